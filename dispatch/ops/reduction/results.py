"""What `reduce` gives back: with `indices` the places, too.

For type checkers alone (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.ops.reduction import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrPair
    from dispatch.device.tensor import Tensor

__all__ = ["ReduceRequest", "reduce"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Alone(request.ReduceRequest["Tensor"]):
    """The reduced tensor."""

    indices: Literal[False] = False


@dataclass(frozen=True, eq=False, kw_only=True)
class WithIndices(request.ReduceRequest["tuple[Tensor, Tensor]"]):
    """The reduced tensor, and the places."""

    indices: Literal[True] = True


class ReduceRequest(request.ReduceRequest[R_co]):
    """`request.ReduceRequest`, whose documentation says what its fields are, with the type of its result."""

    @overload
    @classmethod
    @with_fields_of(Alone)
    def __new__(cls) -> ReduceRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(WithIndices)
    def __new__(cls) -> ReduceRequest[tuple[Tensor, Tensor]]: ...
    @overload
    @classmethod
    @with_fields_of(request.ReduceRequest["OneOrPair"])
    def __new__(cls) -> ReduceRequest[OneOrPair]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


reduce = function_of(Alone, WithIndices, request.ReduceRequest["OneOrPair"])
