"""The cases of `roll`: bitwise equal to NumPy's results, in all layouts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.fft.roll import RollRequest, evaluate
from dispatch.testing.check import Check, MadeCase, place, with_outputs
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["ROLL_MUTATIONS", "roll_cases"]


class Form(NamedTuple):
    """The operand of a roll, and the memory layouts."""

    shape: tuple[int, ...]
    shift: int | tuple[int, ...]
    axis: int | tuple[int, ...] | None
    order: tuple[int, ...] | None = None
    gap: int = 0
    out_order: tuple[int, ...] | None = None


FORMS = (
    Form((7,), 3, 0),
    Form((6, 5), -2, 1),
    Form((6, 5), (4, 1), (0, 1)),
    Form((6, 5), (-13, 22), (-1, 0)),
    Form((3, 4, 5), 2, (0, 2)),
    Form((3, 4, 5), 7, None),
    Form((3, 4, 5), -61, None, (2, 0, 1)),
    Form((3, 4, 5), 1, 1, (1, 2, 0), 2),
    Form((4, 9), 5, 1, None, 1, (1, 0)),
    Form((4, 0, 3), 2, 0),
    Form((), 4, None),
    Form((1, 8), (3, 0), (0, 1)),
    Form((2, 3, 2, 3, 2, 3), 1, (0, 2, 4)),
    Form((300, 41), (150, 20), (0, 1)),
)


def roll_cases(row: Row) -> list[MadeCase]:
    """Every form."""
    dtype = row.dtypes[0]
    return [
        MadeCase(f"{dtype}-{number}", partial(check, form, dtype), str(number)) for number, form in enumerate(FORMS)
    ]


def check(form: Form, dtype: Dtype, name: str, device: Device, rng: Any) -> Check:
    """A case with fresh operands: small integers, which every dtype represents."""
    values = rng.integers(0, 2 if dtype.numpy.kind == "b" else 8, form.shape).astype(np.float32).astype(dtype.numpy)
    x = place(device, values, form.order, form.gap)
    request = RollRequest(x.view, form.shift, form.axis)
    request, written = with_outputs(request, lambda output: place(device, output, form.out_order, form.gap))
    expected = {"out": _wide(evaluate(request, EXACT)["out"])}
    return Check(name, request, expected, {"out": np.zeros(())}, written)


def _wide(values: Any) -> Any:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def one_further(request: Any) -> Results | None:
    """Rolled by one place too many."""
    if not isinstance(request, RollRequest) or request.x.size < FEW:
        return None
    axis = request.axis if request.axis is None or isinstance(request.axis, tuple) else (request.axis,)
    turns = request.turns
    shift = turns[0] + 1 if axis is None else tuple(turns[one % request.x.ndim] + 1 for one in axis)
    return {"out": _wide(altered(evaluate, request, shift=shift)["out"])}


def other_way(request: Any) -> Results | None:
    """Rolled the other way."""
    if not isinstance(request, RollRequest) or request.x.size < FEW:
        return None
    shift = tuple(-one for one in request.shift) if isinstance(request.shift, tuple) else -request.shift
    return {"out": _wide(altered(evaluate, request, shift=shift)["out"])}


FEW = 16
ROLL_MUTATIONS = {"one place too many": one_further, "the other way": other_way}
