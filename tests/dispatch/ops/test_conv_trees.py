"""CUTLASS's convolutions on the host: rows through their cases, gradients by their definition, what is refused."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import Config
from dispatch.ops.conv import channels_last
from dispatch.ops.conv.cases import cases
from dispatch.ops.conv.config import CONFIGS, DEEP, LARGE, MEDIUM, NARROW, SMALL, choose
from dispatch.row_check import check_row
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("conv_operands", Path(__file__).with_name("conv_operands.py"))
operands = importlib.util.module_from_spec(spec)
spec.loader.exec_module(operands)
TF32, Fwd, BwdData, BwdFilter = operands.TF32, operands.Fwd, operands.BwdData, operands.BwdFilter
conv_fwd, conv_bwd_data, conv_bwd_filter = operands.conv_fwd, operands.conv_bwd_data, operands.conv_bwd_filter
host, image, zeros = operands.host, operands.image, operands.zeros

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.min_arch == HOST and row.of("cutlass")]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    assert check_row(row, case, host, rng) == ""


def test_gradients_by_finite_differences(host, rng):
    """In f32 on both sides of each element; convolution is linear, so that a large step costs no precision."""
    x, w = rng.standard_normal((1, 4, 4, 5)), rng.standard_normal((4, 4, 3, 2))
    choices = {"pad": ((1, 0), (0, 1)), "stride": (1, 2), "compute": TF32}
    put = lambda values: image(host, values, "f32")  # noqa: E731 - the shortest name for it
    dy = rng.integers(-4, 5, conv_fwd(put(x), put(w), **choices).shape).astype(np.float64)
    x, w = (rng.integers(-4, 5, values.shape).astype(np.float64) for values in (x, w))

    def loss(a, b):
        return np.vdot(dy, conv_fwd(put(a), put(b), **choices).numpy())

    dx = conv_bwd_data(put(dy), put(w), x_extents=(4, 5), **choices).numpy()
    dw = conv_bwd_filter(put(dy), put(x), w_extents=(3, 2), **choices).numpy()
    for at in itertools.product(*map(range, x.shape)):
        step = np.zeros_like(x)
        step[at] = 1
        assert loss(x + step, w) - loss(x - step, w) == 2 * dx[at]
    for at in itertools.product(*map(range, w.shape)):
        step = np.zeros_like(w)
        step[at] = 1
        assert loss(x, w + step) - loss(x, w - step) == 2 * dw[at]


def test_a_tree_sees_pixels_by_channels(host, rng):
    """Each kind of operand against NumPy's own broadcasting, and each output in its place."""
    x, w = rng.integers(-2, 3, (2, 8, 4, 5)), rng.integers(-2, 3, (16, 8, 3, 3))
    bias, mask, residual = (rng.integers(-2, 3, shape) for shape in ((16,), (2, 4, 5), (2, 16, 4, 5)))
    tree = (evt.accumulator() + evt.row("bias")) * evt.col("mask") - evt.load("residual")
    tree = evt.reduce(evt.reduce(evt.store(tree, "before", "f32"), "over", "max", over="n"), "sums", over="m")
    operands = {"bias": host.array(bias, "f32"), "mask": host.array(mask, "f32"), "residual": image(host, residual)}
    y, before, over, sums = conv_fwd(image(host, x), image(host, w), pad=1, epilogue=evt.relu(tree), operands=operands)
    plain = conv_fwd(image(host, x, "f32"), image(host, w, "f32"), pad=1, compute=TF32).numpy()
    expected = (plain + bias[:, None, None]) * mask[:, None] - residual
    assert np.array_equal(before.numpy(), expected)
    assert np.array_equal(over.numpy(), expected.max(axis=1))
    assert np.array_equal(sums.numpy(), expected.sum(axis=(0, 2, 3)))
    assert np.allclose(y.numpy().astype(float), np.maximum(expected, 0), rtol=2.0**-8)


def test_the_source_may_be_the_result_itself(host, rng):
    dy, x = (image(host, rng.integers(-2, 3, (2, 8, 4, 4)), "f16") for _ in range(2))
    sums = image(host, rng.integers(-2, 3, (8, 8, 1, 1)), "f16")
    before = sums.numpy().astype(float)
    once = conv_bwd_filter(dy, x, w_extents=(1, 1)).numpy().astype(float)
    request = BwdFilter(dy, x, out=sums, z=sums)
    assert not request.repeatable
    assert dp.run(request) is sums
    assert np.array_equal(sums.numpy().astype(float), before + once)


