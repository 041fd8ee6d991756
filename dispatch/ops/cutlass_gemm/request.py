"""CutlassGemmRequest: D = tree(A · B, C, operands), row-major, batched, with an epilogue tree of the user's own.

Making a request validates it. Which kernel carries it out is for the table's rows and for
config.py. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import NO_NUMBERS, check_kinds, check_number
from dispatch.core.operand_checks import check_extents
from dispatch.core.overlap import broadcast, overlap
from dispatch.core.request import Argument, Operands, Request, Signature, Use
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, F32, FP8, HALF, I8, I32, Compute, Dtype
from dispatch.libraries.cutlass.evt import Reduce, Store, walk
from dispatch.libraries.cutlass.evt_operands import Given, Treed, check_tree, pairs_of

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["CutlassGemmRequest"]

Shape = tuple[int, ...]
TENSORS = ("a", "b", "c", "out")


@dataclass(frozen=True, eq=False)
class CutlassGemmRequest(Treed, Request):
    """One product of A (…, m, k) and B (…, k, n) by a CUTLASS kernel; there is at most one batch axis.

    Attributes:
        a, b: the operands; rows or columns are dense, and the others a multiple of 16 bytes apart.
        c: the source (…, m, n), which the tree reads as `evt.source()`.
        out: D, of `out_dtype`. Lines that end amid 16 bytes are copied to it: tensor maps would write on behind them.
        epilogue: a tree of `dispatch.evt`; None for alpha · A · B + beta · C.
        operands: what the tree names: tensors, or numbers for its scalars. A pair of each, or a mapping.
        alpha, beta: the scalars of those names.
        compute: COMPUTE_32F_FAST_TF32 for f32 operands, which only run in TF32; else None.
        fast_accum: fp8 only; sums in the tensor cores' own precision.
        config: tile, cluster, schedule and order; None for what suits the extents.
        autotune: without a config: time kernels and cuBLASLt once, keep the fastest, and remember it on disk.
    """

    op: ClassVar[str] = "cutlass_gemm"
    a: Tensor
    b: Tensor
    c: Tensor | None = None
    out: Tensor | None = None
    epilogue: Node | None = None
    operands: Any = ()
    alpha: Given = 1.0
    beta: Given | None = None
    compute: Compute | None = None
    out_dtype: Any = None
    fast_accum: bool = False
    config: Config | None = None
    autotune: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", pairs_of(self.operands))
        if self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.c is None else 1.0)
        _validate(self)

    # -- sizes and choices ----------------------------------------------------------------------------------------
    @property
    def m(self) -> int:
        return self.a.shape[-2]

    @property
    def n(self) -> int:
        return self.b.shape[-1]

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @cached_property
    def batch(self) -> Shape:
        """The batch axes of D: those of A and B, broadcast."""
        return broadcast(self.a.shape[:-2], self.b.shape[:-2])

    @property
    def batches(self) -> int:
        """How many products there are."""
        return int(np.prod(self.batch, dtype=np.int64))

    @cached_property
    def shape(self) -> Shape:
        return (*self.batch, self.m, self.n)

    @cached_property
    def d_dtype(self) -> Dtype:
        """The dtype of D: that of `out`, `out_dtype`, or what the operands lead to (bf16 for fp8, i32 for i8)."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        return BF16 if self.a.dtype in FP8 else I32 if self.a.dtype is I8 else self.a.dtype

    @property
    def c_dtype(self) -> Dtype:
        """The dtype of C; without one, that of the row: D's, or one of 16 bits beside a D of 8."""
        if self.c is not None:
            return self.c.dtype
        if self.d_dtype.bits > 8 or self.a.dtype is I8:
            return self.d_dtype
        return self.a.dtype if self.a.dtype in HALF else BF16

    @cached_property
    def writes(self) -> dict[str, tuple[Shape, Dtype]]:
        """The outputs that the tree names: shape and dtype."""
        shapes = {"m": (*self.batch, self.n), "n": (*self.batch, self.m), "mn": self.batch}
        made: dict[str, tuple[Shape, Dtype]] = {}
        for node in walk(self.tree):
            if isinstance(node, Store):
                made[node.name] = self.shape, node.dtype or self.d_dtype
            elif isinstance(node, Reduce):
                made[node.name] = shapes[node.over], F32
        return made

    @cached_property
    def not_whole(self) -> tuple[str, ...]:
        """The scalars of an i32 D that are given as numbers which no i32 is."""
        if self.d_dtype is not I32:
            return ()
        numbers = {name: float(x) for name, x in self.given.items() if not isinstance(x, Tensor)}
        return tuple(name for name, x in numbers.items() if not (x.is_integer() and -(2**31) <= x < 2**31))

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        return self.a.device

    def signature(self) -> Signature:
        return Signature((self.a.dtype, self.b.dtype, self.c_dtype, self.d_dtype), self.compute)

    def key(self) -> tuple[Any, ...]:
        layouts = tuple(None if t is None else t.layout for t in (self.a, self.b, self.c, self.out))
        given = tuple((name, x.layout if isinstance(x, Tensor) else None) for name, x in self.given.items())
        choices = (self.tree, self.compute, self.d_dtype.cuda, self.fast_accum, self.config, self.autotune)
        # Numbers are no part of it, but those that a row refuses: else they would find the plan of others.
        return (*layouts, given, *choices, self.not_whole)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        c = 0 if self.c is None else self.c.ptr
        pointers = (self.a.ptr, self.b.ptr, c, outputs.get("out", self.out).ptr)  # type: ignore[union-attr]
        named = {**self.given, **outputs}
        # An address is an int and a number never is, so that a plan tells them apart. -0.0 is 0: they are one record.
        rest = (x.ptr if isinstance(x, Tensor) else float(x) + 0.0 for x in (named[name] for name in self.kinds))
        return (*pointers, *rest)

    def tensors(self) -> tuple[Use, ...]:
        named = [(name, getattr(self, name), name == "out") for name in TENSORS]
        named += [(name, x, name in self.writes) for name, x in self.given.items()]
        return tuple((name, x, written) for name, x, written in named if isinstance(x, Tensor))

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        wanted = {} if self.out is not None else {"out": (self.shape, self.d_dtype)}
        wanted |= {name: made for name, made in self.writes.items() if name not in self.given}
        return {name: (shape, _strides(shape, dtype), dtype) for name, (shape, dtype) in wanted.items()}

    def result(self, outputs: Operands) -> Any:
        extra = tuple(self.given.get(name, outputs.get(name)) for name in self.writes)
        out = outputs.get("out", self.out)
        return (out, *extra) if extra else out

    def replace(self, **operands: Tensor) -> CutlassGemmRequest:
        own: dict[str, Any] = {name: x for name, x in operands.items() if name in (*TENSORS, "alpha", "beta")}
        named = {name: x for name, x in operands.items() if name not in own}
        for name in named:
            if name not in self.kinds:
                known = ", ".join((*TENSORS, *self.kinds))
                raise BadRequest(name, "no operand of this request", f"one of {known}")
        return replace(self, **own, operands={**dict(self.operands), **named})

    def describe(self) -> str:
        choices = {f.name: getattr(self, f.name) for f in fields(self) if f.name in ("compute", "config")}
        words = [f"{name}={value}" for name, value in choices.items() if value is not None]
        words += [name for name in ("fast_accum", "autotune") if getattr(self, name)]
        c = "" if self.c is None else f" + {self.c.layout}"
        text = f"cutlass_gemm {self.a.layout} x {self.b.layout}{c} -> {self.d_dtype}, epilogue {self.tree}"
        return ", ".join([text, *words])


