"""NVML's readings of each GPU: utilization, memory, power, temperature, clocks, and the processes that use it.

`python -m dispatch top` shows them. No context is created, so reading takes no memory and no time of a GPU. NVML
numbers the GPUs by PCI bus order, and ignores CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudabind.errors import NvmlError
from cudabind.sys import nvml

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["Gpu", "Gpus", "Process", "Reading"]

UNAVAILABLE = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
)  # by the GPU, or for this user
TEXT = 96  # bytes, enough for NVML's longest name and its UUID
PATH = 1024
UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE, of memory


@dataclass(frozen=True)
class Process:
    """A process that uses a GPU; fields are None if the driver does not report them, for instance in a container."""

    pid: int
    name: str | None
    memory_used: int | None  # bytes


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; fields are None if NVML does not report them."""

    index: int
    name: str
    uuid: str
    utilization: int | None  # percent of the last sampling period (1/6 to 1 s) in which a kernel ran
    memory_utilization: int | None  # percent of it in which memory was read or written
    memory_used: int | None  # bytes, including the driver's own
    memory_total: int | None
    power: float | None  # watts
    power_limit: float | None
    temperature: int | None  # degrees Celsius
    sm_clock: int | None  # MHz
    memory_clock: int | None
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Reading:
    """All GPUs at one moment."""

    time: float  # seconds since 1970
    driver: str
    gpus: tuple[Gpu, ...]


class Gpus:
    """NVML, initialized as long as the block lasts.

    Raises:
        LibraryNotFound: no driver is installed.
        NvmlError: the driver does not run, or a GPU is lost.
    """

    def __enter__(self) -> Self:
        nvml.nvmlInit_v2()
        return self

    def __exit__(self, *_: object) -> None:
        nvml.nvmlShutdown.unchecked()

    def read(self) -> Reading:
        """Read all GPUs."""
        count = ctypes.c_uint32()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        driver = _text(nvml.nvmlSystemGetDriverVersion) or ""
        return Reading(time.time(), driver, tuple(map(_gpu, range(count.value))))


def _gpu(index: int) -> Gpu:
    device = nvml.nvmlDevice_t()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, device)
    busy, memory = nvml.nvmlUtilization_st(), nvml.nvmlMemory_st()
    knows_busy = _query(nvml.nvmlDeviceGetUtilizationRates, device, busy)
    knows_memory = _query(nvml.nvmlDeviceGetMemoryInfo, device, memory)
    power, limit = _number(nvml.nvmlDeviceGetPowerUsage, device), _number(nvml.nvmlDeviceGetEnforcedPowerLimit, device)
    clocks, sensor = nvml.nvmlClockType_t, nvml.nvmlTemperatureSensors_t.NVML_TEMPERATURE_GPU
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName, device) or "",
        uuid=_text(nvml.nvmlDeviceGetUUID, device) or "",
        utilization=busy.gpu if knows_busy else None,
        memory_utilization=busy.memory if knows_busy else None,
        memory_used=memory.used if knows_memory else None,
        memory_total=memory.total if knows_memory else None,
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        temperature=_number(nvml.nvmlDeviceGetTemperature, device, sensor),
        sm_clock=_number(nvml.nvmlDeviceGetClockInfo, device, clocks.NVML_CLOCK_SM),
        memory_clock=_number(nvml.nvmlDeviceGetClockInfo, device, clocks.NVML_CLOCK_MEM),
        processes=_processes(device),
    )


def _query(function: Callable[..., None], *arguments: object) -> bool:
    """Call NVML; returns whether it answered. A value that is not available is no error."""
    try:
        function(*arguments)
    except NvmlError as error:
        if error.name not in UNAVAILABLE:
            raise
        return False
    return True


def _number(function: Callable[..., None], *arguments: object) -> int | None:
    found = ctypes.c_uint32()
    return found.value if _query(function, *arguments, ctypes.byref(found)) else None


def _text(function: Callable[..., None], *arguments: object, size: int = TEXT) -> str | None:
    found = ctypes.create_string_buffer(size)
    return found.value.decode(errors="replace") if _query(function, *arguments, found, size) else None


def _processes(device: nvml.nvmlDevice_t) -> tuple[Process, ...]:
    """The processes that have a context; their number may grow between two calls."""
    room = 0
    while True:
        count, infos = ctypes.c_uint32(room), (nvml.nvmlProcessInfo_v2_st * max(1, room))()
        try:
            if not _query(nvml.nvmlDeviceGetComputeRunningProcesses_v3, device, ctypes.byref(count), infos):
                return ()
        except NvmlError as error:
            if error.name != "NVML_ERROR_INSUFFICIENT_SIZE":
                raise
            room = count.value + 4
            continue
        return tuple(map(_process, infos[: count.value]))


def _process(info: nvml.nvmlProcessInfo_v2_st) -> Process:
    memory = None if info.usedGpuMemory == UNKNOWN else info.usedGpuMemory
    try:
        name = _text(nvml.nvmlSystemGetProcessName, info.pid, size=PATH)
    except NvmlError:  # it has ended meanwhile, or is in another container
        name = None
    return Process(info.pid, name, memory)
