"""The expected results, with NumPy: the host's rows use it in their precision, and all cases compare with float64."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, sigmoid, values, work_of
from dispatch.errors import BadRequest
from dispatch.keys import Compute, member
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.modes import ALPHABET

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.ops.contraction.base import ModesRequest

__all__ = [
    "BINARY_OF",
    "UNARY_OF",
    "einsum_of",
    "elementwise",
    "intermediate_magnitudes",
    "magnitudes",
    "numpy_modes",
    "summed",
]


def softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0, x) if x.dtype.kind == "f" else np.log(1 + np.exp(x)))


def complex_sigmoid(x: Array) -> Array:
    return np.asarray(sigmoid(x) if x.dtype.kind == "f" else 1 / (1 + np.exp(-x)))


UNARY_OF: dict[TensorOp, Callable[[Array], Array]] = {
    TensorOp.IDENTITY: lambda x: x,
    TensorOp.SQRT: np.sqrt,
    TensorOp.RELU: lambda x: np.maximum(x, 0),
    TensorOp.CONJ: np.conj,
    TensorOp.RCP: lambda x: 1 / x,
    TensorOp.SIGMOID: complex_sigmoid,
    TensorOp.TANH: np.tanh,
    TensorOp.EXP: np.exp,
    TensorOp.LOG: np.log,
    TensorOp.ABS: np.abs,
    TensorOp.NEG: np.negative,
    TensorOp.SIN: np.sin,
    TensorOp.COS: np.cos,
    TensorOp.TAN: np.tan,
    TensorOp.SINH: np.sinh,
    TensorOp.COSH: np.cosh,
    TensorOp.ASIN: np.arcsin,
    TensorOp.ACOS: np.arccos,
    TensorOp.ATAN: np.arctan,
    TensorOp.ASINH: np.arcsinh,
    TensorOp.ACOSH: np.arccosh,
    TensorOp.ATANH: np.arctanh,
    TensorOp.CEIL: np.ceil,
    TensorOp.FLOOR: np.floor,
    TensorOp.MISH: lambda x: x * np.tanh(softplus(x)),
    TensorOp.SWISH: lambda x: x * sigmoid(x),
    TensorOp.SOFT_PLUS: softplus,
    TensorOp.SOFT_SIGN: lambda x: x / (np.abs(x) + 1),
}
BINARY_OF: dict[TensorOp, np.ufunc] = {
    TensorOp.ADD: np.add,
    TensorOp.MUL: np.multiply,
    TensorOp.MAX: np.maximum,
    TensorOp.MIN: np.minimum,
}


def operand(request: ModesRequest, name: str, work: np.dtype[Any]) -> Array:
    """An operand, with its operator."""
    field = next((field for field, of in request.unary.items() if of == name), None)
    array = values(getattr(request, name), work)
    return array if field is None else np.asarray(UNARY_OF[member(getattr(request, field))](array))


def einsum_of(arrays: list[Array], modes: list[str], output: str) -> Array:
    """A sum of products over modes by `numpy.einsum`, for modes of any letters; extents of 1 broadcast."""
    counts = {mode: max(extent for term, array in zip(modes, arrays, strict=True)
                        for letter, extent in zip(term, array.shape, strict=True) if letter == mode)
              for mode in dict.fromkeys("".join(modes))}  # fmt: skip
    letters: dict[str, str] = {}
    if len(counts) > len(ALPHABET):  # more modes than NumPy has letters: those of one element are dropped
        shape = tuple(counts[mode] for mode in output)
        single = {mode for mode, extent in counts.items() if extent == 1}
        if len(counts) - len(single) > len(ALPHABET):
            raise BadRequest(
                "spec", f"{len(counts)} modes", f"at most {len(ALPHABET)} modes with more than one element"
            )
        arrays = [array[tuple(0 if mode in single else slice(None) for mode in term)]
                  for term, array in zip(modes, arrays, strict=True)]  # fmt: skip
        modes = ["".join(mode for mode in term if mode not in single) for term in modes]
        return einsum_of(arrays, modes, "".join(mode for mode in output if mode not in single)).reshape(shape)
    terms = ["".join(letters.setdefault(mode, ALPHABET[len(letters)]) for mode in term) for term in modes]
    result = "".join(letters[mode] for mode in output)
    return np.asarray(np.einsum(f"{','.join(terms)}->{result}", *arrays))


def in_output_order(array: Array, modes: str, output: str) -> Array:
    """An array with its modes in the order of the result: diagonals of repeated modes, extent 1 for missing modes."""
    unique = "".join(dict.fromkeys(modes))
    if unique != modes:
        array = einsum_of([array], [modes], unique)
    order = [unique.index(mode) for mode in output if mode in unique]
    index = tuple(slice(None) if mode in unique else None for mode in output)
    return np.asarray(array.transpose(order)[index])


def scaled(request: ModesRequest, name: str, array: Array) -> Array:
    """A factor times an array, in the array's precision; the array is not read if the factor is 0."""
    factor: Any = request.factor(name)
    if factor == 0:
        return np.zeros_like(array)
    return np.asarray(array * array.dtype.type(factor))


