"""GroupedMatmulListRequest: products that share nothing but their dtypes and orders, as one kernel.

Every extent may differ from product to product, and each matrix lies where it likes. The host knows the extents, so
that they are validated here. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import shown
from dispatch.core.operand_checks import check_extents
from dispatch.core.overlap import overlap
from dispatch.core.request import Argument, Operands, Request, Signature, Use
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import BF16, FP8, Dtype
from dispatch.libraries.cutlass.evt import Node, accumulator, scalar
from dispatch.ops.grouped_matmul.request import padded, validate_choices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.device import Device
    from dispatch.libraries.cutlass.config import Config

__all__ = ["GroupedMatmulListRequest"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GroupedMatmulListRequest(Request):
    """D[g] = tree(A[g] · B[g]) for matrices of any extents; all of a place have one dtype and one order.

    Attributes:
        a, b: matrices (m, k) and (k, n) of each product, rows of a dense.
        out: D of each, (m, n) of `out_dtype`, rows dense; None for memory of their own.
        epilogue, alpha, out_dtype, fast_accum, config: as in `GroupedMatmulRequest`.
    """

    op: ClassVar[str] = "grouped_matmul"
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    out: tuple[Tensor, ...] | None = None
    epilogue: Node | None = None
    alpha: Tensor | float = 1.0
    out_dtype: Any = None
    fast_accum: bool = False
    config: Config | None = None

    def __post_init__(self) -> None:
        for name in ("a", "b", "out"):
            given = getattr(self, name)
            if given is not None or name != "out":
                object.__setattr__(self, name, self._matrices(name, given))
        _validate(self)

    @staticmethod
    def _matrices(name: str, given: object) -> tuple[Tensor, ...]:
        if not isinstance(given, (tuple, list)):
            raise BadRequest(name, shown(given), "a tuple of tensors")
        return tuple(given)

    @property
    def groups(self) -> int:
        return len(self.a)

    @property
    def rows(self) -> int:
        """The rows of all products together."""
        return sum(a.shape[0] for a in self.a)

    @property
    def n(self) -> int:
        """The most columns that a product has."""
        return max(b.shape[1] for b in self.b)

    @property
    def extents(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of each product."""
        return tuple((a.shape[0], b.shape[1], a.shape[1]) for a, b in zip(self.a, self.b, strict=True))

    @property
    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Each matrix given, by its name."""
        for name in ("a", "b", "out"):
            for place, tensor in enumerate(getattr(self, name) or ()):
                yield f"{name}[{place}]", tensor

    @cached_property
    def tree(self) -> Node:
        """The epilogue, which scales by alpha where none was given."""
        return self.epilogue if self.epilogue is not None else scalar("alpha") * accumulator()

    @cached_property
    def d_dtype(self) -> Dtype:
        """The dtype of each D: that of `out`, `out_dtype`, or A's (bf16 for fp8)."""
        if self.out is not None:
            return self.out[0].dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        return BF16 if self.a[0].dtype in FP8 else self.a[0].dtype

    @property
    def device(self) -> Device:
        return self.a[0].device

    def signature(self) -> Signature:
        return Signature((self.a[0].dtype, self.b[0].dtype, self.d_dtype, self.d_dtype))

    def key(self) -> tuple[Any, ...]:
        alpha = self.alpha.layout if isinstance(self.alpha, Tensor) else None
        layouts = tuple(tensor.layout for _, tensor in self.matrices)
        return (self.groups, layouts, alpha, self.tree, self.d_dtype.cuda, self.fast_accum, self.config)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        outs = self._outputs(outputs)
        alpha = self.alpha.ptr if isinstance(self.alpha, Tensor) else float(self.alpha) + 0.0  # of -0.0, too
        return (*(t.ptr for t in self.a), *(t.ptr for t in self.b), *(t.ptr for t in outs), alpha)

    def tensors(self) -> tuple[Use, ...]:
        uses = [(name, tensor, name.startswith("out")) for name, tensor in self.matrices]
        return (*uses, ("alpha", self.alpha, False)) if isinstance(self.alpha, Tensor) else tuple(uses)

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        if self.out is not None:
            return {}
        return {f"out[{g}]": padded((m, n), self.d_dtype) for g, (m, n, _) in enumerate(self.extents)}

    def result(self, outputs: Operands) -> tuple[Tensor, ...]:
        return self._outputs(outputs)

    def _outputs(self, outputs: Operands) -> tuple[Tensor, ...]:
        return self.out if self.out is not None else tuple(outputs[f"out[{g}]"] for g in range(self.groups))

    def replace(self, **operands: Tensor) -> GroupedMatmulListRequest:
        changed: dict[str, Any] = {}
        if "alpha" in operands:
            changed["alpha"] = operands.pop("alpha")
        known = {f"{name}[{g}]" for name in ("a", "b", "out") for g in range(self.groups)}
        for name in operands:
            if name not in known:
                raise BadRequest(name, "no operand of this request", "a[0], b[0], out[0] and so on, or alpha")
        for name in ("a", "b", "out"):
            before = getattr(self, name) or (None,) * self.groups
            after = tuple(operands.get(f"{name}[{g}]", tensor) for g, tensor in enumerate(before))
            if any(tensor is not None for tensor in after):
                changed[name] = after
        return replace(self, **changed)

    def describe(self) -> str:
        fast = (", fast_accum" if self.fast_accum else "") + (f", config={self.config}" if self.config else "")
        extents = ", ".join("x".join(map(str, found)) for found in self.extents[:4])
        more = ", …" if self.groups > 4 else ""
        return (
            f"grouped_matmul {self.groups} of {self.a[0].dtype} x {self.b[0].dtype} -> {self.d_dtype}"
            f" ({extents}{more}), epilogue {self.tree}{fast}"
        )


