"""The result types of convolutions for type checkers: the result, or also the outputs of the tree of an `epilogue`.

Only type checkers read this file (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.ops.conv import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrSeveral
    from dispatch.device.tensor import Tensor

__all__ = [
    "ConvBwdDataRequest",
    "ConvBwdFilterRequest",
    "ConvFwdRequest",
    "conv_bwd_data",
    "conv_bwd_filter",
    "conv_fwd",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class FwdAlone(request.ConvFwdRequest["Tensor"]):
    """A request with one result."""

    epilogue: None = None


class ConvFwdRequest(request.ConvFwdRequest[R_co]):
    """`request.ConvFwdRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(FwdAlone)
    def __new__(cls) -> ConvFwdRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(request.ConvFwdRequest["OneOrSeveral"])
    def __new__(cls) -> ConvFwdRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class BwdDataAlone(request.ConvBwdDataRequest["Tensor"]):
    """A request with one result."""

    epilogue: None = None


class ConvBwdDataRequest(request.ConvBwdDataRequest[R_co]):
    """`request.ConvBwdDataRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(BwdDataAlone)
    def __new__(cls) -> ConvBwdDataRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(request.ConvBwdDataRequest["OneOrSeveral"])
    def __new__(cls) -> ConvBwdDataRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class BwdFilterAlone(request.ConvBwdFilterRequest["Tensor"]):
    """A request with one result."""

    epilogue: None = None


class ConvBwdFilterRequest(request.ConvBwdFilterRequest[R_co]):
    """`request.ConvBwdFilterRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(BwdFilterAlone)
    def __new__(cls) -> ConvBwdFilterRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(request.ConvBwdFilterRequest["OneOrSeveral"])
    def __new__(cls) -> ConvBwdFilterRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


conv_fwd = function_of(FwdAlone, request.ConvFwdRequest["OneOrSeveral"])
conv_bwd_data = function_of(BwdDataAlone, request.ConvBwdDataRequest["OneOrSeveral"])
conv_bwd_filter = function_of(BwdFilterAlone, request.ConvBwdFilterRequest["OneOrSeveral"])
