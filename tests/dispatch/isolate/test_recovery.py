"""Which requests may run again after their child was lost: ranges of memory that touch, cross or lie apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.process.repeatable import InFlightRequest, unsafe_to_repeat, written_tensors

N = 4  # a product is N by N, so a row of it is N elements


@pytest.fixture
def memory() -> dp.Tensor:
    """Four matrices of N rows, one behind the other in one storage."""
    return dp.device("host").array(np.ones((4 * N, N), np.float32))


def operand() -> dp.Tensor:
    return dp.device("host").array(np.ones((N, N), np.float32))


def product(number: int, a: dp.Tensor, b: dp.Tensor, out: dp.Tensor | None = None, **fields: Any) -> InFlightRequest:
    request = dp.MatmulRequest(a=a, b=b, out=out, **fields)
    outputs = {} if out is not None else {"out": operand()}
    return InFlightRequest(number, None, request, outputs, None)  # type: ignore[arg-type]  # nobody asks the future here


def test_what_is_written_are_given_outputs_and_made_ones() -> None:
    a, b, out = operand(), operand(), operand()
    assert written_tensors(product(1, a, b, out)) == [out]
    sent = product(1, a, b)
    assert written_tensors(sent) == [sent.outputs["out"]]


def test_requests_that_share_nothing_may_run_again() -> None:
    assert unsafe_to_repeat([product(n, operand(), operand(), operand()) for n in range(5)]) == {}
    assert unsafe_to_repeat([]) == {}


def test_a_request_that_reads_what_it_writes_may_not() -> None:
    out = operand()
    in_place = product(3, operand(), operand(), out, beta=1.0)
    found = unsafe_to_repeat([product(2, operand(), operand(), operand()), in_place, product(4, operand(), operand())])
    assert list(found) == [3]
    assert "reads an operand that it writes" in found[3]


def test_an_operand_that_a_later_request_overwrites_makes_the_earlier_one_unsafe(memory: dp.Tensor) -> None:
    part = memory[N : 2 * N]
    later = product(9, operand(), operand(), memory[N : 2 * N])
    found = unsafe_to_repeat([product(5, part, operand()), product(6, operand(), part), later])
    assert list(found) == [5, 6]
    assert "operand a" in found[5]
    assert "operand b" in found[6]


def test_an_operand_that_an_earlier_request_wrote_is_safe(memory: dp.Tensor) -> None:
    part = memory[:N]
    assert unsafe_to_repeat([product(1, operand(), operand(), part), product(2, part, operand())]) == {}


@pytest.mark.parametrize(
    ("begin", "is_unsafe"),
    [(0, False), (1, True), (N - 1, True), (N, True), (2 * N - 1, True), (2 * N, False), (3 * N, False)],
)
def test_ranges_that_only_touch_do_not_overlap(memory: dp.Tensor, begin: int, *, is_unsafe: bool) -> None:
    """Rows N to 2N are read; the later request writes N rows from `begin` on: one row more or less decides."""
    sent = [product(1, memory[N : 2 * N], operand()), product(2, operand(), operand(), memory[begin : begin + N])]
    assert (1 in unsafe_to_repeat(sent)) is is_unsafe


def test_a_reversed_operand_is_where_its_elements_are(memory: dp.Tensor) -> None:
    rows = memory[2 * N - 1 : N - 1 : -1]  # rows N to 2N, from the last on
    request: Any = SimpleNamespace(repeatable=True, tensors=lambda: [("x", rows, False)])  # matmul takes no such view
    for begin, is_unsafe in ((0, False), (N, True), (2 * N, False)):
        sent = [product(1, operand(), operand())._replace(request=request, outputs={})]
        sent.append(product(2, operand(), operand(), memory[begin : begin + N]))
        assert (1 in unsafe_to_repeat(sent)) is is_unsafe


def test_one_that_is_unsafe_by_itself_hides_no_other(memory: dp.Tensor) -> None:
    sent = [product(1, operand(), operand(), operand(), beta=1.0), product(2, memory[:N], operand())]
    assert list(unsafe_to_repeat([*sent, product(3, operand(), operand(), memory[:N])])) == [1, 2]


def test_operands_are_looked_at_wherever_outputs_stand_among_them(memory: dp.Tensor) -> None:
    request: Any = SimpleNamespace(
        repeatable=True, tensors=lambda: [("out", operand(), True), ("x", memory[:N], False)]
    )  # matmul names its outputs last
    sent = product(1, operand(), operand())._replace(request=request, outputs={})
    assert list(unsafe_to_repeat([sent, product(2, operand(), operand(), memory[:N])])) == [1]


def test_other_memory_at_the_same_rows_does_not_count(memory: dp.Tensor) -> None:
    other = dp.device("host").array(np.ones((4 * N, N), np.float32))
    assert unsafe_to_repeat([product(1, memory[:N], operand()), product(2, operand(), operand(), other[:N])]) == {}


def test_memory_that_was_made_for_a_later_request_counts_too() -> None:
    later = product(2, operand(), operand())
    made = later.outputs["out"]
    assert list(unsafe_to_repeat([product(1, made, operand()), later])) == [1]


def test_all_writers_of_a_storage_are_looked_at(memory: dp.Tensor) -> None:
    """The second of three writers hits; the first is earlier than the reader, the last lies beside it."""
    sent = [
        product(1, operand(), operand(), memory[:N]),
        product(2, memory[:N], operand()),
        product(3, operand(), operand(), memory[:N]),
        product(4, operand(), operand(), memory[3 * N :]),
    ]
    assert list(unsafe_to_repeat(sent)) == [2]
