"""cuDSS over memory of the host, by NumPy: plans of direct solves run where no GPU is.

It is as strict as the library: arguments are counted and of their kinds, objects are alive, phases come in order, and
a factorization is of the pattern that was analysed. And as rude: it solves with the values that it has factorized.
"""

import ctypes
import importlib.util
import inspect
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind._bind import functions
from cudabind.errors import CudaError
from cudabind.sys import cudss
from dispatch.libraries.cudss import factors
from dispatch.ops.sparse import cudss as plans

spec = importlib.util.spec_from_file_location("cusparse_memory", Path(__file__).with_name("cusparse_memory.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

FUNCTIONS = frozenset(functions(cudss))
INDICES = {10: np.dtype(np.int32), 24: np.dtype(np.int64)}
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008
GENERAL, SYMMETRIC, HERMITIAN, SPD, HPD = range(5)
FULL, LOWER, UPPER = range(3)
BITS = {"int32_t": 32, "int64_t": 64}


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def error(self, status):
        return CudaError("cudss", self.name, int(status), cudss.cudssStatus_t(status).name, "")

    def unchecked(self, *arguments):
        kinds = [str(one.annotation) for one in inspect.signature(getattr(cudss, self.name)).parameters.values()]
        assert len(arguments) == len(kinds), f"{self.name} takes {len(kinds)} arguments, not {len(arguments)}"
        for argument, kind in zip(arguments, kinds, strict=True):
            wanted = getattr(cudss, kind, None)
            if kind in BITS:
                assert type(argument) is int, (self.name, kind, argument)
                assert abs(argument) < 2 ** (BITS[kind] - 1), (self.name, kind, argument)
            elif isinstance(wanted, type) and issubclass(wanted, IntEnum):
                assert isinstance(argument, wanted), (self.name, kind, argument)
            elif kind.startswith("cudss"):
                assert isinstance(argument, wanted), (self.name, kind, argument)
                assert argument.value in self.library.alive, f"{self.name}: what is not there"
        self.library.called.append(self.name)
        return getattr(self.library, f"_{self.name.removeprefix('cudss')}")(*arguments) or 0


class Library:
    """The functions that plans call; `phases` are those that were carried out."""

    def __init__(self):
        self.alive, self.numbers = {1: "handle"}, count(2)
        self.called, self.phases, self.replaced = [], [], 0

    def __getattr__(self, name):
        if name not in FUNCTIONS:
            return getattr(cudss, name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def put(self, handle, thing):
        handle.value = next(self.numbers)
        self.alive[handle.value] = thing

    def _ConfigCreate(self, config):
        self.put(config, "config")

    def _DataCreate(self, handle, data):
        assert self.alive[handle.value] == "handle"
        self.put(data, SimpleNamespace(analysed=None, factors=None, info=0))

    def _ConfigDestroy(self, config):
        del self.alive[config.value]

    _MatrixDestroy = _ConfigDestroy

    def _DataDestroy(self, handle, data):
        del self.alive[data.value]

    def _MatrixCreateCsr(self, matrix, m, n, nnz, start, end, indices, values, *kinds):
        offset, index, value, kind, view, base = map(int, kinds)
        assert m == n
        assert end is None
        assert start
        assert indices
        assert values
        assert (offset, index) != (10, 24), "indices are no wider than offsets"
        assert kind != GENERAL or view == FULL
        is_complex = memory.DTYPES[value].kind == "c"
        assert is_complex or kind not in (HERMITIAN, HPD)
        assert not is_complex or kind != SPD
        said = {"n": n, "nnz": nnz, "offset": INDICES[offset], "index": INDICES[index], "value": memory.DTYPES[value]}
        self.put(matrix, SimpleNamespace(kind=kind, view=view, base=base, at=None, **said))

    def _MatrixCreateDn(self, matrix, rows, columns, ld, values, value, layout):
        assert layout == cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR, "rows one behind another are not supported"
        assert ld >= rows
        assert values
        self.put(matrix, SimpleNamespace(rows=rows, columns=columns, ld=ld, at=None, value=memory.DTYPES[int(value)]))

    def _MatrixSetCsrPointers(self, matrix, start, end, indices, values):
        assert end is None
        self.alive[matrix.value].at = start, indices, values

    def _MatrixSetValues(self, matrix, values):
        self.alive[matrix.value].at = values

    def _DataGet(self, handle, data, what, value, size, written):
        assert size == 4
        found = self.alive[data.value]
        names = {
            cudss.cudssDataParam_t.CUDSS_DATA_INFO: found.info,
            cudss.cudssDataParam_t.CUDSS_DATA_NPIVOTS: self.replaced,
        }
        value._obj.value = names[what]
        written._obj.value = 4

    # -- the work -----------------------------------------------------------------------------------------------------
    def _Execute(self, handle, phase, config, data, a, x, b):
        assert self.alive[config.value] == "config"
        found, matrix = self.alive[data.value], self.alive[a.value]
        self.phases.append(phase)
        rows, columns = self.pattern(matrix)
        if phase == ANALYSIS:
            found.analysed, found.factors = (matrix.at[:2], rows, columns), None
        elif phase in (FACTORIZATION, REFACTORIZATION):
            assert phase == FACTORIZATION or found.factors is not None, "what was never factorized"
            at, *before = found.analysed
            assert at == matrix.at[:2]
            assert all(map(np.array_equal, before, (rows, columns))), "another pattern than the one analysed"
            found.factors = self.whole(matrix, rows, columns)
            positive = matrix.kind not in (SPD, HPD) or (np.linalg.eigvalsh(found.factors) > 0).all()
            found.info = 0 if positive else 3
        else:
            assert phase == SOLVE
            right, target = (self.dense(self.alive[one.value]) for one in (b, x))
            assert right.shape == target.shape
            target[...] = np.linalg.solve(found.factors, right) if not found.info else np.nan

    def pattern(self, matrix):
        start, indices, _ = matrix.at
        ends = memory.array_at(start, matrix.offset, matrix.n + 1).astype(np.int64) - matrix.base
        assert ends[0] == 0
        assert ends[-1] == matrix.nnz
        columns = memory.array_at(indices, matrix.index, matrix.nnz).astype(np.int64) - matrix.base
        return np.repeat(np.arange(matrix.n), np.diff(ends)), columns

    def whole(self, matrix, rows, columns):
        dense = np.zeros((matrix.n, matrix.n), np.result_type(matrix.value, np.float64))
        dense[rows, columns] = memory.array_at(matrix.at[2], matrix.value, matrix.nnz)
        if matrix.view == FULL:
            return dense
        half = np.tril(dense, -1) if matrix.view == LOWER else np.triu(dense, 1)
        turned = half.conj().T if matrix.kind in (HERMITIAN, HPD) else half.T
        return half + turned + np.diag(np.diag(dense))

    @staticmethod
    def dense(said):
        flat = memory.array_at(said.at, said.value, (said.columns - 1) * said.ld + said.rows)
        steps = said.value.itemsize, said.ld * said.value.itemsize
        return np.lib.stride_tricks.as_strided(flat, (said.rows, said.columns), steps)


class Handle:
    def follow(self):
        return cudss.cudssHandle_t(1)


def executor_of(monkeypatch, copy):
    """What plans are made for; `copy` stands for the kernel that copies. `library` says what was called."""
    library = Library()
    monkeypatch.setattr(factors, "cudss", library)
    monkeypatch.setattr(factors, "handle_of", lambda _: Handle())
    monkeypatch.setattr(plans, "Copy", copy)

    def fill(at, value, number, _):
        memory.array_at(at, np.uint32, number)[...] = value

    monkeypatch.setattr(plans, "driver", SimpleNamespace(cuMemsetD32Async=fill))
    device = SimpleNamespace(allocate=lambda nbytes, _: memory.Memory(nbytes), alive=True)
    workspace = SimpleNamespace(c_ptr=ctypes.c_void_p(memory.PLACEHOLDER))
    stream, target = SimpleNamespace(done=lambda: None), SimpleNamespace(value=0)
    return SimpleNamespace(
        workspace=workspace, target=target, stream=stream, device=device, library=library, at_close=[]
    )
