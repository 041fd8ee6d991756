"""Sparse linear algebra beside cupyx.scipy.sparse and torch.sparse, in one run.

Tables, by `--only`: `spmv`, `spmm`, `sddmm`, `spgemm` and `spsv`, us for one call over matrices of 10^5 to 10^7
elements: Poisson's equation on a cube, ten random elements in each row, and columns by a power law; `cg`, us for one
iteration of conjugate gradients at about 100,000 unknowns; `widths`, products with few columns of B and with many;
`batches`, 64 products at once, by one call, by a loop and as one block diagonal matrix; `bsr`, products of blocks;
`block_jacobi`, conjugate gradients with inverses of blocks; and `host`, us of the host for one repeated small product.
In `spmm` cuSPARSE's product is beside the one that is chosen.

Of products the GPU's time is taken in a recorded graph; of `spgemm`, `spsv` and `cg`, in which libraries wait, the time
until all is done. In `spgemm` ours is of a fixed pattern, which is analysed once; its peers analyse in each call. Each
result is held against SciPy's in float64 first. Candidates take turns, and the median counts. A ratio is the fastest
peer's time over ours: above 1 ours is faster. Repeat:
`python tests/benchmarks/bench_sparse.py [--quick] [--device cuda:0|host] [--json FILE] [--only TABLE,TABLE]`. On `host`
sizes are tiny, the peer is SciPy, and it shows whether it runs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from report import Report, Target, judge, say
from sparse_matrices import PATTERNS, in_dtype, pattern_of, poisson
from sparse_races import TABLES as FURTHER
from sparse_races import on_no_gpu as further_on_no_gpu
from sparse_races import race, wall_race
from timing import attempt, geometric_mean, gpu_race, host_race, statement, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE_CALL = ("spmv", "spmm", "sddmm", "spgemm", "spsv", "cg")
TABLES = (*ONE_CALL, *FURTHER, "host")
SIZES = {"spgemm": (10**5, 10**6), "spsv": (10**5, 10**6)}  # elements; of all others to 10^7
DTYPES = {"spmv": "f8", "spmm": "f4", "sddmm": "f4", "spgemm": "f4", "spsv": "f8", "cg": "f8"}
WIDE = 64  # columns of dense matrices
LOOKED_AT = 4  # of these, in a check
ITERATIONS = 200
SIDE = 46  # of the cube of `cg`: 97,336 unknowns
WAITS = ("spgemm", "spsv", "cg")
AFTER = 1e-3  # what is left of the residual after so many iterations
BOUNDS = {"f4": 1e-4, "f8": 1e-10}
TARGETS = (
    Target("each operation to the best peer", "least", 0.98, at_least=True),
    Target("geometric mean to the best peer", "mean", 1.1, at_least=True),
    Target("host time of a repeated product", "host: dispatch", 0.4, "us", "host: cupy"),
    Target("an iteration of cg to CuPy's", "cg to cupy", 3.0, at_least=True),
)


@dataclass(frozen=True)
class Case:
    """An operation over a matrix of a pattern with about so many elements."""

    op: str
    pattern: str
    nnz: int

    def __str__(self) -> str:
        return f"{self.op} {self.pattern} {self.nnz:.0e} {DTYPES[self.op]}"


def cases(table: str, *, tiny: bool) -> Iterator[Case]:
    """Those of a table."""
    if table == "cg":
        yield Case("cg", "poisson", 7 * (4 if tiny else SIDE) ** 3)
        return
    for nnz in (10**3,) if tiny else SIZES.get(table, (10**5, 10**6, 10**7)):
        for pattern in PATTERNS[:1] if table == "spsv" else PATTERNS:
            if table != "spgemm" or pattern != "power law" or nnz < 10**6:  # whose product would not fit
                yield Case(table, pattern, nnz)


def matrix_of(case: Case) -> Any:
    """The matrix of a case in its dtype; of `spsv` the lower triangle."""
    import scipy.sparse as sp

    found = pattern_of(case.pattern, case.nnz)
    return in_dtype(sp.tril(found).tocsr() if case.op == "spsv" else found, DTYPES[case.op])


def operands(case: Case, a: Any, rng: np.random.Generator) -> list[np.ndarray]:
    """The dense operands."""
    n, kind = a.shape[0], DTYPES[case.op]
    shapes = {"spmm": [(n, WIDE)], "sddmm": [(n, WIDE), (WIDE, n)], "spgemm": []}.get(case.op, [(n,)])
    # Numbers that come again: to draw them all would take longer than all that is measured.
    drawn = rng.standard_normal(1_000_003, np.float32).astype(kind)
    return [np.resize(drawn, shape) for shape in shapes]


def looked_at(nnz: int) -> slice:
    """Some of many elements."""
    return slice(None, None, max(1, nnz // 10**5))


def right(case: Case, a: Any, dense: list[np.ndarray]) -> np.ndarray:
    """What is right, in float64, as a vector; of `cg` the right-hand side, which the residual is held against."""
    from scipy.sparse.linalg import spsolve_triangular

    a = a.astype("f8")
    wide = [one[:, :LOOKED_AT] if case.op == "spmm" else one for one in dense]
    if case.op == "sddmm":
        at = looked_at(a.nnz)
        rows = np.repeat(np.arange(a.shape[0]), np.diff(a.indptr))[at]
        return np.einsum("ik,ik->i", wide[0][rows].astype("f8"), wide[1].T[a.indices[at]].astype("f8"))
    if case.op == "spgemm":
        return np.asarray((a @ a).sum(axis=1)).ravel()
    if case.op == "spsv":
        return spsolve_triangular(a, wide[0])
    if case.op == "cg":
        return wide[0]
    return a @ wide[0].astype("f8")


def ours(case: Case, a: Any, dense: list[Any]) -> Callable[[int], Any]:
    """A call of dispatch over a SparseTensor and torch's tensors, or those of the host."""
    s = dp.sparse
    if case.op == "spgemm":
        a = a.fixed()  # a repeated call computes values alone
        count = s.spgemm(a, a).nnz
        return lambda _: s.spgemm(a, a, nnz=count)
    least = 0.0 if case.nnz > 7 * SIDE**2 else 1e-9  # a tiny system is solved long before the last iteration
    calls: dict[str, Callable[[int], Any]] = {
        "spmv": lambda _: s.spmv(a, dense[0]),
        "spmm": lambda _: s.spmm(a, dense[0]),
        "sddmm": lambda _: s.sddmm(a, dense[0], dense[1]).values,
        "spsv": lambda _: s.spsv(a, dense[0]),
        "cg": lambda _: s.cg(a, dense[0], rtol=least, maxiter=ITERATIONS)[0],
    }
    return calls[case.op]


