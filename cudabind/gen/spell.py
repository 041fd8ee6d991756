"""How a C type is written in a generated module: as a parameter, a result, a struct's field, or a ctypes class.

Called by `emit`. It writes types and nothing around them.
"""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING

from cudabind.gen.libraries import ROWS
from cudabind.gen.model import ArrayOf, CType, Field, Named, Pointer, Scalar

if TYPE_CHECKING:
    from collections.abc import Collection

CTYPES = {
    "char": "c_char",
    "bool_t": "c_bool",
    "size_t": "c_size_t",
    "long_t": "c_long",
    "ulong_t": "c_ulong",
    "float32": "c_float",
    "float64": "c_double",
}
ELEMENTS = {element for row in ROWS for element in row.elements}


def identifier(name: str) -> str:
    """A C name, with an underscore where Python has the word for itself."""
    return f"{name}_" if keyword.iskeyword(name) else name


def literal(value: float | str) -> str:
    """A constant; large ones are masks."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return f"0x{value:X}" if isinstance(value, int) and value > 0xFFFF else repr(value)


def field(member: Field, names: Collection[str] = ()) -> str:
    """A struct's member, as an annotation that ctypes and mypy both understand.

    Args:
        member: the member.
        names: those of all members: a type that goes by one of them must be written out.
    """
    kind = member.type
    if member.width:
        return f"Annotated[{parameter(kind)}, Bits({member.width})]"
    if isinstance(kind, ArrayOf):
        lengths: list[str] = []
        nested = "{}"
        element: CType = kind
        while isinstance(element, ArrayOf):
            lengths.append(str(element.length))
            element, nested = element.element, nested.format("Array[{}]")
        return f"Annotated[{nested.format(ctype(element))}, {', '.join(lengths)}]"
    if isinstance(kind, Pointer) or (isinstance(kind, Named) and kind.kind == "pointer"):
        return "Annotated[int | None, c_void_p]" if "address" in names else "address"
    if isinstance(kind, Named) and kind.kind == "enum":
        return f"int32_t  # {kind.name}"
    return parameter(kind)


def result(kind: CType) -> str:
    """What a function returns: texts come back as str, other pointers as an address."""
    if _is_text(kind):
        return "str"
    return "address" if isinstance(kind, Pointer) else parameter(kind)


def parameter(kind: CType) -> str:
    """What a function takes."""
    if isinstance(kind, (Named, Scalar)):
        return kind.name
    if not isinstance(kind, Pointer):
        return "None"
    return "char_p" if _is_text(kind) else _pointer(kind.target, kind.const)


def ctype(kind: CType) -> str:
    """The ctypes class: for what is not a parameter of its own (array elements, pointees)."""
    if isinstance(kind, ArrayOf):
        return ctype(kind.element)
    if isinstance(kind, Pointer):
        return "c_char_p" if _is_text(kind) else "c_void_p"
    if isinstance(kind, Named):
        plain = {"enum": "c_int32", "pointer": "c_void_p"}
        return plain.get(kind.kind) or (kind.name if kind.kind != "scalar" else ctype(Scalar(kind.base)))
    if isinstance(kind, Scalar):
        return CTYPES.get(kind.name) or f"c_{kind.name.removesuffix('_t')}"
    return "None"


def _pointer(target: CType, const: bool) -> str:
    memory = "ConstMem" if const else "Mem"
    if isinstance(target, Named) and target.kind in ("record", "handle"):
        # A pointer to numbers may be a device's; a pointer to a struct or a handle is the host's.
        return f"{memory if target.base in ELEMENTS else 'Ptr'}[{target.name}]"
    if isinstance(target, (Named, Scalar, Pointer, ArrayOf)):
        return f"{memory}[{ctype(target)}]"
    return "const_void_p" if const else "void_p"


def _is_text(kind: CType) -> bool:
    return isinstance(kind, Pointer) and kind.const and kind.target == Scalar("char")
