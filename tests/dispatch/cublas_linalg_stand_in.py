"""cuBLAS's products and batched routines, and the kernels beside them, over memory of the host."""

# ruff: noqa: ARG001 - functions have the arguments of the library's

import ctypes
import inspect
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cublas as real
from dispatch.libraries.cublas import batched
from dispatch.libraries.cublas.calls import Constant, Operand
from dispatch.libraries.cusolver.row_permutations import MAX_SHARED, PermuteMode
from dispatch.ops.linalg.packed import expanded
from dispatch.ops.linalg.reference import lapack
from dispatch.ops.linalg.residuals import product_of_reflections

base = None  # the stand-in of cuSOLVER, whose helpers these use


def install(monkeypatch, stand_in):
    """Put these into the place of cuBLAS and of the kernels; gives the library, which counts."""
    globals()["base"] = stand_in
    library = BatchedLibrary()
    monkeypatch.setattr(batched, "cublas", library)
    monkeypatch.setattr(batched, "handle_of", lambda _: SimpleNamespace(follow=lambda _: "cublas"))
    for kind in (ConvertPivots, FormQ, RefactorizeSingular):
        monkeypatch.setattr(f"dispatch.ops.linalg.cublas.{kind.__name__}", kind)
    monkeypatch.setattr("dispatch.ops.linalg.cusolver_symmetric.ConvertPivots", ConvertPivots)
    for kind in (PermutationFromPivots, PermuteRows):
        monkeypatch.setattr(f"dispatch.ops.linalg.triangles.{kind.__name__}", kind)
    monkeypatch.setattr(stand_in.calls, "CallStep", Blas)
    monkeypatch.setattr(stand_in.calls, "BatchKernelStep", BatchKernelStep)
    return library


# -- kernels and products ---------------------------------------------------------------------------------------------
class BatchKernelStep:
    """A kernel of `reductions.py` by its name, of one matrix after the other."""

    def __init__(self, executor, name, dtype, batch, blocks, arguments, source):
        assert f"__global__ void {name}(" in source
        self.name, self.dtype, self.batch, self.arguments = name, dtype.numpy, batch, arguments

    def enqueue(self, addresses):
        real = np.empty(0, self.dtype).real.dtype

        def vector(place, number, size, kind=real):
            at = addresses[place.operand] + place.offset + number * size * np.dtype(kind).itemsize
            return base.strided(at, kind, (size,), (1,))

        def matrix(one, number):
            return base.of_batch(one, addresses, number)

        for number in range(self.batch):
            KERNELS[self.name](matrix, vector, self.dtype, number, *self.arguments)


def determinant(matrix, vector, dtype, number, lu, n, pivots, out, logarithm):
    diagonal = np.diag(matrix(lu, number)).astype(np.result_type(dtype, np.float64)) if n else np.ones(1)
    exchanged = vector(pivots, number, n, np.int64) != np.arange(n) + 1 if n else np.zeros(1)
    sign = (-1.0) ** np.count_nonzero(exchanged)
    if logarithm is None:
        vector(out, number, 1, dtype)[0] = np.prod(diagonal) * sign
        return
    sizes = np.abs(diagonal)
    vector(out, number, 1, dtype)[0] = sign * np.prod(diagonal / np.where(sizes > 0, sizes, 1))
    with np.errstate(divide="ignore"):
        vector(logarithm, number, 1)[0] = np.log(sizes).sum()


def reduce_columns(matrix, vector, dtype, number, source, rows, cols, out, step, kind):
    values = np.abs(matrix(source._replace(rows=rows, cols=cols), number)).astype(np.float64)
    made = vector(out, number, step)
    if not rows:
        made[:cols] = 0
    else:
        ways = (values.sum, lambda axis: np.sqrt((values**2).sum(axis=axis)), values.max, values.min)
        made[:cols] = (*ways, lambda axis: (values**2).sum(axis=axis))[kind](axis=0)


def reciprocals(matrix, vector, dtype, number, s, n, ratio, out, rank):
    values = vector(s, number, n)
    kept = ~(values <= ratio * values[0])
    if out is not None:
        vector(out, number, n)[...] = np.where(kept, 1 / np.where(kept, values, 1), 0)
    if rank is not None:
        vector(rank, number, 1, np.int64)[0] = (values > ratio * values[0]).sum()


def scale_rows(matrix, vector, dtype, number, target, rows, cols, factors, step):
    matrix(target._replace(rows=rows, cols=cols), number)[...] *= vector(factors, number, step)[:rows, None]


