"""Requests over a sparse vector: some elements of a long one, as `values` and their `indices`.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions. This file calls no library. Indices are
unique, but not checked: one beyond the dense vector causes a read or write beyond it on a GPU.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64
from dispatch.ops.sparse.base import AlphaRequest, FactorRequest, Number

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["GatherRequest", "ScatterRequest", "SparseAxpbyRequest", "SparseRotRequest", "SpvvRequest"]


@dataclass(frozen=True, eq=False)
class VectorRequest(OperandRequest[R_co]):
    """A sparse vector and a dense one.

    Attributes:
        indices: i32 or i64, dense: the place of each element.
        base: the number of the first place: 0 or 1.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.
    """

    mixed: ClassVar[tuple[str, ...]] = ("indices",)
    _: KW_ONLY
    base: int = 0
    library: str | None = None

    def check_vectors(self) -> None:
        """BadRequest unless operands are vectors, and the parts of a sparse one have one length."""
        check_int("base", self.base, 0, 1)
        indices: Tensor = getattr(self, "indices")  # noqa: B009  # a field of each subclass
        if indices.dtype not in (I32, I64):
            raise BadRequest("indices", str(indices.layout), "i32 or i64", 'x.astype("i32")')
        for name in self.reads:
            tensor: Tensor = getattr(self, name)
            if tensor.ndim != 1:
                raise BadRequest(name, str(tensor.layout), "a vector, with one axis")
        values: Tensor | None = getattr(self, "values", None)
        if values is not None and values.shape != indices.shape:
            raise BadRequest("indices", str(indices.layout), f"{list(values.shape)}, the shape of values")


@dataclass(frozen=True, eq=False)
class GatherRequest(VectorRequest["Tensor"]):
    """The elements of a dense vector at some places: out[i] = y[indices[i]]; cuSPARSE's Gather.

    Attributes:
        y: a dense vector.
        out: the elements, as many as indices.
    """

    op: ClassVar[str] = "sparse_gather"
    reads: ClassVar[tuple[str, ...]] = ("y", "indices")
    y: Tensor
    indices: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        self.check_vectors()

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.indices.shape, self.y.dtype)}


@dataclass(frozen=True, eq=False)
class ScatterRequest(VectorRequest["Tensor"]):
    """A dense vector with some elements replaced: y, and then out[indices[i]] = values[i]; cuSPARSE's Scatter.

    Attributes:
        values: the elements.
        y: a dense vector.
        out: the result; it may be y itself.
    """

    op: ClassVar[str] = "sparse_scatter"
    reads: ClassVar[tuple[str, ...]] = ("values", "indices", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    values: Tensor
    indices: Tensor
    y: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        self.check_vectors()

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.y.shape, self.values.dtype)}


@dataclass(frozen=True, eq=False)
class SpvvRequest(VectorRequest["Tensor"]):
    """The sum of values[i] · y[indices[i]], one element on the device: cuSPARSE's SpVV.

    Attributes:
        values: the elements of the sparse vector.
        y: a dense vector.
        conj: whether the elements of the sparse vector are conjugated.
        out: (1,).
    """

    op: ClassVar[str] = "spvv"
    reads: ClassVar[tuple[str, ...]] = ("values", "indices", "y")
    values: Tensor
    indices: Tensor
    y: Tensor
    _: KW_ONLY
    conj: bool = False
    out: Tensor | None = None

    def check_fields(self) -> None:
        self.check_vectors()

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), self.values.dtype)}


@dataclass(frozen=True, eq=False)
class SparseAxpbyRequest(AlphaRequest, VectorRequest["Tensor"]):
    """beta · y, and alpha · values[i] added at indices[i]: cuSPARSE's Axpby.

    Attributes:
        values: the elements of the sparse vector.
        y: a dense vector.
        beta: a number; None for 1.
        out: the result; it may be y itself.
    """

    op: ClassVar[str] = "sparse_axpby"
    reads: ClassVar[tuple[str, ...]] = ("values", "indices", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    added: ClassVar[str] = "y"
    values: Tensor
    indices: Tensor
    y: Tensor
    _: KW_ONLY
    beta: Number | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        self.check_vectors()
        self.check_factors()

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.y.shape, self.values.dtype)}


@dataclass(frozen=True, eq=False)
class SparseRotRequest(FactorRequest["tuple[Tensor, Tensor]"], VectorRequest["tuple[Tensor, Tensor]"]):
    """A plane rotation of a sparse vector and of a dense one at its places: cuSPARSE's Rot.

    out_values[i] = c · values[i] + s · y[indices[i]], and out_y is y except for out_y[indices[i]] = c · y[indices[i]] -
    s · values[i].

    Attributes:
        values: the elements of the sparse vector.
        y: a dense vector.
        c: the cosine, a number; complex only for complex vectors.
        s: the sine, such a number. It is not conjugated, unlike in BLAS's rotation, `rot`: for complex vectors the
            rotation is unitary only for a real s.
        out_values: the rotated elements; they may be `values` itself.
        out_y: the rotated dense vector; it may be `y` itself.

    f16 and bf16 are computed in f32, and rounded once. NVIDIA's header marks the function as deprecated; it still
    exists.
    """

    op: ClassVar[str] = "sparse_rot"
    reads: ClassVar[tuple[str, ...]] = ("values", "indices", "y")
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out_values", "values"), ("out_y", "y")})
    numbers: ClassVar[tuple[str, ...]] = ("c", "s")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("c", "s"))
    values: Tensor
    indices: Tensor
    y: Tensor
    c: Number
    s: Number
    _: KW_ONLY
    out_values: Tensor | None = None
    out_y: Tensor | None = None

    def check_fields(self) -> None:
        self.check_vectors()
        self.check_factors()

    def outputs(self) -> dict[str, Output]:
        dtype = self.values.dtype
        return {"out_values": dense(self.values.shape, dtype), "out_y": dense(self.y.shape, dtype)}
