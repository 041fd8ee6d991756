"""Direct solves on the GPU: batches, factors in the host's memory, factors of f32, and solutions that are refined."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import HOST
from dispatch.ops.sparse.cases import cases
from dispatch.row_check import check_row

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")

S = dp.sparse
ROWS = [row for row in dp.TABLE.of("spsolve_batched") if row.min_arch != HOST]
EPS = {"f4": 2e-7, "c8": 2e-7, "f8": 3e-16, "c16": 3e-16}
MANY = 300  # of matrices: older versions of cuDSS have been wrong from some 160 on


@pytest.fixture(autouse=True)
def with_cudss(skip_without):
    skip_without(ROWS[0])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, gpu, rng):
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


def poisson(*extents):
    """Poisson's equation on a grid."""
    lines = [sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in extents]
    found = lines[0]
    for line in lines[1:]:
        found = sp.kron(found, sp.eye_array(line.shape[0])) + sp.kron(sp.eye_array(found.shape[0]), line)
    return found.tocsr()


def drawn(rng, shape, dtype):
    """Normal numbers of a dtype."""
    return (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)).astype(dtype)


def batch_of(rng, count, dtype, kind="gen"):
    """A pattern, and the elements of so many matrices of a kind at its places."""
    a = poisson(12, 13)
    a.sort_indices()
    rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))
    on_diagonal = rows == a.indices
    values = np.where(on_diagonal, 0, drawn(rng, (count, a.nnz), dtype))
    if kind != "gen":
        dense = np.zeros((count, *a.shape), dtype)
        dense[:, rows, a.indices] = values
        dense = dense + dense.swapaxes(1, 2).conj()
        values = dense[:, rows, a.indices]
    values[:, on_diagonal] = 20
    return a.astype(dtype), values.astype(dtype)


def solved(a, values, x, b, where=None):
    """Assert that solutions of a batch are solutions, by their residuals."""
    worst = 0
    for number in range(len(values)) if where is None else where:
        one = sp.csr_array((values[number].astype(np.complex128), a.indices, a.indptr), a.shape)
        left = np.abs(b[number] - one @ x[number]).max()
        size = abs(one).sum(axis=1).max() * np.abs(x[number]).max() + np.abs(b[number]).max()
        worst = max(worst, left / size if np.isfinite(left) else np.inf)
    assert worst <= 20 * EPS[values.dtype.str[1:]], f"the residual is {worst:.1e}"


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("kind", ["gen", "her", "pos"])
@pytest.mark.parametrize("sides", [0, 1, 3, 16, 17])
def test_many_matrices_are_solved_together(sides, kind, dtype, gpu, rng):
    a, values = batch_of(rng, MANY, dtype, kind)
    b = drawn(rng, (MANY, a.shape[0], sides) if sides else (MANY, a.shape[0]), dtype)
    pattern = S.sparse_tensor(a, device=gpu).fixed()
    for turn in range(3):  # a rare fault shows in one of several
        x, info = S.spsolve(pattern, gpu.array(b), values=gpu.array(values), assume_a=kind, check=False)
        assert not info.numpy().any(), turn
        solved(a, values, x.numpy(), b)


@pytest.mark.parametrize("wrong", [0, 7, MANY - 1])
@pytest.mark.parametrize("kind", ["gen", "pos"])
def test_a_matrix_that_cannot_be_factorized_is_told_and_the_others_are_right(kind, wrong, gpu, rng):
    a, values = batch_of(rng, MANY, "f8", kind)
    values[wrong] = 0 if kind == "gen" else -values[wrong]
    b = rng.standard_normal((MANY, a.shape[0]))
    pattern = S.sparse_tensor(a, device=gpu).fixed()
    x, info = S.spsolve(pattern, gpu.array(b), values=gpu.array(values), assume_a=kind, check=False)
    assert np.flatnonzero(info.numpy()).tolist() == [wrong]
    assert (info.numpy()[wrong] > 0) == (kind == "pos")
    solved(a, values, x.numpy(), b, [number for number in range(MANY) if number != wrong])
    with pytest.raises(LinAlgError, match=rf"of matrix \[{wrong}\]"):
        S.splu(pattern, values=gpu.array(values), assume_a=kind)


