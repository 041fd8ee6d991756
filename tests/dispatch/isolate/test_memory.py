"""Memory that a child maps: views keep it, and it goes with the last of them."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.block_allocator import GROWTH
from dispatch.errors import BadRequest, Closed, StaleTensor
from dispatch.supervise.process import shared_device as memory
from dispatch.supervise.process.child_device import AttachedHost

spec = importlib.util.spec_from_file_location("mapped_memory", Path(__file__).with_name("mapped_memory.py"))
mapped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mapped)
PATIENCE, LARGE, held, run, device = mapped.PATIENCE, mapped.LARGE, mapped.held, mapped.run, mapped.device

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
    for _ in range(20):  # a sweep that another thread is at is not waited for
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
    old = device.tensor_at((0, 512, 256, 0), "f32", (64,), (1,), False)
    larger = device.tensor_at((0, 512, 1024, 0), "f32", (16, 16), (16, 1), False)
    smaller = device.tensor_at((0, 512, 128, 0), "f32", (32,), (1,), False)
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
