"""What the function of a request class does: the way through what is remembered, else through a request.

A call over tensors of ours goes by remembered.py, one over another library's by framework_calls.py.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from dispatch.core.framework_calls import Ways, learn
from dispatch.core.remembered import UNFIT, executor_on, fields_of, remember, tuple_of
from dispatch.core.request import run
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from dispatch.core.remembered_operands import OperandCalls

__all__ = ["call_of"]


def call_of(kind: Any, name: str, unpacked: OperandCalls | None = None) -> Any:
    """`def name(parameters of the class)`: the way through what is remembered, else through a request.

    Compiled, as `dataclass` makes its `__init__`. `unpacked` is the way of a class that has one of its own, for calls
    that the way of operands that are fields does not find.
    """
    given = fields(kind)
    parameters, passed = [], []
    for field in sorted(given, key=lambda field: bool(field.kw_only)):
        if field.kw_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(field.name if field.default is MISSING else f"{field.name}=_defaults[{field.name!r}]")
        passed.append(f"{field.name}={field.name}" if field.kw_only else field.name)
    made = f"_kind({', '.join(passed)})"
    scope: dict[str, Any] = {"_kind": kind, "_run": run, "_defaults": {field.name: field.default for field in given}}
    values = ", ".join(field.name for field in given)
    if unpacked is not None:
        scope["_unpacked"] = unpacked
    if (reads := kind.plain_reads()) is None:
        lines = [f"return _run({made})" if unpacked is None else f"return _unpacked({values})"]
    else:
        by_request = [f"_request = {made}", "_result = _run(_request)"]
        if unpacked is not None:
            by_request = [f"_result, _request = _unpacked.found({values})"]
        scope |= {"_current": current, "_executor_on": executor_on, "_remember": remember, "_UNFIT": UNFIT}
        scope |= {"_Tensor": Tensor, "_ways": Ways(kind, reads[0]), "_learn": learn}
        lines = _lines_of_call(kind, reads[0], made, by_request)
    exec("\n    ".join([f"def {name}({', '.join(parameters)}):", *lines]), scope)
    return scope[name]


def _lines_of_call(kind: Any, first: str, made: str, by_request: list[str]) -> list[str]:
    operands, choices = fields_of(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    layouts = [f"{one}.layout" if one in needed else f"None if {one} is None else {one}.layout" for one in operands]
    return [
        f"if type({first}) is not _Tensor:",
        f"    _way = _ways.get(type({first}))",
        "    if _way is not None:",
        f"        _result = _way({', '.join((*operands, *choices))})",
        "        if _result is not _UNFIT:",
        "            return _result",
        f"    _request = {made}",
        "    _result = _run(_request)",
        f"    _learn(_ways, _request, {tuple_of(operands)}, {tuple_of(choices)})",
        "    return _result",
        "_executor = _current.executor",
        "try:",
        f"    _device = {first}.layout.device",
        "    if _executor is None or _executor.device is not _device:",
        "        _executor = _executor_on(_device)",
        f"    _key = (_kind, {', '.join((*layouts, *choices))})",
        "    _calls = _executor.calls",
        "    _take = _calls.get(_key)",
        "except Exception:",  # an operand is no tensor, a choice has no hash: the request says which
        "    _key = _take = None",
        "if _take is not None:",
        f"    _result = _take(_executor, {', '.join((*operands, *choices))})",
        "    if _result is not _UNFIT:",
        "        return _result",
        *by_request,
        "if _key is not None and _request is not None:",
        "    _remember(_executor, _calls, _key, _request)",
        "return _result",
    ]
