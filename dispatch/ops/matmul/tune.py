"""Autotune among CUTLASS's kernels for one product: the candidates are timed, and the fastest is remembered on disk.

`cutlass_matmul` calls `plan` for requests with `autotune`, and bind/race.py compares the winner with other libraries.
Winners are stored in the same cache as cuBLASLt's algorithms (execute/algorithm_cache.py), by row and kernel.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest
from dispatch.libraries.cutlass.compile import CompileFailed
from dispatch.libraries.cutlass.config import CONFIGS, Config, candidates
from dispatch.libraries.cutlass.plan import multiprocessors
from dispatch.ops.matmul.cutlass import CutlassPlan, compiled
from dispatch.progress import finish

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["candidate_plans", "decode_winner", "encode_winner", "plan", "stored_key"]

OP = "matmul by CUTLASS"  # the op's name in the cache, where cuBLASLt's algorithms have "matmul"


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> CutlassPlan:
    """The plan of the fastest kernel for a request: the remembered one, or the one that is fastest now."""
    key = stored_key(request)
    cached = executor.algorithms("cublasLt").get(OP, key)
    cached_plan = None if cached is None else _remembered_plan(request, executor, row, cached)
    if cached_plan is not None:
        return cached_plan
    executor.refuse_capture("a request with autotune=True")
    plans = candidate_plans(request, executor, row)

    def run(number: int, arguments: tuple[Argument, ...]) -> None:
        plans[number].enqueue(arguments)

    winner = plans[fastest(executor, request, run, len(plans))]
    executor.algorithms("cublasLt").put(OP, key, encode_winner(winner))
    return winner


def candidate_plans(request: MatmulRequest, executor: CudaExecutor, row: Row) -> list[CutlassPlan]:
    """A plan for each candidate that compiles; the first is the one that would be chosen without timing."""
    configs = candidates(request.m, request.n, request.k, request.form.batches, multiprocessors(executor))
    finish([compiled(request.form, row, config)[2] for config in dict.fromkeys(c.kernel for c in configs)])
    plans = [CutlassPlan(request, executor, row, configs[0])]
    for config in configs[1:]:
        try:
            plans.append(CutlassPlan(request, executor, row, config))
        except CompileFailed:  # noqa: PERF203 - a tree whose operands leave no room for a large tile
            continue
    return plans


def encode_winner(winner: CutlassPlan) -> Algorithm:
    """The cache entry of a winner: the names of row and kernel, and the config and id that find the kernel again."""
    facts = {"row": winner.row.name, "kernel": str(winner.config), "config": winner.config, "id": winner.kernel}
    return Algorithm(json.dumps(facts).encode(), 0)


def decode_winner(known: Algorithm) -> tuple[Config, str] | None:
    """The configuration and the kernel's id of a cache entry; None for any other content."""
    try:
        facts = json.loads(known.blob)
        tile, cluster, *other_fields = facts["config"]
        config = Config(tuple(tile), tuple(cluster), *other_fields)
        return (config, str(facts["id"])) if config in CONFIGS else None
    except (ValueError, KeyError, TypeError):
        return None


def _remembered_plan(request: MatmulRequest, executor: CudaExecutor, row: Row, known: Algorithm) -> CutlassPlan | None:
    """The plan of a remembered winner; None where its kernel has changed since."""
    winner = decode_winner(known)
    if winner is None:
        return None
    config, kernel = winner
    bound_plan = CutlassPlan(request, executor, row, config)
    return bound_plan if bound_plan.kernel == kernel else None


def stored_key(request: MatmulRequest) -> str:
    """The request's description and a digest of all that its plan depends on; the same with outputs given or not."""
    form = request.form
    named: dict[str, Tensor | None] = {"a": form.a, "b": form.b, "c": form.c, "out": form.out}
    named |= {name: x for name, x in form.operand_values.items() if hasattr(x, "layout")}  # type: ignore[misc]
    layouts = [
        (name, str(x.dtype), x.shape, x.layout.strides, x.layout.alignment)
        for name, x in named.items()
        if x is not None
    ]
    layouts += [
        (name, str(dtype), shape, strides, 256) for name, (shape, strides, dtype) in request.unallocated().items()
    ]
    choices = (form.tree, str(request.d_dtype), str(request.compute), request.fast_accum)
    digest = hashlib.sha256(repr((sorted(layouts), choices)).encode()).hexdigest()[:16]
    return f"{form.describe()} {digest}"
