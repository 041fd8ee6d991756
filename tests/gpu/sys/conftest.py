"""What the tests of the raw layer share: device memory from NumPy and back, handles that are destroyed, error bounds.

The tests call `cudabind.sys` and `cudabind.driver` alone, never `dispatch`: each is also an example of how to use one
library. Memory that a library shall write holds NaN (or -1) beforehand, so what it leaves out is seen.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from cudabind import _load, driver, nvrtc
from cudabind.errors import LibraryNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
POISON = 0xFF  # in every byte: NaN in each floating type, -1 in each signed integer


class DeviceArray:
    """Device memory with a NumPy array's shape, dtype and order ("C" by rows, "F" by columns)."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, order: str) -> None:
        self.shape, self.dtype, self.order = shape, np.dtype(dtype), order
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.ptr = int(driver.cuMemAlloc(max(self.nbytes, 1)))
        driver.cuMemsetD8(self.ptr, POISON, max(self.nbytes, 1))

    def numpy(self) -> np.ndarray:
        """Copy out, once everything on the device is done."""
        host = np.empty(self.shape, self.dtype, order=self.order)
        driver.cuCtxSynchronize()
        if self.nbytes:
            driver.cuMemcpyDtoH(host.ctypes.data, self.ptr, self.nbytes)
        return host

    def fill(self, values: Any) -> None:
        """Copy an array of this shape in."""
        host = np.asarray(values, self.dtype, order=self.order)
        assert host.shape == self.shape
        if self.nbytes:
            driver.cuMemcpyHtoD(self.ptr, host.ctypes.data, self.nbytes)


class Gpu:
    """The memory and the handles of one test."""

    def __init__(self) -> None:
        self._handles: list[tuple[Callable[[Any], None], Any]] = []
        self._arrays: list[DeviceArray] = []

    def array(self, values: Any, dtype: Any = None, order: str = "C") -> DeviceArray:
        """Device memory that holds these values."""
        host = np.asarray(values, dtype)
        made = self.poisoned(host.shape, host.dtype, order)
        made.fill(host)
        return made

    def poisoned(self, shape: int | tuple[int, ...], dtype: Any, order: str = "C") -> DeviceArray:
        """Device memory for a result: every byte of it is POISON."""
        made = DeviceArray(shape if isinstance(shape, tuple) else (shape,), dtype, order)
        self._arrays.append(made)
        return made

    def workspace(self, size: int | ctypes.c_size_t | ctypes.c_int64 | ctypes.c_uint64) -> int:
        """The address of so many bytes, as a library asked for them; 0 (NULL) where it needs none."""
        count = size if isinstance(size, int) else size.value
        return self.poisoned(count, np.uint8).ptr if count else 0

    def make(self, kind: type[T], create: Callable[[Any], None], destroy: Callable[[Any], None]) -> T:
        """A handle or a descriptor that `create` fills in by reference; it is destroyed after the test."""
        handle = kind()
        create(ctypes.byref(handle))
        self._handles.append((destroy, handle))
        return handle

    @property
    def arch(self) -> str:
        """The GPU's compute capability, as compilers are told it: "90" for 9.0."""
        attributes = driver.CUdevice_attribute
        major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0)
        minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0)
        return f"{major}{minor}"

    def lto(self, source: str) -> bytes:
        """CUDA C++ as intermediate code for this GPU, which nvJitLink and cuFFT link and only then compile."""
        program = nvrtc.nvrtcCreateProgram(source.encode(), b"piece.cu", 0, [], [])
        options = [f"-arch=compute_{self.arch}".encode(), b"-dlto", b"-rdc=true"]
        nvrtc.nvrtcCompileProgram(program, len(options), options)
        code = bytearray(nvrtc.nvrtcGetLTOIRSize(program))
        nvrtc.nvrtcGetLTOIR(program, code)
        nvrtc.nvrtcDestroyProgram(program)
        return bytes(code)

    def clean_up(self) -> None:
        driver.cuCtxSynchronize()
        for destroy, handle in reversed(self._handles):  # the last made uses those before it
            destroy(handle)
        for array in self._arrays:
            driver.cuMemFree(array.ptr)


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    """Skip what cannot run: every test module names the libraries that it calls."""
    try:
        for name in request.module.LIBRARIES:
            _load.open(name)
    except LibraryNotFound as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def _primary_context() -> Iterator[Any]:
    """The context that the CUDA runtime inside the libraries uses."""
    driver.cuInit(0)
    device = driver.cuDeviceGet(0)
    yield driver.cuDevicePrimaryCtxRetain(device)
    driver.cuDevicePrimaryCtxRelease(device)


