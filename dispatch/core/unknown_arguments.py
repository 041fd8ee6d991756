"""The error for keywords that a request function or class does not have: it names the nearest one, and all others."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NoReturn

from dispatch.errors import BadType

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["did_you_mean", "name_unknown", "refuse_operand", "refuse_unknown", "signature_of"]


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


def refuse_unknown(function: str, kind: Any, given: Iterable[str]) -> NoReturn:
    """Raise a TypeError for the first of the keywords that a request class has no field of."""
    known = [field.name for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))]
    name = next(one for one in given if one not in known)
    package = kind.__module__.partition(".")[0]
    help_of = f"help({package}.{function})" if package == "dispatch" else f"help({function})"
    raise TypeError(
        f"{function}() got an unexpected keyword argument {name!r}{did_you_mean(name, known) or '.'} "
        f"It takes {', '.join(known)}: see {help_of}"
    )


def signature_of(kind: Any) -> inspect.Signature:
    """The parameters of a request class: its fields, those that are given by keyword last."""
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

    It is written anew, as `dataclass` does it, with a `**unknown`, which costs a call 10 ns. A `__new__` or a metaclass
    that looks at keywords would cost 0.3 to 1 µs.
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
    if first_keyword < len(names):
        given.insert(first_keyword, "*")
    lines = [
        f"def __init__({', '.join(given)}, **_unknown):",
        "    if _unknown:",
        "        _refuse_unknown(_kind.__name__, _kind, _unknown)",
        *(f"    _set(self, {name!r}, {name})" for name in signature.parameters),
    ]
    if hasattr(kind, "__post_init__"):
        lines.append("    self.__post_init__()")
    scope: dict[str, Any] = {"_kind": kind, "_refuse_unknown": refuse_unknown, "_set": object.__setattr__}
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
