"""Callback: what a transform does with each element as it is read, or as it is written, in CUDA C++ and in NumPy.

`dispatch.fft.Callback`, and the ready ones among its methods. A callback holds no library's code: it is compiled with
the plan of a request. This file calls nothing.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import NO_NUMBERS, check_dtype, check_number, shown
from dispatch.core.counterparts import state_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.libraries.cufft.callback_source import NUMBERS, RESERVED, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["Callback", "Lines", "check_operand"]

NOTHING: Any = ()  # dataclasses take no mapping for a default
OF_KIND = ("real", "complex")  # words for the transform's own dtypes
CPP_WORDS = (
    "alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do double"
    " else enum explicit export extern false float for friend goto if inline int long mutable namespace new not nullptr"
    " operator or private protected public register return short signed sizeof static struct switch template this"
    " throw true try typedef typeid typename union unsigned using virtual void volatile while xor"
)
MOST = WORDS // 2 - 1  # operands: numbers may have two words, and the tensor's address has one


@dataclass(frozen=True)
class Lines:
    """A callback without its operands: what is compared of two."""

    code: str
    broadcast: tuple[str, ...]
    dtype: Dtype | str | None


@dataclass(frozen=True, eq=False, repr=False)
class Callback:
    """Lines of CUDA C++ for each element that a transform reads (`load=`) or writes (`store=`), and the same in NumPy.

    Attributes:
        code: the body of a function, such as "return x * window[i % n];". It finds `x`, the element: of a load as it is
            in the operand, `Real` or `Complex`; of a store a number of the result, with its factor 1/n. `i` is its
            number in C order in the operand, or in the result, whatever their strides; `at[k]` its place along axis k
            of `rank`, of which each has `shape[k]`. `raw` is a load's element as it lies in memory. `Real` is float or
            double, `Complex` has `.x`, `.y`, arithmetic, `conj`, `norm` and `abs`. It returns what is transformed (of
            "r2c" a Real, else a Complex), or what is written.
        numpy: the same for all elements at once: a function of arrays, which is called with those of x, raw, i, at,
            shape and the operands that its parameters name. For the host, and for what is held against it.
        operands: what the lines name: tensors on the device of the transform, or numbers. A tensor is a pointer to its
            elements in C order, its dtype says to which; a Python int is an int or long long, a float a Real, a complex
            number a Complex. A number is part of the plan: what changes from call to call is a tensor of shape ().
        broadcast: tensors among these that broadcast to the operand's, or the result's, shape: the lines have the
            element that belongs to theirs, `x * window` as in NumPy. These may have any strides.
        dtype: of a store, what it writes; "real" or "complex" of the transform's precision. None for what `x` is.

    A child process of the host needs a function that pickles, which a lambda does not; one of a GPU has no use for it.
    Raises BadRequest for names that C++ has, and for operands that are neither tensors nor numbers.
    """

    code: str
    numpy: Callable[..., Any]
    operands: Mapping[str, Tensor | int | float | complex] = NOTHING
    broadcast: tuple[str, ...] = ()
    dtype: Dtype | str | None = None

    def __post_init__(self) -> None:
        code: Any = self.code
        if not isinstance(code, str) or not code.strip():
            raise BadRequest("code", shown(code), 'lines of CUDA C++, such as "return 2 * x;"')
        if not callable(self.numpy):
            raise BadRequest("numpy", shown(self.numpy), "a function of arrays, such as lambda x: 2 * x")
        given: Any = {} if self.operands is NOTHING else self.operands
        if not isinstance(given, Mapping):
            raise BadRequest("operands", shown(given), "a mapping of names to tensors or numbers")
        if len(given) > MOST:
            raise BadRequest("operands", f"{len(given)} operands", f"{MOST} at most")
        for name in given:
            _check_name(name)
        broadcast: Any = self.broadcast
        broadcast = (broadcast,) if isinstance(broadcast, str) else tuple(broadcast)
        for name in broadcast:
            if name not in given:
                raise BadRequest("broadcast", shown(name), f"names of operands: {', '.join(given) or 'there are none'}")
        numbers = {name: one.item() for name, one in given.items() if isinstance(one, np.generic)}
        object.__setattr__(self, "operands", {**given, **numbers})
        object.__setattr__(self, "broadcast", broadcast)
        if self.dtype not in (None, *OF_KIND):
            dtype = check_dtype("dtype", self.dtype)
            if dtype not in NUMBERS:
                raise BadRequest("dtype", str(dtype), f"real, complex, or one of {', '.join(map(str, NUMBERS))}")
            object.__setattr__(self, "dtype", dtype)

    def __getstate__(self) -> dict[str, Any]:
        """The fields; a function that does not pickle stays behind."""
        return state_of(self)

    def __repr__(self) -> str:
        """Its lines and its operands, of tensors without their elements."""
        named = [f"{name}={getattr(one, 'layout', None) or shown(one)}" for name, one in self.operands.items()]
        said = [] if self.dtype is None else [f"dtype={self.dtype}"]
        return f"Callback({', '.join([repr(self.code), *named, *said])})"

    def flat(self, side: str) -> tuple[Lines, dict[str, Any]]:
        """Its lines, and its operands by their names in a request."""
        return self._lines, {f"{side}.{name}": one for name, one in self.operands.items()}

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.code, self.broadcast, self.dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of the operands."""
        return {name: one for name, one in self.operands.items() if isinstance(one, Tensor)}

    @property
    def key(self) -> tuple[Any, ...]:
        """All that a plan depends on, but for the layouts of the tensors."""
        numbers = ((n, None if isinstance(one, Tensor) else (type(one), repr(one))) for n, one in self.operands.items())
        return self.code, tuple(numbers), self.broadcast, self.dtype

    def __call__(self, x: Array, raw: Array, work: np.dtype[Any]) -> Any:
        """The elements of an array as NumPy makes them, in a working dtype; `raw` is as memory has it."""
        there: dict[str, Any] = {"x": x, "raw": raw, "shape": raw.shape}
        wanted = inspect.signature(self.numpy).parameters
        if "i" in wanted:
            there["i"] = np.arange(raw.size).reshape(raw.shape)
        if "at" in wanted:
            there["at"] = np.indices(raw.shape, sparse=True)
        there |= {name: _array(one, work) for name, one in self.operands.items()}
        unknown = [name for name, one in wanted.items() if name not in there and one.default is one.empty]
        if unknown:
            known = dict.fromkeys(("x", "raw", "i", "at", "shape", *there))
            raise BadRequest("numpy", f"parameters {unknown}", f"some of {', '.join(known)}")
        found = self.numpy(**{name: there[name] for name in wanted if name in there})
        if found is None:
            raise BadRequest("numpy", "a function that returns nothing", "one that returns the elements")
        return found

    # -- ready ones -----------------------------------------------------------------------------------------------
    @classmethod
    def window(cls, window: Any) -> Callback:
        """x · window, of real numbers that broadcast to x."""
        return cls("return x * window;", _windowed, {"window": window}, ("window",))

    @classmethod
    def multiply(cls, factors: Any) -> Callback:
        """x · factors, such as the spectrum of a filter; real or complex, they broadcast to x."""
        return cls("return x * factors;", _multiplied, {"factors": factors}, ("factors",))

    @classmethod
    def scale(cls, factor: float) -> Callback:
        """x · factor."""
        check_number("factor", factor)
        return cls("return x * factor;", _scaled, {"factor": float(factor)})

    @classmethod
    def real(cls) -> Callback:
        """Of a store: the real parts."""
        return cls("return real(x);", _real_parts, dtype="real")

    @classmethod
    def magnitude(cls) -> Callback:
        """Of a store: the magnitudes."""
        return cls("return abs(x);", _magnitudes, dtype="real")

    @classmethod
    def from_u8(cls, factor: float = 1 / 255) -> Callback:
        """Of a load: whole numbers of an operand of u8 (or of any), times a factor; `precision` says in which dtype."""
        check_number("factor", factor)
        return cls("return Real(raw) * factor;", _scaled, {"factor": float(factor)})

    @classmethod
    def from_i16(cls, factor: float = 1 / 32768) -> Callback:
        """Of a load: samples of 16 bits with a sign, times a factor, of an operand that has their bits as an f16's.

        There are no tensors of i16: `dev.array(samples.view("f2"))` has the memory of an array of them.
        """
        check_number("factor", factor)
        code = "return Real(short(raw)) * factor;"
        return cls(code, _samples, {"factor": float(factor)})


