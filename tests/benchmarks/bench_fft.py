"""Fourier transforms beside torch and CuPy, in one run: cuFFT's plans, and what is around them.

Tables, by `--only`: `1d` 2^10 to 2^26 points, `batched` 2^24 points in transforms of 2^6 to 2^20, `2d` and `3d`, each
c2c and r2c in single precision and some in double: us of the GPU for one call, and the share of the time in which the
operand could be read and the result written at the bandwidth of a copy measured in the same run; `cosine` transforms
beside CuPy's; `callbacks` against separate steps and nvmath's callbacks; and `host`, us of the host for one call of a
small transform of operands at ever other addresses.

Each result is held against NumPy's in double precision first, of 2^20 points and fewer. Candidates take turns, and the
median counts. A ratio is the fastest peer's time over ours: above 1 ours is faster.
Repeat: `python tests/benchmarks/bench_fft.py [--quick] [--device cuda:0|host] [--json FILE] [--only TABLE,TABLE]`; all
but `callbacks` take two minutes or so, and that one as long again. On `host` sizes are tiny, peers are NumPy, and it
shows whether it runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from fft_callbacks import STEPS, CallbackCase, callback_calls, callback_cases, fused, right, values_of
from report import Report, Target, judge, say
from timing import attempt, geometric_mean, gpu_race, host_race, statement, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = ("1d", "batched", "2d", "3d", "cosine", "callbacks", "host")
RACES = TABLES[:5]  # of transforms beside their peers
CHECKED = 1 << 20  # points that NumPy transforms soon enough
ROOM = 1 << 30  # bytes of all operand sets of a case
MAX_SETS = 8
ADDRESSES = 256
TARGETS = (
    Target("each transform to the best peer", "least", 0.98, at_least=True),
    Target("geometric mean", "mean", 1.05, at_least=True),
    Target("convolution with callbacks to separate steps", "convolution", 1.3, at_least=True),
    Target("host time of a repeated small transform", "host: dispatch", 0.3, "us", "host: cupy"),
)


@dataclass(frozen=True)
class Case:
    """A transform along the last `axes` axes of operands of one shape."""

    name: str  # in numpy.fft, or scipy.fft
    shape: tuple[int, ...]
    axes: int
    dtype: str  # NumPy's name

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.shape))}"

    @property
    def along(self) -> tuple[int, ...]:
        return tuple(range(-self.axes, 0))

    @property
    def nbytes(self) -> int:
        """What is read and written at least."""
        item, points = np.dtype(self.dtype).itemsize, int(np.prod(self.shape))
        written = (
            2 * item * (self.shape[-1] // 2 + 1) * (points // self.shape[-1]) if self.name == "rfftn" else item * points
        )
        return item * points + written


def cases(table: str, *, tiny: bool) -> Iterator[Case]:
    """The transforms of a table."""
    single, both = ("complex64", "float32"), ("complex64", "float32", "complex128")
    shapes: dict[str, list[tuple[int, ...]]] = {
        "1d": [(1 << power,) for power in range(10, 27, 2)] + [(10_000_019,), (3**15,)],
        "batched": [(1 << (24 - power), 1 << power) for power in range(6, 21, 2)] + [(16384, 1000), (65536, 211)],
        "2d": [(1 << power, 1 << power) for power in range(8, 14)] + [(64, 512, 512), (3000, 3000)],
        "3d": [(1 << power,) * 3 for power in range(5, 10)] + [(200, 200, 200)],
        "cosine": [(4096, 4096), (1 << 20, 16), (1 << 22,)],
    }
    if tiny:
        shapes = {name: [(2,) * (len(some[0]) - 1) + (12,)] for name, some in shapes.items()}
    for shape in shapes[table]:
        axes = {"2d": 2, "3d": 3}.get(table, 1)
        if table == "cosine":
            yield from (Case(name, shape, 1, "float32") for name in ("dct", "dst"))
            continue
        for dtype in both if len(shapes[table]) < 9 or shape[-1] < CHECKED else single:
            yield Case("rfftn" if dtype[0] == "f" else "fftn", shape, axes, dtype)


def drawn(case: Case, rng: np.random.Generator) -> Any:
    values = rng.standard_normal(case.shape, np.float32)
    return (
        (values + 1j * rng.standard_normal(case.shape, np.float32)).astype(case.dtype) if "c" in case.dtype else values
    )


def sets_of(case: Case, values: Any, count: int) -> list[Any]:
    """Operand sets of torch's: the values, where NumPy is to check them, and else numbers drawn on the GPU."""
    import torch

    if values is not None:
        return [torch.from_numpy(values).cuda() for _ in range(count)]
    return [torch.randn(case.shape, dtype=getattr(torch, case.dtype), device="cuda") for _ in range(count)]


