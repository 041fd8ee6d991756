"""The result types of `ctc_loss` for type checkers: the losses, and their gradient unless `with_gradient` is False.

Only type checkers read this file (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.ops.ctc import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrPair
    from dispatch.device.tensor import Tensor

__all__ = ["CtcRequest", "ctc_loss"]


@dataclass(frozen=True, eq=False, kw_only=True)
class WithGradient(request.CtcRequest["tuple[Tensor, Tensor]"]):
    """A request whose result is the losses and the gradient."""

    with_gradient: Literal[True] = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Alone(request.CtcRequest["Tensor"]):
    """A request whose result is the losses."""

    with_gradient: Literal[False] = False


class CtcRequest(request.CtcRequest[R_co]):
    """`request.CtcRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(WithGradient)
    def __new__(cls) -> CtcRequest[tuple[Tensor, Tensor]]: ...
    @overload
    @classmethod
    @with_fields_of(Alone)
    def __new__(cls) -> CtcRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(request.CtcRequest["OneOrPair"])
    def __new__(cls) -> CtcRequest[OneOrPair]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


ctc_loss = function_of(WithGradient, Alone, request.CtcRequest["OneOrPair"])
