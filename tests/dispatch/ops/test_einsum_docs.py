"""docs/einsum.md: its example prints what stands below it, and its tables name what there is."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.ops import FAMILIES

TEXT = (Path(__file__).parents[3] / "docs" / "einsum.md").read_text(encoding="utf-8")


def named(start, end):
    table = TEXT[TEXT.index(start) : TEXT.index(end)]
    return {name for line in table.strip().splitlines() for name in re.findall(r"`(\w+)[`(]", line.split("|")[1])}


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("program", "output"), EXAMPLES, ids=["einsum", "block-sparse"])
def test_an_example_prints_what_stands_below_it(program, output):
    pytest.importorskip("opt_einsum")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/einsum.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_tables_have_every_function():
    assert named("| request |", "A spec names the axes") == set(FAMILIES["contraction"][1])
    assert named("| function of", "## Numbers") == set(dp.tensors.__all__)
