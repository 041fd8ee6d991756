"""The repr of requests: the class and the fields that differ from their defaults, on one line."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from dispatch.checks import shown
from dispatch.device.tensor import Tensor

__all__ = ["text_of"]

FIRST = 4  # items of a sequence that are shown; the others are counted
LONGEST = 60  # characters of any other value
DEPTH = 3  # levels of nested values


def text_of(thing: Any, depth: int = DEPTH) -> str:
    """`MatmulRequest(a=f16[64, 32] on cuda:0, b=…)`; a class that is not a dataclass shows its attributes."""
    name = type(thing).__name__
    if is_dataclass(thing):
        defaults = thing.usual() if hasattr(thing, "usual") else {}
        state = {f.name: (getattr(thing, f.name, None), defaults.get(f.name, f.default)) for f in fields(thing)}
    else:
        state = {key: (value, None) for key, value in vars(thing).items() if key != "bound"}
    parts = [f"{key}={_value(value, depth - 1)}" for key, (value, usual) in state.items() if not _same(value, usual)]
    return f"{name}({', '.join(parts)})"


def _same(value: Any, usual: Any) -> bool:
    is_plain = type(value) in (bool, int, float, complex, str) and type(value) is type(usual)
    return value is usual or (is_plain and bool(value == usual)) or (type(value) is tuple and not value and usual == ())


def _value(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        return value.describe_briefly().removeprefix("Tensor(").removesuffix(")")
    if isinstance(value, Enum):
        return str(value.name)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_asdict"):
        if depth <= 0:
            return "…"
        items = [_value(item, depth - 1) for item in value[:FIRST]]
        items += [f"… {len(value) - FIRST} more"] if len(value) > FIRST else []
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"
    if is_dataclass(value) and not isinstance(value, type):
        return text_of(value, depth) if depth > 0 else f"{type(value).__name__}(…)"
    text = " ".join(shown(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
