"""Fourier transforms over two GPUs beside the same on one, and beside CuPy's over two.

Tables, by `--only`: `resident`, ms of one forward transform in single precision of numbers that lie on the GPUs that
transform them, along one axis of 2^26 to 2^28 points, 16384², 512³ and 1024³ complex numbers and as many real ones:
`MultiGpuPlan.forward` over two, a prepared `dft` on one; `whole`, ms of a transform of an array of one GPU into another
there, handed out and gathered: `write`, `forward` and `read(out=…)` beside `cupy.fft.fft` with `use_multi_gpus`, which
has one axis alone, and beside one GPU.

Numbers are written anew before each call, off the clock, which runs from where all GPUs are idle to where they are
again; sides take turns, and the median counts. Some of each result is held against that of one GPU first. A ratio is
the time of one GPU, or CuPy's, over ours: above 1 ours is faster.
Repeat: `python tests/benchmarks/bench_fft_several_gpus.py [--quick] [--device cuda:0|host] [--json FILE] [--only
TABLE,TABLE]`; a minute or so on two GPUs. On `host` sizes are tiny, and it shows whether it runs.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from command import command
from report import Report, Target, judge, say, table
from timing import attempt, geometric_mean, in_turns

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TABLES = ("resident", "whole")
CHECKED = 1 << 20  # elements of a result that are looked at
TOLERANCE = 1e-5
TARGETS = (
    Target("one GPU's time to two GPUs', geometric mean", "mean", 1.0, at_least=True),
    Target("the same, of several axes", "several axes", 1.2, at_least=True),
    Target("CuPy's time to ours, of one axis over two GPUs", "cupy", 1.0, at_least=True),
)


@dataclass(frozen=True)
class Case:
    """One transform of all axes."""

    shape: tuple[int, ...]
    dtype: str = "c64"

    def __str__(self) -> str:
        n = math.prod(self.shape)
        size = f"2^{n.bit_length() - 1}" if len(self.shape) == 1 else "x".join(map(str, self.shape))
        return f"{'rfftn' if self.dtype == 'f32' else 'fftn'} {size}"

    @property
    def made(self) -> tuple[int, ...]:
        return self.shape if self.dtype == "c64" else (*self.shape[:-1], self.shape[-1] // 2 + 1)


def cases(*, tiny: bool, quick: bool) -> Iterator[Case]:
    """Those of a table."""
    if tiny:
        yield from (Case((1 << 10,)), Case((64, 48)), Case((64, 48), "f32"), Case((32, 32, 8)))
        return
    yield from (Case((1 << power,)) for power in ((22,) if quick else (26, 27, 28)))
    for shape in [(1024, 1024), (128, 128, 128)] if quick else [(16384, 16384), (512,) * 3, (1024,) * 3]:
        yield from (Case(shape), Case(shape, "f32"))


def drawn(case: Case, device: dp.Device) -> dp.Tensor:
    """Numbers of which a block is repeated: to draw them all would take longer than all transforms."""
    rng, n = np.random.default_rng(7), math.prod(case.shape)
    block = rng.standard_normal((min(n, CHECKED), 2)).astype("f4")
    values = block.view("c8")[:, 0] if case.dtype == "c64" else block[:, 0]
    return device.array(np.resize(values, case.shape))


def seconds(call: Callable[[], object], devices: Sequence[dp.Device]) -> float:
    """From where all devices are idle to where they are again."""
    for device in devices:
        device.synchronize()
    began = time.perf_counter()
    call()
    for device in devices:
        device.synchronize()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Side:
    """A way to do it: what is done off the clock first, and what is measured."""

    prepare: Callable[[], object]
    call: Callable[[], object]


def race(sides: dict[str, Side], devices: Sequence[dp.Device], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the median; the first two rounds are to warm up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in in_turns(list(sides), rounds + 2):
        side = sides[name]
        side.prepare()
        took = seconds(side.call, devices)
        if number > 1:
            found[name].append(took * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def check(found: dp.Tensor, right: dp.Tensor) -> None:
    """AssertionError unless the first elements are alike."""
    one, other = (x.reshape(-1)[:CHECKED].numpy() for x in (found, right))
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    if not error <= TOLERANCE:
        raise AssertionError(f"differs from one GPU's by {error:.1e}")


def resident(case: Case, devices: Sequence[dp.Device], rounds: int) -> dict[str, float]:
    """Over all devices beside the first one, of numbers that lie there."""
    first = devices[0]
    x = drawn(case, first)
    out = first.empty(case.made, "c64")
    one = dp.prepare(dp.DftRequest(x, "c2c" if case.dtype == "c64" else "r2c", out=out))
    with dp.fft.MultiGpuPlan(devices, case.shape, case.dtype) as plan:
        one()
        plan.write(x).forward()
        if not first.is_host:
            check(plan.read(out=first.empty(case.made, "c64")), out)
        sides = {"one": Side(lambda: None, one), "two": Side(lambda: plan.write(x), plan.forward)}
        return race(sides, devices, rounds)


def whole(case: Case, devices: Sequence[dp.Device], rounds: int, missing: dict[str, str]) -> dict[str, float]:
    """From a tensor of the first device to another there, handed out and gathered."""
    first = devices[0]
    x = drawn(case, first)
    out, right = (first.empty(case.made, "c64") for _ in range(2))
    one = dp.prepare(dp.DftRequest(x, "c2c" if case.dtype == "c64" else "r2c", out=right))
    with dp.fft.MultiGpuPlan(devices, case.shape, case.dtype) as plan:
        sides = {
            "one": Side(lambda: None, one),
            "two": Side(lambda: None, lambda: plan.write(x).forward().read(out=out)),
        }

        def cupy_side() -> Side:
            import cupy

            cupy.fft.config.use_multi_gpus = True
            cupy.fft.config.set_cufft_gpus([device.ordinal for device in devices])
            array = cupy.from_dlpack(x)
            cupy.fft.fft(array)
            return Side(lambda: None, lambda: cupy.fft.fft(array))

        one()
        plan.write(x).forward().read(out=out)
        if not first.is_host:
            check(out, right)
            if len(case.shape) == 1:
                side = attempt(f"cupy, {case}", cupy_side, missing)
                sides |= {} if side is None else {"cupy": side}
        return race(sides, devices, rounds)


def measure(device: dp.Device, quick: bool, report: Report, wanted: list[str]) -> None:
    """The tables that are wanted, over two devices, of which the first is the one that is named."""
    missing: dict[str, str] = {}
    if device.is_host:
        devices = [device, device]
    else:
        from cudabind import driver

        if int(driver.cuDeviceGetCount()) < 2:
            say("nothing to measure: two GPUs are needed")
            report.put("nothing to measure", "one GPU")
            return
        devices = [device, dp.device(f"cuda:{1 if device.ordinal == 0 else 0}")]
    rounds, figures = 3 if quick or device.is_host else 15, dict[str, float]()
    for name in wanted:
        measured: dict[str, dict[str, float]] = {}
        for case in cases(tiny=device.is_host, quick=quick):

            def work(name: str = name, case: Case = case) -> dict[str, float]:
                if name == "resident":
                    return resident(case, devices, rounds)
                return whole(case, devices, rounds, missing)

            took = attempt(f"{name}, {case}", work, missing)
            if took is not None:
                measured[str(case)] = took
                say(f"{name}, {case}, ms: " + " | ".join(f"{side} {value:.4g}" for side, value in took.items()))
                report.put(name, measured)
        figures |= summed(name, measured)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("missing", missing)
    if not device.is_host:
        judge(TARGETS, figures, report)


def summed(name: str, measured: dict[str, dict[str, float]]) -> dict[str, float]:
    """A table, printed, and its figures."""
    rows = []
    for case, took in measured.items():
        cells = [f"{took[side]:.3f}" if side in took else "-" for side in ("one", "two", "cupy")]
        rows.append([case, *cells, f"{took['one'] / took['two']:.3f}"])
    if rows:
        say()
        table([f"{name}, ms", "one GPU", "two GPUs", "CuPy, two", "one / two"], rows)
        say()
    ratios = {case: took["one"] / took["two"] for case, took in measured.items()}
    if name == "resident" and ratios:
        several = [ratio for case, ratio in ratios.items() if "x" in case]
        return {"mean": geometric_mean(list(ratios.values())), "several axes": geometric_mean(several)}
    cupy = [took["cupy"] / took["two"] for took in measured.values() if "cupy" in took]
    return {"cupy": geometric_mean(cupy)} if cupy else {}


if __name__ == "__main__":
    command(measure, __doc__, tables=TABLES)
