"""Direct solves under SciPy's names: `spsolve`, and the factors of a matrix as an object, `splu`."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool, names_arguments, shown
from dispatch.core.statuses import nonzero, on_host
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import I32
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.direct import SparseFactorMemory, SparseFactorPrecision, SparseKind
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.format_functions import as_sparse, tocoo, tocsr, with_i32_indices
from dispatch.ops.sparse.tensor import SparseTensor, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.matrix_choices import FillMode
    from dispatch.device.tensor import Tensor

__all__ = ["SparseLu", "factorized", "splu", "spsolve"]

_stamps = count(1)
BATCHED = len(("batch", "nnz"))  # axes
NOT_POSITIVE = "the matrix is not positive definite (info {status})", 'use assume_a="sym", "her" or "gen"'
SINGULAR = "the matrix is singular or nearly singular: pivots were too small (info {status})"


def as_csr(a: Any) -> SparseTensor:
    """A matrix as a SparseTensor in CSR; CSC and COO are converted by a request, and BSR is left for later refusal."""
    matrix = as_sparse(a, "A")
    return matrix if matrix.format is SparseFormat.BSR else tocsr(matrix)


def as_csc(a: Any) -> SparseTensor | None:
    """A matrix in CSC as one whose elements `csr_values` can convert repeatedly; None for other formats."""
    matrix = as_sparse(a, "A")
    return with_i32_indices(matrix) if matrix.format is SparseFormat.CSC else None


def csr_values(columns: SparseTensor | None, values: Tensor) -> Tensor:
    """Elements in the caller's order, reordered by rows: those of CSC are converted.

    The request `csr2csc` is repeated; nothing waits for it.
    """
    return values if columns is None else tocsr(columns.with_values(values)).values


def batch_operands(a: Any, values: Any) -> tuple[SparseTensor, Tensor]:
    """A pattern in CSR, and the elements of a batch of matrices at its places; no conversion changes their order."""
    matrix, elements = as_sparse(a, "A"), as_tensor("values", values)
    if matrix.format is not SparseFormat.CSR:
        raise BadRequest("A", repr(matrix), "a matrix in CSR, whose pattern `values` has", "A.tocsr() before")
    if elements.dtype is not matrix.values.dtype or elements.ndim != BATCHED or elements.shape[1] != matrix.nnz:
        wanted = f"{matrix.dtype}[batch, {matrix.nnz}], with a value of each matrix for each element of A"
        raise BadRequest("values", str(elements.layout), wanted)
    if elements.device is not matrix.device:
        raise BadRequest("values", f"a tensor on {elements.device!r}", f"one on {matrix.device!r}, the device of A")
    return matrix, elements


def solve_list(matrices: Any, b: Any, choices: dict[str, Any]) -> tuple[list[Any], Any]:
    """The list of solutions of as many systems, and their statuses; BadRequest for choices that need one pattern."""
    usual = {"values": None, "memory": SparseFactorMemory.DEVICE, "device_memory": None, "precision": None}
    for name, value in usual.items():
        choice = choices.pop(name)
        chosen = SparseFactorMemory.named(choice) if name == "memory" and isinstance(choice, str) else choice
        if chosen is not value:
            wanted = f"{'device' if name == 'memory' else value} with a list of matrices"
            raise BadRequest(
                name, shown(choice), wanted, "each matrix of the list has its own values" if name == "values" else ""
            )
    systems = [csr_with_i32_indices(as_csr(a)) for a in matrices]
    values, rows, columns = ([getattr(a, name) for a in systems] for name in ("values", "rows", "columns"))
    *solutions, info = ops.spsolve_batched(values, rows, columns, [a.form for a in systems], b, **choices)
    return solutions, info


def csr_with_i32_indices(a: SparseTensor) -> SparseTensor:
    """A matrix in CSR with indices of i32: i64 indices are converted on the host, as by `tocoo`."""
    is_narrow = a.rows.dtype is I32 and a.columns.dtype is I32
    return a if is_narrow or a.format is not SparseFormat.CSR else tocsr(tocoo(a))


def checked_solution(results: tuple[Any, Any], check: bool, caller: str) -> Any:
    """x, after waiting until its status, or those of a batch, are known to be 0; (x, info) without `check`.

    LinAlgError names the function `caller`.
    """
    if not check:
        return results
    x, info = results
    if failed := nonzero(on_host(info)):
        first = next(iter(failed.values()))
        unchecked = "splu(A, check=False)" if caller == "factorized" else "check=False"
        singular = SINGULAR, f"{unchecked} returns the result unchecked"
        raise LinAlgError(caller, failed, *(NOT_POSITIVE if first > 0 else singular))
    return x


@names_arguments
def spsolve(
    A: Any,
    b: Any,
    *,
    values: Any = None,
    assume_a: SparseKind | str = SparseKind.GEN,
    uplo: FillMode | str | None = None,
    memory: SparseFactorMemory | str = SparseFactorMemory.DEVICE,
    device_memory: int | None = None,
    refinements: int | None = None,
    precision: SparseFactorPrecision | str | None = None,
    check: bool = True,
) -> Any:
    """The x of A·x = b for a vector or a matrix b: the request `spsolve`, or `spsolve_batched`.

    With `values` (batch, nnz) there are as many matrices, with these elements at the places of A, which is in CSR, and
    b is (batch, n) or (batch, n, k). For a list of matrices, of any patterns and extents, b is a list, too, and so is
    the result; `memory` and `precision` are not supported then. The call waits for the status, and raises LinAlgError
    if it is not 0; with `check=False` it returns (x, info). Other choices are those of the requests.
    """
    check_bool("check", check)
    choices: dict[str, Any] = {"assume_a": assume_a, "uplo": uplo, "memory": memory, "device_memory": device_memory}
    choices |= {"refinements": refinements, "precision": precision}
    if isinstance(A, (list, tuple)):
        return checked_solution(solve_list(A, b, {"values": values, **choices}), check, "spsolve")
    if values is None:
        return checked_solution(ops.spsolve(*as_csr(A).parts, b, **choices), check, "spsolve")
    pattern, elements = batch_operands(A, values)
    parts = pattern.rows, pattern.columns, pattern.form
    return checked_solution(ops.spsolve_batched(elements, *parts, b, **choices), check, "spsolve")


class SparseLu:
    """The factors of a matrix, like `scipy.sparse.linalg.SuperLU`: `solve`, and `refactorize` for other values.

    For a batch it has the factors of each matrix; the elements are `values`, and `matrix` has the pattern.

    The constructor factorizes, and raises LinAlgError, for a copy of the values, so that the caller's values may
    change; the pattern may not. Analysis and factors belong to the plans of the stream that solves, one for each shape
    of right-hand sides. The first ones are for a vector; the first `solve` of another shape, or on another stream,
    factorizes the same copy again. `matrix` and `values` are in CSR, also for a matrix in CSC.
    """

    __slots__ = ("_choices", "_columns", "_stamp", "matrix", "values")

    def __init__(
        self,
        matrix: SparseTensor,
        choices: dict[str, Any],
        *,
        values: Tensor | None = None,
        check: bool = True,
        caller: str = "SparseLu",
    ) -> None:
        self._choices, self._columns = choices, as_csc(matrix)
        rows = as_csr(matrix)
        self.matrix = rows if rows.form.pattern is not None else rows.fixed()
        self._factorize(self.matrix.values if values is None else values, check, caller)

    def _factorize(self, values: Tensor, check: bool, caller: str) -> None:
        """Factorize a copy of some values; on failure the previous state remains."""
        check_bool("check", check)
        copied, stamp = values.copy(), next(_stamps)
        zeros = copied.device.zeros((*copied.shape[:-1], self.shape[0]), copied.dtype)
        checked_solution(self._run(copied, stamp, zeros), check, caller)
        self.values, self._stamp = copied, stamp
        if copied.ndim == 1:
            self.matrix = self.matrix.with_values(copied)

    def _run(self, values: Tensor, stamp: int, b: Any) -> tuple[Any, Any]:
        """Run the request for one matrix, or for a batch."""
        function = ops.spsolve if values.ndim == 1 else ops.spsolve_batched
        matrix = self.matrix
        results: tuple[Any, Any] = function(
            values, matrix.rows, matrix.columns, matrix.form, b, stamp=stamp, **self._choices
        )
        return results

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def nnz(self) -> int:
        """The number of elements of the matrix; the library does not report that of the factors."""
        return self.matrix.nnz

    def solve(self, b: Any, *, check: bool = True) -> Any:
        """x of A·x = b; `check` as in `spsolve`."""
        check_bool("check", check)
        return checked_solution(self._run(self.values, self._stamp, b), check, "SparseLu.solve")

    def refactorize(self, values: Any, *, check: bool = True) -> SparseLu:
        """Factorize other elements at the same places, which are copied; returns self. cuDSS keeps its analysis.

        The elements are in the order of the matrix that the caller passed: by columns for CSC. Their dtype, number and
        device are those of the previous elements; BadRequest for others. If they cannot be factorized the previous
        factors remain.
        """
        old, new = self.values, as_tensor("values", values)
        if new.dtype is not old.dtype or new.shape != old.shape:
            hint = f'x.astype("{old.dtype}")' if new.shape == old.shape else "call splu(A) for another pattern"
            raise BadRequest("values", str(new.layout), f"{old.dtype}{list(old.shape)}, as in the matrix", hint)
        if new.device is not old.device:
            raise BadRequest(
                "values", f"a tensor on {new.device!r}", f"one on {old.device!r}, the device of the matrix"
            )
        self._factorize(csr_values(self._columns, new), check, "SparseLu.refactorize")
        return self

    def __repr__(self) -> str:
        batch = f", batch of {self.values.shape[0]}" if self.values.ndim == BATCHED else ""
        return f"SparseLu({self.matrix!r}{batch})"


@names_arguments
def splu(
    A: Any,
    *,
    values: Any = None,
    assume_a: SparseKind | str = SparseKind.GEN,
    uplo: FillMode | str | None = None,
    memory: SparseFactorMemory | str = SparseFactorMemory.DEVICE,
    device_memory: int | None = None,
    refinements: int | None = None,
    precision: SparseFactorPrecision | str | None = None,
    check: bool = True,
) -> SparseLu:
    """The factors of a matrix, or of a batch, computed now, to solve with them repeatedly; choices as in `spsolve`.

    With `values` (batch, nnz) it factorizes a batch over the pattern of A, and `refactorize` takes as many elements.
    """
    choices: dict[str, Any] = {"assume_a": assume_a, "uplo": uplo, "memory": memory, "device_memory": device_memory}
    choices |= {"refinements": refinements, "precision": precision}
    if values is None:
        return SparseLu(as_sparse(A, "A"), choices, check=check, caller="splu")
    pattern, elements = batch_operands(A, values)
    return SparseLu(pattern, choices, values=elements, check=check, caller="splu")


@names_arguments
def factorized(A: Any) -> Callable[[Any], Any]:
    """A function that solves A·x = b, like that of `scipy.sparse.linalg.factorized`."""
    return SparseLu(as_sparse(A, "A"), {}, caller="factorized").solve
