"""cuFFT's transforms with load and store callbacks: NVRTC compiles them to LTO-IR, cuFFT links them into its kernels.

`cufftXtSetJITCallback` takes a callback once, between `cufftCreate` and the call that makes the plan. It also takes
one address of device memory that must stay valid as long as the plan. A kernel of this library (`WRITE_WORDS`) writes
the addresses and numbers of a call to that memory before each transform, in stream order. They are arguments of that
kernel, so that an earlier call that has not run yet keeps its own, and a captured call has them in a node of its graph.

Where cuFFT does not support the callbacks, `passes` runs the same functions as kernels around a transform without
callbacks. Follows https://docs.nvidia.com/cuda/cufft/#lto-load-and-store-callback-routines.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import nvjitlink, nvrtc
from cudabind.errors import LibraryNotFound
from cudabind.sys import cufft
from dispatch.errors import Refused
from dispatch.keys import F32
from dispatch.libraries.cufft.callback_source import EACH, OPTIONS, WORDS, WRITE_WORDS, CallbackSide, source_of
from dispatch.libraries.cufft.transforms import CallbackRoutine, Transform
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.libraries.nvrtc.launching import check, launch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cufft.layouts import TransformSpec

__all__ = ["BoundSide", "CallbackPass", "CallbackWord", "FusedTransform", "callback_routine", "why_not"]

FIRST_VERSION = 11_300  # of cuFFT: the one in CUDA 12.6 Update 2
THREADS = 256
LTO = ("-dlto", "-rdc=true")
TYPE_NAMES = {"load": "LD", "store": "ST"}
FIRST_WORDS = {"load": 0, "store": WORDS}  # the first word of each side

Number = int | float | complex


class CallbackWord(NamedTuple):
    """A word that is written for a callback: an operand's address plus an offset in bytes, or a number."""

    operand: int | None
    offset: int = 0
    number: Number = 0


class BoundSide(NamedTuple):
    """A side of a transform and the words of its callback, the tensor's address first."""

    side: CallbackSide
    words: tuple[CallbackWord, ...]


@cache
def why_not() -> str:
    """The reason why cuFFT supports no callbacks here; "" if it does.

    It links them by nvJitLink, which must be no older than the NVRTC that compiled them. If cuFFT has no plan with
    callbacks for other reasons, for example because they need too many registers, a plan falls back to passes, and logs
    that.
    """
    version = ctypes.c_int()
    cufft.cufftGetVersion(ctypes.byref(version))
    if version.value < FIRST_VERSION:
        name = _version_text(version.value)
        return (
            f"cuFFT {name} does not support callbacks as LTO-IR; the first version that does is 11.3, of CUDA 12.6"
            " Update 2"
        )
    try:
        linker, compiler = nvjitlink.nvJitLinkVersion(), nvrtc.nvrtcVersion()
    except LibraryNotFound as error:
        return f"cuFFT links callbacks with nvJitLink: {error}"
    linker, compiler = tuple(linker)[:2], tuple(compiler)[:2]
    if linker[0] != compiler[0] or linker < compiler:
        versions = f"nvJitLink {'.'.join(map(str, linker))} and NVRTC {'.'.join(map(str, compiler))}"
        return f"cuFFT links callbacks with an nvJitLink that is at least as new as NVRTC; found {versions}"
    return ""


def _version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 100}.{version % 100}"


def callback_routine(side: CallbackSide, arch: str) -> CallbackRoutine:
    """A side's callback for an architecture, in the form that `cufftXtSetJITCallback` takes; Refused without NVRTC.

    Raises NvrtcError, with the compiler's messages, if the user's lines do not compile: "load(1): error: …".
    """
    kind = f"CUFFT_CB_{TYPE_NAMES[side.name]}_{'COMPLEX' if side.number.is_complex else 'REAL'}"
    kind += "" if side.real is F32 else "_DOUBLE"
    try:
        code = compiled(source_of(side), side.symbol, (f"-arch={arch}", *OPTIONS, *LTO))
    except LibraryNotFound as error:
        raise Refused(f"NVRTC, which compiles {side.symbol}, is not available: {error}") from error
    return CallbackRoutine(int(getattr(cufft.cufftXtCallbackType, kind)), side.symbol, code)


