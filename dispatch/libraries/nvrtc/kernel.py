"""A kernel in CUDA C++ as the call of a row: compiled by NVRTC for the GPU, loaded once, launched by a plan.

The kernel's parameters are the addresses of the request's operands, first those of `reads`, then those of `writes`,
with a null pointer for an absent one, followed by the values of its launch. This file knows no op.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from cudabind.errors import LibraryNotFound
from dispatch.checks import names_arguments
from dispatch.core.request import IdlePlan, Plan
from dispatch.device.disposal import load_kernel
from dispatch.device.once_per_gpu import OncePerGpu
from dispatch.errors import BadRow, Refused
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.refusal import calls_user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.call_counter import CallCounter
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.cuda import CudaDevice
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Kernel", "KernelPlan", "Launch", "loaded"]

STATIC_SHARED = 48 << 10  # bytes that a kernel may use without requesting more
AXES = 3


@names_arguments
class Launch(NamedTuple):
    """How a kernel is launched for a request: everything that depends on its layouts and options, but not on addresses.

    Attributes:
        grid, block: the numbers of blocks, and of threads in a block; up to three numbers each. Without blocks, nothing
            is launched.
        values: the kernel's parameters after the addresses, as ctypes numbers: ctypes.c_int64(x.size).
        shared: bytes of dynamic shared memory.
        counter: numbers the launches, if given; the kernel takes the number of each after the values, an unsigned long
            long.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: tuple[Any, ...] = ()
    shared: int = 0
    counter: CallCounter | None = None


@names_arguments
class Kernel:
    """The call of a row that runs a user's own kernel.

    Args:
        source: CUDA C++ with the kernel as `extern "C" __global__ void function(...)`.
        function: its name in the source.
        launch: returns the Launch of a request; called once for each kind of request.
        options: NVRTC's options, such as "-DT=float"; the architecture is that of the GPU.

    A source that does not compile raises NvrtcError with the compiler's messages; without NVRTC the row is refused, and
    the next one is tried.
    """

    def __init__(
        self, source: str, function: str, launch: Callable[[Any], Launch], options: Sequence[str] = ("-std=c++17",)
    ) -> None:
        arguments: tuple[Any, ...] = source, function, launch
        if not isinstance(arguments[0], str) or not isinstance(arguments[1], str) or not callable(arguments[2]):
            wanted = "its source, its name and a function that returns the Launch of a request"
            raise BadRow(f"a kernel needs {wanted}: got {source!r:.40}, {function!r:.40}, {launch!r:.40}")
        if isinstance(options, str):
            raise BadRow(f"options are several strings, not {options!r}: write ({options!r},)")
        self.source, self.function, self.launch, self.options = source, function, launch, tuple(options)
        self.__name__ = self.__qualname__ = function  # shown by `explain`
        self.__module__ = getattr(launch, "__module__", __name__)

    @calls_user_code
    def __call__(self, request: Any, executor: CudaExecutor, row: Row) -> Plan:
        """The plan of a request."""
        launch = self.launch(request)
        check_launch(self, launch)
        if 0 in launch.grid:
            return IdlePlan(row)
        operands = len(request.reads) + len(request.writes)
        return KernelPlan(executor, row, _loaded(self, executor.device), launch, operands)

    def cubin(self, arch: str) -> bytes:
        """The compiled kernel for an architecture, such as "sm_90"; needs NVRTC and no GPU."""
        return _compiled(self.source, self.function, (f"-arch={arch}", *self.options))


def check_launch(kernel: Kernel, launch: Any) -> None:
    """BadRow for a Launch that no kernel can be launched with."""
    if not isinstance(launch, Launch):
        raise BadRow(
            f"the launch function of {kernel.function} returned a {type(launch).__name__}: return a dispatch.Launch"
        )
    for name, least in (("grid", 0), ("block", 1)):
        extents: Any = getattr(launch, name)
        fits = isinstance(extents, tuple) and 0 < len(extents) <= AXES
        if not fits or not all(type(extent) is int and extent >= least for extent in extents):
            wanted = f"a tuple of one to three whole numbers from {least} on"
            raise BadRow(f"the {name} of {kernel.function} is {extents!r}: pass {wanted}")
    for value in launch.values:
        if not isinstance(value, (ctypes._SimpleCData, ctypes.Structure)):
            like = "ctypes.c_float" if isinstance(value, float) else "ctypes.c_int64"
            problem = f"{kernel.function} received {value!r}, whose size in memory is unknown"
            raise BadRow(f"{problem}: convert it to the type that the kernel declares, such as {like}({value!r})")


class KernelPlan(Plan):
    """The launch of one kernel at the addresses of each run."""

    __slots__ = ("_executor", "_launch", "_pointers", "_slots", "_values")

    def __init__(self, executor: CudaExecutor, row: Row, function: int, launch: Launch, operands: int) -> None:
        super().__init__(row, capture_safe=True, counter=launch.counter)
        self._executor = executor
        slots = tuple(ctypes.c_void_p() for _ in range(operands + (launch.counter is not None)))
        self._slots = tuple((slot, index) for index, slot in enumerate(slots))  # a strict zip took 0.2 us longer
        self._values = launch.values  # keeps alive the values that the pointers refer to
        parameters = (*slots[:operands], *launch.values, *slots[operands:])
        self._pointers = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        ones = (1,) * AXES
        extents = (*(launch.grid + ones)[:AXES], *(launch.block + ones)[:AXES])
        permit_shared(function, launch.shared)
        fixed = (ctypes.c_void_p(function), *extents, launch.shared, executor.target, self._pointers, None)
        self._launch: Callable[[], int] = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for slot, index in self._slots:  # addresses are ints, and so is the launch counter
            slot.value = arguments[index]  # type: ignore[assignment]
        status = self._launch()
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise driver.error("cuLaunchKernel", status)


def permit_shared(function: int, nbytes: int) -> None:
    """Let launches of a kernel use so many bytes of dynamic shared memory."""
    if nbytes > STATIC_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(function, attribute, nbytes)


_functions: OncePerGpu[tuple[str, str, tuple[str, ...]], tuple[Any, int]] = OncePerGpu()  # each with its module


def loaded(source: str, function: str, options: tuple[str, ...], device: CudaDevice) -> int:
    """A kernel on a device, compiled and loaded once for all plans; Refused without NVRTC."""

    def load() -> tuple[Any, int]:
        module = driver.cuModuleLoadData(_compiled(source, function, (f"-arch={device.arch}", *options)))
        kernel = int(driver.cuModuleGetFunction(module, function.encode()))
        load_kernel(kernel)
        return module, kernel

    return _functions.get(device, (source, function, options), load)[1]


def _loaded(kernel: Kernel, device: CudaDevice) -> int:
    return loaded(kernel.source, kernel.function, kernel.options, device)


def _compiled(source: str, function: str, options: tuple[str, ...]) -> bytes:
    try:
        return compiled(source, function, options)
    except LibraryNotFound as error:
        raise Refused(f"NVRTC, which compiles {function}, is not available: {error}") from error
