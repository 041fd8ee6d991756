"""The journal of a supervisor: what it holds, and what it survives."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DispatchError, Undelivered
from dispatch.keys import Epilogue
from dispatch.supervise.journal import read
from dispatch.supervise.limits import LONGEST

spec = importlib.util.spec_from_file_location("journals", Path(__file__).with_name("journals.py"))
journals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(journals)
PATIENCE, N, path, product, replay = journals.PATIENCE, journals.N, journals.path, journals.product, journals.replay
report = journals.report


# -- what it holds --------------------------------------------------------------------------------------------------
def test_it_holds_requests_and_how_they_ended(probe, path):
    entered, release = threading.Event(), threading.Event()
    dev = dp.device("host")
    request = product(dev, epilogue=Epilogue.RELU)
    sup = dp.Supervisor("host", streams=2, journal=path)
    sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))), worker=1)
    assert entered.wait(PATIENCE)
    bad = dp.MatmulRequest(dev.zeros((4, 4), "f64"), dev.zeros((4, 4), "f32"))
    failed = sup.submit(bad, worker=0)
    gone = sup.submit(probe(), worker=1)
    assert gone.cancel()
    for future in [sup.submit(request, worker=0, timeout=50), *sup.submit_many([request] * 3, worker=0)]:
        future.result(PATIENCE)
    assert failed.exception(PATIENCE)
    release.set()
    sup.close()
    header, lines = read(path)
    assert {
        "journal": 1,
        "pid": os.getpid(),
        "device": "host",
        "streams": 2,
        "isolation": "thread",
    }.items() <= header.items()
    submitted = [line for line in lines if "request" in line]
    assert [line["request"] for line in submitted] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["worker"] for line in submitted] == [1, 0, 1, 0, 0, 0, 0]
    assert [line.get("timeout") for line in submitted] == [None, None, None, 50, None, None, None]
    defined = {line["define"]: line for line in lines if "define" in line}
    assert len(defined) == 4  # the same request is told once
    entry = defined[submitted[3]["is"]]
    assert (entry["op"], entry["row"]) == ("matmul", dp.explain(request).row.name)
    number = entry["fields"]["b"]["tensor"] - 1
    layout = {"offset": 0, "dtype": "f32", "shape": [N, N], "strides": [N, 1]}
    assert entry["fields"]["a"] == {"tensor": number, **layout}
    assert entry["fields"]["epilogue"] == {"enum": "dispatch.keys:Epilogue", "name": "RELU"}
    done = sorted(number for line in lines for number in line.get("done", ()))
    others = {line["ended"]: (line["status"], line.get("error")) for line in lines if "ended" in line}
    assert done == [1, 4, 5, 6, 7]
    assert others == {2: ("failed", "NoRow"), 3: ("cancelled", None)}


def test_no_data_is_in_it(path):
    dev = dp.device("host")
    secret = 73.0625
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(dp.MatmulRequest(dev.array(np.full((N, N), secret, np.float32)), dev.zeros((N, N)))).result(PATIENCE)
    assert str(secret) not in path.read_text()


def test_what_never_started_is_told_from_what_failed(probe, path):
    entered, release = threading.Event(), threading.Event()
    with dp.Supervisor("host", streams=1, max_restarts=0, journal=path) as sup:
        sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))))
        assert entered.wait(PATIENCE)
        futures = [sup.submit(probe(lambda: 1 / 0)), sup.submit(probe())]
        release.set()
        assert all(future.exception(PATIENCE) for future in futures)
    _, lines = read(path)
    assert [line["status"] for line in lines if "ended" in line] == ["failed", "not run"]


def test_it_is_for_its_user_alone_and_grows(path):
    for _ in range(2):
        with dp.Supervisor("host", streams=1, journal=path) as sup:
            sup.submit(product(dp.device("host"))).result(PATIENCE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().count('"journal"') == 2
    header, lines = read(path)
    assert sum("request" in line for line in lines) == 1
    assert header["journal"] == 1
    assert not any("journal" in line for line in lines)


def test_a_request_that_cannot_be_written_down_is_there_with_the_reason(path, probe):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        assert sup.submit("no request").exception(PATIENCE)
        sup.submit(probe(lambda: 5)).result(PATIENCE)
    _, lines = read(path)
    no_request, unknown = (line for line in lines if "define" in line)
    assert no_request["why"] == "a str is not a request"
    assert unknown["fields"]["action"] == {"other": "function"}


def test_closing_without_waiting_still_tells_every_end(probe, path):
    entered, release = threading.Event(), threading.Event()
    sup = dp.Supervisor("host", streams=1, journal=path)
    sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))))
    assert entered.wait(PATIENCE)
    sup.submit_many([probe() for _ in range(20)])
    sup.close(wait=False)
    release.set()
    sup.close()
    _, lines = read(path)
    assert [line["done"] for line in lines if "done" in line] == [[1]]
    assert sum(line.get("status") == "cancelled" for line in lines) == 20


def test_requests_are_let_go(path):
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        for _ in range(50):
            sup.submit(product(dev)).result(PATIENCE)
    assert sup._journal._defined == {}
    assert not sup._journal._unfinished


# -- what it survives -----------------------------------------------------------------------------------------------
def test_a_full_disk_is_named_as_the_reason():
    with pytest.raises(DispatchError, match=r"^journal: /dev/full cannot be written: No space left on device; free"):
        dp.Supervisor("host", streams=1, journal="/dev/full")


def test_a_file_that_cannot_be_opened_is_refused_at_once(tmp_path):
    threads = threading.active_count()
    with pytest.raises(FileNotFoundError):
        dp.Supervisor("host", streams=1, journal=tmp_path / "nowhere" / "journal")
    for thread in threading.enumerate():
        if thread.name.startswith("dispatch host worker"):
            thread.join(PATIENCE)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("given", [5, b"journal", "", ["journal"]], ids=repr)
def test_what_is_no_path_is_refused(given):
    with pytest.raises(BadRequest, match=r"^journal: got .*; expected the path of a file, or None"):
        dp.Supervisor("host", streams=1, journal=given)


def test_a_file_is_one_open_supervisors(path):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        for isolation in ("thread", "process"):
            with pytest.raises(BadRequest, match=r"^journal: got .*, to which another supervisor is writing"):
                dp.Supervisor("host", streams=1, journal=path, isolation=isolation)
        sup.submit(product(sup.device)).result(PATIENCE)
    with dp.Supervisor("host", streams=1, journal=path):
        pass
    assert path.read_text().count('{"journal":') == 2


def test_a_full_disk_costs_the_journal_and_no_request():
    sup = dp.Supervisor("host", streams=1, journal="/dev/null")
    sup._journal._file, null = os.open("/dev/full", os.O_WRONLY), sup._journal._file
    os.close(null)
    sup.submit(product(sup.device)).result(PATIENCE)
    with pytest.raises(Undelivered, match=r"the journal /dev/null is not complete: .*No space left"):
        sup.close()


@pytest.mark.parametrize("timeout", [np.float32(50), 1e10, 1e300, Fraction(100)])
def test_any_time_is_written_as_a_number_that_is_read_again(path, timeout, capsys):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(product(sup.device), timeout=timeout).result(PATIENCE)
    assert [line["timeout"] for line in read(path)[1] if "request" in line] == [min(float(timeout), LONGEST)]
    assert report(path, capsys)[0] == 0


def test_a_request_with_more_digits_than_json_has_costs_itself_alone(path, capsys):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        for workspace in (10**5000, 1 << 20):
            sup.submit(product(sup.device, workspace=workspace)).result(PATIENCE)
    code, said = report(path, capsys)
    assert (code, said["ran"], said["unreadable"]) == (1, 1, 1)
    assert "an integer of 16610 bits" in said["why"]


@pytest.mark.timeout(PATIENCE)
def test_a_pipe_that_nobody_reads_is_refused_at_once(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        dp.Supervisor("host", streams=1, journal=path)


def test_a_pipe_that_is_read_takes_a_journal(path):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        assert os.get_blocking(sup._journal._file)
    header = json.loads(os.read(reader, 1 << 16))
    os.close(reader)
    assert header["journal"] == 1


KILLED = """
import os, signal, sys, time
import numpy as np
import dispatch as dp
dev = dp.device("host")
sup = dp.Supervisor("host", streams=1, journal=sys.argv[1])
for _ in range(100):
    sup.submit(dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)))).result(120)
