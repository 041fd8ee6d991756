"""Modes: the common axes of tensors, as in a spec like "ik,kj->ij", and the layouts of tensors along them.

A mode is an axis that tensors share by its letter. All the requests of this family, and `einsum`, read specs here. Only
arithmetic; it knows no library.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.checks import shown
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout

__all__ = [
    "View",
    "canonical_spec",
    "check_letters",
    "ellipsis_modes",
    "explicit_spec",
    "extents_of",
    "lower",
    "mode_letter",
    "mode_letters",
    "parse",
    "shown_mode",
    "shown_spec",
]

Shape = tuple[int, ...]
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIRST_BEYOND_ALPHABET = 0x100  # the character of the first mode after the alphabet
FIRST_ELLIPSIS_MODE = (
    0x20000  # the character of the first mode of an ellipsis: letters, because opt_einsum requires them
)
ELLIPSIS_MODES = re.compile(f"[{chr(FIRST_ELLIPSIS_MODE)}-{chr(FIRST_ELLIPSIS_MODE + 0xFFF)}]+")


def mode_letter(number: int) -> str:
    """The letter of a mode that has a number; there are enough for any spec."""
    return ALPHABET[number] if number < len(ALPHABET) else chr(FIRST_BEYOND_ALPHABET + number - len(ALPHABET))


def ellipsis_modes(count: int, text: str) -> list[str]:
    """The modes of an ellipsis of `count` axes, none of which the spec has."""
    free = (chr(number) for number in itertools.count(FIRST_ELLIPSIS_MODE))
    return list(itertools.islice((mode for mode in free if mode not in text), count))


def shown_spec(spec: str) -> str:
    """A spec for messages: with an ellipsis for its modes, or ...[n] for its n-th axis alone."""
    runs = ELLIPSIS_MODES.findall(spec)
    longest: str = max(runs, key=len, default="")
    return ELLIPSIS_MODES.sub(
        lambda run: "..." if longest.endswith(run.group()) else "".join(map(shown_mode, run.group())), spec
    )


def shown_mode(mode: str) -> str:
    """A mode for messages: its letter, or ...[n] for the n-th axis of the ellipsis."""
    return f"...[{ord(mode) - FIRST_ELLIPSIS_MODE}]" if ELLIPSIS_MODES.match(mode) else mode


def canonical_spec(spec: Any) -> str:
    """A spec as a string without blanks; modes in lists may be any hashable objects.

    Raises BadRequest for anything else.
    """
    if isinstance(spec, str):
        return "".join(spec.split())
    wanted = 'a string such as "ik,kj->ij", or lists of modes, the last of the result: [["i", "k"], ["k", "j"], "ij"]'
    if not isinstance(spec, (list, tuple)) or len(spec) < 2:
        raise BadRequest("spec", shown(spec), wanted)
    letters: dict[Any, str] = {}
    try:
        terms = [mode_letters(term, letters) for term in spec]
    except TypeError:
        raise BadRequest("spec", shown(spec), wanted) from None
    return f"{','.join(terms[:-1])}->{terms[-1]}"


def mode_letters(modes: Any, known: dict[Any, str]) -> str:
    """Modes in a list as letters; `...` is an ellipsis. `known` holds the letters of earlier modes.

    Raises TypeError for what cannot be iterated over or has no hash.
    """
    return "".join("..." if mode is Ellipsis else known.setdefault(mode, mode_letter(len(known))) for mode in modes)


def check_letters(term: str, spec: str) -> None:
    """BadRequest for characters that are not letters; those beyond ASCII count as letters, as in opt_einsum."""
    if wrong := sorted({one for one in term if one.isascii() and not one.isalpha()}):
        hint = 'lists of modes may have any names: [["row", 1], [1, "row"]]'
        raise BadRequest("spec", repr(spec), f"letters, one for each axis, not {' '.join(wrong)!r}", hint)


@lru_cache(4096)
def parse(spec: str, operands: int) -> tuple[tuple[str, ...], str]:
    """The modes of each operand and of the result, of a canonical spec without ellipses.

    Raises BadRequest if it has another number of operands, or a result with a mode that no operand has or with one
    twice.
    """
    left_side, arrow, output = spec.partition("->")
    inputs = tuple(left_side.split(","))
    if not arrow:
        raise BadRequest("spec", repr(spec), 'modes of the result after "->"', f'such as "{spec}->{implied(inputs)}"')
    for term in (*inputs, output):
        check_letters(term, spec)
    if len(inputs) != operands:
        many = "operand" if operands == 1 else "operands"
        hint = "" if len(inputs) < operands else "an added operand has the modes of the result, which are written once"
        raise BadRequest("spec", f"{spec!r}, which has {len(inputs)} operands", f"modes of {operands} {many}", hint)
    for letter, count in Counter(output).items():
        if count > 1:
            hint = "in einsum, which writes diagonals, the result may have a mode twice"
            raise BadRequest("spec", f"{spec!r}: the result has {letter} {count} times", "each mode once", hint)
    return inputs, output


def explicit_spec(spec: Any, ranks: tuple[int, ...]) -> str:
    """A spec with letters instead of ellipses and with the modes of its result, for operands of these ranks.

    Raises BadRequest if it does not fit them, or if the result has a mode that no operand has.
    """
    return _explicit_spec(canonical_spec(spec), ranks)


@lru_cache(4096)
def _explicit_spec(text: str, ranks: tuple[int, ...]) -> str:
    left_side, arrow, output = text.partition("->")
    inputs = left_side.split(",")
    if len(inputs) != len(ranks):
        raise BadRequest("spec", f"{text!r}, which has {len(inputs)} operands", f"modes of {len(ranks)} operands")
    beyond = max([0, *(ranks[n] - len(term) + 3 for n, term in enumerate(inputs) if "..." in term)])
    names = ellipsis_modes(beyond, text)
    inputs = [_expand_ellipsis(term, names, ranks[n] - len(term) + 3, text) for n, term in enumerate(inputs)]
    if not arrow:
        output = "".join(names) + "".join(mode for mode in implied(inputs) if mode not in names)
    elif "..." in output:
        output = output.replace("...", "".join(names), 1)
    elif names:
        hint = f"{left_side}->...{output} keeps those axes; letters in place of the dots are summed over"
        raise BadRequest("spec", repr(text), "an ellipsis in the result as well, for the axes that it stands for", hint)
    for term in (*inputs, output):
        check_letters(term, text)
    for mode in Counter(output):
        if not any(mode in term for term in inputs):
            raise BadRequest("spec", f"{text!r}: no operand has {mode}", "only modes of operands")
    return f"{','.join(inputs)}->{output}"


def _expand_ellipsis(term: str, names: list[str], count: int, text: str) -> str:
    """The modes of an operand; for its ellipsis, the last `count` of these names."""
    if "..." not in term:
        return term
    if count < 0:
        raise BadRequest("spec", repr(text), f"at most as many modes as axes, not {term!r}")
    return term.replace("...", "".join(names[len(names) - count :]), 1)


def implied(inputs: Sequence[str]) -> str:
    """The modes of NumPy's result without "->": those that occur once, in alphabetical order."""
    counts = Counter("".join(inputs))
    return "".join(sorted(letter for letter, count in counts.items() if count == 1))


