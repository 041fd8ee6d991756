"""A fit over several ranks goes on when one of them is lost: an error on all others, a smaller world, the right result.

Each rank has some rows of a least squares problem, and adds its gradient to the others' in each step. Rank 1 is lost in
the middle. The others get an error within the deadline, rebuild their world, and go on from their current weights; the
solution is that of the remaining rows. Locally the lost rank raises; under MPI its process is killed:

    python examples/32_survive_a_lost_rank.py --device host
    mpirun --with-ft ulfm -n 4 python examples/32_survive_a_lost_rank.py --start mpi

torchrun ends all ranks if one ends: start those of `--start env` one by one, with its variables.
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
    """The rows of a member, which every other member can compute, too."""
    rng = np.random.default_rng(member)
    return rng.standard_normal((ROWS, COLUMNS)), rng.standard_normal(ROWS)


def solution(members: Any) -> np.ndarray:
    """NumPy's solution for the rows of some members."""
    a, b = (np.concatenate(parts) for parts in zip(*map(problem, members), strict=True))
    return np.linalg.lstsq(a, b, rcond=None)[0]


def fit(world: Any, kill: bool) -> tuple[str, float]:
    """One rank's part: what happened, and the error of its solution."""
    device, member, report = world.device, world.members[world.rank], "nothing was lost"
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
            report = f"{type(error).__name__} in step {step}; {world.size} ranks go on after"
            report += f" {time.perf_counter() - begun:.2f} s, generation {world.generation}"
    right = solution(world.members)
    return report, float(np.abs(w[:, 0] - right).max() / np.abs(right).max())


def gpus(most: int) -> list[str]:
    """The names of the GPUs of this machine, at most `most`."""
    names: list[str] = []
    with contextlib.suppress(dp.errors.DeviceUnavailable):
        while len(names) < most:
            dp.device(f"cuda:{len(names)}")
            names.append(f"cuda:{len(names)}")
    return names


def main() -> int:
    """Lose a rank, and go on; 1 if the solution of the remaining ranks is not NumPy's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, host, or auto (default): the GPUs if there are two")
    parser.add_argument("--ranks", type=int, default=0, help="of a local start (default: 4 on the host, 2 GPUs)")
    parser.add_argument("--start", choices=("local", "env", "mpi"), default="local", help="who starts the ranks")
    options = parser.parse_args()
    results: list[tuple[str, float]] = []
    if options.start == "local":
        names = [] if options.device == "host" else gpus(options.ranks or 2)
        if options.device == "host" or (options.device == "auto" and len(names) < 2):
            names = ["host"] * (options.ranks or 4)
        with dp.World.local(names, deadline=5) as ranks:
            try:
                ranks.run(lambda world: results.append(fit(world, kill=False)))
            except RuntimeError as error:
                print(f"rank {LOST}: {error}")
    else:
        start = dp.World.from_mpi if options.start == "mpi" else dp.World.from_env
        with start(deadline=5) as world:
            results.append(fit(world, kill=True))
    for report, error in results:
        print(f"{report}; relative error {error:.1e}")
    return 0 if results and max(error for _, error in results) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