def by_torch(case: Case, a: Any, dense: list[Any]) -> Callable[[int], Any]:
    """The same by torch; of a sparse matrix that it has no such thing for, an error."""
    import torch

    parts = (torch.from_numpy(part).cuda() for part in (a.indptr, a.indices, a.data))
    m = torch.sparse_csr_tensor(*parts, size=a.shape)
    columns = dense[0][:, None] if case.op == "spsv" else None
    calls: dict[str, Callable[[int], Any]] = {
        "spmv": lambda _: m @ dense[0],
        "spmm": lambda _: m @ dense[0],
        "sddmm": lambda _: torch.sparse.sampled_addmm(m, dense[0], dense[1], beta=0.0).values(),
        "spgemm": lambda _: m @ m,
        "spsv": lambda _: torch.triangular_solve(columns, m, upper=False).solution[:, 0],
    }
    return calls[case.op]


def by_cupy(case: Case, a: Any, dense: list[Any]) -> Callable[[int], Any]:
    """The same by CuPy, on torch's stream."""
    import cupy
    import torch
    from cupyx.scipy import sparse
    from cupyx.scipy.sparse import linalg

    m = sparse.csr_matrix(tuple(cupy.asarray(part) for part in (a.data, a.indices, a.indptr)), shape=a.shape)
    arrays = [cupy.from_dlpack(one) for one in dense]
    word = "rtol" if "rtol" in inspect.signature(linalg.cg).parameters else "tol"  # as SciPy has renamed it
    least: Any = {word: 0.0}
    calls: dict[str, Callable[[], Any]] = {
        "spmv": lambda: m @ arrays[0],
        "spmm": lambda: m @ arrays[0],
        "spgemm": lambda: m @ m,
        "spsv": lambda: linalg.spsolve_triangular(m, arrays[0], lower=True),
        "cg": lambda: linalg.cg(m, arrays[0], atol=0.0, maxiter=ITERATIONS, **least)[0],
    }
    wanted = calls[case.op]

    def call(_: int) -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return wanted()

    return call


