"""What the generated modules import: lazy binding, the status check, and the C types their signatures are written in.

A generated function is a signature; its decorator makes it a callable that looks its symbol up on first use and takes
the ctypes argument types from the annotations, so that each type is written once, for ctypes and for mypy alike.
This file never names a library, a path or a status: those come from the generated module, `_load` and `errors`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from _ctypes import CFuncPtr
from ctypes import Array
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin

from cudabind import LIBRARIES, _load
from cudabind.errors import CudaError, SymbolNotFound

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="type[ctypes.Structure | ctypes.Union]")
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
# A NUL-terminated text that the library reads. A function that returns one is annotated `str`.
char_p = Annotated[bytes | ctypes.c_char_p | None, ctypes.c_char_p]
# A pointer inside a struct, read back as an address.
address = Annotated[int | None, ctypes.c_void_p]

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import _CArgObject, _Pointer, c_void_p
    from types import ModuleType
    from typing import TypeAlias

    void_p: TypeAlias = int | bytes | c_void_p | _Pointer[Any] | Array[Any] | _CArgObject | None  # noqa: PYI042 - spelled like its neighbours
    # Ptr: to a struct or a handle in host memory; ctypes checks its type, and takes the object itself by reference.
    Ptr: TypeAlias = T | _Pointer[T] | Array[T] | _CArgObject | None
    # Mem: to numbers that may lie on the device; an address will do, so ctypes checks nothing.
    Mem: TypeAlias = int | c_void_p | _Pointer[T] | Array[T] | _CArgObject | None
else:
    void_p = ctypes.c_void_p

    class Ptr:
        def __class_getitem__(cls, pointee):
            return ctypes.POINTER(pointee)

    class Mem:
        def __class_getitem__(cls, _pointee):
            return ctypes.c_void_p


class Handle(ctypes.c_void_p):
    """Base of the opaque handles: a pointer whose type ctypes and mypy both check."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value or 0:#x})"


class Callback(CFuncPtr):
    """Base of the callback types: construct one from a Python function, and keep it alive while the library has it."""

    _flags_ = 1  # FUNCFLAG_CDECL


def struct(cls: S) -> S:
    """Decorator: give a struct or union its `_fields_` from its annotations, so that a field's type is written once."""
    names = vars(sys.modules[cls.__module__])
    hints = cls.__annotations__
    cls._fields_ = [(name, *_field(eval(hint, names))) for name, hint in hints.items()]
    return cls


class Bits(int):
    """The width of a bit-field, inside ``Annotated[uint32_t, Bits(3)]``."""


def _field(hint: Any) -> tuple[Any, ...]:
    """The ctypes type of a struct's field, and its width where it is a bit-field."""
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


def _argument(hint: Any) -> Any:
    """The ctypes type of an argument or a result."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if hint is str:
        return ctypes.c_char_p
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return ctypes.c_int
    return hint


class _Function:
    """A function of a library, bound on first use; the two kinds of it differ in what a call does with the result."""

    # `_bare` is what a call calls: at first the method that binds, then the ctypes function. It is a slot, because that
    # is read fastest, and there is no __getattr__, because having one slows down every attribute.
    __slots__ = ("__dict__", "_bare", "_library")

    def __init__(self, library: SysLibrary, signature: Callable[..., Any]) -> None:
        self._library = library
        self._bare: Callable[..., Any] = self._bind_and_call
        self.__wrapped__ = signature  # inspect.signature and help() follow it
        self.__name__ = signature.__name__
        self.__module__ = signature.__module__

    def _bind_and_call(self, *args: object) -> Any:
        return self._library.bind(self)(*args)

    def __repr__(self) -> str:
        return f"<{self._library.name} function {self.__name__}>"


def symbols(module: ModuleType) -> dict[str, str]:
    """The exported symbol of each function of a generated module, which is the function's name."""
    return {f.__name__: f.__name__ for f in vars(module).values() if isinstance(f, _Function)}


class StatusFunction(_Function, Generic[P]):
    """A function that returns a status: a call checks it and returns None.

    `unchecked` is the bare ctypes function, which returns the status as an int: for hot paths, with prebuilt arguments.
    """

    __slots__ = ()

    @cached_property
    def unchecked(self) -> Callable[..., int]:
        return self._library.bind(self)

    def error(self, status: int) -> CudaError:
        """The error for a status, for callers of `unchecked`: `raise lt.cublasLtMatmul.error(status)`."""
        return self._library.error(self, status)

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None: ...

    else:

        def __call__(self, *args):
            status = self._bare(*args)
            if status:
                raise self._library.error(self, status)


class ValueFunction(_Function, Generic[P, R]):
    """A function that returns a value: a call returns it, texts as str.

    `unchecked` is the bare ctypes function, which returns texts as bytes.
    """

    __slots__ = ()

    @cached_property
    def unchecked(self) -> Callable[..., Any]:
        return self._library.bind(self)

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:

        def __call__(self, *args):
            value = self._bare(*args)
            return value.decode(errors="replace") if type(value) is bytes else value


class SysLibrary:
    """What the functions of one generated module share: the library, its error class and its words for a status.

    Args:
        name: a name of `cudabind.LIBRARIES`.
        status: the enum of the library's statuses; 0 is success in every NVIDIA library.
        error: the class to raise.
        text: the function that turns a status into the library's own words, or ``""`` where there is none.
    """

    def __init__(self, name: str, status: type[IntEnum], error: type[CudaError], text: str) -> None:
        self.name = name
        self._status = status
        self._error = error
        self._text = text
        self._lock = threading.Lock()

    def status(self, signature: Callable[P, IntEnum]) -> StatusFunction[P]:
        """Decorator: the signature of a function that returns a status."""
        return StatusFunction(self, signature)

    def value(self, signature: Callable[P, R]) -> ValueFunction[P, R]:
        """Decorator: the signature of a function that returns a value or nothing."""
        return ValueFunction(self, signature)

    def bind(self, function: _Function) -> Callable[..., Any]:
        """The function's symbol with its types; the same ctypes function every time.

        Raises:
            LibraryNotFound: the library is not installed.
            SymbolNotFound: the installed version does not export the function.
        """
        with self._lock:
            # Another thread may have bound it while this one waited: everybody must see one and the same object.
            if not isinstance(function._bare, CFuncPtr):
                symbol = self._symbol(function.__name__)
                names = vars(sys.modules[function.__module__])
                hints = {name: eval(hint, names) for name, hint in function.__wrapped__.__annotations__.items()}
                symbol.restype = _argument(hints.pop("return"))
                symbol.argtypes = tuple(_argument(hint) for hint in hints.values())
                function._bare = symbol  # published last: no thread may see it half made
            return function._bare

    def _symbol(self, name: str) -> Any:
        dll = _load.open(self.name)
        try:
            return dll[name]
        except AttributeError as error:
            version, path = _load.version(self.name), _load.path(self.name)
            text = f"{self.name} {version} ({path}) does not export it."
            install = LIBRARIES[self.name].install
            raise SymbolNotFound(self.name, name, text=text, hint=f"a newer library may have it: {install}") from error

    def error(self, function: _Function, status: int) -> CudaError:
        """The error for a status that is not success, with the library's own name and words for it."""
        name = self._status(status).name if status in self._status._value2member_map_ else "an unknown status"
        text = vars(sys.modules[function.__module__])[self._text](status) if self._text else ""
        return self._error(self.name, function.__name__, status, name, text)
