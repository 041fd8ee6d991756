"""Handles that executors leave to one another, and the memory that an executor's plans share."""

from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from dispatch.execute.shared_memory import beyond_workspace, of_size, shared
from dispatch.libraries.handle import lent


class Storage:
    """Memory of a device."""

    def __init__(self, base):
        self.base = base


@pytest.fixture
def executor():
    """An executor with a workspace of 256 bytes; the device gives memory from 4096 on."""
    asked = []

    def allocate(nbytes, stream):
        assert stream == "the executor's"
        asked.append(nbytes)
        return Storage(4096 * len(asked))

    device = SimpleNamespace(allocate=allocate, idle=defaultdict(deque), context=nullcontext(), fault=None)
    workspace = SimpleNamespace(nbytes=256, c_ptr=SimpleNamespace(value=512))
    return SimpleNamespace(
        asked=asked, device=device, stream="the executor's", workspace=workspace, at_close=[], handles={}
    )


def test_plans_share_memory_of_one_power_of_2_and_purpose_as_long_as_one_keeps_it(executor):
    assert shared(executor, 0, "work") is None
    first = shared(executor, 1000, "work")
    assert shared(executor, 1024, "work") is first
    assert shared(executor, 513, "work") is first
    assert of_size(executor, 1024, "work") is first
    other = shared(executor, 1000, "results")
    assert other is not first
    assert executor.asked == [1024, 1024]
    del first
    again = shared(executor, 1024, "work")
    assert executor.asked == [1024, 1024, 1024]
    assert again.base == 3 * 4096


def test_memory_is_allocated_beyond_the_workspace_alone(executor):
    assert beyond_workspace(executor, 0, "work") == beyond_workspace(executor, 256, "work") == (None, 512)
    storage, address = beyond_workspace(executor, 257, "work")
    assert executor.asked == [512]
    assert (storage.base, address) == (4096, 4096)


def test_a_handle_serves_the_next_executor_once_the_first_is_closed(executor):
    made = iter(["first", "second", "third"])
    ask = ("library", lambda: next(made), lambda _: 0)
    assert lent(executor, *ask) == "first"
    assert lent(executor, *ask) == "second"  # of another executor meanwhile
    close = executor.at_close.pop(0)
    close()
    assert [entry[0] for entry in executor.device.idle["library"]] == ["first"]
    assert lent(executor, *ask) == "first"
    executor.device.fault = "lost"
    for close in executor.at_close:
        close()
    assert not executor.device.idle["library"]
