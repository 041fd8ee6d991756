"""Wrong dropout that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutRequest

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

FEW = 16  # elements, of which by chance all may stay


def named(request: Any, result: Any) -> dict[str, Tensor]:
    """The result alone: a reserve space and a state are the library's own."""
    if isinstance(request, DropoutRequest):
        return {"out": result[0]}
    return {"out": result} if isinstance(request, DropoutBwdRequest) else {}


def nothing_dropped(request: Any) -> Results | None:
    """Everything stays, and is scaled."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)) or not request.p:
        return None
    given = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.asarray(given).astype(np.float64) / (1 - request.p)} if given.size >= FEW else None


def everything_dropped(request: Any) -> Results | None:
    """Nothing stays."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)):
        return None
    given = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.zeros(given.shape)} if given.size >= FEW else None


MUTATIONS = {"nothing dropped": nothing_dropped, "everything dropped": everything_dropped}