def extents_of(tensors: Sequence[tuple[str, str, Shape]], spec: str) -> dict[str, int]:
    """The extent of each mode, from operands by name with their modes and shapes.

    An extent of 1 broadcasts. Raises BadRequest for axes without a mode, and for extents that disagree.
    """
    extents: dict[str, int] = {}
    whose: dict[str, str] = {}
    for name, modes, shape in tensors:
        if len(modes) != len(shape):
            actual = f"{len(shape)} axes, {list(shape)}"
            raise BadRequest(
                name, actual, f"{len(modes)}, because its modes are {shown_spec(modes)!r} in {shown_spec(spec)!r}"
            )
        for mode, extent in zip(modes, shape, strict=True):
            earlier = extents.get(mode, 1)
            if extent != 1 and earlier not in (1, extent):
                wanted = f"{earlier}, the extent of {whose[mode]} along this mode"
                raise BadRequest(name, f"{extent} along {shown_mode(mode)} of {shown_spec(spec)!r}", wanted)
            if mode not in extents or earlier == 1:
                extents[mode], whose[mode] = extent, name
    return extents


class View(NamedTuple):
    """A tensor along modes, each once: letters, extents, and strides in elements."""

    modes: str
    extents: Shape
    strides: Shape

    @property
    def steps(self) -> dict[str, int]:
        """The stride along each mode."""
        return dict(zip(self.modes, self.strides, strict=True))


def lower(modes: str, layout: Layout, extents: dict[str, int]) -> View:
    """The layout of a tensor along its modes, in the order of their first occurrence.

    A mode that it has twice is the diagonal. A mode of one element, or with stride 0, is omitted: the tensor is the
    same everywhere along it.
    """
    steps: dict[str, int] = {}
    for mode, extent, stride in zip(modes, layout.shape, layout.strides, strict=True):
        steps[mode] = steps.get(mode, 0) + (stride if extent > 1 else 0)
    remaining = [mode for mode, step in steps.items() if extents[mode] > 1 and step != 0]
    return View(
        "".join(remaining), tuple(extents[mode] for mode in remaining), tuple(steps[mode] for mode in remaining)
    )
