"""What the requests of CUTLASS's convolutions share beside a convolution's geometry: an epilogue tree and its operands.

`request.py` derives the three requests from it; geometry and its checks are those of `dispatch.ops.conv`. The result is
a matrix of pixels by channels to the tree: a row is a vector of channels, a col one number for each pixel.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import NO_NUMBERS
from dispatch.core.layouts import dense_strides
from dispatch.core.operands import Made
from dispatch.core.request import Signature
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Refused
from dispatch.keys import F32
from dispatch.libraries.cutlass.evt import Reduce, Store, walk
from dispatch.libraries.cutlass.evt_operands import Treed, check_tree, pairs_of
from dispatch.ops.conv.base import ConvRequest

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands, Use
    from dispatch.keys import Dtype
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["TreedConvRequest"]

Shape = tuple[int, ...]
OWN = ("alpha", "beta")
RESERVED = "problem_"  # what the words of a kernel's problem begin with


class TreedConvRequest(Treed, ConvRequest):
    """A convolution whose result goes through a tree; a subclass is a frozen dataclass with `eq=False`."""

    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    writes: ClassVar[tuple[str, ...]] = ("out",)
    mode: ClassVar[str]  # as in ConvSpec
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False
    c: Tensor | None
    epilogue: Node | None
    operands: Any
    config: Config | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", pairs_of(self.operands))
        if self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.c is None else 1.0)
        super().__post_init__()

    @property
    @abstractmethod
    def result_shape(self) -> Shape:
        """The shape of the result: (N, channels, spatial…), or of the filter."""

    @property
    def required(self) -> tuple[str, ...]:
        return self.reads[:2]

    @property
    def _accumulates(self) -> bool:
        return False  # what is added is `c`, which may be out itself

    # -- the tree and what it names -------------------------------------------------------------------------------
    @cached_property
    def produced(self) -> dict[str, Made]:
        """The outputs that the tree names, as they are allocated."""
        shapes = {"m": self.result_shape[1:2], "n": self._pixels, "mn": ()}
        found = {}
        for node in walk(self.tree):
            if isinstance(node, Store):
                found[node.name] = self._image(node.dtype or self.result_dtype)
            elif isinstance(node, Reduce):
                found[node.name] = Made(shapes[node.over], c_strides(shapes[node.over]), F32)
        return found

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of the result as a matrix: pixels by channels, or filters by channels and taps."""
        shape = self.result_shape
        return (shape[0], prod(shape[1:])) if self.mode == "bwd_filter" else (prod(self._pixels), shape[1])

    @property
    def _pixels(self) -> Shape:
        return (self.result_shape[0], *self.result_shape[2:])

    def _image(self, dtype: Dtype) -> Made:
        return Made(self.result_shape, dense_strides(self.result_shape, last=True), dtype)

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        first, second = (getattr(self, name).dtype for name in self.reads[:2])
        return (first, second, self.result_dtype, None if self.c is None else self.c.dtype)

    def signature(self) -> Signature:
        return Signature(self.dtypes, self.compute)

    def made(self) -> dict[str, Made]:
        return {"out": self._image(self.result_dtype), **self.produced}

    def choices(self) -> tuple[Any, ...]:
        given = tuple((name, x.layout if isinstance(x, Tensor) else None) for name, x in self.given.items())
        return (*self.steps, self.result_shape, self.tree, given, self.compute, self.result_dtype.cuda, self.config)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        named = {**self.given, **outputs}
        # An address is an int and a number never is, so that a plan tells them apart. -0.0 is 0: they are one record.
        rest = (x.ptr if isinstance(x, Tensor) else float(x) + 0.0 for x in (named[name] for name in self.kinds))
        return (*super().arguments(outputs), *rest)

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        named = [(name, getattr(self, name), name == "out") for name in (*self.reads, "out")]
        named += [(name, x, name in self.produced) for name, x in self.given.items()]
        return tuple((name, x, written) for name, x, written in named if isinstance(x, Tensor))

    @cached_property
    def _missing(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        there = {name for name, _, _ in self.tensors()}
        return {name: (m.shape, m.strides, m.dtype) for name, m in self._made.items() if name not in there}

    def result(self, outputs: Operands) -> Any:
        given = {name: tensor for name, tensor, _ in self.tensors()}
        found = [outputs.get(name, given.get(name)) for name in self._made]
        return found[0] if len(found) == 1 else tuple(found)

    def replace(self, **operands: Tensor) -> TreedConvRequest:
        fixed = (*self.reads, "out", *OWN)
        own = {name: x for name, x in operands.items() if name in fixed}
        named = {name: x for name, x in operands.items() if name not in own}
        for name in named:
            if name not in self.kinds:
                raise BadRequest(name, "no operand of this request", f"one of {', '.join((*fixed, *self.kinds))}")
        added: dict[str, Any] = {"operands": {**dict(self.operands), **named}} if named else {}
        return cast("TreedConvRequest", super().replace(**own, **added))

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_tree(self) -> None:
        """The tree can be named, and each of its names is given as what it takes it for."""
        for name in ("deterministic", "workspace", "autotune"):
            if getattr(self, name):
                raise BadRequest(name, repr(getattr(self, name)), "none: a kernel of CUTLASS leaves no such choice")
        check_tree(self.epilogue, self.config)
        try:
            kinds = self.kinds
        except Refused as refused:
            raise BadRequest("epilogue", str(self.epilogue), str(refused)) from None
        for name, _ in self.operands:
            if name not in kinds or name in OWN:
                known = ", ".join(kinds) or "none"
                raise BadRequest(f"operands[{name!r}]", "an operand", f"one of {known}: the tree's names")
        for name, kind in kinds.items():
            if name.startswith(RESERVED):
                raise BadRequest("epilogue", f"the name {name!r}", f"one that does not begin with {RESERVED}")
            self._check_operand(name, kind)
        self.check_scalars(getattr(self, self.reads[0]).dtype)

    def _check_operand(self, name: str, kind: str) -> None:
        given = self.given.get(name)
        place = f"operands[{name!r}]"
        if given is None and kind not in ("store", "reduce"):
            raise BadRequest(place, "nothing", f"the {kind} that the epilogue reads")
        number = isinstance(given, (int, float, np.number)) and not isinstance(given, NO_NUMBERS)
        if given is not None and not isinstance(given, Tensor) and not (kind == "scalar" and number):
            raise BadRequest(place, repr(given), "a number or a Tensor" if kind == "scalar" else "a Tensor")
        if not isinstance(given, Tensor):
            return
        self.device.check(given)
        if given.device is not self.device:
            raise BadRequest(place, f"a tensor on {given.device!r}", f"one on {self.device!r}")
        wanted = {"row": self.result_shape[1:2], "col": self._pixels, "load": self.result_shape}
        if kind == "scalar" and given.size != 1:
            raise BadRequest(place, str(given.layout), "a number, or a tensor of one element")
        if kind in wanted and given.shape != wanted[kind]:
            raise BadRequest(place, f"shape {given.shape}", f"shape {wanted[kind]}")
        made = self.produced.get(name)
        if made is not None and (given.shape, given.dtype) != (made.shape, made.dtype):
            raise BadRequest(place, str(given.layout), f"{made.dtype}{list(made.shape)}, as the epilogue says")

    def _check_source(self) -> None:
        if self.c is not None and self.c.shape != self.result_shape:
            raise BadRequest("c", str(self.c.layout), f"shape {self.result_shape}, that of the result")
        if self.c is None and self.beta:
            raise BadRequest("beta", repr(self.beta), "0, for there is no c to be scaled", "pass c=…")
