"""A layer of a transformer's MLP whose weights are shared by the ranks: columns of the first, rows of the second.

Each rank has a part of the hidden layer. In the first form all ranks have all rows, and the second product's sums are
reduced (Megatron's tensor parallelism). In the second the rows are distributed, too: they are gathered before the
first product and scattered after the second (sequence parallelism). Both run in chunks, so that on GPUs one chunk is
sent while the next is computed. The result is that of one device. Ways to start the ranks:

    python examples/33_tensor_parallel_mlp.py --device cuda
    torchrun --nproc-per-node 2 examples/33_tensor_parallel_mlp.py --start torchrun
    mpirun -n 4 python examples/33_tensor_parallel_mlp.py --start mpi --device host
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp
from dispatch import parallel

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH, HIDDEN = 240, 96, 384  # divisible by 2, 3 and 4 ranks
BOUND = 1e-5  # relative to the largest


def problem() -> tuple[np.ndarray, ...]:
    """Inputs and weights, the same on every rank."""
    rng = np.random.default_rng(3)
    shapes = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH))
    return tuple((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes)


def exact() -> np.ndarray:
    """The layer in float64, on one device."""
    x, up, bias, down = (each.astype(np.float64) for each in problem())
    return np.maximum(x @ up + bias, 0) @ down


def layer(world: Any) -> tuple[int, int, float, float, float]:
    """One rank's part: its errors in both forms, and the seconds that a repeated call of the first takes."""
    x, up, bias, down = problem()
    rank, size, comm, device = world.rank, world.size, world.communicator, world.device
    hidden, rows = (slice(rank * n // size, (rank + 1) * n // size) for n in (HIDDEN, ROWS))
    w, b, v = (device.array(each) for each in (np.ascontiguousarray(up[:, hidden]), bias[hidden], down[hidden]))
    everything, mine = device.array(x), device.array(x[rows])

    def by_weights() -> dp.Tensor:
        inner = dp.matmul(everything, w, bias=b, epilogue=dp.Epilogue.RELU_BIAS)
        return parallel.matmul_all_reduce(inner, v, comm=comm, chunks=2)

    def by_rows_too() -> dp.Tensor:
        inner = parallel.all_gather_matmul(mine, w, bias=b, epilogue=dp.Epilogue.RELU_BIAS, comm=comm, chunks=2)
        return parallel.matmul_reduce_scatter(inner, v, comm=comm, chunks=2)

    right = exact()
    errors = [float(np.abs(result.numpy() - expected).max() / np.abs(right).max())
              for result, expected in ((by_weights(), right), (by_rows_too(), right[rows]))]  # fmt: skip
    device.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        by_weights()
    device.synchronize()
    return rank, size, *errors, (time.perf_counter() - begun) / 10


def gpus(most: int) -> list[str]:
    """The names of the GPUs of this machine, at most `most`."""
    names: list[str] = []
    with contextlib.suppress(dp.errors.DeviceUnavailable):
        while len(names) < most:
            dp.device(f"cuda:{len(names)}")
            names.append(f"cuda:{len(names)}")
    return names


def on_ranks(work: Callable[[Any], Any], options: argparse.Namespace) -> list[Any]:
    """What `work(world)` returns on each rank of this process."""
    if options.start == "torchrun":
        with dp.World.from_env(deadline=60) as world:
            return [work(world)]
    if options.start == "mpi":
        with dp.World.from_mpi(deadline=60) as world:
            return [work(world)]
    names = [] if options.device == "host" else gpus(options.ranks)
    if options.device == "host" or (options.device == "auto" and len(names) < options.ranks):
        names = ["host"] * options.ranks
    with dp.World.local(names, deadline=60) as ranks:
        return ranks.run(work)


def main() -> int:
    """Run the layer on all ranks; 1 if a result is not that of one device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, host, or auto (default): the GPUs if there are enough")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 3, 4), help="of a local start (default: 2)")
    parser.add_argument("--start", choices=("local", "torchrun", "mpi"), default="local", help="who starts the ranks")
    options = parser.parse_args()
    results = on_ranks(layer, options)
    for rank, size, sums, shared, seconds in results:
        print(
            f"rank {rank} of {size}: relative error {sums:.1e}, with shared rows {shared:.1e}; {seconds * 1e3:.2f} ms"
        )
    return 0 if max(max(each[2:4]) for each in results) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