def test_a_copy_with_channels_last_holds_the_same(host, rng):
    values = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    copy = channels_last(host.array(values))
    assert copy.layout.strides == (60, 1, 15, 3)
    assert np.array_equal(copy.numpy(), values)


# -- what the rows say ------------------------------------------------------------------------------------------------
def chosen(request, arch=90):
    return select(request, Arch(arch)).function


def test_hopper_takes_what_its_tensor_maps_can_step_through(host):
    request = Fwd(zeros(host, 2, 8, 9, 9), zeros(host, 8, 8, 3, 3))
    assert chosen(request) == "CollectiveConv"
    assert chosen(request, 80) == chosen(request, 100) == "ImplicitGemmConvolution"


@pytest.mark.parametrize(
    ("x", "w", "choices"),
    [
        ((2, 6, 9, 9), (8, 6, 3, 3), {}),
        ((2, 8, 9, 9), (8, 4, 3, 3), {}),
        ((2, 8, 40, 9), (8, 8, 3, 3), {"stride": (9, 1)}),
        ((1, 8, 9, 9, 99), (8, 8, 1, 1, 3), {"dilation": (1, 1, 16)}),
        ((1, 8, 9, 9, 9), (8, 8, 1, 1, 1), {"pad": 17}),
    ],
)
def test_multistage_kernels_take_the_rest(x, w, choices, host):
    assert chosen(Fwd(zeros(host, *x), zeros(host, *w), **choices)) == "ImplicitGemmConvolution"


@pytest.mark.parametrize(
    ("x", "w", "choices", "reason"),
    [
        ((2, 5, 9, 9), (8, 5, 3, 3), {}, "multiples of 4 bytes"),
        ((2, 6, 9, 9, 9), (8, 6, 3, 3, 3), {}, "multiples of 16 bytes for three axes"),
        ((2, 24, 9, 9), (36, 8, 3, 3), {}, "divisor of 64 filters in each group, has 12"),
        ((2, 16, 9, 9, 9), (16, 8, 3, 3, 3), {}, "one group for three axes"),
        ((2, 8, 99, 9), (8, 8, 33, 1), {"stride": (9, 1)}, "32 taps"),
    ],
)
def test_what_no_kernel_takes_is_refused_with_its_reason(x, w, choices, reason, host):
    request = Fwd(zeros(host, *x), zeros(host, *w), **choices)
    for arch in (Arch(90), HOST):
        with pytest.raises(NoRow, match=reason):
            select(request, arch)


def test_gradients_under_a_stride_know_no_dilation(host):
    dy, w = zeros(host, 1, 8, 4, 4), zeros(host, 8, 8, 2, 2)
    assert chosen(BwdData(dy, w, stride=2)) == "ImplicitGemmConvolution"
    with pytest.raises(NoRow, match="dilation 1 under a stride"):
        select(BwdData(dy, w, stride=2, dilation=2), Arch(90))


def test_channels_first_are_refused_with_what_to_do(host):
    x, w = host.zeros((2, 8, 9, 9), "bf16"), zeros(host, 8, 8, 3, 3)
    with pytest.raises(NoRow, match=r"channels last, has x bf16\[2, 8, 9, 9\]: channels_last\(x\)"):
        select(Fwd(x, w), Arch(90))


def test_trees_are_for_images(host):
    dy, x = zeros(host, 2, 8, 4, 4), zeros(host, 2, 8, 4, 4)
    tree = evt.accumulator() + evt.row("bias")
    request = BwdFilter(dy, x, w_extents=(1, 1), epilogue=tree, operands={"bias": host.zeros(8, "f32")})
    with pytest.raises(NoRow, match="epilogue of numbers and z, has bias"):
        select(request, Arch(90))


def test_tf32_only_where_it_is_asked_for(host):
    x, w = zeros(host, 2, 8, 9, 9, dtype="f32"), zeros(host, 8, 8, 3, 3, dtype="f32")
    with pytest.raises(NoRow, match="FAST_TF32"):
        select(Fwd(x, w), Arch(90))
    assert chosen(Fwd(x, w, compute=TF32)) == "CollectiveConv"


