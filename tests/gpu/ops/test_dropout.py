"""Dropout on the GPU: every row through its cases, and masks that can be drawn again."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.dropout import DropoutRequest, dropout, dropout_bwd, dropout_states
from dispatch.ops.dropout.cases import cases

OPS = ("dropout_states", "dropout", "dropout_bwd")
ROWS = [row for row in dispatch.TABLE if row.op in OPS and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


def drawn(gpu, seed, count):
    """The masks of so many passes from a seed, of which the later ones are replayed."""
    states, x = dropout_states(gpu, seed), gpu.array(np.ones(4099, np.float32))
    request = DropoutRequest(x, states, 0.5, out=gpu.empty((4099,)), reserve=gpu.empty((516,), "u8"))
    return [dispatch.run(request)[0].numpy() != 0 for _ in range(count)]


def test_a_seed_gives_the_same_masks_in_the_same_order_and_another_seed_others(gpu):
    first, again, other = drawn(gpu, 7, 5), drawn(gpu, 7, 5), drawn(gpu, 8, 1)
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    pairs = [(first[i], first[j]) for i in range(5) for j in range(i)] + [(first[0], other[0])]
    assert all(0.4 < (one == two).mean() < 0.6 for one, two in pairs)


def test_the_gradient_goes_where_the_forward_pass_kept(gpu, rng):
    x = gpu.array(rng.standard_normal(1000).astype(np.float32) + 10)
    y, reserve = dropout(x, dropout_states(gpu, 3), 0.25)
    dx = dropout_bwd(gpu.array(np.full(1000, 3, np.float32)), reserve, 0.25)
    np.testing.assert_array_equal(dx.numpy(), np.where(y.numpy() != 0, np.float32(4), 0))


def test_two_states_do_not_disturb_each_other(gpu):
    x = gpu.array(np.ones(500, np.float32))
    one, other = dropout_states(gpu, 1), dropout_states(gpu, 2)
    mixed = [dropout(x, states)[0].numpy() for states in (one, other, one, other)]
    one, other = dropout_states(gpu, 1), dropout_states(gpu, 2)
    apart = [dropout(x, one)[0].numpy() for _ in "12"] + [dropout(x, other)[0].numpy() for _ in "12"]
    np.testing.assert_array_equal(mixed, [apart[0], apart[2], apart[1], apart[3]])
