"""The words of a mailbox, and the child's side of it: a lone request and its end are taken once."""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path

import pytest

from dispatch.supervise.process import child_pool, mailbox, messages
from dispatch.supervise.process.mailbox import mailbox_file, mailboxes

spec = importlib.util.spec_from_file_location("mailbox_ends", Path(__file__).with_name("mailbox_ends.py"))
mail = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mail)
PATIENCE, LINKS, boxes, ends, asked = mail.PATIENCE, mail.LINKS, mail.boxes, mail.ends, mail.asked

pytestmark = pytest.mark.skipif(not mailbox.IS_ORDERED, reason="this processor can have no mailbox")


# -- the words ---------------------------------------------------------------------------------------------------------
def test_a_request_is_taken_once(boxes):
    near, far = boxes
    assert far.request() is None
    near.announce_request(5, 7)
    assert near.announced == 5
    assert far.request() == (5, 7)
    assert far.request() is None
    near.announce_request(6, 7)
    assert far.request() == (6, 7)


def test_the_largest_number_and_name_that_fit_come_out_and_larger_ones_are_not_put_here(boxes):
    near, far = boxes
    for number, name in ((1 << 40, 1), (1, 1 << 24)):
        near.announce_request(number, name)
        assert near.announced == 0
        assert far.request() is None
    near.announce_request((1 << 40) - 1, (1 << 24) - 1)
    assert far.request() == ((1 << 40) - 1, (1 << 24) - 1)


def test_an_end_is_said_only_of_what_was_put_here_and_where_somebody_may_look(boxes):
    near, far = boxes
    near.announce_request(5, 7)
    assert not far.announce_end(5)
    near.wait_for(5)
    assert not far.announce_end(4)
    assert not far.announce_end((5, b"an error"))
    assert not near.is_ended(5)
    assert far.announce_end(5)
    assert near.is_ended(5)
    assert not near.is_ended(6)
    assert far.is_waited_for(5)
    assert not far.is_confirmed(5)
    near.confirm_end(5)
    assert far.is_confirmed(5)
    assert not far.is_confirmed(4)
    for likely in (True, False):
        near.expect_message(likely=likely)
        assert not any(asked(number) for asked in (far.is_confirmed, far.is_waited_for) for number in range(1, 9))
        assert far.announce_end(5) == likely


def test_the_words_of_each_connection_are_its_own():
    fd = mailbox_file(LINKS)
    one, other = mailboxes(fd, LINKS), mailboxes(fd, LINKS)
    os.close(fd)
    for number, box in enumerate(one, start=1):
        box.announce_request(number, number)
        box.wait_for(number)
    assert [box.request() for box in other] == [(number, number) for number in range(1, LINKS + 1)]
    assert all(box.announce_end(number) for number, box in enumerate(other, start=1))
    assert all(box.is_ended(number) for number, box in enumerate(one, start=1))


# -- the child's side --------------------------------------------------------------------------------------------------
@pytest.fixture
def looks_long(monkeypatch):
    monkeypatch.setattr(child_pool, "POLL_SECONDS", PATIENCE)


@pytest.mark.usefixtures("looks_long")
def test_what_was_found_in_the_mailbox_is_not_run_again_when_its_message_comes(ends):
    near, queue = ends
    near.mailbox.announce_request(5, 7)
    assert queue.next_message([]) == [(5, 7)]
    near.send([(5, 7)])
    others = [(messages.DEFINE, 8, b""), (6, 8), (messages.RUN, 7, (8, 8))]
    near.send([(messages.FORGET, (3,)), (5, 7), *others])
    assert queue.next_message([]) == [(messages.FORGET, (3,)), *others]
    near.mailbox.announce_request(8, 7)  # the last of the run
    assert queue.link.mailbox.request() is None
    near.mailbox.announce_request(9, 7)
    assert queue.next_message([]) == [(9, 7)]


@pytest.mark.usefixtures("looks_long")
def test_what_came_as_a_message_first_is_not_run_again_when_it_is_found_in_the_mailbox(ends):
    near, queue = ends
    near.mailbox.announce_request(5, 7)
    near.send([(5, 7)])
    assert queue.next_message([]) == [(5, 7)]
    near.mailbox.announce_request(6, 7)
    assert queue.next_message([]) == [(6, 7)]


def test_one_that_is_sent_twice_over_the_connection_runs_twice(ends):
    near, queue = ends
    for _ in range(3):
        near.send([(5, 7)])
        assert queue.next_message([]) == [(5, 7)]


@pytest.mark.usefixtures("looks_long")
@pytest.mark.parametrize("way", ["found", "asked again", "sent again"])
def test_an_end_that_the_parent_finds_in_the_mailbox_does_not_go_over_the_connection(ends, monkeypatch, way):
    monkeypatch.setattr(child_pool, "CONFIRM_SECONDS", PATIENCE)
    near, queue = ends
    near.mailbox.wait_for(5)
    asked(near, queue)
    assert queue.announce_end(5)
    assert queue.unconfirmed == 5
    near.mailbox.confirm_end(5)
    if way == "found":
        monkeypatch.setattr(child_pool, "POLL_SECONDS", 0.01)
        assert queue.next_message([]) == []  # it comes back before it sleeps
    elif way == "asked again":
        near.mailbox.announce_request(6, 7)
        assert queue.next_message([]) == [(6, 7)]
    else:
        near.send([(6, 7)])
        assert queue.next_message([]) == [(6, 7)]
    assert not queue.unconfirmed
    assert near.receive(wait=False) is None


@pytest.mark.parametrize("looks", [True, False], ids=["who looks there is slow", "nobody looks there"])
@pytest.mark.parametrize("company", [True, False])
def test_an_end_that_nobody_finds_goes_over_the_connection_before_the_child_sleeps(ends, monkeypatch, looks, company):
    near, queue = ends
    near.mailbox.expect_message(likely=True)
    monkeypatch.setattr(child_pool, "POLL_SECONDS", PATIENCE)
    asked(near, queue)
    assert queue.announce_end(5)
    if looks:
        near.mailbox.wait_for(5)
    if company:
        near.send([(6, 7)])
    monkeypatch.setattr(child_pool, "POLL_SECONDS", 0.01)
    assert queue.next_message([]) == ([(6, 7)] if company else [])
    assert near.receive(wait=False) == [5]
    assert near.receive(wait=False) is None
    assert not queue.unconfirmed


@pytest.mark.usefixtures("looks_long")
def test_an_end_that_nobody_looks_for_goes_over_the_connection_soon(ends):
    near, queue = ends
    near.mailbox.expect_message(likely=True)
    asked(near, queue)
    assert queue.announce_end(5)
    looking = threading.Thread(target=lambda: queue.next_message([]))
    looking.start()
    assert messages.wait_readable([near.socket], PATIENCE)
    assert near.receive() == [5]
    near.send([(6, 7)])
    looking.join(PATIENCE)


def test_an_end_is_left_in_the_mailbox_only_by_one_who_goes_on_looking(ends, monkeypatch):
    near, queue = ends
    near.mailbox.expect_message(likely=True)
    monkeypatch.setattr(child_pool, "POLL_SECONDS", -1.0)
    asked(near, queue)
    assert not queue.announce_end(5)  # it has looked too long for that one
    assert not near.mailbox.is_ended(5)
