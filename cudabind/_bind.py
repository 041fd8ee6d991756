"""Makes generated signatures callable: lazy binding and the status check.

A generated function is only a signature. Its decorator returns a callable that looks up its symbol on first use and
takes the ctypes argument types from the annotations, so that each type is written once, for ctypes and for mypy. This
file never names a library, a path or a status: those come from the generated module, `_load` and `errors`.
"""

from __future__ import annotations

import threading
from ctypes import Structure, byref, c_char_p, c_void_p, cast, sizeof
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from cudabind import LIBRARIES, _families, _load, callbacks
from cudabind._cached import cached_property
from cudabind._fork import anew
from cudabind._lazy import BEFORE, Module, key
from cudabind._types import Symbol, argument, converter
from cudabind.errors import CudaError, LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import IntEnum
    from types import FunctionType, ModuleType

P = ParamSpec("P")
R = TypeVar("R")


class _Function:
    """A function of a library, bound on first use; the subclasses differ in what a call does with the result."""

    # `__call__` is a slot: the interpreter calls its value directly. At first that is the method that binds, later a
    # ctypes function. A method `__call__(self, *args)` would add a frame, 60 to 90 ns, to each call.
    __slots__ = ("__call__", "__dict__", "_bare", "_library")

    def __init__(self, library: SysLibrary, signature: Callable[..., Any]) -> None:
        self._library = library
        self._bare: Any = None  # the ctypes function, once it is bound
        self._call(self._bind_and_call)
        self.__wrapped__: Any = signature  # inspect.signature and help() follow it
        self.__name__ = signature.__name__
        self.__module__ = signature.__module__

    def _bind_and_call(self, *args: object) -> Any:
        self._library.bind(self)
        return self(*args)

    def _call(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "__call__", function)  # a plain assignment would be a method to mypy

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def publish(self, bare: Any, symbol: Any) -> None:
        """Call this symbol, with checks, from now on. `_bare` is set last: a thread that sees it may call."""
        self._call(self._checking(symbol))
        self._bare = bare

    def _checking(self, symbol: Any) -> Callable[..., Any]:
        """The callable that checks a call of this kind of function."""
        raise NotImplementedError

    @property
    def __origin__(self) -> Any:
        """The signature, which `help` shows instead of the class."""
        return self.__wrapped__

    def __repr__(self) -> str:
        return f"<{self._library.name} function {self.__name__}>"


def symbols(module: ModuleType) -> dict[str, str]:
    """The exported symbol of each function of a generated module that has one, which is the function's name."""
    bound_functions = (
        f for f in vars(module).values() if isinstance(f, _Function) and not isinstance(f, SizedFunction)
    )
    names = (*(function.__name__ for function in bound_functions), *module._names.functions())
    return {name: name for name in names if BEFORE not in name}


def functions(module: ModuleType) -> list[str]:
    """The names of a generated module's functions, the inline ones among them, without second names."""
    sized = [f.__name__ for f in vars(module).values() if isinstance(f, SizedFunction)]
    return [*symbols(module), *dict.fromkeys(sized)]


def expected(module: ModuleType, version: str) -> set[str]:
    """The functions that a library of this version should export, according to the headers that were read.

    Not certain for a version between two that were read: a function counts from the first of them that has it.
    """
    since: dict[str, str] = module.SINCE
    until: dict[str, str] = module.UNTIL
    return {
        name
        for name in symbols(module)
        if name not in module.NOT_EXPORTED
        and key(version) >= key(since.get(name, "0"))
        and (name not in until or key(version) <= key(until[name]))
    }


class _StatusCheck(dict[int, None]):
    """Maps success, which is 0 in every NVIDIA library, to None, and raises for any other status.

    Its `__getitem__` is the `restype` of checked functions: ctypes calls it with each status, in C, where `errcheck` or
    a Python function around the call would add a frame. While an exception of a callback waits for a checked call, the
    key for success is missing, too.
    """

    def __init__(self, function: StatusFunction[Any]) -> None:
        super().__init__()
        self._function = function
        callbacks.watch(self)

    def __missing__(self, status: int) -> None:
        error = self._function.error(status) if status else None
        callbacks.raise_pending(error)
        if error is not None:
            raise error


