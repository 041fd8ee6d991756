"""NumPy counterparts of a caller's CUDA C++: functions that operators hold for the host, where these go to children.

A child process of the host needs a function that pickles; one of a GPU has no use for any. So an operator goes with
what pickles, and what does not stays behind until somebody calls it.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["state_of", "unnamed"]


def unnamed() -> Any:
    """What a child process has instead of a function that does not pickle, and a call on a GPU instead of any."""
    raise BadRequest("numpy", "a function that does not pickle", "one of a module, for a child process", "no lambda")


def state_of(operator: Any, missing: Callable[..., Any] = unnamed) -> dict[str, Any]:
    """The fields of a dataclass with such a function in `numpy`, whose parameters `missing` has, for `__getstate__`."""
    state = {one.name: getattr(operator, one.name) for one in fields(operator)}
    try:
        pickle.dumps(operator.numpy)
    except Exception:  # noqa: BLE001  # whatever it is of
        state["numpy"] = missing
    return state
