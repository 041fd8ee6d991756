"""What all requests over a sparse matrix have in common: its tensors and form, factors passed by value, `library`.

A plan depends on a factor only in whether the operand that it multiplies is read. Factors follow the addresses.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import MAX_FLOAT, shown
from dispatch.core.factors import F32_MAX, as_argument, check_factor
from dispatch.core.operands import OperandRequest
from dispatch.core.request import Argument, NamedArguments, Operands, R_co, Unpacked
from dispatch.core.request import Number as Free
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64
from dispatch.ops.sparse.form import SparseForm, check_form, check_parts

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["AlphaRequest", "FactorRequest", "Number", "ScaledSparseRequest", "SparseRequest"]
__all__ += ["check_matrix", "check_vector"]

Number = int | float | complex


@dataclass(frozen=True, eq=False)
class SparseRequest(OperandRequest[R_co]):
    """A sparse matrix A.

    Attributes:
        values: the elements of A, dense; of BSR (blocks, block rows, block columns).
        rows, columns: i32 or i64, dense: offsets or indices, depending on the form's format. Indices beyond the matrix
            cause reads beyond other operands: check them first by `sparse_check`, or `validate=True` of a SparseTensor.
        form: a `SparseForm`. A `SparseTensor` unpacks into these four: `spmm(*a, b)`.
        library: only rows of this library are considered, such as "cusparse", "own" or "cudss" if they support the op;
            None considers all, in the table's order.
    """

    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns")
    values: Tensor
    rows: Tensor
    columns: Tensor
    form: SparseForm
    _: KW_ONLY
    library: str | None = None

    def check_fields(self) -> None:
        object.__setattr__(self, "form", check_form("form", self.form))
        check_parts(self.form, {name: getattr(self, name) for name in ("values", "rows", "columns")})
        self.check_operands()

    def check_operands(self) -> None:
        """Raise BadRequest for other operands that do not fit A, and for invalid choices."""


@dataclass(frozen=True, eq=False)
class FactorRequest(OperandRequest[R_co]):
    """A request with scalar factors, passed by value: `numbers` are the names of their fields."""

    numbers: ClassVar[tuple[str, ...]] = ()  # in the order of the arguments
    added: ClassVar[str] = ""  # the operand that is added times beta, if there is such a field

    def factor(self, name: str) -> complex:
        """A factor as plans read it: a float or complex; -0.0 becomes 0. A `beta` of None is 1 if used, else 0."""
        given: Any = getattr(self, name)
        if given is None:
            return float(getattr(self, self.added) is not None)
        return as_argument(given)

    @property
    def reads_added(self) -> bool:
        """Whether the operand that is added is read: it is not if beta is 0."""
        return bool(self.added) and getattr(self, self.added) is not None and self.factor("beta") != 0

    @property
    def factor_dtype(self) -> Dtype:
        """The dtype that determines which numbers are valid factors."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype

    def check_factors(self) -> None:
        """Raise BadRequest for factors that are not numbers, or are complex where they must be real."""
        for name in self.numbers:
            given = getattr(self, name)
            if given is not None or name != "beta":
                check_factor(name, given, may_be_complex=self.factor_dtype.is_complex)
        if self.added and getattr(self, self.added) is None and self.factor("beta") != 0:
            name = self.added
            raise BadRequest("beta", shown(getattr(self, "beta", None)), f"0 without {name}", f"give {name}=…")

    def usual(self) -> dict[str, Any]:
        return {"beta": self.factor("beta")} if self.added else {}

    def attributes(self) -> tuple[Any, ...]:
        named = {*self.reads, *self.writes, *self.numbers}
        return (*(getattr(self, field.name) for field in fields(self) if field.name not in named), self.reads_added)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), *map(self.factor, self.numbers))

    def named_arguments(self) -> NamedArguments:
        most = float(MAX_FLOAT) if self.factor_dtype in (F64, C128) else F32_MAX
        free = {name: Free(-most, most) for name in self.numbers if name != "beta"}
        if self.reads_added:
            free["beta"] = Free(math.ulp(0.0), most)  # with 0 the added operand is not read: another plan
        return NamedArguments((*self.reads, *self.writes, *self.numbers), free, self.in_place)


@dataclass(frozen=True, eq=False)
class AlphaRequest(FactorRequest["Tensor"]):
    """A request with a factor alpha, given by value.

    Attributes:
        alpha: a number; complex only for complex matrices.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    _: KW_ONLY
    alpha: Number = 1.0


@dataclass(frozen=True, eq=False)
class ScaledSparseRequest(AlphaRequest, SparseRequest["Tensor"]):
    """A sparse matrix, and factors."""

    def check_fields(self) -> None:
        SparseRequest.check_fields(self)
        self.check_factors()


def check_vector(name: str, tensor: Tensor | None, extent: int, reason: str) -> None:
    """BadRequest unless an operand, if present, is a vector of so many elements."""
    if tensor is not None and tensor.shape != (extent,):
        hint = "x[:, 0] is a column" if tensor.ndim == 2 else ""
        raise BadRequest(name, str(tensor.layout), f"{tensor.dtype}[{extent}], {reason}", hint)


def check_matrix(name: str, tensor: Tensor | None, shape: tuple[int | None, int | None], reason: str) -> None:
    """BadRequest unless an operand, if present, is a matrix of these extents; None allows any extent."""
    if tensor is None:
        return
    fits = tensor.ndim == 2 and all(w is None or w == e for w, e in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("…" if extent is None else str(extent) for extent in shape)
        hint = "x[:, None] is a matrix of one column" if tensor.ndim == 1 else ""
        raise BadRequest(name, str(tensor.layout), f"{tensor.dtype}[{wanted}], {reason}", hint)