class StatusFunction(_Function, Generic[P]):
    """A function that returns a status: a call checks it and returns None.

    `unchecked` is the bare ctypes function, which returns the status as an int: for hot paths, with prebuilt arguments;
    it takes texts and bytes for a pointer, too, and so may overwrite them.
    """

    __slots__ = ()

    @cached_property
    def unchecked(self) -> Callable[..., int]:
        return self._library.bind(self)

    def error(self, status: int | Structure) -> CudaError:
        """The error for a status, for callers of `unchecked`: `raise lt.cublasLtMatmul.error(status)`."""
        return self._library.error(self, status)

    def _checking(self, symbol: Any) -> Callable[..., Any]:
        if isinstance(symbol.restype, type) and issubclass(symbol.restype, Structure):
            symbol.errcheck = self._look_into
        else:
            symbol.restype = _StatusCheck(self).__getitem__
        call: Callable[..., Any] = symbol
        return call

    def _look_into(self, result: Structure, _function: object, _arguments: object) -> None:
        """Check the result of a function that returns its status inside a struct, as cuFile's functions do."""
        error = self.error(result) if _numbers(result)[0] != 0 else None
        if callbacks.pending:
            callbacks.raise_pending(error)
        if error is not None:
            raise error

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None: ...


class SizedFunction(StatusFunction[P]):
    """A function that is inline in the header: it calls another one, with a struct's size after the first argument.

    The size is that of the struct in the library's loaded version, as everywhere.
    """

    __slots__ = ("_called", "_struct")

    def __init__(
        self, library: SysLibrary, signature: Callable[..., Any], called: StatusFunction[Any], struct: str
    ) -> None:
        super().__init__(library, signature)
        self._called = called
        self._struct = struct

    def bare(self) -> Callable[..., int]:
        """The value of `unchecked`: not a ctypes function, which would need the size as an argument."""
        called, size = self._called.unchecked, self._size()
        return lambda first, /, *rest: called(first, size, *rest)

    def _checking(self, symbol: Any) -> Callable[..., Any]:
        called, size = self._called, self._size()
        return lambda first, /, *rest: called(first, size, *rest)

    def _size(self) -> int:
        return sizeof(_names(self)["_names"].resolve(self._struct))


class ValueFunction(_Function, Generic[P, R]):
    """A function that returns a value: a call returns it, texts as str.

    `unchecked` is the bare ctypes function, which returns texts as bytes.
    """

    __slots__ = ()

    @cached_property
    def unchecked(self) -> Callable[..., Any]:
        return self._library.bind(self)

    def _checking(self, symbol: Any) -> Callable[..., Any]:
        is_text = symbol.restype is c_char_p
        call: Callable[..., Any] = (lambda *args: _text(symbol(*args))) if is_text else symbol
        return call

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def _text(given: bytes | None) -> str | None:
    return given.decode(errors="replace") if given is not None else None


