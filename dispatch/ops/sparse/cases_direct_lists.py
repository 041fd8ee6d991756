"""The cases of direct solves of several patterns: sizes from 1 on, kinds of matrices, triangles, and orders of b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import FillMode
from dispatch.ops.sparse.cases_direct import matrix_for, residual_of
from dispatch.ops.sparse.direct import SparseKind
from dispatch.ops.sparse.direct_lists import BatchedSpsolveListRequest
from dispatch.ops.sparse.direct_reference import evaluate_lists, list_systems
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, Mismatch, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["list_direct_cases"]

GEN, SYM, HER, POS = SparseKind
LOWER, UPPER = FillMode


class System(NamedTuple):
    """A system: its pattern, its rows if the pattern does not determine them, and its right-hand sides."""

    pattern: str
    n: int
    nrhs: int = 0  # 0 for a vector
    by_rows: bool = False  # only b; x is column-major
    gap: int = 0  # between the columns of b, or its elements


class Form(NamedTuple):
    """A case: the systems, what is known of all matrices, and choices."""

    systems: tuple[System, ...]
    kind: SparseKind
    uplo: FillMode | None = None
    base: int = 0
    fixed: bool = False
    has_out: bool = False
    choices: tuple[tuple[str, Any], ...] = ()


GRID, CUBE, ODD = System("2d Poisson", 42), System("3d Poisson", 48, 3, True), System("random", 17, 2, gap=3)
SMALL = (System("banded", 5), System("dense row", 9, 1), System("nothing", 1), System("blocks", 12, 4, True))
FORMS = (
    Form((GRID, ODD, CUBE), GEN),
    Form((System("banded", 30, gap=2),), GEN, base=1, has_out=True),
    Form((CUBE, *SMALL, GRID), GEN, fixed=True),
    Form((ODD, CUBE), SYM, fixed=True, has_out=True),
    Form((*SMALL, GRID), SYM, LOWER),
    Form((GRID, System("graph Laplacian", 24, 2)), HER, UPPER, base=1),
    Form((CUBE, ODD, *SMALL), HER, has_out=True),
    Form((GRID, CUBE, ODD), POS, fixed=True),
    Form((ODD, *SMALL), POS, LOWER, base=1, has_out=True),
    Form((*SMALL, *SMALL, *SMALL, GRID), POS, UPPER),
    Form((ODD, ODD, GRID), GEN, choices=(("refinements", 2),)),
    Form((GRID, *SMALL), GEN, fixed=True, choices=(("stamp", 5),)),
)


def list_direct_cases(row: Row) -> list[MadeCase]:
    """Every form."""
    return MadeCase.each(row, FORMS, check)


@dataclass(frozen=True)
class ListCheck(Check):
    """A check of each solution by its residual."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for a residual above the threshold, another status, or writes outside the results."""
        outputs = result if isinstance(result, tuple) else (result,)
        *solutions, info = (tensor.numpy() for tensor in outputs)
        request: Any = self.request
        for number, (one, x) in enumerate(zip(list_systems(request), solutions, strict=True)):
            if wrong := residual_of(one, x, int(info[number]), request.dtype):
                raise Mismatch(f"{self.name}: of matrix {number} {wrong} ({request.describe()})")
        self._check_memory()


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, with only the stored triangle."""
    del op
    fields: dict[str, list[Any]] = {name: [] for name in ("values", "rows", "columns", "form", "b", "out")}
    written: list[GuardedBuffer] = []
    for system in form.systems:
        mask = PATTERNS[system.pattern](rng, (system.n, system.n)) | False
        n = len(mask)
        mask = (mask if form.kind is GEN else mask | mask.T) | np.eye(n, dtype=bool)
        dense = matrix_for(form.kind, mask, rng, is_complex=dtype.is_complex).astype(dtype.numpy)
        if form.uplo is not None:
            mask &= np.tri(n, dtype=bool) if form.uplo is LOWER else np.tri(n, dtype=bool).T
        *parts, matrix_form = stored(mask, dense, SparseFormat.CSR, form.base, np.int32)
        matrix_form = matrix_form._replace(pattern=int(rng.integers(1 << 40))) if form.fixed else matrix_form
        shape = (n, system.nrhs) if system.nrhs else (n,)
        b = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
        order = (1, 0) if system.nrhs and not system.by_rows else None
        for field, value in zip(("values", "rows", "columns"), parts, strict=True):
            fields[field].append(device.array(value))
        fields["form"].append(matrix_form)
        fields["b"].append(place_with_gap(device, b.astype(dtype.numpy), order, system.gap))
        if form.has_out:
            memory = place(device, poison(dtype, shape), (1, 0) if system.nrhs else None, 0)
            written.append(memory)
            fields["out"].append(memory.view)
    if not form.has_out:
        del fields["out"]
    choices: dict[str, Any] = {"assume_a": form.kind, "uplo": form.uplo, **dict(form.choices)}
    operands: dict[str, Any] = {name: tuple(given) for name, given in fields.items()}
    request: Any = BatchedSpsolveListRequest(**operands, **choices)
    return ListCheck(name, request, evaluate_lists(request, EXACT), {}, tuple(written))


def place_with_gap(device: Device, values: Any, order: tuple[int, ...] | None, gap: int) -> Tensor:
    """Values with so many elements between a vector's elements, or after each column or row of a matrix."""
    if values.ndim > 1:
        return place(device, values, order, gap).view
    wide = np.full((len(values), 1 + gap), np.nan, values.dtype)
    wide[:, 0] = values
    return device.array(wide)[:, 0]
