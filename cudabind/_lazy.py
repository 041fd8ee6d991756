"""Lazy creation of the enums, structs, handles, callback types and function families that a generated module declares.

A module has up to two thousand names, and creating them took most of its import. So it has plain class statements with
the bases below and ends in `lazy(globals())`; a name is created at first use. What differs between versions of a
library follows the version that is loaded: this file opens a library only to ask for its version.
"""

from __future__ import annotations

import ctypes
import enum
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from cudabind import _families, _types, callbacks
from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Mapping
    from ctypes import Structure, Union
    from enum import IntEnum

    from cudabind._bind import StatusFunction, ValueFunction
    from cudabind._types import Handle
    from cudabind.callbacks import Callback

    class Status(StatusFunction[...]):
        """Base of a family of functions that return a status."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    class Value(ValueFunction[..., Any]):
        """Base of a family of functions that return a value."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


__all__ = ["Callback", "Handle", "IntEnum", "Module", "Status", "Structure", "Union", "Value", "key", "lazy"]

BEFORE = "_before_"  # in the names of older variants of a declaration

# One lock for all modules, because a struct may need a type of another one. It may be taken while a library's lock is
# held, never the other way round.
_lock = threading.RLock()
anew(sys.modules[__name__], "_lock", threading.RLock)


class Declaration:
    """The result of a class statement in a generated module, until its name is first used."""

    __slots__ = ("base", "body", "made", "name")

    def __init__(self, base: type[_Base], name: str, body: dict[str, Any]) -> None:
        self.base = base
        self.name = name
        self.body = body
        self.made: Any = None

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type[_Base]]:
        """Allows `class cusparseSpMatDescr_t(cusparseConstSpMatDescr_t)` before the base has been created."""
        return (self.base,)


