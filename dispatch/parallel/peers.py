"""Memory of each rank that the others of one machine copy from and into, and the words by which their streams wait.

NCCL's kernels move data on multiprocessors that a product beside them would have: on two H200 an all_reduce of 128 MiB
and a product of 0.7 ms took hardly less together than one behind the other. Copy engines take none of them. A rank
puts what others need into their memory, or into its own for them to copy, and says so in a word of theirs; they say
when they have used it. A word is 0 or 1 and whoever waited for it sets it back, so a graph may hold all of this. Words
are in the host's memory (host_words.py), where a thread sets those of a failed communicator without the driver.

Across machines, between threads of one process, and where GPUs do not reach one another there is nothing of this, and
NCCL moves the data. Follows the CUDA driver's documentation: stream memory operations, interprocess communication.
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
from dispatch.parallel.host_words import TOKEN_BYTES, WORD, HostWords
from dispatch.parallel.peer_memory import Allocation, IpcHandle, Opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.stream import Stream
    from dispatch.keys import Dtype
    from dispatch.libraries.nccl.communicator import NcclCommunicator
    from dispatch.parallel.beside import Beside

__all__ = ["MOST_SLOTS", "Peers", "peers_of"]

MOST_RANKS, MOST_SLOTS = 16, 256
MOST_BYTES = 4 << 30  # of a rank's memory: what would need more goes by NCCL
TAKEN = MOST_RANKS * MOST_SLOTS  # behind the words for what is there, those for what was used
WORDS = TAKEN + MOST_RANKS
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and _WRITE_VALUE_32
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
PLAIN = ctypes.c_uint(0)  # flags of a batch of them
TOKEN = secrets.token_bytes(16)
PATIENCE = 60.0  # seconds for which the words of a failed communicator are set again and again
PAUSE = 1e-3

CARD = np.dtype(
    [
        *(("machine", "V32"), ("process", "V16"), ("handle", "V64"), ("good", "<i8")),
        *(("pid", "<i8"), ("file", "<i8"), ("token", f"V{TOKEN_BYTES}")),
    ]
)
_known: weakref.WeakKeyDictionary[Any, Peers | None] = weakref.WeakKeyDictionary()  # by communicator


class Peers:
    """One rank's memory and words, and where those of the others are mapped.

    Guarantees: nothing is given back while a stream of ours may use it; after a failure of the communicator no stream
    waits for a word any more. All ranks make the same calls of it in the same order, each `begin` with a `finish`.

    Attributes:
        nbytes: of this rank's data.
        others: the other ranks, the next one first.
    """

    def __init__(self, comm: NcclCommunicator, nbytes: int) -> None:
        self.device: Any = comm.device
        self.nbytes, self.rank, self.size = nbytes, comm.rank, comm.size
        self.others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        self.in_graphs = False
        self._held = Allocation(self.device, nbytes)
        self._words = HostWords(self.device, WORDS)
        self._words.array[TAKEN:] = 1
        self._own = self._storage(self._held, self._words)
        self._storages = [self._own] * comm.size
        self._words_of = [self._words] * comm.size
        self._operations: dict[Any, tuple[ctypes.c_uint, Any]] = {}
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._batch, self._copy = driver.cuStreamBatchMemOp.unchecked, driver.cuMemcpyDtoDAsync.unchecked

    def _storage(self, held: Allocation | Opened, words: HostWords) -> Storage:
        """A rank's data, which goes once no stream uses it, and with it the rank's words."""
        return Storage(self.device, held.address, self.nbytes, self.device.quiet, _hand_back, (held, words))

    # -- the beginning --------------------------------------------------------------------------------------------
    def card(self) -> Any:
        """What the other ranks need to map this one's memory."""
        handle, made = IpcHandle(), np.zeros(1, CARD)
        with self.device.context, relaxed():
            status = driver.cuIpcGetMemHandle.unchecked(ctypes.byref(handle), ctypes.c_uint64(self._own.base))
        if status:
            raise driver.error("cuIpcGetMemHandle", status)
        made["machine"], made["process"], made["handle"], made["good"] = _machine(), _process(), bytes(handle), 1
        made["pid"], made["file"], made["token"] = self._words.pid, self._words.fd, self._words.token
        return made

    def map(self, cards: Any) -> bool:
        """Map the memory of the ranks with these cards; whether this rank reaches all of it.

        Ranks that are threads of one process do not: a copy between two GPUs takes the locks of both contexts, and one
        of them a thread has that loads a kernel, once its GPU is idle, which may be waiting for that very copy.
        """
        if len({card["process"].tobytes() for card in cards}) < self.size:
            return False
        if not all(card["good"] and card["machine"] == cards[0]["machine"] for card in cards):
            return False
        try:
            for rank in self.others:
                card = cards[rank]
                file, token = (int(card["pid"]), int(card["file"])), card["token"].tobytes()
                self._words_of[rank] = words = HostWords.of_another(self.device, *file, WORDS, token)
                self._storages[rank] = self._storage(Opened(self.device, card["handle"].tobytes()), words)
        except (CudaError, OSError):
            return False
        return True

    # -- what streams do, in the device's context -----------------------------------------------------------------
    def begin(self, stream: Stream, beside: Beside) -> None:
        """Have a stream wait until the others have used what this rank had for them before.

        A graph that the caller captures keeps the memory.
        """
        self._streams.add(stream)
        if beside.captured:
            self.in_graphs = True
            self.device.graphs.keep(beside.here, self)
        self._tell(stream, tuple(TAKEN + rank for rank in self.others), ())

    def signal(self, ranks: Sequence[int], slot: int, stream: Stream) -> None:
        """Say to some ranks, behind what a stream has, that there is something for them."""
        word = self.rank * MOST_SLOTS + slot
        self._tell(stream, (), tuple((rank, word) for rank in ranks))

    def wait(self, rank: int, slot: int, stream: Stream) -> None:
        """Have a stream wait for another rank's `signal` to this one."""
        self._streams.add(stream)
        self._tell(stream, (rank * MOST_SLOTS + slot,), ())

    def finish(self, beside: Beside) -> None:
        """Have the caller's stream wait for what is beside, and say to all others that all was used."""
        beside.join()
        self._tell(beside.here, (), tuple((rank, TAKEN + self.rank) for rank in self.others))
        self._own.use(beside.here, write=True)  # where the memory is to go back, it is behind this
        for rank in self.others:
            self._storages[rank].use(beside.here, write=True)

    def _tell(self, stream: Stream, waits: tuple[int, ...], writes: tuple[tuple[int, int], ...]) -> None:
        """Wait for words of this rank and set them back, or set words of others: one call of the driver."""
        found = self._operations.get((waits, writes))
        if found is None:
            own = self._words.address
            listed = [(WAIT, own + word * WORD, 1, EQUAL) for word in waits]
            listed += [(WRITE, own + word * WORD, 0, 0) for word in waits]
            listed += [(WRITE, self._words_of[rank].address + word * WORD, 1, 0) for rank, word in writes]
            # CUstreamBatchMemOpParams is a union of 48 bytes: operation, address, value, flags.
            array = (ctypes.c_uint64 * (6 * len(listed)))(*(word for each in listed for word in (*each, 0, 0)))
            found = self._operations[waits, writes] = ctypes.c_uint(len(listed)), array
        count, array = found
        if status := self._batch(stream.c_handle, count, array, PLAIN):
            self.device.fail(status, "cuStreamBatchMemOp")

    def pull(self, address: int, rank: int, offset: int, nbytes: int, stream: Stream) -> None:
        """Copy some of a rank's data, this one's own too, to an address of this device."""
        self._copied(address, self._storages[rank].base + offset, nbytes, stream)

    def put(self, rank: int, offset: int, address: int, nbytes: int, stream: Stream) -> None:
        """Copy from an address of this device into another rank's data."""
        self._copied(self._storages[rank].base + offset, address, nbytes, stream)

    def _copied(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if status := self._copy(
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
        """Some of this rank's data as a tensor, which calls may write."""
        at = self._own.base + offset
        return Tensor(self._own, at, self.device.layout(dtype, shape, c_strides(shape), at))

    # -- the end ----------------------------------------------------------------------------------------------------
    def retire(self) -> None:
        """Let the memory be for another communicator, once no other rank will read or write it any more."""
        if not self.in_graphs and self.device.alive and self.device.fault is None:
            self._held.taken = self._words.array[TAKEN:]

    def release(self) -> None:
        """Set all words of this rank until no stream waits any more: what was waited for does not come.

        A stream may wait for a word more than once, so that they are set again and again. Who asks the driver about
        streams may have to wait within it until they are through: another thread sets.
        """
        done = threading.Event()
        threading.Thread(target=_keep_set, args=(self._words.array, done), name="peers words", daemon=True).start()
        until = time.monotonic() + PATIENCE
        try:
            with self.device.context, relaxed():
                while time.monotonic() < until and self.device.alive and self.device.fault is None:
                    statuses = [driver.cuStreamQuery.unchecked(each.c_handle) for each in list(self._streams)]
                    if NOT_READY not in statuses:
                        break
                    time.sleep(PAUSE)
        finally:
            done.set()


def _keep_set(words: Any, done: threading.Event) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        words[:] = 1
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


def _hand_back(storage: Storage) -> None:
    """Let the memory go once our streams are done with it."""
    if storage.device.alive and storage.device.fault is None:
        storage.device.park(storage)


def _machine() -> bytes:
    """What is the same for all processes of one machine that see one another, as those of two containers do not."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()


def _process() -> bytes:
    """What no other process has, a child of this one neither."""
    return hashlib.sha256(TOKEN + os.getpid().to_bytes(8, "little")).digest()[:16]


def peers_of(beside: Beside, nbytes: int) -> Peers | None:
    """The memory of a communicator's ranks for so much data of each; None where NCCL is to move it.

    The first time, and where more is needed than before, all ranks make it together, and wait for one another; all get
    the same answer.
    """
    comm: Any = beside.comm
    if comm.library != "nccl" or not 1 < comm.size <= MOST_RANKS or not 0 < nbytes <= MOST_BYTES:
        return None
    known = _known.get(comm)
    if comm in _known and (known is None or known.nbytes >= nbytes):
        return known
    if beside.captured:
        return None  # nothing can be waited for
    made = _known[comm] = _made(comm, nbytes)
    if known is not None:
        known.retire()  # all have waited for all that was enqueued before
    return made


def _made(comm: NcclCommunicator, nbytes: int) -> Peers | None:
    made, card = None, np.zeros(1, CARD)
    try:
        made = Peers(comm, nbytes)
        card = made.card()
    except (CudaError, DispatchError):
        made = None  # which the others are told
    cards = all_gather(comm.device.array(card.view(np.uint8)), comm=comm).numpy().view(CARD).ravel()
    reached = np.array([made is not None and made.map(cards)], np.int32)
    everyone = all_reduce(comm.device.array(reached), comm=comm, reduce="min")
    if not int(everyone.numpy()[0]) or made is None:
        return None
    of = weakref.ref(made)

    def failed(_error: CollectiveError) -> None:
        peers = of()
        if peers is not None:
            threading.Thread(target=peers.release, name="peers release", daemon=True).start()

    comm.watchers.append(failed)
    itself = weakref.ref(comm)  # plans keep a communicator for longer than it is open

    def ended() -> None:
        comm = itself()
        peers = _known.pop(comm, None)
        if comm is not None and comm.error is None and peers is not None:
            peers.retire()

    comm.endings.append(ended)
    return made
