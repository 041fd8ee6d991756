"""Products whose rows or columns lie on several ranks of one machine, with what goes between them copied beside.

What shards.py has NCCL's kernels move, copy engines move here (peers.py), in chunks of rows. Sums need no kernels
either: a rank's product adds what the rank before it has of the same rows, and hands that on, as in a ring's
reduce-scatter; each addition is the product's own epilogue, and is rounded to the dtype of A as NCCL's steps are.

What another rank reads where it comes is put there, which spares it a copy; into a result, which the others do not
reach, each rank pulls its parts itself.
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

    In step s a rank multiplies the rows of the one that is s + 1 before it, adds what the rank before it has put here,
    and puts the sum into the next one's memory; in the last step they are its own.
    """
    size, own, n, here, stream = peers.size, x.shape[0] // peers.size, w.shape[1], beside.here, beside.stream
    before, behind, each = (peers.rank - 1) % size, (peers.rank + 1) % size, _nbytes((own, n), x)
    sent = beside.device.empty((size - 1, own, n), x.dtype)
    peers.begin(stream, beside)
    for step in range(size):
        first, is_last = own * ((peers.rank - 1 - step) % size), step == size - 1
        for number, rows in enumerate(chunks):
            operand = x[first + rows.start : first + rows.stop]
            begin, slot = _nbytes((rows.start, n), x), step * len(chunks) + number
            out = outs[number] if is_last else sent[step, rows]
            if step == 0:
                matmul(operand, w, compute=compute, out=out)
            else:
                part = peers.tensor((step - 1) * each + begin, (rows.stop - rows.start, n), x.dtype)
                peers.wait(before, slot - len(chunks), here)
                matmul(operand, w, c=part, compute=compute, out=out)
            if not is_last:
                stream.wait_for(here)
                peers.put(behind, step * each + begin, out.ptr, out.nbytes, stream)
                peers.signal((behind,), slot, stream)
            elif told:
                peers.signal(told, slot, here)


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
    size, own, n, here, stream = peers.size, x.shape[0] // peers.size, w.shape[1], beside.here, beside.stream
    out, chunks = beside.device.empty((x.shape[0], n), x.dtype), _chunks(peers, own, count)
    starts = [_nbytes(((size - 1) * own + rows.start, n), x) for rows in chunks]
    sums = [peers.tensor(at, (rows.stop - rows.start, n), x.dtype) for at, rows in zip(starts, chunks, strict=True)]
    with _Part(beside, peers, "matmul_all_reduce"):
        _reduced(beside, peers, x, w, chunks, compute, sums, peers.others)
        for number, rows in enumerate(chunks):
            for rank in peers.others:
                target = out[rank * own + rows.start : rank * own + rows.stop]
                peers.wait(rank, (size - 1) * len(chunks) + number, stream)
                peers.pull(target.ptr, rank, starts[number], target.nbytes, stream)
        mine = out[peers.rank * own : (peers.rank + 1) * own]
        peers.pull(mine.ptr, peers.rank, starts[0], mine.nbytes, here)
    return out


def all_gather_matmul(
    beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, choices: dict[str, Any], count: int
) -> Tensor:
    """All ranks' rows by this rank's columns, its own rows first; its data is what the others put there, their rows."""
    size, own, here, stream = peers.size, x.shape[0], beside.here, beside.stream
    out = beside.device.empty((size * own, w.shape[1]), x.dtype)
    chunks = _chunks(peers, own, count)
    starts, each = [_nbytes((rows.start, x.shape[1]), x) for rows in chunks], _nbytes(x.shape, x)
    with _Part(beside, peers, "all_gather_matmul"):
        peers.begin(stream, beside)
        for number, rows in enumerate(chunks):
            part = x[rows]
            for place, rank in enumerate(reversed(peers.others)):  # where this one is among the others of that rank
                peers.put(rank, place * each + starts[number], part.ptr, part.nbytes, stream)
                peers.signal((rank,), number, stream)
        mine = out[peers.rank * own : (peers.rank + 1) * own]
        matmul(x, w, compute=compute, out=mine, **choices)
        for place, rank in enumerate(peers.others):
            for number, rows in enumerate(chunks):
                part = peers.tensor(place * each + starts[number], (rows.stop - rows.start, x.shape[1]), x.dtype)
                peers.wait(rank, number, here)
                target = out[rank * own + rows.start : rank * own + rows.stop]
                matmul(part, w, compute=compute, out=target, **choices)
    return out


def matmul_all_gather(beside: Beside, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The product by all ranks' columns; a rank's data is the product by its own."""
    size, (m, n), here, stream = peers.size, (x.shape[0], w.shape[1]), beside.here, beside.stream
    out, chunks = beside.device.empty((m, size * n), x.dtype), _chunks(peers, m, count)
    starts, width = [_nbytes((rows.start, n), x) for rows in chunks], _nbytes((n,), x)
    with _Part(beside, peers, "matmul_all_gather"):
        peers.begin(here, beside)
        for number, rows in enumerate(chunks):
            part = peers.tensor(starts[number], (rows.stop - rows.start, n), x.dtype)
            matmul(x[rows], w, compute=compute, out=part)
            peers.signal(peers.others, number, here)
        for number, rows in enumerate(chunks):
            for rank in peers.others:
                peers.wait(rank, number, stream)
                peers.pull_rows(out[rows, rank * n : (rank + 1) * n], rank, starts[number], width, stream)
        peers.pull_rows(out[:, peers.rank * n : (peers.rank + 1) * n], peers.rank, starts[0], width, here)
    return out