class _Declaring(type):
    """Turns a class statement with one of these bases into a Declaration."""

    def __new__(mcls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if body["__module__"] == __name__:  # the bases themselves
            return super().__new__(mcls, name, bases, body)
        return Declaration(bases[0], name, body)


class _Base(metaclass=_Declaring):
    """Creates the class of a Declaration: `body` is the class statement's namespace, `module` resolves its names."""

    @staticmethod
    def make(declared: Declaration, module: Module) -> Any:
        raise NotImplementedError


class _IntEnum(_Base):
    @staticmethod
    def make(declared: Declaration, module: Module) -> Any:
        members = module.gone(declared.name)  # first, so that they are the members for their numbers
        members += [(key, module.older(key, value)) for key, value in enumerators(declared.body)]
        return enum.IntEnum(declared.name, members, module=module.name, qualname=declared.name)


class _Structure(_Base):
    base: type = ctypes.Structure

    @classmethod
    def make(cls, declared: Declaration, module: Module) -> Any:
        hints = declared.body.get("__annotations__", {})
        fields = [(name, *_types.field(module.evaluate(hint))) for name, hint in hints.items()]
        body = {**declared.body, "_fields_": fields}
        called = {name: kind for name, kind, *_ in fields if issubclass(kind, callbacks.Callback)}
        if not called:
            return _class(declared.name, (cls.base,), body)
        return _class(declared.name, (callbacks.Holder, cls.base), {**body, "_callbacks_": called})


class _Union(_Structure):
    base = ctypes.Union


class _Handle(_Base):
    @staticmethod
    def make(declared: Declaration, module: Module) -> Any:
        above = [module.make(base) for base in declared.body.get("__orig_bases__", ())] or [_types.Handle]
        body = {"__module__": module.name, "__qualname__": declared.name}
        return _class(declared.name, tuple(above), body)


class _Callback(_Base):
    """A callback type: the signature of its `__call__` is the C function's."""

    @staticmethod
    def make(declared: Declaration, module: Module) -> Any:
        hints = dict(declared.body["__call__"].__annotations__)
        result = _types.argument(module.evaluate(hints.pop("return")))
        result = ctypes.c_void_p if result is ctypes.c_char_p else result  # ctypes leaks every returned c_char_p
        arguments = tuple(_types.argument(module.evaluate(hint)) for hint in hints.values())
        body = {"_flags_": callbacks.Callback._flags_, "_restype_": result, "_argtypes_": arguments}
        body |= {"__module__": module.name, "__qualname__": declared.name}
        return _class(declared.name, (callbacks.Callback,), body)


class _Value(_Base):
    """A family of functions (see `_families`); its functions are created, never the family itself."""


class _Status(_Value):
    """A family whose functions return a status."""


if not TYPE_CHECKING:
    IntEnum, Structure, Union, Handle, Callback = _IntEnum, _Structure, _Union, _Handle, _Callback
    Value, Status = _Value, _Status


def _class(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
    """Create a class with ctypes bases, by their metaclass."""
    metaclass: Any = type(bases[-1])
    return metaclass(name, bases, body)


def _is_family(value: object) -> bool:
    return isinstance(value, Declaration) and issubclass(value.base, _Value)


def enumerators(body: dict[str, Any]) -> list[tuple[str, int]]:
    """The members among the names of a class statement."""
    return [(key, value) for key, value in body.items() if not key.startswith("__")]


def key(version: str) -> tuple[int, ...]:
    """A version to compare: "13.10.0" is newer than "13.2"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return tuple(numbers + [0] * (4 - len(numbers)))


class Module:
    """The names of one generated module that are not created yet.

    `BEFORE` in the module has a row for every difference of an older library: the name, the version from which on the
    module's declaration applies, and what applied before: a number, the name of another declaration, a function's
    symbol, or the name of a function with the older signature.

    Args:
        names: the module's globals.
        other: a module that declares some of this one's types, some of which depend on its library's version.
        shared: those types, separated by spaces.
    """

    def __init__(self, names: dict[str, Any], other: Module | None = None, shared: str = "") -> None:
        self.name: str = names["__name__"]
        self._names = names
        self._shared = dict.fromkeys(shared.split(), other) if other is not None else {}
        self._before: dict[str, list[tuple[str, Any]]] = {}
        for name, version, value in names.get("BEFORE", ()):
            self._before.setdefault(name, []).append((version, value))
        self._waiting = {
            name: value
            for name, value in names.items()
            if isinstance(value, Declaration) or (name in self._before and not hasattr(value, "__wrapped__"))
        }
        self._variables = {n: hint for n, hint in names.get("__annotations__", {}).items() if n not in names}
        # Names created as in the newest version because no library was found; and whether one is being created so.
        self._guessed: dict[str, Declaration | None] = {}
        self._guessing = False
        for name in self._waiting:
            del names[name]

    def __getitem__(self, name: str) -> Any:
        """The value of a name in an annotation, for `eval`; an enum is a c_int there, and need not be created."""
        if name in self._names:
            self._guessing |= name in self._guessed
            return self._names[name]
        if other := self._shared.get(name):
            return other[name]
        waiting = self._waiting.get(name)
        if isinstance(waiting, Declaration) and waiting.base is _IntEnum:
            return ctypes.c_int
        if waiting is None:
            raise KeyError(name)
        return self.resolve(name)

    def evaluate(self, hint: str) -> Any:
        """The value of an annotation of the module."""
        with _lock:
            return eval(hint, {}, cast("Mapping[str, object]", self))

    def names(self) -> list[str]:
        """Every name of the module, created or not: its `__dir__`."""
        families = {name for name, each in self._waiting.items() if _is_family(each)}
        return sorted({*self._names, *self._waiting, *self._variables, *self._shared} - families)

    def functions(self) -> list[str]:
        """The functions that belong to families, created or not, without aliases."""
        return [name for name, hint in self._variables.items() if self._family(hint)]

    def variables(self) -> list[str]:
        """The variables that the library exports."""
        return [n for n, hint in self._variables.items() if not self._family(hint) and not _families.second_name(hint)]

    def _family(self, hint: str) -> Declaration | None:
        family = self._waiting.get(_families.family_of(hint))
        return family if _is_family(family) else None

    def resolve(self, name: str) -> Any:
        """Create what a name declares, once: the module's `__getattr__`.

        Raises:
            AttributeError: the module declares no such name.
        """
        if other := self._shared.get(name):
            return other.resolve(name)
        with _lock:
            if name in self._names:  # another thread was faster
                return self._names[name]
            if name in self._variables:
                value = self._annotated(name, self._variables[name])
            elif name in self._waiting:
                value = self._make(name)
            else:
                raise AttributeError(f"module {self.name!r} has no attribute {name!r}")
            self._names[name] = value
            return value

    def _annotated(self, name: str, hint: str) -> Any:
        """A function of a family, an alias of one, or a variable that the library exports."""
        if first := _families.second_name(hint):
            return self.resolve(first)
        if family := self._family(hint):
            return self._names["_lib"].of_family(name, hint, family.body["__call__"], family.base is _Status)
        return self._names["_lib"].variable(name, self.evaluate(hint))

    def settle(self) -> None:
        """Drop names that were created while no library was found, as the one found now may be an older one."""
        if self._guessed:
            with _lock:
                self._forget_guessed()

    def _forget_guessed(self) -> None:
        for name, declared in self._guessed.items():
            self._names.pop(name, None)
            if declared is not None:
                declared.made = None
        self._guessed.clear()

    def older(self, name: str, newest: Any) -> Any:
        """The declaration of a name in the version that is loaded."""
        if name not in self._before:
            return newest
        version = self._names["_lib"].version()
        if version is None:
            self._guessing = True
            return newest
        rows = [(key(before), value) for before, value in self._before[name] if key(version) < key(before)]
        return min(rows)[1] if rows else newest

    def gone(self, enumeration: str) -> list[tuple[str, int]]:
        """Enumerators that only an older library has, because their numbers mean something else now."""
        start = f"{enumeration}."
        older = [(name.removeprefix(start), self.older(name, None)) for name in self._before if name.startswith(start)]
        return [(name, value) for name, value in older if value is not None]

    def symbol(self, function: str) -> str:
        """The symbol under which the library exports a function."""
        older: str = self.older(function, function)
        return function if BEFORE in older else older

    def signature(self, function: str) -> Any:
        """A function's signature in the version that is loaded."""
        older: str = self.older(function, function)
        return self.resolve(older if BEFORE in older else function).__wrapped__

    def make(self, declared: Declaration) -> Any:
        """The class that a Declaration stands for."""
        if declared.made is None:
            outer, self._guessing = self._guessing, False
            declared.made = declared.base.make(declared, self)
            if self._guessing:
                self._guessed[declared.name] = declared
            self._guessing |= outer
        self._guessing |= declared.name in self._guessed
        return declared.made

    def _make(self, name: str) -> Any:
        outer, self._guessing = self._guessing, False
        newest = self._waiting[name]
        value = self.older(name, newest)
        if value is newest and isinstance(newest, Declaration) and newest.name != name:
            value = newest.name  # an alias of the declaration that applies in this version
        if isinstance(value, str) and not isinstance(newest, str):
            value = self.resolve(value)
        value = self.make(value) if isinstance(value, Declaration) else value
        if self._guessing:
            self._guessed.setdefault(name)
        self._guessing |= outer
        return value


def lazy(names: dict[str, Any], other: Module | None = None, shared: str = "") -> Module:
    """Called at the end of a module: removes its declarations from its globals; they are created when first used."""
    module = Module(names, other, shared)
    names["__getattr__"] = module.resolve
    names["__dir__"] = module.names
    return module
