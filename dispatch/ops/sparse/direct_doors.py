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

    Nothing is factorized before the first `solve`. Analysis and factors belong to the plans of the stream that solves,
    one for each shape of right-hand sides. Neither the pattern nor the values may change but by `refactorize`.
    """

    __slots__ = ("_choices", "_stamp", "matrix")

    def __init__(self, matrix: SparseTensor, choices: dict[str, Any]) -> None:
        self.matrix = matrix if matrix.form.pattern is not None else matrix.fixed()
        self._choices, self._stamp = choices, next(_stamps)

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

    def refactorize(self, values: Any) -> SparseLu:
        """Itself, with other elements at the same places; those that were there may have been overwritten, too.

        They are of the dtype and the number of those before, and on their device; BadRequest for others.
        """
        old, new = self.matrix.values, taken_in("values", values)
        if new.dtype is not old.dtype or new.shape != old.shape:
            hint = f'x.astype("{old.dtype}")' if new.shape == old.shape else "splu(A) factorizes another pattern"
            raise BadRequest("values", str(new.layout), f"{old.dtype}{list(old.shape)}, as the matrix has", hint)
        if new.device is not old.device:
            raise BadRequest("values", f"a tensor on {new.device!r}", f"one on {old.device!r}, as the matrix is")
        self.matrix, self._stamp = self.matrix.with_values(new), next(_stamps)
        return self

    def __repr__(self) -> str:
        return f"SparseLu({self.matrix!r})"


def splu(A: Any, *, assume_a: SparseKind | str = SparseKind.GEN, uplo: FillMode | str | None = None) -> SparseLu:
    """The factors of a matrix, to solve with them again and again."""
    return SparseLu(by_rows(A), {"assume_a": assume_a, "uplo": uplo})


def factorized(A: Any) -> Callable[[Any], Any]:
    """A function that solves A·x = b, as `scipy.sparse.linalg.factorized` gives one."""
    return splu(A).solve
