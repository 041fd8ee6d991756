"""TFLOP/s of the matrix products of language models: this project, autotuned and by heuristic, against torch.

95 products of 65 shapes (llm_products.py), bf16 and fp8, plain, with bias, with bias + GELU, forward and backward. GPU
time alone counts, for all alike: each candidate's calls, in turns over operand sets larger than the L2 cache, are one
CUDA graph, replayed between events, in turns with the others; medians of the rounds. Every result is checked first.
Torch's best way counts, its private fused GELU among them; means are by group and over all.
Repeat: `python tests/benchmarks/bench_matmul.py [--quick] [--device cuda:0|host] [--json FILE]`; about 2 minutes on an
H200, at most 4; under 1 with --quick. On `host` a few small products run in f32: whether it runs, not how fast.
"""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import numpy as np
from command import command, empty_cache
from llm_products import PRODUCTS, Product, spread
from report import Report, Target, judge, mapped, say, table
from timing import attempt, geometric_mean, gpu_race, host_race, reason, statement, summary

import dispatch as dp

try:
    import product_candidates as candidates
except ImportError as error:
    no_torch: str | None = reason(error)
else:
    no_torch = None

BURST = 3e-3  # seconds of GPU work in one recorded burst, about
MAX_CALLS = 240  # in one burst
# Only to size the bursts: rates that a Hopper GPU about reaches.
FLOP_RATE, BYTE_RATE, SHORTEST = {2: 7e14, 1: 1.2e15}, 4e12, 3e-6
BUDGET = {True: 45.0, False: 210.0}  # seconds, by `quick`: what is left over then is reported as not run
QUICK_COUNT = 20
TARGETS = (
    Target("geometric mean of ours / torch", "geometric mean", 1.03, at_least=True),
    Target("the worst product", "minimum", 0.97, at_least=True),
    Target("different shapes", "shapes", 30, at_least=True),
)
HOST_PRODUCTS = (("NONE", 16, 2304, 768), ("BIAS", 64, 768, 768), ("GELU_BIAS", 64, 3072, 768))
Row = dict[str, Any]


