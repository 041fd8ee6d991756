"""Direct solves of several patterns on the GPU, of many sizes, what is kept and told; rows run in test_sparse.py."""

import dataclasses

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import LinAlgError
from dispatch.keys import HOST

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
ROWS = [row for row in dp.TABLE.of("spsolve_batched") if row.min_arch != HOST and row.variant]
EPS = {"f4": 2e-7, "c8": 2e-7, "f8": 3e-16, "c16": 3e-16}


@pytest.fixture(autouse=True)
def with_cudss(skip_without):
    skip_without(ROWS[0])


def drawn(rng, shape, dtype):
    """Normal numbers of a dtype."""
    return (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)).astype(dtype)


def matrix_of(rng, n, dtype, kind="gen"):
    """A well conditioned sparse matrix of a kind, of some five elements in a row: of a grid where it is large."""
    if n > 400:
        side = int(np.sqrt(n))
        steps = (-side, -1, 1, side)
        found = sp.diags_array([np.ones(n - abs(step)) for step in steps], offsets=steps, shape=(n, n)).tocsr()
    else:
        found = sp.random_array((n, n), density=min(1.0, 4 / n), rng=rng, dtype="f8").tocsr()
    found = found.astype(dtype)
    found.data = drawn(rng, found.nnz, dtype)
    if kind != "gen":
        found = (found + (found.T if kind == "sym" else found.conj().T)) / 2
    sizes = np.abs(found).sum(axis=1) + 1
    signs = 1 if kind == "pos" else np.where(rng.random(n) < 0.5, -1, 1)
    return sp.csr_array(found + sp.diags_array(sizes * signs)).astype(dtype)


def systems_of(rng, sizes, dtype, kind="gen"):
    matrices = [matrix_of(rng, n, dtype, kind) for n in sizes]
    return matrices, [drawn(rng, (n, k) if k else n, dtype) for n, k in zip(sizes, [0, 3, 1, 0, 2] * len(sizes))]  # noqa: B905


def request_of(gpu, matrices, b, fixed=True, **choices):
    tensors = [S.sparse_tensor(a, device=gpu) for a in matrices]
    parts = [(one.fixed() if fixed else one).parts for one in tensors]
    return dp.BatchedSpsolveListRequest(*zip(*parts, strict=True), tuple(map(gpu.array, b)), **choices)


def are_solutions(matrices, b, x, dtype, but=()):
    for number, (a, right, found) in enumerate(zip(matrices, b, x, strict=True)):
        if number in but:
            continue
        wide = found.astype("c16" if dtype[0] == "c" else "f8")
        off = np.abs(right - a.astype(wide.dtype) @ wide).max()
        size = np.abs(a).sum(axis=1).max() * np.abs(wide).max() + np.abs(right).max()
        assert off <= 8 * len(right) * EPS[dtype] * size, number


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("kind", ["gen", "sym", "her", "pos"])
def test_many_matrices_of_many_sizes(kind, dtype, gpu, rng):
    sizes = [1, 2, 3, 5000, *rng.integers(1, 400, 60).tolist(), 12000]
    matrices, b = systems_of(rng, sizes, dtype, kind)
    *x, info = dp.run(request_of(gpu, matrices, b, assume_a=kind))
    assert not info.numpy().any()
    are_solutions(matrices, b, [one.numpy() for one in x], dtype)


@pytest.mark.parametrize("uplo", ["lower", "upper"])
def test_one_triangle_of_each(uplo, gpu, rng):
    matrices, b = systems_of(rng, (40, 7, 300), "f8", "pos")
    half = [sp.csr_array(sp.tril(a) if uplo == "lower" else sp.triu(a)) for a in matrices]
    x = S.spsolve([S.sparse_tensor(a, device=gpu) for a in half], list(map(gpu.array, b)), assume_a="pos", uplo=uplo)
    are_solutions(matrices, b, [one.numpy() for one in x], "f8")


def test_one_matrix_alone_and_hundreds(gpu, rng):
    for count in (1, 700):  # of more than 480 the addresses come in several launches
        matrices, b = systems_of(rng, rng.integers(1, 60, count).tolist(), "f8")
        *x, info = dp.run(request_of(gpu, matrices, b))
        assert not info.numpy().any()
        are_solutions(matrices, b, [one.numpy() for one in x], "f8")


def test_factors_are_kept_and_values_vectors_and_addresses_may_change(gpu, rng):
    matrices, b = systems_of(rng, (50, 900, 3, 120), "f8")
    request = request_of(gpu, matrices, b, stamp=1)
    for stamp, factor in ((1, 1.0), (1, 1.0), (2, 3.0), (2, 3.0), (3, 0.5)):
        for values, a in zip(request.values, matrices, strict=True):
            values.copy_from(a.data * factor)
        b = [drawn(rng, one.shape, "f8") for one in b]
        given = dataclasses.replace(request, b=tuple(map(gpu.array, b)), stamp=stamp)
        *x, info = dp.run(given)
        assert not info.numpy().any()
        are_solutions([a * factor for a in matrices], b, [one.numpy() for one in x], "f8")
    for turn in range(70):
        others = tuple(gpu.array(a.data * (1 + turn)) for a in matrices)
        given = dataclasses.replace(request, values=others, b=tuple(map(gpu.array, b)), stamp=None)
        *x, info = dp.run(given)
        assert not info.numpy().any()
        are_solutions([a * (1 + turn) for a in matrices], b, [one.numpy() for one in x], "f8")


