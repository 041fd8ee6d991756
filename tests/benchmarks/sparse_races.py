"""Tables of bench_sparse beside those of one call over patterns: widths of B, batches, blocks, and block Jacobi.

A line has candidates that give the same result, which is held against SciPy's in float64 first; a ratio is the fastest
other candidate's time over the first one's.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from report import say
from sparse_matrices import blocks_of, coupled, in_dtype, pattern_of, stack_of
from timing import attempt, gpu_race, in_turns, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from report import Report

    Call = Callable[[int], Any]

TABLES = ("widths", "batches", "bsr", "block_jacobi")
WIDE, LOOKED_AT = 64, 4  # columns of dense matrices, and how many a check looks at
BATCH = 64
BOUNDS = {"f2": 3e-3, "f4": 1e-4, "f8": 1e-8}
SOLVED = 1e-9  # of the residual, where a solve ends
SIZE, SIDE = 3, 32  # unknowns of a point, and points along a side: 98,304 unknowns
HEADS = {
    "widths": "us of the GPU for one product of 10 elements a row and a B of so many columns",
    "batches": f"us of the GPU for {BATCH} products with {WIDE} columns",
    "bsr": f"us of the GPU for one product of blocks and {WIDE} columns",
    "block_jacobi": "us until it is solved",
}


@dataclass
class Line:
    """A line of a table.

    Attributes:
        name: its words.
        makers: candidates by name, each made at first use; the first is this library's.
        expected: what is right, in float64.
        look: what of a result is held against it.
        bound: how far it may be from that, in the norm.
        repeats: calls of a recorded graph; 0 where the time until all is done counts.
        counts: of candidates that iterate, how many iterations there were.
    """

    name: str
    makers: dict[str, Callable[[], Call]]
    expected: np.ndarray
    look: Callable[[np.ndarray], np.ndarray]
    bound: float
    repeats: int = 20
    counts: dict[str, Callable[[], int]] = field(default_factory=dict)


@dataclass
class Side:
    """Where the operands are: torch's on the GPU, and on the host ours."""

    device: dp.Device

    def put(self, array: np.ndarray) -> Any:
        """An operand."""
        if self.device.is_host:
            return self.device.array(array)
        import torch

        return torch.from_numpy(array).cuda()

    def sparse(self, matrix: Any) -> dp.SparseTensor:
        """A matrix of SciPy's in CSR or BSR."""
        parts = (self.put(part) for part in (matrix.data, matrix.indptr, matrix.indices))
        if matrix.format == "bsr":
            return dp.sparse.bsr(*parts, matrix.shape)
        return dp.sparse.csr(*parts, matrix.shape)


def drawn(*shape: int, dtype: str = "f4") -> np.ndarray:
    """Numbers that come again: to draw them all would take longer than all that is measured."""
    return np.resize(np.random.default_rng(3).standard_normal(1_000_003, np.float32).astype(dtype), shape)


def columns_of(found: np.ndarray) -> np.ndarray:
    """Some of the columns of a result."""
    return found[..., :LOOKED_AT]


def whole(found: np.ndarray) -> np.ndarray:
    """All of a result."""
    return found


# -- the tables -------------------------------------------------------------------------------------------------------
def widths(side: Side, *, tiny: bool, quick: bool) -> Iterator[Line]:
    """Products with few columns and with many, of row-major B and of column-major."""
    sizes = {10**3: (1, 4)} if tiny else {10**6: (1, 2, 3, 4, 8, 16, 32, 128), 10**7: (1, 2, 4, 8)}
    chosen = [(nnz, k, True) for nnz, some in sizes.items() for k in some] + [
        (min(sizes) if tiny else 10**6, 64, False)
    ]
    for nnz, k, by_rows in chosen[:2] if quick else chosen:
        matrix = in_dtype(pattern_of("random", nnz), "f4")
        b = drawn(matrix.shape[1], k)
        a, given = side.sparse(matrix), side.put(b if by_rows else np.ascontiguousarray(b.T))
        right = given if by_rows else given.mT
        vectors = [side.put(np.ascontiguousarray(b[:, number])) for number in range(k)] if k <= 8 else []
        makers = {
            "own": lambda a=a, b=right: lambda _: dp.spmm(*a.parts, b, library="own"),
            "cusparse": lambda a=a, b=right: lambda _: dp.spmm(*a.parts, b, library="cusparse"),
        }
        if side.device.is_host:
            del makers["cusparse"]
        else:
            makers["torch"] = lambda m=matrix, b=right: by_torch(m, b)
            if vectors:
                makers["sparse_mv"] = lambda a=a, x=vectors: lambda _: [dp.sparse_mv(*a.parts, one) for one in x]
        words = f"{nnz:.0e} f4, {k} columns{'' if by_rows else ', column-major'}"
        expected = matrix.astype("f8") @ b[:, :LOOKED_AT].astype("f8")
        yield Line(words, makers, expected, columns_of, BOUNDS["f4"], 4 if nnz > 10**6 else 20)


