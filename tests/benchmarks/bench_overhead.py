"""Host time of one small matmul: 64 by 64 by 64 in bf16, in bursts of 200 calls, against every peer in the same run.

Each peer runs in its best mode, too: nvmath-python's stateful execute beside its function, a replayed
torch.cuda.CUDAGraph and a C loop over cuGraphLaunch beside bound calls, torch's private fused GELU and torch.compile
(max-autotune) beside `F.linear` and `F.gelu`.
Bursts of all candidates alternate, the device is synchronized between them off the clock, and the median of the bursts
counts. Besides: calls of shapes never seen before, with the steps inside them, and `import dispatch` in new processes.
Repeat: `python tests/benchmarks/bench_overhead.py [--quick] [--device cuda:0|host] [--json FILE]`; about 45 s on a GPU
machine, 20 s with --quick. On `host` only this project's own calls run, in f32: whether it runs, not how fast.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import overhead_peers as peers
import unseen_shapes
from command import command
from import_time import import_time
from report import Report, Target, judge, mapped, say, table
from timing import Candidate, attempt, host_race, statement, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64
MANY = 4096  # distinct outputs: more than an executor keeps recorded calls, and than a plan remembers addresses
BOUND, SAME, NEW, FUSED = (
    "call(), bound",
    "matmul(out=), same pointers",
    "matmul(out=), new pointers",
    "fused matmul(out=)",
)
TOLERANCE = 1e-2  # of |result - reference| / |reference|: bf16 rounding is about 3e-3
TARGETS = (
    Target("bound call", BOUND, 2.0, "us"),
    Target("bound call beside a C loop over the same graph", BOUND, 1.5, "us", peers.C_GRAPH),
    Target("bound call beside torch's graph replay", BOUND, 1.0, "us", peers.TORCH_GRAPH),
    Target("bound call beside nvmath's stateful one", BOUND, 0.1, "us", peers.NVMATH),
    Target("one-shot that repeats", SAME, 0.7, "us", peers.TORCH_MM),
    Target("one-shot, new pointers", NEW, 1.3, "us", peers.TORCH_MM),
    Target("shape never seen, median", "ours, first call", 200, "us"),
    Target("fused bias + GELU, one-shot", FUSED, 0.4, "us", peers.TORCH_GELU),
    Target("the same beside torch's private fused call", FUSED, 1.0, "us", peers.TORCH_FUSED),
    Target("import dispatch, median", "import dispatch", 0.25, "s"),
)


def our_candidates(device: dp.Device, operands: peers.Operands) -> list[Candidate]:
    """Every way this project has to run the product; dtype bf16 on a GPU, f32 on the host."""
    dtype = "f32" if device.is_host else "bf16"
    a, b, bias = (device.array(x, dtype) for x in operands)
    out, fused_out = (device.array(np.full((SIZE, SIZE), np.nan), dtype) for _ in range(2))
    new = itertools.cycle([device.empty((SIZE, SIZE), dtype) for _ in range(MANY)]).__next__
    request = dp.MatmulRequest(a=a, b=b, out=out)
    fused: dict[str, Any] = {"bias": bias, "epilogue": dp.Epilogue.GELU_BIAS}
    names = {"matmul": dp.matmul, "run": dp.run, "a": a, "b": b, "out": out, "fused_out": fused_out, "new": new}
    names |= {"request": request, "call": dp.prepare(request), **fused}
    names["fused_call"] = dp.prepare(dp.MatmulRequest(a=a, b=b, out=fused_out, **fused))
    rows = (
        (BOUND, "call()"),
        ("run(request)", "run(request)"),
        (SAME, "matmul(a, b, out=out)"),
        (NEW, "matmul(a, b, out=new())"),
        ("matmul(), no out=", "matmul(a, b)"),
        ("fused call(), bound", "fused_call()"),
        (FUSED, "matmul(a, b, bias=bias, epilogue=epilogue, out=fused_out)"),
        ("fused matmul(out=), new pointers", "matmul(a, b, bias=bias, epilogue=epilogue, out=new())"),
        ("fused matmul(), no out=", "matmul(a, b, bias=bias, epilogue=epilogue)"),
    )
    return [statement(name, code, **names) for name, code in rows]


def peer_candidates(
    device: dp.Device, operands: peers.Operands, folder: Path, missing: dict[str, str]
) -> list[Candidate]:
    """All peers that are installed and work; the others go into `missing` with the reason."""
    families: dict[str, Callable[[], list[Candidate]]] = {
        "C loop": lambda: peers.c_candidates(device, operands, folder),
        "C loop over a graph": lambda: peers.graph_candidates(device, operands, folder),
        "ctypes loop": lambda: peers.ctypes_candidates(device, operands),
        "torch": lambda: peers.torch_candidates(operands, MANY),
        "torch graph": lambda: peers.torch_graph_candidates(operands),
        "torch.compile": lambda: peers.torch_compile_candidates(operands),
        "CuPy": lambda: peers.cupy_candidates(operands),
        "nvmath-python": lambda: peers.nvmath_candidates(operands),
    }
    return [candidate for name, build in families.items() for candidate in attempt(name, build, missing) or ()]


def verified(candidates: list[Candidate], operands: peers.Operands, missing: dict[str, str]) -> list[Candidate]:
    """Those that compute the right product: a call that does nothing must not win."""
    product = operands.a.astype(np.float64) @ operands.b
    x = product + operands.bias
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    right = []
    for candidate in candidates:
        name = candidate.name
        want = gelu if "fused" in name or "gelu" in name else x if "bias" in name or "addmm" in name else product
        result = attempt(name, lambda run=candidate.result: _array(run()), missing)
        if result is None:
            continue
        error = np.linalg.norm(result - want) / np.linalg.norm(want)
        if error < TOLERANCE:  # false for NaN
            right.append(candidate)
        else:
            missing[name] = f"wrong result: relative error {error:.1e}"
    return right


def _array(result: Any) -> Any:
    """The values of a tensor of any of the libraries, in float64."""
    if hasattr(result, "cpu"):  # torch
        result = result.float().cpu()
    elif hasattr(result, "get"):  # CuPy
        result = result.get()
    return np.asarray(result).astype(np.float64)


def race(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the host time of every candidate; returns the medians in microseconds."""
    rng = np.random.default_rng(64)
    # Multiples of 1/16 below 2 are exact in bf16.
    draw = (rng.integers(-31, 32, size) / 16 for size in ((SIZE, SIZE), (SIZE, SIZE), SIZE))
    operands = peers.Operands(*(x.astype(np.float32) for x in draw))
    missing: dict[str, str] = {}
    bursts, calls = (5, 20) if device.is_host else (20, 200) if quick else (120, 200)
    with tempfile.TemporaryDirectory() as folder:
        candidates = attempt("ours", lambda: our_candidates(device, operands), missing) or []
        if not device.is_host:
            candidates = peer_candidates(device, operands, Path(folder), missing) + candidates
        candidates = verified(candidates, operands, missing)
        seconds, failed = host_race(candidates, device.synchronize, bursts=bursts, calls=calls)
    missing |= failed
    figures = {name: summary(values) for name, values in seconds.items()}
    say(f"\n{SIZE} x {SIZE} x {SIZE}, host time per call in us, {bursts} bursts of {calls}")
    base = figures.get(peers.TORCH_MM, {}).get("median")
    rows = [
        (
            name,
            *(f"{f[key]:.2f}" for key in ("median", "p25", "p75", "best")),
            f"{f['median'] / base:.2f}" if base else "-",
        )
        for name, f in figures.items()
    ]
    table(("call", "median", "p25", "p75", "best", f"of {peers.TORCH_MM}"), rows)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("bursts", {"count": bursts, "calls": calls, "us": figures, "missing": missing})
    report.put("cublasLt mapped", mapped("libcublasLt"))
    return {name: f["median"] for name, f in figures.items()}


