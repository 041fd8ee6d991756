"""Frames arrive whole and in order, and requests and errors come out as they went in, without their arrays."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections import deque

import numpy as np
import pytest

import dispatch as dp
from dispatch.ops.matmul.scales import NO_SCALES
from dispatch.supervise.cuda_worker import BATCH
from dispatch.supervise.process import child_pool, messages
from dispatch.supervise.process.child_pool import ChildQueue
from dispatch.supervise.process.child_workers import HostChild
from dispatch.supervise.process.shared_device import SharedHost


@pytest.fixture
def pair():
    ends = [messages.Connection(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def home():
    device = SharedHost()
    yield device
    device.close()


MESSAGE = [1, (2, 3), (-1, 7, b"bytes"), (4, 5, ((0, 512, 1024),)), 2**60, "text", 0.5, None]


def test_a_message_comes_out_as_it_went_in(pair):
    one, other = pair
    one.send(MESSAGE)
    one.send([])
    assert other.receive() == MESSAGE
    assert other.receive() == []
    assert other.receive(wait=False) is None


def test_a_frame_that_comes_in_pieces_is_put_together(pair):
    one, other = pair
    whole = [bytes(200_000), 7]
    sender = threading.Thread(target=one.send, args=(whole,))
    sender.start()
    assert other.receive() == whole
    sender.join()
    for byte in messages.LENGTH.pack(5):
        assert other.receive(wait=False) is None
        one.socket.send(bytes([byte]))
    assert other.receive(wait=False) is None


def test_the_end_of_the_other_process_is_told(pair):
    one, other = pair
    one.send([1])
    one.close()
    assert other.receive() == [1]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        other.send([1])


def test_a_request_comes_out_with_the_same_tensors_and_fields(home, rng):
    a, b = (home.array(rng.standard_normal((6, 6)), "f32") for _ in range(2))
    bias = home.array(rng.standard_normal(12), "f32")[2:8]
    fields = {"epilogue": dp.Epilogue.RELU_BIAS, "alpha": 0.5, "compute": dp.Compute.COMPUTE_32F, "workspace": 0}
    request = dp.MatmulRequest(a, b.mT, bias=bias, **fields)
    assert request.shape == (6, 6)  # a cached property, which must not cross
    seen = []

    def at(place, dtype, shape, strides, readonly):
        seen.append((place.chunk, place.offset + place.start, dtype, shape, strides, readonly))
        return next(
            t for t in (request.a, request.b, request.bias) if messages.location_of(t) == place and t.shape == shape
        )

    data = messages.pack_request(request, home)
    clone = messages.unpack_request(data, home, at)
    assert len(data) < 1000
    assert [(clone.a, clone.b, clone.bias)] == [(request.a, request.b, request.bias)]
    assert {name: getattr(clone, name) for name in fields} == fields
    assert clone.scales is NO_SCALES
    assert "shape" not in vars(clone)
    start = request.bias.ptr - home.chunks[0].base
    assert seen[2] == (0, start, "f32", (6,), (1,), False)
    assert seen[1][4] == (1, 6)


def test_scales_cross_with_their_tensors(home):
    a, b = home.array(np.ones((16, 16)), "f8e4m3"), home.array(np.ones((16, 16)), "f8e4m3").mT
    request = dp.MatmulRequest(a, b, scales=dp.Scales(a=home.array([2.0], "f32"), b=0.5))
    tensors = {messages.location_of(t): t for _, t, _ in request.tensors()}
    clone = messages.unpack_request(messages.pack_request(request, home), home, lambda place, *_: tensors[place])
    assert clone.scales.a is request.scales.a
    assert (clone.scales.b, clone.scales.a_mode) == (0.5, request.scales.a_mode)


def test_a_request_over_other_memory_is_refused(home):
    elsewhere = dp.device("host").array(np.ones((2, 2)))
    with pytest.raises(dp.errors.BadRequest, match=r"sup\.device\.array"):
        messages.pack_request(dp.MatmulRequest(elsewhere, elsewhere), home)


def test_a_request_that_does_not_pickle_says_so(home):
    a = home.array(np.ones((2, 2)))
    request = dp.MatmulRequest(a, a)
    object.__setattr__(request, "out_dtype", threading.Lock())
    with pytest.raises(dp.errors.BadRequest, match="pickle"):
        messages.pack_request(request, home)


class TwoWords(Exception):
    """Cannot be made from its args."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_errors_come_out_with_their_fields_and_cause():
    cause = ValueError("why")
    error = dp.errors.BadRequest("a", "this", "that", "do so")
    error.__cause__ = cause
    clone = messages.unpack_error(messages.pack_error(error))
    assert (type(clone), clone.operand, clone.hint, str(clone)) == (dp.errors.BadRequest, "a", "do so", str(error))
    assert (type(clone.__cause__), str(clone.__cause__)) == (ValueError, "why")


