"""cuFFT: transforms of one to three axes, complex and real, strided, in 16 to 64 bits, a callback, two GPUs."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, c_size_t, c_void_p

import ml_dtypes
import numpy as np
import pytest

from cudabind import driver
from cudabind.errors import CufftError
from cudabind.sys import cufft

LIBRARIES = ("cufft", "nvrtc")
TYPE = cufft.cufftType_t
DATA = cufft.cudaDataType_t


@pytest.fixture
def plan(gpu):
    """`plan(create)`: a plan's handle, which is an int, destroyed after the test."""
    return lambda create: gpu.make(c_int32, create, cufft.cufftDestroy)


@pytest.fixture
def transform(close):
    """The result of a transform is within what rounding may do: eps times log2 of the size, relative in the norm."""

    def check(result, expected, size, eps):
        norm = np.linalg.norm(expected)
        close(np.linalg.norm(result.astype(expected.dtype) - expected), 0.0, 4 * eps * np.log2(2 * size) * norm)

    return check


def complex_normal(rng, shape, dtype):
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("n", [1, 60, 211, 1000, 4096])  # 211 is a prime beyond cuFFT's own kernels
def test_1d_forth_and_back_in_a_batch(gpu, plan, rng, transform, n):
    batch = 3
    x = complex_normal(rng, (batch, n), np.complex64)
    d_x, d_y, d_z = gpu.array(x), *(gpu.poisoned(x.shape, np.complex64) for _ in range(2))
    made = plan(lambda p: cufft.cufftPlan1d(p, n, TYPE.CUFFT_C2C, batch))
    cufft.cufftExecC2C(made, d_x.ptr, d_y.ptr, cufft.CUFFT_FORWARD)
    cufft.cufftExecC2C(made, d_y.ptr, d_z.ptr, cufft.CUFFT_INVERSE)
    eps = np.finfo(np.float32).eps
    transform(d_y.numpy(), np.fft.fft(x.astype(np.complex128)), n, eps)
    transform(d_z.numpy(), n * x.astype(np.complex128), n * n, eps)


@pytest.mark.parametrize("shape", [(13, 36), (5, 12, 7)])
def test_2d_and_3d_in_place_and_in_double_precision(gpu, plan, rng, transform, shape):
    x = complex_normal(rng, shape, np.complex128)
    d_x = gpu.array(x)
    create = {2: cufft.cufftPlan2d, 3: cufft.cufftPlan3d}[len(shape)]
    made = plan(lambda p: create(p, *shape, TYPE.CUFFT_Z2Z))
    cufft.cufftExecZ2Z(made, d_x.ptr, d_x.ptr, cufft.CUFFT_FORWARD)
    transform(d_x.numpy(), np.fft.fftn(x), x.size, np.finfo(np.float64).eps)


