"""Generators of cuRAND, one for each kind, which are set to where a request's numbers begin.

To set one costs: XORWOW and MRG32K3A prepare the states of thousands of threads anew, the Mersenne twisters know no
offset, so that what comes before is generated. So a generator that stands where the next request begins is left alone.
This module knows no request.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from cudabind._fork import anew
from cudabind.errors import LibraryNotFound
from cudabind.sys import curand
from dispatch.errors import Refused
from dispatch.libraries.finalizer import finalizer
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = [
    "IN_PAIRS",
    "WITHOUT_OFFSET",
    "HostGenerator",
    "Kind",
    "SequencePosition",
    "device_generator",
    "host_generator",
    "seek",
]

QUASI = 200  # and above: the numbers of quasi-random generators in `curandRngType_t`
WITHOUT_OFFSET = (141, 142)  # MTGP32, MT19937
IN_PAIRS = (101, 121)  # XORWOW, MRG32K3A: normal numbers move the offset on by one for each pair
SKIP_CHUNK = 1 << 22  # numbers that are generated to get on
MAX_HOST_GENERATORS = 8  # generators of one thread


class Kind(NamedTuple):
    """Which generator: numbers of `curandRngType_t` and `curandOrdering_t`, and the dimensions of quasi-random ones."""

    number: int
    ordering: int
    dimensions: int

    @property
    def is_quasi(self) -> bool:
        return self.number >= QUASI

    def prepare(self, c_handle: Any) -> None:
        """Choose ordering and dimensions of a new generator."""
        if self.is_quasi:
            curand.curandSetQuasiRandomGeneratorDimensions(c_handle, self.dimensions)
        else:
            curand.curandSetGeneratorOrdering(c_handle, curand.curandOrdering_t(self.ordering))


class SequencePosition(NamedTuple):
    """Where numbers begin: the sequence's seed, and the offset as cuRAND counts it."""

    seed: int
    offset: int


def seek(
    c_handle: Any, kind: Kind, last: SequencePosition | None, place: SequencePosition, skip: Callable[[int], None]
) -> None:
    """Have a generator, which stands at `last` if that is known, generate from a place on.

    `skip` generates so many numbers, to no end, for a generator that knows no offset.
    """
    if last == place:
        return
    if kind.number in WITHOUT_OFFSET:
        before = place.offset
        if last is not None and last.seed == place.seed and last.offset <= before:
            before -= last.offset
        else:
            curand.curandSetPseudoRandomGeneratorSeed(c_handle, place.seed ^ 1)  # the one it has would change nothing
            curand.curandSetPseudoRandomGeneratorSeed(c_handle, place.seed)
        while before > 0:
            skip(min(before, SKIP_CHUNK))
            before -= SKIP_CHUNK
        return
    if not kind.is_quasi and (last is None or last.seed != place.seed):
        curand.curandSetPseudoRandomGeneratorSeed(c_handle, place.seed)
    curand.curandSetGeneratorOffset(c_handle, place.offset)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
class DeviceGenerator(StreamHandle):
    """A `curandGenerator_t` of one kind on the stream of one executor; `place` is where it stands, if that is known."""

    __slots__ = ("place",)

    kind = curand.curandGenerator_t
    of_kind: ClassVar[Kind]

    def __init__(self, executor: CudaExecutor) -> None:
        self.place: SequencePosition | None = None
        super().__init__(executor)

    @classmethod
    def create(cls, c_handle: Any) -> None:
        curand.curandCreateGenerator(c_handle, curand.curandRngType_t(cls.of_kind.number))
        cls.of_kind.prepare(c_handle)

    @staticmethod
    def destroy(c_handle: Any) -> int:
        status: int = curand.curandDestroyGenerator.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: Any, stream: int | None) -> None:
        curand.curandSetStream(c_handle, curand.cudaStream_t(stream))


@cache
def _class_of(kind: Kind) -> type[DeviceGenerator]:
    name = f"curand {kind.number} {kind.ordering} {kind.dimensions}"
    return type("DeviceGenerator", (DeviceGenerator,), {"__slots__": (), "name": name, "of_kind": kind})


def device_generator(kind: Kind, executor: CudaExecutor) -> DeviceGenerator:
    """The generator of a kind that an executor's plans share."""
    return _class_of(kind).of(executor)


# -- on the host ------------------------------------------------------------------------------------------------------
class HostGenerator:
    """A `curandGenerator_t` that generates on the host, at once; destroyed with this object."""

    __slots__ = ("_kind", "_lock", "c_handle", "place")

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.place: SequencePosition | None = None
        self._lock = threading.Lock()
        self.c_handle = curand.curandGenerator_t()
        curand.curandCreateGeneratorHost(self.c_handle, curand.curandRngType_t(kind.number))
        kind.prepare(self.c_handle)

    def generate(self, place: SequencePosition, end: SequencePosition, call: Callable[[Any], None]) -> None:
        """Have `call(c_handle)` generate from a place to another one."""
        with self._lock:
            last, self.place = self.place, None  # of a call that raises nobody knows how far it came
            seek(self.c_handle, self._kind, last, place, self._skip)
            call(self.c_handle)
            self.place = end

    def _skip(self, count: int) -> None:
        spare = np.empty(count, np.uint32)
        curand.curandGenerate(self.c_handle, spare.ctypes.data, count)

    @finalizer
    def __del__(self) -> None:
        handle = getattr(self, "c_handle", None)
        if handle:
            curand.curandDestroyGenerator.unchecked(handle)


_on_host: dict[Kind, HostGenerator] = {}
_lock = threading.Lock()
anew(sys.modules[__name__], "_lock", threading.Lock)


def host_generator(kind: Kind) -> HostGenerator:
    """The host's generator of a kind, one for all threads; Refused without cuRAND."""
    with _lock:
        found = _on_host.pop(kind, None)
        if found is None:
            try:
                found = HostGenerator(kind)
            except LibraryNotFound as error:
                raise Refused(f"cuRAND is not there: {error}") from error
            while len(_on_host) >= MAX_HOST_GENERATORS:
                del _on_host[next(iter(_on_host))]
        _on_host[kind] = found  # the one used last goes last
        return found
