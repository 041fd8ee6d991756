"""The rotary embedding of transformers' models: a function of ours that their modules call by the name of theirs.

A module of transformers calls the `apply_rotary_pos_emb` of the file that it is written in. A fused module gets a
forward of the same code, for which that name is our function; the file's own functions stay as they are. Which meaning
the name has there is asked with numbers, for models have several.
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
HEADS, TOKENS = 1, 2  # the axis of heads: where cos and sin get one of extent 1
BATCH = 2


# -- which modules -------------------------------------------------------------------------------------------------
def uses_rotary(module: nn.Module) -> bool:
    """Whether its forward calls the function of that name."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and NAME in code.co_names and NAME in _globals_of(forward)


def why_not(module: nn.Module) -> str:
    """Why a module that `uses_rotary` cannot be given our function; empty where it can."""
    forward: Any = type(module).forward
    written = inspect.unwrap(forward)
    original = written.__globals__.get(NAME)
    if not callable(original):
        return f"there is no function {NAME} beside it"
    if semantics_of(original) is None:
        return f"its {NAME} does not compute x · cos + rotate_half(x) · sin of q and k"
    try:
        _rebuild(forward, lambda function: function)
    except LookupError:
        return "a decorator of its forward does not say what it calls"
    return ""


def is_replaced(module: nn.Module) -> bool:
    """Whether a module calls our function already."""
    forward = inspect.unwrap(module.__dict__.get("forward", uses_rotary))
    return getattr(getattr(forward, "__globals__", {}).get(NAME), "__module__", "") == __name__


def forward_of(module: nn.Module) -> Any:
    """Its forward with our function."""
    written: Any = inspect.unwrap(type(module).forward)
    replacement = _our_function(written.__globals__[NAME])
    return _rebuild(type(module).forward, lambda function: _with_global(function, NAME, replacement))


def _globals_of(forward: Any) -> set[str]:
    return {one.argval for one in dis.get_instructions(forward) if one.opname == "LOAD_GLOBAL"}


# -- a forward of the same code ------------------------------------------------------------------------------------
def _rebuild(function: Any, change: Callable[[Any], Any]) -> Any:
    """A function with its decorators, the innermost one changed; LookupError where one does not hold what it wraps."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    cells = getattr(function, "__closure__", None) or ()
    if not isinstance(function, types.FunctionType) or not any(_holds(cell, inner) for cell in cells):
        raise LookupError(function)
    made = _rebuild(inner, change)
    closure = tuple(types.CellType(made) if _holds(cell, inner) else cell for cell in cells)
    other = _copy(function, function.__globals__, closure)
    other.__wrapped__ = made
    return other


def _holds(cell: Any, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _with_global(function: Any, name: str, value: Any) -> Any:
    """The function with another value for a global name; what else changes in its file later is not seen.

    torch.compile finds globals by the name of their file, and would find the file's own there: so they have none.
    """
    scope = {key: each for key, each in function.__globals__.items() if key != "__name__"}
    return _copy(function, scope | {name: value}, function.__closure__)


def _copy(function: Any, scope: dict[str, Any], closure: Any) -> Any:
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(function.__dict__)
    return made


# -- what theirs means ---------------------------------------------------------------------------------------------
class RotarySemantics(NamedTuple):
    """What a function of that name does besides."""

    axis: int  # that of heads, unless told


@functools.cache
def semantics_of(original: Callable[..., Any]) -> RotarySemantics | None:
    """What a function does that computes our op's two results, None for any other: asked with numbers."""
    try:
        parameters = inspect.signature(original).parameters
        axis = parameters["unsqueeze_dim"].default
        if [*parameters][:4] != ["q", "k", "cos", "sin"] or axis not in (HEADS, TOKENS):
            return None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            same = all(_computes_rotary(original, axis, dtype) for dtype in (torch.float64, torch.float32))
    except Exception:  # noqa: BLE001  # whatever a function of others raises
        return None
    return RotarySemantics(axis) if same else None


def _computes_rotary(original: Callable[..., Any], default: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, cos, sin = draw(BATCH, 4, 5, 8), draw(BATCH, 2, 5, 8), draw(BATCH, 5, 8), draw(BATCH, 5, 8)
    expected = [_rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    for axis in (HEADS, TOKENS):
        given = [x.transpose(HEADS, TOKENS) if axis == TOKENS else x for x in (q, k)]
        calls = [original(*given, cos, sin, unsqueeze_dim=axis)]
        if axis == default:
            calls.append(original(*given, cos, sin))
        for found in calls:
            if not isinstance(found, tuple) or len(found) != len(expected):
                return False
            for one, other, x in zip(found, expected, given, strict=True):
                wanted = other.transpose(HEADS, TOKENS) if axis == TOKENS else other
                bound = 32 * torch.finfo(dtype).eps
                if one.dtype != x.dtype or not torch.allclose(one, wanted, rtol=bound, atol=bound):
                    return False
    return True


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


# -- the function --------------------------------------------------------------------------------------------------
@functools.cache
def _our_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our function beside theirs, which runs what ours does not take."""
    semantics = semantics_of(original)
    default = HEADS if semantics is None else semantics.axis

    def dispatch_rotary(q: Any, k: Any, cos: Any, sin: Any, *others: Any, **choices: Any) -> Any:
        axis = choices.get("unsqueeze_dim", default)
        if not others and len(choices) == ("unsqueeze_dim" in choices) and axis in (HEADS, TOKENS):
            if axis == HEADS:
                found = fused.rope(q, k, cos, sin)
            else:
                found = fused.rope(q.transpose(HEADS, TOKENS), k.transpose(HEADS, TOKENS), cos, sin)
                found = found and tuple(x.transpose(HEADS, TOKENS) for x in found)
            if found is not None:
                return found
        return original(q, k, cos, sin, *others, **choices)

    return dispatch_rotary
