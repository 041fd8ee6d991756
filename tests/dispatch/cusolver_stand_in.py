"""cuSOLVER's dense routines, and the kernels between them, over memory of the host: LAPACK's, as SciPy has it.

With it the plans of linear algebra run where no GPU is: all but the library and the kernels is what runs on one.
"""

# ruff: noqa: ARG001, ARG005 - functions have the arguments of the library's

import ctypes
import importlib.util
import inspect
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusolver_types
from cudabind.sys import cusolverDn as dn
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver import calls
from dispatch.ops.linalg.spectral_reference import lapack

spec = importlib.util.spec_from_file_location(
    "cusolver_memory_stand_in", Path(__file__).with_name("cusolver_memory_stand_in.py")
)
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
memory_at, strided, value, columns = memory.memory_at, memory.strided, memory.value, memory.columns
of_batch, Memory, Copy, FillNanWhere = memory.of_batch, memory.Memory, memory.Copy, memory.FillNanWhere
FlagNonfinite, PointerList = memory.FlagNonfinite, memory.PointerList

DTYPES = {dtype.cuda: dtype.numpy for dtype in (F32, F64, C64, C128)}
LETTERS = {"S": F32.numpy, "D": F64.numpy, "C": C64.numpy, "Z": C128.numpy}
LOWER = 0


# -- routines ---------------------------------------------------------------------------------------------------------
def put_info(pointer, status, number=0):
    strided(value(pointer), np.int32, (number + 1,), (1,))[number] = status


def potrf(uplo, a, info, number=0, *, spoils=False):
    c, status = lapack("potrf", a.dtype)(a, lower=uplo == LOWER, clean=0)
    kept = np.tri(*a.shape, dtype=bool) if uplo == LOWER else ~np.tri(*a.shape, k=-1, dtype=bool)
    a[kept] = c[kept]
    if spoils:
        a[~kept] = np.nan
    put_info(info, status, number)


def xpotrf(uplo, n, kind, a, lda, _, *rest):
    *_, info = rest
    potrf(uplo, columns(a, DTYPES[kind], n, n, lda), info)


def potrf_batched(dtype, uplo, n, pointers, lda, info, batch):
    for number, at in enumerate(strided(value(pointers), np.int64, (batch,), (1,))):
        potrf(uplo, columns(at, dtype, n, n, lda), info, number, spoils=True)  # the other triangle is its workspace


def potrs(uplo, c, b):
    b[...] = lapack("potrs", c.dtype)(c, b, lower=uplo == LOWER)[0]


def xpotrs(uplo, n, right, kind, a, lda, other, b, ldb, info):
    assert kind == other
    potrs(uplo, columns(a, DTYPES[kind], n, n, lda), columns(b, DTYPES[kind], n, right, ldb))
    put_info(info, 0)


def potrs_batched(dtype, uplo, n, right, a, lda, b, ldb, info, batch):
    assert right == 1
    lists = [strided(value(one), np.int64, (batch,), (1,)) for one in (a, b)]
    for c, x in zip(*lists, strict=True):
        factor = columns(c, dtype, n, n, lda)
        potrs(uplo, factor, columns(x, dtype, n, 1, ldb))
        if n > 64:  # cuSOLVER 12.0 writes the other triangle
            factor[np.triu_indices(n, 1) if uplo == LOWER else np.tril_indices(n, -1)] = np.nan
    put_info(info, 0)


def xgetrf(m, n, kind, a, lda, pivots, _, *rest):
    a = columns(a, DTYPES[kind], m, n, lda)
    lu, found, status = lapack("getrf", a.dtype)(a)
    a[...] = lu if np.isfinite(lu).all() else 2  # cuSOLVER 12.0 can leave finite numbers alone
    strided(value(pivots), np.int64, (min(m, n),), (1,))[...] = found + 1
    put_info(rest[-1], status)


def xgeqrf(m, n, kind, a, lda, _, tau, __, *rest):
    a = columns(a, DTYPES[kind], m, n, lda)
    made, found, *_ = lapack("geqrf", a.dtype)(a)
    a[...] = np.nan_to_num(made)
    strided(value(tau), a.dtype, (min(m, n),), (1,))[...] = np.nan_to_num(found)  # as cuSOLVER 12.0 has it
    put_info(rest[-1], 0)


