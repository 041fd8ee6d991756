"""ContractRequest, ContractTrinaryRequest, ReduceModesRequest: sums over modes. Making one validates it; this file
calls nothing.

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

MAX_RANK = 1 << 16  # of a kernel, in cuTENSOR's order
MAX_KERNELS = 1 << 10  # that are tried one after the other


@dataclass(frozen=True, eq=False)
class SummingRequest(ModesRequest):
    """A sum over modes that may be added to a tensor.

    Attributes:
        beta: a number; left open it is 1 where there is a c. Without one it is 0.
        algo: the way that cuTENSOR takes; None leaves it the choice.
        kernel_rank: of the kernels of that way the one at this place of cuTENSOR's own ranking, 0 the best.
        jit: whether cuTENSOR may compile a kernel for this very request, which takes seconds at first; kernels are kept
            on disk for this GPU and version of the library.
        workspace: the most bytes of workspace it may use; None for what it suggests.
        autotune: time all rows that take the request, and cuTENSOR's ways and best kernels, once; keep the fastest, and
            remember it on disk.
        incremental_count: how many kernels cuTENSOR tries by itself, another one in each of the first calls, until the
            fastest stays; it is kept on disk. Results may differ in their last bits meanwhile. None tries none.
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
            raise BadRequest("autotune", "True with algo or kernel_rank", "one or the other: it is to choose these")
        if self.incremental_count is not None:
            check_int("incremental_count", self.incremental_count, 1, MAX_KERNELS)
            if self.autotune or self.algo is not None or self.kernel_rank is not None:
                given = f"{self.incremental_count} with autotune, algo or kernel_rank"
                raise BadRequest("incremental_count", given, "one or the other: cuTENSOR is to choose the kernel")


@dataclass(frozen=True, eq=False)
class ContractRequest(SummingRequest):
    """D = alpha · Σ op(A) · op(B) + beta · C, the sum over all modes that D has not.

    Modes come in any order, and may be in A and B, in D or not: in all three they are a batch, in one of A and B alone
    and not in D it is summed up along them. An operand of extent 1 along a mode is the same all along it.

    Attributes:
        a, b: any shape, any strides above 0, and 0; of one dtype, or c128 and f64.
        c: added as beta · c, of out's modes in its order; it may be `out` itself, and is not read where beta is 0.
        op_a, op_b: what is done to each element first, a TensorOp; "conj" the conjugates.
        out: D, of the spec's modes in their order, in C order or laid out as c is.
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
    """E = alpha · Σ op(A) · op(B) · op(C) + beta · op(D), the sum over all modes that E has not, by one call.

    cuTENSOR says that this pays where the operands are on the host of a Grace system; elsewhere two contractions, as
    `einsum` makes them, may be as fast.

    Attributes:
        a, b, c: any shape, any strides above 0, and 0; of one dtype.
        d: added as beta · op(d), of out's modes in its order, which the spec does not name; it may be `out` itself.
        op_a, op_b, op_c, op_d: what is done to each element first, a TensorOp.
        out: E, of the spec's modes in their order and of two elements at least, in C order or laid out as d is.
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
    """D = alpha · reduce(op(A)) + beta · op(C), over all modes that D has not.

    Attributes:
        a: any shape, any strides above 0, and 0.
        reduce: what to: ADD Σ, MUL Π, MAX or MIN.
        c: added as beta · op(c), of out's modes in its order; it may be `out` itself, and is not read where beta is 0.
        op_a, op_c: what is done to each element first, a TensorOp.
        out: D, of the spec's modes in their order, in C order or laid out as c is.
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
            raise BadRequest("a", f"{self.a.layout}, empty along {lost[0]}", "an element at least, for MAX and MIN")
