"""Two tables of bench_linalg: what the choice of a driver wins, and how routines scale with the size of a matrix."""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING, Any

import numpy as np
from command import empty_cache
from linalg_race import SHORT, Case, Timed, best, candidates, race
from linalg_routines import TUNED, operands
from report import say
from timing import attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench_linalg import Run

BATCHES = {
    "eigh": ((1000, 16), (1000, 32), (100, 64), (100, 128), (20, 256)),
    "svd": ((100, 16), (100, 32), (20, 64), (20, 128), (4, 256)),
}
TOO_LONG = 2.5  # seconds of one call above which a driver is not asked for the next size
BLOCK = 256  # rows of what large matrices are made of
PEAK = 8192
FLOPS: dict[str, Callable[[float], float]] = {  # LAPACK's working note 41
    "gemm": lambda n: 2 * n**3,
    "cholesky": lambda n: n**3 / 3 + n**2 / 2 + n / 6,
    "lu_factor": lambda n: 2 * n**3 / 3 - n**2 / 2 + 5 * n / 6,
    "qr": lambda n: 4 * n**3 / 3 + 2 * n**2 + 14 * n / 3,  # geqrf alone, in LAPACK's form
    "syrk": lambda n: n**3 + n**2,
    "trsm": lambda n: n**3,
    "inv": lambda n: 2 * n**3,
}
OUR_CODES = {
    "gemm": ("matmul(a, b)", "matmul(a, b, out={0})"),
    "cholesky": ("cholesky(a)", "cholesky(a, out={0}, info={1})"),
    "lu_factor": ("lu_factor(a)", "lu_factor(a, out={0}, pivots={1}, info={2})"),
    "qr": ("qr(a, mode='raw')", "qr(a, mode='raw', h={0}, tau={1})"),
    "syrk": ("syrk(a)", "syrk(a, out={0})"),
    "trsm": ("trsm(a, b)", "trsm(a, b, out={0})"),
    "inv": ("inv(a)", "inv(a, out={0}, info={1})"),
}
TORCH_CODES = {
    "gemm": ("torch.mm(a, b)", "torch.mm(a, b, out={0})"),
    "cholesky": ("la.cholesky_ex(a)", "la.cholesky_ex(a, out=({0}, {1}))"),
    "lu_factor": ("la.lu_factor_ex(a)", "la.lu_factor_ex(a, out=({0}, {1}, {2}))"),
    "qr": ("torch.geqrf(a)", "torch.geqrf(a, out=({0}, {1}))"),
    "syrk": ("torch.mm(a, a.mT)", "torch.mm(a, a.mT, out={0})"),
    "trsm": ("la.solve_triangular(a, b, upper=False)", "la.solve_triangular(a, b, upper=False, out={0})"),
    "inv": ("la.inv_ex(a)", "la.inv_ex(a, out=({0}, {1}))"),
}
CUPY_CODES = {
    "gemm": ("cupy.matmul(a, b)", "cupy.matmul(a, b, out={0})"),
    "cholesky": ("la.cholesky(a)",) * 2,
    "lu_factor": ("sla.lu_factor(a, check_finite=False)",) * 2,
    "qr": ("la.qr(a, mode='raw')",) * 2,
    "syrk": ("blas.syrk('N', a, lower=True)", "blas.syrk('N', a, out={0}, lower=True)"),
    "trsm": ("sla.solve_triangular(a, b, lower=True, check_finite=False)",) * 2,
    "inv": ("la.inv(a)",) * 2,
}
PEERS = ("torch", "CuPy")


def drivers(run: Run) -> None:
    """svd and eigh by each driver, and by autotune, which measures anew and leaves the user's cache as it is."""
    with empty_cache():
        race_drivers(run)


def race_drivers(run: Run) -> None:
    run.begin("drivers", "DRIVERS: ms until the GPU is done; default over fastest")
    sizes = (8, 12) if run.tiny else (32, 64, 128, 256) if run.quick else (32, 64, 128, 256, 512, 1024, 2048)
    rows: dict[str, Any] = {}
    for routine, batches in BATCHES.items():
        shapes: list[tuple[tuple[int, ...], int]] = [((), n) for n in sizes]
        shapes += [((3,), 8)] if run.tiny else [((count,), n) for count, n in batches]
        for dtype in ("float64", "float32"):
            slow: dict[str, float] = {}
            for batch, n in shapes:
                case = Case(routine, n, dtype, batch)
                if not run.left(case):
                    continue

                def work(case: Case = case, slow: dict[str, float] = slow) -> None:
                    get = operands(case.n, case.dtype, case.batch)
                    here = [side for side in run.sides if side.name in ("ours", *PEERS)]

                    def quick_enough(way: Any) -> bool:
                        times = slow.values() if way.name == TUNED else [slow.get(way.name, 0.0)]
                        return bool(case.batch) or all(seconds < TOO_LONG for seconds in times)

                    found = candidates(run.device, case, here, get, run.missing, only=quick_enough)
                    figures = race(found, run.device, 0.01 if run.tiny else 0.1, run.missing, str(case))
                    # Twice the rows are eight times the work, by a GPU that is better filled.
                    slow |= {name: figure["done"] * 5 for name, figure in figures.items()} if not case.batch else {}
                    rows[str(case)] = figures
                    run.report.put("drivers", {"cases": rows, "missing": run.missing})
                    if not figures:
                        return
                    cells = " | ".join(f"{name} {figure['done'] * 1e3:.4g}" for name, figure in figures.items())
                    say(f"{case!s:<24} {cells}{said_of(figures)}")

                run.guarded(case, work)


