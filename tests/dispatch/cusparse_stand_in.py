"""cuSPARSE's generic interface over memory of the host, by NumPy: plans run where no GPU is.

It is as strict as the library: arguments are counted and of their kinds, descriptors are alive, dtypes and extents go
together, an analysis is of the matrix that is solved with, and its memory is as it was. And as rude: workspace is
overwritten, and a solve takes the values that its analysis was told.
"""

import ctypes
import importlib.util
import inspect
from enum import IntEnum
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind._bind import functions
from cudabind.errors import CusparseError
from cudabind.sys import cusparse
from dispatch.libraries.cusparse import analyses, calls, descriptors, spgemm, spgemm_reuse


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


products = loaded("cusparse_products_stand_in")
memory = products.memory
BSR, COO, CSC, CSR, DTYPES, INDICES, PLACEHOLDER, WORK = (
    vars(memory)[name] for name in ("BSR", "COO", "CSC", "CSR", "DTYPES", "INDICES", "PLACEHOLDER", "WORK")
)
Dense, Matrix, Memory = memory.Dense, memory.Matrix, memory.Memory
address_of, array_at, memory_at, number_at, turned = (
    vars(memory)[name] for name in ("address_of", "array_at", "memory_at", "number_at", "turned")
)
BITS = {"int32_t": 32, "int64_t": 64}
INVALID_VALUE, INTERNAL_ERROR, NOT_SUPPORTED = memory.INVALID_VALUE, memory.INTERNAL_ERROR, memory.NOT_SUPPORTED
ADJOINT = 2  # CUSPARSE_OPERATION_CONJUGATE_TRANSPOSE


FUNCTIONS = frozenset(functions(cusparse))
# In a graph the first faults at its launch; once one of the others was captured, sorts end in an internal error.
NOT_IN_A_GRAPH = frozenset({"cusparseCsr2cscEx2", "cusparseXcoosortByRow", "cusparseXcsrsort"})


@cache
def kinds_of(name):
    """The kinds of the arguments of a function."""
    return [str(one.annotation) for one in inspect.signature(getattr(cusparse, name)).parameters.values()]


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
        kinds = kinds_of(self.name)
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


class Library(products.Products):
    """The functions of cuSPARSE that plans call."""

    def __init__(self):
        self.alive, self.numbers = {}, count(1)
        self.called, self.refused = [], set()

    def function(self, name):
        if name not in FUNCTIONS:
            return getattr(cusparse, name)
        assert hasattr(self, f"_{name.removeprefix('cusparse')}"), name
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def check_capture(self, plan):
        """That a plan of which a graph may be made has called nothing that fails in one."""
        assert not (plan.capture_safe and NOT_IN_A_GRAPH & set(self.called)), f"{plan.row.name} is captured"
        self.called.clear()

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
        spec = {"m": m, "n": n, "nnz": nnz, "rows": address_of(rows), "columns": address_of(columns)}
        spec |= {"values": address_of(values), "kinds": tuple(map(int, kinds)), "base": int(base), "block": block}
        self.put(handle, Matrix(format=kind, value_type=int(value_type), fill=None, diag=None, **spec))

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

    _DestroySpVec = _DestroyDnVec = _DestroyDnMat = _SpSV_destroyDescr = _SpSM_destroyDescr = _SpGEMM_destroyDescr = (
        _DestroySpMat
    )

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

    def _CsrSetStridedBatch(self, handle, count, offsets, elements):
        matrix = self.of(handle)
        assert matrix.format == CSR
        assert offsets in (0, *range(matrix.m + 1, 1 << 20))
        assert elements in (0, *range(matrix.nnz, 1 << 20))
        matrix.batch = count, offsets, elements

    def _CooSetStridedBatch(self, handle, count, step):
        matrix = self.of(handle)
        assert matrix.format == COO
        assert step == 0 or step >= matrix.nnz, "CUSPARSE_STATUS_INVALID_VALUE: batchStride < nnz"
        matrix.batch = count, step, step

    def _DnMatSetStridedBatch(self, handle, count, step):
        matrix = self.of(handle)
        assert count == 1 or step >= (matrix.m if matrix.by_rows else matrix.n) * 1
        matrix.batch = count, step

    # -- triangles ----------------------------------------------------------------------------------------------------
    def _SpSV_createDescr(self, handle):
        self.put(handle, SimpleNamespace(of=None, buffer=None, values=None))

    _SpSM_createDescr = _SpGEMM_createDescr = _SpSV_createDescr

    def _SpSV_bufferSize(self, handle, op, alpha, a, x, y, kind, algorithm, analysis, size):
        self.no_adjoint_of_real(op, a)
        size._obj.value = WORK

    def _SpSM_bufferSize(self, handle, op_a, op_b, alpha, a, b, c, kind, algorithm, analysis, size):
        self.no_adjoint_of_real(op_a, a)
        size._obj.value = WORK

    def no_adjoint_of_real(self, op, a):
        """cuSPARSE refuses it by CUSPARSE_STATUS_INVALID_VALUE, in all of its products and solves."""
        assert int(op) != ADJOINT or self.of(a).places()[2].dtype.kind == "c", "conjugate transpose of real numbers"

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


