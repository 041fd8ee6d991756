"""Compares the ctypes layout of a generated module with libclang's: sizes, offsets and bit-fields.

Called by `python -m cudabind.gen` before anything is written, and by the tests. It runs the generated text as a module,
because only ctypes itself can say how it lays a struct out.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from cudabind.gen.model import Header, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "cudabind_generated"


def load(text: str) -> ModuleType:
    """The generated text as a module, under a name of its own."""
    module = ModuleType(NAME)
    sys.modules[NAME] = module  # decorators look their module up by name
    try:
        exec(compile(text, NAME, "exec"), vars(module))
    finally:
        del sys.modules[NAME]
    return module


class LayoutError(Exception):
    """ctypes lays a struct out in another way than the compiler; one sentence for each size and field."""


def check(text: str, header: Header) -> None:
    """Raise LayoutError where a struct of the text differs from the header's."""
    module = load(text)
    records = [declared for declared in header.types.values() if isinstance(declared, Record)]
    wrong = [problem for record in records for problem in _record(record, getattr(module, record.name))]
    if wrong:
        raise LayoutError("; ".join(wrong))


def _record(record: Record, made: type[ctypes.Structure | ctypes.Union]) -> Iterator[str]:
    if ctypes.sizeof(made) != record.size:
        yield f"{record.name} has {ctypes.sizeof(made)} bytes, the compiler gives it {record.size}"
    for field, (name, *_) in zip(record.fields, made._fields_, strict=True):
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
