"""Refusal: one reason why a row does not take a request, with its kind, what the row needs and what the request has.

It prints as a sentence ("needs …, has …"). Rows make refusals (`core/row.py`, `table/select.py`), and `errors.NoRow`
has them; their kinds decide which row is nearest. Rules, formulas and launches may be functions of a user: the
functions that call them are registered here, so that `core/user_code.py` recognizes errors in users' code.
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
    "reason_of",
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
    for rule in rules:
        answer = rule(request)
        if answer if answer.__class__ is str else reason_of(rule, answer):  # a call takes longer than the comparison
            return True
    return False


def reason_of(rule: Callable[[Any], str], answer: Any) -> str:
    """A rule's answer as the reason for its refusal, "" if it has none; TypeError if it returns a bool, for example."""
    if isinstance(answer, str):
        return answer
    if answer is None:
        return ""
    name = getattr(rule, "__qualname__", repr(rule))
    expected = 'a string that says why the row does not support the request, or "" if it does'
    raise TypeError(f"the rule {name} returned {answer!r:.80}; expected {expected}")


class Kind(Enum):
    """The subject of a refusal. Each comment describes `needed`, and after the semicolon `given`."""

    RULE = "rule"  # the text of a rule of the row, in full
    SIZE = "size"  # the rule's text about the sizes that the row supports, in full
    EPILOGUE_DTYPE = "epilogue dtype"  # the dtypes allowed for an operand that an epilogue adds; the dtype
    VERSION = "version"  # a library's name and its oldest version; the version
    MISSING = "missing"  # the name of a library that is not installed; what to do
    COMPUTE = "compute"  # the row's compute type, or None; the request's, or None
    EPILOGUE = "epilogue"  # the row's epilogues; the request's
    TREE = "tree"  # the row's epilogues; the request's tree
    SCALES = "scales"  # the row's pairs of scale modes; the request's pair
    DTYPES = "dtypes"  # the row's dtypes; those of the operands
    LIBRARY = "library"  # the library's message, in full
    OTHER_LIBRARY = "other library"  # the library whose requests the row takes; the one that the request names
    ARCH = "arch"  # the oldest and the newest architecture, None for no limit; the machine's

    effort: int  # the value in `EFFORT`; looking an Enum member up in a dict takes ten times as long


# The cost of the change that each kind of refusal requires. Another order or alignment takes a copy; another epilogue
# changes the result; another dtype changes more; another size is another problem; another machine is the largest
# change. If a library refuses, no small change helps. A library that the request names, or a tree, was intended.
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
    """One reason why a row refuses; `Kind` describes `needed` and `given`."""

    kind: Kind
    needed: Any
    given: Any = None

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, _text)(self.needed, self.given)

    @property
    def distance(self) -> int:
        """The distance between a request and what the row takes."""
        if self.kind is Kind.DTYPES:
            differing: int = sum(map(ne, self.needed, self.given))
            return self.kind.effort + EACH_DTYPE * differing
        return self.kind.effort


def distance(refusals: Iterable[Refusal]) -> int:
    """The distance between a request and what a row takes, summed over all reasons."""
    total = 0
    for refusal in refusals:  # an error may have a hundred rows of ten refusals each: `sum` would take twice as long
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
    count_note = "" if len(needed) == len(given) else f": a row of this op has {len(given)} dtypes, as `request.dtypes`"
    return f"needs dtypes {_listed(needed)}, has {_listed(given)}{count_note}"


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
