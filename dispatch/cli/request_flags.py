"""The flags of a request class: one for each field, read by the field's type.

An operand is written as `8x64x32x32:f16:channels_last`: extents, dtype and order; any of them may be omitted. Enums are
given by name, tuples like 3,3 or 3x3, dataclasses like mode=LSTM,input_size=64. The types are the annotations of the
class, including types that its module imports only for type checkers.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import sys
import types
from argparse import Action, ArgumentError, BooleanOptionalAction
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin

from dispatch.cli.expression import evaluate
from dispatch.core.communicator import Ranks
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import Choice, Dtype, did_you_mean
from dispatch.libraries.cutlass import evt
from dispatch.libraries.threads.communicator import placeholder_communicator

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["ORDERS", "Partial", "Reader", "Spec", "add_flags", "field_types", "given_fields", "reader"]

ORDERS = ("rows", "columns", "channels_last")  # C order, the last two axes exchanged, the second axis last
FIELD = "field "  # prefix of fields in a namespace, which also has other options


class Spec(NamedTuple):
    """An operand as given on the command line; any part may be None."""

    shape: tuple[int, ...] | None = None
    dtype: Dtype | None = None
    order: str | None = None
    strides: tuple[int, ...] | None = None  # only for default operands: the command line has orders instead

    @classmethod
    def read(cls, text: str) -> Spec:
        """Parse an operand; ValueError for anything else."""
        parts: dict[str, Any] = {}
        for part in text.split(":"):
            parsed: dict[str, Any] = {}
            if re.fullmatch(r"\d+(x\d+)*", part):
                parsed["shape"] = tuple(map(int, part.split("x")))
            elif part in ORDERS:
                parsed["order"] = part
            elif part:
                parsed["dtype"] = read_dtype(part)
            if not parsed or parsed.keys() & parts:
                raise ValueError(part)
            parts |= parsed
        return cls(**parts)


class Partial(NamedTuple):
    """A dataclass and some of its fields; the object is created after its operands."""

    kind: type[Any]
    values: dict[str, Any]


class Reader(NamedTuple):
    """The parser of a command line argument, and a description of the expected text."""

    read: Callable[[str], Any]  # ValueError for invalid text
    expected: str
    hint: Callable[[str], str] = lambda _: ""  # a further hint for invalid text, such as a similar name


# -- types ------------------------------------------------------------------------------------------------------------
def field_types(kind: type[Any]) -> dict[str, Any]:
    """The type of each field of a dataclass or named tuple; an empty class for a name that is not found."""
    types_by_field: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not vars(base).keys() & {"__dataclass_fields__", "_fields"}:
            continue  # its annotations are not fields
        names = _Names(base.__module__)
        for name, hint in inspect.get_annotations(base).items():
            text = hint.__forward_arg__ if hasattr(hint, "__forward_arg__") else hint
            types_by_field[name] = eval(text, {}, names) if isinstance(text, str) else hint  # code of a loaded module
    return types_by_field


class _Names(Mapping[str, Any]):
    """The names of a module, including those that it imports under TYPE_CHECKING."""

    def __init__(self, module: str) -> None:
        self._module, self._known = module, vars(sys.modules[module])

    def __getitem__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in _imported(self._module):
            module, original = _imported(self._module)[name]
            return getattr(importlib.import_module(module), original)
        return type(name, (), {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


@cache
def _imported(module: str) -> dict[str, tuple[str, str]]:
    """All names that a module imports, anywhere in its source, with the module and the name there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a class of an interactive session has no source
        return {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in nodes for alias in node.names}


def read_dtype(text: str) -> Dtype:
    """The dtype of a name; ValueError if there is none."""
    try:
        return Dtype.of(text)
    except TypeError as error:
        raise ValueError(str(error)) from None


