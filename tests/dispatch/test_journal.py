"""The journal of a supervisor: what it holds, what it survives, and that the requests of one can be run again."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.errors import BadRequest, Undelivered
from dispatch.keys import BF16, HOST, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops import FAMILIES
from dispatch.row_check import cases_of
from dispatch.supervise import journal as journal_module
from dispatch.supervise.journal import read
from dispatch.supervise.limits import LONGEST
from dispatch.supervise.request_json import Memory, Reader, Writer

PATIENCE = 120  # seconds, on a machine that has other things to do
N = 8


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def product(dev, **fields):
    return dp.MatmulRequest(dev.array(np.ones((N, N), np.float32)), dev.array(np.ones((N, N), np.float32)), **fields)


def replay(path, *options):
    return main(["replay", str(path), *options])


def report(path, capsys, *options):
    """What `replay --json` says, with its exit status."""
    capsys.readouterr()
    code = replay(path, "--json", *options)
    return code, json.loads(capsys.readouterr().out)


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
    assert no_request["why"] == "a str is no request"
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
    assert not sup._journal._open


# -- what it survives -----------------------------------------------------------------------------------------------
def test_a_file_that_cannot_be_opened_is_refused_at_once(tmp_path):
    threads = threading.active_count()
    with pytest.raises(FileNotFoundError):
        dp.Supervisor("host", streams=1, journal=tmp_path / "nowhere" / "journal")
    for thread in threading.enumerate():
        if thread.name.startswith("dispatch host worker"):
            thread.join(PATIENCE)
    assert threading.active_count() <= threads


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
        ('{"request": 1}\n', "of no version"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(path, text, why, capsys):
    path.write_text(text)
    assert replay(path) == 2
    told = capsys.readouterr().err
    assert "journal" in told
    assert why in told


# -- again ----------------------------------------------------------------------------------------------------------
def rebuilt(request, device):
    """A request, written down and made again on a device."""
    line = json.loads(json.dumps({"define": 1, **Writer().request(request)}, allow_nan=False))
    return Reader(Memory(device, [line], {1: 0}, 0).tensor, device).request(line)


# A callback holds a function of Python's, which cannot be written down, nor can who takes part in a collective: below.
# So do operators of sparse products, but for those of a semiring that is given by its name.
NOT_WRITTEN = ("callback_dft", "spmm_op", "spmv_op", *FAMILIES["collective"][1])
HOST_ROWS = [row for row in dp.TABLE if row.on(HOST) and cases_of(row) and row.op not in NOT_WRITTEN]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if n % 4 else [])
        for n, row in enumerate(HOST_ROWS)
    ],
)
def test_cases_of_a_row_come_back_as_they_were(row, rng):
    dev = dp.device("host")
    cases = cases_of(row)[::4]
    assert cases
    for case in cases:
        request = case.check(dev, rng).request
        again = rebuilt(request, dev)
        assert type(again) is type(request)
        assert again.describe() == request.describe()
        assert again.key() == request.key()
        assert again.repeatable == request.repeatable


def test_a_request_with_a_function_of_pythons_cannot_be_made_again():
    dev = dp.device("host")
    double = dp.fft.Callback("return 2 * x;", lambda x: 2 * x)
    request = dp.CallbackDftRequest(dev.array(np.ones(4)), load=double)
    with pytest.raises(BadRequest, match="got a function; expected a number, a string, a tensor"):
        rebuilt(request, dev)


def test_memory_that_was_shared_is_shared_again():
    dev = dp.device("host")
    base = dev.zeros((4, 2 * N, N))
    c = dev.zeros((N, N))
    request = dp.MatmulRequest(base[1, :N], base[1, N:].T, c=c, out=c)
    again = rebuilt(request, dev)
    assert again.a.storage is again.b.storage
    assert again.b.ptr - again.a.ptr == request.b.ptr - request.a.ptr
    assert again.c is not again.a
    assert again.out is again.c
    assert again.b.strides == request.b.strides


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1 + 2j, np.float32(0.1), np.int64(3), 7])
def test_numbers_come_back(value):
    dev = dp.device("host")
    dtype = "c64" if isinstance(value, complex) else "f32"
    x = dev.zeros((N, N), dtype)
    request = dp.MatmulRequest(x, x, alpha=value)
    np.testing.assert_equal(rebuilt(request, dev).alpha, value)


def test_choices_come_back():
    dev = dp.device("host")
    x, scale = dev.zeros((16, 16), "f8e4m3"), dev.zeros((1,))
    scales = dp.Scales(a=scale, b=2.0, a_mode=ScaleMode.SCALAR_32F)
    choices = {"compute": Compute.COMPUTE_32F, "reduced_precision": True}
    request = dp.MatmulRequest(x, x, scales=scales, out_dtype=np.dtype(BF16.numpy), **choices)
    again = rebuilt(request, dev)
    for field in fields(request):
        if field.name not in ("a", "b", "scales", "out_dtype"):
            assert getattr(again, field.name) == getattr(request, field.name)
    assert Dtype.of(again.out_dtype) is BF16
    assert (again.scales.b, again.scales.a.shape, again.scales.a_mode) == (2.0, (1,), ScaleMode.SCALAR_32F)
    plain = rebuilt(replace(request, scales=dp.MatmulRequest(x, x).scales), dev)
    assert plain.scales is dp.MatmulRequest(x, x).scales


def test_a_journal_is_run_again_with_the_same_outcomes(path, capsys, rng):
    dev = dp.device("host")
    a, b = (dev.array(rng.standard_normal((N, N)), "f32") for _ in range(2))
    bad = dp.MatmulRequest(dev.zeros((4, 4), "f64"), dev.zeros((4, 4), "f32"))
    chain = dp.MatmulRequest(a, b, out=dev.zeros((N, N)))
    with dp.Supervisor("host", streams=2, journal=path) as sup:
        futures = [sup.submit(chain), sup.submit(dp.MatmulRequest(chain.out, b)), sup.submit(bad), sup.submit(chain)]
        futures[-1].result(PATIENCE)
        assert futures[2].exception(PATIENCE)
    code, told = report(path, capsys)
    assert (code, told["requests"], told["ran"], told["difference"]) == (0, 4, 4, None)
    assert replay(path, "--seed", "5", "--device", "host") == 0
    assert "4 requests of host; 4 run again on host\nno difference in outcome\n" in capsys.readouterr().out


def test_the_first_difference_is_reported(path, capsys):
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        for future in sup.submit_many([product(dev) for _ in range(4)]):
            future.result(PATIENCE)
    text = path.read_text()
    (done,) = [line for line in text.splitlines() if '"done"' in line][-1:]
    failed = {"ended": 3, "status": "failed", "error": "OutOfMemory", "words": "none left"}
    changed = text.replace(done, json.dumps({"done": [1, 2, 4]}) + "\n" + json.dumps(failed))
    path.write_text(changed)
    code, told = report(path, capsys)
    assert code == 1
    assert (told["ran"], told["difference"]["request"]) == (3, 3)
    assert told["difference"]["journal"] == "OutOfMemory: none left"
    assert told["difference"]["now"] == f"done, by {dp.explain(product(dev)).row.name}"
    assert replay(path) == 1
    assert "first difference: request 3, matmul(" in capsys.readouterr().out


def test_another_row_is_a_difference(path, capsys):
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(product(dev)).result(PATIENCE)
    name = dp.explain(product(dev)).row.name
    path.write_text(path.read_text().replace(json.dumps(name), json.dumps("matmul of a row that was")))
    code, told = report(path, capsys)
    assert code == 1
    assert told["difference"]["journal"] == "done, by matmul of a row that was"
    assert told["difference"]["now"] == f"done, by {name}"


def test_what_depended_on_the_moment_is_not_run_again(path, probe, capsys):
    entered, release = threading.Event(), threading.Event()
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))))
        assert entered.wait(PATIENCE)
        late, gone = sup.submit(product(dev), timeout=0.0), sup.submit(product(dev))
        assert gone.cancel()
        release.set()
        assert late.exception(PATIENCE)
    code, told = report(path, capsys)
    assert (told["ran"], told["skipped"], told["unreadable"], told["difference"]) == (0, 2, 1, None)
    assert code == 1  # a request that cannot be made again is not taken to be the same
    assert "one of this package" in told["why"]


@pytest.mark.parametrize(
    "name", ["os:system", "dispatch.table.table:TABLE", "dispatch.errors:BadRequest", "dispatch.nowhere:X"]
)
def test_a_file_does_not_choose_what_is_run(path, name, capsys):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(product(sup.device)).result(PATIENCE)
    path.write_text(path.read_text().replace("dispatch.ops.matmul.request:MatmulRequest", name))
    code, told = report(path, capsys)
    assert (code, told["ran"], told["unreadable"]) == (1, 0, 1)


def test_memory_is_held_only_as_long_as_requests_use_it():
    dev = dp.device("host")
    writer = Writer()
    requests = [dp.MatmulRequest(dev.zeros((N, N)), dev.zeros((N, N))) for _ in range(3)]
    lines = [{"define": number, **writer.request(request)} for number, request in enumerate(requests)]
    memory = Memory(dev, lines, {0: 0, 1: 1, 2: 2}, 0)
    reader = Reader(memory.tensor, dev)
    for number, line in enumerate(lines):
        reader.request(line)
        assert len(memory._storages) == 2
        memory.forget(number)
    assert memory._storages == {}


def test_the_data_are_the_seeds():
    dev = dp.device("host")
    line = {"define": 1, **Writer().request(product(dev))}
    one, same, other = (Memory(dev, [line], {1: 0}, seed).tensor(line["fields"]["a"]).numpy() for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_many_notes_do_not_wait_for_the_writer(path, monkeypatch):
    monkeypatch.setattr(journal_module, "PERIOD", PATIENCE)
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        request = product(sup.device)
        sup.submit_many([request] * (journal_module.HURRY + 1))
        while path.read_bytes().count(b'"request"') < journal_module.HURRY:
            assert sup._journal._thread.is_alive()


# -- damage ---------------------------------------------------------------------------------------------------------
JUNK = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 2**200, -(1 << 40), 1.5, 1e300, "", "x", "f64", "f4e2m1", "\x1b[31mred",
    "a" * 3000,
    [], [1], [-1], [[1]], [2**40, 2**40], {}, {"tensor": 0}, {"tensor": 0, "offset": -8}, {"tuple": 5}, {"float": "x"},
    {"enum": "os:path", "name": "x"}, {"enum": "dispatch.keys:Epilogue", "name": "x"}, {"dtype": 5}, {"complex": [1]},
    {"dataclass": "dispatch.keys:Dtype", "fields": {}}, {"constant": "dispatch.nothing:x"}, {"other": "\x1b[2J"},
)  # fmt: skip


def a_journal(path):
    """Requests of several kinds, whose operands share memory."""
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        whole = dev.array(np.ones((8, 8), np.float32))
        sup.submit(dp.MatmulRequest(whole[:4], whole, out=dev.zeros((4, 8)), alpha=2.0)).result(PATIENCE)
        bias = dev.zeros(8)
        sup.submit(dp.MatmulRequest(whole, whole, bias=bias, epilogue=dp.Epilogue.RELU_BIAS)).result(PATIENCE)
        sup.submit(dp.MatmulRequest(whole, whole, scales=dp.Scales(), compute=dp.Compute.COMPUTE_32F)).result(PATIENCE)
        sup.submit(dp.ReduceRequest(whole, (0,))).result(PATIENCE)
        sup.submit(dp.PoolingRequest(dev.array(np.ones((1, 2, 4, 4), np.float32)), 2)).result(PATIENCE)
        assert sup.submit("no request").exception(PATIENCE)


def places(node, found):
    """Every container in a journal's lines, with a key or an index into it."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        found.append((node, key))
        places(node[key], found)
    return found


