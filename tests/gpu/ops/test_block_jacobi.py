"""Block Jacobi on the GPU: every size against NumPy, and large systems by iteration; its rows run in test_sparse.py."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import LinAlgError
from dispatch.ops.sparse.krylov import NOT_FINITE

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
ITERATIONS = {"cg": dp.CgRequest, "bicgstab": dp.BicgstabRequest, "gmres": dp.GmresRequest, "minres": dp.MinresRequest}
EPS = {"f4": 2e-7, "c8": 2e-7, "f8": 3e-16, "c16": 3e-16}


def drawn(rng, shape, dtype):
    """Normal numbers of a dtype."""
    return (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)).astype(dtype)


def along(blocks, n):
    """The matrix of n rows that has these blocks along its diagonal."""
    count, size, _ = blocks.shape
    rows = np.arange(count)[:, None, None] * size + np.arange(size)[:, None] + np.zeros((1, 1, size), int)
    columns = rows.transpose(0, 2, 1)
    inside = (rows < n) & (columns < n)
    return sp.csr_array((blocks[inside], (rows[inside], columns[inside])), shape=(n, n))


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32])
def test_many_blocks_of_every_format_are_inverted(size, dtype, gpu, rng):
    n = 4000 * size + (size // 2 if size % 8 else 0)  # the last block is smaller, or not
    blocks = drawn(rng, (-(-n // size), size, size), dtype) + 3 * np.sqrt(size) * np.eye(size, dtype=dtype)
    beside = sp.diags_array([np.ones(n - size), np.ones(n - size)], offsets=[size, -size], shape=(n, n))
    a = (along(blocks, n) + beside).tocsr().astype(dtype)
    last = n - (len(blocks) - 1) * size
    expected = np.linalg.inv(blocks.astype(np.result_type(dtype, np.float64)))
    if last < size:
        expected[-1] = 0
        expected[-1, :last, :last] = np.linalg.inv(blocks[-1, :last, :last].astype(expected.dtype))
    matrices = [a, a.tocsc(), a.tocoo()]
    if last == size and size > 1:
        matrices.append(a.tobsr((2, size)))
    for matrix in matrices:
        out, info = dp.block_jacobi(*S.sparse_tensor(matrix, device=gpu), block_size=size)
        assert info.item() == 0
        np.testing.assert_allclose(out.numpy(), expected, atol=40 * EPS[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [1, 3, 8, 13, 16, 29, 32])
def test_absolute_values_of_many_blocks(size, dtype, gpu, rng):
    n = 1000 * size
    blocks = drawn(rng, (1000, size, size), dtype)
    blocks = blocks + blocks.transpose(0, 2, 1)
    out, info = dp.block_jacobi(*S.sparse_tensor(along(blocks, n), device=gpu), block_size=size, absolute=True)
    values, vectors = np.linalg.eigh(blocks.astype("f8"))
    found, least = out.numpy(), np.abs(values).min(axis=1)
    assert info.item() == 0
    wide = (vectors / np.abs(values)[:, None]) @ vectors.transpose(0, 2, 1)
    off = np.abs(found - wide).max(axis=(1, 2)) * least**2 / np.abs(values).max(axis=1)
    assert off.max() < 40 * size * EPS["f8"] + (EPS["f4"] if dtype == "f4" else 0)
    np.testing.assert_array_equal(found, found.transpose(0, 2, 1))


def test_a_singular_block_among_many_is_told_and_the_others_are_right(gpu, rng):
    blocks = rng.standard_normal((5000, 6, 6)) + 8 * np.eye(6)
    blocks[[1234, 4321]] = np.ones((6, 6)) / 3
    blocks[4999, 2, 2] = np.nan
    matrix = S.sparse_tensor(along(blocks, 30000), device=gpu)
    for _ in range(70):  # the plan is learnt, and launched as a graph
        out, info = dp.block_jacobi(*matrix, block_size=6)
        assert info.item() == 1235
    wrong = np.isnan(out.numpy()).all(axis=(1, 2))
    assert np.nonzero(wrong)[0].tolist() == [1234, 4321, 4999]
    np.testing.assert_allclose(out.numpy()[~wrong], np.linalg.inv(blocks[~wrong]), atol=1e-13)
    with pytest.raises(LinAlgError, match="block 1234, from row 7404 on"):
        S.block_jacobi(matrix, 6)


# -- iterations -------------------------------------------------------------------------------------------------------
def coupled(op, count, size, dtype, rng):
    """Points with several unknowns each, coupled strongly in a point and weakly from one to another."""
    part = drawn(rng, (count, size, size), "c16" if dtype[0] == "c" else "f8")
    turned, _ = np.linalg.qr(part)
    values = np.geomspace(1, 1e3, size) * rng.uniform(0.5, 2, (count, 1))
    if op == "minres":
        values[:, ::2] *= -1
    blocks = (turned * values[:, None, :]) @ turned.conj().transpose(0, 2, 1)
    if op in ("bicgstab", "gmres"):
        blocks = blocks @ np.linalg.qr(part + 3 * turned)[0]
    line = sp.diags_array([-0.1, 0.2, -0.1], offsets=[-1, 0, 1], shape=(count, count))
    return (along(blocks, count * size) + sp.kron(line, sp.eye_array(size))).tocsr().astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("op", ITERATIONS)
def test_large_systems_take_far_fewer_iterations_than_by_the_diagonal(op, dtype, gpu, rng):
    if op == "minres" and dtype.startswith("c"):
        pytest.skip("minres is for real matrices")
    size = 6
    a = coupled(op, 5000, size, dtype, rng)
    rtol = 1e-3 if dtype in ("f4", "c8") else 1e-9
    b = a @ drawn(rng, a.shape[0], dtype)
    matrix, right = S.sparse_tensor(a, device=gpu), gpu.array(b)
    m = S.block_jacobi(matrix, size, absolute=op == "minres")
    choices = {"rtol": rtol, "maxiter": 40 if op == "gmres" else 800}
    counts = []
    for how in ({"preconditioner": "jacobi"}, {"preconditioner": "block_jacobi", "M": m.inverses}):
        x, info, iterations, residual = dp.run(ITERATIONS[op](*matrix, right, **how, **choices))
        counts.append(iterations.item())
    assert info.item() == 0
    assert counts[1] < 0.3 * counts[0], counts
    left = b - a @ x.numpy()
    slack = 100 * EPS[dtype] * np.abs(a).sum(axis=1).max() * np.linalg.norm(x.numpy())
    if op != "minres":  # whose residual is in the norm of M
        assert np.linalg.norm(left) <= rtol * np.linalg.norm(b) + slack
        assert residual.item() <= rtol * np.linalg.norm(b) + slack
    for turn in range(8):  # other elements at the same places, in memory that comes anew
        scale = 1 + turn
        m.refactorize(gpu.array(a.data * np.dtype(dtype).type(scale)))
        x, info = getattr(S, op)(m.source, right, rtol=rtol, M=m)
        assert info.item() == 0
        if op != "minres":
            assert np.linalg.norm(b - scale * (a @ x.numpy())) <= rtol * np.linalg.norm(b) + scale * slack


@pytest.mark.parametrize("op", ITERATIONS)
def test_repeated_calls_follow_what_changes_in_place(op, gpu, rng):
    a = coupled(op, 60, 4, "f8", rng)
    matrix = S.sparse_tensor(a, device=gpu)
    m = S.block_jacobi(matrix, 4, absolute=op == "minres").inverses
    right, wrong = m.numpy().copy(), m.numpy().copy()
    wrong[33] = np.nan
    choices = {"rtol": 1e-9, **({"restart": 240} if op == "gmres" else {})}
    for turn in range(60):
        m.copy_from(wrong if turn % 3 == 2 else right)
        b = rng.standard_normal(240)
        x, info, *_ = getattr(dp, op)(*matrix, gpu.array(b), M=m, preconditioner="block_jacobi", **choices)
        assert info.item() == (NOT_FINITE if turn % 3 == 2 else 0)
        if turn % 3 != 2:
            np.testing.assert_allclose(a @ x.numpy(), b, atol=1e-3 if op == "minres" else 1e-5)


@pytest.mark.parametrize("op", ITERATIONS)
def test_two_runs_give_the_same_bits(op, gpu, rng):
    a = S.sparse_tensor(coupled(op, 3000, 5, "f8", rng), device=gpu)
    m = S.block_jacobi(a, 5, absolute=op == "minres").inverses
    b = gpu.array(rng.standard_normal(a.shape[0]))
    choices = {"M": m, "preconditioner": "block_jacobi", "rtol": 1e-6, "algorithm": "csr_alg2"}
    first, second = (getattr(dp, op)(*a, b, **choices)[0].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("op", ITERATIONS)
def test_an_inverse_that_is_none_ends_it_with_a_status_of_its_own(op, gpu):
    a = S.sparse_tensor(sp.csr_array(2 * np.eye(90)), device=gpu)
    m = S.block_jacobi(a, 3)
    found = m.inverses.numpy().copy()
    found[17] = np.nan
    x, info = getattr(S, op)(a, gpu.array(np.ones(90)), M=gpu.array(found))
    assert info.item() == NOT_FINITE
    assert np.isnan(x.numpy()).all()


def test_a_supervisor_runs_them(rng):
    a, b = coupled("cg", 200, 4, "f8", rng), rng.standard_normal(800)
    with dp.Supervisor("cuda:0", streams=2, isolation="process") as sup:
        matrix = S.sparse_tensor(a, device=sup.device)
        m, info = sup.submit(dp.BlockJacobiRequest(*matrix, block_size=4)).result(120)
        assert info.item() == 0
        choices = {"M": m, "preconditioner": "block_jacobi", "rtol": 1e-9}
        futures = [sup.submit(dp.CgRequest(*matrix, sup.device.array(k * b), **choices)) for k in range(1, 10)]
        for k, future in enumerate(futures, 1):
            x, status, *_ = future.result(120)
            assert status.item() == 0
            np.testing.assert_allclose(a @ x.numpy(), k * b, atol=1e-6 * k)
