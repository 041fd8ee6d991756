"""The cases of systems with three diagonals: several right-hand sides, batches, and rows that must be exchanged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.reference import evaluate
from dispatch.ops.sparse.tridiagonal import GtsvRequest
from dispatch.ops.sparse.tridiagonal_reference import dense_of_three
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["tridiagonal_cases"]


class Form(NamedTuple):
    """A case: the shape of the diagonals and of b, whether rows may and must be exchanged, and the layouts."""

    diagonals: tuple[int, ...]
    b: tuple[int, ...]
    pivoting: bool = True
    weak: bool = False  # a diagonal of small elements, which needs pivoting
    by_rows: bool = False  # only b; x is column-major
    in_place: bool = False
    has_out: bool = True


FORMS = (
    Form((20,), (20, 3)),
    Form((20,), (20,), has_out=False),
    Form((3,), (3, 1), in_place=True),
    Form((65,), (65, 4), weak=True),
    Form((65,), (65, 4), pivoting=False, by_rows=True),
    Form((33,), (33,), pivoting=False, in_place=True),
    Form((100,), (100, 2), by_rows=True, weak=True, has_out=False),
    Form((7, 12), (7, 12), pivoting=False),
    Form((1, 40), (1, 40), pivoting=False, in_place=True),
    Form((50, 5), (50, 5), pivoting=False, has_out=False),
    Form((20,), (20, 0)),
    Form((0, 9), (0, 9), pivoting=False),
)


def tridiagonal_cases(row: Row) -> list[MadeCase]:
    """Every form."""
    dtype = row.dtypes[0]
    return [MadeCase(f"{dtype}-{number}", partial(check, dtype, form)) for number, form in enumerate(FORMS)]


def check(dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, with poison between their elements."""

    def normal(shape: tuple[int, ...]) -> Array:
        drawn = rng.standard_normal(shape)
        return np.asarray(drawn + 1j * rng.standard_normal(shape) if dtype.is_complex else drawn)

    low, diagonal, high = (normal(form.diagonals) for _ in range(3))
    low[..., :1], high[..., -1:] = 0, 0
    if not form.weak:
        diagonal = diagonal + 5 * np.sign(diagonal.real)
    fields: dict[str, Any] = {}
    for each, values in (("dl", low), ("d", diagonal), ("du", high)):
        # Those of a batch are contiguous.
        stored = values.astype(dtype.numpy)
        fields[each] = place(device, stored, None, 2).view if values.ndim == 1 else device.array(stored)
    b = normal(form.b).astype(dtype.numpy)
    order = (1, 0) if b.ndim == 2 and len(form.diagonals) == 1 else None
    batch = len(form.diagonals) == 2
    right = place(device, b, None if form.by_rows else order, 0 if batch else 2)
    request = GtsvRequest(**fields, b=right.view, pivoting=form.pivoting)
    written: tuple[GuardedBuffer, ...] = ()
    if form.in_place:
        request, written = request.replace(out=right.view), (right,)
    elif form.has_out:
        out = place(device, poison(dtype, form.b), order, 0 if batch else 2)
        request, written = request.replace(out=out.view), (out,)
    expected = evaluate(request, EXACT)
    a = dense_of_three(request, EXACT)
    growth = np.abs(np.linalg.inv(a)) @ np.abs(a)
    x = expected["out"] if batch or b.ndim == 2 else expected["out"][:, None]
    size = growth @ growth @ np.abs(x[..., None] if batch else x)
    unit = 64 * ROUNDOFF[dtype][0] * (4 if dtype.is_complex else 1)
    allowed = (unit * size).reshape(expected["out"].shape)
    return Check(name, request, expected, {"out": np.asarray(rounded(allowed, expected["out"], dtype))}, written)
