"""GroupedMatmulRequest: the rows of A in groups, each group multiplied by a matrix of its own.

That is a layer of experts: the groups' ends lie on the device, where a router has put them, and no extent of a group is
known to the host. Making a request validates what the host can know. This file calls nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import NO_NUMBERS, check_kinds, shown
from dispatch.core.operand_checks import check_extents
from dispatch.core.overlap import overlap
from dispatch.core.request import Argument, Operands, Request, Signature, Use
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, F32, FP8, I32, Dtype
from dispatch.libraries.cutlass.evt import accumulator, scalar
from dispatch.libraries.cutlass.evt_operands import check_tree
from dispatch.libraries.cutlass.visitors import operands_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.device import Device
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

__all__ = ["GroupedMatmulRequest", "padded", "validate_choices"]

Shape = tuple[int, ...]
TENSORS = ("a", "b", "ends", "out")
F32_MAX = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, eq=False)
class GroupedMatmulRequest(Request):
    """D[rows of g] = tree(A[rows of g] · B[g]), where group g ends before row ends[g] and begins where g - 1 ends.

    Attributes:
        a: (total, k), rows dense.
        b: (groups, k, n).
        ends: i32 (groups,), not falling, the last one at most total; rows behind the last end are not written.
        out: D (total, n), of `out_dtype`, rows dense. Rows that end amid 16 bytes are copied to it, see cutlass_gemm's.
        epilogue: a tree of `dispatch.evt` over the accumulator and alpha; None for alpha · A · B.
        alpha: a number, or an f32 tensor of one element.
        fast_accum: fp8 only; sums in the tensor cores' own precision.
        config: tile, cluster and schedule, one of this op's CONFIGS; None for what suits the groups' mean.
    """

    op: ClassVar[str] = "grouped_matmul"
    a: Tensor
    b: Tensor
    ends: Tensor
    out: Tensor | None = None
    epilogue: Node | None = None
    alpha: Tensor | float = 1.0
    out_dtype: Any = None
    fast_accum: bool = False
    config: Config | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def groups(self) -> int:
        return self.b.shape[0]

    @property
    def n(self) -> int:
        return self.b.shape[-1]

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @property
    def rows(self) -> int:
        """The rows of all groups together, at most."""
        return self.a.shape[0]

    @property
    def shape(self) -> Shape:
        return (self.rows, self.n)

    @property
    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Each matrix given, by its name."""
        for name in ("a", "b", "out"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    @cached_property
    def tree(self) -> Node:
        """The epilogue, which scales by alpha where none was given."""
        return self.epilogue if self.epilogue is not None else scalar("alpha") * accumulator()

    @cached_property
    def d_dtype(self) -> Dtype:
        """The dtype of D: that of `out`, `out_dtype`, or A's (bf16 for fp8)."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        return BF16 if self.a.dtype in FP8 else self.a.dtype

    @property
    def device(self) -> Device:
        return self.a.device

    def signature(self) -> Signature:
        return Signature((self.a.dtype, self.b.dtype, self.d_dtype, self.d_dtype))

    def key(self) -> tuple[Any, ...]:
        layouts = tuple(None if t is None else t.layout for t in (self.a, self.b, self.ends, self.out))
        alpha = self.alpha.layout if isinstance(self.alpha, Tensor) else None
        return (*layouts, alpha, self.tree, self.d_dtype.cuda, self.fast_accum, self.config)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        out = outputs.get("out", self.out)
        alpha = self.alpha.ptr if isinstance(self.alpha, Tensor) else float(self.alpha) + 0.0  # of -0.0, too
        return (self.a.ptr, self.b.ptr, self.ends.ptr, out.ptr, alpha)  # type: ignore[union-attr]

    def tensors(self) -> tuple[Use, ...]:
        named = [(name, getattr(self, name), name == "out") for name in (*TENSORS, "alpha")]
        return tuple((name, x, written) for name, x, written in named if isinstance(x, Tensor))

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        if self.out is not None:
            return {}
        return {"out": padded(self.shape, self.d_dtype)}

    def result(self, outputs: Operands) -> Any:
        return outputs.get("out", self.out)

    def replace(self, **operands: Tensor) -> GroupedMatmulRequest:
        for name in operands:
            if name not in (*TENSORS, "alpha"):
                raise BadRequest(name, "no operand of this request", f"one of {', '.join(TENSORS)}, alpha")
        changed: dict[str, Any] = operands
        return replace(self, **changed)

    def describe(self) -> str:
        fast = (", fast_accum" if self.fast_accum else "") + (f", config={self.config}" if self.config else "")
        return (
            f"grouped_matmul {self.a.layout} x {self.b.layout} in {self.groups} groups -> {self.d_dtype},"
            f" epilogue {self.tree}{fast}"
        )


def padded(shape: Shape, dtype: Dtype) -> tuple[Shape, Shape, Dtype]:
    """A matrix to be made, its rows at multiples of 16 bytes, as tensor maps need them."""
    step = 128 // dtype.bits
    return shape, (-(-shape[1] // step) * step, 1), dtype


def _validate(request: GroupedMatmulRequest) -> None:
    """Raise BadRequest for what no kernel could carry out."""
    for name in TENSORS:
        tensor = getattr(request, name)
        if not isinstance(tensor, Tensor) and not (name == "out" and tensor is None):
            raise BadRequest(name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x)")
    a, b, ends = request.a, request.b, request.ends
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[1]:
        raise BadRequest("b", f"{b.layout} with a {a.layout}", "a (total, k) and b (groups, k, n)")
    for name, tensor in request.matrices:
        check_extents(name, tensor)
    if ends.dtype is not I32 or ends.shape != (b.shape[0],) or not ends.layout.is_contiguous:
        raise BadRequest("ends", str(ends.layout), f"i32[{b.shape[0]}], where each group ends", "np.cumsum(sizes)")
    validate_choices(request)
    request.device.check(*(tensor for _, tensor, _ in request.tensors()))
    for name, tensor, _ in request.tensors():
        if tensor.device is not request.device:
            raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {request.device!r}, as a is")
    out = request.out
    if out is None:
        return
    if out.shape != request.shape or out.layout.readonly or out.layout.meets_itself:
        wanted = f"shape {request.shape} in memory that may be written, its own for each element"
        raise BadRequest("out", str(out.layout), wanted)
    for name, tensor, written in request.tensors():
        if not written and overlap(out, tensor):
            raise BadRequest("out", f"memory that overlaps {name}", "memory of its own")


def validate_choices(request: GroupedMatmulRequest | GroupedMatmulListRequest) -> None:
    """Raise BadRequest for fields beside the matrices that are not what they must be."""
    _validate_tree(request)
    _validate_alpha(request)
    check_kinds(request)
    if request.out_dtype is not None and Dtype.of(request.out_dtype) is not request.d_dtype:
        raise BadRequest("out_dtype", shown(request.out_dtype), f"{request.d_dtype}, the dtype of out, or None")


def _validate_alpha(request: GroupedMatmulRequest | GroupedMatmulListRequest) -> None:
    """Alpha is a number or lies on the device as the kernel reads it, and the epilogue reads it where it is not 1."""
    alpha: object = request.alpha
    if isinstance(alpha, Tensor):
        if alpha.size != 1 or alpha.dtype is not F32:
            raise BadRequest("alpha", str(alpha.layout), "a number, or an f32 tensor of one element")
    elif isinstance(alpha, NO_NUMBERS) or not isinstance(alpha, (int, float, np.integer, np.floating)):
        raise BadRequest("alpha", repr(alpha), "a number, or an f32 tensor of one element")
    elif F32_MAX < abs(alpha if isinstance(alpha, int) else float(alpha)) < math.inf:
        raise BadRequest("alpha", repr(alpha), f"a number that f32 holds, up to {F32_MAX:.4g}")
    if (isinstance(alpha, Tensor) or alpha != 1) and "alpha" not in operands_of(request.tree):
        given = str(alpha.layout) if isinstance(alpha, Tensor) else repr(alpha)
        hint = "multiply by evt.scalar('alpha') in the epilogue"
        raise BadRequest("alpha", given, "1, for the epilogue reads no alpha", hint)


def _validate_tree(request: GroupedMatmulRequest | GroupedMatmulListRequest) -> None:
    """The epilogue reads and writes nothing but the accumulator and alpha."""
    check_tree(request.epilogue, request.config)
    try:
        others = [name for name in operands_of(request.tree) if name != "alpha"]
    except Refused as refused:
        raise BadRequest("epilogue", str(request.epilogue), str(refused)) from None
    if others:
        raise BadRequest("epilogue", f"operands {', '.join(others)}", "a tree over the accumulator and alpha")
