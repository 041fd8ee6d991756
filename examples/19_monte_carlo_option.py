"""The price of an option by simulation, against its closed formula: pseudo-random numbers against Sobol's.

A call on the geometric mean of a share's prices on 16 days is worth exp(-rT) · E[max(G - K, 0)], where log G is a
weighted sum of 16 normal numbers. The mean over many simulated paths estimates it; Kemna and Vorst's
formula (1990) is exact. With pseudo-random numbers the error falls as 1/√n; 16 generators spawned from
one seed measure it. With points of Sobol's sequence in 16 dimensions, which fill the cube evenly, it falls
faster. Random numbers and sums are computed on the device.

    python examples/19_monte_carlo_option.py --device cuda:0
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import NormalDist

import numpy as np

import dispatch as dp

HERE = Path(__file__).parent
SPOT, STRIKE, RATE, VOLATILITY, YEARS, DAYS = 100.0, 105.0, 0.03, 0.25, 1.0, 16
STEP = YEARS / DAYS
# log G = MEAN + WEIGHTS · z: the k-th day's number moves the prices of that day and all later ones.
WEIGHTS = VOLATILITY * math.sqrt(STEP) * np.arange(DAYS, 0, -1) / DAYS
MEAN = math.log(SPOT) + (RATE - VOLATILITY**2 / 2) * STEP * (DAYS + 1) / 2
SEED, REPEATS = 2024, 16


def closed_formula() -> float:
    """Kemna and Vorst's formula: log G is normally distributed."""
    deviation = float(np.sqrt((WEIGHTS**2).sum()))
    d = (MEAN - math.log(STRIKE)) / deviation
    phi = NormalDist().cdf
    forward = math.exp(MEAN + deviation**2 / 2)
    return math.exp(-RATE * YEARS) * (forward * phi(d + deviation) - STRIKE * phi(d))


def price(rng: dp.random.Generator, weights: dp.Tensor, paths: int) -> float:
    """The mean value of this number of paths."""
    z = rng.standard_normal((DAYS, paths), "f64")
    mean = np.exp(MEAN + dp.matmul(weights, z).numpy())
    return math.exp(-RATE * YEARS) * float(np.maximum(mean - STRIKE, 0).mean())


def draw(path: Path, counts: list[int], pseudo: list[float], quasi: list[float]) -> bool:
    """Save the errors as a picture; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.loglog(counts, pseudo, "o-", label=f"pseudo-random (Philox), of {REPEATS} generators")
    axes.loglog(counts, quasi, "s-", label=f"Sobol's points in {DAYS} dimensions")
    axes.loglog(counts, [pseudo[0] * math.sqrt(counts[0] / n) for n in counts], "k:", label="1/√n")
    axes.set_xlabel("paths")
    axes.set_ylabel("error of the price")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Price; 1 if the error of an estimate is too large to be random, or Sobol's points are no better."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--most", type=int, help="log2 of the most paths (default: 20, and 16 on the host)")
    parser.add_argument(
        "--out", type=Path, default=HERE / "out" / "monte_carlo_option.png", help="where the picture goes"
    )
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    most = options.most or (16 if dev.is_host else 20)

    exact = closed_formula()
    weights = dev.array(WEIGHTS[None])
    counts = [1 << bits for bits in range(8, most + 1, 2)]
    pseudo, quasi = [], []
    started = time.perf_counter()
    for paths in counts:
        generators = dp.random.Generator(SEED, device=dev).spawn(REPEATS)
        errors = [price(rng, weights, paths) - exact for rng in generators]
        sobol = dp.random.Generator(bit_generator="scrambled_sobol32", dimensions=DAYS, device=dev)
        pseudo.append(math.sqrt(sum(error**2 for error in errors) / REPEATS))
        quasi.append(abs(price(sobol, weights, paths) - exact))
        far = abs(sum(errors) / REPEATS) / (pseudo[-1] / math.sqrt(REPEATS))
        print(f"{paths:8} paths: pseudo-random error {pseudo[-1]:.5f}, Sobol's {quasi[-1]:.5f}")
    took = time.perf_counter() - started
    rng = dp.random.Generator(SEED, device=dev)
    print(f"{exact:.6f} by the formula; numbers by {rng.library_used} and {sobol.library_used} on {dev}, {took:.1f} s")
    slope = math.log(pseudo[-1] / pseudo[0]) / math.log(counts[-1] / counts[0])
    print(
        f"pseudo-random errors fall with n^{slope:.2f}; Sobol's is {pseudo[-1] / quasi[-1]:.0f} times less in the end"
    )
    drawn = draw(options.out, counts, pseudo, quasi)
    print(f"convergence: {options.out}" if drawn else "no picture: matplotlib is not installed")
    return 0 if far < 4 and -0.75 < slope < -0.3 and quasi[-1] < pseudo[-1] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
