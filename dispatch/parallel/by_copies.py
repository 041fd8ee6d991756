"""Products whose rows or columns lie on several ranks of one machine, with what goes between them copied beside.

What shards.py has NCCL's kernels move, copy engines move here (peers.py), in chunks of rows. Sums need no kernels
either: a rank's product adds what the rank before it has of the same rows, and hands that on, as in a ring's
reduce-scatter; each addition is the product's own epilogue, and is rounded to the dtype of A as NCCL's steps are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.errors import CollectiveError
from dispatch.ops.matmul import matmul
from dispatch.parallel.chunks import cut
from dispatch.parallel.peers import MOST_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from dispatch.device.tensor import Tensor
    from dispatch.parallel.beside import Beside
    from dispatch.parallel.peers import Peers

__all__ = ["all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter"]


class _Part:
    """`with` this a rank takes part in a block of products and copies; one that raises ends the communicator."""

    def __init__(self, beside: Beside, peers: Peers, name: str) -> None:
        self.beside, self.peers, self.name = beside, peers, name

    def __enter__(self) -> None:
        beside = self.beside
        beside.comm.check()
        beside.stream.wait_for(beside.here)  # for who wrote the operands, and had the results' memory
        beside.device.context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        comm: Any = self.beside.comm
        try:
            if error is None:
                self.peers.finish(self.beside)
        finally:
            comm.device.context.__exit__(None, None, None)
        if error is not None:  # the others would wait for what does not come
            comm.fail(CollectiveError(f"{comm!r}: {self.name} was left by {type(error).__name__}: {error}"))
        elif not self.beside.captured:
            comm.note(self.beside.stream.c_handle, self.name)


def _chunks(peers: Peers, rows: int, count: int) -> list[slice]:
    """Rows in so many chunks, or in as many as there are words for."""
    return cut(rows, min(count, MOST_SLOTS // peers.size))


def _nbytes(shape: tuple[int, ...], tensor: Tensor) -> int:
    """Of a dense array of a tensor's dtype."""
    return math.prod(shape) * tensor.dtype.itemsize


def _reduced(
    beside: Beside,
    peers: Peers,
    x: Tensor,
    w: Tensor,
    chunks: list[slice],
    compute: Any,
    outs: list[Tensor],
    told: Sequence[int] = (),
) -> None:
    """The sums of this rank's rows, each chunk into one of `outs`, on the caller's stream; some ranks are told of each.

    In step s a rank multiplies the rows of the one that is s + 1 before it, adds what the rank before it has of them,
    and hands the sum on; in the last step they are its own.
    """
    size, own, n, here = peers.size, x.shape[0] // peers.size, w.shape[1], beside.here
    before, behind, each = (peers.rank - 1) % size, (peers.rank + 1) % size, _nbytes((own, n), x)
    came = beside.device.empty((size - 1, own, n), x.dtype)
    peers.begin(here, beside)
    for step in range(size):
        first = own * ((peers.rank - 1 - step) % size)
        for number, rows in enumerate(chunks):
            operand = x[first + rows.start : first + rows.stop]
            at, slot = step * each + _nbytes((rows.start, n), x), step * len(chunks) + number
            out = outs[number] if step == size - 1 else peers.tensor(at, (rows.stop - rows.start, n), x.dtype)
            if step == 0:
                matmul(operand, w, compute=compute, out=out)
            else:
                part = came[step - 1, rows]
                peers.wait(before, slot - len(chunks), beside.stream)
                peers.pull(part.ptr, before, at - each, part.nbytes, beside.stream)
                here.wait_for(beside.stream)
                matmul(operand, w, c=part, compute=compute, out=out)
            if ranks := (behind,) if step < size - 1 else told:
                peers.signal(ranks, slot, here)


def matmul_reduce_scatter(beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """This rank's rows of the sum of all ranks' products; its data is (ranks - 1) / ranks of a product."""
    own = x.shape[0] // peers.size
    out = beside.device.empty((own, w.shape[1]), x.dtype)
    chunks = _chunks(peers, own, count)
    with _Part(beside, peers, "matmul_reduce_scatter"):
        _reduced(beside, peers, x, w, chunks, compute, [out[rows] for rows in chunks])
    return out


def matmul_all_reduce(beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The sum of all ranks' products: each sums up its own rows, and all copy them; its data is a whole product."""
    size, own, n = peers.size, x.shape[0] // peers.size, w.shape[1]
    out, chunks = beside.device.empty((x.shape[0], n), x.dtype), _chunks(peers, own, count)
    starts = [_nbytes(((size - 1) * own + rows.start, n), x) for rows in chunks]
    sums = [peers.tensor(at, (rows.stop - rows.start, n), x.dtype) for at, rows in zip(starts, chunks, strict=True)]
    with _Part(beside, peers, "matmul_all_reduce"):
        _reduced(beside, peers, x, w, chunks, compute, sums, range(size))
        for number, rows in enumerate(chunks):
            for rank in (peers.rank, *peers.others):
                target = out[rank * own + rows.start : rank * own + rows.stop]
                peers.wait(rank, (size - 1) * len(chunks) + number, beside.stream)
                peers.pull(target.ptr, rank, starts[number], target.nbytes, beside.stream)
    return out


def all_gather_matmul(
    beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, choices: dict[str, Any], count: int
) -> Tensor:
    """All ranks' rows by this rank's columns, its own rows first; its data is its rows of A."""
    size, own, here, stream = peers.size, x.shape[0], beside.here, beside.stream
    out = beside.device.empty((size * own, w.shape[1]), x.dtype)
    gathered = beside.device.empty((size - 1, *x.shape), x.dtype)
    chunks = _chunks(peers, own, count)
    starts = [_nbytes((rows.start, x.shape[1]), x) for rows in chunks]
    with _Part(beside, peers, "all_gather_matmul"):
        peers.begin(stream, beside)
        for number, rows in enumerate(chunks):
            peers.put(starts[number], x[rows].ptr, x[rows].nbytes, stream)
            peers.signal(peers.others, number, stream)
        mine = out[peers.rank * own : (peers.rank + 1) * own]
        matmul(x, w, compute=compute, out=mine, **choices)
        for place, rank in enumerate(peers.others):
            for number, rows in enumerate(chunks):
                part = gathered[place, rows]
                peers.wait(rank, number, stream)
                peers.pull(part.ptr, rank, starts[number], part.nbytes, stream)
                here.wait_for(stream)
                target = out[rank * own + rows.start : rank * own + rows.stop]
                matmul(part, w, compute=compute, out=target, **choices)
    return out


def matmul_all_gather(beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The product by all ranks' columns; a rank's data is the product by its own."""
    size, (m, n), here = peers.size, (x.shape[0], w.shape[1]), beside.here
    out, chunks = beside.device.empty((m, size * n), x.dtype), _chunks(peers, m, count)
    starts, width = [_nbytes((rows.start, n), x) for rows in chunks], _nbytes((n,), x)
    with _Part(beside, peers, "matmul_all_gather"):
        peers.begin(here, beside)
        for number, rows in enumerate(chunks):
            part = peers.tensor(starts[number], (rows.stop - rows.start, n), x.dtype)
            matmul(x[rows], w, compute=compute, out=part)
            peers.signal(range(size), number, here)
        for number, rows in enumerate(chunks):
            for rank in (peers.rank, *peers.others):
                peers.wait(rank, number, beside.stream)
                peers.pull_rows(out[rows, rank * n : (rank + 1) * n], rank, starts[number], width, beside.stream)
    return out