def test_real_to_complex_and_back_of_an_odd_size(gpu, plan, rng, transform):
    n = 135
    x = rng.standard_normal(n).astype(np.float32)
    d_y, d_z = gpu.poisoned(n // 2 + 1, np.complex64), gpu.poisoned(n, np.float32)
    forth = plan(lambda p: cufft.cufftPlan1d(p, n, TYPE.CUFFT_R2C, 1))
    back = plan(lambda p: cufft.cufftPlan1d(p, n, TYPE.CUFFT_C2R, 1))
    cufft.cufftExecR2C(forth, gpu.array(x).ptr, d_y.ptr)
    spectrum = d_y.numpy()  # before the way back, which may overwrite its input
    cufft.cufftExecC2R(back, d_y.ptr, d_z.ptr)
    eps = np.finfo(np.float32).eps
    transform(spectrum, np.fft.rfft(x.astype(np.float64)), n, eps)
    transform(d_z.numpy(), n * x.astype(np.float64), n * n, eps)


def test_many_transforms_along_the_first_axis(gpu, plan, rng, transform):
    n, columns = 90, 7
    x = complex_normal(rng, (n, columns), np.complex128)
    d_y = gpu.poisoned(x.shape, np.complex128)
    size = (c_int32 * 1)(n)  # a stride of one row within a transform, of one element from one to the next
    made = plan(lambda p: cufft.cufftPlanMany(p, 1, size, size, columns, 1, size, columns, 1, TYPE.CUFFT_Z2Z, columns))
    cufft.cufftExecZ2Z(made, gpu.array(x).ptr, d_y.ptr, cufft.CUFFT_FORWARD)
    transform(d_y.numpy(), np.fft.fft(x, axis=0), n, np.finfo(np.float64).eps)


def test_a_plan_made_through_the_64_bit_interface_in_memory_of_the_caller(gpu, plan, rng, transform):
    batch, rows, cols = 2, 30, 17
    x = rng.standard_normal((batch, rows, cols))
    d_y = gpu.poisoned((batch, rows, cols // 2 + 1), np.complex128)
    made, size = plan(cufft.cufftCreate), c_size_t()
    cufft.cufftSetAutoAllocation(made, 0)
    cufft.cufftMakePlanMany64(
        *(made, 2, (c_int64 * 2)(rows, cols), None, 1, 0, None, 1, 0, TYPE.CUFFT_D2Z, batch, byref(size)),
    )
    cufft.cufftSetWorkArea(made, gpu.workspace(size))
    cufft.cufftExecD2Z(made, gpu.array(x).ptr, d_y.ptr)
    transform(d_y.numpy(), np.fft.rfft2(x), rows * cols, np.finfo(np.float64).eps)


@pytest.mark.parametrize(("dtype", "data"), [("float16", DATA.CUDA_C_16F), ("bfloat16", DATA.CUDA_C_16BF)])
def test_16_bit_numbers_through_cufftxt(gpu, plan, rng, transform, dtype, data):
    n, batch = 256, 5
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    x = rng.standard_normal((batch, n, 2)).astype(kind)  # NumPy has no such complex numbers: pairs
    d_y = gpu.poisoned(x.shape, kind)
    made, size, shape = plan(cufft.cufftCreate), c_size_t(), (c_int64 * 1)(n)
    cufft.cufftXtMakePlanMany(made, 1, shape, None, 1, n, data, None, 1, n, data, batch, byref(size), data)
    cufft.cufftXtExec(made, gpu.array(x).ptr, d_y.ptr, cufft.CUFFT_FORWARD)
    wide, result = (np.ascontiguousarray(y.astype(np.float64)).view(np.complex128)[..., 0] for y in (x, d_y.numpy()))
    transform(result, np.fft.fft(wide), n, float(ml_dtypes.finfo(kind).eps))


def test_a_callback_that_is_linked_into_the_transform(gpu, plan, rng, transform):
    # A C++ function by its plain name: cuFFT declares it by its types, and does not find an extern "C" one.
    source = """
        __device__ float2 scaled(void *data, unsigned long long offset, void *info, void *) {
            float2 x = ((float2 *)data)[offset];
            float scale = *(float *)info;
            return make_float2(scale * x.x, scale * x.y);
        }"""
    code = gpu.lto(source)
    n, scale = 300, 3.0
    x = complex_normal(rng, n, np.complex64)
    d_y, made, size = gpu.poisoned(n, np.complex64), plan(cufft.cufftCreate), c_size_t()
    info = c_void_p(gpu.array([scale], np.float32).ptr)
    load = cufft.cufftXtCallbackType_t.CUFFT_CB_LD_COMPLEX
    cufft.cufftXtSetJITCallback(made, b"scaled", code, len(code), load, byref(info))
    cufft.cufftMakePlan1d(made, n, TYPE.CUFFT_C2C, 1, byref(size))
    cufft.cufftExecC2C(made, gpu.array(x).ptr, d_y.ptr, cufft.CUFFT_FORWARD)
    transform(d_y.numpy(), scale * np.fft.fft(x.astype(np.complex128)), n, np.finfo(np.float32).eps)


def test_one_transform_on_two_gpus(plan, rng, transform):
    if driver.cuDeviceGetCount() < 2:
        pytest.skip("needs two GPUs")
    shape = (64, 96)
    x, y = complex_normal(rng, shape, np.complex64), np.full(shape, np.nan, np.complex64)
    made, sizes = plan(cufft.cufftCreate), (c_size_t * 2)()
    cufft.cufftXtSetGPUs(made, 2, (c_int32 * 2)(0, 1))
    cufft.cufftMakePlan2d(made, *shape, TYPE.CUFFT_C2C, sizes)
    shared = ctypes.POINTER(cufft.cudaLibXtDesc)()
    cufft.cufftXtMalloc(made, byref(shared), cufft.cufftXtSubFormat_t.CUFFT_XT_FORMAT_INPLACE)
    try:
        assert ctypes.cast(shared[0].descriptor, ctypes.POINTER(cufft.cudaXtDesc))[0].nGPUs == 2
        copy = cufft.cufftXtCopyType_t
        cufft.cufftXtMemcpy(made, shared, x.ctypes.data, copy.CUFFT_COPY_HOST_TO_DEVICE)
        cufft.cufftXtExecDescriptorC2C(made, shared, shared, cufft.CUFFT_FORWARD)
        cufft.cufftXtMemcpy(made, y.ctypes.data, shared, copy.CUFFT_COPY_DEVICE_TO_HOST)
    finally:
        cufft.cufftXtFree(shared)
    transform(y, np.fft.fft2(x.astype(np.complex128)), x.size, np.finfo(np.float32).eps)


def test_a_size_that_cannot_be_is_refused_by_name(plan):
    with pytest.raises(CufftError) as caught:
        plan(lambda p: cufft.cufftPlan1d(p, -5, TYPE.CUFFT_C2C, 1))
    assert caught.value.name == "CUFFT_INVALID_SIZE"
    assert caught.value.function == "cufftPlan1d"
