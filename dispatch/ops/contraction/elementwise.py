"""PermuteRequest, ElementwiseBinaryRequest, ElementwiseTrinaryRequest: operations without sums; axes may be permuted.

Making one validates it; this file calls no library. Follows
https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.request import NamedArguments, Number, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import Dtype
from dispatch.ops.contraction.base import ModesRequest
from dispatch.ops.contraction.choices import TensorOp

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.ops.contraction.base import Factor

__all__ = ["ElementwiseBinaryRequest", "ElementwiseTrinaryRequest", "PermuteRequest"]


@dataclass(frozen=True, eq=False)
class ElementwiseRequest(ModesRequest):
    """An operation without sums: each mode of an operand is also a mode of the result, which may have more.

    Attributes:
        alpha: a number; complex numbers for complex tensors only; if it is 0, the operand that it multiplies is not
            read.
    """

    @property
    def reads_added(self) -> bool:
        return self.has_added  # the plan is the same whether the factor is 0 or not

    def check_fields(self) -> None:
        for name, modes in zip(self.tensors_of_spec, self.parsed[0], strict=True):
            for mode in modes:
                if mode not in self.result_modes:
                    actual = f"{self.spec!r}: {name} has mode {mode}, which the result lacks"
                    raise BadRequest("spec", actual, "only modes of the result", "reduce_modes sums over the others")
        super().check_fields()

    def named_arguments(self) -> NamedArguments:
        arguments = super().named_arguments()
        of_alpha: Number = arguments.numbers["alpha"]
        return arguments._replace(numbers=dict.fromkeys(self.numbers, of_alpha))


@dataclass(frozen=True, eq=False)
class PermuteRequest(ElementwiseRequest):
    """B = alpha · op(A), with the axes in another order, and converted to `out_dtype`.

    Attributes:
        a: any shape, any strides above 0, and 0.
        op_a: the operator for each element, a TensorOp.
        out_dtype: the result's dtype if `out` is omitted: f16 and f32, f32 and f64, c64 and c128 convert to each other;
            None for that of a.
        out: of the spec's modes in their order; a is repeated along modes that it does not have.
    """

    op: ClassVar[str] = "permute"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a",)
    unary: ClassVar[dict[str, str]] = {"op_a": "a"}
    a: Tensor
    _: KW_ONLY
    op_a: TensorOp | str = TensorOp.IDENTITY
    out_dtype: Any = None
    out: Tensor | None = None

    @property
    def result_dtype(self) -> Dtype:
        if self.out is not None:
            return self.out.dtype
        return self.a.dtype if self.out_dtype is None else Dtype.of(self.out_dtype)

    def check_fields(self) -> None:
        super().check_fields()
        if self.out_dtype is not None and Dtype.of(self.out_dtype) is not self.result_dtype:
            raise BadRequest("out_dtype", str(self.out_dtype), f"{self.result_dtype}, the dtype of out, or None")
        if self.result_dtype.is_complex != self.a.dtype.is_complex:
            wanted = "complex numbers, like a" if self.a.dtype.is_complex else "real numbers, like a"
            raise BadRequest("out_dtype", str(self.result_dtype), wanted)

    def attributes(self) -> tuple[Any, ...]:
        return (*super().attributes(), self.result_dtype.cuda)


@dataclass(frozen=True, eq=False)
class ElementwiseBinaryRequest(ElementwiseRequest):
    """D = op_ac(alpha · op(A), gamma · op(C)): two tensors element by element, the first with its axes in any order.

    Attributes:
        a: any shape, any strides above 0, and 0; it may lack modes of the result, along which it is repeated.
        c: of out's modes in its order; the spec does not name it; it may be `out` itself.
        gamma: the factor of C, as alpha is that of A.
        op_a, op_c: the operators for each element, applied first; a TensorOp.
        op_ac: the operator that combines the two: ADD, MUL, MAX or MIN.
        out: D, of c's dtype and layout.
    """

    op: ClassVar[str] = "elementwise_binary"
    reads: ClassVar[tuple[str, ...]] = ("a", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "gamma")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "gamma"))
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a",)
    unary: ClassVar[dict[str, str]] = {"op_a": "a", "op_c": "c"}
    binary: ClassVar[tuple[str, ...]] = ("op_ac",)
    a: Tensor
    c: Tensor
    _: KW_ONLY
    gamma: Factor = 1.0
    op_a: TensorOp | str = TensorOp.IDENTITY
    op_c: TensorOp | str = TensorOp.IDENTITY
    op_ac: TensorOp | str = TensorOp.ADD
    out: Tensor | None = None

    @property
    def result_dtype(self) -> Dtype:
        return self.c.dtype


@dataclass(frozen=True, eq=False)
class ElementwiseTrinaryRequest(ElementwiseRequest):
    """D = op_abc(op_ab(alpha · op(A), beta · op(B)), gamma · op(C)): three tensors element by element.

    Attributes:
        a, b: any shape, any strides above 0, and 0; they may lack modes of the result, along which they are repeated.
        c: of out's modes in its order; the spec does not name it; it may be `out` itself.
        beta, gamma: the factors of B and C, as alpha is that of A.
        op_a, op_b, op_c: the operators for each element, applied first; a TensorOp.
        op_ab, op_abc: the operators that combine A and B, and their result and C: ADD, MUL, MAX or MIN.
        out: D, of c's dtype and layout.
    """

    op: ClassVar[str] = "elementwise_trinary"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta", "gamma")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta", "gamma"))
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a", "b")
    unary: ClassVar[dict[str, str]] = {"op_a": "a", "op_b": "b", "op_c": "c"}
    binary: ClassVar[tuple[str, ...]] = ("op_ab", "op_abc")
    a: Tensor
    b: Tensor
    c: Tensor
    _: KW_ONLY
    beta: Factor = 1.0
    gamma: Factor = 1.0
    op_a: TensorOp | str = TensorOp.IDENTITY
    op_b: TensorOp | str = TensorOp.IDENTITY
    op_c: TensorOp | str = TensorOp.IDENTITY
    op_ab: TensorOp | str = TensorOp.ADD
    op_abc: TensorOp | str = TensorOp.ADD
    out: Tensor | None = None

    @property
    def result_dtype(self) -> Dtype:
        return self.c.dtype
