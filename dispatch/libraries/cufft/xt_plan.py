"""cuFFT's plans over several GPUs of one process (Xt), and the memory that they transform, a part on each GPU.

A plan gets a stream of the first GPU, and its transforms are ordered on it. The streams of the other GPUs are
synchronized with it before and after. So each part is used on a stream of its own GPU, like any storage. cuFFT converts
between the two orders of a transform along one axis while the host waits. cuFFT's plans and memory are destroyed when
no plan on these GPUs is running: two H200 that other processes kept busy reported an illegal address in 3 of 4 runs
while plans were created and destroyed, and never in a run without other processes, which suggests that destroying one
plan disturbs the kernels of another. Follows
https://docs.nvidia.com/cuda/cufft/#multiple-gpu-cufft-transforms.
"""

from __future__ import annotations

import ctypes
import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from cudabind.errors import CufftError
from cudabind.sys import cufft
from dispatch.device.disposal import members
from dispatch.device.storage import Storage
from dispatch.device.stream import relaxed
from dispatch.errors import DispatchError, OutOfMemory, Refused
from dispatch.libraries.cufft.peer_copies import enable_peer_access
from dispatch.libraries.cufft.transforms import REFUSALS
from dispatch.libraries.cufft.xt_layouts import Factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.stream import Stream
    from dispatch.libraries.cufft.xt_layouts import Problem

__all__ = ["XtPlan"]

FORMATS, COPIES = cufft.cufftXtSubFormat, cufft.cufftXtCopyType
NATURAL, SHUFFLED = FORMATS.CUFFT_XT_FORMAT_INPLACE, FORMATS.CUFFT_XT_FORMAT_INPLACE_SHUFFLED
REFUSED = (*REFUSALS, "CUFFT_INVALID_DEVICE", "CUFFT_SETUP_FAILED")


_plans: WeakSet[XtPlan] = WeakSet()


def wait_for_plans(devices: Sequence[Any]) -> None:
    """Wait for the work of all plans on any of these GPUs."""
    for plan in members(_plans):
        if not set(devices).isdisjoint(plan.devices):
            for stream in plan.streams:
                with suppress(DispatchError):  # a fault is reported where the work's results are read
                    stream.synchronize()


class Handles:
    """cuFFT's plans, forward and inverse, which are the same unless real; freed with the last object that uses them."""

    def __init__(self, devices: Sequence[Any], stream: Stream, problem: Problem) -> None:
        self.devices, self.stream, self.handles = tuple(devices), stream, list[int]()
        given, spectrum = problem.signal.cuda, problem.spectrum.cuda
        with self.devices[0].context, relaxed():
            for kinds in [(given, spectrum), (spectrum, given)][: 1 + problem.is_real]:
                self._make(problem, *kinds)

    def _make(self, problem: Problem, given: int, wanted: int) -> None:
        handle, count, rank = ctypes.c_int32(), len(self.devices), len(problem.sizes)
        cufft.cufftCreate(ctypes.byref(handle))
        self.handles.append(handle.value)
        ordinals = (ctypes.c_int32 * count)(*(device.ordinal for device in self.devices))
        sizes, work = (ctypes.c_int64 * rank)(*problem.sizes), (ctypes.c_size_t * count)()
        cufft.cufftSetStream(handle.value, cufft.cudaStream_t(self.stream.c_handle.value or 0))
        cufft.cufftXtSetGPUs(handle.value, count, ordinals)
        kind = cufft.cudaDataType_t
        layouts = None, 1, 0, kind(given), None, 1, 0, kind(wanted)  # dense, and padded for real numbers
        execution = kind(problem.spectrum.cuda)
        cufft.cufftXtMakePlanMany(handle.value, rank, sizes, *layouts, problem.batch, work, execution)

    def __del__(self) -> None:
        if is_alive(self):
            wait_for_plans(self.devices)
            with self.devices[0].context, relaxed():
                for handle in self.handles:
                    cufft.cufftDestroy.unchecked(handle)


