"""A residual block as two CUTLASS convolutions with fused epilogues, compiled by NVRTC: no nvcc, no framework.

    h = silu(conv(x, w) + bias)              one kernel
    y = silu(conv(h, v) + bias + x)          one kernel, which also gives the largest magnitude of y's channels

Images have channels last, the layout that the kernels need. The result is compared with the host's rows, which use
NumPy. On a GPU the first run compiles two kernels (half a minute each), which later runs read from disk, and the
block is timed. The extra `cutlass` installs the headers.

    python examples/12_convolution.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import dispatch as dp
from dispatch.libraries.cutlass import evt
from dispatch.ops.conv import channels_last

BATCH, CHANNELS, EXTENT = 4, 64, 28
FIRST = evt.silu(evt.accumulator() + evt.row("bias"))
SECOND = evt.silu(evt.accumulator() + evt.row("bias") + evt.load("residual"))
SECOND = evt.reduce(SECOND, "largest", "amax", over="m")


def block(x: dp.Tensor, w: dp.Tensor, v: dp.Tensor, bias: dp.Tensor) -> tuple[dp.Tensor, dp.Tensor]:
    """The block's result, and the largest magnitude of each of its channels."""
    h = dp.conv_fwd(x, w, pad=1, epilogue=FIRST, operands={"bias": bias})
    y, largest = dp.conv_fwd(h, v, pad=1, epilogue=SECOND, operands={"bias": bias, "residual": x})
    return y, largest


def operands(dev: dp.Device, arrays: list[np.ndarray]) -> list[dp.Tensor]:
    """Images and filters in bf16 with channels last, the bias in f32."""
    *images, bias = arrays
    return [*(channels_last(dev.array(values, "bf16")) for values in images), dev.array(bias, "f32")]


def error(got: dp.Tensor, expected: dp.Tensor) -> float:
    """The largest error, relative to the largest value."""
    one, other = (tensor.numpy().astype(np.float64) for tensor in (got, expected))
    return float(np.abs(one - other).max() / np.abs(other).max())


def timed(dev: dp.Device, given: list[dp.Tensor], calls: int = 100) -> float:
    """Microseconds for one block, averaged over many calls."""
    block(*given)
    dev.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        block(*given)
    dev.synchronize()
    return (time.perf_counter() - started) / calls * 1e6


def main() -> int:
    """Run the block; 1 if it is less precise than bf16 allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)
    rng = np.random.default_rng(0)
    scale = (9 * CHANNELS) ** 0.5
    filters = [rng.standard_normal((CHANNELS, CHANNELS, 3, 3)) / scale for _ in range(2)]
    arrays = [rng.standard_normal((BATCH, CHANNELS, EXTENT, EXTENT)), *filters, rng.standard_normal(CHANNELS)]
    tensors = operands(dev, arrays)
    y, largest = block(*tensors)
    max_error = error(largest, dev.array(np.abs(y.numpy().astype(np.float32)).max(axis=(0, 2, 3))))
    print(f"residual block on {dev}: {y.layout}, error of the channels' maxima {max_error:.1e}")
    expected, _ = block(*operands(dp.device("host"), arrays))
    off = error(y, expected)
    print(f"    error against the host's rows {off:.1e}")
    if not dev.is_host:
        print(f"    {timed(dev, tensors):.1f} us")
    return 0 if max(max_error, off) < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
