"""What it costs that products are rounded once: the default against `reduced_precision=True`, by GPU time.

The products of language models (llm_products.py), some of them autotuned, too, and others that cuBLASLt has few precise
algorithms for, or none: gradients through GELU, and extents that are multiples of nothing, where kernels of this
library do the epilogue. The ratio is the time of reduced precision over the default's: below 1 the default costs.
Repeat: `python tests/benchmarks/bench_precision.py [--quick] [--device cuda:0|host] [--json FILE]`; about 2 minutes.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from command import command, empty_cache
from llm_products import PRODUCTS, spread
from report import Report, say, table
from timing import attempt, geometric_mean, gpu_race, reason, summary

import dispatch as dp
from dispatch.keys import Epilogue
from dispatch.ops.matmul import aux_shape
from dispatch.ops.matmul.exact import ExactPlan

try:
    import torch
except ImportError as error:
    no_torch: str | None = reason(error)
else:
    no_torch = None

E = Epilogue
ROTATE_BYTES = 160 << 20  # well above the L2 cache
BUDGET = {True: 40.0, False: 150.0}  # seconds, by `quick`
WAYS = {"reduced": True, "default": False}
# Epilogue, m, n, k: gradients through GELU as a training step has them, and extents that fit no vector.
OTHERS = (
    (E.DGELU, 2048, 6144, 24576),
    (E.DGELU, 8192, 1600, 6400),
    (E.DGELU_BGRAD, 2048, 6144, 24576),
    (E.DGELU_BGRAD, 4096, 4096, 1024),
    (E.DRELU_BGRAD, 4096, 4096, 1024),
    (E.GELU_AUX_BIAS, 2048, 24576, 6144),
    (E.GELU_AUX_BIAS, 8192, 6400, 1600),
    (E.RELU_BIAS, 65, 43, 21),
    (E.RELU_BIAS, 33, 77, 8192),
    (E.GELU_BIAS, 33, 77, 8192),
    (E.GELU_BIAS, 1001, 1003, 1005),
    (E.RELU_BIAS, 2047, 4095, 1023),
)
Row = dict[str, Any]


def forward(device: dp.Device, product: Any) -> list[dict[str, Any]]:
    """The fields of so many sets of operands of a language model's product that they do not stay in the cache."""
    m, n, k = product.m, product.n, product.k
    dtype = "bf16" if product.kind == "bf16" else "f8e4m3"

    def one() -> dict[str, Any]:
        a = device.zeros((k, m), dtype).T if product.form == "wgrad" else device.zeros((m, k), dtype)
        b = device.zeros((n, k), dtype).T if product.form == "forward" else device.zeros((k, n), dtype)
        fields = {"a": a, "b": b, "out": device.empty((m, n), "bf16"), "epilogue": E[product.epilogue]}
        if product.epilogue != "NONE":
            fields["bias"] = device.zeros((n,), "bf16")
        return fields | {"fast_accum": product.kind == "fp8"}

    return [one() for _ in range(min(max(2, math.ceil(ROTATE_BYTES / product.nbytes)), 64))]


def other(device: dp.Device, epilogue: Epilogue, m: int, n: int, k: int) -> list[dict[str, Any]]:
    """The same for a product of OTHERS, in bf16."""

    def one() -> dict[str, Any]:
        fields = {"a": device.zeros((m, k), "bf16"), "b": device.zeros((n, k), "bf16").T, "epilogue": epilogue}
        fields["out"] = device.empty((m, n), "bf16")
        if epilogue.adds_bias:
            fields["bias"] = device.zeros((n,), "bf16")
        if epilogue.writes_aux or epilogue.is_gradient:
            own, strides = aux_shape(epilogue, (m, n))
            kind = "u8" if epilogue.activation == "relu" else "bf16"
            fields["aux"] = device.zeros((m, strides[0]), kind)[:, : own[1]]
        if epilogue.writes_bgrad:
            fields["bgrad"] = device.empty((n,), "bf16")
        return fields

    nbytes = 2 * (m * k + k * n + 2 * m * n)
    return [one() for _ in range(min(max(2, math.ceil(ROTATE_BYTES / nbytes)), 64))]


