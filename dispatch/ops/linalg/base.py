"""Base class and checks of the requests of linear algebra: matrices are the last two axes, the leading ones a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.operand_checks import check_extents
from dispatch.core.operands import OperandRequest, Output, by_columns, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64, I32, Dtype

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["LinalgRequest", "by_columns", "check_dense", "check_matrix", "check_right_side", "check_square", "real_of"]

Shape = tuple[int, ...]
DTYPES = (F32, F64, C64, C128)
REALS = {C64: F32, C128: F64}
MATRIX = 2  # axes


def real_of(dtype: Dtype) -> Dtype:
    """The real dtype for magnitudes of numbers of a dtype."""
    return REALS.get(dtype, dtype)


class LinalgRequest(OperandRequest[R_co]):
    """A request over the matrices of its first operand; that operand's dtype selects the row."""

    @property
    def matrices(self) -> Tensor:
        """The first operand."""
        first: Tensor = getattr(self, self.reads[0])
        return first

    @property
    def batch(self) -> Shape:
        """The axes before the two axes of a matrix."""
        return self.matrices.shape[:-2]

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.matrices.dtype, self.matrices.dtype

    def info_output(self) -> Output:
        """The output for one status per matrix."""
        return dense(self.batch, I32)


# -- checks -----------------------------------------------------------------------------------------------------------
def check_matrix(name: str, tensor: Tensor) -> None:
    """BadRequest unless a tensor is a matrix, or a batch of them, of a dtype that LAPACK supports."""
    if tensor.ndim < MATRIX:
        raise BadRequest(name, str(tensor.layout), "a matrix, (…, rows, columns)", "x[None] adds an axis")
    if tensor.dtype not in DTYPES:
        hint = f"convert it: dev.array(x, '{'f64' if tensor.dtype.numpy.kind in 'iub' else 'f32'}')"
        raise BadRequest(name, str(tensor.layout), "f32, f64, c64 or c128", hint)
    check_extents(name, tensor)


def check_square(name: str, tensor: Tensor) -> None:
    """BadRequest unless a tensor is a square matrix, or a batch of them."""
    check_matrix(name, tensor)
    if tensor.shape[-1] != tensor.shape[-2]:
        raise BadRequest(name, str(tensor.layout), "as many rows as columns")


def check_right_side(name: str, b: Tensor, a_name: str, a: Tensor) -> None:
    """BadRequest unless b is a right-hand side for a's square matrices: (…, n, k), or a vector (n,) for one matrix."""
    n = a.shape[-1]
    is_vector = b.ndim == 1 and a.ndim == MATRIX
    if b.dtype is not a.dtype:
        raise BadRequest(
            name, str(b.layout), f"{a.dtype}, the dtype of {a_name}", f"convert it: dev.array(x, '{a.dtype}')"
        )
    if (is_vector and b.shape != (n,)) or (not is_vector and (b.ndim != a.ndim or b.shape[:-1] != a.shape[:-1])):
        leading = "".join(f"{extent}, " for extent in a.shape[:-2])
        vector = f", or {a.dtype}[{n}]" if a.ndim == MATRIX else ""
        hint = "x[..., None] makes each vector a column"
        raise BadRequest(name, str(b.layout), f"{a.dtype}[{leading}{n}, k]{vector}, for {a_name} {list(a.shape)}", hint)
    check_extents(name, b)


def check_dense(name: str, tensor: Tensor | None, dtype: Dtype | None = None, shape: Shape | None = None) -> None:
    """BadRequest unless a vector or a status, if present, is dense and has the dtype and shape, if these are given."""
    if tensor is None:
        return
    fits = dtype is None or (tensor.dtype, tensor.shape) == (dtype, shape)
    if not fits or not tensor.layout.is_contiguous or (tensor.size and tensor.layout.alignment < tensor.dtype.itemsize):
        expected = "dense" if dtype is None else f"{dtype}{list(shape or ())}, dense"
        hint = f'dev.array(x, "{dtype}")' if dtype is not None and tensor.shape == shape else ""
        raise BadRequest(name, str(tensor.layout), expected, hint)
