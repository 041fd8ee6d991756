"""A lone request and its end go by words of shared memory: none is lost or doubled, whoever looks there or does not."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.future import Future
from dispatch.supervise.process import child_pool, mailbox, messages, monitor
from dispatch.supervise.process.child_pool import ChildQueue
from dispatch.supervise.process.mailbox import mailbox_file, mailboxes
from dispatch.supervise.process.monitor import Monitor
from dispatch.supervise.process.remote_queue import RemoteQueue, SentRequest
from dispatch.supervise.queue import CANCELLING

PATIENCE = 120  # seconds, on a machine that has other things to do
AWAY = PATIENCE * 10  # seconds between two looks of the monitor thread that nobody asks for
LINKS = 3

pytestmark = pytest.mark.skipif(not mailbox.IS_ORDERED, reason="this processor can have no mailbox")


@pytest.fixture
def boxes():
    """A parent's mailbox and the child's view of it, the last of several in a file."""
    fd = mailbox_file(LINKS)
    near, far = mailboxes(fd, LINKS), mailboxes(fd, LINKS)
    os.close(fd)
    return near[-1], far[-1]


@pytest.fixture
def ends(boxes):
    """A parent's connection and a child's queue at its other end, which looks and does not sleep."""
    near, far = (messages.Connection(end, box) for end, box in zip(socket.socketpair(), boxes, strict=True))
    queue = ChildQueue(0, far)
    yield near, queue
    os.close(queue.bell)
    near.close()
    far.close()


# -- the words ---------------------------------------------------------------------------------------------------------
def test_a_request_is_taken_once(boxes):
    near, far = boxes
    assert far.request() is None
    near.ask(5, 7)
    assert near.asked == 5
    assert far.request() == (5, 7)
    assert far.request() is None
    near.ask(6, 7)
    assert far.request() == (6, 7)


def test_the_largest_number_and_name_that_fit_come_out_and_larger_ones_are_not_put_here(boxes):
    near, far = boxes
    for number, name in ((1 << 40, 1), (1, 1 << 24)):
        near.ask(number, name)
        assert near.asked == 0
        assert far.request() is None
    near.ask((1 << 40) - 1, (1 << 24) - 1)
    assert far.request() == ((1 << 40) - 1, (1 << 24) - 1)


def test_an_end_is_said_only_of_what_was_put_here_and_where_somebody_may_look(boxes):
    near, far = boxes
    near.ask(5, 7)
    assert not far.end(5)
    near.wait_for(5)
    assert not far.end(4)
    assert not far.end((5, b"an error"))
    assert not near.is_ended(5)
    assert far.end(5)
    assert near.is_ended(5)
    assert not near.is_ended(6)
    assert far.is_waited_for(5)
    assert not far.is_heard(5)
    near.found(5)
    assert far.is_heard(5)
    assert not far.is_heard(4)
    for likely in (True, False):
        near.not_found(likely=likely)
        assert not any(asked(number) for asked in (far.is_heard, far.is_waited_for) for number in range(1, 9))
        assert far.end(5) == likely


def test_the_words_of_each_connection_are_its_own():
    fd = mailbox_file(LINKS)
    one, other = mailboxes(fd, LINKS), mailboxes(fd, LINKS)
    os.close(fd)
    for number, box in enumerate(one, start=1):
        box.ask(number, number)
        box.wait_for(number)
    assert [box.request() for box in other] == [(number, number) for number in range(1, LINKS + 1)]
    assert all(box.end(number) for number, box in enumerate(other, start=1))
    assert all(box.is_ended(number) for number, box in enumerate(one, start=1))


# -- the child's side --------------------------------------------------------------------------------------------------
@pytest.fixture
def looks_long(monkeypatch):
    monkeypatch.setattr(child_pool, "AWAKE", PATIENCE)


@pytest.mark.usefixtures("looks_long")
def test_what_was_found_in_the_mailbox_is_not_run_again_when_its_message_comes(ends):
    near, queue = ends
    near.mailbox.ask(5, 7)
    assert queue.next_message([]) == [(5, 7)]
    near.send([(5, 7)])
    others = [(messages.DEFINE, 8, b""), (6, 8), (messages.RUN, 7, (8, 8))]
    near.send([(messages.FORGET, (3,)), (5, 7), *others])
    assert queue.next_message([]) == [(messages.FORGET, (3,)), *others]
    near.mailbox.ask(8, 7)  # the last of the run
    assert queue.link.mailbox.request() is None
    near.mailbox.ask(9, 7)
    assert queue.next_message([]) == [(9, 7)]


@pytest.mark.usefixtures("looks_long")
def test_what_came_as_a_message_first_is_not_run_again_when_it_is_found_in_the_mailbox(ends):
    near, queue = ends
    near.mailbox.ask(5, 7)
    near.send([(5, 7)])
    assert queue.next_message([]) == [(5, 7)]
    near.mailbox.ask(6, 7)
    assert queue.next_message([]) == [(6, 7)]


def test_one_that_is_sent_twice_over_the_connection_runs_twice(ends):
    near, queue = ends
    for _ in range(3):
        near.send([(5, 7)])
        assert queue.next_message([]) == [(5, 7)]


def asked(near, queue, number=5):
    """Have the child take a request from the mailbox."""
    near.mailbox.ask(number, 7)
    near.send([(number, 7)])
    assert queue.next_message([]) == [(number, 7)]


@pytest.mark.usefixtures("looks_long")
@pytest.mark.parametrize("way", ["found", "asked again", "sent again"])
def test_an_end_that_the_parent_finds_in_the_mailbox_does_not_go_over_the_connection(ends, monkeypatch, way):
    monkeypatch.setattr(child_pool, "PATIENCE", PATIENCE)
    near, queue = ends
    near.mailbox.wait_for(5)
    asked(near, queue)
    assert queue.leave_in_mailbox(5)
    assert queue.untold == 5
    near.mailbox.found(5)
    if way == "found":
        monkeypatch.setattr(child_pool, "AWAKE", 0.01)
        assert queue.next_message([]) == []  # it comes back before it sleeps
    elif way == "asked again":
        near.mailbox.ask(6, 7)
        assert queue.next_message([]) == [(6, 7)]
    else:
        near.send([(6, 7)])
        assert queue.next_message([]) == [(6, 7)]
    assert not queue.untold
    assert near.receive(wait=False) is None


@pytest.mark.parametrize("looks", [True, False], ids=["who looks there is slow", "nobody looks there"])
@pytest.mark.parametrize("company", [True, False])
def test_an_end_that_nobody_finds_goes_over_the_connection_before_the_child_sleeps(ends, monkeypatch, looks, company):
    near, queue = ends
    near.mailbox.not_found(likely=True)
    monkeypatch.setattr(child_pool, "AWAKE", PATIENCE)
    asked(near, queue)
    assert queue.leave_in_mailbox(5)
    if looks:
        near.mailbox.wait_for(5)
    if company:
        near.send([(6, 7)])
    monkeypatch.setattr(child_pool, "AWAKE", 0.01)
    assert queue.next_message([]) == ([(6, 7)] if company else [])
    assert near.receive(wait=False) == [5]
    assert near.receive(wait=False) is None
    assert not queue.untold


@pytest.mark.usefixtures("looks_long")
def test_an_end_that_nobody_looks_for_goes_over_the_connection_soon(ends):
    near, queue = ends
    near.mailbox.not_found(likely=True)
    asked(near, queue)
    assert queue.leave_in_mailbox(5)
    looking = threading.Thread(target=lambda: queue.next_message([]))
    looking.start()
    assert messages.ready([near.socket], PATIENCE)
    assert near.receive() == [5]
    near.send([(6, 7)])
    looking.join(PATIENCE)


def test_an_end_is_left_in_the_mailbox_only_by_one_who_goes_on_looking(ends, monkeypatch):
    near, queue = ends
    near.mailbox.not_found(likely=True)
    monkeypatch.setattr(child_pool, "AWAKE", -1.0)
    asked(near, queue)
    assert not queue.leave_in_mailbox(5)  # it has looked too long for that one
    assert not near.mailbox.is_ended(5)


# -- the parent's side, without threads --------------------------------------------------------------------------------
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
        callbacks_failed=lambda _: None,
        is_own_thread=lambda: False,
        ring=lambda: None,
    )
    queue = RemoteQueue(0, 64, pool)
    pool.queues = [queue]
    queue.link = near
    return queue, far, listened


def known(queue, name):
    queue.defined.add(name)
    bound = object.__new__(SentRequest)
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
        assert box.end(number)
        assert future.result(PATIENCE) == "result 7"
        assert box.is_heard(number)
        assert listened == ([False, True] if number == 2 else [])
    assert not queue.sent
    assert queue.done == 4
    far.link.send([4])  # as a child does that was too late to see it
    assert queue.take(queue.link)
    assert queue.done == 4


def test_an_end_that_comes_over_the_connection_after_others_in_the_mailbox_is_found(alone):
    queue, far, listened = alone
    request = known(queue, 7)
    box = far.link.mailbox
    box.words[mailbox.HEARD] = mailbox.LIKELY
    future = put(queue, request)
    assert box.end(1)
    future.result(PATIENCE)
    future = put(queue, request)
    far.link.send([2])
    listened.clear()
    assert future.result(PATIENCE) == "result 7"
    assert listened == []
    assert not queue.link.mailbox.found_last


def test_one_who_waits_for_what_is_not_sent_yet_finds_no_end_in_an_empty_mailbox(alone):
    queue, far, _ = alone
    future = Future(known(queue, 7))
    future._queue = queue
    queue.pending.append(future)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert not queue.link.mailbox.found_last
    assert not far.link.mailbox.words[mailbox.HEARD]


def test_one_who_waits_long_says_so_before_it_sleeps(alone):
    queue, far, listened = alone
    request, box = known(queue, 7), far.link.mailbox
    queue.link.mailbox.found_last = True
    future = put(queue, request)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert listened == [False, True]
    assert not box.end(1)  # so the child says it over the connection
    far.link.send([1])
    assert future.result(PATIENCE) == "result 7"


def test_of_one_that_has_a_callback_the_end_in_the_mailbox_is_left_to_the_monitor_thread(alone):
    queue, far, _ = alone
    box = far.link.mailbox
    box.words[mailbox.HEARD] = mailbox.LIKELY
    future = put(queue, known(queue, 7))
    called = []
    future.add_done_callback(called.append)
    assert box.end(1)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert not box.is_heard(1)
    far.link.send([1])
    queue.take(queue.link)  # as that does
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


# -- with a child ------------------------------------------------------------------------------------------------------
@pytest.fixture
def sup(trouble, monkeypatch):
    monkeypatch.setattr(monitor, "TICK", AWAY)
    with dp.Supervisor("host", streams=1, isolation="process", setup=(trouble.__name__,)) as made:
        yield made
    made.device.close()


def request_of(sup):
    a = sup.device.array(np.eye(4, dtype=np.float32))
    return dp.MatmulRequest(a, a, out=sup.device.zeros((4, 4)))


def told(future):
    """Set once the callbacks of a future are called."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def test_each_of_many_in_turn_reads_what_the_one_before_has_written_and_runs_once(sup):
    """Were one lost, doubled or out of order, a cell would be another number."""
    device, turns = sup.device, 2000
    one, total, count = (device.array(np.full((1, 1), value, np.float32)) for value in (1, 0, 0))
    add = dp.MatmulRequest(one, one, c=count, out=count)
    add_that = dp.MatmulRequest(count, one, c=total, out=total)
    for _ in range(turns // 2):
        sup.submit(add).result(PATIENCE)
        sup.submit(add_that).result(PATIENCE)
    assert count.numpy() == turns // 2
    assert total.numpy() == sum(range(turns // 2 + 1))


def test_one_by_one_with_pauses_waited_for_in_any_way_all_are_told(sup, rng):
    """The monitor thread looks at nothing of itself: an end that nobody is told of is never found."""
    request, draw = request_of(sup), random.Random(int(rng.integers(1 << 32)))
    for turn in range(3000):
        future = sup.submit(request)
        way = draw.randrange(5)
        if way == 0:
            assert told(future).wait(PATIENCE), turn
        elif way == 1:
            with contextlib.suppress(TimeoutError):
                future.result(draw.uniform(0, 1e-4))
            assert told(future).wait(PATIENCE), turn
        else:
            if way == 2:
                pause(draw.uniform(0, 1e-4))
            future.result(PATIENCE)
        if draw.random() < 0.3:
            pause(draw.choice([1e-5, 3e-5, 1e-4, 1e-3]))


def pause(seconds):
    """Without a sleep, that would take longer."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def mapped_mailboxes():
    gc.collect()  # those of earlier tests' children
    return sum("memfd:mailboxes" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_child_that_is_killed_at_any_moment_costs_no_future(trouble, rng):
    draw, before_all = random.Random(int(rng.integers(1 << 32))), mapped_mailboxes()
    with dp.Supervisor(
        "host", streams=1, isolation="process", setup=(trouble.__name__,), max_restarts=1000, spare=True
    ) as sup:
        request = request_of(sup)
        for _ in range(8):
            sup.submit(request).result(PATIENCE)
            before = sup.generation
            killer = threading.Timer(draw.uniform(0, 2e-3), os.kill, [sup._pool._child.process.pid, signal.SIGKILL])
            killer.start()
            while sup.generation == before:
                sup.submit(request).result(PATIENCE)
            killer.join()
    sup.device.close()
    assert mapped_mailboxes() == before_all


def cpu_seconds(pid):
    """What a process has used of processors, with the threads that it has."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_child_and_a_parent_that_have_nothing_to_do_use_no_processor(sup):
    request = request_of(sup)
    for _ in range(500):
        sup.submit(request).result(PATIENCE)
    pids = [os.getpid(), sup._pool._child.process.pid]
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(1)
    used = [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(used) <= 0.03, used


def test_where_there_is_no_mailbox_all_goes_over_the_connection(monkeypatch):
    monkeypatch.setattr(mailbox, "IS_ORDERED", False)
    with dp.Supervisor("host", streams=2, isolation="process") as sup:
        request = request_of(sup)
        for _ in range(200):
            sup.submit(request).result(PATIENCE)
        assert all(queue.link.mailbox is None for queue in sup._pool.queues)
    sup.device.close()
