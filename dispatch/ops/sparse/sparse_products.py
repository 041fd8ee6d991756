"""Requests for the product of two sparse matrices: its number of elements, and the product itself.

Only the device knows the number of elements. So there are two requests, and a caller that needs the number on the host
waits for the first one: `dispatch.sparse.spgemm` does. If the number of a pattern is already known, nothing waits.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_int
from dispatch.core.factors import check_factor
from dispatch.core.operands import Output, dense
from dispatch.core.request import NamedArguments, Number, R_co, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64
from dispatch.ops.sparse.algorithms import SpgemmAlgorithm
from dispatch.ops.sparse.base import SparseRequest
from dispatch.ops.sparse.form import SparseForm, SparseFormat, check_form, check_parts

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor
    from dispatch.ops.sparse.base import Number as Factor

__all__ = ["REUSE_ALGORITHMS", "SpgemmNnzRequest", "SpgemmRequest"]

MAX_NNZ, MAX_STAMP = 2**48, 2**62
REUSE_ALGORITHMS = (SpgemmAlgorithm.CSR_ALG_DETERMINITIC, SpgemmAlgorithm.CSR_ALG_NONDETERMINITIC)
REUSING_ALGORITHMS = (SpgemmAlgorithm.DEFAULT, *REUSE_ALGORITHMS)


@dataclass(frozen=True, eq=False)
class PairRequest(SparseRequest[R_co]):
    """Two sparse matrices in CSR, with indices of one dtype and base.

    Attributes:
        b_values, b_rows, b_columns, b_form: the second matrix, like the first: `spgemm(*a, *b, nnz=…)`.
        alpha: a number; complex only for complex matrices.
        algorithm: a `SpgemmAlgorithm`.
        stamp: a number that connects one count and one product. cuSPARSE counts the elements of a product by
            multiplying: a `spgemm_nnz` with a stamp leaves its results to the `spgemm` with the same stamp, over the
            same operands with the same alpha, on the same thread and stream. The caller promises that no operand
            changes in between. Without such results `spgemm` repeats the work.
    """

    stamps: ClassVar[int] = 1  # the number of stamps after the addresses
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("stamp",))
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b_values", "b_rows", "b_columns")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "b_rows", "b_columns")
    b_values: Tensor
    b_rows: Tensor
    b_columns: Tensor
    b_form: SparseForm
    _: KW_ONLY
    alpha: Factor = 1.0
    algorithm: SpgemmAlgorithm | str = SpgemmAlgorithm.DEFAULT
    stamp: int | None = None

    def attributes(self) -> tuple[Any, ...]:
        return self.form, self.b_form, self.library, self.alpha, self.algorithm, self.stamp is None

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), -1.0 if self.stamp is None else self.stamp)

    def named_arguments(self) -> NamedArguments:
        free = {} if self.stamp is None else {"stamp": Number(0, MAX_STAMP, is_whole=True)}
        return NamedArguments((*self.reads, *self.writes, "stamp"), free, self.in_place)

    def check_operands(self) -> None:
        check_factor("alpha", self.alpha, may_be_complex=self.values.dtype.is_complex)
        if self.stamp is not None:
            check_int("stamp", self.stamp, 0, MAX_STAMP)
        object.__setattr__(self, "b_form", check_form("b_form", self.b_form))
        parts = {name: getattr(self, f"b_{name}") for name in ("values", "rows", "columns")}
        check_parts(self.b_form, parts, "b_")
        for name, form in (("form", self.form), ("b_form", self.b_form)):
            kind = SparseFormat(form.format)  # type: ignore[arg-type]  # it is a member since it was checked
            if kind is not SparseFormat.CSR:
                raise BadRequest(f"{name}.format", kind.name, "CSR", "dispatch.sparse.tocsr converts the matrix")
        if self.form.shape[1] != self.b_form.shape[0]:
            wanted = f"{self.form.shape[1]} rows, the columns of the first matrix"
            raise BadRequest("b_form.shape", str(self.b_form.shape), wanted)
        if self.b_form.base != self.form.base:
            raise BadRequest("b_form.base", str(self.b_form.base), f"{self.form.base}, the base of the first matrix")
        for name in ("columns", "b_rows", "b_columns"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype is not self.rows.dtype:
                dtype = self.rows.dtype
                hint = f'{name}.astype("{dtype}")'
                raise BadRequest(name, str(tensor.layout), f"{dtype}, the dtype of the first matrix's rows", hint)


@dataclass(frozen=True, eq=False)
class SpgemmNnzRequest(PairRequest["Tensor"]):
    """The number of elements of the product of two sparse matrices: one i64 on the device.

    An element is counted if it has any term, even if the terms add up to 0.

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
    """alpha · A · B of two sparse matrices in CSR: (values, rows, columns) of the product, also in CSR: SpGEMM.

    The library reads numbers on the host during the enqueue, and so waits for all earlier work on its stream. If both
    forms have a `pattern`, indices are i32 from 0 on, and `algorithm` is left out or one of SpGEMMreuse's, the
    product's pattern is computed once and kept with the plan, and computed again if indices are at another address.
    Then a call computes only values, and waits for nothing.

    Attributes:
        nnz: the number of elements of the product, as `spgemm_nnz` counts them; another number raises BadRequest in the
            call, and nothing is written.
        autotune: if `algorithm` is left out, time the algorithms once, keep the fastest for all matrices of these
            layouts, and store it on disk; for fixed patterns also those of SpGEMMreuse.
        out_values, out_rows, out_columns: the result.
    """

    op: ClassVar[str] = "spgemm"
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    nnz: int
    autotune: bool = False
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def attributes(self) -> tuple[Any, ...]:
        return (*super().attributes(), self.nnz, self.autotune)

    @property
    def reuses(self) -> bool:
        """Whether the product's pattern is computed once and kept."""
        is_fixed = self.form.pattern is not None and self.b_form.pattern is not None
        fits = self.rows.dtype is I32 and not self.form.base
        return is_fixed and fits and self.nnz > 0 and self.algorithm in REUSING_ALGORITHMS

    @property
    def most_elements(self) -> int:
        """An upper bound of the product's elements: each of a matrix meets at most a whole line of the other."""
        (m, _), (_, n) = self.form.shape, self.b_form.shape
        of_a, of_b = self.values.shape[0], self.b_values.shape[0]
        return min(m * n, of_a * n, m * of_b, of_a * of_b, MAX_NNZ)

    def check_operands(self) -> None:
        super().check_operands()
        check_int("nnz", self.nnz, 0, self.most_elements)

    def outputs(self) -> dict[str, Output]:
        index = self.rows.dtype
        return {
            "out_values": dense((self.nnz,), self.values.dtype),
            "out_rows": dense((self.form.shape[0] + 1,), index),
            "out_columns": dense((self.nnz,), index),
        }
