"""Checks of the columns of a row, where a user may have written anything.

`row.py` checks every row before it is added to the table. Nothing here knows an op or calls a library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import shown
from dispatch.core.fusion import Fusion
from dispatch.errors import BadRow
from dispatch.keys import Arch, Compute, Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_columns"]


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and bool(given.strip())


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _tuple_of(is_sound: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, tuple) and len(given) >= least and all(map(is_sound, given))


SOUND: dict[str, tuple[Callable[[Any], bool], str]] = {  # by column: the check, and its description
    "op": (_is_name, "is a name"),
    "dtypes": (_tuple_of(lambda one: isinstance(one, Dtype | None), 1), "are a tuple of at least one Dtype"),
    "compute": (lambda given: isinstance(given, Compute | None), "is a Compute, or None"),
    "rules": (_tuple_of(callable), "are a tuple of functions"),
    "min_arch": (lambda given: isinstance(given, Arch), "is an Arch such as Arch(90), or HOST"),
    "max_arch": (lambda given: isinstance(given, Arch | None), "is an Arch such as Arch(90), or HOST, or None"),
    "min_version": (_tuple_of(lambda one: type(one) is int), "is a tuple of numbers such as (12, 4), or ()"),
    "library": (_is_name, "is a name"),
    "function": (_is_name, "is a name"),
    "run_on": (_tuple_of(_is_text), "is a tuple of names of GPUs, or ()"),
    "fusion": (lambda given: isinstance(given, Fusion | None), "is a Fusion, or None"),
    **dict.fromkeys(("variant", "note", "stands_for", "nonfinite"), (_is_text, "is a string, possibly empty")),
}


def check_columns(row: Any) -> None:
    """Raise BadRow for the first column of a row that holds something else."""
    for name, (is_sound, expected) in SOUND.items():
        if not is_sound(value := getattr(row, name)):
            raise BadRow(f"{name} {expected}, not {shown(value)}")
    if not callable(row.call) or not row.epilogues or not row.scales:
        raise BadRow(f"{row.name} needs a function to call, and at least one epilogue and one pair of scale modes")
    if row.max_arch is not None and row.max_arch < row.min_arch:
        raise BadRow(f"{row.name} can never be reached: max_arch {row.max_arch} is older than min_arch {row.min_arch}")