def mutated(lines, rng):
    """The text of a journal with one to three changes to what its lines say, or to its bytes."""
    lines = json.loads(json.dumps(lines))
    for _ in range(int(rng.integers(1, 4))):
        node, key = (found := places(lines, []))[int(rng.integers(len(found)))]
        kind = int(rng.integers(8))
        if kind < 5:
            node[key] = JUNK[int(rng.integers(len(JUNK)))]
        elif kind < 6 and isinstance(node[key], int):
            node[key] += int(rng.integers(-1000, 1000))
        elif kind < 7:
            del node[key]
        elif lines:
            lines.insert(int(rng.integers(len(lines))), lines[int(rng.integers(len(lines)))])
    data = bytearray("".join(json.dumps(line) + "\n" for line in lines).encode())
    if rng.integers(4) == 0 and data:
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
    return bytes(data)


def test_a_damaged_journal_is_one_clear_error_or_runs_what_is_sound(path, tmp_path, rng, capsys, monkeypatch):
    monkeypatch.setattr(
        "dispatch.supervise.request_json.MEMORY", 1 << 22
    )  # as if this machine had no more: others work on it, too
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    statuses = []
    for _ in range(400):
        bad = tmp_path / "bad"
        bad.write_bytes(mutated(lines, rng))
        statuses.append(main(["replay", str(bad), "--device", "host"]))
        said = "".join(capsys.readouterr())
        assert said.strip()
        assert said.replace("\n", "").replace("\t", "").isprintable(), said
    assert set(statuses) == {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("define", {"done": 5}), ("define", {"request": 1}), ("request", {"ended": [1]}), ("journal", {"request": 1})],
    ids=str,
)
def test_a_line_is_of_one_kind(path, kind, more, capsys):
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if kind in line).update(more)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(path) == 2
    assert f"a {kind} and more: " in capsys.readouterr().err


