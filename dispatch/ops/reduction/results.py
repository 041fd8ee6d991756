"""The result types of `reduce` for type checkers: the reduced tensor, or with `indices` the indices, too.

Only type checkers read this file (core/results.py).
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
    """A request whose result is the reduced tensor."""

    indices: Literal[False] = False


@dataclass(frozen=True, eq=False, kw_only=True)
class WithIndices(request.ReduceRequest["tuple[Tensor, Tensor]"]):
    """A request whose result is the reduced tensor and the indices."""

    indices: Literal[True] = True


class ReduceRequest(request.ReduceRequest[R_co]):
    """`request.ReduceRequest` with the type of its result; the fields are documented there."""

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
