"""The formulas of a MatmulRequest in NumPy, in any precision; in float64 they are the tests' reference.

Tests compare rows with `reference`; the host rows run `evaluate` and `evaluate_tree` (host.py). This file writes to no
tensor, rounds no result to an output's dtype and calls no library.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.precision import EXACT, FP8_MAX, Precision, to_tf32
from dispatch.device.layout import Array
from dispatch.device.tensor import Tensor
from dispatch.keys import F64, I8, Compute, Dtype, Epilogue, ScaleMode, member
from dispatch.ops.matmul.scales import BLOCK, VECTOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.ops.matmul.request import MatmulRequest

__all__ = [
    "Results",
    "addends",
    "evaluate",
    "evaluate_tree",
    "gelu",
    "gelu_slope",
    "reference",
    "scaled_product",
    "unpack_mask",
]

Results = dict[str, Array]

GELU_INNER = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def reference(request: MatmulRequest) -> Results:
    """All outputs of a request in float64 (complex128; exact int64 for i8), before rounding to their dtypes.

    Keys: "out" (…, m, n), fp8 saturated to the format's range; "aux" where the epilogue writes it (u8 mask rows of
    16 · ceil(n/128) bytes for ReLU, the input of GELU (…, m, n) else); "bgrad" (…, n) or (…, m); "amax_d" and
    "amax_aux" where the request asks for them. For a request with a tree: "out", and what the tree stores and reduces,
    by its names, unrounded. Call it before a request that works in place is run.
    """
    return evaluate_tree(request, np.float64) if request.has_tree else evaluate(request, EXACT)


def evaluate_tree(request: MatmulRequest, precision: type) -> Results:
    """The outputs of a request's tree by name, unrounded; f32 operands are rounded to TF32 if the request allows it."""
    from dispatch.libraries.cutlass.arithmetic import evaluate as apply  # imported here: few products have a tree

    form = request.form
    exact = request.a.dtype in (F64, I8)  # float64 holds sums of i8 products exactly
    work = np.float64 if exact else precision
    a, b = np.asarray(request.a), np.asarray(request.b)
    if request.compute is Compute.COMPUTE_32F_FAST_TF32:
        a, b = to_tf32(a), to_tf32(b)
    operands = {name: np.asarray(x) for name, x in form.operand_values.items() if name not in form.tree_outputs}
    source = None if form.c is None else np.asarray(form.c)
    with np.errstate(all="ignore"):
        accumulator = np.matmul(a.astype(work), b.astype(work))
    return apply(form.tree, accumulator, operands, source)


def evaluate(request: MatmulRequest, precision: Precision) -> Results:
    """The outputs of a request computed in a precision; fp8 outputs are saturated, none is rounded to its dtype."""
    scales, epilogue = request.scales, request.plain_epilogue
    work = precision.work(request.a.dtype)
    with np.errstate(all="ignore"):  # as on a GPU, an overflow gives a value and no warning
        x = _affine(request, precision, work)
        results = _finish(request, x, work)
        if epilogue in (Epilogue.BGRADA, Epilogue.BGRADB):
            results["bgrad"] = _operand_bgrad(request, work)
        if scales.amax_d is not None:
            results["amax_d"] = _largest(results["out"])
        if scales.amax_aux is not None and "aux" in results:
            results["amax_aux"] = _largest(results["aux"])
        results["out"] = _scaled(results["out"], scales.d, request.d_dtype, work)
        if epilogue.writes_aux and epilogue.activation == "gelu":
            results["aux"] = _scaled(results["aux"], scales.aux, request.aux_dtype, work)
    return results


def _affine(request: MatmulRequest, precision: Precision, work: np.dtype[Any]) -> Array:
    """alpha · scale_a · scale_b · A · B + beta · scale_c · C + bias."""
    x = scaled_product(request, precision, work)
    for addend in addends(request, work):
        x += addend
    return x


def scaled_product(request: MatmulRequest, precision: Precision, work: np.dtype[Any]) -> Array:
    """alpha · scale_a · scale_b · A · B, a fresh array (…, m, n)."""
    scales = request.scales
    a, a_factor = _operand(request.a, scales.a, member(scales.a_mode), work)
    b, b_factor = _operand(request.b.mT, scales.b, member(scales.b_mode), work)
    x = precision.product(a, np.swapaxes(b, -1, -2), work)
    if a_factor is not None:
        x *= a_factor if a_factor.ndim == 0 else a_factor[:, None]
    if b_factor is not None:
        x *= b_factor
    alpha = _number(request.alpha, work)
    if alpha != 1:
        x *= alpha
    return x


def addends(request: MatmulRequest, work: np.dtype[Any]) -> Iterator[Array]:
    """beta · scale_c · C and the bias, where a request has them; they broadcast to (…, m, n)."""
    beta = _number(0.0 if request.beta is None else request.beta, work)
    if beta != 0:  # with beta 0 nothing is read from C, whatever it holds
        c = _values(request.c if request.c is not None else request.out, work)  # C is D where none is given
        factor = beta if request.scales.c is None else beta * _number(request.scales.c, work)
        yield c if factor == 1 else factor * c
    if request.bias is not None:
        yield _values(request.bias, work)[..., None, :]


