"""The error for arguments that a function or class does not have: it names the nearest one, and all others.

`names_arguments` in checks.py is for what users call now and then: explicit signatures stay, and a wrong call is looked
at once it has failed. Request functions and classes, which are called all the time, take `*more` and `**unknown` and
leave what is in there to `refuse_arguments`, which costs a call some 10 ns instead of 100. `Supervisor.submit` has
neither: type checkers would see its `**unknown`, and Python's own error has to do.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dispatch.errors import BadType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "did_you_mean",
    "name_unknown",
    "refuse_arguments",
    "refuse_call",
    "refuse_operand",
    "signature_of",
]

T = TypeVar("T")
# Modules that have another name to users; what stands in other ones is in `dispatch` itself.
MODULES = {
    "dispatch.libraries.cutlass.evt": "dispatch.evt",
    "dispatch.ops.graph.builder": "dispatch.cudnn",
    "dispatch.supervise.trace": "dispatch.trace",
    "dispatch.torch.fusing": "dispatch.torch",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`. Did you mean epilogue?`, with the argument that is called so elsewhere or is like it; "" where none is."""
    from difflib import get_close_matches

    from dispatch.elsewhere import of_argument

    names = list(known)
    if instead := of_argument(name, names):
        return f". Did you mean {instead}?"
    like = get_close_matches(name.lower(), names, 1, 0.6)
    parts = [one for one in names if len(name) > 1 and name.lower() in one.split("_")]
    found = like or (parts if len(parts) == 1 else [])
    return f". Did you mean {found[0]}?" if found else ""


def refuse_arguments(name: str, made: Any, more: Sequence[Any], unknown: Iterable[str]) -> NoReturn:
    """Raise a TypeError for the first of the keywords that a request class, or a function, has no argument of.

    Where all are known, it is for arguments beyond those that are taken by their place: `more` are these.
    """
    given = list(signature_of(made).parameters.values())
    known = [one.name for one in given if one.name not in ("self", "_cls")]
    wrong = next((one for one in unknown if one not in known), None)
    if wrong is not None:
        like = did_you_mean(wrong, known) or "."
        takes = f" It takes {', '.join(known)}" if known else " It takes none"
        raise TypeError(
            f"{name}() got an unexpected keyword argument {wrong!r}{like}{takes}{_where(name, made)}"
        ) from None
    placed = [one for one in given if one.name in known and one.kind is one.POSITIONAL_OR_KEYWORD]
    named = [one.name for one in given if one.kind is one.KEYWORD_ONLY]
    most = "at most " if any(one.default is not one.empty for one in placed) else ""
    count = f"{most}{len(placed)} positional argument{'s' * (len(placed) != 1)}"
    which = f". By their places it takes {', '.join(one.name for one in placed)}" if placed else ""
    by_keyword = f"; by keyword only {', '.join(named)}" if named else ""
    raise TypeError(
        f"{name}() takes {count} but {len(placed) + len(more)} were given{which}{by_keyword}{_where(name, made)}"
    ) from None


def refuse_call(function: Any, args: Sequence[Any], kwargs: Iterable[str], text: str) -> NoReturn:
    """Raise for an unknown keyword or too many arguments; for what is missing or given twice, with Python's text."""
    parameters = inspect.signature(function).parameters
    placed = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
    if len(args) <= len(placed) and parameters.keys() >= set(kwargs):
        raise TypeError(text.replace(f"{function.__qualname__}()", f"{name}()") + _where(name, function)) from None
    refuse_arguments(name, function, args[len(placed) :], kwargs)


def _where(name: str, made: Any) -> str:
    """Where all about a function or class is said."""
    module = MODULES.get(made.__module__, made.__module__.partition(".")[0])
    return f": see help({module}.{name})" if module.startswith("dispatch") else f": see help({name})"


def signature_of(kind: Any) -> inspect.Signature:
    """The parameters of a request class: its fields, those that are given by keyword last. Those of a function."""
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
    """Have the class refuse unknown keywords in words of ours, where `dataclass` wrote its `__init__`.

    It is written anew, as `dataclass` does it, with `*more` and `**unknown`, which cost a call 10 ns. A `__new__` or a
    metaclass that looks at keywords would cost 0.3 to 1 µs.
    """
    made = vars(kind).get("__init__")
    parameters = signature.parameters.values()
    if getattr(getattr(made, "__code__", None), "co_filename", "") != "<string>":
        return
    if set(made.__code__.co_varnames) != {"self", *signature.parameters}:
        return  # it has an InitVar
    names = ["self", *signature.parameters]
    first_keyword = next((place for place, one in enumerate(parameters, 1) if one.kind is one.KEYWORD_ONLY), len(names))
    given = [f"{name}=_defaults[{name!r}]" if name in defaults_of(kind) else name for name in names]
    given.insert(first_keyword, "*_more")
    lines = [
        f"def __init__({', '.join(given)}, **_unknown):",
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
    function.__qualname__, function.__module__ = made.__qualname__, made.__module__
    function.__annotations__ = made.__annotations__
    function.__signature__ = signature.replace(
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters],
        return_annotation=None,
    )
    kind.__init__ = function


def defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a request class by field."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def refuse_operand(name: str, known: Iterable[str]) -> NoReturn:
    """Raise for an operand of a bound call, by a name that its request has no operand of."""
    names = list(known)
    raise BadType(name, "an operand", f"one of {', '.join(names)}{did_you_mean(name, names)}")