def measure(name: str, sets: list[dict[str, Any]], rounds: int, *, autotune: bool) -> Row:
    """One product in both ways: microseconds and the ratio; host seconds that each took to prepare."""
    runs, prepared, whose = {}, {}, {}
    for way, reduced in WAYS.items():
        started = time.perf_counter()
        requests = [
            dp.MatmulRequest(**fields, reduced_precision=reduced, autotune=autotune, library="cublasLt")
            for fields in sets
        ]
        calls = [dp.prepare(requests[0])]
        prepared[way] = time.perf_counter() - started
        calls += [dp.prepare(request) for request in requests[1:]]
        plan = requests[0].device.executor().plan(requests[0])
        whose[way] = "this library's kernels" if isinstance(plan, ExactPlan) else "fused"
        runs[way] = lambda i, calls=calls: calls[i]()
    repeats = len(sets) * max(1, 40 // len(sets))
    seconds, how = gpu_race(runs, sets=len(sets), repeats=repeats, rounds=rounds)
    figures = {way: summary(values) for way, values in seconds.items()}
    ratio = figures["reduced"]["median"] / figures["default"]["median"]
    row: Row = {"product": name, "autotune": autotune, "us": figures, "ratio": ratio, "timed by": how}
    return row | {"epilogue by": whose["default"], "prepare ms": {way: s * 1e3 for way, s in prepared.items()}}


def conclude(rows: list[Row], report: Report) -> None:
    """Print the slowest and the means of each group, and keep them."""
    kept = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        ratios = [row["ratio"] for row in members]
        kept[group] = {
            "products": len(ratios),
            "geometric mean": geometric_mean(ratios),
            "median": statistics.median(ratios),
            "least": min(ratios),
        }
    say("\ntime of reduced_precision=True over the time of the default")
    lines = [(name, *(f"{value:.3f}".removesuffix(".000") for value in one.values())) for name, one in kept.items()]
    table(("group", "products", "geometric mean", "median", "least"), lines)
    report.put("groups", kept)


def on_gpu(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure the products until the time is up."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    ends = time.monotonic() + BUDGET[quick]
    work = [
        ("others" + (", autotuned" if tuned else ""), f"{e.name} {m} {n} {k}", tuned, (other, e, m, n, k))
        for tuned in (False, True)
        for e, m, n, k in OTHERS
    ]
    for tuned in (False, True):
        for p in spread(PRODUCTS, 12 if quick or tuned else len(PRODUCTS)):
            name = f"{p.label} {p.m} {p.n} {p.k} {p.kind} {p.epilogue}"
            work.append(("language models" + (", autotuned" if tuned else ""), name, tuned, (forward, p)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), dp.Stream.from_handle(device, stream.cuda_stream):
        for group, name, tuned, (make, *given) in work:
            if time.monotonic() > ends:
                failed[name] = f"not run: {BUDGET[quick]:.0f} s were up"
                continue
            row = attempt(
                name,
                lambda make=make, given=given, name=name, tuned=tuned: measure(
                    name, make(device, *given), 5, autotune=tuned
                ),
                failed,
            )
            if row is not None:
                rows.append({"group": group, **row})
            device.trim()
    heads = (
        "product",
        "",
        "reduced, us",
        "default, us",
        "ratio",
        "default's epilogue",
        "prepare: reduced, default, ms",
    )
    shown = [row for row in rows if row["group"].startswith("others") or abs(row["ratio"] - 1) > 0.03]
    table(heads, [cells(row) for row in shown])
    left = len(failed)
    if left:
        say(f"missing: {left} products, as {next(iter(failed.items()))}")
    report.put("products", rows)
    report.put("missing", failed)
    conclude(rows, report)


def cells(row: Row) -> tuple[str, ...]:
    times = [f"{row['us'][way]['median']:.1f}" for way in WAYS]
    prepared = ", ".join(f"{row['prepare ms'][way]:.2f}" for way in WAYS)
    return (
        row["product"],
        "tuned" if row["autotune"] else "",
        *times,
        f"{row['ratio']:.3f}",
        row["epilogue by"],
        prepared,
    )


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure and print; NumPy rounds once in any case, so that on the host there is nothing to measure."""
    if device.is_host or no_torch is not None:
        why = "it rounds once in any case" if device.is_host else f"torch, whose events it uses, is missing: {no_torch}"
        say(f"bench_precision has nothing to measure on {device}: {why}")
        report.put("nothing to measure", why)
        return
    with empty_cache():
        on_gpu(device, quick, report)


if __name__ == "__main__":
    command(main, __doc__)
