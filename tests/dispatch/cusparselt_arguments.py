"""cuSPARSELt's functions with their arguments counted and of their kinds, called as plans call them."""

import ctypes
import inspect
from enum import IntEnum
from functools import cache

from cudabind._bind import functions
from cudabind.errors import CusparseLtError
from cudabind.sys import cusparseLt as lt

NOT_SUPPORTED = 10
INTS = {"int32_t": 32, "int64_t": 64, "uint32_t": 32, "size_t": 64}
FUNCTIONS = frozenset(functions(lt))


@cache
def kinds_of(name):
    """The kinds of the arguments of a function."""
    function = getattr(lt, name)
    return [str(one.annotation) for one in inspect.signature(function).parameters.values()]


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def error(self, status):
        name = lt.cusparseStatus_t(status).name
        return CusparseLtError("cusparseLt", self.name, int(status), name, "")

    def unchecked(self, *arguments):
        self.checked(arguments)
        self.library.called.append(self.name)
        if self.name in self.library.refused:
            return NOT_SUPPORTED
        return getattr(self.library, f"_{self.name.removeprefix('cusparseLt')}")(*arguments) or 0

    def checked(self, given):
        kinds = kinds_of(self.name)
        assert len(given) == len(kinds), f"{self.name} takes {len(kinds)} arguments, not {len(given)}"
        for argument, kind in zip(given, kinds, strict=True):
            enum = getattr(lt, kind, None)
            if kind in INTS:
                assert type(argument) is int, (self.name, kind, argument)
                assert argument < 2 ** INTS[kind], (self.name, kind, argument)
            elif isinstance(enum, type) and issubclass(enum, IntEnum):
                assert type(argument) is enum, (self.name, kind, argument)
            elif kind.startswith("Ptr[cusparseLt"):
                assert type(argument).__name__ == kind[4:-1], (self.name, kind, argument)
            elif kind == "Ptr[cudaStream_t]":
                assert isinstance(argument._obj, lt.cudaStream_t), (self.name, kind, argument)
            elif kind == "cudaStream_t":
                assert isinstance(argument, lt.cudaStream_t), (self.name, kind, argument)
            else:
                is_address = isinstance(argument, ctypes.c_void_p) or hasattr(argument, "_obj")
                assert is_address, (self.name, kind, argument)
