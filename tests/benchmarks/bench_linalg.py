"""Dense linear algebra beside torch, CuPy and nvmath-python: cuBLAS's and cuSOLVER's routines, in one run.

Tables, by `--only`: `large` matrices (2048 and 4096 rows), time until the GPU is done; the `host` time of a call with
a matrix of 64x64 at new addresses, before and with the wait for the GPU; `batched`, 10,000 matrices of 32x32; `drivers`
of svd and eigh over sizes and batches, beside torch and CuPy, and what autotune of them wins; `scaling`, n = 32 to
16,384 with the share of the GPU's peak, which is a measured product of 8192 rows, and operations counted as in LAPACK's
working note 41. `--drivers` and `--curves` are these two alone, with all of the time.

Each result is held against float64 first. Bursts of all candidates alternate, and the median of the bursts counts. A
ratio is the fastest peer's time over ours: above 1 ours is faster. `solve`, `inv` and their kind wait for no status on
either side, where the peer can leave that out.
Repeat: `python tests/benchmarks/bench_linalg.py [--quick] [--device cuda:0|host] [--json FILE] [--only TABLE,TABLE]
[--drivers] [--curves]`; five minutes at most, whatever is chosen. On `host` the matrices are tiny, peers are NumPy,
SciPy and torch, and it shows whether they run.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from linalg_peers import all_sides
from linalg_race import Case, best, candidates, is_ours, race
from linalg_routines import LOOKS_AT_THE_GPU, OPERANDS, TUNED, operands
from linalg_scaling import drivers, scaling
from report import Report, Target, judge, say
from timing import attempt, geometric_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from linalg_peers import Side
    from linalg_routines import Way

    import dispatch as dp

SHARES = {"large": 105.0, "host": 45.0, "batched": 35.0, "drivers": 40.0, "scaling": 30.0}  # seconds of a table
TABLES = tuple(SHARES)
QUICK = 0.15  # the share of the time that --quick has
SMALL, MANY, CALLS = 64, 4096, 16  # addresses: four times as many as an executor keeps recorded calls for
BATCH, BATCHED = 10_000, (("solve", "cholesky", "eigh", "svd", "qr"), ("lu_factor", "inv"))
SLOW = ("svd", "lstsq, any rank")  # seconds a call where they are large
LARGE_LEAST, LARGE_MEAN, CAPTURED, NOT_CAPTURED, BATCHED_LEAST = 0.98, 1.05, 0.25, 0.6, 1.0
TARGETS = (
    Target("large: the least ratio to the best peer", "large, least", LARGE_LEAST, at_least=True),
    Target("large: geometric mean", "large, mean", LARGE_MEAN, at_least=True),
    Target("host time of what is captured, the most", "host, captured", CAPTURED, "of the best peer's"),
    Target("host time of what is not", "host, not captured", NOT_CAPTURED, "of the best peer's"),
    Target("batched: the least ratio to the best peer", "batched, least", BATCHED_LEAST, at_least=True),
)
US, MS = 1e-6, 1e-3


@dataclass
class Run:
    """What the tables share: libraries, the report, what is missing, and when the time is up."""

    device: dp.Device
    quick: bool
    report: Report
    sides: list[Side]
    scale: float
    missing: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    ends: float = 0.0
    shown: int = 0  # how many of `missing` have been said
    unrun: list[str] = field(default_factory=list)

    @property
    def tiny(self) -> bool:
        return self.device.is_host

    def begin(self, table: str, title: str) -> None:
        self.ends = time.monotonic() + SHARES[table] * self.scale
        gc.collect()
        say(f"\n{title}")

    def left(self, what: object) -> bool:
        """Whether there is time for one more; else it is noted as not run."""
        if time.monotonic() < self.ends:
            return True
        self.unrun.append(str(what))
        return False

    def end(self, table: str, started: float) -> None:
        """Say how long a table took, and what there was no time for."""
        say(f"{table}: {time.monotonic() - started:.0f} s")
        if self.unrun:
            say(f"not run, for the table's time was up: {', '.join(self.unrun)}")
            self.report.put(f"{table}, not run", self.unrun)
            self.unrun = []

    def guarded(self, what: object, work: Callable[[], Any]) -> Any:
        """What `work` gives, and None where it fails, which ends nothing; says what has gone wrong meanwhile."""
        result = attempt(str(what), work, self.missing)
        for name, why in list(self.missing.items())[self.shown :]:
            say(f"  missing: {name}: {why}")
        self.shown = len(self.missing)
        return result


def line(case: object, figures: dict[str, dict[str, float]], unit: float, key: str, peer: str | None) -> str:
    """A case in one line: all candidates' times, and how ours stand to the best peer."""
    base = figures[peer][key] if peer else None
    cells = []
    for name, figure in figures.items():
        ratio = f" ({base / figure[key]:.2f})" if base and is_ours(name) else ""
        cells.append(f"{name} {figure[key] / unit:.4g}{ratio}")
    return f"{case!s:<24} {' | '.join(cells)}"


