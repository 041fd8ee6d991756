"""counted: the functions of counted.c, as the generator would write them; bench_bindings calls them.

Each has as many arguments as its name says and does nothing. Importing this opens no library: the one who calls has
built it, and has put its row into `cudabind.LIBRARIES`.
"""

# ruff: noqa: TC001, TC003 - the binding evaluates the annotations

from __future__ import annotations

from ctypes import c_float

from cudabind._bind import SysLibrary
from cudabind._lazy import Handle, IntEnum, Structure, lazy
from cudabind._types import ConstMem, Ptr, const_void_p, int32_t, size_t, uint64_t, void_p
from cudabind.errors import CudaError


class countedStatus_t(IntEnum):
    COUNTED_SUCCESS = 0


class countedHandle_t(Handle): ...


class countedDesc_t(Handle): ...


class countedAlgo_t(Structure):
    data: uint64_t


_lib = SysLibrary("counted", "countedStatus_t", CudaError, "")


@_lib.value
def countedLast() -> int32_t: ...


@_lib.status
def counted0() -> countedStatus_t: ...


@_lib.status
def counted5(
    handle: countedHandle_t, desc: countedDesc_t, alpha: ConstMem[c_float], A: const_void_p, Adesc: countedDesc_t, /
) -> countedStatus_t: ...


@_lib.status
def counted10(
    handle: countedHandle_t,
    desc: countedDesc_t,
    alpha: ConstMem[c_float],
    A: const_void_p,
    Adesc: countedDesc_t,
    B: const_void_p,
    Bdesc: countedDesc_t,
    count: int32_t,
    size: size_t,
    stream: countedHandle_t,
    /,
) -> countedStatus_t: ...


@_lib.status
def counted16(
    handle: countedHandle_t,
    desc: countedDesc_t,
    alpha: ConstMem[c_float],
    A: const_void_p,
    Adesc: countedDesc_t,
    B: const_void_p,
    Bdesc: countedDesc_t,
    beta: ConstMem[c_float],
    C: const_void_p,
    Cdesc: countedDesc_t,
    D: void_p,
    Ddesc: countedDesc_t,
    algo: Ptr[countedAlgo_t],
    workspace: void_p,
    workspaceSizeInBytes: size_t,
    stream: countedHandle_t,
    /,
) -> countedStatus_t: ...


_names = lazy(globals())