def first_zero(matrix, vector, dtype, number, source, n, info):
    diagonal = np.diag(matrix(source, number))[:n]
    vector(info, number, 1, np.int32)[0] = next((i + 1 for i, one in enumerate(diagonal) if one == 0), 0)


def expand_ldl(matrix, vector, dtype, number, source, n, pivots, outer, blocks, order, lower, hermitian):
    found = vector(pivots, number, n, np.int64)
    made = expanded(matrix(source, number), found, lower=bool(lower), hermitian=bool(hermitian))
    matrix(outer, number)[...], matrix(blocks, number)[...], vector(order, number, n, np.int64)[...] = made


def note_singular_blocks(matrix, vector, dtype, number, source, n, pivots, info, lower, hermitian):
    found, told = vector(pivots, number, n, np.int64), vector(info, number, 1, np.int32)
    _, d, _ = expanded(matrix(source, number), found, lower=bool(lower), hermitian=bool(hermitian))
    row = 0
    while row < n and told[0] == 0:
        size = 1 + (found[row] < 0)
        block = d[row : row + size, row : row + size]
        if block[0, 0] * block[-1, -1] == (block[0, 1] * block[1, 0] if size > 1 else 0):
            told[0] = row + 1
        row += size


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        *(determinant, reduce_columns, reciprocals, scale_rows, first_zero),
        *(expand_ldl, note_singular_blocks),
    )
}


class Blas:
    """A call of cuBLAS, by its name without the dtype's letter."""

    def __init__(self, executor, routine):
        self.routine = routine

    def enqueue(self, addresses):
        given = (addresses[a.position] + a.offset if isinstance(a, Operand) else a for a in self.routine.arguments)
        BLAS[self.routine.name](
            self.routine.dtype.numpy, *(one.value if isinstance(one, Constant) else one for one in given)
        )


def turned(a, turn):
    return (a, a.T, a.conj().T)[int(turn)]


def gemm_strided_batched(dtype, ta, tb, m, n, k, alpha, a, lda, step_a, b, ldb, step_b, beta, c, ldc, step_c, batch):
    for number in range(batch):
        at = (one + number * step * dtype.itemsize for one, step in ((a, step_a), (b, step_b), (c, step_c)))
        shapes = ((m, k) if int(ta) == 0 else (k, m), (k, n) if int(tb) == 0 else (n, k), (m, n))
        x, y, z = (
            base.columns(one, dtype, *shape, ld) for one, shape, ld in zip(at, shapes, (lda, ldb, ldc), strict=True)
        )
        z[...] = alpha * turned(x, ta) @ turned(y, tb) + (beta * z if beta else 0)


def trsm(dtype, side, uplo, turn, diag, m, n, alpha, a, lda, b, ldb):
    assert int(side) == 0
    kept = base.columns(a, dtype, m, m, lda)
    kept = np.tril(kept) if uplo == base.LOWER else np.triu(kept)
    x = base.columns(b, dtype, m, n, ldb)
    x[...] = alpha * lapack("trtrs", dtype)(kept, x, lower=uplo == base.LOWER, trans=int(turn))[0]


def trsm_batched(dtype, side, uplo, turn, diag, m, n, alpha, a, lda, b, ldb, batch):
    for one, other in zip(*(base.strided(base.value(p), np.int64, (batch,), (1,)) for p in (a, b)), strict=True):
        trsm(dtype, side, uplo, turn, diag, m, n, alpha, one, lda, other, ldb)


BLAS = {"gemmStridedBatched": gemm_strided_batched, "trsm": trsm, "trsmBatched": trsm_batched}


# -- cuBLAS's batched routines ----------------------------------------------------------------------------------------
def each(pointers, batch):
    return base.strided(base.value(pointers), np.int64, (batch,), (1,)).tolist()


def getrf_batched(dtype, n, pointers, lda, pivots, info, batch):
    held = base.strided(base.value(pivots), np.int32, (batch, n), (n, 1))
    for number, at in enumerate(each(pointers, batch)):
        a = base.columns(at, dtype, n, n, lda)
        before = a.copy()
        a[...], found, status = lapack("getrf", dtype)(a)
        if status:  # the library stops there
            a[status:, status:] = before[status:, status:]
            found[status:] = np.arange(status, n)
        held[number] = found + 1
        base.put_info(info, status, number)


