"""cuSPARSE's functions of sparse vectors, sparse products, three diagonals and conversions, over memory of the host."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusparse
from dispatch.keys import C64, C128, F32, F64

spec = importlib.util.spec_from_file_location("cusparse_memory", Path(__file__).with_name("cusparse_memory.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
from_memory = vars(memory)
BSR, COO, CSC, CSR, DTYPES, INDICES, INTERNAL_ERROR, INVALID_VALUE, ITEMS, NOT_SUPPORTED, WORK = (
    from_memory[name]
    for name in (
        *("BSR", "COO", "CSC", "CSR", "DTYPES"),
        *("INDICES", "INTERNAL_ERROR", "INVALID_VALUE", "ITEMS", "NOT_SUPPORTED", "WORK"),
    )
)
address_of, array_at, memory_at, number_at = (
    from_memory[name] for name in ("address_of", "array_at", "memory_at", "number_at")
)

MISALIGNED = "a misaligned address, which ends the process"


class Storage:
    """What the library of the stand-in has beside products and triangles."""

    # -- sparse vectors -----------------------------------------------------------------------------------------------
    def _CreateSpVec(self, handle, size, nnz, indices, values, index, base, value_type):
        assert 0 < nnz <= size
        given = {"size": size, "nnz": nnz, "indices": address_of(indices), "values": address_of(values)}
        self.put(handle, SimpleNamespace(index=int(index), base=int(base), value_type=int(value_type), **given))

    def _SpVecSetValues(self, handle, values):
        self.of(handle).values = values

    def both(self, x, y):
        x, y = self.of(x), self.of(y)
        assert (x.size, x.value_type) == (y.m, y.value_type)
        assert not self.on_device
        indices = array_at(x.indices, INDICES[x.index], x.nnz) - x.base
        return indices, array_at(x.values, DTYPES[x.value_type], x.nnz), y.array()

    def refuses(self, x):
        """The parts of a sparse vector are at multiples of 16 bytes."""
        x = self.of(x)
        return NOT_SUPPORTED if x.indices % 16 or x.values % 16 else 0

    def _Gather(self, handle, y, x):
        if self.refuses(x):
            return NOT_SUPPORTED
        indices, values, dense_ = self.both(x, y)
        values[...] = dense_[indices]
        return None

    def _Scatter(self, handle, x, y):
        if self.refuses(x):
            return NOT_SUPPORTED
        indices, values, dense_ = self.both(x, y)
        dense_[indices] = values
        return None

    def _Axpby(self, handle, alpha, x, beta, y):
        if self.refuses(x):
            return NOT_SUPPORTED
        indices, values, dense_ = self.both(x, y)
        kind = self.of(y).value_type
        dense_[...] = number_at(beta, kind) * dense_
        dense_[indices] += number_at(alpha, kind) * values
        return None

    def _Rot(self, handle, c, s, x, y):
        if self.refuses(x):
            return NOT_SUPPORTED
        indices, values, dense_ = self.both(x, y)
        kind = self.of(y).value_type
        c, s = (number_at(one, F32.cuda if DTYPES[kind].itemsize == 2 else kind) for one in (c, s))
        work = np.complex128 if values.dtype.kind == "c" else np.float64
        before, beside = values.astype(work), dense_[indices].astype(work)
        values[...] = (c * before + s * beside).astype(values.dtype)
        dense_[indices] = (c * beside - s * before).astype(values.dtype)
        return None

    on_device = False

    def _SetPointerMode(self, handle, mode):
        self.on_device = mode == cusparse.cusparsePointerMode_t.CUSPARSE_POINTER_MODE_DEVICE

    def _SpVV_bufferSize(self, handle, op, x, y, result, kind, size):
        if not address_of(result):
            return INVALID_VALUE
        size._obj.value = WORK
        return None

    def _SpVV(self, handle, op, x, y, result, kind, buffer):
        assert self.on_device
        assert int(op) in (0, 2)
        self.on_device = False
        if self.refuses(x):
            return NOT_SUPPORTED
        indices, values, dense_ = self.both(x, y)
        self.work_in(buffer)
        values = values.conj() if op == 2 else values
        array_at(address_of(result), values.dtype, 1)[...] = (values * dense_[indices]).sum()
        return None

    # -- sparse products ----------------------------------------------------------------------------------------------
    def twice(self, given, stage):
        """A function that tells the size of its memory first; whether it is called with that."""
        *_, work, size, buffer = given
        work = self.of(work)
        if buffer is None:
            size._obj.value = WORK
            return False
        assert size._obj.value == WORK
        memory_at(address_of(buffer), WORK)[...] = 0xFF
        setattr(work, stage, True)
        return True

    def _SpGEMM_workEstimation(self, *given):
        _, op_a, op_b, _, a, b, beta, c, kind, *_ = given
        assert (int(op_a), int(op_b), number_at(beta, int(kind))) == (0, 0, 0)
        assert (self.of(a).format, self.of(b).format, self.of(c).format) == (CSR, CSR, CSR)
        assert self.of(c).nnz == 0
        self.twice(given, "estimated")

    def _SpGEMM_estimateMemory(self, *given):
        *front, work, share, first, buffer, second = given
        assert 0 < share.value <= 1
        if self.twice((*front, work, first, buffer), "sized"):
            second._obj.value = WORK

    def _SpGEMM_compute(self, *given):
        _, _, _, alpha, a, b, _, c, kind, algorithm, work, *_ = given
        if int(algorithm) in (1, 2):  # those of SpGEMMreuse
            return INTERNAL_ERROR
        state = self.of(work)
        assert state.estimated
        assert int(algorithm) not in (4, 5) or state.sized
        if self.twice(given, "computed"):
            a, b, c = map(self.of, (a, b, c))
            counts = [(matrix.dense(np.ones(matrix.nnz)) != 0).astype(int) for matrix in (a, b)]
            state.mask = counts[0] @ counts[1] > 0
            state.product = number_at(alpha, int(kind)) * (a.dense() @ b.dense())
            c.nnz = int(state.mask.sum())
        return None

    def _SpGEMM_copy(self, *given):
        _, _, _, _, _, _, _, c, _, _, work = given
        c, state = self.of(c), self.of(work)
        assert state.computed
        row, column = np.nonzero(state.mask)
        order = np.lexsort((-column, row))  # the library promises no order within a row
        row, column = row[order], column[order]
        array_at(c.values, DTYPES[c.value_type], c.nnz)[...] = state.product[row, column]
        array_at(c.columns, INDICES[c.kinds[1]], c.nnz)[...] = column + c.base
        ends = np.concatenate([[0], np.cumsum(state.mask.sum(axis=1))])
        array_at(c.rows, INDICES[c.kinds[0]], c.m + 1)[...] = ends + c.base

    # -- sparse products of fixed patterns ----------------------------------------------------------------------------
    def patterns(self, given, stage, before):
        """The matrices of a step over patterns alone, in its order, and its state; the sizes are told first."""
        _, op_a, op_b, a, b, c, algorithm, work, *rooms = given
        assert (int(op_a), int(op_b)) == (0, 0)
        assert int(algorithm) in (0, 1, 2)
        a, b, c, state = map(self.of, (a, b, c, work))
        assert before is None or getattr(state, before)
        assert a.base == b.base == 0
        assert INDICES[a.kinds[0]] == INDICES[a.kinds[1]] == np.int32
        sizes, buffers = rooms[::2], rooms[1::2]
        if buffers[0] is None:
            for size in sizes:
                size._obj.value = WORK
            return None
        for size, buffer in zip(sizes, buffers, strict=True):
            assert size._obj.value == WORK
            memory_at(address_of(buffer), WORK)[...] = 7
        setattr(state, stage, True)
        return a, b, c, state, buffers

    def _SpGEMMreuse_workEstimation(self, *given):
        found = self.patterns(given, "estimated", None)
        assert self.of(given[5]).nnz == 0
        if found:
            a, b, _, state, _ = found
            state.of = tuple((one.rows, one.columns, one.nnz) for one in (a, b))

    def _SpGEMMreuse_nnz(self, *given):
        found = self.patterns(given, "computed", "estimated")
        if found:
            a, b, c, state, buffers = found
            counts = [(matrix.dense(np.ones(matrix.nnz)) != 0).astype(int) for matrix in (a, b)]
            state.mask = counts[0] @ counts[1] > 0
            c.nnz, state.buffers = int(state.mask.sum()), [address_of(buffers[2])]
            array_at(c.rows, np.int32, c.m + 1)[...] = np.concatenate([[0], np.cumsum(state.mask.sum(axis=1))])

    def _SpGEMMreuse_copy(self, *given):
        found = self.patterns(given, "copied", "computed")
        if found:
            _, _, c, state, buffers = found
            state.buffers.append(address_of(buffers[0]))
            state.places = np.nonzero(state.mask)
            array_at(c.columns, np.int32, c.nnz)[...] = state.places[1]
            state.target = c.rows, c.columns

    def _SpGEMMreuse_compute(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, work):
        a, b, c, state = map(self.of, (a, b, c, work))
        assert state.copied
        assert state.of == tuple((one.rows, one.columns, one.nnz) for one in (a, b)), "of other patterns"
        assert state.target == (c.rows, c.columns)
        assert all((memory_at(buffer, WORK) == 7).all() for buffer in state.buffers), "the analysis was overwritten"
        product = number_at(alpha, int(kind)) * (a.dense() @ b.dense())
        values = array_at(c.values, DTYPES[c.value_type], c.nnz)
        values[...] = product[state.places] + number_at(beta, int(kind)) * values

    # -- three diagonals ----------------------------------------------------------------------------------------------
    def gtsv2(self, letter, n, columns, low, diagonal, high, b, ld, buffer, *, pivoting):
        dtype = {"S": F32, "D": F64, "C": C64, "Z": C128}[letter].numpy
        self.work_in(buffer)
        assert n >= 3
        assert ld >= n
        low, diagonal, high = (array_at(address_of(one), dtype, n) for one in (low, diagonal, high))
        assert low[0] == high[-1] == 0
        a = np.diag(diagonal.astype(np.complex128)) + np.diag(low[1:], -1) + np.diag(high[:-1], 1)
        assert pivoting or (np.abs(diagonal) > 1).all()
        flat = array_at(address_of(b), dtype, (columns - 1) * ld + n)
        lines = np.lib.stride_tricks.as_strided(flat, (columns, n), (ld * dtype.itemsize, dtype.itemsize))
        x = np.linalg.solve(a, lines.T)
        lines.T[...] = x if dtype.kind == "c" else x.real

    def many(self, letter, n, low, diagonal, high, b, count, stride, buffer):
        for number in range(count):
            behind = number * stride * ITEMS[letter]
            one = [address_of(given) + behind for given in (low, diagonal, high, b)]
            self.gtsv2(letter, n, 1, *one, n, buffer, pivoting=False)

    def __getattr__(self, name):
        found = re.fullmatch(r"_([SDCZ])gtsv2(_nopivot|StridedBatch|)(_bufferSizeExt|)", name)
        if found is None:
            return self.function(name)
        letter, kind, asks = found.groups()
        if asks:
            return lambda *given: setattr(given[-1]._obj, "value", WORK)
        if kind == "StridedBatch":
            return lambda _, n, *rest: self.many(letter, n, *rest)
        return lambda _, *given: self.gtsv2(letter, *given, pivoting=not kind)

    # -- conversions --------------------------------------------------------------------------------------------------
    def _SparseToDense(self, handle, a, b, algorithm, buffer):
        a, b = self.of(a), self.of(b)
        assert a.format != BSR
        assert a.value_type == b.value_type
        assert a.format != COO or a.is_at_vectors(), MISALIGNED
        self.work_in(buffer)
        target, (row, column, values) = b.array(), a.places()
        target[row, column] = values  # and nothing else

    def _Xcoo2csr(self, handle, rows, nnz, m, ends, base):
        row = array_at(address_of(rows), np.int32, nnz) - int(base)
        counts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=m))])
        array_at(address_of(ends), np.int32, m + 1)[...] = counts + int(base)

    def _Xcsr2coo(self, handle, ends, nnz, m, rows, base):
        row = np.repeat(np.arange(m), np.diff(array_at(address_of(ends), np.int32, m + 1)))
        array_at(address_of(rows), np.int32, nnz)[...] = row + int(base)

    def _Csr2cscEx2_bufferSize(self, handle, m, n, nnz, *rest):
        *places, _, _, _, _, size = rest
        if not all(map(address_of, places)):
            return INVALID_VALUE
        size._obj.value = WORK
        return None

    def _Csr2cscEx2(self, handle, m, n, nnz, *rest):
        *places, kind, action, base, _, buffer = rest
        assert action == cusparse.cusparseAction_t.CUSPARSE_ACTION_NUMERIC
        assert not any(address_of(at) % 16 for at in places), MISALIGNED
        values, rows, columns, out, ends, indices = map(address_of, places)
        self.work_in(buffer)
        row = np.repeat(np.arange(m), np.diff(array_at(rows, np.int32, m + 1)))
        column = array_at(columns, np.int32, nnz) - int(base)
        order = np.lexsort((row, column))
        array_at(out, DTYPES[int(kind)], nnz)[...] = array_at(values, DTYPES[int(kind)], nnz)[order]
        array_at(indices, np.int32, nnz)[...] = row[order] + int(base)
        counts = np.concatenate([[0], np.cumsum(np.bincount(column, minlength=n))])
        array_at(ends, np.int32, n + 1)[...] = counts + int(base)
