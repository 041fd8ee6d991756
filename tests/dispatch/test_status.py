"""What a running supervisor says of itself: `stats()`, the board that answers other processes, and `top`."""

import contextlib
import errno
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
from dispatch.__main__ import main
from dispatch.cli.top import with_rates
from dispatch.supervise import status_server as status

PATIENCE = 120  # seconds, on a machine that has other things to do


@pytest.fixture(autouse=True)
def _time_to_answer(monkeypatch):
    """Whether an answer comes must not depend on how busy the machine is."""
    monkeypatch.setattr(status, "PATIENCE", float(PATIENCE))


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


def test_a_board_does_not_keep_a_dropped_supervisor(drop):
    sup = dp.Supervisor("host", streams=1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dispatch host status"]
    left = [sup]
    del sup
    drop(left)
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert status.boards(os.getpid()) == []


def test_a_supervisor_says_that_it_is_broken(probe):
    with dp.Supervisor("host", streams=1, max_restarts=0) as sup:
        assert sup.submit(probe(lambda: 1 / 0)).exception(PATIENCE)
        sup._pool.queues[0].worker.thread.join(PATIENCE)
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


# -- what it may lack -----------------------------------------------------------------------------------------------
def own_name(number):
    return f"\0{status.PREFIX}-{os.getpid()}-{number}"


@pytest.fixture
def next_number():
    """The number of the next supervisor."""
    with dp.Supervisor("host", streams=1) as sup:
        return sup._status_server.facts()["supervisor"] + 1


def is_like_any_other(sup, probe):
    """Whether a supervisor works, and says how it does, in every way there is."""
    assert sup.submit(probe(lambda: 3)).result(PATIENCE) == 3
    (facts,) = status.ask(os.getpid())
    assert (facts["state"], facts["done"]) == ("open", 1)
    assert main(["top", str(os.getpid()), "--once", "--interval", "0.01"]) == 0
    return True


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_name_that_is_taken_is_gone_around(probe, next_number, isolation, listens, tmp_path):
    threads = threading.active_count()
    with socket.socket(socket.AF_UNIX) as squatter, socket.socket(socket.AF_UNIX) as other:
        squatter.bind(own_name(next_number))
        other.bind(own_name("x"))
        if listens:
            other.listen()
        with dp.Supervisor("host", streams=1, isolation=isolation, journal=tmp_path / "journal") as sup:
            (name,) = [name for name in status.boards(os.getpid()) if name.count("-") == 4]
            assert name.startswith("@" + own_name(next_number)[1:] + "-")
            if isolation == "thread":
                assert is_like_any_other(sup, probe)
            else:
                assert len(status.ask(os.getpid())) == 1
    assert threading.active_count() == threads
    if isolation == "process":
        sup.device.close()


SQUATTER = """
import socket, sys
taken = []
for number in map(int, sys.argv[2:]):
    taken.append(socket.socket(socket.AF_UNIX))
    taken[-1].bind(f"\\0dispatch-status-{sys.argv[1]}-{number}")
    if number % 2:
        taken[-1].listen()
print("ready", flush=True)
sys.stdin.read()
"""


def test_names_that_other_processes_took_hide_none_that_is_real(probe, next_number, capsys):
    numbers = [str(number) for number in range(next_number, next_number + 8)]
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, str(os.getpid()), *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "ready\n"
        with dp.Supervisor("host", streams=1) as sup:
            assert is_like_any_other(sup, probe)
        with pytest.raises(PermissionError, match=f"process {other.pid} answers in the name of"):
            status.ask(os.getpid())
    assert "supervisor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"version": 99}', b"[" * 100_000, b"0" * 5_000_000]
)
def test_what_no_board_would_say_is_not_believed(said):
    with socket.socket(socket.AF_UNIX) as board:
        board.bind(own_name(10**9))
        board.listen()

        def answer():
            asker, _ = board.accept()
            with asker, contextlib.suppress(OSError):
                asker.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        assert status.ask(os.getpid()) == []
        thread.join(PATIENCE)


@pytest.mark.parametrize("missing", ["socket", "bind", "listen", "thread"])
def test_nothing_that_a_board_lacks_stops_a_supervisor(probe, missing, monkeypatch, caplog, tmp_path):
    caplog.set_level("WARNING", "dispatch")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()

    class Short(socket.socket):
        def __init__(self, *arguments):
            if missing == "socket":
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*arguments)

        def bind(self, name):
            if missing == "bind":
                raise PermissionError("no names here")
            super().bind(name)

        def listen(self, *arguments):
            if missing == "listen":
                raise OSError(errno.ENOBUFS, "No buffer space available")
            super().listen(*arguments)

    start = threading.Thread.start

    def no_more(thread):
        if thread.name == "dispatch host status" and missing == "thread":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(status.socket, "socket", Short)
        patch.setattr(threading.Thread, "start", no_more)
        sup = dp.Supervisor("host", streams=1, journal=tmp_path / "journal")
    assert not sup._status_server.is_open
    assert [record.facts["event"] for record in caplog.records] == ["no status"]
    assert sup.submit(probe(lambda: 3)).result(PATIENCE) == 3
    assert status.ask(os.getpid()) == []
    sup.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED, errno.EPERM])
