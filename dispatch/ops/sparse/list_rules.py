"""The rules of the rows of `spsolve_batched` for its two requests: one pattern for all matrices, or lists.

Both requests have one op, so each row is matched with both. Each row has one rule, which refuses the other request, and
else returns the first reason of the rules for its own request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import I32
from dispatch.ops.sparse import rules
from dispatch.ops.sparse.direct_lists import BatchedSpsolveListRequest

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["is_packed", "lists", "one_pattern"]

MAX_INT = 2**31 - 1
PATTERN_RULES = (
    *(rules.aligned, rules.index_dtypes, rules.direct_batch_operands, rules.dense_results),
    *(rules.factors_on_device, rules.same_precision),
)


def one_pattern(request: Any) -> str:
    """Matrices with elements at the same places, dense operands, and factors on the GPU in their own precision."""
    if isinstance(request, BatchedSpsolveListRequest):
        return "needs values (batch, nnz) for the pattern of one matrix, has lists of matrices"
    return next((reason for rule in PATTERN_RULES if (reason := rule(request))), "")


def lists(request: Any) -> str:
    """Lists of matrices with elements, indices and counts of 32 bits, and dense results."""
    if not isinstance(request, BatchedSpsolveListRequest):
        return "needs lists of matrices, has values (batch, nnz) for the pattern of one matrix"
    return next((reason for rule in LIST_RULES if (reason := rule(request))), "")


def aligned(request: BatchedSpsolveListRequest) -> str:
    """No operand begins between two elements."""
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and layout.alignment < layout.dtype.itemsize:
            return f"needs {name} at a multiple of {layout.dtype.itemsize} bytes, has {layout.alignment}: copy it"
    return ""


def i32_indices(request: BatchedSpsolveListRequest) -> str:
    """Offsets and indices of 32 bits: NVIDIA's nvmath-python refuses others, because it saw wrong results with them."""
    for name, tensor, _ in request.tensors():
        if name.startswith(("rows", "columns")) and tensor.dtype is not I32:
            return f"needs {name} of i32, has {tensor.dtype}"
    return ""


def total_counts(request: BatchedSpsolveListRequest) -> str:
    """The rows and elements that cuDSS counts over all matrices of such a batch."""
    for name, count in (
        ("rows", sum(form.shape[0] for form in request.form)),
        ("elements", sum(values.shape[0] for values in request.values)),
    ):
        if count > MAX_INT:
            return f"needs at most {MAX_INT} {name} in all, has {count}"
    return ""


def direct_operands(request: BatchedSpsolveListRequest) -> str:
    """Matrices with elements, and solutions with contiguous columns."""
    for number, values in enumerate(request.values):
        if not values.shape[0]:
            return f"needs matrices with elements, has none in values[{number}]"
        out = request.layout_of("out", number)
        if not is_packed(out):
            return f"needs out[{number}] with contiguous columns, has {out}: pass out=None"
    return ""


def dense_statuses(request: BatchedSpsolveListRequest) -> str:
    """A status for each system, contiguous."""
    info = request.info
    if info is None or info.layout.strides[0] == 1 or info.shape[0] == 1:
        return ""
    return f"needs info dense, has {info.layout}: pass info=None"


def is_packed(layout: Layout) -> bool:
    """Whether a vector, or all columns of a matrix, are contiguous without gaps."""
    step = 1
    for extent, stride in zip(layout.shape, layout.strides, strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


LIST_RULES = (aligned, i32_indices, total_counts, direct_operands, dense_statuses)
