"""Pooling on the host: against loops over windows, its gradients against finite differences, refusals and rows."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import dispatch
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.pooling import PoolingBwdRequest, PoolingMode, PoolingRequest, pooling, pooling_bwd, reference
from dispatch.ops.pooling.cases import cases
from dispatch.row_check import check_row
from dispatch.table.select import select

ROWS = [row for row in TABLE if row.op.startswith("pooling") and row.on(HOST)]
M = PoolingMode
WINDOWS = [  # shape, window, stride, padding
    ((2, 3, 9), (3,), (2,), (1,)),
    ((1, 2, 6, 7), (2, 3), (2, 1), (0, 1)),
    ((2, 1, 8, 5), (3, 3), (2, 2), (1, 2)),
    ((1, 2, 4, 5, 3), (2, 2, 2), (1, 2, 1), (1, 0, 1)),
]


@pytest.fixture
def dev():
    return dispatch.device("host")


def looped(x, window, stride, padding, mode):
    """Every window one by one, its elements one by one."""
    space = x.shape[2:]
    places = [(n + 2 * p - w) // s + 1 for n, w, s, p in zip(space, window, stride, padding, strict=True)]
    y = np.zeros((*x.shape[:2], *places))
    for place in np.ndindex(y.shape):
        starts = [i * s - p for i, s, p in zip(place[2:], stride, padding, strict=True)]
        reach = itertools.product(*(range(start, start + w) for start, w in zip(starts, window, strict=True)))
        found = [x[(*place[:2], *at)] for at in reach if all(0 <= i < n for i, n in zip(at, space, strict=True))]
        if mode.is_max:
            y[place] = max(found)
        else:
            count = len(found) if mode is M.AVERAGE_COUNT_EXCLUDE_PADDING else np.prod(window)
            y[place] = sum(found) / count
    return y


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("mode", list(M))
@pytest.mark.parametrize(("shape", "window", "stride", "padding"), WINDOWS)
def test_as_loops_compute_it(shape, window, stride, padding, mode, dev, rng):
    x = rng.standard_normal(shape)
    expected = looped(x, window, stride, padding, mode)
    got = pooling(dev.array(x), window, mode=mode, stride=stride, padding=padding)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14, atol=1e-15)
    held = reference(PoolingRequest(dev.array(x), window, mode=mode, stride=stride, padding=padding))["out"]
    np.testing.assert_allclose(held, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("mode", list(M))
@pytest.mark.parametrize(("shape", "window", "stride", "padding"), WINDOWS)
def test_the_gradient_is_that_of_finite_differences(shape, window, stride, padding, mode, dev, rng, slope_of):
    x = rng.standard_normal(shape)
    choices = {"mode": mode, "stride": stride, "padding": padding}

    def forward(values):
        return pooling(dev.array(values), window, **choices).numpy()

    y = forward(x)
    dy = rng.standard_normal(y.shape)
    dx = pooling_bwd(dev.array(x), dev.array(y), dev.array(dy), window, **choices)
    np.testing.assert_allclose(dx.numpy(), slope_of(forward, x, dy), rtol=1e-6, atol=1e-8)


def test_of_equal_elements_the_first_gets_the_gradient(dev):
    x, dy = dev.array(np.ones((1, 1, 4))), dev.array(np.array([[[5.0, 7.0]]]))
    assert pooling_bwd(x, pooling(x, 2), dy, 2).numpy().tolist() == [[[5, 0, 7, 0]]]


def test_channels_that_come_last_stay_there(dev, rng):
    values = rng.standard_normal((2, 6, 8, 3))  # images, rows, columns, channels
    x = dev.array(values)
    image = dispatch.Tensor(x.storage, x.ptr, dev.layout(x.dtype, (2, 3, 6, 8), (144, 1, 24, 3), x.ptr))
    y = pooling(image, 2)
    assert y.layout.strides == (36, 1, 12, 3)
    expected = looped(values.transpose(0, 3, 1, 2), (2, 2), (2, 2), (0, 0), M.MAX)
    np.testing.assert_array_equal(y.numpy(), expected)


# fmt: off
REFUSED = [  # shape of x, fields, the operand that is named, what was given, what was expected
    ((3, 4),       {"window": 2},                             "x",       "f32[3, 4]", "1 to 3 spatial axes"),
    ((1, 1, 4, 4), {"window": (2, 2, 2)},                     "window",  "(2, 2, 2)", "each of 2 spatial axes"),
    ((1, 1, 4, 4), {"window": 0},                             "window",  "0",         "from 1"),
    ((1, 1, 4, 4), {"window": 5},                             "window",  "(5, 5)",    "at most the padded image"),
    ((1, 1, 4, 4), {"window": 2, "padding": 2},               "padding", "(2, 2)",    "less than the window"),
    ((1, 1, 4, 4), {"window": 2, "stride": 0},                "stride",  "0",         "from 1"),
    ((1, 1, 4, 4), {"window": 2, "padding": -1},              "padding", "-1",        "from 0"),
    ((1, 1, 4, 4), {"window": 2, "mode": 0},                  "mode",    "0",         "PoolingMode"),
    ((1, 0, 4, 4), {"window": 2},                             "x",       "[1, 0, 4",  "at least one channel"),
    ((1, 1, 4, 4), {"window": 2.0},                           "window",  "2.0",       "whole number"),
]
# fmt: on


@pytest.mark.parametrize(("shape", "fields", "operand", "given", "expected"), REFUSED)
def test_a_refusal_names_operand_given_and_expected(shape, fields, operand, given, expected, dev):
    with pytest.raises(BadRequest) as caught:
        PoolingRequest(dev.zeros(shape), **fields)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_the_gradient_wants_what_the_forward_pass_gave(dev):
    x, y = dev.zeros((1, 1, 4, 4)), dev.zeros((1, 1, 2, 2))
    with pytest.raises(BadRequest, match="like the output of the forward pass"):
        PoolingBwdRequest(x, x, y, 2)
    with pytest.raises(BadRequest, match="as y is"):
        PoolingBwdRequest(x, y, x, 2)


def test_averages_of_whole_numbers_have_no_row(dev):
    with pytest.raises(NoRow, match="needs a mode of MAX"):
        pooling(dev.zeros((1, 1, 4, 4), "i8"), 2, mode=M.AVERAGE_COUNT_INCLUDE_PADDING)


def test_requests_of_the_same_windows_share_a_plan(dev):
    x = dev.zeros((1, 1, 4, 4))
    assert PoolingRequest(x, 2).key() == PoolingRequest(x, (2, 2), stride=2, padding=(0, 0)).key()
    assert PoolingRequest(x, 2).key() != PoolingRequest(x, 2, stride=1).key()


def test_the_gradient_lies_as_what_it_is_of(dev):
    """cuDNN takes no gradient that lies otherwise than what it is of, and says so with an error of its own."""
    x, y = dev.zeros((2, 3, 4, 5), "f32"), dev.zeros((2, 3, 3, 4), "f32")
    last, turned = (dev.zeros(shape, "f32").transpose(0, 3, 1, 2) for shape in ((2, 3, 4, 3), (2, 4, 5, 3)))
    select(PoolingBwdRequest(x, y, dev.zeros((2, 3, 3, 4), "f32"), 2, stride=1), HOST)
    with pytest.raises(NoRow, match="needs dy with the strides of y"):
        select(PoolingBwdRequest(x, y, last, 2, stride=1), Arch(90))
    with pytest.raises(NoRow, match="needs out with the strides of x"):
        select(PoolingBwdRequest(x, y, dev.zeros((2, 3, 3, 4), "f32"), 2, stride=1, out=turned), Arch(90))
    gapped = dev.zeros((2, 3, 4, 6), "f32")[..., :5]
    with pytest.raises(NoRow, match=r"Nearest that works: .* needs x without gaps .*: copy it with x\.copy\(\)"):
        select(PoolingBwdRequest(gapped, y, dev.zeros((2, 3, 3, 4), "f32"), 2, stride=1), Arch(90))


@pytest.mark.parametrize("mode", [PoolingMode.MAX, PoolingMode.MAX_DETERMINISTIC])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_the_largest_of_what_is_not_finite(mode, dtype, dev):
    """NaN is the largest; of -∞ alone it is the lowest finite number, as on a GPU; padding is no element."""
    x = dev.array(np.array([-np.inf, -np.inf, 1, np.inf, np.nan, -np.inf]).reshape(1, 1, 6), dtype)
    y = pooling(x, 2, mode=mode, stride=1, padding=1)
    lowest = -float(ml_dtypes.finfo(y.dtype.numpy).max)
    np.testing.assert_array_equal(y.numpy().astype(float).ravel(), [lowest, lowest, 1, np.inf, np.nan, np.nan, lowest])
    dy = dev.array(np.ones(y.shape), dtype)
    dx = pooling_bwd(x, y, dy, 2, mode=mode, stride=1, padding=1)
    assert dx.numpy().astype(float).ravel().tolist() == [2, 0, 1, 1, 2, 1]
