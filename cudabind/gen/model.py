"""The small model between a header and a module: types, declarations, and what one header amounts to.

`parse` builds it, `emit` writes it, the tests compare it with a compiler. It knows C and nothing of Python or CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Void:
    """``void``, or something of which only the address is of use."""


@dataclass(frozen=True)
class Scalar:
    """An arithmetic type by its exact name, such as ``int32_t``, ``size_t`` or ``float64``."""

    name: str


@dataclass(frozen=True)
class Named:
    """A type that has a declaration in the model; ``base`` is the declaration that its aliases end in."""

    name: str
    kind: Literal["enum", "record", "handle", "callback", "scalar", "pointer"]
    base: str


@dataclass(frozen=True)
class Pointer:
    target: CType
    const: bool = False


@dataclass(frozen=True)
class ArrayOf:
    element: CType
    length: int


CType: TypeAlias = "Void | Scalar | Named | Pointer | ArrayOf"


@dataclass(frozen=True)
class Function:
    name: str
    result: CType
    parameters: tuple[tuple[str, CType], ...]
    inline: bool = False


@dataclass(frozen=True)
class Enum:
    name: str
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Field:
    """A member of a record.

    ``width`` is 0 unless it is a bit-field; the members of an ``anonymous`` one are in the outer scope.
    """

    name: str
    type: CType
    offset_bits: int
    width: int = 0
    anonymous: bool = False


@dataclass(frozen=True)
class Record:
    """A struct or union; ``c_name`` is how C spells it, ``""`` where it cannot: inside another, without a name."""

    name: str
    union: bool
    fields: tuple[Field, ...]
    size: int
    c_name: str = ""


@dataclass(frozen=True)
class Handle:
    """An opaque pointer; ``base`` is the handle for a const object, which also takes this one, or ``""``."""

    name: str
    base: str = ""


@dataclass(frozen=True)
class Callback:
    name: str
    result: CType
    parameters: tuple[tuple[str, CType], ...]


@dataclass(frozen=True)
class Alias:
    """A second name of a type, from a typedef."""

    name: str
    target: CType


Constant: TypeAlias = int | float | str
Declaration: TypeAlias = Enum | Record | Handle | Callback | Alias


@dataclass
class Header:
    """What a library's headers declare, in the order in which Python must define it."""

    types: dict[str, Declaration] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    variables: dict[str, CType] = field(default_factory=dict)  # exported by the library
    unvalued: list[str] = field(default_factory=list)  # constants that are structs
    renames: dict[str, str] = field(default_factory=dict)  # `#define cublasCreate cublasCreate_v2`
