"""The test cases of the convolution rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`. The bounds are derived below, not tuned to what a
library happens to return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, sigmoid
from dispatch.keys import BF16, F16, F32, F64, FP8, I8, Compute, Dtype
from dispatch.libraries.cudnn.convolve import output_shape
from dispatch.ops.conv import tree_cases
from dispatch.ops.conv.forms import OPERANDS, Form
from dispatch.ops.conv.reference import evaluate, exact, magnitude, product
from dispatch.ops.conv.request import Activation, ConvFwdRequest
from dispatch.ops.conv.rules import something_fused
from dispatch.testing.check import FormCase, GuardedBuffer, by_numpy, checked, normal, place, poison, rounded, unit
from dispatch.testing.roundoff import FP8_SUMS, ROUNDOFF, tf32_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.ops.conv.request import ConvRequest
    from dispatch.ops.conv.tree_cases import TreeCase
    from dispatch.testing.check import Check

__all__ = ["ConvCase", "bound", "cases"]

Shape = tuple[int, ...]
STEEPEST = 1.13  # the largest slope of an activation (GELU's, SWISH's is 1.1)
INTRINSICS = 2.0**-10  # of a fused activation: ex2.approx and tanh.approx, and a division of their results
RISING: dict[Activation, Callable[[Array], Array]] = {
    Activation.SIGMOID_FWD: sigmoid,
    Activation.TANH_FWD: lambda x: np.asarray(np.tanh(x)),
}


# fmt: off
FORMS = (
    Form("plain",            (2, 32, 14, 14),     (48, 32, 3, 3), 1),
    Form("channels first",   (2, 32, 14, 14),     (48, 32, 3, 3), 1, order="first"),
    Form("one by one",       (3, 16, 7, 5),       (32, 16, 1, 1)),
    Form("ones",             (1, 16, 1, 1),       (16, 16, 1, 1)),
    Form("primes",           (3, 5, 13, 11),      (7, 5, 3, 2), (1, 0)),
    Form("primes first",     (3, 5, 13, 11),      (7, 5, 3, 2), (1, 0), order="first"),
    Form("stride",           (2, 16, 15, 17),     (32, 16, 3, 5), (1, 2), (2, 3)),
    Form("dilation",         (2, 16, 15, 17),     (16, 16, 3, 3), 2, 1, (2, 3)),
    Form("uneven padding",   (2, 16, 9, 10),      (16, 16, 3, 3), ((1, 0), (0, 2))),
    Form("uneven, first",    (2, 16, 9, 10),      (16, 16, 3, 3), ((2, 1), (1, 0)), 2, order="first"),
    Form("groups",           (2, 32, 9, 9),       (64, 8, 3, 3), 1),
    Form("groups first",     (2, 32, 9, 9),       (64, 8, 3, 3), 1, order="first"),
    Form("depthwise",        (2, 24, 11, 11),     (24, 1, 7, 7), 3),
    Form("depthwise first",  (2, 24, 11, 11),     (24, 1, 3, 3), 1, 2, order="first"),
    Form("line",             (3, 16, 33),         (24, 16, 5), 2),
    Form("volume",           (1, 16, 6, 7, 8),    (16, 16, 3, 3, 3), 1),
    Form("volume first",     (2, 4, 5, 6, 7),     (8, 4, 3, 2, 3), (1, 0, 1), (1, 2, 1), order="first"),
    Form("gaps",             (2, 16, 8, 9),       (16, 16, 3, 3), 1, order="gaps"),
    Form("alpha",            (2, 16, 8, 9),       (16, 16, 3, 3), 1, alpha=-0.75),
    Form("deep",             (1, 256, 7, 7),      (64, 256, 3, 3), 1),
)
BETA = Form("alpha, beta",   (2, 16, 8, 9),       (16, 16, 3, 3), 1, alpha=0.5, beta=-2.0)
FUSED = (
    (Form("bias",            (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.IDENTITY),
    (Form("bias relu",       (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.RELU_FWD),
    (Form("bias relu first", (2, 5, 9, 7),        (7, 5, 3, 3), 1, order="first"), "b", Activation.RELU_FWD),
    (Form("residual",        (2, 32, 9, 9),       (48, 32, 3, 3), 1), "bz", Activation.RELU_FWD),
    (Form("residual alone",  (2, 32, 9, 9),       (32, 32, 3, 3), 1), "z", Activation.IDENTITY),
    (Form("scaled residual", (2, 32, 9, 9),       (32, 32, 3, 3), 1, alpha=0.5, beta=-2.0), "bz", Activation.RELU_FWD),
    (Form("bias gelu",       (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.GELU_FWD),
    (Form("bias gelu tanh",  (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.GELU_APPROX_TANH_FWD),
    (Form("bias swish",      (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.SWISH_FWD),
    (Form("bias sigmoid",    (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.SIGMOID_FWD),
    (Form("bias tanh",       (2, 32, 9, 9),       (48, 32, 3, 3), 1), "b", Activation.TANH_FWD),
    (Form("gelu first",      (2, 32, 9, 9),       (48, 32, 3, 3), 1, order="first"), "b", Activation.GELU_FWD),
)
# fmt: on


@dataclass(frozen=True)
class ConvCase(FormCase):
    """One request, described by everything except the numbers in its operands.

    `extra` contains b for a bias, z for a residual.
    """

    op: str
    form: Form
    dtypes: tuple[Dtype, ...]
    compute: Compute | None
    extra: str = ""
    activation: Activation = Activation.IDENTITY

    @property
    def id(self) -> str:
        return f"{'x'.join(map(str, self.dtypes))}-{self.form.name}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands; the result is in poisoned memory, or contains the values that beta scales."""
        drawn = self.drawn(device, rng)
        return checked(self.id, drawn, evaluate, lambda request, found: {"out": bound(request, found["out"])})

    def drawn(self, device: Device, rng: np.random.Generator) -> tuple[ConvRequest, tuple[GuardedBuffer, ...]]:
        form = self.form
        shapes = {"x": form.x, "w": form.w, "y": output_shape(form.x, form.w, form.steps)}
        one, other, result = OPERANDS[self.op]
        operands: list[Any] = [
            self._lay(device, self._draw(rng, dtype, shapes[name])).view
            for name, dtype in zip((one, other), self.dtypes, strict=False)
        ]
        dtype = self.dtypes[2]
        filled = form.beta and self.op != "conv_fwd"
        memory = self._lay(device, self._draw(rng, dtype, shapes[result]) if filled else poison(dtype, shapes[result]))
        steps: dict[str, Any] = {"pad": form.pad, "stride": form.stride, "dilation": form.dilation}
        steps.update(alpha=form.alpha, compute=self.compute, out=memory.view)
        if self.op != "conv_fwd":
            return tree_cases.REQUESTS[self.op](*operands, beta=form.beta, **steps), (memory,)
        added: dict[str, Any] = {}
        if "z" in self.extra:
            added = {"z": self._lay(device, self._draw(rng, dtype, shapes["y"])).view, "beta": form.beta or None}
        if "b" in self.extra:
            kind = F32 if self.dtypes[0] is I8 else dtype
            added["bias"] = device.array(self._draw(rng, kind, (form.w[0],)))
        return ConvFwdRequest(operands[0], operands[1], activation=self.activation, **added, **steps), (memory,)

    def _draw(self, rng: np.random.Generator, dtype: Dtype, shape: Shape) -> Array:
        """Values that give results of magnitude 1 to 10, positive and negative."""
        if dtype is I8:
            return rng.integers(-3, 4, shape).astype(np.int8)
        spread = 0.25 if shape == self.form.w else 1.0
        return normal(rng, dtype, shape, spread)

    def _lay(self, device: Device, values: Array) -> GuardedBuffer:
        if self.form.order == "first":
            return place(device, values)
        order = (0, *range(2, values.ndim), 1)
        if self.form.order == "gaps" and values.shape != self.form.w:  # no engine takes a filter with gaps
            return _spread(device, values, order)
        return place(device, values, order)


