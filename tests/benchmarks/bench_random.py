"""Random numbers beside CuPy and torch: numbers a second, and the share of the memory's bandwidth, in one run.

Each side fills arrays of its own of the same size and dtype, several in turn, until the GPU is done; bursts of all
sides alternate, and the median of the bursts counts. The bandwidth is that of a fill with zeros of as much memory. A
ratio is ours over the fastest peer's: above 1 ours is faster. CuPy's are its `Generator` on Philox4x3210 and its
`RandomState`, whose uniform and normal numbers are cuRAND's XORWOW; torch's words have 31 random bits of 32, and its
counts are f32. A burst takes 30 ms or so, and 20 calls at most.
Repeat: `python tests/benchmarks/bench_random.py [--quick] [--device cuda:0|host] [--json FILE]`; two minutes at most.
On `host` the arrays are small, the peers are NumPy and torch, and it shows whether they run.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from report import Report, Target, judge, say
from timing import attempt, geometric_mean, in_turns

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

    Fill = Callable[[int], Any]


COUNT, HOST_COUNT = 1 << 28, 1 << 16  # bytes of an array
SETS = 4
ROUNDS, CALLS = 7, 20
BURST = 0.03  # seconds
QUICK_ROUNDS, QUICK_CALLS = 2, 2
LEAST, SHARE = 1.0, 0.9
# What is drawn, its dtype, and the arguments of our method.
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bits", "u32", {}),
    ("random", "f32", {}),
    ("random", "f64", {}),
    ("random", "f16", {}),
    ("random", "bf16", {}),
    ("standard_normal", "f32", {}),
    ("standard_normal", "f64", {}),
    ("standard_normal", "bf16", {}),
    ("lognormal", "f32", {}),
    ("exponential", "f32", {}),
    ("integers", "i32", {"low": 0, "high": 1000}),
    ("integers", "i64", {"low": 0, "high": 1000}),
    ("poisson", "u32", {"lam": 4.0}),
    ("poisson", "u32", {"lam": 100.0}),
    ("gamma", "f32", {"shape": 2.5}),
    ("beta", "f32", {"a": 2.0, "b": 3.0}),
    ("binomial", "i64", {"n": 100, "p": 0.3}),
    ("truncated_normal", "f32", {}),
    ("permutation", "i64", {}),
)
IN_BANDWIDTH = ("random", "standard_normal")
TARGETS = (
    Target("the least ratio to the best peer", "least", LEAST, at_least=True),
    Target("uniform and normal: the least share of the bandwidth", "share", SHARE, at_least=True),
)


def ours(dev: dp.Device, draw: str, dtype: str, given: dict[str, Any], count: int, generator: str) -> Fill:
    """Fills by a generator of ours, in turn over several arrays."""
    rng = dp.random.Generator(1, generator, device=dev)
    arrays = [dev.empty((count,), dtype) for _ in range(SETS)]
    if draw == "permutation":
        return lambda i: rng.permutation(count, out=arrays[i % SETS])
    method = getattr(rng, draw)
    return lambda i: method(**given, out=arrays[i % SETS])


def torchs(dev: dp.Device, draw: str, dtype: str, given: dict[str, Any], count: int) -> Fill | None:
    """torch's; None where it has no such numbers."""
    import torch

    kinds = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"}
    kinds |= {"u32": "float32" if draw == "poisson" else "int32"} | ({"i64": "float32"} if draw == "binomial" else {})
    if dtype not in kinds:
        return None
    where = "cpu" if dev.is_host else str(dev)
    kind = getattr(torch, kinds[dtype])
    arrays = [torch.empty(count, device=where, dtype=kind) for _ in range(SETS)]
    fills: dict[str, Callable[[Any], Any]] = {
        "bits": lambda x: x.random_(),
        "random": lambda x: x.uniform_(),
        "standard_normal": lambda x: x.normal_(),
        "lognormal": lambda x: x.log_normal_(),
        "exponential": lambda x: x.exponential_(),
        "integers": lambda x: x.random_(given["low"], given["high"]),
        "poisson": torch.poisson,
        "gamma": torch._standard_gamma,
        "binomial": lambda x: torch.binomial(x, chances),
        "truncated_normal": lambda x: torch.nn.init.trunc_normal_(x, a=-2.0, b=2.0),
        "permutation": lambda x: torch.randperm(count, out=x),
    }
    if draw not in fills:
        return None
    chances = torch.full((count if draw == "binomial" else 1,), given.get("p", 0.0), device=where)
    for x in arrays:
        x.fill_(given.get("lam", given.get("shape", given.get("n", 0))))
    return lambda i: fills[draw](arrays[i % SETS])


