"""One thread's calls of specs on a device, each compared with what a fresh request gave; see tests/differential.py.

A Live is a spec on a device with its fresh outcome, a Copy is one of its addresses, a Runner calls them in many ways.
Results are copied out in stream order and compared later, so that a wait that is missing shows.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import differential_specs as specs
import numpy as np
from differential_compare import Live, Outcome, beyond, where, window
from differential_specs import GUARD, POISON, Slot, Spec

import dispatch as dp
from cudabind import driver
from cudabind.errors import CudaError, LibraryNotFound
from dispatch.device.host import HostDevice
from dispatch.device.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterable

RING = 1 << 25  # bytes that wait to be compared
WAITING = 160  # calls that wait to be compared, at most
COPIES = 2  # addresses of each spec and thread
MAX_ARENAS = 1000  # sizes that have some
WAYS = ("function",) * 12 + ("request", "same request", "prepared", "prepared with", "refit")


class Difference(AssertionError):
    """A call gave something else than the same request on an executor that remembers nothing."""


class Memory:
    """Bytes of a device, moved behind the library's back but in stream order."""

    def __init__(self, device: dp.Device) -> None:
        self.device, self.is_host = device, isinstance(device, HostDevice)  # or a stand-in on host memory
        self.ring = device.pinned((RING,), "u8")
        self.used = 0

    def copy(self, to: dp.Tensor, source: dp.Tensor, stream: dp.Stream) -> None:
        to.storage.use(stream, write=True)
        source.storage.use(stream, write=False)
        if self.is_host:
            ctypes.memmove(to.ptr, source.ptr, source.nbytes)
        else:
            self._check(driver.cuMemcpyDtoDAsync.unchecked, to.ptr, source.ptr, source.nbytes, stream)

    def fill(self, address: int, nbytes: int, stream: dp.Stream) -> None:
        if self.is_host:
            ctypes.memset(address, POISON, nbytes)
        else:
            status = driver.cuMemsetD8Async.unchecked(
                ctypes.c_uint64(address), POISON, ctypes.c_size_t(nbytes), stream.c_handle
            )
            assert status == 0, status

    def take(self, address: int, nbytes: int, stream: dp.Stream) -> slice:
        """Begin to copy bytes out; they lie in this part of the ring once the stream is done."""
        part = slice(self.used, self.used + nbytes)
        self.used += nbytes
        host = self.ring.ctypes.data + part.start
        if self.is_host:
            ctypes.memmove(host, address, nbytes)
        elif nbytes:
            self._check(driver.cuMemcpyDtoHAsync.unchecked, host, address, nbytes, stream)
        return part

    def _check(self, copy: Any, to: int, source: int, nbytes: int, stream: dp.Stream) -> None:
        status = copy(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream.c_handle)
        assert status == 0, f"a copy of the test gave {status}"


class Guards(threading.local):
    """Puts guards around, and poison into, what a device allocates while a thread has this on."""

    on = False

    def __init__(self, device: dp.Device, memory: Memory) -> None:
        self.alive: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.device, self.memory = device, memory

    def around(self, real: Any, nbytes: int, stream: dp.Stream) -> Storage:
        if not self.on:
            return real(nbytes, stream)  # type: ignore[no-any-return]
        inner = real(nbytes + 2 * GUARD, stream)
        self.memory.fill(inner.base, nbytes + 2 * GUARD, stream)
        outer = Storage(self.device, inner.base + GUARD, nbytes, stream, _release, inner)
        self.alive.add(outer)
        return outer


def _release(outer: Storage) -> None:
    """What used the memory goes over to the storage that frees it."""
    inner = outer.keep
    inner.owner, inner.writer, inner.readers, inner.lent = None, outer.writer, outer.readers, outer.lent


class Fresh(NamedTuple):
    """A fresh run on its way: what is copied out, the names of its outputs, and their memory."""

    taken: tuple[Any, ...]
    names: list[str]
    keep: tuple[Any, ...]


