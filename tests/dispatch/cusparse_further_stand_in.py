"""Further functions of cuSPARSE over memory of the host, beside its stand-in: ELL, sorts, pruning, five diagonals."""

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusparse
from dispatch.libraries.cusparse import ell, incomplete, pruning, sorting

spec = importlib.util.spec_from_file_location("cusparse_stand_in", Path(__file__).with_name("cusparse_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)
array_at, address_of = stand_in.array_at, stand_in.address_of
DTYPES, INDICES = stand_in.DTYPES, stand_in.INDICES
ALIGNMENT = 16


class Sliced(SimpleNamespace):
    """A matrix in sliced ELL."""

    def dense(self):
        offset, index = (INDICES[kind] for kind in self.kinds)
        slices = -(-self.m // self.slice_size)
        ends = array_at(self.offsets, offset, slices + 1)
        assert (ends[0], ends[-1]) == (0, self.size)
        columns, values = array_at(self.columns, index, self.size), array_at(self.values, self.dtype, self.size)
        assert (columns >= 0).sum() == self.nnz
        found = np.zeros((self.m, self.n), np.complex128 if self.dtype.kind == "c" else np.float64)
        for each in range(slices):
            part = slice(ends[each], ends[each + 1])
            for place, (column, value) in enumerate(zip(columns[part], values[part], strict=True)):
                if column >= 0:
                    found[each * self.slice_size + place % self.slice_size, column] += value
        return found


class Blocked(SimpleNamespace):
    """A matrix in blocked ELL."""

    def dense(self):
        size = self.block
        assert self.values % ALIGNMENT == 0
        columns = array_at(self.columns, INDICES[self.kind], self.m // size, self.width // size)
        values = array_at(self.values, self.dtype, self.m, self.width)
        found = np.zeros((self.m, self.n), np.float64)
        for (high, wide), column in np.ndenumerate(columns):
            if column >= 0:
                rows, to = slice(high * size, (high + 1) * size), slice(column * size, (column + 1) * size)
                found[rows, to] += values[rows, wide * size : (wide + 1) * size].astype(np.float64)
        return found


def cut_to_tf32(values):
    """Ten bits of the fraction, as tensor cores take f32."""
    word = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return word.view(np.float32).astype(np.float64)


def lu_of(dense, there):
    """The first pivot that is 0, and L and U in one, column by column and only where elements are."""
    zero = -1
    with np.errstate(all="ignore"):
        for k in range(len(dense)):
            if dense[k, k] == 0 and zero < 0:
                zero = k
            dense[k + 1 :, k] = np.where(there[k + 1 :, k], dense[k + 1 :, k] / dense[k, k], 0)
            product = np.outer(dense[k + 1 :, k], dense[k, k + 1 :])
            dense[k + 1 :, k + 1 :] -= np.where(there[k + 1 :, k + 1 :], product, 0)
    return zero, dense


def cholesky_of(dense, there):
    """The same for L of L · Lᴴ, which is below the diagonal; what is above is left as it is."""
    zero, low, above = -1, np.tril(dense), np.triu(dense, 1)
    with np.errstate(all="ignore"):
        for k in range(len(low)):
            if low[k, k] == 0 and zero < 0:
                zero = k
            low[k, k] = np.sqrt(low[k, k])
            low[k + 1 :, k] = np.where(there[k + 1 :, k], low[k + 1 :, k] / low[k, k], 0)
            product = np.outer(low[k + 1 :, k], low[k + 1 :, k].conj())
            low[k + 1 :, k + 1 :] -= np.where(np.tril(there)[k + 1 :, k + 1 :], product, 0)
    return zero, low + above


class Library(stand_in.Library):
    """The stand-in with two more formats."""

    def _CreateSlicedEll(self, handle, m, n, nnz, size, slice_size, offsets, columns, values, *rest):
        *kinds, base, value_type = rest
        assert base == cusparse.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO
        assert 0 <= nnz <= size
        said = {"m": m, "n": n, "nnz": nnz, "size": size, "slice_size": slice_size, "kinds": tuple(map(int, kinds))}
        places = {"offsets": address_of(offsets), "columns": address_of(columns), "values": address_of(values)}
        dtype = DTYPES[int(value_type)]
        self.put(handle, Sliced(format=7, value_type=int(value_type), dtype=dtype, **said, **places))

    def _CreateBlockedEll(self, handle, m, n, block, width, columns, values, kind, base, value_type):
        assert base == cusparse.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO
        assert not any(extent % block for extent in (m, n, width))
        assert block & (block - 1) == 0
        said = {"m": m, "n": n, "block": block, "width": width, "kind": int(kind)}
        places = {"columns": address_of(columns), "values": address_of(values)}
        dtype = DTYPES[int(value_type)]
        self.put(handle, Blocked(format=5, value_type=int(value_type), dtype=dtype, **said, **places))

    # -- sorts --------------------------------------------------------------------------------------------------------
    def _CreateMatDescr(self, handle):
        self.put(handle, SimpleNamespace(base=0))

    def _SetMatIndexBase(self, handle, base):
        self.of(handle).base = int(base)

    def _DestroyMatDescr(self, handle):
        del self.alive[handle.value]

    def _CreateIdentityPermutation(self, handle, count, permutation):
        array_at(address_of(permutation), np.int32, count)[...] = np.arange(count)

    def _Xcoosort_bufferSizeExt(self, *given):
        given[-1]._obj.value = stand_in.WORK

    _Xcsrsort_bufferSizeExt = _Xcoosort_bufferSizeExt

    def in_order(self, count, rows, columns, lines, permutation, buffer):
        self.work_in(buffer)
        permutation = array_at(address_of(permutation), np.int32, count)
        assert (permutation == np.arange(count)).all(), "the permutation is the identity at first"
        permutation[...] = np.lexsort((columns, lines))
        columns[...] = columns[permutation]
        if rows is not None:
            rows[...] = rows[permutation]

    def _XcoosortByRow(self, handle, m, n, count, rows, columns, permutation, buffer):
        rows, columns = (array_at(address_of(part), np.int32, count) for part in (rows, columns))
        self.in_order(count, rows, columns, rows.copy(), permutation, buffer)

    def _Xcsrsort(self, handle, m, n, count, descriptor, ends, columns, permutation, buffer):
        ends, columns = array_at(address_of(ends), np.int32, m + 1), array_at(address_of(columns), np.int32, count)
        assert self.of(descriptor).base == ends[0]
        lines = np.repeat(np.arange(m), np.diff(ends))
        self.in_order(count, None, columns, lines, permutation, buffer)

    # -- incomplete factors -------------------------------------------------------------------------------------------
    def _CreateCsrilu02Info(self, handle):
        self.put(handle, SimpleNamespace(of=None, buffer=0, zero=-1, missing=False))

    _CreateCsric02Info = _CreateCsrilu02Info
    _DestroyCsrilu02Info = _DestroyCsric02Info = _DestroyMatDescr

    def _Xcsrilu02_zeroPivot(self, handle, info, position):
        position._obj.value = self.of(info).zero
        return 9 if self.of(info).zero >= 0 else 0  # CUSPARSE_STATUS_ZERO_PIVOT

    _Xcsric02_zeroPivot = _Xcsrilu02_zeroPivot

    def eliminate(self, letter, kind, ending, handle, n, nnz, descriptor, values, rows, columns, info, *rest):
        dtype = {"S": np.float32, "D": np.float64, "C": np.complex64, "Z": np.complex128}[letter]
        base, info = self.of(descriptor).base, self.of(info)
        assert not any(address_of(part) % ALIGNMENT for part in (values, rows, columns))
        if ending == "_bufferSize":
            rest[0]._obj.value = stand_in.WORK
            return
        policy, buffer = rest
        place = (address_of(rows), address_of(columns), n, nnz)
        ends, columns = array_at(place[0], np.int32, n + 1) - base, array_at(place[1], np.int32, nnz) - base
        if ending:
            assert info.of is None, "an analysis is made once with each info"
            info.of, info.buffer, info.policy = place, address_of(buffer), int(policy)
            stand_in.memory_at(info.buffer, stand_in.WORK)[...] = 7
            without = [row for row in range(n) if row not in columns[ends[row] : ends[row + 1]]]
            info.zero, info.missing = without[0] + base if without else -1, bool(without)
            return
        assert (info.of, info.buffer, info.policy) == (place, address_of(buffer), int(policy))
        assert (stand_in.memory_at(info.buffer, stand_in.WORK) == 7).all(), "the analysis was overwritten"
        assert not info.missing, "a place of the diagonal is missing"
        flat = array_at(address_of(values), dtype, nnz)
        row = np.repeat(np.arange(n), np.diff(ends))
        dense, there = np.zeros((n, n), np.result_type(dtype, np.float64)), np.zeros((n, n), bool)
        dense[row, columns], there[row, columns] = flat, True
        info.zero, found = (lu_of if kind == "ilu" else cholesky_of)(dense, there)
        info.zero += base if info.zero >= 0 else 0
        flat[...] = found[row, columns]

    # -- pruning ------------------------------------------------------------------------------------------------------
    def __getattr__(self, name):
        solver = re.fullmatch(r"_([SDCZ])gpsvInterleavedBatch(_bufferSizeExt|)", name)
        if solver is not None:
            asks = lambda *given: setattr(given[-1]._obj, "value", stand_in.WORK)  # noqa: E731
            return asks if solver[2] else lambda *given: self.five(solver[1], *given)
        factors = re.fullmatch(r"_([SDCZ])csr(ilu|ic)02(_bufferSize|_analysis|)", name)
        if factors is not None:
            return lambda *given: self.eliminate(*factors.groups(), *given)
        found = re.fullmatch(r"_([SD])pruneDense2csr(Nnz|)(ByPercentage|)(_bufferSizeExt|)", name)
        if found is None:
            return super().__getattr__(name)
        letter, counts, share, asks = found.groups()
        if asks:
            return lambda *given: setattr(given[-1]._obj, "value", stand_in.WORK)
        return lambda *given: (self.count if counts else self.write)(letter, share, *given)

    def five(self, letter, handle, algorithm, n, *rest):
        """It overwrites the diagonals, and of three unknowns one row more than the right-hand sides have."""
        *parts, batch, buffer = rest
        assert algorithm == 0
        self.work_in(buffer)
        dtype = {"S": np.float32, "D": np.float64, "C": np.complex64, "Z": np.complex128}[letter]
        *lines, x = (array_at(address_of(part), np.dtype(dtype), n, batch) for part in parts)
        dense = np.zeros((batch, n, n), np.complex128 if letter in "CZ" else np.float64)
        for off, line in zip(range(-2, 3), lines, strict=True):
            inside = np.arange(max(0, -off), n - max(0, off))
            assert not np.delete(line, inside, axis=0).any()
            dense[:, inside, inside + off] = line[inside].T
            line[...] = np.nan
        x[...] = np.linalg.solve(dense, x.T[..., None])[..., 0].T
        if n == 3:
            array_at(address_of(parts[-1]) + x.nbytes, x.dtype, batch)[...] = np.nan

    def _CreatePruneInfo(self, handle):
        self.put(handle, SimpleNamespace())

    _DestroyPruneInfo = _DestroyMatDescr

    def left(self, letter, share, m, n, a, ld, amount):
        dtype = np.dtype(np.float32 if letter == "S" else np.float64)
        assert ld >= m
        lines = array_at(address_of(a), dtype, (n - 1) * ld + m)
        dense = np.lib.stride_tricks.as_strided(lines, (m, n), (dtype.itemsize, ld * dtype.itemsize))
        if not share:
            assert type(amount._obj) is (ctypes.c_float if letter == "S" else ctypes.c_double)
            return dense, np.abs(dense) > amount._obj.value
        place = int(np.ceil(m * n * (amount / 100))) - 1
        return dense, np.abs(dense) > np.sort(np.abs(dense), axis=None)[max(0, min(place, m * n - 1))]

    def count(self, letter, share, handle, m, n, a, ld, amount, descriptor, rows, total, *rest):
        assert self.of(descriptor).base == 0
        _, there = self.left(letter, share, m, n, a, ld, amount)
        self.work_in(rest[-1])
        array_at(address_of(rows), np.int32, m + 1)[...] = np.concatenate([[0], np.cumsum(there.sum(1))])
        total._obj.value = int(there.sum())

    def write(self, letter, share, handle, m, n, a, ld, amount, descriptor, values, rows, columns, *rest):
        dense, there = self.left(letter, share, m, n, a, ld, amount)
        row, column = np.nonzero(there)
        assert array_at(address_of(rows), np.int32, m + 1)[-1] == len(row), "offsets are there"
        self.work_in(rest[-1])
        array_at(address_of(values), dense.dtype, len(row))[...] = dense[row, column]
        array_at(address_of(columns), np.int32, len(row))[...] = column

    # -- products -----------------------------------------------------------------------------------------------------
    def _SpMV(self, handle, op, alpha, a, x, beta, y, kind, algorithm, buffer):
        if self.of(a).format != 7:
            super()._SpMV(handle, op, alpha, a, x, beta, y, kind, algorithm, buffer)
            return
        assert (int(op), int(algorithm)) == (0, 5)
        a, x, y = map(self.of, (a, x, y))
        self.kinds_fit(a, x, y, kind)
        self.work_in(buffer)
        right = x.array()
        work = np.complex128 if right.dtype.kind == "c" else np.float64
        self.added(op, alpha, beta, kind, a.dense() @ right.astype(work), y.array())

    def _SpMM_bufferSize(self, *given):
        a = self.of(given[4])
        if a.format == 5 and INDICES[a.kind].itemsize != 4:
            return stand_in.NOT_SUPPORTED
        return super()._SpMM_bufferSize(*given)

    def _SpMM(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        if self.of(a).format != 5:
            super()._SpMM(handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer)
            return
        assert (int(op_a), int(algorithm)) == (0, 13)
        a, b, c = map(self.of, (a, b, c))
        assert b.by_rows == c.by_rows, "B and C are of one order"
        assert not any(one.values % ALIGNMENT for one in (b, c))
        self.kinds_fit(a, b, c, kind)
        self.work_in(buffer)
        left, right = a.dense(), stand_in.turned(b.array(), op_b).astype(np.float64)
        if a.dtype == np.float32:
            left, right = map(cut_to_tf32, (left, right))
        self.added(op_a, alpha, beta, kind, left @ right, c.array())


stand_in.Library = Library


def executor_of(monkeypatch):
    """As the stand-in's, for plans of these formats, too."""
    executor = stand_in.executor_of(monkeypatch)
    for module in (ell, incomplete, pruning, sorting):
        monkeypatch.setattr(module, "cusparse", executor.library)
    monkeypatch.setattr(incomplete, "handle_of", stand_in.calls.handle_of)
    filled = SimpleNamespace(
        cuMemsetD8Async=lambda to, value, nbytes, _: ctypes.memset(to, value, nbytes),
        cuMemsetD32Async=lambda to, value, count, _: array_at(to, np.int32, count).fill(value),
    )
    monkeypatch.setattr(incomplete, "driver", filled)
    monkeypatch.setattr(pruning, "handle_of", stand_in.calls.handle_of)
    monkeypatch.setattr(pruning, "driver", stand_in.spgemm.driver)
    return executor
