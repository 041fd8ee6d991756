"""One trial of a request: operands laid out in poisoned memory, the expected outputs, and how far off each may be.

forms.py builds trials, tests run their requests and hand back the results. This file chooses no shapes and calls no
library; its bounds are derived below, not tuned to what a library happens to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import BF16, C64, C128, F8E4M3, F8E5M2, F16, F32, F64, FP8, HALF, Compute, Dtype, Epilogue
from dispatch.ops.matmul.formulas import EXACT, Precision, Results, addends, reference, scaled_product, unpack_mask

if TYPE_CHECKING:
    from dispatch.device import Device
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.tensor import Array, Tensor

__all__ = ["Memory", "Mismatch", "Trial", "bounds"]

POISON_BYTE = 0x5A

# fmt: off
# Unit roundoff 2^-p, for p significant bits, and half the smallest subnormal step.
ROUNDOFF = {
    F64: (2.0**-53, 0.0),    F32: (2.0**-24, 2.0**-150),  F16: (2.0**-11, 2.0**-25),  BF16: (2.0**-8, 2.0**-134),
    C128: (2.0**-53, 0.0),   C64: (2.0**-24, 2.0**-150),  F8E4M3: (2.0**-4, 2.0**-10),  F8E5M2: (2.0**-3, 2.0**-17),
}
# Of the sums, and of A and B before they are multiplied: tensor cores cut TF32 operands off rather than round them.
SUMS = {
    Compute.COMPUTE_16F: (2.0**-11, 0.0),            Compute.COMPUTE_32F: (2.0**-24, 0.0),
    Compute.COMPUTE_64F: (2.0**-53, 0.0),            Compute.COMPUTE_32I: (0.0, 0.0),
    Compute.COMPUTE_32F_FAST_16F: (2.0**-24, 2.0**-11),
    Compute.COMPUTE_32F_FAST_16BF: (2.0**-24, 2.0**-8),
    Compute.COMPUTE_32F_FAST_TF32: (2.0**-24, 2.0**-10),
}
# fmt: on
FP8_SUMS = 2.0**-14  # a quarter of what fp8 tensor cores lose of a sum of magnitudes: an estimate, see _CutOff
# Products that they add at once, the bits of fraction that each keeps, and those that it has.
FP8_GROUP, FP8_BITS, FP8_PRODUCT_BITS = 32, 13, 7
GPU_TANH = 2.0**-11  # tanh.approx.f32: largest relative error (PTX ISA)
GELU_STEEPEST = 1.13  # the largest slope of GELU; that of its slope is below 1


def _magnitudes(values: Array) -> Array:
    return np.abs(values).astype(values.dtype)


MAGNITUDES = Precision(operand=_magnitudes)


class _CutOff(Precision):
    """What fp8 tensor cores lose of each sum of products, at most.

    They align `FP8_GROUP` products and the sum so far to the largest of them and cut off what lies 13 bits behind its
    first: with products in this order that gives the very bits of an H200's 1.529052734375 for 1.530120849609375. A
    product has 7 bits itself, so that only small ones lose any, one unit at most.
    """

    def product(self, a: Array, b: Array, work: np.dtype[Any]) -> Array:
        total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), work)
        lost = np.zeros_like(total)
        for start in range(0, a.shape[-1], FP8_GROUP):
            some, others = a[..., start : start + FP8_GROUP], b[..., start : start + FP8_GROUP, :]
            terms = [np.abs(some[..., k, None] * others[..., k, None, :]) for k in range(some.shape[-1])]
            _, exponent = np.frexp(np.maximum(np.max(terms, axis=0), np.abs(total)))  # of a mantissa below 1
            unit = np.ldexp(1.0, exponent - 1 - FP8_BITS)
            for term in terms:
                lost += np.where(term < unit * 2**FP8_PRODUCT_BITS, np.minimum(term, unit), 0)
            lost += np.minimum(np.abs(total), unit)
            total += some @ others
        return lost


CUT_OFF = _CutOff()


class Mismatch(AssertionError):
    """An output that is further from the reference than its bound, or memory beside an output that was written."""


def poison(dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Values that show when they are read or left: NaN, or 0x5A in every byte where the dtype has none."""
    if dtype.numpy.kind in "iu":
        size = int(np.prod(shape)) * dtype.itemsize
        return np.full(size, POISON_BYTE, np.uint8).view(dtype.numpy).reshape(shape)
    return np.full(shape, np.nan, dtype.numpy)


