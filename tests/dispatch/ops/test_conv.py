"""Convolution on the host: rows against scipy and plain loops, gradients by their definition, and what is refused."""

import inspect
import itertools
import re

import numpy as np
import pytest
from scipy.signal import correlate

import dispatch as dp
from cudabind.sys.cudnn import cudnnPointwiseMode_t
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch, Compute
from dispatch.libraries.cudnn.convolve import Steps, backward_data, backward_filter, forward, output_shape
from dispatch.ops.conv import Activation, ConvBwdDataRequest, ConvBwdFilterRequest, ConvFwdRequest, channels_last
from dispatch.ops.conv.cases import cases
from dispatch.ops.conv.reference import reference
from dispatch.row_check import check_row
from dispatch.table.select import select
from dispatch.testing.check import place

ROWS = [row for row in dp.TABLE if row.op.startswith("conv_") and row.min_arch == HOST and row.of("cudnn")]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
STEPS = [
    Steps((0, 0), (0, 0), (1, 1), (1, 1)),
    Steps((2, 1), (0, 3), (1, 1), (1, 1)),
    Steps((1, 2), (1, 2), (2, 3), (1, 1)),
    Steps((2, 3), (1, 2), (2, 1), (2, 3)),
]


@pytest.fixture
def host():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    check_row(row, case, host, rng)