# -- what a request says ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"z": (2, 8, 9, 9)}, "z"),
        ({"beta": 1.0}, "beta"),
        ({"operands": {"other": 1.0}}, "operands['other']"),
        ({"epilogue": evt.accumulator() + evt.row("bias")}, "operands['bias']"),
        ({"epilogue": evt.accumulator() * evt.scalar("problem_x0")}, "epilogue"),
        ({"epilogue": "relu"}, "epilogue"),
        ({"pad": -1}, "pad"),
    ],
)
def test_what_does_not_fit_is_named(change, operand, host):
    change = {name: zeros(host, *value) if name == "z" else value for name, value in change.items()}
    with pytest.raises(BadRequest) as caught:
        Fwd(zeros(host, 2, 8, 9, 9), zeros(host, 8, 8, 3, 3), **change)
    assert caught.value.operand == operand


@pytest.mark.parametrize("kind", [evt.row, evt.col, evt.load])
def test_an_operand_of_another_shape_is_named(kind, host):
    with pytest.raises(BadRequest, match="shape"):
        Fwd(
            zeros(host, 2, 8, 9, 9),
            zeros(host, 16, 8, 3, 3),
            epilogue=evt.accumulator() + kind("z"),
            operands={"z": host.zeros((8,), "f32")},
        )


def test_operands_are_replaced_by_name(host):
    x, w, bias = zeros(host, 2, 8, 9, 9), zeros(host, 16, 8, 3, 3), host.zeros(16, "f32")
    tree = evt.accumulator() + evt.row("bias")
    request = Fwd(x, w, epilogue=tree, operands={"bias": bias})
    other, ones = zeros(host, 2, 8, 9, 9), host.array(np.ones(16), "f32")
    changed = request.replace(x=other, bias=ones)
    assert (changed.x, dict(changed.operands)["bias"], changed.key()) == (other, ones, request.key())
    with pytest.raises(BadRequest, match="a name that is not an operand of this request"):
        request.replace(gate=ones)


def test_the_choice_without_timing(host):
    def best(x, w, request=Fwd, **choices):
        return choose(request(zeros(host, *x), zeros(host, *w), **choices), 132)

    assert best((32, 8, 56, 56), (256, 8, 1, 1)) == LARGE
    assert best((32, 8, 56, 56), (128, 8, 1, 1)) == MEDIUM
    assert best((32, 8, 56, 56), (64, 8, 1, 1)) == NARROW
    assert best((1, 8, 7, 7), (256, 8, 1, 1)) == SMALL
    assert best((8, 256, 14, 14), (8, 256, 14, 14), BwdFilter, w_extents=(1, 1)) == DEEP
    assert best((1, 8, 7, 7), (8, 8, 1, 1), config=MEDIUM._replace(swizzle=4)) == MEDIUM._replace(swizzle=4)
    with pytest.raises(BadRequest, match="one of"):
        best((1, 8, 7, 7), (8, 8, 1, 1), config=Config((96, 96)))
    striped = MEDIUM._replace(swizzle=2)
    with pytest.raises(BadRequest, match="swizzle 2"):
        best((1, 8, 7, 7), (1, 8, 7, 7), BwdFilter, w_extents=(1, 1), config=striped)
    assert len(set(CONFIGS)) == len(CONFIGS)


def test_what_is_compiled_ahead_is_what_requests_ask_for(host):
    from dispatch.libraries.cutlass.emit.sm90_conv import emit
    from dispatch.ops.conv import precompile as ahead
    from dispatch.ops.conv.cutlass import spec_of

    texts = {source.text for _, source, _ in ahead.sources(dp.TABLE)}
    assert len(texts) == 3 * 4 + 2 * 4 + 2 * 3
    assert len(list(ahead.sources(dp.TABLE, "conv_bwd_filter"))) == 2 * 3
    x, w = zeros(host, 8, 16, 14, 14), zeros(host, 64, 16, 3, 3)
    dy = zeros(host, 8, 64, 12, 12)
    for request in (
        Fwd(x, w),
        BwdData(dy, w),
        BwdFilter(dy, x, w_extents=(3, 3)),
    ):
        assert emit(spec_of(request, Arch(90), choose(request, 132))).text in texts


def test_precompiling_asks_for_the_convolutions_of_an_op(monkeypatch):
    from dispatch.cli import precompile
    from dispatch.libraries.cutlass import compile as compiler

    asked = []

    def request(_source, target, label):
        asked.append((target, label))
        future = compiler.Future()
        future.set_result(b"")
        return future

    monkeypatch.setattr(compiler, "request", request)
    assert precompile.precompile("conv_bwd_filter") == 6
    assert {target for target, _ in asked} == {"sm_90a"}
    assert asked[0][1].startswith("conv_bwd_filter f16×f16→f16 sm_90 cutlass 128x128")  # noqa: RUF001
