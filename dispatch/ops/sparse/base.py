"""What all requests over a sparse matrix have in common: its tensors and form, factors passed by value, `library`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.factors import ScaledRequest
from dispatch.core.operands import OperandRequest
from dispatch.core.request import R_co, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import BF16, C64, C128, F16, F32, F64, HALF
from dispatch.ops.sparse.form import SparseForm, check_form, check_parts

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["AlphaRequest", "FactorRequest", "Number", "ScaledSparseRequest", "SparseRequest"]
__all__ += ["check_added", "check_matrix", "check_vector", "result_dtype"]

Number = int | float | complex
ELEMENTS = (F32, F64, C64, C128, F16, BF16)


@dataclass(frozen=True, eq=False)
class SparseRequest(OperandRequest[R_co]):
    """A sparse matrix A.

    Attributes:
        values: the elements of A, dense; of BSR (blocks, block rows, block columns).
        rows, columns: i32 or i64, dense: offsets or indices, depending on the form's format. Indices beyond the matrix
            cause reads beyond other operands: check them first by `sparse_check`, or `validate=True` of a SparseTensor.
        form: a `SparseForm`. A `SparseTensor` unpacks into these four: `spmm(*a, b)`.
        library: only rows of this library are considered, such as "cusparse", "own" or "cudss" if they support the op;
            None considers all, in the table's order.
    """

    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns")
    hint_if_missing: ClassVar[str] = (
        "A SparseTensor a unpacks into values, rows, columns and form: {name}(*a, …); functions of dispatch.sparse take"
        " a itself"
    )
    values: Tensor
    rows: Tensor
    columns: Tensor
    form: SparseForm
    _: KW_ONLY
    library: str | None = None

    def check_fields(self) -> None:
        dtype = self.values.dtype
        if dtype not in ELEMENTS:
            expected = f"elements of {', '.join(map(str, ELEMENTS[:-1]))} or {ELEMENTS[-1]}"
            raise BadRequest("values", str(self.values.layout), expected, 'values.astype("f64")')
        object.__setattr__(self, "form", check_form("form", self.form))
        check_parts(self.form, {name: getattr(self, name) for name in ("values", "rows", "columns")})
        self.check_operands()

    def check_operands(self) -> None:
        """Raise BadRequest for other operands that do not fit A, and for invalid choices."""


@dataclass(frozen=True, eq=False)
class FactorRequest(ScaledRequest[R_co]):
    """A request whose plan takes the factors after the addresses; its text shows the beta that is used."""

    added: ClassVar[str] = ""  # nothing, unless there is a beta

    def usual(self) -> dict[str, Any]:
        return {"beta": self.factor("beta")} if "beta" in self.numbers else {}


@dataclass(frozen=True, eq=False)
class AlphaRequest(FactorRequest["Tensor"]):
    """A request with a factor alpha, given by value.

    Attributes:
        alpha: a number; complex only for complex matrices.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    _: KW_ONLY
    alpha: Number = 1.0


@dataclass(frozen=True, eq=False)
class ScaledSparseRequest(AlphaRequest, SparseRequest["Tensor"]):
    """A sparse matrix, and factors."""

    def check_fields(self) -> None:
        SparseRequest.check_fields(self)
        self.check_factors()


def result_dtype(request: Any, added: str) -> Dtype:
    """The dtype of `out`, else of the added operand, else of A; for 16-bit dtypes it may be f32."""
    typed: Tensor | None = request.out if request.out is not None else getattr(request, added)
    dtype: Dtype = request.values.dtype
    return F32 if typed is not None and typed.dtype is F32 and dtype in HALF else dtype


def check_added(request: Any, added: str) -> None:
    """BadRequest unless the added operand has the dtype of the result."""
    tensor, dtype = getattr(request, added), request.out_dtype
    if tensor is not None and tensor.dtype is not dtype:
        raise BadRequest(added, str(tensor.layout), f"{dtype}, the dtype of the result", f'x.astype("{dtype}")')


def check_vector(name: str, tensor: Tensor | None, extent: int, reason: str) -> None:
    """BadRequest unless an operand, if present, is a vector of so many elements."""
    if tensor is not None and tensor.shape != (extent,):
        hint = "x[:, 0] is a vector" if tensor.ndim == 2 else ""
        raise BadRequest(name, str(tensor.layout), f"{tensor.dtype}[{extent}], {reason}", hint)


def check_matrix(name: str, tensor: Tensor | None, shape: tuple[int | None, int | None], reason: str) -> None:
    """BadRequest unless an operand, if present, is a matrix of these extents; None allows any extent."""
    if tensor is None:
        return
    fits = tensor.ndim == 2 and all(w is None or w == e for w, e in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("…" if extent is None else str(extent) for extent in shape)
        hint = "x[:, None] is a matrix of one column" if tensor.ndim == 1 else ""
        raise BadRequest(name, str(tensor.layout), f"{tensor.dtype}[{wanted}], {reason}", hint)
