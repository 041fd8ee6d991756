"""What a running supervisor says of itself: `stats()`, the board that answers other processes, and `top`."""

import gc
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
from dispatch import status
from dispatch.__main__ import main
from dispatch.cli.top import with_rates

PATIENCE = 30


def test_counts_are_kept_by_worker(probe):
    entered, release = threading.Event(), threading.Event()
    with dp.Supervisor("host", streams=2) as sup:
        sup.submit_many([probe() for _ in range(10)], worker=1)[-1].result(PATIENCE)
        sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))), worker=0)
        assert entered.wait(PATIENCE)
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
        sup.submit(probe()).result(PATIENCE)
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
            assert len(status.boards(os.getpid())) == 1
        assert status.boards(os.getpid()) == []
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, before)


def test_a_board_does_not_keep_a_dropped_supervisor():
    sup = dp.Supervisor("host", streams=1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dispatch host status"]
    left = [sup]
    del sup
    with pytest.warns(ResourceWarning, match="dropped"):
        left.clear()
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert status.boards(os.getpid()) == []


def test_a_supervisor_says_that_it_is_broken(probe):
    with dp.Supervisor("host", streams=1, max_restarts=0) as sup:
        assert sup.submit(probe(lambda: 1 / 0)).exception(PATIENCE)
        sup._crew.seats[0].worker.thread.join(PATIENCE)
        (facts,) = status.ask(os.getpid())
    assert (facts["state"], facts["failed"]) == ("broken", 1)


def test_many_ask_at_once():
    with dp.Supervisor("host", streams=1):
        answers = []
        threads = [threading.Thread(target=lambda: answers.extend(status.ask(os.getpid()))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert [facts["state"] for facts in answers] == ["open"] * 16


def test_who_says_nothing_and_who_leaves_keep_nobody_from_asking():
    with dp.Supervisor("host", streams=1):
        (name,) = status.boards(os.getpid())
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
        with pytest.raises(PermissionError, match=f"process {other.pid} answers in the name of"):
            status.ask(os.getpid())
        assert main(["top", str(os.getpid()), "--once"]) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer():
    script = (
        "import os, sys\nfrom dispatch.status import ask, boards\nos.setuid(65534)\n"
        "print(len(boards(int(sys.argv[1]))), ask(int(sys.argv[1])))"
    )
    with dp.Supervisor("host", streams=1):
        done = subprocess.run(
            [sys.executable, "-c", script, str(os.getpid())],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(dp.__file__).parents[1])},
        )
    assert done.stdout == "1 []\n", done.stderr


FORK = """
import os, warnings
import dispatch as dp
from dispatch import status
warnings.simplefilter("ignore")
with dp.Supervisor("host", streams=1) as sup:
    pid = os.fork()
    if pid == 0:
        os._exit(len(status.ask(os.getpid())))
    assert os.waitpid(pid, 0)[1] == 0
    assert len(status.ask(os.getpid())) == 1
print("fine")
"""


def test_a_forked_child_has_no_board():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, env=os.environ)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# -- top ------------------------------------------------------------------------------------------------------------
def test_top_shows_another_process_once(capsys):
    script = (
        "import sys, numpy as np\nimport dispatch as dp\n"
        "with dp.Supervisor('host', streams=2, isolation='process') as sup:\n"
        "    a = sup.device.array(np.eye(4, dtype=np.float32))\n"
        "    for f in sup.submit_many([dp.MatmulRequest(a, a)] * 100): f.result(60)\n"
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
        assert process.wait(PATIENCE) == 0
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
        viewer.join(PATIENCE)
        process.stdin.close()
    assert seen == [0]
    assert "has no supervisor any more" in capsys.readouterr().out
