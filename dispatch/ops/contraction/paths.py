"""The order in which operands are contracted: from opt_einsum, from NumPy if that is not installed, or from the user.

A path has the same form in both: for each step the positions of the operands that are contracted, among those left;
their result is appended to these.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import shown
from dispatch.errors import BadRequest
from dispatch.ops.contraction.modes import ALPHABET

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Path", "check_path", "find_path"]

Path = tuple[tuple[int, ...], ...]
METHODS = (
    *("auto", "auto-hq", "optimal", "greedy", "eager", "opportunistic", "dp", "dynamic-programming"),
    *("branch-all", "branch-2", "branch-1", "random-greedy", "random-greedy-128", "left-to-right"),
)
NUMPY_METHODS = {"auto": "greedy", "greedy": "greedy", "optimal": "optimal"}
INSTALL = "pip install cudabind[einsum] installs opt_einsum, which supports it"


def check_path(optimize: Any, operands: int) -> str | Path:
    """The method of finding a path, or a path; BadRequest for anything else."""
    if isinstance(optimize, str):
        if optimize not in METHODS:
            raise BadRequest("optimize", shown(optimize), f"one of {', '.join(METHODS)}, or a path: [(0, 1), (0, 1)]")
        return optimize
    wanted = f"a path for {operands} operands: pairs of indices, such as {[(0, 1)] * max(operands - 1, 1)}"
    try:
        path = tuple(tuple(int(place) for place in step) for step in optimize)
    except Exception:  # noqa: BLE001  # any object that iterates, or whose items act as numbers
        raise BadRequest("optimize", shown(optimize), f"a name, such as 'auto', or {wanted}") from None
    remaining = operands
    for step in path:
        if not step or len(set(step)) < len(step) or min(step) < 0 or max(step) >= remaining:
            raise BadRequest("optimize", shown(optimize), wanted)
        remaining -= len(step) - 1
    if remaining != 1:
        raise BadRequest("optimize", shown(optimize), wanted, f"it leaves {remaining} operands")
    return path


@lru_cache(1024)
def find_path(
    inputs: tuple[str, ...], output: str, shapes: tuple[tuple[int, ...], ...], optimize: str | Path, limit: int | None
) -> Path:
    """The path of a contraction; `limit` is the maximum number of elements of an intermediate result.

    Raises BadRequest if the method needs opt_einsum and that is not installed, or if no path keeps within the limit.
    """
    count = len(inputs)
    if isinstance(optimize, tuple):
        return optimize
    if count <= 2:
        return (tuple(range(count)),)
    if optimize == "left-to-right" or any(0 in shape for shape in shapes):  # where all orders cost nothing
        return ((0, 1), *((0, left) for left in range(count - 2, 0, -1)))
    if importlib.util.find_spec("opt_einsum") is not None:
        opt_einsum: Any = importlib.import_module("opt_einsum")  # takes long to import
        spec = f"{','.join(inputs)}->{output}"
        path, _ = opt_einsum.contract_path(spec, *shapes, shapes=True, optimize=optimize, memory_limit=limit)
        return _check_pairs(path, limit)
    return _find_by_numpy(inputs, output, shapes, optimize, limit)


def _find_by_numpy(
    inputs: tuple[str, ...], output: str, shapes: Sequence[tuple[int, ...]], optimize: str, limit: int | None
) -> Path:
    letter_of: dict[str, str] = {}
    letters = {mode for term in inputs for mode in term}
    if optimize not in NUMPY_METHODS:
        raise BadRequest(
            "optimize", repr(optimize), f"{', '.join(NUMPY_METHODS)} or left-to-right without opt_einsum", INSTALL
        )
    if len(letters) > len(ALPHABET):
        actual = f"{len(letters)} modes of {len(inputs)} operands"
        raise BadRequest("spec", actual, f"up to {len(ALPHABET)} without opt_einsum, or a path", INSTALL)
    terms = ["".join(letter_of.setdefault(mode, ALPHABET[len(letter_of)]) for mode in term) for term in inputs]
    spec = f"{','.join(terms)}->{''.join(letter_of[mode] for mode in output)}"
    placeholders = [
        np.broadcast_to(np.zeros(()), shape) for shape in shapes
    ]  # of one element in memory: the path depends on shapes only
    method: Any = NUMPY_METHODS[optimize] if limit is None else (NUMPY_METHODS[optimize], limit)
    path, _ = np.einsum_path(spec, *placeholders, optimize=method)
    return _check_pairs(path[1:], limit)


def _check_pairs(found: Any, limit: int | None) -> Path:
    """A computed path, which must consist of pairs; it contracts more at once if nothing kept within the limit."""
    path: Path = tuple(tuple(sorted(step)) for step in found)
    if limit is not None and any(len(step) > 2 for step in path):
        wanted = "a larger limit: no path of pairs was found within it"
        actual = f"bytes for {limit:,} elements of an intermediate result"
        raise BadRequest(
            "memory_limit", actual, wanted, "allow more bytes, or pass another optimize, such as 'optimal'"
        )
    return path