def said_of(figures: dict[str, dict[str, float]]) -> str:
    """Which driver of ours is the fastest and what it wins over the default, and how it stands to the best peer."""
    mine, peer = best(figures, "done", mine=True), best(figures, "done", mine=False)
    if mine is None:
        return ""
    won = figures["ours"]["done"] / figures[mine]["done"] if "ours" in figures else float("nan")
    beside = f"; {peer} over it {figures[peer]['done'] / figures[mine]['done']:.2f}" if peer else ""
    return f" | {mine}: {won:.2f}{beside}"


def matrix(n: int, dtype: str) -> Any:
    """A symmetric positive definite matrix, made of equal blocks so that it costs little."""
    rng, size = np.random.default_rng(n), min(n, BLOCK)
    block = rng.standard_normal((size, size), np.float32)
    block = ((block + block.T) / np.sqrt(2)).astype(dtype)
    whole = np.tile(block, (-(-n // size),) * 2)[:n, :n]
    whole[np.arange(n), np.arange(n)] += 4 * n / np.sqrt(size)
    return np.ascontiguousarray(whole)


def timed(name: str, side: Any, codes: tuple[str, str], names: dict[str, Any]) -> Timed:
    """A call whose outputs are those of the first one, which is not timed."""
    names = side.names | names
    with side.setting():
        first = eval(codes[0], names)
    outputs = list(first) if isinstance(first, (tuple, list)) else [first]
    names |= {f"out_{place}": output for place, output in enumerate(outputs)}
    code = codes[1].format(*(f"out_{place}" for place in range(len(outputs))))
    return Timed(name, timeit.Timer(code, globals=names).timeit, side)


def scaling(run: Run) -> None:
    """Share of the peak over sizes."""
    sizes = (8, 16, 32) if run.tiny else tuple(2**i for i in range(5, 13 if run.quick else 15))
    run.begin("scaling", "SCALING: TFLOP/s and share of the peak by ours, and the shares of torch and CuPy")
    codes = {"ours": OUR_CODES, "torch": TORCH_CODES, "CuPy": CUPY_CODES}
    sides = {side.name: side for side in run.sides if side.name in codes}
    peaks: dict[str, float] = {}
    rows: dict[str, Any] = {}

    def ready(name: str, side: Any, routine: str, names: dict[str, Any], case: str) -> Timed | None:
        """A call that has run once; None where the library cannot, as for want of memory, which is noted."""
        found: Timed | None = attempt(
            f"{case}: {name}", lambda: timed(name, side, codes[name][routine], names), run.missing
        )
        return found

    def race_at(n: int, dtype: str, routines: tuple[str, ...]) -> dict[str, dict[str, float]]:
        values, found = matrix(n, dtype), {}
        held = {name: side.array(values) for name, side in sides.items()}
        for routine in routines:
            ways = [
                way
                for name, side in sides.items()
                if (way := ready(name, side, routine, {"a": held[name], "b": held[name]}, f"{routine} {n} {dtype}"))
            ]
            figures = race(ways, run.device, 0.005 if run.tiny else 0.06, run.missing, f"{routine} {n} {dtype}")
            found[routine] = {name: FLOPS[routine](n) / figure["done"] for name, figure in figures.items()}
        return found

    for dtype in ("float32", "float64"):
        top = run.guarded(f"peak {dtype}", lambda dtype=dtype: race_at(32 if run.tiny else PEAK, dtype, ("gemm",)))
        peaks[dtype] = max((top or {}).get("gemm", {}).values(), default=float("nan"))
        say(f"peak {SHORT[dtype]}: {peaks[dtype] / 1e12:.4g} TFLOP/s")
    for n in sizes:
        for dtype in ("float32", "float64"):
            case = f"{SHORT[dtype]} {n}"
            if not run.left(f"scaling {case}"):
                continue

            def work(n: int = n, dtype: str = dtype, case: str = case) -> None:
                found = race_at(n, dtype, tuple(FLOPS))
                rows[case] = found
                run.report.put("scaling", {"flops": rows, "peaks": peaks, "missing": run.missing})
                cells = []
                for routine, rates in found.items():
                    shares = {name: rate / peaks[dtype] for name, rate in rates.items()}
                    mine = f"{rates['ours'] / 1e12:.4g} = {shares['ours']:.1%}" if "ours" in rates else "-"
                    peers = ", ".join(f"{shares[name]:.1%}" for name in PEERS if name in shares)
                    cells.append(f"{routine} {mine}" + (f" ({peers})" if peers else ""))
                say(f"{case:<10} {' | '.join(cells)}")

            run.guarded(f"scaling {case}", work)