def _spread(device: Device, values: Array, order: Shape) -> GuardedBuffer:
    """Channels last with poisoned lines between the rows, so that no axis except the channels is dense."""
    lines = values.transpose(order)
    wide = np.concatenate([lines, poison(Dtype.of(values.dtype), (*lines.shape[:-2], 1, lines.shape[-1]))], axis=-2)
    memory = place(device, wide.transpose(np.argsort(order)), order)
    view = memory.view[..., : values.shape[-1]]
    inside = (*(slice(None),) * (values.ndim - 2), slice(0, lines.shape[-2]), slice(None))
    return GuardedBuffer(view, memory.whole, memory.before, inside)


def bound(request: ConvRequest, expected: Array) -> Array:
    """The allowed error of a result, element by element.

    With S the sum of the absolute products, k of them, a sum in a compute type of unit roundoff u is within
    (8 + 4 √k) · u · S: rounding errors of k sums add up like a random walk (of 4 standard deviations), and 8 is for the
    few operations after them. TF32 operands are rounded or truncated before they are multiplied (`tf32_error`); fp8
    tensor cores sum in groups, with an error of FP8_SUMS of each group's largest product. An engine may store the
    convolution in a 16-bit result's dtype before the fused operations. Activations multiply errors by their slope, and
    add the error of the GPU's own implementation.
    """
    size, terms = magnitude(request)
    if request.dtypes[0] is I8 and not (isinstance(request, ConvFwdRequest) and request.fused):
        return np.full(expected.shape, 0.0)  # small whole numbers
    first = request.dtypes[0]
    u = unit(first) if first is not None else 0.0
    relative = (8 + 4 * np.sqrt(terms)) * u
    relative += 4 * FP8_SUMS if first in FP8 else 0.0
    error = np.asarray(relative * size)
    if request.compute is Compute.COMPUTE_32F_FAST_TF32:
        parts = (product(request), np.sqrt(product(request, np.square)))
        error = error + tf32_error(size, *(part * abs(request.alpha) for part in parts))
    if isinstance(request, ConvFwdRequest):
        error = _through(request, error, expected, size, u)
        if request.result_dtype is I8:  # values so close to a half may be rounded either way
            value = exact(request, EXACT)
            return np.where(np.abs(np.abs(value - np.rint(value)) - 0.5) <= error, 1.0, 0.0)
    elif request.beta:
        before = np.abs(np.asarray(request.out).astype(np.float64)) * abs(request.beta)
        error = error + 8 * u * before + (ROUNDOFF[request.result_dtype][0] * before if first is not F64 else 0.0)
    return rounded(error, expected, request.result_dtype)