def test_a_board_lives_on_where_it_cannot_answer_for_a_while(number, monkeypatch):
    failed, enough = [], threading.Event()
    accept = socket.socket.accept

    def failing(listener):
        if len(failed) < 3:
            failed.append(listener)
            raise OSError(number, os.strerror(number))
        enough.set()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(status, "PAUSE", 0.001)
    with dp.Supervisor("host", streams=1) as sup:
        assert enough.wait(PATIENCE)
        assert sup._status_server.is_open
        assert len(status.ask(os.getpid())) == 1
    assert not sup._status_server.is_open


def test_a_defect_in_an_answer_costs_that_answer(monkeypatch):
    monkeypatch.setattr(status, "PAUSE", 0.001)
    with dp.Supervisor("host", streams=1) as sup:
        with monkeypatch.context() as patch:
            patch.setattr(status, "count", lambda _: 1 / 0)
            assert status.ask(os.getpid()) == []
        assert len(status.ask(os.getpid())) == 1
        assert sup._status_server.is_open


EXHAUSTED = """
import os, resource, socket, threading, time
import dispatch as dp
from dispatch.supervise import status_server as status
from dispatch.supervise.status_server import ask
status.PATIENCE = 120.0
sup = dp.Supervisor("host", streams=1)
askers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for asker in askers:
    asker.settimeout(0.05)
    asker.connect("\\0dispatch-status-%d-1" % os.getpid())
    try:
        asker.recv(10)  # an accept that was under way had its descriptor already, and then has it again
    except TimeoutError:
        pass
for each in held:
    os.close(each)
for asker in askers:
    asker.close()
assert sup._status_server.is_open
assert len(ask(os.getpid())) == 1
sup.close()
print("fine")
"""


def test_a_board_survives_a_lack_of_descriptors():
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.stderr) == ("fine\n", "")


@pytest.mark.parametrize("missing", ["header", "thread"])
def test_a_journal_that_cannot_be_begun_leaves_nothing(missing, monkeypatch, tmp_path):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    start = threading.Thread.start

    def no_more(thread):
        if thread.name == "dispatch host journal" and missing == "thread":
            raise RuntimeError("can't start new thread")
        start(thread)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        if missing == "header":
            patch.setattr("dispatch.supervise.journal.Journal._write", full)
        with pytest.raises((RuntimeError, OSError), match=r"can't start new thread|No space left"):
            dp.Supervisor("host", streams=1, journal=tmp_path / "journal")
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("dispatch"):
            thread.join(PATIENCE)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert status.boards(os.getpid()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer():
    script = (
        "import os, sys\nfrom dispatch.supervise.status_server import ask, boards\nos.setuid(65534)\n"
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
from dispatch.supervise import status_server as status
status.PATIENCE = 120.0
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
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=600, env=os.environ)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# -- top ------------------------------------------------------------------------------------------------------------
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
    monkeypatch.setattr(status, "PATIENCE", 0.5)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as board:
        board.bind(own_name(10**9))
        board.listen()

        def answer():
            asker, _ = board.accept()
            with asker, contextlib.suppress(OSError):
                while not ended.wait(0.1):
                    asker.sendall(b" ")

        thread = threading.Thread(target=answer)
        thread.start()
        timer = threading.Timer(PATIENCE, ended.set)
        timer.start()
        assert status.ask(os.getpid()) == []
        assert not ended.is_set(), "it was waited for until there came no more"
        ended.set()
        timer.cancel()
        timer.join(PATIENCE)  # other tests count threads
        thread.join(PATIENCE)


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
