"""Products by copies between ranks: what is multiplied, added and waited for, over memory of the host.

A stand-in for the memory of the ranks holds them to its rules: a word is 1 before it is waited for, and 0 before it is
set; nobody writes what another has yet to copy. What streams and the driver do of it only a GPU can show.
"""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch import parallel
from dispatch.device.host import HostDevice
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, CollectiveError, Refused
from dispatch.libraries.threads.communicator import ThreadCommunicator
from dispatch.parallel import by_copies, host_flags, peer_memory, peers, shards
from dispatch.parallel.side_stream import SideStream

PATIENCE = 20


class Words:
    """The words of all ranks; whoever waits for one sets it back."""

    def __init__(self, size):
        self.changed, self.size = threading.Condition(), size
        self.ready = {}
        self.used_flags = {(owner, rank): True for owner in range(size) for rank in range(size)}

    def write(self, words, key):
        with self.changed:
            assert not words.get(key), f"{key} is set before it was waited for"
            words[key] = True
            self.changed.notify_all()

    def wait(self, words, key):
        with self.changed:
            assert self.changed.wait_for(lambda: words.get(key), PATIENCE), f"{key} is never set"
            words[key] = False


class HostPeers:
    def __init__(self, rank, size, words, buffers, nbytes):
        self.rank, self.size, self.words, self.buffers, self.nbytes = rank, size, words, buffers, nbytes
        self.others = [(rank + step) % size for step in range(1, size)]
        self.device = dp.device("host")
        buffers[rank] = self.device.array(np.full(nbytes, 0xAB, np.uint8))

    def begin(self, stream, side):
        for rank in self.others:
            self.words.wait(self.words.used_flags, (self.rank, rank))

    def signal(self, ranks, slot, stream):
        assert slot < peers.MAX_SLOTS
        for rank in ranks:
            self.words.write(self.words.ready, (rank, self.rank, slot))

    def wait(self, rank, slot, stream):
        self.words.wait(self.words.ready, (self.rank, rank, slot))

    def finish(self, side):
        for rank in self.others:
            self.words.write(self.words.used_flags, (rank, self.rank))

    def _at(self, rank, offset, nbytes):
        assert offset >= 0
        assert offset + nbytes <= self.nbytes
        return self.buffers[rank].ptr + offset

    def pull(self, address, rank, offset, nbytes, stream):
        ctypes.memmove(address, self._at(rank, offset, nbytes), nbytes)

    def pull_rows(self, out, rank, offset, width, stream):
        for row in range(out.shape[0]):
            ctypes.memmove(out[row].ptr, self._at(rank, offset + row * width, width), width)

    def put(self, rank, offset, address, nbytes, stream):
        ctypes.memmove(self._at(rank, offset, nbytes), address, nbytes)

    def tensor(self, offset, shape, dtype):
        at = self._at(self.rank, offset, int(np.prod(shape)) * dtype.itemsize)
        return Tensor(self.buffers[self.rank].storage, at, self.device.layout(dtype, shape, c_strides(shape), at))


@pytest.fixture
def copied(monkeypatch):
    """Worlds of the host whose blocks go by copies; each call of `peers_of` has memory of just the size it asks for."""
    shared, lock, asked = {}, threading.Lock(), []

    def peers_of(side, nbytes):
        comm = side.comm
        if not nbytes:
            asked.append(0)
            return None
        count = comm.calls = getattr(comm, "calls", 0) + 1
        with lock:
            asked.append(nbytes)
            words, buffers = shared.setdefault((id(comm.rendezvous), count), (Words(comm.size), {}))
        made = HostPeers(comm.rank, comm.size, words, buffers, nbytes)
        dp.barrier(comm=comm)
        return made

    monkeypatch.setattr(shards, "peers_of", peers_of)
    monkeypatch.setattr(ThreadCommunicator, "record_work", lambda *_: None, raising=False)
    monkeypatch.setattr(SideStream, "__init__", _side)
    monkeypatch.setattr(HostDevice, "context", contextlib.nullcontext(), raising=False)
    return asked


def _side(self, comm):
    found = comm.communicator
    self.comm, self.device = found, found.device
    self.main = self.stream = found.device.executor().stream
    self.is_captured = False


