"""The function of a request class: it runs what the class describes, with the class's own parameters."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, get_args, overload

from dispatch.core.calls import call_of
from dispatch.core.remembered_operands import OperandCalls
from dispatch.core.request_class import check_request_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Request

__all__ = ["OfEither", "request_function", "request_function_of_either"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)

ENDING = """\
Where a member of an enum is expected its name does, too ("gelu_bias", "rms_norm", "tf32"), and for a dtype its name
("bf16", "float16", "half") or one of NumPy, ml_dtypes, torch or JAX.

It is enqueued on the current stream of the calling thread, and nothing is waited for. An output that is left out is
allocated. Raises BadRequest for arguments that do not fit, NoRow where no library takes the request, StaleTensor for
tensors of a closed device, DeviceFault on a lost one."""


def request_function(
    request_class: Callable[P, Request[R]], name: str, call: Callable[..., Any] | None = None
) -> Callable[P, R]:
    """The request function of a class: its parameters, defaults, types and documentation are the class's.

    Raises BadRequestClass where the class lacks what a request needs.

    `call` is what runs instead, with the same parameters, where an op has a shorter way than through a request.
    """
    kind: Any = request_class
    check_request_class(kind)
    unpacked = None if kind.unpacked is None else OperandCalls(kind)
    function: Any = call_of(kind, name, unpacked) if call is None else call
    function.__name__ = function.__qualname__ = name
    function.__module__ = kind.__module__
    function.__annotations__ = {field.name: field.type for field in fields(kind)} | {"return": _result(kind)}
    function.__doc__ = _documentation(kind)
    return cast("Callable[P, R]", function)


class OfEither(Protocol[P, R_co, Q, S_co]):
    """A function with the parameters of one class or of another, each with the result of its own."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S_co: ...


def request_function_of_either(
    first: Callable[P, Request[R]], second: Callable[Q, Request[S]], name: str, call: Callable[..., Any]
) -> OfEither[P, R, Q, S]:
    """The request function of two classes, of which `call` takes the one that its arguments are for.

    Type checkers see both; the signature and the documentation are the first one's, and name what the second has
    otherwise.
    """
    function: Any = request_function(first, name, call)
    parameters = inspect.signature(first).parameters.values()
    function.__signature__ = inspect.Signature(list(parameters), return_annotation=_result(first))
    text, entries, _ = _sections(second)
    function.__doc__ = f"{function.__doc__}\n\nOr: {text}\n\nArgs:\n{entries}"
    return cast("OfEither[P, R, Q, S]", function)


def _documentation(kind: Any) -> str:
    """That of a class; what it does not say of its fields, the classes say that it derives from."""
    text, entries, rest = _sections(kind)
    missing = {field.name for field in fields(kind)} - _named(entries)
    for parent in kind.__mro__[1:]:
        prose, found, _ = _sections(parent)
        taken = [entry for entry in re.split(r"\n(?=    \w)", found) if _named(entry) & missing]
        if taken:
            entries, missing = "\n".join(filter(None, [entries, *taken])), missing - _named(found)
            rest = "\n\n".join(part for part in (rest, prose.partition("\n\n")[2]) if part)
    return "\n\n".join(part for part in (text, f"Args:\n{entries}", rest, ENDING) if part)


def _sections(kind: Any) -> tuple[str, str, str]:
    """A class's documentation before its Attributes, these, and what comes behind them."""
    text, _, behind = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    entries, _, rest = behind.partition("\n\n")
    return text.rstrip(), entries.rstrip(), rest.rstrip()


def _named(entries: str) -> set[str]:
    """The fields that the entries of an Attributes section are about."""
    return {name for names in re.findall(r"(?m)^    (\w[\w, ]*):", entries) for name in names.split(", ")}


def _result(kind: Any) -> Any:
    """The R of the Request[R] that a class derives from; where its fields say which, one of those that they may say."""
    for parent in kind.__mro__:
        for base in parent.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                if not isinstance(argument, TypeVar):
                    return getattr(argument, "__forward_arg__", argument)
    return "Tensor | tuple[Tensor, ...]"
