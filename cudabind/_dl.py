"""Information of the system's loader about the libraries in this process: the file of a handle, and what it is linked
with.

`_load` and `_compat` use it. This file never loads a library and never calls a function of one. If a system's loader
cannot tell something, the answer is "not known", never an error.
"""

from __future__ import annotations

import ctypes
import os

RTLD_DI_LINKMAP = 2
RTLD_DI_SERINFO = 4
RTLD_DI_SERINFOSIZE = 5


class _LinkMap(ctypes.Structure):
    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


class _Info(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class _SearchPath(ctypes.Structure):
    _fields_ = (("dls_name", ctypes.c_char_p), ("dls_flags", ctypes.c_uint))


class _SearchInfo(ctypes.Structure):
    _fields_ = (("dls_size", ctypes.c_size_t), ("dls_cnt", ctypes.c_uint), ("dls_serpath", _SearchPath * 1))


def origin(dll: ctypes.CDLL) -> str:
    """The file of a handle, which its soname alone does not tell."""
    entry = ctypes.POINTER(_LinkMap)()
    if _dlinfo(dll, RTLD_DI_LINKMAP, ctypes.byref(entry)) != 0:
        return dll._name
    return os.path.realpath(os.fsdecode(entry.contents.l_name))


def loaded(soname: str) -> str | None:
    """The file that is loaded under a soname in this process, or None: the next load of that soname returns it."""
    try:
        return origin(ctypes.CDLL(soname, mode=os.RTLD_NOLOAD))
    except OSError:
        return None


def exporter(dll: ctypes.CDLL, symbol: str) -> str | None:
    """The file that a symbol comes from: the library itself, or one that it is linked with."""
    try:
        address = ctypes.cast(dll[symbol], ctypes.c_void_p)
    except AttributeError:
        return None
    info = _Info()
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) == 0:
        return None
    return os.path.realpath(os.fsdecode(info.dli_fname))


def search_path(dll: ctypes.CDLL) -> list[str]:
    """The folders in which the loader looks for libraries that a library needs, in order: first its own RUNPATH."""
    head = _SearchInfo()
    if _dlinfo(dll, RTLD_DI_SERINFOSIZE, ctypes.byref(head)) != 0:
        return []
    room = ctypes.create_string_buffer(head.dls_size)
    ctypes.memmove(room, ctypes.byref(head), _SearchInfo.dls_serpath.offset)
    if _dlinfo(dll, RTLD_DI_SERINFO, room) != 0:
        return []
    entries = (_SearchPath * head.dls_cnt).from_buffer(room, _SearchInfo.dls_serpath.offset)
    return [os.path.realpath(os.fsdecode(entry.dls_name)) for entry in entries]


def _dlinfo(dll: ctypes.CDLL, request: int, answer: object) -> int:
    try:
        dlinfo = ctypes.CDLL(None).dlinfo
    except AttributeError:
        return -1
    return int(dlinfo(ctypes.c_void_p(dll._handle), request, answer))
