"""Latency and bandwidth from measured times of collectives, and what they say of more GPUs: a prediction.

`fit` finds both; `predict` has NCCL's ring and tree over N GPUs in nodes of eight. It calls nothing. What the
numbers are and where they come from stands in docs/scaling.md, whose tables `python tests/benchmarks/bench_scaling.py`
prints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

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
KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
SMALL, LARGE = 8 * KIB, 16 * MIB  # up to which size times are a latency, and from which on they grow with the bandwidth
GPUS = (8, 64, 1024, 16384)
# Microseconds of a call on two H200 by size: driver 580.159.04, NCCL 2.28.9, one process with a thread for each GPU,
# calls captured into graphs, NVLink multicast off; the least of five launches, of the GPU that took longer.
MEASURED = {
    "all_reduce": (5.7, 5.9, 6.6, 7.3, 8.9, 15.2, 34.0, 77.3, 254.7, 922.5, 3329.1),
    "all_gather": (5.3, 5.4, 5.9, 6.2, 6.8, 10.5, 25.9, 53.3, 157.7, 555.0, 1982.2),
    "reduce_scatter": (5.0, 5.2, 5.6, 5.9, 7.0, 10.3, 24.5, 53.0, 175.6, 626.4, 2152.1),
    "broadcast": (4.5, 4.8, 5.1, 5.3, 6.2, 10.7, 23.7, 59.5, 206.4, 775.6, 2958.8),
    "all_to_all": (6.2, 6.3, 6.8, 7.7, 8.0, 12.5, 19.6, 51.7, 142.9, 485.8, 1637.5),
}


class Fit(NamedTuple):
    """Seconds of a call of no bytes, and bytes a second of the bus; by how much the line of both is off, relative.

    That is the largest error with its sign, below 0 where the line is quicker than the data: of the sizes up to SMALL,
    of those in between, and of those from LARGE on.
    """

    latency: float
    bandwidth: float
    off: tuple[float, float, float]


def bus(op: str, ranks: int) -> float:
    """The bytes that cross the bus for each byte of the larger operand, as nccl-tests has it."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(op, (ranks - 1) / ranks)


def fit(op: str, sizes: Sequence[int], seconds: Sequence[float], ranks: int) -> Fit:
    """The bandwidth is the slope of the sizes from LARGE on, the latency what is left of those up to SMALL.

    Both have the least sum of squared relative errors, and are above 0. The line of large sizes begins where it likes;
    only its slope is kept.
    """
    of, crossed, times = np.array(sizes), np.array(sizes) * bus(op, ranks), np.array(seconds)
    small, large = of <= SMALL, of >= LARGE
    lines = np.stack([1 / times, crossed / times], 1)[large]
    (_, slope), *_ = np.linalg.lstsq(lines, np.ones(len(lines)), rcond=None)
    slope = max(float(slope), 1e-15)
    left, weight = (times - crossed * slope)[small], times[small] ** -2
    latency = max(float((left * weight).sum() / weight.sum()), 1e-9)
    off = (latency + crossed * slope) / times - 1
    return Fit(latency, 1 / slope, (worst(off[small]), worst(off[~small & ~large]), worst(off[large])))


def worst(errors: NDArray[np.float64]) -> float:
    """The largest of them by amount, with its sign; 0 of none."""
    return max(errors.tolist(), key=abs, default=0.0)


def seconds_measured(op: str) -> list[float]:
    """What stands in MEASURED, in seconds."""
    return [each * 1e-6 for each in MEASURED[op]]


def measured(op: str, ranks: int = 2) -> Fit:
    """The fit of what stands in MEASURED."""
    return fit(op, SIZES, seconds_measured(op), ranks)


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
    steps = 1 if op == "all_to_all" else steps_of(op, of_ranks, 1)[0]
    base = max(0.0, found.latency - steps * STEPS["ring"]["nvlink"][0])
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


def signed(error: float) -> str:
    """A relative error in whole percent, with its sign."""
    return f"{error:+.0%}" if round(error, 2) else "0%"


def sized(nbytes: int) -> str:
    """A size in the largest unit that leaves it whole."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def of_sizes(name: str, sizes: Sequence[int]) -> list[str]:
    """The two lines with which a table of figures by size begins."""
    return [f"| {name} | {' | '.join(map(sized, sizes))} |", "|---|" + "---|" * len(sizes)]


def measured_table(sizes: Sequence[int], times: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of Markdown: µs of each op by size."""
    rows = [f"| {op} | {' | '.join(f'{each * 1e6:.1f}' for each in row)} |" for op, row in times.items()]
    return [*of_sizes("µs, measured", sizes), *rows]


