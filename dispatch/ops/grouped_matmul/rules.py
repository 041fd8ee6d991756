"""What a row of grouped_matmul requires of a request beyond its dtypes: what tensor maps support.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" if it is met. They hold for both
requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.device.tensor import Tensor
from dispatch.libraries.cutlass.evt import accumulator, scalar
from dispatch.libraries.cutlass.layout import dense_line, lines_by_16, order_of, pitch

if TYPE_CHECKING:
    from dispatch.ops.grouped_matmul.base import GroupedBase

__all__ = [
    "by_16_bytes",
    "dense_lines",
    "host_alpha",
    "k_dense",
    "no_config",
    "no_fast_accum",
    "one_order",
    "only_alpha",
    "only_lists",
    "rows_dense",
    "some_elements",
    "steps_of_32_bits",
]

MAX_STEP = (1 << 31) - 1
ALPHA = scalar("alpha")
ONLY_ALPHA = (accumulator(), ALPHA * accumulator(), accumulator() * ALPHA)


def by_16_bytes(request: GroupedBase[Any]) -> str:
    """Each group of each matrix starts at a multiple of 16 bytes, and so does each line."""
    wrong = [reason for name, tensor in request.matrices if (reason := lines_by_16(name, tensor))]
    return f"needs {' and '.join(wrong)}" if wrong else ""


def rows_dense(request: GroupedBase[Any]) -> str:
    """A and D have dense rows: a group consists of some of their rows."""
    wrong = [name for name, tensor in request.matrices if name[0] != "b" and order_of(tensor) != "row"]
    return f"needs dense rows, has {' and '.join(wrong)} with dense columns" if wrong else ""


def k_dense(request: GroupedBase[Any]) -> str:
    """fp8 operands are dense along k: Hopper's tensor cores read no other order."""
    wrong = [name for name, tensor in request.matrices if name[0] == "b" and order_of(tensor) != "column"]
    return f"needs b column-major (k dense), has {' and '.join(wrong)} with rows" if wrong else ""


def one_order(request: GroupedBase[Any]) -> str:
    """All B have one order: a kernel is made for B with dense rows or for one with dense columns."""
    orders = {order_of(tensor) for name, tensor in request.matrices if name[0] == "b"}
    return "needs b of one order, has some with dense rows and some with dense columns" if len(orders) > 1 else ""


def some_elements(request: GroupedBase[Any]) -> str:
    """No extent is 0; a single group may be empty, because only the device has its extents."""
    fine = all(all(tensor.shape) for _, tensor in request.matrices) and request.groups
    return "" if fine else "needs extents of 1 or more, has 0"


def no_fast_accum(request: GroupedBase[Any]) -> str:
    """Fast accumulation is offered only for fp8 products."""
    return "needs fast_accum=False, has True" if request.fast_accum else ""


def only_alpha(request: GroupedBase[Any]) -> str:
    """The epilogue is alpha: cuBLASLt's groups have only this and a bias for each group, cuBLAS's only this."""
    return "" if request.tree in ONLY_ALPHA else f"needs an epilogue of alpha · acc, has {request.tree}"


def no_config(request: GroupedBase[Any]) -> str:
    """No config: cuBLASLt and cuBLAS choose their kernels themselves."""
    return "" if request.config is None else f"needs config=None, has {request.config}"


def steps_of_32_bits(request: GroupedBase[Any]) -> str:
    """Strides fit in i32, as cuBLASLt and cuBLAS read them."""
    strides = {name: pitch(tensor.shape, tensor.layout.strides) for name, tensor in request.matrices}
    wrong = [f"{name} has {step}" for name, step in strides.items() if step > MAX_STEP]
    return f"needs lines up to {MAX_STEP} elements apart, {' and '.join(wrong)}" if wrong else ""


def only_lists(request: GroupedBase[Any]) -> str:
    """Lists only: cuBLAS reads the extents of all products on the host."""
    if not any(name == "ends" for name, _ in request.operands):
        return ""
    return "needs lists of operands, whose extents are known on the host, has ends on the device"


def host_alpha(request: GroupedBase[Any]) -> str:
    """Alpha is on the host: cuBLAS reads the numbers of grouped products only there."""
    return "needs alpha as a number, has a tensor" if isinstance(request.alpha, Tensor) else ""


def dense_lines(request: GroupedBase[Any]) -> str:
    """Each matrix has dense rows or dense columns, in order and without overlap."""
    wrong = [f"{name} has {tensor.layout}" for name, tensor in request.matrices if not dense_line(tensor)]
    return f"needs dense rows or columns, {' and '.join(wrong)}" if wrong else ""