@dataclass(frozen=True)
class Memory:
    """A view inside a larger buffer, and the buffer as it was."""

    view: Tensor
    whole: Tensor
    before: Array
    inside: tuple[Any, ...]

    @classmethod
    def lay(cls, device: Device, values: Array, *, columns: bool = False, padding: int = 0, guard: int = 0) -> Memory:
        """Put (…, rows, cols) values on a device, in column-major order if `columns`, with poison around them.

        `padding` elements follow every line, `guard` lines stand before and behind every matrix.
        """
        lines = np.swapaxes(values, -1, -2) if columns else values
        *batch, count, extent = lines.shape
        dtype = Dtype.of(values.dtype)
        before = poison(dtype, (*batch, count + 2 * guard, extent + padding))
        inside = (..., slice(guard, guard + count), slice(0, extent))
        before[inside] = lines
        whole = device.array(before)
        view = whole[inside]
        return cls(view.mT if columns else view, whole, before, inside)

    def disturbed(self) -> int:
        """The number of bytes outside the view that differ from what they were."""
        after = self.whole.numpy()
        changed = (_bytes(after) != _bytes(self.before)).sum(axis=-1)
        changed[self.inside] = 0
        return int(changed.sum())


def _bytes(values: Array) -> Array:
    """The bytes of each element along one more axis: NaN compares equal to itself."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, values.dtype.itemsize)


@dataclass(frozen=True)
class Trial:
    """A request with fresh operands, and all that is to be held against its outputs.

    The reference is computed before the run, for D may overwrite C. `check` takes what `run` returned.
    """

    name: str
    request: MatmulRequest
    expected: Results
    allowed: Results
    written: tuple[Memory, ...]

    @classmethod
    def of(cls, name: str, request: MatmulRequest, compute: Compute, written: tuple[Memory, ...]) -> Trial:
        """The trial of a request in a compute type; `written` are the buffers that its outputs lie in."""
        expected = reference(request)
        return cls(name, request, expected, bounds(request, compute, expected), written)

    def check(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch unless every output is within its bound and nothing beside the outputs was written."""
        given = list(result) if isinstance(result, tuple) else [result]
        names = ["out", *(name for name in ("aux", "bgrad") if name in self.expected)]
        outputs = dict(zip(names, given, strict=True))
        for name in ("amax_d", "amax_aux"):
            if name in self.expected:
                outputs[name] = getattr(self.request.scales, name)
        for name, tensor in outputs.items():
            self._compare(name, tensor.numpy())
        for memory in self.written:
            if count := memory.disturbed():
                raise Mismatch(f"{self.name}: {count} bytes beside {memory.view.layout} were written")

    def _compare(self, name: str, got: Array) -> None:
        expected, allowed = self.expected[name], self.allowed[name]
        if got.dtype == np.uint8 and name == "aux":  # beyond column n a library may leave what it likes
            got, expected = (unpack_mask(mask, self.request.n) for mask in (got, expected))
        got = got.reshape(expected.shape).astype(expected.dtype)
        with np.errstate(invalid="ignore"):
            off = np.abs(got.astype(np.result_type(got, np.float64)) - expected)
            wrong = ~((off <= allowed) | (got == expected))  # NaN is wrong, equal infinities are right
        if not wrong.any():
            return
        worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1)), got.shape)
        limit = np.broadcast_to(allowed, got.shape)[worst]
        raise Mismatch(
            f"{self.name}: {name} is wrong in {wrong.sum()} of {got.size} places; at {tuple(map(int, worst))} it is"
            f" {got[worst]}, expected {expected[worst]} within {limit:.3g} ({self.request.describe()})"
        )


