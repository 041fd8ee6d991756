"""The forms of the cases of symmetric and Hermitian indefinite matrices, and the matrices themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import C64, C128
from dispatch.ops.linalg.forms import HALVES, ONE_RIGHT, F, Form, chosen, matrix, normal
from dispatch.ops.linalg.packed import mirrored
from dispatch.ops.linalg.request import MatrixKind

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["OF_HERMITIAN", "SOLVED", "SYMMETRIC_FORMS", "forms_of", "kind_of", "symmetric"]

OF_HERMITIAN = "Hermitian"  # the variant of rows for complex Hermitian matrices
SINGULAR = (F("zero row", (7, 7), lower=True), F("zero row", (3, 6, 6), "columns", "rows", lower=False))
HOLLOW = (F("hollow", (14, 14), lower=True), F("hollow", (2, 9, 9), "strided", "columns", lower=False))
OTHERS = (*SINGULAR, *HOLLOW, F("deficient", (11, 11), lower=False), F("wilkinson", (21, 21), "columns", lower=True))
NOT_IN_PLACE = tuple(form for form in HALVES if form.out != "in place")
SYMMETRIC_FORMS: dict[str, tuple[Form, ...]] = {
    "ldl": (*HALVES, *OTHERS, *chosen((*NOT_IN_PLACE, *OTHERS), "expand", True)),
    "ldl_solve": (*HALVES, *ONE_RIGHT, *HOLLOW),
}
SOLVED = (*HALVES, *ONE_RIGHT, *HOLLOW, *SINGULAR)  # systems of matrices that are not definite


def kind_of(op: str, choices: dict[str, Any]) -> bool | None:
    """Whether the matrices of a case are Hermitian; None if they are neither Hermitian nor symmetric."""
    if op in SYMMETRIC_FORMS:
        return bool(choices["hermitian"])
    assumed = choices.get("assume_a")
    return assumed is MatrixKind.HER if op == "solve" and assumed in (MatrixKind.SYM, MatrixKind.HER) else None


def forms_of(row: Row, forms: tuple[Form, ...]) -> tuple[Form, ...]:
    """The forms of an op that a row supports: symmetric, Hermitian, or for real matrices both in rotation."""
    is_system = row.op == "solve"
    if not is_system and row.op not in SYMMETRIC_FORMS:
        return forms
    kinds: tuple[Any, ...] = (MatrixKind.SYM, MatrixKind.HER) if is_system else (False, True)
    if row.variant == OF_HERMITIAN:
        kinds = kinds[1:]
    elif row.dtypes[0] in (C64, C128):
        kinds = kinds[:1]
    if not is_system:
        return chosen(forms, "hermitian", *kinds)
    return (*(() if row.variant == OF_HERMITIAN else forms), *chosen(SOLVED, "assume_a", *kinds))


def symmetric(kind: str, n: int, dtype: Any, rng: np.random.Generator, *, hermitian: bool) -> Array:
    """A symmetric or Hermitian matrix of a kind, in general indefinite, in double precision."""
    lower = {"lower": True, "hermitian": hermitian}
    if not n:
        return np.zeros((0, 0))
    if kind == "deficient":
        half = normal(rng, dtype, (n, n - 1))
        return np.asarray((half * np.where(np.arange(n - 1) % 2, -1, 1)) @ (half.conj().T if hermitian else half.T))
    a = mirrored(
        matrix("random" if kind in ("zero row", "hollow") else kind, n, n, dtype, rng, positive=False), **lower
    )
    if kind == "hollow":  # zeros on the diagonal, so D has blocks of two rows
        a = a - np.diag(np.diag(a))
    if kind == "zero row":  # no rows are exchanged, and D's diagonal has an exact 0
        a = a + np.diag(np.where(np.arange(n) % 2, -4.0 * n, 4.0 * n))
        a[2], a[:, 2] = 0, 0
    return a
