"""docs/parallel.md: its example prints what stands below it, and its table names every block."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from dispatch import parallel

TEXT = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_stands_below_it(number):
    program, output = EXAMPLES[number]
    if "import torch" in program:
        pytest.importorskip("torch", reason="torch is not installed")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/parallel.md", "exec"), {})
    assert printed.getvalue() == output


def test_both_examples_are_run():
    assert len(EXAMPLES) == TEXT.count("```python") == 2


def test_the_table_has_every_block():
    table = TEXT[TEXT.index("| block |") : TEXT.index("- **Chunks**")]
    named = {name for line in table.strip().splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])}
    assert named == set(parallel.__all__) - {"Step"}