@pytest.mark.parametrize("kind", ["gen", "pos"])
def test_factors_of_a_batch_are_kept_and_take_other_values(kind, gpu, rng):
    a, values = batch_of(rng, 20, "f8", kind)
    factors = S.splu(S.sparse_tensor(a, device=gpu), values=gpu.array(values), assume_a=kind)
    for factor in (1.0, 2.0, 0.5):
        if factor != 1:
            factors.refactorize(gpu.array(values * factor))
        for shape in ((20, 156), (20, 156, 3), (20, 156)):
            b = rng.standard_normal(shape)
            solved(a, factor * values, factors.solve(gpu.array(b)).numpy(), b)


def test_a_batch_over_torchs_tensors(gpu, rng):
    torch = pytest.importorskip("torch")
    del gpu
    a, values = batch_of(rng, 5, "f8")
    b = rng.standard_normal((5, 156))
    x = S.spsolve(
        S.sparse_tensor(a, device=dp.device()), torch.from_numpy(b).cuda(), values=torch.from_numpy(values).cuda()
    )
    assert isinstance(x, torch.Tensor)
    solved(a, values, x.cpu().numpy(), b)


# -- cuSOLVER ---------------------------------------------------------------------------------------------------------
def test_cusolver_factorizes_other_values_again(gpu, rng):
    a = (poisson(30, 40) + sp.random_array((1200, 1200), density=0.001, rng=rng)).tocsr()
    a.sort_indices()
    matrix = S.sparse_tensor(a.copy(), device=gpu).fixed()
    for stamp, factor in ((1, 1.0), (1, 1.0), (2, -0.5), (3, 2.0)):
        matrix.values.copy_from(a.data * factor)
        for shape in ((1200,), (1200, 3)):
            b = rng.standard_normal(shape)
            x, info = dp.spsolve(*matrix, gpu.array(b), library="cusolverRf", stamp=stamp)
            assert info.item() == 0
            np.testing.assert_allclose(factor * (a @ x.numpy()), b, atol=1e-9)
    matrix.values.copy_from(np.zeros(a.nnz))
    assert dp.spsolve(*matrix, gpu.array(np.ones(1200)), library="cusolverRf", stamp=4)[1].item() == -1
    matrix.values.copy_from(a.data)
    x, info = dp.spsolve(*matrix, gpu.array(np.ones(1200)), library="cusolverRf", stamp=5)
    assert info.item() == 0
    np.testing.assert_allclose(a @ x.numpy(), 1, atol=1e-9)


# -- factors in the host's memory -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gen", "sym", "pos"])
def test_factors_in_the_hosts_memory(kind, gpu, rng):
    a = poisson(24, 24, 24)
    matrix, b = S.sparse_tensor(a, device=gpu).fixed(), rng.standard_normal((a.shape[0], 2))
    with pytest.raises(BadRequest, match=r"device_memory: got 1; expected \d+ bytes or more") as caught:
        S.spsolve(matrix, gpu.array(b), assume_a=kind, memory="hybrid", device_memory=1)
    least = int(str(caught.value).partition("expected ")[2].split()[0])
    assert least > 1 << 16
    for limit in (None, least, 4 * least):
        x = S.spsolve(matrix, gpu.array(b), assume_a=kind, memory="hybrid", device_memory=limit).numpy()
        np.testing.assert_allclose(a @ x, b, atol=1e-9)
    factors = S.splu(matrix, assume_a=kind, memory="hybrid", device_memory=2 * least)
    for factor in (1, 3):
        if factor != 1:
            factors.refactorize(gpu.array(a.data * factor))
        np.testing.assert_allclose(factor * (a @ factors.solve(gpu.array(b)).numpy()), b, atol=1e-9)


