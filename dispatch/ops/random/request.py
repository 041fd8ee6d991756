"""Requests for random numbers: each contains the generator and the position of its numbers in the sequence.

The position is a value, (seed, offset), and plans keep no state: the same request gives the same numbers on every
stream, worker or child process, and each time it runs. `Generator` assigns consecutive positions. The terms are
cuRAND's: https://docs.nvidia.com/cuda/curand/host-api-overview.html.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ml_dtypes import finfo

from dispatch.checks import check_dtype, check_int, check_number, check_shape, shown
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import NamedArguments, Number, Unpacked
from dispatch.core.request_function import request_function
from dispatch.device.device import Device
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F16, F32, F64, U32, U64, Choice, member

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "BitGenerator",
    "Ordering",
    "RandomBitsRequest",
    "RandomExponentialRequest",
    "RandomLognormalRequest",
    "RandomNormalRequest",
    "RandomPoissonRequest",
    "RandomRequest",
    "RandomUniformRequest",
    "random_bits",
    "random_exponential",
    "random_lognormal",
    "random_normal",
    "random_poisson",
    "random_uniform",
]

MAX_SEED = 2**64 - 1
MAX_OFFSET = 2**62  # the largest offset: values computed from it fit into 64 bits
MAX_DIMENSIONS = 20000  # cuRAND has direction numbers for these
FLOATS = (F32, F64, F16, BF16)


class BitGenerator(Choice):
    """A generator of random bits, with its number in `curandRngType_t`."""

    XORWOW = 101
    MRG32K3A = 121
    MTGP32 = 141
    MT19937 = 142
    PHILOX4_32_10 = 161
    SOBOL32 = 201
    SCRAMBLED_SOBOL32 = 202
    SOBOL64 = 203
    SCRAMBLED_SOBOL64 = 204

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"PHILOX": "PHILOX4_32_10"}

    @property
    def is_quasi(self) -> bool:
        """Whether it is quasi-random: its points fill the cube evenly."""
        return self >= BitGenerator.SOBOL32

    @property
    def has_offset(self) -> bool:
        """Whether cuRAND can start at an offset without generating the numbers before it."""
        return self not in (BitGenerator.MTGP32, BitGenerator.MT19937)

    @property
    def is_64_bit(self) -> bool:
        """Whether it generates words of 64 bits."""
        return self >= BitGenerator.SOBOL64


class Ordering(Choice):
    """The order of a pseudo-random generator's numbers in memory, as in `curandOrdering_t`."""

    BEST = 100
    DEFAULT = 101
    SEEDED = 102
    LEGACY = 103
    DYNAMIC = 104