from dispatch.supervise.journal import read
while sum(len(line.get("done", ())) for line in read(sys.argv[1])[1]) < 100:
    time.sleep(0.01)  # it is written without being closed
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_has_written_what_ended_before(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, timeout=600)
    assert done.returncode == -signal.SIGKILL
    _, lines = read(path)
    assert sorted(number for line in lines for number in line.get("done", ())) == list(range(1, 101))


LEFT = """
import sys
import dispatch as dp
dev = dp.device("host")
sup = dp.Supervisor("host", streams=1, journal=sys.argv[1])
print(sup.submit(dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)))).result(120).shape)
"""


def test_an_interpreter_that_exits_with_it_open_does_not_hang(path):
    done = subprocess.run(
        [sys.executable, "-c", LEFT, str(path)], capture_output=True, text=True, env=os.environ, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(4, 4)\n", "")


def test_a_line_that_is_cut_off_is_dropped(path, capsys):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit_many([product(sup.device) for _ in range(3)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    code, told = report(path, capsys)
    assert (code, told["requests"], told["ran"], told["unknown"]) == (0, 3, 0, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "journal"),
        ("no json\n", "journal"),
        ("[1]\n", "journal"),
        ('{"journal": 99}\n', "of version 99"),
        ('{"request": 1}\n', "a file without a version"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(path, text, why, capsys):
    path.write_text(text)
    assert replay(path) == 2
    told = capsys.readouterr().err
    assert "journal" in told
    assert why in told
