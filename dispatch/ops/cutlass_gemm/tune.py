"""Autotune of cutlass_gemm: CUTLASS's candidates and cuBLASLt race, and the winner is remembered on disk.

cutlass.py sends requests with `autotune` here. The memory is that of matmul's autotune (execute/algorithm_cache.py); an
outcome names the row and the kernel that won. Where the table refuses a request nothing is timed.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest
from dispatch.libraries.cutlass.compile import CompileFailed
from dispatch.libraries.cutlass.config import CONFIGS, Config, candidates
from dispatch.libraries.cutlass.plan import multiprocessors
from dispatch.ops.cutlass_gemm import cublaslt_candidate
from dispatch.ops.cutlass_gemm.cutlass import CutlassPlan, compiled
from dispatch.progress import finish

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

__all__ = ["candidate_plans", "outcome", "plan", "recall", "store_key"]

CUBLASLT = "cublasLtMatmul"


def plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of the fastest kernel for a request: the one remembered, or the one that wins now."""
    key = store_key(request)
    known = executor.algorithms("cublasLt").get(request.op, key)
    found = None if known is None else _remembered(request, executor, row, known)
    if found is not None:
        return found
    executor.refuse_capture("a request that is to be tuned")
    plans = candidate_plans(request, executor, row)

    def run(number: int, arguments: tuple[Argument, ...]) -> None:
        plans[number].enqueue(arguments)

    winner = plans[fastest(executor, request, run, len(plans))]
    executor.algorithms("cublasLt").put(request.op, key, outcome(winner))
    return winner


def candidate_plans(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> list[Plan]:
    """A plan for each candidate that compiles, the one chosen without timing first; cuBLASLt's comes last."""
    configs = candidates(request.m, request.n, request.k, request.batches, multiprocessors(executor))
    finish([compiled(request, row, config)[2] for config in dict.fromkeys(c.kernel for c in configs)])
    plans: list[Plan] = [CutlassPlan(request, executor, row, configs[0])]
    for config in configs[1:]:
        try:
            plans.append(CutlassPlan(request, executor, row, config))
        except CompileFailed:  # noqa: PERF203 - a tree whose operands leave no room for a large tile
            continue
    other = cublaslt_candidate.plan(request, executor)
    return plans if other is None else [*plans, other]


def outcome(winner: Plan) -> Algorithm:
    """What is remembered: the row and the kernel by name, and what finds the kernel again."""
    facts: dict[str, Any] = {"row": winner.row.name, "kernel": CUBLASLT}
    if isinstance(winner, CutlassPlan):
        facts |= {"kernel": str(winner.config), "config": winner.config, "id": winner.kernel}
    return Algorithm(json.dumps(facts).encode(), 0)


def recall(known: Algorithm) -> tuple[Config | None, str] | None:
    """The configuration (None for cuBLASLt) and the kernel's id of an outcome; None for what says neither."""
    try:
        facts = json.loads(known.blob)
        if facts["kernel"] == CUBLASLT:
            return None, ""
        tile, cluster, *rest = facts["config"]
        config = Config(tuple(tile), tuple(cluster), *rest)
        return (config, str(facts["id"])) if config in CONFIGS else None
    except (ValueError, KeyError, TypeError):
        return None


def _remembered(request: CutlassGemmRequest, executor: CudaExecutor, row: Row, known: Algorithm) -> Plan | None:
    """The plan of an earlier outcome; None where the kernel is another by now, or cuBLASLt has none any more."""
    recalled = recall(known)
    if recalled is None:
        return None
    config, kernel = recalled
    if config is None:
        return cublaslt_candidate.plan(request, executor)
    made = CutlassPlan(request, executor, row, config)
    return made if made.kernel == kernel else None


def store_key(request: CutlassGemmRequest) -> str:
    """The request in words, and a digest of all that its plan depends on; the same whether outputs are given or not."""
    named: dict[str, Tensor | None] = {"a": request.a, "b": request.b, "c": request.c, "out": request.out}
    named |= {name: x for name, x in request.given.items() if hasattr(x, "layout")}  # type: ignore[misc]
    layouts = [
        (name, str(x.dtype), x.shape, x.layout.strides, x.layout.alignment)
        for name, x in named.items()
        if x is not None
    ]
    layouts += [
        (name, str(dtype), shape, strides, 256) for name, (shape, strides, dtype) in request.unallocated().items()
    ]
    rest = (request.tree, str(request.d_dtype), str(request.compute), request.fast_accum)
    digest = hashlib.sha256(repr((sorted(layouts), rest)).encode()).hexdigest()[:16]
    return f"{request.describe()} {digest}"