def fits_table(fits: Mapping[str, Fit]) -> list[str]:
    """Lines of Markdown: latency and bandwidth of each op, and how far the line of both is off."""
    ranges = f"off up to {sized(SMALL)} | in between | from {sized(LARGE)} on"
    lines = [f"| | latency | bandwidth | {ranges} |", "|---|---|---|---|---|---|"]
    for op, one in fits.items():
        off = " | ".join(map(signed, one.off))
        lines.append(f"| {op} | {one.latency * 1e6:.1f} µs | {one.bandwidth / 1e9:.0f} GB/s | {off} |")
    return lines


def errors_table(
    sizes: Sequence[int], times: Mapping[str, Sequence[float]], fits: Mapping[str, Fit], ranks: int = 2
) -> list[str]:
    """Lines of Markdown: how far `predict` is off for the GPUs that were measured, by a ring."""
    lines = of_sizes(f"predicted for {ranks} GPUs beside measured", sizes)
    for op, row in times.items():
        found = [predict(op, "ring", size, ranks, fits[op], ranks) for size in sizes]
        cells = (signed(one / each - 1) for one, each in zip(found, row, strict=True))
        lines.append(f"| {op} | {' | '.join(cells)} |")
    return lines


def predictions_table(op: str, fits: Mapping[str, Fit], of_ranks: int = 2) -> list[str]:
    """Lines of Markdown: the times that are predicted, by GPUs and size, for each algorithm."""
    sizes = (8, 64 * KIB, MIB, 64 * MIB, 1024 * MIB)
    heads = " | ".join(map(sized, sizes))
    lines = [f"| {op}, predicted | {heads} | bus bandwidth of 1 GiB |", "|---|" + "---|" * (len(sizes) + 1)]
    for ranks in GPUS:
        for algorithm in algorithms(op):
            times = [predict(op, algorithm, size, ranks, fits[op], of_ranks) for size in sizes]
            name = f"{ranks:,} GPUs" + (f", {algorithm}" if len(algorithms(op)) > 1 else "")
            busy = sizes[-1] * bus(op, ranks) / times[-1] / 1e9
            lines.append(f"| {name} | {' | '.join(map(spelled, times))} | {busy:.3g} GB/s |")
    return lines


# What others have published: GPUs, bytes, the figure (the middle of two) and its unit, its words, the source.
PUBLISHED = (
    ("8 H100, ring, 2 to 4 GiB", 8, 4 << 30, 367.5, "GB/s", "365 to 370 GB/s", "nccl#1455"),
    ("8 H100, NVLS off, up to 16 GiB", 8, 16 << 30, 369.0, "GB/s", "369 GB/s", "nccl-tests#309"),
    ("16 H20, 2 nodes, 8 B", 16, 8, 47.6, "µs", "47.6 µs", "nccl#1244"),
    ("256 A100, 32 nodes, 8 B", 256, 8, 63.0, "µs", "63.0 µs", "nccl#652"),
    ("1,984 H200, 248 nodes, 512 MiB", 1984, 512 << 20, 350.0, "GB/s", "about 350 GB/s", "nccl-tests#283"),
)


def published_table(fits: Mapping[str, Fit], of_ranks: int = 2) -> list[str]:
    """Lines of Markdown: all_reduce as published, as predicted from the fit, and the one beside the other."""
    lines = ["| all_reduce | published | source | predicted here | off |", "|---|---|---|---|---|"]
    for name, ranks, size, found, unit, said, source in PUBLISHED:
        fit_ = fits["all_reduce"]
        times = {each: predict("all_reduce", each, size, ranks, fit_, of_ranks) for each in algorithms("all_reduce")}
        algorithm = min(times, key=times.__getitem__)
        took = times[algorithm]
        rate = size * bus("all_reduce", ranks) / took / 1e9
        told, off = (f"{rate:.0f} GB/s", rate / found) if unit == "GB/s" else (spelled(took), took * 1e6 / found)
        repository, number = source.split("#")
        link = f"[{source}](https://github.com/NVIDIA/{repository}/issues/{number})"
        lines.append(f"| {name} | {said} | {link} | {told}, {algorithm} | {signed(off - 1)} |")
    return lines
