"""A mixture-of-experts layer as grouped GEMM: each token through two of the experts, all of them in two kernels.

A router scores the experts for each token and takes the best two. The tokens' copies, sorted by expert, are the
groups of a product; the ends of the groups are on the device, so that no launch depends on the number of tokens of an
expert. The first product is fused with silu, the second has no epilogue. A token's two results are added, weighted by
the router. On a GPU the first run compiles two kernels (half a minute each); later runs read them from disk. The extra
`cutlass` installs the headers.

    python examples/09_fused_experts.py --device cuda:0 --tokens 4096 --width 2048 --hidden 4096
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np

import dispatch as dp
from dispatch.libraries.cutlass import evt

TAKEN = 2  # experts of each token
ROUNDS = 20
CHECKED = 64  # tokens that are compared with float64
TOLERANCE = 0.02  # of the largest value: bf16 keeps 8 bits, and intermediate results are rounded to it


class Routes(NamedTuple):
    """The destinations of the tokens' copies: the tokens in the order of their experts, the experts' ends, weights."""

    tokens: np.ndarray
    ends: np.ndarray
    weights: np.ndarray


def route(scores: np.ndarray) -> Routes:
    """The best experts of each token, weighted by the softmax of their scores."""
    best = np.argsort(-scores, axis=1)[:, :TAKEN]
    scores_of_best = np.exp(np.take_along_axis(scores, best, 1) - scores.max(axis=1, keepdims=True))
    weights = scores_of_best / scores_of_best.sum(axis=1, keepdims=True)
    order = np.argsort(best.ravel(), kind="stable")
    ends = np.cumsum(np.bincount(best.ravel(), minlength=scores.shape[1]))
    return Routes(order // TAKEN, ends, weights.ravel()[order])


class Layer:
    """The experts' weights, in bf16, k dense, and the two prepared products of routed tokens."""

    def __init__(
        self, dev: dp.Device, rng: np.random.Generator, routed: dp.Tensor, ends: dp.Tensor, hidden: int
    ) -> None:
        experts, width = ends.shape[0], routed.shape[1]
        self.first = dev.array(rng.standard_normal((experts, hidden, width)) / width**0.5, "bf16").mT
        self.second = dev.array(rng.standard_normal((experts, width, hidden)) / hidden**0.5, "bf16").mT
        h = dev.empty((routed.shape[0], hidden), "bf16")
        silu = evt.silu(evt.accumulator())
        up = dp.GroupedMatmulRequest(routed, self.first, ends, out=h, epilogue=silu)
        self.up, self.down = dp.prepare_all([up, dp.GroupedMatmulRequest(h, self.second, ends)])

    def __call__(self) -> dp.Tensor:
        self.up()
        y: dp.Tensor = self.down()
        return y


def exact(layer: Layer, x: np.ndarray, routes: Routes, count: int) -> np.ndarray:
    """The layer's output for the first tokens, token by token and expert by expert, in float64."""
    first, second = (np.asarray(w.numpy(), np.float64) for w in (layer.first, layer.second))
    experts = np.searchsorted(routes.ends, np.arange(len(routes.tokens)), side="right")
    y = np.zeros((count, x.shape[1]))
    for token, expert, weight in zip(routes.tokens, experts, routes.weights, strict=True):
        if token < count:
            h = x[token] @ first[expert]
            y[token] += weight * ((h / (1 + np.exp(-h))) @ second[expert])
    return y


def main() -> int:
    """Run and time it; 1 if it is less precise than bf16 allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    rng = np.random.default_rng(0)
    x = dev.array(rng.standard_normal((options.tokens, options.width)), "bf16")
    router = dev.array(rng.standard_normal((options.width, options.experts)) / options.width**0.5, "bf16")
    routes = route(dp.matmul(x, router, out_dtype="f32").numpy())
    tokens = np.asarray(x.numpy(), np.float64)
    routed = dev.array(tokens[routes.tokens], "bf16")  # a copy for each expert of a token, sorted by expert
    layer = Layer(dev, rng, routed, dev.array(routes.ends, "i32"), options.hidden)

    results = layer().numpy().astype(np.float64) * routes.weights[:, None]
    y = np.zeros(tokens.shape)
    np.add.at(y, routes.tokens, results)
    print(f"{options.experts} experts, {np.diff(routes.ends, prepend=0).tolist()} tokens each")

    rounds = 1 if dev.is_host else ROUNDS
    dev.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        layer()
    dev.synchronize()
    took = (time.perf_counter() - started) / rounds
    operations = 4 * len(routes.tokens) * options.width * options.hidden
    print(f"both products of all experts: {took * 1e3:.3f} ms, {operations / took / 1e12:.2f} TFLOP/s on {dev}")

    count = min(CHECKED, options.tokens)
    expected = exact(layer, tokens, routes, count)
    error = float(np.abs(y[:count] - expected).max() / np.abs(expected).max())
    print(f"error {error:.1e}")
    return 0 if error < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
