"""Finds the nearest request that a row takes, by trying requests with as few fields changed as possible.

`no_row` in select.py calls it if no row takes a request. Operands of other dtypes are replaced by tensors without real
memory. The requests that are tried are checked like all requests, and matched with the same rows; no library is
called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor
from dispatch.errors import one_line
from dispatch.keys import Dtype
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dispatch.core.request import Request
    from dispatch.core.row import Row
    from dispatch.refusal import Refusal

__all__ = ["change_that_works"]

TRIES = 48  # requests that are tried for one error
NAMED = 2  # changes of the same size that the error names
LONGEST = 40  # characters of a value in the error
LONGEST_LIST = 64  # tensors in an operand that is a list; longer lists are not changed
APART = 1 << 44  # bytes between the fictitious addresses of operands, so that none overlap
CHOICES = {  # the field for each kind of reason
    Kind.COMPUTE: "compute",
    Kind.EPILOGUE: "epilogue",
    Kind.TREE: "epilogue",
    Kind.SCALES: "scales",
    Kind.OTHER_LIBRARY: "library",
    Kind.DTYPES: "out_dtype",
}
Change = dict[str, Any]  # from a field to its value; for an operand, its dtype
Operand = Tensor | Sequence[Tensor]


def change_that_works(
    request: Request, here: Sequence[tuple[Row, Sequence[Refusal]]], taken: Callable[[Request], bool]
) -> str:
    """What to change so that a row takes the request, as text; "" if no small change does.

    `here` has the rows of this machine that refused it, the nearest first; `taken` returns whether a row takes a
    request.
    """
    if not is_dataclass(request):
        return ""
    operands = _operands(request)
    tries = TRIES
    seen: list[Change] = []
    for level in _levels(request, operands, here):
        suggestions = []
        for change in islice((change for change in level if change not in seen), tries):
            seen.append(change)
            tries -= 1
            if taken_with(request, operands, change, taken):
                suggestions.append(_words(request, operands, change))
                if len(suggestions) == NAMED:
                    break
        if suggestions:
            return ", or ".join(suggestions)
    return ""


def _operands(request: Any) -> dict[str, Operand]:
    """The operands by field; lists of tensors only if these have one dtype and are not too many."""
    operands: dict[str, Operand] = {}
    named = {name.partition("[")[0] for name, _, _ in request.tensors()}
    for name in (field.name for field in fields(request) if field.name in named):
        value = getattr(request, name)
        tensors = (value,) if isinstance(value, Tensor) else value
        if not isinstance(tensors, (tuple, list)) or not 0 < len(tensors) <= LONGEST_LIST:
            continue
        if all(isinstance(one, Tensor) and one.dtype is tensors[0].dtype for one in tensors):
            operands[name] = value
    return operands


def _dtype(operand: Operand) -> Dtype:
    return (operand if isinstance(operand, Tensor) else operand[0]).dtype


def taken_with(request: Any, operands: dict[str, Operand], change: Change, taken: Callable[[Request], bool]) -> bool:
    """Whether a row takes the request with a change; False if the changed request is invalid."""
    values, places = dict(change), count(1)
    for name, operand in operands.items():
        dtype = change.get(name, _dtype(operand))
        if dtype is None:
            continue
        if isinstance(operand, Tensor):
            values[name] = _stand_in(operand, dtype, next(places))
        else:
            values[name] = tuple(_stand_in(one, dtype, next(places)) for one in operand)
    try:
        return taken(replace(request, **values))
    except Exception:  # noqa: BLE001  # a user's class may raise anything; the change is then not suggested
        return False


def _stand_in(tensor: Tensor, dtype: Dtype, place: int) -> Tensor:
    """A tensor with another's layout and a given dtype, at a fictitious address."""
    layout = tensor.layout
    alignment = layout.alignment if dtype is layout.dtype else 256
    new_layout = layout.device.layout(dtype, layout.shape, layout.strides, alignment)
    memory = Storage(layout.device, place * APART, APART, tensor.storage.writer, _nothing_to_free)
    return Tensor(memory, place * APART + APART // 2 + alignment % 256, new_layout)


def _nothing_to_free(_: Storage) -> None:
    """The `free` of memory that does not exist."""


# -- the changes to try -----------------------------------------------------------------------------------------------
def _levels(
    request: Any, operands: dict[str, Operand], here: Sequence[tuple[Row, Sequence[Refusal]]]
) -> Iterator[Iterable[Change]]:
    """Changes, the smallest first: one field; several operands with one dtype; these and choices reset to defaults."""
    resets = _resets(request, {reason.kind for _, reasons in here for reason in reasons})
    dtypes = {name: _dtype(operand) for name, operand in operands.items()}
    if not any(reason.kind in (Kind.DTYPES, Kind.EPILOGUE_DTYPE) for _, reasons in here for reason in reasons):
        yield resets
        return
    outputs = [name for name in operands if name in getattr(request, "writes", ("out",))]
    inputs = [name for name in dtypes if name not in outputs]
    present = dict.fromkeys(dtypes.values())
    row_dtypes = dict.fromkeys((*present, *(dtype for row, _ in here for dtype in row.dtypes)))
    one_change = [{name: dtype} for dtype in present for name in dtypes if dtypes[name] is not dtype]
    epilogue_dtypes = dict.fromkeys(dtype for _, reasons in here for dtype in _of_epilogue_alone(reasons))
    epilogue_changes = [{name: dtype} for dtype in epilogue_dtypes for name in inputs if dtypes[name] is not dtype]
    yield [*one_change, *epilogue_changes, *resets]
    yield _results(request, here)
    same = [name for name in inputs if dtypes[name] is dtypes[inputs[0]]]
    bound = [name for name in same if name not in getattr(request, "mixed", ())]  # these need the first's dtype
    joint_changes = [
        {name: dtype for name in names if dtypes[name] is not dtype}
        for dtype in row_dtypes
        for names in (bound, same, inputs)
    ]
    yield [change for change in joint_changes if change]
    reset_all: Change = {name: value for reset in resets for name, value in reset.items()}
    reset_all |= dict.fromkeys(outputs)
    if reset_all:
        yield [change | reset_all for change in ({}, *joint_changes)]


def _of_epilogue_alone(reasons: Sequence[Refusal]) -> Iterator[Dtype]:
    """The dtypes that a row needs for an epilogue's operand, if that is all that it needs."""
    if all(reason.kind is Kind.EPILOGUE_DTYPE for reason in reasons):
        for reason in reasons:
            yield from reason.needed


def _results(request: Any, here: Sequence[tuple[Row, Sequence[Refusal]]]) -> list[Change]:
    """Changes of the result's dtype to that of a row that has no other reason to refuse."""
    field = "out_dtype" if getattr(request, "out", None) is None else "out"
    if not hasattr(request, field):
        return []
    refused = [reasons[0] for _, reasons in here if len(reasons) == 1 and reasons[0].kind is Kind.DTYPES]
    return [{field: each.needed[-1]} for each in refused if each.needed[-1] is not each.given[-1]]


def _resets(request: Any, kinds: set[Kind]) -> list[Change]:
    """Changes that reset one field to its default, for the fields that caused a refusal."""
    about = {CHOICES[kind] for kind in kinds if kind in CHOICES}
    chosen = {field.name: field.default for field in fields(request) if field.name in about}
    return [
        {name: default}
        for name, default in chosen.items()
        if default is not MISSING and getattr(request, name) is not default
    ]


# -- text -------------------------------------------------------------------------------------------------------------
def _words(request: Any, operands: dict[str, Operand], change: Change) -> str:
    """`a and b both f16 (now f32)`, `compute=None (now COMPUTE_64F)`, joined."""
    parts = []
    to: dict[tuple[Any, Any], list[str]] = {}
    for name, value in change.items():
        if name in operands and value is not None:
            to.setdefault((_dtype(operands[name]), value), []).append(name)
        elif name in operands:
            parts.append(f"no {name}")
        elif value is None or isinstance(value, (Enum, Dtype)):
            parts.append(f"{name}={_name(value)} (now {one_line(_name(getattr(request, name)), LONGEST)})")
        else:
            parts.append(f"no {name}")
    groups = [f"{_together(names)} {new} (now {now})" for (now, new), names in to.items()]
    return " and ".join([*groups, *parts])


def _together(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} {'both' if len(names) == 2 else 'all'}" if names[1:] else names[0]


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))
