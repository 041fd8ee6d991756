"""request_function: makes `matmul(…)` from `MatmulRequest`, with the fields of the class as parameters.

A repeated call finds its plan through call_cache.py, or through framework_call_cache.py over another library's tensors,
and makes no request.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, get_args, overload

from dispatch.checks import names_arguments, shown
from dispatch.core.call_cache import CACHE_MISS, cache_call, executor_on, fields_of, tuple_code
from dispatch.core.framework_call_cache import FrameworkCallCache, learn
from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.request import run
from dispatch.core.request_class import check_request_class
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.unknown_arguments import MISSING_ARGUMENT, name_unknown, refuse_arguments, refuse_missing, signature_of

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
Members of enums may be given by name ("gelu_bias", "tf32"), dtypes by name ("bf16"; "i8" is int8) or as those of NumPy,
ml_dtypes, torch or JAX. The call is enqueued on the current stream and does not wait; outputs that are left out are
allocated. BadRequest: arguments that do not fit. NoRow: no library takes them. More errors: help(dispatch.errors)."""


@names_arguments
def request_function(
    request_class: Callable[P, Request[R]], name: str, call: Callable[..., Any] | None = None
) -> Callable[P, R]:
    """The request function of a class: its parameters, defaults, types and documentation are the class's.

    Raises BadRequestClass if the class lacks something that requests need, BadRequest for an invalid function name.

    `call` replaces the generated function for an op that has its own faster path. It has the same parameters, and also
    `*more` and `**unknown`, which it passes to `refuse_arguments` for an error that names similar arguments.
    """
    kind: Any = request_class
    check_request_class(kind)
    label: Any = name
    if not isinstance(label, str) or not label.isidentifier() or iskeyword(label):
        raise BadRequest("name", shown(label), "the name of a function in Python", f'the op is named "{kind.op}"')
    unpacked = None if kind.unpacked is None else ListCallCache(kind)
    function: Any = call_of(kind, name, unpacked) if call is None else call
    function.__name__ = function.__qualname__ = name
    function.__module__ = _home(kind)
    signature = signature_of(kind)
    name_unknown(kind, signature)
    function.__signature__ = signature.replace(return_annotation=_result(kind))
    function.__annotations__ = {field.name: field.type for field in fields(kind)} | {"return": _result(kind)}
    function.__doc__ = _documentation(kind)
    return cast("Callable[P, R]", function)


class OfEither(Protocol[P, R_co, Q, S_co]):
    """A function that takes the parameters of either of two classes and returns that class's result."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S_co: ...


def request_function_of_either(
    first: Callable[P, Request[R]], second: Callable[Q, Request[S]], name: str, call: Callable[..., Any]
) -> OfEither[P, R, Q, S]:
    """The request function of two classes; `call` chooses between them by its arguments.

    Type checkers see both overloads. The signature is that of the first class; the documentation is the first one's,
    followed by the second one's.
    """
    function: Any = request_function(first, name, call)
    name_unknown(second, signature_of(second))
    text, entries, _ = _sections(second)
    function.__doc__ = f"{function.__doc__}\n\nOr: {text}\n\nArgs:\n{entries}"
    return cast("OfEither[P, R, Q, S]", function)


def _home(kind: Any) -> str:
    """The module whose code makes the function, where `pickle` looks for it by its name; else the class's module.

    A function that is made within another function is not in a module, so it gets the class's module.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, names_arguments.__module__):
        frame = frame.f_back
    module: str = kind.__module__
    return frame.f_globals.get("__name__", module) if frame.f_code.co_name == "<module>" else module


def _documentation(kind: Any) -> str:
    """The documentation of a class; fields that it does not document are documented by its base classes."""
    text, entries, rest = _sections(kind)
    missing = {field.name for field in fields(kind)} - _named(entries)
    for parent in kind.__mro__[1:]:
        prose, documented, _ = _sections(parent)
        inherited = [entry for entry in re.split(r"\n(?=    \w)", documented) if _named(entry) & missing]
        if inherited:
            entries, missing = "\n".join(filter(None, [entries, *inherited])), missing - _named(documented)
            rest = "\n\n".join(part for part in (rest, prose.partition("\n\n")[2]) if part)
    return "\n\n".join(part for part in (text, f"Args:\n{entries}", rest, ENDING) if part)


def _sections(kind: Any) -> tuple[str, str, str]:
    """A class's documentation in three parts: before its Attributes, the Attributes, and after them."""
    text, _, after = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    entries, _, rest = after.partition("\n\n")
    return text.rstrip(), entries.rstrip(), rest.rstrip()


def _named(entries: str) -> set[str]:
    """The fields that an Attributes section documents."""
    return {name for names in re.findall(r"(?m)^    (\w[\w, ]*):", entries) for name in names.split(", ")}


