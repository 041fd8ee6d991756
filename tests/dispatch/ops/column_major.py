"""A stand-in for cuBLAS on the host: its routines over column-major memory, by SciPy's BLAS and NumPy.

It is given what `dispatch.ops.blas` would have cuBLAS do, with addresses of the host, and looks at no request: so what
tests hold against a request's reference is how the request was put in cuBLAS's terms.
"""

import ctypes

import numpy as np
import scipy.linalg.blas as blas
from numpy.lib.stride_tricks import as_strided

from dispatch.libraries.cublas.calls import Constant, Copy, Matrices, Operand, Routine, Scalar

LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}


def memory(address, count, dtype):
    """So many elements at an address."""
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def matrix(address, rows, columns, ld, dtype):
    """A column-major matrix at an address."""
    assert ld >= max(rows, 1), f"a leading dimension of {ld} for {rows} rows"
    if rows * columns == 0:
        return np.zeros((rows, columns), dtype)
    whole = memory(address, ld * (columns - 1) + rows, dtype)
    return as_strided(whole, (rows, columns), (dtype.itemsize, ld * dtype.itemsize))


def op(a, trans):
    return (a, a.T, np.conj(a.T))[trans]


def carry_out(works, arguments):
    """Do what cuBLAS would have been asked to, at these addresses."""
    for work in works:
        if isinstance(work, Copy):
            if arguments[work.source] != arguments[work.target]:
                source, target = (arguments[place] + work.start for place in (work.source, work.target))
                ctypes.memmove(target, source, work.nbytes)
        else:
            assert isinstance(work, Routine)
            if work.unless_same and len({arguments[place] for place in work.unless_same}) == 1:
                continue
            given = [plain(argument, arguments) for argument in work.arguments]
            ROUTINES[work.name](work.dtype, *given)


def plain(argument, arguments):
    """What stands for an address or a number, as cuBLAS would see it."""
    if isinstance(argument, Operand):
        return arguments[argument.place] + argument.offset
    if isinstance(argument, Matrices):
        return [arguments[argument.place] + offset for offset in argument.offsets]
    if isinstance(argument, Scalar):
        return argument.dtype.numpy.type(arguments[argument.place])
    return argument.value if isinstance(argument, Constant) else argument


def of_scipy(routine, dtype):
    return getattr(blas, f"{LETTERS[dtype.name]}{routine}")


def put(target, found, uplo=None):
    """Write a result, or the triangle of it that is one."""
    if uplo is None:
        target[...] = found
    else:
        here = np.triu(np.ones(target.shape, bool)) if uplo else np.tril(np.ones(target.shape, bool))
        target[here] = found[here]


def symm(name):
    def call(dtype, side, uplo, m, n, alpha, a, lda, b, ldb, beta, c, ldc):
        order = n if side else m
        a, b = matrix(a, order, order, lda, dtype.numpy), matrix(b, m, n, ldb, dtype.numpy)
        c = matrix(c, m, n, ldc, dtype.numpy)
        before = c if beta else np.zeros_like(c)
        put(c, of_scipy(name, dtype)(alpha, a, b, beta, before, side=side, lower=1 - uplo))

    return call


def rank(name, operands):
    def call(dtype, uplo, trans, n, k, alpha, *rest):
        (beta, c, ldc), given = rest[-3:], rest[:-3]
        shape = (k, n) if trans else (n, k)
        held = [matrix(given[i], *shape, given[i + 1], dtype.numpy) for i in range(0, 2 * operands, 2)]
        c = matrix(c, n, n, ldc, dtype.numpy)
        before = c if beta else np.zeros_like(c)
        adjoint = 2 if name.startswith("he") else 1
        assert trans in (0, adjoint) or (trans == 1 and adjoint == 1)
        if name.endswith("kx"):
            a, b = held
            found = alpha * (op(a, adjoint) @ b if trans else a @ op(b, adjoint)) + (beta * c if beta else 0)
        elif k == 0:
            found = beta * before
        else:
            found = of_scipy(name, dtype)(alpha, *held, beta=beta, c=before, trans=trans, lower=1 - uplo)
        if adjoint == 2:
            found = found.copy()
            np.fill_diagonal(found, found.diagonal().real)
        put(c, found, uplo)

    return call


def trmm(dtype, side, uplo, trans, diag, m, n, alpha, a, lda, b, ldb, c, ldc):
    order = n if side else m
    a, b = matrix(a, order, order, lda, dtype.numpy), matrix(b, m, n, ldb, dtype.numpy)
    found = of_scipy("trmm", dtype)(alpha, a, b, side=side, lower=1 - uplo, trans_a=trans, diag=diag)
    put(matrix(c, m, n, ldc, dtype.numpy), found)


def trsm(dtype, side, uplo, trans, diag, m, n, alpha, a, lda, b, ldb):
    order = n if side else m
    a, b = matrix(a, order, order, lda, dtype.numpy), matrix(b, m, n, ldb, dtype.numpy)
    put(b, of_scipy("trsm", dtype)(alpha, a, b, side=side, lower=1 - uplo, trans_a=trans, diag=diag))


def trsm_batched(dtype, side, uplo, trans, diag, m, n, alpha, a, lda, b, ldb, count):
    assert len(a) == len(b) == count
    for one, other in zip(a, b, strict=True):
        trsm(dtype, side, uplo, trans, diag, m, n, alpha, one, lda, other, ldb)


def geam(dtype, trans_a, trans_b, m, n, alpha, a, lda, beta, b, ldb, c, ldc):
    found = np.zeros((m, n), dtype.numpy)
    for trans, factor, at, ld in ((trans_a, alpha, a, lda), (trans_b, beta, b, ldb)):
        held = matrix(at, *((n, m) if trans else (m, n)), ld, dtype.numpy)
        if at == c:
            assert trans == 0
            assert ld == ldc, "in place all must lie alike"
        found = found + (dtype.numpy.type(factor) * op(held, trans) if factor else 0)
    put(matrix(c, m, n, ldc, dtype.numpy), found)


def dgmm(dtype, mode, m, n, a, lda, x, incx, c, ldc):
    count = n if mode else m
    x = memory(x, (count - 1) * incx + 1, dtype.numpy)[::incx]
    a = matrix(a, m, n, lda, dtype.numpy)
    put(matrix(c, m, n, ldc, dtype.numpy), a * x if mode else a * x[:, None])


ROUTINES = {
    **{name: symm(name) for name in ("symm", "hemm")},
    **{name: rank(name, 1) for name in ("syrk", "herk")},
    **{name: rank(name, 2) for name in ("syr2k", "her2k", "syrkx", "herkx")},
    "trmm": trmm,
    "trsm": trsm,
    "trsmBatched": trsm_batched,
    "geam": geam,
    "dgmm": dgmm,
}