def bounds(request: MatmulRequest, compute: Compute, expected: Results) -> Results:
    """How far each output may be from the float64 reference, element by element.

    With S = |alpha| · (|A| · |B|) · scales + |beta · C| + |bias|, the affine part x of a product in a compute type of
    unit roundoff u is within (8 + 4 √k) · u · S of the exact one: rounding errors of k sums add up like a random walk
    (of 4 standard deviations), 8 is for the few operations after them. Operands rounded to unit roundoff v first
    add 2 · v · S; fp8 tensor cores cut off part of every product (`_CutOff`; in other orders some 4 · `FP8_SUMS` · S).
    GELU passes errors on by its slope, at most `GELU_STEEPEST`, and adds that of the GPU's tanh. A result stored in a
    dtype of unit roundoff w is off by w of itself more. Sums over m or k for a bias gradient walk like those over k. A
    bit of a mask is free where |x| is within its bound of 0. Integers are exact.

    On a GPU, with a C of 16 bits, results were up to 2.7 half-units off the exact ones (cuBLASLt 13.1, algorithms 13,
    16, 21, 24 and 66). That fits a product that is kept in that dtype before beta · C, bias and activation, and bias
    gradients that sum D as it is stored, or partial sums in that dtype. It is inferred from the size of the errors, and
    allowed for: a roundoff w of the product more, and w of each term of a bias gradient. Before it is multiplied by
    gelu'(aux), the sum with beta · C is kept in that dtype, too: of 0.51608 + 3.65625, times 1.09353, cuBLASLt made
    4.59375, which follows from the sum rounded to bf16 and from nothing else; the exact 4.56257 rounds to 4.5625.
    """
    work = EXACT.work(request.a.dtype)
    if work.kind == "i":
        return {name: np.zeros(()) for name in expected}
    u, v = SUMS[compute]
    walk = 8 + 4 * np.sqrt(request.k)
    size = np.abs(scaled_product(request, MAGNITUDES, work))
    relative = walk * u + 2 * v
    kept = ROUNDOFF[request.c_dtype][0] if not request.device.is_host and request.c_dtype in HALF else 0.0
    affine = np.asarray((relative + kept) * size)
    if request.a.dtype in FP8 and not request.device.is_host:
        affine += np.maximum(4 * FP8_SUMS * size, np.abs(scaled_product(request, CUT_OFF, work)))
    added = 8 * max(u, 2.0**-53) + (kept if request.epilogue.is_gradient else 0.0)
    for addend in addends(request, work):
        affine = affine + added * np.abs(addend)
    allowed = {"out": _through(request, affine, u)}
    if "aux" in expected and request.epilogue.activation == "relu":
        allowed["aux"] = _near_zero(request, affine)
    elif "aux" in expected:
        allowed["aux"] = _stored(affine * _factor(request.scales.aux), expected["aux"], request.aux_dtype)
    if "bgrad" in expected:
        allowed["bgrad"] = _bgrad(request, expected, allowed["out"], u)
    for name, source in (("amax_d", "out"), ("amax_aux", "aux")):
        if name in expected:
            allowed[name] = np.asarray(allowed[source].max(initial=0) + 4 * u * expected[name])
    factor = _factor(request.scales.d)
    allowed["out"] = _stored(allowed["out"] * factor, expected["out"], request.d_dtype)
    return allowed


def _through(request: MatmulRequest, affine: Array, u: float) -> Array:
    """The bound of D before scaling, from that of its affine part."""
    epilogue = request.epilogue
    if epilogue.activation != "gelu":
        return affine
    tanh = 4 * u if request.device.is_host else GPU_TANH
    x = np.abs(scaled_product(request, EXACT, EXACT.work(request.a.dtype)))
    for addend in addends(request, EXACT.work(request.a.dtype)):
        x = x + np.abs(addend)
    if not epilogue.is_gradient:
        return np.asarray(GELU_STEEPEST * affine + (tanh + 8 * u) * x)
    stored = np.abs(np.asarray(request.aux).astype(np.float64)) * _factor(request.scales.aux)
    return np.asarray(GELU_STEEPEST * affine + x * (tanh * (1 + 2 * stored) + 16 * u))


def _near_zero(request: MatmulRequest, affine: Array) -> Array:
    """1 for the bits of the mask that rounding may turn."""
    work = EXACT.work(request.a.dtype)
    x = scaled_product(request, EXACT, work)
    for addend in addends(request, work):
        x = x + addend
    return np.asarray((np.abs(x) <= affine).astype(np.float64))


def _bgrad(request: MatmulRequest, expected: Results, out: Array, u: float) -> Array:
    dtype = request.c_dtype if request.bgrad is None else request.bgrad.dtype
    if request.epilogue is Epilogue.BGRADA:
        size, count = np.abs(np.asarray(request.a).astype(np.float64)).sum(axis=-1), request.k
    elif request.epilogue is Epilogue.BGRADB:
        size, count = np.abs(np.asarray(request.b).astype(np.float64)).sum(axis=-2), request.k
    else:
        scaled = expected["out"] / _factor(request.scales.d)
        size, count = np.abs(scaled).sum(axis=-2), request.m
    error = (8 + 4 * np.sqrt(count)) * u * size
    if request.epilogue.is_gradient:
        error = error + out.sum(axis=-2)
    if not request.device.is_host:
        error = error + ROUNDOFF[dtype][0] * size
    return _stored(np.broadcast_to(error, expected["bgrad"].shape), expected["bgrad"], dtype)


def _stored(error: Array, values: Array, dtype: Dtype) -> Array:
    """The bound after rounding to a dtype: what is rounded is at most its error larger than the exact value."""
    w, tiny = ROUNDOFF[dtype]
    return np.asarray(error + w * (np.abs(values) + error) + tiny)


def _factor(factor: Tensor | float | None) -> float:
    return 1.0 if factor is None else float(np.asarray(factor).reshape(()))
