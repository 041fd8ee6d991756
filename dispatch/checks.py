"""Checks of users' arguments: numbers, choices, shapes, dtypes and arrays, each kind in one place.

Requests, devices and tensors use them. A wrong argument raises BadRequest, with its name, the given value and what was
expected; an error raised by the object's own methods is part of that message. This file knows no op and no device.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import fields
from functools import cache, wraps
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from dispatch.errors import BadRequest, DispatchError, OutOfRange
from dispatch.keys import Choice, Compute, Dtype, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "MAX_FLOAT",
    "NO_NUMBERS",
    "annotation_of",
    "as_array",
    "as_python_ints",
    "check_bool",
    "check_bytes",
    "check_dtype",
    "check_enum",
    "check_fits",
    "check_int",
    "check_kinds",
    "check_library",
    "check_number",
    "check_shape",
    "check_type",
    "check_unmasked",
    "convert_array",
    "convert_int_fields",
    "names_arguments",
    "read_choices",
    "shown",
]

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
T = TypeVar("T")
E = TypeVar("E", bound=Choice)

NO_NUMBERS = (bool, np.timedelta64)  # Python and NumPy count these as integers
MAX_INT = 2**31 - 1
MAX_FLOAT = int(sys.float_info.max)
MAX_AXES = 64  # NumPy's limit
MAX_BYTES = 2**62  # of one array, so that its addresses and strides stay far below 2^64
LONGEST = 200  # characters of a value in a message


def shown(value: object) -> str:
    """A value as short text for a message, even if its repr raises; without the elements of a tensor."""
    try:
        describe = getattr(type(value), "describe_briefly", repr)
        text = describe(value)
    except Exception as error:  # noqa: BLE001  # the repr of a user's object may raise anything
        text = f"a {type(value).__name__}, whose repr raised {type(error).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# -- single values ----------------------------------------------------------------------------------------------------
def check_int(name: str, value: object, low: int, high: int = MAX_INT) -> int:
    """A whole number in a range, as a Python int."""
    if isinstance(value, np.integer) and not isinstance(value, NO_NUMBERS):
        value = int(value)
    # A user's subclass of int may override comparison, so the number itself is compared.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= int.__index__(value) <= high:
        raise BadRequest(name, shown(value), f"a whole number from {low} to {high}")
    return value


def as_python_ints(name: str, value: Any) -> Any:
    """Convert NumPy's integers to ints, and lists, ranges and arrays of integers to tuples of ints.

    A bool is refused; anything else is returned as it is, for a later check of the range.
    """
    if type(value) is int or value is None:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise BadRequest(name, shown(value), "a whole number, not a bool")
    if isinstance(value, (list, tuple, range)):
        return tuple(as_python_ints(name, one) for one in value)
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iub":
        return as_python_ints(name, value.tolist())
    is_number = isinstance(value, (np.integer, np.ndarray)) and not isinstance(value, NO_NUMBERS)
    return index(value) if is_number and value.dtype.kind in "iu" else value


def check_bytes(name: str, value: object) -> None:
    """A number of bytes, or None."""
    if value is not None and (type(value) is not int or value < 0):
        raise BadRequest(name, shown(value), "a number of bytes, 0 or more, or None")


def check_bool(name: str, value: object) -> None:
    """True or False; other objects are refused, whatever their truth value."""
    if not isinstance(value, bool):
        raise BadRequest(name, shown(value), "a bool")


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """A real number in a range; NaN only without a range, because its meaning depends on the op."""
    is_any = (low, high) == (-math.inf, math.inf)
    fits = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, NO_NUMBERS)
    if isinstance(value, int):
        fits = fits and abs(value) <= MAX_FLOAT  # larger ones do not fit a float
    number: Any = float(value) if isinstance(value, np.floating) else value  # NumPy compares an f16 with f16 limits
    if not fits or not (is_any or low <= number <= high):
        raise BadRequest(name, shown(value), "a number" if is_any else f"a number from {low:g} to {high:g}")


def check_enum(name: str, value: object, kind: type[E], further: str = "") -> E:
    """A member of an enum, given as such or by name; `further` is text about other values that are allowed."""
    if isinstance(value, kind):
        return value
    named = kind.named(str.__str__(value)) if isinstance(value, str) else None
    if named is not None:
        return named
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    expected = f"{article} {kind.__name__}: {', '.join(member.name for member in kind)}{further}"
    raise BadRequest(name, shown(value), expected + did_you_mean(kind, value))


def check_type(name: str, value: T, kind: Any) -> T:
    """An instance of a class."""
    if not isinstance(value, kind):
        raise BadRequest(name, shown(value), f"a {kind.__name__}")
    return value


def check_dtype(name: str, spec: Any) -> Dtype:
    """The Dtype for a name, a Dtype, or a dtype of NumPy, torch or JAX."""
    try:
        return Dtype.of(spec)
    except TypeError:
        raise BadRequest(name, shown(spec), f"a dtype, one of {', '.join(Dtype.by_name)}", Dtype.hint(spec)) from None


def check_shape(name: str, shape: object, bits: int = 8) -> Shape:
    """A shape; an array of this shape with elements of `bits` bits must be addressable."""
    extents = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if isinstance(extents, np.ndarray) and extents.ndim == 1:
        extents = tuple(extents)
    extents = tuple(extents) if isinstance(extents, (tuple, list)) else None
    if extents is None or len(extents) > MAX_AXES:
        raise BadRequest(name, shown(shape), f"an integer, or a tuple of up to {MAX_AXES} of them")
    if any(isinstance(extent, NO_NUMBERS) or not isinstance(extent, (int, np.integer)) for extent in extents):
        raise BadRequest(name, shown(shape), "integers of 0 or more")
    checked = tuple(int.__index__(extent) if isinstance(extent, int) else int(extent) for extent in extents)
    if min(checked, default=0) < 0:
        raise BadRequest(name, shown(shape), "integers of 0 or more")
    if math.prod(max(extent, 1) for extent in checked) * bits > MAX_BYTES * 8:
        raise BadRequest(name, shown(shape), "fewer elements: no memory is large enough")
    return checked


# -- fields of requests ----------------------------------------------------------------------------------------------
def check_kinds(request: Any) -> None:
    """Raise BadRequest if the value of a dataclass field does not fit its annotation.

    This checks enums and the annotations below, which mean the same in every op; each class checks other fields, and
    ranges, itself.
    """
    kind: Any = type(request)
    read_choices(request)
    for name, check in _field_checks(kind):
        check(name, getattr(request, name))
    convert_int_fields(request, _int_fields(kind))


def read_choices(request: Any) -> None:
    """Set fields of a dataclass that are enums to the members whose names were given; others stay as they are."""
    of: Any = type(request)
    for name, kind in _enum_fields(of):
        value = getattr(request, name)
        if isinstance(value, str) and (member := kind.named(str.__str__(value))) is not None:
            object.__setattr__(request, name, member)


def convert_int_fields(request: Any, names: Iterable[str]) -> None:
    """Convert fields of a dataclass by `as_python_ints`."""
    for name in names:
        value = getattr(request, name)
        if (converted := as_python_ints(name, value)) is not value:
            object.__setattr__(request, name, converted)


def check_library(name: str, library: object) -> None:
    """BadRequest unless it is a name or None; the table checks later whether that library has rows."""
    if library is not None and (type(library) is not str or not library):
        raise BadRequest(name, shown(library), "the name of a library, such as 'cutlass', or None")


def _or_none(check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    def check_unless_none(name: str, value: object) -> None:
        if value is not None:
            check(name, value)

    return check_unless_none


KINDS: dict[str, Callable[[str, Any], object]] = {
    "bool": check_bool,
    "bool | None": _or_none(check_bool),
    "float": check_number,
    "float | None": _or_none(check_number),
}
NAMED: dict[str, Callable[[str, Any], object]] = {
    "library": check_library,
    "out_dtype": _or_none(check_dtype),
    "workspace": check_bytes,
}


INT_ANNOTATIONS = (
    "int",
    "int | None",
    "int | tuple[int, ...]",
    "int | tuple[int, ...] | None",
    "tuple[int, ...] | None",
)
ALIASES = ("Padding", "Steps", "Steps | None", "Lengths | None")  # aliases of these annotations in op families


def annotation_of(field: Any) -> str:
    """The annotation of a dataclass field as text, whether its module's annotations are strings or not."""
    kind = field.type
    return kind.__name__ if isinstance(kind, type) else str(kind)


