"""Orders of a convolution's operands in memory for which cuDNN gives wrong results, and how a residual is scaled."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.ops.conv import channels_last
from dispatch.ops.conv.graph import lower_to_graph
from dispatch.ops.conv.rules import dense_filter, fuses_in_nhwc, gaps_in_one_order
from dispatch.table.select import select

SHAPES = {"x": (2, 8, 9, 9), "w": (16, 8, 3, 3), "z": (2, 16, 7, 7), "out": (2, 16, 7, 7)}


def laid(shape, axes, dtype="f16"):
    """Zeros whose memory has the axes in this order."""
    tensor = dp.device("host").zeros(tuple(shape[axis] for axis in axes), dtype)
    return tensor.transpose(*np.argsort(axes))


FIRST, LAST = (0, 1, 2, 3), (0, 2, 3, 1)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
@pytest.mark.parametrize(
    ("axes", "is_taken"),
    [(FIRST, True), (LAST, True), ((1, 0, 2, 3), False), ((2, 3, 1, 0), False), ((0, 2, 1, 3), False)],
)
def test_filters_have_channels_first_or_last(op, axes, is_taken):
    x, w, y = (laid(SHAPES[name], LAST) for name in ("x", "w", "z"))
    filters = laid(SHAPES["w"], axes)
    request = {
        "conv_fwd": lambda: dp.ConvFwdRequest(x, filters),
        "conv_bwd_data": lambda: dp.ConvBwdDataRequest(y, filters, x_extents=(9, 9)),
        "conv_bwd_filter": lambda: dp.ConvBwdFilterRequest(y, x, out=filters),
    }[op]()
    assert (dense_filter(request) == "") is is_taken
    if is_taken:
        assert select(request, Arch(90)).library == "cudnn"
    else:
        with pytest.raises(dp.errors.NoRow, match="needs a filter without gaps, with channels first or last, has f16"):
            select(request, Arch(90))
    assert w.shape == filters.shape


def test_a_filter_with_one_element_along_an_axis_may_have_any_stride_there():
    w = dp.device("host").zeros((16 * 8,), "f16").strided((16, 8, 1, 1), (1, 16, 7, 5))
    assert dense_filter(dp.ConvFwdRequest(laid(SHAPES["x"], FIRST), w)) != "", "the filters are next to each other"
    w = dp.device("host").zeros((16 * 8,), "f16").strided((16, 8, 1, 1), (8, 1, 7, 5))
    assert dense_filter(dp.ConvFwdRequest(laid(SHAPES["x"], FIRST), w)) == ""


@pytest.mark.parametrize("wrong", ["x", "w", "z", "out"])
def test_what_is_fused_has_all_operands_in_one_order(wrong):
    def request(**orders):
        return dp.ConvFwdRequest(
            **{name: laid(shape, orders.get(name, LAST)) for name, shape in SHAPES.items()}, activation="swish_fwd"
        )

    assert fuses_in_nhwc(request()) == ""
    for axes in (FIRST, (0, 3, 2, 1)):
        refusal = fuses_in_nhwc(request(**{wrong: axes}))
        assert refusal.startswith("needs x, w, z and out with channels last for z + SWISH_FWD"), axes
        assert f"has {wrong} f16" in refusal


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (-2.0, 0.5), (0.5, 0.5), (3.0, 1.0), (2.0, 0.0), (0.0, -3.0)])
def test_the_sum_is_scaled_rather_than_the_residual(alpha, beta, dtype, rng):
    """No multiplication reads z itself; the result is alpha · conv + beta · z all the same. A beta of 0 reads no z."""
    dev = dp.device("host")
    x, w, z = (rng.standard_normal(SHAPES[name]) for name in ("x", "w", "z"))
    if beta == 0:
        z[:] = np.nan
    arrays = [channels_last(dev.array(array, dtype)) for array in (x, w, z)]
    request = dp.ConvFwdRequest(*arrays[:2], z=arrays[2], alpha=alpha, beta=beta, activation="relu_fwd")
    graph, places = lower_to_graph(request)
    multiplied = [node for node in graph.nodes if "MUL" in dict(node.attributes).values()]
    assert all(uid not in places for node in multiplied for _, uid in node.ins)
    given = [array.numpy().astype("f8") for array in arrays]
    windows = np.lib.stride_tricks.sliding_window_view(given[0], (3, 3), (2, 3))
    product = np.einsum("nchwij,kcij->nkhw", windows, given[1])
    expected = np.maximum(alpha * product + (beta * given[2] if beta else 0), 0)
    found = dp.run(request).numpy().astype("f8")
    np.testing.assert_allclose(found, expected, rtol={"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2}[dtype], atol=2e-2)


@pytest.mark.parametrize(
    ("alpha", "beta", "is_taken"),
    [(1.0, 1e-3, True), (0.0, 1e-30, True), (2.0**40, 1.0, True), (1.0, 1e-30, False), (-1e-20, 1e20, False)],
)
def test_factors_whose_ratio_may_overflow_are_refused(alpha, beta, is_taken):
    x, w, z = (laid(SHAPES[name], LAST, "f32") for name in ("x", "w", "z"))
    refusal = fuses_in_nhwc(dp.ConvFwdRequest(x, w, z=z, alpha=alpha, beta=beta, activation="swish_fwd"))
    assert (refusal == "") is is_taken
    assert is_taken or refusal.startswith(
        f"needs alpha / beta from 2^-40 to 2^40 if z is added, has {alpha} and {beta}"
    )


GAPS_FIRST, GAPS_LAST = (128, 32, 8, 1), (160, 1, 40, 8)  # strides


@pytest.mark.parametrize(
    ("x", "dy", "w", "is_taken"),
    [
        (GAPS_FIRST, FIRST, FIRST, True), (GAPS_FIRST, LAST, FIRST, False), (GAPS_FIRST, FIRST, LAST, False),
        (GAPS_LAST, LAST, LAST, True), (GAPS_LAST, LAST, FIRST, False), (GAPS_LAST, FIRST, LAST, False),
        (FIRST, LAST, FIRST, True), (LAST, FIRST, LAST, True),
    ],
)  # fmt: skip
def test_images_with_gaps_have_the_order_of_all_other_operands(x, dy, w, is_taken):
    """x has extents (2, 4, 4, 5), and these strides, or a dense order."""
    dev = dp.device("host")
    image = (
        laid((2, 4, 4, 5), x, "f64") if sorted(x) == [0, 1, 2, 3] else dev.zeros((400,), "f64").strided((2, 4, 4, 5), x)
    )
    request = dp.ConvBwdFilterRequest(laid((2, 6, 2, 3), dy, "f64"), image, out=laid((6, 4, 3, 3), w, "f64"))
    assert (gaps_in_one_order(request) == "") is is_taken
    if is_taken:
        assert select(request, Arch(90)).library == "cudnn"
    else:
        with pytest.raises(dp.errors.NoRow, match=r"because x has gaps, .*: copy it with x.copy\(\)"):
            select(request, Arch(90))
