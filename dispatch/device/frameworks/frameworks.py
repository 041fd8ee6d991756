"""Finds the library of an operand by its type, and replaces the operands of a request by tensors."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dispatch.device.frameworks.framework import ForeignStorage, Framework
from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["adopt", "framework_of"]

MODULES = {"torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax", "numpy": "numpy"}  # by a type's package
MAX_TYPES = 1024
PLAIN = frozenset((type(None), bool, int, float, complex, str))
_known: dict[type, Framework | None] = {Tensor: None}


def framework_of(kind: type) -> Framework | None:
    """The library of a type of operand; None for our own tensors, numbers and everything else."""
    try:
        return _known[kind]
    except KeyError:
        pass
    framework = _found(kind)
    if len(_known) >= MAX_TYPES:
        _known.clear()
    _known[kind] = framework
    return framework


def _found(kind: type) -> Framework | None:
    if issubclass(kind, Tensor):
        return None
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    for package in packages:
        if package in MODULES:
            framework = _framework(MODULES[package])
            if framework.owns(kind):
                return framework
    framework = _other(packages[0])
    return framework if framework.owns(kind) else None


@cache
def _framework(module: str) -> Framework:
    framework: Framework = import_module(f"dispatch.device.frameworks.{module}").FRAMEWORK
    return framework


@cache
def _other(package: str) -> Framework:
    """A library that is accessed only by DLPack."""
    from dispatch.device.frameworks.exchange import Exchange

    return Exchange(package)


# -- the operands of a request ----------------------------------------------------------------------------------------
def adopt(request: Any) -> None:
    """Replace other libraries' operands in a frozen request by tensors; sets `framework` to the library of the first.

    Requests call it before they check their fields.
    """
    frameworks: list[Framework] = []
    cls: Any = type(request)
    for name, default, of_numbers in _fields(cls):
        value = getattr(request, name)
        if value is default:
            continue
        kind = type(value)
        if kind is Tensor:
            if type(value.storage) is ForeignStorage:
                frameworks.append(value.storage.framework)
            continue
        changed = value if of_numbers and kind.__module__ == "numpy" else _adopted(name, value, frameworks)
        if changed is not value:
            object.__setattr__(request, name, changed)
    if frameworks:
        object.__setattr__(request, "framework", frameworks[0])


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """The fields that may hold operands, their defaults, and whether they may hold numbers of the host instead."""
    operand_fields = []
    for field in fields(kind):
        annotation = str(field.type)
        if (
            any(word in annotation for word in ("Tensor", "Scales", "Any", "Mapping", "Callback"))
            and "dtype" not in field.name
        ):
            operand_fields.append((field.name, field.default, "Sequence[int]" in annotation))
    return tuple(operand_fields)


def _adopted(name: str, value: Any, frameworks: list[Framework]) -> Any:
    """A value with tensors in place of other libraries' operands, at any depth; the same object if it has none."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Tensor:
        if type(value.storage) is ForeignStorage:
            frameworks.append(value.storage.framework)
        return value
    framework = framework_of(kind)
    if framework is not None:
        frameworks.append(framework)
        return framework.tensor(name, value)
    if kind in (tuple, list):
        return _items(value, lambda place, one: _adopted(f"{name}[{place}]", one, frameworks))
    if kind is dict:
        changed = {key: _adopted(f"{name}[{key!r}]", one, frameworks) for key, one in value.items()}
        return changed if any(changed[key] is not one for key, one in value.items()) else value
    if is_dataclass(kind) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(kind) if "Tensor" in str(field.type)}
        tensors = {key: _adopted(f"{name}.{key}", one, frameworks) for key, one in parts.items()}
        replaced = {key: one for key, one in tensors.items() if one is not parts[key]}
        return replace(value, **replaced) if replaced else value
    return value


def _items(value: Any, adopted: Callable[[int, Any], Any]) -> Any:
    changed = [adopted(place, one) for place, one in enumerate(value)]
    same = all(one is other for one, other in zip(changed, value, strict=True))
    return value if same else type(value)(changed)
