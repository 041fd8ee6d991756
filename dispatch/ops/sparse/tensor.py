"""SparseTensor: a sparse matrix as three tensors and a form, over the caller's memory.

Created by `csr`, `csc`, `coo` and `bsr` here, or from a matrix of SciPy, CuPy or torch by `sparse_tensor` (sources.py).
It owns no memory and copies nothing: a change of `values` is a change of the matrix.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from dispatch.checks import check_bool, names_arguments
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.ops.sparse.form import SparseForm, SparseFormat, check_form, check_parts, transposed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["SparseTensor", "bsr", "coo", "csc", "csr"]

Part = Tensor | SparseForm
_numbers = count()
FLAWS = ("invalid offsets", "indices beyond the matrix", "unsorted elements", "duplicates")


class SparseTensor:
    """A sparse matrix: `values`, `rows` and `columns` on one device, whose meaning is in `form`.

    It unpacks into the four fields that every request over a sparse matrix has: `dispatch.spmm(*a, b)`. `a @ b` is such
    a product, of a vector, a matrix or another SparseTensor.
    """

    __slots__ = ("columns", "form", "rows", "values")
    __array_priority__ = 1000  # NumPy's operators defer to this class
    __array_ufunc__ = None
    multiplies_tensors = True  # tensors on the left defer to this class, too
    product: ClassVar[Callable[[SparseTensor, Any], Any]]  # set by functions.py, which has the requests
    left_product: ClassVar[Callable[[SparseTensor, Any], Any]]
    densified: ClassVar[Callable[[SparseTensor], Any]]
    flaws: ClassVar[Callable[[SparseTensor], list[int]]]

    def __init__(self, values: Any, rows: Any, columns: Any, form: SparseForm, *, validate: bool = False) -> None:
        """Tensors of one device, or arrays of another library; `validate` checks all indices and waits for it."""
        self.form = check_form("form", form)
        self.values, self.rows, self.columns = (
            as_tensor(name, given) for name, given in (("values", values), ("rows", rows), ("columns", columns))
        )
        home = self.values.device
        for name, tensor in (("rows", self.rows), ("columns", self.columns)):
            if tensor.device is not home:
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}, the device of values")
        check_parts(self.form, {"values": self.values, "rows": self.rows, "columns": self.columns})
        check_bool("validate", validate)
        if validate:
            self.validate()

    @classmethod
    def of_results(cls, values: Any, rows: Any, columns: Any, form: SparseForm) -> SparseTensor:
        """The matrix of a request's results, or of parts that are already checked; checking again took 22 us."""
        matrix = cls.__new__(cls)
        parts = (("values", values), ("rows", rows), ("columns", columns))
        matrix.values, matrix.rows, matrix.columns = (as_tensor(name, part) for name, part in parts)
        matrix.form = form
        return matrix

    def __iter__(self) -> Iterator[Part]:
        """The four fields of a request: values, rows, columns, form."""
        return iter(self.parts)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, SparseForm]:
        """The same as a tuple with static types: `dispatch.spmm(*a.parts, b)`."""
        return self.values, self.rows, self.columns, self.form

    # -- properties ---------------------------------------------------------------------------------------------------
    @property
    def format(self) -> SparseFormat:
        return SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked

    @property
    def shape(self) -> tuple[int, int]:
        return self.form.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Dtype:
        return self.values.dtype

    @property
    def index_dtype(self) -> Dtype:
        """The dtype of the indices; offsets may have another."""
        return self.rows.dtype if self.format is SparseFormat.CSC else self.columns.dtype

    @property
    def device(self) -> Device:
        return self.values.device

    @property
    def nnz(self) -> int:
        """The number of stored elements, including zeros."""
        return self.values.size

    @property
    def density(self) -> float:
        """The fraction of elements that are stored."""
        m, n = self.shape
        return self.nnz / (m * n) if m and n else 0.0

    @property
    def T(self) -> SparseTensor:
        """The transposed matrix over the same memory: CSC from CSR, and CSR from CSC; BadRequest for other formats."""
        other = transposed(self.form)
        if other is None:
            hint = "dispatch.sparse.tocsr(a).T"
            if self.form.format != SparseFormat.BSR:  # its products do not support `trans`
                hint += ", or pass trans='t' to a product, without a copy"
            raise BadRequest("T", repr(self), "CSR or CSC, because the transpose of each is the other", hint)
        return SparseTensor.of_results(self.values, self.columns, self.rows, other)

    def with_values(self, values: Any) -> SparseTensor:
        """Other elements at the same places; a fixed pattern keeps its number."""
        shape = getattr(values, "shape", None)
        if shape is not None and tuple(shape) != self.values.shape:
            raise BadRequest("values", f"shape {list(shape)}", f"{list(self.values.shape)}, a value for each element")
        return SparseTensor(values, self.rows, self.columns, self.form)

    def with_form(self, form: SparseForm) -> SparseTensor:
        """The same tensors with another form."""
        return SparseTensor(self.values, self.rows, self.columns, form)

    def fixed(self) -> SparseTensor:
        """The same matrix with the promise that the contents of `rows` and `columns` do not change from now on.

        Requests over it keep their analyses of the pattern with their plans, as `spsv` and `spsm` do. The elements may
        change.
        """
        return SparseTensor(self.values, self.rows, self.columns, self.form._replace(pattern=next(_numbers)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its parts; a fixed pattern gets a new number in the process that unpickles it."""
        fixed = self.form.pattern is not None
        return _unpickled, (self.values, self.rows, self.columns, self.form._replace(pattern=None), fixed)

    def validate(self) -> SparseTensor:
        """Check all indices, and wait for the result; returns self. BadRequest counts the errors."""
        counts = SparseTensor.flaws(self)
        if any(counts):
            found_flaws = ", ".join(f"{number} {what}" for number, what in zip(counts, FLAWS, strict=True) if number)
            hint = "a.sort_indices() and a.sum_duplicates() of SciPy or CuPy, or a.coalesce() of torch"
            raise BadRequest("indices", found_flaws, "indices within the matrix, sorted and unique in each line", hint)
        return self

    def todense(self) -> Any:
        """The dense matrix, as a request on the current stream."""
        return SparseTensor.densified(self)

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        """Refused: NumPy would hold the object itself. SciPy's `m @ a` of a sparse matrix m calls it, too."""
        hint = "a.todense() makes a dense tensor, dispatch.sparse.to_scipy(a) a sparse array; "
        hint += "for m @ a of a sparse matrix m of SciPy call dispatch.sparse.spgemm(m, a)"
        raise TypeError(f"a SparseTensor cannot be converted to a NumPy array: {hint}")

    def __matmul__(self, other: Any) -> Any:
        return SparseTensor.product(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return SparseTensor.left_product(self, other)

    def __repr__(self) -> str:
        m, n = self.shape
        more = f" base {self.form.base}" if self.form.base else ""
        blocks = f", blocks {self.form.block[0]}x{self.form.block[1]}" if self.format is SparseFormat.BSR else ""
        fixed = ", fixed" if self.form.pattern is not None else ""
        indices = f"{self.index_dtype} indices{more}{blocks}{fixed}"
        return f"SparseTensor({self.format.name} {self.dtype}[{m}, {n}], nnz {self.nnz}, {indices}, {self.device})"


def _unpickled(values: Tensor, rows: Tensor, columns: Tensor, form: SparseForm, fixed: bool) -> SparseTensor:
    matrix = SparseTensor(values, rows, columns, form)
    return matrix.fixed() if fixed else matrix


def as_tensor(name: str, given: Any) -> Tensor:
    """A tensor, or the tensor over the memory of another library's array."""
    if isinstance(given, Tensor):
        return given
    framework = framework_of(type(given))
    if framework is None:
        raise BadType(name, type_shown(given), "a tensor, or an array of another library", "dev.array(x)")
    return framework.tensor(name, given)


@names_arguments
def csr(
    values: Any, rows: Any, columns: Any, shape: tuple[int, int], *, base: int = 0, validate: bool = False
) -> SparseTensor:
    """A matrix in CSR: `rows` (m + 1,) says where each row begins, `columns` (nnz,) the column of each element."""
    return SparseTensor(values, rows, columns, SparseForm(SparseFormat.CSR, shape, base), validate=validate)


@names_arguments
def csc(
    values: Any, rows: Any, columns: Any, shape: tuple[int, int], *, base: int = 0, validate: bool = False
) -> SparseTensor:
    """A matrix in CSC: `columns` (n + 1,) says where each column begins, `rows` (nnz,) the row of each element."""
    return SparseTensor(values, rows, columns, SparseForm(SparseFormat.CSC, shape, base), validate=validate)


@names_arguments
def coo(
    values: Any, rows: Any, columns: Any, shape: tuple[int, int], *, base: int = 0, validate: bool = False
) -> SparseTensor:
    """A matrix in COO: the row and the column of each element, sorted by row."""
    return SparseTensor(values, rows, columns, SparseForm(SparseFormat.COO, shape, base), validate=validate)


@names_arguments
def bsr(
    values: Any, rows: Any, columns: Any, shape: tuple[int, int], *, base: int = 0, validate: bool = False
) -> SparseTensor:
    """A matrix in BSR: `values` (blocks, r, c), `rows` where each row of blocks begins, `columns` of each block."""
    block: Any = tuple(values.shape[1:])
    return SparseTensor(values, rows, columns, SparseForm(SparseFormat.BSR, shape, base, block), validate=validate)
