"""Requests in which one rank has a different role (reduce, gather, scatter), and requests between two ranks.

On a rank that gets nothing the result is None. `send` and `recv` that wait for one another must be in one
`collective_group()`, or be one `sendrecv`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import U8
from dispatch.ops.collective.request import (
    CollectiveRequest,
    RanksRequest,
    ReducingRequest,
    check_counts,
    check_rows,
    check_split,
    gathered_output,
    rank_output,
)

if TYPE_CHECKING:
    from dispatch.core.request import Operands
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "BarrierRequest",
    "GatherToRequest",
    "RecvRequest",
    "ReduceToRequest",
    "ScatterFromRequest",
    "SendRecvRequest",
    "SendRequest",
]


class PartialResultRequest(CollectiveRequest):
    """A call after which only some of the ranks have a result."""

    @property
    def device(self) -> Device:
        return self.ranks.device

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        tensor: Tensor = getattr(self, self.reads[0] if self.reads else "out")
        return tensor.dtype, tensor.dtype

    def result(self, outputs: Operands) -> Any:
        return super().result(outputs) if self._outputs else None


class NoResultRequest(RanksRequest["None"]):
    """A call without a result."""

    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def device(self) -> Device:
        return self.ranks.device

    def outputs(self) -> dict[str, Output]:
        return {}

    def result(self, outputs: Operands) -> None:
        return None


@dataclass(frozen=True, eq=False)
class ReduceToRequest(ReducingRequest):
    """Reduce the operands of all ranks element by element; the root gets the result, the others None.

    Attributes:
        x: this rank's operand, of the same shape and dtype on all ranks.
        root: the rank that gets the result.
        out: the result, of x's shape and dtype, on the root only; it may be x itself.
    """

    op: ClassVar[str] = "reduce_to"
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    _: KW_ONLY
    root: int = 0

    def check_part(self) -> None:
        super().check_part()
        self.check_rank("root")

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.x.dtype, self.x.dtype

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)} if self.ranks.rank == self.root else {}

    def result(self, outputs: Operands) -> Any:
        return super().result(outputs) if self._outputs else None


@dataclass(frozen=True, eq=False)
class GatherToRequest(PartialResultRequest):
    """Send the operand of each rank to the root, which gets them in rank order; the others get None.

    Attributes:
        x: this rank's operand, of the same shape and dtype on all ranks; with counts, the number of rows may differ.
        root: the rank that gets the result.
        counts: the number of rows of each rank, the same tuple on all ranks; None if all have the same shape.
        out: the result, on the root only: (ranks, *x.shape), or with counts the rows of all ranks, concatenated.
    """

    op: ClassVar[str] = "gather"

    x: Tensor
    _: KW_ONLY
    root: int = 0
    counts: tuple[int, ...] | None = None

    def check_part(self) -> None:
        self.check_rank("root")
        if self.counts is not None:
            check_counts("counts", self.counts, self.ranks.size)
            check_rows("x", self.x, self.counts[self.ranks.rank])

    def outputs(self) -> dict[str, Output]:
        is_root = self.ranks.rank == self.root
        return {"out": gathered_output(self.x.shape, self.x.dtype, self.counts, self.ranks.size)} if is_root else {}


@dataclass(frozen=True, eq=False)
class ScatterFromRequest(PartialResultRequest):
    """Send each rank its part of the root's operand.

    Attributes:
        x: on the root, (ranks, …), or (rows, …) with counts; None on the others.
        root: the rank that has x.
        counts: the number of rows that each rank gets, the same tuple on all ranks; None if all parts have the same
            shape.
        out: this rank's part. Only the root may omit it, because the other ranks cannot know its shape.
    """

    op: ClassVar[str] = "scatter"

    x: Tensor | None = None
    _: KW_ONLY
    root: int = 0
    counts: tuple[int, ...] | None = None

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        tensor: Any = self.x if self.x is not None else self.out
        return tensor.dtype, tensor.dtype

    def check_part(self) -> None:
        self.check_rank("root")
        rank = self.ranks.rank
        if (self.x is not None) != (rank == self.root):
            actual = "none" if self.x is None else str(self.x.layout)
            raise BadRequest("x", actual, f"None, except on rank {self.root}, the root; this is rank {rank}")
        if self.x is not None:
            check_split("x", self.x, self.counts, self.ranks.size)
            return
        if self.out is None:
            raise BadRequest("out", "none", "a tensor for this rank's part", "only the root knows its shape")
        if self.counts is not None:
            check_counts("counts", self.counts, self.ranks.size)
            check_rows("out", self.out, self.counts[rank])

    def outputs(self) -> dict[str, Output]:
        if self.x is not None:
            return {"out": rank_output(self.x.shape, self.x.dtype, self.counts, self.ranks.rank)}
        out: Any = self.out
        return {"out": dense(out.shape, out.dtype)}


@dataclass(frozen=True, eq=False)
class SendRequest(NoResultRequest):
    """Send a tensor to another rank, which calls `recv`; returns None.

    Attributes:
        x: the tensor, of the shape and dtype that the other rank expects.
        peer: the other rank.
    """

    op: ClassVar[str] = "send"

    x: Tensor
    _: KW_ONLY
    peer: int

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.x.dtype, self.x.dtype

    def check_part(self) -> None:
        self.check_rank("peer")


@dataclass(frozen=True, eq=False)
class RecvRequest(PartialResultRequest):
    """Receive a tensor that another rank sends by `send`.

    Attributes:
        out: the tensor that receives it, of the shape and dtype that the other rank sends.
        peer: the other rank.
    """

    op: ClassVar[str] = "recv"
    reads: ClassVar[tuple[str, ...]] = ()

    out: Tensor
    _: KW_ONLY
    peer: int

    def check_part(self) -> None:
        output: Any = self.out
        if output is None:
            raise BadRequest("out", "none", "a tensor of the shape and dtype that the other rank sends")
        self.check_rank("peer")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.out.shape, self.out.dtype)}


@dataclass(frozen=True, eq=False)
class SendRecvRequest(PartialResultRequest):
    """Send a tensor to one rank and receive a tensor from another (or the same) rank, at the same time.

    Attributes:
        x: the tensor to send.
        dest, source: the rank that gets x, and the rank whose x is received; either may be this rank.
        out: the tensor that receives, of the shape and dtype that the source sends; by default like x.
    """

    op: ClassVar[str] = "sendrecv"

    x: Tensor
    _: KW_ONLY
    dest: int
    source: int

    def check_part(self) -> None:
        self.check_rank("dest")
        self.check_rank("source")

    def outputs(self) -> dict[str, Output]:
        like = self.x if self.out is None else self.out
        return {"out": dense(like.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class BarrierRequest(NoResultRequest):
    """Wait until all ranks have made this call: on the host the thread waits, on a GPU its stream. Returns None."""

    op: ClassVar[str] = "barrier"
    reads: ClassVar[tuple[str, ...]] = ()

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return U8, U8
