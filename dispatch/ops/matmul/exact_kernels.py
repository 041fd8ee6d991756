"""Epilogue kernels of our own: they read products in the compute type and are compiled by NVRTC.

exact.py launches them after `cublasLtMatmul` where the library itself would round too early, or approximate too
roughly. A process compiles them for its first plan with each dtype. This file knows no request.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.errors import LibraryNotFound, NvrtcError
from dispatch.device.disposal import load_kernel
from dispatch.device.once_per_gpu import OncePerGpu
from dispatch.errors import Refused
from dispatch.keys import BF16, F16, F32, F64, Dtype
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.ops.matmul.reference import GELU_CUBIC, GELU_INNER

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["CONSTANTS", "KERNELS", "NAMES", "Functions", "Launch", "Matrix", "Work", "cubin", "functions"]

# T is the dtype of the sums; S, that of D, C, bias, aux and bias gradients, is Half, Brain or double. Matrices are
# column-major; `step` is the batch stride.
KERNELS = r"""
typedef long long Int;
typedef SUM_TYPE T;
typedef STORED_TYPE S;
struct Matrix { void* at; Int ld, step; };
struct Work {
    Matrix product, d, c, aux, bias, sums;
    Int rows, columns, batch, activation;  // 1 is ReLU, 2 GELU
    T* beta_at;
    T beta;
};

template <class Element> __device__ Element& at(const Matrix& m, Int row, Int column, Int batch)
{
    return ((Element*)m.at)[batch * m.step + column * m.ld + row];
}

__device__ T affine(const Work& w, Int row, Int column, Int batch)
{
    T x = at<T>(w.product, row, column, batch);
    T beta = w.beta_at ? *w.beta_at : w.beta;
    if (w.c.at && beta != 0) x += beta * read(at<S>(w.c, row, column, batch));  // with beta 0, C may hold anything
    if (w.bias.at) x += read(at<S>(w.bias, row, 0, batch));
    return x;
}

// With s = 1 / (1 + exp(-2 u)), 1 + tanh(u) is 2 s: so nothing cancels where tanh(u) is near -1. `rest` is 1 - s.
__device__ void split(T x, T& s, T& rest)
{
    T u = T(INNER) * (x + T(CUBIC) * x * x * x), e = exp(-2 * (u < 0 ? -u : u)), large = 1 / (1 + e);
    s = u < 0 ? e * large : large;
    rest = u < 0 ? large : e * large;
}

#define EACH \
    for (Int batch = blockIdx.z; batch < w.batch; batch += gridDim.z) \
        for (Int column = blockIdx.y; column < w.columns; column += gridDim.y)

extern "C" __global__ void forward(Work w)
{
    Int row = blockIdx.x * Int(blockDim.x) + threadIdx.x;
    if (row >= w.rows) return;
    EACH {
        T x = affine(w, row, column, batch), s, rest;
        if (w.activation == 2) {
            if (w.aux.at) write(at<S>(w.aux, row, column, batch), x);
            split(x, s, rest);
            x *= s;
        } else if (w.activation == 1) {
            x = x < 0 ? T(0) : x;  // of NaN, NaN
        }
        write(at<S>(w.d, row, column, batch), x);
    }
}

// The bit mask of a ReLU, a byte for each thread; the steps of aux are in bits.
extern "C" __global__ void mask(Work w)
{
    Int row = 8 * (blockIdx.x * Int(blockDim.x) + threadIdx.x);
    if (row >= w.rows) return;
    EACH {
        int bits = 0;
        for (int i = 0; i < 8 && row + i < w.rows; ++i) bits |= (affine(w, row + i, column, batch) > 0) << i;
        ((unsigned char*)w.aux.at)[(batch * w.aux.step + column * w.aux.ld + row) / 8] = bits;
    }
}

extern "C" __global__ void backward(Work w)
{
    Int row = blockIdx.x * Int(blockDim.x) + threadIdx.x;
    if (row >= w.rows) return;
    EACH {
        T x = read(at<S>(w.aux, row, column, batch)), s, rest, gradient = affine(w, row, column, batch);
        split(x, s, rest);
        gradient *= s + 2 * x * s * rest * (T(INNER) * (1 + 3 * T(CUBIC) * x * x));
        at<T>(w.product, row, column, batch) = gradient;
        write(at<S>(w.d, row, column, batch), gradient);
    }
}

