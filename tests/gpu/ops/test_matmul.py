"""Every row of cuBLASLt and cuBLAS that this GPU can run, through all of its cases: fresh numbers, poisoned outputs.

A case that a rule of its row or the library refuses must raise NoRow with that reason; the plain case of every epilogue
must run.
"""

from dataclasses import replace

import pytest

import dispatch
from dispatch.core.row import refusals
from dispatch.errors import NoRow
from dispatch.ops.matmul.cases import cases
from dispatch.refusal import Kind

ROWS = [row for row in dispatch.TABLE if row.op == "matmul" and row.library in ("cublasLt", "cublas")]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dispatch.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch):
        newest = "" if row.max_arch is None else f" to {row.max_arch}"
        pytest.skip(f"needs {row.min_arch}{newest}, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, gpu, rng):
    """Right results from the recorded call and the plain one; or NoRow, with the rule's words or the library's."""
    skip_unless_for(row, gpu)
    check = case.check(gpu, rng)
    why = tuple(refusals(row, check.request, check.request.signature()))
    try:  # what this row refuses, one of CUTLASS may take
        named = why or row.library == "cublas"  # behind cuBLASLt's rows
        request = replace(check.request, library=row.library) if named else check.request
        call = dispatch.prepare(request)
    except NoRow as error:
        assert case.form.name != "plain"
        said = dict(error.tried)[row.name]
        theirs = [reason.kind for reason in said] == [Kind.LIBRARY]
        assert said == why or (
            not why and theirs and str(said[0]).startswith(("cublasLtMatmulAlgoGetHeuristic", "cublasGemm"))
        )
        return
    assert (call.row.name == row.name) == (not why)
    result = None
    for _ in range(3):  # the second run of the same addresses is recorded, the third a replay
        check.renew(result)
        result = call()
        check.verify(result)
    again = case.check(gpu, rng)
    again.verify(dispatch.run(replace(again.request, library=request.library)))  # the plain call, at other addresses


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_repeated_request_is_right_each_time(row, gpu, rng):
    """The second run of the same addresses is recorded and the third is a replay; each reads what is there then."""
    skip_unless_for(row, gpu)
    case = next(case for case in cases(row) if case.form.name == "plain")
    check = case.check(gpu, rng)
    request = replace(check.request, library=row.library)
    for _ in range(4):
        check.renew()
        check.verify(dispatch.run(request))
