"""Ten thousand Kalman filters at once: every step of all of them is eight batched products and one batched solution.

Each filter tracks a point in the plane, from measurements of its position alone; each has its own noise of state and
measurement, so that the filters share only the model:

    x = F·x,  P = F·P·Fᵀ + Q                       what is expected
    S = H·P·Hᵀ + R = L·Lᵀ,  S·Kᵀ = H·P             the gain, by Cholesky
    x = x + K·(z - H·x),  P = P - K·H·P            what the measurement adds

Nothing waits for the GPU until all statuses are checked at the end. On the host there are 1,000 filters.

    python examples/18_kalman_batch.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np

import dispatch as dp

STEP = 0.1  # seconds between measurements
F = np.eye(4) + STEP * np.eye(4, k=2)  # positions x and y, then their velocities
H = np.eye(2, 4)
BOUND = {"f64": 1e-12, "f32": 1e-4}


class World(NamedTuple):
    """Moving points, their measurements, (steps, N, …, 1), and the noise that each filter assumes."""

    truth: np.ndarray
    z: np.ndarray
    q: np.ndarray
    r: np.ndarray


def simulate(filters: int, steps: int) -> World:
    """Points with random acceleration, measured with errors of 0.5 to 2."""
    rng = np.random.default_rng(0)
    push = rng.uniform(0.5, 1.5, (filters, 1, 1))
    wrong = rng.uniform(0.5, 2.0, (filters, 1, 1))
    gain = np.concatenate([STEP**2 / 2 * np.eye(2), STEP * np.eye(2)])  # from an acceleration to position and velocity
    x, truth = np.concatenate([rng.standard_normal((filters, 2, 1)) * 5, np.zeros((filters, 2, 1))], axis=1), []
    for _ in range(steps):
        x = F @ x + gain @ (push * rng.standard_normal((filters, 2, 1)))
        truth.append(x)
    places = np.stack(truth)
    z = H @ places + wrong * rng.standard_normal((steps, filters, 2, 1))
    return World(places, z, push**2 * (gain @ gain.T) + 1e-6 * np.eye(4), wrong**2 * np.eye(2))


def ours(dev: dp.Device, world: World, dtype: str) -> tuple[np.ndarray, float]:
    """The states after every step, and the time in seconds."""
    f, h, q, r = (dev.array(values, dtype) for values in (F, H, world.q, world.r))
    z = dev.array(world.z, dtype)
    states, statuses = [], []

    def run(steps: int) -> None:
        x, p = (dev.array(values, dtype) for values in start(world.q.shape[0]))
        for step in range(steps):
            x = dp.matmul(f, x)
            p = dp.matmul(dp.matmul(f, p), f.T, c=q, beta=1.0)
            hp = dp.matmul(h, p)
            low, info = dp.cholesky(dp.matmul(hp, h.T, c=r, beta=1.0))
            gain = dp.cho_solve(low, hp).mT
            x = dp.matmul(gain, dp.matmul(h, x, c=z[step], alpha=-1.0, beta=1.0), c=x, beta=1.0)
            p = dp.matmul(gain, hp, c=p, alpha=-1.0, beta=1.0)
            states.append(x)
            statuses.append(info)

    run(2)  # makes plans and loads kernels
    states.clear()
    dev.synchronize()
    started = time.perf_counter()
    run(len(world.z))
    dev.synchronize()
    took = time.perf_counter() - started
    for info in statuses:
        dp.linalg.check_info("cholesky", info)
    return np.stack([state.numpy() for state in states]), took


def start(filters: int) -> tuple[np.ndarray, np.ndarray]:
    """States and covariances without any measurement."""
    return np.zeros((filters, 4, 1)), np.broadcast_to(100 * np.eye(4), (filters, 4, 4))


def reference(world: World) -> tuple[np.ndarray, float]:
    """The same in NumPy, in float64."""
    (x, p), states = start(world.q.shape[0]), []
    started = time.perf_counter()
    for z in world.z:
        x, p = F @ x, F @ p @ F.T + world.q
        hp = H @ p
        gain = np.linalg.solve(hp @ H.T + world.r, hp).mT
        x, p = x + gain @ (z - H @ x), p - gain @ hp
        states.append(x)
    return np.stack(states), time.perf_counter() - started


def main() -> int:
    """Filter; 1 if the result differs from NumPy, or tracks the points no better than the measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--dtype", choices=BOUND, default="f64", help="of the filters (default: f64)")
    parser.add_argument("--filters", type=int, help="how many (default: 10,000, and 1,000 on the host)")
    parser.add_argument("--steps", type=int, default=30, help="measurements of each (default: 30)")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    filters = options.filters or (1_000 if dev.is_host else 10_000)

    world = simulate(filters, options.steps)
    states, took = ours(dev, world, options.dtype)
    exact, numpys = reference(world)
    error = float(np.abs(states - exact).max() / np.abs(exact).max())
    off = [float(np.sqrt(np.mean((H @ world.truth - places)[-10:] ** 2))) for places in (world.z, H @ states)]
    updates = filters * options.steps
    print(
        f"{filters} filters of {options.steps} steps on {dev}, {options.dtype}: error {error:.1e} against NumPy in f64"
    )
    print(f"    {updates / took:,.0f} updates a second; {updates / numpys:,.0f} by NumPy here")
    print(f"    places are off by {off[0]:.2f} as measured, by {off[1]:.2f} as filtered")
    return 0 if error < BOUND[options.dtype] and off[1] < off[0] / 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
