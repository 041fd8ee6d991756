"""Symmetric and Hermitian indefinite matrices by cuSOLVER: `sytrf` and `sytrs`, and from 12.4 on `hetrf` and `hetrs`.

`sytrf` writes 32-bit pivots, and the solving routine reads 64-bit pivots: a kernel of this library widens them. Follows
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
    """Copy the triangle into the result, with zeros in the other one, and factorize it there; optionally expand it."""
    a, n, part = steps.matrix("a"), request.a.shape[-1], triangle(lower=request.lower)
    kind = {"lower": request.lower, "hermitian": request.hermitian}
    if request.expand:
        target, pivots = steps.scratch_matrix(a.dtype, n, n), steps.scratch(n * WIDE)
        steps.copy(a, target, part)
        factor_ldl(steps, target, pivots, steps.vector("info"), **kind)
        results = steps.matrix("lu"), steps.matrix("d"), steps.vector("perm")
        choices = (int(request.lower), int(request.hermitian))
        steps.launch("expand_ldl", a.dtype, n, target, n, pivots, *results, *choices, per_block=1, source=SOURCE)
    else:
        out = steps.matrix("out")
        target = steps.target(out)
        steps.copy(a, target, part)
        factor_ldl(steps, target, steps.vector("pivots"), steps.vector("info"), **kind)
        steps.copy(target, out, part)  # clears what the routine wrote to the other triangle
    return steps.plan(capture_safe=False)


def ldl_solve(request: LdlSolveRequest, steps: LinalgSteps) -> Plan:
    """Copy b into the result and solve there."""
    ldu, out = steps.column_major(steps.matrix("ldu"), triangle(lower=request.lower)), steps.matrix("out")
    x = steps.target(out)
    steps.copy(steps.matrix("b"), x)
    solve_ldl(steps, ldu, steps.vector("pivots"), x, lower=request.lower, hermitian=request.hermitian)
    steps.finish(x, out)
    return steps.plan(capture_safe=False)


def solve(request: SolveRequest, steps: LinalgSteps) -> Plan:
    """Factorize a copy of the triangle, and solve in the result."""
    a, out, info = steps.matrix("a"), steps.matrix("out"), steps.vector("info")
    kind = {"lower": request.lower, "hermitian": request.assume_a is MatrixKind.HER}
    copy, x, pivots = steps.scratch_matrix(a.dtype, a.rows, a.cols), steps.target(out), steps.scratch(a.rows * WIDE)
    steps.copy(a, copy, triangle(lower=request.lower))
    factor_ldl(steps, copy, pivots, info, **kind)
    steps.copy(steps.matrix("b"), x)
    solve_ldl(steps, copy, pivots, x, **kind)
    steps.finish(x, out)
    steps.fill_nan_where(info, out)
    return steps.plan(capture_safe=False)


def triangle(*, lower: bool) -> CopyMode:
    """The copy mode for the triangle that is read."""
    return CopyMode.LOWER if lower else CopyMode.UPPER


def factor_ldl(
    steps: LinalgSteps, a: Matrix, pivots: OperandPointer, info: OperandPointer, *, lower: bool, hermitian: bool
) -> None:
    """Factorize each matrix in its memory, with zeros in the other triangle; pivots of 64 bits.

    If a matrix is not finite all its factors become NaN: the behaviour of the routines for NaN is undocumented. The
    routines also do not report every singular matrix: for [[0, 0], [0, y]] `sytrf` of cuSOLVER 12.0 gave a status of 0.
    """
    flags = steps.flag_nonfinite(a)
    if hermitian and a.dtype.is_complex:
        kind = cuda_type(a.dtype)
        steps.call_x("cusolverDnXhetrf", FILL[lower], a.rows, kind, a.pointer, a.ld, pivots, kind, info=info)
    else:
        narrow = steps.scratch(a.rows * NARROW)
        arguments, query = (FILL[lower], a.rows, a.pointer, a.ld, narrow), (a.rows, a.pointer, a.ld)
        steps.call_with_work(
            f"cusolverDn{LETTERS[a.dtype]}sytrf", a.dtype, *arguments, info=info, query_arguments=query
        )
        steps.append(ConvertPivots(steps.executor, narrow, pivots, a.rows * steps.batch, widen=True))
    choices = (int(lower), int(hermitian))
    steps.launch("note_singular_blocks", a.dtype, 1, a, a.rows, pivots, info, *choices, source=SOURCE)
    steps.fill_nan_where(flags, a)


def solve_ldl(
    steps: LinalgSteps, a: Matrix, pivots: OperandPointer, x: Matrix, *, lower: bool, hermitian: bool
) -> None:
    """Solve with the factors of each matrix, in x's memory.

    `sytrs` of cuSOLVER 12.0 reads the pivots without waiting for the stream. While they were still being written, which
    is likely on a GPU that other processes share, it gave wrong results, or read and wrote anywhere. Therefore the host
    waits for them.
    """
    steps.wait()
    kind = cuda_type(a.dtype)
    arguments = (FILL[lower], a.rows, x.cols, kind, a.pointer, a.ld, pivots, kind, x.pointer, x.ld)
    is_hermitian = hermitian and a.dtype.is_complex
    name = "cusolverDnXhetrs" if is_hermitian else "cusolverDnXsytrs"
    steps.call_x(name, *arguments, info=steps.ignored_info(), params=is_hermitian)