class Handle:
    counted_product = None

    def follow(self):
        return cusparse.cusparseHandle_t(1)

    def memory(self, executor, nbytes):
        return Memory(nbytes) if nbytes else None


class Copy:
    """The kernel's work; those of cuSOLVER's plans are tried elsewhere."""

    def __init__(self, executor, source, target, batch, keep, *, conj):
        assert (source.rows, source.cols) == (target.rows, target.cols)
        self.given, self.batch = (source, target, int(keep)), batch

    def enqueue(self, addresses):
        source, target, keep = self.given
        assert keep in (0, 4)
        for number in range(self.batch):
            one, other = (self.array(matrix, addresses, number) for matrix in (source, target))
            other[...] = one.copy() if keep == 0 else 0

    @staticmethod
    def array(matrix, addresses, number=0):
        at, item = addresses[matrix.pointer.operand] + matrix.pointer.offset, matrix.dtype.itemsize
        at += number * matrix.pointer.batch_stride
        reach = (matrix.rows - 1) * matrix.row_stride + (matrix.cols - 1) * matrix.col_stride + 1
        flat = array_at(at, matrix.dtype.numpy, reach)
        steps = (matrix.row_stride * item, matrix.col_stride * item)
        return np.lib.stride_tricks.as_strided(flat, (matrix.rows, matrix.cols), steps)


class Rounding:
    """The kernel's work; itself is tried in test_sparse_rounding.py."""

    def __init__(self, executor, source, target):
        self.given = source, target

    def enqueue(self, addresses):
        source, target = (Copy.array(matrix, addresses) for matrix in self.given)
        assert source.dtype != target.dtype
        target[...] = source.astype(target.dtype)


class PatternProduct:
    """The kernel's work; itself is tried in test_sparse_values.py."""

    def __init__(self, executor, front, spec, alpha, pattern, indices, sizes):
        assert all(sizes)
        assert len(indices) == 4
        self.front, self.spec, self.alpha, self.pattern = front, spec, alpha, pattern

    def enqueue(self, addresses):
        spec = self.spec
        product = self.alpha * np.matmul(*(self.dense(one, addresses) for one in self.front))
        ends = array_at(self.pattern[0], np.int32, spec.shape[0] + 1)
        columns = array_at(self.pattern[1], np.int32, spec.nnz)
        array_at(addresses[spec.rows], np.int32, len(ends))[...] = ends
        array_at(addresses[spec.columns], np.int32, spec.nnz)[...] = columns
        row = np.repeat(np.arange(spec.shape[0]), np.diff(ends))
        array_at(addresses[spec.values], DTYPES[spec.value_type], spec.nnz)[...] = product[row, columns]

    @staticmethod
    def dense(spec, addresses):
        found = np.zeros(spec.shape, DTYPES[spec.value_type])
        ends = array_at(addresses[spec.rows], np.int32, spec.shape[0] + 1)
        columns = array_at(addresses[spec.columns], np.int32, spec.nnz)
        row = np.repeat(np.arange(spec.shape[0]), np.diff(ends))
        np.add.at(found, (row, columns), array_at(addresses[spec.values], DTYPES[spec.value_type], spec.nnz))
        return found


def longest_row(_, rows, lines):
    return int(np.diff(array_at(rows, np.int32, lines + 1)).max(initial=0))


def executor_of(monkeypatch):
    """What plans are made for; `monkeypatch` puts this file in the library's place. `library` says what was called."""
    library = Library()
    for module in (analyses, calls, descriptors, spgemm, spgemm_reuse):
        monkeypatch.setattr(module, "cusparse", library)
    handle = Handle()
    for module in (analyses, calls, spgemm):
        monkeypatch.setattr(module, "handle_of", lambda _: handle)
    monkeypatch.setattr(calls, "Copy", Copy)
    monkeypatch.setattr(calls, "Rounding", Rounding)
    copied = SimpleNamespace(cuMemcpyHtoDAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes))
    monkeypatch.setattr(spgemm, "driver", copied)
    moved = SimpleNamespace(
        cuMemcpyDtoDAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda to, value, nbytes, _: ctypes.memset(to, value, nbytes),
    )
    monkeypatch.setattr(spgemm_reuse, "driver", moved)
    monkeypatch.setattr(spgemm_reuse, "PatternProduct", PatternProduct)
    monkeypatch.setattr(spgemm_reuse, "longest_row", longest_row)
    made = SimpleNamespace(allocate=lambda nbytes, _: Memory(nbytes))
    workspace, target = SimpleNamespace(c_ptr=ctypes.c_void_p(PLACEHOLDER)), SimpleNamespace(value=0)
    stream = SimpleNamespace(done=lambda: None)
    parts = {"workspace": workspace, "target": target, "stream": stream, "device": made, "library": library}
    return SimpleNamespace(**parts, versions={"cusparse": (12, 9, 4)})