def xtrtri(uplo, diag, n, kind, a, lda, *rest):
    a = columns(a, DTYPES[kind], n, n, lda)
    assert not np.isnan(a).any()
    a[...] = lapack("trtri", a.dtype)(a, lower=uplo == LOWER)[0]
    put_info(rest[-1], 0)


def potri(dtype, uplo, n, a, lda, work, size, info):
    a = columns(a, dtype, n, n, lda)
    kept = np.tri(n, dtype=bool) if uplo == LOWER else ~np.tri(n, k=-1, dtype=bool)
    a[kept] = lapack("potri", dtype)(a, lower=uplo == LOWER)[0][kept]
    put_info(info, 0)


def ormqr(dtype, side, turn, m, n, k, a, lda, tau, c, ldc, work, size, info):
    is_left = int(side) == 0
    is_complex = dtype.kind == "c"
    assert int(turn) in ((0, 2) if is_complex else (0, 1))
    c = columns(c, dtype, m, n, ldc)
    assert 0 < k <= (m if is_left else n)
    words = ("L" if is_left else "R", "N" if int(turn) == 0 else "C" if is_complex else "T")
    given = (columns(a, dtype, m if is_left else n, k, lda), strided(value(tau), dtype, (k,), (1,)), c, max(m, n) * 64)
    c[...] = lapack("unmqr" if is_complex else "ormqr", dtype)(*words, *given)[0]
    put_info(info, 0)


def orgqr(dtype, m, n, k, a, lda, tau, work, size, info):
    assert m >= n >= k
    a = columns(a, dtype, m, n, lda)
    name = "ungqr" if a.dtype.kind == "c" else "orgqr"
    a[...] = lapack(name, a.dtype)(a, strided(value(tau), dtype, (k,), (1,)))[0]
    put_info(info, 0)


def eigh(mode, uplo, a, w, info, number=0):
    name = "heevd" if a.dtype.kind == "c" else "syevd"
    values, vectors, status = lapack(name, a.dtype)(a, compute_v=int(mode), lower=uplo == LOWER)
    w[...], a[...] = values, vectors if mode else np.nan
    put_info(info, status, number)


def xsyevd(mode, uplo, n, kind, a, lda, real, w, _, *rest):
    eigh(mode, uplo, columns(a, DTYPES[kind], n, n, lda), strided(value(w), DTYPES[real], (n,), (1,)), rest[-1])


def each_eigh(mode, uplo, n, dtype, a, lda, real, w, info, batch):
    for number in range(batch):
        at = value(a) + number * n * lda * dtype.itemsize
        values = strided(value(w) + number * n * real.itemsize, real, (n,), (1,))
        eigh(mode, uplo, columns(at, dtype, n, n, lda), values, info, number)


def xsyev_batched(mode, uplo, n, kind, a, lda, real, w, _, *rest):
    *_, info, batch = rest
    each_eigh(mode, uplo, n, DTYPES[kind], a, lda, DTYPES[real], w, info, batch)


def syevj(dtype, mode, uplo, n, a, lda, w, work, size, info, settings, batch=1):
    for number in range(batch):  # cuSOLVER 12.0 gives finite numbers of a matrix with NaN
        one = columns(value(a) + number * lda * n * dtype.itemsize, dtype, n, n, lda)
        one[...] = np.nan_to_num(one)
    each_eigh(mode, uplo, n, dtype, a, lda, np.empty(0, dtype).real.dtype, w, info, batch)


def svd_of(a, s, info, *, full, number=0):
    u, values, vh, status = lapack("gesvd", a.dtype)(a, full_matrices=full)
    s[...], a[...] = values, np.nan
    put_info(info, status, number)
    return u, vh


def xgesvd(job_u, job_vt, m, n, kind, a, lda, real, s, _, u, ldu, __, vt, ldvt, ___, *rest):
    assert m >= n
    a, s = columns(a, DTYPES[kind], m, n, lda), strided(value(s), DTYPES[real], (n,), (1,))
    left, right = svd_of(a, s, rest[-1], full=chr(job_u) == "A")
    if chr(job_u) != "N":
        columns(u, a.dtype, *left.shape, ldu)[...] = left
        columns(vt, a.dtype, n, n, ldvt)[...] = right


