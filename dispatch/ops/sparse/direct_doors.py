"""Direct solves in SciPy's words: `spsolve`, and the factors of a matrix as an object, `splu`."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool
from dispatch.errors import BadRequest, LinAlgError
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.format_doors import of, tocsr
from dispatch.ops.sparse.tensor import SparseTensor, taken_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.matrix_choices import FillMode

__all__ = ["SparseLu", "factorized", "splu", "spsolve"]

_stamps = count(1)
NOT_POSITIVE = "the matrix is not positive definite (info {status})", 'assume_a="sym", "her" or "gen" takes it'
SINGULAR = (
    "the matrix is singular, or all but: pivots were too small (info {status})",
    "check=False gives what came out",
)


def by_rows(a: Any) -> SparseTensor:
    """A matrix as a SparseTensor in CSR; CSC and COO are converted, by a request, and BSR is left to be refused."""
    found = of(a)
    return found if found.format is SparseFormat.BSR else tocsr(found)


def looked_at(results: tuple[Any, Any], check: bool) -> Any:
    """x, once its status is known to be 0; both without `check`."""
    if not check:
        return results
    x, info = results
    if status := int(info.item()):
        raise LinAlgError("spsolve", {(): status}, *(NOT_POSITIVE if status > 0 else SINGULAR))
    return x


def spsolve(
    A: Any,
    b: Any,
    *,
    assume_a: SparseKind | str = SparseKind.GEN,
    uplo: FillMode | str | None = None,
    check: bool = True,
) -> Any:
    """The x of A·x = b for a vector or a matrix b: the request `spsolve`.

    The status is waited for, and LinAlgError raised where it is not 0; with `check=False` (x, info) comes back.
    """
    check_bool("check", check)
    return looked_at(ops.spsolve(*by_rows(A).parts, b, assume_a=assume_a, uplo=uplo), check)


class SparseLu:
    """The factors of a matrix, as `scipy.sparse.linalg.SuperLU`: `solve`, and `refactorize` for other values.

    They are made, and LinAlgError is raised, when this object is: of a copy of the values, so that those that were
    given may change. The pattern may not. Analysis and factors belong to the plans of the stream that solves, one for
    each shape of right-hand sides: those made at first are for a vector, and the first `solve` of another shape, or on
    another stream, factorizes the same copy once more.
    """

    __slots__ = ("_choices", "_stamp", "matrix")

    def __init__(self, matrix: SparseTensor, choices: dict[str, Any], *, check: bool = True) -> None:
        self._choices = choices
        self._factorize(matrix if matrix.form.pattern is not None else matrix.fixed(), check)

    def _factorize(self, matrix: SparseTensor, check: bool) -> None:
        """Factorize a copy of a matrix's values; where that fails what was there before stays."""
        check_bool("check", check)
        own, stamp = matrix.with_values(matrix.values.copy()), next(_stamps)
        nothing = own.device.zeros((own.shape[0],), own.values.dtype)
        looked_at(ops.spsolve(*own.parts, nothing, stamp=stamp, **self._choices), check)
        self.matrix, self._stamp = own, stamp

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def nnz(self) -> int:
        """The elements of the matrix; those of the factors the library keeps to itself."""
        return self.matrix.nnz

    def solve(self, b: Any, *, check: bool = True) -> Any:
        """x of A·x = b; `check` as `spsolve` has it."""
        check_bool("check", check)
        return looked_at(ops.spsolve(*self.matrix.parts, b, stamp=self._stamp, **self._choices), check)

    def refactorize(self, values: Any, *, check: bool = True) -> SparseLu:
        """Itself, with the factors of other elements at the same places, which are copied; cuDSS keeps its analysis.

        They are of the dtype and the number of those before, and on their device; BadRequest for others. Where they
        cannot be factorized the factors of before stay.
        """
        old, new = self.matrix.values, taken_in("values", values)
        if new.dtype is not old.dtype or new.shape != old.shape:
            hint = f'x.astype("{old.dtype}")' if new.shape == old.shape else "splu(A) factorizes another pattern"
            raise BadRequest("values", str(new.layout), f"{old.dtype}{list(old.shape)}, as the matrix has", hint)
        if new.device is not old.device:
            raise BadRequest("values", f"a tensor on {new.device!r}", f"one on {old.device!r}, as the matrix is")
        self._factorize(self.matrix.with_values(new), check)
        return self

    def __repr__(self) -> str:
        return f"SparseLu({self.matrix!r})"


def splu(
    A: Any,
    *,
    assume_a: SparseKind | str = SparseKind.GEN,
    uplo: FillMode | str | None = None,
    check: bool = True,
) -> SparseLu:
    """The factors of a matrix, made now, to solve with them again and again; `check` as `spsolve` has it."""
    return SparseLu(by_rows(A), {"assume_a": assume_a, "uplo": uplo}, check=check)


def factorized(A: Any) -> Callable[[Any], Any]:
    """A function that solves A·x = b, as `scipy.sparse.linalg.factorized` gives one."""
    return splu(A).solve
