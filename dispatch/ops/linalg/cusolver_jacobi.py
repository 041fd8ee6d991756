"""The settings of Jacobi's methods for eigenvalues and singular values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.libraries.cusolver.handle import Settings

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["eigen_settings", "singular_settings"]

# The tolerance of Jacobi's method: it stops when ‖off-diagonal‖ is this many eps of ‖A‖, in the Frobenius norm. The
# error of the eigenvalues is the square of it, and the vectors' residual is below n·eps·‖A‖ times this. Rotations leave
# some eps of roundoff off the diagonal: a smaller tolerance may never be reached, and each useless sweep adds rounding
# errors to the whole matrix.
TOLERANCE, SWEEPS = 4.0, 100


def eigen_settings(dtype: Dtype) -> Settings:
    """The settings of `syevj` and `sygvj`."""
    settings = Settings("syevjInfo_t", "cusolverDnCreateSyevjInfo", "cusolverDnDestroySyevjInfo")
    settings.set("cusolverDnXsyevjSetTolerance", TOLERANCE * float(np.finfo(dtype.numpy).eps))
    settings.set("cusolverDnXsyevjSetMaxSweeps", SWEEPS)
    return settings


def singular_settings() -> Settings:
    """The settings of `gesvdj`."""
    return Settings("gesvdjInfo_t", "cusolverDnCreateGesvdjInfo", "cusolverDnDestroyGesvdjInfo")
