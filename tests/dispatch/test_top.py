"""`top`, which shows what the supervisors of a process say of themselves, once or until they end."""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.cli.top import with_rates
from dispatch.supervise import status_server as status

spec = importlib.util.spec_from_file_location("boards", Path(__file__).with_name("boards.py"))
boards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(boards)
TIMEOUT, _time_to_answer, own_name = boards.TIMEOUT, boards._time_to_answer, boards.own_name


def test_top_shows_another_process_once(capsys):
    script = (
        "import sys, numpy as np\nimport dispatch as dp\n"
        "with dp.Supervisor('host', streams=2, isolation='process') as sup:\n"
        "    a = sup.device.array(np.eye(4, dtype=np.float32))\n"
        "    for f in sup.submit_many([dp.MatmulRequest(a, a)] * 100): f.result(120)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert main(["top", str(process.pid), "--once", "--json", "--interval", "0.05"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert main(["top", str(process.pid), "--once", "--interval", "0.05"]) == 0
        view = capsys.readouterr().out
        process.stdin.close()
        assert process.wait(TIMEOUT) == 0
    (facts,) = told["supervisors"]
    assert (told["pid"], facts["isolation"], facts["done"], facts["failed"]) == (process.pid, "process", 100, 0)
    assert facts["done_per_second"] == 0
    assert sum(worker["done"] for worker in facts["workers"]) == 100
    assert facts["bytes_in_use"] >= 64
    assert re.search(r"^supervisor 1 of host, process, open, \d+ s old$", view, re.MULTILINE)
    assert re.search(r"^  done/s 0   p50 .* p99 .* memory [\d.,]+ KiB$", view, re.MULTILINE)
    assert re.search(r"^  all +0 +0 +100 +0 +0$", view, re.MULTILINE)
    assert main(["top", str(process.pid), "--once"]) == 1
    assert "has no supervisor that answers" in capsys.readouterr().err


def test_a_rate_is_what_was_done_between_two_looks():
    first = {"supervisor": 1, "time": 10.0, "done": 100}
    (then,) = with_rates([first], [])
    assert then["done_per_second"] is None
    now = [{"supervisor": 1, "time": 12.0, "done": 500}, {"supervisor": 2, "time": 12.0, "done": 7}]
    assert [facts["done_per_second"] for facts in with_rates(now, [then])] == [200.0, None]


@pytest.mark.parametrize(
    ("then", "now"),
    [({"time": 1.0}, {"time": 2.0, "done": 5}), ({"time": 1.0, "done": 0}, {"time": 2.0, "done": 10**400})],
)
def test_a_rate_of_what_no_board_says_is_none(then, now):
    assert with_rates([{"supervisor": 1, **now}], [{"supervisor": 1, **then}])[0]["done_per_second"] is None


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_an_interval_that_is_none_is_told(seconds, capsys):
    with dp.Supervisor("host", streams=1):
        assert main(["top", str(os.getpid()), f"--interval={seconds}"]) == 2
    assert "--interval: got " in capsys.readouterr().err


def test_an_answer_that_comes_in_drops_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(status, "TIMEOUT", 0.5)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as board:
        board.bind(own_name(10**9))
        board.listen()

        def answer():
            client, _ = board.accept()
            with client, contextlib.suppress(OSError):
                while not ended.wait(0.1):
                    client.sendall(b" ")

        thread = threading.Thread(target=answer)
        thread.start()
        timer = threading.Timer(TIMEOUT, ended.set)
        timer.start()
        assert status.ask(os.getpid()) == []
        assert not ended.is_set(), "it was waited for until there came no more"
        ended.set()
        timer.cancel()
        timer.join(TIMEOUT)  # other tests count threads
        thread.join(TIMEOUT)


def test_top_follows_a_process_until_its_supervisor_ends(capsys):
    script = (
        "import sys\nimport dispatch as dp\nsup = dp.Supervisor('host', streams=1)\n"
        "print('ready', flush=True)\nsys.stdin.readline()\nsup.close()\nprint('closed', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        seen = []
        viewer = threading.Thread(target=lambda: seen.append(main(["top", str(process.pid), "--interval", "0.02"])))
        viewer.start()
        while len(capsys.readouterr().out.split("supervisor 1 of host")) < 2:
            assert viewer.is_alive()
        process.stdin.write("\n")
        process.stdin.flush()
        viewer.join(TIMEOUT)
        process.stdin.close()
    assert seen == [0]
    assert "no longer has a supervisor" in capsys.readouterr().out
