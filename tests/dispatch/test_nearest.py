"""What a refusal calls the nearest request that works: which change is smaller than which."""

from __future__ import annotations

import dataclasses

import pytest

import dispatch as dp
from dispatch.keys import HOST, Arch
from dispatch.table.select import distance, explain, nearest

H100 = Arch(90)
ROWS = [row for row in dp.TABLE.of("matmul") if row.on(H100)][:4]

ORDER = "needs a in row-major order, has column-major"
ALIGNED = "needs extents that are multiples of 16, has 3"
EPILOGUE = "needs an epilogue of NONE, has GELU"
OPERAND = "needs an epilogue operand of f16, has f32"
COMPUTE = "needs compute COMPUTE_32F, has COMPUTE_64F"
ASKED = "needs compute=COMPUTE_32F_FAST_TF32 in the request"
SCALES = "needs scale modes (none, none), has (SCALAR_32F, SCALAR_32F)"
ONE_DTYPE = "needs dtypes (f32, f32, f32), has (f32, f32, f16)"
TWO_DTYPES = "needs dtypes (f32, f32, f32), has (f16, f32, f16)"
ALL_DTYPES = "needs dtypes (f32, f32, f32), has (f16, f16, f16)"
LIBRARY = "cublasLtMatmulAlgoGetHeuristic finds no algorithm"
OLD = "needs cublasLt 12.9, has 12.1"
GPU, ELSEWHERE = "needs sm_100 or newer, has sm_90", "needs host, has sm_90"


# From the smallest change to the largest; what stands in one line is as far.
FARTHER = [
    [[]],
    [[ORDER], [ALIGNED], [OLD]],
    [[ORDER, ALIGNED]],
    [[EPILOGUE], [COMPUTE], [ASKED], [SCALES], [ORDER, ALIGNED, OLD]],
    [[ONE_DTYPE], [EPILOGUE, ORDER]],
    [[TWO_DTYPES], [EPILOGUE, COMPUTE]],
    [[ALL_DTYPES], [ONE_DTYPE, ONE_DTYPE]],
    [[EPILOGUE, COMPUTE, SCALES]],
    [[LIBRARY]],
    [[LIBRARY, ORDER]],
    [[GPU], [ELSEWHERE], ["needs sm_100, has host"]],
    [[GPU, LIBRARY]],
]


def test_a_smaller_change_is_nearer() -> None:
    far = [{distance(why) for why in line} for line in FARTHER]
    assert all(len(each) == 1 for each in far), far
    numbers = [each.pop() for each in far]
    assert numbers == sorted(set(numbers))
    assert distance([OPERAND]) == distance([ORDER])


def test_another_number_of_dtypes_counts_those_that_both_have() -> None:
    assert distance(["needs dtypes (f32, f32, f32, f32), has (f32, f32)"]) < distance([ONE_DTYPE])


@pytest.mark.parametrize("line", range(1, len(FARTHER)))
def test_the_nearest_row_is_named_with_all_its_reasons(line: int) -> None:
    tried = [(ROWS[0], FARTHER[-1][0]), (ROWS[1], FARTHER[line][0]), (ROWS[2], FARTHER[-1][0]), (ROWS[3], ())]
    if line == len(FARTHER) - 1:
        tried[0] = (ROWS[0], [*FARTHER[-1][0], ORDER])
    assert nearest(tried, H100) == f"{ROWS[1].name}, which {' and '.join(FARTHER[line][0])}"


def test_of_rows_as_near_the_first_is_named() -> None:
    assert nearest([(ROWS[2], [EPILOGUE]), (ROWS[1], [COMPUTE])], H100).startswith(ROWS[2].name)


def test_a_row_of_another_machine_is_never_the_nearest() -> None:
    other = dataclasses.replace(ROWS[0], arch=HOST, until=HOST)
    assert nearest([(other, [ORDER]), (ROWS[1], [LIBRARY, LIBRARY])], H100).startswith(ROWS[1].name)
    assert nearest([(other, [ORDER])], H100) == "no row is for sm_90"


def test_an_explanation_has_the_refusals_before_the_row_and_cannot_be_changed() -> None:
    dev = dp.device("host")
    request = dp.MatmulRequest(dev.zeros((4, 4), "bf16"), dev.zeros((4, 4), "bf16"))
    found = explain(request, H100)
    names = [row.name for row in dp.TABLE.of("matmul") if row.on(H100)]
    assert [name for name, _ in found.refusals] == names[: names.index(found.row.name)]
    assert found.refusals
    assert all(why for _, why in found.refusals)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.request = ""  # type: ignore[misc]
