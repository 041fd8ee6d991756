"""What requests of BLAS routines have in common: factors given by value, matrices of one dtype, `library`.

A plan does not depend on the factors, but for whether what they multiply is read: they come behind the addresses.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.checks import MAX_FLOAT, NO_NUMBERS, shown
from dispatch.core.operand_checks import check_tensor
from dispatch.core.operands import OperandRequest
from dispatch.core.request import Argument, NamedArguments, Operands, Unpacked
from dispatch.core.request import Number as Free
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["BlasRequest", "Number", "ScaledRequest", "Shape", "check_matrix", "dims", "length"]

Number = int | float | complex
Shape = tuple[int, ...]
F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class BlasRequest(OperandRequest["Tensor"]):
    """What all have in common.

    Attributes:
        library: the one whose rows alone are asked, "cublas"; None asks all in the table's order.
    """

    numbers: ClassVar[tuple[str, ...]] = ()  # the fields that are factors, in the order of the plan's arguments
    added: ClassVar[str] = "c"  # the operand that the product is added to, if there is such a field
    real: ClassVar[tuple[str, ...]] = ()  # those that are real also where the matrices are complex
    _: KW_ONLY
    library: str | None = None

    # -- what a subclass says -------------------------------------------------------------------------------------
    def extents(self) -> dict[str, Shape]:
        """The shape of each matrix by its name, the output's too; BadRequest for operands that lead to none."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> Dtype:
        """The dtype of an operand: that of the first, unless said."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype

    # -- factors --------------------------------------------------------------------------------------------------
    @property
    def has_c(self) -> bool:
        """Whether there is something that the product is added to."""
        return self.added in self.reads and getattr(self, self.added) is not None

    def factor(self, name: str) -> complex:
        """A factor as plans take it: a float, or complex; -0.0 is 0. A `beta` left open is 1 where there is a c."""
        given: Any = getattr(self, name)
        if given is None:
            return float(self.has_c)
        return complex(given) if isinstance(given, (complex, np.complexfloating)) else float(given) + 0.0

    @property
    def reads_c(self) -> bool:
        """Whether c is added; with a beta of 0 nothing reads it."""
        return self.has_c and ("beta" not in self.numbers or self.factor("beta") != 0)

    @property
    def takes_c(self) -> bool:
        """Whether the result is to have of c what the routine does not write, or adds to."""
        return self.reads_c

    def usual(self) -> dict[str, Any]:
        return {"beta": self.factor("beta")} if "beta" in self.numbers else {}

    def check_factors(self) -> None:
        """Raise BadRequest for factors that are no numbers, or complex where they must be real."""
        is_complex = getattr(self, self.reads[0]).dtype.is_complex
        for name in self.numbers:
            given: Any = getattr(self, name)
            if given is None and _default(type(self), name) is None:
                continue
            check_factor(name, given, may_be_complex=is_complex and name not in self.real)
        if "beta" in self.numbers and self.added in self.reads and not self.has_c and self.factor("beta") != 0:
            name = self.added
            hint = f"to add to it in place give {name}=x, out=x"
            raise BadRequest("beta", str(getattr(self, "beta", None)), f"0 without {name}", hint)

    # -- the contract of Request ----------------------------------------------------------------------------------
    def check_fields(self) -> None:
        self.check_factors()
        for name, shape in self.extents().items():
            if name not in self.writes:
                check_tensor(name, getattr(self, name), self.dtype_of(name), shape)

    def attributes(self) -> tuple[Any, ...]:
        named = {*self.reads, *self.writes, *self.numbers}
        return (*(getattr(self, field.name) for field in fields(self) if field.name not in named), self.reads_c)


@dataclass(frozen=True, eq=False)
class ScaledRequest(BlasRequest):
    """A routine with a factor.

    Attributes:
        alpha: a number; complex ones for complex matrices alone.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    _: KW_ONLY
    alpha: Number = 1.0

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), *map(self.factor, self.numbers))

    def named_arguments(self) -> NamedArguments:
        most = float(MAX_FLOAT) if getattr(self, self.reads[0]).dtype in (F64, C128) else F32_MAX
        free = {name: Free(-most, most) for name in self.numbers if name != "beta"}
        if "beta" in self.numbers and self.reads_c:
            free["beta"] = Free(math.ulp(0.0), most)  # with 0 nothing reads c: that is another plan
        return NamedArguments((*self.reads, *self.writes, *self.numbers), free, self.in_place)


def _default(kind: Any, name: str) -> Any:
    return next(field.default for field in fields(kind) if field.name == name)


def check_factor(name: str, value: Any, *, may_be_complex: bool) -> None:
    """BadRequest unless a value is a number, and a real one where complex ones have no meaning."""
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    expected = "a number" if may_be_complex else "a real number"
    if may_be_complex:
        kinds += (complex, np.complexfloating)
    too_large = isinstance(value, int) and abs(value) > MAX_FLOAT
    if isinstance(value, NO_NUMBERS) or not isinstance(value, kinds) or too_large:
        raise BadRequest(name, shown(value), expected)


def check_matrix(name: str, tensor: Tensor) -> Shape:
    """The rows and columns of a matrix; BadRequest for what has other axes."""
    if tensor.ndim != 2:
        hint = "cuBLAS has no batched form: call it for each matrix" if tensor.ndim > 2 else "x[None] adds an axis"
        raise BadRequest(name, str(tensor.layout), "a matrix, of two axes", hint)
    return tensor.shape


def length(name: str, tensor: Tensor) -> int:
    """The elements of a vector; BadRequest for what has other axes than one."""
    if tensor.ndim != 1:
        raise BadRequest(name, str(tensor.layout), "a vector, of one axis", "x.reshape(-1), or a row x[0]")
    return tensor.shape[0]


def dims(name: str, tensor: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = check_matrix(name, tensor)
    return rows, columns
