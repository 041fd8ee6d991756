"""Choosing an algorithm by timing it: the measurement, and the memory of its outcome on disk.

Plans ask here when a request says `autotune`. Candidates run in turns over rotating copies of the operands, so that
neither the L2 cache nor a drifting clock answers for them. The file is private to the user, written atomically, keyed
by GPU and library version, and ignored and rebuilt where it is corrupt.
"""

from __future__ import annotations

import base64
import json
import math
import statistics
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind._fork import anew
from dispatch.errors import OutOfMemory
from dispatch.execute import private_files as private
from dispatch.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dispatch.core.request import Argument, Request
    from dispatch.device.tensor import Tensor
    from dispatch.execute.executor import CudaExecutor

__all__ = ["Algorithm", "AlgorithmCache", "OperandCopies", "fastest", "steadiest"]

ROUNDS = 11  # of a race; in each, every candidate left runs its graph once
FINALISTS = 4  # of the first race that run in the others
RACES = 3  # after the first
WARM_SECONDS = 0.15  # of work before a race is timed: the clocks fall under load, and not alike for all kernels
BURST_SECONDS = 0.002  # the work of one graph, by the candidate's first run
MAX_RUNS = 100  # in one graph
DROP = 1.1  # a candidate this much slower than the best so far runs no further
NOISE = 1.01  # medians of repeated measurements of one algorithm differ by up to this much
FORMAT = 1


@dataclass(frozen=True)
class Algorithm:
    """A library's algorithm in its own serialized form, and the workspace it was measured with."""

    blob: bytes
    workspace: int


class AlgorithmCache:
    """What autotune found for one GPU model and one library version, in memory and on disk.

    Guarantees: only a file of this user's is believed. What several processes find at once is all kept. Where nothing
    can be written, what was found is known until the process ends.
    """

    def __init__(self, gpu: str, library: str, folder: Path | None = None) -> None:
        name = "".join(c if c.isalnum() else "-" for c in f"{gpu}-{library}")
        self.path = (folder or private.cache_folder()) / f"autotune-{name}.json"
        self._stamp = {"format": FORMAT, "gpu": gpu, "library": library}
        self._lock = threading.Lock()
        anew(self, "_lock", threading.Lock)
        self._known: dict[str, Algorithm] | None = None
        self._found: dict[str, Algorithm] = {}  # by this process

    def get(self, op: str, key: str) -> Algorithm | None:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(f"{op} {key}")

    def put(self, op: str, key: str, algorithm: Algorithm) -> None:
        """Remember an outcome; what other processes have written meanwhile is kept."""
        with self._lock:
            self._found[f"{op} {key}"] = algorithm
            try:
                with private.locked(self.path.parent):
                    self._known = {**self._read(), **self._found}
                    private.write(self.path, self._text(self._known).encode())
            except OSError as error:
                self._known = {**(self._known or {}), **self._found}
                log("not cached", {"path": str(self.path), "cause": error})

    def _read(self) -> dict[str, Algorithm]:
        try:
            stored = json.loads(private.read(self.path))
            if stored["stamp"] != self._stamp:
                return {}
            entries = dict(stored["algorithms"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}  # absent, somebody else's, or damaged: it is rebuilt by the next outcome
        found = ((key, _algorithm(entry)) for key, entry in entries.items())
        return {key: algorithm for key, algorithm in found if algorithm is not None}

    def _text(self, known: dict[str, Algorithm]) -> str:
        entries = {key: [base64.b64encode(a.blob).decode(), a.workspace] for key, a in known.items()}
        return json.dumps({"stamp": self._stamp, "algorithms": entries}, indent=1, sort_keys=True)


def _algorithm(entry: object) -> Algorithm | None:
    """One entry of the file; None where it is damaged, which costs the others nothing."""
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and type(entry[1]) is int):
        return None
    blob, workspace = entry
    if not 0 <= workspace < 1 << 62:
        return None
    try:
        return Algorithm(base64.b64decode(blob, validate=True), workspace)
    except ValueError:
        return None


