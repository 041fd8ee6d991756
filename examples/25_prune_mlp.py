"""Prune a network of handwritten digits to half of its weights, in the 2:4 pattern that sparse tensor cores skip.

A 64 → 256 → 128 → 10 MLP learns the UCI digits in NumPy. `structured.prune` removes the two smallest of every four
weights of its two large layers. The remaining weights are trained further with a fixed pattern, and the layers are
compressed: 9/16 of the memory in f16. `structured.linear` then computes them, with bias and ReLU fused. The example
prints the accuracy on held-out scans before and after, the error against the same products in f64, and the time of a
large layer, dense and 2:4; on the host NumPy unpacks the compressed one for every product.

    python examples/25_prune_mlp.py --device cuda:0
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import dispatch as dp
from dispatch import Epilogue

HERE = Path(__file__).resolve().parent
SIZES = (64, 256, 128, 10)
BATCH, EPOCHS, MORE_EPOCHS = 64, 40, 15
RATE, MOMENTUM = 0.05, 0.9
GOAL, LOST, BOUND = 0.955, 0.01, 5e-3
LARGE = {True: (256, 256, 64), False: (8192, 8192, 4096)}  # outputs, inputs and lines: on the host, and on a GPU
CALLS = {True: 5, False: 50}


class Data(NamedTuple):
    """Pixels from 0 to 1, and digits; a fifth of them is held out."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Layer:
    """Weights (outputs, inputs) and a bias, in f32, and a mask of the weights that remain."""

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator) -> None:
        self.w = (rng.standard_normal((outputs, inputs)) * np.sqrt(2 / inputs)).astype(np.float32)
        self.bias = np.zeros(outputs, np.float32)
        self.mask = np.ones_like(self.w)
        self.speed, self.bias_speed = np.zeros_like(self.w), np.zeros_like(self.bias)

    def descend(self, x: np.ndarray, dy: np.ndarray, rate: float) -> None:
        """A step against the gradient; pruned weights stay 0."""
        self.speed = MOMENTUM * self.speed - rate * (dy.T @ x)
        self.bias_speed = MOMENTUM * self.bias_speed - rate * dy.sum(axis=0)
        self.w = (self.w + self.speed) * self.mask
        self.bias = self.bias + self.bias_speed


def load(seed: int) -> Data:
    """The 1,797 scans, shuffled and split."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        digits = np.loadtxt(text, delimiter=",", dtype=np.float32)
    digits = np.random.default_rng(seed).permutation(digits)
    x, y = digits[:, :64] / 16, digits[:, 64].astype(np.int64)
    held_out = len(x) // 5
    return Data(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


def train(layers: list[Layer], data: Data, epochs: int, rng: np.random.Generator) -> None:
    """Gradient descent on the cross entropy, in NumPy, with a rate that falls to zero."""
    steps = len(data.x) // BATCH
    for epoch in range(epochs):
        rate = RATE * (1 - epoch / epochs)
        for batch in rng.permutation(len(data.x))[: steps * BATCH].reshape(steps, BATCH):
            inputs = [data.x[batch]]
            for layer in layers:
                y = inputs[-1] @ layer.w.T + layer.bias
                inputs.append(y if layer is layers[-1] else np.maximum(y, 0))
            odds = np.exp(inputs[-1] - inputs[-1].max(axis=1, keepdims=True))
            dy = odds / odds.sum(axis=1, keepdims=True)
            dy[np.arange(BATCH), data.y[batch]] -= 1
            dy /= BATCH
            for number in range(len(layers) - 1, -1, -1):
                layer, x = layers[number], inputs[number]
                below = dy @ layer.w * (x > 0)
                layer.descend(x, dy, rate)
                dy = below


def padded(x: np.ndarray) -> np.ndarray:
    """Padded with zero rows to a multiple of 8, which products with compressed matrices require."""
    return np.pad(x, ((0, -len(x) % 8), (0, 0)))


def forward(dev: dp.Device, layers: list[Layer], x: np.ndarray, *, compressed: bool) -> np.ndarray:
    """The network's result for scans, in f16: its large layers dense, or compressed."""
    y = dev.array(padded(x), "f16")
    for layer in layers:
        w, bias = dev.array(layer.w, "f16"), dev.array(layer.bias, "f16")
        if layer is layers[-1]:
            y = dp.matmul(y, w.T, bias=bias, epilogue=Epilogue.BIAS)
        elif compressed:
            y = dp.structured.linear(y, dp.structured.compress(w, validate=True), bias, activation="relu")
        else:
            y = dp.matmul(y, w.T, bias=bias, epilogue=Epilogue.RELU_BIAS)
    return np.asarray(y, np.float32)[: len(x)]