def calls(case: Case, sets: list[Any], missing: dict[str, str]) -> dict[str, Callable[[int], Any]]:
    """How each library is called over operand set i, which is torch's."""
    import torch

    is_cosine = case.name in ("dct", "dst")
    ours = getattr(dp.fft, case.name)
    found: dict[str, Callable[[int], Any]] = {
        "dispatch": (lambda i: ours(sets[i])) if is_cosine else (lambda i: ours(sets[i], axes=case.along))
    }
    if not is_cosine:
        theirs = getattr(torch.fft, case.name)
        found["torch"] = lambda i: theirs(sets[i], dim=case.along)

    def cupy_side() -> Callable[[int], Any]:
        import cupy
        import cupyx.scipy.fft

        arrays = [cupy.from_dlpack(one) for one in sets]
        module: Any = cupyx.scipy.fft if is_cosine else cupy.fft
        function = getattr(module, case.name)

        def call(i: int) -> Any:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                return function(arrays[i]) if is_cosine else function(arrays[i], axes=case.along)

        return call

    side = attempt("cupy", cupy_side, missing)
    return found if side is None else {**found, "cupy": side}


def check(case: Case, name: str, result: Any, values: Any) -> None:
    """AssertionError unless a result is right, as far as single precision tells."""
    if values is None:
        return
    if case.name in ("dct", "dst"):
        import scipy.fft

        right = getattr(scipy.fft, case.name)(values.astype(np.float64))
    else:
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        right = getattr(np.fft, case.name)(values.astype(wide), axes=case.along)
    got = result.get() if hasattr(result, "get") else result.cpu().numpy() if hasattr(result, "cpu") else result
    off = np.linalg.norm(np.asarray(got) - right) / np.linalg.norm(right)
    if not off < 1e-5:
        raise AssertionError(f"{name}: {case} is {off:.2g} off")


def is_right(
    case: Case, name: str, call: Callable[[int], Any], values: Any, count: int, missing: dict[str, str]
) -> bool:
    """Whether a candidate runs over all operand sets, and gives what is right; else it is noted why not."""

    def work() -> bool:
        check(case, name, call(0), values)
        for i in range(count):
            call(i)
        return True

    return attempt(f"{case}: {name}", work, missing) is not None


def bandwidth(*, quick: bool) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    import torch

    source = torch.empty(1 << (26 if quick else 28), device="cuda")
    target = torch.empty_like(source)
    seconds, _ = gpu_race({"copy": lambda _: target.copy_(source)}, sets=1, repeats=5, rounds=5)
    return 2 * source.nbytes / float(np.median(seconds["copy"]))


