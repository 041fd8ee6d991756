"""Incomplete factors as objects with a `solve` method: `ilu0` and `ic0`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool, names_arguments
from dispatch.core.matrix_choices import Operation
from dispatch.errors import BadRequest, LinAlgError
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.direct_functions import as_csc, as_csr, csr_values
from dispatch.ops.sparse.format_functions import as_sparse
from dispatch.ops.sparse.tensor import SparseTensor, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IncompleteFactors", "ic0", "ilu0"]

NO_PIVOT = (
    "the pivot of row {row} is {what}, or is not stored",
    "add to the diagonal, or store its zeros explicitly",
)


class IncompleteFactors:
    """L and U of A ≈ L · U, or L of A ≈ L · Lᴴ, at the places of A: `solve` applies the inverse of their product.

    `matrix` holds them as one matrix of a fixed pattern, so that the analyses of its triangles stay with the plans.
    `source` is A in that pattern, in CSR, and `columns` is A in CSC if the caller passed CSC. They can be the
    preconditioner M of `cg`, `bicgstab` and `gmres`.
    """

    __slots__ = ("_factorize", "_is_lu", "columns", "matrix", "source")

    def __init__(self, source: SparseTensor, *, is_lu: bool, check: bool) -> None:
        self._is_lu, self._factorize = is_lu, ops.ilu0 if is_lu else ops.ic0
        self.columns, rows = as_csc(source), as_csr(source)
        self.source = rows if rows.form.pattern is not None else rows.fixed()
        self._make(self.source, check)

    def _make(self, source: SparseTensor, check: bool) -> None:
        check_bool("check", check)
        values, info = self._factorize(*source.parts)
        if check and (status := int(info.item())):
            meaning, hint = NO_PIVOT
            what = "0" if self._is_lu else "not above 0"
            raise LinAlgError(self.kind, {(): status}, meaning.format(row=status - 1, what=what), hint)
        self.matrix = source.with_values(values)

    @property
    def kind(self) -> str:
        """ "ilu0" or "ic0"."""
        return "ilu0" if self._is_lu else "ic0"

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def nnz(self) -> int:
        """The number of elements of the factors, which is that of A."""
        return self.matrix.nnz

    def solve(self, b: Any) -> Any:
        """The x of L·U·x = b, or L·Lᴴ·x = b, for a vector (n,) or a matrix (n, k): two triangular solves."""
        solve: Callable[..., Any] = ops.spsv if getattr(b, "ndim", 1) == 1 else ops.spsm
        parts = self.matrix.parts
        if self._is_lu:
            return solve(*parts, solve(*parts, b, uplo="lower", diag="unit"), uplo="upper")
        return solve(*parts, solve(*parts, b, uplo="lower"), uplo="lower", trans=Operation.C)

    def refactorize(self, values: Any, *, check: bool = True) -> IncompleteFactors:
        """Factorize other elements of A at the same places; returns self. On failure the previous factors remain.

        The elements are in the order of the A that the caller passed: by columns for CSC. Their dtype, number and
        device are those of the previous elements; BadRequest for others.
        """
        old, new = self.source.values, as_tensor("values", values)
        if new.dtype is not old.dtype or new.shape != old.shape or new.device is not old.device:
            raise BadRequest("values", str(new.layout), f"{old.dtype}{list(old.shape)} on {old.device!r}")
        source = self.source.with_values(csr_values(self.columns, new))
        self._make(source, check)
        self.source = source
        return self

    def __repr__(self) -> str:
        return f"IncompleteFactors({'L·U' if self._is_lu else 'L·Lᴴ'} of {self.matrix!r})"


@names_arguments
def ilu0(A: Any, *, check: bool = True) -> IncompleteFactors:
    """L and U of A ≈ L · U without fill, by the request `ilu0`; CSC and COO are converted by `tocsr`.

    Every diagonal element is stored, and indices are sorted (`sort`) and i32. LinAlgError for a pivot that is 0, after
    waiting for the status; with `check=False` there is no check.
    """
    return IncompleteFactors(as_sparse(A, "A"), is_lu=True, check=check)


@names_arguments
def ic0(A: Any, *, check: bool = True) -> IncompleteFactors:
    """L of A ≈ L · Lᴴ without fill, for a Hermitian positive definite A, by the request `ic0`; `check` as in `ilu0`."""
    return IncompleteFactors(as_sparse(A, "A"), is_lu=False, check=check)
