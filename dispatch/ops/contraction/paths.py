"""In which order operands are contracted: by opt_einsum, by NumPy where that is not installed, or as it is asked for.

A path is what both have: at each step the places of the operands that are contracted, among those that are left; their
result comes last among these.
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
INSTALL = "pip install cudabind[einsum] installs opt_einsum, which has it"


def check_path(optimize: Any, operands: int) -> str | Path:
    """The way to find a path, or a path that was given; BadRequest for what is neither."""
    if isinstance(optimize, str):
        if optimize not in METHODS:
            raise BadRequest("optimize", shown(optimize), f"one of {', '.join(METHODS)}, or a path: [(0, 1), (0, 1)]")
        return optimize
    wanted = f"a path for {operands} operands: pairs of places, such as {[(0, 1)] * max(operands - 1, 1)}"
    try:
        path = tuple(tuple(int(place) for place in step) for step in optimize)
    except Exception:  # noqa: BLE001  # of an object that iterates, or whose places are numbers, as it likes
        raise BadRequest("optimize", shown(optimize), f"a name, such as 'auto', or {wanted}") from None
    left = operands
    for step in path:
        if not step or len(set(step)) < len(step) or min(step) < 0 or max(step) >= left:
            raise BadRequest("optimize", shown(optimize), wanted)
        left -= len(step) - 1
    if left != 1:
        raise BadRequest("optimize", shown(optimize), wanted, f"{left} operands are left at its end")
    return path


@lru_cache(1024)
def find_path(
    inputs: tuple[str, ...], output: str, shapes: tuple[tuple[int, ...], ...], optimize: str | Path, limit: int | None
) -> Path:
    """The path of a contraction; `limit` is the most elements that a result on the way may have.

    Raises BadRequest where the way to it needs opt_einsum and that is not installed, or no path keeps within the limit.
    """
    count = len(inputs)
    if isinstance(optimize, tuple):
        return optimize
    if count <= 2:
        return (tuple(range(count)),)
    if optimize == "left-to-right" or any(0 in shape for shape in shapes):  # where nothing costs anything
        return ((0, 1), *((0, left) for left in range(count - 2, 0, -1)))
    if importlib.util.find_spec("opt_einsum") is not None:
        opt_einsum: Any = importlib.import_module("opt_einsum")  # takes long to import
        spec = f"{','.join(inputs)}->{output}"
        found, _ = opt_einsum.contract_path(spec, *shapes, shapes=True, optimize=optimize, memory_limit=limit)
        return _check_pairs(found, limit)
    return _find_by_numpy(inputs, output, shapes, optimize, limit)


def _find_by_numpy(
    inputs: tuple[str, ...], output: str, shapes: Sequence[tuple[int, ...]], optimize: str, limit: int | None
) -> Path:
    known: dict[str, str] = {}
    letters = {mode for term in inputs for mode in term}
    if optimize not in NUMPY_METHODS:
        raise BadRequest(
            "optimize", repr(optimize), f"{', '.join(NUMPY_METHODS)} or left-to-right without opt_einsum", INSTALL
        )
    if len(letters) > len(ALPHABET):
        given = f"{len(letters)} modes of {len(inputs)} operands"
        raise BadRequest("spec", given, f"up to {len(ALPHABET)} without opt_einsum, or a path", INSTALL)
    terms = ["".join(known.setdefault(mode, ALPHABET[len(known)]) for mode in term) for term in inputs]
    spec = f"{','.join(terms)}->{''.join(known[mode] for mode in output)}"
    placeholders = [
        np.broadcast_to(np.zeros(()), shape) for shape in shapes
    ]  # of one element: the path is of shapes alone
    method: Any = NUMPY_METHODS[optimize] if limit is None else (NUMPY_METHODS[optimize], limit)
    found, _ = np.einsum_path(spec, *placeholders, optimize=method)
    return _check_pairs(found[1:], limit)


def _check_pairs(found: Any, limit: int | None) -> Path:
    """A path that was found, of pairs; of more at once where nothing kept within the limit."""
    path: Path = tuple(tuple(sorted(step)) for step in found)
    if limit is not None and any(len(step) > 2 for step in path):
        wanted = "more: no path of pairs was found that keeps within it"
        given = f"bytes for {limit:,} elements of a result on the way"
        raise BadRequest("memory_limit", given, wanted, "more bytes, or another optimize, such as 'optimal'")
    return path
