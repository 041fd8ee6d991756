"""The cases of sparse linear algebra: every pattern in every format, with indices of both widths and both bases.

Memory that must not be read is NaN: the other triangle, a unit diagonal, an operand times a beta of 0, and all of a
result before it is written. Values and indices are surrounded by others, so that an index off by one is detected.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import DiagType, FillMode, Operation
from dispatch.keys import F32, HALF
from dispatch.ops.sparse import conversions, products, solves, sparse_products
from dispatch.ops.sparse.cases_batched import batched_cases
from dispatch.ops.sparse.cases_block_jacobi import block_jacobi_cases
from dispatch.ops.sparse.cases_bsr import BSR_OPS, bsr_cases
from dispatch.ops.sparse.cases_compiled import COMPILED_OPS, compiled_cases
from dispatch.ops.sparse.cases_compression import COMPRESSION, compression_cases
from dispatch.ops.sparse.cases_direct import direct_cases
from dispatch.ops.sparse.cases_direct_batched import batched_direct_cases
from dispatch.ops.sparse.cases_ell import ELL_OPS, ell_cases
from dispatch.ops.sparse.cases_incomplete import INCOMPLETE_OPS, incomplete_cases
from dispatch.ops.sparse.cases_krylov import KRYLOV, krylov_cases
from dispatch.ops.sparse.cases_pentadiagonal import pentadiagonal_cases
from dispatch.ops.sparse.cases_pruning import PRUNED, pruning_cases
from dispatch.ops.sparse.cases_sampled_batched import sampled_batch_cases
from dispatch.ops.sparse.cases_sorting import sorting_cases
from dispatch.ops.sparse.cases_tridiagonal import tridiagonal_cases
from dispatch.ops.sparse.cases_vectors import VECTORS, vector_cases
from dispatch.ops.sparse.form import SparseFormat, shape_of
from dispatch.ops.sparse.mutations import MUTATIONS
from dispatch.ops.sparse.patterns import PATTERNS, SQUARE, stored
from dispatch.ops.sparse.reference import evaluate, product_of_patterns, triangle_of
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, Mismatch, place, poison, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "cases"]

KINDS: dict[str, Any] = {
    kind.op: kind
    for module in (products, solves, sparse_products, conversions)
    for name, kind in vars(module).items()
    if name in module.__all__ and hasattr(kind, "op")
}
FORMATS = tuple(SparseFormat)
N, T, C = Operation
SHAPES = ((20, 28), (36, 12), (1, 8), (24, 24), (8, 1), (48, 36))
EMPTY = ((0, 4), (4, 0))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0))
ADDED = ("nothing", "apart", "in place")
BLOCKS = ((4, 4), (2, 2), (4, 2))
WIDE = 5  # of dense matrices
ANALYSED = ("spsv", "spsm", "spgemm")  # analysed once for fixed patterns


class Form(NamedTuple):
    """A case: pattern and shape, the storage, the operation, factors, the added operand, and layouts."""

    pattern: str
    shape: tuple[int, int]
    kind: SparseFormat
    base: int
    wide: bool  # whether indices have 64 bits
    trans: Operation
    alpha: complex
    beta: complex
    added: str
    by_rows: tuple[bool, bool]
    has_out: bool
    uplo: FillMode = FillMode.LOWER
    diag: DiagType = DiagType.NON_UNIT
    fixed: bool = False
    library: str | None = None


def forms(op: str, dtype: Dtype) -> list[Form]:
    """Each pattern in each format, all other properties in turn; then matrices without rows or columns."""
    kinds = FORMATS
    if op in ("spgemm", "spgemm_nnz"):
        kinds = (SparseFormat.CSR,)
    elif op == "sddmm":
        kinds = (SparseFormat.CSR, SparseFormat.CSC, SparseFormat.COO)
    elif op == "csr2csc":
        kinds = (SparseFormat.CSR, SparseFormat.CSC)
    all_forms = []
    pairs = [*product(PATTERNS, kinds), *(("nothing", kind) for kind in kinds)]
    for number, (pattern, kind) in enumerate(pairs):
        alpha: complex
        beta: complex
        alpha, beta = FACTORS[(number + number // 5) % 5]
        if dtype.is_complex and number % 2:
            alpha, beta = alpha * (1 - 0.5j), beta * (1 + 2j)
        shape = EMPTY[number % 2] if number >= len(pairs) - len(kinds) else SHAPES[(number + number // 6) % 6]
        if kind is SparseFormat.BSR:
            shape = (shape[0] // 4 * 4, shape[1] // 4 * 4)
        if op in ("spsv", "spsm"):
            shape = (max(shape),) * 2
        all_forms.append(
            Form(
                pattern,
                shape,
                kind,
                base=(number // 2 + number // 4) % 2,  # each format has both
                wide=number // 3 % 2 == 1 and op != "csr2csc",
                trans=(N, T, C)[(number + number // 3) % 3],
                alpha=alpha,
                beta=beta,
                added="nothing" if pattern == "nothing" and number % 2 else ADDED[(number + number // 3) % 3],
                by_rows=(number % 2 == 0, number // 2 % 3 != 0),
                has_out=number % 5 != 3,
                uplo=tuple(FillMode)[number // 2 % 2],
                diag=tuple(DiagType)[(number + number // 4) % 2],
                fixed=number % 3 == 1,
            )
        )
    return all_forms


class Draw:
    """The operands of a form on a device."""

    def __init__(self, op: str, dtype: Dtype, form: Form, device: Device, rng: np.random.Generator) -> None:
        self.op, self.dtype, self.form, self.device, self.rng = op, dtype, form, device, rng
        self.fields: dict[str, Any] = {}
        self.written: tuple[GuardedBuffer, ...] = ()
        # For 16-bit dtypes some results are f32.
        self.out = F32 if dtype in HALF and form.base else dtype

    def normal(self, *shape: int, dtype: Dtype | None = None) -> Array:
        drawn = self.rng.standard_normal(shape)
        wanted = dtype or self.dtype
        if wanted.is_complex:
            drawn = drawn + 1j * self.rng.standard_normal(shape)
        return np.asarray(drawn.astype(wanted.numpy))

    def place_operand(self, name: str, values: Array, *, by_rows: bool = True, gap: int = 2) -> GuardedBuffer:
        """Place an operand in memory surrounded by poison; a vector stays dense."""
        order = None if by_rows or values.ndim < 2 else (1, 0)
        memory = place(self.device, values, order, gap)
        self.fields[name] = memory.view
        return memory

    def sparse(self, shape: tuple[int, int], prefix: str = "", number: int = 0) -> tuple[int, int]:
        """Draw a matrix; returns its shape, which some patterns determine."""
        form = self.form
        square = form.pattern in SQUARE and form.kind is not SparseFormat.BSR
        if form.pattern in SQUARE and not square:
            shape = (24, 24)
        mask = PATTERNS[form.pattern if square or form.pattern not in SQUARE else "random"](self.rng, shape)
        if square and mask.shape[0] != shape[0] and prefix:
            mask = PATTERNS["random"](self.rng, shape)
        if mask.size and form.pattern != "nothing":
            mask[-1, 0] = True  # ensures at least one element
        drawn = self.normal(*mask.shape)
        if self.op in ("spsv", "spsm"):
            mask, drawn = self.triangle(mask, drawn)
        block = BLOCKS[number] if form.kind is SparseFormat.BSR else (1, 1)
        values, rows, columns, matrix_form = stored(
            mask, drawn, form.kind, form.base, np.int64 if form.wide else np.int32, block
        )
        if form.fixed and self.op in ANALYSED:
            matrix_form = matrix_form._replace(pattern=int(self.rng.integers(1 << 40)))
        if values.ndim == 1:
            self.place_operand(f"{prefix}values", values)
        else:
            self.fields[f"{prefix}values"] = self.device.array(values)
        self.place_operand(f"{prefix}rows", rows)
        self.place_operand(f"{prefix}columns", columns)
        self.fields[f"{prefix}form"] = matrix_form
        m, n = mask.shape
        return m, n

    def triangle(self, mask: Any, drawn: Array) -> tuple[Any, Array]:
        """A well-conditioned triangle; elements that must not be read are NaN."""
        n = len(mask)
        mask = mask | np.eye(n, dtype=bool)
        drawn = (drawn / (2 * np.sqrt(n + 1))).astype(drawn.dtype)
        np.fill_diagonal(drawn, np.nan if self.form.diag is DiagType.UNIT else 1 + np.arange(n) % 3 / 3)
        stored_part = np.tri(n, dtype=bool)
        stored_part = stored_part if self.form.uplo is FillMode.LOWER else stored_part.T
        drawn[~stored_part] = np.nan
        return mask, drawn

    # -- by kind of op ------------------------------------------------------------------------------------------------
    def draw_product(self) -> None:
        form = self.form
        self.sparse(form.shape, number=form.base + form.wide if self.op == "spmm" else 0)
        long, short = shape_of(self.fields["form"], form.trans)
        self.fields |= {"alpha": form.alpha, "trans": form.trans, "library": form.library}
        vector = self.op == "sparse_mv"
        self.place_operand(
            "x" if vector else "b", self.normal(*((short,) if vector else (short, WIDE))), by_rows=form.by_rows[0]
        )
        result = (long,) if vector else (long, WIDE)
        if form.added != "nothing":
            self.fields["beta"] = form.beta
            values = self.normal(*result, dtype=self.out) if form.beta else poison(self.out, result)
            name = "y" if vector else "c"
            memory = self.place_operand(name, values, by_rows=form.by_rows[1])
            if form.added == "in place":
                self.fields["out"], self.written = memory.view, (memory,)
                return
        if form.has_out or (self.out is not self.dtype and form.added == "nothing"):
            self.written = (self.place_operand("out", poison(self.out, result), by_rows=form.by_rows[1]),)

    def draw_sddmm(self) -> None:
        form = self.form
        m, n = self.sparse(form.shape)
        self.fields |= {"alpha": form.alpha, "beta": form.beta}
        self.place_operand("a", self.normal(m, WIDE), by_rows=form.by_rows[0])
        self.place_operand("b", self.normal(WIDE, n), by_rows=form.by_rows[1])
        count = self.fields["values"].shape
        memory = self.place_operand("values", self.normal(*count) if form.beta else poison(self.dtype, count))
        if form.added == "in place":
            self.fields["out"], self.written = memory.view, (memory,)
        elif form.has_out:
            self.written = (self.place_operand("out", poison(self.dtype, count)),)

    def draw_solve(self) -> None:
        form = self.form
        n, _ = self.sparse(form.shape)
        self.fields |= {"alpha": form.alpha or 1.0, "trans": form.trans, "uplo": form.uplo, "diag": form.diag}
        vector = self.op == "spsv"
        shape = (n,) if vector else (n, WIDE)
        right = self.place_operand("x" if vector else "b", self.normal(*shape), by_rows=form.by_rows[0])
        if vector and form.added == "in place":
            self.fields["out"], self.written = right.view, (right,)
        elif form.has_out:
            self.written = (self.place_operand("out", poison(self.dtype, shape), by_rows=form.by_rows[1]),)

    def draw_spgemm(self) -> None:
        form = self.form
        m, n = self.sparse(form.shape)
        self.sparse((n, m + 3), "b_")
        if self.op == "spgemm_nnz":
            return
        self.fields |= {"alpha": form.alpha, "nnz": 0}
        self.fields["nnz"] = int(product_of_patterns(KINDS[self.op](**self.fields), EXACT).nnz)
        request = KINDS[self.op](**self.fields)
        if form.has_out:
            items = request.outputs().items()
            self.written = tuple(self.place_operand(name, poison(output.dtype, output.shape)) for name, output in items)

    def draw_conversion(self) -> None:
        form = self.form
        self.sparse(form.shape, number=form.base + form.wide)
        if self.op == "sparse_check" and len(self.fields["columns"].shape) and self.fields["values"].size > 3:
            self.corrupt_indices()
        if not form.has_out:
            return
        request = KINDS[self.op](**self.fields)
        order = form.by_rows[0] or self.op != "sparse_to_dense"
        items = request.outputs().items()
        self.written = tuple(
            self.place_operand(name, poison(out.dtype, out.shape), by_rows=order) for name, out in items
        )

    def corrupt_indices(self) -> None:
        """Indices beyond the matrix, unsorted, or duplicate, in turn; offsets that decrease."""
        kind, turn = self.form.kind, int(self.rng.integers(5))
        name = "rows" if kind is SparseFormat.CSC else "columns"
        offsets = "columns" if kind is SparseFormat.CSC else "rows"
        indices, ends = self.fields[name].numpy(), self.fields[offsets].numpy()
        if turn == 0:
            indices[1] = -1 if self.form.base else 1000
        elif turn == 1:
            indices[:] = indices[::-1].copy()
        elif turn == 2:
            indices[1:] = indices[:-1].copy()
        elif turn == 3 and kind is not SparseFormat.COO:
            ends[len(ends) // 2] = 1000
            ends[0] += 1
        self.place_operand(name, indices)
        self.place_operand(offsets, ends)


DRAWS = {
    "sparse_mv": Draw.draw_product,
    "spmm": Draw.draw_product,
    "sddmm": Draw.draw_sddmm,
    "spsv": Draw.draw_solve,
    "spsm": Draw.draw_solve,
    "spgemm": Draw.draw_spgemm,
    "spgemm_nnz": Draw.draw_spgemm,
}


class ProductCheck(Check):
    """A check of a sparse product: the elements of a row may come in any order."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch like others, for the elements in sorted order."""
        values, rows, columns = (tensor.numpy() for tensor in result)
        ends = rows.astype(np.int64)
        if (np.diff(ends) < 0).any() or ends[-1] - ends[0] != len(columns):
            raise Mismatch(f"{self.name}: out_rows are no offsets")
        lines = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        order = np.lexsort((columns, lines))
        for name, array in (("out_values", values[order]), ("out_rows", rows), ("out_columns", columns[order])):
            self._compare(name, array)
        self._check_memory()


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    draw = Draw(op, dtype, form, device, rng)
    DRAWS.get(op, Draw.draw_conversion)(draw)
    request = KINDS[op](**draw.fields)
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        kind_of_check = ProductCheck if op == "spgemm" else Check
        return kind_of_check(name, request, expected, bounds(request, expected), draw.written)


