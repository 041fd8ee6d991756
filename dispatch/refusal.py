"""Refusal: why a row does not take a request, as a value: of which kind, what the row needs, what the request has.

It prints as a sentence ("needs …, has …"). Rows make them (`core/row.py`, `table/select.py`), and `errors.NoRow`
carries them; their kinds decide which row is nearest. Rules, formulas and launches may be a user's own functions: the
functions that call such ones are registered here, so that `core/user_code.py` recognizes errors of users' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import ne
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

__all__ = [
    "Kind",
    "Refusal",
    "SizeReason",
    "any_rule_refuses",
    "calls_user_code",
    "distance",
    "rule_refusal",
    "user_code_callers",
]

F = TypeVar("F", bound="Callable[..., object]")

user_code_callers: set[CodeType] = set()  # the code of functions that call users' functions


def calls_user_code(function: F) -> F:
    """Register a function that calls users' functions; it is returned unchanged, so calls cost nothing more."""
    user_code_callers.add(function.__code__)
    return function


@calls_user_code
def any_rule_refuses(rules: Iterable[Callable[[Any], str]], request: Any) -> bool:
    """Whether any rule of a row refuses a request."""
    for rule in rules:  # noqa: SIM110  # `any` would call them from a frame of its own
        if rule(request):
            return True
    return False


class Kind(Enum):
    """What a refusal is about; behind each kind stands what `needed` is, and after the semicolon `given`."""

    RULE = "rule"  # what a rule of the row says, in full
    SIZE = "size"  # what a rule says of the sizes that the row is for, in full
    EPILOGUE_DTYPE = "epilogue dtype"  # the dtypes allowed for an operand that an epilogue adds; the dtype
    VERSION = "version"  # a library's name and its oldest version; the version
    MISSING = "missing"  # the name of a library that is not installed; what to do
    COMPUTE = "compute"  # the row's compute type, or None; the request's, or None
    EPILOGUE = "epilogue"  # the row's epilogues; the request's
    TREE = "tree"  # the row's epilogues; the request's tree
    SCALES = "scales"  # the row's pairs of scale modes; the request's pair
    DTYPES = "dtypes"  # the row's dtypes; those of the operands
    LIBRARY = "library"  # what the library said, in full
    OTHER_LIBRARY = "other library"  # the library whose requests the row takes; the one that the request names
    ARCH = "arch"  # the oldest and the newest architecture, None for no limit; the machine's

    effort: int  # that of `EFFORT`: to look a member of an Enum up in a dict takes ten times as long


# How far a change goes: an order or an alignment is a copy, another epilogue is another result, another dtype is more,
# another size is another problem, and another machine the most. What a library refuses, no other choice of the same
# words helps; one that a request names was wanted, and so was a tree.
EFFORT = {
    Kind.RULE: 1,
    Kind.SIZE: 50,
    Kind.EPILOGUE_DTYPE: 1,
    Kind.VERSION: 1,
    Kind.MISSING: 1,
    Kind.COMPUTE: 3,
    Kind.EPILOGUE: 3,
    Kind.TREE: 20,
    Kind.SCALES: 3,
    Kind.DTYPES: 2,
    Kind.LIBRARY: 20,
    Kind.OTHER_LIBRARY: 20,
    Kind.ARCH: 100,
}
for kind, effort in EFFORT.items():
    kind.effort = effort
EACH_DTYPE = 2  # and for every dtype that differs


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason of a row's: `Kind` says what `needed` and `given` are."""

    kind: Kind
    needed: Any
    given: Any = None

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, _text)(self.needed, self.given)

    @property
    def distance(self) -> int:
        """How far a request is from what the row takes."""
        if self.kind is Kind.DTYPES:
            differing: int = sum(map(ne, self.needed, self.given))
            return self.kind.effort + EACH_DTYPE * differing
        return self.kind.effort


def distance(refusals: Iterable[Refusal]) -> int:
    """How far a request is from what a row takes, by all its reasons."""
    total = 0
    for refusal in refusals:  # of an error a hundred rows have ten each: `sum` would take twice as long
        total += refusal.distance if refusal.kind is Kind.DTYPES else refusal.kind.effort
    return total


class SizeReason(str):
    """A rule's reason about sizes, which no copy and no other field can change; other reasons are plain str."""

    __slots__ = ()


def rule_refusal(text: str) -> Refusal:
    """The refusal for a rule's reason."""
    return Refusal(Kind.SIZE if isinstance(text, SizeReason) else Kind.RULE, text)


# -- words ------------------------------------------------------------------------------------------------------------
def _text(needed: Any, _: Any) -> str:
    return str(needed)


def _dtypes(needed: Any, given: Any) -> str:
    apart = "" if len(needed) == len(given) else f": a row of this op has {len(given)}, those of `request.dtypes`"
    return f"needs dtypes {_listed(needed)}, has {_listed(given)}{apart}"


def _epilogue_dtype(needed: Any, given: Any) -> str:
    return f"needs an epilogue operand of {' or '.join(map(str, needed)) or 'no such operand'}, has {given}"


def _compute(needed: Any, given: Any) -> str:
    if given is None:
        return f"needs compute={needed.name} in the request"
    return f"needs compute {_name(needed, 'None')}, has {given.name}"


def _epilogue(needed: Any, given: Any) -> str:
    return f"needs an epilogue of {', '.join(epilogue.name for epilogue in needed)}, has {given.name}"


def _tree(needed: Any, given: Any) -> str:
    return f"needs an epilogue of {', '.join(epilogue.name for epilogue in needed)}, has the tree {given}"


def _scales(needed: Any, given: Any) -> str:
    return f"needs scale modes {' or '.join(map(_modes, needed))}, has {_modes(given)}"


def _arch(needed: Any, given: Any) -> str:
    oldest, newest = needed
    span = oldest if newest == oldest else f"{oldest} or newer" if newest is None else f"{oldest} to {newest}"
    return f"needs {span}, has {given}"


def _other_library(needed: Any, given: Any) -> str:
    return f"needs library {needed} or None, has {given}"


def _version(needed: Any, given: Any) -> str:
    library, oldest = needed
    return f"needs {library} {'.'.join(map(str, oldest))}, has {'.'.join(map(str, given))}"


def _missing(library: Any, hint: Any) -> str:
    return f"needs {library}, which is not installed: {hint}"


def _listed(dtypes: Any) -> str:
    return f"({', '.join(map(str, dtypes))})"


def _modes(pair: Any) -> str:
    return f"({', '.join(_name(mode, 'none') for mode in pair)})"


def _name(member: Any, nothing: str) -> str:
    return nothing if member is None else str(member.name)


_TEXTS = {
    Kind.DTYPES: _dtypes,
    Kind.EPILOGUE_DTYPE: _epilogue_dtype,
    Kind.COMPUTE: _compute,
    Kind.EPILOGUE: _epilogue,
    Kind.TREE: _tree,
    Kind.SCALES: _scales,
    Kind.ARCH: _arch,
    Kind.VERSION: _version,
    Kind.MISSING: _missing,
    Kind.OTHER_LIBRARY: _other_library,
}
