"""A sum over two ranks, and the other collectives beside it: on two GPUs by NCCL, on the host between two threads.

The ranks are threads of this program, unless --start names a launcher:

    python examples/30_allreduce_two_gpus.py --device cuda
    torchrun --nproc-per-node 2 examples/30_allreduce_two_gpus.py --start torchrun
    mpirun -n 2 python examples/30_allreduce_two_gpus.py --start mpi --device host
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 1 << 20  # elements of each rank
BOUND = 1e-6  # relative to the largest


def gpus(most: int) -> list[str]:
    """The names of the GPUs of this machine, at most `most`."""
    names: list[str] = []
    with contextlib.suppress(dp.errors.DeviceUnavailable):
        while len(names) < most:
            dp.device(f"cuda:{len(names)}")
            names.append(f"cuda:{len(names)}")
    return names


def both(work: Callable[[Any], float], start: str, names: list[str]) -> list[float]:
    """What `work(world)` returns on each rank of this process."""
    if start == "torchrun":
        with dp.World.from_env(deadline=60) as world:
            return [work(world)]
    if start == "mpi":
        with dp.World.from_mpi(deadline=60) as world:
            return [work(world)]
    with dp.World.local(names, deadline=60) as ranks:
        return ranks.run(work)


def sums(world: Any) -> float:
    """Collectives of numbers that every rank can compute for all ranks; returns the largest relative error."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal((world.size, COUNT)).astype(np.float32)
    x = world.device.array(drawn[world.rank])

    total = dp.all_reduce(x, comm=world)  # enqueued on this GPU's stream; nothing waits for it here
    mean = dp.all_reduce(total, comm=world, reduce="avg")  # the operand is the same on all ranks
    parts = dp.reduce_scatter(x.reshape(world.size, -1), comm=world)  # a share of the sum for each rank
    gathered = dp.all_gather(parts, comm=world)  # and all of it again
    first = dp.broadcast(x, comm=world, root=0)

    exact = drawn.astype(np.float64).sum(0)
    results = {"all_reduce": (total, exact), "avg": (mean, exact), "reduce_scatter + all_gather": (gathered, exact)}
    results["broadcast"] = first, drawn[0]
    worst = 0.0
    for name, (tensor, right) in results.items():
        off = np.abs(tensor.numpy().reshape(-1) - right).max() / np.abs(right).max()
        worst = max(worst, float(off))
        if world.rank == 0:
            print(f"  {name:27} error {off:.1e}")
    return worst


def main() -> int:
    """Run the ranks; 1 if a result differs from NumPy's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, host, or auto (default): the GPUs if there are two")
    parser.add_argument("--start", choices=("local", "torchrun", "mpi"), default="local", help="who starts the ranks")
    options = parser.parse_args()
    names = ["host", "host"] if options.device == "host" else gpus(2)
    if options.device == "auto" and len(names) < 2:
        names = ["host", "host"]
    print(f"{COUNT:,} numbers on each of {len(names)} ranks on {', '.join(names)}:")
    worst = max(both(sums, options.start, names))
    print(f"relative error at most {worst:.1e}")
    return 0 if worst < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
