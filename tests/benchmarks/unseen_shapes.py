"""What the first call of a shape costs: whole calls of many shapes that were never seen, and the steps inside one.

bench_overhead asks. A few other shapes run first, so that handles exist and the usual kernels are loaded; a kernel that
only one shape needs is still loaded within its first call, which is what the ninetieth percentile shows. The second
call of each shape, with another output, shows that the plan is kept.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import dispatch as dp
from dispatch.libraries.cublaslt.handle import handle_of

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 8  # extents are multiples of it, as those of nearly all models are
WARM = 20  # shapes that run before the clock does
Shape = tuple[int, int, int]


def shapes(count: int, largest: int, seed: int) -> list[Shape]:
    """Different (m, n, k) at random."""
    side = largest // STEP
    numbers = random.Random(seed).sample(range(side**3), count)
    return [(STEP * (1 + x % side), STEP * (1 + x // side % side), STEP * (1 + x // side**2)) for x in numbers]


def ours(device: Any, dtype: str, wanted: list[Shape]) -> dict[str, list[float]]:
    """Seconds of the first and of the second one-shot call of each shape."""
    first, second = [], []
    for m, n, k in wanted:
        # Host time does not depend on the values.
        a, b = device.zeros((m, k), dtype), device.zeros((k, n), dtype)
        outs = [device.empty((m, n), dtype) for _ in range(2)]
        device.synchronize()
        for out, seconds in zip(outs, (first, second), strict=True):
            started = time.perf_counter()
            dp.matmul(a, b, out=out)
            seconds.append(time.perf_counter() - started)
            device.synchronize()
    return {"ours, first call": first[WARM:], "ours, second call": second[WARM:]}


def torchs(wanted: list[Shape]) -> dict[str, list[float]]:
    """The same of torch.mm(out=)."""
    import torch

    first, second = [], []
    for m, n, k in wanted:
        a, b = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k, n)))
        outs = [torch.empty((m, n), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        for out, seconds in zip(outs, (first, second), strict=True):
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            seconds.append(time.perf_counter() - started)
            torch.cuda.synchronize()
    return {"torch, first call": first[WARM:], "torch, second call": second[WARM:]}


def steps(device: Any, dtype: str, wanted: list[Shape]) -> dict[str, list[float]]:
    """Seconds of each step by which a request of an unseen shape becomes a call; on the host only the first two."""
    from dispatch.libraries.cublaslt.descriptors import Descriptors, heuristic
    from dispatch.ops.matmul.lower import lower
    from dispatch.table.select import candidates

    executor = device.executor()
    names = ("request", "select", "lower", "descriptors", "heuristic")
    found: dict[str, list[float]] = {f"step: {name}": [] for name in (names[:2] if device.is_host else names)}
    for m, n, k in wanted:
        a, b, out = (device.zeros(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        made: list[Any] = []
        work: tuple[Callable[[], Any], ...] = (
            lambda a=a, b=b, out=out: dp.MatmulRequest(a=a, b=b, out=out),
            lambda made=made: next(candidates(made[0], device.arch, executor.versions)),
            lambda made=made: lower(made[0], made[1].compute),
            lambda made=made: Descriptors(made[2].problem),
            lambda made=made: heuristic(handle_of(executor), made[3], made[2].problem, executor.workspace.nbytes),
        )
        times = [time.perf_counter()]
        for step in work[: len(found)]:
            made.append(step())
            times.append(time.perf_counter())
        for seconds, (before, after) in zip(found.values(), pairwise(times), strict=True):
            seconds.append(after - before)
    return {name: seconds[WARM:] for name, seconds in found.items()}