def with_v(mode, econ, a, s, u, ldu, v, ldv, info, number=0):
    a[...] = np.nan_to_num(a)  # cuSOLVER 12.0's Jacobi gives finite numbers of a matrix with NaN
    left, right = svd_of(a, s, info, full=not econ, number=number)
    if mode:
        columns(u, a.dtype, *left.shape, ldu)[...] = left
        columns(v, a.dtype, a.shape[1], len(right), ldv)[...] = right.conj().T


def xgesvdp(mode, econ, m, n, kind, a, lda, real, s, _, u, ldu, __, v, ldv, ___, *rest):
    assert np.isfinite(columns(a, DTYPES[kind], m, n, lda)).all(), "cuSOLVER 12.0's call fails of NaN"
    a, s = columns(a, DTYPES[kind], m, n, lda), strided(value(s), DTYPES[real], (min(m, n),), (1,))
    with_v(mode, econ, a, s, u, ldu, v, ldv, rest[-2])
    perturbation = strided(value(rest[-1]), np.float64, (1,), (1,))
    perturbation[...] = 0
    if not s[-1] > 1e-4 * s[0]:  # as the library does where the decomposition fails, with a status of 0
        perturbation[...], s[...] = 1.2e3, 1.2e3


def gesvdj(dtype, mode, econ, m, n, a, lda, s, u, ldu, v, ldv, work, size, info, settings):
    s = strided(value(s), np.empty(0, dtype).real.dtype, (min(m, n),), (1,))
    with_v(mode, econ, columns(a, dtype, m, n, lda), s, u, ldu, v, ldv, info)


def gesvdj_batched(dtype, mode, m, n, a, lda, s, u, ldu, v, ldv, work, size, info, settings, batch):
    assert max(m, n) <= 32
    real, item = np.empty(0, dtype).real.dtype, dtype.itemsize
    for number in range(batch):
        values = strided(value(s) + number * min(m, n) * real.itemsize, real, (min(m, n),), (1,))
        at, left, right = (
            value(one) + number * ld * count * item for one, ld, count in ((a, lda, n), (u, ldu, m), (v, ldv, n))
        )
        with_v(mode, 0, columns(at, dtype, m, n, lda), values, left, ldu, right, ldv, info, number)


def gesvda(
    dtype, mode, rank, m, n, a, lda, step_a, s, step_s, u, ldu, step_u, v, ldv, step_v, work, size, info, norms, batch
):
    """The eigenvalues of Aᴴ·A, as the library takes them; finite numbers of what is not, as cuSOLVER 12.0 gives."""
    assert m >= n >= rank >= 1
    assert norms is None
    assert (step_a >= lda * n, step_s >= rank, step_u >= ldu * rank, step_v >= ldv * rank) == (True,) * 4
    real, item = np.empty(0, dtype).real.dtype, dtype.itemsize
    for number in range(batch):
        one = columns(value(a) + number * step_a * item, dtype, m, n, lda)
        one = np.nan_to_num(one, posinf=0, neginf=0)
        w, vectors = np.linalg.eigh(one.conj().T @ one)
        values = np.sqrt(np.maximum(w[::-1], 0))[:rank]
        strided(value(s) + number * step_s * real.itemsize, real, (rank,), (1,))[...] = values
        if mode:
            right = vectors[:, ::-1][:, :rank]
            columns(value(v) + number * step_v * item, dtype, n, rank, ldv)[...] = right
            left = columns(value(u) + number * step_u * item, dtype, m, rank, ldu)
            left[...] = one @ right / np.where(values, values, 1)
        put_info(info, 0, number)


