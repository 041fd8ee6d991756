"""Pooling on the GPU: every row through its cases, its gradients against torch's, and equal elements."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.pooling import PoolingMode, pooling, pooling_bwd
from dispatch.ops.pooling.cases import cases

ROWS = [row for row in dispatch.TABLE if row.op in ("pooling", "pooling_bwd") and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
M = PoolingMode


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("mode", list(PoolingMode))
@pytest.mark.parametrize("space", [(19,), (13, 11), (7, 9, 8)], ids=len)
def test_values_and_gradients_are_those_of_torch(space, mode, rng):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x = torch.tensor(rng.standard_normal((2, 3, *space)), device="cuda", requires_grad=True)
    if mode.is_max:
        expected = getattr(functional, f"max_pool{len(space)}d")(x, 3, 2, 1)
    else:
        include = mode is M.AVERAGE_COUNT_INCLUDE_PADDING
        expected = getattr(functional, f"avg_pool{len(space)}d")(x, 3, 2, 1, count_include_pad=include)
    dy = torch.tensor(rng.standard_normal(expected.shape), device="cuda")
    expected.backward(dy)
    ours, choices = dispatch.from_dlpack(x.detach()), {"mode": mode, "stride": 2, "padding": 1}
    y = pooling(ours, 3, **choices)
    dx = pooling_bwd(ours, y, dispatch.from_dlpack(dy), 3, **choices)
    np.testing.assert_allclose(y.numpy(), expected.detach().cpu().numpy(), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(dx.numpy(), x.grad.cpu().numpy(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("mode", [M.MAX, M.MAX_DETERMINISTIC])
def test_of_equal_elements_the_first_gets_the_gradient(mode, gpu):
    x = gpu.array(np.ones((1, 1, 4, 4), np.float32))
    y = pooling(x, 2, mode=mode)
    dx = pooling_bwd(x, y, gpu.array(np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)), 2, mode=mode)
    assert dx.numpy()[0, 0].tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 4, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("mode", list(PoolingMode))
def test_a_nan_is_passed_on(mode, gpu):
    x = np.zeros((1, 1, 2, 4), np.float32)
    x[0, 0, 1, 0] = np.nan
    assert np.isnan(pooling(gpu.array(x), 2, mode=mode).numpy()).tolist() == [[[[True, False]]]]


@pytest.mark.parametrize("mode", list(PoolingMode))
def test_strides_of_axes_of_one_element_do_not_matter(mode, gpu, rng):
    """`cudnnPoolingBackward` compares those of x and dx, of y and dy."""
    memory, gradients = gpu.array(rng.standard_normal((3, 4))), gpu.array(rng.standard_normal((3, 1, 2)))
    x = memory.strided((3, 1, 4), (4, 1, 1))
    y = pooling(x, 3, mode=mode, padding=1, stride=2).strided((3, 1, 2), (2, 7, 1))
    choices = {"mode": mode, "padding": 1, "stride": 2}
    dx = pooling_bwd(x, y, gradients, 3, out=gpu.zeros((3, 1, 4), "f64"), **choices)
    plain = gpu.array(memory.numpy().reshape(3, 1, 4))
    right = pooling_bwd(plain, pooling(plain, 3, **choices), gradients, 3, **choices)
    np.testing.assert_array_equal(dx.numpy(), right.numpy())
