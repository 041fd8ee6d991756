"""A line through measured times of collectives, and what it says of more GPUs than were measured: a prediction.

`fit` finds a latency and a bandwidth; `predict` has NCCL's ring and tree over N GPUs in nodes of eight. It calls
nothing. What the numbers are and where they come from stands in docs/scaling.md, whose tables `python
tests/benchmarks/bench_scaling.py` prints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

NODE = 8  # GPUs
NICS, NIC = 8, 47e9  # of a node, and bytes a second of each, NDR: https://github.com/NVIDIA/nccl-tests/issues/290
# Seconds of a step, as NCCL's own choice between its algorithms counts them: https://github.com/NVIDIA/nccl, the file
# src/graph/tuning.cc, by protocol: LL, LL128, Simple. Over NVLink and over a network.
STEPS = {
    "ring": {"nvlink": (0.47e-6, 1.9e-6, 3.4e-6), "network": (2.7e-6, 4.0e-6, 9.6e-6)},
    "tree": {"nvlink": (0.52e-6, 1.2e-6, 28e-6), "network": (5.0e-6, 8.5e-6, 50e-6)},
}
SHARES = {"ring": (0.25, 0.92, 1.0), "tree": (0.9 / 3.8, 0.9 * 0.92, 0.9)}  # of the bandwidth, by the same protocols
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
GPUS = (8, 64, 1024, 16384)
# Bus bandwidth in GB/s of two H100s by size: medians, a process for each, NVLink multicast off (docs/collectives.md).
MEASURED = {
    "all_reduce": (1.8, 27.7, 206.0, 293.0, 326.0),
    "all_gather": (0.9, 14.2, 149.0, 238.0, 271.0),
    "reduce_scatter": (0.9, 15.0, 155.0, 234.0, 267.0),
    "all_to_all": (1.0, 17.1, 154.0, 256.0, 310.0),
    "broadcast": (1.8, 26.8, 282.0, 357.0, 369.0),
}


class Fit(NamedTuple):
    """Seconds of a call of no bytes, bytes a second of the bus, and by how much the line is off at most, relative."""

    latency: float
    bandwidth: float
    off: float


def bus(op: str, ranks: int) -> float:
    """The bytes that cross the bus for each byte of the larger operand, as nccl-tests has it."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(op, (ranks - 1) / ranks)


def fit(op: str, sizes: tuple[int, ...], seconds: list[float], ranks: int) -> Fit:
    """The line whose relative errors have the least sum of squares; both numbers above 0."""
    crossed, times = np.array(sizes) * bus(op, ranks), np.array(seconds)
    lines = np.stack([1 / times, crossed / times], 1)
    (latency, slope), *_ = np.linalg.lstsq(lines, np.ones(len(times)), rcond=None)
    latency, slope = max(float(latency), 1e-9), max(float(slope), 1e-15)
    off = np.abs((latency + crossed * slope) / times - 1).max()
    return Fit(latency, 1 / slope, float(off))


def measured(op: str, ranks: int = 2) -> Fit:
    """The fit of what is in docs/collectives.md."""
    return fit(op, SIZES, [n * bus(op, ranks) / (b * 1e9) for n, b in zip(SIZES, MEASURED[op], strict=True)], ranks)


def steps_of(op: str, ranks: int, nodes: int) -> tuple[int, int]:
    """How many steps of a ring go over NVLink, and how many over the network."""
    times = 2 if op == "all_reduce" else 1
    between = nodes - 1 if nodes > 1 else 0
    return times * (ranks - 1 - between), times * between


