"""Compares the ctypes layout of a generated module with libclang's: sizes, offsets and bit-fields.

Called by `python -m cudabind.gen` before anything is written, and by the tests. It runs the generated text as a module,
because only ctypes itself can say how it lays a struct out.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from cudabind.gen.emit import GAP
from cudabind.gen.model import Header, Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cudabind._bind import SysLibrary


class _Library:
    """Stands for a library of some version, so that a module is as it is with that one loaded."""

    def __init__(self, version: str | None, own: SysLibrary | None) -> None:
        self._version = version
        self.of_family = own.of_family if own is not None else None

    def version(self) -> str | None:
        return self._version


def load(name: str, text: str, version: str | None = None, uses: dict[str, ModuleType] | None = None) -> ModuleType:
    """The text of a generated module as a module, without any library.

    Args:
        name: the module's name in `cudabind.sys`.
        text: the text, as generated or as read from its file.
        version: the version of the library that counts as loaded; None is the newest.
        uses: modules that the text imports, where not the installed ones are meant.
    """
    module = ModuleType(name)
    installed = {f"cudabind.sys.{each}": found for each, found in (uses or {}).items()}
    kept = {each: sys.modules.get(each) for each in installed}
    sys.modules.update(installed)
    try:
        exec(compile(text, name, "exec"), vars(module))
    finally:
        for each, found in kept.items():
            if found is None:
                del sys.modules[each]
            else:
                sys.modules[each] = found
    vars(module)["_lib"] = _Library(version, vars(module).get("_lib"))
    return module


class LayoutError(Exception):
    """ctypes lays a struct out in another way than the compiler; one sentence for each size and field."""


def check(module: ModuleType, header: Header, imported: Collection[str] = ()) -> None:
    """Raise LayoutError where a struct of a loaded module is not the header's; imported ones are checked at home."""
    problems = wrong(module, header, imported)
    if problems:
        raise LayoutError("; ".join(problem for each in problems.values() for problem in each))


def wrong(module: ModuleType, header: Header, imported: Collection[str] = ()) -> dict[str, list[str]]:
    """The structs that ctypes lays out otherwise, each with what differs."""
    records = [each for name, each in header.types.items() if isinstance(each, Record) and name not in imported]
    found = {record.name: list(_record(record, getattr(module, record.name))) for record in records}
    return {name: problems for name, problems in found.items() if problems}


def _record(record: Record, made: type[ctypes.Structure | ctypes.Union]) -> Iterator[str]:
    if ctypes.sizeof(made) != record.size:
        yield f"{record.name} has {ctypes.sizeof(made)} bytes, the compiler gives it {record.size}"
    members = [name for name, *_ in made._fields_ if not name.startswith(GAP)]
    for field, name in zip(record.fields, members, strict=True):
        offset, width = placed(made, name)
        if offset != field.offset_bits or width != field.width:
            yield (
                f"{record.name}.{name} is at bit {offset} with width {width}, "
                f"the compiler has it at {field.offset_bits} with {field.width}"
            )


def placed(made: type[ctypes.Structure | ctypes.Union], name: str) -> tuple[int, int]:
    """Where ctypes has a field: its offset in bits, and its width where it is a bit-field."""
    descriptor = getattr(made, name)
    if not any(len(field) == 3 and field[0] == name for field in made._fields_):
        return descriptor.offset * 8, 0
    # A bit-field's size holds its width in the upper half and its place within the storage unit in the lower.
    return descriptor.offset * 8 + (descriptor.size & 0xFFFF), descriptor.size >> 16
