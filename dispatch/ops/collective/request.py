"""The base classes of collective requests, and the requests in which all ranks have the same role.

The ranks are those of `comm`, and each makes the same calls in the same order. Operands are dense in C order, because
libraries count elements and support no strides. Terms and semantics are NCCL's:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.checks import check_int
from dispatch.core.communicator import Communicator, Ranks, communicator_of
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import Choice, member

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "AllGatherRequest",
    "AllReduceRequest",
    "AllToAllRequest",
    "BroadcastRequest",
    "CollectiveRequest",
    "RanksRequest",
    "RedOp",
    "ReduceScatterRequest",
    "ReducingRequest",
    "Shape",
    "check_counts",
    "check_rows",
]

Shape = tuple[int, ...]
Counts = tuple[int, ...]


class RedOp(Choice):
    """The reduction, with the numbers of `ncclRedOp_t`; a PREMUL_SUM op is created for each call."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4
    PREMUL_SUM = 5


@dataclass(frozen=True, eq=False)
class RanksRequest(OperandRequest[R_co]):
    """A call that all ranks of a communicator make, or two of them.

    Attributes:
        comm: the ranks: a World, or a communicator of one. A request uses the communicator that the world has when the
            request is made, and fails once this communicator has failed or was replaced.
        library: "nccl", which on the host selects its equivalent there; None for any.
    """

    reads: ClassVar[tuple[str, ...]] = ("x",)

    _: KW_ONLY
    comm: Ranks
    library: str | None = None

    def check_fields(self) -> None:
        object.__setattr__(self, "comm", communicator_of(self.comm))
        self.ranks.check()
        home = self.ranks.device
        if self.device is not home:
            raise BadRequest("comm", f"{self.ranks!r}", f"one on {self.device!r}", "the operands are on this device")
        self.check_part()

    def check_part(self) -> None:
        """Raise BadRequest if this rank's fields do not fit the call."""

    @property
    def ranks(self) -> Communicator:
        """The communicator."""
        return communicator_of(self.comm)

    def check_rank(self, name: str) -> None:
        """BadRequest unless a field is the number of a rank."""
        check_int(name, getattr(self, name), 0, self.ranks.size - 1)


@dataclass(frozen=True, eq=False)
class CollectiveRequest(RanksRequest["Tensor"]):
    """A call that all ranks of a communicator make.

    Attributes:
        out: the result, dense in C order.
    """

    _: KW_ONLY
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReducingRequest(CollectiveRequest):
    """A call that reduces the operands of all ranks element by element.

    Attributes:
        reduce: SUM, PROD, MAX, MIN, AVG, or PREMUL_SUM: the sum of the operands, each multiplied by its rank's factor.
            Sums and products of integers wrap around in their dtype. AVG divides such a sum, as NCCL does, and
            truncates towards 0: the mean of u8 200 on three ranks is 29.
        factor: this rank's factor of PREMUL_SUM; an integer if x has integers.
        device_factor: the factor in device memory, of one element and x's dtype; it is read while the call runs.
    """

    reads: ClassVar[tuple[str, ...]] = ("x", "device_factor")

    _: KW_ONLY
    reduce: RedOp | str = RedOp.SUM
    factor: float = 1.0
    device_factor: Tensor | None = None

    def check_part(self) -> None:
        x: Tensor = getattr(self, "x")  # noqa: B009  # a field of every derived class
        if self.device_factor is None and self.factor == 1.0:
            return
        if self.red_op is not RedOp.PREMUL_SUM:
            raise BadRequest("factor", "one", "none", 'only reduce="premul_sum" has a factor')
        if self.device_factor is not None:
            if self.factor != 1.0:
                raise BadRequest("factor", f"{self.factor!r} and device_factor", "one of the two")
            if self.device_factor.size != 1:
                raise BadRequest("device_factor", str(self.device_factor.layout), "one element")
        elif x.dtype.numpy.kind in "iu":
            limits = np.iinfo(x.dtype.numpy)
            if self.factor != int(self.factor) or not limits.min <= self.factor <= limits.max:
                expected = f"a whole number from {limits.min} to {limits.max}, because x is {x.dtype}"
                raise BadRequest("factor", repr(self.factor), expected)

    @property
    def red_op(self) -> RedOp:
        """The reduction as a member of RedOp."""
        return member(self.reduce)


@dataclass(frozen=True, eq=False)
class AllReduceRequest(ReducingRequest):
    """Reduce the operands of all ranks element by element; all ranks get the result.

    Attributes:
        x: this rank's operand, of the same shape and dtype on all ranks.
        out: the result, of x's shape and dtype; it may be x itself.
    """

    op: ClassVar[str] = "all_reduce"
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class BroadcastRequest(CollectiveRequest):
    """Send one rank's operand to all ranks.

    Attributes:
        x: of the same shape and dtype on all ranks; only the root's is read.
        root: the rank whose x is sent.
        out: the result, of x's shape and dtype; it may be x itself.
    """

    op: ClassVar[str] = "broadcast"
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    _: KW_ONLY
    root: int = 0

    def check_part(self) -> None:
        self.check_rank("root")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class AllGatherRequest(CollectiveRequest):
    """Send the operand of each rank to all ranks; the result has them in rank order.

    Attributes:
        x: this rank's operand, of the same shape and dtype on all ranks; with counts, the number of rows may differ.
        counts: the number of rows of each rank, the same tuple on all ranks; None if all have the same shape.
        out: the result, (ranks, *x.shape), or with counts the rows of all ranks, concatenated. x may be this rank's
            part of it.
    """

    op: ClassVar[str] = "all_gather"

    x: Tensor
    _: KW_ONLY
    counts: tuple[int, ...] | None = None

    def check_part(self) -> None:
        if self.counts is not None:
            check_counts("counts", self.counts, self.ranks.size)
            check_rows("x", self.x, self.counts[self.ranks.rank])

    def outputs(self) -> dict[str, Output]:
        return {"out": gathered_output(self.x.shape, self.x.dtype, self.counts, self.ranks.size)}

    def _check_written(self, name: str, tensor: Tensor) -> None:
        if not _is_part(self.x, tensor, self.counts, self.ranks.rank):
            super()._check_written(name, tensor)


