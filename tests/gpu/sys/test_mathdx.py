"""libmathdx: a Fourier transform of eight points and a product of matrices, generated as intermediate code, linked into
a kernel of this test's and run on the GPU, against NumPy."""

from __future__ import annotations

from ctypes import byref, c_char, c_int32, c_int64, c_size_t, c_void_p

import numpy as np
import pytest

from cudabind import driver, nvjitlink
from cudabind.errors import MathdxError
from cudabind.sys import mathdx

LIBRARIES = ("cuda", "nvrtc", "nvJitLink", "mathdx")
POINTS, COUNT, M, N, K = 8, 100, 32, 8, 16
TRANSFORM = """
extern "C" __device__ void {symbol}(float2 *);
extern "C" __global__ void run(const float2 *x, float2 *y) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float2 local[{points}];
    if (i >= {count}) return;
    for (int k = 0; k < {points}; ++k) local[k] = x[i * {points} + k];
    {symbol}(local);
    for (int k = 0; k < {points}; ++k) y[i * {points} + k] = local[k];
}}
"""
PRODUCT = """
extern "C" __device__ void {symbol}(float *, float *, float *, float *, float *);
extern "C" __global__ void run(const float *x, float *y) {{  // x: a, then b, then c, as the trait says they lie
    extern __shared__ __align__(16) float memory[];
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int threads = blockDim.x * blockDim.y * blockDim.z;
    float alpha = 1.5f, beta = -0.5f;
    for (int k = thread; k < {size_a} + {size_b} + {size_c}; k += threads) memory[k] = x[k];
    __syncthreads();
    {symbol}(&alpha, memory, memory + {size_a}, &beta, memory + {size_a} + {size_b});
    __syncthreads();
    for (int k = thread; k < {size_c}; k += threads) y[k] = memory[{size_a} + {size_b} + k];
}}
"""


def code_of(finalize, descriptor, sm):
    """The intermediate code of a described function."""
    code, size = c_int64(), c_size_t()
    mathdx.commondxCreateCode(byref(code))
    mathdx.commondxSetCodeOptionInt64(code.value, mathdx.commondxOption.COMMONDX_OPTION_TARGET_SM, sm)
    finalize(code.value, descriptor)
    mathdx.commondxGetCodeLTOIRSize(code.value, byref(size))
    made = (c_char * size.value)()
    mathdx.commondxGetCodeLTOIR(code.value, size.value, made)
    mathdx.commondxDestroyCode(code.value)
    return bytes(made)


def transform(sm):
    """(The symbol of a transform done by one thread, its code)."""
    made, size = c_int64(), c_size_t()
    operators = mathdx.cufftdxOperatorType
    mathdx.cufftdxCreateDescriptor(byref(made))
    for operator, value in (
        (operators.CUFFTDX_OPERATOR_API, mathdx.cufftdxApi.CUFFTDX_API_LMEM),
        (operators.CUFFTDX_OPERATOR_SIZE, POINTS),
        (operators.CUFFTDX_OPERATOR_DIRECTION, mathdx.cufftdxDirection.CUFFTDX_DIRECTION_FORWARD),
        (operators.CUFFTDX_OPERATOR_TYPE, mathdx.cufftdxType.CUFFTDX_TYPE_C2C),
        (operators.CUFFTDX_OPERATOR_PRECISION, mathdx.commondxPrecision.COMMONDX_PRECISION_F32),
        (operators.CUFFTDX_OPERATOR_SM, sm),
        (operators.CUFFTDX_OPERATOR_EXECUTION, mathdx.commondxExecution.COMMONDX_EXECUTION_THREAD),
    ):
        mathdx.cufftdxSetOperatorInt64(made.value, operator, int(value))
    trait = mathdx.cufftdxTraitType.CUFFTDX_TRAIT_SYMBOL_NAME
    mathdx.cufftdxGetTraitStrSize(made.value, trait, byref(size))
    name = (c_char * size.value)()
    mathdx.cufftdxGetTraitStr(made.value, trait, size.value, name)
    code = code_of(mathdx.cufftdxFinalizeCode, made.value, sm)
    mathdx.cufftdxDestroyDescriptor(made.value)
    return name.value.decode(), code


