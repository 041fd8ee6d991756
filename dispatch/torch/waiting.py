"""Which of torch's ops a call runs that wait for the GPU, and so cannot be part of a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Waiting"]

# Ops whose result's extent, or whose value in Python, is known once the GPU is done.
NAMES = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere"),
        *("masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        *("bincount", "histc", "linalg_eig", "linalg_eigvals", "_assert_async"),
    )
)
SELECTS = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))
MASKS = (torch.bool, torch.uint8)


class Waiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its `with` block it notes the first op that waits, or that copies from one device to another.

    Attributes:
        found: that op's name; empty where there is none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name: str = func.name().partition(".")[0]
        if not self.found and (name in NAMES or _selects(name, args) or _crosses(result, args)):
            self.found = name
        return result


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """Whether elements are taken by a mask, so that the result's extent is the mask's sum."""
    return name in SELECTS and any(isinstance(x, torch.Tensor) and x.dtype in MASKS for x in args[1])


def _crosses(result: Any, args: tuple[Any, ...]) -> bool:
    tensors = [x for x in (result, *args) if isinstance(x, torch.Tensor)]
    return len({x.device for x in tensors if x.ndim or x.is_cuda}) > 1
