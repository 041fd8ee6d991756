"""A gated MLP and a layer of experts as CUTLASS kernels, compiled by NVRTC: no nvcc, no host compiler, no framework.

The gate, silu(x·G) * (x·U), is the epilogue of one product; the largest magnitude of each row, which a quantizer wants
next, comes from the same kernel. The experts are one grouped product, whose groups' ends lie on the device. On a GPU
the first run compiles four kernels (half a minute each); later ones read them from disk. The extra `cutlass` brings the
headers.

    python examples/09_fused_experts.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import dispatch as dp
from dispatch.cutlass import evt

TOKENS, WIDTH, HIDDEN, EXPERTS = 256, 512, 1024, 8


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, over the largest value."""
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gated_mlp(dev: dp.Device, rng: np.random.Generator) -> float:
    """h = silu(x·G) * (x·U), its row maxima, and y = h·D + x."""
    x = dev.array(rng.standard_normal((TOKENS, WIDTH)), "bf16")
    gate, up = (dev.array(rng.standard_normal((HIDDEN, WIDTH)) / WIDTH**0.5, "bf16").T for _ in range(2))
    down = dev.array(rng.standard_normal((WIDTH, HIDDEN)) / HIDDEN**0.5, "bf16").T
    tree = evt.reduce(evt.silu(evt.accumulator()) * evt.load("up"), "largest", "amax", over="n")
    for turn in range(2):
        started = time.perf_counter()
        u = dp.cutlass_gemm(x, up)
        h, largest = dp.cutlass_gemm(x, gate, epilogue=tree, operands={"up": u})
        y = dp.cutlass_gemm(h, down, c=x, epilogue=evt.accumulator() + evt.source())
        result = y.numpy()
        took = time.perf_counter() - started
        print(f"gated MLP, {'first' if turn == 0 else 'next'} run: {took * 1e3:.1f} ms")
    exact = [np.asarray(t.numpy(), np.float64) for t in (x, gate, up, down)]
    hidden = silu(exact[0] @ exact[1]) * (exact[0] @ exact[2])
    row_error = error(largest.numpy(), np.abs(hidden).max(axis=1))
    found = error(result, hidden @ exact[3] + exact[0])
    print(f"    error {found:.1e}, of the row maxima {row_error:.1e}")
    return max(found, row_error)


def experts(dev: dp.Device, rng: np.random.Generator) -> float:
    """Each token through the matrix of the expert that it is sent to: tokens sorted by expert, in one kernel."""
    chosen = np.sort(rng.integers(0, EXPERTS, TOKENS))
    x = dev.array(rng.standard_normal((TOKENS, WIDTH)), "bf16")
    weights = dev.array(rng.standard_normal((EXPERTS, HIDDEN, WIDTH)) / WIDTH**0.5, "bf16").mT
    ends = dev.array(np.cumsum(np.bincount(chosen, minlength=EXPERTS)), "i32")
    y = dp.cutlass_grouped_gemm(x, weights, ends, epilogue=evt.silu(evt.accumulator()))
    exact = np.asarray(x.numpy(), np.float64), np.asarray(weights.numpy(), np.float64)
    expected = np.stack([silu(row @ exact[1][expert]) for row, expert in zip(exact[0], chosen, strict=True)])
    found = error(y.numpy(), expected)
    print(f"{EXPERTS} experts, {np.bincount(chosen).tolist()} tokens each: error {found:.1e}")
    return found


def main() -> int:
    """Run both; 1 where one is less precise than bf16 allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)
    rng = np.random.default_rng(0)
    return 0 if max(gated_mlp(dev, rng), experts(dev, rng)) < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
