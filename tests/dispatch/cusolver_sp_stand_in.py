"""cuSOLVER's solves with sparse matrices over memory of the host, by NumPy, as strict as the library."""

import ctypes
import importlib.util
import inspect
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.errors import CudaError
from cudabind.sys import cusolverSp, cusparse
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver import sparse
from dispatch.ops.sparse import cusolver as plans

spec = importlib.util.spec_from_file_location("cusparse_memory", Path(__file__).with_name("cusparse_memory.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

DTYPES = {"S": F32.numpy, "D": F64.numpy, "C": C64.numpy, "Z": C128.numpy}


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def unchecked(self, handle, n, nnz, descriptor, *rest):
        signature = inspect.signature(getattr(cusolverSp, self.name))
        assert 4 + len(rest) == len(signature.parameters)
        assert isinstance(handle, cusolverSp.cusolverSpHandle_t)
        assert isinstance(descriptor, cusolverSp.cusparseMatDescr_t)
        values, rows, columns, b, tolerance, reorder, x, failed = rest
        assert type(n) is type(nnz) is type(reorder) is int
        assert type(tolerance) is float
        assert all(isinstance(one, ctypes.c_void_p) for one in (values, rows, columns, b, x))
        self.library.called.append(self.name)
        dtype, base = DTYPES[self.name[len("cusolverSp")]], self.library.alive[descriptor.value]
        ends = memory.array_at(rows.value, np.int32, n + 1) - base
        places = memory.array_at(columns.value, np.int32, nnz) - base
        dense = np.zeros((n, n), np.result_type(dtype, np.float64))
        dense[np.repeat(np.arange(n), np.diff(ends)), places] = memory.array_at(values.value, dtype, nnz)
        failed._obj.value = self.failure(dense)
        if failed._obj.value < 0:
            right = memory.array_at(b.value, dtype, n)
            memory.array_at(x.value, dtype, n)[...] = np.linalg.solve(dense, right)
        return 0

    def failure(self, dense):
        if "chol" in self.name:
            assert np.array_equal(dense, dense.conj().T), "both triangles are stored"
            minors = [np.linalg.eigvalsh(dense[:k, :k]).min() > 0 for k in range(1, len(dense) + 1)]
            return minors.index(False) if False in minors else -1
        small = np.abs(np.diag(np.linalg.qr(dense)[1])) < 1e-12
        return int(small.argmax()) if small.any() else -1

    def error(self, status):
        return CudaError("cusolverSp", self.name, status, "", "")


class Library:
    """The functions of both libraries; `alive` are the descriptors."""

    def __init__(self):
        self.called, self.alive, self.numbers = [], {}, count(1)
        self.cusparseDestroyMatDescr = SimpleNamespace(unchecked=lambda descriptor: self.alive.pop(descriptor.value))

    def __getattr__(self, name):
        if name.startswith("cusolverSp") and "csrlsv" in name:
            return Function(self, name)
        return getattr(cusolverSp if name.startswith("cusolver") else cusparse, name)

    def cusparseCreateMatDescr(self, descriptor):
        descriptor.value = next(self.numbers)
        self.alive[descriptor.value] = 0

    def cusparseSetMatIndexBase(self, descriptor, base):
        assert isinstance(base, cusparse.cusparseIndexBase_t)
        self.alive[descriptor.value] = int(base)


def executor_of(monkeypatch, copy):
    """What plans are made for; `copy` stands for the kernel that copies. `library` says what was called."""
    library = Library()
    for name in ("cusolverSp", "cusparse"):
        monkeypatch.setattr(sparse, name, library)
    follow = SimpleNamespace(follow=lambda: cusolverSp.cusolverSpHandle_t(1))
    monkeypatch.setattr(sparse, "handle_of", lambda _: follow)
    monkeypatch.setattr(plans, "Copy", copy)

    def fill(at, value, number, _):
        memory.array_at(at, np.uint32, number)[...] = value

    monkeypatch.setattr(plans, "driver", SimpleNamespace(cuMemsetD32Async=fill))
    device = SimpleNamespace(allocate=lambda nbytes, _: memory.Memory(nbytes), alive=True)
    stream, target = SimpleNamespace(done=lambda: None), SimpleNamespace(value=0)
    return SimpleNamespace(device=device, stream=stream, target=target, library=library)
