"""Building blocks for training and serving a model on several ranks: requests of several op families on two streams.

The files: side_stream (the stream of a communicator's collectives, and checks of operands), chunks (how many chunks a
product is cut into), shards (products of sharded matrices), buckets (gradients of data parallelism), ring (attention
over sharded sequences), experts (products by experts that are on other ranks), pipeline (stages of a model). Each
function works on the host and on GPUs, with tensors of this library; the host waits only where the documentation of a
function says so.
"""

from __future__ import annotations

from dispatch.parallel.buckets import GradientBuckets
from dispatch.parallel.experts import ExpertExchange, expert_matmul
from dispatch.parallel.pipeline import Step, one_forward_one_backward, schedule
from dispatch.parallel.ring import ring_attention
from dispatch.parallel.shards import all_gather_matmul, matmul_all_gather, matmul_all_reduce, matmul_reduce_scatter

__all__ = [
    "ExpertExchange",
    "GradientBuckets",
    "Step",
    "all_gather_matmul",
    "expert_matmul",
    "matmul_all_gather",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "one_forward_one_backward",
    "ring_attention",
    "schedule",
]