def predict(op: str, algorithm: str, nbytes: int, ranks: int, found: Fit, of_ranks: int = 2) -> float:
    """Seconds of a collective over so many GPUs, by the protocol of NCCL's that is quickest for the size.

    What a call costs beside its steps is the measured latency without the steps of the measured ring; NVLink has the
    measured bandwidth, and a node's network shares out what its adapters have.
    """
    nodes = max(1, ranks // NODE)
    bandwidth = found.bandwidth if nodes == 1 else min(found.bandwidth, NICS * NIC)
    base = max(0.0, found.latency - steps_of(op, of_ranks, 1)[0] * STEPS["ring"]["nvlink"][0])
    if op == "all_to_all":  # each pair for itself: what leaves the node goes through the GPU's own adapter
        inside, outside = min(ranks, NODE) - 1, ranks - min(ranks, NODE)
        time = max(nbytes / ranks * inside / found.bandwidth, nbytes / ranks * outside / NIC)
        return base + time + STEPS["ring"]["network" if outside else "nvlink"][0]
    best = math.inf
    for protocol in range(3):
        near, far = (STEPS[algorithm][link][protocol] for link in ("nvlink", "network"))
        share = SHARES[algorithm][protocol] * bandwidth
        if algorithm == "ring":
            inside, outside = steps_of(op, ranks, nodes)
            time = inside * near + outside * far + nbytes * bus(op, ranks) / share
        else:  # up and down: the tree of nodes, a chain in each of them
            time = 2 * ((min(ranks, NODE) - 1) * near + math.log2(nodes) * far) + nbytes * 2 / share
        best = min(best, time)
    return base + best


def algorithms(op: str) -> tuple[str, ...]:
    """Those that NCCL has for an op, of ring and tree."""
    return ("ring", "tree") if op == "all_reduce" else ("ring",)


def spelled(seconds: float) -> str:
    """A time in µs or ms, with three digits."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 9.995e-4 else f"{seconds * 1e3:.3g} ms"


def fits_table(fits: dict[str, Fit]) -> list[str]:
    """Lines of Markdown: latency and bandwidth of each op."""
    lines = ["| | latency | bandwidth | off by at most |", "|---|---|---|---|"]
    for op, one in fits.items():
        lines.append(f"| {op} | {one.latency * 1e6:.1f} µs | {one.bandwidth / 1e9:.0f} GB/s | {one.off:.0%} |")
    return lines


def predictions_table(op: str, fits: dict[str, Fit]) -> list[str]:
    """Lines of Markdown: the times that are predicted, by GPUs and size, for each algorithm."""
    sizes = (8, 64 << 10, 1 << 20, 64 << 20, 1 << 30)
    heads = ("8 B", "64 KiB", "1 MiB", "64 MiB", "1 GiB")
    lines = [f"| {op}, predicted | {' | '.join(heads)} | bus bandwidth of 1 GiB |", "|---|" + "---|" * (len(sizes) + 1)]
    for ranks in GPUS:
        for algorithm in algorithms(op):
            times = [predict(op, algorithm, size, ranks, fits[op]) for size in sizes]
            name = f"{ranks:,} GPUs" + (f", {algorithm}" if len(algorithms(op)) > 1 else "")
            busy = sizes[-1] * bus(op, ranks) / times[-1] / 1e9
            lines.append(f"| {name} | {' | '.join(map(spelled, times))} | {busy:.3g} GB/s |")
    return lines


# What others have published, with the source; GPUs, bytes, what was measured and in which unit.
PUBLISHED = (
    ("8 H100, ring, 2 to 4 GiB", 8, 4 << 30, "ring", "365 to 370 GB/s", "nccl#1455"),
    ("8 H100, NVLS off, up to 16 GiB", 8, 16 << 30, "ring", "369 GB/s", "nccl-tests#309"),
    ("16 H20, 2 nodes, 8 B", 16, 8, "tree", "47.6 µs", "nccl#1244"),
    ("256 A100, 32 nodes, 8 B", 256, 8, "tree", "63.0 µs", "nccl#652"),
    ("1,984 H200, 248 nodes, 512 MiB", 1984, 512 << 20, "tree", "about 350 GB/s", "nccl-tests#283"),
)


def published_table(fits: dict[str, Fit]) -> list[str]:
    """Lines of Markdown: all_reduce as published, and as predicted from the fit."""
    lines = ["| all_reduce | published | source | predicted here |", "|---|---|---|---|"]
    for name, ranks, size, _, said, source in PUBLISHED:
        times = {each: predict("all_reduce", each, size, ranks, fits["all_reduce"]) for each in ("ring", "tree")}
        algorithm = min(times, key=times.__getitem__)
        found = times[algorithm]
        is_rate = "GB/s" in said
        told = f"{size * bus('all_reduce', ranks) / found / 1e9:.0f} GB/s" if is_rate else spelled(found)
        repository, number = source.split("#")
        link = f"[{source}](https://github.com/NVIDIA/{repository}/issues/{number})"
        lines.append(f"| {name} | {said} | {link} | {told}, {algorithm} |")
    return lines