def by_loops(x, w, steps):
    """The definition, one product after the other."""
    groups = x.shape[1] // w.shape[1]
    per = w.shape[0] // groups
    y = np.zeros(output_shape(x.shape, w.shape, steps))
    for at_y in itertools.product(*map(range, y.shape)):
        n, k, *spot = at_y
        for c, *tap in itertools.product(*map(range, w.shape[1:])):
            at = [
                s * o + d * t - p
                for s, o, d, t, p in zip(steps.stride, spot, steps.dilation, tap, steps.pre, strict=True)
            ]
            if all(0 <= i < e for i, e in zip(at, x.shape[2:], strict=True)):
                y[at_y] += x[(n, k // per * w.shape[1] + c, *at)] * w[(k, c, *tap)]
    return y


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_forward_is_its_definition(steps, groups, rng):
    x, w = rng.standard_normal((2, 4, 7, 9)), rng.standard_normal((6, 4 // groups, 3, 2))
    assert np.allclose(forward(x, w, steps), by_loops(x, w, steps))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_forward_is_scipy_s_correlation(rank, rng):
    x, w = rng.standard_normal((1, 3, *(6, 7, 5)[:rank])), rng.standard_normal((1, 3, *(3, 2, 4)[:rank]))
    steps = Steps((0,) * rank, (0,) * rank, (1,) * rank, (1,) * rank)
    expected = sum(correlate(x[0, c], w[0, c], mode="valid") for c in range(3))
    assert np.allclose(forward(x, w, steps)[0, 0], expected)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_are_the_adjoints(steps, groups, rng):
    """conv is linear in x and in w: <dy, conv(x, w)> is <DX, x> and <DW, w>."""
    x, w = rng.standard_normal((2, 4, 7, 9)), rng.standard_normal((8, 4 // groups, 3, 2))
    y = forward(x, w, steps)
    dy = rng.standard_normal(y.shape)
    inner = np.vdot(dy, y)
    assert np.allclose(np.vdot(backward_data(dy, w, x.shape, steps), x), inner)
    assert np.allclose(np.vdot(backward_filter(dy, x, w.shape, steps), w), inner)


def test_gradients_by_finite_differences(host, rng):
    x, w = rng.standard_normal((1, 2, 4, 5)), rng.standard_normal((2, 2, 3, 2))
    choices = {"pad": ((1, 0), (0, 1)), "stride": (1, 2)}
    dy = rng.standard_normal(dp.conv_fwd(host.array(x), host.array(w), **choices).shape)

    def loss(a, b):
        return np.vdot(dy, dp.conv_fwd(host.array(a), host.array(b), **choices).numpy())

    dx = dp.conv_bwd_data(host.array(dy), host.array(w), x_extents=(4, 5), **choices).numpy()
    dw = dp.conv_bwd_filter(host.array(dy), host.array(x), w_extents=(3, 2), **choices).numpy()
    for at in itertools.product(*map(range, x.shape)):
        step = np.zeros_like(x)
        step[at] = 1e-3
        assert np.isclose((loss(x + step, w) - loss(x - step, w)) / 2e-3, dx[at], atol=1e-6)
    for at in itertools.product(*map(range, w.shape)):
        step = np.zeros_like(w)
        step[at] = 1e-3
        assert np.isclose((loss(x, w + step) - loss(x, w - step)) / 2e-3, dw[at], atol=1e-6)


def test_what_is_fused_is_applied_in_the_documented_order(host, rng):
    x, w = rng.standard_normal((2, 3, 5, 5)), rng.standard_normal((4, 3, 3, 3))
    bias, z = rng.standard_normal(4), rng.standard_normal((2, 4, 3, 3))
    affine = 0.5 * by_loops(x, w, STEPS[0]) - 2 * z + bias[:, None, None]
    request = ConvFwdRequest(
        *(host.array(x), host.array(w)),
        bias=host.array(bias),
        z=host.array(z),
        alpha=0.5,
        beta=-2.0,
        activation=Activation.RELU_FWD,
    )
    assert np.allclose(reference(request)["out"], np.maximum(affine, 0))


@pytest.mark.parametrize("result", ["i8", "f32"])
def test_an_i8_convolution_is_summed_exactly_then_scaled_as_f32_and_rounded_once(result, host, rng):
    x, w = (rng.integers(-5, 6, shape).astype(np.int8) for shape in ((2, 3, 5, 5), (4, 3, 3, 3)))
    z = rng.integers(-100, 101, (2, 4, 3, 3)).astype(np.int8)
    bias = rng.standard_normal(4).astype(np.float32) * 20
    affine = 1.3 * by_loops(x.astype(int), w.astype(int), STEPS[0]) + 0.5 * z + bias[:, None, None]
    expected = np.maximum(affine, 0)
    if result == "i8":
        expected = np.minimum(np.rint(expected), 127)
        assert (expected == 127).any()
    lasting = [place(host, array, (0, 2, 3, 1)).view for array in (x, w, z)]
    choices = {"alpha": 1.3, "beta": 0.5, "activation": Activation.RELU_FWD, "out_dtype": result}
    request = ConvFwdRequest(*lasting[:2], bias=host.array(bias), z=lasting[2], **choices)
    assert select(request, Arch(90)).variant == "fused"
    assert np.allclose(dp.run(request).numpy(), expected, atol=0 if result == "i8" else 1e-4)
    with pytest.raises(NoRow, match="dense with channels last"):
        select(ConvFwdRequest(host.array(x), host.array(w), bias=host.array(bias)), Arch(90))


def test_the_transposed_convolution_takes_the_forward_back_to_its_extents(host, rng):
    up = dp.conv_transpose(
        host.array(rng.standard_normal((1, 4, 5, 7))), host.zeros((4, 3, 3, 3), "f64"), stride=2, pad=1
    )
    assert up.shape == (1, 3, 9, 13)


# fmt: off
TRANSPOSED = [  # the shapes of x and w, choices, the argument that is named, and what else is said
    ((1, 2, 3),    (2, 3, 2, 2), {},                               "w",       "4 axes|3 axes, like x"),
    ((1, 2, 3, 3), (2, 3, 2, 2), {"stride": 2, "extents": (9, 9)}, "x",       r"conv\(out .*9\)\)\. Hint: extents="),
    ((1, 2, 3, 3), (2, 3, 2, 2), {"extents": (9,)},                "extents", "each of the 2 spatial axes"),
    ((1, 2, 3, 3), (2, 3, 2, 2), {"extents": (1, 1)},              "w",       r"fits into out \(1, 3, 1, 1\)"),
    ((1, 2, 3, 3), (2, 3, 2, 2), {"groups": 0},                    "groups",  "whole number from 1"),
    ((1, 3, 3, 3), (3, 3, 2, 2), {"groups": 2},                    "w",       "the 2 groups of out"),
    ((1, 2, 3, 3), (4, 3, 2, 2), {},                               "x",       "that of conv"),
]
# fmt: on


@pytest.mark.parametrize(("x", "w", "choices", "operand", "said"), TRANSPOSED)
def test_errors_of_the_transposed_convolution_name_its_own_arguments(x, w, choices, operand, said, host):
    with pytest.raises(BadRequest, match=said) as caught:
        dp.conv_transpose(host.zeros(x), host.zeros(w), **choices)
    assert caught.value.operand == operand
    assert not re.search(r"\bdy\b|x_extents|group_count", str(caught.value))


def test_the_transposed_convolution_names_its_own_arguments_where_one_is_wrong(host):
    x, w = host.zeros((1, 2, 3, 3)), host.zeros((2, 3, 2, 2))
    own = r"It takes x, w, extents, groups, z, out, pad, .*: see help\(dispatch\.conv_transpose\)"
    for wrong, right in (("group", "groups"), ("extent", "extents"), ("padding", "pad")):
        with pytest.raises(TypeError, match=rf"^conv_transpose\(\) got .*'{wrong}'\. Did you mean {right}\? {own}"):
            dp.conv_transpose(x, w, **{wrong: 2})
    for wrong in ("dy", "x_extents", "group_count"):
        with pytest.raises(TypeError, match=rf"^conv_transpose\(\) got an unexpected keyword argument '{wrong}'"):
            dp.conv_transpose(x, w, **{wrong: 2})
    with pytest.raises(TypeError, match=r"conv_transpose\(\) missing 1 required positional argument: 'w'"):
        dp.conv_transpose(x)
    with pytest.raises(BadRequest, match="x: got a list"):
        dp.conv_transpose([1.0], w)
    assert list(inspect.signature(dp.conv_transpose).parameters)[:4] == ["x", "w", "extents", "groups"]


def test_gradients_name_their_results_by_their_own_arguments(host):
    """Those that have no x or no w, whose result it is."""
    x, dy = host.zeros((1, 3, 5, 5)), host.zeros((1, 4, 3, 3))
    with pytest.raises(BadRequest, match="out: got filters over 2 channels; expected a divisor of the 3 channels of x"):
        dp.conv_bwd_filter(dy, x, out=host.zeros((4, 2, 3, 3)))
    with pytest.raises(BadRequest, match=r"w_extents: got a filter \(9, 9\)"):
        dp.conv_bwd_filter(dy, x, w_extents=(9, 9))
    with pytest.raises(BadRequest, match="w: got filters over 2 channels; expected a divisor of the 3 channels of out"):
        dp.conv_bwd_data(dy, host.zeros((4, 2, 3, 3)), out=x)


def test_integers_are_summed_exactly_and_cut_off(host):
    last = (0, 2, 3, 1)
    x, w = (place(host, np.full((1, 4, 3, 3), value, np.int8), last).view for value in (100, 3))
    assert dp.conv_fwd(x, w, out_dtype="f32").numpy().item() == 100 * 3 * 36
    assert dp.conv_fwd(x, w).numpy().item() == 127


def test_results_lie_as_their_operands_do(host):
    last = host.empty((2, 5, 5, 8), "f32")
    x = dp.Tensor(last.storage, last.ptr, host.layout(last.dtype, (2, 8, 5, 5), (200, 1, 40, 8), last.ptr))
    assert dp.conv_fwd(x, host.zeros((4, 8, 3, 3))).layout.strides == (36, 1, 12, 4)
    assert dp.conv_fwd(host.zeros((2, 8, 5, 5)), host.zeros((4, 8, 3, 3))).layout.is_contiguous


def test_activations_are_named_and_numbered_as_in_the_header():
    for activation in Activation:
        assert cudnnPointwiseMode_t[f"CUDNN_POINTWISE_{activation.name}"] == activation


@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"w": (4, 2, 3, 3)}, "w"),
        ({"w": (4, 3, 9, 3)}, "w"),
        ({"w": (4, 3, 3)}, "w"),
        ({"x": (3, 5)}, "x"),
        ({"x": (0, 3, 5, 5)}, "x"),
        ({"bias": (3,)}, "bias"),
        ({"z": (2, 4, 5, 5)}, "z"),
        ({"out": (2, 4, 4, 3)}, "out"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, operand, host):
    shapes = {"x": (2, 3, 5, 5), "w": (4, 3, 3, 3), **change}
    with pytest.raises(BadRequest) as caught:
        ConvFwdRequest(**{name: host.zeros(shape) for name, shape in shapes.items()})
    assert caught.value.operand == operand


@pytest.mark.parametrize("operand", ["x", "w", "z", "out"])
@pytest.mark.parametrize("step", [-1, 0])
def test_operands_step_forward(operand, step, host):
    given = {name: host.zeros((4, 4, 3, 3)) for name in ("x", "w", "z", "out")}
    whole = host.zeros((8, 4, 3, 3))
    ptr = whole.ptr + whole.nbytes // 2
    layout = host.layout(whole.dtype, (4, 4, 3, 3), (36, 9 * step, 3, 1), ptr)
    given[operand] = dp.Tensor(whole.storage, ptr, layout)
    with pytest.raises(BadRequest, match="steps forward") as caught:
        ConvFwdRequest(**given, pad=1)
    assert caught.value.operand == operand


@pytest.mark.parametrize(
    ("choice", "operand"),
    [
        ({"pad": -1}, "pad"),
        ({"pad": (1, 1, 1)}, "pad"),
        ({"stride": 0}, "stride"),
        ({"dilation": (1, 0)}, "dilation"),
        ({"dilation": 5}, "w"),
        ({"alpha": "1"}, "alpha"),
        ({"beta": 1.0}, "beta"),
        ({"activation": 100}, "activation"),
        ({"compute": 68}, "compute"),
        ({"out_dtype": "f33"}, "out_dtype"),
        ({"workspace": -1}, "workspace"),
        ({"autotune": 1}, "autotune"),
    ],
)
def test_choices_that_make_no_sense_are_named(choice, operand, host):
    with pytest.raises(BadRequest) as caught:
        ConvFwdRequest(host.zeros((2, 3, 5, 5)), host.zeros((4, 3, 3, 3)), **choice)
    assert caught.value.operand == operand


def test_gradients_say_what_their_extents_must_be(host):
    dy, w = host.zeros((1, 4, 3, 3)), host.zeros((4, 2, 3, 3))
    with pytest.raises(BadRequest, match="x_extents"):
        ConvBwdDataRequest(dy, w, x_extents=(9, 9), stride=2)
    with pytest.raises(BadRequest, match="w_extents"):
        ConvBwdFilterRequest(dy, host.zeros((1, 2, 5, 5)))
    with pytest.raises(BadRequest, match="group_count"):
        ConvBwdFilterRequest(dy, host.zeros((1, 2, 5, 5)), w_extents=(3, 3), group_count=4)
    with pytest.raises(BadRequest, match="no out is passed"):
        ConvBwdFilterRequest(dy, host.zeros((1, 2, 5, 5)), w_extents=(3, 3), beta=1.0)


def test_tf32_only_where_it_is_asked_for(host):
    x, w = host.zeros((2, 8, 5, 5)), host.zeros((4, 8, 3, 3))
    assert select(ConvFwdRequest(x, w), Arch(90)).compute is Compute.COMPUTE_32F
    asked = ConvFwdRequest(x, w, compute=Compute.COMPUTE_32F_FAST_TF32)
    assert select(asked, Arch(90)).compute is Compute.COMPUTE_32F_FAST_TF32


def test_what_cudnn_fuses_in_one_layout_alone_is_refused_in_the_other(host):
    x, w, bias = host.zeros((2, 8, 5, 5), "f16"), host.zeros((4, 8, 3, 3), "f16"), host.zeros((4,), "f16")
    select(ConvFwdRequest(x, w, bias=bias, activation=Activation.RELU_FWD), Arch(90))
    with pytest.raises(NoRow, match="channels last for bias \\+ GELU_FWD"):
        select(ConvFwdRequest(x, w, bias=bias, activation=Activation.GELU_FWD), Arch(90))


def test_a_request_that_adds_to_its_result_is_not_repeatable(host):
    dy, x, dw = host.zeros((1, 4, 3, 3)), host.zeros((1, 2, 5, 5)), host.zeros((4, 2, 3, 3))
    assert ConvBwdFilterRequest(dy, x, out=dw).repeatable
    assert not ConvBwdFilterRequest(dy, x, out=dw, beta=1.0).repeatable


def test_beta_is_documented_as_each_direction_has_it(host):
    x, w = host.zeros((1, 4, 8, 8)), host.zeros((4, 4, 3, 3))
    with pytest.raises(BadRequest, match=r"beta: got 0\.5; expected 0, because no z is passed"):
        dp.conv_fwd(x, w, beta=0.5, out=host.zeros((1, 4, 6, 6)))
    assert "beta: what z is multiplied with; without a z it is 0" in dp.conv_fwd.__doc__
    assert "without a z, of gradients, what was in `out` before" in dp.conv_bwd_data.__doc__


def test_a_tanh_that_gives_nan_is_not_fused(host):
    """cuDNN's kernels made beforehand give NaN above 44; it compiles right ones for NHWC and 16 bits, or TF32."""
    tanh = {"activation": Activation.TANH_FWD}
    for dtype, last, taken in (("f16", True, True), ("bf16", True, True), ("f16", False, False), ("f32", True, False)):
        x, w = host.zeros((2, 9, 9, 16), dtype), host.zeros((8, 3, 3, 16), dtype)
        x, w = (t.transpose(0, 3, 1, 2) if last else t for t in (x, w if last else host.zeros((8, 9, 3, 3), dtype)))
        for arch in (HOST, Arch(90)):
            request = ConvFwdRequest(x, w, bias=host.zeros(8, dtype), **tanh)
            if taken:
                select(request, arch)
                continue
            with pytest.raises(NoRow, match="for TANH_FWD"):
                select(request, arch)
            select(ConvFwdRequest(x, w, bias=host.zeros(8, dtype), activation=Activation.SIGMOID_FWD), arch)
    x, w = (host.zeros(shape, "f32").transpose(0, 3, 1, 2) for shape in ((2, 9, 9, 16), (8, 3, 3, 16)))
    select(ConvFwdRequest(x, w, bias=host.zeros(8, "f32"), compute=Compute.COMPUTE_32F_FAST_TF32, **tanh), Arch(90))


@pytest.mark.parametrize("given", [1, 4])
def test_groups_that_contradict_the_result_are_refused(given, host):
    dy, w, x = host.zeros((2, 60, 4)), host.zeros((60, 1, 1)), host.zeros((2, 5, 4))
    with pytest.raises(BadRequest, match=rf"group_count: got {given}; expected 5, that of out \(2, 5, 4\) and w"):
        dp.conv_bwd_data(dy, w, group_count=given, out=x)
    with pytest.raises(BadRequest, match=rf"groups: got {given}; expected 5"):
        dp.conv_transpose(dy, w, groups=given, out=x)
    with pytest.raises(BadRequest, match=rf"group_count: got {given}; expected 5, that of out \(60, 1, 1\) and x"):
        dp.conv_bwd_filter(dy, x, group_count=given, out=w)


def test_groups_follow_from_the_result_or_are_one(host):
    dy, w, x = host.zeros((2, 60, 4)), host.zeros((60, 1, 1)), host.zeros((2, 5, 4))
    for groups in (None, 5):
        assert ConvBwdDataRequest(dy, w, group_count=groups, out=x).groups == 5
        assert ConvBwdFilterRequest(dy, x, group_count=groups, out=w).groups == 5
    assert dp.conv_bwd_data(dy, w).shape == (2, 1, 4)
    assert dp.conv_bwd_data(dy, w, group_count=4).shape == (2, 4, 4)
    assert dp.conv_transpose(dy, w, groups=4).shape == (2, 4, 4)
    assert dp.conv_bwd_filter(dy, x, w_extents=(1,), group_count=5).shape == (60, 1, 1)


@pytest.mark.parametrize(("x_shape", "w_shape"), [((2, 1, 9, 9), (8, 1, 3, 3)), ((2, 8, 1, 1), (4, 8, 1, 1))], ids=str)
@pytest.mark.parametrize("last", ["x", "w", "z", "out", ""])
def test_one_channel_or_pixel_is_no_reason_for_a_result_with_channels_first(x_shape, w_shape, last, host, rng):
    """Such operands lie with channels first and last, so that another operand decides, or the strides do."""
    x, w = (host.array(rng.standard_normal(shape), "f32") for shape in (x_shape, w_shape))
    plain = dp.conv_fwd(x, w)
    z = host.array(np.zeros(plain.shape), "f32")
    given = (
        {"x": x, "w": w} | ({"z": z} if last == "z" else {}) | ({"out": host.empty(z.shape)} if last == "out" else {})
    )
    if last:
        given[last] = channels_last(given[last])
    request = ConvFwdRequest(**given, activation=Activation.SWISH_FWD)
    assert request.channels_last is bool(last)
    if not last:
        with pytest.raises(NoRow, match="channels last for SWISH_FWD"):
            dp.run(request)
        return
    select(request, Arch(90))
    y = dp.run(request)
    assert y.layout.strides == channels_last(z).layout.strides
    np.testing.assert_allclose(y.numpy(), plain.numpy() / (1 + np.exp(-plain.numpy())), rtol=1e-5, atol=1e-6)


def test_an_operand_in_one_order_alone_decides_against_exact_strides(host):
    """One filter of one channel has the strides of channels last, but lies in both ways; x only with channels first."""
    x, w = host.zeros((2, 4, 5, 5)), channels_last(host.zeros((4, 1, 3, 3)))
    assert not ConvFwdRequest(x, w).channels_last
    assert dp.conv_fwd(x, w).layout.is_contiguous