# -- words ------------------------------------------------------------------------------------------------------------
def reader(name: str, hint: Any) -> Reader | None:
    """The reader of a field; None for a field that cannot be given on the command line."""
    if name.endswith("dtype"):
        return Reader(read_dtype, f"a dtype: {', '.join(Dtype.by_name)}", _hint_of_dtype)
    if get_origin(hint) in (Union, types.UnionType):
        kinds = sorted(get_args(hint), key=_union_order)
        if _is_choice(kinds[0]):
            kinds = [each for each in kinds if each is not str]  # str is for names of members
        readers = [inner for each in kinds if (inner := reader(name, each))]
        expected = dict.fromkeys(each.expected for each in sorted(readers, key=lambda each: each.expected == "none"))
        if not readers:
            return None
        return Reader(
            lambda text: _read_first(readers, text), " or ".join(expected), lambda text: _first_hint(readers, text)
        )
    if get_origin(hint) is tuple:
        return _tuple_reader(name, hint)
    if hint is Any and name == "operands":
        return Reader(lambda text: _pairs(text, lambda _: Spec.read), "operands by name, like bias=256:f32")
    if not isinstance(hint, type):
        return None
    if hint in SIMPLE:
        return SIMPLE[hint]
    if issubclass(hint, Choice):
        return _choice_reader(hint)
    if issubclass(hint, Enum):
        return Reader(_one_of({name.lower(): each for name, each in hint.__members__.items()}), _names_of(hint))
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record_reader(hint)
    return None


def _is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Choice)


def _union_order(hint: Any) -> int:
    """The order in which the types of a union are tried; the first one that accepts the text is used."""
    order: list[Any] = [type(None), bool, int, float, complex, tuple, Tensor]
    origin = get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, Enum):
        return -1
    return order.index(origin) if origin in order else len(order)


def _read_first(readers: list[Reader], text: str) -> Any:
    for each in readers:
        try:
            return each.read(text)
        except ValueError:  # noqa: PERF203  # there are few arguments
            continue
    raise ValueError(text)


def _first_hint(readers: Iterable[Reader], text: str) -> str:
    return next((hint_text for each in readers if (hint_text := each.hint(text))), "")


def _hint_of_dtype(text: str) -> str:
    hint_text = Dtype.hint(text)
    return f". {hint_text}" if hint_text else ""


