"""A stand-in for cuBLAS on the host: its routines over column-major memory, by SciPy's BLAS and NumPy.

It is given what `dispatch.ops.blas` would have cuBLAS do, with addresses of the host, and looks at no request: so what
tests hold against a request's reference is how the request was put in cuBLAS's terms.
"""

import ctypes

import numpy as np
import pytest
import scipy.linalg.blas as blas
from numpy.lib.stride_tricks import as_strided

from dispatch.keys import BF16, C64, C128, F16, F32, F64
from dispatch.libraries.cublas.calls import Constant, Matrices, Moved, Operand, Routine, Scalar, Scratch, Zero

SAMPLED = 11  # no multiple of the periods by which forms vary
LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}


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
        if isinstance(work, Zero):
            ctypes.memset(arguments[work.place], 0, work.nbytes)
        elif isinstance(work, Scratch):
            held = np.full(work.nbytes, 0xFF, np.uint8)  # NaN
            arguments = (*arguments, held.ctypes.data)
        elif isinstance(work, Moved):
            if len({arguments[one.place.operand] for one in (work.source, work.target)}) > 1:
                move(work.source, work.target, work.batch, arguments)
        else:
            assert isinstance(work, Routine)
            if work.unless_same and len({arguments[place] for place in work.unless_same}) == 1:
                continue
            if work.unless and all(arguments[place] == number for place, number in work.unless):
                continue
            given = [plain(argument, arguments) for argument in work.arguments]
            ROUTINES[work.name](work.dtype, *given)


def move(source, target, batch, arguments):
    """A copy of elements of any strides, by a kernel."""
    assert (source.rows, source.cols, source.dtype) == (target.rows, target.cols, target.dtype)
    views = []
    for one in (source, target):
        size, place = one.dtype.itemsize, one.place
        extents = ((batch, place.step), (one.rows, one.row * size), (one.cols, one.col * size))
        low = sum((extent - 1) * min(step, 0) for extent, step in extents)
        high = sum((extent - 1) * max(step, 0) for extent, step in extents) + size
        raw = (ctypes.c_char * (high - low)).from_address(arguments[place.operand] + place.offset + low)
        shape, steps = zip(*extents, strict=True)
        views.append(np.ndarray(shape, one.dtype.numpy, raw, -low, steps))
    views[1][...] = views[0]


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
def vector(address, n, step, dtype):
    """The elements of a vector in their order."""
    assert step != 0
    if n == 0:
        return np.zeros(0, dtype)
    return memory(address, (n - 1) * abs(step) + 1, dtype)[:: abs(step)][:: 1 if step > 0 else -1]


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


# -- level 1: a number is written to an address -----------------------------------------------------------------------
def axpy(dtype, n, alpha, x, incx, y, incy):
    y = vector(y, n, incy, dtype.numpy)
    y[...] += alpha * vector(x, n, incx, dtype.numpy) if alpha else 0


def scal(dtype, n, alpha, x, incx):
    assert incx > 0
    vector(x, n, incx, dtype.numpy)[...] *= alpha


DTYPES = {dtype.cuda: dtype for dtype in (F16, BF16, F32, F64, C64, C128)}


def typed(of_each):
    """A routine that is told dtypes: the same one, over vectors of one dtype, computed with in f32."""

    def call(dtype, *given):
        *given, compute = given
        assert compute == F32.cuda
        return of_each(dtype, *given)

    return call


def axpy_ex(dtype, n, alpha, alpha_type, x, x_type, incx, y, y_type, incy):
    assert alpha_type == F32.cuda
    assert DTYPES[x_type] is DTYPES[y_type] is dtype
    x, y = vector(x, n, incx, dtype.numpy), vector(y, n, incy, dtype.numpy)
    y[...] = np.float32(alpha) * x.astype(np.float32) + y.astype(np.float32)


def scal_ex(dtype, n, alpha, alpha_type, x, x_type, incx):
    assert (alpha_type, DTYPES[x_type]) == (F32.cuda, dtype)
    assert incx > 0
    x = vector(x, n, incx, dtype.numpy)
    x[...] = np.float32(alpha) * x.astype(np.float32)


def dot_ex(dtype, n, x, x_type, incx, y, y_type, incy, result, result_type):
    assert DTYPES[x_type] is DTYPES[y_type] is DTYPES[result_type] is dtype
    x, y = (vector(*one, dtype.numpy).astype(np.float32) for one in ((x, n, incx), (y, n, incy)))
    memory(result, 1, dtype.numpy)[0] = x @ y


def nrm2_ex(dtype, n, x, x_type, incx, result, result_type):
    assert DTYPES[x_type] is DTYPES[result_type] is dtype
    assert incx > 0
    memory(result, 1, dtype.numpy)[0] = np.sqrt((vector(x, n, incx, dtype.numpy).astype(np.float32) ** 2).sum())


def rot_ex(dtype, n, x, x_type, incx, y, y_type, incy, c, s, cs_type):
    assert DTYPES[x_type] is DTYPES[y_type] is DTYPES[cs_type] is dtype
    rotated(n, x, incx, y, incy, memory(c, 1, dtype.numpy)[0], memory(s, 1, dtype.numpy)[0], dtype.numpy, np.float32)


