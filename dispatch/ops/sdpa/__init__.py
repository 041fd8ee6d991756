"""Scaled dot product attention and its gradient: `sdpa_fwd` and `sdpa_bwd`, fused by cuDNN.

`SdpaFwdRequest` and `SdpaBwdRequest` are the requests; `cudnn_sdpa` and `numpy_sdpa` carry them out, `reference` says
what is right, `cases` what is tested. The files: base and request (what may be asked), packed (sequences without
padding), graph, cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.sdpa.packed import ragged_offsets
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest, SdpaFwdRequest, SdpaRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "Diagonal",
    "SdpaBwdRequest",
    "SdpaFwdRequest",
    "cudnn_sdpa",
    "numpy_sdpa",
    "ragged_offsets",
    "sdpa_bwd",
    "sdpa_fwd",
]


# fmt: off
def sdpa_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, seq_len_q: Tensor | None = None,
    seq_len_kv: Tensor | None = None, out: Tensor | None = None, stats_out: Tensor | None = None,
    mask_out: Tensor | None = None, scale: float | None = None, left_bound: int | None = None,
    right_bound: int | None = None, diagonal: Diagonal = Diagonal.TOP_LEFT, dropout: float = 0.0,
    seed: Tensor | None = None, offset: Tensor | None = None, page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None, ragged_q: Tensor | None = None, ragged_k: Tensor | None = None,
    ragged_v: Tensor | None = None, ragged_o: Tensor | None = None, max_q: int | None = None,
    max_kv: int | None = None, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    descale_v: Tensor | None = None, descale_s: Tensor | None = None, scale_s: Tensor | None = None,
    scale_o: Tensor | None = None, amax_s: Tensor | None = None, amax_o: Tensor | None = None, stats: bool = False,
    mask: bool = False, amax: bool = False, workspace: int | None = None, autotune: bool = False,
) -> Any:
    """O = softmax(mask(scale · Q · Kᵀ + bias)) · V on the current stream; returns without waiting.

    q is (B, Hq, Sq, D), k (B, Hk, Skv, D), v (B, Hv, Skv, Dv), O (B, Hq, Sq, Dv); the arguments are the fields of
    `SdpaFwdRequest`, which documents them. right_bound=0 is causal, left_bound a sliding window; ragged_… and max_… are
    for packed sequences, (tokens, heads, head). Returns O, or with
    stats, mask or amax True also what they name, in this order. Follows cuDNN's scaled dot product attention. Raises
    BadRequest for operands that do not fit, NoRow where no library takes the request.
    """
    return run(SdpaFwdRequest(
        q, k, v, bias, seq_len_q, seq_len_kv, out, stats_out, mask_out, scale, left_bound, right_bound, diagonal,
        dropout, seed, offset, page_table_k, page_table_v, descale_q, descale_k, descale_v, descale_s, scale_s,
        scale_o, amax_s, amax_o, ragged_q, ragged_k, ragged_v, ragged_o, max_q, max_kv, stats, mask, amax, workspace,
        autotune,
    ))


def sdpa_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, stats: Tensor, *, bias: Tensor | None = None,
    seq_len_q: Tensor | None = None, seq_len_kv: Tensor | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, dbias: Tensor | None = None, scale: float | None = None,
    left_bound: int | None = None, right_bound: int | None = None, diagonal: Diagonal = Diagonal.TOP_LEFT,
    dropout: float = 0.0, seed: Tensor | None = None, offset: Tensor | None = None, ragged_q: Tensor | None = None,
    ragged_k: Tensor | None = None, ragged_v: Tensor | None = None, ragged_o: Tensor | None = None,
    max_q: int | None = None, max_kv: int | None = None, bias_gradient: bool = False,
    deterministic: bool = False, workspace: int | None = None, autotune: bool = False,
) -> tuple[Tensor, ...]:
    """(dQ, dK, dV), and with bias_gradient=True dbias, of `sdpa_fwd`; `stats` is what it gave back.

    The arguments are the fields of `SdpaBwdRequest`. Raises as `sdpa_fwd` does.
    """
    result: tuple[Tensor, ...] = run(SdpaBwdRequest(
        q, k, v, o, do, stats, bias, seq_len_q, seq_len_kv, dq, dk, dv, dbias, scale, left_bound, right_bound, diagonal,
        dropout, seed, offset, ragged_q, ragged_k, ragged_v, ragged_o, max_q, max_kv, bias_gradient, deterministic,
        workspace, autotune,
    ))
    return result
# fmt: on


def cudnn_sdpa(request: SdpaRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.sdpa import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_sdpa(request: SdpaRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in f32."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.sdpa.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
