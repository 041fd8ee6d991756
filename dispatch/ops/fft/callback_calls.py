"""`callback_dft`: its call cache for calls with the same layouts, lines and numbers; other calls make a request.

The operands of callbacks are fields of the Callback objects, and most callers make new ones for each call. The call
cache therefore represents a callback by its lines, which it compares, and a mapping of its operands by their names in
the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.counterparts import unnamed
from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.request import run
from dispatch.core.request_function import request_function
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.ops.fft.callback import Callback, Lines
from dispatch.ops.fft.callback_dft import CallbackDftRequest
from dispatch.ops.fft.request import DftKind, DftNorm
from dispatch.unknown_arguments import refuse_arguments

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["callback_dft"]

NAMES = ("a", "kind", "s", "axes", "load", "load_operands", "store", "store_operands", "inverse", "norm", "precision",
         "out")  # fmt: skip


def _request(load: Lines | None, store: Lines | None, **values: Any) -> CallbackDftRequest:
    """The request of a call on a GPU, where NumPy's function of a callback is not used."""
    sides: dict[str, Any] = {}
    for side, lines in (("load", load), ("store", store)):
        operands = values.pop(f"{side}_operands")
        if lines is not None:
            callback_operands = {name.removeprefix(f"{side}."): one for name, one in operands.items()}
            sides[side] = Callback(lines.code, unnamed, callback_operands, lines.broadcast, lines.dtype)
    return CallbackDftRequest(**values, **sides)


def _is_on_gpu(a: Any) -> bool:
    """Whether it is on a GPU, where NumPy's function of a callback is not used."""
    if type(a) is Tensor:
        return not a.layout.device.is_host
    framework = framework_of(type(a))
    return framework is not None and framework.is_on_gpu(a)


_calls = ListCallCache(CallbackDftRequest, _request, NAMES)


def _callback_dft(
    a: Tensor,
    kind: DftKind | str = DftKind.C2C,
    s: int | tuple[int, ...] | None = None,
    axes: int | tuple[int, ...] | None = None,
    *more: Any,
    load: Callback | None = None,
    store: Callback | None = None,
    inverse: bool = False,
    norm: DftNorm | str = DftNorm.BACKWARD,
    precision: Dtype | str | None = None,
    out: Tensor | None = None,
    **unknown: Any,
) -> Any:
    if more or unknown:
        refuse_arguments("callback_dft", CallbackDftRequest, more, unknown)
    sides = [(None, None) if one is None else one.flat(name) if type(one) is Callback else None
             for name, one in (("load", load), ("store", store))]  # fmt: skip
    if None in sides or not _is_on_gpu(a):
        choices: dict[str, Any] = {"inverse": inverse, "norm": norm, "precision": precision, "out": out}
        return run(CallbackDftRequest(a, kind, s, axes, load=load, store=store, **choices))
    (load_lines, load_operands), (store_lines, store_operands) = sides  # type: ignore[misc]  # both exist
    return _calls(
        a, kind, s, axes, load_lines, load_operands, store_lines, store_operands, inverse, norm, precision, out
    )


callback_dft = request_function(CallbackDftRequest, "callback_dft", _callback_dft)
