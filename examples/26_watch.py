"""A GPU at work, as the driver sees it: how busy, full, hot and fast it is before, during and after some products.

A thread queries NVML twenty times a second, as `python -m dispatch top` does once a second: that makes no context and
takes no time of the GPU. Without a driver nothing can be queried; the example reports that, and only checks the
product.

    python examples/26_watch.py --device cuda:0 --seconds 3
    python -m dispatch top                                     in another terminal, meanwhile
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

import dispatch as dp
from cudabind.errors import CudaError
from dispatch.libraries.nvml.readings import Gpus

if TYPE_CHECKING:
    from dispatch.libraries.nvml.readings import Gpu

LOOKS = 0.05  # seconds between two queries
BOUND = 1e-5  # relative to the largest element: single precision, sums of thousands of terms


class Watcher(threading.Thread):
    """Queries the GPUs until it is stopped."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__(name="watcher")
        self.gpus, self.seen, self.ended = gpus, list[tuple["Gpu", ...]](), threading.Event()

    def run(self) -> None:
        """Store the result of each query."""
        while not self.ended.wait(LOOKS):
            self.seen.append(self.gpus.read().gpus)

    def stop(self) -> list[tuple[Gpu, ...]]:
        """Stop, and return all results."""
        self.ended.set()
        self.join()
        return self.seen


def work(dev: dp.Device, n: int, seconds: float) -> float:
    """Compute products for this time; returns the error of the last, relative to the largest element."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    x, y = dev.array(a), dev.array(b)
    out, end = dp.matmul(x, y), time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            dp.matmul(x, y, out=out)
        dev.synchronize()
    rows = slice(0, n, max(1, n // 64))  # a few rows are enough for the check
    expected = a[rows].astype(np.float64) @ b
    return float(np.abs(out.numpy()[rows] - expected).max() / np.abs(expected).max())


def show(when: str, gpu: Gpu) -> None:
    """Print one line about a GPU."""
    used = "-" if gpu.memory_used is None else f"{gpu.memory_used / 2**20:,.0f} MiB"
    power = "-" if gpu.power is None else f"{gpu.power:.0f} W"
    print(f"{when:>7}  {gpu.utilization}% busy  {used}  {power}  {gpu.temperature} C  {gpu.sm_clock} MHz")


def main() -> int:
    """Watch while it works; 1 if the product is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to work on a GPU (default: 2)")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    try:
        with Gpus() as gpus:
            before, watcher = gpus.read(), Watcher(gpus)
            watcher.start()
            try:
                error = work(dev, 256 if dev.is_host else 4096, 0 if dev.is_host else options.seconds)
            finally:
                seen = watcher.stop()
            after = gpus.read()
    except CudaError as refused:
        print(f"nobody to ask about GPUs: {type(refused).__name__}; see `python -m dispatch doctor`")
        error = work(dev, 256, 0)
    else:
        for number, gpu in enumerate(before.gpus):
            print(f"GPU {gpu.index}: {gpu.name}, driver {before.driver}")
            show("before", gpu)
            if seen:
                show("busiest", max((each[number] for each in seen), key=lambda one: one.power or 0))
            show("after", after.gpus[number])
    print(f"largest error {error:.1e} of the largest element on {dev}")
    return 0 if error < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
