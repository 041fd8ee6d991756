"""The command line on a terminal of 80 columns: what it folds, colours and pages, and how it ends."""

import codecs
import fcntl
import importlib.util
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cudabind import _progress, _terminal

spec = importlib.util.spec_from_file_location("warm_start", Path(__file__).parents[1] / "warm_start.py")
warm_start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm_start)
START = warm_start.WarmStart()

ROOT = Path(__file__).parents[2]
PROGRESS = warm_start.PROGRESS
REWRITTEN = re.compile(r"\r[^\r\n]*\x1b\[K")  # the same on a terminal
COLOUR = re.compile(r"\x1b\[\d*m")
PLENTY = 5000  # lines: no pager


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "PAGER")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | changes


@pytest.fixture(scope="module", autouse=True)
def warm():
    yield
    START.close()


def on_terminal(words, *, lines=PLENTY, interrupt=None, module=None, **changes):
    """What a terminal of 80 columns is sent, and the exit status; Ctrl-C is typed when `interrupt` has been seen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
    module, *given = [*filter(None, [module]), *words.split()]
    START.begin(module, given, environment(**changes), (theirs, theirs, theirs), is_tty=True)
    os.close(theirs)
    sent, begun = "", time.monotonic()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end amid a character
    while time.monotonic() - begun < 120:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the last of its side is closed
                break
            sent += decoder.decode(data)
            if interrupt is not None and interrupt in sent:
                os.write(ours, b"\x03")
                interrupt = None
    os.close(ours)
    return sent.replace("\r\n", "\n"), START.status()


def piped(words, module="dispatch", **changes):
    return START.run(module, words.split(), environment(**changes))


def lengths(sent):
    return [len(line) for line in COLOUR.sub("", sent).splitlines()]


# -- width --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("dispatch table", 0),
        ("dispatch table --op matmul", 0),
        ("dispatch table --op softmin", 2),
        ("dispatch explain matmul --dtype f8e4m3 --epilogue GELU_BIAS --arch sm_90", 0),
        ("dispatch explain matmul --dtype f8e4m3 --epilogue BGRADB --arch sm_90 --all", 1),
        ("dispatch explain conv_fwd --help", 0),
        ("dispatch doctor", 0),
        ("dispatch --help", 0),
        ("dispatch tabel", 2),
        ("cudabind list", 0),
    ],
)
def test_no_line_is_longer_than_the_terminal_is_wide(words, status):
    sent, ended = on_terminal(words)
    assert ended == status, sent
    assert max(lengths(sent)) <= 80


def test_a_narrow_table_keeps_its_first_columns_and_names_those_that_are_left_out():
    lines = COLOUR.sub("", on_terminal("dispatch table --op matmul")[0]).splitlines()
    assert lines[0].split() == ["op", "dtypes", "compute", "arch", "library"]
    text = " ".join(lines)
    assert "columns are left out here: epilogue dtypes, epilogues, scales of a, b, library function," in text
    assert "--wide shows all" in text


@pytest.mark.parametrize("words", ["dispatch table --op conv_fwd", "dispatch doctor", "cudabind list"])
def test_wide_is_what_a_pipe_gets(words):
    module, _, rest = words.partition(" ")
    sent = REWRITTEN.sub("", on_terminal(f"{words} --wide")[0])
    assert COLOUR.sub("", sent) == piped(rest, module).stdout


def test_columns_fold_between_words_and_a_path_gives_way_in_its_middle():
    rows = [("name", "what"), ("one", "some words that take more room"), ("two", "/a/very/long/path/that/ends/here.so")]
    assert _terminal.columns(rows, 24) == (
        ["name  what", "one   some words that", "      take more room", "two   /a/ve…ends/here.so"], []
    )  # fmt: skip
    assert _terminal.columns(rows, None)[0][1] == "one   some words that take more room"
    assert _terminal.columns(rows, 10, spare=["what"]) == (["name", "one", "two"], ["what"])
    assert _terminal.columns([], 10) == ([], [])


# -- colour -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)],
    ids=str,
)
def test_a_terminal_shows_colours_unless_it_is_told_not_to(changes, coloured):
    assert ("\x1b[" in on_terminal("dispatch explain softmax --shape 8x64:f32", **changes)[0]) == coloured


def test_a_pipe_has_no_colour_unless_it_is_told_to():
    assert "\x1b" not in piped("explain softmax --shape 8x64:f32").stdout
    assert "\x1b[1m" in piped("explain softmax --shape 8x64:f32", FORCE_COLOR="1").stdout


def test_json_has_no_colour_and_no_fold_anywhere():
    assert (
        on_terminal("dispatch explain softmax --shape 8x64:f32 --json", FORCE_COLOR="1")[0]
        == piped("explain softmax --shape 8x64:f32 --json").stdout
    )


# -- pager --------------------------------------------------------------------------------------------------------
@pytest.fixture
def pager(tmp_path):
    path = tmp_path / "pager"
    path.write_text('#!/bin/sh\necho "turned: $LESS"\nsed -n "1,2p"\n')
    path.chmod(0o755)
    return str(path)


def test_what_is_longer_than_the_screen_goes_through_the_pager(pager):
    sent, status = on_terminal("dispatch table", lines=24, PAGER=pager)
    assert (status, sent.splitlines()[0], len(sent.splitlines())) == (0, "turned: FRX", 3)


@pytest.mark.parametrize(
    ("words", "lines", "changes"),
    [
        ("dispatch table --op ctc_loss", 24, {}),
        ("dispatch table", PLENTY, {}),
        ("dispatch table", 24, {"TERM": "dumb"}),
        ("dispatch table", 24, {"PAGER": "cat"}),
        ("dispatch table", 24, {"PAGER": "/nowhere/less"}),
    ],
)
def test_there_is_no_pager_where_none_is_needed_or_wanted_or_there(pager, words, lines, changes):
    sent, status = on_terminal(words, lines=lines, **{"PAGER": pager, **changes})
    assert status == 0
    assert "turned" not in sent
    assert "rows, in order of priority" in sent


def test_a_pipe_has_no_pager(pager):
    assert piped("table", PAGER=pager, LINES="10").stdout.startswith("op ")


# -- ends ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("tabel", "did you mean table?"),
        ("explain matmul --dtipe f32", "unrecognized arguments: --dtipe f32; did you mean --dtype?"),
        ("explain matmull", "did you mean matmul?"),
        ("cache export", "cache export needs a file"),
        ("cache import /nowhere/pack", "/nowhere/pack"),
        ("bench --device cuda:99", "cuda:99"),
        ("--import", "argument --import: expected one argument"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence):
    done = piped(words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


SLOW = """
import time
print("here", flush=True)
time.sleep(60)
"""


def test_an_interrupt_is_status_130_and_no_traceback(tmp_path):
    (tmp_path / "slow_rows.py").write_text(SLOW)
    sent, status = on_terminal(
        "--import slow_rows table", module="dispatch", TERM="dumb",
        PYTHONPATH=f"{tmp_path}:{ROOT}", interrupt="here",
    )  # fmt: skip
    assert status == 130
    assert sent.replace("^C", "").split() == ["here"]


def test_an_interrupt_of_a_benchmark_ends_all_of_them():
    sent, status = on_terminal("dispatch bench --device host --only supervisor --only matmul", interrupt="== ")
    assert status == 130
    assert "Traceback" not in sent
    assert "matmul on host" not in sent


@pytest.mark.parametrize("words", ["table", "table --json", "--help", "explain matmul --help", "doctor"])
def test_a_reader_that_goes_away_is_no_error(words):
    command = f"{sys.executable} -m dispatch {words} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment(), cwd="/")
    assert (len(done.stdout.splitlines()), PROGRESS.sub("", done.stderr)) == (1, "")


@pytest.mark.parametrize(("module", "words"), [("dispatch", "table"), ("dispatch", "doctor"), ("cudabind", "list")])
def test_output_that_cannot_be_written_is_a_sentence_and_none_that_is_wanted_is_no_error(module, words):
    command = f"{sys.executable} -m {module} {words}"
    full, closed = (
        subprocess.run(f"{command} {end}", shell=True, stderr=subprocess.PIPE, text=True, env=environment(), cwd="/")
        for end in (">/dev/full", ">&-")
    )
    assert full.returncode == 2
    said = PROGRESS.sub("", full.stderr)
    assert said == f"python -m {module}: error: [Errno 28] No space left on device\n"
    assert (closed.returncode, PROGRESS.sub("", closed.stderr)) == (0, "")


# -- rows of others -----------------------------------------------------------------------------------------------
ROWS = """
from dataclasses import replace
import dispatch as dp
from dispatch.keys import HOST
row = next(row for row in dp.TABLE if row.min_arch == HOST)
dp.register(replace(row, op={op!r}, fusion=None, library="mine", function="theirs"))
"""


@pytest.fixture
def modules(tmp_path):
    (tmp_path / "first_rows.py").write_text(ROWS.format(op="first"))
    (tmp_path / "second_rows.py").write_text(ROWS.format(op="second"))
    (tmp_path / "wrong_rows.py").write_text("import dispatch\n\nraise ValueError('no\\x1b[31m such row')\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


@pytest.mark.parametrize(
    "words",
    [
        "--import first_rows --import second_rows table --op second",
        "table --import first_rows --op second --import=second_rows",
        "explain --import second_rows second --dtype f64 --arch host",
        "explain second --dtype f64 --arch host --import second_rows",
    ],
)
def test_rows_of_imported_modules_are_there(modules, words):
    done = piped(words, **modules)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine.theirs" in done.stdout


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("missing_rows", "--import missing_rows failed: ModuleNotFoundError: No module named 'missing_rows'"),
        ("wrong_rows", r"ValueError: no\x1b[31m such row ("),
        ("wrong_rows", "wrong_rows.py, line 3)"),
        ("ends", "--import ends failed: SystemExit"),
        ("first_rows.py", "the name of a module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_in_one_line(modules, module, sentence):
    done = piped(f"--import {module} table", **modules)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_package_whose_rows_are_broken_is_one_line_and_the_others_are_there(modules, tmp_path):
    (tmp_path / "good_rows.py").write_text(ROWS.format(op="good").replace("dp.register(", "ROW = ("))
    for name in ("wrong_rows", "good_rows"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dispatch.rows]\n{name} = {name}:ROW\n")
    done = piped("table --op good", **modules)
    assert done.returncode == 0
    assert "mine.theirs" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: entry point wrong_rows = wrong_rows:ROW of dispatch.rows adds no rows: ValueError")


# -- progress -----------------------------------------------------------------------------------------------------
WORK = """
import sys, time
from cudabind import _progress
_progress.PATIENCE, _progress.SELDOM = 0.1, 0.3
if "tell" in sys.argv:
    _progress.tell_pipes()