def _through(request: ConvFwdRequest, error: Array, expected: Array, size: Array, u: float) -> Array:
    added = np.zeros(())
    if request.z is not None:
        added = added + abs(request.beta or 0) * np.abs(np.asarray(request.z).astype(np.float64))
    if request.bias is not None:
        bias = np.abs(np.asarray(request.bias).astype(np.float64))
        added = added + bias.reshape(-1, *(1,) * (expected.ndim - 2))
    error = error + 8 * u * added
    if request.fused and request.result_dtype in (F16, BF16):
        error = error + ROUNDOFF[request.result_dtype][0] * np.minimum(size, np.abs(expected) + added)
    if request.activation in (Activation.IDENTITY, Activation.RELU_FWD):
        return np.asarray(error)
    approximate = 64 * u if by_numpy(request.device) or request.dtypes[0] is F64 else INTRINSICS
    function_error = approximate * (1 + np.abs(expected))
    if request.activation in RISING:  # the error shrinks where they are flat
        bare, rising = exact(replace(request, activation=Activation.IDENTITY), EXACT), RISING[request.activation]
        ends = (rising(bare + error) - rising(bare), rising(bare) - rising(bare - error))
        return np.asarray(np.maximum(*ends) + function_error)
    return np.asarray(STEEPEST * error + function_error)


def cases(row: Row) -> list[ConvCase] | list[TreeCase]:
    """Every form (with a bias for a row that only fuses), and for the forward operation its fused operations."""
    if row.of("cutlass"):
        return tree_cases.cases(row)
    compute = row.compute if row.compute is Compute.COMPUTE_32F_FAST_TF32 else None
    all_cases = [ConvCase(row.op, form, row.dtypes, compute) for form in FORMS]
    if something_fused in row.rules:
        all_cases = [ConvCase(row.op, form, row.dtypes, compute, "b", Activation.RELU_FWD) for form in FORMS]
    if row.op == "conv_fwd":
        all_cases += [ConvCase(row.op, form, row.dtypes, compute, extra, act) for form, extra, act in FUSED]
    else:
        all_cases.append(ConvCase(row.op, BETA, row.dtypes, compute))
    return all_cases
