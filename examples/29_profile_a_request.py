"""Every kernel of a request with its time: `dispatch.trace.profile` around it, as tables and as a trace for Chrome.

The requests are a layer with bias and GELU and the attention after it. They are called a hundred times before, so the
profile is that of a running program. The table lists kernels, copies and fills in their order; open the trace
in https://ui.perfetto.dev or chrome://tracing. Without a GPU CUPTI records nothing: the example reports
that, and only checks the results.

    python examples/29_profile_a_request.py --device cuda:0 --out trace.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import dispatch as dp

HERE = Path(__file__).resolve().parent
ROWS, WIDTH, HEADS = 1024, 512, 8
WARM = 100
BOUND = 2**-6  # relative to the largest: bf16 with 8 bits, rounded twice


class Layer:
    """The operands of both requests."""

    def __init__(self, dev: dp.Device, rows: int) -> None:
        rng = np.random.default_rng(0)
        self.x, self.w = rng.standard_normal((rows, WIDTH)), rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5
        self.bias = rng.standard_normal(WIDTH)
        self.operands = [dev.array(each, "bf16") for each in (self.x, self.w, self.bias)]

    def run(self) -> dp.Tensor:
        """gelu(x · w + bias), by one request, and its self-attention, by another."""
        x, w, bias = self.operands
        hidden = dp.matmul(x, w, bias=bias, epilogue=dp.Epilogue.GELU_BIAS)
        heads = hidden.reshape(1, x.shape[0], HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
        return dp.sdpa_fwd(heads, heads, heads)

    def expected(self) -> np.ndarray:
        """The same in double precision, from the rounded operands."""
        x, w, bias = (each.numpy().astype(np.float64) for each in self.operands)
        hidden = x @ w + bias
        hidden = 0.5 * hidden * (1 + np.tanh((2 / np.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        heads = hidden.reshape(-1, HEADS, WIDTH // HEADS).transpose(1, 0, 2)
        scores = heads @ heads.transpose(0, 2, 1) / (WIDTH // HEADS) ** 0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: np.ndarray = (weights / weights.sum(axis=-1, keepdims=True)) @ heads
        return mixed[None]


def main() -> int:
    """Profile the two requests; 1 if the results are wrong, or a GPU reports no kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "trace.json", help="where the trace goes")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    layer = Layer(dev, 64 if dev.is_host else ROWS)
    for _ in range(1 if dev.is_host else WARM):
        result = layer.run()
    dev.synchronize()
    began = time.perf_counter()
    if dev.is_host:
        result = layer.run()
        took = (time.perf_counter() - began) * 1e6
        print(f"on the host there are no kernels to record; NumPy took {took:,.0f} us")
        kernels = 1
    else:
        with dp.trace.profile() as profile:
            result = layer.run()
        print(profile.table(), profile, sep="\n\n")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        profile.write_chrome_trace(options.out)
        print(f"trace: {options.out}")
        kernels = len(profile.kernels)
    expected = layer.expected()
    error = float(np.abs(result.numpy().astype(np.float64) - expected).max() / np.abs(expected).max())
    print(f"largest error {error:.1e} of the largest element")
    return 0 if error < BOUND and kernels else 1


if __name__ == "__main__":
    sys.exit(main())
