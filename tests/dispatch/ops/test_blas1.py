"""BLAS level 1 on the host: rows through their cases, against SciPy, in cuBLAS's terms, and refusals."""

import sys
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.blas.cases import cases
from dispatch.ops.blas.cublas1 import lower
from dispatch.row_check import check_row
from dispatch.table.cublas import LEVEL1
from dispatch.table.select import select

sys.path.insert(0, str(Path(__file__).parent))
import column_major

sys.path.remove(str(Path(__file__).parent))

GPU = Arch(90)
ROWS = [row for row in TABLE if row.op in LEVEL1 and row.on(HOST)]
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


def test_places_are_counted_from_1(dev):
    x = np.array([0.5, -3, 2, 3])
    assert dp.iamax(dev.array(x)).item() == 2
    assert dp.iamin(dev.array(x)).item() == 1
    assert dp.iamax(dev.array(x[:0])).item() == 0


def test_sums_norms_and_products(dev, rng):
    x, y = (rng.standard_normal(9) + 1j * rng.standard_normal(9) for _ in range(2))
    np.testing.assert_allclose(dp.dotc(dev.array(x), dev.array(y)).item(), np.vdot(x, y))
    np.testing.assert_allclose(dp.nrm2(dev.array(x)).item(), np.linalg.norm(x))
    assert dp.nrm2(dev.array(np.full(4, 1e200))).item() == 2e200
    assert dp.nrm2(dev.array(x.astype(np.complex64))).dtype == "f32"
    np.testing.assert_allclose(dp.axpy(dev.array(x), dev.array(y), alpha=2j).numpy(), 2j * x + y)


def test_what_does_not_fit_is_refused(dev):
    x, z = dev.zeros((3,)), dev.zeros((3,), "c64")
    for make, words in (
        (lambda: dp.AxpyRequest(x, dev.zeros((4,))), "y: got f32[4]; expected f32[3]"),
        (lambda: dp.DotRequest(x, z), "y: got c64[3]; expected f32[3]"),
        (lambda: dp.ScalRequest(dev.zeros((3, 1))), "x: got f32[3, 1]; expected a vector"),
        (lambda: dp.ScalRequest(x, alpha=1j), "alpha: got 1j; expected a real number"),
        (lambda: dp.Nrm2Request(z, out=dev.zeros((), "c64")), "out: got c64[]; expected f32[]"),
    ):
        with pytest.raises(BadRequest) as error:
            make()
        assert words in str(error.value)
    for request, reason in ((dp.DotRequest(z, z), "c64"), (dp.IamaxRequest(x[::-1]), "x with a stride above 0")):
        with pytest.raises(NoRow, match=reason):
            select(request, GPU)
