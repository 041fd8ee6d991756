"""Attention over a sequence that is sharded over the ranks: blocks of K and V are passed around a ring.

Each rank has some rows of Q, K and V. While it attends to one block, it receives the next one from its neighbour. The
partial results are merged by their statistics, so the result is that of the whole sequence. Follows Ring Attention,
https://arxiv.org/abs/2310.01889. At any time a rank has two blocks in addition to its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool
from dispatch.errors import BadRequest
from dispatch.keys import F32
from dispatch.ops.attention_merge import attention_merge
from dispatch.ops.collective import collective_group, sendrecv
from dispatch.ops.sdpa import sdpa_fwd
from dispatch.parallel.side_stream import SideStream, check_operand

if TYPE_CHECKING:
    from dispatch.core.communicator import Ranks
    from dispatch.device.tensor import Tensor

__all__ = ["ring_attention"]

AXES = 4


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, comm: Ranks, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale · Q · Kᵀ) · V over the keys of all ranks, for this rank's queries.

    Args:
        q: (batch, heads, rows of this rank, width), f16 or bf16, as in `sdpa_fwd`.
        k, v: (batch, heads of K and of V, rows of this rank, width), dense, because they are sent; the same shape on
            all ranks.
        comm: the ranks. Rank 0 has the first rows of the sequence, and so on.
        causal: a query attends to the keys up to its own position. Q and K must then have the same number of rows. The
            last rank has the most work: it attends to all blocks, the first rank only to its own.
        scale: the factor of the scores; None for 1/√width.

    Returns O, of q's dtype, and the statistics, f32 (batch, heads, rows, 1): the logarithm of each row's sum. There
    is no backward pass.
    """
    check_bool("causal", causal)
    side = SideStream(comm)
    q, k, v = (check_operand(name, operand, side, AXES) for name, operand in (("q", q), ("k", k), ("v", v)))
    for name, tensor in (("k", k), ("v", v)):
        if not tensor.layout.is_contiguous:
            raise BadRequest(
                name, str(tensor.layout), "a dense tensor, because it is sent to other ranks", f"{name}.copy()"
            )
    if causal and q.shape[2] != k.shape[2]:
        raise BadRequest(
            "k", str(k.layout), f"{q.shape[2]} rows, as in q: causal attention needs as many keys as queries"
        )
    rank, size = side.comm.rank, side.comm.size
    block, spare, merged = (k, v), [_empty_block(side, k, v) for _ in range(min(2, size - 1))], None
    parts = [number for number in range(size) if not (causal and (rank - number) % size > rank)]
    for number in range(size):
        side.wait_for_reads(*block)  # after the transfer of this block, before the next one is enqueued
        onward = block if number == size - 1 else _pass_on(side, block, spare[number % 2])
        if number in parts:
            bounds: dict[str, Any] = {"right_bound": 0} if causal and number == 0 else {}
            partial_result: Any = sdpa_fwd(q, *block, scale=scale, stats=True, **bounds)
            merged = (
                partial_result
                if merged is None
                else _merge(merged, partial_result, q.dtype if number == parts[-1] else F32)
            )
        block = onward
    side.join()
    output: Any = merged
    return output[0], output[1]


def _empty_block(side: SideStream, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized memory for a block, allocated on the side stream."""
    with side.stream:
        return side.device.empty(k.shape, k.dtype), side.device.empty(v.shape, v.dtype)


def _pass_on(side: SideStream, block: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Send a block to the next rank and receive the previous rank's, on the side stream."""
    comm = side.comm
    to: Any = {"dest": (comm.rank + 1) % comm.size, "source": (comm.rank - 1) % comm.size}
    with side.stream, collective_group():
        for sent, received in zip(block, into, strict=True):
            sendrecv(sent, comm=comm, out=received, **to)
    return into


def _merge(found: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor], dtype: Any) -> tuple[Tensor, Tensor]:
    """Merge the attention to two sets of keys; in f32 until the last merge."""
    return attention_merge(*found, *made, out_dtype=dtype)
