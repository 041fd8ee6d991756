"""Plans at thousands of addresses, memory that stays as it was, and what was learnt wrongly on purpose: that is found.

Each result is compared with what the library's own call gives. Operands lie at odd multiples of 16 bytes, no more
aligned than their layouts promise, with guards between them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.testing.memory import POISON_BYTE

sys.path.insert(0, str(Path(__file__).parents[1]))

from address_sets import COPIES, KINDS, SKEW, Kind, Many, relocated

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find it, too

MANY = 10_000  # address sets of each plan
WARM = 500  # before memory is looked at


def state_of(executor: Any) -> tuple[Any, ...]:
    """What is kept for a plan, and how much memory tensors hold."""
    stats = executor.relocation_stats()
    executor.device.synchronize()
    return stats["relocated"], stats["bytes"], executor.device.bytes_in_use()


@pytest.mark.parametrize("name", KINDS)
def test_ten_thousand_addresses_of_a_plan(dev, rng, name):
    kind = KINDS[name]
    with dev.stream():
        many = Many(dev, rng, kind, MANY)
        executor = dev.executor()
        right, is_exact = many.expected()
        many.poison()
        relocation = relocated(many.request([0] * len(many.operands), 0))
        picks = rng.integers(COPIES, size=(MANY, len(many.operands)))
        order = rng.permutation(MANY)
        before = relocation.launches
        for turn, number in enumerate(order.tolist()):
            if turn == WARM:
                kept = state_of(executor)
            if turn % 2:
                many.call(picks[number], number)
            else:
                dp.run(many.request(picks[number], number))
        assert state_of(executor) == kept
        assert relocation.launches - before >= MANY - 100  # some are compared with the library's own call
        assert executor.relocation_stats()["differed"] == 0
        got = many.left(MANY)
    weights = 2 ** np.arange(picks.shape[1])[::-1]
    wanted = right[(picks % 2) @ weights]
    if is_exact:
        wrong = (got != wanted).any(axis=1)
    else:  # parts of sums are added as blocks end
        numpy = dp.Dtype.of(kind.dtype).numpy
        one, other = (np.ascontiguousarray(x).view(numpy).astype(np.float64) for x in (got, wanted))
        wrong = (np.abs(one - other) > 2.0**-7 * np.abs(other).max()).any(axis=1)
    assert not wrong.any(), f"{wrong.sum()} of {MANY}, the first at {np.flatnonzero(wrong)[:5]}"


def resident() -> int:
    """Bytes of this process in the host's memory."""
    fields = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in fields.splitlines() if line.startswith("VmRSS"))


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_million_addresses_leave_memory_as_it_was(dev, rng):
    """In rounds of 10,000 outputs; every round is compared as a whole."""
    kind = Kind("bf16", (16, 16), dp.MatmulRequest, {"a": (16, 16), "b": (16, 16)})
    rounds = 100
    with dev.stream():
        many = Many(dev, rng, kind, MANY)
        executor = dev.executor()
        right, is_exact = many.expected()
        assert is_exact
        relocation = relocated(many.request([0, 0], 0))
        begin = rng.integers(COPIES**2, size=MANY)
        seconds, kept = 0.0, (0, 0, ())
        for turn in range(rounds + 2):
            one_of, other_of = divmod((begin + 5 * turn) % COPIES**2, COPIES)  # no output has a pair of inputs twice
            picks = np.stack([one_of, other_of], axis=1)
            many.poison()
            dev.synchronize()
            chosen = picks.tolist()
            started = time.perf_counter()
            for number, (one, other) in enumerate(chosen):
                dp.matmul(many.operands[0][one], many.operands[1][other], out=many.places[number])
            seconds += time.perf_counter() - started
            wrong = (many.left(MANY) != right[(picks % 2) @ (2, 1)]).any(axis=1)
            assert not wrong.any(), f"round {turn}: {wrong.sum()} are wrong"
            state = (resident(), int(driver.cuMemGetInfo()[0]), state_of(executor))
            if turn == 1:  # the first rounds take what buffers there are
                kept = state
                print(f"after {2 * MANY:,}: {kept[0] / 2**20:.1f} MiB on the host, {kept[1] / 2**20:.1f} MiB free")
        print(f"after {(rounds + 2) * MANY:,}: {state[0] / 2**20:.1f} MiB on the host, {state[1] / 2**20:.1f} MiB free")
        print(f"{1e6 * seconds / MANY / (rounds + 2):.2f} us a call, {relocation.launches:,} relocated launches")
        print(f"stats: {executor.relocation_stats()}")
    assert state[0] - kept[0] < 8 << 20
    assert state[1:] == kept[1:]
    assert relocation.launches >= rounds * MANY - 100