def on_the_gpu(table: str, report: Report, missing: dict[str, str], rate: float, *, quick: bool) -> list[float]:
    """Race the cases of a table; prints a line for each, and gives the ratios of the best peer to ours."""
    rng, rows, ratios = np.random.default_rng(7), {}, []
    say(f"\n{table}: us of the GPU for one call, ratio of the best peer to ours, share of the memory's bandwidth")
    for case in cases(table, tiny=False):
        if quick and int(np.prod(case.shape)) > CHECKED:
            continue

        def work(case: Case = case) -> None:
            values = drawn(case, rng) if int(np.prod(case.shape)) <= CHECKED else None
            count = max(1, min(MAX_SETS, ROOM // case.nbytes))
            sets = sets_of(case, values, count)
            runs = calls(case, sets, missing)
            runs = {name: call for name, call in runs.items() if is_right(case, name, call, values, count, missing)}
            seconds, how = gpu_race(runs, sets=count, repeats=count * (2 if quick else 4), rounds=3 if quick else 9)
            figures = {name: summary(some) for name, some in seconds.items()}
            peers = [figure["median"] for name, figure in figures.items() if name != "dispatch"]
            share = case.nbytes / rate / (figures["dispatch"]["median"] * 1e-6)
            ratio = min(peers) / figures["dispatch"]["median"] if peers else None
            if ratio is not None:
                ratios.append(ratio)
            rows[str(case)] = {"us": figures, "how": how, "ratio": ratio, "share of bandwidth": share}
            report.put(table, rows)
            cells = " | ".join(f"{name} {figure['median']:.4g}" for name, figure in figures.items())
            say(f"{case!s:<34} {cells} | {'-' if ratio is None else f'{ratio:.2f}'} | {share:.0%}{told(how)}")

        attempt(str(case), work, missing)
    return ratios


def told(how: str) -> str:
    """What figures may have in them that were not taken from a recorded graph."""
    return how.removeprefix("graph").replace(";", " |")


def is_close(case: CallbackCase, name: str, got: Any, expected: Any) -> None:
    """AssertionError unless a result is right, as far as single precision tells."""
    got = got.get() if hasattr(got, "get") else got.cpu().numpy() if hasattr(got, "cpu") else np.asarray(got)
    off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    if not off < 1e-5:
        raise AssertionError(f"{name}: {case} is {off:.2g} off")


def through_callbacks(report: Report, missing: dict[str, str], rate: float, *, quick: bool) -> dict[str, float]:
    """Race callbacks against separate steps and nvmath; the least ratio of a convolution's fastest steps to ours."""
    import torch

    rng, rows, ratios = np.random.default_rng(7), {}, []
    say("\ncallbacks: us of the GPU for one call, ratio of the fastest separate steps to ours, share of the bandwidth")
    for case in callback_cases(tiny=False):

        def work(case: CallbackCase = case) -> None:
            x, other = values_of(case, rng)
            count = max(1, min(MAX_SETS, ROOM // case.nbytes))
            sets = [torch.from_numpy(x).cuda() for _ in range(count)]
            expected = (
                right(case, x, other) if case.points <= 16 * CHECKED and not (quick and case.points > CHECKED) else None
            )
            runs = {}
            for name, call in callback_calls(case, sets, other, missing).items():

                def tried(name: str = name, call: Callable[[int], Any] = call) -> bool:
                    if expected is not None:
                        is_close(case, name, call(0), expected)
                    return all(call(i) is not None for i in range(count))

                if attempt(f"{case}: {name}", tried, missing):
                    runs[name] = call
            repeats, rounds = count * (2 if quick else 4), 3 if quick else 9
            nvmath = {name: runs.pop(name) for name in ("nvmath",) if name in runs}  # it may take no recording
            seconds, how = gpu_race(runs, sets=count, repeats=repeats, rounds=rounds)
            if nvmath:
                seconds |= gpu_race(nvmath, sets=count, repeats=repeats, rounds=rounds)[0]
            figures = {name: summary(some) for name, some in seconds.items()}
            ours = figures["dispatch"]["median"]
            steps = [figure["median"] for name, figure in figures.items() if name in STEPS]
            share, ratio = case.nbytes / rate / (ours * 1e-6), min(steps) / ours
            if case.name == "convolution":
                ratios.append(ratio)
            rows[str(case)] = {"us": figures, "how": how, "ratio": ratio, "share of bandwidth": share}
            report.put("callbacks", rows)
            cells = " | ".join(f"{name} {figure['median']:.4g}" for name, figure in figures.items())
            say(f"{case!s:<34} {cells} | {ratio:.2f} | {share:.0%}{told(how)}")

        attempt(str(case), work, missing)
    return {"convolution": min(ratios)} if ratios else {}


def on_the_host(device: dp.Device, report: Report, missing: dict[str, str], *, quick: bool) -> dict[str, float]:
    """The host's time of one call of 1,024 points, at ever other addresses."""
    n = 16 if device.is_host else 1024
    values = (np.arange(n) + 1j).astype(np.complex64)
    ours = itertools.cycle([device.array(values) for _ in range(ADDRESSES)]).__next__
    candidates = [statement("dispatch", "fft(x())", fft=dp.fft.fft, x=ours)]
    x, out = device.array(values), device.array(values)
    again = {"fft": dp.fft.fft, "x": x, "out": out, "call": dp.prepare(dp.DftRequest(x, out=out))}
    candidates.append(statement("dispatch, out= again", "fft(x, out=out)", **again))
    candidates.append(statement("dispatch, prepared", "call()", **again))
    if device.is_host:
        candidates.append(statement("numpy", "fft(x)", fft=np.fft.fft, x=values))
    else:

        def torch_side() -> Any:
            import torch

            x = itertools.cycle([torch.from_numpy(values).cuda() for _ in range(ADDRESSES)]).__next__
            return [
                statement("torch", "fft(x())", fft=torch.fft.fft, x=x),
                statement("dispatch over torch", "fft(x())", fft=dp.fft.fft, x=x),
            ]

        def cupy_side() -> Any:
            import cupy

            x = itertools.cycle([cupy.asarray(values) for _ in range(ADDRESSES)]).__next__
            return [statement("cupy", "fft(x())", fft=cupy.fft.fft, x=x)]

        for name, side in (("torch", torch_side), ("cupy", cupy_side)):
            candidates += attempt(name, side, missing) or []
    for candidate in candidates:
        attempt(candidate.name, lambda candidate=candidate: candidate.burst(ADDRESSES), missing)
    device.synchronize()
    seconds, failed = host_race(
        candidates, device.synchronize, bursts=3 if quick else 30, calls=16 if device.is_host else 100
    )
    missing.update(failed)
    figures = {name: summary(some) for name, some in seconds.items()}
    say(
        f"\nhost: us of the host for one fft of {n} points: "
        + " | ".join(f"{n} {f['median']:.3g}" for n, f in figures.items())
    )
    report.put("host", {"us": figures, "missing": missing})
    return {f"host: {name}": figure["median"] for name, figure in figures.items()}


def races(report: Report, missing: dict[str, str], wanted: list[str], *, quick: bool) -> dict[str, float]:
    """The tables of the GPU's time, on a stream of their own: the default one takes no recording."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        rate = attempt("bandwidth", lambda: bandwidth(quick=quick), missing)
        if rate is None:
            return {}
        say(f"\na copy reads and writes {rate / 1e12:.2f} TB/s")
        report.put("bandwidth", rate)
        ratios = [
            ratio
            for table in RACES
            if table in wanted
            for ratio in on_the_gpu(table, report, missing, rate, quick=quick)
        ]
        figures = through_callbacks(report, missing, rate, quick=quick) if "callbacks" in wanted else {}
    return figures | ({"least": min(ratios), "mean": geometric_mean(ratios)} if ratios else {})


def measure(device: dp.Device, quick: bool, report: Report, wanted: list[str]) -> None:
    """All tables that are wanted; the GPU's are those of torch's and CuPy's current device."""
    missing: dict[str, str] = {}
    figures: dict[str, float] = {}
    if device.is_host:
        on_the_host(device, report, missing, quick=True)
        for through in callback_cases(tiny=True):
            x, other = values_of(through, np.random.default_rng(7))
            operands = [device.array(x)]
            met = None if other is None else device.array(other)
            is_close(
                through, "dispatch", fused(through, operands.__getitem__, met)(0).numpy(), right(through, x, other)
            )
        for table in RACES:
            for case in cases(table, tiny=True):
                values = drawn(case, np.random.default_rng(7))
                along = {} if table == "cosine" else {"axes": case.along}
                check(case, "dispatch", getattr(dp.fft, case.name)(device.array(values), **along).numpy(), values)
        return
    if "host" in wanted:
        figures |= on_the_host(device, report, missing, quick=quick)
    figures |= races(report, missing, wanted, quick=quick)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("missing", missing)
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(measure, __doc__, tables=TABLES)
