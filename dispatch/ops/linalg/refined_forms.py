"""The forms of the cases of refined systems and least squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.linalg.forms import SINGULAR, F, chosen
from dispatch.ops.linalg.refined import FactorPrecision, Refinement

if TYPE_CHECKING:
    from dispatch.ops.linalg.forms import Form

__all__ = ["REFINED_FORMS"]

LOWER = (None, FactorPrecision.TF32, FactorPrecision.BF16, FactorPrecision.F16)
SYSTEMS = (
    F("even", (40, 40)), F("even", (33, 33), "columns", "columns"), F("random", (3, 17, 17), "strided", "rows"),
    F("even", (130, 130), "rows", "columns"), F("even", (2, 2, 9, 9), "rows"), F("hilbert", (6, 6), "columns"),
    F("random", (0, 0)), F("random", (0, 3, 3)), F("random", (1, 1)),
)  # fmt: skip
SIDES = (*SYSTEMS, *(form._replace(right=3) for form in SYSTEMS[:5]))
TALL = (
    F("random", (30, 7)), F("random", (3, 20, 4), "columns", "columns"), F("random", (40, 11), "strided", "rows"),
    F("even", (24, 24), "rows"), F("random", (130, 40)), F("random", (0, 9, 2)), F("random", (4, 0)),
)  # fmt: skip
TALL_SIDES = (*TALL, *(form._replace(right=3) for form in TALL[:4]))
REFINED_FORMS: dict[str, tuple[Form, ...]] = {
    "refined_solve": (
        *chosen(SIDES, "precision", *LOWER),
        *chosen(chosen(SIDES, "refinement", Refinement.CLASSICAL), "precision", *LOWER[1:]),
        *SINGULAR,
    ),
    "refined_lstsq": (
        *chosen(TALL_SIDES, "precision", *LOWER),
        *chosen(TALL_SIDES, "refinement", Refinement.CLASSICAL),
    ),
}
