"""The methods of `dispatch.random.Generator` whose numbers are drawn element by element, only from Philox."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from dispatch.checks import as_array, as_python_ints, check_bool, check_int, check_number, shown
from dispatch.errors import BadRequest
from dispatch.keys import I64
from dispatch.ops.random.distributions import (
    MAX_SHAPE,
    RandomBetaRequest,
    RandomBinomialRequest,
    RandomChoiceRequest,
    RandomGammaRequest,
    RandomIntegersRequest,
    RandomMultinomialRequest,
    RandomPermutationRequest,
    RandomTruncatedNormalRequest,
    random_beta,
    random_binomial,
    random_choice,
    random_gamma,
    random_integers,
    random_multinomial,
    random_permutation,
    random_truncated_normal,
)

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor

__all__ = ["ELEMENTWISE", "DistributionMethods"]

Size = int | tuple[int, ...] | None


class DistributionMethods:
    """The methods that draw element by element, with a separate stream for each element."""

    device: Device

    @abstractmethod
    def _draw(
        self, function_and_kind: tuple[Any, Any], size: Size, dtype: Any, out: Tensor | None, **numbers: Any
    ) -> Tensor:
        """The next numbers of a kind."""

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Size = None,
        dtype: Any = None,
        endpoint: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Integers from low to high - 1, or to high with `endpoint`; from 0 to low - 1 if `high` is None. i64."""
        name, given = ("low", low) if high is None else ("high", high)
        if high is None:
            low, high = 0, low
        check_bool("endpoint", endpoint)
        low, high = as_python_ints("low", low), as_python_ints(name, high)
        high = high + 1 if endpoint and type(high) is int else high
        try:
            return self._draw(INTEGERS, size, dtype, out, low=low, high=high)
        except BadRequest as error:  # about the argument as it was given, which may be another one, and less by 1
            if error.operand != "high":
                raise
            expected = error.expected + " when endpoint=True has added 1" * endpoint
            raise BadRequest(name, shown(given), expected, error.hint) from None

    def gamma(
        self, shape: float, scale: float = 1.0, size: Size = None, dtype: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Gamma numbers of a shape, times a scale."""
        return self._draw(GAMMA, size, dtype, out, shape_parameter=shape, scale=scale)

    def standard_gamma(
        self, shape: float, size: Size = None, dtype: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Gamma numbers of a shape."""
        return self._draw(GAMMA, size, dtype, out, shape_parameter=shape)

    def chisquare(self, df: float, size: Size = None, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        """Chi-square numbers: sums of the squares of `df` normal numbers; `df` need not be an integer."""
        check_number("df", df, low=0.0, high=2 * MAX_SHAPE)
        return self._draw(GAMMA, size, dtype, out, shape_parameter=df / 2, scale=2.0)

    def beta(self, a: float, b: float, size: Size = None, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        """Beta numbers of two shapes."""
        return self._draw(BETA, size, dtype, out, a=a, b=b)

    def binomial(self, n: int, p: float, size: Size = None, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        """How many of n trials succeed, each with probability p. i64."""
        return self._draw(BINOMIAL, size, dtype, out, n=n, p=p)

    def multinomial(self, n: int, pvals: Any, size: Size = None, *, out: Tensor | None = None) -> Tensor:
        """How many of n trials have each outcome, along a last axis, as i64.

        `pvals` are the probabilities of the outcomes; they sum to 1.
        """
        probabilities = self._probabilities("pvals", pvals)
        if not (out is None or hasattr(out, "shape")):
            raise BadRequest("out", shown(out), "a Tensor")
        rows = out.shape[:-1] if size is None and out is not None else size
        return self._draw(MULTINOMIAL, rows, I64, out, n=n, pvals=self.device.array(probabilities))

    def truncated_normal(
        self,
        low: float = -2.0,
        high: float = 2.0,
        loc: float = 0.0,
        scale: float = 1.0,
        size: Size = None,
        dtype: Any = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Normal numbers of a mean and a standard deviation, conditional on lying between two bounds."""
        return self._draw(TRUNCATED, size, dtype, out, low=low, high=high, mean=loc, std=scale)

    def permutation(self, x: int, *, out: Tensor | None = None) -> Tensor:
        """0, 1, …, x - 1 in a random order, as i64."""
        return self._draw(PERMUTATION, check_int("x", x, 0, 2**40), I64, out, n=x)

    def choice(
        self, a: int, size: Size = None, replace: bool = True, p: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Integers below `a`, equally likely or with the probabilities `p`, as i64.

        With replace=False no number is drawn twice, and `p` must be None.
        """
        a = check_int("a", a, 1, 2**40)
        check_bool("replace", replace)
        if p is None:
            function_and_kind = INTEGERS if replace else PERMUTATION
            return self._draw(function_and_kind, size, I64, out, **({"low": 0, "high": a} if replace else {"n": a}))
        if not replace:
            hint = "replace=True, or p=None"
            raise BadRequest("p", "probabilities of a sample without replacement", "None", hint)
        probabilities = self._probabilities("p", p)
        if len(probabilities) != a:
            raise BadRequest("p", f"{len(probabilities)} probabilities", f"a = {a} probabilities")
        return self._draw(CHOICE, size, I64, out, sums=self.device.array(probabilities.cumsum()))

    def _probabilities(self, name: str, given: Any) -> Any:
        """Probabilities as f64 that sum to 1 within the square root of their dtype's epsilon, as in NumPy."""
        import numpy as np
        from ml_dtypes import finfo  # supports bf16

        array = as_array(name, given)
        if array.dtype.kind == "c":
            raise BadRequest(name, f"an array of {array.dtype}", "real numbers from 0 to 1")
        rounded = array.dtype.itemsize < 8 and array.dtype.kind not in "iub"
        listed = np.ascontiguousarray(array, np.float64)
        if listed.ndim != 1 or not listed.size:
            raise BadRequest(name, f"an array of {listed.ndim} axes, {listed.size} elements", "a list of probabilities")
        if not ((listed >= 0) & (listed <= 1)).all():
            raise BadRequest(name, shown(listed[~((listed >= 0) & (listed <= 1))][0].item()), "numbers from 0 to 1")
        eps = finfo(array.dtype if rounded else np.float64).eps  # type: ignore[no-untyped-call]
        if abs(listed.sum() - 1) > math.sqrt(eps):
            raise BadRequest(name, f"probabilities that sum to {listed.sum():.9g}", "probabilities that sum to 1")
        return listed / listed.sum() if rounded else listed


INTEGERS = random_integers, RandomIntegersRequest
GAMMA = random_gamma, RandomGammaRequest
BETA = random_beta, RandomBetaRequest
BINOMIAL = random_binomial, RandomBinomialRequest
MULTINOMIAL = random_multinomial, RandomMultinomialRequest
TRUNCATED = random_truncated_normal, RandomTruncatedNormalRequest
PERMUTATION = random_permutation, RandomPermutationRequest
CHOICE = random_choice, RandomChoiceRequest
# Each element takes one position, and as many bits as it needs from its own stream.
ELEMENTWISE = {kind for _, kind in (INTEGERS, GAMMA, BETA, BINOMIAL, MULTINOMIAL, TRUNCATED, PERMUTATION, CHOICE)}
