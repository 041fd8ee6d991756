"""Generators of cuRAND, one for each kind, which are set to the position where a request's numbers begin.

Setting a position is expensive: XORWOW and MRG32K3A initialize the states of thousands of threads again, and the
Mersenne twisters have no offset, so the numbers before it must be generated. Therefore a generator that is already at
the position of the next request is not set. This module does not depend on requests.
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
IN_PAIRS = (101, 121)  # XORWOW, MRG32K3A: normal numbers advance the offset by one for each pair
SKIP_CHUNK = 1 << 22  # numbers that are generated at a time to skip ahead
MAX_HOST_GENERATORS = 8  # the least recently used one is dropped


class Kind(NamedTuple):
    """A kind of generator: values of `curandRngType_t` and `curandOrdering_t`, and the dimensions if quasi-random."""

    number: int
    ordering: int
    dimensions: int

    @property
    def is_quasi(self) -> bool:
        return self.number >= QUASI

    def prepare(self, c_handle: Any) -> None:
        """Set the ordering or the dimensions of a new generator."""
        if self.is_quasi:
            curand.curandSetQuasiRandomGeneratorDimensions(c_handle, self.dimensions)
        else:
            curand.curandSetGeneratorOrdering(c_handle, curand.curandOrdering_t(self.ordering))


class SequencePosition(NamedTuple):
    """A position in a sequence: the seed, and the offset as cuRAND counts it."""

    seed: int
    offset: int


def seek(
    c_handle: Any, kind: Kind, last: SequencePosition | None, position: SequencePosition, skip: Callable[[int], None]
) -> None:
    """Set a generator to a position; `last` is its present position, None if that is unknown.

    `skip(count)` generates numbers and discards them, for a generator without an offset.
    """
    if last == position:
        return
    if kind.number in WITHOUT_OFFSET:
        before = position.offset
        if last is not None and last.seed == position.seed and last.offset <= before:
            before -= last.offset
        else:
            curand.curandSetPseudoRandomGeneratorSeed(
                c_handle, position.seed ^ 1
            )  # setting the same seed has no effect
            curand.curandSetPseudoRandomGeneratorSeed(c_handle, position.seed)
        while before > 0:
            skip(min(before, SKIP_CHUNK))
            before -= SKIP_CHUNK
        return
    if not kind.is_quasi and (last is None or last.seed != position.seed):
        curand.curandSetPseudoRandomGeneratorSeed(c_handle, position.seed)
    curand.curandSetGeneratorOffset(c_handle, position.offset)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
class DeviceGenerator(StreamHandle):
    """A `curandGenerator_t` of one kind on the stream of one executor; `position` is None if it is unknown."""

    __slots__ = ("position",)

    kind = curand.curandGenerator_t
    generator_kind: ClassVar[Kind]

    def __init__(self, executor: CudaExecutor) -> None:
        self.position: SequencePosition | None = None
        super().__init__(executor)

    @classmethod
    def create(cls, c_handle: Any) -> None:
        curand.curandCreateGenerator(c_handle, curand.curandRngType_t(cls.generator_kind.number))
        cls.generator_kind.prepare(c_handle)

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
    return type("DeviceGenerator", (DeviceGenerator,), {"__slots__": (), "name": name, "generator_kind": kind})


def device_generator(kind: Kind, executor: CudaExecutor) -> DeviceGenerator:
    """The generator of a kind, shared by an executor's plans."""
    return _class_of(kind).of(executor)


# -- on the host ------------------------------------------------------------------------------------------------------
class HostGenerator:
    """A `curandGenerator_t` that generates on the host, synchronously; it is destroyed with this object."""

    __slots__ = ("_kind", "_lock", "c_handle", "position")

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.position: SequencePosition | None = None
        self._lock = threading.Lock()
        self.c_handle = curand.curandGenerator_t()
        curand.curandCreateGeneratorHost(self.c_handle, curand.curandRngType_t(kind.number))
        kind.prepare(self.c_handle)

    def generate(self, start: SequencePosition, end: SequencePosition, call: Callable[[Any], None]) -> None:
        """Run `call(c_handle)`, which generates the numbers between two positions."""
        with self._lock:
            last, self.position = self.position, None  # if a call raises, the position is unknown
            seek(self.c_handle, self._kind, last, start, self._skip)
            call(self.c_handle)
            self.position = end

    def _skip(self, count: int) -> None:
        discarded = np.empty(count, np.uint32)
        curand.curandGenerate(self.c_handle, discarded.ctypes.data, count)

    @finalizer
    def __del__(self) -> None:
        handle = getattr(self, "c_handle", None)
        if handle:
            curand.curandDestroyGenerator.unchecked(handle)


_on_host: dict[Kind, HostGenerator] = {}
_lock = threading.Lock()
anew(sys.modules[__name__], "_lock", threading.Lock)


def host_generator(kind: Kind) -> HostGenerator:
    """The host's generator of a kind, shared by all threads; Refused if cuRAND is not installed."""
    with _lock:
        generator = _on_host.pop(kind, None)
        if generator is None:
            try:
                generator = HostGenerator(kind)
            except LibraryNotFound as error:
                raise Refused(f"cuRAND is not installed: {error}") from error
            while len(_on_host) >= MAX_HOST_GENERATORS:
                del _on_host[next(iter(_on_host))]
        _on_host[kind] = generator  # the most recently used one is last
        return generator
