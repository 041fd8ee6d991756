"""ContractRequest, ContractTrinaryRequest, ReduceModesRequest: sums over modes. Making one validates it; this file
calls no library.

Follows https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.ops.contraction.base import ModesRequest
from dispatch.ops.contraction.choices import ContractionAlgo, TensorOp

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.ops.contraction.base import Factor

__all__ = ["ContractRequest", "ContractTrinaryRequest", "ReduceModesRequest"]

MAX_RANK = 1 << 16  # of a kernel, in cuTENSOR's ranking
MAX_KERNELS = 1 << 10  # that are tried one after the other


@dataclass(frozen=True, eq=False)
class SummingRequest(ModesRequest):
    """A sum over modes that may be added to a tensor.

    Attributes:
        beta: a number; the default is 1 if there is a c, else 0.
        algo: cuTENSOR's algorithm; None lets cuTENSOR choose.
        kernel_rank: the kernel of that algorithm at this position of cuTENSOR's ranking, 0 for the best.
        jit: whether cuTENSOR may compile a kernel for this request, which takes seconds at first; kernels are stored on
            disk for this GPU and version of the library.
        workspace: the limit for its workspace in bytes; None for cuTENSOR's suggestion.
        autotune: time all rows that take the request, and cuTENSOR's algorithms and best kernels, once; the fastest is
            used, and stored on disk.
        incremental_count: the number of kernels that cuTENSOR itself tries, another one in each of the first calls,
            until it uses the fastest; that is stored on disk. Meanwhile results may differ in their last bits. None
            tries none.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    _: KW_ONLY
    beta: Factor | None = None
    algo: ContractionAlgo | str | None = None
    kernel_rank: int | None = None
    jit: bool = False
    workspace: int | None = None
    autotune: bool = False
    incremental_count: int | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.kernel_rank is not None:
            check_int("kernel_rank", self.kernel_rank, 0, MAX_RANK)
        if self.autotune and (self.algo is not None or self.kernel_rank is not None):
            raise BadRequest(
                "autotune",
                "True with algo or kernel_rank",
                "pass one or the other: autotune chooses algo and kernel_rank",
            )
        if self.incremental_count is not None:
            check_int("incremental_count", self.incremental_count, 1, MAX_KERNELS)
            if self.autotune or self.algo is not None or self.kernel_rank is not None:
                actual = f"{self.incremental_count} with autotune, algo or kernel_rank"
                raise BadRequest(
                    "incremental_count",
                    actual,
                    "pass one or the other: with incremental_count cuTENSOR chooses the kernel",
                )


@dataclass(frozen=True, eq=False)
class ContractRequest(SummingRequest):
    """D = alpha · Σ op(A) · op(B) + beta · C, the sum over all modes that D does not have.

    Modes may be in any order. A mode of A, B and D is a batch; a mode of only A or only B that D does not have is
    summed over. An operand of extent 1 along a mode is broadcast along it.

    Attributes:
        a, b: any shape, any strides above 0, and 0; of one dtype, or c128 and f64.
        c: added as beta · c, of out's modes in its order; it may be `out` itself, and is not read if beta is 0.
        op_a, op_b: the operators for each element, applied first; a TensorOp; "conj" for the conjugates.
        out: D, of the spec's modes in their order, in C order or in c's layout.
    """

    op: ClassVar[str] = "contract"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    mixed: ClassVar[tuple[str, ...]] = ("b", "c")
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a", "b")
    unary: ClassVar[dict[str, str]] = {"op_a": "a", "op_b": "b"}
    a: Tensor
    b: Tensor
    _: KW_ONLY
    op_a: TensorOp | str = TensorOp.IDENTITY
    op_b: TensorOp | str = TensorOp.IDENTITY
    c: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ContractTrinaryRequest(SummingRequest):
    """E = alpha · Σ op(A) · op(B) · op(C) + beta · op(D), the sum over all modes that E does not have, by one call.

    According to cuTENSOR this is faster if the operands are on the host of a Grace system; elsewhere two contractions,
    as in `einsum`, may be as fast.

    Attributes:
        a, b, c: any shape, any strides above 0, and 0; of one dtype.
        d: added as beta · op(d), of out's modes in its order; the spec does not name it; it may be `out` itself.
        op_a, op_b, op_c, op_d: the operators for each element, applied first; a TensorOp.
        out: E, of the spec's modes in their order and of two elements at least, in C order or in d's layout.
    """

    op: ClassVar[str] = "contract_trinary"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c", "d")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "d")})
    added: ClassVar[str] = "d"
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    unary: ClassVar[dict[str, str]] = {"op_a": "a", "op_b": "b", "op_c": "c", "op_d": "d"}
    a: Tensor
    b: Tensor
    c: Tensor
    _: KW_ONLY
    op_a: TensorOp | str = TensorOp.IDENTITY
    op_b: TensorOp | str = TensorOp.IDENTITY
    op_c: TensorOp | str = TensorOp.IDENTITY
    op_d: TensorOp | str = TensorOp.IDENTITY
    d: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReduceModesRequest(SummingRequest):
    """D = alpha · reduce(op(A)) + beta · op(C), over all modes that D does not have.

    Attributes:
        a: any shape, any strides above 0, and 0.
        reduce: the reduction: ADD Σ, MUL Π, MAX or MIN. Over a mode without elements, the first two give 0 and 1, and
            MAX and MIN are refused.
        c: added as beta · op(c), of out's modes in its order; it may be `out` itself, and is not read if beta is 0.
        op_a, op_c: the operators for each element, applied first; a TensorOp.
        out: D, of the spec's modes in their order, in C order or in c's layout.
    """

    op: ClassVar[str] = "reduce_modes"
    reads: ClassVar[tuple[str, ...]] = ("a", "c")
    tensors_of_spec: ClassVar[tuple[str, ...]] = ("a",)
    unary: ClassVar[dict[str, str]] = {"op_a": "a", "op_c": "c"}
    binary: ClassVar[tuple[str, ...]] = ("reduce",)
    a: Tensor
    _: KW_ONLY
    reduce: TensorOp | str = TensorOp.ADD
    op_a: TensorOp | str = TensorOp.IDENTITY
    op_c: TensorOp | str = TensorOp.IDENTITY
    c: Tensor | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        super().check_fields()
        lost = [mode for mode in self.modes_of("a") if mode not in self.result_modes and not self.sizes[mode]]
        if lost and self.reduce in (TensorOp.MAX, TensorOp.MIN):
            raise BadRequest("a", f"{self.a.layout}, empty along {lost[0]}", "at least one element, for MAX and MIN")