@dataclass(frozen=True, eq=False)
class RandomRequest(OperandRequest["Tensor"]):
    """Random numbers.

    Attributes:
        on: the device.
        size: the shape of the result; for a quasi-random generator with several dimensions, they are the first axis.
        seed: from 0 to 2^64 - 1; a quasi-random generator has no seed: it must be 0.
        offset: the number of elements of this kind before the first one in the generator's sequence, as in
            `curandSetGeneratorOffset`; for normal numbers of XORWOW and MRG32K3A the number of pairs, for a
            quasi-random generator the number of points.
        bit_generator: PHILOX4_32_10, XORWOW, MRG32K3A, MTGP32, MT19937, SOBOL32, SCRAMBLED_SOBOL32, SOBOL64 or
            SCRAMBLED_SOBOL64. The Mersenne twisters cannot skip: the numbers before an offset are generated, unless
            the previous request ended there.
        ordering: DEFAULT, BEST, LEGACY, SEEDED or DYNAMIC: cuRAND's orderings of pseudo-random generators.
        dimensions: the dimensions of a quasi-random generator's points, from 1 to 20,000; 1 for all others.
        out_dtype: the dtype of the numbers; None for the dtype of `out`, or for the default.
        library: "own" for kernels of this library, "curand" for cuRAND's functions; None for the first row that
            supports the request.
        out: the output tensor, in C order.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("seed", "offset"), device="on")
    kinds: ClassVar[tuple[Dtype, ...]] = FLOATS  # the supported dtypes, the default first
    parameters: ClassVar[tuple[str, ...]] = ()

    on: Device
    size: int | tuple[int, ...]
    seed: int = 0
    offset: int = 0
    _: KW_ONLY
    bit_generator: BitGenerator | str = BitGenerator.PHILOX4_32_10
    ordering: Ordering | str = Ordering.DEFAULT
    dimensions: int = 1
    out_dtype: Any = None
    library: str | None = None
    out: Tensor | None = None

    def __post_init__(self) -> None:
        on: object = self.on
        if not isinstance(on, Device):
            raise BadRequest("on", shown(on), "a Device", 'dispatch.device("cuda:0") returns one')
        super().__post_init__()

    @property
    def device(self) -> Device:
        return self.on

    @property
    def generator(self) -> BitGenerator:
        """The bit generator as a member."""
        return member(self.bit_generator)

    @property
    def order(self) -> Ordering:
        """The ordering as a member."""
        return member(self.ordering)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the result."""
        return check_shape("size", self.size, 64)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> Dtype:
        """The dtype of the numbers."""
        if self.out is not None and self.out_dtype is None:
            return self.out.dtype
        return self.kinds[0] if self.out_dtype is None else check_dtype("out_dtype", self.out_dtype)

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        return self.kind, self.kind

    def check_fields(self) -> None:
        if self.kind not in self.kinds:
            raise BadRequest("out_dtype", str(self.kind), " or ".join(map(str, self.kinds)))
        count = self.count
        check_int("seed", self.seed, 0, MAX_SEED)
        check_int("offset", self.offset, 0, MAX_OFFSET - count)
        if self.out is not None and not self.out.layout.is_contiguous:
            raise BadRequest(
                "out", str(self.out.layout), "memory in C order without gaps", "out.copy() has this layout"
            )
        if self.generator.is_quasi:
            self._check_quasi(count)
        else:
            check_int("dimensions", self.dimensions, 1, 1)
        self.check_parameters()

    def _check_quasi(self, count: int) -> None:
        check_int("dimensions", self.dimensions, 1, MAX_DIMENSIONS)
        name = self.generator.name
        if self.seed != 0:
            raise BadRequest("seed", shown(self.seed), f"0, because {name} has no seed", "offset= selects other points")
        if self.order is not Ordering.DEFAULT:
            raise BadRequest("ordering", self.order.name, f"DEFAULT, the only one that {name} has")
        if self.dimensions > 1 and self.shape[:1] != (self.dimensions,):
            expected = (
                f"({self.dimensions}, …): the first coordinates of all points, then the second ones, as in cuRAND"
            )
            raise BadRequest("size", shown(self.size), expected)
        limit = 2**64 if self.generator.is_64_bit else 2**32
        if self.offset + count // self.dimensions > limit:
            raise BadRequest(
                "offset", shown(self.offset), f"an offset with which all points are among the {limit} points of {name}"
            )

    def check_parameters(self) -> None:
        """BadRequest for invalid parameters of the distribution."""

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.shape, self.kind)}

    def attributes(self) -> tuple[Any, ...]:
        choices = (self.on, self.shape, self.generator, self.order, self.dimensions, self.kind, self.library)
        return (*choices, *(getattr(self, name) for name in self.parameters))

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), self.seed, self.offset)

    def named_arguments(self) -> NamedArguments:
        quasi = self.generator.is_quasi
        seed = Number(0, 0 if quasi else MAX_SEED, is_whole=True)
        last = (2**64 if self.generator.is_64_bit else 2**32) if quasi else MAX_OFFSET
        offset = Number(0, min(last, MAX_OFFSET) - self.count, is_whole=True)
        return NamedArguments((*self.reads, "out", "seed", "offset"), {"seed": seed, "offset": offset})


@dataclass(frozen=True, eq=False)
class RandomBitsRequest(RandomRequest):
    """Random bits: integers, all equally likely.

    Attributes:
        out_dtype: u32, or u64: from Philox two words of 32 bits, the first one as the lower half; from the 64-bit
            Sobol generators their words.
    """

    op: ClassVar[str] = "random_bits"
    kinds: ClassVar[tuple[Dtype, ...]] = (U32, U64)


