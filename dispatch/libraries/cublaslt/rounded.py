"""The heuristic's algorithm for rounded extents, for all small products whose extents round to them.

To ask cublasLtMatmulAlgoGetHeuristic took 135 of the 230 us of a shape's first call, to have an algorithm checked 10
(H100, cuBLAS 13.1). So the extents of small products are rounded up before it is asked, and its answer serves all that
round to the same. Which algorithm a shape gets follows from the shape alone, not from what was asked before it.

What that costs on the GPU was measured beside the algorithm that the heuristic has for the shape itself, in bf16, 60 to
100 shapes of each kind: any extents up to 512, 0.959 of its time in the mean and at most 1.138; multiples of 8 up to
256, 1.003 and 1.066; up to 800, 1.001 and 1.057; a layer with any number of rows, 0.993 and 1.147. Single products of
more work took 1.33 and 1.47, of f32 up to 2.4, of one row 3.9: these are asked for as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import HALF

if TYPE_CHECKING:
    from collections.abc import Callable

    from cudabind.sys.cublasLt import cublasLtMatmulAlgo_t as Algo
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cublaslt.problem import Matrix, Problem

__all__ = ["rounded", "suggestion"]

DTYPES = frozenset(dtype.cuda for dtype in HALF)
MOST_WORK = 1 << 29  # m * n * k: a few microseconds of an H100
FEW = 16  # extents up to here stay as they are: kernels for a few rows are of another kind
SMALL = 512  # products of extents up to here are rounded to powers of two, others to so many parts of an octave
PARTS = 32
STEP = 8  # or to a multiple of it
WIDEST = 8  # elements, 16 bytes: of leading dimensions that are multiples of more the library makes no other use
MOST = 4096  # answers that an executor keeps; the oldest goes first
ANSWERS = "cublasLt, of rounded extents"  # among what an executor has of libraries


def suggestion(
    executor: CudaExecutor, problem: Problem, limit: int, ask: Callable[[Problem], Algo | None]
) -> Algo | None:
    """What `ask`, the heuristic's first algorithm, gives for the rounded problem; it is to be checked for this one.

    None where it has none within the limit of workspace, and for problems that are not rounded.
    """
    key = _key(problem)
    if key is None:
        return None
    answers: dict[Any, Algo | None] = executor.handles.setdefault(ANSWERS, {})
    name = (key, limit)
    if name in answers:
        return answers[name]
    found = ask(rounded(problem))
    if len(answers) >= MOST:
        del answers[next(iter(answers))]  # only the executor's own thread comes here
    answers[name] = found
    return found


def _key(problem: Problem) -> tuple[Any, ...] | None:
    """What of a problem its rounded one follows from, quickly; None for one that is not rounded."""
    a, b, c, d = problem[:4]
    m, n, k = d.rows, d.cols, a.rows if problem.op_a else a.cols
    if a.dtype not in DTYPES or problem.batch != 1 or problem.aux_ld:
        return None
    if m < 2 or n < 2 or k < 2 or m * n * k > MOST_WORK:
        return None
    up = _up(problem)
    steps = (a.ld & -a.ld, b.ld & -b.ld, c.ld & -c.ld, d.ld & -d.ld)
    if max(steps) > WIDEST:
        steps = tuple(min(step, WIDEST) for step in steps)  # type: ignore[assignment]
    dtypes = (a.dtype, b.dtype, c.dtype, d.dtype)
    alignments = (a.alignment, b.alignment, c.alignment, d.alignment)
    return up(m), up(n), up(k), steps, dtypes, alignments, problem[4:]


def rounded(problem: Problem) -> Problem:
    """The problem with extents rounded up, and leading dimensions that are as aligned as before."""
    up = _up(problem)
    a, b, c, d = (_rounded(matrix, up) for matrix in problem[:4])
    return problem._replace(a=a, b=b, c=c, d=d)


def _up(problem: Problem) -> Callable[[int], int]:
    a, b = problem.a, problem.b
    return _to_power if max(a.rows, a.cols, b.rows, b.cols) <= SMALL else _to_part


def _rounded(matrix: Matrix, up: Callable[[int], int]) -> Matrix:
    rows = up(matrix.rows)
    step = min(matrix.ld & -matrix.ld, WIDEST)
    ld = -(-rows // step)  # in steps: an odd number of them, so that it is a multiple of no more
    return matrix._replace(rows=rows, cols=up(matrix.cols), ld=(ld if step == WIDEST else ld | 1) * step)


def _to_power(extent: int) -> int:
    return extent if extent <= FEW else 1 << (extent - 1).bit_length()


def _to_part(extent: int) -> int:
    if extent <= FEW:
        return extent
    step = max(STEP, (1 << (extent - 1).bit_length()) // (2 * PARTS))
    return -(-extent // step) * step
