"""The cases of inverses of diagonal blocks: every format and size, compared with NumPy's inverses of the dense blocks.

Expected results are computed from the dense matrix by `numpy.linalg` in float64, without any code of the row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.keys import F64
from dispatch.ops.sparse.block_jacobi import BlockJacobiRequest
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, Mismatch, place, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["block_jacobi_cases", "expected_inverses", "matrix"]

CSR, CSC, COO, BSR = SparseFormat
ACCURATE = 16  # roundoffs of f64 for each row of a block, relative to inverse times condition number


class Form(NamedTuple):
    """A case: the number of rows, the block size, the pattern, the storage, the kind of elements, and the layout."""

    n: int
    size: int
    pattern: str
    kind: SparseFormat = CSR
    base: int = 0
    wide: bool = False
    elements: str = "strong"  # mixed units, indefinite, singular, empty row, nan, inf
    absolute: bool = False
    order: tuple[int, ...] | None = None  # of the axes of the result in memory; None leaves out `out`
    block: tuple[int, int] = (3, 3)


FORMS = (
    Form(20, 32, "random", order=(2, 0, 1)),  # one block has all elements
    Form(24, 4, "blocks"),
    Form(29, 1, "random", base=1),
    Form(25, 2, "banded", CSC, order=(0, 1, 2)),
    Form(26, 3, "blocks", COO, base=1, wide=True),
    Form(36, 5, "power law", BSR, elements="mixed units"),
    Form(36, 7, "blocks", BSR, base=1, wide=True, block=(4, 2), order=(1, 2, 0)),
    Form(70, 8, "random", elements="mixed units", order=(0, 2, 1)),
    Form(71, 16, "dense row", CSC, wide=True),
    Form(72, 17, "blocks", base=1, elements="mixed units"),
    Form(96, 32, "random", COO),
    Form(1, 1, "random"),
    Form(5, 6, "empty rows", elements="mixed units"),
    Form(24, 4, "blocks", elements="singular"),
    Form(33, 32, "random", CSC, elements="singular"),
    Form(25, 8, "banded", base=1, elements="empty row"),
    Form(30, 6, "blocks", BSR, elements="nan"),
    Form(26, 4, "random", COO, elements="inf"),
)
SYMMETRIC = (
    Form(24, 4, "blocks", absolute=True),
    Form(25, 2, "banded", COO, base=1, elements="indefinite", absolute=True),
    Form(36, 7, "blocks", BSR, elements="indefinite", absolute=True, order=(0, 1, 2)),
    Form(71, 16, "random", CSC, wide=True, elements="indefinite", absolute=True),
    Form(75, 32, "random", elements="indefinite", absolute=True),
    Form(7, 1, "random", elements="indefinite", absolute=True),
    Form(24, 8, "blocks", elements="singular", absolute=True),
    Form(24, 3, "blocks", elements="nan", absolute=True),
)


def block_jacobi_cases(row: Row) -> list[MadeCase]:
    """Every form of a row; absolute values are those of real matrices."""
    dtype = row.dtypes[0]
    forms = FORMS if dtype.is_complex else (*FORMS, *SYMMETRIC)
    return [MadeCase(f"{dtype}-{number}", partial(check, dtype, form)) for number, form in enumerate(forms)]


def matrix(dtype: Dtype, form: Form, rng: np.random.Generator) -> tuple[Array, Array]:
    """The places and values of elements: each diagonal block is as close to singular as the form requires."""
    n, size = form.n, form.size
    mask = PATTERNS[form.pattern](rng, (n, n)) | np.eye(n, dtype=bool)
    drawn = rng.uniform(-1, 1, (n, n)) + (1j * rng.uniform(-1, 1, (n, n)) if dtype.is_complex else 0)
    if form.absolute:
        mask, drawn = mask | mask.T, (drawn + drawn.T) / 2
    drawn = np.where(mask, drawn, 0)
    sizes = np.abs(drawn).sum(axis=1) + 1
    signs = np.where(rng.random(n) < 0.5, -1, 1) if form.elements == "indefinite" else 1
    drawn[np.diag_indices(n)] = sizes * signs
    last = n - (n - 1) % size - 1  # where the last block begins
    if form.elements == "mixed units":  # very different for rows, less for columns: one scaling of each removes it
        most = 20 if dtype.itemsize // (1 + dtype.is_complex) == 4 else 200
        drawn *= np.exp2(rng.integers(-5, 6, n)) * np.exp2(rng.integers(-most, most, n))[:, None]
    elif form.elements == "singular":  # integers, whose rows are linearly dependent without roundoff
        for first in dict.fromkeys((last, size * (n // size // 2))):
            end = min(first + size, n)
            mask[first:end, first:end] = True
            part = rng.integers(-3, 4, (end - first, end - first)).astype(float)
            part = part + part.T
            part[:, -1], part[-1] = part[:, 0], part[0]
            part[-1, -1] = part[0, 0]
            drawn[first:end, first:end] = part if end - first > 1 else 0
    elif form.elements == "empty row":
        mask[n // 2], drawn[n // 2] = False, 0
    elif form.elements in ("nan", "inf"):
        drawn[n // 2, n // 2] = float(form.elements)
    return mask, drawn.astype(dtype.numpy)


def expected_inverses(dense: Array, form: Form) -> tuple[Array, Array, int]:
    """The inverses of a dense matrix's diagonal blocks, their bounds in units of roundoff, and the status."""
    n, size = form.n, form.size
    count = -(-n // size)
    wide = dense.astype(np.complex128 if dense.dtype.kind == "c" else np.float64)
    inverses, error = np.zeros((count, size, size), wide.dtype), np.zeros((count, size, size))
    info = 0
    for number in range(count):
        part = wide[number * size : (number + 1) * size, number * size : (number + 1) * size]
        extent = len(part)
        target = number, slice(0, extent), slice(0, extent)
        by_row, by_column = scaling_powers(part)
        if not np.isfinite(part).all() or np.linalg.matrix_rank(part * by_row * by_column) < extent:
            inverses[target] = complex(np.nan, np.nan) if wide.dtype.kind == "c" else np.nan
            info = info or 1 + number
        elif form.absolute:
            values, vectors = np.linalg.eigh(part)
            inverses[target] = (vectors / np.abs(values)) @ vectors.T
            error[target] = np.abs(1 / values).max() ** 2 * np.abs(values).max()
        else:
            scaled = part * by_row * by_column
            inverse = np.linalg.inv(scaled)
            inverses[target] = by_column.T * inverse * by_row.T
            # The error of an elimination is relative to the whole scaled block, not to each of its elements.
            error[target] = by_column.T * (np.abs(inverse) @ np.abs(scaled) @ np.abs(inverse)).max() * by_row.T
    return inverses, error, info


def scaling_powers(part: Array) -> tuple[Array, Array]:
    """Powers of 2 for each row (extent, 1) and each column (1, extent), which bring all elements to similar sizes."""
    with np.errstate(all="ignore"):
        by_row = np.exp2(-np.floor(np.log2(np.abs(part).max(axis=1, keepdims=True))))
        by_row[~np.isfinite(by_row)] = 1
        by_column = np.exp2(-np.floor(np.log2(np.abs(part * by_row).max(axis=0, keepdims=True))))
    by_column[~np.isfinite(by_column)] = 1
    return by_row, by_column


class BlockJacobiCheck(Check):
    """A check in which an inverse that does not exist must be all NaN."""

    writes_nan = True

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for an inverse that differs from NumPy's, for one that should not exist, or like `Check`."""
        out, _ = (tensor.numpy() for tensor in result)
        missing = np.isnan(self.expected["out"])
        if not np.isnan(out[missing]).all():
            raise Mismatch(f"{self.name}: an inverse that there is none of is no NaN ({self.request.describe()})")
        super().verify(result)


def check(dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands surrounded by poison."""
    mask, dense = matrix(dtype, form, rng)
    index = np.int64 if form.wide else np.int32
    parts = stored(mask, dense, form.kind, form.base, index, form.block if form.kind is BSR else (1, 1))
    fields: dict[str, Any] = {"form": parts[3], "block_size": form.size, "absolute": form.absolute}
    for field, values in zip(("values", "rows", "columns"), parts, strict=False):
        fields[field] = device.array(values)
    found, error, info = expected_inverses(dense, form)
    written: tuple[GuardedBuffer, ...] = ()
    if form.order is not None:
        memory = place(device, poison(dtype, found.shape), form.order, 2)
        fields["out"], written = memory.view, (memory,)
    bound = rounded(ACCURATE * form.size * ROUNDOFF[F64][0] * error, found, dtype)
    allowed = {"out": np.where(np.isnan(found), np.inf, bound), "info": np.zeros(())}
    expected = {"out": found, "info": np.asarray(np.int32(info))}
    return BlockJacobiCheck(name, BlockJacobiRequest(**fields), expected, allowed, written)