def getrs_batched(dtype, trans, n, right, pointers, lda, pivots, others, ldb, info, batch):
    assert base.value(info), "the status is on the host"
    held = base.strided(base.value(pivots), np.int32, (batch, n), (n, 1))
    for number, (at, other) in enumerate(zip(each(pointers, batch), each(others, batch), strict=True)):
        b = base.columns(other, dtype, n, right, ldb)
        b[...] = lapack("getrs", dtype)(base.columns(at, dtype, n, n, lda), held[number] - 1, b, trans=int(trans))[0]


def geqrf_batched(dtype, m, n, pointers, lda, taus, info, batch):
    assert base.value(info), "the status is on the host"
    for at, tau in zip(each(pointers, batch), each(taus, batch), strict=True):
        a = base.columns(at, dtype, m, n, lda)
        a[...], found, *_ = lapack("geqrf", dtype)(a)
        base.strided(tau, dtype, (min(m, n),), (1,))[...] = found


def triangles_batched(dtype, side, uplo, trans, diag, m, n, alpha, pointers, lda, others, ldb, batch):
    assert (side, diag, base.strided(base.value(alpha), dtype, (1,), (1,))[0]) == (0, 0, 1)
    for at, other in zip(each(pointers, batch), each(others, batch), strict=True):
        a, b = base.columns(at, dtype, m, m, lda), base.columns(other, dtype, m, n, ldb)
        half = np.tril(a) if uplo == base.LOWER else np.triu(a)
        b[...] = np.linalg.solve((half, half.T, half.conj().T)[trans], b)


def triangle(dtype, side, uplo, trans, diag, m, n, alpha, a, lda, b, ldb):
    assert (int(side), base.strided(base.value(alpha), dtype, (1,), (1,))[0]) == (0, 1)
    half, x = base.columns(a, dtype, m, m, lda), base.columns(b, dtype, m, n, ldb)
    half = np.tril(half) if uplo == base.LOWER else np.triu(half)
    if diag:
        np.fill_diagonal(half, 1)
    with np.errstate(all="ignore"):
        singular = not half.diagonal().all()
        x[...] = np.nan if singular else lapack("trtrs", dtype)(half, x, lower=uplo == base.LOWER, trans=int(trans))[0]


def inverted(a):
    """The inverse and the status; of a singular matrix what is left half way."""
    lu, pivots, status = lapack("getrf", a.dtype)(a)
    return (lu, status) if status else lapack("getri", a.dtype)(lu, pivots)


def matinv_batched(dtype, n, pointers, lda, others, ldb, info, batch):
    assert n <= 32
    for number, (at, other) in enumerate(zip(each(pointers, batch), each(others, batch), strict=True)):
        columns, status = inverted(base.columns(at, dtype, n, n, lda).copy())
        base.columns(other, dtype, n, n, ldb)[...] = columns
        base.put_info(info, status, number)


def getri_batched(dtype, n, pointers, lda, pivots, others, ldb, info, batch):
    held = base.strided(base.value(pivots), np.int32, (batch, n), (n, 1))
    for number, (at, other) in enumerate(zip(each(pointers, batch), each(others, batch), strict=True)):
        assert at != other, "the library wants the inverse apart from the factors"
        lu = base.columns(at, dtype, n, n, lda).copy()
        singular = next((i + 1 for i, one in enumerate(np.diag(lu)) if one == 0), 0)
        found = np.full_like(lu, 7) if singular else lapack("getri", dtype)(lu, held[number] - 1)[0]
        base.columns(other, dtype, n, n, ldb)[...] = found
        base.put_info(info, singular, number)


def gels_batched(dtype, trans, m, n, right, pointers, lda, others, ldc, info, statuses, batch):
    assert (int(trans), m >= n) == (0, True)
    base.put_info(info, 0)  # on the host
    for number, (at, other) in enumerate(zip(each(pointers, batch), each(others, batch), strict=True)):
        a, c = base.columns(at, dtype, m, n, lda), base.columns(other, dtype, m, right, ldc)
        q, r = np.linalg.qr(a)
        status = next((i + 1 for i, one in enumerate(np.diag(r)) if one == 0), 0)
        c[:n] = 7 if status else lapack("trtrs", dtype)(r, q.conj().T @ c)[0]
        a[...], c[n:] = np.nan, np.nan  # so that nothing is taken for documented that is not
        base.put_info(statuses, status, number)


BATCHED = {
    "getrf": getrf_batched, "getrs": getrs_batched, "geqrf": geqrf_batched, "trsm": triangles_batched,
    "matinv": matinv_batched, "getri": getri_batched, "gels": gels_batched,
}  # fmt: skip


