"""Whatever a board lacks, or meets in the place of its name, costs no more than what the supervisor says of itself."""

import contextlib
import errno
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
TIMEOUT, _time_to_answer, own_name = boards.TIMEOUT, boards._time_to_answer, boards.own_name


@pytest.fixture
def next_number():
    """The number of the next supervisor."""
    with dp.Supervisor("host", streams=1) as sup:
        return sup._status_server.facts()["supervisor"] + 1


def is_like_any_other(sup, probe):
    """Whether a supervisor works, and says how it does, in every way there is."""
    assert sup.submit(probe(lambda: 3)).result(TIMEOUT) == 3
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
            (name,) = [name for name in status.socket_names(os.getpid()) if name.count("-") == 4]
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
        with pytest.raises(PermissionError, match=f"process {other.pid} answers at the address of"):
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
            client, _ = board.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        assert status.ask(os.getpid()) == []
        thread.join(TIMEOUT)


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
    assert sup.submit(probe(lambda: 3)).result(TIMEOUT) == 3
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
    monkeypatch.setattr(status, "RETRY_SECONDS", 0.001)
    with dp.Supervisor("host", streams=1) as sup:
        assert enough.wait(TIMEOUT)
        assert sup._status_server.is_open
        assert len(status.ask(os.getpid())) == 1
    assert not sup._status_server.is_open


def test_a_defect_in_an_answer_costs_that_answer(monkeypatch):
    monkeypatch.setattr(status, "RETRY_SECONDS", 0.001)
    with dp.Supervisor("host", streams=1) as sup:
        with monkeypatch.context() as patch:
            patch.setattr(status, "read_stats", lambda _: 1 / 0)
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
        with pytest.raises((RuntimeError, dp.errors.DispatchError), match=r"can't start new thread|No space left"):
            dp.Supervisor("host", streams=1, journal=tmp_path / "journal")
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("dispatch"):
            thread.join(TIMEOUT)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert status.socket_names(os.getpid()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer():
    script = (
        "import os, sys\nfrom dispatch.supervise.status_server import ask, socket_names\nos.setuid(65534)\n"
        "print(len(socket_names(int(sys.argv[1]))), ask(int(sys.argv[1])))"
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
