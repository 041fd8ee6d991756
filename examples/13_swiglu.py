"""A gated MLP block (SwiGLU) as fused products, compiled by NVRTC: no nvcc, no host compiler, no framework.

y = (silu(x·G) * (x·U))·D + x. The gate is the epilogue of the product with G, which also loads x·U; the residual
is the epilogue of the product with D. Both also compute the largest magnitude of each row, which a quantizer needs. On
a GPU the first run compiles two kernels at once (half a minute); later runs read them from disk. The first product has
no epilogue and runs on cuBLASLt. The extra `cutlass` installs the headers.

    python examples/13_swiglu.py --device cuda:0 --tokens 4096 --width 4096 --hidden 11008
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import dispatch as dp
from dispatch.libraries.cutlass import evt

GATE = evt.reduce(evt.silu(evt.accumulator()) * evt.load("up"), "hidden_max", "amax", over="n")
DOWN = evt.reduce(evt.accumulator() + evt.source(), "y_max", "amax", over="n")
ROUNDS = 20
CHECKED = 64  # tokens that are compared with float64
TOLERANCE = 0.02  # of the largest value: bf16 keeps 8 bits, and h is rounded to it between the products


class Block:
    """The weights of a block, in bf16, k dense, and its three prepared products for one x."""

    def __init__(self, dev: dp.Device, rng: np.random.Generator, tokens: int, width: int, hidden: int) -> None:
        def weight(rows: int, columns: int) -> dp.Tensor:
            return dev.array(rng.standard_normal((columns, rows)) / rows**0.5, "bf16").T

        self.x = dev.array(rng.standard_normal((tokens, width)), "bf16")
        self.gate, self.up, self.down = weight(width, hidden), weight(width, hidden), weight(hidden, width)
        u, h = dev.empty((tokens, hidden), "bf16"), dev.empty((tokens, hidden), "bf16")
        self.requests = (
            dp.MatmulRequest(self.x, self.up, out=u),
            dp.MatmulRequest(self.x, self.gate, out=h, epilogue=GATE, operands={"up": u}),
            dp.MatmulRequest(h, self.down, c=self.x, epilogue=DOWN),
        )
        self.calls = dp.prepare_all(self.requests)

    def __call__(self) -> tuple[dp.Tensor, dp.Tensor, dp.Tensor]:
        """y, and the largest magnitude of each row of h and of y."""
        up, gate, down = self.calls
        up()
        _, hidden_max = gate()
        y, y_max = down()
        return y, hidden_max, y_max

    def exact(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for some tokens in float64, without intermediate rounding."""
        x, gate, up, down = (np.asarray(t.numpy(), np.float64) for t in (self.x, self.gate, self.up, self.down))
        g = x[rows] @ gate
        h = g / (1 + np.exp(-g)) * (x[rows] @ up)
        y = h @ down + x[rows]
        return y, np.abs(h).max(axis=1), np.abs(y).max(axis=1)


def main() -> int:
    """Run and time it; 1 if it is less precise than bf16 allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    started = time.perf_counter()
    block = Block(dev, np.random.default_rng(0), options.tokens, options.width, options.hidden)
    got = [result.numpy() for result in block()]
    print(f"first run, with its preparation: {time.perf_counter() - started:.2f} s")

    rounds = 1 if dev.is_host else ROUNDS
    dev.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        block()
    dev.synchronize()
    took = (time.perf_counter() - started) / rounds
    operations = 6 * options.tokens * options.width * options.hidden
    print(f"a block of {options.tokens} tokens: {took * 1e3:.3f} ms, {operations / took / 1e12:.2f} TFLOP/s on {dev}")

    rows = slice(0, CHECKED)
    pairs = zip(("y", "row maxima of h", "row maxima of y"), got, block.exact(rows), strict=True)
    errors = {name: float(np.abs(x[rows] - exact).max() / np.abs(exact).max()) for name, x, exact in pairs}
    print("error " + ", ".join(f"{value:.1e} of {name}" for name, value in errors.items()))
    return 0 if max(errors.values()) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
