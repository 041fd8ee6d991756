"""Python functions that a library calls back: their lifetime, and their exceptions.

Wherever a generated module takes a callback, as an argument or in a struct, a Python function can be passed; so can the
callback type around one, `cublasLogCallback(function)`, which type checkers understand. The type for a member of a
struct is named after both. ctypes acquires the GIL for the call, whichever thread it comes from.

Lifetime: a function that was passed to a library lives as long as the process, because libraries do not document their
last call; passing the same function again makes no second callback. `release(function)` ends its life, once the library
will not call it any more (usually because it was passed None). A later call nevertheless raises ReleasedCallback, and
runs nothing; some 200 bytes of each callback are kept for that.

Exceptions: the library gets -1 (or NULL, or 0 for an unsigned number) as the result, and the exception is raised by the
checked call during which the function ran. If that was an unchecked call, or a thread of the library, the next checked
call raises it; `raise_pending()` does so without a call. At exit Python prints exceptions that were never raised.

Generated modules and `_bind` use this file. It knows no library.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from _ctypes import CFuncPtr
from types import MethodType
from typing import TYPE_CHECKING, Any

from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["Callback", "ReleasedCallback", "function_type", "raise_pending", "release"]

SUCCESS = 0
SIGNED = (ctypes.c_int8, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64)

pending: list[tuple[int, BaseException]] = []  # (thread, exception raised there); never replaced
checks: list[dict[int, None]] = []  # they map SUCCESS to None, except while something is pending
_kept: dict[int, Callback] = {}  # by id: nothing is freed that a library may still call
_released: list[Callback] = []  # kept, so that a late call does not find freed memory
_given: dict[tuple[object, ...], Callback] = {}  # callbacks made for plain functions
# Reentrant: a finalizer may run inside it, and call a library that calls back.
_lock = threading.RLock()
anew(sys.modules[__name__], "_lock", threading.RLock)
os.register_at_fork(after_in_child=pending.clear)  # they belong to the parent


class ReleasedCallback(RuntimeError):
    """A library called a function that had been released."""


class _Guarded:
    """The function that ctypes calls: it catches every exception, and converts the result."""

    __slots__ = ("failed", "function", "kind", "name", "text")

    def __init__(self, name: str, kind: Any, function: Callable[..., Any]) -> None:
        self.name, self.kind, self.function = name, kind, function
        self.failed = -1 if kind in SIGNED else None if kind in (None, ctypes.c_void_p) else 0
        self.text: Any = None  # the last text that it returned, which the library reads afterwards

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._result(self.function(*arguments))
        except BaseException as error:  # noqa: BLE001 - C cannot handle it; ctypes would only print it
            carry(error)
            return self.failed

    def _result(self, value: Any) -> Any:
        if self.kind is None:
            return None
        if self.kind is ctypes.c_void_p and isinstance(value, (str, bytes)):
            self.text = ctypes.create_string_buffer(value.encode() if isinstance(value, str) else value)
            return ctypes.addressof(self.text)
        try:
            return value.value if isinstance(value, self.kind) else self.kind(value).value
        except (TypeError, AttributeError):
            wanted = f"the library expects {self.kind.__name__}"
            raise TypeError(f"a function passed as {self.name} returned {value!r}; {wanted}") from None

    def call_nothing(self, *_: object) -> None:
        raise ReleasedCallback(f"a library called a function, passed as {self.name}, that was already released")


class Callback(CFuncPtr):
    """Base of the callback types: made from a Python function, from an address, or without arguments for NULL."""

    _flags_ = 1  # FUNCFLAG_CDECL
    _guarded: _Guarded | None = None

    def __new__(cls, *given: Any) -> Self:
        if len(given) != 1 or isinstance(given[0], CFuncPtr) or not callable(given[0]):
            return super().__new__(cls, *given)
        guarded = _Guarded(cls.__name__, cls._restype_, given[0])  # type: ignore[attr-defined]  # of each class
        callback = super().__new__(cls, guarded)
        callback._guarded = guarded
        return callback

    @classmethod
    def from_param(cls, value: Any) -> Any:
        """Convert a function, a callback of this type, or None."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return _keep(value)
        if isinstance(value, CFuncPtr) or not callable(value):
            raise TypeError(f"{type(value).__name__} is not a {cls.__name__}; pass a Python function, or None for NULL")
        with _lock:
            key = (cls, *_identity(value))
            if key not in _given:
                _given[key] = _keep(cls(value))
            return _given[key]

    @property
    def address(self) -> int:
        """The function's address, for an argument or a field that is a plain pointer in the header; also kept alive."""
        return ctypes.cast(_keep(self), ctypes.c_void_p).value or 0


