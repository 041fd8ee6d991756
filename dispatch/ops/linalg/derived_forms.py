"""The cases of inverses, determinants, norms, ranks, least squares and exponentials."""

from __future__ import annotations

from dispatch.ops import linalg as ops
from dispatch.ops.linalg.forms import EVERY, FAILING, HALVES, OBLONG, RANKS, SINGULAR, SQUARE, F, Form, chosen

__all__ = ["DERIVED_FORMS"]

LARGE = 50  # with this many rows a determinant may exceed single precision
TRIANGLES = (*(F("dominant", (form.rows,) * 2, form.order, form.out) for form in SQUARE[:6]), F("dominant", (3, 9, 9)),
             F("zeros", (4, 4)), F("dominant", (0, 0)), F("dominant", (130, 130)))  # fmt: skip
WITH_SIDES = (
    *OBLONG,
    *SQUARE[:6],
    *(form._replace(right=right) for form, right in zip(OBLONG, (0, 0, 1, 0), strict=False)),
)
# Only norms at which single precision can distinguish the exponential from a wrong one: see residuals_derived.py.
EXPONENTIAL = (
    F("even", (17, 17)),
    F("even", (33, 33), "columns", "columns"),
    F("hilbert", (6, 6), "strided", "rows"),
    F("graded", (3, 8, 8), "columns", "rows"),
    F("repeated", (2, 2, 5, 5), "rows", "columns"),
    F("random", (1, 1)),
    F("random", (4, 7, 7), "strided", "strided"),
    F("random", (0, 0)),
    F("random", (0, 3, 3)),
    F("even", (130, 130)),
    F("even", (65, 65), "columns", "rows"),
    F("skew", (9, 9)),
    F("skew", (2, 40, 40), "columns", squarings=8),
    F("nilpotent", (9, 9), "rows", "rows"),
    F("diagonal", (3, 12, 12), "columns", "columns"),
    F("zeros", (4, 4)),
    F("jordan", (12, 12), "strided"),
    F("companion", (2, 5, 5), "rows", "rows"),
    F("rotation", (16, 16), squarings=2),
    F("kahan", (15, 15), "columns"),
    F("mixed", (7, 6, 6), squarings=4),
    F("mixed", (4, 33, 33), "columns", "rows", squarings=0),
    F("mixed", (5, 5, 5)),
)
DERIVED_FORMS: dict[str, tuple[Form, ...]] = {
    "inv": (
        *(form for form in SQUARE if form.out != "in place"), *SINGULAR,
        *chosen((*(form for form in HALVES if form.out != "in place"), *FAILING), "assume_a", ops.InverseKind.POS),
        *chosen(TRIANGLES, "assume_a", ops.InverseKind.LOWER, ops.InverseKind.UPPER),
        *chosen(TRIANGLES, "assume_a", ops.InverseKind.UPPER, ops.InverseKind.LOWER),
    ),
    "det": tuple(form for form in (*SQUARE, *SINGULAR) if form.rows < LARGE),
    "slogdet": (*SQUARE, *SINGULAR),
    # The least singular value of a rank-deficient matrix is roundoff: any such value is correct.
    "matrix_norm": tuple(
        form._replace(choices=(("order", order),)) for order in ops.NormOrder for form in EVERY
        if not (order is ops.NormOrder.MIN_TWO and form in RANKS)
    ),
    "matrix_rank": (*EVERY, *SINGULAR, F("graded", (3, 9, 4), rtol=0.05)),
    "pinv": (*EVERY, F("deficient", (4, 9, 7), "strided", "rows"), F("graded", (3, 9, 4), rtol=0.05)),
    "polar": (
        *chosen(EVERY, "side", ops.QrSide.RIGHT, ops.QrSide.LEFT),
        *chosen((*OBLONG, *SINGULAR), "side", ops.QrSide.LEFT, ops.QrSide.RIGHT),
    ),
    "lstsq": (
        *chosen(WITH_SIDES, "driver", ops.LstsqDriver.GELSS), *chosen(RANKS, "driver", ops.LstsqDriver.GELSS),
        *chosen(WITH_SIDES, "driver", ops.LstsqDriver.GELS),
        *chosen((F("zeros", (6, 4)), F("zeros", (2, 3, 5))), "driver", *ops.LstsqDriver),
    ),
    "expm": EXPONENTIAL,
}  # fmt: skip
