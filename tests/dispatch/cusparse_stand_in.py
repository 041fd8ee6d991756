"""cuSPARSE's generic interface over memory of the host, by NumPy: plans run where no GPU is.

It is as strict as the library: arguments are counted and of their kinds, descriptors are alive, dtypes and extents go
together, an analysis is of the matrix that is solved with, and its memory is as it was. And as rude: workspace is
overwritten, and a solve takes the values that its analysis was told.
"""

import ctypes
import inspect
import re
from enum import IntEnum
from itertools import count
from types import SimpleNamespace

import numpy as np

from cudabind.errors import CusparseError
from cudabind.sys import cusparse
from dispatch.keys import BF16, C64, C128, F16, F32, F64
from dispatch.libraries.cusparse import analyses, calls, dense, descriptors, spgemm

DTYPES = {dtype.cuda: dtype.numpy for dtype in (F32, F64, C64, C128, F16, BF16)}
INDICES = {2: np.dtype(np.int32), 3: np.dtype(np.int64)}
CSR, CSC, COO, BSR = 1, 2, 3, 6
WORK = 72  # bytes
BITS = {"int32_t": 32, "int64_t": 64}
NOT_SUPPORTED = cusparse.cusparseStatus_t.CUSPARSE_STATUS_NOT_SUPPORTED
PLACEHOLDER = 256
ITEMS = {"S": 4, "D": 8, "C": 8, "Z": 16}


def memory_at(address, nbytes):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def array_at(address, dtype, *shape):
    assert address != PLACEHOLDER, "the placeholder is read"
    size = int(np.prod(shape))
    assert address or not size
    return (
        np.ndarray(shape, dtype, memory_at(address, size * np.dtype(dtype).itemsize))
        if size
        else np.zeros(shape, dtype)
    )


def address_of(argument):
    return (argument.value if isinstance(argument, ctypes.c_void_p) else argument) or 0


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.owner = self.writer = None


class Matrix(SimpleNamespace):
    """What a descriptor of a sparse matrix says."""

    def places(self):
        """The row and the column of each element, or block, and where the values are."""
        value_type, (rows, columns) = DTYPES[self.value_type], (INDICES[kind] for kind in self.kinds)
        m, n = self.m, self.n
        shape = (self.nnz, *self.block) if self.format == BSR else (self.nnz,)
        values = array_at(self.values, value_type, *shape)
        if self.format == COO:
            row, column = array_at(self.rows, rows, self.nnz), array_at(self.columns, rows, self.nnz)
            assert (np.diff(row) >= 0).all(), "COO is sorted by row"
            return row - self.base, column - self.base, values
        lines = m if self.format != CSC else n
        at = (self.rows, self.columns) if self.format != CSC else (self.columns, self.rows)
        ends = array_at(at[0], rows, lines + 1)
        assert ends[0] == self.base
        assert ends[-1] == self.base + self.nnz
        across = array_at(at[1], columns, self.nnz) - self.base
        along = np.repeat(np.arange(lines), np.diff(ends))
        row, column = (along, across) if self.format != CSC else (across, along)
        return row, column, values

    def dense(self, values=None):
        row, column, own = self.places()
        values = own if values is None else values
        work = np.complex128 if values.dtype.kind == "c" else np.float64
        found = np.zeros((self.m, self.n, *self.block), work)
        np.add.at(found, (row, column), values.reshape(-1, *self.block).astype(work))
        return found.transpose(0, 2, 1, 3).reshape(self.m * self.block[0], self.n * self.block[1])


class Dense(SimpleNamespace):
    def array(self):
        dtype = DTYPES[self.value_type]
        if self.by_rows is None:
            return array_at(self.values, dtype, self.m)
        long, short = (self.m, self.n) if self.by_rows else (self.n, self.m)
        assert self.ld >= max(1, short)
        reach = (long - 1) * self.ld + short if long and short else 0
        flat = array_at(self.values, dtype, reach)
        lines = np.lib.stride_tricks.as_strided(flat, (long, short), (self.ld * dtype.itemsize, dtype.itemsize))
        return lines if self.by_rows else lines.T


