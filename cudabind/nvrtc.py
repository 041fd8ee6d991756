"""NVRTC, the run-time compiler, over cuda-python: every function by NVIDIA's name, and `compile` for all steps at once.

Users and CUTLASS's rows call it. A failed compilation raises NvrtcError with the compiler's log. It needs no GPU and no
driver. This module caches nothing.

NVIDIA's documentation: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind._cuda_python import Calls
from cudabind.errors import NvrtcError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Compiled(NamedTuple):
    """The result of a compilation.

    Attributes:
        code: the cubin for ``-arch=sm_…``, PTX for ``-arch=compute_…``, or LTO-IR with ``-dlto``.
        kind: ``"cubin"``, ``"ptx"`` or ``"ltoir"``.
        lowered: the mangled name of each name expression requested.
        log: the compiler's warnings, ``""`` if it had none.
    """

    code: bytes
    kind: str
    lowered: dict[str, str]
    log: str


def error(function: str, status: int, log: str = "") -> NvrtcError:
    """The error for a status of NVRTC."""
    from cuda.bindings import nvrtc

    try:
        name = nvrtc.nvrtcResult(status).name
    except ValueError:  # a newer library's status
        name = "an unknown status"
    return NvrtcError("nvrtc", function, status, name, log=log)


LTO = frozenset(("-dlto", "--dlink-time-opt"))
OUTPUTS = {"cubin": "CUBIN", "ptx": "PTX", "ltoir": "LTOIR"}
_calls = Calls("cuda.bindings.nvrtc", "nvrtc", "nvrtc", error)


def compile(  # noqa: A001 - the module is always named at the call: nvrtc.compile(…)
    source: str,
    name: str = "program.cu",
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
) -> Compiled:
    """Compile CUDA C++ to a cubin or to PTX, depending on ``-arch``, or with ``-dlto`` to LTO-IR for nvJitLink.

    Args:
        source: the text of the program.
        name: the program's name in messages.
        options: NVRTC's options, such as ``"-arch=sm_90a"``, ``"-std=c++17"`` and ``"-I…"``.
        headers: the texts of headers by the name they are included by.
        names: C++ name expressions whose mangled names are wanted, such as ``"kernel<float>"``.

    Raises:
        NvrtcError: it does not compile; ``log`` holds the compiler's messages.
        LibraryNotFound: NVRTC is not installed.
    """
    texts = headers or {}
    nvrtc = _calls.look_up
    program = nvrtc("nvrtcCreateProgram")(
        source.encode(), name.encode(), len(texts), [t.encode() for t in texts.values()], [n.encode() for n in texts]
    )
    try:
        for expression in names:
            nvrtc("nvrtcAddNameExpression")(program, expression.encode())
        try:
            nvrtc("nvrtcCompileProgram")(program, len(options), [option.encode() for option in options])
        except NvrtcError as failed:
            raise error(failed.function, failed.status or 0, _log(program)) from failed
        kind = "ltoir" if not LTO.isdisjoint(options) else "cubin" if nvrtc("nvrtcGetCUBINSize")(program) else "ptx"
        lowered = {
            expression: nvrtc("nvrtcGetLoweredName")(program, expression.encode()).decode() for expression in names
        }
        return Compiled(_output(program, OUTPUTS[kind]), kind, lowered, _log(program))
    finally:
        nvrtc("nvrtcDestroyProgram")(program)


def _output(program: Any, kind: str) -> bytes:
    code = bytearray(_calls.look_up(f"nvrtcGet{kind}Size")(program))
    _calls.look_up(f"nvrtcGet{kind}")(program, code)
    return bytes(code)


def _log(program: Any) -> str:
    text = bytearray(_calls.look_up("nvrtcGetProgramLogSize")(program))
    _calls.look_up("nvrtcGetProgramLog")(program, text)
    return text.rstrip(b"\0").decode(errors="replace").strip()


def symbols() -> dict[str, str]:
    """The exported symbol of each function, which is the function's name."""
    return {name: name for name in _calls.functions()}


def __getattr__(name: str) -> Any:
    value = _calls.look_up(name)
    return globals().setdefault(name, value)  # one object per name, also when threads race


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls.names()})
