"""Eigenvalues and singular values in SciPy's and NumPy's words, their status looked at: a part of `dispatch.linalg`."""

from __future__ import annotations

from typing import Any

from dispatch.ops import linalg as ops
from dispatch.ops.linalg.spectral import EighDriver, SvdDriver
from dispatch.ops.linalg.status import checked

__all__ = ["eigh", "eigvalsh", "svd", "svdvals"]


def eigh(
    a: Any,
    *,
    lower: bool = True,
    eigvals_only: bool = False,
    driver: EighDriver | str = EighDriver.SYEVD,
    check: bool = True,
) -> Any:
    """(w, v) of A·V = V·diag(w) for a symmetric or Hermitian A; w alone with `eigvals_only`."""
    results = ops.eigh(a, lower=lower, eigvals_only=eigvals_only, driver=driver)
    return checked("eigh", results, check=check)


def eigvalsh(a: Any, *, lower: bool = True, driver: EighDriver | str = EighDriver.SYEVD, check: bool = True) -> Any:
    """The eigenvalues of a symmetric or Hermitian matrix, ascending."""
    return eigh(a, lower=lower, eigvals_only=True, driver=driver, check=check)


def svd(
    a: Any,
    full_matrices: bool = True,  # SciPy's
    compute_uv: bool = True,  # SciPy's
    *,
    driver: SvdDriver | str = SvdDriver.GESVD,
    check: bool = True,
) -> Any:
    """(u, s, vh) of A = U·diag(s)·Vᴴ; s alone without `compute_uv`."""
    results = ops.svd(a, full_matrices=full_matrices, compute_uv=compute_uv, driver=driver)
    return checked("svd", results, check=check)


def svdvals(a: Any, *, driver: SvdDriver | str = SvdDriver.GESVD, check: bool = True) -> Any:
    """The singular values of a matrix, descending."""
    return svd(a, compute_uv=False, driver=driver, check=check)