def _one_of(names: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.lower() not in names:
            raise ValueError(text)
        return names[text.lower()]

    return read


EVT = {name: getattr(evt, name) for name in evt.__all__ if name.islower()}
SIMPLE: dict[type[Any], Reader] = {
    type(None): Reader(_one_of({"none": None}), "none"),
    bool: Reader(_one_of({"true": True, "false": False}), "true or false"),
    int: Reader(int, "a whole number"),
    float: Reader(float, "a number"),
    complex: Reader(complex, "a number"),
    str: Reader(str, "a word"),
    evt.Node: Reader(lambda text: evaluate(text, EVT), "an epilogue tree like relu(accumulator() + row('bias'))"),
    Tensor: Reader(Spec.read, "an operand like 8x64:f16:rows"),
    Ranks: Reader(
        lambda text: placeholder_communicator(int(text)), "the number of ranks; the request is that of rank 0"
    ),
}


def _choice_reader(kind: type[Choice]) -> Reader:
    """A reader of an enum's names, as requests take them."""

    def read(text: str) -> Choice:
        member = kind.named(text)
        if member is None:
            raise ValueError(text)
        return member

    return Reader(read, _names_of(kind), lambda text: did_you_mean(kind, text))


def _names_of(kind: type[Enum]) -> str:
    return f"one of {', '.join(kind.__members__)}"


def _tuple_reader(name: str, hint: Any) -> Reader | None:
    """A reader of numbers like 3,3 or 3x3; pairs are separated by semicolons."""
    kinds = [each for each in get_args(hint) if each is not Ellipsis]
    nested = all(get_origin(each) is tuple for each in kinds)
    inner = reader(name, kinds[0])
    if inner is None or kinds[0] is Tensor:
        return None
    split = ";" if nested else "[,x]"
    count = None if Ellipsis in get_args(hint) else len(kinds)

    def read(text: str) -> tuple[Any, ...]:
        values = tuple(inner.read(part) for part in re.split(split, text))
        if (count is not None and len(values) != count) or (nested and len(values) < 2):
            raise ValueError(text)
        return values

    return Reader(read, "pairs like 1,1;0,2" if nested else "numbers like 3,3")


def _record_reader(kind: type[Any]) -> Reader:
    """A reader of values by name: mode=LSTM,input_size=64."""
    readers = {name: field_reader for name, hint in field_types(kind).items() if (field_reader := reader(name, hint))}
    parameters = inspect.signature(kind).parameters
    needed = [name for name in readers if parameters[name].default is inspect.Parameter.empty]
    optional = ", ".join(name for name in readers if name not in needed)

    def of(name: str) -> Callable[[str], Any]:
        if name not in readers:
            raise ValueError(name)
        return readers[name].read

    def read(text: str) -> Partial:
        values_by_name = _pairs(text, of)
        if not values_by_name.keys() >= set(needed):
            raise ValueError(text)
        return Partial(kind, values_by_name)

    values = ",".join(f"{name}=…" for name in needed or [next(iter(readers))])
    words = "; ".join(f"{name} is {readers[name].expected}" for name in needed)
    text = f"values by name, like {values}{' and' if needed else ', of'} {optional}"
    return Reader(read, f"{text}; {words}" if words else text)


def _pairs(text: str, reader_of: Callable[[str], Callable[[str], Any]]) -> dict[str, Any]:
    """Values by name, separated by commas; a part without a name continues the previous value, as in shape=3,3."""
    pairs: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        name, equals, value = part.partition("=")
        if not equals or name in pairs:
            raise ValueError(part)
        pairs[name] = reader_of(name)(value)
    return pairs


# -- flags ------------------------------------------------------------------------------------------------------------
def add_flags(parser: ArgumentParser, kinds: Sequence[type[Any]]) -> None:
    """Add a flag for each field of an op's request classes that has a reader; nearly every op has one class."""
    readers_by_field: dict[str, dict[type[Any], Reader]] = {}
    for kind in kinds:
        field_type = field_types(kind)
        for field in fields(kind):
            each = reader(field.name, field_type[field.name])
            if each is not None:
                readers_by_field.setdefault(field.name, {})[kind] = each
    for name, readers in readers_by_field.items():
        first = next(iter(readers))
        flag, about = "--" + name.replace("_", "-"), field_docs(first).get(name, "").replace("%", "%%")
        options: dict[str, Any] = {"dest": FIELD + name, "default": MISSING}
        if all(each is SIMPLE[bool] for each in readers.values()):
            parser.add_argument(flag, action=BooleanOptionalAction, help=about, **options)
            continue
        default = next(field.default for field in fields(first) if field.name == name)
        unsaid = default is MISSING or default is None
        text = f"{about + '; ' if about else ''}{_expected(readers)}"
        text += "" if unsaid else f" (default: {getattr(default, 'name', default)})"
        parser.add_argument(flag, action=_ReadAction, readers=readers, metavar=name.upper(), help=text, **options)


def _expected(readers: dict[type[Any], Reader]) -> str:
    return " or ".join(dict.fromkeys(each.expected for each in readers.values()))


class _ReadAction(Action):
    """Stores the value that each class's reader of a field returns for a text, or reports what was expected."""

    def __init__(self, *words: Any, readers: dict[type[Any], Reader], **options: Any) -> None:
        super().__init__(*words, **options)
        self.readers = readers

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, _: str | None = None) -> None:
        parsed: dict[type[Any], Any] = {}
        for kind, each in self.readers.items():
            with suppress(ValueError, BadRequest):
                parsed[kind] = each.read(values)
        if not parsed:
            hint_text = _first_hint(self.readers.values(), values)
            raise ArgumentError(self, f"got {values!r}; expected {_expected(self.readers)}{hint_text}")
        setattr(namespace, self.dest, parsed)


def given_fields(options: Namespace, kind: type[Any]) -> dict[str, Any]:
    """The fields of a class given on the command line; BadRequest if the class does not take one of them."""
    flags = {name.removeprefix(FIELD): value for name, value in vars(options).items() if name.startswith(FIELD)}
    names = {field.name for field in fields(kind)}
    chosen: dict[str, Any] = {}
    for name, value in flags.items():
        if value is MISSING:
            continue
        if name not in names or (isinstance(value, dict) and kind not in value):
            raise BadRequest(f"--{name.replace('_', '-')}", "a value", f"none, with the other flags: {kind.__name__}")
        chosen[name] = value[kind] if isinstance(value, dict) else value
    return chosen


def field_docs(kind: type[Any]) -> dict[str, str]:
    """The description of each field in the docstrings of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, listed = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", listed.partition("\n\n")[0]):
            names, colon, text = entry.strip().partition(": ")
            if colon:
                docs |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()).rstrip("."))
    return docs
