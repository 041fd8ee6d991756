"""NCCL over memory of the host: ranks are threads, and what they call is held against NCCL's signatures and computed.

As the library does, it takes a group's calls at its end, and gives `ncclInProgress` for what goes on. Unlike it, it
refuses a handle that was aborted or destroyed, and arguments of other types.
"""

import ctypes
import importlib.util
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from cudabind.sys import nccl
from dispatch.libraries.nccl import communicator, config, group, memory, monitor
from dispatch.libraries.threads.communicator import Contribution, Rendezvous
from dispatch.ops.collective import nccl as calls
from dispatch.ops.collective import nccl_messages as messages
from dispatch.ops.collective.reference import RankInput, reduce_inputs
from dispatch.ops.collective.request import RedOp

spec = importlib.util.spec_from_file_location("nccl_signatures", Path(__file__).with_name("nccl_signatures.py"))
signatures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signatures)
Call, SIGNATURES = signatures.Call, signatures.SIGNATURES

spec = importlib.util.spec_from_file_location("nccl_gpu_stand_in", Path(__file__).with_name("nccl_gpu_stand_in.py"))
around = importlib.util.module_from_spec(spec)
spec.loader.exec_module(around)
Gpu, Driver = around.Gpu, around.Driver

SUCCESS, INTERNAL_ERROR, INVALID_ARGUMENT, IN_PROGRESS = 0, 3, 4, 7
DTYPES = (
    *(np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
)
STREAM = 7  # the one that plans are to enqueue on
PATIENCE = 20


def array(address, count, dtype):
    if not count:
        return np.empty(0, dtype)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8).view(dtype)