def rotated(n, x, incx, y, incy, c, s, dtype, work):
    x, y = vector(x, n, incx, dtype), vector(y, n, incy, dtype)
    c, s, one, other = c.astype(work), s.astype(work), x.astype(work), y.astype(work)
    x[...], y[...] = c * one + s * other, c * other - np.conj(s) * one


def rot(real_sine):
    def call(dtype, n, x, incx, y, incy, c, s):
        real = np.zeros(0, dtype.numpy).real.dtype
        c, s = memory(c, 1, real)[0], memory(s, 1, real if real_sine else dtype.numpy)[0]
        rotated(n, x, incx, y, incy, c, s, dtype.numpy, dtype.numpy)

    return call


def swap(dtype, n, x, incx, y, incy):
    x, y = vector(x, n, incx, dtype.numpy), vector(y, n, incy, dtype.numpy)
    x[...], y[...] = y.copy(), x.copy()


def rotm(dtype, n, x, incx, y, incy, param):
    x, y = vector(x, n, incx, dtype.numpy), vector(y, n, incy, dtype.numpy)
    x[...], y[...] = of_scipy("rotm", dtype)(x, y, memory(param, 5, dtype.numpy))


def rotg(dtype, a, b, c, s):
    """As LAPACK's; SciPy does not give r, and reads half of a complex c."""
    a, b, s = (memory(one, 1, dtype.numpy) for one in (a, b, s))
    c = memory(c, 1, a.real.dtype)
    size = np.sqrt(abs(a[0]) ** 2 + abs(b[0]) ** 2)
    if not dtype.is_complex:
        c[0], s[0] = of_scipy("rotg", dtype)(a[0], b[0])
        r = size if (a[0] if abs(a[0]) > abs(b[0]) else b[0]) >= 0 else -size
        b[0] = s[0] if abs(a[0]) > abs(b[0]) else 1 / c[0] if c[0] else 1
        b[0] *= size > 0
        a[0] = r
        return
    phase = a[0] / abs(a[0])
    c[0], s[0] = abs(a[0]) / size, phase * np.conj(b[0]) / size
    a[0], b[0] = phase * size, np.nan


def rotmg(dtype, d1, d2, x1, y1, param):
    """SciPy does not give what becomes of the numbers: they follow from the matrix."""
    d1, d2, x1, y1 = (memory(one, 1, dtype.numpy) for one in (d1, d2, x1, y1))
    found = of_scipy("rotmg", dtype)(d1[0], d2[0], x1[0], y1[0])
    memory(param, 5, dtype.numpy)[:] = found
    flag, h11, h21, h12, h22 = found
    if flag == -2:
        return
    if flag == -1 and not np.any(found[1:]):
        d1[0] = d2[0] = x1[0] = 0
        return
    h11, h22 = (1, 1) if flag == 0 else (h11, h22)
    h12, h21 = (1, -1) if flag == 1 else (h12, h21)
    determinant = h11 * h22 - h12 * h21
    # H takes diag(d1, d2) to diag(d1', d2') by congruence with its inverse.
    inverse = np.array(((h22, -h12), (-h21, h11)), np.float64) / determinant
    scaled = inverse.T @ np.diag((np.float64(d1[0]), np.float64(d2[0]))) @ inverse
    x1[0] = h11 * x1[0] + h12 * y1[0]
    d1[0], d2[0] = scaled[0, 0], scaled[1, 1]


def number(name):
    def call(dtype, n, x, incx, *rest):
        x = vector(x, n, incx, dtype.numpy)
        if name.startswith("dot"):
            y, incy, result = rest
            found = ((np.conj(x) if name == "dotc" else x) * vector(y, n, incy, dtype.numpy)).sum()
        else:
            assert incx > 0
            (result,) = rest
            found = getattr(blas, f"i{LETTERS[dtype.name]}amax")(x) + 1 if name == "iamax" else OF_ONE[name](x)
        kind = np.int32 if name.startswith("i") else found.dtype
        memory(result, 1, np.dtype(kind))[0] = found

    return call


OF_ONE = {
    "asum": lambda x: (abs(x.real) + abs(x.imag)).sum(),
    "nrm2": lambda x: np.sqrt((abs(x) ** 2).sum()),
    "iamin": lambda x: (abs(x.real) + abs(x.imag)).argmin() + 1,
}
HALVES = {"HSH": None, "HSS": F32, "TST": None, "TSS": F32}
ROUTINES = {
    **{name: number(name) for name in ("asum", "nrm2", "iamax", "iamin", "dot", "dotu", "dotc")},
    "AxpyEx": typed(axpy_ex),
    "ScalEx": typed(scal_ex),
    "DotEx": typed(dot_ex),
    "Nrm2Ex": typed(nrm2_ex),
    "RotEx": typed(rot_ex),
    "rot": rot(real_sine=False),
    "srot": rot(real_sine=True),
    "drot": rot(real_sine=True),
    "rotg": rotg,
    "rotm": rotm,
    "rotmg": rotmg,
    "swap": swap,
    "axpy": axpy,
    "scal": scal,
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