def measure(product: Product, rounds: int) -> Row:
    """One product: seconds of every candidate, TFLOP/s and ratio; raises where nothing could be timed."""
    missing: dict[str, str] = {}
    sets = candidates.operand_sets(product)
    started = time.perf_counter()
    runs = candidates.our_runs(product, sets, missing)
    prepared = time.perf_counter() - started
    runs = candidates.verified(product, sets, {**candidates.torch_runs(product, sets), **runs}, missing)
    shortest = max(product.flop / FLOP_RATE[product.itemsize], product.nbytes / BYTE_RATE, SHORTEST)
    turns = max(1, min(math.ceil(BURST / shortest), MAX_CALLS) // len(sets))
    seconds, how = gpu_race(runs, sets=len(sets), repeats=turns * len(sets), rounds=rounds)
    figures = {name: summary(values) for name, values in seconds.items()}
    row: Row = {"product": product.label, "kind": product.kind, "epilogue": product.epilogue, "form": product.form}
    row |= {
        "number": PRODUCTS.index(product),
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "us": figures,
        "timed by": how,
        "missing": missing,
    }
    row |= {"sets": len(sets), "calls": turns * len(sets), "seconds to prepare": prepared}
    row["tflops"] = {name: product.flop / f["median"] / 1e6 for name, f in figures.items()}
    theirs = [name for name in figures if name.startswith(("torch", "F."))]
    row["torch"] = min(theirs, key=lambda name: figures[name]["median"], default=None)
    public = [name for name in theirs if name != candidates.PRIVATE]
    row["public torch"] = min(public, key=lambda name: figures[name]["median"], default=None)
    for name in (candidates.TUNED, candidates.HEURISTIC):
        if name in figures and row["torch"] is not None:
            row[f"ratio {name}"] = figures[row["torch"]]["median"] / figures[name]["median"]
        if name in figures and row["public torch"] is not None:
            row[f"public {name}"] = figures[row["public torch"]]["median"] / figures[name]["median"]
    return row


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, in TFLOP/s."""
    rates = row["tflops"]
    note = [] if row["timed by"] == "graph" else [f"by {row['timed by']}"]
    if row["torch"] == candidates.PRIVATE:
        note.append(f"(torch by {candidates.PRIVATE}; {row['public torch']} {rates[row['public torch']]:.0f})")
    note += [f"missing: {name}: {why}" for name, why in row["missing"].items()]
    shown = [f"{rates[name]:.1f}" if name in rates else "-" for name in (candidates.TUNED, candidates.HEURISTIC)]
    theirs = f"{rates[row['torch']]:.1f}" if row["torch"] else "-"
    ratio = row.get(f"ratio {candidates.TUNED}")
    kind = f"{row['kind']} {row['epilogue']}"
    sizes = f"{row['m']} {row['n']} {row['k']}"
    return (row["product"], sizes, kind, *shown, theirs, f"{ratio:.3f}" if ratio else "-", " ".join(note))


def group(row: Row) -> str:
    if row["form"] != "forward":
        return "bf16, backward"
    return row["kind"] + {"NONE": "", "BIAS": " + bias", "GELU_BIAS": " + bias + GELU"}[row["epilogue"]]


def conclude(rows: list[Row], report: Report) -> None:
    """Print and keep means and minima by group, and the targets."""
    tuned, untuned = f"ratio {candidates.TUNED}", f"ratio {candidates.HEURISTIC}"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if tuned in row:
            groups.setdefault(group(row), []).append(row)
    groups["all"] = [row for members in groups.values() for row in members]
    if not groups["all"]:
        say("\nno product was timed on both sides")
        return
    lines, kept = [], {}
    for name, members in groups.items():
        ratios = [row[tuned] for row in members]
        plain = [row[untuned] for row in members if untuned in row]
        kept[name] = {"products": len(members), "geometric mean": geometric_mean(ratios), "minimum": min(ratios)}
        kept[name]["heuristic, geometric mean"] = geometric_mean(plain)
        public = [row[f"public {candidates.TUNED}"] for row in members if f"public {candidates.TUNED}" in row]
        kept[name]["of torch's public calls"] = geometric_mean(public)
        lines.append((name, *(f"{value:.3f}".removesuffix(".000") for value in kept[name].values())))
    say("\nours / torch (torch's time over ours)")
    heads = ("group", "products", "mean, tuned", "minimum", "mean, heuristic", "mean, of torch's public calls")
    table(heads, lines)
    below = sorted((row for row in groups["all"] if row[tuned] < TARGETS[1].limit), key=lambda row: row[tuned])
    for row in below:
        say(
            f"below {TARGETS[1].limit}: {row[tuned]:.3f} {row['product']} {row['m']} {row['n']} {row['k']} {group(row)}"
        )
    report.put("groups", kept)
    shapes = len({(row["m"], row["n"], row["k"]) for row in groups["all"]})
    judge(TARGETS, {**kept["all"], "shapes": float(shapes)}, report)


def on_gpu(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure the products in an order in which any first part is a cross-section, until the time is up."""
    torch = candidates.torch
    torch.manual_seed(0)
    chosen = spread(PRODUCTS, QUICK_COUNT if quick else len(PRODUCTS))
    rows: list[Row] = []
    failed: dict[str, str] = {}
    ends = time.monotonic() + BUDGET[quick]
    stream = torch.cuda.Stream()
    # On one stream there is nothing to wait for between the libraries, and nothing in a recording that is not its own.
    with torch.cuda.stream(stream), torch.no_grad(), dp.Stream.from_handle(device, stream.cuda_stream):
        for number, product in enumerate(chosen):
            name = f"{product.label} {product.m} {product.n} {product.k} {product.kind} {product.epilogue}"
            if time.monotonic() > ends:
                failed[name] = f"not run: {BUDGET[quick]:.0f} s were up"
                continue
            row = attempt(name, lambda product=product: measure(product, 6 if quick else 18), failed)
            if row is None:
                gc.collect()  # what a traceback holds on to
            else:
                rows.append(row)
                report.put("products", rows)
            if attempt("synchronize", torch.cuda.synchronize, failed) is None and "synchronize" in failed:
                say(f"the GPU is lost after {name}: {failed['synchronize']}")
                break
            torch.cuda.empty_cache()
            attempt("trim", device.trim, failed)
            if number % 10 == 9:
                say(f"{number + 1} of {len(chosen)} products, {ends - time.monotonic():.0f} s left")
    rows.sort(key=lambda row: row["number"])
    say("\nTFLOP/s; ratio is torch's time over ours, autotuned")
    if rows:
        table(("product", "m n k", "dtype, epilogue", "tuned", "heuristic", "torch", "ratio", ""), map(cells, rows))
    for name, why in failed.items():
        say(f"missing: {name}: {why}")
    report.put("missing", failed)
    report.put("cublasLt mapped", mapped("libcublasLt"))
    conclude(rows, report)


def on_host(device: dp.Device, report: Report) -> None:
    """A few small products in f32, by the wall clock, next to NumPy's own matmul."""
    rng = np.random.default_rng(0)
    found = []
    for epilogue, m, n, k in HOST_PRODUCTS:
        x, w, bias = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (n, k), n))
        out = np.empty((m, n), np.float32)
        fields: dict[str, Any] = {"epilogue": dp.Epilogue[epilogue]}
        if epilogue != "NONE":
            fields["bias"] = device.array(bias)
        request = dp.MatmulRequest(a=device.array(x), b=device.array(w).T, out=device.empty((m, n)), **fields)
        ours = statement("ours", "call()", call=dp.prepare(request))
        numpy = statement("numpy.matmul, no epilogue", "matmul(x, w, out=out)", matmul=np.matmul, x=x, w=w.T, out=out)
        seconds, missing = host_race([ours, numpy], device.synchronize, bursts=5, calls=5)
        medians = {name: summary(values)["median"] for name, values in seconds.items()}
        found.append({"m": m, "n": n, "k": k, "epilogue": epilogue, "us": medians, "missing": missing})
        rates = "  ".join(f"{name} {2 * m * n * k / us / 1e3:.1f} GFLOP/s" for name, us in medians.items())
        say(f"f32 {m} {n} {k} {epilogue}: {rates}")
        report.put("host", found)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure and print the table and the targets."""
    if device.is_host:
        on_host(device, report)
        return
    if no_torch is not None:
        say(f"bench_matmul cannot run on {device}: torch, the peer, is missing: {no_torch}")
        report.put("missing", {"torch": no_torch})
        return
    with empty_cache():
        on_gpu(device, quick, report)


if __name__ == "__main__":
    command(main, __doc__)
