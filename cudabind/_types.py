"""The C types of signatures and fields in generated modules: each is a type for mypy and one for ctypes.

Generated modules use them in annotations, which `_bind` and `_lazy` evaluate. It knows no library, and calls none.
"""

from __future__ import annotations

import ctypes
from _ctypes import CFuncPtr
from ctypes import Array
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

T = TypeVar("T", bound=Any)

# C's arithmetic types, by width: a Python number for mypy, the ctypes class for the call.
int8_t = Annotated[int, ctypes.c_int8]
uint8_t = Annotated[int, ctypes.c_uint8]
int16_t = Annotated[int, ctypes.c_int16]
uint16_t = Annotated[int, ctypes.c_uint16]
int32_t = Annotated[int, ctypes.c_int32]
uint32_t = Annotated[int, ctypes.c_uint32]
int64_t = Annotated[int, ctypes.c_int64]
uint64_t = Annotated[int, ctypes.c_uint64]
size_t = Annotated[int, ctypes.c_size_t]
long_t = Annotated[int, ctypes.c_long]
ulong_t = Annotated[int, ctypes.c_ulong]
char = Annotated[bytes, ctypes.c_char]
bool_t = Annotated[bool, ctypes.c_bool]
float32 = Annotated[float, ctypes.c_float]
float64 = Annotated[float, ctypes.c_double]
# A NUL-terminated text that the library reads. A function that returns a text is annotated `str`.
char_p = Annotated[bytes | ctypes.c_char_p | None, ctypes.c_char_p]
# A pointer inside a struct, read back as an address.
address = Annotated[int | None, ctypes.c_void_p]

if TYPE_CHECKING:
    from ctypes import _CArgObject, _Pointer, c_void_p
    from typing import TypeAlias

    void_p: TypeAlias = int | c_void_p | _Pointer[Any] | Array[Any] | _CArgObject | None  # noqa: PYI042 - spelled like its neighbours
    const_void_p: TypeAlias = void_p | bytes  # noqa: PYI042
    # Ptr: a pointer to a struct or a handle in host memory; ctypes checks its type, and passes objects by reference.
    Ptr: TypeAlias = T | _Pointer[T] | Array[T] | _CArgObject | None
    # Mem: a pointer to numbers that may be on the device; it may be a plain address, so ctypes checks no type.
    Mem: TypeAlias = int | c_void_p | _Pointer[T] | Array[T] | _CArgObject | None
    ConstMem: TypeAlias = int | c_void_p | _Pointer[T] | Array[T] | _CArgObject | bytes | None
else:
    void_p = ctypes.c_void_p
    const_void_p = Annotated[int, ctypes.c_void_p, "const"]

    class Ptr:
        def __class_getitem__(cls, pointee):
            return ctypes.POINTER(pointee)

    class Mem:
        def __class_getitem__(cls, _pointee):
            return ctypes.c_void_p

    class ConstMem:
        def __class_getitem__(cls, _pointee):
            return const_void_p


class Handle(ctypes.c_void_p):
    """Base of the opaque handles: a pointer whose type ctypes and mypy both check.

    c_void_p's own `from_param` takes any pointer, also str and bytes. That of all other simple types, which is used
    here, takes an instance, an int or None.
    """

    from_param: Any = classmethod(type(ctypes.c_void_p).from_param)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value or 0:#x})"


class Writable:
    """How a checked call converts a `void_p` or a `Mem`: as c_void_p does, but without str and bytes.

    The library writes there, and Python may share such an object with other users, such as a constant or a dict key.
    """

    @staticmethod
    def from_param(value: Any) -> Any:
        if type(value) in PREBUILT:  # arguments of calls that must be fast: a fifth of c_void_p's time
            return value
        if isinstance(value, SHARED):
            hint = "an address, byref(x), an array, or ctypes.create_string_buffer(data)"
            raise TypeError(f"{type(value).__name__} is not writable memory; pass {hint}")
        try:
            return ctypes.c_void_p.from_param(value)
        except TypeError:  # its text is only "wrong type"
            hint = "byref(x) of an object or an array of ctypes, x.ctypes.data of NumPy's"
            raise TypeError(f"{type(value).__name__} is not an address; pass one: {hint}") from None


class Whole:
    """How a checked call converts an integer: as ctypes does, but an integer that does not fit raises OverflowError.

    ctypes would drop its upper bits. A C int takes 10 ns less than with ctypes, a wider one 70 ns more.
    """

    def __init__(self, kind: Any, low: int, high: int) -> None:
        wide = ctypes.sizeof(kind) > ctypes.sizeof(ctypes.c_int)  # ctypes passes an integer as an int of C
        convert = kind.from_param

        def from_param(value: Any) -> Any:
            if isinstance(value, int):
                if low <= value <= high:
                    return convert(value) if wide else value
                raise OverflowError(f"{int(value)} is not between {low} and {high}, the range of this parameter")
            if isinstance(value, kind):
                return value
            if hasattr(value, "__index__"):  # a NumPy integer
                return from_param(index(value))
            if hasattr(value, "_as_parameter_"):
                return from_param(value._as_parameter_)
            return convert(value)

        self.from_param = from_param


SHARED = (bytes, str, ctypes.c_char_p, ctypes.c_wchar_p)  # the last two point into the first two two
PREBUILT = frozenset({ctypes.c_void_p, type(ctypes.byref(ctypes.c_int()))})

SIGNED = (ctypes.c_int8, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64)
UNSIGNED = (ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64)
WHOLE: dict[Any, Whole] = {kind: Whole(kind, 0, 256 ** ctypes.sizeof(kind) - 1) for kind in UNSIGNED}
WHOLE |= {kind: Whole(kind, -(256 ** ctypes.sizeof(kind)) // 2, 256 ** ctypes.sizeof(kind) // 2 - 1) for kind in SIGNED}
# A C enum is a signed or an unsigned int, depending on its members, and a newer library may have other members.
ENUM = Whole(ctypes.c_int, -(2**31), 2**32 - 1)


class Symbol(CFuncPtr):
    """A function of a library. Without FUNCFLAG_CDECL, ctypes refuses surplus arguments.

    On Linux the flag has no other effect, because there is only one calling convention.
    """

    _flags_ = 0
    _restype_ = ctypes.c_int


class Bits(int):
    """The width of a bit-field, inside ``Annotated[uint32_t, Bits(3)]``."""


def argument(hint: Any) -> Any:
    """The ctypes type of an argument or a result."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if hint is str:
        return ctypes.c_char_p
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return ctypes.c_int
    return hint


def converter(hint: Any) -> Any:
    """The type by which a checked call converts an argument."""
    if hint is ctypes.c_void_p:
        return Writable
    kind = argument(hint)
    return WHOLE.get(kind, kind) if kind is not ctypes.c_int or get_origin(hint) is Annotated else ENUM


def field(hint: Any) -> tuple[Any, ...]:
    """The ctypes type of a struct's field, and its width if it is a bit-field."""
    if get_origin(hint) is not Annotated:
        return (hint,)
    extra = hint.__metadata__
    if isinstance(extra[-1], Bits):
        return (extra[0], int(extra[-1]))
    kind = get_args(hint)[0]
    if get_origin(kind) is not Array:
        return (extra[0],)
    element = kind
    while get_origin(element) is Array:
        element = get_args(element)[0]
    for length in reversed(extra):  # C's outermost dimension is written first
        element = element * length
    return (element,)