PLAIN = {}  # those that are told no dtype
X = {
    "Xpotrf": xpotrf, "Xpotrs": xpotrs, "Xgetrf": xgetrf, "Xgeqrf": xgeqrf, "Xsyevd": xsyevd,
    "XsyevBatched": xsyev_batched, "Xgesvd": xgesvd, "Xgesvdp": xgesvdp, "Xtrtri": xtrtri,
}  # fmt: skip
OLDER = {
    "potrfBatched": potrf_batched, "potrsBatched": potrs_batched, "potri": potri,
    "ormqr": ormqr, "unmqr": ormqr, "orgqr": orgqr, "ungqr": orgqr, "syevj": syevj,
    "heevj": syevj, "syevjBatched": syevj, "heevjBatched": syevj, "gesvdj": gesvdj, "gesvdjBatched": gesvdj_batched,
    "gesvdaStridedBatched": gesvda,
}  # fmt: skip
WORK = 40
NUMBERS = (
    "int",
    "size_t",
    "cublas",
    "cusolver_int_t",
    "cusolverEigMode_t",
    "cusolverEigType_t",
    "cusolverEigRange_t",
    "cudaDataType",
    "float",
    "signed",
)
WITHOUT_PARAMS = ("Xtrtri", "Xsytrs")
BITS = {"int32_t": 32, "cusolver_int_t": 32, "int64_t": 64}


class Routine:
    """A function of the library, called as plans call it."""

    def __init__(self, name):
        self.name = name.removeprefix("cusolverDn")

    def __call__(self, *arguments):
        """One that tells the sizes of workspace."""
        self.counted(arguments)
        for argument in arguments:
            if hasattr(argument, "_obj"):
                argument._obj.value = WORK

    def counted(self, given):
        """As many arguments as the library's own function has, each of its kind: a number, or an address."""
        declared = inspect.signature(getattr(dn, f"cusolverDn{self.name}"))
        kinds = [str(one.annotation) for one in declared.parameters.values()]
        assert len(given) == len(kinds), self.name
        for argument, kind in zip(given[1:], kinds[1:], strict=True):
            is_number = isinstance(argument, (int, float, np.integer))
            assert is_number == kind.startswith(NUMBERS), f"{self.name}: {argument!r} for {kind}"
        for argument, kind in zip(given, kinds, strict=True):
            bits, enum = BITS.get(kind), getattr(dn, kind, None) or getattr(cusolver_types, kind, None)
            if bits:
                assert -(2 ** (bits - 1)) <= int(argument) < 2 ** (bits - 1), (self.name, kind, argument)
            elif isinstance(enum, type) and issubclass(enum, IntEnum):
                assert argument in list(enum), (self.name, kind, argument)

    def unchecked(self, handle, *arguments):
        name = self.name
        self.counted((handle, *arguments))
        if name in PLAIN:
            PLAIN[name](*arguments)
        elif name in X:
            X[name](*arguments[name not in WITHOUT_PARAMS :])
        else:
            OLDER[name[1:]](LETTERS[name[0]], *arguments)
        return 0


class Library:
    def __getattr__(self, name):
        known = name.removeprefix("cusolverDn").removesuffix("_bufferSize")
        is_routine = name.startswith("cusolverDn") and (known in PLAIN or known in X or known[1:] in OLDER)
        return Routine(name) if is_routine else getattr(dn, name)


class Settings:
    """Choices of Jacobi's method, each by a function that the library has."""

    handle = None

    def __init__(self, *names):
        assert all(hasattr(dn, name) for name in names)

    def set(self, function, value):
        assert hasattr(dn, function)
        assert value > 0


class Handle:
    params = SimpleNamespace(handle=None)

    def follow(self):
        return None

    def memory(self, executor, purpose, nbytes):
        return Memory(nbytes) if nbytes else None


waited = []  # a stream for each time that the host waited for it, since pivots were written


def zero(address, value, nbytes, stream):
    memory_at(address, nbytes)[...] = value


def executor_of(monkeypatch):
    """What plans are made for; `monkeypatch` puts this file in the library's place."""
    waited.clear()
    monkeypatch.setattr(calls, "dn", Library())
    monkeypatch.setattr(calls, "handle_of", lambda executor: Handle())
    monkeypatch.setattr(calls, "driver", SimpleNamespace(cuMemsetD8Async=zero, cuStreamSynchronize=waited.append))
    for kind in (Copy, FlagNonfinite, FillNanWhere, PointerList):
        monkeypatch.setattr(calls, kind.__name__, kind)
    workspace, target = SimpleNamespace(c_ptr=ctypes.c_void_p(256)), SimpleNamespace(value=0)
    return SimpleNamespace(workspace=workspace, target=target, stream=None, refuse_capture=lambda what, **_: None)
