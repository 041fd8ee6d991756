"""cuTENSOR's caches on disk: kernels that it compiled and plans that it tuned, over its stand-in; and broken files."""

import importlib.util
import json
import multiprocessing
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CutensorError
from dispatch.__main__ import main
from dispatch.errors import BadRequest
from dispatch.execute import private_files as private
from dispatch.execute.library_cache import LibraryCache, Stored
from dispatch.table.cutensor import GPU_ROWS


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cutensor_stand_in.py")
ROW = next(row for row in GPU_ROWS if (row.op, row.dtypes[0], row.compute.name) == ("contract", "f32", "COMPUTE_32F"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def process(monkeypatch):
    """An executor as another process has it: with a library that knows nothing yet."""
    return lambda: stand_in.executor_of(monkeypatch)


def planned(executor, rng, extent=3, **choices):
    """The plan of a contraction, and what runs it and looks at the result."""
    dev = dp.device("host")
    a, b = (dev.array(rng.standard_normal((extent, extent)).astype("f4")) for _ in range(2))
    out = dev.zeros((extent, extent), "f32")
    request = dp.ContractRequest("ik,kj->ij", a, b, out=out, **choices)
    plan = ROW.call(request, executor, ROW)

    def run():
        out.copy_from(np.full(out.shape, np.nan, "f4"))
        plan.enqueue(request.arguments({}))
        np.testing.assert_allclose(out.numpy(), a.numpy() @ b.numpy(), rtol=1e-5, atol=1e-5)
        return executor.library.executed[-1][2]  # the kernel

    return plan, run


def test_compiled_kernels_are_there_in_the_next_process(folder, process, rng):
    first = process()
    planned(first, rng, jit=True)[1]()
    (path,) = folder.iterdir()
    assert re.fullmatch(r"library-kernels-NVIDIA-H100-cutensor-2-8-1\.cache", path.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = process()
    assert not second.library.kernels
    planned(second, rng, jit=False)
    assert not second.library.kernels  # nobody asked for them
    planned(second, rng, 4, jit=True)
    assert second.library.kernels > first.library.kernels  # what was there, and another one
    assert len(json.loads(Stored.unpack(path.read_bytes()).data)[1]) == 2
    before = path.stat().st_mtime_ns
    planned(second, rng, 4, jit=True)
    assert path.stat().st_mtime_ns == before  # nothing new: nothing is written
    assert [one.name for one in folder.iterdir()] == [path.name]  # and nothing left beside it


def test_what_two_processes_compile_is_all_kept(process, rng):
    first = process()
    planned(first, rng, 3, jit=True)
    second = process()
    second.library.kernels.add("of the second")
    planned(second, rng, 5, jit=True)
    third = process()
    planned(third, rng, 3, jit=True)
    assert "of the second" in third.library.kernels
    assert len(third.library.kernels) == 3


def test_kernels_are_tried_one_a_call_until_the_fastest_stays(process, rng):
    executor = process()
    plan, run = planned(executor, rng, incremental_count=3)
    assert [run() for _ in range(6)] == [0, 1, 2, 1, 1, 1]  # the stand-in's second best is the fastest
    assert plan.is_tuned
    assert plan.capture_safe  # from then on it may become a graph
    assert not planned(process(), rng, incremental_count=2)[0].capture_safe


def test_what_was_tried_is_there_until_all_of_it_has_run(process, rng):
    executor = process()
    library, log = executor.library, []
    executor.stream.synchronize = lambda: log.append(("waits", library.destroyed.count("plan")))
    write = library.cutensorHandleWritePlanCacheToFile
    library.cutensorHandleWritePlanCacheToFile = lambda *given: log.append("writes") or write(*given)
    _, run = planned(executor, rng, incremental_count=3)
    for _ in range(5):
        run()
    assert log == [("waits", 0), "writes"]
    assert library.destroyed.count("plan") == 3


def test_what_was_tuned_is_there_in_the_next_process(folder, process, rng):
    _, run = planned(process(), rng, incremental_count=3)
    for _ in range(3):
        run()
    assert [path.name for path in folder.iterdir()] == ["library-plans-NVIDIA-H100-cutensor-2-8-1.cache"]
    executor = process()
    _, run = planned(executor, rng, incremental_count=3)
    assert [run() for _ in range(4)] == [1, 1, 1, 1]
    assert executor.library.plans_kept == 1024
    _, run = planned(executor, rng, 4, incremental_count=2)  # the handle has read them: nothing is forgotten
    assert [run() for _ in range(3)] == [0, 1, 1]
    assert len(executor.library.tried) == 2


DAMAGE = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "no line": lambda data: data.replace(b"\n", b" ", 1),
    "another format": lambda data: data.replace(b'"format": 1', b'"format": 2', 1),
    "another GPU": lambda data: data.replace(b"H100", b"H200", 1),
    "another version": lambda data: data.replace(b"2.8.1", b"2.9.0", 1),
    "no text": lambda data: b"\xff\xfe" + data,
    "deep": lambda _: b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_file_never_reaches_the_library_and_is_written_anew(folder, process, rng, damage):
    planned(process(), rng, jit=True)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    executor = process()
    executor.library.reads = False
    planned(executor, rng, 3, jit=True)[1]()
    assert path.read_bytes() == whole


def test_what_the_library_refuses_is_written_anew(folder, process, rng):
    planned(process(), rng, jit=True)
    (path,) = folder.iterdir()
    executor = process()
    executor.library.broken = True
    planned(executor, rng, 7, jit=True)[1]()
    assert len(json.loads(Stored.unpack(path.read_bytes()).data)[1]) == 1  # what this process has


@pytest.mark.parametrize("change", ["a link", "others may write", "a folder", "no folder"])
def test_what_is_not_this_users_own_is_as_if_it_were_not_there(folder, process, rng, change):
    planned(process(), rng, jit=True)
    (path,) = folder.iterdir()
    if change == "a link":
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    elif change == "others may write":
        path.chmod(0o666)
    elif change == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.unlink()
        folder.rmdir()
        folder.write_text("no folder")
    executor = process()
    planned(executor, rng, 5, jit=True)[1]()
    assert len(executor.library.kernels) == 1


def test_what_cannot_be_written_is_no_error(process, rng, monkeypatch):
    executor = process()

    def fails(*_):
        raise CutensorError("cutensor", "cutensorWriteKernelCacheToFile", 24, "CUTENSOR_STATUS_IO_ERROR")

    monkeypatch.setattr(executor.library, "cutensorWriteKernelCacheToFile", fails)
    planned(executor, rng, jit=True)[1]()


def add(folder, name):
    """One process of many: it knows one thing, and keeps all."""
    cache, known = LibraryCache("things", "GPU", "lib-1.0", folder), {name}

    def read(path):
        known.update(json.loads(Path(os.fsdecode(path)).read_bytes()))

    def write(path):
        Path(os.fsdecode(path)).write_bytes(json.dumps(sorted(known)).encode())

    assert cache.save(write, read)


def test_processes_at_once_keep_all(folder):
    jobs = [multiprocessing.get_context("fork").Process(target=add, args=(folder, f"{n}")) for n in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
        assert job.exitcode == 0
    (path,) = folder.iterdir()
    assert json.loads(Stored.unpack(private.read(path)).data) == [f"{n}" for n in range(8)]


def test_the_command_line_shows_and_clears_them(folder, process, rng, capsys):
    planned(process(), rng, jit=True)
    (path,) = folder.iterdir()
    (folder / f"{path.name}x7").write_bytes(b"left behind")
    assert main(["cache", "--json"]) == 0
    good, left = json.loads(capsys.readouterr().out)["caches"]
    assert (good["kind"], good["gpu"], good["library"], good["state"]) == (
        *("kernels", "NVIDIA H100", "cutensor-2.8.1", "good"),
    )
    assert left["state"].startswith("damaged")
    assert main(["cache"]) == 0
    assert re.search(r"NVIDIA H100 +cutensor-2\.8\.1 +kernels", capsys.readouterr().out)
    assert main(["cache", "clear"]) == 0
    assert not [*folder.iterdir()]


def test_incremental_autotune_and_another_choice_are_one_or_the_other():
    a = dp.device("host").zeros((2, 2), "f32")
    for choices in ({"autotune": True}, {"algo": "ttgt"}, {"kernel_rank": 1}):
        with pytest.raises(BadRequest, match="incremental_count: got 4 with autotune, algo or kernel_rank"):
            dp.contract("ik,kj->ij", a, a, incremental_count=4, **choices)
    with pytest.raises(BadRequest, match="incremental_count: got 0"):
        dp.contract("ik,kj->ij", a, a, incremental_count=0)
    assert (dp.contract("ik,kj->ij", a, a, incremental_count=4).numpy() == 0).all()
