"""Products of matrices whose rows or columns lie on several ranks, with the collective beside the product.

The product is cut into chunks of rows: while one is sent, the next is computed. Between the ranks of one machine copy
engines send where `by="copies"` says so (by_copies.py); else NCCL does. The two forms of a layer's matrix
are those of Megatron-LM, https://arxiv.org/abs/1909.08053 and, where rows are shared as well, /abs/2205.05198: sharded
by columns it needs nothing of the others but its operand's rows, sharded by rows its results are added up.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dispatch.checks import shown
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, F16, F32, F64, Epilogue
from dispatch.ops.collective import all_gather, all_reduce, reduce_scatter
from dispatch.ops.fft.roll import roll
from dispatch.ops.matmul import matmul
from dispatch.parallel import by_copies
from dispatch.parallel.beside import Beside, matrix
from dispatch.parallel.chunks import cut, in_chunks
from dispatch.parallel.peers import peers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.communicator import Ranks
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute

__all__ = ["all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter"]

# Whether copies go, and are measured beside NCCL, where `by` is not said. Of two H200 in bf16 they took 0.73 to 0.91 ms
# for products of 8192x8192x8192 in two processes, of 0.73 without the transfer, and NCCL 1.04 to 1.50.
MEASURED = True
COPIED = (F16, BF16, F32, F64)  # dtypes whose products add a C of the same, which sums between ranks are made of


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, whose inner axis is shared: each rank has some columns of A and the same rows of B. All get the result.

    Args:
        a: (m, k of this rank). The dtype is the result's: sums over ranks are rounded to it.
        b: (k of this rank, n).
        comm: the ranks, a World or a communicator. All have the same m and n.
        chunks: into how many the rows of A are cut, the same on all ranks; None to measure it the first time.
        compute: as in `matmul`.
        by: what moves the data: "nccl", as None does, or "copies", by the GPUs' copy engines within one machine.

    Gives (m, n) on every rank. BadRequest for shapes that do not fit; Refused for copies where they cannot be.
    """
    beside = Beside(comm)
    x, w = matrix(a, b, beside)

    def run(count: int) -> Tensor:
        with beside.stream:
            out = beside.device.empty((x.shape[0], w.shape[1]), x.dtype)
        kept = []
        for rows in cut(x.shape[0], count):
            part = matmul(x[rows], w, compute=compute, out_dtype=x.dtype)
            kept.append(part)  # its memory is not asked for again by the next chunk, which would wait
            with beside.stream:
                all_reduce(part, comm=beside.comm, out=out[rows])
        beside.join()
        return out

    m, n = x.shape[0], w.shape[1]
    key = _key("all_reduce", x, w, (m, n), compute, by)
    copied = _copied(by_copies.matmul_all_reduce, beside, by, 0 if m % beside.comm.size else m * n, x, w, compute)
    return in_chunks(_ways(by, copied, run), chunks, m, key, beside)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B as in `matmul_all_reduce`, of which each rank gets its share of the rows: (m / ranks, n).

    Args as there; m is a multiple of the number of ranks.
    """
    beside = Beside(comm)
    x, w = matrix(a, b, beside)
    size, n = beside.comm.size, w.shape[1]
    if x.shape[0] % size:
        raise BadRequest("a", str(x.layout), f"a multiple of {size} rows, for so many ranks share them")
    own = x.shape[0] // size
    of_ranks = x.strided((size, own, x.shape[1]), (own * x.element_strides[0], *x.element_strides))

    def run(count: int) -> Tensor:
        with beside.stream:
            out = beside.device.empty((own, n), x.dtype)
        kept = []
        for rows in cut(own, count):
            part = matmul(of_ranks[:, rows], w, compute=compute, out_dtype=x.dtype)  # these rows of every rank
            kept.append(part)
            with beside.stream:
                reduce_scatter(part, comm=beside.comm, out=out[rows])
        beside.join()
        return out

    key = _key("reduce_scatter", x, w, (x.shape[0], n), compute, by)
    copied = _copied(by_copies.matmul_reduce_scatter, beside, by, (x.shape[0] - own) * n, x, w, compute)
    return in_chunks(_ways(by, copied, run), chunks, own, key, beside)


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    bias: Tensor | None = None,
    epilogue: Epilogue | str = Epilogue.NONE,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, where each rank has some rows of A and some columns of B, and gets all rows of its columns.

    Args:
        a: (m / ranks, k), the same on all ranks; dense, for it is sent.
        b: (k, n of this rank).
        comm: the ranks, a World or a communicator.
        bias: (n of this rank,), with an epilogue that has one.
        epilogue: what `matmul` does to each element: RELU, GELU, BIAS and those with both.
        chunks, compute, by: as in `matmul_all_reduce`.

    Gives (m, n of this rank), rows of rank 0 first. BadRequest for shapes that do not fit.
    """
    beside = Beside(comm)
    x, w = matrix(a, b, beside)
    own, n, size = x.shape[0], w.shape[1], beside.comm.size
    choices: dict[str, Any] = {"epilogue": epilogue, **({} if bias is None else {"bias": bias})}
    if not x.layout.is_contiguous:
        raise BadRequest("a", str(x.layout), "elements that are dense in C order, for they are sent", "a.copy()")

    def run(count: int) -> Tensor:
        out = beside.device.empty((size * own, n), x.dtype)
        of_ranks = out.reshape(size, own, n)
        kept = []
        with beside.stream:
            beside.stream.wait_for(beside.here)  # for who wrote A
        for rows in cut(own, count):
            with beside.stream:
                part = all_gather(x[rows], comm=beside.comm)  # these rows of every rank
            kept.append(part)
            beside.read_here(part)  # behind this chunk's transfer, before the next one is enqueued
            matmul(part, w, compute=compute, out=of_ranks[:, rows], **choices)
        beside.join()
        return out

    key = (*_key("all_gather", x, w, x.shape, compute, by), str(epilogue))
    copied = _copied(by_copies.all_gather_matmul, beside, by, x.size * (beside.comm.size - 1), x, w, compute, choices)
    return in_chunks(_ways(by, copied, run), chunks, own, key, beside)


