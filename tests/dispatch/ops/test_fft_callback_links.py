"""Callbacks of transforms by the real compiler and linker: they are linked with what calls them."""

import importlib.util
from pathlib import Path

import pytest

import dispatch as dp
from cudabind import nvjitlink, nvrtc
from dispatch.keys import F32
from dispatch.libraries.cufft import callbacks
from dispatch.ops.fft import cufft_callback
from dispatch.ops.fft.cases import cases

spec = importlib.util.spec_from_file_location("callback_rows", Path(__file__).with_name("callback_rows.py"))
callback_rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callback_rows)
stand_in, ROWS, compiler = callback_rows.stand_in, callback_rows.ROWS, callback_rows.compiler


# As cuFFT's own kernels have them: C++ functions by their names alone, without namespace and extern "C".
CALLERS = {
    "load": """extern __device__ PAIR dispatch_load(void*, unsigned long long, void*, void*);
extern "C" __global__ void caller(PAIR* y, void* data, void* info)
{ y[threadIdx.x] = dispatch_load(data, threadIdx.x, info, nullptr); }""",
    "store": """extern __device__ void dispatch_store(void*, unsigned long long, PAIR, void*, void*);
extern "C" __global__ void caller(const PAIR* y, void* data, void* info)
{ dispatch_store(data, threadIdx.x, y[threadIdx.x], info, nullptr); }""",
}


@pytest.mark.compiles
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_callbacks_are_linked_with_a_kernel_that_calls_them(row, compiler, rng):
    if nvjitlink.nvJitLinkVersion()[0] != compiler[0]:
        pytest.skip("nvJitLink is of another CUDA than NVRTC")
    for case in cases(row)[:8:3]:
        work = cufft_callback._CallbackProblem(case.request(dp.device("host"), rng))
        _, source, target = cufft_callback._dense_spec(work)
        for side in (work.load(source, is_direct=False).side, work.store(target, is_direct=False).side):
            made = callbacks.callback_routine(side, "sm_90")
            pair = (
                ("float2" if side.real is F32 else "double2")
                if side.number.is_complex
                else ("float", "double")[side.real is not F32]
            )
            caller = nvrtc.compile(CALLERS[side.name].replace("PAIR", pair), options=("-arch=sm_90", *callbacks.LTO))
            linked = nvjitlink.link([("LTOIR", made.code), ("LTOIR", caller.code)], ("-arch=sm_90", "-lto"))
            assert linked[:4] == b"\x7fELF"
            assert (made.symbol, CALLERS[side.name].count(made.symbol)) == (f"dispatch_{side.name}", 2)
            assert stand_in.CALLBACKS[made.kind] == (side.name, side.number.numpy.type)


def test_what_cufft_links_has_no_kernel(rng):
    """Beside one it links no callback: no plan could be made on an H100."""
    for row in ROWS:
        for case in cases(row)[::6]:
            work = cufft_callback._CallbackProblem(case.request(dp.device("host"), rng))
            counted = cufft_callback._dense_spec(work)
            sides = (
                ()
                if counted is None
                else (work.load(counted[1], is_direct=True), work.store(counted[2], is_direct=True))
            )
            for one in sides:
                assert "__global__" not in callbacks.source_of(one.side)
                assert f"__global__ void {one.side.name}_pass" in callbacks.source_of(one.side, as_pass=True)


@pytest.mark.compiles
@pytest.mark.usefixtures("compiler")
def test_the_passes_and_what_writes_operands_compile_for_a_gpu(rng):
    from dispatch.libraries.nvrtc.compiled import compiled

    options = ("-arch=sm_75", *callbacks.OPTIONS)
    assert len(compiled(callbacks.WRITE_WORDS, "write_words", options)) > 1000
    for row in ROWS[:2]:
        for case in cases(row)[::6]:
            work = cufft_callback._CallbackProblem(case.request(dp.device("host"), rng))
            counted = cufft_callback._dense_spec(work)
            for side in () if counted is None else (work.load(counted[1], is_direct=True).side,):
                assert len(compiled(callbacks.source_of(side, as_pass=True), "load_pass", options)) > 1000
