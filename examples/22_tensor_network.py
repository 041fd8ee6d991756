"""The partition function of the two-dimensional Ising model as a network of tensors, against Kaufman's exact result.

    Z = Σ over all spins of exp(K · Σ s s'), the inner sum over neighbours on a lattice that closes to a torus

Each site is a tensor with a mode of two values for each of its four bonds, and Z is the contraction of all of them:
`dispatch.einsum`, which contracts two at a time in an order that keeps intermediate results small. It is planned once,
and called again for each temperature.

    python examples/22_tensor_network.py --device cuda:0 --size 5
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np

import dispatch as dp

CRITICAL = math.log(1 + math.sqrt(2)) / 2  # of K: below it the spins are disordered, above it ordered
COUPLINGS = (0.1, 0.25, CRITICAL, 0.6, 1.0)
BOUND = 1e-12  # of log Z, relative


def site(coupling: float) -> np.ndarray:
    """The tensor of a site: Σ over its spin of a factor for each bond; two such factors make exp(K s s')."""
    even, odd = math.sqrt(math.cosh(coupling)), math.sqrt(math.sinh(coupling))
    factor = np.array([[even, odd], [even, -odd]])  # by the spin, by the bond
    return np.einsum("sa,sb,sc,sd->abcd", factor, factor, factor, factor)


def lattice(size: int) -> list[list[tuple[str, int, int]]]:
    """The modes of each site of a torus, up, left, down and right, and none of the result."""
    sites = [(row, column) for row in range(size) for column in range(size)]
    modes = []
    for row, column in sites:
        before = ("down", (row - 1) % size, column), ("right", row, (column - 1) % size)
        modes.append([*before, ("down", row, column), ("right", row, column)])
    return [*modes, []]


def exact(size: int, coupling: float) -> float:
    """log Z by B. Kaufman (1949), Crystal Statistics II, https://doi.org/10.1103/PhysRev.76.1232."""
    double = 2 * coupling
    gamma = [double + math.log(math.tanh(coupling))]
    gamma += [
        math.acosh(math.cosh(double) / math.tanh(double) - math.cos(math.pi * k / size)) for k in range(1, 2 * size)
    ]
    odd, even = gamma[1::2], gamma[0::2]
    logs, signs = [], []
    for some, function in ((odd, math.cosh), (odd, math.sinh), (even, math.cosh), (even, math.sinh)):
        parts = [2 * function(size * one / 2) for one in some]
        logs.append(sum(math.log(abs(part)) if part else -math.inf for part in parts))
        signs.append(math.prod(math.copysign(1, part) for part in parts))
    largest = max(logs)
    total = sum(sign * math.exp(log - largest) for sign, log in zip(signs, logs, strict=True))
    return size * size / 2 * math.log(2 * math.sinh(double)) + largest + math.log(total / 2)


def main() -> int:
    """Contract the network for some temperatures; 1 if a result differs from Kaufman's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--size", type=int, default=5, help="sites along a side, 3 or more (default: 5)")
    options = parser.parse_args()
    if options.size < 3:
        parser.error("--size: 3 or more, for two bonds between the same sites are another model")
    dev = dp.device(None if options.device == "auto" else options.device)
    spec, count = lattice(options.size), options.size**2
    network = dp.tensors.contract_expression(spec, *[(2,) * 4] * count)
    request = dp.EinsumRequest(network.spec, [dev.array(site(1.0))] * count)
    schedule = request.schedule
    print(f"{count} tensors on {dev}: {len(schedule.steps)} contractions, {schedule.flops:,} operations,")
    print(f"{schedule.largest:,} elements of intermediate results at most, where all spins have 2^{count} states")

    worst = 0.0
    for coupling in COUPLINGS:
        log_z = math.log(network(*[dev.array(site(coupling))] * count).item())
        expected = exact(options.size, coupling)
        off = abs(log_z - expected) / abs(expected)
        worst = max(worst, off)
        print(f"  K = {coupling:.4f}: log Z / N = {log_z / count:.12f}, Kaufman's {expected / count:.12f}")
    print(f"relative error at most {worst:.1e}")
    return 0 if worst < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
