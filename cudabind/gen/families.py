"""Writes a module's functions: signatures that differ only by some types stand once, as a family of functions.

Called by `emit`. Functions belong to one family where the names of their parameters are the same, their types too but
for at most four, and the text becomes shorter by it; `cudabind._families` says what the text means. It knows C's types
only as they are spelled in Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cudabind._families import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH = 120
# What is around a type that may differ: of `ConstMem[c_float]` it is `c_float`, of `int32_t` all of it.
AROUND = re.compile(r"((?:ConstMem|Mem|Ptr)\[)?(.*?)(\]?)")


@dataclass(frozen=True)
class Signature:
    """A function as Python spells it: its parameters, its result, and whether that is a status."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    result: str
    checked: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parameters)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for _, kind in self.parameters)

    def shape(self) -> tuple[object, ...]:
        """What all functions of a family have in common."""
        around = [(found[1], found[3]) for found in map(_around, self.kinds)]
        return (self.checked or self.result, self.names, *around)


def text(functions: Iterable[Signature], prefix: str, alone: Iterable[str] = ()) -> str:
    """All functions of a module.

    Args:
        functions: in the header's order, in which the first of each family stands.
        prefix: how their names start: a family is named after its first function, without it.
        alone: names of functions that must be made when the module is imported.
    """
    single = set(alone)
    shapes: dict[object, list[Signature]] = {}
    order: dict[str, int] = {}
    for index, each in enumerate(functions):
        order[each.name] = index
        shapes.setdefault(each.name if each.name in single else each.shape(), []).append(each)
    groups = [group for members in shapes.values() for group in _split(members)]
    groups.sort(key=lambda group: order[group[0].name])
    blocks: list[str] = []
    for group in groups:
        apart = "".join(map(function, group))
        together = _family(group, prefix) if len(group) > 1 else apart
        shorter = (together.count("\n"), len(together)) < (apart.count("\n"), len(apart))
        blocks.append(f"\n{together}\n" if shorter else apart)
    return "".join(blocks).replace("\n\n\n", "\n\n")


def annotation(name: str, body: str) -> str:
    """The annotation of a function, where it is one of a family in the module's text, or ``""``."""
    found = re.search(rf"(?:^|; ){re.escape(name)}: ([^;\n]*)", body, re.MULTILINE)
    return found[1] if found else ""


def function(each: Signature) -> str:
    """One function of its own."""
    return f"@_lib.{'status' if each.checked else 'value'}\n{definition(each)}\n"


def definition(each: Signature, indent: str = "") -> str:
    """A `def`, filled to the width."""
    parts = [f"{name}: {kind}" for name, kind in each.parameters]
    parts += ["/"] if parts else []
    parts = ["self", *parts] if indent else parts
    start, end = f"{indent}def {each.name}(", f") -> {each.result}: ..."
    if len(start) + len(", ".join(parts)) + len(end) <= WIDTH:
        return f"{start}{', '.join(parts)}{end}"
    lines = filled([f"{part}," for part in parts[:-1]] + [parts[-1]], WIDTH - len(indent) - 4)
    inner = "\n".join(f"{indent}    {line}" for line in lines)
    return f"{start}\n{inner}\n{indent}{end}"


def filled(words: Sequence[str], width: int = WIDTH, gap: str = " ") -> list[str]:
    """Words in lines that are not longer than they must be."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
        else:
            lines.append(word)
    return lines


def _split(members: list[Signature]) -> list[list[Signature]]:
    """Functions of one shape in groups, in each of which at most four types differ."""
    columns = _columns(members)
    differing = {column for column in columns if len(set(column)) > 1}
    if len(differing) <= len(VARIABLES):
        return [members]
    pivot = min(sorted(differing), key=lambda column: len(set(column)))
    parts: dict[str, list[Signature]] = {}
    for member, kind in zip(members, pivot, strict=True):
        parts.setdefault(kind, []).append(member)
    return [group for part in parts.values() for group in _split(part)]


def _columns(members: Sequence[Signature]) -> list[tuple[str, ...]]:
    """For each place of the signature the type that may differ, by function."""
    return list(zip(*([_around(kind)[2] for kind in member.kinds] for member in members), strict=True))


def _around(kind: str) -> re.Match[str]:
    found = AROUND.fullmatch(kind) if kind.startswith(("ConstMem[", "Mem[", "Ptr[")) else re.fullmatch("()(.*)()", kind)
    assert found is not None  # noqa: S101 - both patterns take any text
    return found


def _family(group: list[Signature], prefix: str) -> str:
    """A class with the signature, and the functions as variables of it."""
    variables: dict[tuple[str, ...], str] = {}
    kinds = []
    for kind, column in zip(group[0].kinds, _columns(group), strict=True):
        if len(set(column)) > 1 and column not in variables:
            variables[column] = VARIABLES[len(variables)]
        before, own, after = _around(kind).groups()
        kinds.append(f"{before or ''}{variables.get(column, own)}{after}")
    name = f"_{group[0].name.removeprefix(prefix)}"
    checked = group[0].checked  # then the call returns nothing
    result = "None" if checked else group[0].result
    parameters = tuple(zip(group[0].names, kinds, strict=True))
    call = definition(replace(group[0], name="__call__", parameters=parameters, result=result), "    ")
    generic = f", Generic[{', '.join(variables.values())}]" if variables else ""
    lines = [f"class {name}({'Status' if checked else 'Value'}{generic}):", call]
    given = [", ".join(column[index] for column in variables) for index in range(len(group))]
    members = [f"{m.name}: {name}{f'[{kind}]' if kind else ''}" for m, kind in zip(group, given, strict=True)]
    return "\n".join([*lines, *filled(members, gap="; ")]) + "\n"


def common_prefix(names: Sequence[str]) -> str:
    """How the names of a module's functions start."""
    first, last = min(names), max(names)
    same = [one == other for one, other in zip(first, last, strict=False)]
    return first[: [*same, False].index(False)] if len(names) > 1 else ""
