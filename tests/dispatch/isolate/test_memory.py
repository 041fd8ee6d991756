"""Memory that a child maps: views keep it, what fails leaves nothing behind, who does not read stops nobody."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.block_allocator import GROWTH
from dispatch.errors import BadRequest, Closed, OutOfMemory, StaleTensor, WorkerFailed
from dispatch.supervise.process import child_process as launch
from dispatch.supervise.process import chunks
from dispatch.supervise.process import shared_device as memory
from dispatch.supervise.process.child_device import AttachedHost

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds, on a machine that has other things to do
MIB = 1 << 20
LARGE = GROWTH + MIB  # bytes of a tensor that gets a chunk of its own


def held() -> tuple[int, int]:
    """How many descriptors of shared memory this process has, and how many mappings."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or another thread's, is closed by now
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:dispatch" in link for link in links), sum("memfd:dispatch" in line for line in maps)


def run(program, *options, **environment):
    """Run a program in a process of its own, for it may crash; returns what it wrote."""
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=10 * PATIENCE,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def device():
    gc.collect()
    before = held()
    made = memory.SharedHost()
    yield made
    made.close()
    gc.collect()
    assert held() == before


# -- views ----------------------------------------------------------------------------------------------------------
VIEWS = """
import gc, itertools
import numpy as np
import dispatch as dp
from dispatch.supervise.process.shared_device import SharedHost

def look(tensor, kind):
    if kind == "numpy":
        return np.asarray(tensor)
    if kind == "slice":
        return np.asarray(tensor[2:, ::-1])[::-1].T
    if kind == "memoryview":
        return memoryview(np.asarray(tensor))
    if kind == "dlpack":
        return np.from_dlpack(tensor)
    import torch
    if kind == "torch":
        return torch.from_dlpack(tensor)
    return torch.from_dlpack(tensor).view(-1)[5:].numpy()

right = np.arange(1 << 14, dtype=np.float32).reshape(1 << 7, 1 << 7)
for how, kind in itertools.product(("closed", "collected", "dropped", "trimmed"), KINDS):
    print(how, kind, flush=True)
    dev = SharedHost()
    tensor = dev.array(right)
    view = look(tensor, kind)
    expected = np.array(view)
    if how == "closed":
        dev.close()
    elif how == "collected":
        dev.close()
        del dev, tensor
    elif how == "dropped":
        del dev, tensor
    elif how == "trimmed":
        del tensor
        dev.trim()
    gc.collect()
    other = SharedHost()
    fill = other.array(np.full(65 << 20, 7, np.uint8))  # would lie where the view does, were that free
    assert (np.array(view) == expected).all()
    np.asarray(view)[...] = 3
    assert (np.asarray(view) == 3).all()
    copies = [np.asarray(view)[1:] for _ in range(3)]
    del view
    gc.collect()
    assert (copies[2] == 3).all()
    other.close()
print("fine")
"""


@pytest.mark.parametrize("kinds", [("numpy", "slice", "memoryview", "dlpack"), ("torch", "torch's numpy")], ids=str)
def test_views_keep_the_memory(kinds):
    if "torch" in kinds:
        pytest.importorskip("torch", reason="torch is not installed")
    assert run(f"KINDS = {kinds!r}\n{VIEWS}").endswith("trimmed " + kinds[-1] + "\nfine\n")


ENDS = """
import atexit, gc, sys, threading
import numpy as np
import dispatch as dp

sup = dp.Supervisor("host", isolation="process", streams=1)
tensor = sup.device.array(np.arange(1000, dtype=np.float32))

class Node:
    def __del__(self):
        assert self.view[999] == 999 and self.view.sum() == 499500

node = Node()
node.self, node.view, node.tensor, node.device = node, np.asarray(tensor), tensor, sup.device  # a cycle
lasting = np.from_dlpack(tensor)
sys.modules["numpy"].lasting = np.asarray(tensor)

def later():
    assert lasting.sum() == 499500
    print("looked", flush=True)

atexit.register(later)
begun = threading.Event()

def reader():
    while True:
        assert lasting[999] == 999
        begun.set()

threading.Thread(target=reader, daemon=True).start()
begun.wait()
{close}
print("end", flush=True)
"""


