"""Checks of operands and numbers that several families share: extents, spatial axes, probabilities, opaque memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import as_python_ints, check_int
from dispatch.device.frameworks.framework import ForeignStorage
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.keys import U8

if TYPE_CHECKING:
    from dispatch.core.overlap import Shape
    from dispatch.device.frameworks.framework import Framework
    from dispatch.keys import Dtype

__all__ = [
    "MAX_EXTENT",
    "TENSOR",
    "check_array",
    "check_extents",
    "check_image",
    "check_opaque",
    "check_probability",
    "check_tensor",
    "check_writable",
    "each",
    "taken_in",
]

TENSOR = "a dispatch Tensor, or an array of torch, NumPy, CuPy or JAX"


def each(name: str, value: Any, rank: int, low: int) -> Shape:
    """A parameter of spatial axes as a tuple with a number for each; BadRequest for one below `low`."""
    value = as_python_ints(name, value)
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise BadRequest(name, repr(value), f"a number, or one for each of the {rank} spatial axes")
    return tuple(check_int(name, one, low) for one in values)


def check_probability(name: str, p: object) -> None:
    """BadRequest unless a number is a probability below 1."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise BadRequest(name, repr(p), "a number p with 0 <= p < 1")


def check_array(
    name: str, given: object, hint: str = "dispatch.device().array(x) makes a tensor of an array"
) -> Framework | None:
    """The library that an operand belongs to, None for a Tensor of ours; BadType for anything else."""
    framework = framework_of(type(given))
    if framework is None and not isinstance(given, Tensor):
        raise BadType(name, type_shown(given), "a tensor, or an array of another library", hint)
    return framework


def taken_in(name: str, given: Any, *hint: str) -> Tensor:
    """A tensor, or the tensor over the memory of another library's array; BadType for anything else."""
    framework = check_array(name, given, *hint)
    tensor: Tensor = given if framework is None else framework.tensor(name, given)
    return tensor


def check_tensor(
    name: str, tensor: Tensor | None, dtype: Dtype, shape: Shape, said: str = "", hint: str = "", *, dense: bool = False
) -> None:
    """BadRequest unless a tensor is None or has this dtype and shape and, with `dense`, is dense.

    `said` is appended to the expected value in the message.
    """
    if tensor is None or (
        (tensor.shape, tensor.dtype) == (shape, dtype) and (tensor.layout.is_contiguous or not dense)
    ):
        return
    raise BadRequest(name, str(tensor.layout), f"{dtype}{list(shape)}{', dense' if dense else ''}{said}", hint)


def check_opaque(name: str, tensor: Tensor, wanted: int | None, alignment: int, hint: str) -> None:
    """BadRequest unless a tensor is dense u8 of `wanted` bytes (None for any) at a multiple of `alignment` bytes."""
    layout = tensor.layout
    shape = layout.shape[:1] if wanted is None else (wanted,)
    if (layout.shape, layout.dtype) != (shape, U8) or not layout.is_contiguous:
        raise BadRequest(name, str(layout), f"dense u8[{'…' if wanted is None else wanted}]", hint)
    if layout.size and layout.alignment < alignment:
        raise BadRequest(
            name, f"an address that is a multiple of {layout.alignment} bytes", f"one of {alignment}", hint
        )


def check_image(name: str, tensor: Tensor, low: int, high: int) -> None:
    """BadRequest unless a tensor has the axes images, channels and `low` to `high` spatial axes."""
    if not low <= tensor.ndim - 2 <= high:
        expected, hint = f"(images, channels, spatial…) with {low} to {high} spatial axes", "x[None] adds an axis"
        raise BadRequest(name, str(tensor.layout), expected, hint)


MAX_EXTENT = 2**31 - 1


def check_extents(name: str, tensor: Tensor) -> None:
    """BadRequest for an extent above MAX_EXTENT: libraries count rows, columns and products in a C int."""
    if max(tensor.shape, default=0) > MAX_EXTENT:
        raise BadRequest(name, str(tensor.layout), f"extents up to {MAX_EXTENT}")


def check_writable(name: str, tensor: Tensor) -> None:
    """BadRequest for an output that is read-only, or in which two elements share memory."""
    if tensor.layout.readonly:
        storage = tensor.storage
        if isinstance(storage, ForeignStorage) and storage.framework.readonly:
            array, hint = f"an array of {storage.framework.name}, read-only", f"with {name}=None an array is allocated"
            raise BadRequest(name, array, "writable memory", hint)
        raise BadRequest(name, "read-only memory", "writable memory", "copy it: dev.array(x)")
    if tensor.layout.meets_itself:
        raise BadRequest(name, f"a view {tensor.layout}", "elements that have different addresses")