extern "C" __global__ void sum_columns(Work w)
{
    __shared__ T part[LINES][WARP];
    Int row = blockIdx.x * Int(WARP) + threadIdx.x;
    for (Int batch = blockIdx.z; batch < w.batch; batch += gridDim.z) {
        T sum = 0;
        if (row < w.rows)
            for (Int column = threadIdx.y; column < w.columns; column += LINES)
                sum += at<T>(w.product, row, column, batch);
        part[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y == 0 && row < w.rows) {
            for (int line = 1; line < LINES; ++line) sum += part[line][threadIdx.x];
            write(at<S>(w.sums, row, 0, batch), sum);
        }
        __syncthreads();
    }
}
"""
WARP, LINES = 32, 8
CONSTANTS = {"INNER": repr(GELU_INNER), "CUBIC": repr(GELU_CUBIC), "WARP": WARP, "LINES": LINES}  # macros of KERNELS
TYPES = {F64: ("double", "double"), F16: ("float", "Half"), BF16: ("float", "Brain")}  # T and S by dtype of D
NAMES = ("forward", "mask", "backward", "sum_columns")
THREADS = 256
MAX_BLOCKS = 65535  # a grid's limit along y and z
Functions = dict[str, int]


class Matrix(ctypes.Structure):
    """A matrix or vector: struct Matrix of KERNELS."""

    _fields_ = (("at", ctypes.c_void_p), ("ld", ctypes.c_int64), ("step", ctypes.c_int64))


class Work(ctypes.Structure):
    """The only parameter of every kernel: struct Work of KERNELS. Kernels read `beta` in the dtype of the sums."""

    _fields_ = (
        *((name, Matrix) for name in ("product", "d", "c", "aux", "bias", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "batch", "activation")),
        ("beta_at", ctypes.c_void_p),
        ("beta", ctypes.c_double),
    )

    def set_beta(self, value: float, sums: Dtype) -> None:
        """Set beta, in the dtype of the sums."""
        kind = ctypes.c_float if sums is F32 else ctypes.c_double
        kind.from_buffer(self, Work.beta.offset).value = value


class Launch:
    """The launch of one kernel with a Work, whose fields but the extents may change from run to run."""

    def __init__(self, function: int, name: str, work: Work, executor: CudaExecutor) -> None:
        high, wide, block = min(work.batch, MAX_BLOCKS), min(work.columns, MAX_BLOCKS), (THREADS, 1, 1)
        rows = -(-work.rows // 8) if name == "mask" else work.rows
        if name == "sum_columns":
            wide, block = 1, (WARP, LINES, 1)
        grid = (-(-rows // block[0]), wide, high)
        self.name, self._work = name, work  # the parameters point to it: it must stay alive
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(work))
        fixed = (*grid, *block, 0, executor.target, self._pointers, None)
        self._launch = partial(_launch_function(), ctypes.c_void_p(function), *fixed)

    def __call__(self) -> int:
        """Enqueue the kernel; returns the driver's status."""
        status: int = self._launch()
        return status


def _launch_function() -> Any:
    return driver.cuLaunchKernel.unchecked


_loaded: OncePerGpu[Dtype, tuple[Any, Functions]] = OncePerGpu()  # each with its module


def functions(executor: CudaExecutor, dtype: Dtype) -> Functions:
    """The kernels for a dtype of D on this device, loaded once for all plans; Refused where they cannot be compiled."""

    def load() -> tuple[Any, Functions]:
        module = driver.cuModuleLoadData(cubin(f"{executor.device.arch}", dtype))
        kernels = {name: int(driver.cuModuleGetFunction(module, name.encode())) for name in NAMES}
        for kernel in kernels.values():
            load_kernel(kernel)
        return module, kernels

    return _loaded.get(executor.device, dtype, load)[1]


@cache
def cubin(arch: str, dtype: Dtype) -> bytes:
    """The kernels for an architecture, such as "sm_90"; Refused with the reason where they cannot be compiled."""
    sums, stored = TYPES[dtype]
    macros = {**CONSTANTS, "SUM_TYPE": sums, "STORED_TYPE": stored}
    options = (f"-arch={arch}", "-std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))
    try:
        return compiled(NUMBERS + KERNELS, "epilogue", options)
    except (LibraryNotFound, NvrtcError) as error:
        raise Refused(f"NVRTC compiles no kernel for an epilogue of {dtype}: {error}") from error
