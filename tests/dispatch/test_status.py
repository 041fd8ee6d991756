"""What a running supervisor says of itself: `stats()`, and the board that answers other processes."""

import gc
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.supervise import status_server as status

spec = importlib.util.spec_from_file_location("boards", Path(__file__).with_name("boards.py"))
boards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(boards)
TIMEOUT, _time_to_answer = boards.TIMEOUT, boards._time_to_answer


def test_counts_are_kept_by_worker(probe):
    entered, release = threading.Event(), threading.Event()
    with dp.Supervisor("host", streams=2) as sup:
        sup.submit_many([probe() for _ in range(10)], worker=1)[-1].result(TIMEOUT)
        sup.submit(probe(lambda: (entered.set(), release.wait(TIMEOUT))), worker=0)
        assert entered.wait(TIMEOUT)
        sup.submit_many([probe() for _ in range(3)], worker=0)
        stats = sup.stats()
        release.set()
    zero, one = stats.workers
    assert (zero.queued, zero.running, zero.done) == (3, 1, 0)
    assert (one.queued, one.running, one.done) == (0, 0, 10)
    assert (stats.queued, stats.running, stats.done, stats.generation) == (3, 1, 10, 1)
    assert stats.bytes_in_use is None


def test_a_board_says_what_stats_does(probe):
    with dp.Supervisor("host", streams=3) as sup, dp.Supervisor("host", streams=1):
        sup.submit(probe()).result(TIMEOUT)
        first, second = status.ask(os.getpid())
        stats = sup.stats()
    assert {name: first[name] for name in ("done", "queued", "failed", "restarts", "p50", "p99")} == {
        name: getattr(stats, name) for name in ("done", "queued", "failed", "restarts", "p50", "p99")
    }
    assert (first["device"], first["isolation"], first["state"], first["version"]) == ("host", "thread", "open", 1)
    assert (len(first["workers"]), len(second["workers"])) == (3, 1)
    assert status.ask(os.getpid()) == []


def test_a_board_goes_with_its_supervisor():
    threads, before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with dp.Supervisor("host", streams=1):
            assert len(status.socket_names(os.getpid())) == 1
        assert status.socket_names(os.getpid()) == []
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, before)


def test_a_board_does_not_keep_a_dropped_supervisor(drop):
    sup = dp.Supervisor("host", streams=1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dispatch host status"]
    left = [sup]
    del sup
    drop(left)
    gc.collect()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert status.socket_names(os.getpid()) == []


def test_a_supervisor_says_that_it_is_broken(probe):
    with dp.Supervisor("host", streams=1, max_restarts=0) as sup:
        assert sup.submit(probe(lambda: 1 / 0)).exception(TIMEOUT)
        sup._pool.queues[0].worker.thread.join(TIMEOUT)
        (facts,) = status.ask(os.getpid())
    assert (facts["state"], facts["failed"]) == ("broken", 1)


def test_many_ask_at_once():
    with dp.Supervisor("host", streams=1):
        answers = []
        threads = [threading.Thread(target=lambda: answers.extend(status.ask(os.getpid()))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
    assert [facts["state"] for facts in answers] == ["open"] * 16


def test_who_says_nothing_and_who_leaves_keep_nobody_from_asking():
    with dp.Supervisor("host", streams=1):
        (name,) = status.socket_names(os.getpid())
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as gone:
            silent.connect(f"\0{name[1:]}")
            gone.connect(f"\0{name[1:]}")
            gone.close()
            assert len(status.ask(os.getpid())) == 1


OTHER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"\\0dispatch-status-{sys.argv[1]}-7")
listener.listen()
print("ready", flush=True)
listener.accept()[0].sendall(b"{}")
sys.stdin.read()
"""


def test_only_the_process_itself_is_believed():
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(PermissionError, match=f"process {other.pid} answers at the address of"):
            status.ask(os.getpid())
        assert main(["top", str(os.getpid()), "--once"]) == 1
