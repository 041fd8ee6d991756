"""NumPy counterparts of a caller's CUDA C++ operators, when requests with such operators go to child processes.

A child process on the host needs the NumPy function, so the function must pickle; a child on a GPU never calls it. A
function that does not pickle is left out, and raises only if the child calls it.
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
    """Raise BadRequest; it replaces a function that cannot be pickled in a child process, and any function on a GPU."""
    raise BadRequest(
        "numpy",
        "a function that cannot be pickled",
        "a function that a child process can import from a module",
        "no lambda",
    )


def state_of(operator: Any, missing: Callable[..., Any] = unnamed) -> dict[str, Any]:
    """The fields of a dataclass, for `__getstate__`; `missing` replaces the function in `numpy` if it does not pickle.

    `missing` has the parameters of that function.
    """
    state = {one.name: getattr(operator, one.name) for one in fields(operator)}
    try:
        pickle.dumps(operator.numpy)
    except Exception:  # noqa: BLE001  # pickling may raise anything
        state["numpy"] = missing
    return state