@pytest.fixture
def gpu(_primary_context: Any) -> Iterator[Gpu]:
    driver.cuCtxSetCurrent(_primary_context)
    things = Gpu()
    yield things
    driver.cuCtxSetCurrent(_primary_context)
    things.clean_up()


@pytest.fixture
def sparse_matrix(rng: np.random.Generator) -> Callable[[int, int], np.ndarray]:
    """`sparse_matrix(rows, cols)`: of normal numbers, of which nine in ten are zero."""

    def make(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols)) * (rng.random((rows, cols)) < 0.1)

    return make


@pytest.fixture
def csr() -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`offsets, columns, values = csr(a)`: the nonzeros of a matrix row by row, with 32-bit indices."""

    def compress(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = np.nonzero(a)
        offsets = np.searchsorted(rows, np.arange(len(a) + 1))
        return offsets.astype(np.int32), columns.astype(np.int32), a[rows, columns]

    return compress


def eps(dtype: Any) -> float:
    """The distance from 1 to the next number of the type, which is twice the rounding error."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def wide(values: np.ndarray) -> np.ndarray:
    """The same values in the widest type, where the reference is computed."""
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def assert_close(result: np.ndarray, expected: np.ndarray, bound: Any) -> None:
    """Every element within its bound; a NaN is never within."""
    assert result.shape == np.shape(expected)
    error = np.abs(wide(result) - expected)
    good = error <= bound  # written so that a NaN is not good
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape) if error.size else ()
    assert good.all(), (
        f"{np.count_nonzero(~good)} of {good.size} elements are off; at {tuple(map(int, worst))} is {result[worst]}, "
        f"expected is {np.asarray(expected)[worst]} within {np.broadcast_to(bound, error.shape)[worst]}"
    )


@pytest.fixture
def close() -> Callable[..., None]:
    """`close(result, expected, bound)`: see assert_close."""
    return assert_close


@pytest.fixture
def product() -> Callable[..., None]:
    """`product(result, a, b, …)`: the result is then(alpha·a·b + beta·c), to what rounding may do in sums of products.

    `then` must not take values further apart, as relu does not; `compute` is the type of the sums, by default that of
    the result.
    """

    def check(
        result: np.ndarray,
        a: np.ndarray,
        b: np.ndarray,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        c: Any = 0,
        compute: Any = None,
        then: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ) -> None:
        # A sum of k products is off by at most k·u·|a|·|b|, u half of eps. A complex product is four real ones; tensor
        # cores truncate instead of rounding, which costs up to twice as much; the scaling and the result round, too.
        a, b = wide(a), wide(b)
        c = wide(np.asarray(c))
        expected = alpha * (a @ b) + beta * c
        size = abs(alpha) * (np.abs(a) @ np.abs(b)) + abs(beta) * np.abs(c)
        bound = (2 * a.shape[-1] + 4) * eps(compute or result.dtype) * size + eps(result.dtype) * np.abs(expected)
        assert_close(result, then(expected), bound)

    return check


@pytest.fixture
def solves() -> Callable[..., None]:
    """`solves(x, a, b)`: x is NumPy's solution of a·x = b, to what rounding may do with a matrix of that condition."""

    def check(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        expected = np.linalg.solve(wide(a), wide(b))
        # A backward stable solver errs by a small multiple of n·eps·cond, relative to the solution, in the norm.
        relative = 10 * len(a) * eps(x.dtype) * np.linalg.cond(wide(a))
        assert relative < 1e-2, "the matrix is too ill-conditioned to tell anything"
        assert_close(x, expected, relative * np.abs(expected).max())

    return check
