"""Compiling for real, with NVRTC and CUTLASS's headers and no GPU: the machinery with small sources, then kernels."""

import threading

import pytest

from dispatch.errors import DispatchError
from dispatch.keys import BF16, F8E4M3, F32, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass import evt, headers
from dispatch.libraries.cutlass.compile import CompileFailed, first_errors
from dispatch.libraries.cutlass.emit.sm90_gemm import GemmSpec, Source, emit
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.libraries.nvrtc import kernel_cache as store

try:
    headers.find()
    MISSING = ""
except headers.HeadersMissing as missing:
    MISSING = str(missing)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

SMALL = Source('extern "C" __global__ void gemm(float* x) { *x = 1; }', ())


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of this test's own, and nothing in memory."""
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_known", {})
    return tmp_path


def test_the_installed_headers_are_of_versions_that_fit():
    found = headers.find()
    assert found.cutlass.startswith("4.2")
    assert found.cccl.startswith("3.0")
    assert set(found.texts) == set(headers.AMENDMENTS)
    assert "record_tensor_map" in found.texts["cute/atom/copy_traits_sm90_tma.hpp"]


@pytest.mark.usefixtures("fresh")
def test_a_kernel_is_compiled_in_another_process_and_kept():
    code = compiler.request(SMALL, "sm_90", "small").result()
    assert code.startswith(b"\x7fELF")
    ((_, entry),) = store.store().entries()
    assert (entry.label, entry.target, entry.code) == ("small", "sm_90", code)
    assert "NVRTC 1" in entry.toolchain
    assert "CUTLASS 4.2" in entry.toolchain


@pytest.mark.usefixtures("fresh")
def test_it_is_read_from_disk_the_next_time(monkeypatch):
    code = compiler.request(SMALL, "sm_90", "small").result()
    monkeypatch.setattr(compiler, "_known", {})
    monkeypatch.setattr(compiler, "_compilers", None)  # a compilation would fail now
    assert compiler.request(SMALL, "sm_90", "small").result() == code


@pytest.mark.usefixtures("fresh")
def test_a_damaged_entry_is_compiled_again(monkeypatch):
    code = compiler.request(SMALL, "sm_90", "small").result()
    ((path, _),) = store.store().entries()
    path.write_bytes(path.read_bytes()[:-20])
    monkeypatch.setattr(compiler, "_known", {})
    assert compiler.request(SMALL, "sm_90", "small").result() == code
    assert store.store().find(compiler.kernel_id(SMALL, "sm_90"), compiler.toolchain()).code == code


@pytest.mark.usefixtures("fresh")
def test_a_second_request_waits_for_the_first():
    futures = []
    threads = [
        threading.Thread(target=lambda: futures.append(compiler.request(SMALL, "sm_90", "small"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(future) for future in futures}) == 1
    futures[0].result()
    assert len(list(store.store().entries())) == 1


def test_another_target_and_another_text_are_other_kernels():
    ids = {compiler.kernel_id(SMALL, "sm_90"), compiler.kernel_id(SMALL, "sm_80")}
    assert len(ids | {compiler.kernel_id(Source(SMALL.text + "\n", ()), "sm_90")}) == 3


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_does_not_compile_is_named_with_its_error_and_its_log():
    source = Source('template <class T> struct X { static_assert(sizeof(T) > 4, "too small"); }; X<int> x;', ())
    with pytest.raises(CompileFailed, match=r"NVRTC does not compile relu of bf16: .*too small") as caught:
        compiler.request(source, "sm_90", "relu of bf16").result()
    assert len(str(caught.value)) < 600
    with open(caught.value.log, encoding="utf-8") as file:
        text = file.read()
    assert "X<int>" in text
    assert source.text in text
    assert not list(store.store().entries())
    with pytest.raises(CompileFailed):  # it is tried again, and not remembered as a failure for good
        compiler.request(source, "sm_90", "relu of bf16").result()


def test_a_log_that_cannot_be_kept_does_not_hide_what_the_compiler_said(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("CUDABIND_CACHE", str(fresh / "file"))
    with pytest.raises(CompileFailed, match=r"The full log is in no file: .*Not a directory"):
        compiler.request(Source("no such thing;", ()), "sm_90", "nothing").result()


def test_without_a_toolchain_only_what_was_imported_is_there(fresh, monkeypatch):
    code = compiler.request(SMALL, "sm_90", "small").result()
    store.store().export_pack(fresh / "pack")
    monkeypatch.setenv("CUDABIND_CACHE", str(fresh / "elsewhere"))
    monkeypatch.setattr(compiler, "_known", {})
    monkeypatch.setattr(compiler, "toolchain", lambda: None)

    def nothing():
        raise headers.HeadersMissing("no headers here")

    monkeypatch.setattr(headers, "find", nothing)
    with pytest.raises(headers.HeadersMissing):
        compiler.request(SMALL, "sm_90", "small").result()
    store.store().import_pack(fresh / "pack")
    assert compiler.request(SMALL, "sm_90", "small").result() == code


@pytest.mark.usefixtures("fresh")
def test_a_folder_of_somebody_else_is_not_used(monkeypatch):
    monkeypatch.setattr(store.os, "getuid", lambda: 12345)
    store._store.cache_clear()
    with pytest.raises(DispatchError, match="belongs to another user"):
        store.store()


def test_errors_are_told_without_the_templates_around_them():
    log = (
        'a.hpp(7): error: static assertion failed with "no such tile"\n'
        "          detected during instantiation of class X at line 3\n"
        'a.hpp(7): error: static assertion failed with "no such tile"\n'
        "k.cu(2): warning #1: nothing\n"
        'k.cu(9): error: identifier "y" is undefined\n'
    )
    assert first_errors(log) == 'static assertion failed with "no such tile"; identifier "y" is undefined'
    assert first_errors("") == "the compiler process ended without a message"


# -- one kernel with all there is: what a person waits for, once; later it is found in the user's cache ----------------
SHARED = evt.accumulator() + evt.row("bias")
EVERYTHING = GemmSpec(
    arch=Arch(90),
    a=F8E4M3,
    b=F8E4M3,
    c=BF16,
    d=BF16,
    orders=("row", "column", "column", "row"),
    tile=(128, 64, 128),
    cluster=(1, 2),
    schedule="cooperative",
    scheduler="stream_k",
    epilogue=evt.amax(evt.store(evt.sigmoid(SHARED) * SHARED + evt.source() * evt.load("gate"), "aux"), "top"),
    operands=(
        ("bias", Operand("row", F32)),
        ("gate", Operand("load", BF16)),
        ("aux", Operand("store", BF16)),
        ("top", Operand("reduce", F32)),
    ),
)


# 45 s of one core and 3.8 GB, all but 10 s of it in NVRTC's front end; a busy machine takes many times that. All other
# kernels: test_compile_all.py. NVRTC's own -fdevice-time-trace is no help: with it, any kernel here takes 10 GB.
@pytest.mark.timeout(900)
@pytest.mark.compiles
def test_a_kernel_with_everything_compiles():
    code = compiler.request(emit(EVERYTHING), EVERYTHING.target, "test: everything at once").result()
    for symbol in (b"\0gemm\0", b"\0fill\0", b"\0scale\0"):
        assert symbol in code
