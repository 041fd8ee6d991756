"""Families of functions whose signatures differ only in some types: written once, as a generic class.

`_lazy` calls it to make a function when its name is first used; generated modules import `Generic` and the type
variables from here. To a type checker a family is a generic class with a `__call__`, and a function is a variable of
that class. At run time the types in the variable's annotation are put in place of the type variables.
"""

from __future__ import annotations

import re
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Generic, TypeVar

    T = TypeVar("T", bound=Any)  # of arrays and pointers ctypes wants its own classes
    U = TypeVar("U", bound=Any)
    V = TypeVar("V", bound=Any)
    W = TypeVar("W", bound=Any)
else:
    T, U, V, W = "TUVW"

    class _NoBase:
        """A base that disappears from the bases of a class."""

        def __mro_entries__(self, bases):
            return ()

    class Generic:
        """Only a type checker sees the second base of `class _Saxpy(Status, Generic[T])`."""

        _none = _NoBase()

        def __class_getitem__(cls, variables):
            return cls._none


__all__ = ["VARIABLES", "Generic", "T", "U", "V", "W", "family_of", "second_name", "signature"]

VARIABLES = ("T", "U", "V", "W")  # in the order in which a family's class names them
_VARIABLE = re.compile(r"\b[TUVW]\b")


def family_of(hint: str) -> str:
    """The name of the family in a function's annotation, such as ``_Saxpy`` in ``_Saxpy[c_float]``."""
    return hint.partition("[")[0]


def second_name(hint: str) -> str:
    """The function that a name is an alias of, from its annotation: ``Annotated[_Saxpy[c_float], "cublasSaxpy"]``."""
    return re.split("[\"']", hint)[1] if hint.startswith("Annotated[") else ""


def signature(name: str, hint: str, call: FunctionType, result: str) -> Callable[..., Any]:
    """One function's own signature.

    Args:
        name: the function's name.
        hint: its annotation, with the types for the family's variables.
        call: the family's `__call__`.
        result: the C function's result type, if the family has none: a checked call returns nothing.
    """
    types = dict(zip(VARIABLES, _parts(hint.partition("[")[2].removesuffix("]")), strict=False))
    code = call.__code__  # without `self`
    names, count = code.co_varnames[1:], code.co_argcount - 1
    code = code.replace(co_argcount=count, co_posonlyargcount=count, co_nlocals=count, co_varnames=names, co_name=name)
    function = FunctionType(code, call.__globals__, name)
    hints = {each: _VARIABLE.sub(lambda match: types[match[0]], kind) for each, kind in call.__annotations__.items()}
    function.__annotations__ = {**hints, "return": result or hints["return"]}
    function.__module__, function.__qualname__ = call.__module__, name
    return function


def _parts(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    return re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text.replace(", ", ","))
