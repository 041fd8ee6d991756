"""Checks of request classes: whether a class declares everything that requests need. The error says what to write.

`request_function` and the first request of a class run them, once for each class; a test checks this package's classes.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dispatch.checks import annotation_of
from dispatch.core.request import Request
from dispatch.errors import BadRequestClass
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_class_body", "check_outputs", "check_request_class", "is_tensor"]

UNSIZED = -1  # the extent of an output that only the device's library knows
DECORATOR = "@dataclass(frozen=True, eq=False)"
CONSTANTS = ("op", "reads", "writes", "updates", "mixed", "in_place", "advice")
TENSOR = re.compile(r"Tensor|Tensor \| None|None \| Tensor|Optional\[Tensor\]")


def is_tensor(field: Field[Any]) -> bool:
    """Whether a field is annotated `Tensor` or `Tensor | None`, with or without a module before the name."""
    return TENSOR.fullmatch(re.sub(r"[\w.]+\.(?=\w)", "", annotation_of(field))) is not None


def check_class_body(kind: Any) -> None:
    """Raise BadRequestClass for a class constant without ClassVar, before `dataclass` reports its default instead."""
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        if name in CONSTANTS and "ClassVar" not in str(annotation):
            declaration = f"{name}: ClassVar[{str(annotation).removeprefix('typing.')}]"
            raise BadRequestClass(
                f"{kind.__name__} has {name} as a field instead of a class variable: write {declaration}"
            )


@cache
def check_request_class(kind: Any) -> None:
    """Raise BadRequestClass, a TypeError, with the first thing that a class lacks, and the remedy."""
    for problem, remedy in _lacks(kind):
        name = getattr(kind, "__name__", repr(kind))
        raise BadRequestClass(f"{name} {problem}: {remedy}")


def check_outputs(request: Any, made: Any) -> None:
    """Raise BadRequestClass unless `outputs()` has returned outputs by name whose elements do not share memory."""
    name = type(request).__name__
    remedy = (
        "return {'out': dispatch.Output(shape, strides in elements, dtype)}, without the outputs that are not allocated"
    )
    if not isinstance(made, dict):
        raise BadRequestClass(f"{name}: outputs() returns {made!r:.80}: {remedy}")
    for key, output in made.items():
        problem = _problem_of_output(request, output)
        if problem:
            raise BadRequestClass(f"{name}: outputs() returns {output!r:.80} for {key!r}, {problem}: {remedy}")


def _problem_of_output(request: Any, output: Any) -> str:
    if not (isinstance(output, tuple) and hasattr(output, "strides")):
        return "which is not a dispatch.Output"
    shape, strides, dtype = output
    for kind, counts in (("shape", shape), ("strides", strides)):
        if type(counts) is not tuple or not all(type(count) is int for count in counts):
            return f"whose {kind} is not a tuple of int"
    if type(dtype) is not Dtype:
        return "whose dtype is not one of dispatch.keys"
    if len(shape) != len(strides):
        return f"which has {len(shape)} extents and {len(strides)} strides"
    made = type(request)
    if shape == (UNSIZED,) and made.bytes_of is not _first_of(made, "bytes_of"):  # which tells the size later
        return ""
    if any(extent < 0 for extent in shape):
        return "which has a negative extent"
    if any(stride < 0 for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        return "which has a negative stride"
    if request.device.layout(dtype, shape, strides, 256).meets_itself:
        return "some of whose elements share an address"
    return ""


def _lacks(kind: Any) -> Iterator[tuple[str, str]]:
    yield from _lacks_as_class(kind)
    yield from _lacks_as_dataclass(kind)
    if any(hasattr(getattr(kind, name, None), "__get__") for name in ("reads", "writes")):
        return  # properties: the values differ from request to request
    if not hasattr(kind, "in_place"):
        return  # derives from Request directly
    for name in ("reads", "writes", "updates", "mixed"):
        yield from _lacks_as_names(kind, name)
    for pair in kind.in_place:
        if len(pair) != 2 or pair[0] not in kind.writes or pair[1] not in kind.reads:
            yield f"has {pair!r} in in_place", "write pairs of an output and an input that may share the same memory"
    yield from _lacks_as_fields(kind)
    if len(kind.writes) > 1 and kind.outputs is _first_of(kind, "outputs"):
        remedy = f"return {{{', '.join(f'{name!r}: Output(shape, strides, dtype)' for name in kind.writes)}}} there"
        yield (
            f"has {len(kind.writes)} outputs but does not define outputs()",
            f"{remedy}, without those that are not allocated",
        )


def _lacks_as_class(kind: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(kind, type) or not issubclass(kind, Request):
        yield "is not a class that derives from OperandRequest", "write class MyRequest(dispatch.OperandRequest)"
    if not isinstance(getattr(kind, "op", None), str):
        yield "has no op", 'write op: ClassVar[str] = "name", the name that rows use'
    if hasattr(kind, "in_place") and not hasattr(kind, "reads"):
        yield "has no reads", 'write reads: ClassVar[tuple[str, ...]] = ("x",) with the fields that are inputs'
    for name in sorted(getattr(kind, "__abstractmethods__", ())):
        yield f"has no {name}()", f"write def {name}(self), as {_first_with(kind, name)} describes it"


def _lacks_as_dataclass(kind: Any) -> Iterator[tuple[str, str]]:
    annotations = vars(kind).get("__annotations__", {})
    new_fields = [name for name, text in annotations.items() if "ClassVar" not in str(text)]
    if not is_dataclass(kind) or (new_fields and "__dataclass_params__" not in vars(kind)):
        yield "is not a dataclass", f"put {DECORATOR} above it"
    for field in fields(kind):
        if field.default_factory is not MISSING:
            yield f"has a default_factory for {field.name}", "give it a default that is a value: None, or a tuple"
    options: Any = kind.__dataclass_params__
    if not options.frozen:
        yield "is not frozen, although plans are cached by the values of its fields", f"put {DECORATOR} above it"
    if options.eq:
        yield "compares its fields, but tensors cannot be compared", f"put {DECORATOR} above it"


def _lacks_as_names(kind: Any, name: str) -> Iterator[tuple[str, str]]:
    names, field_names = getattr(kind, name), [field.name for field in fields(kind)]
    if not isinstance(names, tuple):
        first = names if isinstance(names, str) else "x"
        yield f"has {name} = {names!r}, which is not a tuple", f'write ("{first}",)'
    for one in names:
        if one not in field_names:
            yield f"has {one!r} in {name}, which is not a field", f"add one, or name some of {', '.join(field_names)}"


def _lacks_as_fields(kind: Any) -> Iterator[tuple[str, str]]:
    named = {*kind.reads, *kind.writes}
    for field in fields(kind):
        if field.name in named and "Tensor" not in (text := annotation_of(field)):
            yield f"has {field.name} in reads or writes and annotates it {text}", "annotate it Tensor, or Tensor | None"
        if field.name not in named and is_tensor(field):
            remedy = "add its name there, in the order of the addresses that the plan receives"
            yield f"has a tensor {field.name} that is neither in reads nor in writes", remedy
    for name in kind.mixed:
        if name not in kind.reads[1:]:
            yield (
                f"has {name!r} in mixed, which may contain only inputs other than the first",
                f"name some of {kind.reads[1:]}",
            )
    for name in (*kind.updates, *(pair[1] for pair in kind.in_place)):
        if name not in kind.reads:
            yield f"has {name!r} in updates and not in reads", "an operand that the op updates is also read"


def _first_of(kind: Any, name: str) -> Any:
    """A method of OperandRequest, the first class of the MRO that has `in_place`."""
    return vars(next(parent for parent in reversed(kind.__mro__) if "in_place" in vars(parent)))[name]


def _first_with(kind: Any, name: str) -> str:
    names: list[str] = [parent.__name__ for parent in kind.__mro__ if name in vars(parent)]
    return names[-1]