def summed(request: ModesRequest, work: np.dtype[Any]) -> Results:
    """Contractions and reductions: a sum, a product or an extremum over the modes that the result does not have."""
    arrays = [operand(request, name, work) for name in request.tensors_of_spec]
    modes, output = request.parsed
    kind: Any = getattr(request, "reduce", TensorOp.ADD)
    if member(kind) is TensorOp.ADD:
        wide = [np.broadcast_to(one, _broadcast_shape(term, request)) for one, term in zip(arrays, modes, strict=True)]
        result = einsum_of(wide, list(modes), output)
    else:
        unique = "".join(dict.fromkeys(modes[0]))
        lost = [mode for mode in unique if mode not in output]
        ordered = in_output_order(arrays[0], modes[0], output + "".join(lost))
        result = np.asarray(BINARY_OF[member(kind)].reduce(ordered, tuple(range(len(output), ordered.ndim))))
    result = scaled(request, "alpha", np.asarray(result))
    if request.reads_added:
        result = result + scaled(request, "beta", operand(request, request.added, work))
    return {"out": np.broadcast_to(result, request.shape)}


def _broadcast_shape(modes: str, request: ModesRequest) -> tuple[int, ...]:
    return tuple(request.sizes[mode] for mode in modes)


def elementwise(request: Any, work: np.dtype[Any]) -> Results:
    """Permutations, and two or three tensors element by element."""
    _, output = request.parsed
    parts = []
    for name, factor in zip(request.reads, request.numbers, strict=True):
        ordered = in_output_order(operand(request, name, work), request.modes_of(name), output)
        parts.append(scaled(request, factor, ordered))
    kinds = [BINARY_OF[member(getattr(request, field))] for field in request.binary]
    result = reduce(lambda done, pair: np.asarray(pair[0](done, pair[1])), zip(kinds, parts[1:], strict=True), parts[0])
    return {"out": np.broadcast_to(result, request.shape)}


def terms_summed(request: ModesRequest) -> Array:
    """|alpha| · Σ |A| · |B|: the magnitudes of the summed terms."""
    work = np.dtype(np.float64)
    arrays = [np.abs(operand(request, name, work)) for name in request.tensors_of_spec]
    modes, output = request.parsed
    wide = [np.broadcast_to(one, _broadcast_shape(term, request)) for one, term in zip(arrays, modes, strict=True)]
    return np.asarray(abs(request.factor("alpha")) * einsum_of(wide, list(modes), output))


def magnitudes(request: ModesRequest) -> Array:
    """|alpha| · Σ |A| · |B| + |beta| · |C|: the magnitude that the roundoff of a sum is proportional to."""
    result = terms_summed(request)
    if request.reads_added:
        result = result + abs(request.factor("beta")) * np.abs(operand(request, request.added, np.dtype(np.float64)))
    return np.asarray(result)


def intermediate_magnitudes(request: ModesRequest) -> Array:
    """|alpha| · Σ |T| · |C| of three tensors, T the sum of products of two of them, which cuTENSOR computes first.

    Which two it computes first is not documented: this is the maximum over all pairs.
    """
    work = np.dtype(np.float64)
    arrays = [operand(request, name, work) for name in request.tensors_of_spec]
    modes, output = request.parsed
    wide = [np.broadcast_to(one, _broadcast_shape(term, request)) for one, term in zip(arrays, modes, strict=True)]
    largest = np.zeros(request.shape)
    for last in range(3):
        first, second = (number for number in range(3) if number != last)
        shared = "".join(dict.fromkeys(mode for mode in modes[first] + modes[second] if mode in modes[last] + output))
        both = einsum_of([wide[first], wide[second]], [modes[first], modes[second]], shared)
        largest = np.maximum(largest, einsum_of([np.abs(both), np.abs(wide[last])], [shared, modes[last]], output))
    return np.asarray(abs(request.factor("alpha")) * largest)


def numpy_modes(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy: in f64 where the result is f64 or c128 or that is asked for, else in f32."""
    del executor
    work = np.dtype(np.float64) if row.compute is Compute.COMPUTE_64F else work_of(row.dtypes[-1])
    formula = elementwise if request.op in ("permute", "elementwise_binary", "elementwise_trinary") else summed
    return NumpyPlan(row, formula, work)