@dataclass(frozen=True, eq=False)
class RandomUniformRequest(RandomRequest):
    """Uniform numbers between low and high: low + (high - low) · u.

    u is a multiple of 2^-24 (f32), 2^-53 (f64), 2^-11 (f16) or 2^-8 (bf16) in [0, 1); in (0, 1] it is
    cuRAND's (k + 1/2) · 2^-32, rounded, in f32, (k + 1/2) · 2^-53 in f64, and (k + 1) · 2^-11 or 2^-8 in f16, bf16.

    Attributes:
        low, high: finite, low <= high, and their distance is finite in the numbers' dtype. If they are not 0 and 1,
            rounding may give the excluded end.
        interval: "(0,1]" as in cuRAND, or "[0,1)" as in NumPy: the end of the interval that is included.
    """

    op: ClassVar[str] = "random_uniform"
    parameters: ClassVar[tuple[str, ...]] = ("low", "high", "interval")

    _: KW_ONLY
    low: float = 0.0
    high: float = 1.0
    interval: str = "(0,1]"

    def check_parameters(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            check_finite(name, value)
        if self.low > self.high:
            raise BadRequest("low", shown(self.low), f"no more than high, {shown(self.high)}")
        limit = float(finfo(self.kind.numpy).max)  # type: ignore[no-untyped-call]
        for name, value in (("low", self.low), ("high", self.high)):
            check_finite(name, value, low=-limit, high=limit)
        if float(self.high) - float(self.low) > limit:
            raise BadRequest(
                "high", shown(self.high), f"a number whose distance from low {self.kind} can hold: {limit:g}"
            )
        interval: object = self.interval
        if not isinstance(interval, str) or interval not in ("(0,1]", "[0,1)"):
            raise BadRequest("interval", shown(self.interval), '"(0,1]" or "[0,1)"')


@dataclass(frozen=True, eq=False)
class RandomNormalRequest(RandomRequest):
    """Normal numbers, mean + std · z; pseudo-random ones by the Box-Muller transform, as in cuRAND.

    Attributes:
        mean, std: finite; std is 0 or more.
    """

    op: ClassVar[str] = "random_normal"
    parameters: ClassVar[tuple[str, ...]] = ("mean", "std")

    _: KW_ONLY
    mean: float = 0.0
    std: float = 1.0

    def check_parameters(self) -> None:
        check_finite("mean", self.mean)
        check_finite("std", self.std, low=0.0)


@dataclass(frozen=True, eq=False)
class RandomLognormalRequest(RandomNormalRequest):
    """Numbers whose logarithms are normal: exp(mean + std · z).

    Attributes:
        mean, std: those of the logarithms; finite, std is 0 or more.
    """

    op: ClassVar[str] = "random_lognormal"


@dataclass(frozen=True, eq=False)
class RandomExponentialRequest(RandomRequest):
    """Exponential numbers, -scale · log(u) with u in (0, 1].

    Attributes:
        scale: the mean, finite, 0 or more.
    """

    op: ClassVar[str] = "random_exponential"
    parameters: ClassVar[tuple[str, ...]] = ("scale",)

    _: KW_ONLY
    scale: float = 1.0

    def check_parameters(self) -> None:
        check_finite("scale", self.scale, low=0.0)


MAX_MEAN = 2.0**31 - 2**20  # of Poisson numbers: all of them fit into 32 bits


@dataclass(frozen=True, eq=False)
class RandomPoissonRequest(RandomRequest):
    """Poisson numbers.

    Attributes:
        lam: the mean, 0 or more; cuRAND supports only means above 0.
        out_dtype: u32.
    """

    op: ClassVar[str] = "random_poisson"
    kinds: ClassVar[tuple[Dtype, ...]] = (U32,)
    parameters: ClassVar[tuple[str, ...]] = ("lam",)

    _: KW_ONLY
    lam: float = 1.0

    def check_parameters(self) -> None:
        check_finite("lam", self.lam, low=0.0, high=MAX_MEAN)


def check_finite(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf) -> None:
    """BadRequest unless a parameter is a finite number in a range."""
    check_number(name, value)
    if not (math.isfinite(value) and low <= value <= high):
        least = f" of {low:g} or more" if low > -math.inf else ""
        most = f"{' and' if least else ' of'} {high:g} at most" if high < math.inf else ""
        raise BadRequest(name, shown(value), f"a finite number{least}{most}")


random_bits = request_function(RandomBitsRequest, "random_bits")
random_uniform = request_function(RandomUniformRequest, "random_uniform")
random_normal = request_function(RandomNormalRequest, "random_normal")
random_lognormal = request_function(RandomLognormalRequest, "random_lognormal")
random_exponential = request_function(RandomExponentialRequest, "random_exponential")
random_poisson = request_function(RandomPoissonRequest, "random_poisson")
