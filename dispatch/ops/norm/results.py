"""The result types of `norm_fwd` for type checkers: Y alone, or with `training` the statistics, too.

Only type checkers read this file (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.ops.norm import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrSeveral, Several
    from dispatch.device.tensor import Tensor

__all__ = ["NormFwdRequest", "norm_fwd"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Alone(request.NormFwdRequest["Tensor"]):
    """A request whose result is Y."""

    training: Literal[False] = False


@dataclass(frozen=True, eq=False, kw_only=True)
class WithStatistics(request.NormFwdRequest["Several"]):
    """A request whose result is Y and the statistics."""

    training: Literal[True] = True


class NormFwdRequest(request.NormFwdRequest[R_co]):
    """`request.NormFwdRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(Alone)
    def __new__(cls) -> NormFwdRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(WithStatistics)
    def __new__(cls) -> NormFwdRequest[Several]: ...
    @overload
    @classmethod
    @with_fields_of(request.NormFwdRequest["OneOrSeveral"])
    def __new__(cls) -> NormFwdRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


norm_fwd = function_of(Alone, WithStatistics, request.NormFwdRequest["OneOrSeveral"])
