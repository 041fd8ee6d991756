"""The fields of a convolution request for CUTLASS's kernels: an epilogue tree, its operands, and the library.

`base.py` derives the requests' base class from TreeConvRequest. For the tree, the result is a matrix of pixels by
channels: a row is a vector of channels, a col has one number for each pixel. Requests that use none of these fields
behave as if they did not exist.
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
RESERVED = "problem_"  # the prefix of the words of a kernel's problem
IN_PLACE = frozenset({("out", "z")})


class TreeConvRequest(EpilogueTreeMixin, OperandRequest[R_co]):
    """A convolution with an optional epilogue tree for its result.

    Attributes:
        epilogue: a tree of `dispatch.evt`, which CUTLASS compiles; None for the epilogue of the other fields. Its
            `evt.source()` is what beta scales: z, or without a z, of gradients, `out`. Its `evt.scalar("alpha")` and
            `evt.scalar("beta")` are alpha and beta. A z, alpha or beta that the tree does not read is refused. Rows of
            the tree have one number for each channel of the result, cols are (N, spatial…), and loaded and stored
            tensors have the result's shape. The result and stored tensors then have channels last.
        operands: the tensors that the tree names, and numbers for its scalars: (name, operand) pairs, or a mapping.
        config: tile, cluster and schedule of a CUTLASS kernel; None takes what suits the extents.
        library: use only rows of this library, such as "cudnn" or "cutlass"; None asks all rows in the table's order.
    """

    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",), numbers=("alpha", "beta"))
    mode: ClassVar[str]  # as in ConvSpec
    operand_names: ClassVar[tuple[str, ...]]  # the operands of the convolution, by name
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
        """Whether only CUTLASS can run the request: it has a tree, or uses an option that only CUTLASS has."""
        added = self.mode != "fwd" and self.z is not None
        return self.epilogue is not None or self.config is not None or self.library == "cutlass" or added

    @classmethod
    def plain_reads(cls) -> tuple[str, ...]:
        """The operands of requests without a tree, whose `operands` may hold tensors."""
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
        """Whether beta scales the previous content of `out`."""
        return self.mode != "fwd" and self.beta != 0 and self.z is None

    @property
    def c(self) -> Tensor | None:  # type: ignore[override]
        """The tree's source."""
        return self.out if self.accumulates else self.z

    @property
    def source_dtype(self) -> tuple[Dtype, ...]:
        """A tuple of the dtype of z; empty without a z."""
        return () if self.z is None else (self.z.dtype,)

    # -- the tree and its operands --------------------------------------------------------------------------------
    @cached_property
    def tree_outputs(self) -> dict[str, Output]:
        """The outputs that the tree names, with the shapes and strides in which they are allocated."""
        shapes = {"m": self.result_shape[1:2], "n": self._pixels, "mn": ()}
        outputs = {}
        for node in walk(self.tree):
            if isinstance(node, Store):
                outputs[node.name] = self.image(node.dtype or self.result_dtype, last=True)
            elif isinstance(node, Reduce):
                outputs[node.name] = Output(shapes[node.over], c_strides(shapes[node.over]), F32)
        return outputs

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of the result as a matrix: pixels by channels, or filters by channels and taps."""
        shape = self.result_shape
        return (shape[0], prod(shape[1:])) if self.mode == "bwd_filter" else (prod(self._pixels), shape[1])

    @property
    def _pixels(self) -> Shape:
        return (self.result_shape[0], *self.result_shape[2:])

    def image(self, dtype: Dtype, *, last: bool) -> Output:
        """A dense tensor of the result's shape, with channels last or first."""
        return Output(self.result_shape, dense_strides(self.result_shape, last=last), dtype)

    # -- the contract of Request ----------------------------------------------------------------------------------
    def tree_choices(self) -> tuple[Any, ...]:
        """The part of the key of a request with a tree that is not layouts."""
        layouts = tuple((name, x.layout if isinstance(x, Tensor) else None) for name, x in self.operand_values.items())
        return (self.result_shape, self.tree, layouts, self.compute, self.result_dtype.cuda, self.config, self.library)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        if not self.has_tree:
            return super().arguments(outputs)
        named = {**self.operand_values, **outputs}
        # Addresses are ints and numbers are floats, so that a plan can distinguish them. -0.0 becomes 0.0.
        tree_arguments = (
            x.ptr if isinstance(x, Tensor) else float(x) + 0.0 for x in (named[name] for name in self.kinds)
        )
        return (*super().arguments(outputs), *tree_arguments)

    def named_arguments(self) -> NamedArguments | None:
        if not self.has_tree:
            return None  # OperandRequest handles operands that are fields
        fixed_scalars = () if self.z is not None else ("beta",)  # without z it determines whether there is a source
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
        given_names = {name for name, _, _ in self.tensors()}
        return {name: (m.shape, m.strides, m.dtype) for name, m in self._outputs.items() if name not in given_names}

    def result(self, outputs: Operands) -> R_co:
        if not self.has_tree:
            return super().result(outputs)
        tensors = {name: tensor for name, tensor, _ in self.tensors()}
        results: Any = [outputs.get(name, tensors.get(name)) for name in self._outputs]
        return cast("R_co", results[0] if len(results) == 1 else tuple(results))

    def replace(self, **operands: Tensor) -> Self:
        if not self.has_tree:
            return super().replace(**operands)
        fixed = (*self.reads, "out", *SCALARS)
        fields = {name: x for name, x in operands.items() if name in fixed}
        named = {name: x for name, x in operands.items() if name not in fields}
        for name in named:
            if name not in self.kinds:
                raise BadRequest(
                    name, "a name that is not an operand of this request", f"one of {', '.join((*fixed, *self.kinds))}"
                )
        added: dict[str, Any] = {"operands": {**dict(self.operands), **named}} if named else {}
        return super().replace(**fields, **added)

    def _named_choices(self) -> list[str]:
        tree = ("bias", "z", "epilogue", "operands", "config", "library")
        return [name for name in super()._named_choices() if name not in tree or getattr(self, name) not in (None, ())]

    # -- checks ---------------------------------------------------------------------------------------------------
    def check_source(self) -> None:
        """Check that z has the result's shape."""
        if self.z is not None and self.z.shape != self.result_shape:
            raise BadRequest("z", str(self.z.layout), f"shape {self.result_shape}, that of the result")
        if self.mode == "fwd" and self.z is None and self.beta != 0:
            raise BadRequest("beta", repr(self.beta), "0, because no z is passed that could be scaled", "pass z=…")

    def check_operands(self) -> None:
        """Check the tree's names, and that each operand fits its use in the tree."""
        if not self.has_tree and not self.operands:
            return
        self.check_names(RESERVED)
        self.check_reads("z", self.z)
        for name in ("deterministic", "workspace", "autotune"):
            if getattr(self, name):
                raise BadRequest(name, repr(getattr(self, name)), "None: CUTLASS kernels do not have this choice")
        for name, kind in self.kinds.items():
            self._check_operand(name, kind)
        self.check_scalars(getattr(self, self.operand_names[0]).dtype)

    def _check_operand(self, name: str, kind: str) -> None:
        operand = self.operand_values.get(name)
        label = f"operands[{name!r}]"
        if not isinstance(operand, Tensor):
            return
        self.device.check(operand)
        if operand.device is not self.device:
            raise BadRequest(label, f"a tensor on {operand.device!r}", f"one on {self.device!r}")
        shapes = {"row": self.result_shape[1:2], "col": self._pixels, "load": self.result_shape}
        if kind == "scalar" and operand.size != 1:
            raise BadRequest(label, str(operand.layout), "a number, or a tensor of one element")
        if kind in shapes and operand.shape != shapes[kind]:
            raise BadRequest(label, f"shape {operand.shape}", f"shape {shapes[kind]}")
        output = self.tree_outputs.get(name)
        if output is not None and (operand.shape, operand.dtype) != (output.shape, output.dtype):
            raise BadRequest(
                label, str(operand.layout), f"{output.dtype}{list(output.shape)}, as the epilogue specifies"
            )
