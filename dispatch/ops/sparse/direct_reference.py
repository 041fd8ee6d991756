"""Direct solves by SciPy's SuperLU: the host's results, and the expected ones in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, store, work_of
from dispatch.core.matrix_choices import FillMode
from dispatch.errors import Refused
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.matrix_reference import matrix_of, numbers
from dispatch.ops.sparse.reference import NEEDS_SCIPY
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.request import Operands
    from dispatch.core.row import Row

__all__ = ["LISTS", "evaluate_batch", "evaluate_direct", "evaluate_lists", "scipy_direct"]
__all__ += ["batch_systems", "full_matrix", "list_systems"]

SINGULAR, NOT_POSITIVE = -1, 1
LISTS = "several patterns"  # the variant of the rows that take lists


def scipy_direct(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that factorizes with SciPy in each call; Refused if SciPy is not installed."""
    del request, executor
    try:
        import scipy.sparse.linalg  # noqa: F401  # looked for now, used by the plan
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    if row.variant == LISTS:
        return ScipyListPlan(row, evaluate_lists, work_of(row.dtypes[0]))
    formula = evaluate_batch if row.op == "spsolve_batched" else evaluate_direct
    return NumpyPlan(row, formula, work_of(row.dtypes[0]))


class ScipyListPlan(NumpyPlan):
    """The systems of lists one after another; their outputs are not separate fields."""

    __slots__ = ()

    def run(self, request: Any, outputs: Operands) -> None:
        """Compute a request into its outputs, or into those that were allocated for it."""
        with np.errstate(all="ignore"):
            results = self._formula(request, self._work)
        for target, values in zip(request.result(outputs), results.values(), strict=True):
            store(values, target)


def full_matrix(request: Any, work: np.dtype[Any]) -> Any:
    """The matrix with both of its triangles, in CSC."""
    import scipy.sparse as sp

    matrix = matrix_of(request, work).tocsc()
    if request.uplo is None:
        return matrix
    below = request.uplo is FillMode.LOWER
    half = sp.tril(matrix, -1) if below else sp.triu(matrix, 1)
    other = half.T if request.assume_a is SparseKind.SYM else half.conj().T
    return (half + other + sp.diags_array(matrix.diagonal())).tocsc()


def evaluate_direct(request: Any, work: np.dtype[Any]) -> Results:
    """x and the status; NaN if a matrix cannot be factorized, or something is not finite."""
    from scipy.sparse.linalg import splu

    a, b = full_matrix(request, work), numbers(request.b, work)
    nan = np.full_like(b, complex(np.nan, np.nan) if b.dtype.kind == "c" else np.nan)
    if not np.isfinite(a.data).all():
        return {"out": nan, "info": np.asarray(np.int32(SINGULAR))}
    positive = request.assume_a is SparseKind.POS
    cholesky_options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    try:
        factors = splu(a, **(cholesky_options if positive else {}))
    except RuntimeError:  # exactly singular
        return {"out": nan, "info": np.asarray(np.int32(NOT_POSITIVE if positive else SINGULAR))}
    diagonal = factors.U.diagonal()
    if positive and not (diagonal.real > 0).all():
        return {"out": nan, "info": np.asarray(np.int32(NOT_POSITIVE))}
    return {"out": np.asarray(factors.solve(b)), "info": np.asarray(np.int32(0))}


def batch_systems(request: Any) -> list[Any]:
    """Each system of a batch, with the fields of a single request."""
    values, b, rows, columns = (np.asarray(getattr(request, name)) for name in ("values", "b", "rows", "columns"))
    same = {name: getattr(request, name) for name in ("form", "uplo", "assume_a")}
    return [
        SimpleNamespace(values=one, b=rhs, rows=rows, columns=columns, **same)
        for one, rhs in zip(values, b, strict=True)
    ]


def list_systems(request: Any) -> list[Any]:
    """Each system of lists, with the fields of a single request."""
    same = {name: getattr(request, name) for name in ("uplo", "assume_a")}
    parts = zip(request.values, request.rows, request.columns, request.form, request.b, strict=True)
    return [
        SimpleNamespace(values=values, rows=rows, columns=columns, form=form, b=b, **same)
        for values, rows, columns, form, b in parts
    ]


def evaluate_lists(request: Any, work: np.dtype[Any]) -> Results:
    """The solution of each system by its name, and the statuses."""
    solved = [evaluate_direct(one, work) for one in list_systems(request)]
    solutions = {f"out[{number}]": each["out"] for number, each in enumerate(solved)}
    return {**solutions, "info": np.stack([each["info"] for each in solved])}


def evaluate_batch(request: Any, work: np.dtype[Any]) -> Results:
    """The solution and the status of each system."""
    solved = [evaluate_direct(one, work) for one in batch_systems(request)]
    return {name: np.stack([each[name] for each in solved]) for name in ("out", "info")}
