"""`python -m dispatch cache` over compiled kernels: list, export, import, clear; and what it refuses."""

import json

import pytest

from dispatch.__main__ import main
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
from dispatch.libraries.nvrtc.kernel_cache import Entry, store

ENTRY = Entry("k" * 64, "NVRTC 13.0", "sm_90a", "relu of bf16", 20.5, b"\x7fELF" + bytes(2000))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "here"))
    return tmp_path


def told(capsys, *words):
    assert main(["cache", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_kernels_are_listed_with_what_they_are(folder, capsys):
    assert told(capsys)["kernels"] == []
    store().put(ENTRY)
    (kernel,) = told(capsys)["kernels"]
    assert (kernel["label"], kernel["target"], kernel["state"]) == ("relu of bf16", "sm_90a", "good")
    assert str(folder) in kernel["path"]
    assert main(["cache"]) == 0
    assert "sm_90a  20 s" in capsys.readouterr().out


def test_doctor_counts_kernels_too(folder, capsys):
    store().put(ENTRY)
    assert main(["doctor", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache == {"folder": str(folder / "here"), "exists": True, "files": 0, "kernels": 1}
    assert main(["doctor"]) == 0
    assert f"{folder / 'here'}, 0 files of autotune, 1 compiled kernels\n" in capsys.readouterr().out


def test_a_damaged_kernel_is_listed_as_such(folder, capsys):
    store().put(ENTRY)
    path = told(capsys)["kernels"][0]["path"]
    with open(path, "wb") as file:
        file.write(b"not ours")
    assert told(capsys)["kernels"][0]["state"].startswith("damaged")
    assert str(folder) in path


def test_kernels_go_to_another_machine_in_a_pack(folder, capsys, monkeypatch):
    store().put(ENTRY)
    pack = str(folder / "kernels.pack")
    assert told(capsys, "export", pack) == {"file": pack, "kernels": 1}
    monkeypatch.setenv("CUDABIND_CACHE", str(folder / "there"))
    assert told(capsys, "import", pack, "--arch", "sm_100a") == {"file": pack, "kernels": 0}
    assert told(capsys, "import", pack) == {"file": pack, "kernels": 1}
    assert store().find(ENTRY.kernel, None) == ENTRY


@pytest.mark.usefixtures("folder")
def test_clear_removes_them(capsys):
    store().put(ENTRY)
    assert told(capsys, "clear")["removed"] == 1
    assert told(capsys)["kernels"] == []


def test_precompiling_needs_nothing_where_no_row_is_meant(folder, capsys):
    assert told(capsys, "precompile", "--op", "pooling") == {"kernels": 0}
    assert folder.exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "cache export needs a file"),
        (["import"], "cache import needs a file"),
        (["list", "x"], "cache list takes no file"),
        (["import", "/nowhere/pack"], "/nowhere/pack is not a pack of kernels: No such file or directory\n"),
    ],
)
def test_what_cannot_be_done_is_said(words, message, capsys):
    assert main(["cache", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_kernel_that_won_a_race_is_named(folder, capsys):
    cache = AlgorithmCache("H200", "cublasLt-13.1", folder / "here")
    cache.put("matmul", "of a library alone", Algorithm(bytes(range(64)), 4096))
    facts = {"row": "matmul", "kernel": "128x256 cluster 2x1", "config": [], "id": "1f"}
    cache.put("matmul by CUTLASS", "bf16[64, 64]", Algorithm(json.dumps(facts).encode(), 0))
    (entry,) = told(capsys)["files"]
    assert entry["algorithms"] == 2
    assert entry["won"] == {"matmul by CUTLASS bf16[64, 64]": "128x256 cluster 2x1"}
    assert main(["cache"]) == 0
    assert "128x256 cluster 2x1  matmul by CUTLASS bf16[64, 64]" in capsys.readouterr().out


ESCAPES = "\x1b[2J\x9b31m\x07\u202emine"


def test_what_is_in_files_is_shown_without_escapes(folder, capsys):
    cache = AlgorithmCache(f"GPU{ESCAPES}", f"lib{ESCAPES}", folder / "here")
    facts = {"kernel": f"k{ESCAPES}"}
    cache.put("op", f"key{ESCAPES}", Algorithm(json.dumps(facts).encode(), 0))
    for words in (["cache"], ["cache", "--json"], ["cache", "clear"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable()
    assert main(["cache", "import", f"/nowhere/{ESCAPES}"]) == 2
    assert capsys.readouterr().err.strip().isprintable()


@pytest.mark.parametrize(
    "stored",
    [
        [], 5, None, "x", {"stamp": 1}, {"stamp": {}, "algorithms": []}, {"stamp": {"gpu": 1, "library": []}},
        {"stamp": {"gpu": 1, "library": {}}, "algorithms": {"a": 1}},
        {"stamp": {"gpu": 1, "library": {}}, "algorithms": {"a": [5, 5]}},
        {"stamp": {"gpu": 1, "library": {}}, "algorithms": {"a": ["W" * 50, 5, 6]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_of_anything_is_listed(folder, stored, capsys):
    (folder / "here").mkdir(mode=0o700)
    path = folder / "here" / "autotune-x.json"
    path.write_text(json.dumps(stored))
    path.chmod(0o600)
    assert main(["cache"]) == 0
    assert str(path) in capsys.readouterr().out


def test_files_of_others_are_listed_and_not_looked_into(folder, capsys):
    cache = AlgorithmCache("H200", "lib", folder / "here")
    cache.put("op", "key", Algorithm(b"1", 0))
    cache.path.chmod(0o666)
    (entry,) = told(capsys)["files"]
    assert (entry["algorithms"], entry["gpu"]) == (0, None)
