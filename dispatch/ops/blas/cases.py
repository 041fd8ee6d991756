"""The test cases of the rows of BLAS, and wrong results that each case must reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dispatch.keys import HALF
from dispatch.ops.blas import evaluate, reference1, reference_rotations
from dispatch.ops.blas.cases1 import level1_cases
from dispatch.ops.blas.cases2 import level2_cases
from dispatch.ops.blas.cases3 import level3_cases
from dispatch.ops.blas.cases_gemv import gemv_cases
from dispatch.ops.blas.cases_rotations import rotation_cases
from dispatch.ops.blas.choices import DiagType, Operation
from dispatch.ops.blas.reference3 import ROUTINES
from dispatch.testing.mutations import other_alpha, other_beta, with_fields

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.testing.check import MadeCase

__all__ = ["MUTATIONS", "cases"]


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's routine."""
    if row.op in (*reference_rotations.ROUTINES, "copy"):
        return rotation_cases(row)
    if row.op in reference1.ROUTINES:
        return level1_cases(row)
    if row.op == "gemv":
        return [*([] if row.dtypes[0] in HALF else level2_cases(row)), *gemv_cases(row)]
    return level3_cases(row) if row.op in ROUTINES else level2_cases(row)


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` -----------------------------------
def other_side(request: Any) -> Any:
    """The other side, if the shapes allow both."""
    square = hasattr(request, "side") and len(set(request.extents()["out"][-2:])) == 1
    return request.side.other if square else None


def read_diagonal(request: Any) -> Any:
    """The diagonal treated as ones although it must be read."""
    return DiagType.UNIT if getattr(request, "diag", None) is DiagType.NON_UNIT else None


def other_operation(request: Any) -> Any:
    """The transpose instead of a matrix, or the reverse."""
    if not hasattr(request, "trans"):
        return None
    shapes = request.extents()
    sides = [*shapes["x"], *shapes["out"]] if "x" in shapes else shapes["a"][-2:]
    if len(set(sides)) > 1 or request.op.startswith("he"):
        return None
    return Operation.T if request.trans is Operation.N else Operation.N


_other = partial(with_fields, evaluate, 16)
MUTATIONS = {
    "another alpha": _other(alpha=other_alpha),
    "c with the other sign": _other(beta=other_beta),
    "the other side": _other(side=other_side),
    "a diagonal of ones": _other(diag=read_diagonal),
    "the other operation": _other(trans=other_operation),
}