def _finish(request: MatmulRequest, x: Array, work: np.dtype[Any]) -> Results:
    """D, and aux and bgrad where the epilogue writes them, from the affine part; before scaling."""
    epilogue = request.plain_epilogue
    relu = epilogue.activation == "relu"
    results: Results = {}
    if epilogue.is_gradient:
        d = _through(request, x, work)
        if epilogue.writes_bgrad:
            results["bgrad"] = d.sum(axis=-2)
    else:
        if epilogue.writes_aux:
            results["aux"] = pack_mask(x >= 0) if relu else x  # cuBLASLt lets the gradient pass at 0
        d = np.maximum(x, 0) if relu else gelu(x) if epilogue.activation else x
    results["out"] = d
    return results


def _through(request: MatmulRequest, gradient: Array, work: np.dtype[Any]) -> Array:
    """A gradient multiplied by the derivative of the activation whose input, or mask, is aux."""
    aux = request.aux
    if request.plain_epilogue.activation == "relu":
        return np.where(unpack_mask(np.asarray(aux), request.n), gradient, gradient.dtype.type(0))
    values = _values(aux, work)
    if request.scales.aux is not None:  # multiplied by its factor when read, like A, B and C
        values = values * _number(request.scales.aux, work)
    return gradient * gelu_slope(values)


def gelu(x: Array) -> Array:
    """GELU by the tanh approximation, as in cuBLASLt."""
    t: Array = np.tanh(GELU_INNER * (x + GELU_CUBIC * x * x * x))
    return np.asarray(0.5 * x * (1 + t))


def gelu_slope(x: Array) -> Array:
    """The derivative of `gelu`."""
    t: Array = np.tanh(GELU_INNER * (x + GELU_CUBIC * x * x * x))
    steep = GELU_INNER * (1 + 3 * GELU_CUBIC * x * x)
    return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * steep)


def pack_mask(positive: Array) -> Array:
    """cuBLASLt's bit mask: column j is bit j % 8 of byte j // 8; rows are padded with zero bits to multiples of 128."""
    *outer, n = positive.shape
    mask = np.zeros((*outer, -(-n // BLOCK) * BLOCK // 8), np.uint8)
    packed = np.packbits(positive, axis=-1, bitorder="little")
    mask[..., : packed.shape[-1]] = packed
    return mask


def unpack_mask(mask: Array, n: int) -> Array:
    """The first n columns of a bit mask, as booleans."""
    return np.unpackbits(mask, axis=-1, count=n, bitorder="little").astype(np.bool_)


def _operand_bgrad(request: MatmulRequest, work: np.dtype[Any]) -> Array:
    """BGRADA, BGRADB: an operand as it is stored, summed over k, for each product of the batch."""
    if request.plain_epilogue is Epilogue.BGRADA:
        total, extent = _values(request.a, work).sum(axis=-1), request.m
    else:
        total, extent = _values(request.b, work).sum(axis=-2), request.n
    return np.broadcast_to(total, (*request.batch, extent))


def _operand(
    tensor: Tensor, factor: Tensor | float | None, mode: ScaleMode, work: np.dtype[Any]
) -> tuple[Array, Array | None]:
    """A (…, lines, k) operand, and the factor to apply to its sums: one number or one per line.

    Factors that change along k cannot wait for the sums: they are multiplied in here.
    """
    values = _values(tensor, work)
    if factor is None:
        return values, None
    if mode is ScaleMode.SCALAR_32F:
        return values, np.asarray(_number(factor, work))
    factors = np.asarray(factor).astype(work, copy=False)
    if mode is ScaleMode.OUTER_VEC_32F:
        return values, factors
    lines, k = tensor.shape[-2:]
    return values * _spread(factors, mode, lines, k), None


def _spread(factors: Array, mode: ScaleMode, lines: int, k: int) -> Array:
    """Block factors of a (lines, k) operand, one per element."""
    if mode is ScaleMode.VEC128_32F:
        return np.asarray(np.repeat(factors, BLOCK, axis=0)[:k].T)
    if mode is ScaleMode.BLK128x128_32F:
        return np.asarray(np.repeat(np.repeat(factors, BLOCK, axis=0)[:lines], BLOCK, axis=1)[:, :k])
    return np.asarray(np.repeat(untile(factors), VECTOR[mode], axis=1)[:lines, :k])


def untile(factors: Array) -> Array:
    """Scale factors in the tensor cores' order, rearranged to a (lines, blocks of k) array.

    The memory is tiles of 128 lines by 4 blocks, in row-major order; in a tile, line l and block j are at
    16 · (l % 32) + 4 · (l // 32) + j (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    lines, blocks = factors.shape
    tiles = factors.reshape(lines // 128, blocks // 4, 32, 4, 4)
    return np.asarray(tiles.transpose(0, 3, 2, 1, 4).reshape(lines, blocks))


def _values(tensor: Tensor | None, work: np.dtype[Any]) -> Array:
    """The elements of a tensor in a working dtype: a view of its memory where they are of that dtype on the host."""
    return np.asarray(tensor).astype(work, copy=False)


def _number(value: Any, work: np.dtype[Any]) -> Any:
    """A factor, given by value or in memory, as a scalar of the working dtype."""
    if isinstance(value, Tensor):
        return np.asarray(value).astype(work).reshape(())[()]
    return work.type(value)


def _largest(values: Array) -> Array:
    return np.asarray(np.abs(values).max(initial=0))


def _scaled(values: Array, factor: Tensor | float | None, dtype: Dtype, work: np.dtype[Any]) -> Array:
    """Values times their factor, saturated to the range of the dtype where that is an fp8 format."""
    if factor is not None:
        values = values * _number(factor, work)
    top = FP8_MAX.get(dtype)
    return values if top is None else np.clip(values, -top, top)
