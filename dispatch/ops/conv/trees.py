"""What of a convolution request is for CUTLASS's kernels: an epilogue tree, what it names, and the choice of a library.

`base.py` derives the requests' base from it. The result is a matrix of pixels by channels to the tree: a row is a
vector of channels, a col one number for each pixel. A request without any of it is as if there were no such thing.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from cudabind._cached import cached_property
from dispatch.checks import check_library
from dispatch.core.layouts import dense_strides
from dispatch.core.operands import OperandRequest, Output
from dispatch.core.request import NamedArguments, R_co, Unpacked
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import F32
from dispatch.libraries.cutlass.evt import Reduce, Store, walk
from dispatch.libraries.cutlass.evt_operands import EpilogueTreeMixin, check_tree, numbers_of, pairs_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.core.request import Argument, Operands, Use
    from dispatch.keys import Compute, Dtype
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["TreeConvRequest"]

Shape = tuple[int, ...]
SCALARS = ("alpha", "beta")
RESERVED = "problem_"  # what the words of a kernel's problem begin with
IN_PLACE = frozenset({("out", "z")})


class TreeConvRequest(EpilogueTreeMixin, OperandRequest[R_co]):
    """A convolution whose result may go through a tree.

    Attributes:
        epilogue: a tree of `dispatch.evt`, which CUTLASS compiles; its `evt.source()` is z. None for what the other
            fields say. Rows of it are one number for each channel of the result, cols (N, spatial…), what it loads and
            stores is of the result's shape. The result, and what the tree stores, then lies with channels last.
        operands: what the tree names: tensors, or numbers for its scalars. A pair of each, or a mapping.
        config: tile, cluster and schedule of a kernel of CUTLASS; None for what suits the extents.
        library: the one whose rows alone are asked, such as "cudnn" or "cutlass"; None asks all in the table's order.
    """

    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",), numbers=("alpha", "beta"))
    mode: ClassVar[str]  # as in ConvSpec
    operand_names: ClassVar[tuple[str, ...]]  # what is convolved, by name
    z: Tensor | None
    out: Tensor | None
    epilogue: Node | None
    operands: Any
    config: Config | None
    library: str | None
    alpha: float
    beta: float
    compute: Compute | str | None
    deterministic: bool
    workspace: int | None
    autotune: bool
    result_dtype: Dtype | cached_property[Any]

    def __post_init__(self) -> None:
        adopt(self)
        check_library("library", self.library)
        check_tree(self.epilogue, self.config)
        object.__setattr__(self, "operands", pairs_of(self.operands))
        if self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.z is None else 1.0)
        super().__post_init__()

    @property
    @abstractmethod
    def result_shape(self) -> Shape:
        """The shape of the result: (N, channels, spatial…), or of the filter."""

    @cached_property
    def has_tree(self) -> bool:
        """Whether only CUTLASS can carry it out: it has a tree, or asks for what only CUTLASS has."""
        added = self.mode != "fwd" and self.z is not None
        return self.epilogue is not None or self.config is not None or self.library == "cutlass" or added

    @classmethod
    def plain_reads(cls) -> tuple[str, ...]:
        """Of those that have no tree: `operands` may hold tensors."""
        return cls.operand_names

    @property
    def is_plain(self) -> bool:
        return not self.has_tree and not self.operands

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (*self.operand_names, "z") if self.has_tree else self.operand_names

    @cached_property
    def in_place(self) -> frozenset[tuple[str, str]]:
        return IN_PLACE if self.has_tree else frozenset()

    @property
    def required(self) -> tuple[str, ...]:
        return self.operand_names[:2]

    @property
    def accumulates(self) -> bool:
        """Whether beta scales what was in `out` before."""
        return self.mode != "fwd" and self.beta != 0 and self.z is None

    @property
    def c(self) -> Tensor | None:  # type: ignore[override]
        """The tree's source."""
        return self.out if self.accumulates else self.z

    @property
    def source_dtype(self) -> tuple[Dtype, ...]:
        """The dtype of z, or none."""
        return () if self.z is None else (self.z.dtype,)

    # -- the tree and what it names -------------------------------------------------------------------------------
    @cached_property
    def tree_outputs(self) -> dict[str, Output]:
        """The outputs that the tree names, as they are allocated."""
        shapes = {"m": self.result_shape[1:2], "n": self._pixels, "mn": ()}
        found = {}
        for node in walk(self.tree):
            if isinstance(node, Store):
                found[node.name] = self.image(node.dtype or self.result_dtype, last=True)
            elif isinstance(node, Reduce):
                found[node.name] = Output(shapes[node.over], c_strides(shapes[node.over]), F32)
        return found

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of the result as a matrix: pixels by channels, or filters by channels and taps."""
        shape = self.result_shape
        return (shape[0], prod(shape[1:])) if self.mode == "bwd_filter" else (prod(self._pixels), shape[1])

    @property
    def _pixels(self) -> Shape:
        return (self.result_shape[0], *self.result_shape[2:])

    def image(self, dtype: Dtype, *, last: bool) -> Output:
        """A tensor of the result's shape, dense, with channels last or first."""
        return Output(self.result_shape, dense_strides(self.result_shape, last=last), dtype)

    # -- the contract of Request ----------------------------------------------------------------------------------
    def tree_choices(self) -> tuple[Any, ...]:
        """What of the key of a request through a tree is no layout."""
        given = tuple((name, x.layout if isinstance(x, Tensor) else None) for name, x in self.operand_values.items())
        return (self.result_shape, self.tree, given, self.compute, self.result_dtype.cuda, self.config, self.library)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        if not self.has_tree:
            return super().arguments(outputs)
        named = {**self.operand_values, **outputs}
        # An address is an int and a number never is, so that a plan tells them apart. -0.0 is 0: they are one record.
        rest = (x.ptr if isinstance(x, Tensor) else float(x) + 0.0 for x in (named[name] for name in self.kinds))
        return (*super().arguments(outputs), *rest)

    def named_arguments(self) -> NamedArguments | None:
        if not self.has_tree:
            return None  # the way of operands that are fields finds it
        fixed_scalars = () if self.z is not None else ("beta",)  # without z it says whether there is a source
        return NamedArguments((*self.reads, "out", *self.kinds), numbers_of(self.kinds, fixed_scalars), self.in_place)

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        named: list[tuple[str, Any, bool]] = [
            (name, getattr(self, name), name == "out") for name in (*self.reads, "out")
        ]
        if self.has_tree:
            named += [(name, x, name in self.tree_outputs) for name, x in self.operand_values.items()]
        return tuple((name, x, written) for name, x, written in named if isinstance(x, Tensor))

    @cached_property
    def _unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        there = {name for name, _, _ in self.tensors()}
        return {name: (m.shape, m.strides, m.dtype) for name, m in self._outputs.items() if name not in there}

    def result(self, outputs: Operands) -> R_co:
        if not self.has_tree:
            return super().result(outputs)
        given = {name: tensor for name, tensor, _ in self.tensors()}
        found: Any = [outputs.get(name, given.get(name)) for name in self._outputs]
        return cast("R_co", found[0] if len(found) == 1 else tuple(found))

    def replace(self, **operands: Tensor) -> Self:
        if not self.has_tree:
            return super().replace(**operands)
        fixed = (*self.reads, "out", *SCALARS)
        own = {name: x for name, x in operands.items() if name in fixed}
        named = {name: x for name, x in operands.items() if name not in own}
        for name in named:
            if name not in self.kinds:
                raise BadRequest(name, "no operand of this request", f"one of {', '.join((*fixed, *self.kinds))}")
        added: dict[str, Any] = {"operands": {**dict(self.operands), **named}} if named else {}
        return super().replace(**own, **added)

    def _named_choices(self) -> list[str]:
        tree = ("bias", "z", "epilogue", "operands", "config", "library")
        return [name for name in super()._named_choices() if name not in tree or getattr(self, name) not in (None, ())]

    # -- checks ---------------------------------------------------------------------------------------------------
    def check_source(self) -> None:
        """What is added is of the result's shape."""
        if self.z is not None and self.z.shape != self.result_shape:
            raise BadRequest("z", str(self.z.layout), f"shape {self.result_shape}, that of the result")
        if self.mode == "fwd" and self.z is None and self.beta != 0:
            raise BadRequest("beta", repr(self.beta), "0, for there is no z to be scaled", "pass z=…")

    def check_operands(self) -> None:
        """The tree can be named, and each of its names is given as what it takes it for."""
        if not self.has_tree and not self.operands:
            return
        self.check_names(RESERVED)
        for name in ("deterministic", "workspace", "autotune"):
            if getattr(self, name):
                raise BadRequest(name, repr(getattr(self, name)), "none: a kernel of CUTLASS leaves no such choice")
        for name, kind in self.kinds.items():
            self._check_operand(name, kind)
        self.check_scalars(getattr(self, self.operand_names[0]).dtype)

    def _check_operand(self, name: str, kind: str) -> None:
        given = self.operand_values.get(name)
        place = f"operands[{name!r}]"
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
        made = self.tree_outputs.get(name)
        if made is not None and (given.shape, given.dtype) != (made.shape, made.dtype):
            raise BadRequest(place, str(given.layout), f"{made.dtype}{list(made.shape)}, as the epilogue says")
