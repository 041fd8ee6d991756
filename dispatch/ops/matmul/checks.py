"""Checks that products with an epilogue tree and those without have in common; validate.py and trees.py call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import BadRequest
from dispatch.keys import Epilogue

if TYPE_CHECKING:
    from dispatch.core.overlap import Shape
    from dispatch.device.tensor import Tensor

__all__ = ["check_beta_has_c", "check_shape"]


def check_shape(name: str, tensor: Tensor | None, *shapes: Shape) -> None:
    """The tensor, if there is one, has one of these shapes."""
    if tensor is not None and tensor.shape not in shapes:
        raise BadRequest(name, f"shape {tensor.shape}", f"shape {' or '.join(map(str, dict.fromkeys(shapes)))}")


def check_beta_has_c(request: Any) -> None:
    """There is something that beta scales, except with a tree, which may use beta in another way."""
    has_tree = not isinstance(request.epilogue, Epilogue)
    if not has_tree and request.c is None and request.out is None and request.has_beta:
        expected = "0, because neither c nor out is passed that could be scaled"
        raise BadRequest("beta", str(request.beta), expected, "pass c=…")
