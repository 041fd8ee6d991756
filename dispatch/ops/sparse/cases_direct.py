"""The cases of direct solves: each kind of matrix, whole or as one triangle, and all orders of right-hand sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import FillMode
from dispatch.keys import C128, F64
from dispatch.ops.sparse.direct import SparseKind, SpsolveRequest
from dispatch.ops.sparse.direct_reference import evaluate_direct, full_matrix
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.matrix_reference import numbers
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, Mismatch, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["direct_cases", "matrix_for", "residual_of"]

GEN, SYM, HER, POS = SparseKind
LOWER, UPPER = FillMode


class Form(NamedTuple):
    """A case: what is known of the matrix, the stored triangle, and the layouts of b and x."""

    pattern: str
    kind: SparseKind
    uplo: FillMode | None = None
    nrhs: int = 0  # right-hand sides; 0 for a vector
    by_rows: bool = False  # only b; x is column-major
    base: int = 0
    wide: tuple[bool, bool] = (False, False)  # offsets and indices of 64 bits
    fixed: bool = False
    has_out: bool = False
    choices: tuple[tuple[str, Any], ...] = ()


FORMS = (
    Form("2d Poisson", GEN),
    Form("3d Poisson", GEN, nrhs=3, by_rows=True, base=1, wide=(True, True), fixed=True),
    Form("graph Laplacian", GEN, nrhs=2, has_out=True),
    Form("2d Poisson", SYM, fixed=True),
    Form("graph Laplacian", SYM, LOWER, nrhs=4, wide=(True, False)),
    Form("3d Poisson", HER, UPPER, base=1, has_out=True),
    Form("2d Poisson", HER, nrhs=2, by_rows=True, has_out=True),
    Form("3d Poisson", POS, fixed=True, nrhs=1),
    Form("2d Poisson", POS, LOWER, has_out=True),
    Form("graph Laplacian", POS, UPPER, nrhs=3, base=1),
    Form("3d Poisson", GEN, nrhs=2, choices=(("memory", "hybrid"),)),
    Form("2d Poisson", POS, LOWER, fixed=True, choices=(("memory", "hybrid"), ("device_memory", 1 << 30))),
    Form("3d Poisson", GEN, nrhs=2, by_rows=True, choices=(("refinements", 2),)),
    Form("2d Poisson", GEN, fixed=True, has_out=True, choices=(("stamp", 5),)),
    Form("graph Laplacian", SYM, nrhs=3, by_rows=True, fixed=True, choices=(("stamp", 6),)),
)
IN_F32 = (("precision", "f32"),)
REFINED = (  # only for f64 and c128
    Form("2d Poisson", GEN, choices=IN_F32),
    Form("3d Poisson", GEN, nrhs=3, by_rows=True, base=1, wide=(True, True), fixed=True, choices=IN_F32),
    Form("graph Laplacian", SYM, LOWER, nrhs=2, wide=(True, False), has_out=True, choices=IN_F32),
    Form("3d Poisson", HER, UPPER, base=1, has_out=True, choices=(*IN_F32, ("refinements", 20))),
    Form("graph Laplacian", POS, nrhs=2, choices=(*IN_F32, ("memory", "hybrid"))),
)
THRESHOLD = 8.0  # of a residual in units of n·eps


def direct_cases(row: Row) -> list[MadeCase]:
    """Every form."""
    return MadeCase.each(row, FORMS + REFINED * (row.dtypes[0] in (F64, C128)), check)


@dataclass(frozen=True)
class DirectCheck(Check):
    """A check of a solution by its residual, like LAPACK's own testers."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for a residual above the threshold, another status, or writes outside the results."""
        outputs = result if isinstance(result, tuple) else (result,)
        x, info = (tensor.numpy() for tensor in outputs)
        request: Any = self.request
        if wrong := residual_of(request, x, int(info), request.values.dtype):
            raise Mismatch(f"{self.name}: {wrong} ({request.describe()})")
        self._check_memory()


def residual_of(system: Any, x: Array, info: int, dtype: Dtype) -> str:
    """The error of a solution of a system, "" if there is none."""
    a, b = full_matrix(system, EXACT), numbers(system.b, EXACT)
    wide = x.astype(np.result_type(x.dtype, np.float64))
    size = np.abs(a).sum(axis=1).max() * np.abs(wide).max() + np.abs(b).max()
    unit = len(b) * ROUNDOFF[dtype][0] * float(size)
    residual = float(np.abs(b - a @ wide).max()) / unit
    if info == 0 and residual <= THRESHOLD:
        return ""
    return f"the residual is {residual:.3g} n·eps, above {THRESHOLD:g}, or info {info} other than 0"


def matrix_for(kind: SparseKind, mask: Any, rng: np.random.Generator, *, is_complex: bool) -> Array:
    """A well-conditioned matrix of a kind."""
    n = len(mask)
    drawn = rng.uniform(-1, 1, (n, n)) + (1j * rng.uniform(-1, 1, (n, n)) if is_complex else 0)
    drawn = np.where(mask & ~np.eye(n, dtype=bool), drawn, 0)
    if kind is SYM:
        drawn = (drawn + drawn.T) / 2
    elif kind is not GEN:
        drawn = (drawn + drawn.conj().T) / 2
    signs = 1 if kind is POS else np.where(rng.random(n) < 0.5, -1, 1)
    return np.asarray(drawn + np.diag((np.abs(drawn).sum(axis=1) + 0.5) * signs))


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, with only the stored triangle."""
    del op
    mask = PATTERNS[form.pattern](rng, (24, 24)) | False
    n = len(mask)
    dense = matrix_for(form.kind, mask, rng, is_complex=dtype.is_complex).astype(dtype.numpy)
    kept = mask | np.eye(n, dtype=bool)
    if form.uplo is not None:
        kept &= np.tri(n, dtype=bool) if form.uplo is LOWER else np.tri(n, dtype=bool).T
    values, rows, columns, matrix_form = stored(kept, dense, SparseFormat.CSR, form.base, np.int32)
    offsets, indices = (np.int64 if wide else np.int32 for wide in form.wide)
    if form.fixed:
        matrix_form = matrix_form._replace(pattern=int(rng.integers(1 << 40)))
    shape = (n, form.nrhs) if form.nrhs else (n,)
    b = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    order = (1, 0) if form.nrhs else None
    written: tuple[GuardedBuffer, ...] = ()
    fields: dict[str, Any] = {"uplo": form.uplo, "assume_a": form.kind, **dict(form.choices)}
    if form.has_out:
        written = (place(device, poison(dtype, shape), order, 2),)
        fields["out"] = written[0].view
    request = SpsolveRequest(
        device.array(values.astype(dtype.numpy)),
        device.array(rows.astype(offsets)),
        device.array(columns.astype(indices)),
        matrix_form,
        place(device, b.astype(dtype.numpy), None if form.by_rows else order, 2).view,
        **fields,
    )
    return DirectCheck(name, request, evaluate_direct(request, EXACT), {}, written)