def compare(run: Run, cases: Iterable[tuple[Case, Callable[[str], Any]]], table: str, unit: float) -> dict[str, float]:
    """Race each case until the GPU is done; prints a line for each, and gives the ratio of the best peer to ours."""
    ratios: dict[str, float] = {}
    rows: dict[str, Any] = {}
    for case, get in cases:
        if not run.left(case):
            continue

        def work(case: Case = case, get: Callable[[str], Any] = get) -> None:
            budget = 0.01 if run.tiny else (0.03 if run.quick else 0.1) * (2 if case.n > 2048 else 1)
            found = candidates(run.device, case, run.sides, get, run.missing, only=lambda way: wanted(way, case))
            figures = race(found, run.device, budget, run.missing, str(case))
            peer, mine = best(figures, "done", mine=False), best(figures, "done", mine=True)
            if peer and mine:
                ratios[str(case)] = figures[peer]["done"] / figures[mine]["done"]
            rows[str(case)] = {"seconds": figures, "peer": peer, "ours": mine, "ratio": ratios.get(str(case))}
            run.report.put(table, {"cases": rows, "missing": run.missing})
            say(line(case, figures, unit, "done", peer))

        run.guarded(case, work)
    run.report.put(table, {"cases": rows, "missing": run.missing})
    summarize(run, table, ratios)
    return ratios


def wanted(way: Way, case: Case) -> bool:
    """Whether it is raced: by the drivers for large matrices 10,000 take minutes, and autotune has its own table."""
    left_out = ("ours", "ours, gesvdp") if case.batch and case.routine == "svd" else ()
    return way.name not in (*left_out, TUNED)


def summarize(run: Run, table: str, ratios: dict[str, float]) -> None:
    if not ratios or run.tiny:
        return
    least = min(ratios, key=lambda case: ratios[case])
    mean, limit = geometric_mean(list(ratios.values())), LARGE_LEAST if table == "large" else BATCHED_LEAST
    run.figures |= {f"{table}, least": ratios[least], f"{table}, mean": mean}
    short = {case: ratio for case, ratio in ratios.items() if ratio < limit}
    say(f"{len(ratios)} cases: geometric mean {mean:.3f}, least {ratios[least]:.3f} ({least})")
    say(f"below {limit}: {', '.join(f'{case} {ratio:.3f}' for case, ratio in short.items()) or 'none'}")