def _validate(request: GroupedMatmulListRequest) -> None:
    """Raise BadRequest for what no kernel could carry out."""
    a, b, out = request.a, request.b, request.out
    if not a or len(a) != len(b) or (out is not None and len(out) != len(a)):
        counts = f"{len(a)} of a, {len(b)} of b" + ("" if out is None else f", {len(out)} of out")
        raise BadRequest("a", counts, "as many of each, and one at least")
    for name, tensor in request.matrices:
        given: object = tensor  # what users give may be anything
        if not isinstance(given, Tensor) or given.ndim != 2:
            said = str(given.layout) if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise BadRequest(name, said, "a Tensor of two axes")
        check_extents(name, tensor)
        first = getattr(request, name.partition("[")[0])[0]
        if tensor.dtype is not first.dtype:
            raise BadRequest(name, str(tensor.dtype), f"{first.dtype}, as the first one is")
    for place, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.shape[1] != other.shape[0]:
            raise BadRequest(f"b[{place}]", str(other.layout), f"{one.shape[1]} rows, as a[{place}] has columns")
    validate_choices(request)
    _validate_memory(request)


def _validate_memory(request: GroupedMatmulListRequest) -> None:
    uses = request.tensors()
    request.device.check(*(tensor for _, tensor, _ in uses))
    for name, tensor, _ in uses:
        if tensor.device is not request.device:
            raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {request.device!r}, as a is")
    for place, (out, (m, n, _)) in enumerate(zip(request.out or (), request.extents, strict=False)):
        if out.shape != (m, n) or out.layout.readonly or out.layout.meets_itself:
            wanted = f"shape ({m}, {n}) in memory that may be written, its own for each element"
            raise BadRequest(f"out[{place}]", str(out.layout), wanted)
    for place, out in enumerate(request.out or ()):
        for name, tensor, _ in uses:
            if name != f"out[{place}]" and overlap(out, tensor):
                raise BadRequest(f"out[{place}]", f"memory that overlaps {name}", "memory of its own")
