"""Compiled kernels on disk: private, sound or not there at all, and packs that only load whole."""

import hashlib
import json
import os
import stat
import tracemalloc
import zipfile
import zlib

import pytest

from dispatch.errors import DispatchError
from dispatch.libraries.nvrtc.kernel_cache import BadPack, Entry, Store

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


def test_a_pack_is_not_written_where_a_link_leads(kept, tmp_path):
    kept.put(ENTRY)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f"pack.{os.getpid()}.part").symlink_to(precious)
    with pytest.raises(DispatchError, match="cannot be written"):
        kept.export_pack(tmp_path / "pack")
    assert precious.read_text() == "precious"
    assert kept.export_pack(tmp_path / "pack") == 1, "the link is gone"


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


def damaged(data, rng):
    """A pack with a few bytes changed, cut out or put in, or its end cut off."""
    bad = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        place, kind = int(rng.integers(len(bad))), int(rng.integers(4))
        if kind == 0:
            bad[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            bad[place : place + int(rng.integers(1, 30))] = b""
        elif kind == 2:
            bad[place:place] = rng.bytes(int(rng.integers(1, 30)))
        else:
            del bad[max(place, 1) :]
    return bytes(bad)


def test_every_damage_to_a_pack_is_one_clear_error(kept, tmp_path, rng):
    small = Entry(ENTRY.kernel, ENTRY.toolchain, ENTRY.target, ENTRY.label, 2.0, b"\x7fELF" + bytes(50))
    kept.put(small)
    kept.put(OTHER)
    kept.export_pack(tmp_path / "pack")
    data, bad = (tmp_path / "pack").read_bytes(), tmp_path / "bad"
    refusals = []
    for _ in range(500):
        bad.write_bytes(damaged(data, rng))
        elsewhere = Store(tmp_path / "elsewhere")
        try:
            taken = elsewhere.import_pack(bad)
        except BadPack as error:
            refusals.append(str(error))
        else:
            assert set(taken) <= {small, OTHER}  # what was damaged says nothing, such as a date
    assert len(refusals) > 350
    assert all(str(bad) in text and text.isprintable() for text in refusals)


def pack_of(path, **entries):
    with zipfile.ZipFile(path, "w") as pack:
        pack.writestr("pack", "dispatch-kernels-1")
        for name, data in entries.items():
            pack.writestr(name, data)


def sealed(facts, code):
    body = (facts if isinstance(facts, bytes) else json.dumps(facts).encode()) + b"\n" + code
    return b"dispatch-kernel-1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


FACTS = {"kernel": "k", "toolchain": "t", "target": "sm_90a", "label": "l", "seconds": 1.0}


def test_a_pack_that_would_inflate_to_gigabytes_is_refused_before_it_does(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("dispatch.libraries.nvrtc.kernel_cache.LARGEST_CODE", 4 << 20)
    stream = zlib.compressobj(9)
    zeros = bytes(1 << 20)
    bomb = b"".join(stream.compress(zeros) for _ in range(100)) + stream.flush()
    path = tmp_path / "pack"
    pack_of(path, k=sealed(FACTS, bomb))
    outer = tmp_path / "outer"
    with zipfile.ZipFile(outer, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("pack", "dispatch-kernels-1")
        pack.writestr("k", bytes(100 << 20))
    tracemalloc.start()
    for each in (path, outer):
        with pytest.raises(BadPack):
            kept.import_pack(each)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20


def test_many_kernels_that_would_inflate_to_gigabytes_are_refused_before_they_do(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("dispatch.libraries.nvrtc.kernel_cache.MAX_CODE", 8 << 20)
    packed = zlib.compress(bytes(3 << 20), 9)
    path = tmp_path / "pack"
    pack_of(path, **{name: sealed(FACTS | {"kernel": name}, packed) for name in "abcdefgh"})
    tracemalloc.start()
    with pytest.raises(BadPack, match="holds more than 8388608 bytes of kernels"):
        kept.import_pack(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20
    assert files(kept) == []
    pack_of(path, **{name: sealed(FACTS | {"kernel": name}, packed) for name in "ab"})
    assert len(kept.import_pack(path)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "\x1b[31m"}, {"seconds": float("nan")}, {"seconds": -1}, {"seconds": True}, {"seconds": None},
        {"label": "\x1b]0;mine\x07"}, {"label": 5}, {"label": "a\nb"}, {"label": "x" * 10_000}, {"target": None},
        {"toolchain": []}, {"kernel": {}}, {"more": 1}, {"label": "\u202e"}, {"seconds": 10**400}, {"seconds": 1e300},
    ],
    ids=str,
)  # fmt: skip
def test_facts_of_another_type_or_with_escapes_are_no_entry(kept, tmp_path, change):
    data = sealed(FACTS | change, zlib.compress(b"code"))
    assert Entry.unpack(sealed(FACTS, zlib.compress(b"code"))).code == b"code"
    assert Entry.unpack(data) is None
    pack_of(tmp_path / "pack", k=data)
    with pytest.raises(BadPack, match="damaged"):
        kept.import_pack(tmp_path / "pack")


@pytest.mark.parametrize("facts", [b"[]", b"5", b"null", b"{", b"[" * 100_000, b'{"kernel": 1}'])
def test_facts_that_are_no_facts_are_no_entry(facts):
    assert Entry.unpack(sealed(facts, zlib.compress(b"code"))) is None


def test_names_in_a_pack_are_shown_without_escapes(kept, tmp_path):
    pack_of(tmp_path / "pack", **{"\x1b[2Jmine": ENTRY.pack()})
    with pytest.raises(BadPack) as caught:
        kept.import_pack(tmp_path / "pack")
    assert str(caught.value).isprintable()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DispatchError, match="CUDABIND_CACHE"):
        Store(tmp_path / "file" / "cutlass")


def test_a_folder_in_which_none_can_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "entries").write_text("")
    with pytest.raises(DispatchError, match="CUDABIND_CACHE"):
        Store(tmp_path)


@pytest.mark.parametrize("above", [0, 1], ids=["a folder in its place", "a file in its folder's place"])
def test_an_entry_that_cannot_be_read_is_none(kept, above):
    kept.put(ENTRY)
    (path,) = files(kept)
    path.unlink()
    if above:
        path.parent.rmdir()
        path.parent.write_text("")
    else:
        path.mkdir()
    assert kept.find(ENTRY.kernel, ENTRY.toolchain) is None
