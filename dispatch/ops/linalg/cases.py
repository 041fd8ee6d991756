"""The test cases of the rows of linear algebra: difficult matrices, in all memory orders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import C64, F32
from dispatch.ops import linalg as ops
from dispatch.ops.linalg.derived_forms import DERIVED_FORMS
from dispatch.ops.linalg.drivers import DRIVERS, driver_of
from dispatch.ops.linalg.forms import (
    EVERY,
    FAILING,
    HALVES,
    OBLONG,
    ONE_RIGHT,
    RANKS,
    SINGULAR,
    SQUARE,
    SYSTEMS,
    F,
    Form,
    chosen,
    for_single_precision,
    matrix,
    mixed,
    normal,
    one_triangle,
    place_on_device,
)
from dispatch.ops.linalg.reference import evaluate
from dispatch.ops.linalg.refined_forms import REFINED_FORMS
from dispatch.ops.linalg.residuals import ResidualCheck
from dispatch.ops.linalg.rules import MAX_ROWS
from dispatch.ops.linalg.small_forms import SMALL_FORMS
from dispatch.ops.linalg.spectral_forms import HERMITIAN, SPECTRAL_FORMS, matrices_b, with_subset_bounds
from dispatch.ops.linalg.symmetric_forms import SYMMETRIC_FORMS, forms_of, kind_of, symmetric
from dispatch.testing.check import MadeCase, place
from dispatch.testing.memory import poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.testing.check import Check

__all__ = ["F", "Form", "cases", "check", "chosen", "matrix"]

KINDS: dict[str, Any] = {
    kind.op: kind
    for kind in (
        *(ops.CholeskyRequest, ops.ChoSolveRequest, ops.LuFactorRequest, ops.LuSolveRequest, ops.SolveRequest),
        *(ops.RefinedSolveRequest, ops.RefinedLstsqRequest),
        *(ops.EigRequest, ops.RandomizedSvdRequest, ops.LdlRequest, ops.LdlSolveRequest, ops.QrMultiplyRequest),
        *(ops.OrgqrRequest, ops.OrmqrRequest, ops.PolarRequest),
        *(ops.QrRequest, ops.EighRequest, ops.GeneralizedEighRequest, ops.SvdRequest, ops.InvRequest, ops.DetRequest),
        *(ops.SlogdetRequest, ops.MatrixNormRequest, ops.MatrixRankRequest, ops.PinvRequest, ops.LstsqRequest),
        ops.ExpmRequest,
    )
}
VECTORS = (  # dense outputs
    *(
        "info",
        "count",
        "iterations",
        "pivots",
        "tau",
        "w",
        "s",
        "det",
        "sign",
        "logabsdet",
        "norm",
        "rank",
        "residuals",
        "perm",
    ),
)
FEW = 6  # matrices with fewer elements may not change under some mutations

REDUCED, COMPLETE, R, RAW = ops.QrMode
FULL_RANK = (*SQUARE[:2], SQUARE[4], *OBLONG)
FORMS = {
    "cholesky": (*HALVES, *FAILING),
    "cho_solve": (*HALVES, *ONE_RIGHT),
    "lu_factor": (*(form for form in (*SQUARE, *OBLONG, *RANKS)), *SINGULAR),
    "lu_solve": chosen(SYSTEMS, "trans", 0, 1, 2),
    "solve": (
        *SYSTEMS,
        *SINGULAR,
        *chosen((*HALVES, *FAILING, *ONE_RIGHT), "assume_a", ops.MatrixKind.POS),
    ),
    "qr": (
        *chosen(EVERY, "mode", REDUCED),
        *chosen(EVERY, "mode", COMPLETE),
        *chosen(FULL_RANK, "mode", R),
        *chosen((*EVERY, *SQUARE[6:8]), "mode", RAW),
    ),
    "qr_multiply": (
        *chosen((*EVERY, EVERY[0]._replace(right=0)), "mode", ops.QrSide.LEFT),
        *chosen((*EVERY, EVERY[0]._replace(right=0)), "mode", ops.QrSide.RIGHT),
    ),
    "orgqr": (*EVERY, F("random", (12, 5), columns=12), F("random", (2, 9, 4), "columns", "rows", columns=6)),
    "ormqr": (
        *chosen((*EVERY, *SQUARE[6:8], EVERY[0]._replace(right=0)), "side", *ops.QrSide),
        *chosen(chosen((*EVERY[::2], *SQUARE[6:8]), "side", ops.QrSide.RIGHT, ops.QrSide.LEFT), "adjoint", True),
    ),
    **SPECTRAL_FORMS,
    **DERIVED_FORMS,
    **SYMMETRIC_FORMS,
    **REFINED_FORMS,
}


# Many small matrices: in the order that the routine uses, in another order, and with copies of everything.
MANY = (
    F("random", (40, 6, 6)), F("random", (3, 2, 17, 17), "columns", "columns"),
    F("hilbert", (2, 6, 6), "strided", "rows"), F("random", (5, 33, 33), "columns", "in place"),
    F("random", (2, 64, 64), "rows", "rows"), F("random", (7, 1, 1)),
)  # fmt: skip
MANY_HALVES = (*chosen(MANY, "lower", True, False), *chosen(MANY, "lower", False, True))
MANY_OBLONG = (
    *MANY, F("random", (20, 12, 5)), F("random", (2, 2, 5, 12), "columns", "columns"),
    F("graded", (3, 40, 7), "strided"), F("random", (2, 33, 70), "rows", "rows"),
    F("deficient", (4, 11, 8)), F("random", (3, 9, 1), "columns"),
)  # fmt: skip
MANY_FORMS = {
    "cho_solve": (*MANY_HALVES, *(form._replace(right=1) for form in MANY_HALVES[:2])),
    "lu_factor": (*MANY, *SINGULAR),
    "lu_solve": tuple(form for trans in range(3) for form in chosen(MANY, "trans", trans)),
    "solve": (
        *(*MANY, *SINGULAR, *(form._replace(right=1) for form in MANY[:3])),
        *chosen((*MANY_HALVES, *FAILING), "assume_a", ops.MatrixKind.POS),
    ),
    "qr": tuple(form for mode in ops.QrMode for form in chosen(MANY_OBLONG, "mode", mode) if form.out != "in place"),
    "inv": (
        *(form for form in MANY if form.out != "in place"), *SINGULAR,
        F("random", (3, 32, 32), "columns", "rows"), F("random", (2, 33, 33), "rows", "columns"),
        F("graded", (3, 8, 8), "strided", "strided"), F("singular", (3, 40, 40)),
    ),
    "generalized_eigh": chosen(
        chosen(tuple(form for form in MANY_HALVES if form.out != "in place"), "itype", 1, 2, 3), "autotune", True
    ),
    "expm": (
        F("even", (40, 6, 6)), F("even", (3, 2, 17, 17), "columns", "columns"), F("random", (7, 1, 1)),
        F("mixed", (9, 33, 33), "strided", "rows"), F("even", (2, 64, 64), "rows", "rows"),
        F("skew", (2, 128, 128), "rows", "strided"),
    ),
    "lstsq": chosen(
        (
            *(form for form in MANY_OBLONG if form.out != "in place" and form.kind != "deficient"),
            F("random", (3, 9, 4), "columns", "rows", 1), F("zeros", (3, 6, 4)), F("random", (4, 33, 32), "strided"),
        ),
        "driver", ops.LstsqDriver.GELS,
    ),
}  # fmt: skip


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's op and driver; with several matrices if the row is for many small ones."""
    forms = FORMS[row.op]
    if row.variant.startswith("of many"):
        # Forms of the other rows with a single matrix are refused, and so are large ones in any case.
        forms = (*MANY_FORMS[row.op], *(form for form in forms[::4] if max(form.rows, form.cols) <= MAX_ROWS))
    elif row.variant == "small":
        forms = SMALL_FORMS[row.op]
    else:
        forms = forms_of(row, forms)
    if row.op in DRIVERS:
        usual, driver = next(iter(DRIVERS[row.op])), driver_of(row)
        forms = tuple(form for form in forms if dict(form.choices).get("driver", usual) is driver)
    if row.dtypes[0] in (F32, C64):
        forms = tuple(
            for_single_precision(form) if depends_on_least_singular_value(row.op, form) else form for form in forms
        )
    return MadeCase.each(row, forms, check)