with _progress.Progress("work", 4, ticking="ticking" in sys.argv) as bar:
    for _ in range(4):
        time.sleep(0.25)
        bar.update()
print("done")
"""


@pytest.mark.parametrize("ticking", ["", " ticking"])
def test_a_terminal_has_one_line_that_is_rewritten_and_goes_away(tmp_path, ticking):
    (tmp_path / "work.py").write_text(WORK)
    sent, status = on_terminal(f"work{ticking}", PYTHONPATH=f"{tmp_path}:{ROOT}", NO_COLOR="1")
    assert status == 0
    assert re.search(r"\rwork: 2 of 4, \d s, about \d s left\x1b\[K\r", sent)
    assert sent.endswith("\r\x1b[Kdone\n")
    assert sent.count("\n") == 1


@pytest.mark.parametrize(("words", "shown"), [("tell ticking", True), ("tell", True), ("ticking", False)])
def test_a_pipe_has_a_line_now_and_then_of_command_lines_alone(tmp_path, words, shown):
    (tmp_path / "work.py").write_text(WORK)
    done = piped(words, "work", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert (1 < len(lines) < 5) == shown
    assert all(re.fullmatch(r"work: \d of 4, \d s(, about \d s left)?", line) for line in lines)


def test_what_is_quick_shows_nothing(capsys):
    _progress.tell_pipes()
    try:
        with _progress.Progress("work", 2, ticking=True) as bar:
            bar.update()
    finally:
        _progress.tell_pipes(False)
    assert capsys.readouterr().err == ""


def test_seconds_are_said_as_people_do():
    assert [_progress.duration(s) for s in (0.4, 99, 130, 5000, 9000)] == ["0 s", "99 s", "2 min", "83 min", "2.5 h"]


def test_a_killed_reader_of_the_pager_ends_quietly(tmp_path):
    path = tmp_path / "pager"
    path.write_text(f"#!/bin/sh\nkill -{signal.SIGKILL} $$\n")
    path.chmod(0o755)
    sent, status = on_terminal("dispatch table", lines=24, PAGER=str(path))
    assert (sent, status) == ("", 0)
