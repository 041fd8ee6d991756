"""A stand-in for cuBLAS on the host: its routines over column-major memory, by SciPy's BLAS and NumPy.

It is given what `dispatch.ops.blas` would have cuBLAS do, with addresses of the host, and looks at no request: so what
tests hold against a request's reference is how the request was put in cuBLAS's terms.
"""

import ctypes

import column_vectors
import numpy as np
import pytest
from column_memory import matrix, memory, of_scipy, op, put, vector

from dispatch.keys import F32
from dispatch.libraries.cublas.calls import Constant, Matrices, MatrixCopy, Operand, Routine, Scalar, Scratch, Zero

SAMPLED = 11  # no multiple of the periods by which forms vary


def host_cases(rows, cases_of):
    """The cases of some rows as parameters of tests: an eleventh of each row's, and all others, `exhaustive`."""
    found = []
    for place, row in enumerate(rows):
        cases = list(cases_of(row))
        few = cases[place % SAMPLED :: SAMPLED]
        others = [case for number, case in enumerate(cases) if number % SAMPLED != place % SAMPLED]
        found += [pytest.param(row, few, id=f"{row.name}-sample")] * bool(few)
        found += [pytest.param(row, others, id=f"{row.name}-others", marks=pytest.mark.exhaustive)] * bool(others)
    return found


def carry_out(tasks, arguments):
    """Do what cuBLAS would have been asked to, at these addresses."""
    for work in tasks:
        if isinstance(work, Zero):
            ctypes.memset(arguments[work.position], 0, work.nbytes)
        elif isinstance(work, Scratch):
            held = np.full(work.nbytes, 0xFF, np.uint8)  # NaN
            arguments = (*arguments, held.ctypes.data)
        elif isinstance(work, MatrixCopy):
            if len({arguments[one.pointer.operand] for one in (work.source, work.target)}) > 1:
                move(work.source, work.target, work.batch, arguments)
        else:
            assert isinstance(work, Routine)
            if work.skip_if_same and len({arguments[place] for place in work.skip_if_same}) == 1:
                continue
            if work.skip_if and all(arguments[place] == number for place, number in work.skip_if):
                continue
            given = [plain(argument, arguments) for argument in work.arguments]
            ROUTINES[work.name](work.dtype, *given)


def move(source, target, batch, arguments):
    """A copy of elements of any strides, by a kernel."""
    assert (source.rows, source.cols, source.dtype) == (target.rows, target.cols, target.dtype)
    views = []
    for one in (source, target):
        size, place = one.dtype.itemsize, one.pointer
        extents = ((batch, place.batch_stride), (one.rows, one.row_stride * size), (one.cols, one.col_stride * size))
        low = sum((extent - 1) * min(step, 0) for extent, step in extents)
        high = sum((extent - 1) * max(step, 0) for extent, step in extents) + size
        raw = (ctypes.c_char * (high - low)).from_address(arguments[place.operand] + place.offset + low)
        shape, steps = zip(*extents, strict=True)
        views.append(np.ndarray(shape, one.dtype.numpy, raw, -low, steps))
    views[1][...] = views[0]


def plain(argument, arguments):
    """What stands for an address or a number, as cuBLAS would see it."""
    if isinstance(argument, Operand):
        return arguments[argument.position] + argument.offset
    if isinstance(argument, Matrices):
        return [arguments[argument.position] + offset for offset in argument.offsets]
    if isinstance(argument, Scalar):
        return argument.dtype.numpy.type(arguments[argument.position])
    return argument.value if isinstance(argument, Constant) else argument


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
        assert beta != 1 or (alpha and k), "whether it looks at the diagonal then is the library's choice"
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


# -- level 2: vectors at an address, from the other end where they go backwards ------------------------------------
def copy(dtype, n, x, incx, y, incy):
    vector(y, n, incy, dtype.numpy)[...] = vector(x, n, incx, dtype.numpy)


