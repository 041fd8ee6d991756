"""The test cases of CUTLASS's rows of convolution, and the allowed errors.

cases.py returns them; tests run `case.check(device, rng)`. A case names its kernel's configuration, so that all extents
of a row share a few kernels. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import BF16, F16, F32, Compute, Dtype
from dispatch.libraries.cudnn.convolve import output_shape
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.bounds import SUMS, errors_of, stored
from dispatch.ops.conv.config import DEEP, MEDIUM, NARROW, PLAIN, SMALL
from dispatch.ops.conv.forms import OPERANDS, Form
from dispatch.ops.conv.reference import convolved, image, matrix, reference, tree_operands
from dispatch.ops.conv.request import ConvBwdDataRequest, ConvBwdFilterRequest, ConvFwdRequest
from dispatch.testing.check import Check, GuardedBuffer, normal, place, poison
from dispatch.testing.roundoff import tf32_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["TreeCase", "bounds", "cases"]

Shape = tuple[int, ...]
REQUESTS: dict[str, Any] = {
    "conv_fwd": ConvFwdRequest,
    "conv_bwd_data": ConvBwdDataRequest,
    "conv_bwd_filter": ConvBwdFilterRequest,
}

# fmt: off
# For tensor maps: channels fill 16 bytes.
FORMS = (
    Form("plain",          (2, 32, 14, 14),     (48, 32, 3, 3), 1),
    Form("one by one",     (3, 16, 7, 5),       (32, 16, 1, 1)),
    Form("ones",           (1, 16, 1, 1),       (16, 16, 1, 1)),
    Form("primes",         (3, 8, 13, 11),      (24, 8, 3, 2), (1, 0)),
    Form("uneven padding", (2, 16, 9, 10),      (16, 16, 3, 3), ((1, 0), (0, 2))),
    Form("dilation",       (2, 16, 15, 17),     (16, 16, 3, 3), 2, 1, (2, 3)),
    Form("line",           (3, 16, 33),         (24, 16, 5), 2),
    Form("deep",           (1, 256, 7, 7),      (64, 256, 3, 3), 1),
    Form("wide",           (3, 72, 13, 17),     (264, 72, 3, 3), 1),
)
STRIDES = Form("stride",   (2, 16, 15, 17),     (32, 16, 3, 5), (1, 2), (2, 3))
VOLUMES = (
    Form("volume",         (1, 16, 6, 7, 8),    (16, 16, 3, 3, 3), 1),
    Form("volume, odd",    (2, 24, 5, 6, 7),    (40, 24, 3, 2, 1), (1, 0, 1)),
)
SOURCE = Form("alpha, beta", (2, 16, 8, 9),     (16, 16, 3, 3), 1, alpha=0.5, beta=-2.0)
TREES = Form("tree",       (2, 40, 9, 11),      (72, 40, 3, 3), 1)

# For multistage kernels: what tensor maps do not support, or CUTLASS's kernels for sm_90 do not support with them.
ODD = Form("odd",          (3, 6, 13, 11),      (10, 6, 3, 2), (1, 0))
ODD_SOURCE = Form("odd, beta", (2, 18, 8, 9),   (14, 18, 3, 3), 1, alpha=0.5, beta=-2.0)
ODD_LINE = Form("odd line", (3, 6, 33),         (10, 6, 5), 2)
ODD_F32 = Form("odd",      (3, 5, 13, 11),      (7, 5, 3, 2), (1, 0))
ODD_LINE_F32 = Form("odd line", (3, 5, 33),     (7, 5, 5), 2)
LONG_STEPS = Form("long steps", (2, 16, 31, 29), (32, 16, 3, 3), 1, 9)
FAR = Form("far volume",   (1, 16, 5, 6, 40),   (16, 16, 1, 1, 3), 0, 1, (1, 1, 16))
GROUPS = (
    Form("groups",         (2, 32, 9, 9),       (32, 8, 3, 3), 1),
    Form("large groups",   (2, 32, 9, 9),       (128, 16, 3, 3), 1, 2),
)
STRIDED = (
    Form("stride",         (2, 16, 15, 17),     (32, 16, 3, 5), (1, 2), (2, 3)),
    Form("stride, one by one", (2, 16, 9, 7),   (32, 16, 1, 1), 0, 2),
    Form("stride, volume", (1, 16, 7, 7, 9),    (16, 16, 3, 3, 3), 1, 2),
)
STRIDED_ODD = Form("stride, odd", (3, 6, 13, 11), (10, 6, 3, 2), (1, 0), 2)
STRIDED_ODD_F32 = Form("stride, odd", (3, 5, 13, 11), (7, 5, 3, 2), (1, 0), 2)
# fmt: on

TREE = evt.store(evt.silu(evt.accumulator() + evt.row("bias")) * evt.col("mask") + evt.load("residual"), "before", BF16)
TREE = evt.reduce(evt.reduce(TREE, "largest", "amax", over="mn"), "sums", "sum", over="m")


@dataclass(frozen=True)
class TreeCase:
    """One request, described by everything except the numbers in its operands."""

    op: str
    form: Form
    dtype: Dtype
    compute: Compute | None
    config: Config | None = None
    tree: Node | None = None

    @property
    def id(self) -> str:
        return f"{self.dtype}-{self.form.name}{'' if self.config is None else f'-{self.config}'}"

    @property
    def name(self) -> str:
        return self.form.name

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands, and poisoned memory for the result."""
        request, memory = self._request(device, rng)
        expected = reference(request)
        return Check(self.id, request, expected, bounds(request, expected), (memory,))

    def request(self, device: Device, rng: np.random.Generator) -> ConvRequest:
        """The request alone."""
        return self._request(device, rng)[0]

    def _request(self, device: Device, rng: np.random.Generator) -> tuple[ConvRequest, GuardedBuffer]:
        form = self.form
        shapes = {"x": form.x, "w": form.w, "y": output_shape(form.x, form.w, form.steps)}
        one, other, result = (shapes[part] for part in OPERANDS[self.op])

        def drawn(shape: Shape) -> GuardedBuffer:
            spread = 0.25 if shape == form.w else 1.0
            return _last(device, normal(rng, self.dtype, shape, spread))

        memory = _last(device, poison(self.dtype, result))
        choices: dict[str, Any] = {
            "out": memory.view,
            "config": self.config,
            "compute": self.compute,
            "library": "cutlass",
        }
        choices |= {"pad": form.pad, "stride": form.stride, "dilation": form.dilation, "alpha": form.alpha}
        if form.beta:
            choices |= {"z": drawn(result).view, "beta": form.beta}
        if self.tree is not None:
            pixels = (result[0], *result[2:])
            named = {"bias": device.array(rng.standard_normal(result[1]), F32), "residual": drawn(result).view}
            choices["operands"] = {**named, "mask": device.array(rng.standard_normal(pixels), F32)}
            choices["epilogue"] = self.tree
        request: ConvRequest = REQUESTS[self.op](drawn(one).view, drawn(other).view, **choices)
        return request, memory


