"""docs/fft.md: its example prints what stands below it, and its table names what there is."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import dispatch as dp

TEXT = (Path(__file__).parents[3] / "docs" / "fft.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("program", "output"), EXAMPLES, ids=["transforms", "callbacks", "several GPUs"])
def test_an_example_prints_what_stands_below_it(program, output):
    pytest.importorskip("scipy")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/fft.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_table_has_every_function():
    table = TEXT[TEXT.index("| function of") : TEXT.index("`n` and `s` say")]
    named = {name for line in table.strip().splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(dp.fft.__all__)
