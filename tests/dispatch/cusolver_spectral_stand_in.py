"""More of cuSOLVER's routines over memory of the host: some of the eigenvalues, pairs of matrices, and what follows."""

# ruff: noqa: ARG001 - functions have the arguments of the library's

import importlib

import numpy as np

from dispatch.ops.linalg.spectral_reference import lapack, near_one, times_power

BY_INDEX, BY_VALUE = 1002, 1003
base = None  # the stand-in of the other routines, whose helpers these use


def install(monkeypatch, stand_in):
    """Add these routines to those of a stand-in, and put the kernels' stand-ins into the plans."""
    globals()["base"] = stand_in
    stand_in.X.update(X)
    stand_in.OLDER.update(OLDER)
    for module, kinds in KERNELS.items():
        for kind in kinds:
            monkeypatch.setattr(importlib.import_module(f"dispatch.ops.linalg.{module}"), kind.__name__, kind)
    monkeypatch.setattr(stand_in.calls.driver, "cuMemcpyHtoDAsync", upload, raising=False)


def upload(target, source, nbytes, stream):
    base.memory_at(target, nbytes)[...] = base.memory_at(source, nbytes)


def at_place(addresses, place, number=0):
    return addresses[place.operand] + place.offset + number * place.batch_stride


# -- kernels ----------------------------------------------------------------------------------------------------------
class FillNanAfterFound:
    def __init__(self, executor, found, target, batch):
        self.given = found, target, batch

    def enqueue(self, addresses):
        found, target, batch = self.given
        counts = base.strided(at_place(addresses, found), np.int64, (batch,), (1,))
        for number, count in enumerate(counts):
            one = base.of_batch(target, addresses, number)
            one[:, count:] = complex(np.nan, np.nan) if one.dtype.kind == "c" else np.nan


class ConvertSygvjStatus:
    def __init__(self, executor, info, of, batch):
        self.given = info, of.rows, batch

    def enqueue(self, addresses):
        info, n, batch = self.given
        statuses = base.strided(at_place(addresses, info), np.int32, (batch,), (1,))
        statuses[...] = [1 if one > n else n + one if one > 0 else one for one in statuses]


class ComplexVectors:
    def __init__(self, executor, values, source, target, batch):
        self.given = values, source, target, batch

    def enqueue(self, addresses):
        values, source, target, batch = self.given
        for number in range(batch):
            real, one = (base.of_batch(matrix, addresses, number) for matrix in (source, target))
            at = at_place(addresses, values, number)
            signs = base.strided(at, one.dtype, (len(one),), (1,)).imag
            for column, sign in enumerate(signs):
                first = column - (sign < 0)
                one[:, column] = real[:, first] + (1j * np.sign(sign) * real[:, first + 1] if sign else 0)


class MatchEigenvectors:
    def __init__(self, executor, values, others, source, target, info, status, batch):
        self.given = values, others, source, target, info, status, batch

    def enqueue(self, addresses):
        values, others, source, target, info, status, batch = self.given
        statuses, more = (base.strided(at_place(addresses, one), np.int32, (batch,), (1,)) for one in (info, status))
        statuses[...] = np.where(statuses == 0, more, statuses)
        for number in range(batch):
            one, made = (base.of_batch(matrix, addresses, number) for matrix in (source, target))
            w, left = (
                base.strided(at_place(addresses, place, number), one.dtype, (len(one),), (1,))
                for place in (values, others)
            )
            for column, value in enumerate(w):
                distances = np.abs(left.conj() - value)
                nearest = column if np.isnan(distances).all() else int(np.nanargmin(distances))
                made[:, column], left[nearest] = one[:, nearest], np.nan


class ZeroNonfinite:
    def __init__(self, executor, matrix, flags, batch):
        self.given = matrix, flags, batch

    def enqueue(self, addresses):
        matrix, flags, batch = self.given
        for number in range(batch):
            one = base.of_batch(matrix, addresses, number)
            found = not np.isfinite(one).all()
            base.strided(at_place(addresses, flags, number), np.int32, (1,), (1,))[...] = found
            if found:
                one[...] = 0


class MarkUnconverged:
    def __init__(self, executor, info, flags, of, batch):
        self.given = info, flags, batch

    def enqueue(self, addresses):
        *places, batch = self.given
        info, flags = (base.strided(at_place(addresses, one), np.int32, (batch,), (1,)) for one in places)
        info[flags != 0] = 1


# -- routines ---------------------------------------------------------------------------------------------------------
def chosen(asked, low, high, first, last, w):
    """Which of all eigenvalues a routine gives."""
    if asked == BY_INDEX:
        assert 1 <= first <= last <= len(w)
        return slice(first - 1, last)
    assert asked == BY_VALUE
    assert np.isfinite([low, high]).all()
    inside = np.flatnonzero((w > low) & (w <= high))
    return slice(inside[0], inside[-1] + 1) if inside.size else slice(0, 0)


def put_chosen(mode, wanted, w, vectors, a, values, found):
    """What is chosen comes first; the rest of the matrix is rubbish."""
    count = len(w[wanted])
    values[:count], values[count:] = w[wanted], 7
    found[0] = count
    a[...] = 7
    if mode:
        a[:, :count] = vectors[:, wanted]