class XtMemory:
    """A cuFFT descriptor with memory on each GPU, freed when no tensor uses the memory any more."""

    def __init__(self, handles: Handles) -> None:
        self.devices, self._handles, self._at = handles.devices, handles, 0  # plans are destroyed after their memory
        self.is_idle = False
        pointer = ctypes.c_void_p()
        with self.devices[0].context, relaxed():
            cufft.cufftXtMalloc(handles.handles[0], ctypes.byref(pointer), NATURAL)
        self._at = pointer.value or 0
        self.descriptor: Any = cufft.cudaLibXtDesc.from_address(self._at)
        parts: Any = cufft.cudaXtDesc.from_address(self.descriptor.descriptor or 0)
        self.addresses, self.sizes = parts.data[: len(self.devices)], parts.size[: len(self.devices)]

    @property
    def address(self) -> int:
        """The address of the descriptor."""
        return self._at

    def storages(self, streams: Sequence[Stream]) -> list[Storage]:
        """The parts, each first used on a stream of its GPU."""
        parts = zip(self.devices, self.addresses, self.sizes, streams, strict=True)
        return [Storage(device, at or 0, size, home, release_part, (self, home)) for device, at, size, home in parts]

    def __del__(self) -> None:
        if self._at and is_alive(self):
            wait_for_plans(self.devices)
            with self.devices[0].context, relaxed():
                cufft.cufftXtFree.unchecked(ctypes.byref(self.descriptor))


def is_alive(owner: Any) -> bool:
    """Whether the GPUs still hold the objects to free: else these were destroyed with the contexts."""
    devices = getattr(owner, "devices", ())  # Ctrl-C may have come before the first line of __init__
    return not sys.is_finalizing() and all(device.alive and device.fault is None for device in devices)


def release_part(storage: Storage) -> None:
    """Return a part to cuFFT: at once if nothing uses it, else after the streams that use it."""
    memory, home = storage.keep
    if memory.is_idle and storage.owner is home and not storage.lent:
        return
    if storage.device.alive and storage.device.fault is None:
        storage.device.park(storage)


