"""What requests of BLAS routines have in common: factors given by value, matrices of one dtype, `library`."""

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
    """What all have in common.

    Attributes:
        library: the one whose rows alone are asked, "cublas"; None asks all in the table's order.
    """

    _: KW_ONLY
    library: str | None = None

    # -- what a subclass says -------------------------------------------------------------------------------------
    def extents(self) -> dict[str, Shape]:
        """The shape of each matrix by its name, the output's too; BadRequest for operands that lead to none."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> Dtype:
        """The dtype of an operand: that of the first, unless said."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype

    @property
    def takes_c(self) -> bool:
        """Whether the result is to have of c what the routine does not write, or adds to."""
        return self.reads_c

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
        alpha: a number; complex ones for complex matrices alone.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha",)
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha",))
    _: KW_ONLY
    alpha: Number = 1.0


def check_matrix(name: str, tensor: Tensor) -> Shape:
    """The rows and columns of a matrix; BadRequest for what has other axes."""
    if tensor.ndim != 2:
        hint = "cuBLAS has no batched form: call it for each matrix" if tensor.ndim > 2 else "x[None] adds an axis"
        raise BadRequest(name, str(tensor.layout), "a matrix, of two axes", hint)
    return tensor.shape


def length(name: str, tensor: Tensor) -> int:
    """The elements of a vector; BadRequest for what has other axes than one."""
    if tensor.ndim != 1:
        raise BadRequest(name, str(tensor.layout), "a vector, of one axis", "x.reshape(-1), or a row x[0]")
    return tensor.shape[0]


def dims(name: str, tensor: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = check_matrix(name, tensor)
    return rows, columns