def _result(kind: Any) -> Any:
    """The R of the Request[R] that a class derives from; a union if it depends on the values of fields."""
    for parent in kind.__mro__:
        for base in parent.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                if not isinstance(argument, TypeVar):
                    return getattr(argument, "__forward_arg__", argument)
    return "Tensor | tuple[Tensor, ...]"


# -- the generated function ------------------------------------------------------------------------------------------
def call_of(kind: Any, name: str, unpacked: ListCallCache | None = None) -> Any:
    """`def name(parameters of the class)`: looks for a cached call, else makes a request and runs it.

    The code is generated, as `dataclass` generates `__init__`. `unpacked` handles the calls of a class whose operands
    may be in lists or mappings; it is used if the look-up of operands that are fields finds nothing.

    If the class has a `hint_if_missing`, the function itself looks for the last required argument by position, and for
    those by keyword, which costs a call 10 ns each; the request refuses an earlier one that is missing. For other
    classes Python's own error is raised.
    """
    all_fields = fields(kind)
    parameters, passed = [], []
    for field in sorted(all_fields, key=lambda field: bool(field.kw_only)):
        if field.kw_only and "*_more" not in parameters:
            parameters.append("*_more")
        is_needed = field.default is MISSING and not kind.hint_if_missing
        parameters.append(field.name if is_needed else f"{field.name}=_defaults[{field.name!r}]")
        passed.append(f"{field.name}={field.name}" if field.kw_only else field.name)
    construction = f"_kind({', '.join(passed)})"
    scope: dict[str, Any] = {
        "_kind": kind,
        "_run": run,
        "_refuse_arguments": refuse_arguments,
        "_defaults": {f.name: MISSING_ARGUMENT if f.default is MISSING else f.default for f in all_fields},
    }
    values = ", ".join(field.name for field in all_fields)
    if unpacked is not None:
        scope["_unpacked"] = unpacked
    if (reads := kind.plain_reads()) is None:
        lines = [f"return _run({construction})" if unpacked is None else f"return _unpacked({values})"]
    else:
        by_request = [f"_request = {construction}", "_result = _run(_request)"]
        if unpacked is not None:
            by_request = [f"_result, _request = _unpacked.found({values})"]
        scope |= {"_current": current, "_executor_on": executor_on, "_remember": cache_call, "_CACHE_MISS": CACHE_MISS}
        scope |= {
            "_Tensor": Tensor,
            "_type": type,
            "_framework_calls": FrameworkCallCache(kind, reads[0]),
            "_learn": learn,
        }
        lines = _lines_of_call(kind, reads[0], by_request)
    if "*_more" not in parameters:
        parameters.append("*_more")
    if kind.hint_if_missing:
        required = [field for field in all_fields if field.default is MISSING]
        needed, last = [field.name for field in required], [field.name for field in required if not field.kw_only][-1]
        scope |= {"_missing": MISSING_ARGUMENT, "_refuse_missing": refuse_missing}
        test = " or ".join(f"{one.name} is _missing" for one in required if one.kw_only or one.name == last)
        lines = [f"if {test}:", f"    _refuse_missing({name!r}, _kind, ({', '.join(needed)},))", *lines]
    lines = ["if _unknown or _more:", f"    _refuse_arguments({name!r}, _kind, _more, _unknown)", *lines]
    exec("\n    ".join([f"def {name}({', '.join(parameters)}, **_unknown):", *lines]), scope)
    return scope[name]


def _lines_of_call(kind: Any, first: str, by_request: list[str]) -> list[str]:
    operands, choices = fields_of(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    layouts = [f"{one}.layout" if one in needed else f"None if {one} is None else {one}.layout" for one in operands]
    return [
        f"if {first}.__class__ is not _Tensor:",
        f"    _lookup = _framework_calls.get(_type({first}))",
        "    if _lookup is not None:",
        f"        _result = _lookup({', '.join((*operands, *choices))})",
        "        if _result is not _CACHE_MISS:",
        "            return _result",
        *(f"    {line}" for line in by_request),
        "    if _request is not None:",
        f"        _learn(_framework_calls, _request, {tuple_code(operands)}, {tuple_code(choices)})",
        "    return _result",
        "_executor = _current.executor",
        "try:",
        f"    _device = {first}.layout.device",
        "    if _executor is None or _executor.device is not _device:",
        "        _executor = _executor_on(_device)",
        f"    _key = (_kind, {', '.join((*layouts, *choices))})",
        "    _calls = _executor.calls",
        "    _fast_call = _calls.get(_key)",
        "except Exception:",  # an operand is no tensor, or a choice has no hash: the request explains it
        "    _key = _fast_call = None",
        "if _fast_call is not None:",
        f"    _result = _fast_call(_executor, {', '.join((*operands, *choices))})",
        "    if _result is not _CACHE_MISS:",
        "        return _result",
        *by_request,
        "if _key is not None and _request is not None:",
        "    _remember(_executor, _calls, _key, _request)",
        "return _result",
    ]