class XtPlan:
    """Transforms in place over several GPUs; only one thread at a time may call it.

    Attributes:
        devices: the GPUs.
        streams: one on each GPU, on which its part is used.
        storages: the memory of the parts; `restore` replaces it.
        is_shuffled: whether the parts are in the order that a single transform leaves them in; set it after writing
            them.
        factors: the factors of that order, for one transform along one axis; else None.
    """

    def __init__(self, devices: Sequence[Any], problem: Problem) -> None:
        self.devices, self._problem = tuple(devices), problem
        self.streams: list[Stream] = [device.stream() for device in devices]
        _plans.add(self)
        for is_last in (False, True):
            try:
                self._make()
                return
            except CufftError as error:
                if is_last or error.name != "CUFFT_ALLOC_FAILED":
                    raise self._translated(error) from error
            for device in dict.fromkeys(devices):  # the error freed what was made
                device.trim()  # memory that this library caches becomes free for cuFFT

    def _make(self) -> None:
        self._handles = Handles(self.devices, self.streams[0], self._problem)
        self._memory = XtMemory(self._handles)
        self.storages = self._memory.storages(self.streams)
        self._spare: tuple[XtMemory, list[Storage]] | None = None
        self.factors: Factors | None = None
        if self._problem.in_strings:
            factors = cufft.cufftXt1dFactors()
            query = cufft.cufftXtQueryType.CUFFT_QUERY_1D_FACTORS
            with self.devices[0].context:
                cufft.cufftXtQueryPlan(self._handles.handles[0], ctypes.byref(factors), query)
            self.factors = Factors(factors.factor2, factors.stringCount, factors.substringLength)
            if math.prod(self.factors) != self._problem.sizes[0] or factors.stringCount % len(self.devices):
                raise Refused(
                    f"cuFFT reports the factors {self.factors} for a result of {self._problem.sizes[0]} points"
                )

    def check_sizes(self, nbytes: Sequence[int]) -> None:
        """Refused if a part has less memory than its layouts need."""
        for device, size, wanted in zip(self.devices, self._memory.sizes, nbytes, strict=True):
            if size < wanted:
                raise Refused(f"cuFFT has allocated {size} bytes for a part on {device}, which needs {wanted}")

    def _translated(self, error: CufftError) -> Exception:
        names = ", ".join(map(str, self.devices))
        what = f"{self._problem.batch} transform(s) of {list(self._problem.sizes)} over {names}"
        if error.name == "CUFFT_ALLOC_FAILED":
            room = "; ".join(f"{device}: {device.memory()}" for device in dict.fromkeys(self.devices))
            return OutOfMemory(
                f"cuFFT has not enough memory for {what}, which needs about twice the size of its parts. {room}"
            )
        if error.name in REFUSED:
            hint = "try other GPUs, sizes with prime factors up to 7, or dispatch.dft on one GPU"
            return Refused(f"cuFFT has no plan for {what}: {error}. Hint: {hint}")
        return error

    @property
    def is_shuffled(self) -> bool:
        return bool(self._memory.descriptor.subFormat == SHUFFLED)

    @is_shuffled.setter
    def is_shuffled(self, value: bool) -> None:
        self._memory.descriptor.subFormat = int(SHUFFLED if value else NATURAL)

    def execute(self, *, inverse: bool) -> None:
        """Transform the parts, after all work that uses them; later uses of them wait for this."""
        handles = self._handles.handles
        handle, descriptor = handles[inverse and len(handles) - 1], ctypes.byref(self._memory.descriptor)
        direction = cufft.CUFFT_INVERSE if inverse else cufft.CUFFT_FORWARD
        self._begin(self.storages)
        call: Any = cufft.cufftXtExecDescriptor
        self._call(call, handle, descriptor, descriptor, ctypes.c_int(direction))
        for home in self.streams[1:]:
            home.wait_for_uses(self.streams[0])

    def restore(self) -> None:
        """Copy the result of one transform along one axis, in natural order, to other memory; the host waits."""
        if self._spare is None:
            try:
                memory = XtMemory(self._handles)
            except CufftError as error:
                raise self._translated(error) from error
            self._spare = memory, memory.storages(self.streams)
        memory, storages = self._spare
        memory.descriptor.subFormat = int(NATURAL)
        self._begin([*self.storages, *storages])
        self.streams[0].synchronize()
        addresses = ctypes.c_void_p(memory.address), ctypes.c_void_p(self._memory.address)
        call: Any = cufft.cufftXtMemcpy
        self._call(call, self._handles.handles[0], *addresses, ctypes.c_int(COPIES.CUFFT_COPY_DEVICE_TO_DEVICE))
        self._spare = self._memory, self.storages
        self._memory, self.storages = memory, storages

    def _begin(self, storages: Sequence[Storage]) -> None:
        """Have the first GPU's stream wait for all work that uses these."""
        for storage in storages:
            storage.use(storage.keep[1], write=True)
        for home in self.streams[1:]:
            self.streams[0].wait_for_uses(home)

    def _call(self, function: Any, *arguments: Any) -> None:
        # Making the plan enabled peer access. It is not documented whether destroying another plan disables it.
        enable_peer_access(self.devices)
        with self.devices[0].context, relaxed():
            status = function.unchecked(*arguments)
        if status:
            for home in self.streams:
                home.done()  # raises DeviceFault if the device is lost
            raise function.error(status)

    def close(self) -> None:
        """Wait for the work, and free the plans and the memory, except parts that tensors still use."""
        held = [(self._memory, self.storages), *([] if self._spare is None else [self._spare])]
        if all(device.alive and device.fault is None for device in self.devices):
            self._begin([storage for _, storages in held for storage in storages])
            for home in self.streams:
                home.synchronize()
            for memory, _ in held:
                memory.is_idle = True
        del self.storages, self._memory, self._spare, self._handles