SINGLE = {"trsm_v2": triangle}


def check_arguments(name, arguments):
    """They are what the library's own function declares: sizes, enums of its own, memory."""
    declared = list(inspect.signature(getattr(real, name)).parameters.values())
    for parameter, argument in zip(declared[1:], arguments, strict=True):  # without the handle
        kind = parameter.annotation
        if kind == "int32_t":
            assert type(argument) is int, parameter
        elif "Mem[" in kind or "void_p" in kind:
            assert isinstance(argument, ctypes.c_void_p), parameter
        else:
            assert type(argument).__name__ == kind, parameter


class BatchedLibrary:
    """What `cudabind.sys.cublas` is to plans of many small matrices; `called` counts."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        plain = name.removeprefix("cublas")[1:]
        routine = SINGLE[plain] if plain in SINGLE else BATCHED[plain.removesuffix("Batched")]

        def unchecked(handle, *arguments):
            assert handle == "cublas"
            self.called.append(name)
            check_arguments(name, arguments)
            routine(base.LETTERS[name.removeprefix("cublas")[0]], *arguments)
            return 0

        return SimpleNamespace(unchecked=unchecked)


class ConvertPivots:
    def __init__(self, executor, source, target, count, *, widen):
        self.given = source, target, count, (np.int32, np.int64) if widen else (np.int64, np.int32)

    def enqueue(self, addresses):
        *places, count, kinds = self.given
        source, target = (
            base.strided(addresses[place.operand] + place.offset, kind, (count,), (1,))
            for place, kind in zip(places, kinds, strict=True)
        )
        target[...] = source


class PermutationFromPivots:
    """Exchanges one after another."""

    def __init__(self, executor, pivots, order, room, like, batch):
        assert (room is not None) == (like.rows > MAX_SHARED)
        assert (pivots.batch_stride, order.batch_stride) == (8 * like.rows, 4 * like.rows) or batch == 1
        self.given = pivots, order, like.rows, batch

    def enqueue(self, addresses):
        pivots, order, n, batch = self.given
        every, found = (
            base.strided(addresses[place.operand] + place.offset, kind, (batch, n), (n, 1))
            for place, kind in ((pivots, np.int64), (order, np.int32))
        )
        for row_permutations, rows in zip(every, found, strict=True):
            rows[...] = np.arange(n)
            for i, pivot in enumerate(row_permutations):
                assert i < pivot <= n
                rows[[i, pivot - 1]] = rows[[pivot - 1, i]]


class PermuteRows:
    def __init__(self, executor, source, target, order, batch, kind):
        self.given = source, target, order, batch, kind

    def enqueue(self, addresses):
        source, target, place, batch, kind = self.given
        at = addresses[place.operand] + place.offset
        orders = base.strided(at, np.int32, (batch, target.rows), (target.rows, 1))
        for number, order in enumerate(orders):
            x, y = (base.of_batch(one, addresses, number) for one in (source, target))
            assert kind is PermuteMode.IDENTITY or not np.shares_memory(x, y), "blocks read what others have written"
            if kind is PermuteMode.SCATTER:
                y[order] = x
            else:
                y[...] = np.eye(target.rows)[order] if kind is PermuteMode.IDENTITY else x[order]


class RefactorizeSingular:
    def __init__(self, executor, a, lu, pivots, info, batch):
        self.given = a, lu, pivots, info, batch

    def enqueue(self, addresses):
        a, lu, pivots, info, batch = self.given
        held = base.strided(addresses[pivots.operand] + pivots.offset, np.int32, (batch, a.rows), (a.rows, 1))
        statuses = base.strided(addresses[info.operand] + info.offset, np.int32, (batch,), (1,))
        for number in np.flatnonzero(statuses).tolist():
            source, target = (base.of_batch(matrix, addresses, number) for matrix in (a, lu))
            target[...], found, statuses[number] = lapack("getrf", source.dtype)(source)
            held[number] = found + 1


class FormQ:
    def __init__(self, executor, factors, tau, q, batch):
        self.given = factors, tau, q, batch

    def enqueue(self, addresses):
        factors, tau, q, batch = self.given
        size = q.dtype.itemsize
        for number in range(batch):
            h, target = (base.of_batch(matrix, addresses, number) for matrix in (factors, q))
            at = addresses[tau.operand] + tau.offset + number * tau.batch_stride
            found = base.strided(at, q.dtype.numpy, (tau.batch_stride // size,), (1,))
            target[...] = product_of_reflections(h, found)[:, : q.cols]