def bounds(request: Any, expected: Results) -> Results:
    """Error bounds: n + 4 roundings of the magnitudes of n products, four times that for complex ones, or 0."""
    dtype, name = request.values.dtype, next(iter(expected))
    limits = {each: np.zeros(()) for each in expected}
    if request.op in ("sparse_to_dense", "csr2csc", "spgemm_nnz", "sparse_check"):
        return limits
    out = expected[name]
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    terms = max(*request.form.shape, WIDE)
    if request.op in ("spsv", "spsm"):
        a = triangle_of(request, EXACT)[0].toarray()
        growth = np.abs(np.linalg.inv(a)) @ np.abs(a) if a.size else a
        error = 4 * (terms + 2) * unit * (growth @ growth @ np.abs(out))
        return {name: rounded(error, out, dtype)}
    sizes: dict[str, Any] = {
        each: np.abs(np.asarray(tensor))
        for each, tensor, _ in request.tensors()
        if each in request.reads and each not in request.mixed[:2] and "rows" not in each and "columns" not in each
    }
    factors = {each: abs(request.factor(each)) for each in getattr(request, "numbers", ())}
    if request.op == "spgemm":
        factors = {"alpha": abs(request.alpha)}
    size = np.abs(altered(evaluate, request, **sizes, **factors)[name])
    stored_as = request.layout_of(name).dtype
    return limits | {name: np.asarray(rounded((terms + 4) * unit * size, out, stored_as))}


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's op and dtypes."""
    op, dtype = row.op, row.dtypes[0]
    if op in PRUNED:
        return pruning_cases(row)
    if op == "spmm_batched":
        return batched_cases(row)
    if op == "sddmm_batched":
        return sampled_batch_cases(row)
    if op in BSR_OPS:
        return bsr_cases(row)
    if op in COMPILED_OPS:
        return compiled_cases(row)
    if op == "sparse_sort":
        return sorting_cases(row)
    if op in ELL_OPS:
        return ell_cases(row)
    if op in COMPRESSION:
        return compression_cases(row)
    if op == "gpsv":
        return pentadiagonal_cases(row)
    if op == "spsolve":
        return direct_cases(row)
    if op == "spsolve_batched":
        return batched_direct_cases(row)
    if op in KRYLOV:
        return krylov_cases(row)
    if op in INCOMPLETE_OPS:
        return incomplete_cases(row)
    if op == "block_jacobi":
        return block_jacobi_cases(row)
    if op == "gtsv":
        return tridiagonal_cases(row)
    if op in VECTORS:
        return vector_cases(row)
    wide = row.dtypes[1] is F32 and dtype in HALF
    # For requests that several libraries support, one must be named; the blocks of the cases are small.
    requested = "cusparse" if op in ("sparse_mv", "spmm") and "cusparse" in (row.library, row.stands_for) else None
    requested = "own" if row.variant == "blocks" and op == "spmm" else requested
    selected = [
        form for form in forms(op, dtype) if dtype not in HALF or op not in ("sparse_mv", "spmm") or form.base == wide
    ]
    selected = [form._replace(library=requested if number // 4 % 3 else None) for number, form in enumerate(selected)]
    return [MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)) for number, form in enumerate(selected)]