class FusedTransform(Transform):
    """A cuFFT transform with callbacks, and the kernel that writes their words before it."""

    __slots__ = ("_pointer", "_slots", "_words", "_write_words")

    def __init__(
        self,
        executor: CudaExecutor,
        spec: TransformSpec,
        given: Sequence[BoundSide],
        routines: tuple[CallbackRoutine, ...],
        *,
        forward: bool,
    ) -> None:
        super().__init__(executor, spec, forward=forward, routines=routines)
        self._slots = [(FIRST_WORDS[one.side.name], one.words) for one in given if _needs_words(one)]
        plan: Any = self._plan
        if not self._slots:
            return
        self._words, self._pointer = Blocks(), ctypes.c_void_p(plan.block.base)
        kernel = (WRITE_WORDS, "write_words", OPTIONS)
        self._write_words = launch_of(executor, kernel, (1,), (2 * WORDS,), (self._pointer, self._words))

    def enqueue(self, addresses: Any) -> None:
        """Enqueue the transform for these addresses."""
        if self._slots:
            self.claim_block()
            for first, words in self._slots:
                write_block(self._words, first, words, addresses)
            check(self._executor, self._write_words())
        super().enqueue(addresses)


def _needs_words(given: BoundSide) -> bool:
    return not given.side.is_direct or len(given.words) > 1


class Blocks(ctypes.Structure):
    """The kernel's struct `Blocks`."""

    _fields_ = (("word", ctypes.c_uint64 * (2 * WORDS)),)


class Block(ctypes.Structure):
    """The kernels' struct of the same name."""

    _fields_ = (("word", ctypes.c_uint64 * WORDS),)


def write_block(block: Any, first: int, words: Sequence[CallbackWord], addresses: Sequence[Any]) -> None:
    """Write addresses and numbers into a block, starting at word `first`."""
    place = first
    for one in words:
        for value in (addresses[one.operand] + one.offset,) if one.operand is not None else words_of_number(one.number):
            block.word[place] = value
            place += 1


def words_of_number(number: Number) -> tuple[int, ...]:
    """A number as words: an integer unchanged, a real number as f64, a complex number as two of these."""
    if isinstance(number, complex):
        return (*words_of_number(number.real), *words_of_number(number.imag))
    if isinstance(number, float):
        return struct.unpack("<Q", struct.pack("<d", number))
    return (number & 0xFFFF_FFFF_FFFF_FFFF,)


class CallbackPass:
    """A side of a transform as a separate kernel, from the tensor to dense memory or from there to the tensor."""

    __slots__ = ("_arguments", "_block", "_data", "_dense", "_executor", "_given", "_launch", "_operand", "_place")

    def __init__(self, executor: CudaExecutor, given: BoundSide, operand: int, offset: int) -> None:
        """`operand` and `offset` are the location of the dense memory."""
        self._executor, self._given, self._operand, self._place = executor, given, operand, offset
        side = given.side
        self._block, self._data, self._dense = Block(), ctypes.c_void_p(), ctypes.c_void_p()
        is_load, count = side.name == "load", ctypes.c_longlong(side.elements)
        addresses = (self._data, self._dense) if is_load else (self._dense, self._data)
        self._arguments = (*addresses, count, self._block)
        kernel = (source_of(side, as_pass=True), f"{side.name}_pass", OPTIONS)
        grid = (-(-side.elements // (EACH * THREADS)),)
        self._launch = launch_of(executor, kernel, grid, (THREADS,), self._arguments)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Launch it for these addresses."""
        write_block(self._block, 0, self._given.words, addresses)
        self._data.value = self._block.word[0]
        self._dense.value = addresses[self._operand] + self._place
        check(self._executor, self._launch())