def test_without_a_promise_patterns_may_change_in_place(gpu, rng):
    matrices, b = systems_of(rng, (80, 33), "f8")
    request = request_of(gpu, matrices, b, fixed=False)
    for _ in range(3):
        *x, info = dp.run(request)
        assert not info.numpy().any()
        are_solutions(matrices, b, [one.numpy() for one in x], "f8")
        order = rng.permutation(80)
        matrices[0] = sp.csr_array(matrices[0][order][:, order])
        matrices[0].sort_indices()
        for name, array in (
            ("values", matrices[0].data),
            ("rows", matrices[0].indptr),
            ("columns", matrices[0].indices),
        ):
            getattr(request, name)[0].copy_from(array.astype(getattr(request, name)[0].numpy().dtype))


@pytest.mark.parametrize("wrong", [0, 2, 4])
@pytest.mark.parametrize("how", ["zero", "rank", "nan", "negative"])
def test_one_that_cannot_be_factorized_is_told_and_the_others_are_right(how, wrong, gpu, rng):
    kind = "pos" if how == "negative" else "gen"
    matrices, b = systems_of(rng, (60, 200, 45, 7, 150), "f8", kind)
    request = request_of(gpu, matrices, b, assume_a=kind)
    good, a = matrices[wrong].data.copy(), matrices[wrong]
    if how == "rank":
        first = slice(a.indptr[0], a.indptr[1])
        bad = good.copy()
        bad[first] = 0
    else:
        bad = {"zero": 0 * good, "nan": good * np.nan, "negative": -good}[how]
    for _ in range(2):
        request.values[wrong].copy_from(bad)
        *x, info = (one.numpy() for one in dp.run(request))
        assert (info != 0).tolist() == [number == wrong for number in range(5)], info
        assert (info[wrong] > 0) == (how == "negative")
        are_solutions(matrices, b, x, "f8", but=(wrong,))
        request.values[wrong].copy_from(good)
        *x, info = (one.numpy() for one in dp.run(request))
        assert not info.any(), "once all can be factorized they are so together again"
        are_solutions(matrices, b, x, "f8")
    request.values[wrong].copy_from(bad)
    tensors = [
        S.SparseTensor(*parts)
        for parts in zip(request.values, request.rows, request.columns, request.form, strict=True)
    ]
    with pytest.raises(LinAlgError) as caught:
        S.spsolve(tensors, list(request.b), assume_a=kind)
    assert [*caught.value.statuses] == [(wrong,)]


def test_what_is_no_number_in_b_is_no_failure(gpu, rng):
    matrices, b = systems_of(rng, (60, 200, 45), "f8")
    b[1][7, 2] = np.inf
    *x, info = (one.numpy() for one in dp.run(request_of(gpu, matrices, b)))
    assert not info.any()
    are_solutions(matrices, b, x, "f8", but=(1,))


def test_refinements_and_views(gpu, rng):
    matrices, b = systems_of(rng, (60, 200, 45), "f4")
    request = request_of(gpu, matrices, b, refinements=2)
    wide = [gpu.array(np.repeat(one, 2, axis=0))[::2] for one in b]  # with gaps between elements, and by rows
    *x, info = (one.numpy() for one in dp.run(dataclasses.replace(request, b=tuple(wide))))
    assert not info.any()
    are_solutions(matrices, b, x, "f4")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_lists_of_torchs_tensors(gpu, rng):
    torch = pytest.importorskip("torch")
    assert gpu is dp.device()
    matrices, b = systems_of(rng, (60, 200, 45), "f8")
    theirs = [torch.from_numpy(a.toarray()).to_sparse_csr().cuda() for a in matrices]
    x = S.spsolve(theirs, [torch.from_numpy(one).cuda() for one in b])
    assert all(isinstance(one, torch.Tensor) and one.is_cuda for one in x)
    are_solutions(matrices, b, [one.cpu().numpy() for one in x], "f8")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, rng):
    matrices, b = systems_of(rng, (60, 200, 45), "f8")
    with dp.Supervisor("cuda:0", streams=2, isolation=isolation) as sup:
        request = request_of(sup.device, matrices, b)
        futures = [sup.submit(request) for _ in range(4)]
        for future in futures:
            *x, info = (one.numpy() for one in future.result(120))
            assert not info.any()
            are_solutions(matrices, b, x, "f8")
