"""Error bounds for the results of this family: where values are rounded, in the order in which cuTENSOR computes.

Its user guide promises at least the compute type's precision, and gives few details. The rest was
observed on an H100 with cuTENSOR 2.8.1 and reproduced by the same arithmetic in NumPy. Cases use these bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import BF16, HALF, Compute, member
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.reference import (
    BINARY_OF,
    in_output_order,
    intermediate_magnitudes,
    magnitudes,
    operand,
    scaled,
    terms_summed,
)
from dispatch.testing.check import rounded
from dispatch.testing.roundoff import ROUNDOFF, SUMS

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["SUMMING", "bounds", "in_16_bits", "sums_in_parts"]

SUMMING = ("contract", "contract_trinary", "reduce_modes")
OWN_SUMS = {
    Compute.COMPUTE_16F: 2.0**-24,
    Compute.COMPUTE_32F_FAST_3XTF32: 2.0**-24,
    Compute.COMPUTE_32F_EMULATED_16FX4: 2.0**-23,
}
# The part of a number that splits into two numbers of 11 bits lose: nothing for the operands of these cases.
SPLIT = {Compute.COMPUTE_32F_FAST_3XTF32: 2.0**-22, Compute.COMPUTE_32F_EMULATED_16FX4: 2.0**-22}
OPERATORS = 16 * 2.0**-24  # the relative error of operators of one element, which are computed at least in f32
EXACT_OPERATORS = (TensorOp.IDENTITY, TensorOp.CONJ, TensorOp.ABS, TensorOp.NEG, TensorOp.RELU)


def in_16_bits(dtype: Dtype, compute: Compute | None) -> bool:
    """Whether everything is computed in f16 or bf16: operands of cases are then small integers, and sums are exact."""
    return compute is Compute.COMPUTE_16F or (compute is Compute.COMPUTE_32F_FAST_16BF and dtype is BF16)


def sums_in_parts(op: str, dtype: Dtype, compute: Compute | None) -> bool:
    """Whether cuTENSOR rounds parts of a sum to the result's dtype before it adds them up.

    Observed for sums along the axis of the smallest stride, although COMPUTE_32F promises sums in f32.
    """
    return op == "reduce_modes" and dtype in HALF and not in_16_bits(dtype, compute)


def bounds(request: Any, expected: Results) -> Results:
    """The error bound of the result: a sum of n adds √n of its roundoffs; operands may be rounded, too."""
    out, dtype = expected["out"], request.outputs()["out"].dtype
    compute: Any = member(request.compute)
    unit = OWN_SUMS.get(compute) or SUMS.get(compute, (2.0**-24, 0.0))[0]
    if request.op not in SUMMING:
        if in_16_bits(request.a.dtype, compute):
            return {"out": rounded(stepwise_error(request, dtype), out, dtype)}
        return {"out": rounded(16 * unit * part_magnitudes(request), out, dtype)}
    if getattr(request, "reduce", TensorOp.ADD) in (TensorOp.MAX, TensorOp.MIN):
        return {"out": rounded(4 * unit * np.abs(out), out, dtype)}
    if getattr(request, "reduce", TensorOp.ADD) is TensorOp.MUL:
        return {"out": rounded(64 * unit * np.abs(out), out, dtype)}
    count = np.prod([float(size) for mode, size in request.sizes.items() if mode not in request.result_modes])
    size = magnitudes(request) * (2 if dtype.is_complex else 1)
    error = (8 + 4 * np.sqrt(count)) * unit * size
    if request.op == "contract_trinary":
        # Two contractions: the result of the first is stored in the operands' dtype. It is an operand of the second,
        # which rounds it to its compute type like the others.
        stored = ROUNDOFF[request.a.dtype][0]
        error = error + (stored + SPLIT.get(compute, SUMS.get(compute, (0.0, 0.0))[1])) * intermediate_magnitudes(
            request
        )
    if sums_in_parts(request.op, dtype, compute) and count > 1:
        # Each element is in one part, and u times the magnitudes of all parts is at most u times those of all elements.
        error = error + ROUNDOFF[dtype][0] * terms_summed(request)
    return {"out": rounded(error, out, dtype)}


def part_magnitudes(request: Any) -> Array:
    """The magnitude that determines the roundoff of elementwise operations: that of all parts, added or multiplied."""
    total = np.zeros(request.shape)
    product = np.ones(request.shape)
    for name, number in zip(request.reads, request.numbers, strict=True):
        ordered = in_output_order(operand(request, name, EXACT), request.modes_of(name), request.result_modes)
        part = np.abs(scaled(request, number, ordered))
        total = total + part
        product = product * part
    return np.asarray(np.maximum(total, product) if request.binary else total)


def stepwise_error(request: Any, dtype: Dtype) -> Array:
    """The error of elementwise operations that round each step to 16 bits: operators, factors, pairwise operations.

    It does not include the last rounding, which is that of the result. Values that fit in 16 bits already, such as
    small integers, are not rounded.
    """
    unit = ROUNDOFF[dtype][0]

    def stored(values: Array, error: Array) -> Array:
        is_exact = (error == 0) & (values.astype(dtype.numpy).astype(np.float64) == values)
        return np.asarray(error + np.where(is_exact, 0.0, unit * (np.abs(values) + error)))

    fields = {name: field for field, name in request.unary.items()}
    parts: list[tuple[Array, Array]] = []
    for name, number in zip(request.reads, request.numbers, strict=True):
        values = in_output_order(operand(request, name, EXACT), request.modes_of(name), request.result_modes)
        is_exact = request.operator(fields[name]) in EXACT_OPERATORS
        error = np.zeros_like(values) if is_exact else OPERATORS * np.abs(values)
        if (factor := request.factor(number)) != 1:
            values, error = scaled(request, number, values), abs(factor) * stored(values, error)
        parts.append((values, error))
    (values, error), *others = parts
    for field, (other, others_error) in zip(request.binary, others, strict=True):
        error, other_error = stored(values, error), stored(other, others_error)
        kind = member(getattr(request, field))
        if kind is TensorOp.ADD:
            error = error + other_error
        elif kind is TensorOp.MUL:
            error = np.abs(values) * other_error + np.abs(other) * error + error * other_error
        else:
            error = np.maximum(error, other_error)
        values = np.asarray(BINARY_OF[kind](values, other))
    return np.broadcast_to(error, request.shape)
