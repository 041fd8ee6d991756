"""Error bounds of products over compressed matrices: the roundings of operands, sums, epilogue and result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, values
from dispatch.keys import I8, Compute
from dispatch.ops.structured.product import Activation24
from dispatch.ops.structured.reference import clipped, multiplied
from dispatch.testing.check import rounded
from dispatch.testing.roundoff import ROUNDOFF, by_numpy, tf32_error
from dispatch.testing.tensor_cores import STRUCTURED_CUT_OFF

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["bounds"]

F32_UNIT = 2.0**-24
GELU_SLOPE = 1.13  # the largest slope of GELU
GELU_UNIT = 2.0**-10  # the error of the GPU's approximate hyperbolic tangent


def bounds(request: Any, expected: Results, dense: Array) -> Results:
    """The bound of a result's error, element by element; at a jump of the activation, any value in reach is valid."""
    plain = replace(request, activation=Activation24.NONE, upper_bound=np.inf, threshold=0.0, gelu_scaling=1.0)
    before = multiplied(plain, EXACT, dense)["out"]
    a, b = dense.astype(np.float64), values(request.b, EXACT)
    error = before_activation(request, a, b, np.abs(before))
    out, jumps = expected["out"], np.zeros(before.shape, bool)
    if request.activation is Activation24.RELU:
        jumps = (np.abs(before - request.threshold) <= error) & (request.threshold != 0)
    elif request.activation is Activation24.GELU:
        size = abs(request.gelu_scaling)
        by_gpu = 0.0 if by_numpy(request.device) else GELU_UNIT
        error = size * (GELU_SLOPE * error + (by_gpu + 8 * F32_UNIT) * np.abs(before))
    return {"out": np.where(jumps, np.inf, rounded(error, clipped(out, request.d_dtype), request.d_dtype))}


def before_activation(request: Any, a: Array, b: Array, size_after: Array) -> Array:
    """The error of alpha · A · B + beta · C + bias, each summed in f32."""
    product, size = a @ b, np.abs(a) @ np.abs(b)
    alpha = request.factor("alpha") if request.alpha_vector is None else values(request.alpha_vector, EXACT)[:, None]
    terms = a.shape[-1] / 2
    error = F32_UNIT * size if request.a_dtype is I8 else (terms + 2) * F32_UNIT * size
    if not by_numpy(request.device):
        if request.compute is Compute.COMPUTE_32F_FAST_TF32:
            error = error + tf32_error(size, product, np.sqrt(a**2 @ b**2))
        elif request.compute is Compute.COMPUTE_16F:
            error = 0 * size  # the cases have integers whose sums are exact in f16
        elif request.a_dtype.is_fp8:
            error = error + STRUCTURED_CUT_OFF.product(a, b, EXACT)
    unit = ROUNDOFF[request.c_dtype][0] if request.compute is Compute.COMPUTE_16F else F32_UNIT
    reach = np.abs(product) if request.compute is Compute.COMPUTE_16F else size  # sums in f16 are exact
    added = np.abs(np.asarray(alpha)) * reach + size_after
    if request.reads_added:
        beta = request.factor("beta") if request.beta_vector is None else values(request.beta_vector, EXACT)[:, None]
        added = added + np.abs(beta * values(request.c, EXACT))
    return np.asarray(np.abs(np.asarray(alpha)) * error + 4 * unit * added)
