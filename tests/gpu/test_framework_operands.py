"""Repeated calls over torch's and CuPy's arrays with numbers, lists and sparse matrices are right, and make no request.

They go on until their plans are relocated, each at other addresses and with other numbers.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import dispatch as dp
from dispatch.execute.cuda_executor import CudaExecutor

pytestmark = pytest.mark.usefixtures("dev")
CALLS = 80
REQUESTS = 3  # of each op: arrays may be aligned to more or less


@pytest.fixture
def ran(monkeypatch):
    """How many requests were run."""
    count = Counter()
    before = CudaExecutor.run

    def counted(self, request):
        count[request.op] += 1
        return before(self, request)

    monkeypatch.setattr(CudaExecutor, "run", counted)
    return count


@pytest.fixture(params=["torch", "cupy"])
def library(request):
    """`new(array)` of a library, and `numbers(x)` of what it gave back."""
    if request.param == "cupy":
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        return cupy.asarray, cupy.asnumpy, cupy.ndarray
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return (lambda array: torch.from_numpy(np.ascontiguousarray(array)).cuda()), lambda x: x.cpu().numpy(), torch.Tensor


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def axpy(rng, turn):
    x, y, alpha = draw(rng, 1000), draw(rng, 1000), turn / 4
    return (lambda new: dp.axpy(new(x), new(y), alpha=alpha)), alpha * x.astype(float) + y


def gemv(rng, turn):
    a, x, y = draw(rng, 65, 33), draw(rng, 33), draw(rng, 65)
    alpha, beta = 0.5 + turn, 0.25
    right = alpha * (a.astype(float) @ x) + beta * y
    return (lambda new: dp.gemv(new(a), new(x), y=new(y), alpha=alpha, beta=beta)), right


def einsum(rng, turn):
    del turn
    a, b = draw(rng, 24, 16), draw(rng, 16, 40)  # one product, which needs no cuTENSOR
    return (lambda new: dp.einsum("ij,jk->ik", new(a), new(b))), a.astype(float) @ b


def lists(rng, turn):
    a, b = [draw(rng, m, 16) for m in (8, 24)], [draw(rng, 16, 8) for _ in range(2)]
    right = np.concatenate([(turn / 4) * (x.astype(float) @ y) for x, y in zip(a, b, strict=True)])

    def call(new):
        parts = dp.grouped_matmul([new(x) for x in a], [new(y) for y in b], alpha=turn / 4)
        return list(parts)

    return call, right


def sparse(of_ours):
    """One matrix of the library's own memory, or of ours, times many vectors."""
    made = {}
    keep = np.random.default_rng(1).random((40, 30)) < 0.2
    dense = np.where(keep, np.random.default_rng(2).standard_normal(keep.shape), 0).astype(np.float32)
    rows = np.concatenate([[0], np.cumsum(keep.sum(1))]).astype(np.int32)

    def make(rng, turn):
        x = draw(rng, 30)

        def call(new):
            if new not in made:
                gpu = dp.device("cuda").array if of_ours else new
                parts = dense[keep], rows, np.nonzero(keep)[1].astype(np.int32)
                made.clear()
                made[new] = dp.sparse.csr(*map(gpu, parts), shape=dense.shape)
            return dp.sparse.spmv(made[new], new(x), alpha=1.0 + turn)

        return call, (1.0 + turn) * (dense.astype(float) @ x)

    return make


FORMS = {"axpy": lambda: axpy, "gemv": lambda: gemv, "einsum": lambda: einsum, "lists": lambda: lists,
         "sparse": lambda: sparse(of_ours=False), "ours": lambda: sparse(of_ours=True)}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_calls_with_other_numbers_are_right_and_make_no_request(library, rng, ran, name):
    new, numbers, kind = library
    form = FORMS[name]()
    results, rights = [], []
    for turn in range(1, CALLS):
        call, right = form(rng, turn)
        results.append(call(new))
        rights.append(right)
    for turn, (result, right) in enumerate(zip(results, rights, strict=True)):  # nothing was waited for before
        parts = result if isinstance(result, list) else [result]
        assert all(isinstance(part, kind) for part in parts)
        found = np.concatenate([np.asarray(numbers(part), float) for part in parts])
        bound = 2e-3 if name in ("lists", "einsum") else 1e-4  # products of f32 may be TF32's
        np.testing.assert_allclose(found, right, rtol=0, atol=bound * np.abs(right).max(), err_msg=f"call {turn}")
    assert all(count <= REQUESTS for count in ran.values()), ran
