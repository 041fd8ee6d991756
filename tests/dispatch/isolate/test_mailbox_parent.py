"""The parent's side of a mailbox, without threads: what goes there, and who finds the end."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from dispatch.supervise.future import Future
from dispatch.supervise.process import mailbox, monitor
from dispatch.supervise.process.monitor import Monitor
from dispatch.supervise.process.remote_queue import RemoteBound, RemoteQueue
from dispatch.supervise.queue import CANCELLING

spec = importlib.util.spec_from_file_location("mailbox_ends", Path(__file__).with_name("mailbox_ends.py"))
mail = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mail)
PATIENCE, boxes, ends = mail.PATIENCE, mail.boxes, mail.ends

pytestmark = pytest.mark.skipif(not mailbox.IS_ORDERED, reason="this processor can have no mailbox")


@pytest.fixture
def alone(ends):
    """A parent's queue, the child's, and what the monitor thread was told of whether to listen."""
    near, far = ends
    listened = []

    def listen(link, *, on):
        link.listened = on
        listened.append(on)

    pool = SimpleNamespace(
        numbers=iter(range(1, 10_000)),
        names=iter([1]),
        device=SimpleNamespace(taints=False),
        state=0,
        ordered=False,
        blocked=0,
        release_reader=False,
        listen=listen,
        on_callback_errors=lambda _: None,
        is_own_thread=lambda: False,
        wake_monitor=lambda: None,
    )
    queue = RemoteQueue(0, 64, pool)
    pool.queues = [queue]
    queue.link = near
    return queue, far, listened


def known(queue, name):
    queue.defined.add(name)
    bound = object.__new__(RemoteBound)
    bound.pool, bound.name, bound.data = queue.pool, name, b"packed"
    bound.unallocated, bound.result = {}, f"result {name}"
    return SimpleNamespace(bound=bound)


def put(queue, request):
    future = Future(request)
    future._queue = queue
    queue.pending.append(future)
    queue.wake()
    return future


def test_a_known_request_goes_both_ways_and_is_taken(alone):
    queue, far, _ = alone
    future = put(queue, known(queue, 7))
    assert far.link.mailbox.request() == (1, 7)
    assert far.link.receive(wait=False) == [(1, 7)]
    assert far.link.receive(wait=False) is None
    assert list(queue.sent) == [1]
    assert (len(queue.pending), len(queue.taken), queue.unframed, queue.busy) == (0, 0, [], 1)
    assert not future.cancel()
    assert future.running()


@pytest.mark.parametrize("how", ["unknown", "with new outputs", "another supervisor's", "withdrawn"])
def test_what_is_not_known_goes_by_itself_over_the_connection_if_at_all(alone, how):
    queue, far, _ = alone
    request = known(queue, 7)
    bound = request.bound
    if how == "unknown":
        queue.defined.clear()
    elif how == "with new outputs":
        bound.unallocated = {"out": ()}
    elif how == "another supervisor's":
        bound.pool = SimpleNamespace(queues=[])
    future = Future(request)
    queue.pending.append(future)
    if how == "withdrawn":
        future.cancel()
    with contextlib.suppress(AttributeError):  # of what stands in for a request and a pool here
        queue.wake()
    assert far.link.mailbox.request() is None


def test_one_that_finds_another_in_flight_goes_over_the_connection_alone(alone):
    queue, far, _ = alone
    request = known(queue, 7)
    put(queue, request)
    assert far.link.mailbox.request() == (1, 7)
    put(queue, request)
    assert far.link.mailbox.request() is None
    assert far.link.receive() + far.link.receive() == [(1, 7), (2, 7)]


def test_a_supervisor_that_cancels_what_is_queued_asks_for_nothing(alone):
    queue, far, _ = alone
    queue.pool.state = CANCELLING
    put(queue, known(queue, 7))
    assert far.link.mailbox.request() is None
    assert len(queue.pending) == 1


def test_an_end_in_the_mailbox_is_found_and_the_monitor_thread_is_not_disturbed_for_the_next(alone):
    queue, far, listened = alone
    request = known(queue, 7)
    box = far.link.mailbox
    future = put(queue, request)
    far.link.send([1])  # nobody has looked into the mailbox yet
    assert future.result(PATIENCE) == "result 7"
    assert listened == [False, True]
    for number in (2, 3, 4):
        listened.clear()
        future = put(queue, request)
        assert box.announce_end(number)
        assert future.result(PATIENCE) == "result 7"
        assert box.is_confirmed(number)
        assert listened == ([False, True] if number == 2 else [])
    assert not queue.sent
    assert queue.done == 4
    far.link.send([4])  # as a child does that was too late to see it
    assert queue.read_report(queue.link)
    assert queue.done == 4


def test_an_end_that_comes_over_the_connection_after_others_in_the_mailbox_is_found(alone):
    queue, far, listened = alone
    request = known(queue, 7)
    box = far.link.mailbox
    box.words[mailbox.CONFIRMED] = mailbox.LIKELY
    future = put(queue, request)
    assert box.announce_end(1)
    future.result(PATIENCE)
    future = put(queue, request)
    far.link.send([2])
    listened.clear()
    assert future.result(PATIENCE) == "result 7"
    assert listened == []
    assert not queue.link.mailbox.last_was_found


def test_one_who_waits_for_what_is_not_sent_yet_finds_no_end_in_an_empty_mailbox(alone):
    queue, far, _ = alone
    future = Future(known(queue, 7))
    future._queue = queue
    queue.pending.append(future)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert not queue.link.mailbox.last_was_found
    assert not far.link.mailbox.words[mailbox.CONFIRMED]


def test_one_who_waits_long_says_so_before_it_sleeps(alone):
    queue, far, listened = alone
    request, box = known(queue, 7), far.link.mailbox
    queue.link.mailbox.last_was_found = True
    future = put(queue, request)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert listened == [False, True]
    assert not box.announce_end(1)  # so the child says it over the connection
    far.link.send([1])
    assert future.result(PATIENCE) == "result 7"


def test_of_one_that_has_a_callback_the_end_in_the_mailbox_is_left_to_the_monitor_thread(alone):
    queue, far, _ = alone
    box = far.link.mailbox
    box.words[mailbox.CONFIRMED] = mailbox.LIKELY
    future = put(queue, known(queue, 7))
    called = []
    future.add_done_callback(called.append)
    assert box.announce_end(1)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert not box.is_confirmed(1)
    far.link.send([1])
    queue.read_report(queue.link)  # as that does
    assert called == [future]


class Racing:
    """An epoll object at which something else happens just before a change of what is listened to takes place."""

    def __init__(self):
        self.mask, self.before = monitor.IN, None

    def modify(self, _, mask):
        before, self.before = self.before, None
        if before is not None:
            before()
        self.mask = mask


@pytest.mark.parametrize("before", [True, False], ids=["with the lock", "behind it"])
def test_a_link_is_listened_to_though_its_reader_ends_just_as_the_monitor_thread_turns_away(alone, before):
    queue, _, _ = alone
    link, watch = queue.link, Monitor()
    watch.poll = Racing()
    queue.recv_lock.acquire()

    def end_of_reading():
        """As in RemoteQueue: turned on with the lock and behind it, if it is found to be off."""
        if before and not link.listened:
            watch.listen(link, on=True)
        queue.recv_lock.release()
        if not link.listened and not queue.recv_lock.locked():
            watch.listen(link, on=True)

    watch.poll.before = end_of_reading
    assert watch._read(queue) is None
    assert link.listened
    assert watch.poll.mask & monitor.IN