def by_torch(matrix: Any, b: Any) -> Call:
    """A product by torch."""
    import torch

    parts = (torch.from_numpy(part).cuda() for part in (matrix.indptr, matrix.indices, matrix.data))
    m = torch.sparse_csr_tensor(*parts, size=matrix.shape)
    return lambda _: m @ b


def batches(side: Side, *, tiny: bool, quick: bool) -> Iterator[Line]:
    """Matrices of one size with elements at places of their own; "even" have as many in each row."""
    count = 4 if tiny else BATCH
    chosen = [(1000, "f4", True), (1000, "f4", False), (10_000, "f4", False), (1000, "f2", False), (100, "f4", True)]
    for rows, dtype, even in [(20, "f4", False)] if tiny else chosen[:2] if quick else chosen:
        values, offsets, columns = stack_of(count, rows, even=even)
        values, b = values.astype(dtype), drawn(count, rows, WIDE, dtype=dtype)
        yield batch_line(side, (values, offsets, columns), b, f"{count} x {rows} rows {dtype}{', even' * even}")


def batch_line(side: Side, arrays: tuple[np.ndarray, ...], b: np.ndarray, name: str) -> Line:
    """One batch by one launch, by cuSPARSE, by a loop of ours, as one block diagonal matrix, and by torch."""
    import scipy.sparse as sp

    values, offsets, columns = arrays
    count, rows, _ = b.shape
    form, parts, right = dp.SparseForm("csr", (rows, rows)), [side.put(part) for part in arrays], side.put(b)
    wide = [sp.csr_array((v.astype("f8"), c, o), (rows, rows)) for v, o, c in zip(*arrays, strict=True)]
    expected = np.stack([one @ left[:, :LOOKED_AT].astype("f8") for one, left in zip(wide, b, strict=True)])
    ones = [[part[number] for part in parts] for number in range(count)]

    def diagonal() -> Call:
        """The matrices along the diagonal of one."""
        nnz = values.shape[1]
        ends = np.concatenate([[0], *((own[1:] + number * nnz) for number, own in enumerate(offsets))]).astype("i4")
        places = np.concatenate([own + number * rows for number, own in enumerate(columns)]).astype("i4")
        whole_a = [side.put(part) for part in (values.reshape(-1), ends, places)]
        shape, tall = (count * rows, count * rows), right.reshape(count * rows, WIDE)
        return lambda _: dp.spmm(*whole_a, dp.SparseForm("csr", shape), tall).reshape(count, rows, WIDE)

    def batched(library: str | None) -> Callable[[], Call]:
        return lambda: lambda _: dp.spmm_batched(*parts, form, right, library=library)

    def torch_side() -> Call:
        import torch

        m = torch.sparse_csr_tensor(parts[1], parts[2], parts[0], size=(count, rows, rows))
        return lambda _: torch.bmm(m, right)

    makers = {"dispatch": batched(None), "block diagonal": diagonal}
    if not side.device.is_host:
        makers |= {
            "cusparse": batched("cusparse"),
            "loop": lambda: lambda _: [dp.spmm(*one, form, left) for one, left in zip(ones, right, strict=True)],
            "torch": torch_side,
        }
    return Line(name, makers, expected, columns_of, BOUNDS[str(b.dtype)[0] + str(b.itemsize)])


