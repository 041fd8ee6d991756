"""Several versions of a library's headers as one: what is in any of them, since when, until when, and what changed.

Called by `python -m cudabind.gen` and the tests. The newest version's words are taken. A difference that the module
could not get right for each version is refused: no difference is passed over in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from cudabind.gen.model import (
    Alias,
    ArrayOf,
    Callback,
    Constant,
    CType,
    Declaration,
    Enum,
    Function,
    Header,
    Named,
    Pointer,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

T = TypeVar("T")
INT = "int32_t"  # what a C compiler makes of an enum


class MergeError(Exception):
    """Two versions differ in a way that there is no rule for."""


@dataclass(frozen=True)
class Before:
    """What a name is in a library older than ``version``: a number, or another declaration of the module."""

    name: str
    version: str
    value: Constant


@dataclass
class Merged:
    """All versions of a library's headers, and what is not in each of them.

    ``since`` and ``until`` are the first and the last version read that has a name, where that is not every version;
    enumerators are names like all others.
    """

    header: Header = field(default_factory=Header)
    since: dict[str, str] = field(default_factory=dict)
    until: dict[str, str] = field(default_factory=dict)
    before: list[Before] = field(default_factory=list)


def merge(
    versions: Sequence[tuple[str, Header]],
    inline_as: Mapping[str, str] | None = None,
    renumbered: Collection[str] = (),
) -> Merged:
    """Merge headers.

    Args:
        versions: the headers, oldest first, each with its library's version.
        inline_as: the symbols behind functions that are inline in old headers and exported by newer libraries.
        renumbered: enums in which a number may mean something else in another version.

    Raises:
        MergeError: two versions differ in a way that there is no rule for.
    """
    # Of one version in the packages of two releases of CUDA, the later one counts.
    return _Merger([*dict(versions).items()], inline_as or {}, renumbered).merge()


class _Merger:
    def __init__(
        self, versions: Sequence[tuple[str, Header]], inline_as: Mapping[str, str], renumbered: Collection[str]
    ) -> None:
        self._inline_as = inline_as
        self._renumbered = renumbered
        self._versions = [version for version, _ in versions]
        self._headers = [header for _, header in versions]
        self._newest = self._headers[-1]
        self._kept: dict[str, str] = {}  # older records, and the last version that has each so
        types = [(name, each) for header in self._headers for name, each in header.types.items()]
        self._enums = {name for name, each in types if isinstance(each, Enum)}
        self._merged = Merged()

    def merge(self) -> Merged:
        header = self._merged.header
        for name, functions in self._each([header.functions for header in self._headers]):
            header.functions[name] = self._function(name, functions)
        for name, declared in self._each([header.types for header in self._headers]):
            self._type(name, declared)
        self._use_older_parts()
        for name, values in self._each([header.constants for header in self._headers]):
            header.constants[name] = values[0][1]
            self._merged.before += [Before(name, *change) for change in self._changes(values)]
        for name, kinds in self._each([header.variables for header in self._headers]):
            self._same(name, [(version, self._shape(kind)) for version, kind in kinds])
            header.variables[name] = kinds[0][1]
        self._merged.header.unvalued = [*dict.fromkeys(name for each in self._headers for name in each.unvalued)]
        for name, targets in self._each([header.renames for header in self._headers]):
            header.renames[name] = self._same(name, targets)
        return self._merged

    def _each(self, sections: Sequence[dict[str, T]]) -> Iterable[tuple[str, list[tuple[str, T]]]]:
        """Each name with its versions, newest first; the newest header's names come first, in its order."""
        names = dict.fromkeys(name for section in reversed(sections) for name in section)
        for name in names:
            self._note(name, [name in section for section in sections])
            present = zip(self._versions, sections, strict=True)
            yield name, [(version, section[name]) for version, section in present if name in section][::-1]

    def _note(self, name: str, present: list[bool]) -> None:
        first, last = present.index(True), len(present) - 1 - present[::-1].index(True)
        if not all(present[first : last + 1]):
            raise MergeError(f"{name} comes and goes: it is not in every version from {self._versions[first]} on")
        if first > 0:
            self._merged.since[name] = self._versions[first]
        if last < len(present) - 1:
            self._merged.until[name] = self._versions[last]

    def _next(self, version: str) -> str:
        return self._versions[self._versions.index(version) + 1]

    def _changes(self, values: list[tuple[str, T]]) -> Iterable[tuple[str, T]]:
        """The older values, each with the version from which on it is no longer so."""
        now = values[0][1]
        for version, value in values[1:]:
            if value != now:
                yield self._next(version), value
            now = value

    def _same(self, name: str, values: list[tuple[str, T]]) -> T:
        for version, value in values[1:]:
            if value != values[0][1]:
                raise MergeError(f"{name} is {value} in {version} and {values[0][1]} in {values[0][0]}")
        return values[0][1]

    def _function(self, name: str, functions: list[tuple[str, Function]]) -> Function:
        """The newest signature, and each that an older version has instead; the parameters' names may differ."""
        newest = functions[0][1]
        now = self._call(newest)
        for version, older in functions[1:]:
            if self._shape(older.result) != self._shape(newest.result):
                raise MergeError(f"{name} is {older} in {version} and {newest} in {functions[0][0]}")
            if self._call(older) != now:
                changed = self._next(version)
                kept = f"{name}_before_{changed.replace('.', '_')}"
                self._merged.header.functions[kept] = replace(older, name=kept)
                self._merged.before.append(Before(name, changed, kept))
            now = self._call(older)
        inline = [version for version, function in functions if function.inline]
        if inline and not newest.inline:
            # A symbol of that name may be there in the old library, too, and be another function.
            if name not in self._inline_as:
                raise MergeError(f"{name} is inline in {inline[0]}: give the symbol that it calls in inline_as")
            self._merged.before.append(Before(name, self._next(inline[0]), self._inline_as[name]))
        return newest

    def _call(self, function: Function) -> tuple[object, ...]:
        """What a caller passes, as bits: an enum is an int, whatever else an older version calls it."""
        return tuple(
            INT if shape in self._enums else shape for _, kind in function.parameters for shape in [self._shape(kind)]
        )

    def _type(self, name: str, declared: list[tuple[str, Declaration]]) -> None:
        newest = declared[0][1]
        if all(isinstance(each, Enum) for _, each in declared):
            self._merged.header.types[name] = self._enum(name, [(v, e) for v, e in declared if isinstance(e, Enum)])
            return
        now = newest
        for version, older in declared[1:]:
            if self._declared(older) != self._declared(now):
                changed = self._next(version)
                self._merged.before.append(Before(name, changed, self._older(name, newest, changed, older)))
            now = older
        self._merged.header.types[name] = newest

    def _older(self, name: str, newest: Declaration, version: str, older: Declaration) -> str:
        """Where the module finds the older declaration of a name: an alias names its target, others get a new name."""
        if isinstance(older, Alias) and isinstance(newest, Alias) and isinstance(older.target, Named):
            return older.target.name
        if isinstance(older, (Record, Callback)) and type(older) is type(newest):
            kept: Declaration = replace(older, name=f"{name}_before_{version.replace('.', '_')}")
            self._kept[kept.name] = self._versions[self._versions.index(version) - 1]
        elif isinstance(older, (Enum, Record)) and isinstance(newest, Alias):
            kept = replace(older, name=f"{name}_before_{version.replace('.', '_')}")
        else:
            raise MergeError(f"{name} is {older} before {version} and {newest} now")
        self._merged.header.types[kept.name] = kept
        return kept.name

    def _use_older_parts(self) -> None:
        """What is kept of an older version is made of what that version had."""
        types = self._merged.header.types
        for kept, version in self._kept.items():
            record = types[kept]
            if isinstance(record, Record):
                fields = tuple(replace(field, type=self._as_of(version, field.type)) for field in record.fields)
                types[kept] = replace(record, fields=fields)

    def _as_of(self, version: str, kind: CType) -> CType:
        if isinstance(kind, ArrayOf):
            return replace(kind, element=self._as_of(version, kind.element))
        if not isinstance(kind, Named) or kind.kind != "record":
            return kind
        order = self._versions.index
        own = [each for each in self._merged.before if each.name in (kind.name, kind.base)]
        older = [each for each in own if order(each.version) > order(version)]
        if not older:
            return kind
        name = str(min(older, key=lambda before: order(before.version)).value)
        return replace(kind, name=name, base=name)

    def _enum(self, name: str, enums: list[tuple[str, Enum]]) -> Enum:
        """All enumerators of all versions; the newest's come first, so that a value they share goes by its name."""
        members: dict[str, int] = {}
        versions = [version for version, _ in enums][::-1]
        sections = [dict(enum.members) for _, enum in enums][::-1]
        outer = self._versions
        self._versions = versions  # an enumerator is not newer than its enum
        for member, values in self._each(sections):
            members[member] = values[0][1]
            self._merged.before += [Before(member, *change) for change in self._changes(values)]
        self._versions = outer
        gone = [member for member in members if member not in sections[-1]]
        for member in gone:
            if members[member] in sections[-1].values() and name in self._renumbered:
                # Only a library that has it knows it: see cudabind._lazy.Module.gone.
                until = self._merged.until.pop(member)
                own = f"{name}.{member}"
                renamed = [replace(each, name=own) if each.name == member else each for each in self._merged.before]
                self._merged.before = [*renamed, Before(own, self._next(until), members.pop(member))]
            elif members[member] in sections[-1].values():
                raise MergeError(f"{name}: the value of {member}, which is gone, means something else now")
        return Enum(name, tuple(members.items()))

    def _declared(self, declared: Declaration) -> object:
        """A declaration as far as it matters to who uses it."""
        if isinstance(declared, Record):
            fields = [(f.name, self._shape(f.type), f.offset_bits, f.width, f.anonymous) for f in declared.fields]
            return (declared.union, declared.size, *fields)
        if isinstance(declared, Callback):
            return (self._shape(declared.result), *(self._shape(kind) for _, kind in declared.parameters))
        return (Alias, self._shape(declared.target)) if isinstance(declared, Alias) else declared

    def _shape(self, kind: CType) -> object:
        """A type without what a caller cannot tell: the aliases of one type, and const."""
        if isinstance(kind, Pointer):
            return (Pointer, self._shape(kind.target))
        if isinstance(kind, ArrayOf):
            return (ArrayOf, self._shape(kind.element), kind.length)
        if not isinstance(kind, Named) or kind.kind == "scalar":
            return getattr(kind, "base", None) or getattr(kind, "name", kind)
        alias = self._newest.types.get(kind.name)
        return self._shape(alias.target) if isinstance(alias, Alias) else kind.name
