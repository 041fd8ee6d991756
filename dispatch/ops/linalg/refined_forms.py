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
ALONE = tuple(form._replace(right=0) for form in SYSTEMS[:5])  # with one right-hand side, which GMRES supports
SIDES = (*SYSTEMS, *ALONE)
TALL = (
    F("random", (30, 7)), F("random", (3, 20, 4), "columns", "columns"), F("random", (40, 11), "strided", "rows"),
    F("even", (24, 24), "rows"), F("random", (130, 40)), F("random", (0, 9, 2)), F("random", (4, 0)),
)  # fmt: skip
ONE_SIDE = (
    *(form._replace(right=0) for form in TALL[:5]), F("random", (22, 2), right=1), F("random", (200, 33), right=1),
    F("random", (3, 1), right=1), F("even", (8, 8), "columns", right=1),
)  # fmt: skip
TALL_SIDES = (*TALL, *ONE_SIDE)
REFINED_FORMS: dict[str, tuple[Form, ...]] = {
    "refined_solve": (
        *chosen(SIDES, "precision", *LOWER),
        *chosen(chosen(SIDES, "refinement", Refinement.CLASSICAL), "precision", *LOWER[1:]),
        *chosen(chosen(ALONE, "refinement", Refinement.GMRES), "precision", *LOWER),
        *SINGULAR,
    ),
    "refined_lstsq": (
        *chosen(TALL_SIDES, "precision", *LOWER),
        *chosen(TALL_SIDES, "refinement", Refinement.CLASSICAL),
        *chosen(chosen(ONE_SIDE, "refinement", Refinement.GMRES), "precision", *LOWER),
    ),
}