def bsr(side: Side, *, tiny: bool, quick: bool) -> Iterator[Line]:
    """Blocks of several sizes, and the same elements in CSR."""
    chosen = [(10**3, 2)] if tiny else [(10**6, 4), (10**6, 16), (10**6, 32), (10**7, 16)]
    for nnz, size in chosen[:2] if quick else chosen:
        matrix = blocks_of(nnz, size)
        b = drawn(matrix.shape[1], WIDE)
        flat = in_dtype(matrix.tocsr(), "f4")
        a, c, right = side.sparse(matrix), side.sparse(flat), side.put(b)

        def torch_side(matrix: Any = matrix, right: Any = right) -> Call:
            import torch

            parts = (torch.from_numpy(part).cuda() for part in (matrix.indptr, matrix.indices, matrix.data))
            m = torch.sparse_bsr_tensor(*parts, size=matrix.shape)
            return lambda _: m @ right

        makers: dict[str, Callable[[], Call]] = {
            "dispatch": lambda a=a, b=right: lambda _: dp.spmm(*a.parts, b),
            "as CSR": lambda a=c, b=right: lambda _: dp.spmm(*a.parts, b),
        }
        if not side.device.is_host:
            makers["cusparse"] = lambda a=a, b=right: lambda _: dp.spmm(*a.parts, b, library="cusparse")
            makers["torch"] = torch_side
        expected = flat.astype("f8") @ b[:, :LOOKED_AT].astype("f8")
        yield Line(f"{nnz:.0e} f4, blocks of {size}", makers, expected, columns_of, BOUNDS["f4"])


def block_jacobi(side: Side, *, tiny: bool, quick: bool) -> Iterator[Line]:
    """Conjugate gradients with inverses of blocks, with the diagonal, and alone; a solve ends at the same residual."""
    del quick
    matrix = coupled(3 if tiny else SIDE, SIZE)
    n, b = matrix.shape[0], drawn(matrix.shape[0], dtype="f8")
    a, right, counts = side.sparse(in_dtype(matrix, "f8")).fixed(), side.put(b), {}
    inverses = dp.sparse.block_jacobi(a, SIZE).inverses

    def ours(name: str, **choices: Any) -> Callable[[], Call]:
        def call(_: int) -> Any:
            x, _info, iterations, _residual = dp.cg(*a.parts, right, rtol=SOLVED, **choices)
            counts[name] = lambda: int(iterations.item())
            return x

        return lambda: call

    makers = {
        "block_jacobi": ours("block_jacobi", M=inverses, preconditioner="block_jacobi"),
        "jacobi": ours("jacobi", preconditioner="jacobi"),
        "cg": ours("cg"),
    }
    if not side.device.is_host:
        makers |= {
            f"cupy{word}": lambda is_blocked=is_blocked, name=f"cupy{word}": by_cupy(
                matrix, b, counts, name, is_blocked=is_blocked
            )
            for word, is_blocked in ((" block Jacobi", True), (" cg", False))
        }
    from scipy.sparse.linalg import spsolve

    # Of the large system SciPy's factors would take long: the result is held against its right-hand side.
    expected, look = (spsolve(matrix.tocsc(), b), whole) if tiny else (b, lambda x: matrix @ x)
    yield Line(f"{n} unknowns, blocks of {SIZE}", makers, expected, look, BOUNDS["f8"], 0, counts)


def by_cupy(matrix: Any, b: np.ndarray, counts: dict[str, Callable[[], int]], name: str, *, is_blocked: bool) -> Call:
    """CuPy's cg on torch's stream, alone or with a function that multiplies with the inverses of blocks."""
    import cupy
    import torch
    from cupyx.scipy import sparse
    from cupyx.scipy.sparse import linalg

    m = sparse.csr_matrix(
        tuple(cupy.asarray(part) for part in (matrix.data, matrix.indices, matrix.indptr)), matrix.shape
    )
    right, n = cupy.asarray(b), matrix.shape[0]
    blocks = cupy.asarray(np.linalg.inv(block_diagonal(matrix)))
    several = {"M": linalg.LinearOperator((n, n), lambda r: (blocks @ r.reshape(-1, SIZE, 1)).ravel(), dtype=b.dtype)}
    word = "rtol" if "rtol" in inspect.signature(linalg.cg).parameters else "tol"  # as SciPy has renamed it
    choices: dict[str, Any] = {word: SOLVED, "atol": 0.0, **(several if is_blocked else {})}

    def call(_: int) -> Any:
        turns = [0]

        def counted(_: Any) -> None:
            turns[0] += 1

        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            found = linalg.cg(m, right, callback=counted, **choices)[0]
        counts[name] = lambda: turns[0]
        return found

    return call


