"""The rows for requests that may name a routine, their `driver`: each driver has its own row of the table.

A request without a driver uses the first row, or `gesvdj` for many matrices that are small enough for its single
batched call: 100 matrices of 32 rows in f64 took 150 ms by `gesvd` on an H100, and 0.34 by `gesvdj`. With `autotune`
the rows whose residuals must meet the same bounds as the first row's support it too: their plans are timed, and the
fastest is remembered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.ops.linalg.spectral import EighDriver, SvdDriver

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.keys import Choice
    from dispatch.ops.linalg.spectral import EighRequest, GeneralizedEighRequest, SvdRequest

__all__ = [
    "DRIVERS",
    "JACOBI_OF_MANY",
    "by_gesvd",
    "by_gesvda",
    "by_gesvdj",
    "by_gesvdp",
    "by_syevd",
    "by_syevd_of_many",
    "by_syevj",
    "driver_of",
]

JACOBI_OF_MANY = 32  # the most rows and columns that `gesvdjBatched` supports
DRIVERS: dict[str, type[Choice]] = {"eigh": EighDriver, "generalized_eigh": EighDriver, "svd": SvdDriver}


def driver_of(row: Row) -> Choice:
    """The driver of a row: the one that its variant names, or the first one of its op."""
    kind = DRIVERS[row.op]
    return next((one for one in kind if one.name.lower() == row.variant), next(iter(kind)))


def _lacking(request: Any, driver: Choice, wanted: str, *, takes_open: bool) -> str:
    """The reason why the row of one driver does not support a request, or ""."""
    if request.driver is driver or (request.driver is None and takes_open):
        return ""
    return f"needs {wanted}, has {'none' if request.driver is None else request.driver.name.lower()}"


# -- the first rows, which take requests without a driver --------------------------------------------------------------
def by_gesvd(request: SvdRequest) -> str:
    """Driver gesvd, or none."""
    open_to = request.autotune or not at_once(request)
    needed = (
        "driver gesvd, or none"
        if open_to
        else "driver gesvd, or autotune, because gesvdj computes the whole batch at once"
    )
    return _lacking(request, SvdDriver.GESVD, needed, takes_open=open_to)


def at_once(request: SvdRequest) -> bool:
    """Whether `gesvdj` computes all matrices in one call: there are several, of up to 32 rows and columns."""
    return math.prod(request.batch) > 1 and max(request.a.shape[-2:]) <= JACOBI_OF_MANY


def by_syevd(request: EighRequest | GeneralizedEighRequest) -> str:
    """Driver syevd, or none."""
    return _lacking(request, EighDriver.SYEVD, "driver syevd, or none", takes_open=True)


# -- rows that are timed too, because their results must meet the same bounds ------------------------------------------
def by_gesvdj(request: SvdRequest) -> str:
    """Driver gesvdj, or no driver and many small matrices, or no driver and autotune."""
    takes_open = request.autotune or at_once(request)
    return _lacking(request, SvdDriver.GESVDJ, "driver gesvdj, or none and autotune", takes_open=takes_open)


def by_syevj(request: EighRequest | GeneralizedEighRequest) -> str:
    """Driver syevj, or none and autotune."""
    return _lacking(request, EighDriver.SYEVJ, "driver syevj, or none and autotune", takes_open=request.autotune)


def by_syevd_of_many(request: GeneralizedEighRequest) -> str:
    """Driver syevd, or none, and autotune."""
    if not request.autotune:
        return "needs autotune=True, has False"
    return _lacking(request, EighDriver.SYEVD, "driver syevd, or none", takes_open=True)


def by_gesvdp(request: SvdRequest) -> str:
    """Driver gesvdp, or none and autotune."""
    return _lacking(request, SvdDriver.GESVDP, "driver gesvdp, or none and autotune", takes_open=request.autotune)


# -- rows that a request must name: their results have to meet other bounds only --------------------------------------
def by_gesvda(request: SvdRequest) -> str:
    """Driver gesvda, which autotune never selects."""
    return _lacking(request, SvdDriver.GESVDA, "driver gesvda, which autotune never selects", takes_open=False)
