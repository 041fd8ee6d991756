"""Grouped products by one CUTLASS kernel: rows of one matrix in groups, or products of any extents.

`grouped_matmul` is the request function, `GroupedMatmulRequest` and `GroupedMatmulListRequest` are the
requests; `cutlass_plan` and `numpy_plan` carry them out, reference.py says what is right. The files: request and
request_lists (what may be asked), rules, config, cutlass (on a GPU), reference, cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_array
from dispatch.core.request import run
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

    Requests = GroupedMatmulRequest | GroupedMatmulListRequest

__all__ = [
    "GroupedMatmulRequest",
    "grouped_matmul",
]


def cutlass_plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a grouped CUTLASS kernel, which is compiled where it is in no cache."""
    from dispatch.ops.grouped_matmul import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, executor, row)


def numpy_plan(request: Requests, _executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy, group by group."""
    from dispatch.ops.grouped_matmul import reference as host

    return host.plan(request, row)


def grouped_matmul(
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    ends: Tensor | Sequence[int] | None = None,
    *,
    out: Tensor | Sequence[Tensor] | None = None,
    epilogue: Node | None = None,
    alpha: Tensor | float = 1.0,
    out_dtype: Any = None,
    fast_accum: bool = False,
    config: Config | None = None,
) -> Any:
    """Multiply groups, on the current stream, by one kernel; returns without waiting.

    With tensors: rows of a (total, k), in groups that end before the rows `ends`, by b (groups, k, n); `ends` is an
    i32 tensor of the device, or numbers of the host. Returns D (total, n). With sequences of matrices: each of a by the
    one of b, of any extents. Returns a tuple of D. The other arguments are the fields of `GroupedMatmulRequest`.
    Raises BadRequest for operands that do not fit, NoRow where no kernel takes the request.
    """
    choices = (epilogue, alpha, out_dtype, fast_accum, config)
    if not isinstance(a, Tensor):
        if ends is not None or isinstance(b, Tensor) or isinstance(out, Tensor):
            raise BadRequest("a", f"a {type(a).__name__}", "a tensor; or sequences for b and out as well, and no ends")
        return run(GroupedMatmulListRequest(a, b, out, *choices))  # type: ignore[arg-type]  # it looks at them itself
    if not isinstance(ends, Tensor):
        ends = _told(a, ends)
    return run(GroupedMatmulRequest(a, b, ends, out, *choices))  # type: ignore[arg-type]  # it looks at them itself


def _told(a: Tensor, ends: Sequence[int] | None) -> Tensor:
    """Ends that the host knows, checked and copied to the device."""
    numbers = as_array("ends", () if ends is None else ends)
    whole = numbers.ndim == 1 and numbers.dtype.kind in "iu"
    if a.ndim != 2:
        raise BadRequest("a", str(a.layout), "a (total, k)")
    if not whole or (np.diff(numbers, prepend=0) < 0).any() or numbers[-1] > a.shape[0]:
        raise BadRequest(
            "ends", repr(ends), f"whole numbers that do not fall, at most {a.shape[0]}", "np.cumsum(sizes)"
        )
    return a.device.array(numbers, "i32")
