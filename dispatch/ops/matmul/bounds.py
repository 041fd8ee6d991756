"""The check of a request's results: expected outputs, error bounds, and guarded memory around the outputs.

cases.py makes checks; tests run their requests and pass the results back. This file chooses no shapes and calls no
library. Its bounds are derived below, not tuned to what a library happens to return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.precision import EXACT, Precision
from dispatch.keys import F64, FP8, HALF, Compute, Epilogue, ScaleMode
from dispatch.ops.matmul.reference import Results, addends, reference, scaled_product, unpack_mask
from dispatch.testing.memory import GuardedBuffer, Mismatch, poison
from dispatch.testing.roundoff import ROUNDOFF, SUMS, by_numpy, stored
from dispatch.testing.tensor_cores import CUT_OFF, SCALED_CUT_OFF, SPREAD

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["SPREAD", "Check", "bounds"]


GPU_TANH = 2.0**-11  # tanh.approx.f32: largest relative error (PTX ISA)
DOUBLE_TANH = 4e-10  # relative error of cuBLASLt's GELU in f64, which is used with reduced_precision=True
GELU_STEEPEST = 1.13  # the largest slope of GELU; that of its slope is below 1


def _magnitudes(values: Array) -> Array:
    return np.abs(values).astype(values.dtype)


MAGNITUDES = Precision(operand=_magnitudes)


@dataclass(frozen=True)
class Check:
    """A request with fresh operands, its expected outputs, and their bounds.

    The reference is computed before the run, because D may overwrite C. `verify` takes what `run` returned.
    """

    name: str
    request: MatmulRequest
    expected: Results
    allowed: Results
    written: tuple[GuardedBuffer, ...]

    @classmethod
    def of(cls, name: str, request: MatmulRequest, compute: Compute, written: tuple[GuardedBuffer, ...]) -> Check:
        """The check of a request in a compute type; `written` are the buffers that contain its outputs."""
        expected = reference(request)
        return cls(name, request, expected, bounds(request, compute, expected), written)

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch unless every output is within its bound and nothing around the outputs was written."""
        results = list(result) if isinstance(result, tuple) else [result]
        names = ["out", *(name for name in ("aux", "bgrad") if name in self.expected)]
        outputs = dict(zip(names, results, strict=True))
        for name in ("amax_d", "amax_aux"):
            if name in self.expected:
                outputs[name] = getattr(self.request.scales, name)
        for name, tensor in outputs.items():
            self._compare(name, tensor.numpy())
        for memory in self.written:
            if count := memory.disturbed():
                raise Mismatch(f"{self.name}: {count} bytes beside {memory.view.layout} were written")

    def renew(self, result: Tensor | tuple[Tensor, ...] | None = None) -> None:
        """Reset all outputs to what they were before the first run; allocated ones, from `result`, are poisoned."""
        for memory in self.written:
            memory.renew()
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        held = {id(tensor) for _, tensor, _ in self.request.tensors()}
        amax = (self.request.scales.amax_d, self.request.scales.amax_aux)
        for tensor in (*(t for t in results if id(t) not in held), *(t for t in amax if t is not None)):
            tensor.copy_from(poison(tensor.dtype, tensor.shape))

    def _compare(self, name: str, got: Array) -> None:
        expected, allowed = self.expected[name], self.allowed[name]
        if got.dtype == np.uint8 and name == "aux":  # beyond column n a library may write anything
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
    """The allowed distance of each output from the float64 reference, element by element.

    Affine part. With S = |alpha| · (|A| · |B|) · scales + |beta · C| + |bias|, the affine part x of a product in a
    compute type of unit roundoff u is within (8 + 4 √k) · u · S of the exact one: the rounding errors of k sums add up
    like a random walk (4 standard deviations), and 8 is for the few operations after them.
    Rounded operands. Operands that are first rounded with unit roundoff v add 4 · v · R, with R the root of the sum of
    the squares of the products: a rounding error within ±v has a standard deviation of 0.4 · v for spread mantissas,
    and two of them 0.57 · v. Tensor cores truncate TF32 operands instead, which makes all of them smaller, by v · |x|,
    with half the spread. The error is never more than 2 · v · S. fp8 tensor cores truncate every product
    (tensor_cores.py).
    Epilogue. GELU multiplies errors by its slope, at most `GELU_STEEPEST`, and adds the error of the GPU's tanh.
    Bias gradients. Sums over m or k have random-walk errors, too, and the errors of their terms add up like the root of
    the sum of the squares.
    A result must be a value that its dtype can round to from within the bound. A bit of a mask is free where |x| is
    within its bound of 0. Integers are exact.

    With `reduced_precision` the library may round early: a product with a 16-bit C may be kept in that dtype before
    beta · C, bias and activation, in parts, and so may the sum before it is multiplied by gelu'(aux). For example,
    cuBLASLt 13.1 computed (0.51608 + 3.65625) · 1.09353 as 4.59375, which only follows from the sum rounded to bf16;
    the exact 4.56257 rounds to 4.5625. Otherwise only D may be rounded before it is summed to a bias gradient.

    Sums in f16 (COMPUTE_16F) are allowed k/8 more roundoffs: two for each 16 terms, which tensor cores may truncate
    rather than round. Whole numbers and quarters that f16 holds are exact.
    """
    work = EXACT.work(request.a.dtype)
    if work.kind == "i":
        return {name: np.zeros(()) for name in expected}
    affine = _affine(request, compute, work)
    u = SUMS[compute][0]
    allowed = {"out": _through(request, affine, u)}
    if "aux" in expected and request.plain_epilogue.activation == "relu":
        allowed["aux"] = _near_zero(request, affine)
    elif "aux" in expected:
        allowed["aux"] = affine * _factor(request.scales.aux)
    if "bgrad" in expected:
        allowed["bgrad"] = _bgrad(request, expected, allowed["out"], u)
    allowed["out"] = allowed["out"] * _factor(request.scales.d)
    for name, source in (("amax_d", "out"), ("amax_aux", "aux")):
        if name in expected:
            factor = _factor(getattr(request.scales, source.replace("out", "d")))
            largest = (np.abs(expected[source]) + allowed[source]).max(initial=0) / factor
            allowed[name] = np.asarray(max(largest - expected[name], 0) + 4 * u * expected[name])
    allowed["out"] = stored(allowed["out"], expected["out"], request.d_dtype)
    if "aux" in expected and request.plain_epilogue.activation == "gelu":
        allowed["aux"] = stored(allowed["aux"], expected["aux"], request.aux_dtype)
    return allowed


