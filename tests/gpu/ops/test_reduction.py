"""Reductions on the GPU: every row through its cases, large ones against torch, and NaN and equal elements."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.reduction import ReduceOp, reduce
from dispatch.ops.reduction.cases import cases

ROWS = [row for row in dispatch.TABLE if row.op == "reduce" and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("axes", [None, 0, (1, 3), (0, 2)])
def test_sums_and_extremes_are_those_of_torch(axes, rng):
    torch = pytest.importorskip("torch")
    x = torch.tensor(rng.standard_normal((17, 31, 13, 29)), device="cuda")
    ours, over = dispatch.from_dlpack(x), tuple(range(4)) if axes is None else axes
    for op, theirs in ((ReduceOp.ADD, torch.sum), (ReduceOp.MAX, torch.amax), (ReduceOp.AVG, torch.mean)):
        expected = theirs(x, dim=over, keepdim=True).cpu().numpy()
        np.testing.assert_allclose(
            reduce(ours, axes, reduce=op, keepdims=True).numpy(), expected, rtol=1e-12, atol=1e-11
        )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(4096, 4096), (7, 40009), (40009, 7), (513, 255)], ids=str)
def test_sums_of_rows_and_columns_start_from_zero_each_time(shape, axis, dtype, gpu, rng):
    """Into memory that holds something else, plain, recorded and replayed."""
    x = gpu.array(rng.standard_normal(shape), dtype)
    exact = x.numpy().astype(np.float64)
    out = gpu.array(np.full(shape[1 - axis], np.nan, np.float32))
    bound = 2.0**-24 * (4 + 4 * np.sqrt(shape[axis])) * np.abs(exact).sum(axis)
    for _ in range(4):
        reduce(x, axis, out=out)
        assert (np.abs(out.numpy() - exact.sum(axis)) <= bound).all()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_of_equal_elements_the_first_has_the_place(op, gpu):
    x = gpu.array(np.array([[3, 1, 3, 1], [2, 2, 2, 2]], np.float32))
    least = op is ReduceOp.MIN
    values, places = reduce(x, 1, reduce=op, indices=True)
    assert values.numpy().tolist() == [1 if least else 3, 2]
    assert places.numpy().tolist() == [1 if least else 0, 0]


@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_nan_is_passed_on(op, gpu):
    assert np.isnan(reduce(gpu.array(np.array([1, np.nan, 3], np.float32)), reduce=op).item())
