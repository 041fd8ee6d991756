"""Gated activations on the host against plain Python; their kernels compiled for the CPU, and for sm_90; refusals."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import BF16, F16, F32, F64, HOST
from dispatch.ops import gated as ops
from dispatch.ops.gated import (
    GatedActivationBwdRequest,
    GatedActivationRequest,
    GatedMode,
    gated_activation,
    gated_activation_bwd,
    kernel_of,
    lines_of,
)
from dispatch.ops.gated.cases import cases
from dispatch.row_check import check_row
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

OPS = ("gated_activation", "gated_activation_bwd")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.on(HOST)]
OWN = [row for op in OPS for row in dp.TABLE.of(op) if row.library == "own"]
M = GatedMode
# fmt: off
PLAIN = {  # in plain Python, one number at a time
    M.SILU:      lambda x: x / (1 + math.exp(-x)),
    M.GELU:      lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    M.GELU_TANH: lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    M.RELU:      lambda x: x if x > 0 else 0.0,
    M.SIGMOID:   lambda x: 1 / (1 + math.exp(-x)),
}
# fmt: on


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return kernels_on_cpu.OnCpu(tmp_path_factory.mktemp("gated"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("mode", list(M))
def test_as_plain_python_computes_it(mode, dev, rng):
    gate, up = rng.standard_normal((5, 7)) * 3, rng.standard_normal((5, 7))
    expected = [[PLAIN[mode](x) * y for x, y in zip(*lines, strict=True)] for lines in zip(gate, up, strict=True)]
    y = gated_activation(dev.array(gate), dev.array(up), mode)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("mode", list(M))
def test_the_gradients_are_those_of_finite_differences(mode, dev, rng, slope_of):
    gate, up, dy = rng.standard_normal((4, 5)) * 2, rng.standard_normal((4, 5)), rng.standard_normal((4, 5))
    dgate, dup = gated_activation_bwd(*map(dev.array, (gate, up, dy)), mode)

    def forward(gate, up):
        return gated_activation(dev.array(gate), dev.array(up), mode).numpy()

    np.testing.assert_allclose(dgate.numpy(), slope_of(lambda x: forward(x, up), gate, dy), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dup.numpy(), slope_of(lambda x: forward(gate, x), up, dy), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", [M.SILU, M.GELU, M.GELU_TANH, M.RELU])
def test_far_out_it_is_the_identity_or_nothing(mode, dev):
    x = dev.array(np.array([-3e38, -1e20, -200, 200, 1e20, 3e38], np.float32))
    one = dev.array(np.ones(6, np.float32))
    np.testing.assert_array_equal(gated_activation(x, one, mode).numpy(), [0, 0, 0, *x.numpy()[3:]])
    dgate, dup = gated_activation_bwd(x, one, one, mode)
    np.testing.assert_array_equal(dgate.numpy(), [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(dup.numpy(), [0, 0, 0, *x.numpy()[3:]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_relu_drops_is_0_whatever_it_is(value, dev):
    gate, up, dy = (dev.array(np.array(x)) for x in ([-1.0, 0.0, 2.0], [1.0, 1.0, 1.0], [value] * 3))
    np.testing.assert_array_equal(gated_activation_bwd(gate, up, dy, "relu")[0].numpy(), [0, 0, value])


def test_halves_of_one_tensor_and_what_may_be_an_output(dev, rng):
    both = rng.standard_normal((3, 4, 16))
    whole = dev.array(both)
    gate, up = whole[..., :8], whole[..., 8:]
    y = gated_activation(gate, up)
    assert y.layout.is_contiguous
    expected = both[..., :8] / (1 + np.exp(-both[..., :8])) * both[..., 8:]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13, atol=1e-14)
    assert gated_activation(gate, up, out=up) is up
    np.testing.assert_array_equal(up.numpy(), y.numpy())
    np.testing.assert_array_equal(gate.numpy(), both[..., :8])


@pytest.mark.parametrize(
    ("call", "operand", "given", "expected"),
    [
        (lambda x, y: gated_activation(x, y.T), "up", "f32[4, 3]", "f32[3, 4], as gate is"),
        (lambda x, y: gated_activation(x, y.astype("f16")), "up", "f16[3, 4]", "f32[3, 4], as gate is"),
        (lambda x, y: gated_activation(x, y, "tanhh"), "mode", "tanhh", "GatedMode"),
        (lambda x, y: gated_activation(x, y, out=y.T), "out", "f32[4, 3]", "f32[3, 4]"),
        (lambda x, y: gated_activation_bwd(x, y, y[:2]), "dy", "f32[2, 4]", "f32[3, 4], as gate is"),
        (lambda x, y: gated_activation_bwd(x, y, y, dgate=x, dup=x), "dgate", "overlaps dup", "memory of its own"),
    ],
)
def test_a_refusal_names_operand_given_and_expected(call, operand, given, expected, dev):
    with pytest.raises(BadRequest) as caught:
        call(dev.zeros((3, 4)), dev.zeros((3, 4)))
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_modes_have_names_of_elsewhere_and_whole_numbers_have_no_row(dev):
    x = dev.zeros((3,))
    for name, mode in (("swish", M.SILU), ("SwiGLU", M.SILU), ("gelu-tanh", M.GELU_TANH), ("geglu", M.GELU)):
        assert GatedActivationRequest(x, x, name).mode is mode
    with pytest.raises(NoRow, match="gated_activation"):
        gated_activation(x.astype("i8"), x.astype("i8"))


def test_seven_axes_that_do_not_merge_are_too_many(dev):
    shape = (2,) * 7
    gate, up = dev.zeros(tuple(reversed(shape))).transpose(*reversed(range(7))), dev.zeros(shape)
    with pytest.raises(NoRow, match="needs at most 6 axes that do not merge, has 7"):
        gated_activation(gate, up)


# -- the kernels ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.compiles] if number else []) for number, row in enumerate(OWN)],
)
def test_the_kernel_run_on_the_cpu_passes_the_cases(row, dev, rng, on_cpu):
    at_once = set()
    for case in cases(row):
        if case.name != "large":  # as "vectors" is
            with as_on_a_gpu():
                check = case.check(dev, rng)
            on_cpu.run(kernel_of(check.request), check.request)
            check.verify(check.request.result({}))
            at_once |= {(case.name, lines_of(check.request)[0])}
    count = 16 // row.dtypes[0].itemsize
    assert {name for name, each in at_once if each == count} >= {"vectors", "gaps of vectors", "vectors in place"}
    assert {name for name, each in at_once if each == 1} >= {"primes", "gaps", "two orders", "six axes"}


@pytest.mark.compiles
def test_more_than_32_bits_count_are_counted_by_64(dev, rng, on_cpu, monkeypatch):
    monkeypatch.setattr(ops, "SMALL", 1)
    for row in OWN[-1:]:
        for case in (case for case in cases(row) if case.name in ("vectors", "gaps")):
            with as_on_a_gpu():
                check = case.check(dev, rng)
            kernel = kernel_of(check.request)
            assert "-DINDEX=unsigned long long" in kernel.options
            assert kernels_on_cpu.size_for_sm_90(kernel) > 1000
            on_cpu.run(kernel, check.request)
            check.verify(check.request.result({}))


@pytest.mark.compiles
@pytest.mark.parametrize("mode", list(M))
def test_every_kernel_compiles_for_sm_90(mode, dev):
    for dtype in (F64, F32, F16, BF16):
        for width in (32, 7):
            x = dev.zeros((3, width), dtype)
            for request in (GatedActivationRequest(x, x, mode), GatedActivationBwdRequest(x, x, x, mode)):
                assert kernels_on_cpu.size_for_sm_90(kernel_of(request)) > 1000


def test_halves_are_read_in_vectors_by_two_axes(dev):
    whole = dev.zeros((6, 5, 64), BF16)
    request = GatedActivationRequest(whole[..., :32], whole[..., 32:])
    count, axes = lines_of(request)
    assert (count, [axis.extent for axis in axes]) == (8, [30, 4])
    assert kernel_of(request).launch(request).grid == (1,)
    empty = GatedActivationRequest(whole[:0], whole[:0])
    assert kernel_of(empty).launch(empty).grid == (0,)
