"""The description of a compressed matrix, and which matrices can be compressed: 2 of 4 elements, 1 of 2 in f32.

Follows https://docs.nvidia.com/cuda/cusparselt/types.html and functions.html, whose extents apply to the host, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.checks import check_bool, check_dtype, check_int, names_arguments, shown
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, I8, Choice, Dtype

if TYPE_CHECKING:
    from typing import Any

    from dispatch.device.tensor import Tensor

__all__ = ["ON_HOST", "PruneAlgorithm", "StructuredForm", "check_form", "check_structured", "dense_step", "group_of"]

ON_HOST = "host"
DTYPES = (F16, BF16, I8, F8E4M3, F8E5M2, F32)
MAX_EXTENT = 2**31 - 1
MATRIX, BATCH = 2, 3  # axes


class PruneAlgorithm(Choice):
    """`cusparseLtPruneAlg_t`: which elements stay; those of the largest magnitudes.

    STRIP: in each group of four along the columns two, for f32 in each pair one. TILE: in each tile of 4 x 4 two in
    each row and each column, for f32 one in those of each tile of 2 x 2, such that the sum of magnitudes is the
    largest: the transposed matrix can be compressed, too.
    """

    TILE = 0
    STRIP = 1


@names_arguments
class StructuredForm(NamedTuple):
    """The description of a compressed matrix, or of a batch of them, without its bytes.

    Attributes:
        shape: (rows, k), or (batch, rows, k).
        dtype: the dtype of its elements.
        by_rows: whether the matrix was row-major before compression, or column-major.
        made_by: the owner of the layout of the compressed bytes: "host", or library, version and architecture.
    """

    shape: tuple[int, ...]
    dtype: Dtype | str
    by_rows: bool = True
    made_by: str = ON_HOST


def group_of(dtype: Dtype) -> tuple[int, int]:
    """The number of elements of a group, and the number of those that stay."""
    return (2, 1) if dtype is F32 else (4, 2)


def structured_step(dtype: Dtype) -> int:
    """The number that the extents of a structured matrix are multiples of."""
    return 32 // dtype.itemsize


def dense_step(dtype: Dtype) -> int:
    """The number that the extents of a dense matrix are multiples of."""
    return 16 // dtype.itemsize


def check_form(name: str, given: object) -> StructuredForm:
    """A form with valid fields, its dtype by name; BadRequest for any other."""
    if not isinstance(given, StructuredForm):
        hint = "pass a StructuredTensor as *a, which is both arguments: matmul_2_4(*a, b)"
        raise BadRequest(name, shown(given), "a StructuredForm", hint)
    dtype = check_dtype(f"{name}.dtype", given.dtype)
    shape: Any = given.shape
    if not isinstance(shape, (tuple, list)) or len(shape) not in (MATRIX, BATCH):
        raise BadRequest(f"{name}.shape", shown(shape), "(rows, k), or (batch, rows, k)")
    extents = tuple(check_int(f"{name}.shape", extent, 0, MAX_EXTENT) for extent in shape)
    check_extents(f"{name}.shape", extents, dtype)
    check_bool(f"{name}.by_rows", given.by_rows)
    if not isinstance(given.made_by, str):
        raise BadRequest(
            f"{name}.made_by", shown(given.made_by), "a text that names the library and GPU on which compress_2_4 ran"
        )
    return given._replace(shape=extents, dtype=dtype.name)


def check_structured(name: str, tensor: Tensor) -> None:
    """BadRequest unless a dense matrix, or a batch of them, can be compressed."""
    if tensor.ndim not in (MATRIX, BATCH):
        raise BadRequest(name, str(tensor.layout), "a matrix (rows, k), or a batch of them (batch, rows, k)")
    check_extents(name, tensor.shape, tensor.dtype)


def check_extents(name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
    """BadRequest for a dtype or extents that the sparse tensor cores or the library do not support."""
    if dtype not in DTYPES:
        names = ", ".join(one.name for one in DTYPES)
        raise BadRequest(name, f"{dtype}{list(shape)}", f"one of {names}", 'x.astype("f16")')
    step = structured_step(dtype)
    if any(extent < 1 or extent % step for extent in shape[-2:]) or 0 in shape:
        wanted = f"rows and columns that are multiples of {step}, as structured matrices of {dtype} need"
        raise BadRequest(name, f"{dtype}{list(shape)}", wanted, "pad it with zeros")
