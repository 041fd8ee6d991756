"""A fit over several ranks goes on when one of them is lost: an error on all others, a smaller world, the right result.

Each rank has some rows of a least squares problem, and adds its gradient to the others' in each step. Rank 1 goes in
the middle. The others are told within the deadline, rebuild their world, and go on from the weights that they have; the
solution is that of the rows that are left. Locally the lost rank raises; under MPI its process is killed:

    python examples/32_survive_a_lost_rank.py --device host
    mpirun --with-ft ulfm -n 4 python examples/32_survive_a_lost_rank.py --start mpi

torchrun ends all ranks where one ends: start those of `--start env` each by itself, with its variables.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import dispatch as dp
from dispatch.errors import CollectiveError

ROWS, COLUMNS = 400, 8  # of each rank
STEPS, LOST_AT, LOST = 120, 40, 1
BOUND = 1e-9  # of the solution, relative


def problem(member: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a member has, which every other can draw, too."""
    rng = np.random.default_rng(member)
    return rng.standard_normal((ROWS, COLUMNS)), rng.standard_normal(ROWS)


def solution(members: Any) -> np.ndarray:
    """What NumPy says for the rows of some members."""
    a, b = (np.concatenate(parts) for parts in zip(*map(problem, members), strict=True))
    return np.linalg.lstsq(a, b, rcond=None)[0]


def fit(world: Any, kill: bool) -> tuple[str, float]:
    """One rank's part: what happened, and the error of its solution."""
    device, member, said = world.device, world.members[world.rank], "nothing was lost"
    rows, values = problem(member)
    a, b, w = device.array(rows), device.array(values[:, None]), np.zeros((COLUMNS, 1))
    step = 0
    while step < STEPS:
        try:
            if member == LOST and step == LOST_AT:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("this rank is lost")
            residual = dp.matmul(a, device.array(w)).numpy() - b.numpy()
            gradient = dp.all_reduce(dp.matmul(a.T, device.array(residual)), comm=world.communicator)
            w = w - gradient.numpy() / (ROWS * world.size)
            step += 1
        except CollectiveError as error:  # noqa: PERF203  # the loop goes on after it
            begun = time.perf_counter()
            world.rebuild()
            said = f"{type(error).__name__} in step {step}; {world.size} ranks go on after"
            said += f" {time.perf_counter() - begun:.2f} s, generation {world.generation}"
    right = solution(world.members)
    return said, float(np.abs(w[:, 0] - right).max() / np.abs(right).max())


def gpus(most: int) -> list[str]:
    """The names of the GPUs that there are, so many at most."""
    found: list[str] = []
    with contextlib.suppress(dp.errors.DeviceUnavailable):
        while len(found) < most:
            dp.device(f"cuda:{len(found)}")
            found.append(f"cuda:{len(found)}")
    return found


def main() -> int:
    """Lose a rank, and go on; 1 where the solution of those that live is not NumPy's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, host, or auto (default): the GPUs if there are two")
    parser.add_argument("--ranks", type=int, default=0, help="of a local start (default: 4 on the host, 2 GPUs)")
    parser.add_argument("--start", choices=("local", "env", "mpi"), default="local", help="who starts the ranks")
    options = parser.parse_args()
    found: list[tuple[str, float]] = []
    if options.start == "local":
        names = [] if options.device == "host" else gpus(options.ranks or 2)
        if options.device == "host" or (options.device == "auto" and len(names) < 2):
            names = ["host"] * (options.ranks or 4)
        with dp.World.local(names, deadline=5) as ranks:
            try:
                ranks.run(lambda world: found.append(fit(world, kill=False)))
            except RuntimeError as error:
                print(f"rank {LOST}: {error}")
    else:
        start = dp.World.from_mpi if options.start == "mpi" else dp.World.from_env
        with start(deadline=5) as world:
            found.append(fit(world, kill=True))
    for said, error in found:
        print(f"{said}; relative error {error:.1e}")
    return 0 if found and max(error for _, error in found) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
