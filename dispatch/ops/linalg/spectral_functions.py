"""Eigenvalues and singular values named as in SciPy and NumPy, with checked statuses; part of `dispatch.linalg`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, check_int
from dispatch.core.statuses import nonzero, on_host
from dispatch.errors import LinAlgError
from dispatch.ops import linalg as ops
from dispatch.ops.linalg.status import NOT_POSITIVE, checked

if TYPE_CHECKING:
    from dispatch.ops.linalg.spectral import EighDriver, SvdDriver

__all__ = ["eig", "eigh", "eigvals", "eigvalsh", "randomized_svd", "svd", "svdvals"]


def eigh(
    a: Any,
    b: Any = None,
    *,
    lower: bool = True,
    eigvals_only: bool = False,
    type: int = 1,  # noqa: A002  # SciPy's
    subset_by_index: Any = None,
    subset_by_value: Any = None,
    driver: EighDriver | str | None = None,
    autotune: bool = False,
    check: bool = True,
) -> Any:
    """(w, v) of A·V = V·diag(w) for a symmetric or Hermitian A; only w with `eigvals_only`.

    With a positive definite `b` it is A·v = w·B·v, or by `type` 2 A·B·v = w·v, 3 B·A·v = w·v. With `subset_by_value`,
    (low, high], only these are returned for one matrix; for a batch each matrix's are followed by NaN. With
    `check=False` it returns all tensors of the request, and nothing waits: w, v, the count if values are bounded, and
    info. With `autotune` the faster driver is determined once, and remembered.
    """
    check_bool("check", check)
    if b is not None:
        check_int("type", type, 1, 3)
    choices = {
        "lower": lower, "eigvals_only": eigvals_only, "driver": driver, "autotune": autotune,
        "subset_by_index": subset_by_index, "subset_by_value": subset_by_value,
    }  # fmt: skip
    if b is None:
        results = checked("eigh", ops.eigh(a, **choices), check=check)
    else:
        results = ops.generalized_eigh(a, b, itype=type, **choices)
        if check:
            results = checked_pair(results, int(results[0].shape[-1]) if subset_by_index is None else a.shape[-1])
    if not check or subset_by_value is None:
        return results
    *values, count = results
    counts = on_host(count)
    selected = [tensor[..., : int(counts)] for tensor in values] if not counts.ndim else values
    return selected[0] if eigvals_only else tuple(selected)


def checked_pair(results: tuple[Any, ...], n: int) -> Any:
    """Results of a pair of matrices; the status is above n if b is not positive definite."""
    if failed := nonzero(np.maximum(on_host(results[-1]) - n, 0)):
        raise LinAlgError(
            "eigh", failed, f"{NOT_POSITIVE}: that of b", "b must be positive definite; if a is, exchange a and b"
        )
    return checked("eigh", results, check=True)


def eigvalsh(
    a: Any,
    b: Any = None,
    *,
    lower: bool = True,
    type: int = 1,  # noqa: A002  # SciPy's
    subset_by_index: Any = None,
    subset_by_value: Any = None,
    driver: EighDriver | str | None = None,
    autotune: bool = False,
    check: bool = True,
) -> Any:
    """The eigenvalues of a symmetric or Hermitian matrix, ascending; see `eigh`."""
    subset = {"subset_by_index": subset_by_index, "subset_by_value": subset_by_value}
    return eigh(
        a, b, lower=lower, eigvals_only=True, type=type, driver=driver, autotune=autotune, check=check, **subset
    )


def svd(
    a: Any,
    full_matrices: bool = True,  # SciPy's
    compute_uv: bool = True,  # SciPy's
    *,
    driver: SvdDriver | str | None = None,
    autotune: bool = False,
    check: bool = True,
) -> Any:
    """(u, s, vh) of A = U·diag(s)·Vᴴ; only s without `compute_uv`.

    With `autotune` the fastest of the drivers that are as exact as GESVD is determined once, and remembered.
    """
    results = ops.svd(a, full_matrices=full_matrices, compute_uv=compute_uv, driver=driver, autotune=autotune)
    return checked("svd", results, check=check)


def svdvals(a: Any, *, driver: SvdDriver | str | None = None, autotune: bool = False, check: bool = True) -> Any:
    """The singular values of a matrix, descending."""
    return svd(a, compute_uv=False, driver=driver, autotune=autotune, check=check)


def eig(a: Any, *, left: bool = False, right: bool = True, check: bool = True) -> Any:
    """(w, v) of A·V = V·diag(w) for any square A; both are complex, in NumPy only if an eigenvalue is not real.

    With `left` it returns (w, vl, v), where vlᴴ·A = diag(w)·vlᴴ; without `right` it omits v.
    """
    for name, value in (("left", left), ("right", right)):
        check_bool(name, value)
    results = ops.eig(a, eigvals_only=not (left or right), left=left)
    if left and not right:
        w, vectors, _, *info = results
        results = (w, vectors, *info)
    return checked("eig", results, check=check)


def eigvals(a: Any, *, check: bool = True) -> Any:
    """The eigenvalues of a square matrix, complex, in no order."""
    return checked("eig", ops.eig(a, eigvals_only=True), check=check)


def randomized_svd(
    a: Any, rank: int, *, oversampling: int | None = None, iterations: int = 2, check: bool = True
) -> Any:
    """(u, s, vh) of the `rank` largest singular values of A, by random projection."""
    results = ops.randomized_svd(a, rank, oversampling=oversampling, iterations=iterations)
    return checked("randomized_svd", results, check=check)
