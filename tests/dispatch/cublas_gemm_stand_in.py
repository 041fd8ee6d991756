"""cuBLAS's products over memory of the host, by NumPy: what `dispatch.ops.matmul.cublas` calls where no GPU is.

It is given what the library would be, and looks at no request: the order of arguments, leading dimensions, steps and
where numbers are read are held to what it makes of them.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cudabind.sys import cublas as real
from dispatch.keys import BF16, C64, C128, F16, F32, F64, I8, I32
from dispatch.libraries.cublas.handle import MATH
from dispatch.ops.matmul import cublas as bound
from dispatch.ops.matmul import cublas_pointers

DTYPES = {dtype.cuda: dtype.numpy for dtype in (F16, BF16, F32, F64, C64, C128, I8, I32)}
COMPUTE = {64: F16, 68: F32, 70: F64, 72: I32, 74: F32, 75: F32, 77: F32, 78: F32, 79: F64}
NOT_SUPPORTED = 15


def matrix(address, rows, columns, ld, dtype):
    """A column-major matrix at an address."""
    assert ld >= max(rows, 1), f"a leading dimension of {ld} for {rows} rows"
    if rows * columns == 0:
        return np.zeros((rows, columns), dtype)
    size = np.dtype(dtype).itemsize
    raw = (ctypes.c_char * ((ld * (columns - 1) + rows) * size)).from_address(address)
    return as_strided(np.frombuffer(raw, dtype), (rows, columns), (size, ld * size))


def number(address, dtype):
    return np.frombuffer((ctypes.c_char * np.dtype(dtype).itemsize).from_address(address), dtype)[0]


class Library:
    """What `cudabind.sys.cublas` is to plans: `modes` and `names` tell what was called."""

    def __init__(self):
        self.on_device, self.math, self.modes, self.names, self.status = False, MATH, [], [], 0

    def __getattr__(self, name):
        if not name.startswith("cublasGemm") or name == "cublasGemmAlgo_t":
            return getattr(real, name)

        def unchecked(handle, *arguments):
            assert handle == "handle"
            self.names.append(name)
            self.modes.append((self.on_device, self.math))
            if not self.status:
                given = [one.value if isinstance(one, ctypes.c_void_p) else one for one in arguments]
                getattr(self, f"_{name.removesuffix('_64')}")(*given)
            return self.status

        return SimpleNamespace(
            unchecked=unchecked, __name__=name, error=lambda status: RuntimeError(f"status {status}")
        )

    def cublasSetMathMode(self, handle, mode):
        assert handle == "handle"
        self.math = mode

    def follow(self, _, *, on_device=False):
        self.on_device = on_device
        return "handle"

    def _cublasGemmEx(self, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, *rest):
        batch = (op_a, op_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1)
        self._cublasGemmStridedBatchedEx(*batch, *rest)

    def _cublasGemmBatchedEx(self, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, *rest):
        ldc, batch, compute, algo = rest
        lists = (np.frombuffer((ctypes.c_int64 * batch).from_address(one), np.int64).tolist() for one in (a, b, c))
        wide = [DTYPES[int(one)].itemsize >= 4 for one in (a_type, b_type, c_type)]
        for one, other, target in zip(*lists, strict=True):
            if not (all(wide) and int(compute) in (68, 70)):
                assert not any(address % 16 for address in (one, other, target))
            given = (op_a, op_b, m, n, k, alpha, one, a_type, lda, 0, other, b_type, ldb, 0, beta, target, c_type, ldc)
            self._cublasGemmStridedBatchedEx(*given, 0, 1, compute, algo)

    def _cublasGemmStridedBatchedEx(self, op_a, op_b, m, n, k, *rest):
        alpha, a, a_type, lda, step_a, b, b_type, ldb, step_b, beta, *rest = rest
        c, c_type, ldc, step_c, batch, compute, algo = rest
        assert algo == -1
        types = [DTYPES[int(one)] for one in (a_type, b_type, c_type)]
        scale = COMPUTE[int(compute)].numpy
        if types[0].kind == "c":
            scale = np.result_type(scale, np.complex64)
        alpha, beta = (number(one, scale) for one in (alpha, beta))
        work = np.int64 if scale.kind == "i" else np.result_type(scale, np.float32)
        for place in range(batch):
            at = [
                address + place * step * dtype.itemsize
                for address, step, dtype in zip((a, b, c), (step_a, step_b, step_c), types, strict=True)
            ]
            one = matrix(at[0], *((k, m) if op_a else (m, k)), lda, types[0]).astype(work)
            other = matrix(at[1], *((n, k) if op_b else (k, n)), ldb, types[1]).astype(work)
            target = matrix(at[2], m, n, ldc, types[2])
            found = alpha.astype(work) * ((one.T if op_a else one) @ (other.T if op_b else other))
            if beta != 0:
                found = found + beta.astype(work) * target.astype(work)
            target[...] = found.astype(types[2])


class Copy:
    """The kernel that copies C to D."""

    def __init__(self, _, source, target, batch, keep, *, conj):
        assert (keep, conj) == (0, False)
        assert (source.rows, source.cols) == (target.rows, target.cols)
        self.given = source, target, batch

    def enqueue(self, addresses):
        source, target, batch = self.given
        for place in range(batch):
            one, other = (
                matrix(
                    addresses[each.pointer.operand] + each.pointer.offset + place * each.pointer.batch_stride,
                    *(each.rows, each.cols, each.col_stride, each.dtype.numpy),
                )
                for each in (source, target)
            )
            other[...] = one


class Pointers:
    """A list of addresses in memory of the host."""

    def __init__(self, executor, index, offsets):
        self.index, self.offsets = index, np.array(offsets, np.int64)
        self.found = np.zeros_like(self.offsets)
        self.address = ctypes.c_void_p(self.found.ctypes.data)

    def enqueue(self, arguments):
        self.found[...] = arguments[self.index] + self.offsets


class Executor:
    """One whose plans call the stand-in; what it holds in memory stays there."""

    def __init__(self, monkeypatch):
        self.library, self.target, self.kept = Library(), ctypes.c_void_p(), []
        self.stream = SimpleNamespace(done=lambda: None)
        for module in (bound, cublas_pointers):
            monkeypatch.setattr(module, "cublas", self.library)
        monkeypatch.setattr(cublas_pointers, "PointerArray", Pointers)
        monkeypatch.setattr(bound, "handle_of", lambda _: self.library)
        monkeypatch.setattr(bound, "Copy", Copy)
        monkeypatch.setattr(bound, "kernels", lambda *_: None)

    def scalar(self, value, dtype):
        return self.hold(np.array([value], dtype.numpy))

    def zeros(self, nbytes):
        return self.hold(np.zeros(nbytes, np.uint8))

    def hold(self, array):
        self.kept.append(array)
        return array.ctypes.data
