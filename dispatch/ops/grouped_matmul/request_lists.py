"""GroupedMatmulListRequest: products that share only their dtypes and orders, as one kernel.

Every extent may differ from product to product, and each matrix may be anywhere in memory. The host has the extents, so
they are validated here. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import shown
from dispatch.core.operand_checks import check_extents
from dispatch.core.request import Unpacked
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.grouped_matmul.base import GroupedBase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from dispatch.core.request import Argument, Operands

__all__ = ["GroupedMatmulListRequest"]

Shape = tuple[int, ...]
MATRICES = ("a", "b", "out")


@dataclass(frozen=True, eq=False)
class GroupedMatmulListRequest(GroupedBase["tuple[Tensor, ...]"]):
    """D[g] = tree(A[g] · B[g]) for matrices of any extents; all A have one dtype, and so have all B and all D.

    Attributes:
        a, b: matrices (m, k) and (k, n) of each product; rows of a dense and all b of one order; cuBLAS supports any
            order. No extent is 0. Except for f32 without TF32 and f64, each matrix and each of its lines begins at a
            multiple of 16 bytes.
        out: D of each product, (m, n) of `out_dtype`, rows dense, or columns with cuBLAS; None allocates them.
    """

    unpacked: ClassVar[Unpacked | None] = Unpacked(several=MATRICES, numbers=("alpha",))
    a: Sequence[Tensor]
    b: Sequence[Tensor]
    _: KW_ONLY
    out: Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        adopt(self)
        for name in MATRICES:
            matrices = getattr(self, name)
            if matrices is not None or name != "out":
                object.__setattr__(self, name, self._matrices(name, matrices))
        self._check_matrices()
        self.check_choices()
        self.check_memory()

    @staticmethod
    def _matrices(name: str, given: object) -> tuple[Tensor, ...]:
        if not isinstance(given, (tuple, list)):
            raise BadRequest(name, shown(given), "a tuple of tensors")
        return tuple(given)

    def _check_matrices(self) -> None:
        a, b, out = self.a, self.b, self.out
        if not a or len(a) != len(b) or (out is not None and len(out) != len(a)):
            counts = f"{len(a)} of a, {len(b)} of b" + ("" if out is None else f", {len(out)} of out")
            raise BadRequest("a", counts, "as many of each, and at least one")
        for name, tensor in self.matrices:
            matrix: object = tensor  # users may pass anything
            if not isinstance(matrix, Tensor) or matrix.ndim != 2:
                type_text = str(matrix.layout) if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
                raise BadRequest(name, type_text, "a Tensor with two axes")
            check_extents(name, tensor)
            first = self.first(name.partition("[")[0])
            if tensor.dtype is not first.dtype:
                raise BadRequest(name, str(tensor.dtype), f"{first.dtype}, the dtype of the first one")
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            if one.shape[1] != other.shape[0]:
                raise BadRequest(
                    f"b[{index}]", str(other.layout), f"{one.shape[1]} rows, the number of columns of a[{index}]"
                )

    @property
    def operands(self) -> Iterator[tuple[str, Tensor]]:
        for name in MATRICES:
            for index, tensor in enumerate(getattr(self, name) or ()):
                yield f"{name}[{index}]", tensor

    def first(self, name: str) -> Tensor:
        tensors: tuple[Tensor, ...] = getattr(self, name)
        return tensors[0]

    @property
    def groups(self) -> int:
        return len(self.a)

    @property
    def rows(self) -> int:
        return sum(a.shape[0] for a in self.a)

    @property
    def n(self) -> int:
        return max(b.shape[1] for b in self.b)

    @property
    def extents(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of each product."""
        return tuple((a.shape[0], b.shape[1], a.shape[1]) for a, b in zip(self.a, self.b, strict=True))

    @property
    def shapes(self) -> dict[str, Shape]:
        return {f"out[{g}]": (m, n) for g, (m, n, _) in enumerate(self.extents)}

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        matrices = (*self.a, *self.b, *self.result(outputs))
        return (*(tensor.ptr for tensor in matrices), self.alpha_argument)

    def result(self, outputs: Operands) -> tuple[Tensor, ...]:
        return tuple(outputs[name] for name in self.shapes) if self.out is None else tuple(self.out)

    def replace(self, **operands: Tensor) -> Self:
        changed: dict[str, Any] = {}
        if "alpha" in operands:
            changed["alpha"] = operands.pop("alpha")
        names = {f"{name}[{g}]" for name in MATRICES for g in range(self.groups)}
        for name in operands:
            if name not in names:
                raise BadRequest(
                    name, "a name that is not an operand of this request", "a[0], b[0], out[0] and so on, or alpha"
                )
        for name in MATRICES:
            before = getattr(self, name) or (None,) * self.groups
            after = tuple(operands.get(f"{name}[{g}]", tensor) for g, tensor in enumerate(before))
            if any(tensor is not None for tensor in after):
                changed[name] = after
        return replace(self, **changed)

    def describe(self) -> str:
        extents = ", ".join("x".join(map(str, extent_list)) for extent_list in self.extents[:4])
        more = ", …" if self.groups > 4 else ""
        dtypes = f"{self.first('a').dtype} x {self.first('b').dtype} -> {self.d_dtype}"
        return f"grouped_matmul {self.groups} of {dtypes} ({extents}{more}), {self.choices}"
