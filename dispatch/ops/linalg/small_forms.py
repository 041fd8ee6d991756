"""The cases of the rows for small matrices: sizes at which the kernel changes, or uses all or not all threads."""

from __future__ import annotations

from dispatch.ops.linalg.forms import FAILING, SINGULAR, SQUARE, F, Form, chosen
from dispatch.ops.linalg.request import MatrixKind

__all__ = ["SMALL_FORMS"]

SIZES = (
    F("random", (2, 2)), F("random", (7, 3, 3), "columns"), F("random", (131, 5, 5), "strided", "rows"),
    F("random", (1, 8, 8), "rows", "columns"), F("graded", (2, 3, 9, 9), "columns", "rows"),
    F("random", (16, 16), "rows", "in place"), F("random", (5, 17, 17), "columns", "in place"),
    F("random", (31, 31), "strided"), F("random", (9, 32, 32), "rows", "rows"), F("random", (3, 32, 32), "columns"),
    F("random", (2, 33, 33), "rows", "columns"), F("repeated", (2, 48, 48), "columns", "columns"),
    F("random", (63, 63), "columns", "rows"), F("random", (3, 64, 64)), F("random", (64, 64), "strided", "in place"),
)  # fmt: skip
FAILED = (*FAILING, *(F("indefinite", extents) for extents in ((2, 4, 4), (32, 32), (2, 40, 40), (64, 64))))
ZERO_PIVOT = (*SINGULAR, *(F("singular", extents) for extents in ((3, 4, 4), (32, 32), (2, 40, 40), (64, 64))))
# Not for factorizations: a mutation that exchanges rows of zeros gives the same product.
ZEROS = (F("zeros", (2, 3, 3)), F("zeros", (33, 33)))
GENERAL = (*SQUARE, *SIZES)
POSITIVE = (*chosen((*GENERAL, *FAILED), "lower", False, True), *chosen((*SIZES, *FAILED), "lower", True, False))
# More and fewer right-hand sides than the kernel solves at once, and exactly as many.
SIDES = tuple(
    form._replace(right=right)
    for form, right in zip((*SQUARE[:6], *SIZES), (0, 1, 2, 5, 16, 0, 4, 1, 17, 33, 64, 32) * 2, strict=False)
)
SYSTEMS = tuple(form._replace(right=form.right or 3) if form.batch else form for form in SIDES)
LOWERS = (*chosen(SYSTEMS, "lower", True, False), *chosen(SYSTEMS, "lower", False, True))
SMALL_FORMS: dict[str, tuple[Form, ...]] = {
    "cholesky": POSITIVE,
    "cho_solve": (*chosen(GENERAL, "lower", False, True), *LOWERS),
    "lu_factor": (*GENERAL, *ZERO_PIVOT),
    "lu_solve": tuple(form for trans in range(3) for form in chosen((*SIZES, *SYSTEMS), "trans", trans)),
    "solve": (
        *GENERAL, *SYSTEMS, *ZERO_PIVOT, *ZEROS,
        *chosen((*POSITIVE, *LOWERS), "assume_a", MatrixKind.POS),
    ),
    "inv": tuple(form for form in (*GENERAL, *ZERO_PIVOT, *ZEROS) if form.out != "in place"),
}  # fmt: skip
