"""Every host row of matmul that stands for cuBLASLt, through all its cases, by the functions that users call."""

from dataclasses import replace

import numpy as np
import pytest

import dispatch
from dispatch import TABLE
from dispatch.core.row import refusals
from dispatch.errors import NoRow
from dispatch.keys import HOST, Epilogue
from dispatch.ops.matmul import numpy_matmul
from dispatch.ops.matmul.cases import cases
from dispatch.ops.matmul.lower import vector_alignment
from dispatch.testing.memory import Mismatch

ROWS = [row for row in TABLE if row.op == "matmul" and row.on(HOST) and row.of("cublasLt")]


@pytest.fixture
def host():
    return dispatch.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, host, rng):
    taken = 0
    for case in cases(row):
        check = case.check(host, rng)
        if refusals(row, check.request, check.request.signature()):
            with pytest.raises(NoRow):
                dispatch.prepare(replace(check.request, library="cublasLt"))
            continue
        taken += 1
        assert dispatch.prepare(check.request).row.dtypes == row.dtypes
        check.verify(dispatch.run(check.request))
    assert taken >= len(row.epilogues)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_numpy_also_takes_what_the_gpu_row_refuses(row, host, rng):
    """The rules of a row are the GPU library's; the formulas know none of them."""
    for case in cases(row):
        check = case.check(host, rng)
        executor = host.executor()
        outputs = executor.outputs(check.request)
        numpy_matmul(check.request, executor, row).run(check.request, outputs)
        check.verify(check.request.result(outputs))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_cases_cover_what_a_row_lists(row):
    found = cases(row)
    assert 3 <= len(found) <= 64
    assert {case.epilogue for case in found} == set(row.epilogues)
    assert {case.modes for case in found} == set(row.scales)
    assert len({case.id for case in found}) == len(found)
    vectors = [{case.bias for case in found} - {None}, {case.aux for case in found} - {None}]
    for allowed, seen in zip(row.epilogue_dtypes, vectors, strict=True):
        assert seen <= set(allowed)


def test_every_epilogue_has_a_host_row():
    assert {epilogue for row in ROWS for epilogue in row.epilogues} == set(Epilogue)


F32_ROW = next(row for row in ROWS if row.dtypes[0].name == "f32")


@pytest.mark.parametrize("number", range(0, len(cases(F32_ROW)), 7))
def test_a_case_notices_a_wrong_element(number, host, rng):
    check = cases(F32_ROW)[number].check(host, rng)
    result = dispatch.run(check.request)
    check.verify(result)
    out = result[0] if isinstance(result, tuple) else result
    if not out.size:
        return
    values = np.asarray(out)
    corner = (-1,) * values.ndim
    values[corner] += 0.01
    with pytest.raises(Mismatch, match="out is wrong in 1 of"):
        check.verify(result)


def test_a_case_notices_a_byte_beside_the_output(host, rng):
    padded = next(case for case in cases(F32_ROW) if case.form.name == "odd padded")
    check = padded.check(host, rng)
    result = dispatch.run(check.request)
    check.verify(result)
    np.asarray(check.written[0].whole)[0, 0] = 1.0
    with pytest.raises(Mismatch, match="bytes beside"):
        check.verify(result)


def test_a_case_notices_an_output_that_was_not_written(host, rng):
    plain = next(case for case in cases(F32_ROW) if case.form.name == "plain")
    check = plain.check(host, rng)
    with pytest.raises(Mismatch):
        check.verify(check.request.out)


def test_a_bgrad_is_allocated_so_that_each_call_of_a_batch_gets_it_at_16_bytes(host, rng):
    """The first batch axis does not merge with the others, so that the library is called for each of its indices."""
    a = host.array(rng.integers(-2, 3, 300), "f16").strided((3, 4, 3, 7), (98, 24, 1, 3))
    request = dispatch.MatmulRequest(a, host.array(np.ones((7, 1)), "f16"), epilogue="bgrada")
    assert vector_alignment(request, "bgrad") == 64  # 32 elements from call to call
    _, bgrad = dispatch.run(request)
    assert bgrad.layout.strides == (32, 8, 1)
    np.testing.assert_array_equal(bgrad.numpy(), a.numpy().sum(axis=-1))
    whole = host.zeros((3, 4, 3), "f16")
    with pytest.raises(NoRow, match=r"bgrad at multiples of 16 bytes along the outer batch axis, has 8: give one"):
        dispatch.run(replace(request, bgrad=whole))


@pytest.mark.parametrize(
    ("strides", "bgrad"),
    [
        ((84, 21, 1, 3), (12, 3, 1)),  # dense: one call of the library
        ((100, 21, 1, 3), (32, 8, 1)),
        ((0, 21, 1, 3), (32, 8, 1)),
        ((84, 0, 1, 3), (32, 8, 1)),
    ],
)
def test_a_bgrad_has_gaps_only_where_batch_axes_do_not_merge(strides, bgrad, host):
    a = host.zeros(400, "f16").strided((3, 4, 3, 7), strides)
    request = dispatch.MatmulRequest(a, host.zeros((7, 1), "f16"), epilogue="bgrada")
    assert request.unallocated()["bgrad"][:2] == ((3, 4, 3), bgrad)
    assert dispatch.run(request)[1].shape == (3, 4, 3)
    even = dispatch.MatmulRequest(
        host.zeros(800, "f16").strided((3, 4, 6, 7), (200, 42, 1, 6)), request.b, epilogue="bgrada"
    )
    assert even.unallocated()["bgrad"][1] == (24, 6, 1)  # 48 bytes from call to call