@pytest.mark.parametrize(
    "close", ["sup.close(); sup.device.close()", "sup.close()", "sup.device.close()", "sup.close(wait=False)", ""]
)
def test_an_interpreter_may_exit_with_views(close):
    assert run(ENDS.format(close=close), "-Wignore") == "end\nlooked\n"


def test_memory_goes_with_the_last_view(device):
    before = held()
    tensor = device.array(np.ones(LARGE, np.uint8))
    views = [np.asarray(tensor), np.from_dlpack(tensor), np.asarray(tensor)[5::7]]
    assert held() == (before[0] + 1, before[1] + 1)
    device.close()
    assert held() == (before[0], before[1] + 1), "the descriptor has gone, the mapping has not"
    del tensor
    while views:
        assert views[-1].min() == 1
        assert held() == (before[0], before[1] + 1)
        views.pop()
        np.from_dlpack(np.ones(1))  # what was consumed of DLPack is swept away by others
    np.from_dlpack(dp.device("host").zeros(1))
    assert held() == before


def test_a_block_is_not_given_to_another_while_a_view_is_left(device):
    tensor = device.array(np.full(1000, 5, np.int64))
    view, lent = np.asarray(tensor), np.from_dlpack(tensor)
    del tensor
    others = [device.array(np.zeros(1000, np.int64)) for _ in range(100)]
    assert (view == 5).all()
    assert (lent == 5).all()
    assert len({other.ptr for other in others}) == 100


def test_a_block_may_be_larger_than_one_before_it_of_which_the_child_knows_a_request():
    device = AttachedHost()
    mapped = os.memfd_create("dispatch test")
    os.ftruncate(mapped, 1 << 16)
    device.attach(0, 1 << 16, mapped)
    old = device.at((0, 512, 256, 0), "f32", (64,), (1,), False)
    larger = device.at((0, 512, 1024, 0), "f32", (16, 16), (16, 1), False)
    smaller = device.at((0, 512, 128, 0), "f32", (32,), (1,), False)
    np.asarray(larger)[:] = 3.0
    np.testing.assert_array_equal(np.asarray(old), np.full(64, 3.0))
    assert old.storage is larger.storage is smaller.storage  # streams are ordered by their uses of it
    assert old.storage.nbytes == 1024


def test_whatever_is_asked_of_a_closed_device_is_refused(device):
    tensor = device.array(np.ones(8, np.float32))
    device.close()
    device.close()
    asked = (
        lambda: device.empty((4,)),
        lambda: device.array(np.ones(3)),
        lambda: device.zeros(3),
        lambda: device.pinned((3,)),
        lambda: device.allocate(64, device.stream()),
        tensor.numpy,
        lambda: np.asarray(tensor),
        lambda: np.from_dlpack(tensor),
        lambda: tensor.copy_from(np.zeros(8, np.float32)),
        lambda: tensor.copy_from_async(np.zeros(8, np.float32)),
        tensor.numpy_async,
        tensor[2:].numpy,
        tensor.item,
        device.synchronize,
        lambda: dp.Supervisor(device, isolation="process"),
        lambda: dp.Supervisor(device),
    )
    for each in asked:
        with pytest.raises(StaleTensor):
            each()
    device.trim()
    assert device.bytes_in_use() in (0, 512)