class Library:
    """The functions of NCCL that are called."""

    def __init__(self):
        self.lock, self.by_key, self.comms, self.ops = threading.RLock(), {}, {}, {}
        self.open = threading.local()
        self.aborted, self.destroyed, self.named = [], [], []  # named: functions, in the order of their calls
        self.memory, self.registered = {}, {}
        self.slow = 0  # how often each call is in progress, before it is done
        self.left = {}
        self.stuck, self.unstuck = False, threading.Event()  # whether a reduction waits within NCCL, until an abort
        self.broken = {}  # what NCCL tells of a communicator, by its handle
        self.met = {}  # what a rank has sent to and received from another, a group each

    def __getattr__(self, name):
        if SIGNATURES.get(name) is None:
            return getattr(nccl, name)  # a type
        made = Call(self, name)
        setattr(self, name, made)
        return made

    def called(self, name, arguments):
        with self.lock:
            self.named.append(name)
        return getattr(self, f"_{name.removeprefix('nccl')}")(*arguments) or SUCCESS

    # -- communicators ------------------------------------------------------------------------------------------------
    def _GetUniqueId(self, pointer):
        pointer._obj.internal = b"%d" % id(pointer._obj)

    def _GetVersion(self, pointer):
        pointer._obj.value = 23203

    def _CommInitRankConfig(self, pointer, size, identity, rank, settings):
        assert settings._obj.magic == 0xCAFEBEEF
        assert settings._obj.blocking in (0, 1)
        assert settings._obj.size == ctypes.sizeof(settings._obj)
        rendezvous = self.by_key.setdefault(bytes(identity), Rendezvous(size.value))
        handle = self._made(rendezvous, rank.value)
        pointer._obj.value = handle
        self.left[handle] = 0 if settings._obj.blocking else self.slow
        return SUCCESS if settings._obj.blocking else IN_PROGRESS

    def _made(self, rendezvous, rank):
        with self.lock:
            handle = 0x1000 + 16 * len(self.comms)
            self.comms[handle] = SimpleNamespace(rendezvous=rendezvous, rank=rank, number=0, handle=handle)
            return handle

    def comm(self, handle):
        found = self.comms.get(handle.value)
        assert found is not None, "a handle that was never made, or is gone"
        assert handle.value not in (*self.aborted, *self.destroyed), "a handle that is gone"
        return found

    def _CommGetAsyncError(self, handle, pointer):
        comm = self.comm(handle)
        if handle.value in self.broken:
            pointer._obj.value = self.broken[handle.value]
            return
        left = self.left.get(handle.value, 0)
        self.left[handle.value] = max(0, left - 1)
        missing = hasattr(comm, "waits") and not comm.waits()
        pointer._obj.value = IN_PROGRESS if left or missing else SUCCESS

    def _CommAbort(self, handle):
        self.comm(handle)
        self.aborted.append(handle.value)
        self.unstuck.set()

    def _CommDestroy(self, handle):
        self.comm(handle)
        self.destroyed.append(handle.value)

    def _CommFinalize(self, handle):
        self.comm(handle)

    def _CommCount(self, handle, pointer):
        pointer._obj.value = self.comm(handle).rendezvous.size

    def _CommUserRank(self, handle, pointer):
        pointer._obj.value = self.comm(handle).rank

    def _CommSplit(self, handle, color, key, pointer, settings):
        comm = self.comm(handle)
        found = self._meet(comm, "split", (color.value, key.value))()
        mine = [(k, rank) for rank, (c, k) in enumerate(found) if c == color.value]
        if color.value == -1:
            pointer._obj.value = None
            return
        order = [rank for _, rank in sorted(mine)]
        with self.lock:
            rendezvous = self.by_key.setdefault((id(comm.rendezvous), comm.number, color.value), Rendezvous(len(order)))
        pointer._obj.value = self._made(rendezvous, order.index(comm.rank))

    def _CommShrink(self, handle, excluded, count, pointer, settings, flags):
        comm = self.comm(handle)
        assert flags.value in (0, 1)
        left = [rank for rank in range(comm.rendezvous.size) if rank not in list(excluded)[: count.value]]
        with self.lock:
            rendezvous = self.by_key.setdefault((id(comm.rendezvous), "shrink", tuple(left)), Rendezvous(len(left)))
        pointer._obj.value = self._made(rendezvous, left.index(comm.rank))

    def _CommGetUniqueId(self, handle, pointer):
        pointer._obj.internal = b"grown %d" % self.comm(handle).handle

    def _CommGrow(self, handle, size, identity, rank, pointer, settings):
        """One rank that was there says the id, which names the rendezvous; it tells the others."""
        assert settings._obj.magic == 0xCAFEBEEF
        assert (handle.value is None) == (rank.value >= 0), "a new rank has no communicator, and says its number"
        if handle.value is None:
            own, word = rank.value, identity._obj.internal
        else:
            comm = self.comm(handle)
            own, word = comm.rank, None if identity is None else identity._obj.internal
            words = [each for each in self._meet(comm, "grow", word)() if each is not None]
            assert len(words) == 1, "one rank of those that were there gives the id"
            word = words[0]
        with self.lock:
            rendezvous = self.by_key.setdefault(("grow", word), Rendezvous(size.value))
        pointer._obj.value = self._made(rendezvous, own)

    # -- memory -------------------------------------------------------------------------------------------------------
    def _MemAlloc(self, pointer, size):
        made = np.full(size + 4096, 0xFF, np.uint8)
        at = -(-made.ctypes.data // 4096) * 4096
        self.memory[at] = made
        pointer._obj.value = at

    def _MemFree(self, at):
        del self.memory[at.value]

    def _CommRegister(self, handle, address, size, pointer):
        self.comm(handle)
        pointer._obj.value = 1 + len(self.registered)
        self.registered[pointer._obj.value] = address.value, size.value

    def _CommWindowRegister(self, handle, address, size, pointer, flags):
        assert address.value % 4096 == 0
        assert flags.value == 1
        comm = self.comm(handle)
        sizes = self._meet(comm, "window", size.value)()
        assert len(set(sizes)) == 1
        return self._CommRegister(handle, address, size, pointer)

    def _CommDeregister(self, handle, registration):
        self.comm(handle)
        del self.registered[registration.value]

    _CommWindowDeregister = _CommDeregister

    # -- groups -------------------------------------------------------------------------------------------------------
    def _GroupStart(self):
        self.open.depth = getattr(self.open, "depth", 0) + 1
        if self.open.depth == 1:
            self.open.begun = []

    def _GroupEnd(self):
        assert getattr(self.open, "depth", 0) > 0
        self.open.depth -= 1
        if self.open.depth == 0:
            begun, self.open.begun = self.open.begun, []
            self._match([start.message for start in begun if hasattr(start, "message")])
            for end in [start() for start in begun]:
                end()
        return IN_PROGRESS if self.slow else SUCCESS

    def _do(self, comm, start):
        """Begin a call, at once or with its group, and wait for the other ranks."""
        if getattr(self.open, "depth", 0):
            self.open.begun.append(start)
        else:
            start()()
        self.left[comm.handle] = self.slow
        return IN_PROGRESS if self.slow else SUCCESS

    def _match(self, messages):
        """A group's messages between two ranks are one group's of the other, too: NCCL connects them at once."""
        pairs = {}
        for comm, peer, word in messages:
            pairs.setdefault((id(comm.rendezvous), comm.rank, peer), []).append(word)
        with self.lock:
            for (rendezvous, rank, peer), words in pairs.items():
                mine = self.met.setdefault((rendezvous, rank, peer), [])
                mine.append(sorted(words))
                theirs = self.met.get((rendezvous, peer, rank), [])[len(mine) - 1 :]
                wanted = sorted("recv" if word == "send" else "send" for word in words)
                assert not theirs or theirs[0] == wanted, f"rank {peer} has {theirs[0]} for {words} of rank {rank}"

    def _message(self, comm, peer, word, start):
        start.message = comm, peer, word
        if not getattr(self.open, "depth", 0):
            self._match([start.message])
        return self._do(comm, start)

    def _meet(self, comm, call, part):
        number, comm.number = comm.number, comm.number + 1
        comm.rendezvous.contribute(number, comm.rank, Contribution(call, part))

        def finish():
            found = comm.rendezvous.collect(number, time.monotonic() + PATIENCE)
            assert found is not None, f"{call}: not all ranks came"
            assert {each.call for each in found} == {call}, "ranks disagree"
            return [each.part for each in found]

        return finish

    # -- calls --------------------------------------------------------------------------------------------------------
    def _collective(self, handle, stream, call, part, ended):
        comm = self.comm(handle)
        assert stream.value == STREAM

        def start():
            wait = self._meet(comm, call, part() if callable(part) else part)
            return lambda: ended(comm, wait())

        return self._do(comm, start)

    def _op(self, op):
        return self.ops.get(op.value, (RedOp(op.value) if op.value < 5 else None, 1))

    def _RedOpCreatePreMulSum(self, pointer, scalar, dtype, residence, handle):
        self.comm(handle)
        value = array(scalar.value, 1, DTYPES[dtype.value])
        assert residence.value in (0, 1)
        with self.lock:
            pointer._obj.value = 100 + len(self.ops)
            self.ops[pointer._obj.value] = RedOp.PREMUL_SUM, value.copy() if residence.value else value

    def _RedOpDestroy(self, op, handle):
        self.comm(handle)
        assert op.value in self.ops

    def _reduced(self, parts, how):
        own = parts[0].x.dtype
        wide = [
            RankInput(each.x.astype(np.float32 if own.kind not in "iu" and own.itemsize < 4 else own), each.factor)
            for each in parts
        ]
        return reduce_inputs(wide, how).astype(own)

    def _reduction(self, name, source, count, dtype, op, handle, stream, ended):
        if self.stuck:
            assert self.unstuck.wait(PATIENCE)
            return INTERNAL_ERROR
        how, factor = self._op(op)
        kind = DTYPES[dtype.value]

        def part():
            return RankInput(array(source.value, count, kind).copy(), np.asarray(factor).reshape(-1)[0])

        call = f"{name} {count} {kind} {how}"
        return self._collective(
            handle, stream, call, part, lambda comm, parts: ended(comm, self._reduced(parts, how), kind)
        )

    def _AllReduce(self, source, target, count, dtype, op, handle, stream):
        source, target = (ctypes.c_void_p(each.value) for each in (source, target))

        def ended(_, total, kind):
            array(target.value, count.value, kind)[:] = total

        return self._reduction("all_reduce", source, count.value, dtype, op, handle, stream, ended)

    def _Reduce(self, source, target, count, dtype, op, root, handle, stream):
        source, root = ctypes.c_void_p(source.value), root.value
        at = None if target is None else target.value

        def ended(comm, total, kind):
            if comm.rank == root:
                array(at, count.value, kind)[:] = total

        return self._reduction(f"reduce {root}", source, count.value, dtype, op, handle, stream, ended)

    def _ReduceScatter(self, source, target, count, dtype, op, handle, stream):
        source, at, size = ctypes.c_void_p(source.value), target.value, self.comm(handle).rendezvous.size

        def ended(comm, total, kind):
            array(at, count.value, kind)[:] = total.reshape(size, -1)[comm.rank]

        return self._reduction("reduce_scatter", source, size * count.value, dtype, op, handle, stream, ended)

    def _Broadcast(self, source, target, count, dtype, root, handle, stream):
        at, to, root, kind = source.value, target.value, root.value, DTYPES[dtype.value]
        comm = self.comm(handle)

        def ended(_, parts):
            array(to, count.value, kind)[:] = parts[root]

        def part():
            return array(at, count.value, kind).copy() if comm.rank == root else None

        return self._collective(handle, stream, f"broadcast {count.value} {kind} {root}", part, ended)

    def _AllGather(self, source, target, count, dtype, handle, stream):
        at, to, kind = source.value, target.value, DTYPES[dtype.value]

        def ended(comm, parts):
            array(to, count.value * comm.rendezvous.size, kind)[:] = np.concatenate(parts)

        return self._collective(
            handle, stream, f"all_gather {count.value} {kind}", lambda: array(at, count.value, kind).copy(), ended
        )

    def _AlltoAll(self, source, target, count, dtype, handle, stream):
        at, to, kind, n = source.value, target.value, DTYPES[dtype.value], count.value
        size = self.comm(handle).rendezvous.size

        def ended(comm, parts):
            rows = [part.reshape(size, n)[comm.rank] for part in parts]
            array(to, n * size, kind)[:] = np.concatenate(rows) if n else 0

        part = lambda: array(at, n * size, kind).copy()  # noqa: E731
        return self._collective(handle, stream, f"alltoall {n} {kind}", part, ended)

    def _Send(self, source, count, dtype, peer, handle, stream):
        comm, at, kind = self.comm(handle), source.value, DTYPES[dtype.value]
        assert stream.value == STREAM

        def start():
            sent = Contribution(f"{count.value} {kind}", array(at, count.value, kind).copy())
            comm.rendezvous.send(comm.rank, peer.value, sent)
            return lambda: None

        return self._message(comm, peer.value, "send", start)

    def _Recv(self, target, count, dtype, peer, handle, stream):
        comm, at, kind, source = self.comm(handle), target.value, DTYPES[dtype.value], peer.value
        assert stream.value == STREAM

        def start():
            def finish():
                found = comm.rendezvous.receive(source, comm.rank, time.monotonic() + PATIENCE)
                assert found is not None
                assert found.call == f"{count.value} {kind}"
                array(at, count.value, kind)[:] = found.part

            return finish

        return self._message(comm, source, "recv", start)


def install(monkeypatch):
    """Have all that calls NCCL call a stand-in; and the device that its communicators are on."""
    library, gpu = Library(), Gpu()
    for module in (communicator, config, group, memory, calls, messages):
        monkeypatch.setattr(module, "nccl", library)
    for module in (communicator, monitor):
        monkeypatch.setattr(module, "driver", Driver(gpu))
    return library, gpu