def xsyevdx(mode, asked, uplo, n, kind, a, lda, low, high, first, last, found, real, w, _, *rest):
    a, real = base.columns(a, base.DTYPES[kind], n, n, lda), base.DTYPES[real]
    low, high = (base.strided(base.value(one), real, (1,), (1,))[0] for one in (low, high))
    name = "heevd" if a.dtype.kind == "c" else "syevd"
    values, vectors, status = lapack(name, a.dtype)(a, compute_v=int(mode), lower=uplo == base.LOWER)
    found = base.strided(base.value(found), np.int64, (1,), (1,))
    wanted = chosen(asked, low, high, first, last, values)
    put_chosen(mode, wanted, values, vectors, a, base.strided(base.value(w), real, (n,), (1,)), found)
    base.put_info(rest[-1], status)


def pair(dtype, problem, mode, uplo, n, a, lda, b, ldb, w):
    """The eigenvalues and vectors of a pair, and LAPACK's status."""
    a, b = base.columns(a, dtype, n, n, lda), base.columns(b, dtype, n, n, ldb)
    choices = {"itype": int(problem), "jobz": "V" if mode else "N", "uplo": "L" if uplo == base.LOWER else "U"}
    values, vectors, status = lapack("hegvd" if dtype.kind == "c" else "sygvd", dtype)(a, b, **choices)
    b[...] = 7
    w = base.strided(base.value(w), np.empty(0, dtype).real.dtype, (n,), (1,))
    return a, w, values, vectors, status


def sygvd(dtype, problem, mode, uplo, n, a, lda, b, ldb, w, work, size, info):
    a, w, values, vectors, status = pair(dtype, problem, mode, uplo, n, a, lda, b, ldb, w)
    a[...], w[...] = vectors if mode else 7, values
    base.put_info(info, status)


def sygvj(dtype, problem, mode, uplo, n, a, lda, b, ldb, w, work, size, info, settings):
    a, w, values, vectors, status = pair(dtype, problem, mode, uplo, n, a, lda, b, ldb, w)
    a[...], w[...] = vectors if mode else 7, values
    base.put_info(info, status - n if status > n else n + 1 if status else 0)


def sygvdx(dtype, problem, mode, asked, uplo, n, a, lda, b, ldb, low, high, first, last, found, w, work, size, info):
    a, w, values, vectors, status = pair(dtype, problem, mode, uplo, n, a, lda, b, ldb, w)
    found = base.strided(base.value(found), np.int32, (1,), (1,))
    put_chosen(mode, chosen(asked, low, high, first, last, values), values, vectors, a, w, found)
    base.put_info(info, status)


def sygv_of_many(problem, mode, uplo, n, kind, a, lda, step, _, b, ldb, step_b, real, w, step_w, __, batch, *rest):
    dtype = base.DTYPES[kind]
    assert step >= lda * n
    assert step_b >= ldb * n
    assert step_w >= n
    for number in range(batch):
        places = (base.value(one) + number * by * dtype.itemsize for one, by in ((a, step), (b, step_b)))
        first, second = places
        at = base.value(w) + number * step_w * base.DTYPES[real].itemsize
        one, values, found, vectors, status = pair(dtype, problem, mode, uplo, n, first, lda, second, ldb, at)
        one[...], values[...] = vectors if mode else 7, found
        base.put_info(rest[-1], status, number)


def xgeev(left, right, n, kind, a, lda, _, w, __, vl, ldvl, ___, vr, ldvr, ____, *rest):
    assert not left
    assert not base.value(vl)
    a = base.columns(a, base.DTYPES[kind], n, n, lda)
    assert np.isfinite(a).all()  # else cuSOLVER may end in CUSOLVER_STATUS_INTERNAL_ERROR
    scaled, exponent = near_one(a)
    *values, _, vectors, status = lapack("geev", a.dtype)(scaled, compute_vl=False, compute_vr=bool(right))
    found = times_power(values[0] if len(values) == 1 else values[0] + 1j * values[1], exponent)
    base.strided(base.value(w), found.dtype, (n,), (1,))[...] = found
    a[...] = 7
    if right:
        base.columns(vr, a.dtype, n, n, ldvr)[...] = vectors
    base.put_info(rest[-1], status)


def xgesvdr(job, job_v, m, n, k, more, iterations, kind, a, lda, real, s, _, u, ldu, __, v, ldv, ___, *rest):
    assert k + more < min(m, n)
    assert job == job_v
    a = base.columns(a, base.DTYPES[kind], m, n, lda)
    assert np.isfinite(a).all(), "CUSOLVER_STATUS_INTERNAL_ERROR"
    left, values, right, status = lapack("gesvd", a.dtype)(a, full_matrices=False)
    base.strided(base.value(s), base.DTYPES[real], (k,), (1,))[...] = values[:k]
    a[...] = 7
    if chr(job) == "S":
        base.columns(u, a.dtype, m, k, ldu)[...] = left[:, :k]
        base.columns(v, a.dtype, n, k, ldv)[...] = right[:k].conj().T
    base.put_info(rest[-1], status)


X = {"XsygvStridedBatched": sygv_of_many, "Xsyevdx": xsyevdx, "Xgeev": xgeev, "Xgesvdr": xgesvdr}
OLDER = {"sygvd": sygvd, "hegvd": sygvd, "sygvj": sygvj, "hegvj": sygvj, "sygvdx": sygvdx, "hegvdx": sygvdx}
KERNELS = {
    "cusolver_subset": (FillNanAfterFound, ConvertSygvjStatus),
    "steps": (ZeroNonfinite,),
    "cusolver_eig": (ComplexVectors, MarkUnconverged, MatchEigenvectors),
}