def product(world, name, size, rows, k, n, chunks, dtype, seed, turns=3):
    """A block's results on this rank, and what one device gives."""
    rng = np.random.default_rng(seed)
    rank, device, comm = world.rank, world.device, world.communicator
    found = []
    for _ in range(turns):
        a, b = (rng.standard_normal(shape) for shape in ((size * rows, size * k), (size * k, size * n)))
        inner = slice(rank * k, (rank + 1) * k)
        columns, mine = slice(rank * n, (rank + 1) * n), slice(rank * rows, (rank + 1) * rows)
        by_rows = (device.array(a[:, inner].copy(), dtype), device.array(b[inner].copy(), dtype))
        by_columns = device.array(b[:, columns].copy(), dtype)
        if name in ("matmul_all_reduce", "matmul_reduce_scatter"):
            out = getattr(parallel, name)(*by_rows, comm=comm, chunks=chunks, by="copies")
            right = a @ b if name == "matmul_all_reduce" else (a @ b)[mine]
        elif name == "all_gather_matmul":
            bias = device.array(np.arange(n, dtype=float), dtype)
            choices = {"bias": bias, "epilogue": "BIAS", "by": "copies"}
            out = parallel.all_gather_matmul(
                device.array(a[mine], dtype), by_columns, comm=comm, chunks=chunks, **choices
            )
            right = (a @ b)[:, columns] + np.arange(n)
        else:
            out = parallel.matmul_all_gather(device.array(a, dtype), by_columns, comm=comm, chunks=chunks, by="copies")
            right = a @ b
        found.append(float(np.abs(out.astype("f64").numpy() - right).max() / np.abs(right).max()))
    return max(found)


BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (6, 1), (6, 4), (7, 16)])
def test_a_block_by_copies_gives_what_one_device_gives(copied, name, size, rows, chunks):
    with dp.World.local(["host"] * size, deadline=60) as world:
        errors = world.run(product, name, size, rows, 4, 3, chunks, "f64", [rows, size])
    assert max(errors) < 1e-14
    elements = {"matmul_all_reduce": size * rows * 3 * size, "matmul_reduce_scatter": (size - 1) * rows * 3 * size,
                "all_gather_matmul": (size - 1) * rows * 4 * size, "matmul_all_gather": size * rows * 3}  # fmt: skip
    assert set(copied) == {8 * elements[name]}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dtypes(copied, dtype):
    with dp.World.local(["host"] * 3, deadline=60) as world:
        for name in BLOCKS:
            bound = {"f32": 1e-5, "f16": 5e-3, "bf16": 4e-2}[dtype]
            assert max(world.run(product, name, 3, 8, 8, 8, 2, dtype, 1)) < bound
    assert copied


def test_rows_that_the_ranks_do_not_divide_go_by_nccl(copied, monkeypatch):
    monkeypatch.setattr(shards, "MEASURE_COPIES", True)

    def run(world):
        x, w = world.device.array(np.ones((7, 2))), world.device.array(np.ones((2, 3)))
        with pytest.raises(Refused, match="multiple of the number of ranks"):
            parallel.matmul_all_reduce(x, w, comm=world, by="copies")
        return parallel.matmul_all_reduce(x, w, comm=world, chunks=2).numpy()

    with dp.World.local(["host"] * 2, deadline=60) as world:
        assert all((found == 4).all() for found in world.run(run))
    assert set(copied) == {0}


@pytest.mark.parametrize(
    ("measured", "by", "copies"), [(True, None, 2), (False, None, 0), (True, "nccl", 0), (False, "copies", 2)]
)
def test_which_way_a_block_goes(copied, monkeypatch, measured, by, copies):
    monkeypatch.setattr(shards, "MEASURE_COPIES", measured)

    def run(world):
        x = world.device.array(np.ones((4, 2)))
        return parallel.matmul_all_reduce(x, x.T, comm=world, chunks=2, by=by).numpy()

    with dp.World.local(["host"] * 2, deadline=60) as world:
        assert all((found == 4).all() for found in world.run(run))
    assert len(copied) == copies


@pytest.mark.usefixtures("copied")
def test_a_block_that_raises_ends_the_communicator(monkeypatch):
    def run(world):
        x = world.device.array(np.ones((4, 2)))
        with pytest.raises((ZeroDivisionError, CollectiveError)):  # its own, or what the other has told
            parallel.matmul_reduce_scatter(x, x.T, comm=world, chunks=2, by="copies")
        with pytest.raises(CollectiveError, match="matmul_reduce_scatter ended with ZeroDivisionError"):
            world.check()

    monkeypatch.setattr(by_copies, "matmul", lambda *_, **__: 1 / 0)
    with dp.World.local(["host"] * 2, deadline=60) as world:
        world.run(run)


def test_rows_that_are_not_dense_are_refused_before_anything_is_sent():
    def run(world):
        x = world.device.array(np.ones((4, 6)))[:, ::2]
        with pytest.raises(BadRequest, match=r"a: .* dense in C order"):
            parallel.all_gather_matmul(x, world.device.array(np.ones((3, 2))), comm=world)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        world.run(run)


