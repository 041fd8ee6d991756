"""GroupedMatmulRequest: the rows of A in groups, each of which is multiplied by its own matrix.

It is used for layers of experts: a router has written the groups' ends to device memory, and the host does not know the
groups' extents. A request is validated when it is made, as far as the host has the values. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dispatch.checks import as_array
from dispatch.core.operand_checks import check_extents
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import I32
from dispatch.ops.grouped_matmul.base import GroupedBase
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from dispatch.core.request import Argument, Operands
    from dispatch.device.layout import Array

__all__ = ["GroupedMatmulRequest", "check_ends"]

Shape = tuple[int, ...]
TENSORS = ("a", "b", "ends", "out")


@dataclass(frozen=True, eq=False)
class GroupedMatmulRequest(GroupedBase["Tensor"]):
    """D[rows of g] = tree(A[rows of g] · B[g]), where group g ends before row ends[g] and begins where g - 1 ends.

    Attributes:
        a: (total, k), rows dense. No extent is 0, but groups may be empty. Each line of a and b begins at a multiple of
            16 bytes.
        b: (groups, k, n).
        ends: i32 (groups,), or numbers on the host, which are copied to the device; not decreasing, the last one at
            most total. Rows after the last end are not written.
        out: D (total, n), of `out_dtype`, rows dense. Rows that do not end at a multiple of 16 bytes are copied to it,
            see matmul's.
    """

    a: Tensor
    b: Tensor
    ends: Tensor | Sequence[int]
    _: KW_ONLY
    out: Tensor | None = None

    def __post_init__(self) -> None:
        adopt(self)
        for name in ("a", "b", "out"):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) and not (name == "out" and tensor is None):
                raise BadRequest(name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x)")
        if not isinstance(self.ends, Tensor):
            object.__setattr__(self, "ends", _on_device(self.a, self.ends))
        self._check_matrices()
        self.check_choices()
        self.check_memory()

    def _check_matrices(self) -> None:
        a, b, ends = self.a, self.b, self.first("ends")
        if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[1]:
            raise BadRequest("b", f"{b.layout} with a {a.layout}", "a (total, k) and b (groups, k, n)")
        for name, tensor in self.matrices:
            check_extents(name, tensor)
        if ends.dtype is not I32 or ends.shape != (b.shape[0],) or not ends.layout.is_contiguous:
            raise BadRequest("ends", str(ends.layout), f"i32[{b.shape[0]}], the end of each group", "np.cumsum(sizes)")

    @property
    def operands(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name in TENSORS if (tensor := getattr(self, name)) is not None)

    def first(self, name: str) -> Tensor:
        return cast("Tensor", getattr(self, name))

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
        return self.a.shape[0]

    @property
    def shape(self) -> Shape:
        return (self.rows, self.n)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"out": self.shape}

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (self.a.ptr, self.b.ptr, self.first("ends").ptr, self.result(outputs).ptr, self.alpha_argument)

    def result(self, outputs: Operands) -> Tensor:
        return cast("Tensor", outputs.get("out", self.out))

    def replace(self, **operands: Tensor) -> Self:
        for name in operands:
            if name not in (*TENSORS, "alpha"):
                refuse_operand(name, (*TENSORS, "alpha"))
        changed: dict[str, Any] = operands
        return replace(self, **changed)

    def describe(self) -> str:
        product = f"{self.a.layout} x {self.b.layout} in {self.groups} groups -> {self.d_dtype}"
        return f"grouped_matmul {product}, {self.choices}"


def _on_device(a: Tensor, ends: object) -> Tensor:
    """Ends on the host, validated and copied to the device."""
    numbers = as_array("ends", () if ends is None else ends)
    if a.ndim != 2:
        raise BadRequest("a", str(a.layout), "a (total, k)")
    check_ends(numbers, a.shape[0], repr(ends))
    return a.device.array(numbers, "i32")


def check_ends(numbers: Array, rows: int, shown: str) -> None:
    """BadRequest for numbers that are not valid ends of groups with this number of rows in all."""
    is_integer = numbers.ndim == 1 and numbers.dtype.kind in "iu"
    if not is_integer or (np.diff(numbers.astype(np.int64), prepend=0) < 0).any() or numbers.max(initial=0) > rows:
        raise BadRequest("ends", shown, f"non-decreasing whole numbers, at most {rows}", "np.cumsum(sizes)")
