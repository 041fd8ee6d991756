"""The choices of Jacobi's methods of eigenvalues and singular values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.libraries.cusolver.handle import Settings

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["eigen_settings", "singular_settings"]

# Where Jacobi's method is done: ‖off-diagonal‖ at this many eps of ‖A‖, in the Frobenius norm. Eigenvalues are then off
# by its square, and the vectors' residual is below n·eps·‖A‖ times this. Rotations leave some eps of roundoff beside
# the diagonal: a smaller tolerance may never be reached, and each sweep in vain rounds all of the matrix once more.
TOLERANCE, SWEEPS = 4.0, 100


def eigen_settings(dtype: Dtype) -> Settings:
    """Those of `syevj` and `sygvj`."""
    settings = Settings("syevjInfo_t", "cusolverDnCreateSyevjInfo", "cusolverDnDestroySyevjInfo")
    settings.set("cusolverDnXsyevjSetTolerance", TOLERANCE * float(np.finfo(dtype.numpy).eps))
    settings.set("cusolverDnXsyevjSetMaxSweeps", SWEEPS)
    return settings


def singular_settings() -> Settings:
    """Those of `gesvdj`."""
    return Settings("gesvdjInfo_t", "cusolverDnCreateGesvdjInfo", "cusolverDnDestroyGesvdjInfo")
