"""Local normalization on the host: against loops over neighbours, gradients against finite differences, refusals."""

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.local_norm import DivisiveNormBwdRequest, DivisiveNormRequest, LrnBwdRequest, LrnRequest
from dispatch.ops.local_norm.cases import cases
from dispatch.row_check import check_row
from dispatch.table.select import select

OPS = ("lrn", "lrn_bwd", "divisive_norm", "divisive_norm_bwd")
ROWS = [row for row in TABLE if row.op in OPS and row.on(HOST)]
FIELDS = {"alpha": 0.7, "beta": 0.6, "k": 1.3}


@pytest.fixture
def dev():
    return dp.device("host")


def neighbours(shape, place, window, axes):
    """The places in a window around one, inside the image."""
    found = [list(place)]
    for axis in axes:
        low = place[axis] - (window - 1) // 2
        reach = range(max(low, 0), min(low + window, shape[axis]))
        found = [[*at[:axis], i, *at[axis + 1 :]] for at in found for i in reach]
    return [tuple(at) for at in found]


def looped(x, means, window, axes):
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        total = sum((x[at] - means[place]) ** 2 for at in neighbours(x.shape, place, window, axes))
        y[place] = x[place] * (1.3 + 0.7 / window ** len(axes) * total) ** -0.6
    return y


@pytest.mark.parametrize(("row", "case"), [pytest.param(r, c, id=f"{r.name}-{c.id}") for r in ROWS for c in cases(r)])
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, dev, rng):
    check_row(row, case, dev, rng)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(2, 5), (2, 6, 3), (1, 7, 3, 2), (2, 3, 2, 3, 2)])
def test_lrn_is_what_loops_over_channels_give(shape, window, dev, rng):
    x = rng.standard_normal(shape)
    got = dp.lrn(dev.array(x), window=window, **FIELDS).numpy()
    np.testing.assert_allclose(got, looped(x, np.zeros(shape), window, (1,)), rtol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(2, 2, 5, 4), (1, 2, 3, 4, 3)])
@pytest.mark.parametrize("centred", [True, False])
def test_divisive_norm_is_what_loops_over_space_give(shape, window, centred, dev, rng):
    x, means = rng.standard_normal(shape), rng.standard_normal(shape) * centred
    given = dev.array(means) if centred else None
    got = dp.divisive_norm(dev.array(x), given, window=window, **FIELDS).numpy()
    np.testing.assert_allclose(got, looped(x, means, window, range(2, len(shape))), rtol=1e-12)


def slope(forward, x, dy):
    """The gradient of Σ dy · forward(x) by central differences."""
    gradient, step = np.zeros_like(x), 1e-6
    for place in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        gradient[place] = ((forward(moved[0]) - forward(moved[1])) * dy).sum() / (2 * step)
    return gradient


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_the_gradient_of_lrn_is_that_of_finite_differences(window, dev, rng):
    x, dy = rng.standard_normal((2, 2, 6, 2, 3))
    fields = {"window": window, **FIELDS}
    y = dp.lrn(dev.array(x), **fields)
    got = dp.lrn_bwd(dev.array(x), y, dev.array(dy), **fields).numpy()
    expected = slope(lambda x: dp.lrn(dev.array(x), **fields).numpy(), x, dy)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_the_gradient_of_divisive_norm_is_that_of_finite_differences(window, dev, rng):
    x, dy, means = rng.standard_normal((3, 2, 2, 4, 3))
    fields = {"window": window, **FIELDS}
    got = dp.divisive_norm_bwd(dev.array(x), dev.array(dy), dev.array(means), **fields).numpy()
    expected = slope(lambda x: dp.divisive_norm(dev.array(x), dev.array(means), **fields).numpy(), x, dy)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "fields",
    [{"window": 0}, {"window": 17}, {"window": 2.0}, {"alpha": -1.0}, {"beta": 0.0}, {"k": 0.0}, {"k": np.nan}],
)
def test_what_cudnn_takes_for_no_normalization_is_refused(fields, dev):
    (name,) = fields
    with pytest.raises(BadRequest, match=name):
        LrnRequest(dev.zeros((1, 2, 3, 3)), **fields)


def test_operands_that_do_not_fit_are_refused_by_name(dev):
    x, other = dev.zeros((1, 2, 3, 3)), dev.zeros((1, 2, 3, 4))
    with pytest.raises(BadRequest, match="dy"):
        LrnBwdRequest(x, x, other)
    with pytest.raises(BadRequest, match="means"):
        DivisiveNormRequest(x, other)
    with pytest.raises(BadRequest, match="2 to 3 spatial axes"):
        DivisiveNormRequest(dev.zeros((1, 2, 3)))
    with pytest.raises(BadRequest, match="dy"):
        DivisiveNormBwdRequest(x, None)


def test_rows_refuse_what_cudnn_does_otherwise(dev):
    x = dev.zeros((2, 4, 6, 5))
    assert select(LrnRequest(x), Arch(90)).function == "cudnnLRNCrossChannelForward"
    for request, reason in (
        (LrnRequest(x[..., ::2]), "dense with channels first or last"),
        (LrnRequest(dev.zeros((2, 4, 5, 6)).transpose(0, 1, 3, 2)), "dense with channels first or last"),
        (DivisiveNormRequest(x, dev.zeros((2, 6, 5, 4)).transpose(0, 3, 1, 2)), "means with the strides of x"),
        (DivisiveNormBwdRequest(x, x, window=4), "an odd window, has 4"),
        (LrnRequest(dev.zeros((1, 2, 3, 3), ml_dtypes.bfloat16)), "bf16"),
    ):
        with pytest.raises(NoRow, match=reason):
            select(request, Arch(90))
