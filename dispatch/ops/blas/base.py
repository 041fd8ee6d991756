"""Base classes of the requests of BLAS routines: factors passed by value, matrices of one dtype, `library`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core import factors
from dispatch.core.operand_checks import check_tensor
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["BlasRequest", "Number", "ScaledRequest", "Shape", "check_matrix", "dims", "length"]

Number = int | float | complex
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlasRequest(factors.FactorRequest["Tensor"]):
    """Base class of all BLAS requests.

    Attributes:
        library: use only this library, "cublas"; None allows all in the table's order.
    """

    _: KW_ONLY
    library: str | None = None

    # -- for subclasses -----------------------------------------------------------------------------------------
    def extents(self) -> dict[str, Shape]:
        """The shape of each matrix by its name, including the output; BadRequest for shapes that do not match."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> Dtype:
        """The dtype of an operand: that of the first one, unless overridden."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype

    @property
    def takes_c(self) -> bool:
        """Whether c is copied to the result, because the routine adds to it or leaves a part of it unchanged."""
        return self.reads_added

    # -- the contract of Request ----------------------------------------------------------------------------------
    def check_fields(self) -> None:
        self.check_factors()
        for name, shape in self.extents().items():
            if name not in self.writes:
                check_tensor(name, getattr(self, name), self.dtype_of(name), shape)


@dataclass(frozen=True, eq=False)
class ScaledRequest(BlasRequest, factors.ScaledRequest["Tensor"]):
    """A routine with a factor.

    Attributes:
        alpha: a number; complex only for complex matrices.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    _: KW_ONLY
    alpha: Number = 1.0


def check_matrix(name: str, tensor: Tensor) -> Shape:
    """The rows and columns of a matrix; BadRequest if it does not have two axes."""
    if tensor.ndim != 2:
        hint = "cuBLAS has no batched version: call it once per matrix" if tensor.ndim > 2 else "x[None] adds an axis"
        raise BadRequest(name, str(tensor.layout), "a matrix, with two axes", hint)
    return tensor.shape


def length(name: str, tensor: Tensor) -> int:
    """The number of elements of a vector; BadRequest if it does not have one axis."""
    if tensor.ndim != 1:
        raise BadRequest(name, str(tensor.layout), "a vector, with one axis", "x.reshape(-1), or a row x[0]")
    return tensor.shape[0]


def dims(name: str, tensor: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = check_matrix(name, tensor)
    return rows, columns
