"""The error for arguments that a function or class does not have: it names the most similar argument and all others.

`names_arguments` in checks.py is for functions that are called rarely: signatures stay explicit, and a wrong call is
examined after it has failed. Request functions and classes, which are called often, take `*more` and `**unknown` and
pass their contents to `refuse_arguments`, which costs a call about 10 ns instead of 100. `Supervisor.submit` uses
neither: type checkers would see its `**unknown`, so it raises Python's own error.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dispatch.errors import BadType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "MISSING_ARGUMENT",
    "did_you_mean",
    "name_unknown",
    "refuse_arguments",
    "refuse_call",
    "refuse_missing",
    "refuse_operand",
    "signature_of",
]

T = TypeVar("T")
MISSING_ARGUMENT: Any = type("missing argument", (), {})()  # the default where `refuse_missing` makes the error
# Modules that have another public name; the contents of all others are public in `dispatch` itself.
MODULES = {
    "dispatch.libraries.cutlass.evt": "dispatch.evt",
    "dispatch.ops.graph.builder": "dispatch.cudnn",
    "dispatch.supervise.trace": "dispatch.trace",
    "dispatch.torch.fusing": "dispatch.torch",
}

# Packages whose functions are public in another module, while their classes are so in `dispatch`.
FUNCTIONS = {
    "dispatch.ops.contraction": "dispatch.tensors",
    "dispatch.ops.sparse": "dispatch.sparse",
    "dispatch.ops.structured": "dispatch.structured",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`. Did you mean epilogue?`: the argument for a name of NumPy or torch, or one with a similar name; "" if none."""
    from difflib import get_close_matches

    from dispatch.elsewhere import of_argument

    names = list(known)
    if instead := of_argument(name, names):
        return f". Did you mean {instead}?"
    like = get_close_matches(name.lower(), names, 1, 0.6)
    parts = [one for one in names if len(name) > 1 and name.lower() in one.split("_")]
    similar = like or (parts if len(parts) == 1 else [])
    return f". Did you mean {similar[0]}?" if similar else ""


def refuse_arguments(name: str, made: Any, more: Sequence[Any], unknown: Iterable[str]) -> NoReturn:
    """Raise a TypeError for the first keyword that is not an argument of a request class or function.

    If all keywords are known, the error is about `more`, the surplus positional arguments.
    """
    parameters = list(signature_of(made).parameters.values())
    names = [one.name for one in parameters if one.name not in ("self", "_cls") and one.kind is not one.VAR_POSITIONAL]
    wrong = next((one for one in unknown if one not in names), None)
    if wrong is not None:
        like = did_you_mean(wrong, names) or "."
        takes = f" It takes {', '.join(names)}" if names else " It takes no arguments"
        raise TypeError(
            f"{name}() got an unexpected keyword argument {wrong!r}{like}{takes}{_where(name, made)}"
        ) from None
    placed = [one for one in parameters if one.name in names and one.kind is one.POSITIONAL_OR_KEYWORD]
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    most = "at most " if any(one.default is not one.empty for one in placed) else ""
    count = f"{most}{len(placed)} positional argument{'s' * (len(placed) != 1)}"
    which = f". It takes {', '.join(one.name for one in placed)} by position" if placed else ""
    by_keyword = f"; by keyword only {', '.join(named)}" if named else ""
    raise TypeError(
        f"{name}() takes {count} but {len(placed) + len(more)} were given{which}{by_keyword}{_where(name, made)}"
    ) from None


def refuse_call(function: Any, args: Sequence[Any], kwargs: Iterable[str], text: str) -> NoReturn:
    """Raise for an unknown keyword or too many arguments; for a missing or repeated argument, with Python's text."""
    parameters = inspect.signature(function).parameters
    placed = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    if (takes_all or len(args) <= len(placed)) and parameters.keys() >= set(kwargs):
        raise TypeError(text.replace(f"{function.__qualname__}()", f"{name}()") + _where(name, function)) from None
    refuse_arguments(name, function, args[len(placed) :], kwargs)


def refuse_missing(name: str, kind: Any, given: Sequence[Any]) -> NoReturn:
    """Raise a TypeError for missing arguments of a request function, with Python's text and the class's own.

    `given` are the values of all required arguments, in the order of the fields.
    """
    needed = [field for field in fields(kind) if field.default is MISSING]
    lacking = [field for field, value in zip(needed, given, strict=True) if value is MISSING_ARGUMENT]
    placed = [repr(field.name) for field in lacking if not field.kw_only]
    names = placed or [repr(field.name) for field in lacking]
    *first, last = names
    which = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
    way = "positional" if placed else "keyword-only"
    text = f"{name}() missing {len(names)} required {way} argument{'s' * (len(names) > 1)}: {which}"
    raise TypeError(f"{text}. {kind.hint_if_missing.format(name=name)}{_where(name, kind)}") from None


def _where(name: str, made: Any) -> str:
    """The end of an error: where the help of a function or class is."""
    module = MODULES.get(made.__module__, made.__module__.partition(".")[0])
    if not isinstance(made, type):
        module = FUNCTIONS.get(".".join(made.__module__.split(".")[:3]), module)
    return f": see help({module}.{name})" if module.startswith("dispatch") else f": see help({name})"


def signature_of(kind: Any) -> inspect.Signature:
    """The signature of a function, or of a request class: its fields, with keyword-only ones last."""
    if not is_dataclass(kind):
        return inspect.signature(kind)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))
    ]
    return inspect.Signature(parameters)


def name_unknown(kind: Any, signature: inspect.Signature) -> None:
    """Make a class refuse unknown keywords with our own error, if `dataclass` generated its `__init__`.

    A new `__init__` is generated, as `dataclass` does it, with `*more` and `**unknown`, which cost a call 10 ns. A
    `__new__` or a metaclass that checks keywords would cost 0.3 to 1 µs.
    """
    generated = vars(kind).get("__init__")
    parameters = signature.parameters.values()
    if getattr(getattr(generated, "__code__", None), "co_filename", "") != "<string>":
        return
    if set(generated.__code__.co_varnames) != {"self", *signature.parameters}:
        return  # it has an InitVar
    names = ["self", *signature.parameters]
    first_keyword = next((place for place, one in enumerate(parameters, 1) if one.kind is one.KEYWORD_ONLY), len(names))
    declared = [f"{name}=_defaults[{name!r}]" if name in defaults_of(kind) else name for name in names]
    declared.insert(first_keyword, "*_more")
    lines = [
        f"def __init__({', '.join(declared)}, **_unknown):",
        "    if _unknown or _more:",
        "        _refuse_arguments(_kind.__name__, _kind, _more, _unknown)",
        *(f"    _set(self, {name!r}, {name})" for name in signature.parameters),
    ]
    if hasattr(kind, "__post_init__"):
        lines.append("    self.__post_init__()")
    scope: dict[str, Any] = {"_kind": kind, "_refuse_arguments": refuse_arguments, "_set": object.__setattr__}
    scope["_defaults"] = defaults_of(kind)
    exec("\n".join(lines), scope)
    function = scope["__init__"]
    function.__qualname__, function.__module__ = generated.__qualname__, generated.__module__
    function.__annotations__ = generated.__annotations__
    function.__signature__ = signature.replace(
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters],
        return_annotation=None,
    )
    kind.__init__ = function


def defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a request class by field."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def refuse_operand(name: str, known: Iterable[str]) -> NoReturn:
    """Raise BadType for the name of an operand that the request of a bound call does not have."""
    names = list(known)
    expected = f"the name of an operand: {', '.join(names)}{did_you_mean(name, names)}"
    raise BadType(name, "an argument of this name", expected)
