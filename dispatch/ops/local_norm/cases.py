"""The test cases of local normalization, their bounds, and the wrong results that each case must reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops import local_norm as ops
from dispatch.testing.check import ROUNDOFF, MadeCase, checked, normal, place, result_of, rounded, unit, with_outputs
from dispatch.testing.mutations import with_fields

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

REQUESTS = (ops.LrnRequest, ops.LrnBwdRequest, ops.DivisiveNormRequest, ops.DivisiveNormBwdRequest)
KINDS: dict[str, Any] = {kind.op: kind for kind in REQUESTS}
FIRST, LAST, CUBES = (0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 3, 4, 1)
FORMS = (  # shape, order in memory, window, alpha, beta, k, whether there are means
    ((2, 6, 5, 7), FIRST, 3, 0.7, 0.6, 1.3, True), ((2, 6, 5, 7), LAST, 5, 0.9, 0.75, 1.0, False),
    ((1, 19, 4, 3), FIRST, 7, 2.0, 1.0, 0.5, True), ((2, 4, 3, 5, 6), CUBES, 3, 0.8, 0.5, 1.0, True),
    ((2, 8, 5, 3), FIRST, 4, 1.0, 0.75, 2.0, False), ((3, 1, 1, 1), FIRST, 1, 0.5, 0.75, 1.0, True),
    ((2, 32, 12, 11), LAST, 9, 3.0, 0.75, 1.0, True), ((0, 3, 4, 4), FIRST, 5, 0.5, 0.75, 1.0, False),
)  # fmt: skip


def check(op: str, dtype: Any, form: Any, name: str, device: Device, rng: np.random.Generator) -> Check:
    """The check of a form with fresh operands."""
    shape, order, *choices, has_means = form
    fields: dict[str, Any] = dict(zip(("window", "alpha", "beta", "k"), choices, strict=True))
    kind, lay = KINDS[op], partial(place, device, order=order)
    drawn = {each: normal(rng, dtype, shape) for each in kind.reads if has_means or each != "means"}
    if "y" in drawn:
        drawn["y"] = result_of(ops.evaluate, ops.LrnRequest(lay(drawn["x"]).view, **fields))
    request = kind(**{each: lay(values).view for each, values in drawn.items()}, **fields)
    return checked(name, with_outputs(request, lay), ops.evaluate, bounds)


def bounds(request: ops.LocalNormRequest, expected: dict[str, Any]) -> dict[str, Any]:
    """The allowed error: that of sums over up to an image's elements, and of 16-bit values between kernels."""
    dtype, axes = request.x.dtype, range(2, request.x.ndim) if request.over_space else range(1, 2)
    operands = {name: np.abs(np.asarray(tensor).astype(float)) for name, tensor, _ in request.tensors()}
    x, dy = operands["x"] + operands.get("means", 0), operands.get("dy", operands["x"])
    share = 2 * request.alpha * request.beta / request.window ** len(axes) / request.k
    size = dy + share * x * ops.window_sum(x * dy, request.window, axes, turned=True) + np.abs(expected["out"])
    stored_roundoff = ROUNDOFF[dtype][0] if dtype.bits == 16 else 0.0
    error = (64 + 8 * np.prod(request.x.shape[2:])) * unit(dtype) * size + 4 * stored_roundoff * size
    return {"out": rounded(error, expected["out"], dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form."""
    return MadeCase.each(row, FORMS, check)


_other = partial(with_fields, ops.evaluate, 16)
MUTATIONS = {
    "a wider window": _other(window=lambda r: r.window + 2),
    "another power": _other(beta=lambda r: r.beta + 0.1),
    "neighbours count more": _other(alpha=lambda r: 1.5 * r.alpha),
    "another k": _other(k=lambda r: 1.1 * r.k),
}
