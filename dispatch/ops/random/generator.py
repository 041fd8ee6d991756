"""`dispatch.random`: a generator with NumPy's methods, based on cuRAND's generators and kernels of this library.

    rng = dispatch.random.Generator(seed=7, device="cuda:0")
    x = rng.standard_normal((1000, 3), dtype="f64")

The generator only counts positions, on the host: each method makes a request that contains its position in the
sequence. So the same seed gives the same numbers in the same order, whichever streams, workers or child processes run
the requests.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind._fork import anew
from dispatch.checks import check_dtype, check_enum, check_int, check_shape, names_arguments, shown
from dispatch.device.device import Device
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.keys import U64
from dispatch.libraries.curand.generators import IN_PAIRS
from dispatch.ops.random.distributions import RandomGammaRequest, RandomPermutationRequest, RandomTruncatedNormalRequest
from dispatch.ops.random.generator_distributions import ELEMENTWISE, DistributionMethods
from dispatch.ops.random.request import (
    MAX_DIMENSIONS,
    MAX_SEED,
    BitGenerator,
    Ordering,
    RandomBitsRequest,
    RandomExponentialRequest,
    RandomLognormalRequest,
    RandomNormalRequest,
    RandomPoissonRequest,
    RandomUniformRequest,
    random_bits,
    random_exponential,
    random_lognormal,
    random_normal,
    random_poisson,
    random_uniform,
)

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["BitGenerator", "Generator", "Ordering"]

ROW = 1 << 20  # words: a multiple of one step of all subsequences, for each generator
Size = int | tuple[int, ...] | None


class Reservation(NamedTuple):
    """The offset of reserved elements, and the generator's position before and after them: unit, words and offset."""

    offset: int
    before: tuple[str, int, int]
    after: tuple[str, int, int]