def turned(array, operation):
    return {0: array, 1: array.T, 2: array.conj().T}[int(operation)]


def number_at(pointer, kind):
    return array_at(address_of(pointer), DTYPES[kind], 1)[0]


def declared():
    """The kinds of the arguments of each function."""
    found = {}
    for name, said in re.findall(r"def (cusparse\w+)\((.*?)/?\s*\) ->", inspect.getsource(cusparse), re.DOTALL):
        found[name] = [one.split(":")[1].strip() for one in said.replace("\n", " ").split(",") if ":" in one]
    return found


KINDS = declared()


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def error(self, status):
        return CusparseError("cusparse", self.name, int(status), cusparse.cusparseStatus_t(status).name, "")

    def unchecked(self, *arguments):
        self.checked(arguments)
        self.library.called.append(self.name)
        if self.name in self.library.refused:
            return NOT_SUPPORTED
        name = self.name.removeprefix("cusparse")
        return getattr(self.library, f"_{name}")(*arguments) or 0

    def checked(self, given):
        kinds = KINDS[self.name]
        assert len(given) == len(kinds), f"{self.name} takes {len(kinds)} arguments, not {len(given)}"
        for argument, kind in zip(given, kinds, strict=True):
            enum = getattr(cusparse, kind, None)
            if kind in BITS:
                assert type(argument) is int, (self.name, kind, argument)
                assert -(2 ** (BITS[kind] - 1)) <= argument < 2 ** (BITS[kind] - 1), (self.name, kind, argument)
            elif isinstance(enum, type) and issubclass(enum, IntEnum):
                assert type(argument) is enum, (self.name, kind, argument)
            elif kind.endswith("Descr_t") and not kind.startswith("Ptr"):
                wanted = getattr(cusparse, kind)
                assert isinstance(argument, wanted), (self.name, kind, argument)
                assert argument.value in self.library.alive, f"{self.name}: a descriptor that is not there"
            elif kind in ("void_p", "const_void_p") or kind.startswith(("Mem", "ConstMem")):
                is_address = (
                    argument is None or isinstance(argument, (int, ctypes.c_void_p)) or hasattr(argument, "_obj")
                )
                assert is_address, (self.name, kind, argument)


