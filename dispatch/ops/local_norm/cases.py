"""The cases of the rows of local normalization, their bounds, and wrong results that each must reject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops import local_norm as ops
from dispatch.testing.check import ROUNDOFF, Check, normal, place, poison, rounded, unit
from dispatch.testing.mutations import made as named

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device

__all__ = ["MUTATIONS", "cases", "named"]

KINDS = (ops.LrnRequest, ops.LrnBwdRequest, ops.DivisiveNormRequest, ops.DivisiveNormBwdRequest)
FIRST, LAST, CUBES = (0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 3, 4, 1)
FORMS = (  # shape, order in memory, window, alpha, beta, k, whether there are means
    ((2, 6, 5, 7), FIRST, 3, 0.7, 0.6, 1.3, True), ((2, 6, 5, 7), LAST, 5, 0.9, 0.75, 1.0, False),
    ((1, 19, 4, 3), FIRST, 7, 2.0, 1.0, 0.5, True), ((2, 4, 3, 5, 6), CUBES, 3, 0.8, 0.5, 1.0, True),
    ((2, 8, 5, 3), FIRST, 4, 1.0, 0.75, 2.0, False), ((3, 1, 1, 1), FIRST, 1, 0.5, 0.75, 1.0, True),
    ((2, 32, 12, 11), LAST, 9, 3.0, 0.75, 1.0, True), ((0, 3, 4, 4), FIRST, 5, 0.5, 0.75, 1.0, False),
)  # fmt: skip


@dataclass(frozen=True)
class LocalNormCase:
    """One request of a form."""

    id: str
    op: str
    dtype: Any
    form: tuple[Any, ...]

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """Fresh operands; sums of up to an image's elements, and what is kept between two kernels in 16 bits."""
        shape, order, *choices, has_means = self.form
        kind: Any = next(kind for kind in KINDS if kind.op == self.op)
        fields: dict[str, Any] = dict(zip(("window", "alpha", "beta", "k"), choices, strict=True))
        given = {name: place(device, normal(rng, self.dtype, shape), order).view for name in kind.reads}
        if not has_means:
            given.pop("means", None)
        if "y" in given:
            y = ops.evaluate(ops.LrnRequest(given["x"], **fields), EXACT)["out"].astype(self.dtype.numpy)
            given["y"] = place(device, y, order).view
        memory = place(device, poison(self.dtype, shape), order)
        request = kind(**given, **fields, out=memory.view)
        expected = ops.evaluate(request, EXACT)
        x, dy = (sum(np.abs(np.asarray(given[n]).astype(float)) for n in names) for names in _terms(given))
        axes = range(2, len(shape)) if kind.over_space else range(1, 2)
        share = 2 * request.alpha * request.beta / request.window ** len(axes) / request.k
        size = dy + share * x * ops.window_sum(x * dy, request.window, axes, turned=True) + np.abs(expected["out"])
        w = ROUNDOFF[self.dtype][0] if self.dtype.bits == 16 else 0.0
        error = (64 + 8 * np.prod(shape[2:])) * unit(self.dtype) * size + 4 * w * size
        return Check(self.id, request, expected, {"out": rounded(error, expected["out"], self.dtype)}, (memory,))


def _terms(given: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The operands whose magnitudes a window's terms are of, and those that these are multiplied with."""
    return [n for n in ("x", "means") if n in given], ["dy" if "dy" in given else "x"]


def cases(row: Row) -> list[LocalNormCase]:
    """Every form."""
    return [LocalNormCase(f"{row.dtypes[0]}-{n}", row.op, row.dtypes[0], form) for n, form in enumerate(FORMS)]


def _other(**changes: Any) -> Any:
    """The wrong result of a request with other fields, where there is something to be normalized."""
    return lambda r: ops.evaluate(replace(r, **{n: f(r) for n, f in changes.items()}), EXACT) if r.x.size > 9 else None


MUTATIONS = {
    "a wider window": _other(window=lambda r: r.window + 2), "another power": _other(beta=lambda r: r.beta + 0.1),
    "neighbours count more": _other(alpha=lambda r: 1.5 * r.alpha), "another k": _other(k=lambda r: 1.1 * r.k),
}  # fmt: skip
