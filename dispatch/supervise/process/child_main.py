"""The main function of a child: starts a worker thread for each stream, each with its own connection to the parent.

`child_process.py` starts it by `main`. If the device is lost, the child reports that on the control connection and
ends; if the parent has ended, it ends at once. It owns no memory that must survive.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from time import monotonic
from typing import Any

from dispatch.errors import error_text
from dispatch.supervise.process import messages
from dispatch.supervise.process.child_device import make_attached_device
from dispatch.supervise.process.child_pool import ChildPool, ChildQueue, chunk_message
from dispatch.supervise.process.child_workers import CudaChild, HostChild
from dispatch.supervise.process.mailbox import mailboxes

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
MAX_TRACEBACK_CHARS = 20_000  # of a message to the parent, which must fit into the socket


def main(words: str) -> None:
    """Run as a child: `words` is JSON with device, control (fd), links (fds), mailboxes (fd), setup (modules), parent
    (pid), started.

    `started` is the parent's time.monotonic(), a clock that all processes share: the child reports how long its start
    took.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the parent until it is ignored
    config = json.loads(words)
    _die_with(config["parent"])
    control = socket.socket(fileno=config["control"])
    for module in config["setup"]:
        _import(module, control)
    imported = monotonic()
    chunks, warm = _wait_for_go(control)
    going = monotonic()
    device = make_attached_device(config["device"])
    pool = ChildPool(device, control, config["completion"])
    for number, (nbytes, fd) in chunks.items():
        device.attach(number, nbytes, fd)
    kind = HostChild if device.is_host else CudaChild
    boxes = mailboxes(config["mailboxes"], len(config["links"]))
    if config["mailboxes"] >= 0:
        os.close(config["mailboxes"])
    for index, (fd, mailbox) in enumerate(zip(config["links"], boxes, strict=True)):
        queue = ChildQueue(index, messages.Connection(socket.socket(fileno=fd), mailbox))
        worker = kind(queue, pool)  # type: ignore[arg-type]  # a ChildPool is a WorkerOwner, but for its device's class
        queue.worker = worker
        pool.workers.append(worker)
    if warm and not device.is_host:
        _warm(device)
    for worker in pool.workers:
        worker.start()
    ready = monotonic()
    pool.send_control(
        "ready", {"import": imported - config["started"], "stand by": going - imported, "open": ready - going}
    )
    pool.listen()


def _import(module: str, control: socket.socket) -> None:
    """Import a module of `setup`; if that fails, this process ends, and the parent is told where and why."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001  # raised by the parent
        text = f"setup: importing {module!r} raised {error_text(error)}"
        lines = "".join(traceback.format_tb(error.__traceback__, -messages.MAX_FRAMES))
        with contextlib.suppress(OSError):  # the parent has ended
            control.send(json.dumps(["setup failed", text, lines[-MAX_TRACEBACK_CHARS:]]).encode())
        sys.exit(1)


def _wait_for_go(control: socket.socket) -> tuple[dict[int, tuple[int, int]], bool]:
    """Wait for "go"; returns the chunks announced until then (bytes and fd of each), and whether to warm up."""
    chunks: dict[int, tuple[int, int]] = {}
    while True:
        first, second, fds = chunk_message(control)
        if first == "go":
            return chunks, second
        if first == "drop":
            for fd in (*(chunks.pop(number)[1] for number in second), *fds):
                os.close(fd)
        else:
            chunks[first] = (second, fds[0])


def _warm(device: Any) -> None:
    """Run a product, which loads its libraries, so that a spare child is as fast as one that has run requests."""
    from dispatch.core.request import run
    from dispatch.ops.matmul.request import MatmulRequest

    a = device.zeros((64, 64))
    run(MatmulRequest(a, a))
    device.synchronize()


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when the parent's thread ends, even if this one is stopped or hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
