"""docs/random.md: its example gives the output that stands there, its table has all methods and requests."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.ops import FAMILIES

DOCS = (Path(__file__).parents[3] / "docs" / "random.md").read_text(encoding="utf-8")


def test_the_example_gives_what_stands_below_it():
    pytest.importorskip("cudabind.sys.curand")
    program, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", DOCS, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), np.printoptions():
        exec(compile(program, "random.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_table_has_all_methods_and_requests():
    rows = re.findall(r"^\| (`.*?) \| `(random_\w+)` \|", DOCS, re.MULTILINE)
    assert {op for _, op in rows} == set(FAMILIES["random"][1])
    methods = {name for names, _ in rows for name in re.findall(r"`(\w+)", names)}
    public = {name for name in dir(dp.random.Generator) if not name.startswith("_")}
    assert methods == public - {"library_used", "offset", "requests", "seed", "spawn", "state", "device"}
