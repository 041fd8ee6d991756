"""cuBLASLt over memory of the host, by NumPy, whose descriptors are the library's own: products run without a GPU."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cudabind.errors import LibraryNotFound
from cudabind.sys import cublasLt
from dispatch.ops.contraction import cublaslt

DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 4: np.complex64, 5: np.complex128, 14: ml_dtypes.bfloat16}


def strided(address, dtype, shape, strides):
    """An array over memory; strides in elements, none below 0."""
    size = np.dtype(dtype).itemsize
    reach = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * size
    flat = np.frombuffer((ctypes.c_char * reach).from_address(address), np.uint8)
    return np.ndarray(shape, dtype, flat, 0, tuple(stride * size for stride in strides))


class Lt:
    """cuBLASLt, whose descriptors are its own, and whose products are NumPy's, at the addresses that it is given."""

    def __init__(self):
        self.cublasLtMatmul = SimpleNamespace(unchecked=self.multiply)

    def __getattr__(self, name):
        return getattr(cublasLt, name)

    @staticmethod
    def asked(function, descriptor, attribute, kind):
        found = kind()
        function(descriptor, attribute, ctypes.byref(found), ctypes.sizeof(found), ctypes.byref(ctypes.c_size_t()))
        return found.value

    def matrix(self, address, layout, transposed):
        ask, names = cublasLt.cublasLtMatrixLayoutGetAttribute, cublasLt.cublasLtMatrixLayoutAttribute_t
        kinds = {"ROWS": ctypes.c_uint64, "COLS": ctypes.c_uint64, "LD": ctypes.c_int64, "TYPE": ctypes.c_uint32,
                 "BATCH_COUNT": ctypes.c_int32, "STRIDED_BATCH_OFFSET": ctypes.c_int64}  # fmt: skip
        rows, cols, ld, dtype, batch, step = (
            self.asked(ask, layout, names[f"CUBLASLT_MATRIX_LAYOUT_{name}"], kind) for name, kind in kinds.items()
        )
        assert ld >= rows
        found = strided(address.value, DTYPES[dtype], (batch, rows, cols), (step, 1, ld))
        return found.transpose(0, 2, 1) if transposed else found

    def multiply(self, handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algo, work, size, stream):
        ask, names = cublasLt.cublasLtMatmulDescGetAttribute, cublasLt.cublasLtMatmulDescAttributes_t
        assert (handle, stream, size.value) == ("handle", 7, 256)
        turns = [self.asked(ask, operation, names[f"CUBLASLT_MATMUL_DESC_TRANS{x}"], ctypes.c_int32) for x in "AB"]
        scale = self.asked(ask, operation, names.CUBLASLT_MATMUL_DESC_SCALE_TYPE, ctypes.c_int32)
        numbers = [strided(one.value, DTYPES[scale], (), ())[()] for one in (alpha, beta)]
        left, right = self.matrix(a, of_a, turns[0]), self.matrix(b, of_b, turns[1])
        found = numbers[0] * (left.astype("c16") @ right.astype("c16"))
        if numbers[1]:
            found += numbers[1] * self.matrix(c, of_c, False).astype("c16")
        result = self.matrix(d, of_d, False)
        result[...] = found if result.dtype.kind == "c" else found.real
        return 0


def install(monkeypatch, executor):
    """Have contractions that are products call it; `executor.problems` are what the heuristic was asked."""
    try:
        cublasLt.cublasLtGetVersion()
    except LibraryNotFound as error:
        pytest.skip(f"its descriptors are the library's own: {error}")
    monkeypatch.setattr(cublaslt, "lt", Lt())
    monkeypatch.setattr(cublaslt, "handle_of", lambda _: "handle")
    executor.problems = []

    def heuristic(_handle, _descriptors, problem, _limit):
        executor.problems.append(problem)
        return (SimpleNamespace(algo=cublasLt.cublasLtMatmulAlgo_t(), workspaceSize=256),)

    monkeypatch.setattr(cublaslt, "heuristic", heuristic)