def depends_on_least_singular_value(op: str, form: Form) -> bool:
    """Whether the correct result depends on the least singular value; single precision may hide it in roundoff."""
    choices = dict(form.choices)
    if op == "inv":
        return "assume_a" not in choices
    if op in ("lstsq", "pinv", "refined_lstsq"):
        return form.rows == form.cols
    return op in ("det", "slogdet") or choices.get("order") is ops.NormOrder.MIN_TWO


# -- requests ---------------------------------------------------------------------------------------------------------
def operands(op: str, form: Form, dtype: Any, rng: np.random.Generator) -> dict[str, Array]:
    """The operands of a request by name, in its dtype."""
    choices = dict(form.choices)
    assumed, is_hermitian = choices.get("assume_a"), kind_of(op, choices)
    is_triangle = op == "inv" and assumed in (ops.InverseKind.LOWER, ops.InverseKind.UPPER)
    is_positive = op in ("cholesky", "cho_solve") or assumed in (ops.MatrixKind.POS, ops.InverseKind.POS)
    is_half = is_positive or is_triangle or op in HERMITIAN or is_hermitian is not None
    matrices = []
    for number, _ in enumerate(np.ndindex(form.batch)):
        if form.kind == "mixed":
            matrices.append(mixed(form.rows, dtype, rng, number))
            continue
        if is_hermitian is not None:
            matrices.append(symmetric(form.kind, form.rows, dtype, rng, hermitian=is_hermitian))
            continue
        one = matrix(form.kind, form.rows, form.cols, dtype, rng, positive=is_positive)
        if op in HERMITIAN and form.kind in ("random", "graded"):
            one = one + one.conj().T
        matrices.append(one)
    empty = np.zeros((*form.batch, form.rows, form.cols))
    a = np.reshape(matrices, empty.shape) if matrices else empty
    exact = (a, a.mT, a.conj().mT)[choices.get("trans", 0)]
    if op == "cho_solve" and a.size:
        a = np.linalg.cholesky(a) if choices["lower"] else np.linalg.cholesky(a).conj().mT
    if op == "lu_solve":
        factors = evaluate(ops.LuFactorRequest(_on_host(a.astype(dtype.numpy))), EXACT)
        arrays = {"lu": factors["out"], "pivots": factors["pivots"]}
    elif op == "ldl_solve":
        triangle = {"lower": choices["lower"], "hermitian": choices["hermitian"]}
        factors = evaluate(ops.LdlRequest(_on_host(a.astype(dtype.numpy)), **triangle), EXACT)
        a, arrays = factors["out"], {"pivots": factors["pivots"]}
    elif op in ("orgqr", "ormqr"):
        arrays = evaluate(ops.QrRequest(_on_host(a.astype(dtype.numpy)), mode=RAW), EXACT)
    else:
        arrays = {KINDS[op].reads[0]: a}
    if is_half:
        name = KINDS[op].reads[0]
        lower = assumed is ops.InverseKind.LOWER if is_triangle else choices["lower"]
        halves = [one_triangle(a[index], lower=lower) for index in np.ndindex(form.batch)]
        arrays[name] = np.reshape(halves, a.shape) if halves else a
    if op == "generalized_eigh":
        arrays["b"] = matrices_b(form, dtype, rng)
    elif op == "ormqr":
        extents = (form.rows, form.right) if choices["side"] is ops.QrSide.LEFT else (form.right, form.rows)
        arrays["c"] = normal(rng, dtype, (*form.batch, *extents))
    elif op == "qr_multiply":
        is_left = choices["mode"] is ops.QrSide.LEFT
        extents = (min(form.rows, form.cols), form.right) if is_left else (form.right, form.rows)
        arrays["c"] = normal(rng, dtype, (*form.batch, *extents))
    elif "b" in KINDS[op].reads:
        sides = (form.right,) if form.right else ()
        shape = (*form.batch, form.rows, *(sides or (() if not form.batch else (1,))))
        x = normal(rng, dtype, shape)  # b is A·x: an error in x shows, as it may not if b is small and x large
        arrays["b"] = normal(rng, dtype, shape) if op in ("lstsq", "refined_lstsq") else exact @ x
    return {name: values if name == "pivots" else values.astype(dtype.numpy) for name, values in arrays.items()}


