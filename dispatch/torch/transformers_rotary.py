"""Our rotary embedding for transformers models, which fused modules call instead of `apply_rotary_pos_emb`.

A transformers module calls the `apply_rotary_pos_emb` of its own source file. A fused module gets a forward with the
same code but with our function under that global name; the file's functions do not change. Models define this function
in several ways, so the original is tested on numbers to find out what it computes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dispatch.torch import fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["NAME", "forward_of", "is_replaced", "uses_rotary", "why_not"]

NAME = "apply_rotary_pos_emb"
HEADS, TOKENS = 1, 2  # values of unsqueeze_dim: the axis of heads, where cos and sin get an axis of extent 1
BATCH = 2


# -- which modules -------------------------------------------------------------------------------------------------
def uses_rotary(module: nn.Module) -> bool:
    """Whether a module's forward calls the global function NAME."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and NAME in code.co_names and NAME in _globals_of(forward)


def why_not(module: nn.Module) -> str:
    """The reason why a module that `uses_rotary` cannot use our function; empty if it can."""
    forward: Any = type(module).forward
    undecorated = inspect.unwrap(forward)
    original = undecorated.__globals__.get(NAME)
    if not callable(original):
        return f"its file has no function {NAME}"
    if semantics_of(original) is None:
        return f"its {NAME} does not compute x · cos + rotate_half(x) · sin of q and k"
    try:
        _rebuild(forward, lambda function: function)
    except LookupError:
        return "a decorator of its forward does not hold the wrapped function in its closure"
    return ""


def is_replaced(module: nn.Module) -> bool:
    """Whether a module calls our function already."""
    forward = inspect.unwrap(module.__dict__.get("forward", uses_rotary))
    return getattr(getattr(forward, "__globals__", {}).get(NAME), "__module__", "") == __name__


def forward_of(module: nn.Module) -> Any:
    """A module's forward that calls our function."""
    undecorated: Any = inspect.unwrap(type(module).forward)
    replacement = _our_function(undecorated.__globals__[NAME])
    return _rebuild(type(module).forward, lambda function: _with_global(function, NAME, replacement))


def _globals_of(forward: Any) -> set[str]:
    return {one.argval for one in dis.get_instructions(forward) if one.opname == "LOAD_GLOBAL"}


# -- a forward of the same code ------------------------------------------------------------------------------------
def _rebuild(function: Any, change: Callable[[Any], Any]) -> Any:
    """A function and its decorators, with the innermost one changed; LookupError if a decorator's closure lacks it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    cells = getattr(function, "__closure__", None) or ()
    if not isinstance(function, types.FunctionType) or not any(_holds(cell, inner) for cell in cells):
        raise LookupError(function)
    rebuilt = _rebuild(inner, change)
    closure = tuple(types.CellType(rebuilt) if _holds(cell, inner) else cell for cell in cells)
    decorator = _copy(function, function.__globals__, closure)
    decorator.__wrapped__ = rebuilt
    return decorator


def _holds(cell: Any, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # the cell is empty
        return False


def _with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of the function with another value for a global; it does not see later changes of its file's globals.

    torch.compile looks globals up by their module's `__name__`, where it would find the original: so it is left out.
    """
    scope = {key: each for key, each in function.__globals__.items() if key != "__name__"}
    return _copy(function, scope | {name: value}, function.__closure__)


def _copy(function: Any, scope: dict[str, Any], closure: Any) -> Any:
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


# -- the original function -----------------------------------------------------------------------------------------
class RotarySemantics(NamedTuple):
    """The properties of a function with the name NAME."""

    axis: int  # the default of unsqueeze_dim, i.e. the axis of heads


@functools.cache
def semantics_of(original: Callable[..., Any]) -> RotarySemantics | None:
    """The semantics of a function that computes the same as our op, tested on numbers; None for other functions."""
    try:
        parameters = inspect.signature(original).parameters
        axis = parameters["unsqueeze_dim"].default
        if [*parameters][:4] != ["q", "k", "cos", "sin"] or axis not in (HEADS, TOKENS):
            return None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            same = all(_computes_rotary(original, axis, dtype) for dtype in (torch.float64, torch.float32))
    except Exception:  # noqa: BLE001  # the original may raise anything
        return None
    return RotarySemantics(axis) if same else None


def _computes_rotary(original: Callable[..., Any], default: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, cos, sin = draw(BATCH, 4, 5, 8), draw(BATCH, 2, 5, 8), draw(BATCH, 5, 8), draw(BATCH, 5, 8)
    expected = [_rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    for axis in (HEADS, TOKENS):
        operands = [x.transpose(HEADS, TOKENS) if axis == TOKENS else x for x in (q, k)]
        results = [original(*operands, cos, sin, unsqueeze_dim=axis)]
        if axis == default:
            results.append(original(*operands, cos, sin))
        for result in results:
            if not isinstance(result, tuple) or len(result) != len(expected):
                return False
            for y, right, x in zip(result, expected, operands, strict=True):
                reference = right.transpose(HEADS, TOKENS) if axis == TOKENS else right
                bound = 32 * torch.finfo(dtype).eps
                if y.dtype != x.dtype or not torch.allclose(y, reference, rtol=bound, atol=bound):
                    return False
    return True


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


# -- the function --------------------------------------------------------------------------------------------------
@functools.cache
def _our_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our function, which calls the original for operands that our op does not support."""
    semantics = semantics_of(original)
    default = HEADS if semantics is None else semantics.axis

    def dispatch_rotary(q: Any, k: Any, cos: Any, sin: Any, *others: Any, **choices: Any) -> Any:
        axis = choices.get("unsqueeze_dim", default)
        if not others and len(choices) == ("unsqueeze_dim" in choices) and axis in (HEADS, TOKENS):
            if axis == HEADS:
                rotated = fused.rope(q, k, cos, sin)
            else:
                rotated = fused.rope(q.transpose(HEADS, TOKENS), k.transpose(HEADS, TOKENS), cos, sin)
                rotated = rotated and tuple(x.transpose(HEADS, TOKENS) for x in rotated)
            if rotated is not None:
                return rotated
        return original(q, k, cos, sin, *others, **choices)

    return dispatch_rotary
