"""Candidates of bench_linalg: one routine in every library's ways, held against float64, and timed in turns.

A candidate is an expression in a loop of its own. The clock gives two figures for a burst: when all calls had come
back, and when the GPU was done with them. Bursts are as long as a budget of seconds says, so that a run ends in time.
"""

from __future__ import annotations

import itertools
import time
import timeit
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from linalg_peers import arithmetic, wide
from linalg_routines import CHECKS, IN_PLACE, OPERANDS, OURS, bound
from timing import attempt, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from linalg_peers import Side
    from linalg_routines import Way

    import dispatch as dp

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDS, FEWEST = 9, 3  # bursts of a candidate
LONG = 1.0  # seconds of a call that is checked once and has one burst, and whose variant with `out=` is left out
CALLS = 500  # of a burst, at most


@dataclass(frozen=True)
class Timed:
    """A candidate: `loop(n)` calls it n times and returns the seconds; `first` is how long its first call took."""

    name: str
    loop: Callable[[int], float]
    side: Side
    first: float = 0.0


@dataclass(frozen=True)
class Case:
    """A routine over matrices of one size."""

    routine: str
    n: int
    dtype: str  # NumPy's name
    batch: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.batch, self.n, self.n))) if self.batch else str(self.n)
        return f"{self.routine} {SHORT[self.dtype]} {shape}"


SHORT = {"float32": "f32", "float64": "f64", "complex64": "c64", "complex128": "c128"}


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def candidates(
    device: dp.Device,
    case: Case,
    sides: Sequence[Side],
    get: Callable[[str], Array],
    missing: dict[str, str],
    *,
    many: int = 1,
    only: Callable[[Way], bool] = lambda _: True,
) -> list[Timed]:
    """The ways of all sides that are right, for operands of `get`; with `many` each call has other addresses."""
    kind, others = OPERANDS[case.routine]
    xp, host = arithmetic(device), {"x": get(kind), **{name: get(other) for name, other in others.items()}}
    exact = {name: wide(xp, values) for name, values in host.items()}
    found = []
    for side in sides:
        ways = [way for way in side.ways.get(case.routine, ()) if only(way)]
        if not ways:
            continue
        names = attempt(f"{case}: {side.name}", lambda side=side: operand_names(side, host), missing)
        for way in ways if names is not None else ():
            label = f"{case}: {way.name}"
            if way.name.endswith("out=") and found and found[-1].side is side and found[-1].first > LONG:
                continue

            def build(side: Side = side, way: Way = way, names: dict[str, Any] = names) -> Timed:
                return candidate(device, case, side, way, names, (xp, exact), host["x"], many)

            one = attempt(label, build, missing)
            found += [one] if one is not None else []
    return found


def operand_names(side: Side, host: dict[str, Array]) -> dict[str, Any]:
    return side.names | {name: side.array(values) for name, values in host.items()}


def candidate(
    device: dp.Device,
    case: Case,
    side: Side,
    way: Way,
    names: dict[str, Any],
    right: tuple[Any, Any],
    values: Array,
    many: int,
) -> Timed:
    """One way, after its result was found right: ValueError where it is not."""
    names = dict(names)
    with side.setting():
        device.synchronize()
        if way.before:
            exec(way.before, names)
        plain, took = way.code.format(x="x", out=""), 0.0
        for again in range(1 if case.routine in IN_PLACE else 2):
            if again and took < LONG:  # else it may have been that kernels were loaded or compiled
                break
            started = time.perf_counter()
            first = eval(plain, names)
            device.synchronize()
            took = time.perf_counter() - started
        check(device, case, first, right)
        x, out = "x", ""
        outputs = listed(first) if way.out else []
        if many > 1:
            copies = side.like(names["x"], many)
            for one in copies:
                put(one, names["x"], values)
            names["next_x"], x = itertools.cycle(copies).__next__, "next_x()"
            outputs = [itertools.cycle(side.like(output, many)).__next__ for output in outputs]
        names |= {f"out_{place}": output for place, output in enumerate(outputs)}
        if way.out:
            call = "()" if many > 1 else ""
            out = way.out.format(*(f"out_{place}{call}" for place in range(len(outputs))))
        code = way.code.format(x=x, out=out)
        if case.routine not in IN_PLACE and code != plain and took < LONG:
            check(device, case, eval(code, names), right)
        return Timed(way.name, timeit.Timer(code, globals=names).timeit, side, took)


def put(target: Any, source: Any, values: Array) -> None:
    """Copy elements within a library, or from the host."""
    if hasattr(target, "copy_from"):
        target.copy_from(values)
    elif hasattr(target, "copy_"):
        target.copy_(source)
    else:
        target[...] = source


def check(device: dp.Device, case: Case, result: Any, right: tuple[Any, Any]) -> None:
    device.synchronize()
    xp, exact = right
    results = [wide(xp, value) for value in listed(result)]
    error, limit = CHECKS[case.routine](xp, exact, results), bound(case.routine, case.n, case.dtype)
    if not error <= limit:  # false for NaN
        raise ValueError(f"wrong result: {error:.1e} where {limit:.1e} is the bound")


# -- the race ----------------------------------------------------------------------------------------------------------
def race(
    found: Sequence[Timed], device: dp.Device, budget: float, missing: dict[str, str], case: str, *, calls: int = 0
) -> dict[str, dict[str, float]]:
    """Median seconds of a call by name: "call" until it is back, "done" until the GPU is, over some bursts in turns.

    A burst has so many `calls`, or as many as the budget of seconds of a candidate allows.
    """
    named = {one.name: one for one in found}
    counts: dict[str, tuple[int, int]] = {}
    failed: dict[str, str] = {}

    def burst(name: str, count: int) -> tuple[float, float]:
        one = named[name]
        with one.side.setting():
            device.synchronize()
            start = time.perf_counter()
            called = one.loop(count)
            device.synchronize()
            return called, time.perf_counter() - start

    for name, timed in named.items():
        one = timed.first
        if one < LONG:
            for _ in range(2):  # the second one is warm
                taken = attempt(name, lambda name=name: burst(name, calls or 1), failed)
                one = max(taken[1], 1e-7) if taken else 0.0
        if name in failed:
            continue
        rounds = 1 if one > LONG else max(FEWEST, min(ROUNDS if not calls else 60, int(budget / one)))
        counts[name] = rounds, calls or max(1, min(CALLS, int(budget / rounds / one)))
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in counts}
    for number, name in in_turns(list(counts), max((rounds for rounds, _ in counts.values()), default=0)):
        rounds, count = counts[name]
        if number < rounds and name not in failed:
            seconds = attempt(name, lambda name=name, count=count: burst(name, count), failed)
            took[name] += [] if seconds is None else [(seconds[0] / count, seconds[1] / count)]
    missing |= {f"{case}: {name}": why for name, why in failed.items()}
    return {
        name: {
            "call": float(np.median([pair[0] for pair in pairs])),
            "done": float(np.median([pair[1] for pair in pairs])),
            "bursts": float(len(pairs)),
            "calls": float(counts[name][1]),
        }
        for name, pairs in took.items()
        if name not in failed
    }


def is_ours(name: str) -> bool:
    return name.partition(",")[0] == OURS


def best(figures: dict[str, dict[str, float]], key: str, *, mine: bool) -> str | None:
    """The fastest of ours or of the peers."""
    names = [name for name in figures if is_ours(name) is mine]
    return min(names, key=lambda name: figures[name][key]) if names else None
