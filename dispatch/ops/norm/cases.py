"""The test cases of the normalization rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`. The bounds are derived below, not tuned to what a
library happens to return.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, values
from dispatch.keys import F32
from dispatch.ops.norm.reference import broadcast_statistic, evaluate, mean_along, statistic_result, statistics
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode
from dispatch.ops.norm.rules import grouped, ungrouped
from dispatch.testing.check import FormCase, checked, normal, place, rounded, unit, with_outputs
from dispatch.testing.roundoff import ROUNDOFF

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.ops.norm.request import NormRequest
    from dispatch.testing.check import Check, GuardedBuffer

__all__ = ["Form", "NormCase", "bounds_of", "cases"]

LAYER, RMS, BATCH, INSTANCE = NormMode.LAYER_NORM, NormMode.RMS_NORM, NormMode.BATCH_NORM, NormMode.INSTANCE_NORM
GROUP = NormMode.GROUP_NORM


@dataclass(frozen=True)
class Form:
    """Sizes and choices.

    `axes` is the number of last axes that LAYER_NORM and RMS_NORM average over; `last` means channels last.
    """

    name: str
    mode: NormMode
    shape: tuple[int, ...]
    axes: int = 1
    last: bool = False
    bias: bool = True
    running: bool = False
    groups: int = 1


# fmt: off
FORMS = (
    Form("layer",             LAYER,    (37, 256)),
    Form("layer of three",    LAYER,    (5, 7, 96)),
    Form("layer over two",    LAYER,    (5, 7, 12), 2),
    Form("layer odd",         LAYER,    (3, 37)),
    Form("layer no bias",     LAYER,    (9, 64), bias=False),
    Form("layer one row",     LAYER,    (1, 1000)),
    Form("layer wide",        LAYER,    (3, 8192)),
    Form("rms",               RMS,      (37, 256), bias=False),
    Form("rms odd",           RMS,      (3, 5, 101), bias=False),
    Form("rms bias",          RMS,      (19, 64)),
    Form("rms wide",          RMS,      (65, 4096), bias=False),
    Form("batch last",        BATCH,    (4, 32, 14, 13), last=True),
    Form("batch first",       BATCH,    (4, 16, 9, 7)),
    Form("batch running",     BATCH,    (5, 24, 7, 11), last=True, running=True),
    Form("batch flat",        BATCH,    (33, 40), running=True),
    Form("batch volume",      BATCH,    (2, 8, 5, 3, 4), last=True, running=True),
    Form("batch of 12",       BATCH,    (3, 12, 7, 11)),
    Form("batch of 5",        BATCH,    (3, 5, 7, 11), last=True),
    Form("instance last",     INSTANCE, (4, 32, 14, 13), last=True),
    Form("instance first",    INSTANCE, (3, 5, 7, 11)),
    Form("instance volume",   INSTANCE, (2, 8, 5, 3, 4), last=True),
    Form("group",             GROUP,    (2, 32, 7, 5), groups=4),
    Form("group of all",      GROUP,    (3, 15, 7, 11)),
    Form("group of one",      GROUP,    (3, 5, 7, 11), groups=5),
    Form("group one sample",  GROUP,    (1, 12, 5, 7), groups=3),
    Form("group flat",        GROUP,    (33, 40), groups=8),
    Form("group flat of one", GROUP,  (7, 5), groups=5),
    Form("group volume",      GROUP,    (2, 8, 5, 3, 4), groups=2),
    Form("group no bias",     GROUP,    (2, 24, 9, 9), bias=False, groups=6),
    Form("group last",        GROUP,    (2, 16, 5, 7), last=True, groups=4),
)
# fmt: on


@dataclass(frozen=True)
class NormCase(FormCase):
    """One request, described by everything except the numbers in its operands."""

    op: str
    form: Form
    dtype: Dtype
    parameters: Dtype
    training: bool

    @property
    def id(self) -> str:
        way = "" if self.op == "norm_bwd" else "-training" if self.training else "-inference"
        return f"{self.dtype}-{self.parameters}-{self.form.name}{way}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands and poisoned outputs; x has a mean other than 0 and a spread other than 1."""
        return checked(self.id, self.drawn(device, rng), evaluate, bounds_of)

    def drawn(self, device: Device, rng: np.random.Generator) -> tuple[NormRequest, tuple[GuardedBuffer, ...]]:
        request: NormRequest = self._backward(device, rng) if self.op == "norm_bwd" else self._forward(device, rng)
        image = partial(place, device, order=self._order())
        return with_outputs(request, partial(place, device), out=image, dx=image)

    def _order(self) -> tuple[int, ...] | None:
        return (0, *range(2, len(self.form.shape)), 1) if self.form.last else None

    def _x(self, rng: np.random.Generator) -> Array:
        return (normal(rng, F32, self.form.shape) * 1.5 + 0.5).astype(self.dtype.numpy)

    def _parameter(self, device: Device, rng: np.random.Generator) -> Any:
        form = self.form
        by_channel = form.mode in (BATCH, INSTANCE, GROUP)
        shape = (form.shape[1],) if by_channel else form.shape[len(form.shape) - form.axes :]
        return device.array((normal(rng, F32, shape) * 0.5 + 1).astype(self.parameters.numpy))

    def _forward(self, device: Device, rng: np.random.Generator) -> NormFwdRequest:
        form = self.form
        operands: dict[str, Any] = {"x": place(device, self._x(rng), self._order()).view}
        operands["scale"] = self._parameter(device, rng)
        if form.bias:
            operands["bias"] = self._parameter(device, rng)
        if form.mode is BATCH and (form.running or not self.training):
            operands["running_mean"] = device.array(normal(rng, F32, (form.shape[1],)))
            operands["running_var"] = device.array(np.abs(normal(rng, F32, (form.shape[1],))) + np.float32(0.1))
        choices: dict[str, Any] = {"mode": form.mode, "groups": form.groups, "epsilon": 1e-3}
        return NormFwdRequest(training=self.training, momentum=0.3, **choices, **operands)

    def _backward(self, device: Device, rng: np.random.Generator) -> NormBwdRequest:
        x = self._x(rng)
        place_x = place(device, x, self._order()).view
        dy = place(device, normal(rng, self.dtype, self.form.shape), self._order()).view
        scale = self._parameter(device, rng)
        choices: dict[str, Any] = {"mode": self.form.mode, "groups": self.form.groups, "epsilon": 1e-3}
        bare = NormFwdRequest(place_x, scale, scale, training=True, **choices)
        results = evaluate(bare, EXACT)
        inverse = device.array(results["inv_variance_out"].astype(np.float32))
        mean = device.array(results["mean_out"].astype(np.float32)) if bare.has_mean else None
        bias = self.form.bias or self.form.mode is not RMS
        return NormBwdRequest(dy, place_x, scale, inverse, mean, bias=bias, **choices)


