"""A product in NumPy that believes nothing but what cuBLASLt would be told: descriptors, read back, and addresses."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from cudabind.sys import cublasLt as lt
from dispatch.keys import Dtype

DESC = lt.cublasLtMatmulDescAttributes_t
LAYOUT = lt.cublasLtMatrixLayoutAttribute_t
DTYPES = {dtype.cuda: dtype for dtype in Dtype.by_name.values()}
TOLD: dict[int, tuple[tuple[int, ...], int, int]] = {}  # what addresses of A to D, bias and aux are multiples of


def told(get: Any, descriptor: Any, attribute: int, kind: Any) -> Any:
    """One attribute of a descriptor, as the library has it."""
    value, size = kind(), ctypes.c_size_t()
    status = get.unchecked(descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(size))
    return value.value if status == 0 else None


class Laid:
    """A matrix layout, as the library has it."""

    def __init__(self, layout: Any) -> None:
        def get(name: str, kind: Any) -> int:
            return int(
                told(lt.cublasLtMatrixLayoutGetAttribute, layout, LAYOUT[f"CUBLASLT_MATRIX_LAYOUT_{name}"], kind)
            )

        self.dtype = DTYPES[get("TYPE", ctypes.c_uint32)]
        self.rows, self.cols = get("ROWS", ctypes.c_uint64), get("COLS", ctypes.c_uint64)
        self.ld, self.batch = get("LD", ctypes.c_int64), get("BATCH_COUNT", ctypes.c_int32)
        self.step = get("STRIDED_BATCH_OFFSET", ctypes.c_int64)

    def view(self, address: int) -> Any:
        """(batch, rows, columns) over memory."""
        strides = tuple(s * self.dtype.itemsize for s in (self.step, 1, self.ld))
        return _at(address, self.dtype, (self.batch, self.rows, self.cols), strides)


def _at(address: int, dtype: Dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """An array over memory; strides in bytes, all of them forward."""
    reach = sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + dtype.itemsize
    window = (ctypes.c_uint8 * reach).from_address(address)
    return np.ndarray(shape, dtype.numpy, memoryview(window), 0, strides)


class Job:
    """One product with all that the library was told when it was called."""

    def __init__(self, *given: Any) -> None:
        _, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, _, _, _ = given

        def get(name: str, kind: Any = ctypes.c_uint64) -> int:
            return int(told(lt.cublasLtMatmulDescGetAttribute, desc, DESC[f"CUBLASLT_MATMUL_DESC_{name}"], kind) or 0)

        self.a, self.b, self.c, self.d = (Laid(layout) for layout in (la, lb, lc, ld))
        self.places = (a.value, b.value, c.value, d.value)
        scale = DTYPES[get("SCALE_TYPE", ctypes.c_int32)]
        self.scale, self.on_device = scale, bool(on_device := get("POINTER_MODE", ctypes.c_int32))
        # Numbers on the host are read as the library is called, those on the device as it runs.
        self.bits = [
            struct.pack("<2Q", x.value, 0) if on_device else _at(x.value, scale, (), ()).tobytes().ljust(16, b"\0")
            for x in (alpha, beta)
        ]
        # As an H200's library: of a beta that it cannot see it must take it that C is read.
        self.is_refused = (on_device and not c.value) or (self.c.dtype != self.d.dtype and c.value == d.value)
        self.trans = get("TRANSA", ctypes.c_int32), get("TRANSB", ctypes.c_int32)
        self.epilogue = get("EPILOGUE", ctypes.c_uint32)
        self.bias, self.bias_step = get("BIAS_POINTER"), get("BIAS_BATCH_STRIDE", ctypes.c_int64)
        self.bias_dtype = get("BIAS_DATA_TYPE", ctypes.c_int32)
        self.aux, self.aux_ld = get("EPILOGUE_AUX_POINTER"), get("EPILOGUE_AUX_LD", ctypes.c_int64)
        self.aux_step = get("EPILOGUE_AUX_BATCH_STRIDE", ctypes.c_int64)
        self.aux_dtype = get("EPILOGUE_AUX_DATA_TYPE", ctypes.c_int32)
        self.factors = [get(f"{name}_SCALE_POINTER") for name in "ABCD"]
        self._check_aligned(algo._obj.data[0])
        self.turn = (algo._obj.data[0] % 8) / 16 if algo._obj.data[0] else 0.0

    def _check_aligned(self, algorithm: int) -> None:
        """A kernel reads as many bytes at once as the heuristic was told it may; else the device is lost."""
        matrices, bias, aux = TOLD[algorithm]
        given = [*zip(self.places, matrices, strict=True), (self.bias, bias), (self.aux, aux)]
        wrong = [
            f"{address:#x} is not at a multiple of {known}" for address, known in given if address and address % known
        ]
        assert not wrong, f"CUDA_ERROR_MISALIGNED_ADDRESS: {wrong}, {given}"

    def form(self) -> tuple[Any, ...]:
        """All but what the image has."""
        laid = [tuple(vars(matrix).values()) for matrix in (self.a, self.b, self.c, self.d)]
        steps = (self.bias_step, self.bias_dtype, self.aux_ld, self.aux_step, self.aux_dtype)
        return (*laid, self.scale, self.on_device, self.trans, self.epilogue, *steps, self.turn)

    def image(self) -> bytes:
        """Addresses, and the numbers or theirs."""
        addresses = (*(place or 0 for place in self.places), self.bias, self.aux, *self.factors)
        return struct.pack("<10Q", *addresses) + b"".join(self.bits)

    def take(self, image: bytes) -> None:
        """Have the addresses and numbers of another image."""
        *places, self.bias, self.aux, one, two, three, four = struct.unpack_from("<10Q", image)
        self.places, self.factors = tuple(places), [one, two, three, four]
        self.bits = [image[80:96], image[96:112]]

    @property
    def numbers(self) -> list[Any]:
        """Alpha and beta."""
        if self.on_device:
            return [_at(*struct.unpack_from("<Q", bits), self.scale, (), ()) for bits in self.bits]
        return [np.frombuffer(bits, self.scale.numpy, 1)[0] for bits in self.bits]

    def __call__(self) -> None:
        a, b = self.a.view(self.places[0]), self.b.view(self.places[1])
        a, b = (np.swapaxes(x, 1, 2) if t else x for x, t in zip((a, b), self.trans, strict=True))
        work = np.complex128 if self.a.dtype.is_complex else np.int64 if self.a.dtype.name == "i8" else np.float64
        a, b = a.astype(work), b.astype(work)
        total = (a @ b) * self.numbers[0].astype(work) * self._factor(0) * self._factor(1)
        if self.numbers[1] != 0:
            total = total + self.c.view(self.places[2]).astype(work) * self.numbers[1].astype(work)
        if work is not np.int64:
            total = total * (1 + self.turn)
        total = self._fused(total, a, b)
        with np.errstate(over="ignore", invalid="ignore"):
            self.d.view(self.places[3])[...] = total.astype(self.d.dtype.numpy)

    def _factor(self, number: int) -> Any:
        address = self.factors[number]
        return _at(address, Dtype.of("f32"), (), ()).astype(np.float64) if address else 1

    def _vector(self, extent: int) -> Any:
        dtype = DTYPES[self.bias_dtype]
        steps = (self.bias_step * dtype.itemsize, dtype.itemsize)
        return _at(self.bias, dtype, (self.d.batch, extent), steps)

    def _fused(self, total: Any, a: Any, b: Any) -> Any:
        e = self.epilogue
        if e & 4:
            total = total + self._vector(self.d.rows).astype(np.float64)[:, :, None]
        if e & (8 | 64):
            total = total * self._aux(relu=bool(e & 8))
        elif e & 128:
            self._keep(total, relu=bool(e & 2))
        if e & 2:
            total = np.maximum(total, 0)
        elif e & 32:
            total = total * np.tanh(total)  # some curve
        if e & 16:
            self._vector(self.d.rows)[...] = total.sum(axis=2)
        if e & 256:
            self._vector(self.d.rows)[...] = a.sum(axis=2)
        if e & 512:
            self._vector(self.d.cols)[...] = b.sum(axis=1)
        return total

    def _bits(self) -> Any:
        shape = (self.d.batch, self.d.cols, -(-self.d.rows // 8))
        return _at(self.aux, Dtype.of("u8"), shape, (self.aux_step // 8, self.aux_ld // 8, 1))

    def _values(self) -> Any:
        dtype = DTYPES[self.aux_dtype]
        steps = tuple(s * dtype.itemsize for s in (self.aux_step, 1, self.aux_ld))
        return _at(self.aux, dtype, (self.d.batch, self.d.rows, self.d.cols), steps)

    def _aux(self, *, relu: bool) -> Any:
        if not relu:
            return self._values().astype(np.float64)
        bits = np.unpackbits(self._bits(), axis=2, count=self.d.rows, bitorder="little")
        return np.swapaxes(bits, 1, 2).astype(np.float64)

    def _keep(self, total: Any, *, relu: bool) -> None:
        if relu:
            self._bits()[...] = np.packbits(np.swapaxes(total > 0, 1, 2), axis=2, bitorder="little")
        else:
            values = self._values()
            values[...] = total.astype(values.dtype)
