"""Poisson's equation on a cube by preconditioned conjugate gradients: all iterations are one launch of a CUDA graph.

    -Δu + w · u = f, on the unit cube, with u = 0 on its faces

with a seven-point stencil. The weight w jumps between two halves of the cube by 10⁴, so that the reciprocals of the
diagonal, Jacobi's preconditioner, make a difference. f is chosen so that u is known: sin(πx) · sin(πy) · sin(πz) plus
another wave. On a GPU the device itself tests the residual and ends the loop; the host waits once, for the status.
The convergence curve is from solves to ever smaller residuals, each starting where the one before ended.

    python examples/28_solve_poisson.py --device cuda:0 --out poisson.png
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

import dispatch as dp

JUMP = 1e4
BOUNDS = [10.0**-k for k in range(1, 11)]
BOUND = 1e-7  # of the error of u, by its norm


def problem(n: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """The matrix of n points a side, the right-hand side, and the solution u."""
    h = 1 / (n + 1)
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) / h**2
    one = sp.eye_array(n)
    terms = (sp.kron(sp.kron(line, one), one), sp.kron(sp.kron(one, line), one), sp.kron(sp.kron(one, one), line))
    x, y, z = (axis.ravel() for axis in np.meshgrid(*[np.arange(1, n + 1) * h] * 3, indexing="ij"))
    weight = np.where(x < 0.5, 1.0, JUMP / h)
    a = sp.csr_array(sum(terms) + sp.diags_array(weight))
    a.sort_indices()
    u = np.sin(np.pi * x) * np.sin(np.pi * y) * np.sin(np.pi * z) + 0.3 * np.sin(3 * np.pi * x * y) * z * (1 - z)
    return a, a @ u, u


def curve(a: Any, b: Any, how: str | None) -> list[tuple[int, float]]:
    """The iterations up to each bound of the residual, and the residual; the host waits for one number at a time."""
    points, x, total = [], None, 0
    size = float(np.linalg.norm(b.numpy()))
    for bound in BOUNDS:
        kind = "none" if how is None else how
        x, info, iterations, residual = dp.cg(*a, b, x, rtol=bound, preconditioner=kind)
        if info.item():
            break
        total += iterations.item()
        points.append((total, residual.item() / size))
    return points


def plot(curves: dict[str, list[tuple[int, float]]], path: str) -> None:
    """The residuals over the iterations, as a picture."""
    import matplotlib.pyplot as plt

    for name, points in curves.items():
        plt.semilogy(*zip(*points, strict=True), marker="o", label=name)
    plt.xlabel("iterations")
    plt.ylabel("residual / norm of f")
    plt.legend()
    plt.savefig(path, dpi=120)


def main() -> int:
    """Solve it with and without the preconditioner; the exit status shows whether u is right."""
    parser = argparse.ArgumentParser(description="Poisson's equation in one launch.")
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--points", type=int, help="a side of the cube: 46, which makes 97,336 unknowns; 24 on host")
    parser.add_argument("--out", help="where a picture of the convergence goes; it needs matplotlib")
    options = parser.parse_args()
    dev = dp.device() if options.device == "auto" else dp.device(options.device)
    n = options.points or (24 if dev.is_host else 46)
    matrix, right, u = problem(n)
    # With the promise that its pattern does not change, the library analyses it once.
    a = dp.sparse.sparse_tensor(matrix, device=dev, validate=True).fixed()
    b = dev.array(right)
    curves = {name: curve(a, b, how) for name, how in (("without", None), ("jacobi", "jacobi"))}
    started = time.perf_counter()
    x, info = dp.sparse.cg(a, b, rtol=1e-10, M="jacobi")
    status = info.item()  # the only time that the host waits
    took = time.perf_counter() - started
    off = float(np.linalg.norm(x.numpy() - u) / np.linalg.norm(u))
    print(
        f"{n**3:,} unknowns, {matrix.nnz:,} elements on {dev}: "
        f"status {status}, error of u {off:.1e}, {took * 1e3:.1f} ms"
    )
    for name, points in curves.items():
        print(f"{name:>8}: {points[-1][0]} iterations to a residual of {points[-1][1]:.1e}")
    if options.out:
        plot(curves, options.out)
        print(f"the convergence is drawn in {options.out}")
    fewer = curves["jacobi"][-1][0] < curves["without"][-1][0]
    return 0 if status == 0 and off < BOUND and fewer else 1


if __name__ == "__main__":
    sys.exit(main())
