"""Symmetric and Hermitian indefinite matrices by cuSOLVER: `sytrf` and `sytrs`, and from 12.4 on `hetrf` and `hetrs`.

`sytrf` counts pivots in 32 bits, what solves with them in 64: a kernel of this library widens them. Follows
https://docs.nvidia.com/cuda/cusolver/#cusolverdn-t-sytrf and #cusolverdnxsytrs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.cublas.batched import ConvertPivots
from dispatch.libraries.cusolver.calls import LETTERS, cuda_type
from dispatch.libraries.cusolver.copies import CopyMode
from dispatch.libraries.cusolver.ldl_expansion import SOURCE
from dispatch.ops.linalg.request import MatrixKind
from dispatch.ops.linalg.steps import LOWER, UPPER

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
    from dispatch.ops.linalg.request import SolveRequest
    from dispatch.ops.linalg.steps import LinalgSteps
    from dispatch.ops.linalg.symmetric import LdlRequest, LdlSolveRequest

__all__ = ["ldl", "ldl_solve", "solve"]

FILL = {True: LOWER, False: UPPER}
NARROW, WIDE = 4, 8  # bytes of a pivot


def ldl(request: LdlRequest, steps: LinalgSteps) -> Plan:
    """Copy the triangle into the result, with zeros beside it, and factorize it there, or take it apart behind that."""
    a, n, part = steps.matrix("a"), request.a.shape[-1], triangle(lower=request.lower)
    kind = {"lower": request.lower, "hermitian": request.hermitian}
    if request.expand:
        made, pivots = steps.scratch_matrix(a.dtype, n, n), steps.scratch(n * WIDE)
        steps.copy(a, made, part)
        factor_ldl(steps, made, pivots, steps.vector("info"), **kind)
        results = steps.matrix("lu"), steps.matrix("d"), steps.vector("perm")
        choices = (int(request.lower), int(request.hermitian))
        steps.launch("expand_ldl", a.dtype, n, made, n, pivots, *results, *choices, per_block=1, source=SOURCE)
    else:
        wanted = steps.matrix("out")
        made = steps.target(wanted)
        steps.copy(a, made, part)
        factor_ldl(steps, made, steps.vector("pivots"), steps.vector("info"), **kind)
        steps.copy(made, wanted, part)  # whatever the routine has left beside the triangle
    return steps.plan(capture_safe=False)


def ldl_solve(request: LdlSolveRequest, steps: LinalgSteps) -> Plan:
    """Copy b into the result and solve there."""
    ldu, wanted = steps.matrix("ldu"), steps.matrix("out")
    if not ldu.is_column_major:
        made = steps.target(ldu)
        steps.copy(ldu, made, triangle(lower=request.lower))
        ldu = made
    x = steps.target(wanted)
    steps.copy(steps.matrix("b"), x)
    solve_ldl(steps, ldu, steps.vector("pivots"), x, lower=request.lower, hermitian=request.hermitian)
    steps.finish(x, wanted)
    return steps.plan(capture_safe=False)


def solve(request: SolveRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of the triangle, and solve in the result."""
    a, wanted, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    kind = {"lower": request.lower, "hermitian": request.assume_a is MatrixKind.HER}
    copy, x, pivots = steps.scratch_matrix(a.dtype, a.rows, a.cols), steps.target(wanted), steps.scratch(a.rows * WIDE)
    steps.copy(a, copy, triangle(lower=request.lower))
    factor_ldl(steps, copy, pivots, info, **kind)
    steps.copy(steps.matrix("b"), x)
    solve_ldl(steps, copy, pivots, x, **kind)
    steps.finish(x, wanted)
    steps.fill_nan_where(info, wanted)
    return steps.plan(capture_safe=False)


def triangle(*, lower: bool) -> CopyMode:
    """What is read of a matrix."""
    return CopyMode.LOWER if lower else CopyMode.UPPER


def factor_ldl(
    steps: LinalgSteps, a: Matrix, pivots: OperandPointer, info: OperandPointer, *, lower: bool, hermitian: bool
) -> None:
    """Factorize each matrix in its memory, with zeros beside the triangle; pivots of 64 bits.

    Of a matrix that is not finite all factors become NaN: what the routines do with NaN is documented nowhere. Nor do
    they tell of each singular matrix: of [[0, 0], [0, y]] `sytrf` of cuSOLVER 12.0 had a status of 0.
    """
    flags = steps.flag_nonfinite(a)
    if hermitian and a.dtype.is_complex:
        kind = cuda_type(a.dtype)
        steps.call_x("cusolverDnXhetrf", FILL[lower], a.rows, kind, a.pointer, a.ld, pivots, kind, info=info)
    else:
        narrow = steps.scratch(a.rows * NARROW)
        given, query = (FILL[lower], a.rows, a.pointer, a.ld, narrow), (a.rows, a.pointer, a.ld)
        steps.call_with_work(f"cusolverDn{LETTERS[a.dtype]}sytrf", a.dtype, *given, info=info, query_arguments=query)
        steps.append(ConvertPivots(steps.executor, narrow, pivots, a.rows * steps.batch, widen=True))
    choices = (int(lower), int(hermitian))
    steps.launch("note_singular_blocks", a.dtype, 1, a, a.rows, pivots, info, *choices, source=SOURCE)
    steps.fill_nan_where(flags, a)


def solve_ldl(
    steps: LinalgSteps, a: Matrix, pivots: OperandPointer, x: Matrix, *, lower: bool, hermitian: bool
) -> None:
    """Solve with the factors of each matrix, in x's memory.

    cuSOLVER 12.0's `sytrs` reads the pivots beside the stream: where these were still being written, which a GPU that
    other processes share makes likely, it gave wrong results, or read and wrote anywhere. So the host waits for them.
    """
    steps.wait()
    kind = cuda_type(a.dtype)
    given = (FILL[lower], a.rows, x.cols, kind, a.pointer, a.ld, pivots, kind, x.pointer, x.ld)
    is_hermitian = hermitian and a.dtype.is_complex
    name = "cusolverDnXhetrs" if is_hermitian else "cusolverDnXsytrs"
    steps.call_x(name, *given, info=steps.ignored_info(), params=is_hermitian)
