"""Operators of products that are compiled into kernels: in CUDA C++ and in NumPy, single and as semirings.

`dispatch.sparse.SparseOperator` and `dispatch.sparse.Semiring`. They hold no compiled code: it is compiled with the
plan of a request. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.checks import shown
from dispatch.core.counterparts import state_of, unnamed
from dispatch.core.factors import check_factor
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array
    from dispatch.ops.sparse.base import Number

__all__ = ["NAMED_SEMIRINGS", "Semiring", "SparseOperator", "check_operator", "semiring_of"]


@dataclass(frozen=True)
class SparseOperator:
    """One operator of a product: lines of CUDA C++ for two numbers, and the same in NumPy for two arrays.

    Attributes:
        code: the body of a function that returns a `Number`, such as "return a < b ? a : b;". Its arguments depend on
            where the operator is used: `a` and `b`, or `sum` and `c`, or `row` and `x`. `Number` is the type of the
            computation: float, double, or a complex type with `.x`, `.y`, arithmetic, `conj`, `norm` and `abs`; `Real`
            is the type of its parts.
        numpy: a function of two arrays, element by element: for the host, and for comparisons with it.

    A child process of the host needs a function that can be pickled, which a lambda cannot; one of a GPU does not use
    it. Raises BadRequest for code that is not a string, and for a `numpy` that is not callable.
    """

    is_constant: ClassVar[bool] = True  # for caches of calls
    code: str
    numpy: Callable[..., Any]

    def __post_init__(self) -> None:
        code: Any = self.code
        if not isinstance(code, str) or not code.strip():
            raise BadRequest("code", shown(code), 'lines of CUDA C++, such as "return a + b;"')
        if not callable(self.numpy):
            raise BadRequest("numpy", shown(self.numpy), "a function of two arrays, such as numpy.add")

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without a function that cannot be pickled."""
        return state_of(self, missing)

    def __repr__(self) -> str:
        return f"SparseOperator({self.code!r})"

    def of(self, name: str, first: Array, second: Array) -> Array:
        """Apply it to two arrays; the result has the dtype of the second. Errors use `name`."""
        result = np.asarray(self.numpy(first, second))
        if result.shape not in ((), second.shape):
            what = f"shape {list(result.shape)} from its NumPy counterpart"
            raise BadRequest(name, what, f"{list(second.shape)}, the shape of its arguments")
        if result.dtype.kind == "c" and second.dtype.kind != "c":
            raise BadRequest(name, "complex numbers from its NumPy counterpart", "real numbers, like A and B")
        return np.broadcast_to(result, second.shape).astype(second.dtype)


@dataclass(frozen=True)
class Semiring:
    """The operators that replace multiplication and addition in a product of matrices.

    Attributes:
        multiply: of an element `a` of A and an element `b` of B.
        add: of two products, or sums of products, `a` and `b`. It must be associative and commutative, because the
            library determines the order in which a row's products are added (docs/sparse.md).
        identity: the sum of no products, for rows of A without elements: a number, such as 0, or inf for `min`.
        epilogue: of the `sum` and of `c`, the element of C (0 without a C). None for `sum` itself, and for
            add(sum, c) if there is a C.

    `Semiring.named("min_plus")` is a predefined one; a request also accepts its name: "plus_times", "min_plus" (the
    shortest paths), "max_plus", "max_times" and "or_and" (nonzero numbers are true, and the result is 0 or 1). Raises
    BadRequest for invalid operators, and for an identity that is not a number.
    """

    is_constant: ClassVar[bool] = True
    multiply: SparseOperator
    add: SparseOperator
    identity: Number
    epilogue: SparseOperator | None = None

    def __post_init__(self) -> None:
        for name in ("multiply", "add", "epilogue"):
            check_operator(name, getattr(self, name), may_be_none=name == "epilogue")
        check_factor("identity", self.identity, may_be_complex=True)

    @staticmethod
    def named(name: str) -> Semiring:
        """A predefined semiring; BadRequest for an unknown name."""
        return semiring_of(name)

    @property
    def code_key(self) -> tuple[str | None, ...]:
        """The part that a GPU plan depends on: the operators' code, and the identity."""
        codes = (None if one is None else one.code for one in (self.multiply, self.add, self.epilogue))
        return *codes, repr(complex(self.identity))


def check_operator(name: str, given: object, *, may_be_none: bool = False) -> None:
    """BadRequest unless it is an operator, or None if that is allowed."""
    if isinstance(given, SparseOperator) or (may_be_none and given is None):
        return
    hint = "SparseOperator(…, numpy=…) makes one of CUDA C++" if isinstance(given, str) else ""
    none = ", or None" if may_be_none else ""
    raise BadRequest(
        name, shown(given), f'a SparseOperator, such as SparseOperator("return a + b;", numpy.add){none}', hint
    )


def semiring_of(given: object) -> Semiring:
    """A semiring, or the predefined one of a name; BadRequest for any other."""
    if isinstance(given, Semiring):
        return given
    predefined = NAMED_SEMIRINGS.get(given) if isinstance(given, str) else None
    if predefined is None:
        raise BadRequest(
            "semiring", shown(given), f"a dispatch.sparse.Semiring, or one of {', '.join(NAMED_SEMIRINGS)}"
        )
    return predefined


# Named functions, which can be pickled: requests are sent to child processes.
def missing(_first: Any, _second: Any) -> Any:
    """Replaces a function that cannot be pickled."""
    return unnamed()


def _logical_or(a: Array, b: Array) -> Any:
    return (a != 0) | (b != 0)


def _logical_and(a: Array, b: Array) -> Any:
    return (a != 0) & (b != 0)


SUM, PRODUCT = SparseOperator("return a + b;", np.add), SparseOperator("return a * b;", np.multiply)
# Like NumPy's: NaN if either operand is NaN.
MINIMUM = SparseOperator("return a < b || a != a ? a : b;", np.minimum)
MAXIMUM = SparseOperator("return a > b || a != a ? a : b;", np.maximum)
LOGICAL_OR = SparseOperator("return a != Number(0) || b != Number(0);", _logical_or)
LOGICAL_AND = SparseOperator("return a != Number(0) && b != Number(0);", _logical_and)
NAMED_SEMIRINGS: dict[str, Semiring] = {
    "plus_times": Semiring(PRODUCT, SUM, 0.0),
    "min_plus": Semiring(SUM, MINIMUM, float("inf")),
    "max_plus": Semiring(SUM, MAXIMUM, float("-inf")),
    "max_times": Semiring(PRODUCT, MAXIMUM, float("-inf")),
    "or_and": Semiring(LOGICAL_AND, LOGICAL_OR, 0.0),
}