@dataclass(eq=False)
class Copy:
    """A spec at one address."""

    arena: dp.Tensor
    fields: dict[str, Any]
    request: dp.Request | None = None
    calls: dict[Any, dp.BoundCall] = field(default_factory=dict)  # prepared, by stream


class Runner:
    """One thread's calls on a device, and what of them is still to be compared."""

    def __init__(self, device: dp.Device, seed: int, number: int = 0) -> None:
        self.device, self.number = device, number
        self.rng = np.random.default_rng([seed, number])
        self.memory = Memory(device)
        self.guards = Guards(device, self.memory)
        self.streams = [device.stream() for _ in range(3)]
        self.apart = device.stream()  # of the fresh requests
        if not self.memory.is_host:
            self.streams[2].handle  # noqa: B018  # from now on one that others know
        self.stream = self.streams[0]
        self.ways_of = WAYS
        self.arenas: dict[int, list[dp.Tensor]] = {}
        self.waiting: list[tuple[Any, ...]] = []
        self.recent: list[Spec] = []  # called since the last wait: one of them it was, where the device is lost
        self.count = 0
        self.calls: collections.Counter[str] = collections.Counter()
        self.ways: collections.Counter[str] = collections.Counter()
        self.varied: collections.Counter[str] = collections.Counter()  # calls with other bits, within their bound

    # -- fresh ----------------------------------------------------------------------------------------------------
    def lives(self, given: Iterable[Spec]) -> list[Live]:
        """Run specs fresh, each of them again elsewhere: that tells whether its results can be compared bit by bit."""
        found: list[Live] = []
        waiting: list[tuple[Any, ...]] = []
        with self.apart:
            stream = self.device.executor().stream
            for spec in given:
                if self.memory.used + 8 * spec.image.nbytes + (1 << 20) > RING:
                    found += self._settled(waiting, stream)
                image = self.device.array(spec.image)
                self.device.executor().forget()
                self.recent.append(spec)
                first = self._fresh(spec, image)
                again = self._fresh(spec, image) if first.taken[0] is None else first
                waiting.append((spec, image, first, again))
            return found + self._settled(waiting, stream)

    def _settled(self, waiting: list[tuple[Any, ...]], stream: dp.Stream) -> list[Live]:
        """What was run fresh, once it is done."""
        stream.synchronize()
        self.recent.clear()
        found = []
        for spec, image, first, again in waiting:
            live = Live(spec, image, self._outcome(*first.taken), first.names)
            other = self._outcome(*again.taken)
            if (live.fresh.arena, live.fresh.outputs) != (other.arena, other.outputs):
                live.loose = where(live, other)
                if not live.varies:
                    raise Difference(f"two fresh requests: {spec}: {live.loose}")
            found.append(live)
        waiting.clear()
        self.memory.used = 0
        return found

    def _fresh(self, spec: Spec, image: dp.Tensor) -> Fresh:
        """By the library's own call: nothing was recorded at these addresses."""
        arena = self.device.empty(spec.image.nbytes, "u8")
        executor = self.device.executor()
        self.memory.copy(arena, image, executor.stream)
        names: list[str] = []

        def run() -> Any:
            request = spec.kind(**spec.at(arena))
            result = dp.run(request)
            outputs = result if isinstance(result, tuple) else (result,)
            given = {id(tensor): name for name, tensor, _ in request.tensors()}
            left = iter(request.unallocated())
            names.extend(given[id(t)] if id(t) in given else next(left) for t in outputs)
            return result

        result, error = self._guarded(run)
        # Not alike in both: what a library cannot do is refused before it is called. The stand-in has no driver.
        if isinstance(error, CudaError) and not isinstance(error, LibraryNotFound):
            raise Difference(f"{spec}: a fresh request ended in {error!r}") from error
        return Fresh(self._taken(arena, result, error, executor.stream), names, (arena, result))

    def _guarded(self, run: Any) -> tuple[Any, Exception | None]:
        self.guards.on = True
        try:
            return run(), None
        except Exception as error:  # noqa: BLE001  # whatever it is, a fresh request must end in the same
            return None, error
        finally:
            self.guards.on = False

    def _taken(self, arena: dp.Tensor, result: Any, error: Exception | None, stream: dp.Stream) -> tuple[Any, ...]:
        """Begin to copy out what a run left."""
        outputs = () if result is None else result if isinstance(result, tuple) else (result,)
        made = []
        for tensor in outputs:
            layout = tensor.layout
            if tensor.storage is arena.storage:
                where = ("given", tensor.ptr - arena.ptr, layout.shape, layout.strides)
                made.append((where, slice(0, 0)))
                continue
            tensor.storage.use(stream, write=False)
            inner = tensor.storage.keep
            part = self.memory.take(inner.base, inner.nbytes, stream)
            made.append((("made", layout.dtype.name, layout.shape, layout.strides), part))
        arena.storage.use(stream, write=False)
        return error, self.memory.take(arena.ptr, arena.nbytes, stream), made

    def _outcome(self, error: Exception | None, arena: slice, made: list[tuple[Any, slice]]) -> Outcome:
        ring = self.memory.ring
        parts = [(*layout, ring[part].tobytes()) for layout, part in made]
        return Outcome(None if error is None else type(error), ring[arena].tobytes(), parts)

    # -- calls ----------------------------------------------------------------------------------------------------
    def call(self, live: Live) -> None:
        """Call a spec in some way on the current stream; what it leaves is compared later."""
        rng, spec = self.rng, live.spec
        if rng.random() < 0.03:
            self.stream = self.streams[int(rng.integers(len(self.streams)))]
        self.count += 1
        self.recent.append(spec)
        if self.memory.used + 4 * spec.image.nbytes + (1 << 16) > RING:
            self.compare()
        copies = self._copies(live)
        copy = copies[int(rng.integers(COPIES))]
        way = self.ways_of[int(rng.integers(len(self.ways_of)))]
        if way == "function" and not spec.callable_fields:
            way = "request"
        with self.stream:
            stream = self.device.executor().stream
            self.memory.copy(copy.arena, live.image, stream)
            result, error = self._guarded(lambda: getattr(self, "_" + way.replace(" ", "_"))(live, copy, copies))
            taken = self._taken(copy.arena, result, error, stream)
        self.calls[spec.function] += 1
        self.ways[way] += 1
        self.waiting.append((live, way, self.count, result, taken))
        if len(self.waiting) >= WAITING:
            self.compare()

    def _copies(self, live: Live) -> list[Copy]:
        found = live.copies.get(self.number)
        if found is None:
            found = live.copies[self.number] = []
            with self.stream:
                found += [Copy(arena, live.spec.at(arena)) for arena in self._arenas(live.spec.image.nbytes)]
        return found

    def _arenas(self, nbytes: int) -> list[dp.Tensor]:
        """Memory for operands: the same for all specs of a size, so that they have addresses in common."""
        if nbytes not in self.arenas:
            if len(self.arenas) > MAX_ARENAS:
                self.arenas.clear()
            self.arenas[nbytes] = [self.device.empty(nbytes, "u8") for _ in range(COPIES)]
        return self.arenas[nbytes]

    def _function(self, live: Live, copy: Copy, _: list[Copy]) -> Any:
        return getattr(dp, live.spec.function)(**live.spec.arguments(copy.fields))

    def _request(self, live: Live, copy: Copy, _: list[Copy]) -> Any:
        return dp.run(live.spec.kind(**copy.fields))

    def _same_request(self, live: Live, copy: Copy, _: list[Copy]) -> Any:
        copy.request = copy.request or live.spec.kind(**copy.fields)
        return dp.run(copy.request)

    def _call_of(self, live: Live, copy: Copy) -> dp.BoundCall:
        call = copy.calls.get(self.stream)
        if call is None:
            call = copy.calls[self.stream] = dp.prepare(live.spec.kind(**copy.fields))
        for _, tensor, _ in call.request.tensors():  # what it allocated once
            if tensor.storage is not copy.arena.storage and isinstance(tensor.storage.keep, Storage):
                executor = self.device.executor()
                tensor.storage.use(executor.stream, write=True)
                self.memory.fill(tensor.storage.keep.base, tensor.storage.keep.nbytes, executor.stream)
        return call

    def _prepared(self, live: Live, copy: Copy, _: list[Copy]) -> Any:
        return self._call_of(live, copy)()

    def _prepared_with(self, live: Live, copy: Copy, copies: list[Copy]) -> Any:
        """The prepared call of one copy with the operands of another."""
        other = copies[copies.index(copy) - 1]
        names = [name for name, value in live.spec.given.items() if isinstance(value, Slot)]
        plain = [name for name, value in live.spec.given.items() if specs.substituted(value, Slot, id) is not value]
        if names != plain:  # what lies inside scales or mappings would stay the other's
            return self._prepared(live, copy, copies)
        return self._call_of(live, other)(**{name: copy.fields[name] for name in names})

    def _refit(self, live: Live, copy: Copy, _: list[Copy]) -> Any:
        """Overwrite an operand with zeros, then with what it was, by the prepared call."""
        call, home = self._call_of(live, copy), live.image
        written = {id(tensor) for _, tensor, is_written in call.request.tensors() if is_written}
        names = [name for name, value in live.spec.given.items() if isinstance(value, Slot)]
        names = [name for name in names if may_refit(copy.fields[name], written)]
        if names:
            name = names[int(self.rng.integers(len(names)))]
            tensor = copy.fields[name]
            call.refit(**{name: np.zeros(tensor.shape, tensor.dtype.numpy)})
            operand, start = (
                live.spec.operands[live.spec.given[name].number],
                live.spec.offsets[live.spec.given[name].number],
            )
            values = window(operand, live.spec.image, start).copy().view(operand.dtype.numpy)[..., 0]
            call.refit(**{name: live.spec.at(home)[name] if self.rng.integers(2) else values})
        return call()

    # -- comparisons ----------------------------------------------------------------------------------------------
    def compare(self) -> None:
        """Wait for what was called, and compare all of it."""
        for stream in self.streams:
            stream.synchronize()
        self.device.executor().stream.synchronize()
        self.recent.clear()
        for live, way, number, _, taken in self.waiting:
            got, fresh = self._outcome(*taken), live.fresh
            if got == fresh:
                continue
            text = f"call {number} of thread {self.number}, {way}, {live.spec}"
            if got.error is not fresh.error:
                raise Difference(f"{text}: ended in {taken[0]!r}, fresh in {fresh.error}") from taken[0]
            if live.varies:
                self.varied[live.spec.function] += 1
                why = beyond(live, got)
            else:
                why = where(live, got)
            if why:
                raise Difference(f"{text}: {why}")
        self.waiting.clear()
        self.memory.used = 0

    def check_guards(self) -> None:
        """Look at the guards of what is still allocated: workspaces, numbers, outputs of prepared calls."""
        self.compare()
        for outer in list(self.guards.alive):
            for start in (outer.keep.base, outer.base + outer.nbytes):
                part = self.memory.take(start, GUARD, self.streams[0])
                self.streams[0].synchronize()
                if (self.memory.ring[part] != POISON).any():
                    raise Difference(f"a guard of {outer.nbytes} bytes that the library allocated was written")
                self.memory.used = 0


def may_refit(tensor: dp.Tensor, written: set[int]) -> bool:
    layout = tensor.layout
    own = all(s > 0 or e <= 1 for s, e in zip(layout.strides, layout.shape, strict=True))
    return id(tensor) not in written and own and not layout.readonly and layout.size > 0