def test_structs_are_as_the_driver_has_them():
    from cuda.bindings import driver as types

    copy = peers._Copy2D(
        sourceType=2, targetType=2, width=3, height=4, source=5, sourcePitch=6, target=7, targetPitch=8
    )
    theirs = types.CUDA_MEMCPY2D()
    device = types.CUmemorytype.CU_MEMORYTYPE_DEVICE
    theirs.srcMemoryType = theirs.dstMemoryType = device
    theirs.WidthInBytes, theirs.Height = 3, 4
    theirs.srcDevice, theirs.srcPitch, theirs.dstDevice, theirs.dstPitch = 5, 6, 7, 8
    assert bytes(copy) == ctypes.string_at(int(theirs.getPtr()), ctypes.sizeof(copy))
    operation = types.CUstreamBatchMemOpType
    assert peers.WAIT == operation.CU_STREAM_MEM_OP_WAIT_VALUE_32
    assert peers.WRITE == operation.CU_STREAM_MEM_OP_WRITE_VALUE_32
    assert peers.EQUAL == types.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    made = types.CUstreamBatchMemOpParams()
    made.operation = operation.CU_STREAM_MEM_OP_WAIT_VALUE_32
    made.waitValue.address, made.waitValue.value, made.waitValue.flags = 0x1000, 1, 1
    words = (ctypes.c_uint64 * 6).from_buffer_copy(ctypes.string_at(int(made.getPtr()), 48))
    assert [words[0] & 0xFFFFFFFF, words[1], words[2] & 0xFFFFFFFF, words[3] & 0xFFFFFFFF] == [1, 0x1000, 1, 1]


def test_a_machine_is_the_same_for_its_processes():
    assert peers._machine_id() == peers._machine_id()
    assert len(peers._machine_id()) == peers.PEER_RECORD["machine"].itemsize


CHILD = """
import contextlib, sys, time
from types import SimpleNamespace
import numpy as np
from dispatch.parallel import host_flags

host_flags.driver = SimpleNamespace(cuMemHostRegister=lambda *_: None, cuMemHostGetDevicePointer=lambda at, _: at)
device = SimpleNamespace(context=contextlib.nullcontext(), alive=False)
pid, fd, token = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
words = host_flags.HostFlags.open_remote(device, pid, fd, 100, token)
assert words.array[7] == 77
words.array[8] = 88
try:
    host_flags.HostFlags.open_remote(device, pid, fd, 100, bytes(16))
except FileNotFoundError:
    print("another file is found out")
"""


def test_words_of_the_host_are_those_of_another_process_too(monkeypatch):
    """Over a stand-in for the driver, which has the host's memory where it lies."""
    registered = []
    stand_in = SimpleNamespace(
        cuMemHostRegister=lambda at, nbytes, flags: registered.append((at, nbytes, flags)),
        cuMemHostGetDevicePointer=lambda at, _: at,
    )
    monkeypatch.setattr(host_flags, "driver", stand_in)
    device = SimpleNamespace(context=contextlib.nullcontext(), alive=False)
    words = host_flags.HostFlags(device, 100)
    assert registered == [(words.address, mmap.PAGESIZE, 3)]
    assert not words.array.any()
    assert words.address % mmap.PAGESIZE == 0
    words.array[7] = 77
    command = [sys.executable, "-c", CHILD, str(words.pid), str(words.fd), words.token.hex()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "another file is found out\n"), ran.stderr
    assert list(np.flatnonzero(words.array)) == [7, 8]
    fd = words.fd
    del words
    until = time.monotonic() + PATIENCE
    while os.path.exists(f"/proc/self/fd/{fd}") and "dispatch flags" in os.readlink(f"/proc/self/fd/{fd}"):
        assert time.monotonic() < until, "the file is closed by a thread, behind the driver"
        time.sleep(1e-3)


def test_words_are_set_again_and_again_until_nobody_waits():
    """A stream may wait for a word twice: whoever sets them once leaves it waiting."""
    words, done = np.zeros(5, np.uint32), threading.Event()
    setter = threading.Thread(target=peers._keep_set, args=(words, done))
    setter.start()
    until = time.monotonic() + PATIENCE
    for _ in range(3):
        while not words.all():
            assert time.monotonic() < until
            time.sleep(1e-4)
        words[:] = 0  # as a stream that has waited
    done.set()
    setter.join(PATIENCE)
    assert not setter.is_alive()


def test_memory_is_kept_once_all_others_are_done_with_it_as_it_goes(monkeypatch):
    """Not as its communicator ends: then words may be those of the block before one that is still to run."""
    freed = threading.Event()
    stand_in = SimpleNamespace(cuMemAlloc=lambda _: 1 << 20, cuMemFree=SimpleNamespace(unchecked=lambda _: freed.set()))
    monkeypatch.setattr(peer_memory, "driver", stand_in)
    monkeypatch.setattr(peer_memory, "_spare", kept := [])
    device = SimpleNamespace(context=contextlib.nullcontext(), alive=True)
    for words, is_kept in (([1, 1, 1], True), ([1, 0, 1], False), (None, False)):
        memory, taken = peer_memory.Allocation(device, 1000), np.ones(3, np.uint32)
        if words is not None:
            memory.used_flags = taken
            taken[:] = words
        freed.clear()
        del memory
        assert [each.address for each in kept] == [1 << 20] * is_kept
        assert is_kept or freed.wait(PATIENCE)
        kept.clear()
