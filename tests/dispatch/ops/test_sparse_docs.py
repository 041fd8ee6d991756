"""docs/sparse.md: its example prints what stands below it, and its tables name what there is."""

import contextlib
import io
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.ops import FAMILIES
from dispatch.table.select import select

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


def test_the_table_of_algorithms_says_which_products_take_them():
    """Each algorithm with each format and `trans`, of cuSPARSE's rows and on the host."""
    sp = pytest.importorskip("scipy.sparse")
    table = TEXT[TEXT.index("| `algorithm` |") : TEXT.index("## Products with other operators")]
    said = set()
    for line in table.strip().splitlines()[2:]:
        names, mv, mm, ways = (cell.strip() for cell in line.strip("|").split("|"))
        for op, formats in (("sparse_mv", mv), ("spmm", mm)):
            said |= set(product([op], re.findall(r"`(\w+)`", names), formats.split(), re.findall(r"`(.)`", ways)))
    dev, found = dp.device("host"), set()
    dense = {"sparse_mv": dev.array(np.ones(4)), "spmm": dev.array(np.ones((4, 2)))}
    kinds = {"sparse_mv": dp.SparseMvRequest, "spmm": dp.SpmmRequest}
    matrix = sp.eye_array(4, format="csr")
    for op, kind in kinds.items():
        enum = type(kind(*dp.sparse.sparse_tensor(matrix), dense[op]).algorithm)
        for algorithm, name, trans in product(enum, ("CSR", "CSC", "COO", "BSR"), "ntc"):
            a = dp.sparse.sparse_tensor(matrix.tobsr((2, 2)) if name == "BSR" else matrix.asformat(name.lower()))
            try:
                request = kind(*a, dense[op], algorithm=algorithm, trans=trans)
                dp.run(request)
                select(request, dp.Arch(90))
            except (BadRequest, NoRow):
                continue
            found.add((op, algorithm.name.lower(), name, trans))
    assert found == said


def test_a_matrix_that_has_no_view_as_its_transpose_says_what_has():
    sp = pytest.importorskip("scipy.sparse")
    matrix = sp.csr_array(np.array([[4.0, 1, 0, 0], [0, 4, 1, 2], [0, 1, 4, 0], [3, 0, 1, 3]]))
    for given, hint in ((matrix.tocoo(), "trans='t' to a product"), (matrix.tobsr((2, 2)), "")):
        a = dp.sparse.sparse_tensor(given)
        with pytest.raises(
            BadRequest, match=r"Hint: dispatch\.sparse\.tocsr\(a\)\.T" + (", or " if hint else "$")
        ) as caught:
            a.T  # noqa: B018  # a property
        assert hint in str(caught.value)
        np.testing.assert_array_equal(dp.sparse.tocsr(a).T.todense(), matrix.T.toarray())
        if hint:
            np.testing.assert_allclose(dp.sparse.spmv(a, np.ones(4), trans="t"), matrix.T @ np.ones(4))


def test_blocks_of_scipy_s_may_be_unsorted():
    sp, rng = pytest.importorskip("scipy.sparse"), np.random.default_rng(0)
    matrix = sp.random_array((40, 40), density=0.1, format="csr", rng=rng)
    blocks = matrix.tobsr((2, 2))
    assert not blocks.has_sorted_indices
    a = dp.sparse.sparse_tensor(blocks)
    b = rng.standard_normal((40, 3))
    np.testing.assert_allclose(a @ b, matrix @ b)
    np.testing.assert_allclose(a @ b[:, 0].copy(), matrix @ b[:, 0])
    with pytest.raises(BadRequest, match="unsorted elements"):
        dp.sparse.sparse_tensor(blocks, validate=True)
    dp.sparse.tobsr(dp.sparse.sparse_tensor(matrix), (2, 2)).validate()
    blocks.sort_indices()
    dp.sparse.sparse_tensor(blocks, validate=True)


def test_what_has_run_on_no_gpu_is_said():
    rows = [row for op in FAMILIES["sparse"][1] for row in dp.TABLE.of(op) if row.on(dp.Arch(90)) and not row.run_on]
    text = " ".join(TEXT.split())
    assert "all cases of its rows have passed, solvers included." in text
    said = re.search(r"No GPU has run ([^.]*)\.", text)
    assert {row.op for row in rows} == set(re.findall(r"`(\w+)`", said.group(1)) if said else ())