def accuracy(found: np.ndarray, data: Data) -> float:
    """The share of held-out scans that are classified correctly."""
    return float(np.mean(found.argmax(axis=1) == data.y_test))


def exactly(layers: list[Layer], x: np.ndarray) -> np.ndarray:
    """The network in f64, with its weights as rounded to f16."""
    y = x.astype(np.float64)
    for layer in layers:
        y = y @ layer.w.astype(np.float16).T.astype(np.float64) + layer.bias
        y = y if layer is layers[-1] else np.maximum(y, 0)
    return y


def seconds_of(dev: dp.Device, run: dp.BoundCall[dp.Tensor], calls: int) -> float:
    """The time of one call, averaged over many; the first ones, which are captured, do not count."""
    for _ in range(3):
        run()
    dev.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    dev.synchronize()
    return (time.perf_counter() - began) / calls


def compare(dev: dp.Device) -> None:
    """Compare a large layer, dense and compressed, each by a prepared call."""
    outputs, inputs, lines = LARGE[dev.is_host]
    rng = np.random.default_rng(1)
    w = dp.structured.prune(dev.array(rng.standard_normal((outputs, inputs)), "f16"))
    x = dev.array(rng.standard_normal((lines, inputs)), "f16")
    half = dp.structured.compress(w)
    dense = dp.prepare(dp.MatmulRequest(w, x.T))
    sparse = dp.prepare(dp.Matmul24Request(*half.parts, x.T, autotune=True))
    one, other = (seconds_of(dev, run, CALLS[dev.is_host]) for run in (dense, sparse))
    print(f"a layer of {outputs} x {inputs} over {lines} lines: dense {one * 1e6:,.0f} us, 2:4 {other * 1e6:,.0f} us")
    print(f"  {one / other:.2f} times as fast, in {half.nbytes / (2 * outputs * inputs):.1%} of the memory")


def main() -> int:
    """Train, prune, retrain, compress and compare; the exit status shows whether the network kept its accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and the batches (default: 0)")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    data, rng = load(options.seed), np.random.default_rng(options.seed)

    layers = [Layer(*pair, rng) for pair in itertools.pairwise(SIZES)]
    train(layers, data, EPOCHS, rng)
    before = accuracy(forward(dev, layers, data.x_test, compressed=False), data)
    for layer in layers[:-1]:
        pruned = dp.structured.prune(dev.array(layer.w, "f16")).numpy()
        layer.mask = (pruned != 0).astype(np.float32)
        layer.w *= layer.mask
        layer.speed[:] = 0
    at_once = accuracy(forward(dev, layers, data.x_test, compressed=True), data)
    train(layers, data, MORE_EPOCHS, rng)
    logits = forward(dev, layers, data.x_test, compressed=True)
    after = accuracy(logits, data)
    exact = exactly(layers, data.x_test)
    error = float(np.abs(logits - exact).max() / np.abs(exact).max())
    left = sum(np.count_nonzero(layer.w) for layer in layers) / sum(layer.w.size for layer in layers)
    print(f"accuracy on {len(data.x_test)} held-out scans: {before:.2%} dense, {at_once:.2%} pruned at once,")
    print(f"  {after:.2%} once trained on, with {left:.1%} of the weights; error {error:.1e} against f64")
    compare(dev)
    return 0 if after >= max(GOAL, before - LOST) and error < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