def bounds_of(request: NormRequest, expected: Results) -> Results:
    """The allowed error of each output, element by element.

    The error of a sum of n terms is (8 + 4 √n) · u times the sum of their magnitudes, and so is that of a mean. The
    error of a variance is that of the squares, because engines may compute the mean of squares less the square of the
    mean. The relative error of its inverse root is half of the variance's, plus that of the GPU's rsqrt, 2^-22.
    """
    u = unit(F32)
    x = values(request.x, EXACT)
    count = request.x.layout.size // int(np.prod(request.statistics_shape))
    growth = (8 + 4 * np.sqrt(count)) * u
    mean, variance = statistics(request, x)
    squares = mean_along(request, x * x)
    off_mean = growth * mean_along(request, np.abs(x))
    share = growth * squares / (variance + request.epsilon) + 2.0**-22
    if isinstance(request, NormBwdRequest):
        return _backward_bounds(request, expected, u)
    if not isinstance(request, NormFwdRequest):
        return {}
    scale = np.abs(values(request.scale, EXACT)).reshape(request.parameter_shape)
    if request.by_running:
        mean, variance = (
            broadcast_statistic(request, values(t, EXACT)) for t in (request.running_mean, request.running_var)
        )
        off_mean, share = np.zeros(()), np.asarray(2.0**-20)
    inverse = 1 / np.sqrt(variance + request.epsilon)
    error = scale * inverse * (np.abs(x - mean) * (share + 4 * u) + off_mean + 4 * u * (np.abs(x) + np.abs(mean)))
    if request.bias is not None:
        error = error + 4 * u * np.abs(values(request.bias, EXACT)).reshape(request.parameter_shape)
    shape = request.statistics_shape
    errors = {"out": error}
    if request.training:
        errors["mean_out"] = statistic_result(request, off_mean)
        errors["inv_variance_out"] = statistic_result(request, share * inverse)
        if request.running_mean is not None:
            errors["running_mean_out"] = off_mean.reshape(shape) + 4 * u * np.abs(expected["running_mean_out"])
            errors["running_var_out"] = 2 * growth * squares.reshape(shape) + 8 * u * expected["running_var_out"]
    return _stored(request, errors, expected)


