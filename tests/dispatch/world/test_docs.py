"""docs/collectives.md: its example prints what stands below it, and its table names every call."""

import contextlib
import io
import re
from pathlib import Path

import dispatch as dp
from dispatch.ops import FAMILIES

TEXT = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_below_it():
    program, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/collectives.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_table_has_every_call():
    table = TEXT[TEXT.index("| request | x |") : TEXT.index("- **Reductions**")]
    named = {name for line in table.strip().splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])}
    assert named == set(FAMILIES["collective"][1])
    for name in named:
        assert callable(getattr(dp, name))