def cupys(draw: str, dtype: str, given: dict[str, Any], count: int) -> dict[str, Fill]:
    """CuPy's two generators, each where it has such numbers."""
    import cupy

    rng = cupy.random.Generator(cupy.random.Philox4x3210(1))
    state = cupy.random.RandomState(1)
    kinds = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64, "u32": np.uint32}
    if dtype not in kinds:
        return {}
    kind = kinds[dtype]
    fills: dict[str, tuple[Callable[[], Any] | None, Callable[[], Any] | None]] = {
        "bits": (
            lambda: rng.integers(0, 2**32, count, dtype=kind),
            lambda: state.randint(0, 2**32, count, dtype=kind),
        ),
        "random": (
            lambda: rng.random(count, dtype=kind),
            lambda: state.random_sample(count, dtype=kind),
        ),
        "standard_normal": (
            lambda: rng.standard_normal(count, dtype=kind),
            lambda: state.standard_normal(count, dtype=kind),
        ),
        "lognormal": (None, lambda: state.lognormal(size=count, dtype=kind)),
        "exponential": (
            lambda: rng.standard_exponential(count, dtype=kind),
            lambda: state.exponential(size=count, dtype=kind),
        ),
        "integers": (
            lambda: rng.integers(given["low"], given["high"], count, dtype=kind),
            lambda: state.randint(given["low"], given["high"], count, dtype=kind),
        ),
        "poisson": (
            lambda: rng.poisson(given["lam"], count),
            lambda: state.poisson(given["lam"], count, dtype=np.int32),
        ),
        "gamma": (
            lambda: rng.standard_gamma(given["shape"], count, dtype=kind),
            lambda: state.gamma(given["shape"], size=count, dtype=kind),
        ),
        "beta": (
            lambda: rng.beta(given["a"], given["b"], count),
            lambda: state.beta(given["a"], given["b"], count, dtype=kind),
        ),
        "binomial": (
            lambda: rng.binomial(given["n"], given["p"], count),
            lambda: state.binomial(given["n"], given["p"], count, dtype=kind),
        ),
        "permutation": (None, lambda: state.permutation(count)),
    }
    ways = zip(("cupy Generator", "cupy RandomState"), fills.get(draw, ()), strict=False)
    return {name: (lambda _, fill=fill: fill()) for name, fill in ways if fill is not None}


def numpys(draw: str, dtype: str, given: dict[str, Any], count: int) -> Fill | None:
    """NumPy's, on the host."""
    rng = np.random.Generator(np.random.Philox(1))
    if draw in ("random", "standard_normal") and dtype in ("f32", "f64"):
        kind = np.dtype("f4" if dtype == "f32" else "f8")
        return lambda _: getattr(rng, draw)(count, dtype=kind)
    if draw == "permutation":
        return lambda _: rng.permutation(count)
    return (lambda _: getattr(rng, draw)(**given, size=count)) if hasattr(rng, draw) else None


