"""Requests of the product of two sparse matrices: how many elements it has, and the product itself.

How many there are the device alone knows. So there are two requests, and who needs the number on the host waits for
the first: `dispatch.sparse.spgemm` does. A number that is known, of a pattern that comes again, needs no such wait.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.factors import check_factor
from dispatch.core.operands import Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I64
from dispatch.ops.sparse.algorithms import SpgemmAlgorithm
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseForm, SparseFormat, check_form, check_parts

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.ops.sparse.base import Number

__all__ = ["SpgemmNnzRequest", "SpgemmRequest"]

MAX_NNZ = 2**48


@dataclass(frozen=True, eq=False)
class PairRequest(SparseRequest[R_co]):
    """Two sparse matrices in CSR, with indices of one dtype and base.

    Attributes:
        b_values, b_rows, b_columns, b_form: the second matrix, as the first: `spgemm(*a, *b, nnz=…)`.
        algorithm: a `SpgemmAlgorithm`.
    """

    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b_values", "b_rows", "b_columns")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "b_rows", "b_columns")
    b_values: Tensor
    b_rows: Tensor
    b_columns: Tensor
    b_form: SparseForm
    _: KW_ONLY
    algorithm: SpgemmAlgorithm | str = SpgemmAlgorithm.DEFAULT

    def check_operands(self) -> None:
        object.__setattr__(self, "b_form", check_form("b_form", self.b_form))
        parts = {name: getattr(self, f"b_{name}") for name in ("values", "rows", "columns")}
        check_parts(self.b_form, parts, "b_")
        for name, form in (("form", self.form), ("b_form", self.b_form)):
            kind = SparseFormat(form.format)  # type: ignore[arg-type]  # it is a member since it was checked
            if kind is not SparseFormat.CSR:
                hint = "csr2csc makes one of CSC" if kind is SparseFormat.CSC else ""
                raise BadRequest(f"{name}.format", kind.name, "CSR", hint)
        if self.form.shape[1] != self.b_form.shape[0]:
            wanted = f"{self.form.shape[1]} rows, the columns of the first matrix"
            raise BadRequest("b_form.shape", str(self.b_form.shape), wanted)
        if self.b_form.base != self.form.base:
            raise BadRequest("b_form.base", str(self.b_form.base), f"{self.form.base}, as that of the first matrix")
        for name in ("columns", "b_rows", "b_columns"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype is not self.rows.dtype:
                raise BadRequest(name, str(tensor.layout), f"{self.rows.dtype}, as rows are", "x.astype(…)")


@dataclass(frozen=True, eq=False)
class SpgemmNnzRequest(PairRequest["Tensor"]):
    """How many elements the product of two sparse matrices has: one i64 on the device.

    Those are counted that have a product at all, also where these add up to 0.

    Attributes:
        out: i64 (1,).
    """

    op: ClassVar[str] = "spgemm_nnz"
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), I64)}


@dataclass(frozen=True, eq=False)
class SpgemmRequest(PairRequest["tuple[Tensor, Tensor, Tensor]"]):
    """alpha · A · B of two sparse matrices in CSR: (values, rows, columns) of the product, in CSR, too: SpGEMM.

    The library looks at numbers on the host while it enqueues, and so waits for what stands before it on its stream.

    Attributes:
        nnz: how many elements the product has, as `spgemm_nnz` counts them; another number raises BadRequest in the
            call, and nothing is written.
        alpha: a number; complex ones for complex matrices alone.
        out_values, out_rows, out_columns: the result.
    """

    op: ClassVar[str] = "spgemm"
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    nnz: int
    alpha: Number = 1.0
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_operands(self) -> None:
        super().check_operands()
        check_int("nnz", self.nnz, 0, MAX_NNZ)
        check_factor("alpha", self.alpha, may_be_complex=self.values.dtype.is_complex)

    def outputs(self) -> dict[str, Output]:
        index = self.rows.dtype
        return {
            "out_values": dense((self.nnz,), self.values.dtype),
            "out_rows": dense((self.form.shape[0] + 1,), index),
            "out_columns": dense((self.nnz,), index),
        }
