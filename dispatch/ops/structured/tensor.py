"""StructuredTensor: a compressed matrix as its bytes and a form, over the caller's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from dispatch.core.operand_checks import taken_in
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import Dtype
from dispatch.ops.structured.form import StructuredForm, check_form, group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.device import Device

__all__ = ["StructuredTensor"]

Part = Tensor | StructuredForm


class StructuredTensor:
    """A matrix, or a batch of them, with at most two nonzeros of four elements (one of two for f32): bytes and `form`.

    It unpacks into the two fields of a request: `dispatch.matmul_2_4(*a, b)`. `a @ b` and `x @ a.T` are such
    products. The layout of the bytes depends on the library's version and the GPU, so they are valid only there.
    """

    __slots__ = ("data", "form", "is_transposed")
    __array_priority__ = 1000  # NumPy's operators defer to this class
    __array_ufunc__ = None
    multiplies_tensors = True  # tensors on the left defer to this class, too
    product: ClassVar[Callable[[StructuredTensor, Any], Any]]  # set by functions.py, which has the requests
    left_product: ClassVar[Callable[[StructuredTensor, Any], Any]]
    densified: ClassVar[Callable[[StructuredTensor], Any]]

    def __init__(self, data: Any, form: StructuredForm, *, is_transposed: bool = False) -> None:
        """Bytes from `compress_2_4`, as a tensor or an array of another library, and their form."""
        self.form, self.is_transposed = check_form("form", form), is_transposed
        self.data: Tensor = taken_in("data", data, "structured.compress(x) makes one")

    def __iter__(self) -> Iterator[Part]:
        """The two fields of a request: a and form."""
        return iter(self.parts)

    @property
    def parts(self) -> tuple[Tensor, StructuredForm]:
        """The same as a tuple with static types; BadRequest for a transposed one."""
        if self.is_transposed:
            raise BadRequest("a", repr(self), "a matrix that is not transposed", "x @ a.T is (a @ x.T).T")
        return self.data, self.form

    # -- properties ---------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        *batch, m, k = self.form.shape
        return (*batch, k, m) if self.is_transposed else (*batch, m, k)

    @property
    def ndim(self) -> int:
        return len(self.form.shape)

    @property
    def dtype(self) -> Dtype:
        return Dtype.of(self.form.dtype)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """The size in bytes of the compressed matrix."""
        return self.data.size

    @property
    def made_by(self) -> str:
        """The owner of the layout of the bytes: "host", or library, version and architecture."""
        return self.form.made_by

    @property
    def mT(self) -> StructuredTensor:
        """The transposed matrices over the same memory, for products from the left: x @ a.mT."""
        return StructuredTensor(self.data, self.form, is_transposed=not self.is_transposed)

    @property
    def T(self) -> StructuredTensor:
        """The transposed matrix over the same memory; BadRequest for a batch."""
        if self.ndim > len(("m", "k")):
            raise BadRequest("T", repr(self), "a matrix", "a.mT exchanges the last two axes")
        return self.mT

    def todense(self) -> Any:
        """The dense matrix, as a request on the current stream; on a GPU as a product with the identity.

        There elements of f32 are rounded to TF32, and NaN and infinities spread.
        """
        return StructuredTensor.densified(self)

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        """Refused: NumPy would hold the object itself."""
        raise TypeError("a StructuredTensor cannot be converted to a NumPy array: a.todense() makes a dense tensor")

    def __matmul__(self, other: Any) -> Any:
        return StructuredTensor.product(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return StructuredTensor.left_product(self, other)

    def __repr__(self) -> str:
        group, nonzeros = group_of(self.dtype)
        turned = ", transposed" if self.is_transposed else ""
        shape = ", ".join(map(str, self.shape))
        return f"StructuredTensor({nonzeros}:{group} {self.dtype}[{shape}]{turned}, by {self.made_by}, {self.device})"