class OperandCopies:
    """Copies of a request's operands, so many that a turn through them leaves nothing of itself in the L2 cache."""

    def __init__(self, executor: CudaExecutor, request: Request) -> None:
        operands = {name: tensor for name, tensor, _ in request.tensors() if "." not in name and name not in SCALARS}
        once = sum(tensor.layout.high - tensor.layout.low for tensor in operands.values()) or 1
        for shape, _, dtype in request.missing().values():
            size = dtype.bits
            for extent in shape:
                size *= extent
            once += size // 8
        # One set more than fills the cache twice: of a single large set, its end would still be there at the next run.
        self.turns = min(1 + -(-2 * executor.device.l2_bytes // once), 64)
        self._executor = executor
        self._sets = [self._copy(request, operands) for _ in range(self.turns)]

    def _copy(self, request: Request, operands: dict[str, Tensor]) -> tuple[Any, tuple[Argument, ...]]:
        outputs = self._executor.outputs(request)
        twins = {name: self._executor.twin(tensor) for name, tensor in operands.items()}
        if "c" in twins and "out" in operands and operands["c"].ptr == operands["out"].ptr:
            twins["out"] = twins["c"]
        copied = request.replace(**twins) if twins else request
        return (copied, outputs), copied.arguments(outputs)

    def arguments(self, turn: int) -> tuple[Argument, ...]:
        return self._sets[turn % self.turns][1]


SCALARS = ("alpha", "beta")


def fastest(
    executor: CudaExecutor, request: Request, run: Callable[[int, tuple[Argument, ...]], None], count: int
) -> int:
    """The number of the fastest of `count` candidates; `run(number, arguments)` enqueues one of them.

    All race on one set of copies of the request's operands, the best few again on others, because an algorithm's speed
    differs from race to race (seen: by a tenth, for products of 256 rows). The first candidate, which is the library's
    own choice, runs in every race: how the others did against it there is what counts.
    """
    bar = _progress(f"autotune {request.describe()}", count + RACES * (ROUNDS + FINALISTS))
    rehearsals = [OperandCopies(executor, request)]
    times = _race(executor, rehearsals[0], run, range(count), bar)
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    ratios = {number: [times[number] / times[0]] for number in finalists}
    for _ in range(RACES):
        try:
            rehearsals.append(
                OperandCopies(executor, request)
            )  # the others keep their memory, so that this gets another
        except OutOfMemory:
            break  # large operands on a small GPU: what has been seen must do
        again = _race(executor, rehearsals[-1], run, sorted({0, *ratios}), bar)
        ratios = {number: [*seen, again[number] / again[0]] for number, seen in ratios.items() if number in again}
    bar.close()
    return steadiest(ratios)


def steadiest(ratios: Mapping[int, Sequence[float]]) -> int:
    """The candidate to take, by each one's times in the races over the first candidate's.

    That is the one with the least mean, if it was faster than the first by more than the noise on the whole and slower
    in no race; else the first, 0.
    """
    means = {number: statistics.fmean(seen) for number, seen in ratios.items() if max(seen) < NOISE}
    winner = min(means, key=means.__getitem__, default=0)
    return winner if means.get(winner, 1.0) * NOISE < 1 else 0


def _race(
    executor: CudaExecutor,
    rehearsal: OperandCopies,
    run: Callable[[int, tuple[Argument, ...]], None],
    numbers: Iterable[int],
    bar: Any,
) -> dict[int, float]:
    """The median time of the first candidate and of each other that did not fall behind.

    Each is recorded as a graph of many runs, so that the host's time is not what is measured. The graphs take turns,
    every round beginning with another one, on a GPU that has been busy for a while: on a rested one the winner can be
    another (seen on an H200: of two kernels one was faster by 2% at rest and slower by 4% under load).
    """
    timer = _Timer(executor)
    graphs: dict[int, tuple[Any, int]] = {}
    for number in numbers:
        once = timer.time(partial(run, number, rehearsal.arguments(0)))
        runs = max(rehearsal.turns, min(MAX_RUNS, int(BURST_SECONDS / once)))
        burst = partial(_burst, run, number, rehearsal, runs)
        graphs[number] = executor.capture(burst) or _Plain(burst), runs
        bar.update(1)
    for _ in range(math.ceil(WARM_SECONDS / (BURST_SECONDS * len(graphs)))):
        for replay, _ in graphs.values():
            executor.launch(replay, (), ())
    times: dict[int, list[float]] = {number: [] for number in graphs}
    medians: dict[int, float] = {}
    for turn in range(ROUNDS):
        left = list(times)
        first = turn % len(left)
        for number in (*left[first:], *left[:first]):
            replay, runs = graphs[number]
            times[number].append(timer.time(partial(executor.launch, replay, (), ())) / runs)
        medians = {number: statistics.median(samples) for number, samples in times.items()}
        best = min(medians.values())
        times = {n: samples for n, samples in times.items() if n == 0 or medians[n] <= best * DROP}
        bar.update(1)
    return {number: medians[number] for number in times}


def _burst(run: Callable[[int, tuple[Argument, ...]], None], number: int, rehearsal: OperandCopies, runs: int) -> None:
    for turn in range(runs):
        run(number, rehearsal.arguments(turn))


class _Plain:
    """In a graph's place where it could not be recorded, for others waited for the whole context again and again."""

    def __init__(self, burst: Callable[[], None]) -> None:
        self._burst = burst

    def launch(self) -> int:
        self._burst()
        return 0


class _Timer:
    """Two events on the executor's stream."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._stream = executor.stream
        self._events = [driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT) for _ in range(2)]

    def time(self, enqueue: Callable[[], None]) -> float:
        """Seconds on the GPU for what `enqueue()` enqueues."""
        handle = self._stream.c_handle.value or 0
        driver.cuEventRecord(self._events[0], handle)
        enqueue()
        driver.cuEventRecord(self._events[1], handle)
        self._stream.synchronize()
        return max(float(driver.cuEventElapsedTime(self._events[0], self._events[1])) / 1000, 1e-7)

    def __del__(self) -> None:
        for event in self._events:
            driver.cuEventDestroy(event)


class _NoBar:
    def update(self, _: int) -> None:
        """Nobody watches."""

    def close(self) -> None:
        """Nothing was shown."""


def _progress(title: str, total: int) -> Any:
    """A progress bar where a person watches and tqdm is installed."""
    if not sys.stderr.isatty():
        return _NoBar()
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, desc=title, leave=False)
