"""Train a network on handwritten digits with its batches split over ranks, and see that it learns the same as on one.

Every rank has the whole network and a share of each batch. Gradients are in buckets; each bucket is averaged as soon
as it is complete, concurrently with the rest of the backward pass. Then gradients and weights are the same on every
rank. On two GPUs this uses NCCL, on the host threads or MPI:

    python examples/31_data_parallel_digits.py --device cuda --ranks 2
    torchrun --nproc-per-node 2 examples/31_data_parallel_digits.py --start torchrun
    mpirun -n 4 python examples/31_data_parallel_digits.py --start mpi --device host
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import dispatch as dp
from dispatch import parallel

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
SIZES = (64, 128, 10)
BATCH = 96  # of all ranks together
RATE = 0.3
GOAL = 0.95  # of the held-out scans
SAME = 1e-3  # the limit for differences from the weights of one rank: sums are rounded in another order


class Data(NamedTuple):
    """Pixels from 0 to 1, and digits; a fifth of them is held out."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load() -> Data:
    """The 1,797 scans, shuffled and split; the same on every rank."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        digits = np.random.default_rng(0).permutation(np.loadtxt(text, delimiter=",", dtype=np.float32))
    x, y, held_out = digits[:, :64] / 16, digits[:, 64].astype(np.int64), len(digits) // 5
    return Data(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


class Network:
    """Two layers, whose gradients are in buckets."""

    def __init__(self, world: Any) -> None:
        rng = np.random.default_rng(2)
        self.device = device = world.device
        shapes = list(itertools.pairwise(SIZES))
        self.weights = [device.array(rng.standard_normal(s) * np.sqrt(2 / s[0]), "f32") for s in shapes]
        # For such a small network one bucket would be enough; with one bucket per layer the last layer's is reduced at
        # once.
        self.buckets = parallel.GradientBuckets(shapes, comm=world.communicator, bucket_bytes=16 << 10)

    def forward(self, x: dp.Tensor) -> tuple[dp.Tensor, dp.Tensor]:
        """The hidden layer, and the scores."""
        hidden = dp.matmul(x, self.weights[0], epilogue=dp.Epilogue.RELU)
        return hidden, dp.matmul(hidden, self.weights[1])

    def backward(self, x: np.ndarray, y: np.ndarray) -> None:
        """The gradients of the mean cross entropy over some scans."""
        inputs = self.device.array(x)
        hidden, scores = self.forward(inputs)
        d_scores = dp.softmax(scores).numpy()
        d_scores[np.arange(len(y)), y] -= 1
        d = self.device.array(d_scores / len(y))
        dp.matmul(hidden.T, d, out=self.buckets.gradients[1])
        self.buckets.ready(1)
        d_hidden = dp.matmul(d, self.weights[1].T)
        d_hidden = self.device.array(d_hidden.numpy() * (hidden.numpy() > 0))
        dp.matmul(inputs.T, d_hidden, out=self.buckets.gradients[0])
        self.buckets.ready(0)

    def descend(self) -> None:
        """A step against the mean of all ranks' gradients."""
        for weight, gradient in zip(self.weights, self.buckets.wait(), strict=True):
            weight.copy_from(weight.numpy() - RATE * gradient.numpy())


def train(world: Any, epochs: int) -> tuple[float, np.ndarray]:
    """One rank's part: the accuracy, and all weights."""
    data, network = load(), Network(world)
    rng, share = np.random.default_rng(4), BATCH // world.size
    for _ in range(epochs):
        order = rng.permutation(len(data.x))  # the same on every rank
        for first in range(0, len(order) - BATCH + 1, BATCH):
            mine = order[first + world.rank * share : first + (world.rank + 1) * share]
            network.backward(data.x[mine], data.y[mine])
            network.descend()
    _, scores = network.forward(world.device.array(data.x_test))
    accuracy = float((scores.numpy().argmax(1) == data.y_test).mean())
    return accuracy, np.concatenate([weight.numpy().reshape(-1) for weight in network.weights])


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
    """Train on all ranks and on one; 1 if the two differ, or have not learned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, host, or auto (default): the GPUs if there are two")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 3, 4), help="of a local start (default: 2)")
    parser.add_argument("--start", choices=("local", "torchrun", "mpi"), default="local", help="who starts the ranks")
    parser.add_argument("--epochs", type=int, default=12, help="times through the scans (default: 12)")
    options = parser.parse_args()
    results = on_ranks(lambda world: (*train(world, options.epochs), world.rank, world.size), options)
    with dp.World.local(["host"]) as one:
        ((alone, weights),) = one.run(train, options.epochs)
    error = max(float(np.abs(each[1] - weights).max()) for each in results)
    for accuracy, _, rank, size in results:
        print(f"rank {rank} of {size}: {accuracy:.1%} of the held-out digits, one rank alone {alone:.1%}")
    print(f"largest error of a weight against one rank's: {error:.1e}")
    return 0 if error < SAME and min(each[0] for each in results) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