class SysLibrary:
    """The state that the functions of one generated module share: the library, its error class, texts of statuses.

    Args:
        name: a name of `cudabind.LIBRARIES`.
        status: the name of the enum of the library's statuses; 0 is success in every NVIDIA library.
        error: the class to raise.
        text: the name of the function that returns the text of a status, or ``""``.
        returned: the struct that functions return, if the status is its first member.
    """

    def __init__(self, name: str, status: str, error: type[CudaError], text: str, returned: str = "") -> None:
        self.name = name
        self._status = status
        self._returned = returned or status
        self._error = error
        self._text = text
        self._lock = threading.RLock()  # a finalizer may run inside it, and bind a function that destroys
        anew(self, "_lock", threading.RLock)

    def status(self, signature: Callable[P, IntEnum | Structure]) -> StatusFunction[P]:
        """Decorator: the signature of a function that returns a status."""
        return StatusFunction(self, signature)

    def sized(self, called: StatusFunction[Any], struct: str) -> Callable[[Callable[P, IntEnum]], SizedFunction[P]]:
        """Decorator: the signature of an inline function; it calls `called` with the size of `struct` added."""
        return lambda signature: SizedFunction(self, signature, called, struct)

    def value(self, signature: Callable[P, R]) -> ValueFunction[P, R]:
        """Decorator: the signature of a function that returns a value or nothing."""
        return ValueFunction(self, signature)

    def of_family(self, name: str, hint: str, call: FunctionType, checked: bool) -> _Function:
        """A function of a family: its name, its annotation, and the family's `__call__`."""
        typed = _families.signature(name, hint, call, self._returned if checked else "")
        return StatusFunction(self, typed) if checked else ValueFunction(self, typed)

    def version(self) -> str | None:
        """The version of the library, which is opened for it; None if it is not installed."""
        try:
            return _load.version(self.name)
        except LibraryNotFound:
            return None

    def bind(self, function: _Function) -> Callable[..., Any]:
        """The function's symbol with its types; the same ctypes function every time.

        Raises:
            LibraryNotFound: the library is not installed.
            SymbolNotFound: the installed version does not export the function.
        """
        if isinstance(function, SizedFunction):
            function.publish(function.bare(), None)  # the types come from the function that it calls
            inline: Callable[..., Any] = function._bare
            return inline
        with self._lock:
            # Another thread may have bound it meanwhile; all threads must see the same object.
            if function._bare is None:
                names = _names(function)
                symbol = self._symbol(function.__name__, names)
                module: Module = names["_names"]
                module.settle()
                annotations = module.signature(function.__name__).__annotations__
                hints = dict(zip(annotations, map(module.evaluate, annotations.values()), strict=True))
                symbol.restype = argument(hints.pop("return"))
                symbol.argtypes = tuple(map(argument, hints.values()))
                again: Any = Symbol(cast(symbol, c_void_p).value or 0)
                again.argtypes, again.restype = tuple(map(converter, hints.values())), symbol.restype
                if function._bare is None:  # a finalizer may have bound it meanwhile
                    function.publish(symbol, again)
            bound: Callable[..., Any] = function._bare
            return bound

    def variable(self, name: str, kind: Any) -> Any:
        """A variable that the library exports, such as ``CUTENSOR_COMPUTE_DESC_32F``.

        Raises:
            LibraryNotFound: the library is not installed.
            SymbolNotFound: the installed version does not export the variable.
        """
        dll = _load.open(self.name)
        try:
            plain = argument(kind)
            value = plain.in_dll(dll, name)
            return value if plain is kind else value.value  # a Python number for a C number
        except ValueError as error:
            raise self._missing(name, {}) from error

    def error(self, function: _Function, status: int | Structure) -> CudaError:
        """The error for a status that is not success, with the library's name and text for it."""
        names = _names(function)
        more = ""
        if isinstance(status, Structure):
            status, *others = _numbers(status)
            more = f"with the further status {others[0]}" if any(others) else ""
        statuses = names["_names"].resolve(self._status)
        name = statuses(status).name if status in statuses._value2member_map_ else "an unknown status"
        text = self._words(names, status) or more
        return self._error(self.name, function.__name__, status, name, text)

    def _words(self, names: dict[str, Any], status: int) -> str:
        if not self._text:
            return ""
        try:
            text_of = names["_names"].resolve(self._text)
            if isinstance(text_of, StatusFunction):  # CUPTI's writes the text's address
                words = c_char_p()
                text_of.unchecked(status, byref(words))
                return _text(words.value) or ""
            return text_of(status) or ""  # some return NULL for an unknown status
        except SymbolNotFound:  # an older library: cuSPARSELt 0.7 declares the function and does not export it
            return ""

    def _symbol(self, name: str, names: dict[str, Any]) -> Any:
        dll = _load.open(self.name)
        module: Module = names["_names"]
        try:
            return Symbol((module.symbol(name), dll))
        except AttributeError as error:
            raise self._missing(name, names) from error

    def _missing(self, name: str, names: dict[str, Any]) -> SymbolNotFound:
        """The error for a name that the installed library does not export, with the versions that the headers give."""
        version, path = _load.version(self.name), _load.path(self.name)
        since, until = names.get("SINCE", {}).get(name), names.get("UNTIL", {}).get(name)
        install = LIBRARIES[self.name].install
        text = f"{self.name} {version} ({path}) does not export it."
        hint = f"another version may have it: {install}"
        if since and key(version) < key(since):
            text, hint = f"needs {self.name} {since} or newer, installed is {version} ({path}).", install
        elif until and key(version) > key(until):
            text = f"needs {self.name} {until} or older, installed is {version} ({path})."
            hint = "NVIDIA has removed it: its documentation names what to use instead"
        return SymbolNotFound(self.name, name, text=text, hint=hint)


def _numbers(result: Structure) -> list[int]:
    """The members of a struct that has only numbers."""
    return [int(getattr(result, name)) for name, *_ in result._fields_]


def _names(function: _Function) -> dict[str, Any]:
    """The globals of the generated module that a function is in."""
    names: dict[str, Any] = function.__wrapped__.__globals__
    return names