class GeneratorPosition:
    """The position of a generator, in elements of one kind; each takes `words` words of 32 bits."""

    __slots__ = ("__weakref__", "lock", "offset", "unit", "words")

    def __init__(self, offset: int) -> None:
        self.lock = threading.Lock()
        self.unit, self.words, self.offset = "", 1, offset
        anew(self, "lock", threading.Lock)

    def reserve(self, unit: str, words: int, count: int) -> Reservation:
        """Reserve `count` elements of a kind; after elements of another kind they begin at a new row."""
        with self.lock:
            before = self.unit, self.words, self.offset
            if self.unit and unit != self.unit:
                used = self.offset * self.words
                self.offset = -(-used // ROW) * ROW // words
            self.unit, self.words = unit, words
            start = self.offset
            self.offset += count
            return Reservation(start, before, (unit, words, self.offset))

    def cancel(self, reservation: Reservation) -> None:
        """Return to the position before a reservation that was not used, unless more was reserved since."""
        with self.lock:
            if (self.unit, self.words, self.offset) == reservation.after:
                self.unit, self.words, self.offset = reservation.before


@names_arguments
class Generator(DistributionMethods):
    """Random numbers with NumPy's method names; each call continues the sequence of a seed after the previous call.

    Args:
        seed: from 0 to 2^64 - 1; None for random bytes of the operating system. Quasi-random generators have no seed.
        bit_generator: the name of a BitGenerator: "philox", "xorwow", "mrg32k3a", "mtgp32", "mt19937",
            "sobol32", "scrambled_sobol32", "sobol64", "scrambled_sobol64".
        device: a Device or its name; None for the first GPU, or for the host if there is no GPU.
        dimensions: the dimensions of a quasi-random generator; they are the first axis of its results.
        offset: the start: how many numbers, or points, are skipped.
        ordering: cuRAND's ordering of a pseudo-random generator: "default", "best", "legacy", "seeded", "dynamic".
        library: "own" or "curand" to use only that library's rows; None for the first row that supports a request.

    Methods return tensors on the device, in f32 unless `dtype` is given, and accept `out=`, a tensor in C order;
    size=None is a scalar. They are the methods of `numpy.random.Generator`, with the numbers of the bit generator.

    Guarantees: positions are assigned consecutively, from any threads, and never twice; a refused call takes none.
    Consecutive calls of one kind return the same numbers as one call, for normal numbers, which come in pairs, if each
    count is even. No two numbers of Philox share bits. For XORWOW and MRG32K3A this holds for bits and uniform numbers
    of 32 bits; for their other numbers the offset advances like cuRAND's own, and the next call may share words with
    the last few thousand numbers. Copies and forked child processes count independently: give each a generator from
    `spawn`.
    """

    def __init__(
        self,
        seed: int | None = None,
        bit_generator: BitGenerator | str = BitGenerator.PHILOX4_32_10,
        *,
        device: Device | str | None = None,
        dimensions: int = 1,
        offset: int = 0,
        ordering: Ordering | str = Ordering.DEFAULT,
        library: str | None = None,
    ) -> None:
        self.bit_generator = check_enum("bit_generator", bit_generator, BitGenerator)
        self.ordering = check_enum("ordering", ordering, Ordering)
        quasi = self.bit_generator.is_quasi
        if seed is None:
            seed = 0 if quasi else int.from_bytes(os.urandom(8), sys.byteorder)
        if quasi and seed != 0:
            hint = "offset= selects other points of its only sequence"
            raise BadRequest("seed", shown(seed), f"None: {self.bit_generator.name} has no seed", hint)
        self._seed = check_int("seed", seed, 0, MAX_SEED)
        if not quasi and dimensions != 1:
            quasis = ", ".join(one.name.lower() for one in BitGenerator if one.is_quasi)
            raise BadRequest("dimensions", shown(dimensions), f"1: {quasis} have points of several dimensions")
        self.dimensions = check_int("dimensions", dimensions, 1, MAX_DIMENSIONS)
        if not (device is None or isinstance(device, (Device, str))):
            raise BadRequest("device", shown(device), 'a Device or its name, such as "cuda:0" or "host"')
        self.device: Device = device if isinstance(device, Device) else device_of(device)
        if library not in (None, *LIBRARIES):
            raise BadRequest("library", shown(library), f"{' or '.join(map(repr, LIBRARIES))}, or None")
        self.library = library
        self._position = GeneratorPosition(check_int("offset", offset, 0, 2**62))
        self._path: tuple[int, ...] = ()  # the spawn_key, as in NumPy's SeedSequence
        self._spawned = 0
        self._root = self._seed
        self._requests = False

    def __reduce__(self) -> Any:
        """The state for a copy or a pickle, which continues from here independently."""
        kind = self.bit_generator, self.device.name, self.dimensions, self.ordering, self.library
        return _restored, (*kind, self.state, self._requests)

    def __repr__(self) -> str:
        words = f"{self.bit_generator.name}, seed={self.seed}, offset={self._position.offset}, {self.device!r}"
        return f"<dispatch.random.Generator: {words}>"

    # -- which generator -------------------------------------------------------------------------------------------
    @property
    def seed(self) -> int:
        """The seed, from 0 to 2^64 - 1."""
        return self._seed

    @property
    def offset(self) -> int:
        """The offset of the next number of the kind drawn last; `Generator(seed, offset=…)` continues from it."""
        return self._position.offset

    @property
    def state(self) -> dict[str, Any]:
        """The position as strings and numbers for JSON; assign it to a generator of the same kind to continue."""
        place = self._position
        with place.lock:
            return {
                "bit_generator": self.bit_generator.name,
                "seed": self.seed,
                "place": [place.unit, place.words, place.offset],
                "spawned": [self._root, list(self._path), self._spawned],
            }

    @state.setter
    def state(self, value: Any) -> None:
        if not isinstance(value, dict) or value.keys() != self.state.keys():
            raise BadRequest("state", shown(value), "the `state` of a generator")
        if value["bit_generator"] != self.bit_generator.name:
            raise BadRequest("state", f"the state of {value['bit_generator']}", f"a state of {self.bit_generator.name}")
        place = self._position
        with place.lock:
            self._seed = check_int("seed", value["seed"], 0, 0 if self.bit_generator.is_quasi else MAX_SEED)
            place.unit, place.words, place.offset = value["place"]
            self._root, path, self._spawned = value["spawned"]
            self._path = tuple(path)

    @property
    def requests(self) -> Generator:
        """This generator, with methods that return requests instead: for supervisors, workers, prepared calls.

        They reserve positions in the same sequence when they are made.
        """
        other = object.__new__(Generator)
        vars(other).update(vars(self), _requests=True)
        return other

    @property
    def library_used(self) -> str:
        """The library for uniform f32 numbers on this device: "own", "curand" or, on a host without cuRAND, "numpy"."""
        request = RandomUniformRequest(self.device, self.dimensions, self.seed, **self._choices())
        plan = self.device.executor().plan(request)
        return str(getattr(plan, "library", plan.row.library))

    def spawn(self, n_children: int) -> list[Generator]:
        """Generators with other seeds, for streams, workers or ranks; equal seeds spawn equal generators in order.

        Seeds are those of `numpy.random.SeedSequence(seed).spawn(n)`, 64 bits of each child's. A quasi-random
        generator has only one sequence: give each part a different `offset`.
        """
        if self.bit_generator.is_quasi:
            expected = "a pseudo-random generator; use Generator(offset=…) to give each part different points"
            raise BadRequest("bit_generator", self.bit_generator.name, expected)
        import numpy as np  # numpy.random is imported only here

        count = check_int("n_children", n_children, 0)
        children = []
        with self._position.lock:
            first, self._spawned = self._spawned, self._spawned + count
        for number in range(first, first + count):
            path = (*self._path, number)
            state = np.random.SeedSequence(self._root, spawn_key=path).generate_state(1, np.uint64)
            child = Generator(int(state[0]), self.bit_generator, device=self.device, library=self.library)
            child.ordering, child._root, child._path = self.ordering, self._root, path
            children.append(child)
        return children

    # -- numbers ---------------------------------------------------------------------------------------------------
    def bits(self, size: Size = None, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        """Words of random bits, u32 or u64; from the 64-bit Sobol generators u64."""
        return self._draw(BITS, size, dtype, out)

    def random(
        self, size: Size = None, dtype: Any = None, *, out: Tensor | None = None, interval: str = "(0,1]"
    ) -> Tensor:
        """Uniform numbers in (0, 1], like cuRAND's, or with interval="[0,1)" like NumPy's."""
        return self._draw(UNIFORM, size, dtype, out, interval=interval)

    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        size: Size = None,
        dtype: Any = None,
        *,
        out: Tensor | None = None,
        interval: str = "(0,1]",
    ) -> Tensor:
        """Uniform numbers between low and high: low + (high - low) · u, with u as in `random`."""
        return self._draw(UNIFORM, size, dtype, out, low=low, high=high, interval=interval)

    def standard_normal(self, size: Size = None, dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
        """Normal numbers of mean 0 and variance 1."""
        return self._draw(NORMAL, size, dtype, out)

    def normal(
        self, loc: float = 0.0, scale: float = 1.0, size: Size = None, dtype: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Normal numbers of a mean and a standard deviation."""
        return self._draw(NORMAL, size, dtype, out, mean=loc, std=scale)

    def lognormal(
        self, mean: float = 0.0, sigma: float = 1.0, size: Size = None, dtype: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Numbers whose logarithms are normal, with this mean and standard deviation."""
        return self._draw(LOGNORMAL, size, dtype, out, mean=mean, std=sigma)

    def exponential(
        self, scale: float = 1.0, size: Size = None, dtype: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Exponential numbers with the mean `scale`."""
        return self._draw(EXPONENTIAL, size, dtype, out, scale=scale)

    def poisson(self, lam: float = 1.0, size: Size = None, *, out: Tensor | None = None) -> Tensor:
        """Poisson numbers with the mean `lam`, as u32."""
        return self._draw(POISSON, size, None, out, lam=lam)

    # -- requests --------------------------------------------------------------------------------------------------
    def _choices(self) -> dict[str, Any]:
        choices = {"bit_generator": self.bit_generator, "ordering": self.ordering}
        return {**choices, "dimensions": self.dimensions, "library": self.library}

    def _draw(
        self, function_and_kind: tuple[Any, Any], size: Size, dtype: Any, out: Tensor | None, **numbers: Any
    ) -> Tensor:
        """The next numbers of a kind, by its request function; or a request of its class."""
        function, kind = function_and_kind
        if out is not None and not (hasattr(out, "shape") and hasattr(out, "dtype")):
            raise BadRequest("out", shown(out), "a Tensor")
        if size is None:
            shape = (self.dimensions,) * (self.dimensions > 1) if out is None else out.shape
        else:
            shape = check_shape("size", size, 64)
        if dtype is not None:
            dtype = check_dtype("dtype", dtype)
        elif out is not None:
            dtype = out.dtype
        else:
            dtype = self._default_dtype(kind)
        count = math.prod(shape)
        needed = max(count, numbers["n"]) if kind is RandomPermutationRequest else count
        reservation = self._reserve(kind, needed, dtype)
        offset, make = reservation.offset, kind if self._requests else function
        try:
            result: Tensor = make(
                self.device, shape, self._seed, offset, out_dtype=dtype, out=out, **self._choices(), **numbers
            )
        except Exception as error:
            self._position.cancel(reservation)
            method_names = METHOD_ARGUMENTS.get(kind, {}) | METHOD_ARGUMENTS[None]
            if isinstance(error, BadRequest) and error.operand in method_names:  # report the method's argument name
                raise error.renamed(method_names) from None
            raise
        return result

    def _default_dtype(self, kind: Any) -> Dtype:
        """The dtype of numbers if the caller gives none."""
        default: Dtype = U64 if kind is RandomBitsRequest and self.bit_generator.is_64_bit else kind.kinds[0]
        return default

    def _reserve(self, kind: Any, count: int, dtype: Dtype) -> Reservation:
        """Reserve `count` numbers of a kind after the last ones, as cuRAND's own generator would continue."""
        if self.bit_generator.is_quasi:
            return self._position.reserve("", 1, count // self.dimensions)
        is_normal = issubclass(kind, RandomNormalRequest)
        count += count % 2 if is_normal else 0
        if self.bit_generator is not BitGenerator.PHILOX4_32_10:
            in_pairs = is_normal and int(self.bit_generator) in IN_PAIRS
            return self._position.reserve("", 1, count // 2 if in_pairs else count)
        words = 2 if dtype.itemsize == 8 and kind not in (*ELEMENTWISE, RandomPoissonRequest) else 1
        return self._position.reserve(f"{words} words", words, count)


def _restored(
    bit_generator: BitGenerator,
    device: str,
    dimensions: int,
    ordering: Ordering,
    library: str | None,
    state: dict[str, Any],
    requests: bool,
) -> Generator:
    """A generator with the state of the copied one."""
    seed = None if bit_generator.is_quasi else 0
    restored = Generator(seed, bit_generator, device=device, dimensions=dimensions, ordering=ordering, library=library)
    restored.state = state
    return restored.requests if requests else restored


LIBRARIES = ("own", "curand")
BITS = random_bits, RandomBitsRequest
UNIFORM = random_uniform, RandomUniformRequest
NORMAL = random_normal, RandomNormalRequest
LOGNORMAL = random_lognormal, RandomLognormalRequest
EXPONENTIAL = random_exponential, RandomExponentialRequest
POISSON = random_poisson, RandomPoissonRequest
# The argument names of methods, which are NumPy's, for fields of requests.
METHOD_ARGUMENTS: dict[Any, dict[str, str]] = {
    None: {"out_dtype": "dtype"},
    RandomNormalRequest: {"mean": "loc", "std": "scale"},
    RandomLognormalRequest: {"std": "sigma"},
    RandomTruncatedNormalRequest: {"mean": "loc", "std": "scale"},
    RandomGammaRequest: {"shape_parameter": "shape"},
}
