"""Copies of 64 MiB between host and GPU, against cuMemcpyAsync on page-locked memory and an event: the plain way.

Ours are `copy_from_async` and `numpy_async` with arrays of `Device.pinned`, and `copy_from` and `numpy` with pageable
ones; each once on a device of this process, and once on a supervisor's whose memory a child shares.
Repeat: `python tests/benchmarks/bench_copies.py [--quick] [--device cuda:0|host] [--json FILE]`; 10 s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from command import command
from report import Report, Target, judge, say, table

import dispatch as dp
from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 64 << 20
PLAIN_IN, PLAIN_OUT = "cuMemcpyHtoDAsync, pinned", "cuMemcpyDtoHAsync, pinned"
PARENT_IN, PARENT_OUT = "copy_from_async, pinned, parent of a child", "numpy_async, pinned, parent of a child"
OUR_IN, OUR_OUT = "copy_from_async, pinned", "numpy_async, pinned"
TARGETS = (
    Target("in, against the plain copy", OUR_IN, 0.95, peer=PLAIN_IN, at_least=True),
    Target("out, against the plain copy", OUR_OUT, 0.95, peer=PLAIN_OUT, at_least=True),
    Target("in through a parent, against the plain copy", PARENT_IN, 0.95, peer=PLAIN_IN, at_least=True),
    Target("out through a parent, against the plain copy", PARENT_OUT, 0.95, peer=PLAIN_OUT, at_least=True),
)


def plain(device: dp.Device, size: int) -> dict[str, Callable[[], object]]:
    """What one writes with the driver alone: pinned memory, a stream, and a wait for it."""
    host, tensor = device.pinned(size, "u8"), device.empty(size, "u8")
    host[...] = np.arange(size, dtype=np.uint8)  # as ours: what the CPU's caches hold is read at another speed
    stream = device.stream()

    def copy_in() -> None:
        driver.cuMemcpyHtoDAsync(tensor.ptr, host.ctypes.data, size, stream.c_handle.value)
        stream.synchronize()

    def copy_out() -> None:
        driver.cuMemcpyDtoHAsync(host.ctypes.data, tensor.ptr, size, stream.c_handle.value)
        stream.synchronize()

    return {PLAIN_IN: copy_in, PLAIN_OUT: copy_out}


def ours(device: dp.Device, size: int, suffix: str) -> dict[str, Callable[[], object]]:
    """The ways of this project on one device, each with what it copies."""
    source, target = device.pinned(size, "u8"), device.pinned(size, "u8")
    source[...] = np.arange(size, dtype=np.uint8)
    pageable, tensor = source.copy(), device.empty(size, "u8")
    works: dict[str, Callable[[], object]] = {
        OUR_IN + suffix: lambda: tensor.copy_from_async(source).result(),
        OUR_OUT + suffix: lambda: tensor.numpy_async(target).result(),
        "numpy_async" + suffix: lambda: tensor.numpy_async().result(),
        "copy_from, pageable" + suffix: lambda: (tensor.copy_from(pageable), device.synchronize()),
        "numpy, pageable" + suffix: tensor.numpy,
    }
    for work in works.values():
        work()
    if not (np.array_equal(target, source) and np.array_equal(tensor.numpy(), source)):
        raise SystemExit(f"copies{suffix} are wrong")
    return works


def race(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in taken.items()}


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure all and print them with the targets."""
    size = BYTES // 64 if quick else BYTES
    with dp.Supervisor(device.name, streams=1, isolation="process") as sup:
        works = {} if device.is_host else plain(device, size)
        works |= ours(device, size, "") | ours(sup.device, size, ", parent of a child")
        seconds = race(works, 5 if quick else 30)
    rates = {name: size / value / 1e9 for name, value in seconds.items()}
    say(f"\n{size / 2**20:g} MiB, median of copies that are waited for")
    table(("", "us", "GB/s"), [(name, f"{seconds[name] * 1e6:,.1f}", f"{rates[name]:.2f}") for name in seconds])
    report.put("copies", {"bytes": size, "seconds": seconds, "GB/s": rates})
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, rates, report)


if __name__ == "__main__":
    command(main, __doc__)
