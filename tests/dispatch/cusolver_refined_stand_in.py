"""cuSOLVER's iterative refinement over memory of the host: LAPACK's solution, and what the routine asks."""

# ruff: noqa: ARG001 - functions have the arguments of the library's

import numpy as np

from cudabind.sys import cusolverDn as dn
from dispatch.ops.linalg.reference import lapack

STEPS, OVERFLOWED = -3, -5  # below 0: it fell back, or nothing was finite there either
PREFIX = "cusolverDnIRSParamsSet"
METHODS, KINDS = dn.cusolverIRSRefinement_t, dn.cusolverPrecType_t
DTYPES = {
    KINDS.CUSOLVER_R_32F: np.dtype("f4"), KINDS.CUSOLVER_R_64F: np.dtype("f8"),
    KINDS.CUSOLVER_C_32F: np.dtype("c8"), KINDS.CUSOLVER_C_64F: np.dtype("c16"),
}  # fmt: skip
BITS = {"16F": 1, "16BF": 1, "TF32": 1, "32F": 2, "64F": 3}  # which is the lower one
base = None


def install(monkeypatch, stand_in):
    """Add these routines to those of a stand-in, and its settings to the plans."""
    globals()["base"] = stand_in
    stand_in.PLAIN.update(IRSXgesv=gesv, IRSXgels=gels)
    monkeypatch.setattr("dispatch.ops.linalg.cusolver_refinement.Settings", Settings)


class Settings:
    """Choices, each by a function that the library has, and of the kind that it takes."""

    def __init__(self, kind, create, destroy):
        assert create == kind.removesuffix("_t") + "Create"
        assert destroy == kind.removesuffix("_t") + "Destroy"
        assert all(hasattr(dn, name) for name in (kind, create, destroy))
        self.kind, self.choices, self.handle = kind, {}, self

    def set(self, function, value):
        assert function.startswith(PREFIX)
        assert hasattr(dn, function)
        name = function.removeprefix(PREFIX)
        assert isinstance(value, {"RefinementSolver": METHODS, "MaxIters": int}.get(name, KINDS))
        self.choices[name] = value


def dtype_of(params, infos, sides):
    """The dtype of the operands, once the choices are sound."""
    assert (params.kind, infos.kind) == ("cusolverDnIRSParams_t", "cusolverDnIRSInfos_t")
    main, lowest = (params.choices[f"Solver{one}Precision"] for one in ("Main", "Lowest"))
    (_, letter, *kind), (_, other, *lower) = main.name.split("_"), lowest.name.split("_")
    assert letter == other
    assert BITS[lower[0]] < BITS[kind[0]]
    method = params.choices["RefinementSolver"]
    assert method is METHODS.CUSOLVER_IRS_REFINE_CLASSICAL or (
        method is METHODS.CUSOLVER_IRS_REFINE_GMRES and sides == 1
    )
    assert params.choices["MaxIters"] >= 1
    return DTYPES[main]


def finish(a, b, x, found, status, steps, info):
    """As cuSOLVER 12.0: of a singular matrix the status is 0, of one with NaN as well, and x is b."""
    x[...] = found if status == 0 else np.inf
    taken = STEPS if status == 0 else OVERFLOWED
    if not np.isfinite(a).all():
        x[...], taken = np.nan_to_num(b[: len(x)]), 0
    base.strided(base.value(steps), np.int32, (1,), (1,))[0] = taken
    base.put_info(info, 0)
    a[...] = b[...] = 7


def gesv(params, infos, n, sides, a, lda, b, ldb, x, ldx, work, size, steps, info):
    dtype = dtype_of(params, infos, sides)
    assert size == base.WORK
    a, b, x = (
        base.columns(*one) for one in ((a, dtype, n, n, lda), (b, dtype, n, sides, ldb), (x, dtype, n, sides, ldx))
    )
    _, _, found, status = lapack("gesv", dtype)(a, b)
    finish(a, b, x, found, status, steps, info)


def gels(params, infos, m, n, sides, a, lda, b, ldb, x, ldx, work, size, steps, info):
    dtype = dtype_of(params, infos, sides)
    assert m >= n
    # cuSOLVER 12.0 says CUSOLVER_STATUS_IRS_NOT_SUPPORTED of GMRES with more rows than columns.
    assert m == n or params.choices["RefinementSolver"] is METHODS.CUSOLVER_IRS_REFINE_CLASSICAL
    assert size == base.WORK
    a, b, x = (
        base.columns(*one) for one in ((a, dtype, m, n, lda), (b, dtype, m, sides, ldb), (x, dtype, n, sides, ldx))
    )
    _, found, status = lapack("gels", dtype)(a, b)
    finish(a, b, x, found[:n], status, steps, info)