@dataclass(frozen=True, eq=False)
class ReduceScatterRequest(ReducingRequest):
    """Reduce the operands of all ranks element by element; each rank gets a part of the result.

    Attributes:
        x: (ranks, …), of the same shape and dtype on all ranks; with counts (rows, …).
        counts: the number of rows that each rank gets, the same tuple on all ranks; None if all parts have the same
            shape.
        out: this rank's part, of x's shape without the first axis, or with counts this rank's rows. It may be this
            rank's part of x.
    """

    op: ClassVar[str] = "reduce_scatter"

    x: Tensor
    _: KW_ONLY
    counts: tuple[int, ...] | None = None

    def check_part(self) -> None:
        super().check_part()
        check_split("x", self.x, self.counts, self.ranks.size)

    def outputs(self) -> dict[str, Output]:
        return {"out": rank_output(self.x.shape, self.x.dtype, self.counts, self.ranks.rank)}

    def _check_written(self, name: str, tensor: Tensor) -> None:
        if not _is_part(tensor, self.x, self.counts, self.ranks.rank):
            super()._check_written(name, tensor)


@dataclass(frozen=True, eq=False)
class AllToAllRequest(CollectiveRequest):
    """Send a part of the operand to each rank, and receive a part from each, in rank order.

    Attributes:
        x: (ranks, …), of the same shape and dtype on all ranks; with counts (rows, …), the rows for rank 0 first.
        send_counts: the number of rows for each rank; None if all parts have the same shape.
        recv_counts: the number of rows from each rank; it must equal that rank's send_counts for this rank.
        out: the result, of x's shape; with counts the rows from all ranks, concatenated in rank order.
    """

    op: ClassVar[str] = "all_to_all"

    x: Tensor
    _: KW_ONLY
    send_counts: tuple[int, ...] | None = None
    recv_counts: tuple[int, ...] | None = None

    def check_part(self) -> None:
        if (self.send_counts is None) != (self.recv_counts is None):
            raise BadRequest("recv_counts", f"{self.recv_counts}", "both counts, or neither")
        check_split("x", self.x, self.send_counts, self.ranks.size, "send_counts")
        if self.recv_counts is not None and self.send_counts is not None:
            check_counts("recv_counts", self.recv_counts, self.ranks.size)
            rank = self.ranks.rank
            if self.recv_counts[rank] != self.send_counts[rank]:
                actual = f"{self.recv_counts[rank]} from this rank itself"
                raise BadRequest("recv_counts", actual, f"{self.send_counts[rank]}, the number in send_counts")

    def outputs(self) -> dict[str, Output]:
        if self.recv_counts is None:
            return {"out": dense(self.x.shape, self.x.dtype)}
        return {"out": dense((sum(self.recv_counts), *self.x.shape[1:]), self.x.dtype)}


# -- shapes and checks ------------------------------------------------------------------------------------------------
def check_counts(name: str, counts: Any, size: int) -> None:
    """BadRequest unless `counts` is a tuple with a number of rows for each rank."""
    if not isinstance(counts, tuple) or len(counts) != size:
        raise BadRequest(name, repr(counts), f"a number of rows for each of {size} ranks")
    for count in counts:
        check_int(name, count, 0)


def check_split(name: str, tensor: Tensor, counts: Counts | None, size: int, counts_name: str = "counts") -> None:
    """BadRequest unless a tensor can be split into a part for each rank."""
    if counts is not None:
        check_counts(counts_name, counts, size)
        check_rows(name, tensor, sum(counts))
    elif tensor.ndim < 1 or tensor.shape[0] != size:
        hint = "x.reshape(ranks, -1) if the number of ranks divides the rows; pass counts for parts of different sizes"
        raise BadRequest(name, str(tensor.layout), f"a first axis of extent {size}, the number of ranks", hint)


def check_rows(name: str, tensor: Tensor, rows: int) -> None:
    """BadRequest unless a tensor has `rows` rows."""
    if tensor.ndim < 1 or tensor.shape[0] != rows:
        raise BadRequest(name, str(tensor.layout), f"{rows} rows, the sum of the counts")


def gathered_output(shape: Shape, dtype: Dtype, counts: Counts | None, size: int) -> Output:
    """The output with the parts of all ranks: parts of the same shape, or with counts the rows of each rank."""
    return dense((size, *shape) if counts is None else (sum(counts), *shape[1:]), dtype)


def rank_output(shape: Shape, dtype: Dtype, counts: Counts | None, rank: int) -> Output:
    """The output that is a rank's part of an array with a part for each rank."""
    return dense(shape[1:] if counts is None else (counts[rank], *shape[1:]), dtype)


def _is_part(part: Tensor, whole: Tensor, counts: Counts | None, rank: int) -> bool:
    """Whether one tensor is a rank's part of the other in the same memory, which libraries treat as in-place."""
    if part.storage is not whole.storage or part.layout.readonly or whole.layout.readonly or whole.ndim < 1:
        return False
    if not (part.layout.is_contiguous and whole.layout.is_contiguous):
        return False
    rows = rank if counts is None else sum(counts[:rank])
    row = whole.nbytes // max(whole.shape[0], 1)
    return part.ptr == whole.ptr + rows * row
