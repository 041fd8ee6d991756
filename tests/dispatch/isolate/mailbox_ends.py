"""A parent's mailbox and the child's view of it, and connections that have such."""

from __future__ import annotations

import os
import socket

import pytest

from dispatch.supervise.process import messages
from dispatch.supervise.process.child_pool import ChildQueue
from dispatch.supervise.process.mailbox import mailbox_file, mailboxes

PATIENCE = 120  # seconds, on a machine that has other things to do
AWAY = PATIENCE * 10  # seconds between two looks of the monitor thread that nobody asks for
LINKS = 3


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
    os.close(queue.wake_fd)
    near.close()
    far.close()


def asked(near, queue, number=5):
    """Have the child take a request from the mailbox."""
    near.mailbox.announce_request(number, 7)
    near.send([(number, 7)])
    assert queue.next_message([]) == [(number, 7)]
