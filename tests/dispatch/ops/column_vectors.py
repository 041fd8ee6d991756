"""cuBLAS's routines over vectors (level 1) on the host, by SciPy's BLAS and NumPy; a number goes to an address."""

import numpy as np
import scipy.linalg.blas as blas
from column_memory import LETTERS, memory, of_scipy, vector

from dispatch.keys import BF16, C64, C128, F16, F32, F64


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
}