def first_calls(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep what unseen shapes cost; returns the medians in microseconds."""
    count = unseen_shapes.WARM + (20 if device.is_host else 60 if quick else 200)
    dtype, largest = ("f32", 128) if device.is_host else ("bf16", 512)
    # One draw for all three, so that no shape is seen by two of them: the library below has a cache of its own.
    drawn = unseen_shapes.shapes(3 * count, largest, seed=7)
    mine, theirs, stepped = drawn[:count], drawn[count : 2 * count], drawn[2 * count :]
    parts: dict[str, Callable[[], dict[str, list[float]]]] = {
        "ours": lambda: unseen_shapes.ours(device, dtype, mine),
        "steps": lambda: unseen_shapes.steps(device, dtype, stepped),
    }
    if not device.is_host:
        parts["torch"] = lambda: unseen_shapes.torchs(theirs)
    figures: dict[str, dict[str, float]] = {}
    missing: dict[str, str] = {}
    for name, measure in parts.items():
        found = attempt(name, measure, missing) or {}
        figures |= {what: summary(seconds) for what, seconds in found.items()}
    say(f"\nshapes never seen, multiples of {unseen_shapes.STEP} up to {largest}, us")
    keys = ("median", "p90", "best", "count")
    table(("", *keys), [(name, *(f"{f[key]:.0f}" for key in keys)) for name, f in figures.items()])
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("unseen shapes", {"us": figures, "missing": missing})
    return {name: f["median"] for name, f in figures.items()}


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    figures = import_time(report, 3 if quick else 7)
    figures |= race(device, report, quick)
    figures |= first_calls(device, report, quick)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(main, __doc__)