class Library:
    """The functions of cuSPARSE that plans call."""

    def __init__(self):
        self.alive, self.numbers = {}, count(1)
        self.called, self.refused = [], set()

    def function(self, name):
        if name not in KINDS:
            return getattr(cusparse, name)
        assert hasattr(self, f"_{name.removeprefix('cusparse')}"), name
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def put(self, handle, thing):
        handle.value = next(self.numbers)
        self.alive[handle.value] = thing

    def of(self, handle):
        return self.alive[handle.value]

    # -- descriptors --------------------------------------------------------------------------------------------------
    def _sparse(self, handle, kind, m, n, nnz, rows, columns, values, kinds, base, value_type, block=(1, 1)):
        assert m >= 0
        assert n >= 0
        assert 0 <= nnz <= m * n
        assert address_of(rows) or not nnz
        assert address_of(values) or not nnz
        said = {"m": m, "n": n, "nnz": nnz, "rows": address_of(rows), "columns": address_of(columns)}
        said |= {"values": address_of(values), "kinds": tuple(map(int, kinds)), "base": int(base), "block": block}
        self.put(handle, Matrix(format=kind, value_type=int(value_type), fill=None, diag=None, **said))

    def _CreateCsr(self, handle, m, n, nnz, rows, columns, values, *rest):
        *kinds, base, value_type = rest
        self._sparse(handle, CSR, m, n, nnz, rows, columns, values, kinds, base, value_type)

    def _CreateCsc(self, handle, m, n, nnz, columns, rows, values, *rest):
        *kinds, base, value_type = rest
        self._sparse(handle, CSC, m, n, nnz, rows or columns, columns, values, kinds, base, value_type)

    def _CreateCoo(self, handle, m, n, nnz, rows, columns, values, kind, base, value_type):
        self._sparse(handle, COO, m, n, nnz, rows, columns, values, (kind, kind), base, value_type)

    def _CreateBsr(self, handle, m, n, nnz, high, wide, rows, columns, values, *rest):
        *kinds, base, value_type, order = rest
        assert order == cusparse.cusparseOrder_t.CUSPARSE_ORDER_ROW
        self._sparse(handle, BSR, m, n, nnz, rows, columns, values, kinds, base, value_type, (high, wide))

    def _DestroySpMat(self, handle):
        del self.alive[handle.value]

    _DestroyDnVec = _DestroyDnMat = _SpSV_destroyDescr = _SpSM_destroyDescr = _SpGEMM_destroyDescr = _DestroySpMat

    def _CsrSetPointers(self, handle, rows, columns, values):
        matrix = self.of(handle)
        matrix.rows, matrix.columns, matrix.values = rows, columns or 0, values or 0

    def _CscSetPointers(self, handle, columns, rows, values):
        matrix = self.of(handle)
        matrix.rows, matrix.columns, matrix.values = rows, columns, values

    _CooSetPointers = _CsrSetPointers

    def _SpMatSetValues(self, handle, values):
        self.of(handle).values = values

    def _SpMatSetAttribute(self, handle, attribute, data, size):
        assert size == 4
        matrix = self.of(handle)
        name = {0: "fill", 1: "diag"}[int(attribute)]
        setattr(matrix, name, data._obj.value)

    def _SpMatGetSize(self, handle, m, n, nnz):
        matrix = self.of(handle)
        m._obj.value, n._obj.value, nnz._obj.value = matrix.m, matrix.n, matrix.nnz

    def _CreateDnVec(self, handle, size, values, value_type):
        self.put(handle, Dense(m=size, by_rows=None, values=address_of(values), value_type=int(value_type)))

    def _CreateDnMat(self, handle, m, n, ld, values, value_type, order):
        by_rows = order == cusparse.cusparseOrder_t.CUSPARSE_ORDER_ROW
        assert ld >= (n if by_rows else m)
        given = {"m": m, "n": n, "ld": ld, "by_rows": by_rows, "values": address_of(values)}
        self.put(handle, Dense(value_type=int(value_type), **given))

    def _DnVecSetValues(self, handle, values):
        self.of(handle).values = values or 0

    _DnMatSetValues = _DnVecSetValues

    # -- sparse vectors -----------------------------------------------------------------------------------------------
    def _CreateSpVec(self, handle, size, nnz, indices, values, index, base, value_type):
        assert 0 < nnz <= size
        given = {"size": size, "nnz": nnz, "indices": address_of(indices), "values": address_of(values)}
        self.put(handle, SimpleNamespace(index=int(index), base=int(base), value_type=int(value_type), **given))

    _DestroySpVec = _DestroySpMat

    def _SpVecSetValues(self, handle, values):
        self.of(handle).values = values

    def both(self, x, y):
        x, y = self.of(x), self.of(y)
        assert (x.size, x.value_type) == (y.m, y.value_type)
        assert not self.on_device
        indices = array_at(x.indices, INDICES[x.index], x.nnz) - x.base
        return indices, array_at(x.values, DTYPES[x.value_type], x.nnz), y.array()

    def _Gather(self, handle, y, x):
        indices, values, dense_ = self.both(x, y)
        values[...] = dense_[indices]

    def _Scatter(self, handle, x, y):
        indices, values, dense_ = self.both(x, y)
        dense_[indices] = values

    def _Axpby(self, handle, alpha, x, beta, y):
        indices, values, dense_ = self.both(x, y)
        kind = self.of(y).value_type
        dense_[...] = number_at(beta, kind) * dense_
        dense_[indices] += number_at(alpha, kind) * values

    on_device = False

    def _SetPointerMode(self, handle, mode):
        self.on_device = mode == cusparse.cusparsePointerMode_t.CUSPARSE_POINTER_MODE_DEVICE

    def _SpVV_bufferSize(self, *given):
        given[-1]._obj.value = WORK

    def _SpVV(self, handle, op, x, y, result, kind, buffer):
        assert self.on_device
        assert int(op) in (0, 2)
        self.on_device = False
        indices, values, dense_ = self.both(x, y)
        self.work_in(buffer)
        values = values.conj() if op == 2 else values
        array_at(address_of(result), values.dtype, 1)[...] = (values * dense_[indices]).sum()

    # -- products -----------------------------------------------------------------------------------------------------
    def _SpMV_bufferSize(self, *given):
        given[-1]._obj.value = WORK

    _SpMM_bufferSize = _SDDMM_bufferSize = _SparseToDense_bufferSize = _Csr2cscEx2_bufferSize = _SpMV_bufferSize

    @staticmethod
    def work_in(buffer):
        memory_at(address_of(buffer), WORK)[...] = 0xFF

    def kinds_fit(self, a, b, c, kind, *, mixed=True):
        """The dtypes of a product that the documentation lists."""
        types = DTYPES[a.value_type], DTYPES[c.value_type]
        assert a.value_type == b.value_type
        if types[0].itemsize == 2:
            assert mixed
            assert types[1] in (types[0], F32.numpy)
            assert kind == F32.cuda
        else:
            assert types[0] == types[1] == DTYPES[int(kind)]

    def added(self, op, alpha, beta, kind, product, target):
        alpha, beta = number_at(alpha, int(kind)), number_at(beta, int(kind))
        found = alpha * product
        if beta or op is None:  # SDDMM promises nothing of a beta of 0
            found = found + beta * target.astype(found.dtype)
        target[...] = found.astype(target.dtype)

    def _SpMV(self, handle, op, alpha, a, x, beta, y, kind, algorithm, buffer):
        a, x, y = map(self.of, (a, x, y))
        assert a.format != BSR or (op == 0 and a.block[0] == a.block[1])
        assert int(algorithm) in {CSR: (0, 2, 3), CSC: (0, 2, 3), COO: (0, 1, 4), BSR: (0, 6)}[a.format]
        assert a.nnz
        self.kinds_fit(a, x, y, kind)
        self.work_in(buffer)
        right = x.array()
        work = np.complex128 if right.dtype.kind == "c" else np.float64
        self.added(op, alpha, beta, kind, turned(a.dense(), op) @ right.astype(work), y.array())

    def _SpMM(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        a, b, c = map(self.of, (a, b, c))
        assert b.by_rows == c.by_rows, "B and C are of one order"
        assert a.format != BSR or (op_a == 0 and a.block[0] == a.block[1])
        assert a.nnz
        self.kinds_fit(a, b, c, kind)
        self.work_in(buffer)
        right = turned(b.array(), op_b)
        work = np.complex128 if right.dtype.kind == "c" else np.float64
        self.added(op_a, alpha, beta, kind, turned(a.dense(), op_a) @ right.astype(work), c.array())

    def _SDDMM(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        a, b, c = map(self.of, (a, b, c))
        assert (c.format, int(op_a), int(op_b)) == (CSR, 0, 0)
        self.kinds_fit(a, b, c, kind, mixed=False)
        self.work_in(buffer)
        row, column, values = c.places()
        work = np.complex128 if values.dtype.kind == "c" else np.float64
        product = a.array().astype(work) @ b.array().astype(work)
        self.added(None, alpha, beta, kind, product[row, column], values)

    # -- triangles ----------------------------------------------------------------------------------------------------
    def _SpSV_createDescr(self, handle):
        self.put(handle, SimpleNamespace(of=None, buffer=None, values=None))

    _SpSM_createDescr = _SpGEMM_createDescr = _SpSV_createDescr

    def _SpSV_bufferSize(self, *given):
        given[-1]._obj.value = WORK

    _SpSM_bufferSize = _SpSV_bufferSize

    def analysed(self, a, analysis, buffer):
        a, analysis = self.of(a), self.of(analysis)
        assert analysis.of is None, "an analysis is made once with each descriptor"
        memory_at(address_of(buffer), WORK)[...] = 7
        analysis.of, analysis.buffer = (a.rows, a.columns, a.nnz), address_of(buffer)
        analysis.values = a.places()[2].copy()

    def _SpSV_analysis(self, handle, op, alpha, a, x, y, kind, algorithm, analysis, buffer):
        self.analysed(a, analysis, buffer)

    def _SpSM_analysis(self, handle, op_a, op_b, alpha, a, b, c, kind, algorithm, analysis, buffer):
        self.analysed(a, analysis, buffer)

    def _SpSV_updateMatrix(self, handle, analysis, values, part):
        assert part == cusparse.cusparseSpSVUpdate_t.CUSPARSE_SPSV_UPDATE_GENERAL
        self.update(analysis, values)

    def _SpSM_updateMatrix(self, handle, analysis, values, part):
        assert part == cusparse.cusparseSpSMUpdate_t.CUSPARSE_SPSM_UPDATE_GENERAL
        self.update(analysis, values)

    def update(self, analysis, values):
        analysis = self.of(analysis)
        analysis.values = array_at(address_of(values), analysis.values.dtype, *analysis.values.shape).copy()

    def solved(self, op, alpha, a, right, target, kind, analysis):
        a, analysis = self.of(a), self.of(analysis)
        assert a.format in (CSR, COO)
        assert analysis.of == (a.rows, a.columns, a.nnz), "the analysis is of another matrix"
        assert (memory_at(analysis.buffer, WORK) == 7).all(), "the analysis was overwritten"
        assert DTYPES[a.value_type] == right.dtype == target.dtype == DTYPES[int(kind)]
        matrix = a.dense(analysis.values)
        kept = np.tri(a.m, dtype=bool)
        matrix = np.where(kept if a.fill == 0 else kept.T, matrix, 0)
        if a.diag == 1:
            np.fill_diagonal(matrix, 1)
        target[...] = np.linalg.solve(turned(matrix, op), number_at(alpha, int(kind)) * right)

    def _SpSV_solve(self, handle, op, alpha, a, x, y, kind, algorithm, analysis):
        self.solved(op, alpha, a, self.of(x).array(), self.of(y).array(), kind, analysis)

    def _SpSM_solve(self, handle, op_a, op_b, alpha, a, b, c, kind, algorithm, analysis):
        b, c = self.of(b), self.of(c)
        assert b.by_rows == c.by_rows, "B and C are of one order"
        self.solved(op_a, alpha, a, turned(b.array(), op_b), c.array(), kind, analysis)

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
        state = self.of(work)
        assert state.estimated
        assert int(algorithm) not in (4, 5) or state.sized
        if self.twice(given, "computed"):
            a, b, c = map(self.of, (a, b, c))
            counts = [(matrix.dense(np.ones(matrix.nnz)) != 0).astype(int) for matrix in (a, b)]
            state.mask = counts[0] @ counts[1] > 0
            state.product = number_at(alpha, int(kind)) * (a.dense() @ b.dense())
            c.nnz = int(state.mask.sum())

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
        self.work_in(buffer)
        target, (row, column, values) = b.array(), a.places()
        target[row, column] = values  # and nothing else

    def _DenseToSparse_bufferSize(self, handle, a, b, algorithm, size):
        size._obj.value = WORK

    def _DenseToSparse_analysis(self, handle, a, b, algorithm, buffer):
        a, b = self.of(a), self.of(b)
        assert (a.m, a.n, b.nnz) == (b.m, b.n, 0)
        memory_at(address_of(buffer), WORK)[...] = 7
        b.nnz = int(np.count_nonzero(a.array()))
        if b.format != COO and b.rows:  # an analysis may use the memory of offsets
            memory_at((b.columns, b.rows)[b.format == CSR], 4)[...] = 7

    def _DenseToSparse_convert(self, handle, a, b, algorithm, buffer):
        a, b = self.of(a).array(), self.of(b)
        assert (memory_at(address_of(buffer), WORK) == 7).all()
        major, minor = np.nonzero(a.T if b.format == CSC else a)
        row, column = (minor, major) if b.format == CSC else (major, minor)
        index = INDICES[b.kinds[0]]
        array_at(b.values, DTYPES[b.value_type], b.nnz)[...] = a[row, column]
        ends = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=a.shape[b.format == CSC]))])
        array_at(b.rows, index, b.m + 1 if b.format == CSR else b.nnz)[...] = ends if b.format == CSR else row
        array_at(b.columns, index, b.n + 1 if b.format == CSC else b.nnz)[...] = ends if b.format == CSC else column

    def _Xcoo2csr(self, handle, rows, nnz, m, ends, base):
        row = array_at(address_of(rows), np.int32, nnz) - int(base)
        counts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=m))])
        array_at(address_of(ends), np.int32, m + 1)[...] = counts + int(base)

    def _Xcsr2coo(self, handle, ends, nnz, m, rows, base):
        row = np.repeat(np.arange(m), np.diff(array_at(address_of(ends), np.int32, m + 1)))
        array_at(address_of(rows), np.int32, nnz)[...] = row + int(base)

    def _Csr2cscEx2(self, handle, m, n, nnz, *rest):
        *places, kind, action, base, _, buffer = rest
        assert action == cusparse.cusparseAction_t.CUSPARSE_ACTION_NUMERIC
        values, rows, columns, out, ends, indices = map(address_of, places)
        self.work_in(buffer)
        row = np.repeat(np.arange(m), np.diff(array_at(rows, np.int32, m + 1)))
        column = array_at(columns, np.int32, nnz) - int(base)
        order = np.lexsort((row, column))
        array_at(out, DTYPES[int(kind)], nnz)[...] = array_at(values, DTYPES[int(kind)], nnz)[order]
        array_at(indices, np.int32, nnz)[...] = row[order] + int(base)
        counts = np.concatenate([[0], np.cumsum(np.bincount(column, minlength=n))])
        array_at(ends, np.int32, n + 1)[...] = counts + int(base)


