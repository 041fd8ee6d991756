"""Linear algebra on the host: every row through its cases, against NumPy and SciPy, refusals, and checked statuses."""

import numpy as np
import pytest

import dispatch as dp
from dispatch import TABLE
from dispatch.keys import HOST
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import cases
from dispatch.row_check import check_row

OPS = FAMILIES["linalg"][1]
ROWS = [row for row in TABLE if row.op in OPS and row.on(HOST)]


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), [pytest.param(r, c, id=f"{r.name}-{c.id}") for r in ROWS for c in cases(r)])
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, dev, rng):
    check_row(row, case, dev, rng)