def test_an_error_that_does_not_pickle_comes_out_in_its_words():
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoWords("half", "way")))
    clone = messages.unpack_error(messages.pack_error(TwoWords("half", "way")))
    assert isinstance(clone, dp.errors.WorkerFailed)
    lost = "TwoWords: half way (raised in the child process, with its type lost: it cannot be pickled: TypeError("
    assert str(clone).startswith(lost)


def test_a_request_that_no_message_can_hold_is_refused(home, monkeypatch):
    a = home.array(np.ones((2, 2)))
    monkeypatch.setattr(messages, "LARGEST", 10)
    with pytest.raises(dp.errors.BadRequest, match="at most 10 bytes"):
        messages.pack_request(dp.MatmulRequest(a, a), home)


class NoError(Exception):
    """Comes out as something else."""

    def __reduce__(self):
        return str, ("no error",)


def test_what_does_not_come_out_as_an_error_comes_out_in_its_words():
    clone = messages.unpack_error(messages.pack_error(NoError("half")))
    assert isinstance(clone, dp.errors.WorkerFailed)
    assert str(clone).startswith("NoError: half (raised in the child process, with its type lost: it cannot be pickled")


def test_an_error_whose_class_is_known_on_one_side_only_comes_out_in_its_words(monkeypatch):
    class Private(Exception):
        pass

    Private.__qualname__ = "Private"
    monkeypatch.setattr(sys.modules[__name__], "Private", Private, raising=False)
    data = messages.pack_error(Private("of the child"))
    monkeypatch.undo()
    clone = messages.unpack_error(data)
    assert isinstance(clone, dp.errors.WorkerFailed)
    assert str(clone).startswith("Private: of the child (raised in the child process, with its type lost: it cannot be")
    assert "cannot be rebuilt in this one: AttributeError(" in str(clone)


def test_an_error_that_ends_the_process_when_it_is_rebuilt_comes_out_in_its_words():
    clone = messages.unpack_error(pickle.dumps(("Leaving: half way", b"csys\nexit\n(tR.")))
    assert isinstance(clone, dp.errors.WorkerFailed)
    assert str(clone).startswith("Leaving: half way (raised in the child process, with its type lost: it cannot be reb")
    assert isinstance(clone.__cause__, SystemExit)


# -- how a worker of the child waits for messages ----------------------------------------------------------------------
@pytest.fixture
def queues(pair):
    """Of two workers; the message of the first comes from `pair[1]`."""
    ends = socket.socketpair()
    made = [ChildQueue(0, pair[0]), ChildQueue(1, messages.Connection(ends[0]))]
    yield made
    for queue in made:
        os.close(queue.wake_fd)
    for end in ends:
        end.close()


def counted(link, monkeypatch):
    """The reads of a connection that do not wait, and what follows the first of those that do."""
    looks, receive = [], link.receive
    monkeypatch.setattr(link, "receive", lambda *, wait=True: looks.append(wait) or receive(wait=wait))
    return looks