class Handle:
    def follow(self):
        return cusparse.cusparseHandle_t(1)

    def memory(self, executor, nbytes):
        return Memory(nbytes) if nbytes else None


class Copy:
    """The kernel's work; those of cuSOLVER's plans are tried elsewhere."""

    def __init__(self, executor, source, target, batch, keep, *, conj):
        assert (source.rows, source.cols) == (target.rows, target.cols)
        self.given = source, target, int(keep)

    def enqueue(self, addresses):
        source, target, keep = self.given
        one, other = (self.array(matrix, addresses) for matrix in (source, target))
        assert keep in (0, 4)
        other[...] = one.copy() if keep == 0 else 0

    @staticmethod
    def array(matrix, addresses):
        at, item = addresses[matrix.place.operand] + matrix.place.offset, matrix.dtype.itemsize
        reach = (matrix.rows - 1) * matrix.row + (matrix.cols - 1) * matrix.col + 1
        flat = array_at(at, matrix.dtype.numpy, reach)
        steps = (matrix.row * item, matrix.col * item)
        return np.lib.stride_tricks.as_strided(flat, (matrix.rows, matrix.cols), steps)


def executor_of(monkeypatch):
    """What plans are made for; `monkeypatch` puts this file in the library's place. `library` says what was called."""
    library = Library()
    for module in (analyses, calls, dense, descriptors, spgemm):
        monkeypatch.setattr(module, "cusparse", library)
    handle = Handle()
    for module in (analyses, calls):
        monkeypatch.setattr(module, "handle_of", lambda _: handle)
    monkeypatch.setattr(calls, "Copy", Copy)
    copied = SimpleNamespace(cuMemcpyHtoDAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes))
    for module in (dense, spgemm):
        monkeypatch.setattr(module, "driver", copied)
    made = SimpleNamespace(allocate=lambda nbytes, _: Memory(nbytes))
    workspace, target = SimpleNamespace(c_ptr=ctypes.c_void_p(PLACEHOLDER)), SimpleNamespace(value=0)
    stream = SimpleNamespace(done=lambda: None)
    return SimpleNamespace(workspace=workspace, target=target, stream=stream, device=made, library=library)
