"""One check of a request of an op that is one cuDNN call: operands in poisoned memory, and the expected results.

The `cases` modules of the ops build checks; tests run them through a row with `check_row`. Each op defines its own
bounds; this file chooses no shapes and calls no library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.device.tensor import Tensor
from dispatch.keys import F64, Dtype
from dispatch.testing.memory import GuardedBuffer, Mismatch, poison
from dispatch.testing.roundoff import ROUNDOFF, by_numpy, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from dispatch.core.host_plan import Formula, Results
    from dispatch.core.operands import OperandRequest
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array

__all__ = [
    "ROUNDOFF",
    "Case",
    "Check",
    "FormCase",
    "GuardedBuffer",
    "MadeCase",
    "Mismatch",
    "by_numpy",
    "checked",
    "distinct",
    "in_turn",
    "normal",
    "place",
    "poison",
    "result_of",
    "rounded",
    "unit",
    "with_outputs",
]

Q = TypeVar("Q", bound="OperandRequest")
F = TypeVar("F", bound="tuple[Any, ...]")
C = TypeVar("C")
TOGETHER = 2.5  # factor on the bound of a whole output with random errors: some errors affect several elements


class Case(Protocol):
    """One parameter of a parametrized test."""

    @property
    def id(self) -> str:
        """A readable name, unique within a row."""

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands."""


class FormCase(ABC):
    """A case of a form; it draws its request and guarded memory before anything is computed."""

    form: Any

    @property
    def name(self) -> str:
        """The name of the form."""
        return str(self.form.name)

    @abstractmethod
    def drawn(self, device: Device, rng: np.random.Generator) -> tuple[Any, tuple[GuardedBuffer, ...]]:
        """The request with fresh operands, and the guarded memory of its outputs."""

    def request(self, device: Device, rng: np.random.Generator) -> Any:
        """The request alone."""
        return self.drawn(device, rng)[0]


@dataclass(frozen=True)
class MadeCase:
    """A case that consists of its id and `make`, the function that builds its check from the id."""

    id: str
    make: Callable[[str, Device, np.random.Generator], Check]
    name: str = ""  # the name of its form

    @classmethod
    def each(cls, row: Row, forms: Sequence[Any], make: Callable[..., Check]) -> list[MadeCase]:
        """A case for each form; `make` gets op, first dtype, form, id, device and generator."""
        op, dtype = row.op, row.dtypes[0]
        return [cls(f"{dtype}-{number}", partial(make, op, dtype, form)) for number, form in enumerate(forms)]

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands."""
        return self.make(self.id, device, rng)

    def request(self, device: Device, rng: np.random.Generator) -> Any:
        """The request alone."""
        return self.check(device, rng).request


@dataclass(frozen=True)
class Check:
    """A request with fresh operands, its expected results, the allowed error of each element, and guarded memory.

    A bound of infinity is for elements that an op does not define, such as those between packed sequences.
    The reference is computed before the run, because an output may overwrite an input. `verify` takes the result of
    `run`. With `by_chance` the errors of elements are random, so a whole output has a much smaller relative error than
    they have: if each element is 1% too large, the whole output shows it even where no single element does.
    """

    name: str
    request: OperandRequest
    expected: Results
    allowed: Results
    written: tuple[GuardedBuffer, ...] = ()
    by_chance: bool = False

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch unless every output is within its bound and no memory around the outputs was written."""
        tensors = list(result) if isinstance(result, tuple) else [result]
        for name, tensor in zip(self.request.outputs(), tensors, strict=True):
            if name in self.expected:
                self._compare(name, tensor.numpy())
        self._check_memory()

    def renew(self, result: Tensor | tuple[Tensor, ...] | None = None) -> None:
        """Restore all outputs to their values before the first run; outputs that the run allocated get poison."""
        for memory in self.written:
            if memory.whole.ndim:
                memory.renew()
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        given_ids = {id(tensor) for _, tensor, _ in self.request.tensors()}
        for tensor in results:
            if id(tensor) not in given_ids:
                tensor.copy_from(poison(tensor.dtype, tensor.shape))

    def _check_memory(self) -> None:
        for memory in self.written:
            if memory.whole.ndim and (count := memory.disturbed()):
                raise Mismatch(f"{self.name}: {count} bytes beside {memory.view.layout} were written")

    def _compare(self, name: str, got: Array) -> None:
        expected = self.expected[name]
        allowed = np.broadcast_to(self.allowed[name], expected.shape)
        values = got.astype(np.complex128 if got.dtype.kind == "c" else np.float64)
        with np.errstate(invalid="ignore"):
            off = np.abs(values - expected)
            # NaN is wrong, equal infinities are right; under an infinite bound every value is right
            right = (off <= allowed) | (values == expected)
            wrong = None if right.all() else ~(right | (allowed == np.inf))
        if wrong is not None and wrong.any():
            worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1)), got.shape)
            raise Mismatch(
                f"{self.name}: {name} is wrong in {wrong.sum()} of {got.size} places; at {tuple(map(int, worst))} it is"
                f" {got[worst]}, expected {expected[worst]} within {allowed[worst]:.3g} ({self.request.describe()})"
            )
        if self.by_chance:
            self._compare_together(name, values, expected, allowed)

    def _compare_together(self, name: str, values: Array, expected: Array, allowed: Array) -> None:
        """Raise Mismatch if the errors of all elements, projected on the result, exceed the limit for random errors."""
        finite = np.isfinite(expected) & np.isfinite(allowed) & np.isfinite(values)
        exact, off = expected[finite], values[finite] - expected[finite]
        share, limit = (off * exact).sum(), TOGETHER * np.sqrt(((allowed[finite] * exact) ** 2).sum())
        limit += (off**2).sum()  # rounding to nearest lowers `share` by the sum of its squared errors: 0.15% with fp8
        if abs(share) > limit:
            size = (exact**2).sum()
            raise Mismatch(
                f"{self.name}: {name} is {share / size:+.4%} of itself off as a whole, within {limit / size:.4%}"
                f" ({self.request.describe()})"
            )