@cache
def _int_fields(kind: Any) -> tuple[str, ...]:
    typed = [(field.name, annotation_of(field)) for field in fields(kind)]
    return tuple(name for name, annotation in typed if annotation in (*INT_ANNOTATIONS, *ALIASES) and name not in NAMED)


@cache
def _field_checks(kind: Any) -> tuple[tuple[str, Callable[[str, Any], object]], ...]:
    enums, names = dict(_enum_fields(kind)), _module_names(kind)
    checks = []
    for field in fields(kind):
        check = NAMED.get(field.name) or KINDS.get(annotation_of(field))
        if check is None and (enum := enums.get(field.name)) is not None:
            others = {word for word in _annotation_names(annotation_of(field)) if names.get(word) is not enum}
            check = _enum_check(others, enum)
        if check is not None:
            checks.append((field.name, check))
    return tuple(checks)


def _enum_check(others: set[str], kind: type[Choice]) -> Callable[[str, Any], object] | None:
    """The check of a field that may be a member, its name, and perhaps None; no check if other values are allowed.

    `others` are the names in its annotation except the enum's, which a module may have imported under another name.
    """
    if not others <= {"str", "None"}:
        return None
    further = " or None" if "None" in others else ""

    def check_member(name: str, value: object) -> None:
        check_enum(name, value, kind, further)

    return _or_none(check_member) if further else check_member


def _module_names(kind: Any) -> dict[str, Any]:
    """The names in the modules of a class and its bases."""
    names: dict[str, Any] = {"Compute": Compute}
    for base in reversed(kind.__mro__):
        names |= vars(sys.modules.get(base.__module__, sys))
    return names