def product(sm):
    """(The symbol of alpha·a·b + beta·c by one block, its code, the block's dimensions)."""
    made, size, threads = c_int64(), c_size_t(), (c_int64 * 3)()
    operators, kind = mathdx.cublasdxOperatorType, int(mathdx.commondxPrecision.COMMONDX_PRECISION_F32)
    rows, columns = (getattr(mathdx.cublasdxArrangement, f"CUBLASDX_ARRANGEMENT_{n}_MAJOR") for n in ("ROW", "COL"))
    mathdx.cublasdxCreateDescriptor(byref(made))
    for operator, value in (
        (operators.CUBLASDX_OPERATOR_FUNCTION, mathdx.cublasdxFunction.CUBLASDX_FUNCTION_MM),
        (operators.CUBLASDX_OPERATOR_TYPE, mathdx.cublasdxType.CUBLASDX_TYPE_REAL),
        (operators.CUBLASDX_OPERATOR_EXECUTION, mathdx.commondxExecution.COMMONDX_EXECUTION_BLOCK),
        (operators.CUBLASDX_OPERATOR_API, mathdx.cublasdxApi.CUBLASDX_API_SMEM),
        (operators.CUBLASDX_OPERATOR_SM, sm),
    ):
        mathdx.cublasdxSetOperatorInt64(made.value, operator, int(value))
    for operator, values in (
        (operators.CUBLASDX_OPERATOR_SIZE, (M, N, K)),
        (operators.CUBLASDX_OPERATOR_PRECISION, (kind, kind, kind)),
        (operators.CUBLASDX_OPERATOR_ARRANGEMENT, (int(rows), int(columns), int(rows))),
        (operators.CUBLASDX_OPERATOR_BLOCK_DIM, (64, 1, 1)),
    ):
        mathdx.cublasdxSetOperatorInt64s(made.value, operator, 3, (c_int64 * 3)(*values))
    trait = mathdx.cublasdxTraitType.CUBLASDX_TRAIT_SYMBOL_NAME
    mathdx.cublasdxGetTraitStrSize(made.value, trait, byref(size))
    name = (c_char * size.value)()
    mathdx.cublasdxGetTraitStr(made.value, trait, size.value, name)
    mathdx.cublasdxGetTraitInt64s(made.value, mathdx.cublasdxTraitType.CUBLASDX_TRAIT_BLOCK_DIM, 3, threads)
    code = code_of(mathdx.cublasdxFinalizeCode, made.value, sm)
    mathdx.cublasdxDestroyDescriptor(made.value)
    return name.value.decode(), code, list(threads)


def last_error():
    """What the compiler inside libmathdx has said."""
    size, code = c_size_t(), c_int32()
    mathdx.commondxGetLastErrorStrSize(byref(size))
    text = (c_char * max(size.value, 1))()
    mathdx.commondxGetLastErrorStr(byref(code), size.value, text)
    return text.value.decode(errors="replace")


def run(gpu, cubin, x, y, blocks, threads, shared):
    """What the linked kernel writes into an array like y."""
    module, d_x, d_y = driver.cuModuleLoadData(cubin), gpu.array(x), gpu.poisoned(y.shape, y.dtype)
    kernel = driver.cuModuleGetFunction(module, b"run")
    parameters = ((d_x.ptr, d_y.ptr), (c_void_p, c_void_p))
    driver.cuLaunchKernel(kernel, blocks, 1, 1, *threads, shared, 0, parameters, 0)
    result = d_y.numpy()
    driver.cuModuleUnload(module)
    return result


def linked(gpu, source, code):
    return nvjitlink.link([("LTOIR", gpu.lto(source)), ("LTOIR", code)], [f"-arch=sm_{gpu.arch}", "-lto"])


@pytest.fixture
def sm(gpu):
    return 10 * int(gpu.arch)


def test_a_generated_transform_runs_and_is_numpys(gpu, sm, rng):
    symbol, code = transform(sm)
    cubin = linked(gpu, TRANSFORM.format(symbol=symbol, points=POINTS, count=COUNT), code)
    x = (rng.standard_normal((COUNT, POINTS)) + 1j * rng.standard_normal((COUNT, POINTS))).astype(np.complex64)
    result = run(gpu, cubin, x, x, -(-COUNT // 32), (32, 1, 1), 0)
    expected = np.fft.fft(x.astype(np.complex128), axis=1)
    assert np.abs(result - expected).max() <= 8 * np.finfo(np.float32).eps * np.abs(x).sum(axis=1).max()


def test_a_generated_product_runs_and_is_numpys(gpu, sm, rng):
    try:
        symbol, code, threads = product(sm)
    except MathdxError as error:
        told = last_error()
        if error.name != "COMMONDX_COMPILATION_ERROR" or "cannot open source file" not in told:
            raise AssertionError(told) from error
        pytest.skip(f"this libmathdx wants a header that this NVRTC does not bring along: {told.splitlines()[0]}")
    sizes = {"size_a": M * K, "size_b": K * N, "size_c": M * N}
    cubin = linked(gpu, PRODUCT.format(symbol=symbol, **sizes), code)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    x = np.concatenate([a.ravel(), b.T.ravel(), c.ravel()])  # b lies by columns
    result = run(gpu, cubin, x, c, 1, threads, x.nbytes)
    a, b, c = (each.astype(np.float64) for each in (a, b, c))
    size = 1.5 * (np.abs(a) @ np.abs(b)) + 0.5 * np.abs(c)
    assert (np.abs(result - (1.5 * a @ b - 0.5 * c)) <= 2 * (K + 4) * np.finfo(np.float32).eps * size).all()