def as_vector(case: Case, got: Any) -> np.ndarray:
    """A result in NumPy: of a product of sparse matrices the sums of its rows."""
    if case.op == "spgemm":
        if isinstance(got, dp.SparseTensor):
            got = dp.sparse.to_scipy(got)
            return np.asarray(got.astype("f8").sum(axis=1)).ravel()
        if hasattr(got, "crow_indices"):
            import scipy.sparse as sp

            parts = (part.cpu().numpy() for part in (got.values(), got.col_indices(), got.crow_indices()))
            return np.asarray(sp.csr_array(tuple(parts), shape=tuple(got.shape)).astype("f8").sum(axis=1)).ravel()
        return np.asarray(got.get().astype("f8").sum(axis=1)).ravel()
    for name in ("cpu", "get"):
        if hasattr(got, name):
            got = getattr(got, name)()
            break
    found: np.ndarray = got.numpy() if hasattr(got, "numpy") else np.asarray(got)
    return found[:, :LOOKED_AT] if case.op == "spmm" else found[looked_at(len(found))] if case.op == "sddmm" else found


def is_right(case: Case, name: str, call: Callable[[int], Any], a: Any, expected: np.ndarray, missing: Any) -> bool:
    """Whether a candidate gives what is right; else it is noted why not."""

    def work() -> bool:
        got = as_vector(case, call(0)).astype("f8")
        got = a.astype("f8") @ got if case.op == "cg" else got
        off = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        if not off < (AFTER if case.op == "cg" else BOUNDS[DTYPES[case.op]]):
            raise AssertionError(f"{off:.2g} off")
        call(0)
        return True

    return attempt(f"{case}: {name}", work, missing) is not None


def on_the_gpu(table: str, report: Report, missing: dict[str, str], *, quick: bool) -> list[tuple[float, float]]:
    """Race the cases of a table; prints a line for each, and gives the ratios of the best peer and of CuPy to ours."""
    import torch

    rng, rows, ratios = np.random.default_rng(7), {}, []
    what = "until it is done" if table in WAITS else "of the GPU"
    say(f"\n{table}: us {what} for one {'iteration' if table == 'cg' else 'call'}, ratio of the best peer to ours")
    chosen = list(cases(table, tiny=False))
    for case in chosen[:2] if quick else chosen:

        def work(case: Case = case) -> None:
            a = matrix_of(case)
            arrays = operands(case, a, rng)
            expected = right(case, a, arrays)
            dense = [torch.from_numpy(one).cuda() for one in arrays]
            parts = [torch.from_numpy(part).cuda() for part in (a.data, a.indptr, a.indices)]
            matrix = dp.sparse.csr(*parts, a.shape).fixed()
            runs: dict[str, Callable[[int], Any]] = {"dispatch": ours(case, matrix, dense)}
            if table == "spmm":
                runs["cusparse"] = lambda _: dp.spmm(*matrix.parts, dense[0], library="cusparse")
            for name, side in (("torch", by_torch), ("cupy", by_cupy)):
                call = attempt(f"{case}: {name}", lambda side=side: side(case, a, dense), missing)
                if call is not None:
                    runs[name] = call
            runs = {name: call for name, call in runs.items() if is_right(case, name, call, a, expected, missing)}
            if table in WAITS:
                seconds, how = wall_race(runs, torch.cuda.synchronize, rounds=2 if quick else 7), "wall"
            else:
                repeats = 4 if case.nnz > 10**6 else 20
                seconds, how = gpu_race(runs, sets=1, repeats=repeats, rounds=3 if quick else 9)
            count = ITERATIONS if table == "cg" else 1
            figures = {name: summary([one / count for one in some]) for name, some in seconds.items()}
            mine = figures["dispatch"]["median"]
            peers = {name: figure["median"] for name, figure in figures.items() if name != "dispatch"}
            ratio = min(peers.values()) / mine if peers else None
            ratios.extend([] if ratio is None else [(ratio, peers.get("cupy", np.nan) / mine)])
            rows[str(case)] = {"us": figures, "how": how, "ratio": ratio}
            report.put(table, rows)
            cells = " | ".join(f"{name} {figure['median']:.4g}" for name, figure in figures.items())
            say(f"{case!s:<28} {cells} | {'-' if ratio is None else f'{ratio:.2f}'}")

        attempt(str(case), work, missing)
    return ratios


