"""Linear algebra by LAPACK through SciPy: the host's implementation, and in double precision the reference.

Results are by name; if the status of a matrix is not 0 its results are NaN, as on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, work_of
from dispatch.errors import Refused
from dispatch.keys import C128, F64
from dispatch.ops.linalg.reference_derived import BATCHED, DERIVED
from dispatch.ops.linalg.request import MatrixKind, QrMode
from dispatch.ops.linalg.spectral_reference import SPECTRAL, lapack
from dispatch.ops.linalg.symmetric_reference import SYMMETRIC, factored, solved
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["RIGHT_EVEN_SO", "evaluate", "lapack", "scipy_linalg"]

RIGHT_EVEN_SO = ("lu_factor", "ldl")  # their results stay valid if the status is not 0
NEEDS_SCIPY = "needs SciPy on the host, which is not installed: pip install 'cudabind[host]'"


def scipy_linalg(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with SciPy's LAPACK; Refused if SciPy is not installed."""
    del request, executor
    try:
        import scipy.linalg.lapack  # noqa: F401  # checked now, used by the plan
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    return NumpyPlan(row, evaluate, work_of(F64 if row.dtypes[0] in (F64, C128) else row.dtypes[0]))


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, in a working dtype or the complex one of its precision."""
    arrays = {name: np.asarray(tensor) for name, tensor, written in request.tensors() if not written}
    first = arrays[request.reads[0]]
    dtype = np.result_type(work, np.complex64) if first.dtype.kind == "c" else work
    operands = {n: one.astype(dtype) if one.dtype.kind in "fc" else one for n, one in arrays.items()}
    outputs = request.outputs()
    kinds = {"f": work, "c": np.result_type(work, np.complex64)}
    results = {n: np.zeros(o.shape, kinds.get(o.dtype.numpy.kind, o.dtype.numpy)) for n, o in outputs.items()}
    if request.op in BATCHED:
        with np.errstate(all="ignore"):  # overflow, underflow and NaN are valid results
            return {n: one.astype(results[n].dtype) for n, one in BATCHED[request.op](request, **operands).items()}
    for place in np.ndindex(request.batch):
        one = MEANING[request.op](request, *(operands[name][place] for name in request.reads))
        for name in outputs:
            if one.get("info", 0) and results[name].dtype.kind in kinds and request.op not in RIGHT_EVEN_SO:
                results[name][place] = complex(np.nan, np.nan) if results[name].dtype.kind == "c" else np.nan
            else:
                results[name][place] = one[name]
    return results


def _cholesky(request: Any, a: Array) -> dict[str, Any]:
    if not a.size:
        return {"out": a, "info": 0}
    out, info = lapack("potrf", a.dtype)(a, lower=request.lower, clean=1)
    return {"out": out, "info": info}


def _cho_solve(request: Any, c: Array, b: Array) -> dict[str, Any]:
    if not b.size:
        return {"out": b}
    return {"out": lapack("potrs", c.dtype)(c, b, lower=request.lower)[0].reshape(b.shape)}


def _lu_factor(request: Any, a: Array) -> dict[str, Any]:
    del request
    if not a.size:
        return {"out": a, "pivots": np.zeros(0, np.int64), "info": 0}
    out, pivots, info = lapack("getrf", a.dtype)(a)
    return {"out": out, "pivots": pivots.astype(np.int64) + 1, "info": info}


def _lu_solve(request: Any, lu: Array, pivots: Array, b: Array) -> dict[str, Any]:
    if not b.size:
        return {"out": b}
    _check_pivots(pivots)
    return {"out": lapack("getrs", lu.dtype)(lu, pivots - 1, b, trans=request.trans)[0].reshape(b.shape)}


def _check_pivots(pivots: Array) -> None:
    """BadRequest for pivots that LAPACK would use as rows outside the matrix."""
    if pivots.min() < 1 or pivots.max() > len(pivots):
        from dispatch.errors import BadRequest

        expected = f"pivots from 1 to {len(pivots)}, as `lu_factor` counts"
        raise BadRequest(
            "pivots", f"pivots from {pivots.min()} to {pivots.max()}", expected, "SciPy's pivots count from 0: add 1"
        )


def _solve(request: Any, a: Array, b: Array) -> dict[str, Any]:
    if not b.size:
        return {"out": b, "info": 0}
    if request.assume_a is MatrixKind.POS:
        c, info = lapack("potrf", a.dtype)(a, lower=request.lower)
        x = b if info else lapack("potrs", a.dtype)(c, b, lower=request.lower)[0]
    elif request.assume_a is not MatrixKind.GEN:
        kind = {"lower": request.lower, "hermitian": request.assume_a is MatrixKind.HER}
        ldu, pivots, info = factored(a, **kind)
        x = b if info else solved(ldu, pivots, b, **kind)
    else:
        lu, pivots, info = lapack("getrf", a.dtype)(a)
        x = b if info else lapack("getrs", a.dtype)(lu, pivots, b)[0]
    return {"out": x.reshape(b.shape), "info": info}


def _qr(request: Any, a: Array) -> dict[str, Any]:
    (rows, cols), least = a.shape, min(a.shape)
    count = rows if request.mode is QrMode.COMPLETE else least
    if not a.size:
        return {"q": np.eye(rows, count), "r": np.zeros((count, cols)), "h": a, "tau": np.zeros(0)}
    h, tau, *_ = lapack("geqrf", a.dtype)(a)
    results = {"h": h, "tau": tau, "r": np.triu(h[:count])}
    if request.mode in (QrMode.REDUCED, QrMode.COMPLETE):
        work = np.zeros((rows, count), a.dtype, order="F")
        work[:, :least] = h[:, :least]
        name = "ungqr" if a.dtype.kind == "c" else "orgqr"
        results["q"] = lapack(name, a.dtype)(work, tau)[0]
    return results


ONE: dict[str, Callable[..., dict[str, Any]]] = {
    "cholesky": _cholesky,
    "cho_solve": _cho_solve,
    "lu_factor": _lu_factor,
    "lu_solve": _lu_solve,
    "solve": _solve,
    "qr": _qr,
    **SPECTRAL,
    **SYMMETRIC,
}


def _refined(name: str) -> Callable[..., dict[str, Any]]:
    """The implementation of an op whose solution is refined: the op without refinement, with 0 steps."""

    def meaning(request: Any, *given: Array) -> dict[str, Any]:
        if not all(np.isfinite(one).all() for one in given):  # refinement steps do not change that
            nan = complex(np.nan, np.nan) if given[0].dtype.kind == "c" else np.nan
            return {"out": nan, "residuals": np.nan, "iterations": 0, "info": 0}
        return {**(ONE | DERIVED)[name](request, *given), "iterations": 0}

    return meaning


MEANING = {**ONE, **DERIVED, "refined_solve": _refined("solve"), "refined_lstsq": _refined("lstsq")}