def _last(device: Device, values: Array) -> GuardedBuffer:
    return place(device, values, (0, *range(2, values.ndim), 1))


def bounds(request: ConvRequest, expected: dict[str, Array]) -> dict[str, Array]:
    """The allowed error of each output.

    The convolution's rounding errors grow like the root of the number of products, as in a random walk, and its
    operands may be truncated to TF32. The errors then propagate through the tree, and an output is rounded to its
    dtype.
    """
    operands = [np.asarray(getattr(request, name)).astype(np.float64) for name in request.operand_names[:2]]

    def result(change: Callable[[Array], Array]) -> Array:
        return matrix(request, convolved(request, *map(change, operands)))

    product, size = result(np.asarray), result(np.abs)
    error = (8 + 4 * np.sqrt(_terms(request))) * SUMS[False] * size
    if request.compute is Compute.COMPUTE_32F_FAST_TF32:
        error = error + tf32_error(size, product, np.sqrt(result(np.square)))
    source = None if request.c is None else matrix(request, np.asarray(request.c))
    named = {name: x.astype(np.float64) for name, x in tree_operands(request).items()}
    errors = errors_of(request.tree, product, error, named, source)
    shaped = {name: image(request, name, values) for name, values in errors.items()}
    return {name: stored(shaped[name], expected[name], output.dtype) for name, output in request.outputs().items()}


def _terms(request: ConvRequest) -> int:
    """The number of products that are summed for each element of the result."""
    if request.mode == "fwd":
        return prod(request.w_shape[1:])
    if request.mode == "bwd_data":
        return request.w_shape[0] // request.groups * prod(request.w_shape[2:])
    return prod(request.y_shape) // request.y_shape[1]


def cases(row: Row) -> list[TreeCase]:
    """For tensor maps, forms with one configuration each and, for bf16, other configurations; else unsupported forms.

    Every kernel is tested with bf16. The code for f16 differs only in the instruction, so f16 has fewer cases.
    """
    mode = row.op.removeprefix("conv_")
    dtype, compute = row.dtypes[0], row.compute
    if row.function == "ImplicitGemmConvolution" or row.library == "numpy-multistage":
        return [TreeCase(row.op, form, dtype, compute) for form in _multistage(mode, dtype)]
    forms = FORMS if mode == "bwd_data" else (*FORMS, STRIDES)
    all_cases = [TreeCase(row.op, form, dtype, compute, MEDIUM) for form in forms]
    if dtype is not F16:
        all_cases += [TreeCase(row.op, form, dtype, compute, MEDIUM) for form in VOLUMES]
    if dtype is BF16:
        all_cases.append(TreeCase(row.op, SOURCE, dtype, compute, MEDIUM))
        configs = (DEEP, NARROW) if mode == "bwd_filter" else (SMALL, PLAIN) if mode == "fwd" else (SMALL,)
        all_cases += [TreeCase(row.op, FORMS[-1], dtype, compute, config) for config in configs]
        if mode == "fwd":
            all_cases.append(TreeCase(row.op, TREES, dtype, compute, NARROW, TREE))
    return all_cases


def _multistage(mode: str, dtype: Dtype) -> list[Form]:
    if dtype is F16:
        return {"fwd": [ODD, ODD_LINE, GROUPS[0]], "bwd_data": [ODD, STRIDED[0]], "bwd_filter": [ODD]}[mode]
    odd = [ODD, ODD_LINE, ODD_SOURCE] if dtype is BF16 else [ODD_F32, ODD_LINE_F32]
    if mode == "fwd":
        return [*odd, LONG_STEPS, FAR, *GROUPS]
    if mode == "bwd_data":
        return [*odd, *STRIDED, STRIDED_ODD if dtype is BF16 else STRIDED_ODD_F32]
    return [*odd, LONG_STEPS, FAR]
