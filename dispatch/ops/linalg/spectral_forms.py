"""The forms of the cases of eigenvalues and singular values, and operands that only these cases need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops import linalg as ops
from dispatch.ops.linalg.forms import EVERY, HALVES, SQUARE, F, Form, chosen, matrix, one_triangle
from dispatch.ops.linalg.norms import hermitian_matrix, standard_form

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["HERMITIAN", "SPECTRAL_FORMS", "matrices_b", "with_subset_bounds"]

HERMITIAN = ("eigh", "generalized_eigh")
SYEVJ = ops.EighDriver.SYEVJ

EIGEN = (*(form for form in HALVES if form.out != "in place"), F("wilkinson", (21, 21), lower=True))
BY_INDEX = tuple(
    form._replace(choices=(*form.choices, ("subset_by_index", subset)))
    for form, subset in (
        (EIGEN[0], (0, 0)), (EIGEN[1], (5, 32)), (EIGEN[2], (1, 4)), (EIGEN[3], (6, 7)), (EIGEN[4], (0, 3)),
        (EIGEN[5], (0, 0)), (EIGEN[8], (60, 79)), (EIGEN[9], (0, 64)), (EIGEN[-1], (17, 20)),
    )
)  # fmt: skip
# Words that `with_subset_bounds` replaces by numbers: bounds lie in gaps between eigenvalues, so roundoff does not
# matter.
BY_VALUE = (
    *chosen((EIGEN[0], EIGEN[1], EIGEN[9], EIGEN[3], EIGEN[8]), "subset_by_value", "inner", "above", "below"),
    *chosen((EIGEN[0], EIGEN[5], EIGEN[6], EIGEN[1]), "subset_by_value", "none", "all"),
)
SOME = (*BY_INDEX, *BY_VALUE, *chosen((BY_INDEX[1], BY_VALUE[0], BY_VALUE[2]), "eigvals_only", True))
EIGEN_FORMS = (
    *EIGEN, *chosen(EIGEN, "driver", SYEVJ), *chosen(EIGEN[:6], "eigvals_only", True),
    *chosen(chosen(EIGEN[:6], "driver", SYEVJ), "eigvals_only", True), *SOME,
)  # fmt: skip
INDEFINITE = (F("indefinite", (9, 9), lower=True), F("indefinite", (2, 6, 6), "columns", "rows", lower=False))
PAIRS = (*EIGEN, *INDEFINITE)
GENERALIZED_FORMS = (
    *chosen(PAIRS, "itype", 1, 2, 3),
    *chosen(chosen(PAIRS, "driver", SYEVJ), "itype", 2, 3, 1),
    *chosen(chosen(EIGEN[:6], "eigvals_only", True), "itype", 3, 1, 2),
    *chosen(SOME, "itype", 1, 2, 3),
)
SVD_FORMS = tuple(
    form
    for driver in (ops.SvdDriver.GESVD, ops.SvdDriver.GESVDJ, ops.SvdDriver.GESVDP)
    for form in (
        *chosen(chosen(EVERY, "driver", driver), "full_matrices", True),
        *chosen(chosen(EVERY, "driver", driver), "full_matrices", False),
        *chosen(chosen(EVERY[::3], "driver", driver), "compute_uv", False),
    )
)
# Full rank only: for other matrices the left vectors are unspecified; wide matrices are transposed.
SKINNY = (
    F("random", (40, 6)), F("random", (30, 2, 20, 4), "columns", "columns"), F("random", (5, 33, 7), "strided", "rows"),
    F("random", (4, 33), "rows", "columns"), F("random", (3, 5, 60), "columns"), F("random", (300, 10)),
    F("random", (3, 12, 1)), F("zeros", (0, 3)), F("random", (0, 9, 2)),
)  # fmt: skip
SKINNY_FORMS = chosen(
    (*chosen(SKINNY, "full_matrices", False), *chosen(SKINNY[::2], "compute_uv", False)),
    "driver",
    ops.SvdDriver.GESVDA,
)
SQUARES = (
    *(form for form in SQUARE if form.out != "in place"),
    F("kahan", (15, 15), "columns", "rows"), F("companion", (2, 7, 7), "rows", "columns"),
    F("rotation", (16, 16), "strided"), F("deficient", (9, 9), "columns"), F("wilkinson", (21, 21)),
)  # fmt: skip
SMALL = tuple(form for form in SQUARES if form.rows <= 40)  # the check needs a decomposition for each eigenvalue
EIG_FORMS = (
    *SQUARES, *chosen((*SMALL, F("jordan", (12, 12))), "eigvals_only", True),
    *chosen(tuple(form for form in SMALL if form.kind != "kahan"), "left", True),
    F("huge", (6, 6)), F("tiny", (2, 7, 7), "columns"), *chosen((F("tiny", (9, 9)),), "eigvals_only", True),
    *chosen((F("huge", (2, 5, 5)),), "left", True),
)  # fmt: skip
LOW_RANK = (
    F("rank 3", (24, 18)), F("rank 3", (18, 24), "columns"), F("rank 3", (2, 11, 9), "strided", "rows"),
    F("rank 3", (3, 9, 30), "columns", "columns"), F("rank 3", (130, 70)), F("rank 3", (5, 5)),
)  # fmt: skip
RANDOM_FORMS = (
    *chosen(LOW_RANK, "rank", 3),
    *chosen(chosen(LOW_RANK, "rank", 3), "oversampling", 1),
    *chosen(chosen(LOW_RANK[:3], "rank", 3), "compute_uv", False),
)
SPECTRAL_FORMS = {
    "eig": EIG_FORMS,
    "eigh": EIGEN_FORMS,
    "generalized_eigh": GENERALIZED_FORMS,
    "randomized_svd": RANDOM_FORMS,
    "svd": (*SVD_FORMS, *SKINNY_FORMS),
}


def matrices_b(form: Form, dtype: Any, rng: np.random.Generator) -> Array:
    """One triangle of each matrix B of the pairs: positive definite, except in the forms that must fail."""
    kind = "indefinite" if form.kind == "indefinite" else "random"
    lower = dict(form.choices)["lower"]
    matrices = [
        one_triangle(matrix(kind, form.rows, form.cols, dtype, rng, positive=True), lower=lower)
        for _ in np.ndindex(form.batch)
    ]
    shape = (*form.batch, form.rows, form.cols)
    return np.reshape(matrices, shape) if matrices else np.zeros(shape)


def with_subset_bounds(op: str, choices: dict[str, Any], given: dict[str, Array]) -> dict[str, Any]:
    """Choices in which a word for a subset is replaced by its bounds."""
    word = choices.get("subset_by_value")
    if word is None:
        return choices
    values = np.sort(np.concatenate([spectrum(op, choices, given, n) for n in np.ndindex(given["a"].shape[:-2])]))
    width = 1.0 + float(np.abs(values).max(initial=0))
    middle, gaps = (values[1:] + values[:-1]) / 2, np.diff(values)
    early, late = gaps[: len(gaps) // 2], gaps[len(gaps) // 2 :]
    low = float(middle[early.argmax()]) if early.size else -2 * width
    high = float(middle[len(early) + late.argmax()]) if late.size else 2 * width
    bounds = {
        "inner": (low, high), "above": (low, math.inf), "below": (-math.inf, high),
        "none": (2 * width, 3 * width), "all": (-math.inf, math.inf),
    }  # fmt: skip
    return choices | {"subset_by_value": bounds[word]}


def spectrum(op: str, choices: dict[str, Any], given: dict[str, Array], place: tuple[int, ...]) -> Array:
    """The eigenvalues of one matrix, or of one pair."""
    a, *b = (
        hermitian_matrix(given[name][place].astype(np.complex128), lower=choices["lower"]) for name in sorted(given)
    )
    if op == "generalized_eigh" and a.size:
        a = standard_form(a, b[0], choices["itype"])
    return np.linalg.eigvalsh(a) if a.size else np.zeros(0)
