"""Refit: new weights in the old memory of a prepared call, and what is refused."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.libraries.cutlass import evt
from dispatch.ops.matmul import MatmulRequest


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def call(dev, rng):
    a, b = dev.array(rng.standard_normal((4, 8)), "f32"), dev.array(rng.standard_normal((8, 16)), "f32")
    return dp.prepare(dp.MatmulRequest(a, b))


@pytest.mark.parametrize("kind", ["a tensor", "an array", "another layout"])
def test_the_next_call_reads_the_new_weights_from_the_old_memory(kind, call, dev, rng):
    call()
    weights = rng.standard_normal((8, 16)).astype(np.float32)
    address = call.request.b.ptr
    given = {"a tensor": dev.array(weights), "an array": weights, "another layout": dev.array(weights.T.copy()).T}[kind]
    call.refit(given)
    assert call.request.b.ptr == address
    np.testing.assert_allclose(call().numpy(), call.request.a.numpy() @ weights, rtol=1e-4, atol=1e-5)


def test_an_operand_of_a_tree_is_refitted_by_its_name(dev):
    a, b = dev.array(np.ones((4, 8)), "f16"), dev.array(np.ones((8, 16)), "f16")
    request = MatmulRequest(
        a, b, epilogue=evt.accumulator() + evt.row("bias"), operands={"bias": dev.zeros(16)}, library="cutlass"
    )
    call = dp.prepare(request)
    assert call().numpy().max() == 8
    call.refit(bias=np.full(16, 2, np.float32))
    assert call().numpy().min() == 10


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"weights": np.zeros((8, 15), np.float32)}, "a refit changes only the numbers"),
        ({"weights": np.zeros((8, 16), np.float64)}, "a refit changes only the numbers"),
        ({"weights": [[0.0] * 16] * 8}, "a refit changes only the numbers"),
        ({"out": np.zeros((4, 16), np.float32)}, "a name that is not an operand of this call"),
        ({"bias": np.zeros(16, np.float32)}, "one of a, b"),
    ],
)
def test_another_size_dtype_or_operand_is_refused_and_nothing_is_written(operands, message, call):
    before = call.request.b.numpy()
    with pytest.raises(BadRequest, match=message):
        call.refit(**operands)
    np.testing.assert_array_equal(call.request.b.numpy(), before)


def test_nothing_is_written_where_one_of_several_is_refused(call):
    before = call.request.b.numpy()
    with pytest.raises(BadRequest):
        call.refit(np.zeros((8, 16), np.float32), a=np.zeros(3, np.float32))
    np.testing.assert_array_equal(call.request.b.numpy(), before)


def test_read_only_weights_are_refused(dev):
    frozen = np.ones((8, 16), np.float32)
    frozen.flags.writeable = False
    call = dp.prepare(dp.MatmulRequest(dev.zeros((4, 8)), dp.from_dlpack(frozen)))
    with pytest.raises(BadRequest, match="read-only"):
        call.refit(np.zeros((8, 16), np.float32))


def test_weights_and_the_operand_that_they_are_are_not_both_passed():
    dev = dp.device("host")
    call = dp.prepare(dp.MatmulRequest(dev.array(np.eye(2)), dev.array(np.eye(2))))
    with pytest.raises(BadRequest, match="weights: got an array, as well as b"):
        call.refit(np.ones((2, 2)), b=np.ones((2, 2)))
    assert np.array_equal(call().numpy(), np.eye(2))