def test_threads_that_use_a_device_as_it_is_closed_are_told_so():
    gc.collect()  # memory of earlier tests' devices is mapped until then
    before = held()
    for turn in range(20):
        device = memory.SharedHost()
        raised, begun = [], threading.Barrier(4)

        def use(device=device, raised=raised, begun=begun, turn=turn):
            begun.wait()
            kept = []
            try:
                while True:
                    kept.append(device.empty((GROWTH // 4 if turn % 2 else 100,), np.uint8))
                    view = np.asarray(kept[-1])
                    kept = kept[-5:]
                    view[-10:] = 7
                    assert view[-1] == 7
            except BaseException as error:  # noqa: BLE001  # looked at below
                raised.append(error)  # noqa: B023  # the exception's own name

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        device.empty((1,))
        device.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(raised) == 3
        assert {type(error) for error in raised} <= {StaleTensor, Closed}
        del use, device, raised
    gc.collect()
    assert held() == before


def test_each_supervisor_has_memory_of_its_own():
    with (
        dp.Supervisor("host", isolation="process", streams=1) as one,
        dp.Supervisor(one.device, isolation="process", streams=1) as two,
    ):
        assert two.device is not one.device
        ours, theirs = (sup.device.array(np.eye(4, dtype=np.float32)) for sup in (one, two))
        with pytest.raises(BadRequest, match="supervisor's own device"):
            two.submit(dp.MatmulRequest(ours, ours)).result(PATIENCE)
        one.device.close()
        assert (two.submit(dp.MatmulRequest(theirs, theirs)).result(PATIENCE).numpy() == np.eye(4)).all()
    two.device.close()


# -- what fails leaves nothing behind -------------------------------------------------------------------------------
class Failing:
    """Has the n-th of all calls of some functions fail with an errno, as the system would."""

    def __init__(self, monkeypatch, number):
        self.at, self.number, self.calls = 0, number, []
        for owner, name in ((os, "memfd_create"), (os, "ftruncate"), (os, "pipe")):
            monkeypatch.setattr(owner, name, self.wrapped(name, getattr(owner, name)))
        real = chunks._libc.mmap

        class Libc:
            munmap = chunks._libc.munmap

            @staticmethod
            def mmap(*arguments):
                if self.fails("mmap"):
                    chunks.ctypes.set_errno(self.number)
                    return chunks.FAILED
                return real(*arguments)

        monkeypatch.setattr(chunks, "_libc", Libc)

    def fails(self, name):
        self.calls.append(name)
        return len(self.calls) == self.at

    def wrapped(self, name, function):
        def call(*arguments):
            if self.fails(name):
                raise OSError(self.number, os.strerror(self.number))
            return function(*arguments)

        return call


def use_all(device):
    """Allocate, grow, free, trim and allocate once more; nothing of it may fail."""
    kept = {}

    def make(value, nbytes):
        kept[value] = device.empty((nbytes,), np.uint8)
        np.asarray(kept[value])[:100] = np.asarray(kept[value])[-100:] = value
        for number, tensor in kept.items():
            view = np.asarray(tensor)
            assert (view[:100] == number).all()
            assert (view[-100:] == number).all()

    for value in range(1, 4):
        make(value, 1000)
    for value in range(4, 7):
        make(value, LARGE)
    del kept[4], kept[2]
    device.trim()
    make(7, LARGE)
    kept.clear()
    device.trim()
    make(8, 1000)


@pytest.fixture
def little_garbage():
    """Collections look at what a test makes, and not at all that was imported.

    What is frozen stays so: to unfreeze it would undo what conftest.py has frozen for all tests of this process, each
    of whose collections then takes more than a second.
    """
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.usefixtures("little_garbage")
def test_whichever_call_fails_nothing_is_lost_and_memory_is_tried_for_again(monkeypatch, number):
    before = held()
    failing = Failing(monkeypatch, number)
    while True:
        failing.at, failing.calls = failing.at + 1, []
        device = memory.SharedHost()
        device.on_chunks = [].append
        use_all(device)  # one failure is no lack: what is free is given back, and it is tried again
        device.close()
        device = None
        gc.collect()
        assert held() == before
        if len(failing.calls) < failing.at:
            break
    assert failing.at > 10


@pytest.mark.exhaustive
def test_a_lasting_lack_is_told_as_such_and_costs_nothing_else(device, monkeypatch):
    small = device.array(np.arange(10))
    before = held()
    for name in ("memfd_create", "ftruncate"):
        with monkeypatch.context() as patch:
            failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(os, name, lambda *_, failure=failure: (_ for _ in ()).throw(failure))
            for _ in range(3):
                with pytest.raises(OutOfMemory, match=r"MiB of memory that processes can share: .*No space left"):
                    device.empty((LARGE,), "u8")
            assert device.empty((1000,), "u8").nbytes == 1000
        assert held() == before
    assert (small.numpy() == np.arange(10)).all()


@pytest.mark.parametrize(
    "nbytes",
    [1 << 63, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (1 << 50, 1 << 62, (1 << 63) - 1, 1 << 70))],
)
def test_no_size_is_too_large_to_be_refused(device, nbytes):
    before = held()
    with pytest.raises(OutOfMemory):
        device.allocate(nbytes, device.stream())
    assert held() == before


def test_a_defect_while_children_are_told_costs_no_memory(device):
    before = held()

    def broken(_):
        raise RuntimeError("a defect")

    device.on_chunks = broken
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a defect"):
            device.empty((LARGE,), "u8")
    assert held() == before
    assert device.chunks == {}
    device.on_chunks = None
    kept = device.array(np.ones(LARGE, np.uint8))
    del kept
    device.on_chunks = broken
    with pytest.raises(RuntimeError, match="a defect"):
        device.trim()
    assert held() == before


LIMITS = """
import os, resource, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import dispatch as dp
from dispatch.errors import OutOfMemory

def count():
    return len(os.listdir("/proc/self/fd"))

def limited(kind, value):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    return soft, hard

sup = dp.Supervisor("host", isolation="process", streams=1, spare=1)
dev = sup.device
a = dev.array(np.eye(8, dtype=np.float32))
request = dp.MatmulRequest(a, a)
sup.submit(request).result(120)
while len(sup._pool._children()) < 3:
    pass  # those that stand by have their connections
before = count()
"""
AS = """
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
old = limited(resource.RLIMIT_AS, size + (20 << 20))
for _ in range(20):
    try:
        dev.empty((100 << 20,), "u8")
    except OutOfMemory:
        continue
    raise SystemExit("there was memory")
resource.setrlimit(resource.RLIMIT_AS, old)
assert count() == before, (count(), before)
sup.submit(request).result(120)
print("fine")
"""
FILES = """
hold = [dev.empty((65 << 20,), "u8") for _ in range(20)]
hold.clear()
pad = []
old = limited(resource.RLIMIT_NOFILE, 128)
try:
    while True:
        pad.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for _ in range(3):
    hold.append(dev.empty((66 << 20,), "u8"))  # none is large enough: one is given back for each
try:
    while True:
        hold.append(dev.empty((67 << 20,), "u8"))
        if len(hold) > 100:
            raise SystemExit("there were descriptors")
except OutOfMemory as error:
    assert "ulimit -n" in str(error), error
sup.submit(request).result(120)
hold.clear()
dev.trim()
assert len(dev.chunks) == 1, len(dev.chunks)
resource.setrlimit(resource.RLIMIT_NOFILE, old)
for fd in pad:
    os.close(fd)
assert count() == before, (count(), before)
sup.close()
dev.close()
names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
left = [os.readlink(name) for name in names if os.path.islink(name)]
assert not any("memfd" in link for link in left), left
print("fine")
"""


@pytest.mark.parametrize("program", [AS, FILES], ids=["address space", "descriptors"])
def test_at_the_limits_of_the_system_nothing_leaks(program):
    assert run(LIMITS + program) == "fine\n"


# -- children that do not read --------------------------------------------------------------------------------------
@contextmanager
def many_descriptors(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this user may have {hard} descriptors, not {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def finish(thread):
    """Wait for a thread that must not wait for others."""
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("who", ["present", "standing by", "both"])
def test_a_stopped_child_stops_no_allocation(who):
    count = 2000
    with many_descriptors(count + 500), dp.Supervisor("host", isolation="process", streams=2) as sup:
        device, pool = sup.device, sup._pool
        first = device.array(np.full((4, 4), 2, np.float32))
        right = sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy()
        while not pool.standby.children:
            threading.Event().wait(0.01)
        stopped = {"present": [pool._child], "standing by": pool.standby.children, "both": pool._children()}[who]
        for child in list(stopped):
            os.kill(child.process.pid, signal.SIGSTOP)
        tensors = []

        def allocate():
            tensors.extend(device.empty((LARGE,), "u8") for _ in range(count))

        thread = threading.Thread(target=allocate, daemon=True)
        thread.start()
        finish(thread)
        assert len(device.chunks) == count + 1
        assert sup.stats().restarts == 0
        for child in list(stopped):
            os.kill(child.process.pid, signal.SIGCONT)
        for tensor in (tensors[0], tensors[-1], tensors[count // 2]):
            last = dp.Tensor(tensor.storage, tensor.ptr, first.layout)
            last.copy_from(np.full((4, 4), 2, np.float32))
            assert (sup.submit(dp.MatmulRequest(last, last)).result(PATIENCE).numpy() == right).all()
        assert (sup.stats().restarts, sup.generation) == (0, 1)
        assert pool._child._attached == set(device.chunks)
        tensors.clear()
        tensor = last = None
        device.trim()
        assert len(device.chunks) == 1
        assert (sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy() == right).all()
    device.close()


def test_a_stopped_child_that_has_work_is_replaced_by_one_that_has_all_memory():
    count = 700
    with many_descriptors(count + 500), dp.Supervisor("host", isolation="process", streams=1) as sup:
        device = sup.device
        first = device.array(np.full((4, 4), 2, np.float32))
        os.kill(sup._pool._child.process.pid, signal.SIGSTOP)
        tensors = [device.empty((LARGE,), "u8") for _ in range(count)]
        last = dp.Tensor(tensors[-1].storage, tensors[-1].ptr, first.layout)
        last.copy_from(np.eye(4, dtype=np.float32))
        assert (sup.submit(dp.MatmulRequest(first, last)).result(PATIENCE).numpy() == 2).all()
        assert (sup.stats().restarts, sup.generation) == (1, 2)
    device.close()


def test_a_stopped_child_delays_what_is_given_back_by_no_more_than_it_is_given(monkeypatch):
    monkeypatch.setattr(memory, "LET_GO_SECONDS", 0.05)
    with dp.Supervisor("host", isolation="process", streams=1) as sup:
        device = sup.device
        first = device.array(np.full((4, 4), 2, np.float32))
        pid = sup._pool._child.process.pid
        os.kill(pid, signal.SIGSTOP)
        for _ in range(500):
            tensor = device.empty((LARGE,), "u8")
            tensor = None
            if len(device.chunks) > 20:
                device.trim()
            monkeypatch.setattr(memory, "LET_GO_SECONDS", 0.001)
        os.kill(pid, signal.SIGCONT)
        assert (sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy() == 16).all()
        assert sup.generation == 1
    assert tensor is None
    device.close()


ABOVE = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
"""
AFTER = """
import numpy as np, dispatch as dp
with dp.Supervisor("host", isolation="process", streams=3, setup=("many",) * {in_child}, spare=1) as sup:
    a = sup.device.array(np.full((8, 8), 0.5, np.float32))
    before = ()
    for turn in range(60):
        before = [sup.submit(dp.MatmulRequest(a, a), after=before, worker=turn % 3)]
    assert (before[0].result(120).numpy() == 2).all()
    assert sup.stats().restarts == 0 and sup.stats().failed == 0
    if {in_child}:
        highest = max(map(int, __import__("os").listdir(f"/proc/{{sup._pool._child.process.pid}}/fd")))
        assert highest > 1100, highest
print("fine")
"""


@pytest.mark.parametrize("where", ["parent", "child"])
def test_descriptors_above_1023_are_like_others(where, tmp_path):
    (tmp_path / "many.py").write_text(ABOVE)
    with many_descriptors(2048):
        program = (ABOVE if where == "parent" else "") + AFTER.format(in_child=int(where == "child"))
        assert run(program, PYTHONPATH=f"{ROOT}:{tmp_path}") == "fine\n"


KEEPS = """
import numpy as np, trouble
kept = []
run = trouble.HostTrouble.run
def keeping(self, request, outputs):
    kept.extend((np.asarray(request.a), np.from_dlpack(request.out)))
    run(self, request, outputs)
    np.asarray(request.out)[0] = sum(int(view[-1]) for view in kept)
trouble.HostTrouble.run = keeping
"""


def test_views_that_code_in_the_child_keeps_hold_the_memory_there(trouble, tmp_path, monkeypatch):
    (tmp_path / "keeps.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(tmp_path)
    with dp.Supervisor("host", isolation="process", streams=1, setup=("trouble", "keeps"), max_restarts=0) as sup:
        device = sup.device
        for turn in range(1, 4):
            a, out = (device.array(np.ones(GROWTH // 4, np.float32)) for _ in range(2))
            request = trouble.Trouble("fine", a, out)
            assert sup.submit(request).result(PATIENCE).numpy()[0] == 2 * turn
            request = a = out = None
            device.trim()
            assert len(device.chunks) == 0
        assert sup.generation == 1
    device.close()


NO_ROOM = """
import resource
if {limit!r} == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, __import__("os").listdir("/proc/self/fd"))) + 12,) * 2)
else:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (300 << 20),) * 2)
"""


@pytest.mark.parametrize("limit", ["files", "memory"])
def test_a_child_that_cannot_take_what_it_is_given_says_so(limit, tmp_path, monkeypatch):
    (tmp_path / "no_room.py").write_text(NO_ROOM.format(limit=limit))
    monkeypatch.syspath_prepend(tmp_path)
    sup = dp.Supervisor("host", isolation="process", streams=1, setup=("no_room",), max_restarts=0)
    device = sup.device
    a = device.array(np.eye(4, dtype=np.float32))
    assert (sup.submit(dp.MatmulRequest(a, a)).result(PATIENCE).numpy() == np.eye(4)).all()
    big = [device.empty((LARGE,), "u8") for _ in range(8)]
    last = dp.Tensor(big[-1].storage, big[-1].ptr, a.layout)
    last.copy_from(np.eye(4, dtype=np.float32))
    if limit == "files":  # it closes what it has mapped, so it has room for all
        assert (sup.submit(dp.MatmulRequest(a, last)).result(PATIENCE).numpy() == np.eye(4)).all()
    else:
        try:
            error = sup.submit(dp.MatmulRequest(a, last)).exception(PATIENCE)
        except WorkerFailed as refusal:  # the child was lost, and noticed, before that
            error = refusal
        assert isinstance(error, (WorkerFailed, dp.errors.DeviceFault)), error
        assert "a child process cannot map 65 MiB" in f"{error} {error.__cause__}"
    sup.close(wait=False)
    device.close()


# -- the interpreter of a child -------------------------------------------------------------------------------------
TELLS = """
import json, os, sys, warnings
with open(os.environ["TOLD"], "w") as file:
    json.dump([list(sys.flags), sys._xoptions, sys.warnoptions, sys.path], file)