class Holder:
    """Base of structs with callback fields: these may be set to Python functions, which are kept alive."""

    __slots__ = ()
    _callbacks_: dict[str, type[Callback]]

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self._callbacks_.get(name)
        super().__setattr__(name, value if kind is None else kind.from_param(value))


def _identity(function: Any) -> tuple[object, ...]:
    """A key for a function; each access to a method makes another object."""
    if isinstance(function, MethodType):
        return id(function.__self__), id(function.__func__)
    return (id(function),)


def _keep(callback: Any) -> Any:
    if callback._guarded is not None:
        _kept[id(callback)] = callback
    return callback


def function_type(result: Any, *arguments: Any) -> type[Callback]:
    """The callback type of a C function, like ctypes.CFUNCTYPE, for pointers without a type in the header.

    `callback = function_type(c_int, c_void_p, c_void_p)(function)`, and `callback.address` for the library.
    """
    metaclass: Any = type(Callback)
    callback_type: type[Callback] = metaclass(
        "function_type", (Callback,), {"_flags_": Callback._flags_, "_restype_": result, "_argtypes_": arguments}
    )
    return callback_type


def release(function: Callable[..., Any]) -> None:
    """Release a function or a callback that was passed to libraries; they must not call it any more.

    Raises:
        ValueError: it was not passed to a library, or it has been released.
    """
    with _lock:
        callbacks = [each for each in _kept.values() if each is function or _is_of(each, function)]
        if not callbacks:
            raise ValueError(f"{function!r} was not passed to a library, or has been released")
        for callback in callbacks:
            guarded = callback._guarded
            if guarded is not None:
                guarded.function = guarded.call_nothing
            _released.append(_kept.pop(id(callback)))
        for key in [key for key, each in _given.items() if any(each is one for one in callbacks)]:
            del _given[key]


def _is_of(callback: Callback, function: Any) -> bool:
    return callback._guarded is not None and _identity(callback._guarded.function) == _identity(function)


def carry(error: BaseException) -> None:
    """Let a checked call of this thread raise an exception; of any thread, if this one belongs to a library."""
    with _lock:
        pending.append((threading.get_ident(), error))
        for check in checks:
            check.pop(SUCCESS, None)


def watch(check: dict[int, None]) -> None:
    """Register a dict in which checked calls look up statuses; it lacks SUCCESS while something is pending."""
    with _lock:
        checks.append(check)
        if not pending:
            check[SUCCESS] = None


def raise_pending(during: BaseException | None = None) -> None:
    """Raise the pending exceptions of callbacks on this thread and on threads of libraries.

    The first is raised, with the others and then `during`, the error of the call, in the chain of its contexts.
    """
    with _lock:
        others = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        others.discard(threading.get_ident())
        errors = [error for thread, error in pending if thread not in others]
        pending[:] = [(thread, error) for thread, error in pending if thread in others]
        if not pending:
            for check in checks:
                check[SUCCESS] = None
    if errors:
        raise _chained([*errors, *([during] if during is not None else [])])


def _chained(errors: list[BaseException]) -> BaseException:
    chain: list[BaseException] = []
    for error in errors:
        if chain and not any(error is one for one in chain):
            chain[-1].__context__ = error
        following: BaseException | None = error
        while following is not None and not any(following is one for one in chain):
            chain.append(following)
            following = following.__context__
    return errors[0]


atexit.register(raise_pending)
