"""Autotune among cuTENSOR's algorithms and kernels for one request: they are timed, and the fastest is stored.

`cutensor.plan` sends requests with `autotune` here, and bind/race.py compares the winner with other libraries.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest
from dispatch.ops.contraction.choices import ContractionAlgo

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutensor.descriptors import Preference

__all__ = ["candidates", "stored_key", "tuned"]

KERNEL_RANKS = 4  # kernels of each algorithm that are tried, in cuTENSOR's order
ALGOS = (ContractionAlgo.DEFAULT_PATIENT, ContractionAlgo.GETT, ContractionAlgo.TGETT, ContractionAlgo.TTGT)


def candidates(request: Any, default: Preference) -> list[Preference]:
    """The preferences to time; cuTENSOR's own choice first."""
    preferences = [default]
    if request.op == "contract":
        preferences += [
            default._replace(algo=int(algo), kernel_rank=rank) for algo in ALGOS[1:] for rank in range(KERNEL_RANKS)
        ]
        preferences.append(default._replace(algo=int(ALGOS[0])))
    elif request.op == "contract_trinary":
        preferences.append(default._replace(algo=int(ALGOS[0])))
    return preferences


def tuned(
    request: Any, executor: CudaExecutor, row: Row, default: Preference, make_plan: Callable[[Preference], Plan]
) -> Plan:
    """The plan of the fastest kernel: the stored one, or else the fastest in new timings."""
    key = stored_key(request, row)
    memory = executor.algorithms("cutensor")
    stored = memory.get(request.op, key)
    remembered = None if stored is None else decode_winner(stored, candidates(request, default))
    if remembered is not None:
        return make_plan(remembered)
    executor.refuse_capture("a request with autotune=True")
    plans: list[tuple[Preference, Plan]] = [(default, make_plan(default))]
    for preference in candidates(request, default)[1:]:
        with suppress(Refused):
            plans.append((preference, make_plan(preference)))

    def run(number: int, arguments: tuple[Argument, ...]) -> None:
        plans[number][1].enqueue(arguments)

    winner = fastest(executor, request, run, len(plans)) if len(plans) > 1 else 0
    preference, plan = plans[winner]
    facts = {"row": row.name, "algo": preference.algo, "rank": preference.kernel_rank}
    memory.put(request.op, key, Algorithm(json.dumps(facts).encode(), 0))
    return plan


def decode_winner(known: Algorithm, offered: list[Preference]) -> Preference | None:
    """The preference that a stored outcome names; None if it is not among those offered."""
    try:
        facts = json.loads(known.blob)
        stored = facts["algo"], facts["rank"]
    except (ValueError, KeyError, TypeError):
        return None
    return next((one for one in offered if (one.algo, one.kernel_rank) == stored), None)


def stored_key(request: Any, row: Row) -> str:
    """The request as text, and a digest of all that its plan depends on; the same whether outputs are passed or not."""
    names = [*(name for name in request.reads if getattr(request, name) is not None), "out"]
    layouts = [(name, request.layout_of(name)) for name in names]
    described = [(name, str(one.dtype), one.shape, one.strides, one.alignment) for name, one in layouts]
    digest = hashlib.sha256(repr((described, row.name, list(map(repr, request.attributes())))).encode()).hexdigest()[
        :16
    ]
    return f"{request.spec} {', '.join(f'{name} {layout}' for name, layout in layouts)} {digest}"