def sides(dev: dp.Device, case: tuple[str, str, dict[str, Any]], count: int, failed: dict[str, str]) -> dict[str, Fill]:
    """All ways to draw a case."""
    draw, dtype, given = case
    made: dict[str, Fill] = {"ours": ours(dev, draw, dtype, given, count, "philox")}
    if draw in ("bits", *IN_BANDWIDTH) and dtype in ("u32", "f32"):
        made["ours, cuRAND's XORWOW"] = ours(dev, draw, dtype, given, count, "xorwow")
    peers: dict[str, Callable[[], Fill | None]] = {"torch": lambda: torchs(dev, draw, dtype, given, count)}
    if dev.is_host:
        peers["numpy"] = lambda: numpys(draw, dtype, given, count)
    for name, make in peers.items():
        fill = attempt(name, make, failed)
        if fill is not None:
            made[name] = fill
    return made if dev.is_host else made | (attempt("cupy", lambda: cupys(draw, dtype, given, count), failed) or {})


def race(dev: dp.Device, fills: dict[str, Fill], quick: bool, failed: dict[str, str]) -> dict[str, float]:
    """Seconds of one fill of each, the median of bursts that alternate."""
    rounds, most = (QUICK_ROUNDS, QUICK_CALLS) if quick else (ROUNDS, CALLS)
    calls = dict.fromkeys(fills, 1)
    took: dict[str, list[float]] = {name: [] for name in fills}
    for turn, name in in_turns(list(fills), rounds + 2):
        if name in failed:
            continue

        def burst(fill: Fill = fills[name], count: int = calls[name]) -> float:
            wait(dev)
            started = time.perf_counter()
            for i in range(count):
                fill(i)
            wait(dev)
            return (time.perf_counter() - started) / count

        seconds = attempt(name, burst, failed)
        if seconds is None or not turn:  # the first call compiles
            continue
        if turn == 1:
            calls[name] = max(1, min(most, round(BURST / seconds)))
        else:
            took[name].append(seconds)
    return {name: statistics.median(values) for name, values in took.items() if values}


def wait(dev: dp.Device) -> None:
    """Until the whole GPU is done, whoever's work it is."""
    if not dev.is_host:
        from cudabind import driver

        with dev.context:  # type: ignore[attr-defined]  # of a GPU
            driver.cuCtxSynchronize()


def measure(dev: dp.Device, quick: bool, report: Report) -> None:
    """One line for each case; what is slower than a peer shows."""
    size = HOST_COUNT if dev.is_host else COUNT // (16 if quick else 1)
    missing: dict[str, str] = {}
    table, ratios, shares = {}, [], []
    memory = dev.empty((size // 4,), "f32")
    speed = race(dev, {"fill": lambda _: dev.fill_zero(memory)}, quick, missing).get("fill")
    bandwidth = size / speed if speed else float("nan")
    say(f"{size >> 20} MiB an array; a fill with zeros writes {bandwidth / 1e9:,.0f} GB/s\n")
    for case in CASES:
        draw, dtype, given = case
        itemsize = dp.Dtype.of(dtype).itemsize
        count = size // itemsize // (64 if draw == "permutation" else 1)
        failed: dict[str, str] = {}
        took = race(dev, sides(dev, case, count, failed), quick, failed)
        missing |= {f"{name}, {draw} {dtype}": why for name, why in failed.items()}
        words = f"{draw} {dtype} {', '.join(f'{name}={value}' for name, value in given.items())}".strip()
        if "ours" not in took:
            continue
        best = min((seconds for name, seconds in took.items() if not name.startswith("ours")), default=None)
        share = count * itemsize / took["ours"] / bandwidth
        line = {name: count / seconds for name, seconds in took.items()}
        table[words] = {"rates": line, "share": share, "ratio": None if best is None else best / took["ours"]}
        if best is not None:
            ratios.append(best / took["ours"])
        if draw in IN_BANDWIDTH and dtype in ("f32", "f64"):
            shares.append(share)
        rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in line.items())
        ratio = "" if best is None else f"  {best / took['ours']:.2f} times the best peer"
        say(f"{words:42} {rates} G/s; {share:.0%} of the bandwidth{ratio}")
    report.put("random", table)
    figures = {"least": min(ratios, default=0.0), "share": min(shares, default=0.0)}
    report.put("figures", figures | {"mean": geometric_mean(ratios) if ratios else 0.0})
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(measure, __doc__)