def with_outputs(
    request: Q, lay: Callable[[Array], GuardedBuffer], **by_name: Callable[[Array], GuardedBuffer]
) -> tuple[Q, tuple[GuardedBuffer, ...]]:
    """A request with poisoned memory for each output, put on the device by `by_name[output]`, else by `lay`."""
    poisoned = {name: poison(output.dtype, output.shape) for name, output in request.outputs().items()}
    memories = {name: by_name.get(name, lay)(values) for name, values in poisoned.items()}
    replaced: Any = request.replace(**{name: memory.view for name, memory in memories.items()})
    return replaced, tuple(memories.values())


def checked(
    name: str,
    drawn: tuple[OperandRequest, tuple[GuardedBuffer, ...]],
    evaluate: Formula,
    bounds: Callable[[Any, Results], Results],
    *,
    by_chance: bool = False,
) -> Check:
    """The check of a request with guarded memory: the results of its formula in float64, within its bounds."""
    request, written = drawn
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, bounds(request, expected), written, by_chance)


def in_turn(forms: Sequence[F], choices: Sequence[C], plain: Container[str]) -> list[tuple[F, C]]:
    """Each form with one of the choices in turn; forms whose name (the first item) is in `plain` with all choices."""
    return [
        (form, choice)
        for number, form in enumerate(forms)
        for turn, choice in enumerate(choices)
        if form[0] in plain or turn == number % len(choices)
    ]


def result_of(formula: Formula, request: OperandRequest) -> Array:
    """The exact result of a request with one output, rounded to its dtype, as an operand of another request."""
    return formula(request, EXACT)["out"].astype(request.outputs()["out"].dtype.numpy)


# -- operands -----------------------------------------------------------------------------------------------------
def place(
    device: Device, values: Array, order: Sequence[int] | None = None, gap: int = 0, *, aligned: bool = False
) -> GuardedBuffer:
    """Values on a device with their axes in memory in the given order; `gap` poisoned elements follow every axis.

    Unless `aligned`, `gap` elements also precede the innermost axis, so that the view starts at an odd element.
    """
    axes = tuple(range(values.ndim)) if order is None else tuple(order)
    lines = values.transpose(axes)
    dtype = Dtype.of(values.dtype)
    padded_shape = [extent + gap for extent in lines.shape]
    inside: list[Any] = [slice(0, extent) for extent in lines.shape]
    before = 0 if aligned else gap
    if padded_shape and before:
        padded_shape[-1] += before
        inside[-1] = slice(before, before + lines.shape[-1])
    poisoned = poison(dtype, tuple(padded_shape))
    poisoned[tuple(inside)] = lines
    whole = device.array(poisoned)
    part = whole[tuple(inside)]
    strides = [0] * values.ndim
    for position, axis in enumerate(axes):
        strides[axis] = part.layout.strides[position]
    layout = device.layout(dtype, values.shape, tuple(strides), part.ptr)
    return GuardedBuffer(Tensor(part.storage, part.ptr, layout), whole, poisoned, tuple(inside))


def normal(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...], spread: float = 1.0) -> Array:
    """Normally distributed numbers with standard deviation `spread`; integers over most of the range of i8."""
    if dtype.numpy.kind in "iu":
        return rng.integers(-100 if dtype.numpy.kind == "i" else 0, 101, shape).astype(dtype.numpy)
    drawn: Array = (rng.standard_normal(shape) * spread).astype(dtype.numpy)
    return drawn


def distinct(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Values of magnitude 1; no two within 2000 elements of each other are equal, except that integers may be.

    bf16 has 128 values between two powers of 2: 8 of those ranges and both signs make 2048 of them.
    """
    if dtype.numpy.kind in "iu":
        return normal(rng, dtype, shape)
    powers = 2.0 ** np.arange(-5, 3)
    grid = np.outer(powers, 1 + np.arange(128) / 128).ravel()
    pool = np.concatenate([grid, -grid])
    size = int(np.prod(shape))
    return np.asarray(np.resize(rng.permutation(pool), size).reshape(shape).astype(dtype.numpy))


def rounded(error: Array, expected: Array, dtype: Dtype) -> Array:
    """A bound after rounding to a dtype: the result is one of the values within the bound, rounded."""
    if dtype.numpy.kind in "iu":
        return np.asarray(error + 0.5)
    return stored(error, expected, dtype)


def unit(dtype: Dtype) -> float:
    """The unit roundoff of the computation between reading and storing: that of f64 for f64, else of f32."""
    return 2.0**-53 if dtype is F64 else 2.0**-24
