"""Convolution by CUTLASS against cuDNN through torch, channels last: what bench_cutlass.py measures of it.

Forward in bf16, with the configuration that a request takes unasked; every result is checked before it is timed.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from timing import gpu_race

import dispatch as dp

__all__ = ["SHAPES", "convolution"]

# Images, channels, filters, extent, taps along an axis: layers of a ResNet-50 and wider ones.
SHAPES = ((32, 256, 256, 56, 3), (32, 512, 512, 28, 3), (64, 256, 1024, 28, 1))
L2_BYTES = 120 << 20


def convolution(shape: tuple[int, int, int, int, int], rounds: int) -> dict[str, Any]:
    """TFLOP/s of torch and of ours, for one shape with padding that keeps the extents."""
    import torch

    n, c, k, extent, taps = shape
    pad = taps // 2
    count = max(2, min(6, math.ceil(2 * L2_BYTES / (2 * n * extent * extent * (c + k)))))

    def images(*shape: int) -> list[Any]:
        made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        return [t.to(memory_format=torch.channels_last) for t in made]

    x, w, out = images(n, c, extent, extent), images(k, c, taps, taps), images(n, k, extent, extent)
    torch.backends.cudnn.benchmark = True  # cuDNN's own choice of an engine, timed
    expected = torch.nn.functional.conv2d(x[0], w[0], padding=pad).float()
    runs: dict[str, Any] = {"torch": lambda i: torch.nn.functional.conv2d(x[i], w[i], padding=pad)}
    calls = [_call(x[i], w[i], out[i], pad) for i in range(count)]
    out[0].fill_(float("nan"))
    calls[0]()
    torch.cuda.synchronize()
    off = float((out[0].float() - expected).abs().max() / expected.abs().max())
    if not off < 0.02:
        raise AssertionError(f"convolution {shape} is off by {off}")
    runs["ours"] = lambda i: calls[i]()
    seconds, how = gpu_race(runs, sets=count, repeats=4 * count, rounds=rounds)
    flops = 2 * n * extent * extent * k * c * taps * taps
    rates = {name: flops / statistics.median(values) / 1e12 for name, values in seconds.items()}
    picked = str(calls[0]._bound.plan.config)
    return {"tflops": rates, "picked": picked, "ratio": rates["ours"] / rates["torch"], "timed by": how}


def _call(x: Any, w: Any, out: Any, pad: int) -> Any:
    given = (dp.from_dlpack(tensor) for tensor in (x, w))
    return dp.prepare(dp.ConvFwdRequest(*given, out=dp.from_dlpack(out), pad=pad, library="cutlass"))