def matmul_all_gather(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, where each rank has some columns of B, and gets those of all: (m, n of this rank · ranks).

    Args:
        a: (m, k), the same on all ranks.
        b: (k, n of this rank), as many columns on all ranks.
        comm, chunks, compute, by: as in `matmul_all_reduce`.

    What comes from a rank is a block of its columns, which a kernel puts into the rows of the result.
    """
    beside = Beside(comm)
    x, w = matrix(a, b, beside)
    m, n, size = x.shape[0], w.shape[1], beside.comm.size

    def run(count: int) -> Tensor:
        out = beside.device.empty((m, size * n), x.dtype)
        by_rank = out.reshape(m, size, n).transpose(1, 0, 2)
        kept: list[Tensor] = []
        before: tuple[Tensor, slice] | None = None
        for rows in cut(m, count):
            part = matmul(x[rows], w, compute=compute, out_dtype=x.dtype)
            if before is not None:  # behind this product, which does not wait, and ahead of the next transfer
                beside.read_here(before[0])
            with beside.stream:
                whole = all_gather(part, comm=beside.comm)
            if before is not None:
                _place(beside, *before, by_rank)
            kept += [part, whole]
            before = (whole, rows)
        if before is not None:
            _place(beside, *before, by_rank)
        beside.join()
        return out

    key = _key("columns", x, w, (*x.shape, n), compute, by)
    copied = _copied(by_copies.matmul_all_gather, beside, by, m * n, x, w, compute)
    return in_chunks(_ways(by, copied, run), chunks, m, key, beside)


def _place(beside: Beside, whole: Tensor, rows: slice, by_rank: Tensor) -> None:
    """Put a chunk's columns, rank by rank, into the rows of the result."""
    beside.read_here(whole)
    if whole.size:
        roll(whole, 0, 0, out=by_rank[:, rows])


def _copied(
    block: Callable[..., Tensor], beside: Beside, by: str | None, elements: int, a: Tensor, *rest: Any
) -> Callable[[int], Tensor] | None:
    """A block by copies of so many elements of each rank, but for the number of chunks; None where NCCL moves them."""
    if by not in (None, "nccl", "copies"):
        raise BadRequest("by", shown(by), '"nccl", "copies", or None')
    found = None
    if by == "copies" or (by is None and MEASURED):
        found = peers_of(beside, elements * a.dtype.itemsize) if a.dtype in COPIED else None
    if by == "copies" and found is None:
        where = "between GPUs of one machine, of a process each, over as many rows as the ranks divide"
        here = f"here are {a.layout} and {beside.comm!r}"
        raise Refused(f'by="copies" is {where}, of {" ".join(map(str, COPIED))}; {here}')
    return None if found is None else partial(block, beside, found, a, *rest)


def _ways(
    by: str | None, copied: Callable[[int], Tensor] | None, run: Callable[[int], Tensor]
) -> list[Callable[[int], Tensor]]:
    """The ways that a block may go, the first one first."""
    if copied is None:
        return [run]
    return [copied] if by == "copies" else [copied, run]


def _key(kind: str, a: Tensor, b: Tensor, extents: tuple[int, ...], compute: Any, by: str | None) -> tuple[Any, ...]:
    """What a measured number of chunks holds for: extents that all ranks share, for all are to measure at once."""
    return kind, extents, a.dtype.name, b.dtype.name, str(compute), by
