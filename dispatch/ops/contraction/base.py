"""The common fields of this family's requests: a spec, operators, a compute type, factors passed by value."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_enum, shown
from dispatch.core.factors import ScaledRequest
from dispatch.core.operand_checks import check_tensor
from dispatch.core.operands import Output, dense, like
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype, member
from dispatch.ops.contraction.choices import BINARY, ORDERED, TensorOp
from dispatch.ops.contraction.modes import canonical_spec, extents_of, parse, shown_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor

__all__ = ["NUMBERS", "Factor", "ModesRequest", "check_binary", "check_unary"]

Shape = tuple[int, ...]
Factor = int | float | complex
NUMBERS = (F16, BF16, F32, F64, C64, C128)


@dataclass(frozen=True, eq=False)
class ModesRequest(ScaledRequest["Tensor"]):
    """A request over tensors whose axes are modes.

    Attributes:
        spec: the modes of each operand and of the result: a letter for each axis, such as "ik,kj->ij"; or lists of
            modes, [["row", "sum"], ["sum", "col"], ["row", "col"]]. A mode that an operand has twice is its diagonal.
        compute: the precision of products and sums: a Compute or its name ("tf32", "3xtf32", "9x16bf"); None takes
            that of the dtypes, f32 for f16, bf16 and f32, f64 for f64. Others are used only on request.
        alpha: a number; complex numbers for complex tensors only.
        library: use only this library's rows, such as "cutensor"; None considers all rows in the table's order.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    tensors_of_spec: ClassVar[tuple[str, ...]]  # the operands whose modes the spec names
    unary: ClassVar[dict[str, str]] = {}  # fields of operators of one element, with the operand of each
    binary: ClassVar[tuple[str, ...]] = ()
    spec: str | Sequence[Any]
    _: KW_ONLY
    compute: Compute | str | None = None
    alpha: Factor = 1.0
    library: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", canonical_spec(self.spec))
        super().__post_init__()

    # -- modes ----------------------------------------------------------------------------------------------------
    @cached_property
    def parsed(self) -> tuple[tuple[str, ...], str]:
        """The modes of each operand of the spec, and of the result."""
        return parse(str(self.spec), len(self.tensors_of_spec))

    @property
    def result_modes(self) -> str:
        """The modes of the result, in its order."""
        return self.parsed[1]

    def modes_of(self, name: str) -> str:
        """The modes of an operand; the added operand has those of the result."""
        if name in self.tensors_of_spec:
            return self.parsed[0][self.tensors_of_spec.index(name)]
        return self.parsed[1]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The extent of each mode; for a mode that only the result has, that of the added operand, or of `out`."""
        shapes = [(name, self.modes_of(name), getattr(self, name).shape) for name in self.tensors_of_spec]
        others = [name for name in (self.added, "out") if name not in self.tensors_of_spec]
        for name in others:
            tensor: Tensor | None = getattr(self, name, None)
            if tensor is not None:
                shapes.append((name, self.parsed[1], tensor.shape))
        extents = extents_of(shapes, str(self.spec))
        for mode in self.parsed[1]:
            if mode not in extents:
                raise BadRequest("spec", f"{self.spec!r}: no operand has {mode}", "only modes of operands")
        return extents

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return tuple(self.sizes[mode] for mode in self.parsed[1])

    # -- the contract of OperandRequest -----------------------------------------------------------------------------
    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        operand_dtypes = (getattr(self, name).dtype for name in self.tensors_of_spec)
        return (*operand_dtypes, self.layout_of("out").dtype)

    @property
    def factor_dtype(self) -> Dtype:
        return self.result_dtype

    @property
    def result_dtype(self) -> Dtype:
        """The dtype of `out` if it is omitted: that of the first complex operand if there is one, else of the first."""
        operand_dtypes: list[Dtype] = [getattr(self, name).dtype for name in self.tensors_of_spec]
        return next((dtype for dtype in operand_dtypes if dtype.is_complex), operand_dtypes[0])

    def outputs(self) -> dict[str, Output]:
        added: Tensor | None = getattr(self, self.added, None)
        if added is not None and added.shape == self.shape and not added.layout.meets_itself:
            return {"out": like(added.layout)}
        return {"out": dense(self.shape, self.result_dtype)}

    def check_fields(self) -> None:
        for name in self.tensors_of_spec:
            tensor: Tensor = getattr(self, name)
            if tensor.dtype not in NUMBERS:
                wanted = f"{', '.join(map(str, NUMBERS[:-1]))} or {NUMBERS[-1]}"
                raise BadRequest(name, str(tensor.layout), wanted, f"{name}.astype('f32')")
        self.check_factors()
        if self.has_added and self.added not in self.tensors_of_spec:
            check_tensor(self.added, getattr(self, self.added), self.result_dtype, self.shape)
        for field, name in self.unary.items():
            check_unary(field, getattr(self, field), getattr(self, name))
        for field in self.binary:
            check_binary(field, getattr(self, field), self.result_dtype)

    def describe(self) -> str:
        """One line: op, spec, layouts, and the fields that differ from their defaults."""
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        skipped = {"spec", *self.reads, *self.writes}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in skipped and value is not field.default and value != field.default:
                parts.append(f"{field.name}={getattr(value, 'name', value)}")
        return f"{self.op}({shown_spec(str(self.spec))!r}, {', '.join(parts)})"

    def operator(self, field: str) -> TensorOp:
        """An operator in the form that libraries get: real numbers are their own conjugates."""
        op: TensorOp = member(getattr(self, field))
        tensor: Tensor | None = getattr(self, self.unary[field])
        is_real = tensor is None or not tensor.dtype.is_complex
        return TensorOp.IDENTITY if op is TensorOp.CONJ and is_real else op


def check_unary(field: str, value: Any, operand: Tensor | None) -> None:
    """BadRequest unless a value is an operator of one element that is defined for the operand's dtype."""
    op = check_enum(field, value, TensorOp)
    if op in BINARY:
        raise BadRequest(field, op.name, "an operator of one element", "such as RELU, EXP or CONJ")
    if operand is not None and operand.dtype.is_complex and op in ORDERED:
        raise BadRequest(field, op.name, f"an operator for {operand.dtype}: complex numbers have no order")


def check_binary(field: str, value: Any, dtype: Dtype) -> None:
    """BadRequest unless a value is an operator of two elements that is defined for a dtype."""
    operation = check_enum(field, value, TensorOp)
    if operation not in BINARY:
        raise BadRequest(field, operation.name, shown([op.name for op in BINARY]))
    if dtype.is_complex and operation in ORDERED:
        raise BadRequest(field, operation.name, f"ADD or MUL: {dtype} numbers have no order")
