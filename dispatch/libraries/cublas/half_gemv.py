"""The batched matrix-vector products of half precision, which cuBLAS's header declares for C++ alone.

H is f16, T is bf16 and S f32: of the matrix and the vector that is multiplied, of the numbers, and of the result.
`cudabind.sys.cublas` has what the header declares for C.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from cudabind import _load
from cudabind.sys import cublas

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMES", "HalfGemv", "half_gemv"]

BATCHED, STRIDED = "gemvBatched", "gemvStridedBatched"
NAMES = frozenset(
    f"cublas{kind}{routine}{wide}"
    for kind in ("HSH", "HSS", "TST", "TSS")
    for routine in (BATCHED, STRIDED)
    for wide in ("", "_64")
)


class HalfGemv:
    """One of these functions, with what plans ask of those of `cudabind.sys.cublas`."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__wrapped__: Any = cublas.cublasSgemvBatched.__wrapped__  # of whose module the words for a status are

    @cached_property
    def unchecked(self) -> Callable[..., int]:
        """The ctypes function, which returns the status."""
        size: Any = c_int64 if self.__name__.endswith("_64") else c_int32
        steps = (c_int64,) if STRIDED in self.__name__ else ()  # from one matrix, or vector, to the next
        operand = (c_void_p, size, *steps)
        function = getattr(_load.open("cublas"), self.__name__)
        # The handle, the operation, m, n, alpha, A, x, beta, y, and how many.
        function.argtypes = (c_void_p, c_int32, size, size, c_void_p, *operand, *operand, c_void_p, *operand, size)
        function.restype = c_int32
        unchecked: Callable[..., int] = function
        return unchecked

    def error(self, status: int) -> Exception:
        """The error of a status."""
        function: Any = self
        return cublas._lib.error(function, status)


@cache
def half_gemv(name: str) -> HalfGemv:
    """The function of a name."""
    return HalfGemv(name)