def _affine(request: MatmulRequest, compute: Compute, work: np.dtype[Any]) -> Array:
    """The bound of alpha · scales · A · B + beta · C + bias."""
    u, v = SUMS[compute]
    if compute is Compute.COMPUTE_16F:
        return _in_half(request, u, work)
    product, size, spread = (np.abs(scaled_product(request, p, work)) for p in (EXACT, MAGNITUDES, SPREAD))
    affine = np.asarray((8 + 4 * np.sqrt(request.k)) * u * size)
    cut = compute is Compute.COMPUTE_32F_FAST_TF32
    affine = affine + np.minimum(2 * v * size, v * (product + 2 * spread if cut else 4 * spread))
    early_roundoff = _kept(request)
    if request.reduced_precision:
        affine = affine + early_roundoff * np.minimum(size, product + spread)
    if request.a.dtype in FP8 and not by_numpy(request.device):
        in_blocks = {request.scales.a_mode, request.scales.b_mode} - {ScaleMode.SCALAR_32F, ScaleMode.OUTER_VEC_32F}
        affine = affine + np.abs(scaled_product(request, SCALED_CUT_OFF if in_blocks else CUT_OFF, work))
    added = 8 * max(u, 2.0**-53) + (
        early_roundoff if request.reduced_precision and request.plain_epilogue.is_gradient else 0.0
    )
    for addend in addends(request, work):
        affine = affine + added * np.abs(addend)
    return np.asarray(affine)


