"""The cases of the rows for small matrices: each size at which a kernel is another, or fills its threads or not."""

from __future__ import annotations

from dispatch.ops.linalg.forms import FAILING, HALVES, F, Form, chosen

__all__ = ["SMALL_FORMS"]

SIZES = (
    F("random", (2, 2)), F("random", (7, 3, 3), "columns"), F("random", (131, 5, 5), "strided", "rows"),
    F("random", (1, 8, 8), "rows", "columns"), F("graded", (2, 3, 9, 9), "columns", "rows"),
    F("random", (16, 16), "rows", "in place"), F("random", (5, 17, 17), "columns", "in place"),
    F("random", (31, 31), "strided"), F("random", (9, 32, 32), "rows", "rows"), F("random", (3, 32, 32), "columns"),
    F("random", (2, 33, 33), "rows", "columns"), F("repeated", (2, 48, 48), "columns", "columns"),
    F("random", (63, 63), "columns", "rows"), F("random", (3, 64, 64)), F("random", (64, 64), "strided", "in place"),
)  # fmt: skip
INDEFINITE = tuple(F("indefinite", extents) for extents in ((2, 4, 4), (32, 32), (2, 40, 40), (64, 64)))
TRIANGLES = (
    *chosen((*SIZES, *INDEFINITE), "lower", True, False),
    *chosen((*SIZES, *INDEFINITE), "lower", False, True),
)
SMALL_FORMS: dict[str, tuple[Form, ...]] = {
    "cholesky": (*HALVES, *FAILING, *TRIANGLES),
}
