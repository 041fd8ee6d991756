"""Host time of streams of products whose shapes change: matmul(a, b, out=) in bf16 beside torch.mm(out=).

5,000 calls each of Zipf's law over 500 shapes, uniform over 500, and growing by one with every call. Both sides run
streams of the same kind over different shapes, so that neither finds the library's caches warm, each side first once;
the figures are of both orders together. Told are the total, the worst call, and of each shape the first call, the
second, and the slowest after the first. Repeat:
`python tests/benchmarks/bench_streams.py [--quick] [--device cuda:0|host] [--json FILE]`; 30 s on a GPU machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import shape_streams
from command import command
from report import Report, Target, judge, say, table
from shape_streams import PATTERNS, Timed
from timing import attempt, summary

if TYPE_CHECKING:
    import dispatch as dp

OURS, TORCH = "dispatch", "torch.mm(out=)"
SIDES = (OURS, TORCH)
TOTAL, WORST = "total, ms", "worst call, us"
FIRST, SECOND, SLOWEST = "first call of a shape", "second call", "slowest call but the first"
TURNS = (FIRST, SECOND, SLOWEST)


def key(side: str, pattern: str, figure: str) -> str:
    return f"{side}, {pattern}: {figure}"


def targets() -> list[Target]:
    """What is aimed at, pattern by pattern."""
    found = []
    for pattern in PATTERNS:
        mine, theirs = ({f: key(side, pattern, f) for f in (TOTAL, *TURNS)} for side in SIDES)
        found.append(Target(f"{pattern}: all calls", mine[TOTAL], 1.0, "ms", theirs[TOTAL]))
        found.append(Target(f"{pattern}: the first call of a shape, median", mine[FIRST], 1.6, "us", theirs[FIRST]))
        if pattern != shape_streams.GROWING:  # there every shape is called once
            found += [Target(f"{pattern}: {t}, median", mine[t], 1.3, "us", theirs[t]) for t in (SECOND, SLOWEST)]
    return found


def measure(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the figures of all streams, of both sides; returns totals, worst calls and medians."""
    count, pool, largest = (60, 20, 64) if device.is_host else (1500, 150, 256) if quick else (5000, 500, 256)
    dtype = "f32" if device.is_host else "bf16"
    sides = [OURS] if device.is_host else list(SIDES)
    missing: dict[str, str] = {}
    # One part to warm up with, and for each of two orders one for each side.
    streams = shape_streams.parts(count, pool, largest, 2 * len(sides) + 2, seed=11)
    found: dict[str, dict[str, list[Timed]]] = {pattern: {} for pattern in streams}
    runs = {OURS: lambda stream: shape_streams.ours(device, dtype, stream), TORCH: shape_streams.torchs}
    for pattern, left in streams.items():
        for side in sides:  # handles are made, and the usual kernels loaded
            attempt(f"{side}, {pattern}", lambda s=side, left=left: runs[s](left.pop()), missing)
        for order in (sides, sides[::-1]):
            for side in order:
                name = f"{side}, {pattern}"
                taken = attempt(name, lambda s=side, left=left: runs[s](left.pop()), missing)
                if taken is not None:
                    found[pattern].setdefault(side, []).append(taken)
    figures: dict[str, float] = {}
    kept: dict[str, object] = {}
    say(f"\n{count} products a stream, {pool} shapes up to {largest}, both orders together; us but for the total")
    rows = []
    for pattern, by_side in found.items():
        for side, timed in by_side.items():
            numbers = numbers_of(timed)
            kept[f"{side}, {pattern}"] = numbers
            figures |= {key(side, pattern, name): value for name, value in flat(numbers).items()}
            rows.append((pattern, side, *cells(numbers)))
    table(("stream", "", TOTAL, WORST, *(f"{turn}, median (p90)" for turn in TURNS), ""), rows)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("streams", {"calls": count, "shapes": pool, "figures": kept, "missing": missing})
    return figures


def numbers_of(timed: list[Timed]) -> dict[str, object]:
    """The figures of a side over one kind of stream."""
    seconds = [value for one in timed for value in one.seconds]
    turns = [[value for one in timed for value in one.by_turn()[number]] for number in range(len(TURNS))]
    numbers: dict[str, object] = {TOTAL: 1e3 * sum(seconds) / len(timed), WORST: 1e6 * max(seconds)}
    return numbers | {name: summary(values) for name, values in zip(TURNS, turns, strict=True) if values}


def flat(numbers: dict[str, object]) -> dict[str, float]:
    """Medians in the place of summaries."""
    return {name: v["median"] if isinstance(v, dict) else float(v) for name, v in numbers.items()}  # type: ignore[arg-type]


def cells(numbers: dict[str, object]) -> list[str]:
    found = [f"{numbers[TOTAL]:.2f}", f"{numbers[WORST]:.0f}"]
    for turn in TURNS:
        figure = numbers.get(turn)
        found.append(f"{figure['median']:.1f} ({figure['p90']:.1f})" if isinstance(figure, dict) else "-")
    return [*found, ""]


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    figures = measure(device, report, quick)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(targets(), figures, report)


if __name__ == "__main__":
    command(main, __doc__)