def _strides(shape: Shape, dtype: Dtype) -> Shape:
    """C order, with rows at multiples of 16 bytes, as tensor maps need them."""
    if len(shape) < 2 or dtype.bits == 0:
        return c_strides(shape)
    step = 128 // dtype.bits
    pitch = -(-shape[-1] // step) * step
    return (*(s * pitch for s in c_strides(shape[:-1])), 1)


def _validate(request: CutlassGemmRequest) -> None:
    """Raise BadRequest for what no kernel could carry out."""
    for name in TENSORS:
        tensor = getattr(request, name)
        if not isinstance(tensor, Tensor) and (tensor is not None or name in "ab"):
            raise BadRequest(
                name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x) or from_dlpack(x)"
            )
    check_kinds(request)
    check_tree(request.epilogue, request.config)
    for name, value in (("alpha", request.alpha), ("beta", request.beta)):
        if not isinstance(value, Tensor):
            check_number(name, value)
    try:
        kinds = request.kinds
    except Refused as refused:
        raise BadRequest("epilogue", str(request.epilogue), str(refused)) from None
    _validate_operands(request, kinds)
    request.check_scalars(request.a.dtype)
    _validate_shapes(request)
    _validate_memory(request)


def _validate_operands(request: CutlassGemmRequest, kinds: dict[str, str]) -> None:
    """Each name of the tree is given, once, as what the tree takes it for."""
    for name, _ in request.operands:
        if name not in kinds or name in ("alpha", "beta"):
            raise BadRequest(
                f"operands[{name!r}]", "an operand", f"one of {', '.join(kinds) or 'none'}: the tree's names"
            )
    for name, kind in kinds.items():
        given = request.given.get(name)
        if given is None and kind not in ("store", "reduce"):
            raise BadRequest(f"operands[{name!r}]", "nothing", f"the {kind} that the epilogue reads")
        number = isinstance(given, (int, float, np.number)) and not isinstance(given, NO_NUMBERS)
        if given is not None and not isinstance(given, Tensor) and not (kind == "scalar" and number):
            raise BadRequest(
                f"operands[{name!r}]", repr(given), "a number or a Tensor" if kind == "scalar" else "a Tensor"
            )