# -- solutions that are refined ---------------------------------------------------------------------------------------
def backward(a, x, b):
    """The residual in roundoffs of f64, beside what is added up in it."""
    left = np.abs(b - a @ x).max(axis=0)
    return (left / (abs(a) @ np.abs(x) + np.abs(b)).max(axis=0)).max() / 2.0**-52


def uneven(n, rng):
    """A matrix whose rows and columns are of very different sizes."""
    a = sp.random_array((n, n), density=5 / n, rng=rng) + sp.eye_array(n)
    scale = sp.diags_array(10.0 ** rng.uniform(-4, 4, n))
    return (scale @ a).tocsr()


def test_cudss_refines_by_itself(gpu, rng):
    a, b = uneven(2000, rng), rng.standard_normal((2000, 2))
    matrix, right = S.sparse_tensor(a, device=gpu), gpu.array(b)
    plain, refined = (
        S.spsolve(matrix, right, check=False, **choices)[0].numpy() for choices in ({}, {"refinements": 3})
    )
    assert backward(a, refined, b) <= max(4.0, 1.5 * backward(a, plain, b))


@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("kind", ["gen", "sym", "pos"])
@pytest.mark.parametrize("uplo", [None, "lower", "upper"])
def test_factors_of_f32_give_solutions_of_f64(uplo, kind, dtype, gpu, rng):
    if kind == "gen" and uplo:
        pytest.skip("a general matrix is stored whole")
    a = poisson(40, 50, 6).astype(dtype)
    given = a if uplo is None else (sp.tril(a) if uplo == "lower" else sp.triu(a)).tocsr()
    matrix = S.sparse_tensor(given, device=gpu).fixed()
    factors = S.splu(matrix, assume_a=kind, uplo=uplo, precision="f32")
    for factor in (1.0, 2.0):
        if factor != 1:
            factors.refactorize(gpu.array(given.data * factor))
        for shape in ((a.shape[0],), (a.shape[0], 3)):
            b = drawn(rng, shape, dtype)
            assert backward(factor * a, factors.solve(gpu.array(b)).numpy(), b) < 200


def test_factors_of_f32_are_those_that_solve(gpu, rng):
    """Where they suffice no others are made, and the status is 0."""
    a = poisson(40, 40)
    request = dp.SpsolveRequest(*S.sparse_tensor(a, device=gpu), gpu.array(rng.standard_normal(1600)), precision="f32")
    x, info = dp.run(request)
    assert info.item() == 0
    assert backward(a, x.numpy(), request.b.numpy()) < 100
    assert request.bound.plan._full_factors is None


def test_what_factors_of_f32_do_not_suffice_for_is_solved_all_the_same(gpu, rng):
    q, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    bad = sp.csr_array(q * np.geomspace(1, 1e-10, 60) @ q.T)
    for a in (bad, poisson(8, 8) * 1e200, poisson(8, 8) * 1e-200):
        b = a @ rng.standard_normal(a.shape[0])
        x, info = S.spsolve(S.sparse_tensor(a, device=gpu), gpu.array(b), precision="f32", check=False)
        plain, other = S.spsolve(S.sparse_tensor(a, device=gpu), gpu.array(b), check=False)
        assert info.item() == other.item()
        np.testing.assert_array_equal(np.isfinite(x.numpy()), np.isfinite(plain.numpy()))
        if info.item() == 0:
            assert backward(a, x.numpy(), b) < 1000
    indefinite = S.sparse_tensor(sp.csr_array(np.diag([1.0, -1.0, 2.0])), device=gpu)
    with pytest.raises(LinAlgError, match="positive definite"):
        S.spsolve(indefinite, gpu.array(np.ones(3)), assume_a="pos", precision="f32")
