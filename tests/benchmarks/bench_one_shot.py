"""Host time of one-shot calls at new addresses each time, beside torch's function for the same op, in the same run.

Small products, bias + GELU, softmax, layer norm, max pooling, convolution and attention in bf16, with `out=` and
without; where torch's function has no `out=`, both are held against the function as it is. The first operand and the
output lie elsewhere at each call. Each candidate is verified against NumPy, then called 300 times off the clock, so
that what is learnt of a call is learnt; then bursts of all candidates alternate, and the median of the bursts counts.
Repeat: `python tests/benchmarks/bench_one_shot.py [--quick] [--device cuda:0|host] [--json FILE]`; 60 s on a GPU
machine, 15 s with --quick. On `host` only this project's own calls run: whether they do, not how fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import one_shot_ops as one_shot
from command import command
from one_shot_ops import BOUND, FRESH, GELU, MM, NAMES, OUT, SAME, TORCH_FRESH, TORCH_OUT, Op
from report import Report, Target, judge, say, table
from timing import Candidate, attempt, host_race, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    import dispatch as dp

TOLERANCE = 1e-2  # of |result - reference| / |reference|: bf16 rounding is about 3e-3
WARM = 300  # calls of each candidate before the clock
OTHERS = tuple(name for name in NAMES if name not in (MM, GELU))
MM_OUT, MM_FRESH = f"{MM}, {TORCH_OUT}", f"{MM}, {TORCH_FRESH}"


def peer_of(op: Op) -> str:
    """torch's candidate that a call with `out=` is held against."""
    return op.named(TORCH_OUT if op.torch_out else TORCH_FRESH)


def targets(ops: list[Op]) -> list[Target]:
    """What is aimed at, op by op."""
    found = [
        Target("matmul, new addresses", f"{MM}, {OUT}", 0.55, "us", MM_OUT),
        Target("matmul, same addresses", SAME, 0.35, "us", MM_OUT),
        Target("matmul, no out=", f"{MM}, {FRESH}", 0.75, "us", MM_FRESH),
        Target("bound call with other operands", BOUND, 0.5, "us", MM_OUT),
        Target("bias + GELU, new addresses", f"{GELU}, {OUT}", 0.4, "us", f"{GELU}, {TORCH_FRESH}"),
    ]
    for op in ops:
        if op.name in OTHERS:
            found.append(Target(f"{op.name}, new addresses", op.named(OUT), 0.5, "us", peer_of(op)))
            found.append(Target(f"{op.name}, no out=", op.named(FRESH), 0.5, "us", op.named(TORCH_FRESH)))
    return found


def verified(candidates: list[Candidate], op: Op, missing: dict[str, str]) -> Iterator[Candidate]:
    """Those that compute what the op does: a call that does nothing must not win."""
    for candidate in candidates:
        result = attempt(candidate.name, lambda run=candidate.result: one_shot.values(run()), missing)
        if result is None:
            continue
        error = np.linalg.norm(result - op.want) / np.linalg.norm(op.want)
        if result.shape == op.want.shape and error < TOLERANCE:  # false for NaN
            yield candidate
        else:
            missing[candidate.name] = f"wrong result: relative error {error:.1e}"


def candidates_of(device: dp.Device, op: Op, many: int, missing: dict[str, str]) -> list[Candidate]:
    """Both sides' calls of an op, as far as they work."""
    found = attempt(op.name, lambda: one_shot.our_candidates(device, op, many), missing) or []
    if not device.is_host:
        found += attempt(f"torch, {op.name}", lambda: one_shot.torch_candidates(op, many), missing) or []
    return list(verified(found, op, missing))


def race(device: dp.Device, ops: list[Op], report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the host time of every candidate; returns the medians in microseconds."""
    missing: dict[str, str] = {}
    many, warm = (16, 5) if device.is_host else (one_shot.MANY, WARM)
    bursts, calls = (3, 5) if device.is_host else (20, 200) if quick else (100, 200)
    figures: dict[str, dict[str, float]] = {}
    for op in ops:  # those of one op in turns with each other: the memory of all at once would be large
        candidates = candidates_of(device, op, many, missing)
        for candidate in candidates:
            attempt(candidate.name, lambda burst=candidate.burst: burst(warm), missing)
            device.synchronize()
        candidates = [candidate for candidate in candidates if candidate.name not in missing]
        seconds, failed = host_race(candidates, device.synchronize, bursts=bursts, calls=calls)
        missing |= failed
        figures |= {name: summary(taken) for name, taken in seconds.items()}
    show(ops, figures, f"host time per call in us, {bursts} bursts of {calls}")
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("one-shot", {"count": bursts, "calls": calls, "us": figures, "missing": missing})
    return {name: figure["median"] for name, figure in figures.items()}


def show(ops: list[Op], figures: dict[str, dict[str, float]], title: str) -> None:
    say(f"\n{title}")
    peers = {op.named(OUT): peer_of(op) for op in ops} | {op.named(FRESH): op.named(TORCH_FRESH) for op in ops}
    peers |= dict.fromkeys((SAME, BOUND), MM_OUT)
    rows = []
    for name, figure in figures.items():
        base = figures.get(peers.get(name, ""), {}).get("median")
        share = f"{figure['median'] / base:.2f}" if base else "-"
        rows.append((name, *(f"{figure[key]:.2f}" for key in ("median", "p25", "p75", "best")), share))
    table(("call", "median", "p25", "p75", "best", "of torch's"), rows)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    ops = one_shot.ops()
    figures = race(device, ops, report, quick)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(targets(ops), figures, report)


if __name__ == "__main__":
    command(main, __doc__)
