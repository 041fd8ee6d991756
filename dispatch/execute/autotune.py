"""Chooses the fastest of several algorithms by timing them.

Plans call it for requests with `autotune=True`; algorithm_cache.py stores the outcome. Candidates take turns on
rotating copies of the operands, so that neither the L2 cache nor a changing clock rate affects the choice.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind._progress import Progress
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dispatch.core.request import Argument, Request
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["OperandCopies", "fastest", "fastest_call", "pick_fastest"]

ROUNDS = 11  # of a race; in each, every remaining candidate launches its graph once
FINALISTS = 4  # the best of the first race, which also run in the others
RACES = 3  # after the first
WARM_SECONDS = 0.15  # of work before a race is timed: clock rates drop under load, depending on the kernel
BURST_SECONDS = 0.002  # of work in one graph, estimated by the candidate's first run
MAX_RUNS = 100  # in one graph
DROP = 1.1  # a candidate this much slower than the best so far is dropped
CALL_SECONDS = 3.0  # the limit of a race of calls that cannot be recorded, unless one turn takes longer
NOISE = 1.01  # medians of repeated measurements of one algorithm differ by up to this much


class OperandCopies:
    """Enough copies of a request's operands that cycling through them always misses the L2 cache."""

    def __init__(self, executor: CudaExecutor, request: Request) -> None:
        operands = {name: tensor for name, tensor, _ in request.tensors() if "." not in name and name not in SCALARS}
        set_bytes = sum(tensor.layout.high - tensor.layout.low for tensor in operands.values()) or 1
        for shape, _, dtype in request.unallocated().values():
            size = dtype.bits
            for extent in shape:
                size *= extent
            set_bytes += size // 8
        # One more set than fills the cache twice: the end of a single large set would still be cached at the next run.
        self.turns = min(1 + -(-2 * executor.device.l2_bytes // set_bytes), 64)
        self._executor = executor
        self._sets = [self._copy(request, operands) for _ in range(self.turns)]

    def _copy(self, request: Request, operands: dict[str, Tensor]) -> tuple[Any, tuple[Argument, ...]]:
        outputs = self._executor.outputs(request)
        clones = {name: self._executor.clone(tensor) for name, tensor in operands.items()}
        if "c" in clones and "out" in operands and operands["c"].ptr == operands["out"].ptr:
            clones["out"] = clones["c"]
        copied = request.replace(**clones) if clones else request
        return (copied, outputs), copied.arguments(outputs)

    def arguments(self, turn: int) -> tuple[Argument, ...]:
        return self._sets[turn % self.turns][1]


SCALARS = ("alpha", "beta")


def fastest(
    executor: CudaExecutor, request: Request, run: Callable[[int, tuple[Argument, ...]], None], count: int
) -> int:
    """The number of the fastest of `count` candidates; `run(number, arguments)` enqueues one of them.

    All run in a race on one set of copies of the request's operands, then the best few on further sets, because an
    algorithm's speed differs from race to race (seen: by 10%, for products of 256 rows). Candidate 0, the library's own
    choice, runs in every race; candidates are compared by their time relative to it.
    """
    bar = Progress(f"autotune {request.describe()}", count + RACES * (ROUNDS + FINALISTS))
    copies = [OperandCopies(executor, request)]
    times = _race(executor, copies[0], run, range(count), bar)
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    ratios = {number: [times[number] / times[0]] for number in finalists}
    for _ in range(RACES):
        try:
            copies.append(OperandCopies(executor, request))  # earlier copies stay alive, so these get other memory
        except OutOfMemory:
            break  # large operands on a small GPU: decide by the races so far
        race_times = _race(executor, copies[-1], run, sorted({0, *ratios}), bar)
        ratios = {
            number: [*previous, race_times[number] / race_times[0]]
            for number, previous in ratios.items()
            if number in race_times
        }
    bar.close()
    return pick_fastest(ratios)


def fastest_call(
    executor: CudaExecutor, request: Request, run: Callable[[int, tuple[Argument, ...]], None], count: int
) -> int:
    """As `fastest`, for candidates that cannot all be recorded, such as routines that synchronize while they run.

    Plain calls take turns on one set of copies, each turn with enough runs to fill a burst. The host's time counts,
    because it recurs at every call. The first turn, which may load kernels, is not counted. If a turn takes seconds,
    one is enough: routines of that duration differ by more than the noise.
    """
    bar = Progress(f"autotune {request.describe()}", ROUNDS + 1)
    copies, timer = OperandCopies(executor, request), _Timer(executor)
    run_seconds = [timer.time(partial(_burst, run, number, copies, 1)) for number in range(count)]
    bar.update(1)
    runs = [max(1, min(MAX_RUNS, int(BURST_SECONDS / seconds))) for seconds in run_seconds]
    times: list[list[float]] = [[] for _ in range(count)]
    spent = 0.0
    for turn in range(ROUNDS):
        for number in (*range(turn % count, count), *range(turn % count)):
            burst = partial(_burst, run, number, copies, runs[number])
            times[number].append(timer.time(burst) / runs[number])
            spent += times[number][-1] * runs[number]
        bar.update(1)
        if spent > CALL_SECONDS:
            break
    bar.close()
    medians = [statistics.median(samples) for samples in times]
    return pick_fastest({number: [median / medians[0]] for number, median in enumerate(medians)})


def pick_fastest(ratios: Mapping[int, Sequence[float]]) -> int:
    """The candidate to use, from the ratios of each candidate's times to those of candidate 0, one for each race.

    It is the candidate with the least mean, if it beats candidate 0 by more than the noise and was not slower in any
    race; else candidate 0.
    """
    means = {number: statistics.fmean(values) for number, values in ratios.items() if max(values) < NOISE}
    winner = min(means, key=means.__getitem__, default=0)
    return winner if means.get(winner, 1.0) * NOISE < 1 else 0


def _race(
    executor: CudaExecutor,
    copies: OperandCopies,
    run: Callable[[int, tuple[Argument, ...]], None],
    numbers: Iterable[int],
    bar: Progress,
) -> dict[int, float]:
    """The median times of candidate 0 and of all others that were not dropped.

    Each candidate is recorded as a graph of many runs, so that the host's time is not measured. The graphs take turns;
    every round starts with another one. The GPU has been busy for a while before: on an idle GPU another candidate may
    win (seen on an H200: one of two kernels was faster by 2% on an idle GPU and slower by 4% under load).
    """
    timer = _Timer(executor)
    graphs: dict[int, tuple[Any, int]] = {}
    for number in numbers:
        run_seconds = timer.time(partial(run, number, copies.arguments(0)))
        runs = max(copies.turns, min(MAX_RUNS, int(BURST_SECONDS / run_seconds)))
        burst = partial(_burst, run, number, copies, runs)
        graphs[number] = executor.capture(burst) or _Plain(burst), runs
        bar.update(1)
    for _ in range(math.ceil(WARM_SECONDS / (BURST_SECONDS * len(graphs)))):
        for graph, _ in graphs.values():
            executor.launch(graph, (), ())
    times: dict[int, list[float]] = {number: [] for number in graphs}
    medians: dict[int, float] = {}
    for turn in range(ROUNDS):
        remaining = list(times)
        first = turn % len(remaining)
        for number in (*remaining[first:], *remaining[:first]):
            graph, runs = graphs[number]
            times[number].append(timer.time(partial(executor.launch, graph, (), ())) / runs)
        medians = {number: statistics.median(samples) for number, samples in times.items()}
        best = min(medians.values())
        times = {n: samples for n, samples in times.items() if n == 0 or medians[n] <= best * DROP}
        bar.update(1)
    return {number: medians[number] for number in times}


def _burst(run: Callable[[int, tuple[Argument, ...]], None], number: int, copies: OperandCopies, runs: int) -> None:
    for turn in range(runs):
        run(number, copies.arguments(turn))


class _Plain:
    """Replaces a graph that could not be recorded because other libraries synchronized the context repeatedly."""

    def __init__(self, burst: Callable[[], None]) -> None:
        self._burst = burst

    def launch(self) -> int:
        self._burst()
        return 0


class _Timer:
    """Times work on the executor's stream with two events."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._stream = executor.stream
        self._events = [driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT) for _ in range(2)]

    def time(self, enqueue: Callable[[], None]) -> float:
        """The GPU's time, in seconds, for the work that `enqueue()` enqueues; waits for that work."""
        handle = self._stream.c_handle.value or 0
        driver.cuEventRecord(self._events[0], handle)
        enqueue()
        driver.cuEventRecord(self._events[1], handle)
        self._stream.synchronize()
        return max(float(driver.cuEventElapsedTime(self._events[0], self._events[1])) / 1000, 1e-7)

    def __del__(self) -> None:
        for event in self._events:
            driver.cuEventDestroy(event)
