"""A stand-in for the driver, for the modules that call it: contexts, streams, events, memory, captures and their order.

It keeps each thread's stack of contexts and refuses what the driver refused on two H200s: an event on a stream of
another context, a copy of another context's memory, a default stream where no context is current. The handles 0, 1 and
2 mean a default stream of the current context; streams, events and pools have one of their own. Memory is the host's.

It knows what is behind what, by a vector clock for each stream, and notes what must never happen: in `touched` a handle
that was given to it when its stream was gone, in `early` memory that was freed before its uses, and in `lost` captures
that something ended (by the table of what ends them, as it was seen with driver 580). Memory that is handed out again
without having been freed counts as freed by that, and must be nobody else's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
import threading
from collections import Counter
from pathlib import Path

import cudabind.driver
from dispatch.device.stream import NOT_READY

spec = importlib.util.spec_from_file_location("stand_in_streams", Path(__file__).with_name("stand_in_streams.py"))
streams = importlib.util.module_from_spec(spec)
spec.loader.exec_module(streams)
GLOBAL, DEFAULTS = streams.GLOBAL, streams.DEFAULTS

OUT_OF_MEMORY = 2
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, UNSUPPORTED, INVALIDATED = 1, 201, 400, 900, 901
UNSAFE = {  # for whoever is not relaxed, while any thread captures in the default mode
    *("cuStreamSynchronize", "cuStreamQuery", "cuEventQuery", "cuEventSynchronize", "cuMemAllocFromPoolAsync"),
    *("cuMemFreeAsync", "cuMemPoolTrimTo", "cuMemPoolGetAttribute", "cuMemPoolCreate", "cuMemPoolDestroy"),
    *("cuMemHostAlloc", "cuMemFreeHost", "cuGraphInstantiate", "cuGraphExecDestroy"),
}


def plain(value):
    """An argument as Python has it; a bare call gets it as an instance of a ctypes type."""
    return (value.value or 0) if isinstance(value, ctypes._SimpleCData) else value


class Function:
    """One function: called, or called bare, where its result goes to the first pointer among the arguments."""

    def __init__(self, driver, name):
        self.driver, self.name, self.carry_out = driver, name, getattr(driver, f"_{name}", driver._fine)

    def __call__(self, *arguments):
        status, value = self.carry(*arguments)
        if status:
            raise cudabind.driver.error(self.name, status)
        return value

    def carry(self, *arguments):
        self.driver.calls[self.name] += 1
        if self.name in UNSAFE and self.driver.is_unsafe():
            self.driver.lose(self.name)
            return UNSUPPORTED, None
        return self.carry_out(*arguments)

    def unchecked(self, *arguments):
        pointers = [argument._obj for argument in arguments if hasattr(argument, "_obj")]
        status, value = self.carry(*map(plain, arguments))
        if pointers and value is not None:
            pointers[0].value = value
        return status

    unchecked_holding_gil = unchecked


class StandIn(streams.Streams):
    """The driver's functions that the modules under test call; a method gives the status and the result."""

    error = staticmethod(cudabind.driver.error)

    def __init__(self, count):
        self.contexts = [0x1000 * (number + 1) for number in range(count)]
        self.owners = {}  # of streams, events and pools: their context
        self.memory = {}  # address: (the bytes, their number, their context)
        self.locked = []
        self.busy, self.captured = set(), set()  # contexts whose streams are
        self.launched = []  # the contexts in which recorded calls were
        self.handles = itertools.count(0x9000, 16)
        self.thread = threading.local()
        self.identities = itertools.count(100)
        self.streams = {}  # alive, by handle: what the driver knows them by
        self.clocks, self.host = {}, Counter()  # what is behind each stream, and done for the host
        self.events = {}  # what is behind each, and the capture that it was recorded in
        self.uses = {}  # of memory, by address: the last on each stream
        self.capturing = {}  # streams, by handle: the number of the capture and its mode
        self.captures = itertools.count(1)
        self.semaphores = {}  # by capture: what is posted once its graph is gone
        self.room = 1 << 40  # bytes that may be allocated at once
        self.calls, self.reuses = Counter(), 0
        self.fresh, self.in_use = set(), set()  # addresses of memory that no storage has had yet, and that one has
        self.is_slow = False  # nothing is done before the host waits for it
        self.touched, self.early, self.lost, self.ended = [], [], [], set()
        self.in_graphs, self.graphs = {}, set()  # the captures that memory is used in, by address; those that may run

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if name.startswith("CU") or name == "cuuint64_t":
            return getattr(cudabind.driver, name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    @property
    def stack(self):
        return self.thread.__dict__.setdefault("stack", [])

    @property
    def current(self):
        return self.stack[-1] if self.stack else 0

    # -- the functions --------------------------------------------------------------------------------------------
    def owner(self, handle):
        self.identity(handle)
        return self.current if handle in (*DEFAULTS, None) else self.owners[int(handle)]

    def outputs(self, context):
        if not context:
            return INVALID_CONTEXT, None
        handle = next(self.handles)
        self.owners[handle] = context
        return 0, handle

    def lies_in(self, address):
        return next(
            context for base, (_, size, context) in self.memory.copy().items() if base <= address < base + max(size, 1)
        )

    def moved(self, to, source, size, handle, *on_device):
        if any(self.lies_in(address) != self.current for address in on_device):
            return INVALID_VALUE, None
        self.step(handle, *on_device)
        ctypes.memmove(to, source, size)
        return 0, None

    def _fine(self, *_):
        return 0, 0

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        before = self.thread.__dict__.get("mode", GLOBAL)
        self.thread.mode = mode._obj.value
        return 0, before

    def _cuCtxSynchronize(self):
        return self._of_all(lambda clock: self.host.update(clock - self.host))

    def _cuCtxRecordEvent(self, _, event):
        self.events[event] = Counter(), None
        return self._of_all(lambda clock: self.events[event][0].update(clock - self.events[event][0]))

    def _of_all(self, act):
        if not self.current:
            return INVALID_CONTEXT, None
        if self.capturing:
            self.lose("the whole context")
            return UNSUPPORTED, None
        for clock in self.clocks.copy().values():
            act(clock)
        return 0, None

    def _cuStreamSynchronize(self, handle):
        if not self.owner(handle):
            return INVALID_CONTEXT, None
        if handle in self.capturing:
            self.lose("cuStreamSynchronize of it")
            return UNSUPPORTED, None
        clock = self.clock(handle)
        self.host.update(clock - self.host)
        return 0, None

    def _cuEventSynchronize(self, event):
        clock, capture = self.events.get(event, (Counter(), None))
        assert capture is None
        self.host.update(clock - self.host)
        return 0, None

    def _cuEventQuery(self, event):
        clock, capture = self.events.get(event, (Counter(), None))
        assert capture is None
        return (0 if self.done(clock) else NOT_READY), None

    def _cuStreamQuery(self, handle):
        context = self.owner(handle)
        if handle in self.capturing:
            self.lose("cuStreamQuery of it")
            return UNSUPPORTED, None
        if not self.done(self.clock(handle)):
            return NOT_READY, None
        return (NOT_READY if context in self.busy else 0) if context else INVALID_CONTEXT, None

    def _cuStreamIsCapturing(self, handle, _):
        return 0, int(self.owner(handle) in self.captured or handle in self.capturing)

    def _cuStreamGetCaptureInfo(self, handle, state, number, graph, *_):
        self.identity(handle)
        number._obj.value = self.capturing.get(handle, (0, 0))[0]
        if graph is not None:
            graph._obj.value = number._obj.value
        return 0, 1

    def _cuStreamGetId(self, handle, _):
        if handle in self.capturing:
            self.lose("cuStreamGetId of it")
            return UNSUPPORTED, None
        identity = self.identity(handle)
        return 0, identity if isinstance(identity, int) else 7

    def _cuStreamBeginCapture(self, handle, mode):
        self.begin_capture(handle, mode)
        return 0, None

    def _cuStreamEndCapture(self, handle, _):
        return (0, next(self.handles)) if self.end_capture(handle) else (INVALIDATED, 0)

    def _cuUserObjectCreate(self, made, semaphore, *_):
        self.made_for = semaphore
        return 0, 1

    def _cuGraphRetainUserObject(self, graph, *_):
        self.semaphores[graph] = self.made_for
        return 0, None

    def _cuDeviceTotalMem(self, _):
        return 0, 1 << 33

    def _cuDeviceGetCount(self):
        return 0, len(self.contexts)

    def _cuDeviceGet(self, number):
        return 0, number

    def _cuDevicePrimaryCtxRetain(self, number):
        return 0, self.contexts[number]

    def _cuDeviceGetName(self, *_):
        return 0, b"stand-in\0"

    def _cuCtxGetDevice(self, *_):
        return (0, self.contexts.index(self.current)) if self.current else (INVALID_CONTEXT, None)

    def _cuCtxSetCurrent(self, context):
        self.stack[-1:] = [context]
        return 0, None

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return 0, None

    def _cuCtxPopCurrent(self, _):
        self.stack.pop()
        return 0, None

    def _cuMemGetInfo(self):
        return (0 if self.current else INVALID_CONTEXT), (1 << 20, 1 << 30)

    def _cuMemPoolCreate(self, props):
        return self.outputs(self.contexts[props.location.id])

    def _cuEventCreate(self, _):
        return self.outputs(self.current)

    def _cuStreamCreateWithPriority(self, flags, priority):
        assert (flags, priority <= 0) == (1, True)
        status, handle = self.outputs(self.current)
        if not status:
            self.streams[handle] = next(self.identities)
        return status, handle

    def _cuStreamDestroy(self, handle):
        self.identity(handle)
        del self.streams[handle]
        return 0, None

    def _cuEventRecord(self, event, handle):
        if not self.owner(handle):
            return INVALID_CONTEXT, None
        self.events[event] = Counter(self.clock(handle)), self.capturing.get(handle)
        return (0 if self.owners[event] == self.owner(handle) else INVALID_HANDLE), None

    def _cuStreamWaitEvent(self, handle, event, _):
        if not self.owner(handle):
            return INVALID_CONTEXT, None
        clock, capture = self.events.get(event, (Counter(), None))
        mine = self.capturing.get(handle)
        if mine is not None and capture != mine:
            self.lose("a wait for what is outside of it")
            return UNSUPPORTED, None
        if capture is not None and mine is None:
            self.capturing[handle] = capture  # it joins
        own = self.clock(handle)
        own.update(clock - own)
        return (0 if self.owners[event] == self.owner(handle) else INVALID_HANDLE), None

    def _cuMemAllocFromPoolAsync(self, _, size, pool, handle):
        if self.owner(handle) != self.owners[pool]:
            return INVALID_HANDLE, None
        assert handle not in self.capturing, "memory that would live only as the graph runs"
        if sum(taken for _, taken, _ in self.memory.copy().values()) + size > self.room:
            return OUT_OF_MEMORY, None
        block = (ctypes.c_uint8 * (size + 256))()
        base = (ctypes.addressof(block) + 255) // 256 * 256
        self.memory[base] = block, size, self.owners[pool]
        self.fresh.add(base)
        return 0, base

    def _cuMemPoolGetAttribute(self, pool, *_):
        taken = [size for _, size, context in self.memory.copy().values() if context == self.owners[pool]]
        return 0, sum(max(-(-size // 512), 1) * 512 for size in taken)

    # -- memory that is used again without having been freed --------------------------------------------------------
    def hand_out(self, address, handle):
        """A storage is made over memory for a stream: what was allocated just now, or what another storage had."""
        if address not in self.memory:  # another library's
            return
        if address in self.in_use:
            self.early.append(("handed out twice", address))
        self.in_use.add(address)
        if address in self.fresh:
            self.fresh.discard(address)
            return
        self.reuses += 1
        self.end_uses(address, handle)

    def die(self, address):
        """A storage is about to let its memory go."""
        self.in_use.discard(address)

    def _cuMemFreeAsync(self, address, handle):
        if address in self.in_use:
            self.early.append(("freed under a storage", address))
        self.fresh.discard(address)
        assert self.owner(handle) == self.memory.pop(address)[2]
        self.end_uses(address, handle)
        return 0, None

    def end_uses(self, address, handle):
        """What was enqueued with this memory must be behind the stream by now, or done."""
        if handle in self.capturing:
            self.early.append("in a graph")
        if self.in_graphs.pop(address, set()) & self.graphs:
            self.early.append("while a graph may run")
        clock = self.clock(handle)
        for identity, count in self.uses.pop(address, {}).items():
            if clock[identity] < count and self.host[identity] < count:
                self.early.append((address, identity))

    def _cuPointerGetAttribute(self, _, attribute, address):
        pages = [(ctypes.addressof(page), ctypes.sizeof(page)) for page in self.locked]
        return (0 if any(base <= address < base + size for base, size in pages) else INVALID_VALUE), 1

    def _cuMemHostAlloc(self, _, size, flags):
        self.locked.append((ctypes.c_uint8 * size)())
        return (0, ctypes.addressof(self.locked[-1])) if self.current else (INVALID_CONTEXT, None)

    def _cuMemcpyHtoDAsync(self, to, source, size, handle):
        return self.moved(to, source, size, handle, to)

    def _cuMemcpyDtoHAsync(self, to, source, size, handle):
        return self.moved(to, source, size, handle, source)

    def _cuMemcpyDtoDAsync(self, to, source, size, handle):
        return self.moved(to, source, size, handle, to, source)

    def _cuGraphLaunch(self, *_):
        self.launched.append(self.current)
        return 0, None

    def _cuMemsetD8Async(self, to, value, size, handle):
        self.step(handle, to)
        ctypes.memset(to, value, size)
        return (0 if self.owner(handle) == self.lies_in(to) else INVALID_HANDLE), None


def watched(driver, storage):
    """The class of storages, whose memory the driver is told of as it is handed out and let go of."""

    class Watched(storage):
        __slots__ = ()

        def __init__(self, device, base, nbytes, stream, *rest):
            driver.hand_out(base, stream.c_handle.value or 0)
            super().__init__(device, base, nbytes, stream, *rest)

        def __del__(self):
            if not sys.is_finalizing() and hasattr(self, "base"):
                driver.die(self.base)
            super().__del__()

    return Watched