def gemm(dtype, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    a = matrix(a, *((k, m) if trans_a else (m, k)), lda, dtype.numpy)
    b = matrix(b, *((n, k) if trans_b else (k, n)), ldb, dtype.numpy)
    c = matrix(c, m, n, ldc, dtype.numpy)
    put(c, (alpha * (op(a, trans_a) @ op(b, trans_b)) if alpha else 0) + (beta * c if beta else 0))


def product(found, alpha, beta, y):
    y[...] = (alpha * found if alpha else 0) + (beta * y if beta else 0)


def gemv(dtype, trans, m, n, alpha, a, lda, x, incx, beta, y, incy):
    long, short = (n, m) if trans else (m, n)
    a, x = matrix(a, m, n, lda, dtype.numpy), vector(x, short, incx, dtype.numpy)
    product(op(a, trans) @ x, alpha, beta, vector(y, long, incy, dtype.numpy))


def each_of(routine, operands):
    """A batched routine: the addresses of each operand are a list, at these places among the arguments."""

    def call(dtype, *given):
        *given, count = given
        for number in range(count):
            one = list(given)
            for position in operands:
                assert len(one[position]) == count
                one[position] = one[position][number]
            routine(dtype, *one)

    return call


def strided(routine, operands):
    """One whose operands lie at equal distances: each is an address, a step, and the elements to the next."""

    def call(dtype, *given, sizes=None):
        *given, count = given
        for number in range(count):
            one, skipped = list(given), []
            for position in operands:
                size = (sizes or {}).get(position, dtype.itemsize)
                one[position] += number * one[position + 2] * size
                skipped.append(position + 2)
            routine(dtype, *(value for place, value in enumerate(one) if place not in skipped))

    return call


def half_gemv(out):
    """What is summed in f32 and rounded to the dtype of the result."""

    def call(dtype, trans, m, n, alpha, a, lda, x, incx, beta, y, incy):
        long, short = (n, m) if trans else (m, n)
        a = matrix(a, m, n, lda, dtype.numpy).astype(np.float32)
        x = vector(x, short, incx, dtype.numpy).astype(np.float32)
        y = vector(y, long, incy, (out or dtype).numpy)
        y[...] = (alpha * (op(a, trans) @ x) if alpha else 0) + (beta * y.astype(np.float32) if beta else 0)

    return call


def half_gemv_strided(out):
    def call(dtype, *given):
        strided(half_gemv(out), (4, 7, 11))(dtype, *given, sizes={11: (out or dtype).itemsize})

    return call


def banded(ab, m, kl, ku):
    found = np.zeros((m, ab.shape[1]), ab.dtype)
    for i in range(m):
        for j in range(max(0, i - kl), min(ab.shape[1], i + ku + 1)):
            found[i, j] = ab[ku + i - j, j]
    return found


def gbmv(dtype, trans, m, n, kl, ku, alpha, ab, lda, x, incx, beta, y, incy):
    a = banded(matrix(ab, kl + ku + 1, n, lda, dtype.numpy), m, kl, ku)
    long, short = (n, m) if trans else (m, n)
    product(op(a, trans) @ vector(x, short, incx, dtype.numpy), alpha, beta, vector(y, long, incy, dtype.numpy))


def triangle_of(name, dtype, uplo, n, given):
    """The triangle that a routine is given, with zeros in the other, and what stands behind it."""
    if name[1] == "b":
        k, ab, ld, *rest = given
        held = matrix(ab, k + 1, n, ld, dtype.numpy)
        return (banded(held, n, 0, k) if uplo else banded(held, n, k, 0)), rest
    if name[1] == "p":
        ap, *rest = given
        held, found, place = memory(ap, n * (n + 1) // 2, dtype.numpy), np.zeros((n, n), dtype.numpy), 0
        for j in range(n):
            for i in range(j + 1) if uplo else range(j, n):
                found[i, j], place = held[place], place + 1
        return found, rest
    a, ld, *rest = given
    return (np.triu if uplo else np.tril)(matrix(a, n, n, ld, dtype.numpy)), rest


def symmetric(name):
    def call(dtype, uplo, n, *given):
        if name[1] == "b":
            k, alpha, *rest = given
            given = (k, *rest)
        else:
            alpha, *given = given
        half, (x, incx, beta, y, incy) = triangle_of(name, dtype, uplo, n, given)
        whole = half + (np.conj(half.T) if name[0] == "h" else half.T)
        np.fill_diagonal(whole, half.diagonal().real if name[0] == "h" else half.diagonal())
        product(whole @ vector(x, n, incx, dtype.numpy), alpha, beta, vector(y, n, incy, dtype.numpy))

    return call


def of_triangle(name):
    def call(dtype, uplo, trans, diag, n, *given):
        half, (x, incx) = triangle_of(name, dtype, uplo, n, given)
        if diag:
            np.fill_diagonal(half, 1)
        x = vector(x, n, incx, dtype.numpy)
        x[...] = op(half, trans) @ x if name.endswith("mv") else np.linalg.solve(op(half, trans), x)

    return call


def ger(name):
    def call(dtype, m, n, alpha, x, incx, y, incy, a, lda):
        x, y = vector(x, m, incx, dtype.numpy), vector(y, n, incy, dtype.numpy)
        a = matrix(a, m, n, lda, dtype.numpy)
        a[...] += alpha * np.outer(x, np.conj(y) if name == "gerc" else y)

    return call


def symmetric_outer(name):
    def call(dtype, uplo, n, alpha, x, incx, *rest):
        assert alpha, "cuBLAS returns at once, and leaves the imaginary parts of a diagonal"
        x = vector(x, n, incx, dtype.numpy)
        y, other = (np.conj, np.conj(alpha)) if name[0] == "h" else (np.asarray, alpha)
        if name.endswith("2"):
            at, incy, *rest = rest
            held = vector(at, n, incy, dtype.numpy)
            found = alpha * np.outer(x, y(held)) + other * np.outer(held, y(x))
        else:
            found = alpha * np.outer(x, y(x))
        if name[1] == "p":
            held, place = memory(rest[0], n * (n + 1) // 2, dtype.numpy), 0
            for j in range(n):
                for i in range(j + 1) if uplo else range(j, n):
                    held[place] += found[i, j]
                    if i == j and name[0] == "h":
                        held[place] = held[place].real
                    place += 1
            return
        a = matrix(*rest[:1], n, n, rest[1], dtype.numpy)
        found = a + found
        if name[0] == "h":
            np.fill_diagonal(found, found.diagonal().real)
        put(a, found, uplo)

    return call


HALVES = {"HSH": None, "HSS": F32, "TST": None, "TSS": F32}
ROUTINES = {
    **column_vectors.ROUTINES,
    **{name: symm(name) for name in ("symm", "hemm")},
    **{name: rank(name, 1) for name in ("syrk", "herk")},
    **{name: rank(name, 2) for name in ("syr2k", "her2k", "syrkx", "herkx")},
    **{name: symmetric(name) for name in ("symv", "hemv", "sbmv", "hbmv", "spmv", "hpmv")},
    **{name: of_triangle(name) for name in ("trmv", "trsv", "tbmv", "tbsv", "tpmv", "tpsv")},
    **{name: ger(name) for name in ("ger", "geru", "gerc")},
    **{name: symmetric_outer(name) for name in ("syr", "her", "syr2", "her2", "spr", "hpr", "spr2", "hpr2")},
    "trmm": trmm,
    "trsm": trsm,
    "trsmBatched": trsm_batched,
    "geam": geam,
    "dgmm": dgmm,
    "copy": copy,
    "gemm": gemm,
    "gemv": gemv,
    "gbmv": gbmv,
    "gemvBatched": each_of(gemv, (4, 6, 9)),
    "gemvStridedBatched": strided(gemv, (4, 7, 11)),
    "gemmBatched": each_of(gemm, (6, 8, 11)),
    "gemmStridedBatched": strided(gemm, (6, 9, 13)),
    **{f"{kind}gemvBatched": each_of(half_gemv(out), (4, 6, 9)) for kind, out in HALVES.items()},
    **{f"{kind}gemvStridedBatched": half_gemv_strided(out) for kind, out in HALVES.items()},
}
