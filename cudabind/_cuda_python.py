"""Calls into cuda-python in the style of the generated modules: they raise on failure and return plain values.

`driver`, `runtime` and `nvrtc` each make one Calls object and look up their names in it. Types and enums pass through
unchanged. The meaning of a status is left to the module of the library, in its `error` function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudabind import _load
from cudabind.callbacks import pending, raise_pending
from cudabind.errors import LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from cudabind.errors import CudaError

NO_DRIVER = "no NVIDIA driver was found: install one, or use a device that needs none"

SHORT = "List is too small"  # the text of cuda-python's RuntimeError for such an argument


class Call:
    """One function of cuda-python: a call checks the status and returns the value, a tuple of several, or None."""

    # `_function` is called: at first the method that opens an overridden library, then cuda-python's function.
    __slots__ = ("__dict__", "_bound", "_error", "_function", "_library")

    def __init__(
        self, name: str, function: Callable[..., Any], error: Callable[[str, int], CudaError], library: str
    ) -> None:
        self._function: Callable[..., Any] = self._open_and_call
        self._bound = function
        self._error = error
        self._library = library
        self.__name__ = name
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._function(*args, **kwargs)
        except RuntimeError as error:
            if str(error).startswith(SHORT):
                raise ValueError(f"{self.__name__}: {error}") from error
            raise _unavailable(self._error(self.__name__, 0), error) from error
        if result[0] or pending:
            self._refuse(int(result[0]))
        return result[1] if len(result) == 2 else result[1:] or None

    def _refuse(self, status: int) -> None:
        """Raise the error of a status that is not success, and the errors of callbacks."""
        error = self._error(self.__name__, status) if status else None
        raise_pending(error)
        if error is not None:
            raise error

    def _open_and_call(self, *args: Any, **kwargs: Any) -> Any:
        _load.open_override(self._library)
        self._function = self._bound
        return self._bound(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<cuda-python function {self.__name__}>"


def _unavailable(call: CudaError, error: RuntimeError) -> CudaError:
    """Our error for cuda-python's error about a missing library or function."""
    text = _load.in_short(error)
    install = _load.install(call.library)
    if call.function in text:
        return SymbolNotFound(call.library, call.function, text=text, hint=f"a newer library may have it: {install}")
    hint = NO_DRIVER if call.library == "cuda" else install
    return LibraryNotFound(call.library, call.function, text=text, hint=hint)


class Calls:
    """The names of one module of cuda-python.

    Args:
        module: cuda-python's module, imported at the first look-up.
        prefix: how the names of functions start; all other names pass through.
        library: the name in `cudabind.LIBRARIES`.
        error: makes the error for a function's name and its status.
        make: the class of the calls.
    """

    def __init__(
        self, module: str, prefix: str, library: str, error: Callable[[str, int], CudaError], make: type[Call] = Call
    ) -> None:
        self._module = module
        self._prefix = prefix
        self._library = library
        self._error = error
        self._make = make

    def names(self) -> list[str]:
        """The public names of the module, for `dir` and for the list of functions."""
        return [name for name in dir(importlib.import_module(self._module)) if not name.startswith("_")]

    def functions(self) -> list[str]:
        """The names of the functions only."""
        module = importlib.import_module(self._module)
        return [name for name in self.names() if self._is_function(name, getattr(module, name))]

    def look_up(self, name: str) -> Any:
        """The call or the type of a name; AttributeError if cuda-python has none."""
        value = getattr(importlib.import_module(self._module), name)
        return self._make(name, value, self._error, self._library) if self._is_function(name, value) else value

    def _is_function(self, name: str, value: object) -> bool:
        following = name[len(self._prefix) : len(self._prefix) + 1]
        return name.startswith(self._prefix) and following.isupper() and not isinstance(value, (type, int))
