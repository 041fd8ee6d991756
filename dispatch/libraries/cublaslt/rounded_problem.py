"""The heuristic's algorithm for rounded extents, which serves all small products whose extents round to the same.

cublasLtMatmulAlgoGetHeuristic took 135 of the 230 us of a shape's first call, the check of an algorithm 10 (H100,
cuBLAS 13.1). So the extents of small products are rounded up before the heuristic is called, and its answer is cached
for all shapes that round to the same. A shape's algorithm depends only on the shape, not on earlier calls.

The cost on the GPU, as the ratio to the time of the algorithm that the heuristic has for the shape itself, was measured
in bf16 on 60 to 100 shapes of each kind: any extents up to 512, 0.959 in the mean and at most 1.138; multiples of 8 up
to 256, 1.003 and 1.066; up to 800, 1.001 and 1.057; a layer with any number of rows, 0.993 and 1.147. Single products
of more work took 1.33 and 1.47, of f32 up to 2.4, of one row 3.9: their extents are not rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import HALF

if TYPE_CHECKING:
    from collections.abc import Callable

    from cudabind.sys.cublasLt import cublasLtMatmulAlgo_t as Algo
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cublaslt.problem import Matrix, Problem

__all__ = ["rounded", "suggested_algo"]

DTYPES = frozenset(dtype.cuda for dtype in HALF)
MAX_WORK = 1 << 29  # m * n * k: a few microseconds of an H100
UNROUNDED = 16  # extents up to here are not rounded: kernels for a few rows are of another kind
POWERS_UP_TO = 512  # products of extents up to here are rounded up to powers of two
PARTS_PER_OCTAVE = 32  # extents of larger products are rounded up to such a part of an octave,
STEP = 8  # or to a multiple of this, if that is more
MAX_LD_ALIGNMENT = 8  # elements, 16 bytes: the library does not make use of larger alignments of leading dimensions
MAX_ANSWERS = 4096  # that an executor keeps; the oldest is dropped first
CACHE_NAME = "cublasLt, of rounded extents"  # in the executor's `handles`


def suggested_algo(
    executor: CudaExecutor, problem: Problem, limit: int, ask: Callable[[Problem], Algo | None]
) -> Algo | None:
    """The heuristic's first algorithm, `ask`, for the rounded problem; the caller checks it for the problem itself.

    None if there is none within the limit of workspace, and for problems that are not rounded.
    """
    key = _key(problem)
    if key is None:
        return None
    answers: dict[Any, Algo | None] = executor.handles.setdefault(CACHE_NAME, {})
    name = (key, limit)
    if name in answers:
        return answers[name]
    algorithm = ask(rounded(problem))
    if len(answers) >= MAX_ANSWERS:
        del answers[next(iter(answers))]  # only the executor's own thread comes here
    answers[name] = algorithm
    return algorithm


def _key(problem: Problem) -> tuple[Any, ...] | None:
    """The key of the rounded problem, computed quickly; None for a problem that is not rounded."""
    a, b, c, d = problem[:4]
    m, n, k = d.rows, d.cols, a.rows if problem.op_a else a.cols
    if a.dtype not in DTYPES or problem.batch != 1 or problem.aux_ld:
        return None
    if m < 2 or n < 2 or k < 2 or m * n * k > MAX_WORK:
        return None
    round_up = _rounding_of(problem)
    alignments_of_ld = (a.ld & -a.ld, b.ld & -b.ld, c.ld & -c.ld, d.ld & -d.ld)
    if max(alignments_of_ld) > MAX_LD_ALIGNMENT:
        alignments_of_ld = tuple(min(step, MAX_LD_ALIGNMENT) for step in alignments_of_ld)  # type: ignore[assignment]
    dtypes = (a.dtype, b.dtype, c.dtype, d.dtype)
    alignments = (a.alignment, b.alignment, c.alignment, d.alignment)
    return round_up(m), round_up(n), round_up(k), alignments_of_ld, dtypes, alignments, problem[4:]


def rounded(problem: Problem) -> Problem:
    """The problem with extents rounded up, and leading dimensions that are as aligned as before."""
    round_up = _rounding_of(problem)
    a, b, c, d = (_rounded(matrix, round_up) for matrix in problem[:4])
    return problem._replace(a=a, b=b, c=c, d=d)


def _rounding_of(problem: Problem) -> Callable[[int], int]:
    a, b = problem.a, problem.b
    return _up_to_power_of_2 if max(a.rows, a.cols, b.rows, b.cols) <= POWERS_UP_TO else _up_to_part_of_octave


def _rounded(matrix: Matrix, round_up: Callable[[int], int]) -> Matrix:
    rows = round_up(matrix.rows)
    step = min(matrix.ld & -matrix.ld, MAX_LD_ALIGNMENT)
    ld = -(-rows // step)  # in multiples of `step`: an odd number, so that it is aligned to no more than before
    ld = (ld if step == MAX_LD_ALIGNMENT else ld | 1) * step
    return matrix._replace(rows=rows, cols=round_up(matrix.cols), ld=ld)


def _up_to_power_of_2(extent: int) -> int:
    return extent if extent <= UNROUNDED else 1 << (extent - 1).bit_length()


def _up_to_part_of_octave(extent: int) -> int:
    if extent <= UNROUNDED:
        return extent
    step = max(STEP, (1 << (extent - 1).bit_length()) // (2 * PARTS_PER_OCTAVE))
    return -(-extent // step) * step