def _in_half(request: MatmulRequest, u: float, work: np.dtype[Any]) -> Array:
    """The bound of sums in f16: 0 where all terms and sums are multiples of 1, or of 1/4, that f16 holds."""
    size = np.abs(scaled_product(request, MAGNITUDES, work))
    added = sum((np.abs(addend) for addend in addends(request, work)), np.zeros(()))
    off = (8 + 4 * np.sqrt(request.k) + request.k / 8) * u * size + 8 * u * added
    terms = [np.asarray(tensor).astype(work) for tensor in (request.a, request.b)]
    if not all((np.rint(one) == one).all() for one in terms):
        return np.asarray(off)
    step = next((step for step in (1.0, 0.25) if all((one % step == 0).all() for one in (size, added))), 0.0)
    return np.asarray(np.where(size + added <= step / u, 0.0, off))


def _kept(request: MatmulRequest) -> float:
    """The unit roundoff of intermediate results that a library may store in 16 bits; 0 if it stores none."""
    if by_numpy(request.device) or request.c_dtype not in HALF:
        return 0.0
    return ROUNDOFF[request.c_dtype][0]


def _through(request: MatmulRequest, affine: Array, u: float) -> Array:
    """The bound of D before scaling, from the bound of its affine part."""
    epilogue = request.plain_epilogue
    if epilogue.activation != "gelu":
        return affine
    rough = DOUBLE_TANH if request.reduced_precision else 4 * u
    tanh = 4 * u if by_numpy(request.device) else rough if request.a.dtype is F64 else GPU_TANH
    x = np.abs(scaled_product(request, EXACT, EXACT.work(request.a.dtype)))
    for addend in addends(request, EXACT.work(request.a.dtype)):
        x = x + np.abs(addend)
    if not epilogue.is_gradient:
        return np.asarray(GELU_STEEPEST * affine + (tanh + 8 * u) * x)
    stored = np.abs(np.asarray(request.aux).astype(np.float64)) * _factor(request.scales.aux)
    return np.asarray(GELU_STEEPEST * affine + x * (tanh * (1 + 2 * stored) + 16 * u))


def _near_zero(request: MatmulRequest, affine: Array) -> Array:
    """1 for the bits of the mask that rounding may flip."""
    work = EXACT.work(request.a.dtype)
    x = scaled_product(request, EXACT, work)
    for addend in addends(request, work):
        x = x + addend
    return np.asarray((np.abs(x) <= affine).astype(np.float64))


def _bgrad(request: MatmulRequest, expected: Results, out: Array, u: float) -> Array:
    dtype = request.c_dtype if request.bgrad is None else request.bgrad.dtype
    if request.plain_epilogue is Epilogue.BGRADA:
        terms = np.swapaxes(np.asarray(request.a).astype(np.float64), -1, -2)
    elif request.plain_epilogue is Epilogue.BGRADB:
        terms = np.asarray(request.b).astype(np.float64)
    else:
        terms = expected["out"] / _factor(request.scales.d)
    error = (8 + 4 * np.sqrt(terms.shape[-2])) * u * np.abs(terms).sum(axis=-2)
    if request.plain_epilogue.is_gradient:
        error = error + _together(out, -2)
    error = error + _kept(request) * 2.5 * _together(terms, -2)  # six times 0.4 of the roundoff of each
    return stored(np.broadcast_to(error, expected["bgrad"].shape), expected["bgrad"], dtype)


def _together(errors: Array, axis: int) -> Array:
    """The error of a sum whose terms have independent random errors."""
    return np.asarray(np.sqrt((np.abs(errors) ** 2).sum(axis=axis)))


def _factor(factor: Tensor | float | None) -> float:
    return 1.0 if factor is None else float(np.asarray(factor).reshape(()))
