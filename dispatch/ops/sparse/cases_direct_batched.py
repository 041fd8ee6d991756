"""The cases of batches of direct solves: kinds of matrices, triangles, and right-hand sides in every order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import FillMode
from dispatch.ops.sparse.cases_direct import matrix_for, residual_of
from dispatch.ops.sparse.cases_direct_lists import list_direct_cases
from dispatch.ops.sparse.direct import BatchedSpsolveRequest, SparseKind
from dispatch.ops.sparse.direct_reference import LISTS, batch_systems, evaluate_batch
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, Mismatch, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["batched_direct_cases"]

GEN, SYM, HER, POS = SparseKind
LOWER, UPPER = FillMode


class Form(NamedTuple):
    """A case: the number of matrices, what is known of them, the layouts of b and x, and choices."""

    batch: int
    kind: SparseKind
    uplo: FillMode | None = None
    nrhs: int = 0  # right-hand sides; 0 for vectors
    order: tuple[int, ...] | None = None  # of b's axes in memory; None is row-major
    base: int = 0
    wide: tuple[bool, bool] = (False, False)  # offsets and indices of 64 bits
    fixed: bool = False
    has_out: bool = False
    choices: tuple[tuple[str, Any], ...] = ()


FORMS = (
    Form(2, GEN),
    Form(3, GEN, nrhs=2, order=(0, 2, 1), fixed=True),
    Form(2, GEN, nrhs=3, order=(0, 1, 2), base=1, wide=(True, True)),
    Form(5, GEN, order=(1, 0), has_out=True),
    Form(3, SYM, nrhs=1, order=(0, 2, 1), fixed=True),
    Form(2, SYM, LOWER, wide=(True, False)),
    Form(4, HER, UPPER, nrhs=2, order=(2, 1, 0), base=1, has_out=True),
    Form(3, HER, nrhs=4, order=(0, 2, 1), has_out=True),
    Form(7, POS, fixed=True),
    Form(2, POS, LOWER, nrhs=2, order=(1, 2, 0), has_out=True),
    Form(33, POS, UPPER, base=1),
    Form(3, GEN, nrhs=2, order=(0, 2, 1), choices=(("refinements", 2),)),
)


def batched_direct_cases(row: Row) -> list[MadeCase]:
    """Every form, of one pattern or of several."""
    return list_direct_cases(row) if row.variant == LISTS else MadeCase.each(row, FORMS, check)


@dataclass(frozen=True)
class BatchedCheck(Check):
    """A check of each solution by its residual."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for a residual above the threshold, another status, or writes outside the results."""
        outputs = result if isinstance(result, tuple) else (result,)
        x, info = (tensor.numpy() for tensor in outputs)
        request: Any = self.request
        for number, (one, found, status) in enumerate(zip(batch_systems(request), x, info, strict=True)):
            if wrong := residual_of(one, found, int(status), request.values.dtype):
                raise Mismatch(f"{self.name}: of matrix {number} {wrong} ({request.describe()})")
        self._check_memory()


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, with only the stored triangle."""
    del op
    pattern = ("2d Poisson", "3d Poisson", "graph Laplacian")[(form.batch + form.nrhs) % 3]
    mask = PATTERNS[pattern](rng, (24, 24)) | False
    n = len(mask)
    kept = mask | np.eye(n, dtype=bool)
    if form.uplo is not None:
        kept &= np.tri(n, dtype=bool) if form.uplo is LOWER else np.tri(n, dtype=bool).T
    matrices = [matrix_for(form.kind, mask, rng, is_complex=dtype.is_complex) for _ in range(form.batch)]
    made = [stored(kept, one.astype(dtype.numpy), SparseFormat.CSR, form.base, np.int32) for one in matrices]
    _, rows, columns, matrix_form = made[0]
    offsets, indices = (np.int64 if wide else np.int32 for wide in form.wide)
    if form.fixed:
        matrix_form = matrix_form._replace(pattern=int(rng.integers(1 << 40)))
    shape = (form.batch, n, form.nrhs) if form.nrhs else (form.batch, n)
    b = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    written: tuple[GuardedBuffer, ...] = ()
    fields: dict[str, Any] = {"uplo": form.uplo, "assume_a": form.kind, **dict(form.choices)}
    if form.has_out:
        written = (place(device, poison(dtype, shape), (0, 2, 1) if form.nrhs else None, 0),)
        fields["out"] = written[0].view
    request = BatchedSpsolveRequest(
        device.array(np.stack([one[0] for one in made]).astype(dtype.numpy)),
        device.array(rows.astype(offsets)),
        device.array(columns.astype(indices)),
        matrix_form,
        place(device, b.astype(dtype.numpy), form.order, 2).view,
        **fields,
    )
    return BatchedCheck(name, request, evaluate_batch(request, EXACT), {}, written)
