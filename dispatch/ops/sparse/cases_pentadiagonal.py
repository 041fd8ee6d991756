"""The cases of systems with five diagonals: few and many, in place, weak diagonals that need QR."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.pentadiagonal import DIAGONALS, GpsvRequest
from dispatch.ops.sparse.pentadiagonal_reference import dense_of_five
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["pentadiagonal_cases"]


class Form(NamedTuple):
    """A case: unknowns and systems, whether the diagonal is weak, and the layout of the result."""

    n: int
    batch: int
    weak: bool = False
    in_place: bool = False
    has_out: bool = True


FORMS = (
    Form(6, 5),
    Form(3, 1, in_place=True),
    Form(20, 33, weak=True, has_out=False),
    Form(64, 7, in_place=True),
    Form(100, 3, weak=True),
    Form(4, 128, has_out=False),
    Form(9, 0),
)


def pentadiagonal_cases(row: Row) -> list[MadeCase]:
    """Every form."""
    dtype = row.dtypes[0]
    return [MadeCase(f"{dtype}-{number}", partial(check, dtype, form)) for number, form in enumerate(FORMS)]


def check(dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, surrounded by poison except for the diagonals."""

    def normal() -> Any:
        drawn = rng.standard_normal((form.n, form.batch))
        return drawn + 1j * rng.standard_normal(drawn.shape) if dtype.is_complex else drawn

    fields: dict[str, Any] = {}
    for each, off in DIAGONALS.items():
        values = normal()
        values = values + 8 * np.sign(values.real) if not off and not form.weak else values
        values[: max(0, -off)] = 0
        values[form.n - max(0, off) :] = 0
        fields[each] = device.array(values.astype(dtype.numpy))
    right = place(device, normal().astype(dtype.numpy))
    request = GpsvRequest(**fields, b=right.view)
    written: tuple[GuardedBuffer, ...] = ()
    if form.in_place:
        request, written = request.replace(out=right.view), (right,)
    elif form.has_out:
        out = place(device, poison(dtype, (form.n, form.batch)))
        request, written = request.replace(out=out.view), (out,)
    expected = evaluate(request, EXACT)
    a = dense_of_five(request, EXACT)
    growth = np.abs(np.linalg.inv(a)) @ np.abs(a)
    size = (growth @ growth @ np.abs(expected["out"]).T[..., None])[..., 0].T
    unit = 64 * ROUNDOFF[dtype][0] * (4 if dtype.is_complex else 1)
    allowed = np.asarray(rounded(unit * size, expected["out"], dtype))
    return Check(name, request, expected, {"out": allowed}, written)
