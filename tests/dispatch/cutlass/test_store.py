"""Compiled kernels on disk: private, sound or not there at all, and packs that only load whole."""

import os
import stat
import zipfile

import pytest

from dispatch.cutlass.store import BadPack, Entry, Store

ENTRY = Entry("k" * 64, "NVRTC 13.0", "sm_90a", "a kernel", 20.5, b"\x7fELF" + bytes(range(256)) * 40)
OTHER = Entry("l" * 64, "NVRTC 13.0", "sm_100a", "another", 18.0, b"\x7fELF and so on")


@pytest.fixture
def kept(tmp_path):
    return Store(tmp_path / "cutlass")


def files(store):
    return [path for path, _ in store.entries()]


def test_what_is_kept_is_found_again_and_by_another_store(kept):
    assert kept.find(ENTRY.kernel, ENTRY.toolchain) is None
    kept.put(ENTRY)
    assert kept.find(ENTRY.kernel, ENTRY.toolchain) == ENTRY
    assert Store(kept.path).find(ENTRY.kernel, ENTRY.toolchain) == ENTRY


def test_another_toolchain_does_not_find_it(kept):
    kept.put(ENTRY)
    assert kept.find(ENTRY.kernel, "NVRTC 13.1") is None
    assert kept.find(ENTRY.kernel, None) is None


def test_the_folder_is_private(kept):
    kept.put(ENTRY)
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o700
    os.chmod(kept.path, 0o755)
    assert stat.S_IMODE(Store(kept.path).path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"\x7fELF, a bare cubin",
        lambda data: data[:-1],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: data.replace(b"sm_90a", b"sm_80a"),
    ],
    ids=["empty", "foreign", "short", "one bit", "another target"],
)
def test_a_damaged_file_is_none_and_is_replaced(kept, damage):
    kept.put(ENTRY)
    (path,) = files(kept)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.find(ENTRY.kernel, ENTRY.toolchain) is None
    kept.put(ENTRY)
    assert kept.find(ENTRY.kernel, ENTRY.toolchain) == ENTRY


def test_an_entry_under_another_kernels_name_is_not_taken_for_it(kept):
    kept.put(ENTRY)
    kept.put(OTHER)
    mine, theirs = sorted(files(kept), key=lambda path: path.stat().st_size, reverse=True)
    theirs.write_bytes(mine.read_bytes())
    assert kept.find(OTHER.kernel, OTHER.toolchain) is None


def test_clearing_leaves_nothing(kept):
    kept.put(ENTRY)
    kept.put(OTHER)
    assert kept.clear() == 2
    assert files(kept) == []


def test_a_pack_loads_where_there_is_no_toolchain(kept, tmp_path):
    kept.put(ENTRY)
    kept.put(OTHER)
    assert kept.export_pack(tmp_path / "pack") == 2
    elsewhere = Store(tmp_path / "elsewhere")
    assert {entry.kernel for entry in elsewhere.import_pack(tmp_path / "pack")} == {ENTRY.kernel, OTHER.kernel}
    assert elsewhere.find(ENTRY.kernel, None) == ENTRY
    assert elsewhere.find(ENTRY.kernel, "a toolchain of another version") == ENTRY


def test_a_pack_is_taken_for_the_architectures_asked_for(kept, tmp_path):
    kept.put(ENTRY)
    kept.put(OTHER)
    kept.export_pack(tmp_path / "pack")
    elsewhere = Store(tmp_path / "elsewhere")
    assert elsewhere.import_pack(tmp_path / "pack", ["sm_90a"]) == [ENTRY]
    assert elsewhere.find(OTHER.kernel, None) is None


def test_a_pack_holds_the_kernels_asked_for(kept, tmp_path):
    kept.put(ENTRY)
    kept.put(OTHER)
    assert kept.export_pack(tmp_path / "pack", [OTHER.kernel]) == 1


@pytest.mark.parametrize("what", ["no zip", "another kind", "a damaged entry", "an entry under another name"])
def test_nothing_of_an_unsound_pack_is_taken(kept, tmp_path, what):
    path = tmp_path / "pack"
    if what == "no zip":
        path.write_bytes(b"not a pack")
    else:
        with zipfile.ZipFile(path, "w") as pack:
            pack.writestr("pack", "something else" if what == "another kind" else "dispatch-kernels-1")
            pack.writestr(ENTRY.kernel, ENTRY.pack())
            damaged = OTHER.pack()[:-2] if what == "a damaged entry" else ENTRY.pack()
            pack.writestr(OTHER.kernel, damaged)
    with pytest.raises(BadPack):
        kept.import_pack(path)
    assert files(kept) == []
