"""The fields and checks that the two requests of grouped products share: all but the matrices and their layout.

`request.py` and `request_lists.py` derive from GroupedBase. A request is validated when it is made, as far as the host
has the values. This file calls no library.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import NO_NUMBERS, check_kinds, check_library, read_choices, shown
from dispatch.core.factors import F32_MAX, F32_NUMBER
from dispatch.core.overlap import overlap
from dispatch.core.request import NamedArguments, R_co, Request, Signature, Unpacked
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F32, FP8, Compute, Dtype, member
from dispatch.libraries.cutlass.evt import accumulator, scalar
from dispatch.libraries.cutlass.evt_operands import check_factor_is_read, check_tree, reads_the_source
from dispatch.libraries.cutlass.visitors import operands_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.core.request import Argument, Use
    from dispatch.device.device import Device
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["GroupedBase"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GroupedBase(Request[R_co]):
    """Products in groups by one kernel.

    Attributes:
        epilogue: a tree of `dispatch.evt` over the accumulator and `evt.scalar("alpha")`, which is alpha; None for
            alpha · A · B.
        alpha: a number, or an f32 tensor of one element.
        out_dtype: the dtype of D; None for that of `out`, else A's, bf16 for fp8.
        fast_accum: fp8 only; sums in the tensor cores' own precision.
        config: tile, cluster and schedule, one of this op's CONFIGS; None takes what suits the groups' mean extents.
        autotune: time the rows of all libraries that support the request once, keep the fastest, and remember it on
            disk.
        library: use only rows of this library, "cutlass", "cublasLt" or "cublas"; None asks all rows in the table's
            order.
        compute: COMPUTE_32F_FAST_TF32 ("tf32") for lists of f32; None takes the dtypes' default.
    """

    op: ClassVar[str] = "grouped_matmul"
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))  # `ends` on the host are copied in each call
    _: KW_ONLY
    epilogue: Node | None = None
    alpha: Tensor | float = 1.0
    out_dtype: Any = None
    fast_accum: bool = False
    config: Config | None = None
    autotune: bool = False
    library: str | None = None
    compute: Compute | str | None = None

    # -- what a subclass defines ----------------------------------------------------------------------------------
    @property
    @abstractmethod
    def operands(self) -> Iterator[tuple[str, Tensor]]:
        """Each given tensor except alpha, by its name, in the order of the plans' addresses."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """The number of products."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The rows of all products together, at most."""

    @property
    @abstractmethod
    def n(self) -> int:
        """The largest number of columns of a product."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """The shape of each output by its name."""

    @abstractmethod
    def first(self, name: str) -> Tensor:
        """The tensor of a field; the first one if the field has several."""

    # -- derived properties ---------------------------------------------------------------------------------------
    @property
    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Each given matrix, by its name."""
        return ((name, tensor) for name, tensor in self.operands if name != "ends")

    @cached_property
    def given_out(self) -> dict[str, Tensor]:
        """The given outputs, by their names: all or none."""
        return {name: tensor for name, tensor in self.operands if name.startswith("out")}

    @cached_property
    def tree(self) -> Node:
        """The epilogue; alpha · A · B if none was given."""
        return self.epilogue if self.epilogue is not None else scalar("alpha") * accumulator()

    @cached_property
    def d_dtype(self) -> Dtype:
        """The dtype of D: that of `out`, `out_dtype`, or A's (bf16 for fp8)."""
        if self.given_out:
            return self.first("out").dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        a = self.first("a").dtype
        return BF16 if a in FP8 else a

    @property
    def device(self) -> Device:
        return self.first("a").device

    def signature(self) -> Signature:
        dtypes = (self.first("a").dtype, self.first("b").dtype, self.d_dtype, self.d_dtype)
        return Signature(dtypes, member(self.compute), library=self.library)

    def key(self) -> tuple[Any, ...]:
        layouts = tuple(tensor.layout for _, tensor in self.operands)
        alpha = self.alpha.layout if isinstance(self.alpha, Tensor) else None
        choices = (self.tree, self.d_dtype.cuda, self.fast_accum, self.config, self.autotune, self.library)
        return (self.groups, layouts, alpha, *choices, self.compute)

    @property
    def alpha_argument(self) -> Argument:
        """Alpha as an argument of a plan: its address, or the number."""
        return self.alpha.ptr if isinstance(self.alpha, Tensor) else float(self.alpha) + 0.0  # -0.0 becomes 0.0

    def named_arguments(self) -> NamedArguments:
        names = {name: None for name, _ in self.operands} | dict.fromkeys(self.shapes)
        numbers = {"alpha": F32_NUMBER} if "alpha" in operands_of(self.tree) else {}
        return NamedArguments((*names, "alpha"), numbers)

    def tensors(self) -> tuple[Use, ...]:
        uses = tuple((name, tensor, name in self.given_out) for name, tensor in self.operands)
        return (*uses, ("alpha", self.alpha, False)) if isinstance(self.alpha, Tensor) else uses

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        if self.given_out:
            return {}
        return {name: _padded(shape, self.d_dtype) for name, shape in self.shapes.items()}

    @property
    def choices(self) -> str:
        """The choices for `describe`."""
        fast = (", fast_accum" if self.fast_accum else "") + (f", config={self.config}" if self.config else "")
        compute = member(self.compute)
        return f"epilogue {self.tree}{fast}{f', {compute.name}' if compute is not None else ''}"

    # -- checks ---------------------------------------------------------------------------------------------------
    def check_choices(self) -> None:
        """Raise BadRequest for invalid values of the fields other than matrices."""
        check_library("library", self.library)
        read_choices(self)
        self._check_tree()
        self._check_alpha()
        check_kinds(self)
        if self.out_dtype is not None and Dtype.of(self.out_dtype) is not self.d_dtype:
            raise BadRequest("out_dtype", shown(self.out_dtype), f"{self.d_dtype}, the dtype of out, or None")

    def _check_tree(self) -> None:
        """Check that the epilogue reads and writes nothing but the accumulator and alpha."""
        check_tree(self.epilogue, self.config)
        others = [name for name in operands_of(self.tree) if name != "alpha"]
        others = [f"operands {', '.join(others)}"] if others else []
        others += ["evt.source()"] if reads_the_source(self.tree) else []
        if others:
            expected = "a tree that reads only the accumulator and alpha"
            raise BadRequest("epilogue", " and ".join(others), expected)

    def _check_alpha(self) -> None:
        """Check that alpha is a number or a tensor that kernels can read, and that the tree reads it unless it is 1."""
        alpha: object = self.alpha
        if isinstance(alpha, Tensor):
            if alpha.size != 1 or alpha.dtype is not F32:
                raise BadRequest("alpha", str(alpha.layout), "a number, or an f32 tensor of one element")
        elif isinstance(alpha, NO_NUMBERS) or not isinstance(alpha, (int, float, np.integer, np.floating)):
            raise BadRequest("alpha", shown(alpha), "a number, or an f32 tensor of one element")
        elif F32_MAX < abs(alpha if isinstance(alpha, int) else float(alpha)) < math.inf:
            raise BadRequest("alpha", shown(alpha), f"a number in the range of f32, up to {F32_MAX:.4g}")
        check_factor_is_read("alpha", alpha, 1, operands_of(self.tree))

    def check_memory(self) -> None:
        """Check that all is on one device, and that each output has its shape, and memory of its own."""
        uses = self.tensors()
        self.device.check(*(tensor for _, tensor, _ in uses))
        for name, tensor, _ in uses:
            if tensor.device is not self.device:
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {self.device!r}, the device of a")
        for name, out in self.given_out.items():
            shape = self.shapes[name]
            if out.shape != shape or out.layout.readonly or out.layout.meets_itself:
                wanted = f"shape {shape} in writable memory, with a different address for each element"
                raise BadRequest(name, str(out.layout), wanted)
        for name, out in self.given_out.items():
            for other_name, other, _ in uses:
                if other_name != name and overlap(out, other):
                    raise BadRequest(name, f"memory that overlaps {other_name}", "memory of its own")


def _padded(shape: Shape, dtype: Dtype) -> tuple[Shape, Shape, Dtype]:
    """A matrix to be allocated, with rows at multiples of 16 bytes, as tensor maps need them."""
    step = 128 // dtype.bits
    return shape, (-(-shape[1] // step) * step, 1), dtype
