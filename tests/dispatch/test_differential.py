"""The sequences of tests/differential.py without a GPU: all of the host, and matmul over a stand-in for cuBLASLt.

What breaks the memory on purpose must be found: each mutation here is one that real calls would suffer from.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.bind.refit import _copy
from dispatch.execute import relocated_graph
from dispatch.keys import F32
from dispatch.ops import matmul
from dispatch.ops.matmul import cublaslt, shortcut
from dispatch.ops.matmul.request import MatmulRequest

sys.path.insert(0, str(Path(__file__).parents[1]))

import differential
import differential_standin as standin
import differential_suspects as suspects
from differential_compare import beyond, bounds, window
from differential_runner import Difference, Runner
from differential_specs import GUARD, Slot, Spec

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find them, too

QUICK = tuple(op for op in differential.OPS if not op.startswith(("cutlass", "sdpa", "conv")))
PATIENCE = 600  # seconds that a sequence may take on a busy machine; the counts below are asserted


SQUARE = {
    "dtypes": (F32, F32, F32), "epilogue": dp.Epilogue.BIAS, "batch": (), "c": "", "orders": ("r", "r"), "square": True,
    "padded": False, "skewed": False, "given": dict.fromkeys(("out", "aux", "bgrad"), True),
}  # fmt: skip
PLAIN = {"batch": (), "c": "", "alpha_on_device": False, "d_columns": False, "square": False}
FLOATS = (F32, F32, F32)


@pytest.fixture
def gpu(monkeypatch):
    standin.install(monkeypatch.setattr)
    device = standin.Standin()
    yield device
    device.close()


def called(device, seed, calls, **more):
    """A sequence of matmul alone over small extents; `fixed` is what of it is not drawn at random."""
    with differential.Sequence(device, seed, ops=(), small=False, largest=20, **more) as sequence:
        return sequence.run(calls, PATIENCE, families=24, each=50)


def test_every_function_of_the_host_gives_what_a_fresh_request_gives(rng):
    with differential.Sequence(dp.device("host"), int(rng.integers(1 << 30)), ops=QUICK) as sequence:
        sequence.add_cases(2, 20_000, PATIENCE)
        report = sequence.run(600, PATIENCE, families=5)
    assert sum(report.calls.values()) >= 600
    assert not report.varying
    functions = {live.spec.function for lives in sequence.cases.values() for live in lives}
    assert len(functions) >= 13
    assert functions <= set(report.known)


@pytest.mark.parametrize("threads", [1, 3])
def test_matmul_tells_the_library_what_a_fresh_request_would(gpu, rng, threads):
    report = called(gpu, int(rng.integers(1 << 30)), 1200, threads=threads)
    assert report.calls["matmul"] >= 1200
    assert not report.varying
    assert 0 < report.refused["matmul"] < 0.6 * report.known["matmul"]


@pytest.mark.parametrize("epilogue", [dp.Epilogue.NONE, dp.Epilogue.GELU_BIAS], ids=lambda e: e.name)
def test_what_is_recognized_by_its_pattern_is_what_a_fresh_request_would_be(gpu, rng, epilogue, monkeypatch):
    found = []
    real = shortcut.recognize
    monkeypatch.setattr(matmul, "recognize", lambda *given: found.append(real(*given)) or found[-1])
    report = called(gpu, int(rng.integers(1 << 30)), 900, fixed=PLAIN | {"epilogue": epilogue, "dtypes": FLOATS})
    assert report.calls["matmul"] >= 900
    assert sum(one is not None for one in found) > 20


# -- what is broken on purpose, one thing at a time -----------------------------------------------------------------
pattern = shortcut._pattern


def pattern_of_all(key):
    """A pattern for what writes aux or a bias gradient as well."""
    name = pattern((*key[:7], dp.Epilogue.NONE, *key[8:]))
    return None if name is None else (*name, key[7])


def untyped(layout):
    found = kind(layout)
    return found and found[1:]


kind = shortcut._kind


def fits_all_numbers(form):
    return [test for test in misfits(form) if "fixed" not in test]


def c_alone_is_apart(self):
    return tuple(pair for pair in pairs(self) if pair[1] not in "ab")


pairs = shortcut.Form.pairs.fget
misfits = relocated_graph._misfits
enqueue = cublaslt.CublasLtPlan.enqueue


def numbers_of_the_first_call(self, arguments):
    if self._numbers:
        arguments = (*arguments[:7], *self._numbers, *arguments[9:])
    return enqueue(self, arguments)


MUTATIONS = {  # what is broken, and the calls that show it
    "patterns of all epilogues": (shortcut, "_pattern", pattern_of_all, PLAIN | {"epilogue": dp.Epilogue.BGRADB}),
    "any dtype": (shortcut, "_kind", untyped, PLAIN | {"dtypes": FLOATS, "epilogue": dp.Epilogue.NONE}),
    "graphs of other numbers": (relocated_graph, "_misfits", fits_all_numbers, PLAIN),
    "numbers of the first call": (cublaslt.CublasLtPlan, "enqueue", numbers_of_the_first_call, {}),
    "any number": (shortcut.Shortcut, "takes", lambda *_: True, {}),
    "outputs over operands": (shortcut, "overlap_bounds", lambda *_: (0, 0, None), SQUARE),
    "an operand that is the output": (shortcut.Form, "pairs", property(c_alone_is_apart), SQUARE),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_memory_that_is_broken_is_found(gpu, mutation, monkeypatch):
    *patch, fixed = mutation
    monkeypatch.setattr(*patch)
    caches = relocated_graph._code, shortcut._maker
    for made in caches:
        made.cache_clear()
    try:
        with pytest.raises(Difference):
            called(gpu, 0, 8000, fixed=fixed)
    finally:
        for made in caches:
            made.cache_clear()


# -- beside the sequences -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [(8, 1), (5, 1), (16, 1)], ids=str)
def test_a_bias_gradient_over_no_rows_is_zero_in_its_own_elements_alone(gpu, steps):
    whole = gpu.array(np.full(64, 7, np.float32))
    bgrad = dp.Tensor(whole.storage, whole.ptr, gpu.layout(whole.dtype, (3, 5), steps, whole.ptr))
    fields = {"aux": gpu.zeros((3, 0, 8))[..., :5], "bgrad": bgrad, "epilogue": dp.Epilogue.DGELU_BGRAD}
    dp.matmul(gpu.zeros((3, 0, 4)), gpu.zeros((3, 4, 5)), **fields)
    expected = np.full(64, 7, np.float32)
    for line in range(3):
        expected[line * steps[0] : line * steps[0] + 5] = 0
    np.testing.assert_array_equal(whole.numpy(), expected)


def test_a_stream_that_was_closed_runs_nothing_that_was_remembered(gpu):
    """Recorded calls hold the handle of a stream that is gone."""
    stream, other = gpu.stream(), gpu.zeros((4, 8))
    with stream:
        a, b, out = gpu.zeros((4, 8)), gpu.zeros((8, 4)), gpu.zeros((4, 4))
        call = dp.prepare(MatmulRequest(a, b, out=out))
        for _ in range(3):
            dp.matmul(a, b, out=out)
            call()
        stream.close()
        for again in (lambda: dp.matmul(a, b, out=out), lambda: dp.matmul(other, b), call):
            with pytest.raises(dp.errors.Closed):
                again()
    with pytest.raises(dp.errors.Closed, match="stream"), stream:
        pass
    assert dp.matmul(a, b).shape == (4, 4)


# -- refits ---------------------------------------------------------------------------------------------------------
SHAPE = (3, 4, 6)
STEPS = {
    "dense": (24, 6, 1),
    "padded": (40, 8, 1),
    "columns": (24, 1, 4),
    "planes last": (1, 3, 12),
    "backward": (-24, -6, -1),
    "rows backward": (24, -6, 1),
    "gaps": (96, 16, 2),
}


@pytest.mark.parametrize("to", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("of", STEPS.values(), ids=STEPS.keys())
def test_a_refit_writes_the_elements_and_nothing_else(gpu, rng, to, of):
    def laid(device, steps):
        whole = device.array(np.arange(300, dtype=np.float32) + 1)
        low = sum(min(step, 0) * (extent - 1) for step, extent in zip(steps, SHAPE, strict=True))
        ptr = whole.ptr + 4 * (2 - low)
        return whole, dp.Tensor(whole.storage, ptr, device.layout(whole.dtype, SHAPE, steps, ptr))

    whole, target = laid(gpu, to)
    _, source = laid(gpu, of)
    values = rng.standard_normal(SHAPE).astype(np.float32)
    source.copy_from(values)
    mirror, view = laid(dp.device("host"), to)
    view.copy_from(values)
    expected = mirror.numpy()
    _copy(target, source, 0)
    np.testing.assert_array_equal(whole.numpy(), expected)


@pytest.mark.parametrize("on", ["host", "gpu"])
def test_a_refit_from_the_memory_that_it_writes_reads_what_was_there(on, gpu, rng):
    device = gpu if on == "gpu" else dp.device("host")
    one, other = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    call = dp.prepare(dp.MatmulRequest(device.array(one), device.array(other)))
    a, b = call.request.a, call.request.b
    call.refit(b.T)
    np.testing.assert_array_equal(b.numpy(), other.T)
    call.refit(a=b, b=a)
    np.testing.assert_array_equal(a.numpy(), other.T)
    np.testing.assert_array_equal(b.numpy(), one)


def test_a_broadcast_operand_is_not_refitted(gpu):
    whole = gpu.zeros((8, 16))
    layout = gpu.layout(whole.dtype, (2, 8, 16), (0, 16, 1), whole.ptr)
    b = dp.Tensor(whole.storage, whole.ptr, layout)
    call = dp.prepare(dp.MatmulRequest(gpu.zeros((2, 4, 8)), b))
    for source in (np.ones((2, 8, 16), np.float32), gpu.zeros((2, 8, 16))):
        with pytest.raises(dp.errors.BadRequest, match="elements that have different addresses"):
            call.refit(source)


def test_the_weights_of_a_network_are_its_operand_of_that_name(rng):
    host = dp.device("host")
    network = dp.Network(dp.RnnMode.LSTM, 3, 4)
    x, weights = host.array(rng.standard_normal((5, 2, 3)), "f32"), host.zeros(network.weight_count)
    call = dp.prepare(dp.RnnRequest(x, weights, network))
    before = call()
    values = rng.standard_normal(network.weight_count).astype(np.float32)
    for give in (lambda: call.refit(values), lambda: call.refit(weights=values)):
        weights.copy_from(np.zeros(network.weight_count, np.float32))
        give()
        np.testing.assert_array_equal(weights.numpy(), values)
    assert before is not None


# -- what varies from run to run ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "op", ["reduce", "pooling_bwd", "conv_bwd_data", "conv_bwd_filter", "sdpa_fwd", "contract_block_sparse"]
)
def test_what_varies_is_held_to_its_bound_and_the_memory_beside_it_to_every_byte(op, rng):
    host = dp.device("host")
    with differential.Sequence(host, int(rng.integers(1 << 30)), ops=(op,)) as sequence:
        sequence.add_cases(3, 40_000, PATIENCE)
    lives = [live for live in next(iter(sequence.cases.values())) if live.fresh.error is None]
    assert lives
    for live in lives:
        assert live.varies
        assert beyond(live, live.fresh) == ""
        guard = bytearray(live.fresh.arena)
        guard[3] ^= 1
        assert "a guard" in beyond(live, replace(live.fresh, arena=bytes(guard)))
        if any(exact.size and np.isfinite(exact).any() for exact in bounds(live)[0].values()):
            assert "beyond its bound" in beyond(live, spoilt(live))


def spoilt(live):
    """The outcome with a bit of every byte of its outputs turned."""
    arena = bytearray(live.fresh.arena)
    for name in live.names:
        value = live.spec.given.get(name)
        if isinstance(value, Slot):
            mask = np.zeros(len(arena), bool)
            window(live.spec.operands[value.number], mask, live.spec.offsets[value.number])[...] = True
            for place in np.flatnonzero(mask):
                arena[place] ^= 0x55
    outputs = []
    for *where, data in live.fresh.outputs:
        inside = bytes(byte ^ 0x55 for byte in data[GUARD:-GUARD])
        outputs.append((*where, data[:GUARD] + inside + data[-GUARD:] if data else data))
    return replace(live.fresh, arena=bytes(arena), outputs=outputs)


def test_fresh_requests_that_differ_are_a_difference(monkeypatch):
    """What varies without a reason that is known may read memory that nobody wrote."""
    runner, turns = Runner(dp.device("host"), 0), iter(range(9))
    monkeypatch.setattr(Runner, "_taken", disturbed_by(turns))
    with pytest.raises(Difference, match="two fresh requests"):
        small_product(runner)


def disturbed_by(turns):
    real = Runner._taken

    def disturbed(self, arena, *given):
        dp.device("host").view(arena)[2] = next(turns)
        return real(self, arena, *given)

    return disturbed


def test_requests_of_two_kinds_with_equal_keys_have_plans_of_their_own(rng):
    host = dp.device("host")
    x = host.array(rng.standard_normal((3, 4)), "f32")
    for _ in range(2):
        relu, soft = dp.activation(x, mode=dp.ActivationMode.RELU), dp.softmax(x, axis=1)
        assert (relu.numpy() == np.maximum(x.numpy(), 0)).all()
        np.testing.assert_allclose(soft.numpy().sum(axis=1), 1, rtol=1e-5)
    assert dp.ActivationRequest(x).key() == dp.SoftmaxRequest(x, axis=1).key(), "else this shows nothing"


# -- the program itself -----------------------------------------------------------------------------------------------
def small_product(runner):
    operand = differential.drawn.drawn(runner.rng, dp.device("host").zeros(1).dtype, (4, 4))
    given = {"a": Slot(0), "b": Slot(1), "out": Slot(2)}
    return runner.lives([Spec(MatmulRequest, given, [operand] * 3)])[0]


@pytest.mark.parametrize("place", ["a guard", "an input", "an output"])
def test_one_byte_anywhere_is_a_difference(rng, place, monkeypatch):
    """A function that writes one byte too many, wherever it lies."""
    host = dp.device("host")
    runner = Runner(host, int(rng.integers(1 << 30)))
    live = small_product(runner)
    operand = {"a guard": None, "an input": 0, "an output": 2}[place]
    offset = 7 if operand is None else live.spec.offsets[operand] + 5
    real = Runner._taken

    def disturbed(self, arena, *given):
        view = host.view(arena)
        view[offset] ^= 1
        return real(self, arena, *given)

    monkeypatch.setattr(Runner, "_taken", disturbed)
    runner.call(live)
    with pytest.raises(Difference, match="memory differs in 1 bytes"):
        runner.compare()


def test_minus_zero_is_the_number_that_its_record_was_made_with(rng):
    """-0.0 and 0.0 are equal, so that they have one record, and must be one number."""
    host = dp.device("host")
    a, b = (host.array(rng.standard_normal((8, 8)), "bf16") for _ in range(2))
    requests = [
        *(MatmulRequest(a, b, alpha=zero) for zero in (0.0, -0.0)),
        *(dp.MatmulRequest(a, b, alpha=zero, library="cutlass") for zero in (0.0, -0.0)),
        *(dp.GroupedMatmulRequest(a, b[None], host.array([8], "i32"), alpha=zero) for zero in (0.0, -0.0)),
    ]
    out = host.zeros((8, 8), "bf16")
    for one, other in zip(requests[::2], requests[1::2], strict=True):
        numbers = [[x.hex() for x in r.arguments({"out": out}) if isinstance(x, float)] for r in (one, other)]
        assert numbers[0]
        assert numbers[0] == numbers[1]


def test_the_call_that_lost_the_device_is_named(monkeypatch):
    """Of all calls under way, called again one by one, those that fault and no others."""
    drawing = np.random.default_rng(5)
    given = [differential.drawn.elementwise(drawing) for _ in range(6)]
    deadly = [str(given[2]), str(given[5])]

    class Faulty:
        def lives(self, some):
            if str(some[0]) in deadly:
                raise dp.errors.DeviceFault("cuda:0 is lost")
            return []

    def run(command, **_):
        path, start = command[command.index("--only") + 1], int(command[command.index("--start") + 1])
        with redirect_stdout(io.StringIO()) as said:
            status = suspects.replay(Faulty(), path, start)
        return subprocess.CompletedProcess(command, status, said.getvalue())

    monkeypatch.setattr(suspects.subprocess, "run", run)
    assert suspects.find("cuda:0", given).splitlines() == [f"loses the device: {text}" for text in deadly]
    assert suspects.find("cuda:0", given[:2]).startswith("none of these 2")