# Named functions, which pickle: requests go to child processes.
def _windowed(x: Array, window: Array) -> Any:
    return x * window


def _multiplied(x: Array, factors: Array) -> Any:
    return x * factors


def _scaled(x: Array, factor: float) -> Any:
    return x * factor


def _real_parts(x: Array) -> Any:
    return x.real


def _magnitudes(x: Array) -> Any:
    return np.abs(x)


def _samples(x: Array, raw: Array, factor: float) -> Any:
    return raw.view(np.int16).astype(x.dtype) * factor


def _check_name(name: object) -> None:
    fits = isinstance(name, str) and name.isascii() and name.isidentifier()
    if (
        not fits
        or name in RESERVED
        or name in CPP_WORDS.split()
        or keyword.iskeyword(str(name))
        or str(name).startswith("__")
    ):
        wanted = f"a name of C++ and Python, and none of {', '.join(sorted(RESERVED))}"
        raise BadRequest("operands", f"the name {shown(name)}", wanted)


def _array(operand: Any, work: np.dtype[Any]) -> Any:
    """An operand as NumPy has it: whole numbers as they are, others in the working dtype."""
    if not isinstance(operand, Tensor):
        return operand
    array = np.asarray(operand)
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.result_type(work, np.complex64) if array.dtype.kind == "c" else work)


def check_operand(place: str, operand: Any) -> None:
    """BadRequest for what is neither a tensor nor a number."""
    if isinstance(operand, Tensor):
        if operand.dtype not in NUMBERS:
            known = ", ".join(map(str, NUMBERS))
            raise BadRequest(place, str(operand.layout), f"a tensor of one of {known}")
        return
    if isinstance(operand, NO_NUMBERS) or not isinstance(operand, (int, float, complex)):
        raise BadRequest(place, shown(operand), "a Tensor, or a number", "use dev.array(x)")
    if isinstance(operand, int) and not -(2**63) <= operand < 2**63:
        raise BadRequest(place, shown(operand), "a whole number of 64 bits")
