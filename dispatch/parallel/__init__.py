"""What several ranks do together to train and serve a model, by requests of several op families on two streams.

The files: beside (the stream of a communicator's collectives, and operands), chunks (into how many a product is cut),
shards (products of sharded matrices), buckets (gradients of data parallelism), ring (attention over sharded
sequences), experts (products by experts that other ranks have), pipeline (stages of a model). Each function works on
the host and on GPUs, of tensors of this library; nothing waits on the host but where its documentation says so.
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
