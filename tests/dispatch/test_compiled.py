"""Kernels that NVRTC compiles: once in a process, once on a disk, and anew where something else may come out."""

import pytest

from cudabind import nvrtc
from cudabind.errors import LibraryNotFound, NvrtcError
from dispatch.libraries.nvrtc import compiled as module
from dispatch.libraries.nvrtc.kernel_cache import store

SOURCE = 'extern "C" __global__ void doubled(float* x) { x[threadIdx.x] *= FACTOR; }'
OPTIONS = ("-arch=sm_90", "-DFACTOR=2")


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """What NVRTC is asked for, in a cache of its own."""
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "cache"))
    asked, real = [], nvrtc.compile

    def compile_and_count(source, name, options):
        asked.append((name, *options))
        return real(source, name, options)

    monkeypatch.setattr(nvrtc, "compile", compile_and_count)
    return asked


def compiled(source=SOURCE, options=OPTIONS):
    """As a process would that has compiled nothing yet."""
    module.compiled.cache_clear()
    return module.compiled(source, "doubled", options)


def test_another_process_has_it_from_the_disk(compilations):
    code = compiled()
    assert type(code) is bytes
    assert code.startswith(b"\x7fELF")
    assert compiled() == code
    assert compilations == [("doubled.cu", *OPTIONS)]
    ((_, entry),) = store().entries()
    assert (entry.label, entry.target, entry.code) == ("doubled", "sm_90", code)


@pytest.mark.parametrize("options", [("-arch=sm_80", "-DFACTOR=2"), ("-arch=sm_90", "-DFACTOR=3")], ids=str)
def test_other_options_are_another_kernel(compilations, options):
    assert compiled() != compiled(options=options)
    assert len(compilations) == 2


def test_another_nvrtc_compiles_anew(compilations, monkeypatch):
    compiled()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (99, 9), raising=False)
    compiled()
    assert len(compilations) == 2


@pytest.mark.usefixtures("compilations")
def test_what_a_source_includes_may_have_changed(tmp_path):
    header = tmp_path / "factor.h"
    made = []
    for factor in (2, 3):
        header.write_text(f"#define TIMES {factor}")
        made.append(compiled('#include "factor.h"\n' + SOURCE, ("-arch=sm_90", f"-I{tmp_path}", "-DFACTOR=TIMES")))
    assert made[0] != made[1]
    assert not list(store().entries())


def test_an_error_is_not_kept(compilations):
    for _ in range(2):
        with pytest.raises(NvrtcError, match="FACTOR"):
            compiled(options=OPTIONS[:1])
    assert len(compilations) == 2
    assert not list(store().entries())


def test_a_damaged_file_is_compiled_anew(compilations):
    code = compiled()
    ((path, _),) = store().entries()
    path.write_bytes(b"\x7fELF")
    assert compiled() == code
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_used_costs_the_time_alone(compilations, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "file"))
    assert compiled() == compiled()
    assert len(compilations) == 2


@pytest.mark.usefixtures("compilations")
def test_a_pack_serves_a_machine_without_nvrtc(tmp_path, monkeypatch):
    code = compiled()
    store().export_pack(tmp_path / "pack")
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "elsewhere"))

    def missing(*_):
        raise LibraryNotFound("nvrtc", "it is not there")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing, raising=False)
    monkeypatch.setattr(nvrtc, "compile", missing)
    with pytest.raises(LibraryNotFound):
        compiled()
    store().import_pack(tmp_path / "pack")
    assert compiled() == code
