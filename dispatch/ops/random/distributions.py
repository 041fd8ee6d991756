"""Requests for numbers that take a variable number of random bits, only from Philox: by rejection, or by a table.

The published methods are: Walker's tables for Poisson and binomial numbers (1977), Hörmann's transformed rejection for
those with a large variance (PTRS and BTRS, 1993), Marsaglia and Tsang's for gamma (2000), Robert's for truncated normal
numbers (1995), Lemire's for bounded integers (2019). An element's bits depend only on the seed and on offset + index.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int, check_number, shown
from dispatch.core.operands import dense
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import F64, I8, I32, I64, U8, U32, U64
from dispatch.ops.random.request import MAX_OFFSET, RandomRequest, check_finite

if TYPE_CHECKING:
    from dispatch.core.operands import Output
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "RandomBetaRequest",
    "RandomBinomialRequest",
    "RandomChoiceRequest",
    "RandomGammaRequest",
    "RandomIntegersRequest",
    "RandomMultinomialRequest",
    "RandomPermutationRequest",
    "RandomTruncatedNormalRequest",
    "random_beta",
    "random_binomial",
    "random_choice",
    "random_gamma",
    "random_integers",
    "random_multinomial",
    "random_permutation",
    "random_truncated_normal",
]

INTEGER_DTYPES = (I64, I32, U32, U64, U8, I8)
MAX_TRIALS = 2**31 - 1
MAX_SHAPE = 1e30  # of gamma numbers: keeps all computed values finite


@dataclass(frozen=True, eq=False)
class RandomIntegersRequest(RandomRequest):
    """Integers in a range, all exactly equally likely.

    Attributes:
        low, high: the numbers are low, …, high - 1, all of which `out_dtype` can hold.
        out_dtype: i64, i32, u32, u64, u8 or i8.
    """

    op: ClassVar[str] = "random_integers"
    kinds: ClassVar[tuple[Dtype, ...]] = INTEGER_DTYPES
    parameters: ClassVar[tuple[str, ...]] = ("low", "high")

    _: KW_ONLY
    low: int = 0
    high: int = 2

    def check_parameters(self) -> None:
        bits = self.kind.bits
        least = -(2 ** (bits - 1)) if self.kind.numpy.kind == "i" else 0
        check_int("low", self.low, least, least + 2**bits - 1)
        check_int("high", self.high, self.low + 1, least + 2**bits)


@dataclass(frozen=True, eq=False)
class RandomGammaRequest(RandomRequest):
    """Gamma numbers of a shape, times scale.

    Attributes:
        shape_parameter: 0 or more; the mean is this times scale.
        scale: finite, 0 or more.
    """

    op: ClassVar[str] = "random_gamma"
    parameters: ClassVar[tuple[str, ...]] = ("shape_parameter", "scale")

    _: KW_ONLY
    shape_parameter: float = 1.0
    scale: float = 1.0

    def check_parameters(self) -> None:
        check_finite("shape_parameter", self.shape_parameter, low=0.0, high=MAX_SHAPE)
        check_finite("scale", self.scale, low=0.0)


@dataclass(frozen=True, eq=False)
class RandomBetaRequest(RandomRequest):
    """Beta numbers, X / (X + Y) where X and Y are gamma numbers of two shapes.

    Attributes:
        a, b: the shapes, above 0.
    """

    op: ClassVar[str] = "random_beta"
    parameters: ClassVar[tuple[str, ...]] = ("a", "b")

    _: KW_ONLY
    a: float = 1.0
    b: float = 1.0

    def check_parameters(self) -> None:
        for name in self.parameters:
            check_finite(name, getattr(self, name), low=2.0**-1000, high=MAX_SHAPE)


@dataclass(frozen=True, eq=False)
class RandomBinomialRequest(RandomRequest):
    """Binomial numbers: how many of n trials succeed.

    Attributes:
        n: the number of trials, from 0 to 2^31 - 1.
        p: the probability of success, from 0 to 1.
        out_dtype: i64, i32 or u32.
    """

    op: ClassVar[str] = "random_binomial"
    kinds: ClassVar[tuple[Dtype, ...]] = (I64, I32, U32)
    parameters: ClassVar[tuple[str, ...]] = ("n", "p")

    _: KW_ONLY
    n: int = 1
    p: float = 0.5

    def check_parameters(self) -> None:
        check_int("n", self.n, 0, MAX_TRIALS)
        check_number("p", self.p, low=0.0, high=1.0)


@dataclass(frozen=True, eq=False)
class RandomTruncatedNormalRequest(RandomRequest):
    """Normal numbers of a mean and a standard deviation, conditional on lying between two bounds.

    Attributes:
        low, high: the bounds, low < high; either may be infinite.
        mean, std: those of the normal distribution before truncation; std is above 0.
    """

    op: ClassVar[str] = "random_truncated_normal"
    parameters: ClassVar[tuple[str, ...]] = ("low", "high", "mean", "std")

    _: KW_ONLY
    low: float = -2.0
    high: float = 2.0
    mean: float = 0.0
    std: float = 1.0

    def check_parameters(self) -> None:
        check_finite("mean", self.mean)
        check_finite("std", self.std, low=2.0**-1000)
        check_number("low", self.low)
        check_number("high", self.high)
        if not self.low < self.high:
            raise BadRequest("low", shown(self.low), f"less than high, {shown(self.high)}")
        if not all(abs(end) < 1e100 for end in self.standard if math.isfinite(end)):
            raise BadRequest("low", shown(self.low), "bounds less than 1e100 standard deviations from the mean")

    @property
    def standard(self) -> tuple[float, float]:
        """The bounds in standard deviations from the mean."""
        low, high = ((float(end) - float(self.mean)) / float(self.std) for end in (self.low, self.high))
        return low, high


@dataclass(frozen=True, eq=False)
class RandomPermutationRequest(RandomRequest):
    """The first numbers of 0, 1, …, n - 1 in a random order: a sample without replacement.

    For n up to 1,024 a Fisher-Yates shuffle is used, with all orders equally likely. For larger n a Feistel network of
    ten Philox rounds computes the position of each number independently (cycle walking): 2^64 seeds give at most as
    many orders.

    Attributes:
        n: the size of the population, at least the number of elements of the result; None for that number.
        out_dtype: i64.
    """

    op: ClassVar[str] = "random_permutation"
    kinds: ClassVar[tuple[Dtype, ...]] = (I64,)
    parameters: ClassVar[tuple[str, ...]] = ("n",)

    _: KW_ONLY
    n: int | None = None

    def check_parameters(self) -> None:
        if self.n is not None:
            check_int("n", self.n, 0, MAX_OFFSET // 2)
            if self.count > self.n:
                raise BadRequest("size", shown(self.size), f"at most {self.n} numbers, because none is drawn twice")

    @property
    def population(self) -> int:
        """The size of the population."""
        return self.count if self.n is None else self.n


@dataclass(frozen=True, eq=False)
class RandomChoiceRequest(RandomRequest):
    """Indices of a list, with given probabilities, by a search in the cumulative sums.

    Attributes:
        sums: f64 of one axis, in C order: the cumulative sums of the probabilities; the last need not be 1.
        out_dtype: i64.
    """

    op: ClassVar[str] = "random_choice"
    reads: ClassVar[tuple[str, ...]] = ("sums",)
    kinds: ClassVar[tuple[Dtype, ...]] = (I64,)

    sums: Tensor | None = None

    @property
    def required(self) -> tuple[str, ...]:
        return ("sums",)

    def check_parameters(self) -> None:
        check_list("sums", self.sums)


@dataclass(frozen=True, eq=False)
class RandomMultinomialRequest(RandomRequest):
    """How many of n trials have each of several outcomes: a binomial number of the remaining trials for each outcome.

    Attributes:
        pvals: f64 of one axis, in C order: the probability of each outcome; the last outcome gets the remaining trials.
        n: the number of trials, from 0 to 2^31 - 1.
        out_dtype: i64. The result has one more axis after those of `size`: the outcomes.
    """

    op: ClassVar[str] = "random_multinomial"
    reads: ClassVar[tuple[str, ...]] = ("pvals",)
    kinds: ClassVar[tuple[Dtype, ...]] = (I64,)
    parameters: ClassVar[tuple[str, ...]] = ("n",)

    pvals: Tensor | None = None
    _: KW_ONLY
    n: int = 1

    @property
    def required(self) -> tuple[str, ...]:
        return ("pvals",)

    def check_parameters(self) -> None:
        check_list("pvals", self.pvals)
        check_int("n", self.n, 0, MAX_TRIALS)

    def outputs(self) -> dict[str, Output]:
        single = super().outputs()["out"]
        outcomes = 0 if self.pvals is None else self.pvals.size
        return {"out": dense((*single.shape, outcomes), self.kind)}


def check_list(name: str, tensor: Tensor | None) -> None:
    """BadRequest unless a tensor is a list of f64."""
    if tensor is None:
        raise BadRequest(name, "None", "a tensor of f64 with one axis")
    layout = tensor.layout
    if tensor.dtype is not F64 or len(tensor.shape) != 1 or not tensor.size or not layout.is_contiguous:
        raise BadRequest(name, str(layout), "f64 of one axis with at least one element, in C order")


random_integers = request_function(RandomIntegersRequest, "random_integers")
random_gamma = request_function(RandomGammaRequest, "random_gamma")
random_beta = request_function(RandomBetaRequest, "random_beta")
random_binomial = request_function(RandomBinomialRequest, "random_binomial")
random_truncated_normal = request_function(RandomTruncatedNormalRequest, "random_truncated_normal")
random_permutation = request_function(RandomPermutationRequest, "random_permutation")
random_choice = request_function(RandomChoiceRequest, "random_choice")
random_multinomial = request_function(RandomMultinomialRequest, "random_multinomial")