# -- tables ------------------------------------------------------------------------------------------------------------
def large(run: Run) -> None:
    """Each routine at two sizes and dtypes; svd at smaller ones, for it takes seconds."""
    run.begin("large", "LARGE: ms until the GPU is done; behind ours the best peer's time over it")

    def cases() -> Iterable[tuple[Case, Callable[[str], Any]]]:
        sizes = (24,) if run.tiny else (512,) if run.quick else (2048, 4096)
        for n in sizes:
            for dtype in ("float32", "float64"):
                get = operands(n, dtype)
                for routine in OPERANDS:
                    if routine not in SLOW and not (routine == "eigh" and n > 2048):
                        yield Case(routine, n, dtype), get
        get = operands(sizes[0], "complex64")
        for routine in ("gemm", "trsm", "cholesky", "lu_factor", "solve", "qr"):
            yield Case(routine, sizes[0], "complex64"), get
        for dtype in ("float32", "float64"):
            for routine, n in ((SLOW[1], sizes[0] // 2), (SLOW[0], sizes[0] // 2), ("eigh", sizes[-1])):
                yield Case(routine, n, dtype), operands(n, dtype)
        yield Case("svd", sizes[0], "float32"), operands(sizes[0], "float32")

    compare(run, cases(), "large", MS)


def host(run: Run) -> None:
    """The host's time of a small call at new addresses."""
    n, many, calls = (8, 8, 2) if run.tiny else (SMALL, MANY, CALLS)
    run.begin("host", f"HOST: us of the host for one call, {n}x{n} in f32, {many} addresses; bursts of {calls}")
    get, rows, shares = operands(n, "float32"), {}, {}
    for routine in OPERANDS:
        case = Case(routine, n, "float32")
        if not run.left(case):
            continue

        def work(case: Case = case) -> None:
            found = candidates(
                run.device, case, run.sides, get, run.missing, many=many, only=lambda way: way.name != TUNED
            )
            warm = 2 if run.tiny else 40 if case.routine in LOOKS_AT_THE_GPU else 300
            for one in found:  # until plans are recorded, and allocators and their likes have what they need
                attempt(f"{case}: {one.name}", lambda one=one: one.loop(warm), run.missing)
                run.device.synchronize()
            budget = 0.01 if run.tiny else 0.05 if run.quick else 0.25
            figures = race(found, run.device, budget, run.missing, str(case), calls=calls)
            peer, mine = best(figures, "call", mine=False), best(figures, "call", mine=True)
            rows[case.routine] = {"seconds": figures, "peer": peer, "ours": mine}
            run.report.put("host", {"cases": rows, "missing": run.missing})
            say(line(case.routine, figures, US, "call", peer))
            cells = [f"{name} {figure['done'] / US:.4g}" for name, figure in figures.items()]
            say(f"{'  with the wait':<24} {' | '.join(cells)}")
            if peer and mine:
                shares[case.routine] = figures[mine]["call"] / figures[peer]["call"]

        run.guarded(f"host, {routine}", work)
    run.report.put("host", {"cases": rows, "missing": run.missing})
    for name, limit in (("captured", CAPTURED), ("not captured", NOT_CAPTURED)):
        of = {r: share for r, share in shares.items() if (r in LOOKS_AT_THE_GPU) is (name == "not captured")}
        if of and not run.tiny:
            run.figures[f"host, {name}"] = max(of.values())
            short = ", ".join(f"{routine} {share:.2f}" for routine, share in of.items() if share > limit)
            mean = geometric_mean(list(of.values()))
            say(f"{name}: {len(of)} routines, mean {mean:.2f} of the best peer's; above {limit}: {short or 'none'}")


def batched(run: Run) -> None:
    """Ten thousand small matrices."""
    n, batch = (6, 4) if run.tiny else (32, 1000 if run.quick else BATCH)
    run.begin("batched", f"BATCHED: ms for {batch} matrices of {n}x{n}; behind ours the best peer's time over it")

    def cases() -> Iterable[tuple[Case, Callable[[str], Any]]]:
        gets = {dtype: operands(n, dtype, (batch,), right=1) for dtype in ("float32", "float64")}
        for group in BATCHED:
            for dtype, get in gets.items():
                for routine in group:
                    yield Case(routine, n, dtype, (batch,)), get

    compare(run, cases(), "batched", MS)


def main(device: dp.Device, quick: bool, report: Report, only: list[str]) -> None:
    """Measure the tables that are wanted, and print the targets."""
    absent: dict[str, str] = {}
    sides = all_sides(device, absent)
    for name, why in absent.items():
        say(f"missing: {name}: {why}")
    report.put("peers", {"found": [side.name for side in sides], "missing": absent})
    chosen = [table for table in TABLES if table in only]
    scale = sum(SHARES.values()) / sum(SHARES[table] for table in chosen) * (QUICK if quick else 1.0)
    run = Run(device, quick, report, sides, scale)
    work = {"large": large, "host": host, "batched": batched, "drivers": drivers, "scaling": scaling}
    with np.errstate(all="ignore"):
        for table in chosen:
            started = time.monotonic()
            run.guarded(table, lambda table=table: work[table](run))
            run.end(table, started)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, run.figures, report)


if __name__ == "__main__":
    command(main, __doc__, tables=TABLES, shortcuts={"drivers": "drivers", "curves": "scaling"})
