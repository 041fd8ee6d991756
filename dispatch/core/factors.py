"""Factors (alpha, beta) that requests pass by value: the allowed numbers, and their form as arguments of plans.

A plan depends on a factor only for whether the operand that it multiplies is read. In `arguments`, factors follow the
addresses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.checks import MAX_FLOAT, NO_NUMBERS, shown
from dispatch.core.operands import OperandRequest
from dispatch.core.request import NamedArguments, Number, R_co
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["F32_MAX", "F32_NUMBER", "FactorRequest", "ScaledRequest", "as_argument", "check_factor"]

F32_MAX = float(np.finfo(np.float32).max)
F32_NUMBER = Number(-F32_MAX, F32_MAX)  # any finite number that f32 holds


def as_argument(given: Any) -> complex:
    """A factor as plans take it: a float or complex; -0.0 becomes 0.0."""
    return complex(given) if isinstance(given, (complex, np.complexfloating)) else float(given) + 0.0


def check_factor(name: str, value: Any, *, may_be_complex: bool) -> None:
    """BadRequest unless a value is a number, and a real one unless `may_be_complex`."""
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    expected = "a number" if may_be_complex else "a real number"
    if may_be_complex:
        kinds += (complex, np.complexfloating)
    too_large = isinstance(value, int) and abs(value) > MAX_FLOAT
    if isinstance(value, NO_NUMBERS) or not isinstance(value, kinds) or too_large:
        raise BadRequest(name, shown(value), expected)


@dataclass(frozen=True, eq=False)
class FactorRequest(OperandRequest[R_co]):
    """A request that may have factors; `beta`, if there is one, multiplies the operand that is added to the result."""

    numbers: ClassVar[tuple[str, ...]] = ()  # the fields that are factors, in the order of the plan's arguments
    added: ClassVar[str] = "c"  # the operand that beta multiplies, if there is such a field
    real: ClassVar[tuple[str, ...]] = ()  # the factors that are real even if the operands are complex

    @property
    def factor_dtype(self) -> Dtype:
        """The dtype that decides which numbers may be factors: that of the first operand, unless overridden."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype

    @property
    def has_added(self) -> bool:
        """Whether the operand that beta multiplies is given."""
        return self.added in self.reads and getattr(self, self.added) is not None

    def factor(self, name: str) -> complex:
        """A factor as plans take it (`as_argument`); a `beta` of None is 1 if there is something to add, else 0."""
        value: Any = getattr(self, name)
        return float(self.has_added) if value is None else as_argument(value)

    @property
    def reads_added(self) -> bool:
        """Whether the operand that beta multiplies is read: it is given, and beta is not 0."""
        return self.has_added and ("beta" not in self.numbers or self.factor("beta") != 0)

    def check_factors(self) -> None:
        """Raise BadRequest for factors that are not numbers, or complex if they must be real."""
        is_complex, may_add = self.factor_dtype.is_complex, self.added in self.reads
        for name in self.numbers:
            value: Any = getattr(self, name)
            if value is not None or name != "beta" or not may_add:
                check_factor(name, value, may_be_complex=is_complex and name not in self.real)
        if "beta" in self.numbers and may_add and not self.has_added and self.factor("beta") != 0:
            hint = f"to add to x in place, pass {self.added}=x and out=x"
            raise BadRequest("beta", shown(getattr(self, "beta", None)), f"0 without {self.added}", hint)

    def attributes(self) -> tuple[Any, ...]:
        named = {*self.reads, *self.writes, *self.numbers}
        return (*(getattr(self, field.name) for field in fields(self) if field.name not in named), self.reads_added)


@dataclass(frozen=True, eq=False)
class ScaledRequest(FactorRequest[R_co]):
    """A request whose plan takes the factors after the addresses."""

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), *map(self.factor, self.numbers))

    def named_arguments(self) -> NamedArguments:
        most = float(MAX_FLOAT) if self.factor_dtype in (F64, C128) else F32_MAX
        free = {name: Number(-most, most) for name in self.numbers if name != "beta"}
        if "beta" in self.numbers and self.reads_added:
            free["beta"] = Number(math.ulp(0.0), most)  # not 0, for which c is not read, with another plan
        return NamedArguments((*self.reads, *self.writes, *self.numbers), free, self.in_place)