@pytest.mark.parametrize("asleep", [True, False], ids=["others sleep", "another is awake"])
def test_a_worker_looks_for_a_message_only_while_all_others_sleep(pair, queues, monkeypatch, asleep):
    mine, other = queues
    other.asleep = asleep
    monkeypatch.setattr(child_pool, "POLL_SECONDS", 0.05)
    looks = counted(mine.link, monkeypatch)
    found = []
    thread = threading.Thread(target=lambda: found.append(mine.next_message([other])))
    thread.start()
    ends = time.monotonic() + 120
    while not mine.asleep and time.monotonic() < ends:
        time.sleep(0.001)
    assert mine.asleep  # it gives up looking
    pair[1].send(MESSAGE)
    thread.join(120)
    assert found == [MESSAGE]
    assert not mine.asleep
    assert looks.count(False) > 10 if asleep else looks.count(False) == 1
    assert looks[-1] is True


def test_a_worker_that_looks_finds_what_comes_without_sleeping(pair, queues, monkeypatch):
    mine, other = queues
    other.asleep = True
    monkeypatch.setattr(child_pool, "POLL_SECONDS", 120.0)
    looks = counted(mine.link, monkeypatch)
    sender = threading.Timer(0.05, pair[1].send, [MESSAGE])
    sender.start()
    assert mine.next_message([other]) == MESSAGE
    assert True not in looks
    sender.join()


def test_a_worker_whose_looks_find_nothing_looks_more_and_more_rarely_until_one_does(pair, queues, monkeypatch):
    mine, other = queues
    other.asleep = True
    looks = counted(mine.link, monkeypatch)
    monkeypatch.setattr(child_pool, "POLL_SECONDS", -1.0)  # too short for anything to come
    looked = []
    for number in range(300):
        looks.clear()
        pair[1].send([number])
        assert mine.next_message([other]) == [number]
        if False in looks:
            looked.append(number)
    assert looked == [0, 3, 8, 17, 34, 67, 132, 197, 262]
    monkeypatch.setattr(child_pool, "POLL_SECONDS", 120.0)
    for number in range(200):
        looks.clear()
        pair[1].send([number])
        assert mine.next_message([other]) == [number]
    assert looks == [False]


def test_a_worker_takes_what_has_come_at_once_up_to_a_batch_and_in_order(pair, queues):
    worker = object.__new__(HostChild)
    worker.queue, worker.others, worker.jobs = queues[0], [queues[1]], deque()
    for first in range(0, 3 * BATCH, 16):
        pair[1].send(list(range(first, first + 16)))
    for count in (1, 2, 3):
        worker.receive(wait=count == 1)
        assert list(worker.jobs) == list(range((count - 1) * BATCH, count * BATCH))
        worker.jobs.clear()
    worker.receive(wait=False)
    assert not worker.jobs


def test_the_end_of_the_parent_ends_the_wait(pair, queues):
    mine, other = queues
    pair[1].close()
    for other.asleep in (True, False):
        for _ in range(3):  # one that looks, and those that do not
            with pytest.raises(EOFError):
                mine.next_message([other])
            assert not mine.asleep


def test_a_pause_is_as_short_as_it_is_asked_to_be(queues):
    """One of whole milliseconds made a request of 0.15 ms take 1.3."""
    took = []
    for _ in range(200):
        began = time.perf_counter()
        queues[0].wait(100e-6)
        took.append(time.perf_counter() - began)
    assert 100e-6 <= min(took) < 900e-6


@pytest.mark.parametrize("seconds", [-1, 120.0])
def test_a_pause_ends_with_a_message_or_a_wake_up_and_the_one_for_wake_ups_with_these_alone(pair, queues, seconds):
    mine = queues[0]
    pair[1].send(MESSAGE)
    mine.wait(seconds)
    mine.wait_for_wakeup(0.01)
    assert mine.link.receive(wait=False) == MESSAGE
    for wait in (mine.wait, mine.wait_for_wakeup):
        thread = threading.Timer(0.01, mine.wake)
        thread.start()
        wait(seconds)
        thread.join()
    began = time.monotonic()
    mine.wait(0.01)  # the wake-ups are used up
    assert time.monotonic() - began >= 0.01