"""
ASKS = """
import json, os, sys
sys.path[:0] = {paths!r}
import dispatch as dp
with dp.Supervisor("host", isolation="process", streams=1, setup=("tells",)) as sup:
    pass
flags, options, warned, path = json.load(open(os.environ["TOLD"]))
assert flags == list(sys.flags), (flags, sys.flags)
assert {{**options}} == sys._xoptions, (options, sys._xoptions)
assert set(warned) == set(sys.warnoptions), (warned, sys.warnoptions)
assert path == sys.path, (path, sys.path)
print("fine")
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-I",),
        ("-I", "-S", "-B"),
        ("-E",),
        ("-s", "-OO"),
        ("-X", "utf8", "-X", "dev"),
        ("-W", "error::UserWarning", "-W", "ignore::DeprecationWarning", "-bb"),
        ("-X", "pycache_prefix={tmp}", "-X", "int_max_str_digits=5000"),
    ],
    ids=" ".join,
)
def test_the_child_is_started_as_its_parent_was(options, tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    told = tmp_path / "told"
    site = [path for path in sys.path if path.endswith("-packages")]
    program = ASKS.format(paths=[str(ROOT), str(tmp_path), *site])
    options = [option.format(tmp=tmp_path / "cache") for option in options]
    assert run(program, *options, TOLD=str(told), PYTHONPATH=str(tmp_path / "nothing")) == "fine\n"
    assert json.loads(told.read_text())


def test_options_of_an_interpreter_are_those_it_was_given():
    for given in (["-I"], ["-O"], ["-OO", "-B"], ["-X", "dev"], ["-W", "error::UserWarning"]):
        program = (
            "from dispatch.supervise.process.child_process import interpreter_options; print(interpreter_options())"
        )
        path = f"import sys; sys.path[:] = {sys.path!r}; "
        said = run(path + program, *given, PYTHONPATH=str(ROOT))
        for word in given:
            assert repr(word) in said
    assert launch.interpreter_options() is not None