def _validate_shapes(request: CutlassGemmRequest) -> None:
    a, b = request.a, request.b
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim < 2:
            raise BadRequest(name, str(tensor.layout), "two axes or more", "x[None] and x[:, None] add an axis")
        check_extents(name, tensor)
    if a.shape[-1] != b.shape[-2]:
        raise BadRequest("b", str(b.layout), f"{a.shape[-1]} rows, the columns of a {a.layout}", "transpose with .mT")
    try:
        batch = request.batch
    except ValueError:
        raise BadRequest("b", str(b.layout), f"batch axes that broadcast with those of a {a.layout}") from None
    m, n = request.m, request.n
    shapes = {
        "row": ((n,), (*batch, n)),
        "col": ((m,), (*batch, m)),
        "load": ((m, n), request.shape),
    }
    wanted: dict[str, tuple[Shape, ...]] = {"c": ((m, n), request.shape), "out": (request.shape,)}
    wanted |= {name: shapes[kind] for name, kind in request.kinds.items() if kind in shapes}
    wanted |= {name: (shape,) for name, (shape, _) in request.writes.items()}
    for name, tensor, _ in request.tensors():
        if request.kinds.get(name) == "scalar" and tensor.size != 1:
            raise BadRequest(name, str(tensor.layout), "a number, or a tensor of one element")
        if name in wanted and tensor.shape not in wanted[name]:
            raise BadRequest(name, f"shape {tensor.shape}", f"shape {' or '.join(map(str, wanted[name]))}")
        if name in request.writes and tensor.dtype is not request.writes[name][1]:
            raise BadRequest(name, str(tensor.layout), f"dtype {request.writes[name][1]}, as the epilogue says")
    if request.out is not None and request.out_dtype is not None and Dtype.of(request.out_dtype) is not request.d_dtype:
        raise BadRequest("out_dtype", str(request.out_dtype), f"{request.out.dtype}, the dtype of out, or None")


def _validate_memory(request: CutlassGemmRequest) -> None:
    """All tensors are of one device and alive, and what is written overlaps nothing else."""
    uses = request.tensors()
    home = request.a.device
    home.check(*(tensor for _, tensor, _ in uses))
    for name, tensor, written in uses:
        if tensor.device is not home:
            raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}, as a is")
        if not written:
            continue
        if tensor.layout.readonly or tensor.layout.meets_itself:
            raise BadRequest(name, str(tensor.layout), "memory that may be written, its own for each element")
        for other_name, other, _ in uses:
            same = name == "out" and other_name == "c" and _same(tensor, other)
            if other_name != name and not same and overlap(tensor, other):
                raise BadRequest(
                    name, f"memory that overlaps {other_name}", "memory of its own", "only c may be out itself"
                )


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.ptr, one.dtype, one.layout.strides) == (other.ptr, other.dtype, other.layout.strides)