def _stored(request: NormRequest, errors: Results, expected: Results) -> Results:
    dtypes = {name: output.dtype for name, output in request.outputs().items()}
    return {name: rounded(errors[name], expected[name], dtypes[name]) for name in expected}


def _backward_bounds(request: NormBwdRequest, expected: Results, u: float) -> Results:
    x, dy = (np.abs(values(t, EXACT)) for t in (request.x, request.dy))
    inverse = broadcast_statistic(request, values(request.inv_variance, EXACT))
    mean = (
        broadcast_statistic(request, np.abs(values(request.mean, EXACT))) if request.mean is not None else np.zeros(())
    )
    size = (x + mean) * inverse
    scaled = dy * np.abs(values(request.scale, EXACT)).reshape(request.parameter_shape)
    count = request.x.layout.size // int(np.prod(request.statistics_shape))
    summed = request.x.layout.size // request.scale.layout.size
    along = mean_along(request, scaled * size)
    level = mean_along(request, scaled)
    growth = (8 + 4 * np.sqrt(count)) * u
    over = (
        tuple(a for a in range(x.ndim) if a != 1) if request.by_channel else tuple(range(x.ndim - request.scale.ndim))
    )
    errors = {
        "dx": inverse * (16 * u * scaled + growth * level + (growth + 16 * u) * size * along),
        "dscale": ((16 + 4 * np.sqrt(summed)) * u * (dy * size).sum(axis=over)).reshape(request.scale.shape),
        "dbias": ((8 + 4 * np.sqrt(summed)) * u * dy.sum(axis=over)).reshape(request.scale.shape),
    }
    if request.by_group:  # dY · scale is stored in between, in the operands' dtype
        w, tiny = ROUNDOFF[request.dy.dtype]
        stored = w * scaled + tiny
        means = mean_along(request, stored) + size * mean_along(request, stored * size)
        errors["dx"] = errors["dx"] + inverse * (stored + means)
    return _stored(request, errors, expected)


def cases(row: Row) -> list[NormCase]:
    """Every form that the row supports, in training and without; parameters in f32, and alternately in x's dtype."""
    dtype = row.dtypes[0]
    all_cases = []
    forms = [form for form in FORMS if (ungrouped if form.mode is GROUP else grouped) not in row.rules]
    for number, form in enumerate(forms):
        for training in (True,) if row.op == "norm_bwd" else (True, False):
            parameters = row.epilogue_dtypes[0][(number + training) % len(row.epilogue_dtypes[0])]
            if form.mode in (BATCH, INSTANCE, GROUP):
                parameters = F32
            all_cases.append(NormCase(row.op, form, dtype, parameters, training))
    return all_cases
