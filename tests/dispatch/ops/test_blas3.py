"""BLAS level 3 on the host: rows through their cases, against SciPy's BLAS, in cuBLAS's terms, and refusals."""

import sys
from pathlib import Path

import pytest

import dispatch as dp
from dispatch import TABLE
from dispatch.keys import HOST
from dispatch.ops.blas.cases import cases
from dispatch.ops.blas.cublas3 import lower
from dispatch.row_check import check_row

sys.path.insert(0, str(Path(__file__).parent))
import column_major

sys.path.remove(str(Path(__file__).parent))

OPS = ("symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx", "trmm", "trsm", "geam", "dgmm")
ROWS = [row for row in TABLE if row.op in OPS and row.on(HOST)]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case(row, case, dev, rng):
    assert check_row(row, case, dev, rng) == ""


@pytest.mark.parametrize("case", [pytest.param(p.values[1], id=p.id) for p in CASES])
def test_cublas_is_asked_for_what_the_request_says(case, dev, rng):
    check = case.check(dev, rng)
    request = check.request
    outputs = dev.executor().outputs(request)
    column_major.carry_out(lower(request), request.arguments(outputs))
    check.verify(request.result(outputs))
