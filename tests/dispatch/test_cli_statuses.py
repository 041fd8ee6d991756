"""What the command line ends with: 2 for wrong arguments, 1 for a failure, each with a sentence on stderr."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch.__main__ import main

spec = importlib.util.spec_from_file_location("warm_start", Path(__file__).parents[1] / "warm_start.py")
warm_start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm_start)

MISTAKES = [
    [],
    ["no-such"],
    ["--no-such"],
    ["table", "--op", "no_such"],
    ["table", "--arch", "sm_x"],
    ["table", "--import", "no_such_module"],
    ["explain"],
    ["explain", "no_such"],
    ["explain", "matmul", "--dtype", "zz"],
    ["explain", "matmul", "--shape", "3x3"],
    ["explain", "matmul", "--dtype", "f32", "--epilogue", "no_such"],
    ["doctor", "--no-such"],
    ["cache", "no-such"],
    ["cache", "import", "/no/such/file"],
    ["cache", "export", "/no/such/folder/file"],
    ["replay"],
    ["replay", "{garbage}"],
    ["top", "no-number"],
    ["bench", "--no-such"],
]
FAILURES = [
    ["explain", "matmul", "--dtype", "bool"],
    ["replay", "/no/such/file"],
    ["top", "99999999"],
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(one, 2) for one in MISTAKES] + [(one, 1) for one in FAILURES],
    ids=lambda given: " ".join(given) or "nothing" if isinstance(given, list) else str(given),
)
def test_bad_input_ends_with_a_sentence_and_its_status(capsys, tmp_path, arguments, expected):
    garbage = tmp_path / "garbage"
    garbage.write_text("no journal\n")
    try:
        status = main([one.format(garbage=garbage) for one in arguments])
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == expected
    assert "Traceback" not in told.err + told.out
    if arguments[0:1] != ["explain"] or expected == 2:  # a refusal is what was asked for, and goes to stdout
        assert told.err.strip()
        assert told.out == ""


def test_help_documents_the_statuses(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0; 1 for a refusal or a failure; 2 for wrong arguments; 130 after Ctrl-C." in told


@pytest.mark.parametrize("command", [["dispatch", "table"], ["cudabind", "list"], ["dispatch", "--help"]], ids=" ".join)
def test_a_reader_that_has_seen_enough_and_none_at_all_are_no_errors(command):
    line = f'"{sys.executable}" -m {" ".join(command)}'
    for ending in (" | head -c 1", " >&-"):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line + ending], check=False, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, warm_start.PROGRESS.sub("", done.stderr)) == (0, "")
