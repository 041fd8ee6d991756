"""Stopwatches that the benchmarks share: host time of bursts of calls, and GPU time of recorded runs of calls.

Both take all candidates at once and let them run in turns, each round beginning with another one, so that a drifting
clock and a warming GPU hit all alike. One that raises is taken out with its reason and never ends the run. Nothing here
knows a library under test; torch is imported only where GPU time is taken, for its events and its graph recording.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import math
import statistics
import time
import timeit
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_DELAY, MAX_DELAY = 2e-4, 0.2  # seconds for which the GPU is held back while calls are enqueued
SPARE = 1.5  # of the time that they took the host before
CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, about: an upper bound of the SM clock


@dataclass(frozen=True)
class Candidate:
    """One way to do the work: `burst(n)` does it n times and returns the seconds; `result()` does it once."""

    name: str
    burst: Callable[[int], float]
    result: Callable[[], Any]


def statement(name: str, code: str, **names: Any) -> Candidate:
    """A candidate from an expression: it stands inside the timed loop itself, so that nobody pays for a wrapper."""
    timer = timeit.Timer(code, globals=names)
    compiled = compile(code, name, "eval")
    return Candidate(name, timer.timeit, lambda: eval(compiled, names))


def in_turns(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, name) for all of them in each round, beginning one further every time."""
    order = []
    for number in range(rounds):
        start = number % max(len(names), 1)
        order += [(number, name) for name in (*names[start:], *names[:start])]
    return order


def host_race(
    candidates: Sequence[Candidate], synchronize: Callable[[], None], *, bursts: int, calls: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of host time for one call, one figure for each burst of `calls`, and the reasons of those that failed.

    The clock runs while a burst is enqueued; the device is synchronized between bursts, off the clock. The first round
    is a warm-up and not counted.
    """
    named = {candidate.name: candidate for candidate in candidates}
    seconds: dict[str, list[float]] = {name: [] for name in named}
    failed: dict[str, str] = {}
    gc.collect()
    for number, name in in_turns(list(named), bursts + 1):
        if name in failed:
            continue
        took = attempt(name, lambda burst=named[name].burst: (burst(calls), synchronize()), failed)
        if took is not None and number:
            seconds[name].append(took[0] / calls)
    return {name: values for name, values in seconds.items() if name not in failed}, failed


def gpu_race(
    runs: dict[str, Callable[[int], Any]], *, sets: int, repeats: int, rounds: int
) -> tuple[dict[str, list[float]], str]:
    """Seconds of GPU time for one call of each, and how they were taken: "graph", and of which else.

    `runs[name](i)` enqueues a call on operand set i, on torch's current stream. `repeats` calls, in turns over the
    sets, are recorded as one CUDA graph and replayed between two events, so that no launch from the host is in the
    figures. Of one that cannot be recorded they are enqueued on the stream, while the GPU is held back for longer than
    that takes: then they run one after another as in a graph, unless a call waits for the GPU by itself.
    """
    import torch

    taken = {name: _burst(name, run, sets, repeats) for name, run in runs.items()}
    bursts = {name: burst for name, (burst, _) in taken.items()}
    delays = {name: delay for name, (_, delay) in taken.items() if delay}
    seconds: dict[str, list[float]] = {name: [] for name in bursts}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number, name in in_turns(list(bursts), rounds + 1):
        torch.cuda.synchronize()
        if delay := delays.get(name):
            torch.cuda._sleep(delay)
        start.record()
        bursts[name]()
        end.record()
        end.synchronize()
        if number:  # the first round is a warm-up
            seconds[name].append(start.elapsed_time(end) / 1000 / repeats)
    return seconds, "graph" if not delays else f"graph; on the stream: {', '.join(delays)}"


def _burst(name: str, run: Callable[[int], Any], sets: int, repeats: int) -> tuple[Callable[[], Any], int]:
    """The calls as a graph's replay, or as they are, and then for how many cycles the GPU is to be held back."""
    import torch

    try:
        return _record(run, sets, repeats).replay, 0
    except Exception as error:  # noqa: BLE001 - whatever a library raises under capture
        print(f"    {name} on the stream: {reason(error)}")
    loop = _loop(run, sets, repeats)
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loop()
        took = time.perf_counter() - began
    torch.cuda.synchronize()
    return loop, int(min(max(SPARE * took, MIN_DELAY), MAX_DELAY) * CYCLES_PER_SECOND)


def _loop(run: Callable[[int], Any], sets: int, repeats: int) -> Callable[[], None]:
    def loop() -> None:
        # As many results stay alive as there are sets: fresh outputs then rotate through memory as given ones do.
        alive: collections.deque[Any] = collections.deque(maxlen=sets)
        for turn in range(repeats):
            alive.append(run(turn % sets))

    return loop


def _record(run: Callable[[int], Any], sets: int, repeats: int) -> Any:
    """The calls as a `torch.cuda.CUDAGraph`; they have run before, so handles, workspaces and plans are there."""
    import torch

    graph = torch.cuda.CUDAGraph()
    loop = _loop(run, sets, repeats)
    torch.cuda.synchronize()
    gc.disable()  # a collection during the recording could free memory into it
    try:
        # Relaxed: a library may look up or allocate what it likes meanwhile, as long as it enqueues on this stream.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            loop()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what broke the recording is the better reason
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        gc.enable()
    return graph


def summary(seconds: Sequence[float], unit: float = 1e-6) -> dict[str, float]:
    """Median, quartiles, tenth and ninetieth percentile, best and count, in units of so many seconds."""
    figures = sorted(value / unit for value in seconds)
    at = {"p10": 0.1, "p25": 0.25, "p75": 0.75, "p90": 0.9}
    found = {name: figures[min(int(share * len(figures)), len(figures) - 1)] for name, share in at.items()}
    return {"median": statistics.median(figures), **found, "best": figures[0], "count": float(len(figures))}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


def attempt(name: str, work: Callable[[], Any], missing: dict[str, str]) -> Any:
    """What `work` returns; None, and the reason under its name in `missing`, where it raises."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the run goes on without it
        missing[name] = reason(error)
        return None


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