# -- what was learnt wrongly ----------------------------------------------------------------------------------------
def mutate(words: tuple[Any, ...], how: str, first: int, second: int) -> tuple[Any, ...]:
    """The words of a relocated graph with one thing wrong; `first` and `second` are places among the arguments.

    This alone and `wrongly` know what is learnt: words that have an argument, and a step that is added to it.
    """
    if how == "two operands exchanged":
        other = {first: second, second: first}
        return tuple(word._replace(argument=other.get(word.argument, word.argument)) for word in words)
    assert how == "an operand 16 bytes off"
    return tuple(word._replace(step=word.step + 16) if word.argument == first else word for word in words)


def is_words(given: Any) -> bool:
    from dispatch.execute.relocation import Word

    return isinstance(given, tuple) and bool(given) and isinstance(given[0], Word)


@pytest.fixture
def wrongly(monkeypatch):
    """`wrongly(how, first, second)`: graphs that are made from now on have wrong words, behind all proofs of them."""
    from dispatch.execute import learner

    real = learner.RelocatedGraph

    def begin(how: str, first: int, second: int = -1) -> None:
        def make(*given: Any) -> Any:
            changed = [mutate(x, how, first, second) if is_words(x) else x for x in given]
            assert changed != list(given), "nothing was mutated"
            return real(*changed)

        monkeypatch.setattr(learner, "RelocatedGraph", make)

    return begin


A, B, OUT = 0, 1, 6  # places of a product's operands among its arguments
MUTATIONS = [
    ("two operands exchanged", A, B),
    ("an operand 16 bytes off", A, -1),
    ("an operand 16 bytes off", B, -1),
    ("an operand 16 bytes off", OUT, -1),
]


def mutated_work(dev: dp.Device, rng: np.random.Generator) -> Many:
    """Operands with room between them, so that what is 16 bytes off touches nothing else."""
    return Many(dev, rng, KINDS["matmul"], 400)


@pytest.mark.parametrize(("how", "first", "second"), MUTATIONS)
def test_what_was_learnt_wrongly_shows_in_the_comparison(dev, rng, wrongly, how, first, second):
    """The comparison that every row goes through finds it: in the output, or in what lies beside it."""
    with dev.stream():
        many = mutated_work(dev, rng)
        right, is_exact = many.expected()
        assert is_exact
        many.poison()
        wrongly(how, first, second)
        relocation = relocated(many.request([0, 1], 0))
        before = relocation.launches
        dp.run(many.request([2, 5], 0))
        dev.synchronize()
        assert relocation.launches == before + 1
        whole = many.memory.numpy()[SKEW : SKEW + many.pitch]
        beside = (whole[many.nbytes :] != POISON_BYTE).any()
        assert beside or (whole[: many.nbytes] != right[1]).any()


@pytest.mark.parametrize(("how", "first", "second"), MUTATIONS)
def test_a_sampled_check_takes_back_what_was_learnt_wrongly(dev, rng, wrongly, caplog, how, first, second):
    """For good: from then on the library is called, and what it gives is right."""
    with dev.stream():
        many = mutated_work(dev, rng)
        executor = dev.executor()
        right, _ = many.expected()
        wrongly(how, first, second)
        relocation = relocated(many.request([0, 1], 0))
        for number in range(many.outs):
            dp.run(many.request(rng.integers(COPIES, size=2), number))
            if executor.relocation_stats()["differed"]:
                break
        assert executor.relocation_stats()["differed"] == 1
        assert relocation.why
        print(relocation.why, caplog.text)
        many.poison()
        before = relocation.launches
        picks = rng.integers(COPIES, size=(many.outs, 2))
        for number in range(many.outs):
            dp.run(many.request(picks[number], number))
        assert (many.left(many.outs) == right[(picks % 2) @ (2, 1)]).all()
        assert relocation.launches == before
        assert relocation.why
        assert executor.relocate(executor.plan(many.request([0, 1], 0)), many.request([0, 1], 0).arguments({}))


def test_words_that_predict_nothing_are_refused(dev, rng, monkeypatch):
    """What is wrong before the proof at real addresses is found by it, and never launched."""
    from dispatch.execute import learner

    real = learner.learn

    def learn(*given: Any) -> Any:
        return mutate(tuple(real(*given)), "two operands exchanged", A, B)

    monkeypatch.setattr(learner, "learn", learn)
    monkeypatch.setattr(learner, "_words", {})
    with dev.stream():
        many = mutated_work(dev, rng)
        executor = dev.executor()
        right, _ = many.expected()
        many.poison()
        first = many.request([0, 1], 0)
        assert executor.relocate(executor.plan(first), first.arguments({}))
        picks = rng.integers(COPIES, size=(many.outs, 2))
        for number in range(many.outs):
            dp.run(many.request(picks[number], number))
        assert (many.left(many.outs) == right[(picks % 2) @ (2, 1)]).all()
        assert executor.plan(first).relocation.launches == 0
