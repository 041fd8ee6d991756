"""What two ranks do with blocks by copies, for tests; and two ranks on one GPU, which NCCL does not have.

These are two processes: `python blocks_by_copies.py RANK ADDRESS`, which prints a line of JSON. They meet in words of
their own; everything else is as between two GPUs, but for the link. Two threads cannot stand for two GPUs: where one
waits within the driver for the GPU, the other is not let in to launch what that waits for.
"""

import ctypes
import json
import sys
import threading
import time
from multiprocessing.connection import Client, Listener

import numpy as np

import dispatch as dp
from cudabind import driver
from dispatch import parallel
from dispatch.core.communicator import Communicator
from dispatch.errors import CollectiveError
from dispatch.parallel import peers

BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


class Pair(Communicator):
    """One of two ranks on a GPU; `exchange` gives an object to the other, and has its."""

    library = "nccl"

    def __init__(self, rank, device, exchange):
        super().__init__(rank, 2, device, deadline=30)
        self.exchange = exchange

    def meet(self):
        self.exchange(None)

    def record_work(self, stream, what):
        assert stream.value
        assert what

    def stop(self):
        pass

    def release(self):
        pass

    def split(self, color, key=0):
        raise NotImplementedError


class Told:
    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


def all_gather(x, *, comm):
    mine, other = x.numpy(), comm.exchange(x.numpy())
    return Told(np.stack([mine, other] if comm.rank == 0 else [other, mine]))


def all_reduce(x, *, comm, reduce):
    assert reduce == "min"
    return Told(np.minimum(x.numpy(), comm.exchange(x.numpy())))


def install():
    peers.all_gather, peers.all_reduce = all_gather, all_reduce


# -- what is done -----------------------------------------------------------------------------------------------------
def operands(comm, name, a, b):
    """A rank's part of two matrices for a block, and what of their product it is to give."""
    rows, inner, columns = (
        slice(comm.rank * n // 2, (comm.rank + 1) * n // 2) for n in (a.shape[0], a.shape[1], b.shape[1])
    )
    mine = {"all_gather_matmul": (a[rows], b[:, columns]), "matmul_all_gather": (a, b[:, columns])}
    x, w = (comm.device.array(np.ascontiguousarray(e)) for e in mine.get(name, (a[:, inner], b[inner])))
    part = {"matmul_reduce_scatter": (rows, slice(None)), "all_gather_matmul": (slice(None), columns)}.get(name, ...)
    return x, w, part


def block(comm, name, a, b, chunks):
    """A block's result, and what of the product of two matrices it is to be."""
    x, w, part = operands(comm, name, a, b)
    return getattr(parallel, name)(x, w, comm=comm, chunks=chunks, by="copies"), part


def one_behind_the_other(comm, turns=150):
    """Blocks of changing shapes; what was wrong."""
    rng, found, wrong = np.random.default_rng(3), [], []
    for turn in range(turns):
        m, k, n = (2 * int(extent) for extent in rng.integers(1, 200, 3))
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        name, chunks = BLOCKS[int(rng.integers(4))], int(rng.integers(1, 9))
        out, part = block(comm, name, a, b, chunks)
        found.append((out, (a.astype(np.float64) @ b)[part], name, turn))
        if turn % 37 == 0:
            comm.device.synchronize()
    for out, right, name, turn in found:
        error = np.abs(out.numpy() - right).max() / np.abs(right).max()
        if not error < 1e-5:
            wrong.append((turn, name, float(error)))
    assert peers._peers_of[comm] is not None
    return wrong


def memory_is_used_again(comm):
    """Bytes of the GPU's memory that are free with a communicator's, and with the next one's."""
    x, w, _ = operands(comm, "matmul_all_reduce", *(np.ones((2048, 2048), np.float32) for _ in range(2)))
    free = []
    for _ in range(3):
        ranks = Pair(comm.rank, comm.device, comm.exchange)
        for _ in range(3):
            parallel.matmul_all_reduce(x, w, comm=ranks, chunks=2, by="copies")
        comm.device.synchronize()
        comm.meet()
        free.append(driver.cuMemGetInfo()[0])
        comm.meet()
        ranks.close()
    assert not peers._peers_of.get(ranks)
    return free


def graphs(comm, name, meet):
    """A graph of a block, launched six times, with calls in between; whether each was right. `meet()` is a barrier."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((128, 64), (64, 96)))
    right = a.astype(np.float64) @ b

    def is_right(out, part):
        return bool(np.abs(out.numpy() - right[part]).max() < 1e-3)

    assert is_right(*block(comm, name, a, b, 2))
    x, w, part = operands(comm, name, a, b)
    getattr(parallel, name)(x, w, comm=comm, chunks=2, by="copies")
    meet()
    stream, graph = comm.device.stream(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.handle)
    with comm.device.context:
        assert driver.cuStreamBeginCapture.unchecked(handle, 1) == 0
        with stream:
            out = getattr(parallel, name)(x, w, comm=comm, chunks=2, by="copies")
        assert driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph)) == 0
        executable = driver.cuGraphInstantiate(graph.value, 0)
    found = []
    for turn in range(6):
        meet()
        with comm.device.context:
            driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()
        found.append(is_right(out, part))
        out.copy_from(np.full(out.shape, np.nan))
        if turn % 2:
            found.append(is_right(*block(comm, name, a, b, 1 + turn)))
    return found


def left_alone(comm):
    """Seconds until a rank whose partner makes no block is free again by its communicator's failure."""
    x, w, _ = operands(comm, "matmul_all_reduce", *(np.ones((256, 256), np.float32) for _ in range(2)))
    for turn in range(4):
        if turn == 1:
            comm.device.synchronize()
            comm.meet()
            if comm.rank:
                comm.meet()
                return 0.0
        parallel.matmul_all_reduce(x, w, comm=comm, chunks=2, by="copies")
    late = threading.Timer(0.5, comm.fail, (CollectiveError("enough"),))  # while this thread waits
    late.start()
    begun = time.monotonic()
    comm.device.executor().stream.synchronize()
    took = time.monotonic() - begun
    late.join()
    comm.meet()
    assert took > 0.4, "nothing was waited for"
    return took


def host_time(comm, count=200):
    """Microseconds of the host for a block of two chunks."""
    found = {}
    for name in BLOCKS:
        x, w, _ = operands(comm, name, *(np.ones((256, 256), np.float32) for _ in range(2)))
        for number in range(count + 50):
            if number == 50:
                comm.device.synchronize()
                comm.meet()
                begun = time.perf_counter()
            getattr(parallel, name)(x, w, comm=comm, chunks=2, by="copies")
        found[name] = (time.perf_counter() - begun) / count * 1e6
        comm.device.synchronize()
    return found


def main(rank, address):
    install()
    line = Listener(address, "AF_UNIX").accept() if rank == 0 else Client(address, "AF_UNIX")

    def exchange(what):
        line.send(what)
        return line.recv()

    device = dp.device("cuda:0")
    with device.stream():
        comm = Pair(rank, device, exchange)
        facts = {
            "wrong": one_behind_the_other(comm),
            "graphs": {name: graphs(comm, name, comm.meet) for name in BLOCKS},
        }
        facts["host"] = host_time(comm)
        facts["memory"] = memory_is_used_again(comm)
        facts["seconds"] = left_alone(comm)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
