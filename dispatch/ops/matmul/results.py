"""The result types of `matmul` for type checkers: D alone, or D with aux, a bias gradient or the outputs of a tree.

Only type checkers read this file (core/results.py).
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch.core.request import R_co
from dispatch.core.results import function_of, with_fields_of
from dispatch.keys import Epilogue
from dispatch.ops.matmul import request

if TYPE_CHECKING:
    from dispatch.core.results import OneOrSeveral
    from dispatch.device.tensor import Tensor

__all__ = ["MatmulRequest", "matmul"]

# fmt: off
Alone = Literal[
    Epilogue.NONE, Epilogue.RELU, Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU, Epilogue.GELU_BIAS, Epilogue.DRELU,
    Epilogue.DGELU,
]
WithAnother = Literal[
    Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS, Epilogue.DRELU_BGRAD,
    Epilogue.DGELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB,
]
# fmt: on


@dataclass(frozen=True, eq=False, kw_only=True)
class Plain(request.MatmulRequest["Tensor"]):
    """A request whose result is D."""

    epilogue: Alone = Epilogue.NONE


@dataclass(frozen=True, eq=False, kw_only=True)
class Pair(request.MatmulRequest["tuple[Tensor, Tensor]"]):
    """A request whose result is D and aux, or D and the bias gradient."""

    epilogue: WithAnother = Epilogue.RELU_AUX


class MatmulRequest(request.MatmulRequest[R_co]):
    """`request.MatmulRequest` with the type of its result; the fields are documented there."""

    @overload
    @classmethod
    @with_fields_of(Plain)
    def __new__(cls) -> MatmulRequest[Tensor]: ...
    @overload
    @classmethod
    @with_fields_of(Pair)
    def __new__(cls) -> MatmulRequest[tuple[Tensor, Tensor]]: ...
    @overload
    @classmethod
    @with_fields_of(request.MatmulRequest["OneOrSeveral"])
    def __new__(cls) -> MatmulRequest[OneOrSeveral]: ...
    @classmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...


matmul = function_of(Plain, Pair, request.MatmulRequest["OneOrSeveral"])
