"""NVRTC and nvJitLink: from CUDA C++ to PTX, to a cubin and to LTO-IR, and pieces linked into one; with their logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cudabind import nvjitlink, nvrtc
from cudabind.errors import NvJitLinkError, NvrtcError

if TYPE_CHECKING:
    from collections.abc import Callable

EM_CUDA = 190  # the machine of an ELF file for NVIDIA's GPUs
CALLER = 'extern __device__ float twice(float);\nextern "C" __global__ void run(float *p) { *p = twice(*p); }'
CALLED = "__device__ float twice(float x) { return 2 * x; }"


@pytest.fixture(autouse=True)
def _installed(need: Callable[..., None]) -> None:
    need("nvrtc", "nvJitLink")


def is_cubin(code: bytes) -> bool:
    return code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == EM_CUDA


def lto_ir(source: str) -> bytes:
    """By NVIDIA's own names, as a program in C would do it."""
    program = nvrtc.nvrtcCreateProgram(source.encode(), b"piece.cu", 0, [], [])
    options = [b"-arch=sm_90", b"-dlto", b"-rdc=true"]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    code = bytearray(nvrtc.nvrtcGetLTOIRSize(program))
    nvrtc.nvrtcGetLTOIR(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def test_every_arch_that_nvrtc_names_gets_ptx_and_a_cubin_of_its_own() -> None:
    archs = nvrtc.nvrtcGetSupportedArchs()
    assert 90 in archs
    for arch in archs:
        ptx = nvrtc.compile(CALLED + CALLER, options=[f"-arch=compute_{arch}"])
        assert (ptx.kind, f".target sm_{arch}\n".encode() in ptx.code) == ("ptx", True)
        assert b".entry run" in ptx.code
    assert len({nvrtc.compile(CALLED + CALLER, options=[f"-arch=sm_{arch}"]).code for arch in archs}) == len(archs)


@pytest.mark.parametrize("kind", ["PTX", "CUBIN"])
def test_pieces_are_linked_with_the_call_left_in(kind: str) -> None:
    option = "-arch=compute_90" if kind == "PTX" else "-arch=sm_90"
    pieces = [nvrtc.compile(source, options=[option, "-rdc=true"]) for source in (CALLER, CALLED)]
    cubin = nvjitlink.link([(kind, piece.code) for piece in pieces], ["-arch=sm_90"])
    assert is_cubin(cubin)
    assert b"run\0" in cubin
    assert b"_Z5twicef\0" in cubin


def test_pieces_of_lto_ir_are_optimized_across_their_borders() -> None:
    cubin = nvjitlink.link([("LTOIR", lto_ir(source)) for source in (CALLER, CALLED)], ["-arch=sm_90", "-lto"])
    assert is_cubin(cubin)
    assert b"run\0" in cubin
    assert b"_Z5twicef\0" not in cubin  # it was inlined: only link-time optimization can do that


def test_a_piece_that_is_missing_is_named_in_the_log() -> None:
    with pytest.raises(NvJitLinkError) as caught:
        nvjitlink.link([("LTOIR", lto_ir(CALLER))], ["-arch=sm_90", "-lto"])
    assert caught.value.function == "nvJitLinkComplete"
    assert "_Z5twicef" in caught.value.log
    assert caught.value.log in str(caught.value)


def test_linking_for_no_arch_is_refused_by_name() -> None:
    with pytest.raises(NvJitLinkError) as caught:
        nvjitlink.link([("LTOIR", lto_ir(CALLED))], ["-lto"])
    assert (caught.value.function, caught.value.name) == ("nvJitLinkCreate", "NVJITLINK_ERROR_MISSING_ARCH")
    assert "-arch=sm_90" in caught.value.hint


@pytest.mark.parametrize("option", ["-arch=sm_1", "-no-such-option"])
def test_an_option_that_nvrtc_does_not_take_is_in_the_log(option: str) -> None:
    with pytest.raises(NvrtcError) as caught:
        nvrtc.compile(CALLED, options=[option])
    assert (caught.value.function, caught.value.name) == ("nvrtcCompileProgram", "NVRTC_ERROR_INVALID_OPTION")
    assert option.split("=", maxsplit=1)[0] in caught.value.log


def test_warnings_of_what_compiles_are_kept() -> None:
    made = nvrtc.compile("__global__ void run() { int unused; }", name="mine.cu", options=["-arch=sm_90"])
    assert "mine.cu(1): warning" in made.log
    assert "unused" in made.log