@cache
def _enum_fields(kind: Any) -> tuple[tuple[str, type[Choice]], ...]:
    """The fields of a dataclass that may be members of an enum, by their annotations."""
    names = _module_names(kind)
    candidates = [
        (field.name, names.get(word)) for field in fields(kind) for word in _annotation_names(annotation_of(field))
    ]
    return tuple((name, enum) for name, enum in candidates if isinstance(enum, type) and issubclass(enum, Choice))


def _annotation_names(annotation: str) -> set[str]:
    """The names in an annotation, without the modules before them."""
    return {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", annotation)}


# -- arrays -----------------------------------------------------------------------------------------------------------
def as_array(name: str, source: Any) -> Array:
    """The array of numbers that NumPy makes of an object; no element may be masked.

    The array is in native byte order; other arrays are converted, because they are copied in any case.
    """
    check_unmasked(name, source)
    try:
        array = np.asarray(source)
    except (DispatchError, MemoryError):  # from a tensor; its message is clear as it is
        raise
    except Exception as error:
        expected = "an array, or an object that numpy.asarray converts to one"
        raise BadRequest(name, f"a {type(source).__name__}", expected, f"{type(error).__name__}: {error}") from error
    is_number = array.dtype.kind in "biufc" or array.dtype in Dtype.by_numpy or array.dtype.isbuiltin == 2
    if not is_number:
        refuse_objects(name, array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def refuse_objects(name: str, array: Array) -> NoReturn:
    """OutOfRange for integers beyond every dtype, which NumPy stores as objects; BadRequest for other objects."""
    numbers = array.flat if array.dtype == object else ()
    beyond = next((one for one in numbers if isinstance(one, int) and not -(2**63) <= one < 2**64), None)
    if beyond is None:
        raise BadRequest(name, f"an array of dtype {array.dtype}", "an array of numbers")
    expected = "whole numbers from -2^63 to 2^64 - 1, the range of i64 and u64"
    raise OutOfRange(name, shown(beyond), expected, 'np.asarray(x, "f8") converts them to floats')


def check_unmasked(name: str, source: object) -> None:
    """Refuse masked elements: NumPy would pass on their numbers as if they were valid."""
    ma: Any = sys.modules.get("numpy.ma")  # imported by NumPy at its first use: without it, there are no masks
    if isinstance(source, getattr(ma, "MaskedArray", ())) and ma.is_masked(source):
        raise BadRequest(name, "an array with masked elements", "one without", "x.filled(…) replaces them by a number")


def check_fits(name: str, source: object, array: Array, kind: Dtype) -> None:
    """OutOfRange if Python numbers do not fit an integer dtype, as in NumPy 2.

    The elements of an array, which already has a dtype, wrap around when they are converted, as with `astype`.
    """
    if kind.numpy.kind not in "iu" or hasattr(source, "dtype") or array.dtype.kind not in "iuf" or not array.size:
        return
    limits, low, high = np.iinfo(kind.numpy), array.min().item(), array.max().item()  # Python ints compare exactly
    if low < limits.min or high > limits.max:
        wrong, hint = low if low < limits.min else high, "dev.array(np.asarray(x), dtype) wraps around"
        raise OutOfRange(name, shown(wrong), f"numbers from {limits.min} to {limits.max}, the range of {kind}", hint)


def convert_array(name: str, array: Array, kind: Dtype) -> Array:
    """An array in a dtype; BadRequest if that would drop an imaginary part, or convert NaN or infinity to integers.

    A float that is too large becomes infinite, as in IEEE 754; integers of an array wrap around, as in NumPy.
    """
    if array.dtype == kind.numpy:
        return array
    if array.dtype.kind == "c" and not kind.is_complex:
        raise BadRequest(name, f"complex numbers ({array.dtype})", f"real numbers, for {kind}", "use x.real or abs(x)")
    to_int = kind.numpy.kind in "iu" and array.dtype.kind not in "biu"
    with np.errstate(all="ignore", invalid="raise" if to_int else "ignore"):
        try:
            return array.astype(kind.numpy)
        except FloatingPointError:
            raise BadRequest(
                name, "numbers that are not finite, or too large", f"numbers that {kind} can represent"
            ) from None


def names_arguments(made: T) -> T:
    """Decorate a function or class so that wrong arguments raise this library's own, more helpful error."""
    kind: Any = made
    if isinstance(made, type):
        maker = "__init__" if "__init__" in vars(made) else "__new__"
        setattr(kind, maker, _with_argument_errors(getattr(kind, maker), made.__module__))
        return made
    wrapped: T = _with_argument_errors(kind, kind.__module__)
    return wrapped


def _with_argument_errors(function: Any, module: str) -> Any:
    """Wrap a function so that arguments which do not fit its signature raise a more helpful error."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # the error comes from inside the function
            from dispatch.unknown_arguments import refuse_call

            refuse_call(call, args, kwargs, str(error))

    call.__module__ = module  # the `__new__` of a NamedTuple has no module
    return call
