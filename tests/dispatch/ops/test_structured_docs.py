"""docs/sparse.md of structured matrices: its example prints what stands below it, its tables name what there is."""

import contextlib
import io
import re
from pathlib import Path

import dispatch as dp
from dispatch.ops import FAMILIES
from dispatch.ops.structured.rules import GELU_DTYPES

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "sparse.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("## Structured matrices") : TEXT.index("## What is not supported")]
ROWS = [row for row in dp.TABLE.of("matmul_2_4") if row.library == "cusparseLt"]


def test_the_example_prints_what_stands_below_it():
    program, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", SECTION, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/sparse.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_table_has_every_function_and_request():
    functions = SECTION[SECTION.index("| function of") : SECTION.index("| A and B")]
    words = set(re.findall(r"(\w+)\(|`(\w+)`", functions))
    named = {word for pair in words for word in pair if word}
    assert named >= set(FAMILIES["structured"][1])
    assert named >= set(dp.structured.__all__) - {"StructuredForm", "StructuredTensor", "made_by"}
    assert all(f"`{name}`" in SECTION for name in ("StructuredForm", "StructuredTensor"))


def test_the_table_has_the_dtypes_and_activations_of_every_row():
    table = SECTION[SECTION.index("| A and B") : SECTION.index("RELU has an")]
    said, gelus = set(), set()
    for line in table.strip().splitlines()[2:]:
        a, c, d, activation = (cell.strip() for cell in line.split("|")[1:5])
        for out in d.split():
            said |= {(a, out if c == "as D" else one, out) for one in c.split()[-1:] + c.split()[:-1] if one != "as"}
            wanted = activation.partition("GELU to")[2] or (d if "GELU" in activation else "")
            gelus |= {(a, out)} if out in re.findall(r"\w+", wanted) else set()
    assert said == {tuple(one.name for one in (row.dtypes[0], *row.dtypes[2:])) for row in ROWS}
    assert gelus == {(a.name, d.name) for a, d in GELU_DTYPES}


def test_what_has_run_on_a_gpu_is_said():
    text = " ".join(SECTION.split())
    assert "Pruning, checks and compression have passed all their cases on an H100 (cuSPARSELt 0.8.0)" in text
    assert "**Refused** are f32 with a row-major B with 0.8 on sm_90, which did not terminate" in text
    assert "and i8 with a bias and results of 16 bits, which were wrong" in text
    rows = [row for op in FAMILIES["structured"][1] for row in dp.TABLE.of(op) if row.library == "cusparseLt"]
    assert all(row.run_on for row in rows)
    assert f"those of {sum(bool(row.run_on) for row in rows if row.op == 'matmul_2_4')} of 18 combinations" in text
