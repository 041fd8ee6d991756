"""Softmax on the GPU: every row through its cases, its gradient against torch's, and a stream that is captured."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.softmax import SoftmaxAlgorithm, SoftmaxRequest, softmax, softmax_bwd
from dispatch.ops.softmax.cases import cases

ROWS = [row for row in dispatch.TABLE if row.op in ("softmax", "softmax_bwd") and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("algorithm", [SoftmaxAlgorithm.ACCURATE, SoftmaxAlgorithm.LOG])
@pytest.mark.parametrize(("shape", "axis"), [((5, 131), 1), ((2, 19, 3, 7), 1), ((31, 3), 0)])
def test_values_and_gradients_are_those_of_torch(shape, axis, algorithm, rng):
    torch = pytest.importorskip("torch")
    x = torch.tensor(rng.standard_normal(shape), device="cuda", requires_grad=True)
    dy = torch.tensor(rng.standard_normal(shape), device="cuda")
    log = algorithm is SoftmaxAlgorithm.LOG
    expected = torch.log_softmax(x, axis) if log else torch.softmax(x, axis)
    expected.backward(dy)
    y = softmax(dispatch.from_dlpack(x.detach()), axis=axis, algorithm=algorithm)
    dx = softmax_bwd(y, dispatch.from_dlpack(dy), axis=axis, algorithm=algorithm)
    np.testing.assert_allclose(y.numpy(), expected.detach().cpu().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dx.numpy(), x.grad.cpu().numpy(), rtol=1e-11, atol=1e-13)


def test_a_repeated_request_reads_what_is_there_then(gpu, rng):
    x = gpu.array(rng.standard_normal((7, 33)).astype(np.float32))
    request = SoftmaxRequest(x, out=gpu.empty((7, 33)))
    for _ in range(4):  # called, recorded, replayed twice
        values = rng.standard_normal((7, 33)).astype(np.float32)
        x.copy_from(values)
        powers = np.exp(values.astype(np.float64))
        np.testing.assert_allclose(
            dispatch.run(request).numpy(), powers / powers.sum(axis=-1, keepdims=True), rtol=2e-6
        )


def test_plans_of_a_closed_executor_free_their_descriptors_once(gpu):
    """Closing the device lets plans, descriptors and handle go; the next device works as before."""
    softmax(gpu.zeros((3, 4)))
    gpu.close()
    again = dispatch.device("cuda:0")
    assert softmax(again.zeros((3, 4))).numpy().ravel().tolist() == [0.25] * 12