def block_diagonal(matrix: Any) -> np.ndarray:
    """The blocks along the diagonal of a matrix in CSR."""
    found, entries = np.zeros((matrix.shape[0] // SIZE, SIZE, SIZE)), matrix.tocoo()
    inside = entries.row // SIZE == entries.col // SIZE
    row, column = entries.row[inside], entries.col[inside]
    found[row // SIZE, row % SIZE, column % SIZE] = entries.data[inside]
    return found


LINES = {"widths": widths, "batches": batches, "bsr": bsr, "block_jacobi": block_jacobi}


# -- the races --------------------------------------------------------------------------------------------------------
def as_array(got: Any) -> np.ndarray:
    """A result in NumPy, in float64; a list of them as one."""
    if isinstance(got, (list, tuple)):
        columns = [as_array(one) for one in got]
        return np.stack(columns, axis=1 if columns[0].ndim == 1 else 0)
    for name in ("cpu", "get"):
        if hasattr(got, name):
            got = getattr(got, name)()
            break
    found: np.ndarray = got.numpy() if hasattr(got, "numpy") else np.asarray(got)
    return found.astype("f8")


def checked(line: Line, call: Call) -> bool:
    """True; AssertionError for a candidate that is not right."""
    got = line.look(as_array(call(0)))
    off = float(np.linalg.norm(got - line.expected) / np.linalg.norm(line.expected))
    if not off < line.bound:
        raise AssertionError(f"{off:.2g} off")
    call(0)
    return True


def wall_race(runs: dict[str, Call], synchronize: Callable[[], None], *, rounds: int) -> dict[str, list[float]]:
    """Seconds until a call is done, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in in_turns(list(runs), rounds + 1):
        synchronize()
        began = time.perf_counter()
        runs[name](0)
        synchronize()
        if number:
            seconds[name].append(time.perf_counter() - began)
    return seconds


def candidates(line: Line, missing: dict[str, str]) -> dict[str, Call]:
    """Those of a line that can be made and are right; why others are not is noted."""
    found: dict[str, Call] = {}
    for name, make in line.makers.items():
        call = attempt(f"{line.name}: {name}", make, missing)
        if call is not None and attempt(f"{line.name}: {name}", lambda call=call: checked(line, call), missing):
            found[name] = call
    return found


def race(table: str, device: dp.Device, report: Report, missing: dict[str, str], *, quick: bool) -> None:
    """Race the lines of a table on the GPU; prints each."""
    import torch

    say(f"\n{table}: {HEADS[table]}, ratio of the fastest other to the first")
    rows: dict[str, Any] = {}
    for line in LINES[table](Side(device), tiny=False, quick=quick):

        def work(line: Line = line) -> None:
            runs = candidates(line, missing)
            if line.repeats:
                seconds, how = gpu_race(runs, sets=1, repeats=line.repeats, rounds=3 if quick else 7)
            else:
                seconds, how = wall_race(runs, torch.cuda.synchronize, rounds=2 if quick else 5), "wall"
            figures = {name: summary(some) for name, some in seconds.items()}
            turns = {name: line.counts[name]() for name in runs if name in line.counts}
            first, *others = (figure["median"] for figure in figures.values())
            ratio = min(others) / first if others and next(iter(runs)) == next(iter(line.makers)) else None
            rows[line.name] = {"us": figures, "how": how, "ratio": ratio, "iterations": turns}
            report.put(table, rows)
            cells = [
                f"{name} {figure['median']:.4g}"
                + (f" ({turns[name]} iterations, {figure['median'] / turns[name]:.3g} each)" if name in turns else "")
                for name, figure in figures.items()
            ]
            say(f"{line.name:<28} {' | '.join(cells)} | {'-' if ratio is None else f'{ratio:.2f}'}")

        attempt(line.name, work, missing)


def on_no_gpu(table: str, device: dp.Device, missing: dict[str, str]) -> None:
    """Each candidate of tiny lines once, held against SciPy."""
    for line in LINES[table](Side(device), tiny=True, quick=False):
        found = candidates(line, missing)
        assert found.keys() == line.makers.keys(), missing
        assert all(turns() > 0 for turns in line.counts.values())
