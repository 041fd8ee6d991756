"""The interpreter of a child has the options that its parent's was given."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from dispatch.supervise.process import child_process as launch

spec = importlib.util.spec_from_file_location("mapped_memory", Path(__file__).with_name("mapped_memory.py"))
mapped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mapped)
ROOT, run = mapped.ROOT, mapped.run

TELLS = """
import json, os, sys, warnings
with open(os.environ["TOLD"], "w") as file:
    json.dump([list(sys.flags), sys._xoptions, sys.warnoptions, sys.path], file)
"""
ASKS = """
import json, os, sys
sys.path[:0] = {paths!r}
import dispatch as dp
with dp.Supervisor("host", isolation="process", streams=1, setup=("tells",)) as sup:
    pass
flags, options, warned, path = json.load(open(os.environ["TOLD"]))
assert flags == list(sys.flags), (flags, sys.flags)
assert {{**options}} == sys._xoptions, (options, sys._xoptions)
assert set(warned) == set(sys.warnoptions), (warned, sys.warnoptions)
assert path == sys.path, (path, sys.path)
print("fine")
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-I",),
        ("-I", "-S", "-B"),
        ("-E",),
        ("-s", "-OO"),
        ("-X", "utf8", "-X", "dev"),
        ("-W", "error::UserWarning", "-W", "ignore::DeprecationWarning", "-bb"),
        ("-X", "pycache_prefix={tmp}", "-X", "int_max_str_digits=5000"),
    ],
    ids=" ".join,
)
def test_the_child_is_started_as_its_parent_was(options, tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    told = tmp_path / "told"
    site = [path for path in sys.path if path.endswith("-packages")]
    program = ASKS.format(paths=[str(ROOT), str(tmp_path), *site])
    options = [option.format(tmp=tmp_path / "cache") for option in options]
    assert run(program, *options, TOLD=str(told), PYTHONPATH=str(tmp_path / "nothing")) == "fine\n"
    assert json.loads(told.read_text())


def test_options_of_an_interpreter_are_those_it_was_given():
    for given in (["-I"], ["-O"], ["-OO", "-B"], ["-X", "dev"], ["-W", "error::UserWarning"]):
        program = (
            "from dispatch.supervise.process.child_process import interpreter_options; print(interpreter_options())"
        )
        path = f"import sys; sys.path[:] = {sys.path!r}; "
        said = run(path + program, *given, PYTHONPATH=str(ROOT))
        for word in given:
            assert repr(word) in said
    assert launch.interpreter_options() is not None
