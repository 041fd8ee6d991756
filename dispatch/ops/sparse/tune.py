"""Autotune among cuSPARSE's algorithms for one product: they are timed, and the fastest is stored on disk.

The speed of an algorithm depends on the pattern, which no plan can see: the fastest for the first matrix of some
layouts is used for all later ones.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch.device.layout import Layout
from dispatch.errors import Refused
from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest, fastest_call
from dispatch.ops.sparse.algorithms import SpgemmAlgorithm, SpmmAlgorithm, SpmvAlgorithm
from dispatch.ops.sparse.form import SparseForm, SparseFormat
from dispatch.ops.sparse.sparse_products import REUSE_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Plan
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["fastest_plan", "suited"]

LIBRARY = "cusparse"


def suited(request: Any) -> list[Any]:
    """The algorithms for a request's format, the library's own choice first; CSC is the transpose of CSR."""
    if request.op == "spgemm":
        is_fixed = replace(request, algorithm=SpgemmAlgorithm.DEFAULT).reuses
        return [one for one in SpgemmAlgorithm if is_fixed or one not in REUSE_ALGORITHMS]
    kind: Any = SpmvAlgorithm if request.op == "sparse_mv" else SpmmAlgorithm
    form = SparseFormat(request.form.format)
    name = "CSR" if form is SparseFormat.CSC else form.name
    algorithms = [kind.DEFAULT, *(one for one in kind if one.name.startswith(name))]
    return [one for one in algorithms if request.op != "spmm_batched" or one is not SpmmAlgorithm.COO_ALG3]


def fastest_plan(request: Any, executor: CudaExecutor, make: Callable[[Any], Plan]) -> Plan:
    """The plan that `make` returns for a request with the fastest algorithm: the stored one, or the winner now."""
    memory, key = executor.algorithms(LIBRARY), stored_key(request)
    stored = memory.get(request.op, key)
    remembered = None if stored is None else _named(request, stored)
    if remembered is not None:
        with suppress(Refused):
            return make(replace(request, algorithm=remembered))
    executor.refuse_capture("a request with autotune=True")
    plans: list[tuple[Any, Plan]] = []
    for algorithm in suited(request):
        with suppress(Refused):  # this library or these operands do not support the algorithm
            plans.append((algorithm, make(replace(request, algorithm=algorithm))))
    if not plans:
        raise Refused("cuSPARSE has no algorithm for this request")

    def run(number: int, arguments: tuple[Argument, ...]) -> None:
        plans[number][1].enqueue(arguments)

    race = fastest if all(plan.capture_safe for _, plan in plans) else fastest_call
    winner, plan = plans[race(executor, request, run, len(plans)) if len(plans) > 1 else 0]
    memory.put(request.op, key, Algorithm(json.dumps({"algorithm": winner.name}).encode(), 0))
    return plan


def _named(request: Any, known: Algorithm) -> Any:
    """The algorithm that an outcome names; None for an unknown name."""
    try:
        name = json.loads(known.blob)["algorithm"]
    except (ValueError, KeyError, TypeError):
        return None
    return next((one for one in suited(request) if one.name == name), None)


def stored_key(request: Any) -> str:
    """The request in words, and a digest of all that its plan depends on except the pattern's number."""
    layouts = [
        (name, str(tensor.dtype), tensor.shape, tensor.layout.strides, tensor.layout.alignment)
        for name, tensor, _ in request.tensors()
    ]
    layouts += [(name, str(made[2]), made[0], made[1], 256) for name, made in request.unallocated().items()]
    digest = hashlib.sha256(repr((sorted(layouts), _choices(request.key()))).encode()).hexdigest()[:16]
    m, n = request.form.shape
    return f"{request.op}({SparseFormat(request.form.format).name} {request.values.dtype}[{m}, {n}]) {digest}"


def _choices(part: Any) -> Any:
    """The parts of a key that are not layouts, without those that are specific to this process."""
    if isinstance(part, SparseForm):
        return repr(part._replace(pattern=None))
    if isinstance(part, tuple):
        return [_choices(each) for each in part]
    return repr(None if isinstance(part, Layout) else part)
