"""What `sdpa_fwd` gives back: O, and the statistics and more where they are asked for.

For type checkers alone (core/results.py).
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
    """O."""

    stats: Literal[False] = False
    mask: Literal[False] = False
    amax: Literal[False] = False


@dataclass(frozen=True, eq=False, kw_only=True)
class WithStatistics(request.SdpaFwdRequest["Several"]):
    """O, the statistics, and what else is asked for."""

    stats: Literal[True] = True


class SdpaFwdRequest(request.SdpaFwdRequest[R_co]):
    """`request.SdpaFwdRequest`, whose documentation says what its fields are, with the type of its result."""

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