def on_the_host(device: dp.Device, report: Report, missing: dict[str, str], *, quick: bool) -> dict[str, float]:
    """The host's time of one small product, again and again."""
    matrix, x = poisson(6), np.ones(216)
    a = dp.sparse.sparse_tensor(matrix, device=device)
    names = {"spmv": dp.sparse.spmv, "a": a, "x": device.array(x)}
    candidates = [statement("dispatch", "spmv(a, x)", **names)]
    if device.is_host:
        candidates.append(statement("scipy", "a @ x", a=matrix, x=x))
    else:

        def torch_side() -> Any:
            import torch

            parts = (torch.from_numpy(part).cuda() for part in (matrix.indptr, matrix.indices, matrix.data))
            m = torch.sparse_csr_tensor(*parts, size=matrix.shape)
            return statement("torch", "a @ x", a=m, x=torch.from_numpy(x).cuda())

        def cupy_side() -> Any:
            import cupy
            from cupyx.scipy import sparse

            return statement("cupy", "a @ x", a=sparse.csr_matrix(matrix), x=cupy.asarray(x))

        for name, side in (("torch", torch_side), ("cupy", cupy_side)):
            made = attempt(name, side, missing)
            candidates += [] if made is None else [made]
    for candidate in candidates:
        attempt(candidate.name, lambda candidate=candidate: candidate.burst(100), missing)
    device.synchronize()
    calls_of = 16 if device.is_host else 100
    seconds, failed = host_race(candidates, device.synchronize, bursts=3 if quick else 30, calls=calls_of)
    missing.update(failed)
    figures = {name: summary(some) for name, some in seconds.items()}
    cells = " | ".join(f"{name} {figure['median']:.3g}" for name, figure in figures.items())
    say(f"\nhost: us of the host for one product of 216 rows and a vector: {cells}")
    report.put("host", {"us": figures, "missing": missing})
    return {f"host: {name}": figure["median"] for name, figure in figures.items()}


def on_no_gpu(device: dp.Device, missing: dict[str, str]) -> None:
    """Each operation once over a tiny matrix, held against SciPy."""
    rng = np.random.default_rng(7)
    for table in FURTHER:
        further_on_no_gpu(table, device, missing)
    for table in ONE_CALL:
        for case in cases(table, tiny=True):
            a = matrix_of(case)
            dense = operands(case, a, rng)
            call = ours(case, dp.sparse.sparse_tensor(a, device=device), [device.array(one) for one in dense])
            assert is_right(case, "dispatch", call, a, right(case, a, dense), missing), missing


def measure(device: dp.Device, quick: bool, report: Report, wanted: list[str]) -> None:
    """All tables that are wanted; the GPU's are those of torch's current device."""
    missing: dict[str, str] = {}
    if device.is_host:
        on_the_host(device, report, missing, quick=True)
        on_no_gpu(device, missing)
        return
    figures = on_the_host(device, report, missing, quick=quick) if "host" in wanted else {}
    import torch

    found: dict[str, list[tuple[float, float]]] = {}
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one takes no recording
        for table in ONE_CALL:
            if table in wanted:
                found[table] = on_the_gpu(table, report, missing, quick=quick)
        for table in FURTHER:
            if table in wanted:
                race(table, device, report, missing, quick=quick)
    best = [ratio for table, pairs in found.items() if table != "cg" for ratio, _ in pairs]
    if best:
        figures |= {"least": min(best), "mean": geometric_mean(best)}
    if found.get("cg"):
        figures["cg to cupy"] = found["cg"][0][1]
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("missing", missing)
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(measure, __doc__, tables=TABLES)
