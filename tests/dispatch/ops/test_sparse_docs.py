"""docs/sparse.md: its example prints what stands below it, and its tables name what there is."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.ops import FAMILIES

TEXT = (Path(__file__).parents[3] / "docs" / "sparse.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_below_it():
    pytest.importorskip("scipy")
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == TEXT.count("```python")
    names = {}  # an example goes on where the one before it has ended
    for program, output in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "docs/sparse.md", "exec"), names)
        assert printed.getvalue() == output


def test_the_tables_have_every_function_request_and_dtype():
    functions = TEXT[TEXT.index("| function of") : TEXT.index("(`dp.spmv` is")]
    named = set(re.findall(r"`(\w+)\(|`(\w+)`", functions))
    words = {word for pair in named for word in pair if word}
    assert words >= set(FAMILIES["sparse"][1])
    said = {
        "BlockJacobi",
        "IncompleteFactors",
        "LinAlgError",
        "SparseLu",
        "SparseTensor",
        "bsr",
        "coo",
        "csc",
        "csr",
        "sparse_tensor",
        "to_scipy",
        "to_torch",
    }
    assert all(f"`{word}" in TEXT for word in said)
    assert words >= set(dp.sparse.__all__) - said
    dtypes = TEXT[TEXT.index("| request | dtypes") : TEXT.index("```python")]
    for line in dtypes.strip().splitlines()[2:]:
        cells = line.split("|")
        for op in re.findall(r"`(\w+)`", cells[1]):
            rows = [row for row in dp.TABLE.of(op) if row.library in ("cusparse", "own", "cudss", "cusolverSp")]
            assert {row.dtypes[0].name for row in rows} == set(
                re.findall(r"\b[fcbi]+\d+\b", cells[2].partition(" with")[0])
            ), op


def test_what_has_run_on_no_gpu_is_said():
    rows = [row for op in FAMILIES["sparse"][1] for row in dp.TABLE.of(op) if row.on(dp.Arch(90)) and not row.run_on]
    text = " ".join(TEXT.split())
    assert "all cases of its rows have passed, solvers included." in text
    said = re.search(r"No GPU has run ([^.]*)\.", text)
    assert {row.op for row in rows} == set(re.findall(r"`(\w+)`", said.group(1)) if said else ())
