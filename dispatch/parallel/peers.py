"""Memory of each rank that the other ranks of one machine read and write by copies, and flags for streams to wait on.

NCCL's kernels use multiprocessors that a concurrent product needs: on two H200 an all_reduce of 128 MiB and a product
of 0.7 ms took hardly less time together than one after the other. Copy engines use no multiprocessors. A rank copies
data for others into their memory, or into its own memory for them to copy, and sets one of their flags; they set a flag
when they have used the data. A flag is 0 or 1, and the stream that waited for it resets it, so all of this can be
captured in a graph. The flags are in host memory (host_flags.py), where a thread can set the flags of a failed
communicator without the driver.

Across machines, between threads of one process, and between GPUs that cannot access one another, this is not available
and NCCL moves the data. Follows the CUDA driver's documentation: stream memory operations, interprocess communication.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.device.layout import c_strides
from dispatch.device.storage import Storage
from dispatch.device.stream import NOT_READY, relaxed
from dispatch.device.tensor import Tensor
from dispatch.errors import CollectiveError, DispatchError
from dispatch.ops.collective import all_gather, all_reduce
from dispatch.parallel.host_flags import FLAG_BYTES, TOKEN_BYTES, HostFlags
from dispatch.parallel.peer_memory import Allocation, ImportedMemory, IpcHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.stream import Stream
    from dispatch.keys import Dtype
    from dispatch.libraries.nccl.communicator import NcclCommunicator
    from dispatch.parallel.side_stream import SideStream

__all__ = ["MAX_SLOTS", "Peers", "peers_of"]

MAX_RANKS, MAX_SLOTS = 16, 256
MAX_BYTES = 4 << 30  # bytes of a rank's memory: blocks that need more use NCCL
USED_FLAGS = MAX_RANKS * MAX_SLOTS  # the first flag for data that was used; those before it are for data that is ready
FLAG_COUNT = USED_FLAGS + MAX_RANKS
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and _WRITE_VALUE_32
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
PLAIN = ctypes.c_uint(0)  # the flags argument of cuStreamBatchMemOp
TOKEN = secrets.token_bytes(16)
UNBLOCK_SECONDS = 60.0  # for this long the flags of a failed communicator are set again and again
PAUSE = 1e-3

PEER_RECORD = np.dtype(
    [
        *(("machine", "V32"), ("process", "V16"), ("handle", "V64"), ("good", "<i8")),
        *(("pid", "<i8"), ("file", "<i8"), ("token", f"V{TOKEN_BYTES}")),
    ]
)
_peers_of: weakref.WeakKeyDictionary[Any, Peers | None] = weakref.WeakKeyDictionary()  # by communicator


class Peers:
    """One rank's memory and flags, and the mappings of those of the other ranks.

    Guarantees: nothing is freed while a stream of this process may use it; after a failure of the communicator no
    stream waits for a flag any more. All ranks make the same calls in the same order, each `begin` with a `finish`.

    Attributes:
        nbytes: size of this rank's data.
        others: the other ranks, the next one first.
    """

    def __init__(self, comm: NcclCommunicator, nbytes: int) -> None:
        self.device: Any = comm.device
        self.nbytes, self.rank, self.size = nbytes, comm.rank, comm.size
        self.others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        self.in_graphs = False
        self._allocation = Allocation(self.device, nbytes)
        self._flags = HostFlags(self.device, FLAG_COUNT)
        self._flags.array[USED_FLAGS:] = 1
        self._own = self._storage(self._allocation, self._flags)
        self._storages = [self._own] * comm.size
        self._flags_of = [self._flags] * comm.size
        self._operations: dict[Any, tuple[ctypes.c_uint, Any]] = {}
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._batch, self._enqueue_copy = driver.cuStreamBatchMemOp.unchecked, driver.cuMemcpyDtoDAsync.unchecked

    def _storage(self, held: Allocation | ImportedMemory, flags: HostFlags) -> Storage:
        """A rank's data, which is freed together with the rank's flags once no stream uses it."""
        return Storage(self.device, held.address, self.nbytes, self.device.quiet, _release_storage, (held, flags))

    # -- the beginning --------------------------------------------------------------------------------------------
    def record(self) -> Any:
        """The data that the other ranks need to map this rank's memory."""
        handle, record = IpcHandle(), np.zeros(1, PEER_RECORD)
        with self.device.context, relaxed():
            status = driver.cuIpcGetMemHandle.unchecked(ctypes.byref(handle), ctypes.c_uint64(self._own.base))
        if status:
            raise driver.error("cuIpcGetMemHandle", status)
        record["machine"], record["process"], record["handle"], record["good"] = (
            _machine_id(),
            _process_id(),
            bytes(handle),
            1,
        )
        record["pid"], record["file"], record["token"] = self._flags.pid, self._flags.fd, self._flags.token
        return record

    def map(self, records: Any) -> bool:
        """Map the memory of the ranks with these records; returns whether this rank can access all of it.

        It refuses ranks that are threads of one process: a copy between two GPUs takes the locks of both contexts, and
        a thread that loads a kernel holds one of them until its GPU is idle, which may be waiting for that very copy.
        """
        if len({record["process"].tobytes() for record in records}) < self.size:
            return False
        if not all(record["good"] and record["machine"] == records[0]["machine"] for record in records):
            return False
        try:
            for rank in self.others:
                record = records[rank]
                file, token = (int(record["pid"]), int(record["file"])), record["token"].tobytes()
                self._flags_of[rank] = flags = HostFlags.open_remote(self.device, *file, FLAG_COUNT, token)
                self._storages[rank] = self._storage(ImportedMemory(self.device, record["handle"].tobytes()), flags)
        except (CudaError, OSError):
            return False
        return True

    # -- operations on streams, in the device's context --------------------------------------------------------------
    def begin(self, stream: Stream, side: SideStream) -> None:
        """Make a stream wait until the other ranks have used the data that this rank gave them before.

        A graph that the caller captures keeps the memory alive.
        """
        self._streams.add(stream)
        if side.is_captured:
            self.in_graphs = True
            self.device.graphs.keep(side.main, self)
        self._enqueue_flags(stream, tuple(USED_FLAGS + rank for rank in self.others), ())

    def signal(self, ranks: Sequence[int], slot: int, stream: Stream) -> None:
        """Tell some ranks, after the work of a stream, that data for them is ready."""
        flag = self.rank * MAX_SLOTS + slot
        self._enqueue_flags(stream, (), tuple((rank, flag) for rank in ranks))

    def wait(self, rank: int, slot: int, stream: Stream) -> None:
        """Make a stream wait for another rank's `signal` to this one."""
        self._streams.add(stream)
        self._enqueue_flags(stream, (rank * MAX_SLOTS + slot,), ())

    def finish(self, side: SideStream) -> None:
        """Make the main stream wait for the side stream, and tell all other ranks that their data was used."""
        side.join()
        self._enqueue_flags(side.main, (), tuple((rank, USED_FLAGS + self.rank) for rank in self.others))
        self._own.use(side.main, write=True)  # the memory must not be freed before this
        for rank in self.others:
            self._storages[rank].use(side.main, write=True)

    def _enqueue_flags(self, stream: Stream, waits: tuple[int, ...], writes: tuple[tuple[int, int], ...]) -> None:
        """Wait for flags of this rank and reset them, or set flags of other ranks: one call of the driver."""
        operations = self._operations.get((waits, writes))
        if operations is None:
            flags_address = self._flags.address
            listed = [(WAIT, flags_address + flag * FLAG_BYTES, 1, EQUAL) for flag in waits]
            listed += [(WRITE, flags_address + flag * FLAG_BYTES, 0, 0) for flag in waits]
            listed += [(WRITE, self._flags_of[rank].address + flag * FLAG_BYTES, 1, 0) for rank, flag in writes]
            # CUstreamBatchMemOpParams is a union of 48 bytes: operation, address, value, flags.
            array = (ctypes.c_uint64 * (6 * len(listed)))(*(word for each in listed for word in (*each, 0, 0)))
            operations = self._operations[waits, writes] = ctypes.c_uint(len(listed)), array
        count, array = operations
        if status := self._batch(stream.c_handle, count, array, PLAIN):
            self.device.fail(status, "cuStreamBatchMemOp")

    def pull(self, address: int, rank: int, offset: int, nbytes: int, stream: Stream) -> None:
        """Copy a part of a rank's data, which may be this rank's own, to an address of this device."""
        self._copy_bytes(address, self._storages[rank].base + offset, nbytes, stream)

    def put(self, rank: int, offset: int, address: int, nbytes: int, stream: Stream) -> None:
        """Copy from an address of this device into another rank's data."""
        self._copy_bytes(self._storages[rank].base + offset, address, nbytes, stream)

    def _copy_bytes(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if status := self._enqueue_copy(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream.c_handle
        ):
            self.device.fail(status, "cuMemcpyDtoDAsync")

    def pull_rows(self, out: Tensor, rank: int, offset: int, width: int, stream: Stream) -> None:
        """Copy rows of `width` bytes, dense in a rank's data, to the rows of a tensor of this device."""
        copy = _Copy2D(sourceType=DEVICE, targetType=DEVICE, width=width, height=out.shape[0])
        copy.source, copy.sourcePitch = self._storages[rank].base + offset, width
        copy.target, copy.targetPitch = out.ptr, out.strides[0]
        if status := driver.cuMemcpy2DAsync.unchecked(ctypes.byref(copy), stream.c_handle):
            self.device.fail(status, "cuMemcpy2DAsync")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """A part of this rank's data as a tensor, which calls may write."""
        at = self._own.base + offset
        return Tensor(self._own, at, self.device.layout(dtype, shape, c_strides(shape), at))

    # -- the end ----------------------------------------------------------------------------------------------------
    def allow_reuse(self) -> None:
        """Let another communicator reuse the memory, once no other rank will read or write it any more."""
        if not self.in_graphs and self.device.alive and self.device.fault is None:
            self._allocation.used_flags = self._flags.array[USED_FLAGS:]

    def unblock_streams(self) -> None:
        """Set all flags of this rank until no stream waits any more, because their data will not come.

        A stream may wait for a flag more than once, so they are set again and again. The thread that queries the
        streams may be blocked inside the driver until they have ended, so another thread sets the flags.
        """
        done = threading.Event()
        threading.Thread(target=_keep_set, args=(self._flags.array, done), name="peers flags", daemon=True).start()
        until = time.monotonic() + UNBLOCK_SECONDS
        try:
            with self.device.context, relaxed():
                while time.monotonic() < until and self.device.alive and self.device.fault is None:
                    statuses = [driver.cuStreamQuery.unchecked(each.c_handle) for each in list(self._streams)]
                    if NOT_READY not in statuses:
                        break
                    time.sleep(PAUSE)
        finally:
            done.set()


def _keep_set(flags: Any, done: threading.Event) -> None:
    until = time.monotonic() + UNBLOCK_SECONDS
    while time.monotonic() < until:
        flags[:] = 1
        if done.wait(PAUSE):
            return


DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("sourceX", ctypes.c_size_t), ("sourceY", ctypes.c_size_t), ("sourceType", ctypes.c_int),
        ("sourceHost", ctypes.c_void_p), ("source", ctypes.c_uint64), ("sourceArray", ctypes.c_void_p),
        ("sourcePitch", ctypes.c_size_t),
        ("targetX", ctypes.c_size_t), ("targetY", ctypes.c_size_t), ("targetType", ctypes.c_int),
        ("targetHost", ctypes.c_void_p), ("target", ctypes.c_uint64), ("targetArray", ctypes.c_void_p),
        ("targetPitch", ctypes.c_size_t), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


def _release_storage(storage: Storage) -> None:
    """Free the memory once the streams of this process are done with it."""
    if storage.device.alive and storage.device.fault is None:
        storage.device.park(storage)


def _machine_id() -> bytes:
    """A hash that is the same for all processes of a machine that see one another; it differs between containers."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()


def _process_id() -> bytes:
    """A hash that no other process has, not even a child of this one."""
    return hashlib.sha256(TOKEN + os.getpid().to_bytes(8, "little")).digest()[:16]


def peers_of(side: SideStream, nbytes: int) -> Peers | None:
    """The memory of a communicator's ranks for `nbytes` of data on each; None if NCCL must move the data.

    The first time, and when more is needed than before, all ranks allocate it together and wait for one another; all
    get the same answer.
    """
    comm: Any = side.comm
    if comm.library != "nccl" or not 1 < comm.size <= MAX_RANKS or not 0 < nbytes <= MAX_BYTES:
        return None
    existing = _peers_of.get(comm)
    if comm in _peers_of and (existing is None or existing.nbytes >= nbytes):
        return existing
    if side.is_captured:
        return None  # a capture cannot wait for other ranks
    created = _peers_of[comm] = _make_peers(comm, nbytes)
    if existing is not None:
        existing.allow_reuse()  # all ranks have waited for all work enqueued before
    return created


def _make_peers(comm: NcclCommunicator, nbytes: int) -> Peers | None:
    created, record = None, np.zeros(1, PEER_RECORD)
    try:
        created = Peers(comm, nbytes)
        record = created.record()
    except (CudaError, DispatchError):
        created = None  # the record tells the other ranks
    records = all_gather(comm.device.array(record.view(np.uint8)), comm=comm).numpy().view(PEER_RECORD).ravel()
    can_access = np.array([created is not None and created.map(records)], np.int32)
    all_can_access = all_reduce(comm.device.array(can_access), comm=comm, reduce="min")
    if not int(all_can_access.numpy()[0]) or created is None:
        return None
    created_ref = weakref.ref(created)

    def failed(_error: CollectiveError) -> None:
        peers = created_ref()
        if peers is not None:
            threading.Thread(target=peers.unblock_streams, name="peers release", daemon=True).start()

    comm.watchers.append(failed)
    comm_ref = weakref.ref(comm)  # weak, because plans keep a communicator alive after it is closed

    def ended() -> None:
        comm = comm_ref()
        peers = _peers_of.pop(comm, None)
        if comm is not None and comm.error is None and peers is not None:
            peers.allow_reuse()

    comm.endings.append(ended)
    return created