@pytest.mark.parametrize("depth", [400, 600, 900])
def test_what_is_nested_deeply_is_told_like_any_other_damage(path, depth, capsys):
    a_journal(path)
    deep = "[" * depth + "]" * depth
    path.write_text(path.read_text().replace('"alpha":2.0', f'"alpha":{deep}'))
    assert replay(path) in (1, 2)  # 2 where JSON itself goes no deeper
    assert "got" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "words"), [(("--seed", "-1"), "--seed"), (("--setup", ""), "--setup"), (("--setup", "..x"), "--setup")]
)
def test_an_option_that_is_none_is_told(path, options, words, capsys):
    a_journal(path)
    assert replay(path, *options) == 2
    assert f"{words}: got " in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -(1 << 40)}, {"offset": -4}, {"offset": 2}, {"offset": 1 << 47}, {"strides": [-8, 1]},
        {"strides": [1 << 40, 1]}, {"shape": [-1, 8]}, {"shape": [8]}, {"shape": [2**30, 2**30]}, {"shape": "ab"},
        {"dtype": "f31"}, {"dtype": None}, {"tensor": "x"}, {"offset": None}, {"offset": 0.0}, {"strides": None},
        {"shape": [1] * 70, "strides": [1] * 70},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_leaves_its_storage_is_never_made(path, tmp_path, change, capsys):
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in lines if "define" in line)
    line["fields"]["out"] |= change
    bad = tmp_path / "bad"
    bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(bad), "--device", "host", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["unreadable"] == 2  # and what is no request
    assert report["why"].startswith(("BadRequest", "OutOfMemory"))
    assert report["ran"] == 4