def _on_host(values: Array) -> Any:
    from dispatch.device.registry import device

    return device("host").array(values)


def check(op: str, dtype: Any, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, and the expected results."""
    arrays = operands(op, form, dtype, rng)
    memories = {
        n: place(device, v) if v.ndim == 1 or n in VECTORS else place_on_device(device, v, form.order)
        for n, v in arrays.items()
    }
    choices = with_subset_bounds(op, dict(form.choices), arrays)
    request = KINDS[op](**{n: memory.view for n, memory in memories.items()}, **choices)
    expected, written = evaluate(request, EXACT), []
    if form.out != "open":
        given_outputs = {}
        for output, layout in request.outputs().items():
            over = next((read for one, read in request.in_place if one == output), None)
            if form.out == "in place" and over is not None:
                memory = memories[over]
            elif output in VECTORS or len(layout.shape) == 1:
                memory = place(device, poison(layout.dtype, layout.shape))
            else:
                memory = place_on_device(
                    device, poison(layout.dtype, layout.shape), "rows" if form.out == "in place" else form.out
                )
            given_outputs[output] = memory.view
            written.append(memory)
        request = request.replace(**given_outputs)
    return ResidualCheck(name, request, expected, {}, tuple(written), given=arrays)


# -- wrong results that every case must reject ------------------------------------------------------------------------
def _flipped(request: Any) -> Any:
    """The request for the other triangle."""
    if not hasattr(request, "lower") or request.matrices.size < FEW or request.op == "ldl_solve":
        return None
    arrays = {name: np.asarray(tensor) for name, tensor, written in request.tensors() if not written}
    if not np.isnan(arrays[request.reads[0]]).any():
        return None
    with np.errstate(all="ignore"):
        return evaluate(replace(request, lower=not request.lower), EXACT)


def _with(**changes: Any) -> Any:
    """Replaces outputs by functions of all outputs, if the request has them."""

    def mutation(request: Any) -> Any:
        if request.matrices.size < FEW or not changes.keys() <= request.outputs().keys():
            return None
        outputs = evaluate(request, EXACT)
        return outputs | {name: change(outputs) for name, change in changes.items()}

    return mutation


def _descending(request: Any) -> Any:
    """Eigenvalues in descending order, if the op specifies an order or there are vectors that must match."""
    has_order = request.op != "eig" or not request.eigvals_only
    return _with(w=lambda found: found["w"][..., ::-1])(request) if has_order else None


def _right_for_left(request: Any) -> Any:
    """Right eigenvectors in place of left ones; they differ for matrices that are not normal."""
    if request.op != "eig":
        return None
    a = np.asarray(request.a)
    is_normal = np.allclose(a @ a.conj().mT, a.conj().mT @ a, atol=1e-3 * max(1.0, float(np.abs(a).max(initial=0))))
    return None if is_normal else _with(vl=lambda found: found["v"])(request)


def _negated(request: Any) -> Any:
    """The results of the other sign, for products of reflectors, which determine the sign."""
    if request.op not in ("orgqr", "ormqr") or request.matrices.size < FEW:
        return None
    return {name: -values for name, values in evaluate(request, EXACT).items()}


def _doubled(request: Any) -> Any:
    """Twice the result of an exponential; for other ops this may be within the allowed error."""
    return _with(out=lambda found: 2 * found["out"])(request) if request.op == "expm" else None


MUTATIONS = {
    "the other triangle": _flipped,
    "the status is another": _with(info=lambda found: found["info"] + 1),
    "pivots counted from 0": _with(pivots=lambda found: found["pivots"] - 1),
    "R of another sign": _with(q=lambda found: found["q"], r=lambda found: -found["r"]),
    "Q of another sign": _with(out=lambda found: -found["out"], r=lambda found: found["r"]),
    "a product of reflectors of another sign": _negated,
    "eigenvalues descending": _descending,
    "singular values ascending": _with(s=lambda found: found["s"][..., ::-1]),
    "vectors of another sign": _with(u=lambda found: -found["u"]),
    "eigenvectors that are longer": _with(v=lambda found: 2 * found["v"]),
    "an eigenvalue more": _with(count=lambda found: found["count"] + 1),
    "left eigenvectors that are longer": _with(vl=lambda found: 2 * found["vl"]),
    "left eigenvectors one behind": _with(vl=lambda found: np.roll(found["vl"], 1, axis=-1)),
    "left eigenvectors that are right ones": _right_for_left,
    "eigenvectors one behind": _with(v=lambda found: np.roll(found["v"], 1, axis=-1)),
    "P of another sign": _with(u=lambda found: -found["u"], p=lambda found: -found["p"]),
    "a determinant of another sign": _with(det=lambda found: -found["det"]),
    "a sign that is another": _with(sign=lambda found: -found["sign"]),
    "a logarithm of base 2": _with(logabsdet=lambda found: found["logabsdet"] / np.log(2)),
    "a norm squared": _with(norm=lambda found: found["norm"] ** 2),
    "rows in another order": _with(perm=lambda found: np.roll(found["perm"], 1, axis=-1)),
    "blocks of another sign": _with(d=lambda found: -found["d"]),
    "twice the exponential": _doubled,
    "a rank too high": _with(rank=lambda found: found["rank"] + 1),
    "residuals whose root is taken": _with(residuals=lambda found: np.sqrt(found["residuals"])),
}
