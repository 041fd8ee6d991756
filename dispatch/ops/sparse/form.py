"""How a sparse matrix is stored: the meaning of each of its three tensors, and their checks.

A sparse operand of a request is three tensors, `values`, `rows` and `columns`, and a `SparseForm` with all the rest. So
a request has its tensors like any other, and no other part needs to handle sparse matrices. Follows
https://docs.nvidia.com/cuda/cusparse/#cusparse-storage-formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dispatch.checks import check_int, names_arguments, shown
from dispatch.core.matrix_choices import Operation
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64, Choice

if TYPE_CHECKING:
    from typing import Any

    from dispatch.core.request import Operands
    from dispatch.device.tensor import Tensor

__all__ = ["SparseForm", "SparseFormat", "check_form", "check_parts", "shape_of", "transposed"]

Shape = tuple[int, ...]
MAX_EXTENT = 2**62


class SparseFormat(Choice):
    """`cusparseFormat_t`: the meaning of `rows` and `columns`; the elements are in `values`.

    CSR: rows[i] is where row i begins, and rows[m] where the last one ends; columns holds the column of each element.
    CSC: the same with rows and columns exchanged. COO: the row and the column of each element, sorted by row.
    BSR: as CSR, of dense blocks: values is (blocks, block rows, block columns).
    """

    CSR = 1
    CSC = 2
    COO = 3
    BSR = 6

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"COORDINATE": "COO"}


@names_arguments
class SparseForm(NamedTuple):
    """The description of a sparse matrix, without its tensors.

    Attributes:
        format: a `SparseFormat`, or its name.
        shape: rows and columns of the matrix.
        base: the number of the first row, column and element: 0 or 1.
        block: rows and columns of a block of BSR.
        pattern: a number that identifies the contents of `rows` and `columns`: the caller promises that they do not
            change, and that no other matrix of the process has this number, so that analyses are kept. None: each call
            repeats the analyses that it needs. `SparseTensor.fixed` assigns one.
    """

    format: SparseFormat | str
    shape: tuple[int, int]
    base: int = 0
    block: tuple[int, int] = (1, 1)
    pattern: int | None = None


def transposed(form: SparseForm) -> SparseForm | None:
    """The form of the transposed matrix, whose `rows` are these `columns`; None if its format is not supported.

    COO would be sorted by column, and BSR would need its blocks transposed.
    """
    others = {SparseFormat.CSR: SparseFormat.CSC, SparseFormat.CSC: SparseFormat.CSR}
    other = others.get(SparseFormat(form.format))  # type: ignore[arg-type]  # a name is read, too
    return None if other is None else form._replace(format=other, shape=(form.shape[1], form.shape[0]))


def shape_of(form: SparseForm, trans: Operation | str) -> tuple[int, int]:
    """Rows and columns of op(A)."""
    m, n = form.shape
    return (m, n) if trans is Operation.N else (n, m)


def check_form(name: str, given: object) -> SparseForm:
    """A form with valid fields; BadRequest for any other."""
    if not isinstance(given, SparseForm):
        hint = "pass a SparseTensor as *a, which is all four arguments: spmm(*a, b)"
        raise BadRequest(name, shown(given), "a SparseForm", hint)
    kind: Any = given.format
    kind_member = SparseFormat.named(kind) if isinstance(kind, str) else kind
    if not isinstance(kind_member, SparseFormat):
        names = ", ".join(SparseFormat.__members__)
        raise BadRequest(f"{name}.format", shown(kind), f"one of {names}", "convert it: a.tocsr() of SciPy or CuPy")
    pairs = {}
    for part, least in (("shape", 0), ("block", 1)):
        pair: Any = getattr(given, part)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise BadRequest(f"{name}.{part}", shown(pair), "rows and columns")
        pairs[part] = tuple(check_int(f"{name}.{part}", extent, least, MAX_EXTENT) for extent in pair)
    check_int(f"{name}.base", given.base, 0, 1)
    if given.pattern is not None:
        check_int(f"{name}.pattern", given.pattern, 0, MAX_EXTENT)
    if kind_member is not SparseFormat.BSR and pairs["block"] != (1, 1):
        raise BadRequest(f"{name}.block", shown(given.block), f"(1, 1), because {kind_member.name} has no blocks")
    if any(extent % step for extent, step in zip(pairs["shape"], pairs["block"], strict=True)):
        hint = "pad the matrix with zeros"
        raise BadRequest(f"{name}.shape", shown(given.shape), f"whole blocks of {pairs['block']}", hint)
    (m, n), (high, wide) = pairs["shape"], pairs["block"]
    return given._replace(format=kind_member, shape=(m, n), block=(high, wide), base=int(given.base))


def check_parts(form: SparseForm, tensors: Operands, prefix: str = "") -> None:
    """BadRequest unless the three tensors have the extents of a form, integer indices, and are dense."""
    (m, n), (high, wide) = form.shape, form.block
    values, rows, columns = (tensors[name] for name in ("values", "rows", "columns"))
    places = rows if form.format == SparseFormat.CSC else columns
    counted = values if values.ndim == (3 if form.format == SparseFormat.BSR else 1) else places
    count = counted.shape[0] if counted.ndim else 0
    wanted: dict[str, Shape] = {"values": (count,), "rows": (count,), "columns": (count,)}
    if form.format == SparseFormat.BSR:
        wanted["values"] = (count, high, wide)
    if form.format in (SparseFormat.CSR, SparseFormat.BSR):
        wanted["rows"] = (m // high + 1,)
    elif form.format == SparseFormat.CSC:
        wanted["columns"] = (n + 1,)
    for name, tensor in tensors.items():
        _check_part(form, prefix + name, tensor, wanted[name], is_index=name != "values")
    reach = {"rows": m // high, "columns": n // wide}  # what an index counts; offsets count elements, too
    for name in ("columns",) if form.format == SparseFormat.CSC else ("rows",):
        reach[name] = max(reach[name], count)
    for name, number in reach.items():
        if tensors[name].dtype is I32 and number + form.base > np.iinfo(np.int32).max:
            expected = f"i64, because numbers up to {number + form.base} need more than 31 bits"
            raise BadRequest(f"{prefix}{name}", str(tensors[name].layout), expected, 'x.astype("i64")')


def _check_part(form: SparseForm, name: str, tensor: Tensor, shape: Shape, *, is_index: bool) -> None:
    of_matrix = f" of {SparseFormat(form.format).name}[{form.shape[0]}, {form.shape[1]}]"  # type: ignore[arg-type]
    if is_index and tensor.dtype not in (I32, I64):
        raise BadRequest(name, str(tensor.layout), f"i32 or i64{list(shape)}{of_matrix}", 'x.astype("i32")')
    if tensor.shape != shape:
        is_batch = name == "values" and tensor.ndim == len(shape) + 1
        hint = "pass a batch of values as values= of spmm, sddmm, spsolve or splu, with one matrix"
        raise BadRequest(name, str(tensor.layout), f"{tensor.dtype}{list(shape)}{of_matrix}", hint if is_batch else "")
    if tensor.layout.size > 1 and not tensor.layout.is_contiguous:
        raise BadRequest(name, str(tensor.layout), f"dense memory{of_matrix}", "x.copy() makes it dense")
