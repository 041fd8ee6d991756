"""Autotune across rows: which plans race, what the winner is remembered by, and what a library's refusal changes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.bind import race
from dispatch.errors import Refused
from dispatch.execute import autotune, installed
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
from dispatch.execute.cuda_executor import CudaExecutor


class Executor:
    """What a race asks of an executor."""

    versions = {"cublasLt": (13, 1, 0)}  # noqa: RUF012

    def __init__(self, folder):
        self.folder = folder
        self.captures = 0

    def algorithms(self, library):
        return AlgorithmCache("GPU", f"{library}-1", self.folder)

    def refuse_capture(self, _):
        self.captures += 1


class Plan(dp.Plan):
    is_safe = True

    def __init__(self, row):
        super().__init__(row, capture_safe=self.is_safe)


def fine(_request, _executor, row):
    return Plan(row)


def refusing(*_):
    raise Refused("needs another day")


@pytest.fixture
def executor(tmp_path):
    return Executor(tmp_path)


@pytest.fixture
def races(monkeypatch):
    """How many took part in each race; the last one wins."""
    found = []

    def last(_executor, _request, _run, count):
        found.append(count)
        return count - 1

    monkeypatch.setattr(race, "fastest", last)
    return found


def rows(*calls):
    made = [row for row in dp.TABLE.of("matmul") if row.dtypes == (dp.Dtype.of("bf16"),) * 4 and row.min_arch == 90]
    return [
        replace(made[0], function=f"call{place}", variant=str(place), call=call) for place, call in enumerate(calls)
    ]


def request(m=16, **options):
    dev = dp.device("host")
    return dp.MatmulRequest(dev.zeros((m, 32), "bf16"), dev.zeros((32, 16), "bf16"), autotune=True, **options)


def test_all_rows_race_and_the_winner_is_remembered_on_disk(executor, races):
    few = rows(fine, fine, fine)
    assert race.fastest_plan(executor, request(), few, {}).row is few[2]
    assert races == [3]
    assert race.fastest_plan(Executor(executor.folder), request(), few, {}).row is few[2]
    assert races == [3]  # by another process, say
    assert race.fastest_plan(executor, request(m=24), few, {}).row is few[2]
    assert races == [3, 3]  # another shape is another race


@pytest.mark.parametrize(
    ("libraries", "remembering"),
    [
        (("cublasLt", "cutlass"), "cublasLt-1"),
        (("cutlass", "cublasLt"), "cublasLt-1"),  # kernels of one's own have no version that could make one forget
        (("cutlass", "mine"), "cutlass-1"),
    ],
    ids=str,
)
def test_it_is_remembered_for_a_version_where_there_is_one(libraries, remembering, executor, races):
    few = [replace(row, library=library) for row, library in zip(rows(fine, fine), libraries, strict=True)]
    race.fastest_plan(executor, request(), few, {})
    assert [path.stem for path in executor.folder.glob("*.json")] == [f"autotune-GPU-{remembering}"]
    assert races == [2]


def test_a_library_without_a_version_has_a_memory_too(tmp_path, monkeypatch):
    monkeypatch.setattr(CudaExecutor, "__init__", lambda _: None)
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()
    bare = CudaExecutor()
    monkeypatch.setattr(bare, "device", SimpleNamespace(model="GPU"), raising=False)
    assert bare.algorithms("cutlass").path.name == "autotune-GPU-cutlass.json"
    installed.algorithms.cache_clear()


def test_a_row_alone_is_not_timed(executor, races):
    (row,) = rows(fine)
    assert race.fastest_plan(executor, request(), [row], {}).row is row
    refused = {}
    few = rows(refusing, fine)
    assert race.fastest_plan(executor, request(), few, refused).row is few[1]
    assert not races
    assert [str(reason) for reason in refused.values()] == ["needs another day"]


def test_where_no_row_binds_every_reason_is_kept(executor):
    refused = {}
    few = rows(refusing, refusing)
    with pytest.raises(Refused):
        race.fastest_plan(executor, request(), few, refused)
    assert list(refused) == few


def test_a_winner_that_is_refused_by_now_or_gone_is_raced_for_anew(executor, races):
    few = rows(fine, fine)
    race.fastest_plan(executor, request(), few, {})
    now = [few[0], replace(few[1], call=refusing), *rows(fine, fine, fine)[2:]]
    assert race.fastest_plan(executor, request(), now, {}).row is now[2]
    assert races == [2, 2]
    memory = executor.algorithms("cublasLt")
    memory.put("matmul rows", race.stored_key(request()), Algorithm(b"\xff", 0))
    assert race.fastest_plan(executor, request(), few, {}).row is few[1]
    assert races == [2, 2, 2]


def every_kind():
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), "bf16"), dev.zeros((32, 16), "bf16")
    x, w = dev.zeros((2, 8, 6, 6), "f16"), dev.zeros((8, 8, 3, 3), "f16")
    tree = dp.evt.silu(dp.evt.accumulator() * dp.evt.scalar("s"))
    yield dp.MatmulRequest(a, b, autotune=True)
    yield dp.MatmulRequest(a, b, autotune=True, scales=dp.Scales(a=dev.array([1.0], "f32")))
    yield dp.MatmulRequest(a, b, autotune=True, epilogue=tree, operands={"s": dev.array([1.0], "f32")})
    yield dp.ConvFwdRequest(x, w, autotune=True)
    yield dp.NormFwdRequest(a, dev.zeros(32, "f32"), autotune=True, mode=dp.NormMode.RMS_NORM)
    yield dp.SdpaFwdRequest(x, x, x, autotune=True)


KINDS = 6


@pytest.fixture(params=range(KINDS))
def asked(request):
    """A request of each kind, made when it is wanted: a test before may have closed the host."""
    return list(every_kind())[request.param]


def test_a_stored_key_says_nothing_that_is_of_one_process_alone(asked):
    key = repr(race._choices(asked.key()))
    assert " at 0x" not in key
    for _, tensor, _ in asked.tensors():
        assert str(tensor.ptr) not in key
    assert " at 0x" not in race.stored_key(asked)
    assert len(list(every_kind())) == KINDS


def test_an_output_that_lies_as_it_would_is_no_other_race_and_one_that_lies_otherwise_is(asked):
    dev = dp.device("host")
    shape, strides, dtype = asked.unallocated()["out"]
    out = dev.empty(shape, dtype)
    if out.layout.strides == strides:
        assert race.stored_key(asked.replace(out=out)) == race.stored_key(asked)
    whole = dev.empty((*shape[:-1], 2 * shape[-1]), dtype)
    assert race.stored_key(asked.replace(out=whole[..., : shape[-1]])) != race.stored_key(asked)


def test_each_choice_is_a_race_of_its_own():
    keys = [race.stored_key(request()), race.stored_key(request(workspace=1)), race.stored_key(request(alpha=2.0))]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]  # a number by value is no part of a plan


def test_a_view_at_another_alignment_is_another_race():
    dev = dp.device("host")
    whole, b = dev.array(np.zeros(16 * 32 + 8), "bf16"), dev.zeros((32, 16), "bf16")
    views = [whole[start : start + 512].reshape(16, 32) for start in (0, 1)]
    assert len({race.stored_key(dp.MatmulRequest(view, b, autotune=True)) for view in views}) == 2


# -- calls that cannot be recorded ------------------------------------------------------------------------------------
class Clock:
    """In the place of the timer: seconds by candidate, and how often each was called."""

    def __init__(self, seconds):
        self.seconds, self.now, self.called = seconds, 0.0, [0] * len(seconds)

    def run(self, number, _):
        self.called[number] += 1
        first = 5.0 if self.called[number] == 1 else 0.0  # kernels are loaded
        self.now += self.seconds[number] + first * self.seconds[number]

    def time(self, enqueue):
        before = self.now
        enqueue()
        return self.now - before


class Copies:
    turns = 3

    def __init__(self, *_):
        pass

    def arguments(self, turn):
        return (turn % self.turns,)


RACES = {
    "the second is faster": ([1e-3, 5e-4, 2e-3], 1),
    "none is by more than the noise": ([1e-3, 0.995e-3], 0),
    "the first is the fastest": ([1e-3, 2e-3], 0),
    "each takes seconds": ([9.0, 4.0], 1),
}


@pytest.mark.parametrize(("seconds", "winner"), RACES.values(), ids=RACES)
def test_calls_that_cannot_be_recorded_take_turns(seconds, winner, monkeypatch):
    clock = Clock(seconds)
    monkeypatch.setattr(autotune, "OperandCopies", Copies)
    monkeypatch.setattr(autotune, "_Timer", lambda _: clock)
    assert autotune.fastest_call(None, request(), clock.run, len(seconds)) == winner
    if seconds[0] > 1:
        assert clock.called == [2, 2]  # once to load, and once
    else:
        assert min(clock.called) >= autotune.ROUNDS


def test_rows_whose_plans_cannot_be_recorded_are_timed_as_calls(executor, races, monkeypatch):
    few, measured = rows(fine, fine), []
    monkeypatch.setattr(Plan, "is_safe", False)
    monkeypatch.setattr(race, "fastest_call", lambda *given: measured.append(given[-1]) or 1)
    assert race.fastest_plan(executor, request(), few, {}).row is few[1]
    assert (measured, races) == ([2], [])
    assert race.fastest_plan(Executor(executor.folder), request(), few, {}).row is few[1]
    assert measured == [2]  # remembered as others are
