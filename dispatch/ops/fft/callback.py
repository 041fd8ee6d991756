"""Callback: a function that a transform applies to each element that it reads or writes, in CUDA C++ and in NumPy.

It is public as `dispatch.fft.Callback`; some of its methods are predefined callbacks. A callback refers to no library:
it is compiled with the plan of a request. This file calls no library.
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

NOTHING: Any = ()  # dataclasses do not allow a mapping as a default
OF_KIND = ("real", "complex")  # names for the transform's own dtypes
CPP_WORDS = (
    "alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do double"
    " else enum explicit export extern false float for friend goto if inline int long mutable namespace new not nullptr"
    " operator or private protected public register return short signed sizeof static struct switch template this"
    " throw true try typedef typeid typename union unsigned using virtual void volatile while xor"
)
MAX_OPERANDS = WORDS // 2 - 1  # operands: a number may have two words, and the tensor's address has one


@dataclass(frozen=True)
class Lines:
    """A callback without its operands: the part that is compared between two callbacks."""

    code: str
    broadcast: tuple[str, ...]
    dtype: Dtype | str | None


@dataclass(frozen=True, eq=False, repr=False)
class Callback:
    """Lines of CUDA C++ for each element that a transform reads (`load=`) or writes (`store=`), and the same in NumPy.

    Attributes:
        code: the body of a function, such as "return x * window[i % n];". `x` is the element: for a load the element of
            the operand, `Real` or `Complex`; for a store a number of the result, including its factor 1/n. `i` is the
            element's index in C order in the operand, or in the result, whatever their strides; `at[k]` is its
            coordinate along axis k of `rank` axes, which have `shape[k]` elements. `raw` is a load's element as stored
            in memory. `Real` is float or double, `Complex` has `.x`, `.y`, arithmetic, `conj`, `norm` and `abs`. The
            function returns the number to transform (for "r2c" a Real, else a Complex), or the number to write.
        numpy: the same for all elements at once: a function of arrays, which is called with those of x, raw, i, at,
            shape and the operands that its parameters name. The host uses it, and tests of GPU results compare with it.
        operands: the operands that the lines name: tensors on the device of the transform, or numbers. A tensor is a
            pointer to its elements in C order, of its dtype; a Python int is an int or long long, a float a Real, a
            complex number a Complex. A number is part of the plan: pass a value that changes between calls as a tensor
            of shape ().
        broadcast: names of operands, tensors that broadcast to the shape of the operand, or of the result: in the lines
            such a name is the element at the same coordinates, so `x * window` works as in NumPy. They may have any
            strides.
        dtype: for a store, the dtype that it writes; "real" or "complex" of the transform's precision. None for the
            dtype of `x`.

    Child processes of the host need a function that pickles, which a lambda does not; those of a GPU do not use it.
    Raises BadRequest for names that are reserved in C++, and for operands that are neither tensors nor numbers.
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
        operands: Any = {} if self.operands is NOTHING else self.operands
        if not isinstance(operands, Mapping):
            raise BadRequest("operands", shown(operands), "a mapping of names to tensors or numbers")
        if len(operands) > MAX_OPERANDS:
            raise BadRequest("operands", f"{len(operands)} operands", f"at most {MAX_OPERANDS}")
        for name in operands:
            _check_name(name)
        broadcast: Any = self.broadcast
        if not isinstance(broadcast, (str, tuple, list)):
            raise BadRequest("broadcast", shown(broadcast), "a tuple of names of operands")
        broadcast = (broadcast,) if isinstance(broadcast, str) else tuple(broadcast)
        for name in broadcast:
            if name not in operands:
                raise BadRequest(
                    "broadcast", shown(name), f"names of operands: {', '.join(operands) or 'there are none'}"
                )
        numbers = {name: one.item() for name, one in operands.items() if isinstance(one, np.generic)}
        object.__setattr__(self, "operands", {**operands, **numbers})
        object.__setattr__(self, "broadcast", broadcast)
        if self.dtype not in (None, *OF_KIND):
            dtype = check_dtype("dtype", self.dtype)
            if dtype not in NUMBERS:
                raise BadRequest("dtype", str(dtype), f"real, complex, or one of {', '.join(map(str, NUMBERS))}")
            object.__setattr__(self, "dtype", dtype)

    def __getstate__(self) -> dict[str, Any]:
        """The fields; a function that does not pickle is left out."""
        return state_of(self)

    def __repr__(self) -> str:
        """Its lines and its operands; tensors without their elements."""
        operands = [f"{name}={getattr(one, 'layout', None) or shown(one)}" for name, one in self.operands.items()]
        dtype = [] if self.dtype is None else [f"dtype={self.dtype}"]
        return f"Callback({', '.join([repr(self.code), *operands, *dtype])})"

    def flat(self, side: str) -> tuple[Lines, dict[str, Any]]:
        """Its lines, and its operands by their names in a request."""
        return self._lines, {f"{side}.{name}": one for name, one in self.operands.items()}

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.code, self.broadcast, self.dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The operands that are tensors."""
        return {name: one for name, one in self.operands.items() if isinstance(one, Tensor)}

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that a plan depends on, except the layouts of the tensors."""
        numbers = ((n, None if isinstance(one, Tensor) else (type(one), repr(one))) for n, one in self.operands.items())
        return self.code, tuple(numbers), self.broadcast, self.dtype

    def __call__(self, x: Array, raw: Array, work: np.dtype[Any]) -> Any:
        """The elements of an array, computed by NumPy in a working dtype; `raw` is the array as stored in memory."""
        arguments: dict[str, Any] = {"x": x, "raw": raw, "shape": raw.shape}
        parameters = inspect.signature(self.numpy).parameters
        if "i" in parameters:
            arguments["i"] = np.arange(raw.size).reshape(raw.shape)
        if "at" in parameters:
            arguments["at"] = np.indices(raw.shape, sparse=True)
        arguments |= {name: _array(one, work) for name, one in self.operands.items()}
        unknown = [name for name, one in parameters.items() if name not in arguments and one.default is one.empty]
        if unknown:
            names = dict.fromkeys(("x", "raw", "i", "at", "shape", *arguments))
            raise BadRequest("numpy", f"parameters {unknown}", f"some of {', '.join(names)}")
        elements = self.numpy(**{name: arguments[name] for name in parameters if name in arguments})
        if elements is None:
            raise BadRequest("numpy", "a function that returns None", "a function that returns the elements")
        return elements

    # -- predefined callbacks -------------------------------------------------------------------------------------
    @classmethod
    def window(cls, window: Any) -> Callback:
        """x · window, for real numbers that broadcast to x."""
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
        """For a store: the real parts."""
        return cls("return real(x);", _real_parts, dtype="real")

    @classmethod
    def magnitude(cls) -> Callback:
        """For a store: the magnitudes."""
        return cls("return abs(x);", _magnitudes, dtype="real")

    @classmethod
    def from_u8(cls, factor: float = 1 / 255) -> Callback:
        """For a load: integers of an operand of u8 (or any other dtype), times a factor; `precision` sets the dtype."""
        check_number("factor", factor)
        return cls("return Real(raw) * factor;", _scaled, {"factor": float(factor)})

    @classmethod
    def from_i16(cls, factor: float = 1 / 32768) -> Callback:
        """For a load: signed samples of 16 bits, times a factor; the operand has their bits with dtype f16.

        There are no tensors of i16: `dev.array(samples.view("f2"))` has the same bytes as an i16 array.
        """
        check_number("factor", factor)
        code = "return Real(short(raw)) * factor;"
        return cls(code, _samples, {"factor": float(factor)})


# Named functions, because they pickle: requests go to child processes.
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
    """An operand as a NumPy array or number: integers unchanged, others in the working dtype."""
    if not isinstance(operand, Tensor):
        return operand
    array = np.asarray(operand)
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.result_type(work, np.complex64) if array.dtype.kind == "c" else work)


def check_operand(place: str, operand: Any) -> None:
    """BadRequest if the operand is neither a tensor nor a number."""
    if isinstance(operand, Tensor):
        if operand.dtype not in NUMBERS:
            dtypes = ", ".join(map(str, NUMBERS))
            raise BadRequest(place, str(operand.layout), f"a tensor of one of {dtypes}")
        return
    if isinstance(operand, NO_NUMBERS) or not isinstance(operand, (int, float, complex)):
        raise BadRequest(place, shown(operand), "a Tensor, or a number", "use dev.array(x)")
    if isinstance(operand, int) and not -(2**63) <= operand < 2**63:
        raise BadRequest(place, shown(operand), "a whole number of 64 bits")
