"""The cases of inverses, determinants, norms, ranks and least squares."""

from __future__ import annotations

from dispatch.ops import linalg as ops
from dispatch.ops.linalg.forms import EVERY, FAILING, HALVES, OBLONG, RANKS, SINGULAR, SQUARE, F, Form, chosen

__all__ = ["DERIVED_FORMS"]

LARGE = 50  # rows of matrices whose determinant may be beyond single precision
TRIANGLES = (*(F("dominant", (form.rows,) * 2, form.order, form.out) for form in SQUARE[:6]), F("dominant", (3, 9, 9)),
             F("zeros", (4, 4)), F("dominant", (0, 0)), F("dominant", (130, 130)))  # fmt: skip
WITH_SIDES = (
    *OBLONG,
    *SQUARE[:6],
    *(form._replace(right=right) for form, right in zip(OBLONG, (0, 0, 1, 0), strict=False)),
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
    # The least singular value of a matrix that lacks rank is roundoff, of which any is right.
    "matrix_norm": tuple(
        form._replace(choices=(("order", order),)) for order in ops.NormOrder for form in EVERY
        if not (order is ops.NormOrder.MIN_TWO and form in RANKS)
    ),
    "matrix_rank": (*EVERY, *SINGULAR, F("graded", (3, 9, 4), rtol=0.05)),
    "pinv": (*EVERY, F("deficient", (4, 9, 7), "strided", "rows"), F("graded", (3, 9, 4), rtol=0.05)),
    "lstsq": (
        *chosen(WITH_SIDES, "driver", ops.LstsqDriver.GELSS), *chosen(RANKS, "driver", ops.LstsqDriver.GELSS),
        *chosen(WITH_SIDES, "driver", ops.LstsqDriver.GELS),
        *chosen((F("zeros", (6, 4)), F("zeros", (2, 3, 5))), "driver", *ops.LstsqDriver),
    ),
}  # fmt: skip
