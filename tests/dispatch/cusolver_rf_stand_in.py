"""cuSOLVER's refactorization over memory of the host, by NumPy, as strict as the library and without exchanges of rows.

Whatever values come, L and U have no elements but those that they were set up with.
"""

import ctypes
import importlib.util
import inspect
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.errors import CudaError
from cudabind.sys import cusolverRf
from dispatch.libraries.cusolver import refactor
from dispatch.ops.sparse import cusolver_refactor as plans

spec = importlib.util.spec_from_file_location("cusparse_memory", Path(__file__).with_name("cusparse_memory.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

ZERO_PIVOT, INVALID_VALUE = 10, 3


def pattern_at(n, nnz, offsets, columns, values):
    """The dense matrix, and where it has elements."""
    ends, places = (memory.array_at(at.value, np.int32, size) for at, size in ((offsets, n + 1), (columns, nnz)))
    assert ends[0] == 0
    assert ends[-1] == nnz
    rows = np.repeat(np.arange(n), np.diff(ends))
    assert all((np.diff(places[low:high]) > 0).all() for low, high in pairwise(ends))
    dense, mask = np.zeros((n, n)), np.zeros((n, n), bool)
    dense[rows, places], mask[rows, places] = memory.array_at(values.value, np.float64, nnz), True
    return dense, mask


def orders(n, p, q):
    found = [memory.array_at(one.value, np.int32, n).copy() for one in (p, q)]
    assert all(np.array_equal(np.sort(one), np.arange(n)) for one in found)
    return found


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def unchecked(self, *arguments):
        declared = getattr(cusolverRf, self.name)
        assert len(arguments) == len(inspect.signature(declared).parameters), self.name
        self.library.called.append(self.name.removeprefix("cusolverRf"))
        return getattr(self.library, f"_{self.name.removeprefix('cusolverRf')}")(*arguments) or 0

    def error(self, status):
        return CudaError("cusolverRf", self.name, status, "", "")


class Library:
    """`called` are the functions that were; `alive` the handles."""

    def __init__(self):
        self.called, self.alive, self.numbers = [], {}, count(1)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if name.startswith("cusolverRf") and not name.endswith("_t"):
            return Function(self, name)
        return getattr(cusolverRf, name)

    def _Create(self, handle):
        handle.value = next(self.numbers)
        self.alive[handle.value] = SimpleNamespace(format=None, fill=None, is_analysed=False, reset=None, factors=None)

    def _Destroy(self, handle):
        del self.alive[handle.value]

    def _SetMatrixFormat(self, handle, kind, diagonal):
        assert isinstance(kind, cusolverRf.cusolverRfMatrixFormat_t)
        assert isinstance(diagonal, cusolverRf.cusolverRfUnitDiagonal_t)
        self.alive[handle.value].format = kind.name, diagonal.name

    def _SetupHost(self, n, *rest):
        *parts, p, q, handle = rest
        found = self.alive[handle.value]
        assert found.format == ("CUSOLVERRF_MATRIX_FORMAT_CSR", "CUSOLVERRF_UNIT_DIAGONAL_ASSUMED_L")
        (_, a), (_, low), (_, high) = (pattern_at(n, *parts[k : k + 4]) for k in (0, 4, 8))
        p, q = orders(n, p, q)
        assert not np.triu(low).any(), "L is given without its diagonal"
        assert not np.tril(high, -1).any()
        assert np.diag(high).all()
        assert not (a[p][:, q] & ~(low | high)).any(), "fill has the places of A"
        found.pattern, found.fill, found.order = a, low | high, (p, q)

    def _Analyze(self, handle):
        assert self.alive[handle.value].fill is not None
        self.alive[handle.value].is_analysed = True

    def _ResetValues(self, n, nnz, rows, columns, values, p, q, handle):
        found = self.alive[handle.value]
        assert found.is_analysed
        dense, mask = pattern_at(n, nnz, rows, columns, values)
        assert np.array_equal(mask, found.pattern), "another pattern"
        assert all(map(np.array_equal, orders(n, p, q), found.order))
        found.reset, found.factors = dense, None

    def _Refactor(self, handle):
        found = self.alive[handle.value]
        p, q = found.order
        left = found.reset[p][:, q]
        for i in range(len(left)):
            if left[i, i] == 0:
                return ZERO_PIVOT
            left[i + 1 :, i] /= left[i, i]
            left[i + 1 :, i + 1 :] -= np.outer(left[i + 1 :, i], left[i, i + 1 :])
            left[~found.fill] = 0
        found.factors = np.tril(left, -1) + np.eye(len(left)), np.triu(left)
        return 0

    def _Solve(self, handle, p, q, sides, work, ld_work, x, ld_x):
        found = self.alive[handle.value]
        low, high = found.factors
        n = len(low)
        assert (sides, ld_work, ld_x) == (1, n, n)
        assert all(map(np.array_equal, orders(n, p, q), found.order))
        memory.array_at(work.value, np.float64, n)[...] = np.nan
        right = memory.array_at(x.value, np.float64, n)
        solved = np.linalg.solve(high, np.linalg.solve(low, right[found.order[0]]))
        right[found.order[1]] = solved


def executor_of(monkeypatch, copy):
    """What plans are made for; `copy` stands for the kernel that copies. `library` says what was called."""
    library = Library()
    monkeypatch.setattr(refactor, "cusolverRf", library)
    monkeypatch.setattr(plans, "Copy", copy)

    def fill(at, value, number, _):
        memory.array_at(at, np.uint32, number)[...] = value

    def move(to, source, nbytes, _):
        ctypes.memmove(to, source, nbytes)

    waited = []
    driver = SimpleNamespace(
        cuMemsetD32Async=fill, cuMemcpyDtoHAsync=move, cuMemcpyHtoDAsync=move, cuStreamSynchronize=waited.append
    )
    monkeypatch.setattr(plans, "driver", driver)
    device = SimpleNamespace(allocate=lambda nbytes, _: memory.Memory(nbytes), alive=True)
    stream, target = SimpleNamespace(done=lambda: None), SimpleNamespace(value=5)
    return SimpleNamespace(device=device, stream=stream, target=target, library=library, waited=waited)
