"""Wrong results of sparse linear algebra that the cases must reject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.matrix_choices import DiagType, Operation
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.formulas import evaluate
from dispatch.testing.mutations import altered, changed, of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.testing.mutations import Mutation

__all__ = ["MUTATIONS"]

COUNTS = ("spgemm_nnz", "sparse_check", "csr2bsr_nnz")
COLUMN_OPS = (
    "sparse_mv",
    "spmm",
    "sddmm",
    "sparse_to_dense",
    "csr2csc",
    "spmm_op",
    "spmv_op",
    "sddmm_batched",
    "bsr2csr",
)


def neighbours(request: Any) -> Results | None:
    """Each element is read from the next column, and the last from the first."""
    if request.op not in COLUMN_OPS or request.form.format == SparseFormat.CSC:
        return None
    columns, base = np.array(request.columns), request.form.base
    wide = request.form.shape[1] // request.form.block[1]
    if not columns.size:
        return None
    return altered(evaluate, request, columns=(columns - base + 1) % wide + base)


def without_beta(request: Any) -> Results | None:
    """The added operand is left out."""
    return altered(evaluate, request, beta=0.0) if getattr(request, "reads_added", False) else None


def other_diagonal(request: Any) -> Results | None:
    """A unit diagonal where another is stored."""
    if getattr(request, "diag", None) is not DiagType.NON_UNIT:
        return None
    return altered(evaluate, request, diag=DiagType.UNIT)


def unconjugated(request: Any) -> Results | None:
    """The transpose for the adjoint."""
    if getattr(request, "trans", None) is not Operation.C or not request.values.dtype.is_complex:
        return None
    return altered(evaluate, request, trans=Operation.T)


def rotated_back(request: Any) -> Results | None:
    """A rotation the other way."""
    return altered(evaluate, request, s=-request.s) if request.op == "sparse_rot" and request.s else None


def conjugated_sine(request: Any) -> Results | None:
    """A rotation like BLAS's, with a conjugated sine."""
    if request.op != "sparse_rot" or not isinstance(request.s, complex):
        return None
    sine = request.s.conjugate()
    return {
        "out_y": altered(evaluate, request, s=sine)["out_y"],
        "out_values": altered(evaluate, request)["out_values"],
    }


def without_c(request: Any) -> Results | None:
    """A product over a semiring that ignores c."""
    return altered(evaluate, request, c=None) if request.op == "spmm_op" and request.c is not None else None


def with_zeros(request: Any) -> Results | None:
    """A product over a semiring that also adds zeros, as sums of cuSPARSE begin with them."""
    if request.op != "spmm_op" or request.c is not None or request.ring.epilogue is not None:
        return None
    result = altered(evaluate, request)["out"]
    is_sum = request.values.dtype.is_complex  # adding 0 changes nothing
    return None if is_sum else {"out": request.ring.add.of("add", result, np.zeros_like(result))}


def without_epilogue(request: Any) -> Results | None:
    """Sums of rows without the epilogue."""
    return altered(evaluate, request, epilogue=None) if getattr(request, "epilogue", None) is not None else None


def neighbouring_values(request: Any) -> Results | None:
    """Each element is the previous one; counts do not depend on elements."""
    rolled = None if request.op in COUNTS else _rolled(request)
    return None if rolled is None else dict(rolled)


_scaled = with_fields(
    evaluate, 1, alpha=lambda request: 1.5 * getattr(request, "alpha", 0) * (request.op not in COUNTS) or None
)  # a count does not depend on it


def has_lists(request: Any) -> bool:
    """Whether a request is of several systems, each with its own operands."""
    return isinstance(getattr(request, "values", None), tuple)


def scaled_more(request: Any) -> Results | None:
    """A factor that is too large; lists of systems have none."""
    result = None if has_lists(request) else _scaled(request)
    return None if result is None else dict(result)


def systems_exchanged(request: Any) -> Results | None:
    """For lists, the first system with the right-hand side of the second, up to the size of the smaller one."""
    if not has_lists(request) or len(request.b) < 2:
        return None
    first, second = (np.array(b) for b in request.b[:2])
    exchanged = first.copy().reshape(-1)
    exchanged[: second.size] = np.resize(second, min(exchanged.size, second.size))
    return dict(altered(evaluate, request, b=(changed(request.b[0], exchanged.reshape(first.shape)), *request.b[1:])))


def values_of_one(request: Any) -> Results | None:
    """For lists, each element of the largest matrix is the previous one."""
    if not has_lists(request):
        return None
    largest = max(range(len(request.values)), key=lambda number: request.values[number].size)
    values = list(request.values)
    values[largest] = changed(values[largest], np.roll(np.array(values[largest]), 1))
    return dict(altered(evaluate, request, values=tuple(values)))


_rolled = of_operand(evaluate, "values", lambda values: np.roll(values, 1, axis=0))

MUTATIONS: dict[str, Mutation] = {
    "values of a neighbour": neighbouring_values,
    "columns of a neighbour": neighbours,
    "alpha too large": scaled_more,
    "without beta": without_beta,
    "a unit diagonal": other_diagonal,
    "transposed for adjoint": unconjugated,
    "without c": without_c,
    "sums that begin with 0": with_zeros,
    "without an epilogue": without_epilogue,
    "rotated the other way": rotated_back,
    "the sine conjugated": conjugated_sine,
    "b of another system": systems_exchanged,
    "values of one system's neighbours": values_of_one,
}
