"""The rules of this family's rows beyond dtypes: each returns "needs …, has …", or ""."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dispatch.core.layouts import aligned
from dispatch.keys import BF16, F16
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.modes import lower

if TYPE_CHECKING:
    from dispatch.core.request import Request

__all__ = [
    "adds_as_precisely",
    "asks_no_kernel",
    "compute_asked_for",
    "few_terms",
    "no_operators",
    "nonnegative_strides",
    "only_conjugates",
    "result_has_modes",
    "strides_along_modes",
    "summable",
]


MAX_TERMS = 1024  # a product of matrices adds up this number of terms in a short time, even in one block


def nonnegative_strides(request: Request[Any]) -> str:
    """Elements are aligned, and no stride is below 0."""
    if reason := aligned(request):
        return reason
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        steps = [step for extent, step in zip(layout.shape, layout.strides, strict=True) if extent > 1]
        if layout.size and min(steps, default=1) < 0:
            return f"needs strides of 0 or more, has {name} {layout}: copy it with dev.array(x)"
    return ""


def compute_asked_for(request: Any) -> str:
    """Sums of f64 in f32 are only for requests that ask for them, even if other rows refuse these."""
    return "" if request.compute is not None else "needs compute='32f', has None"


def no_operators(request: Any) -> str:
    """A matrix product has no operators."""
    names = [field for field in request.unary if request.operator(field).name != "IDENTITY"]
    return f"needs {names[0]} IDENTITY, has {request.operator(names[0]).name}" if names else ""


def asks_no_kernel(request: Any) -> str:
    """The request names no kernel of cuTENSOR and no way to choose one: other libraries do not support that."""
    for name in ("algo", "kernel_rank", "incremental_count"):
        if (choice := getattr(request, name)) is not None:
            return f"needs {name} None, has {getattr(choice, 'name', choice)}, which only cuTENSOR supports"
    return "needs jit False, has True, which only cuTENSOR supports" if request.jit else ""


def only_conjugates(request: Any) -> str:
    """For complex numbers, and for the factors of `cutensorContract`, cuTENSOR supports only IDENTITY and CONJ.

    With others its descriptors fail with CUTENSOR_STATUS_INVALID_VALUE or NOT_SUPPORTED.
    """
    for field, name in request.unary.items():
        tensor, operator = getattr(request, name), request.operator(field)
        if tensor is None or operator in (TensorOp.IDENTITY, TensorOp.CONJ):
            continue
        if request.op == "contract" or tensor.dtype.is_complex:
            of = f"for {tensor.dtype}" if tensor.dtype.is_complex else "of what is contracted"
            return f"needs {field} IDENTITY or CONJ {of}, has {operator.name}"
    return ""


def result_has_modes(request: Any) -> str:
    """cuTENSOR 2.8.1 does not contract three tensors to a result of one element: observed on an H100.

    Recorded, all dtypes failed with CUTENSOR_STATUS_CUDA_ERROR. With placeholder addresses, which a recording never
    reads, there was a fault: a part of the call ran immediately.
    """
    if all(request.sizes[mode] == 1 for mode in request.result_modes):
        return "needs a result of two elements at least, has one element: einsum contracts two tensors at a time"
    return ""


def few_terms(request: Any) -> str:
    """A scalar of so few terms that moving an operand takes no noticeable time.

    cuTENSOR's contractions to a scalar wait for the GPU, so an einsum that ends in one could not be a graph.
    """
    if any(request.sizes[mode] > 1 for mode in request.result_modes):
        return "needs a result of one element"
    terms = prod(request.sizes.values())
    return f"needs up to {MAX_TERMS} terms, has {terms}" if terms > MAX_TERMS else ""


def strides_along_modes(request: Any) -> str:
    """An operand has a stride along each mode: along others cuTENSOR would neither sum nor repeat."""
    views = (lower(request.modes_of(name), request.layout_of(name), request.sizes) for name in request.tensors_of_spec)
    stepped = "".join(view.modes for view in views)
    lost = [mode for mode, extent in request.sizes.items() if extent > 1 and mode not in stepped]
    return (
        f"needs an operand with a nonzero stride along {lost[0]}, has none: permute repeats along a mode"
        if lost
        else ""
    )


def summable(request: Any) -> str:
    """Over no elements only sums and products, with nothing added and a result without gaps."""
    empty = [mode for mode, extent in request.sizes.items() if not extent and mode not in request.result_modes]
    if not empty:
        return ""
    if not request.reads_added and request.layout_of("out").fills_bytes:
        return ""
    kind = "product" if getattr(request, "reduce", TensorOp.ADD) is TensorOp.MUL else "sum"
    return (
        f"needs an element along {empty[0]}, has none: an empty {kind} must be written to a result without gaps and"
        " without an added operand"
    )


def adds_as_precisely(request: Any) -> str:
    """With a C of 16 bits that is also D, cuBLASLt rounds the product before it adds it."""
    is_narrow = request.result_dtype in (F16, BF16) and request.reads_added
    return (
        f"needs no c for a result of {request.result_dtype}, has one: it would be added after rounding"
        if is_narrow
        else ""
    )
