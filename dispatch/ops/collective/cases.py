"""The cases of the rows of collectives, with a communicator of one rank, and wrong results that each must reject.

With one rank every collective returns its operand, or a multiple; layouts, dtypes, roots and counts work as with any
number of ranks. Several ranks, and the error bounds of their sums, have separate tests, and so have `send`, `recv` and
`barrier`, which have no results to compare.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops import collective as ops
from dispatch.ops.collective.reference import evaluate
from dispatch.ops.collective.request import ReducingRequest
from dispatch.testing.check import ROUNDOFF, MadeCase, checked, normal, place, rounded, with_outputs
from dispatch.testing.mutations import with_fields

if TYPE_CHECKING:
    from dispatch.core.communicator import Communicator
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "bound", "cases", "solo"]

REQUESTS = (
    *(ops.AllReduceRequest, ops.ReduceToRequest, ops.ReduceScatterRequest, ops.BroadcastRequest, ops.AllGatherRequest),
    *(ops.GatherToRequest, ops.ScatterFromRequest, ops.AllToAllRequest, ops.SendRecvRequest),
)
KINDS: dict[str, Any] = {kind.op: kind for kind in REQUESTS}
# The shape of x, and values for those of these fields that a class has.
FORMS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 5, 7), {}), ((1, 0), {}), ((1, 257), {"reduce": ops.RedOp.AVG}), ((1, 2, 3), {"reduce": ops.RedOp.PROD}),
    ((1, 33), {"reduce": ops.RedOp.MAX}), ((1, 11), {"reduce": ops.RedOp.MIN}), ((1, 9), {"counts": (1,)}),
    ((1, 3, 4), {"reduce": ops.RedOp.PREMUL_SUM, "factor": 3.0}),
    ((1, 13), {"reduce": ops.RedOp.PREMUL_SUM, "factor_of": 2.0}),
    ((1, 8), {"send_counts": (1,), "recv_counts": (1,)}),
)  # fmt: skip
_solo: weakref.WeakKeyDictionary[Device, Communicator] = weakref.WeakKeyDictionary()


def solo(device: Device) -> Communicator:
    """A communicator of one rank on a device, the same for all cases."""
    comm = _solo.get(device)
    if comm is None or comm.closed or comm.error is not None:
        if device.is_host:
            from dispatch.libraries.threads.communicator import solo as make
        else:
            from dispatch.libraries.nccl.communicator import solo as make  # type: ignore[assignment]
        comm = _solo[device] = make(device)
    return comm


def check(op: str, dtype: Any, form: Any, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form, with new operands."""
    shape, choices = form
    kind, lay = KINDS[op], partial(place, device)
    fields = {each: value for each, value in choices.items() if each in kind.__dataclass_fields__}
    if "factor_of" in choices and "reduce" in fields:
        factor = np.full((), choices["factor_of"], dtype.numpy)
        fields["device_factor"] = device.array(factor)
    if op == "sendrecv":
        fields |= {"dest": 0, "source": 0}
    x = lay(normal(rng, dtype, shape)).view
    return checked(name, with_outputs(kind(x=x, comm=solo(device), **fields), lay), evaluate, bounds)


def bounds(request: Any, expected: dict[str, Any]) -> dict[str, Any]:
    """The error bounds for one rank: moved data is unchanged; a product with a factor is rounded once or twice."""
    return {name: bound(request, values, np.abs(values), 1) for name, values in expected.items()}


def bound(request: Any, expected: Any, size: Any, ranks: int) -> Any:
    """The error bound of a result of `ranks` ranks: each step rounds in the dtype, in any order.

    `size` is the sum of the magnitudes, or the magnitude of the product.
    """
    dtype = request.x.dtype if getattr(request, "x", None) is not None else request.out.dtype
    steps = ranks + 1 if isinstance(request, ReducingRequest) else 0
    if not isinstance(request, ReducingRequest) or request.red_op in (ops.RedOp.MAX, ops.RedOp.MIN):
        steps = 0
    if ranks == 1 and request.op != "sendrecv" and getattr(request, "red_op", None) is not ops.RedOp.PREMUL_SUM:
        steps = 0
    if dtype.numpy.kind in "iu" or steps == 0:
        return np.zeros(np.shape(expected))
    unit, tiny = ROUNDOFF[dtype]
    return rounded(steps * (unit * size + tiny), expected, dtype)


def cases(row: Row) -> list[MadeCase]:
    """The forms whose fields exist in the row's request class."""
    if row.op not in KINDS:
        return []
    fields = KINDS[row.op].__dataclass_fields__
    chosen = [form for form in FORMS if not form[1] or form[1].keys() & fields.keys()]
    return MadeCase.each(row, chosen, check)


_other = partial(with_fields, evaluate, 2)
MUTATIONS = {
    "the factor is left out": _other(
        factor=lambda r: 1.0 if getattr(r, "factor", 1.0) != 1.0 else None,
    ),
}
