"""Running a case of a row on a device as users run requests: prepared, recorded, replayed, and as a plain call."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.bind.prepare import prepare
from dispatch.core.request import run
from dispatch.core.row import refusals
from dispatch.errors import NoRow
from dispatch.table.table import TABLE
from dispatch.testing.memory import Mismatch

if TYPE_CHECKING:
    import numpy as np

    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.testing.check import Case

__all__ = ["cases_of", "check_row"]


REPLAYS = 2  # the second run of the same addresses is recorded, the third a replay


def cases_of(row: Row) -> list[Case]:
    """All cases of a row, from the module `cases` of its op's family; none for a row of a user's package."""
    family = ".".join(row.call.__module__.split(".")[:3])
    if not family.startswith("dispatch.ops.") or importlib.util.find_spec(f"{family}.cases") is None:
        return []
    cases: list[Case] = importlib.import_module(f"{family}.cases").cases(row)
    return cases


def check_row(row: Row, case: Case, device: Device, rng: np.random.Generator) -> str:
    """Run a case through its row and check it; returns the text of the refusal if the row refuses it, else "".

    A prepared call is run until it is a replay, into memory that is poisoned again before every run, unless it changes
    its inputs. A plain call follows, at other addresses.

    Raises Mismatch for a wrong result, for a request that a later row runs instead of this one, and for one that this
    row runs though it should refuse it; NoRow for a refusal that is not the row's.
    """
    check = case.check(device, rng)
    why = refusals(row, check.request, check.request.signature())
    request: Any = check.request
    if why and getattr(request, "library", "") is None:  # another library may take what this row refuses
        request = replace(request, library=row.stands_for or row.library)
        why = refusals(row, request, request.signature())
    try:
        call = prepare(request)
    except NoRow as error:
        if not why or tuple(why) != dict(error.tried)[row.name]:
            raise
        return str(why[0])
    first = next(other for other in TABLE.of(row.op) if other in (row, call.row))
    if (call.row == row) if why else (call.row != first):
        reasons = "; ".join(map(str, why)) or "no reason"
        raise Mismatch(f"{check.name}: runs on {call.row.name}; {row.name} refuses it: {reasons}")
    changes = any(getattr(check.request, name, None) is not None for name in check.request.updates)
    result = call()
    check.verify(result)
    for _ in range(0 if changes else REPLAYS):
        check.renew(result)
        result = call()
        check.verify(result)
    again = case.check(device, rng)
    again.verify(run(again.request))  # the plain call, at other addresses
    return str(why[0]) if why else ""
