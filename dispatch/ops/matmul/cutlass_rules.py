"""What a CUTLASS row of matmul requires of a request beyond its columns: layouts that tensor maps and cores can read.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" where it is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.device.tensor import Tensor
from dispatch.errors import Refused
from dispatch.libraries.cutlass.layout import alignment, dense_line, lines_by_16, order_of
from dispatch.libraries.cutlass.visitors import lower
from dispatch.ops.matmul.cutlass import operands_of
from dispatch.ops.matmul.rules import along_k

if TYPE_CHECKING:
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = [
    "buildable",
    "by_4_bytes",
    "by_16_bytes",
    "dense_vectors",
    "k_dense",
    "linear",
    "no_fast_accum",
    "no_limit",
    "one_batch_axis",
    "some_elements",
    "whole_numbers",
]


def k_dense(request: MatmulRequest) -> str:
    """Operands that are not 16 bits wide are dense along k: Hopper's tensor cores read them in no other order."""
    wrong = []
    if order_of(request.a) != "row":
        wrong.append(f"a row-major (k dense): {along_k(request, 'a')}")
    if order_of(request.b) != "column":
        wrong.append(f"b column-major (k dense): {along_k(request, 'b')}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def by_16_bytes(request: MatmulRequest) -> str:
    """Matrices start at a multiple of 16 bytes, and so does each of their lines, as tensor maps require."""
    form = request.form
    matrices = {"a": form.a, "b": form.b, "c": None if form.c is form.out else form.c, "out": form.out}
    for name, kind in form.kinds.items():
        operand = form.operand_values.get(name)
        if kind in ("load", "store"):
            matrices[name] = operand  # type: ignore[assignment]  # the request has checked that it is a tensor
    wrong = [
        reason for name, tensor in matrices.items() if tensor is not None and (reason := lines_by_16(name, tensor))
    ]
    if not form.has_tree and form.out is None and form.n * form.d_dtype.bits % 128:  # D will be allocated dense
        wrong.append(f"out with lines at multiples of 16 bytes, or library='cutlass', has {form.n} columns")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def by_4_bytes(request: MatmulRequest) -> str:
    """Multistage kernels copy at least 4 bytes at a time, and read C and write D in rows."""
    wrong = []
    for name, tensor in (("a", request.a), ("b", request.b)):
        if not dense_line(tensor):
            wrong.append(f"{name} with dense rows or columns, has {tensor.layout}")
        elif alignment(tensor.shape, tensor.layout.strides, tensor.dtype.itemsize, tensor.layout.alignment) < 4:
            wrong.append(f"{name} with lines of and at multiples of 4 bytes, has {tensor.layout}")
    for name, matrix in (("c", request.form.c), ("out", request.out)):
        if matrix is not None and (not dense_line(matrix) or order_of(matrix) != "row"):
            wrong.append(f"{name} with dense rows, has {matrix.layout}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def buildable(request: MatmulRequest) -> str:
    """CUTLASS has visitors for the whole tree, over operands of these dtypes."""
    form = request.form
    try:
        lower(form.tree, operands_of(form), form.d_dtype, None if form.c is None else form.c.dtype)
    except Refused as refused:
        return str(refused)
    return ""


def dense_vectors(request: MatmulRequest) -> str:
    """Vectors are dense, and so is the memory of a reduction, which is filled by one memset."""
    wrong = []
    for name, kind in request.form.kinds.items():
        operand = request.form.operand_values.get(name)
        if kind not in ("row", "col", "reduce") or not isinstance(operand, Tensor):
            continue
        steps = operand.layout.strides[-1:] if operand.shape[-1:] != (1,) and kind != "reduce" else ()
        if (kind == "reduce" and not operand.layout.is_contiguous) or any(step != 1 for step in steps):
            wrong.append(f"a dense {name}, has {operand.layout}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def linear(request: MatmulRequest) -> str:
    """The epilogue is alpha · A · B + beta · C: multistage kernels have no other."""
    if not request.form.is_linear:
        return f"needs no epilogue but alpha, beta and c, has {request.form.tree}"
    return f"needs no config, has {request.config}" if request.config is not None else ""


def one_batch_axis(request: MatmulRequest) -> str:
    """At most one batch axis: a tensor map has one axis for the batch."""
    if len(request.batch) > 1:
        return f"needs one batch axis at most, has {len(request.batch)}: reshape them into one"
    return ""


def some_elements(request: MatmulRequest) -> str:
    """No extent is 0."""
    return "" if request.k and all(request.shape) else f"needs extents of 1 or more, has {(*request.shape, request.k)}"


def whole_numbers(request: MatmulRequest) -> str:
    """Scalars of an i32 D are whole numbers of 32 bits: it is computed in integers."""
    wrong = ", ".join(f"{name} {request.form.operand_values[name]}" for name in request.form.invalid_i32_scalars)
    return f"needs whole numbers of 32 bits for an i32 D, has {wrong}" if wrong else ""


def no_limit(request: MatmulRequest) -> str:
    """No workspace limit is given: a kernel needs the workspace that it was made for."""
    return "" if request.workspace is None else f"needs workspace=None, has {request.workspace}"


def no_fast_accum(request: MatmulRequest) -> str:
    """Fast accumulation is offered only for fp8 products."""
    return "needs fast_accum=False, has True" if request.fast_accum else ""
