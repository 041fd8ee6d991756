"""Result types, for type checkers, of requests whose fields decide whether one tensor or several are returned.

A family with such requests declares in its `results.py` which value of which field gives which result:

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Alone(request.NormFwdRequest["Tensor"]):
        training: Literal[False] = False

    class NormFwdRequest(request.NormFwdRequest[R_co]):
        @overload
        @classmethod
        @with_fields_of(Alone)
        def __new__(cls) -> NormFwdRequest[Tensor]: ...

    norm_fwd = function_of(Alone, …)

All other fields and the documentation are those of the request class in `request.py`, which is the only one that
exists at run time: families import `results.py` under TYPE_CHECKING. mypy complains that `__new__` is no class method
but accepts its overloads; pyright binds a decorated `__new__` only if it is marked as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, TypeAlias

    from dispatch.core.request import Request
    from dispatch.core.request_function import OfEither
    from dispatch.device.tensor import Tensor

    OneOrPair: TypeAlias = Tensor | tuple[Tensor, Tensor]
    Several: TypeAlias = tuple[Tensor, ...]
    OneOrSeveral: TypeAlias = Tensor | Several  # if it depends on values at run time

__all__ = ["OfThree", "function_of", "with_fields_of"]

P = ParamSpec("P")
Q = ParamSpec("Q")
V = ParamSpec("V")
C = TypeVar("C")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


class OfThree(Protocol[P, R_co, Q, S_co, V, T_co]):
    """A function that takes the parameters of any of three classes and returns that class's result."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> S_co: ...
    @overload
    def __call__(self, *args: V.args, **kwargs: V.kwargs) -> T_co: ...


def with_fields_of(
    kind: Callable[P, object],
) -> Callable[[Callable[[type[C]], R]], Callable[Concatenate[type[C], P], R]]:
    """Give a `__new__` the parameters of a class."""
    raise NotImplementedError("for type checkers alone")


@overload
def function_of(first: Callable[P, Request[R]], second: Callable[Q, Request[S]], /) -> OfEither[P, R, Q, S]: ...
@overload
def function_of(
    first: Callable[P, Request[R]], second: Callable[Q, Request[S]], third: Callable[V, Request[T]], /
) -> OfThree[P, R, Q, S, V, T]: ...
def function_of(*kinds: object) -> object:
    """The type of a request function: the first of these classes that the arguments fit gives the result type."""
    raise NotImplementedError("for type checkers alone")
