"""Autotune of a product over a compressed matrix: the library runs its kernels, and the fastest is kept on disk."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.execute import algorithm_cache as cache
from dispatch.execute.autotune import OperandCopies
from dispatch.libraries.cusparselt.descriptors import OWN_CHOICE, Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparselt.calls import ProductPlan
    from dispatch.libraries.cusparselt.descriptors import Product

__all__ = ["fastest_plan", "stored_key"]

LIBRARY = "cusparseLt"


def fastest_plan(request: Any, executor: CudaExecutor, said: Product, make: Callable[[Algorithm], ProductPlan]) -> Plan:
    """The plan with the fastest algorithm: the one remembered, or that which a search finds now, over copies."""
    memory, key = executor.algorithms(LIBRARY), stored_key(request, said)
    known = memory.get(request.op, key)
    remembered = None if known is None else _read(known.blob)
    if remembered is not None:
        with suppress(Refused):
            return make(remembered)
    executor.refuse_capture("a request that is to be tuned")
    plan = make(OWN_CHOICE)
    copies = OperandCopies(executor, request)  # which are there as long as the search runs
    found = plan.search(copies.arguments(0))
    del copies
    memory.put(request.op, key, cache.Algorithm(json.dumps(found._asdict()).encode(), 0))
    return plan


def _read(blob: bytes) -> Algorithm | None:
    """The algorithm of an outcome; None where it is damaged."""
    try:
        found = Algorithm(**json.loads(blob))
    except (ValueError, TypeError):
        return None
    return found if all(type(number) is int for number in found) else None


def stored_key(request: Any, said: Product) -> str:
    """The request in words, and a digest of all that the library is told."""
    digest = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    m, k = request.form.shape[-2:]
    return f"{request.op}({request.form.dtype}[{m}, {k}] x [{k}, {request.b.shape[-1]}]) {digest}"
