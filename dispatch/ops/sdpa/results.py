"""The result types of `sdpa_fwd` for type checkers: O alone, or O with the statistics and other outputs.

Only type checkers read this file (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.ops.sdpa import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrSeveral, Several
    from dispatch.device.tensor import Tensor

__all__ = ["SdpaFwdRequest", "sdpa_fwd"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Alone(request.SdpaFwdRequest["Tensor"]):
    """A request whose result is O."""

    stats: Literal[False] = False
    mask: Literal[False] = False
    amax: Literal[False] = False


@dataclass(frozen=True, eq=False, kw_only=True)
class WithStatistics(request.SdpaFwdRequest["Several"]):
    """A request whose result is O, the statistics, and the other requested outputs."""

    stats: Literal[True] = True


class SdpaFwdRequest(request.SdpaFwdRequest[R_co]):
    """`request.SdpaFwdRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(Alone)
    def __new__(cls) -> SdpaFwdRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(WithStatistics)
    def __new__(cls) -> SdpaFwdRequest[Several]: ...
    @overload
    @classmethod
    @with_fields_of(request.SdpaFwdRequest["OneOrSeveral"])
    def __new__(cls) -> SdpaFwdRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


sdpa_fwd = function_of(Alone, WithStatistics, request.SdpaFwdRequest["OneOrSeveral"])
