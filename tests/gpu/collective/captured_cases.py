"""Collectives that all ranks prepare as graphs: launches over changing values, between other calls, against NumPy."""

import numpy as np

import dispatch as dp


def requests(world, n):
    """By name: the request of this rank, its input, and what it must give for the inputs of all ranks."""
    comm, device, rank, size = world.communicator, world.device, world.rank, world.size
    x, whole = device.empty((n,)), device.empty((size, n))
    half = device.empty((n,), "bf16")
    factor = device.array(np.float32(rank + 2))
    return {
        "sum": (dp.AllReduceRequest(x, comm=comm), x, lambda all_: all_.sum(0)),
        "sum in place": (dp.AllReduceRequest(y := device.empty((n,)), comm=comm, out=y), y, lambda all_: all_.sum(0)),
        "max": (dp.AllReduceRequest(x, comm=comm, reduce="max"), x, lambda all_: all_.max(0)),
        "bf16": (dp.AllReduceRequest(half, comm=comm), half, lambda all_: all_.sum(0)),
        "by factors in memory": (
            dp.AllReduceRequest(x, comm=comm, reduce="premul_sum", device_factor=factor),
            x,
            lambda all_: sum((other + 2) * row for other, row in enumerate(all_)),
        ),
        "broadcast": (dp.BroadcastRequest(x, comm=comm, root=size - 1), x, lambda all_: all_[-1]),
        "all_gather": (dp.AllGatherRequest(x, comm=comm), x, lambda all_: all_),
        "reduce_scatter": (dp.ReduceScatterRequest(whole, comm=comm), whole, lambda all_: all_.sum(0)[rank]),
        "all_to_all": (dp.AllToAllRequest(whole, comm=comm), whole, lambda all_: all_[:, rank]),
        "sendrecv": (
            dp.SendRecvRequest(x, comm=comm, dest=(rank + 1) % size, source=(rank - 1) % size),
            x,
            lambda all_: all_[rank - 1],
        ),
    }


def failures(world, sizes=(1, 1000, 300_007), turns=6):
    """The names of wrong results; all ranks draw the same numbers, so each knows what the others have."""
    rng, wrong = np.random.default_rng(11), []
    for n in sizes:
        calls = {name: (dp.prepare(r, graph=True), x, want) for name, (r, x, want) in requests(world, n).items()}
        other = world.device.empty((n,))
        for turn in range(turns):
            for name, (call, x, want) in calls.items():
                all_ = rng.integers(-50, 50, (world.size, *x.shape)).astype(np.float32)
                x.copy_from(all_[world.rank].astype(x.dtype.numpy))
                result = call()
                if turn % 2:  # NCCL's own call behind the graph, and a second launch over what it has read
                    dp.all_reduce(other, comm=world, out=other)
                    if "in place" not in name:
                        result = call()
                found = result.numpy().astype(np.float64)
                if not np.array_equal(found, want(all_.astype(np.float64))):
                    wrong.append(f"{name} of {n}, turn {turn}")
        barrier = dp.prepare(dp.BarrierRequest(comm=world.communicator), graph=True)
        for _ in range(3):
            barrier()
    return wrong


def many(world, launches=3000):
    """Whether a sum in place that doubles each time is right behind so many launches without a wait, on two streams."""
    comm, device = world.communicator, world.device
    first, second = device.stream(), device.stream()
    right = []
    for stream in (first, second, first):
        with stream:
            x = device.array(np.full(256, float(world.rank), np.float32))
            call = dp.prepare(dp.AllReduceRequest(x, comm=comm, reduce="max", out=x), graph=True)
            for _ in range(launches):
                call()
            right.append(bool((x.numpy() == world.size - 1).all()))
    return right
