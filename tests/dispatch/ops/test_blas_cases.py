"""BLAS on the host: the rows of all levels through their cases, by NumPy and in cuBLAS's terms."""

import sys
from pathlib import Path

import pytest

import dispatch as dp
from dispatch import TABLE
from dispatch.keys import HOST
from dispatch.ops.blas import cublas1, cublas2, cublas3
from dispatch.ops.blas.cases import cases
from dispatch.row_check import check_row
from dispatch.table.cublas import LEVEL1, LEVEL2, LEVEL3

sys.path.insert(0, str(Path(__file__).parent))
import column_major

sys.path.remove(str(Path(__file__).parent))

LOWER = {
    **dict.fromkeys(LEVEL1, cublas1.lower),
    **dict.fromkeys(LEVEL2, cublas2.lower),
    **dict.fromkeys(LEVEL3, cublas3.lower),
}
CASES = column_major.host_cases([row for row in TABLE if row.op in LOWER and row.on(HOST)], cases)


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "cases"), CASES)
def test_a_row_passes_its_cases(row, cases, dev, each):
    def passes(case, rng):
        assert check_row(row, case, dev, rng) == ""

    each(cases, passes)


@pytest.mark.parametrize("cases", [pytest.param(p.values[1], id=p.id, marks=p.marks) for p in CASES])
def test_cublas_is_asked_for_what_the_requests_say(cases, dev, each):
    def asked(case, rng):
        check = case.check(dev, rng)
        request = check.request
        outputs = dev.executor().outputs(request)
        column_major.carry_out(LOWER[request.op](request), request.arguments(outputs))
        check.verify(request.result(outputs))

    each(cases, asked)
