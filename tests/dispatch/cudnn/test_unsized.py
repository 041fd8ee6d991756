"""Outputs whose size only the library knows: a request is made without asking it, and its plan asks."""

from typing import Any

import pytest

import dispatch as dp
from dispatch.core.operands import UNSIZED
from dispatch.errors import BadRequest
from dispatch.libraries.cudnn import dropout_states
from dispatch.ops.dropout import DropoutRequest, DropoutStatesRequest
from dispatch.ops.rnn import RnnRequest, descriptors
from dispatch.ops.rnn import cudnn as rnn

NETWORK = dp.Network(dp.RnnMode.LSTM, 4, 8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library has been asked for, by requests on a device that passes for a GPU."""
    questions: list[str] = []

    def states_bytes(_: Any) -> int:
        questions.append("states")
        return 64

    def reserve_bytes(*_: Any) -> int:
        questions.append("reserve")
        return 320

    monkeypatch.setattr(type(dp.device("host")), "is_host", False)
    for module in (dropout_states, dp.ops.dropout):
        monkeypatch.setattr(module, "states_bytes", states_bytes)
    monkeypatch.setattr(descriptors, "reserve_bytes", reserve_bytes)
    return questions


def test_a_state_is_sized_when_it_is_allocated(asked):
    request = DropoutStatesRequest(dp.device("host"), 7)
    request.key(), request.describe(), request.signature(), request.tensors()
    assert asked == []
    assert request.unallocated() == {"out": ((64,), (1,), dp.Dtype.of("u8"))}
    assert request.layout_of("out").shape == (64,)
    assert "states" in asked


def test_dropout_takes_a_state_of_any_size_until_it_is_bound(asked):
    host = dp.device("host")
    request = DropoutRequest(host.zeros((8,), "f32"), host.empty((48,), "u8"))
    request.key(), request.describe(), request.unallocated()
    assert asked == []
    with pytest.raises(BadRequest, match=r"states: got u8\[48\]; expected dense u8\[64\]"):
        dp.ops.dropout.cudnn_dropout(request, None, None)
    with pytest.raises(BadRequest, match=r"out: got u8\[48\]; expected dense u8\[64\]"):
        dp.ops.dropout.cudnn_dropout(DropoutStatesRequest(host, 7, out=request.states), None, None)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 12), "u8"), ((48,), "i8")])
def test_what_can_be_no_state_is_refused_at_once(asked, shape, dtype):
    host = dp.device("host")
    with pytest.raises(BadRequest, match=r"states: .* expected dense u8\[…\]"):
        DropoutRequest(host.zeros((8,), "f32"), host.empty(shape, dtype))
    with pytest.raises(BadRequest, match=r"out: .* expected dense u8\[…\]"):
        DropoutStatesRequest(host, 7, out=host.empty(shape, dtype))
    assert asked == []


def test_a_network_in_training_asks_for_its_reserve_space_when_it_is_bound(asked):
    host = dp.device("host")
    fields: dict[str, Any] = {"training": True, "dropout": 0.5, "states": host.empty((48,), "u8")}
    x, weights = host.zeros((5, 2, 4)), host.zeros((NETWORK.weight_count,))
    request = RnnRequest(x, weights, NETWORK, **fields)
    request.key(), request.describe(), request.signature()
    given = request.replace(reserve=host.empty((123,), "u8"))  # its size is compared where the plan is made
    assert "reserve" not in given.unallocated()
    assert asked == []
    assert request.outputs()["reserve"].shape == (UNSIZED,)
    assert request.unallocated()["reserve"] == ((320,), (1,), dp.Dtype.of("u8"))
    assert asked == ["reserve"]
    with pytest.raises(BadRequest, match=r"reserve: .* expected u8\[…\]"):
        request.replace(reserve=host.empty((123,), "f32"))
    with pytest.raises(BadRequest, match=r"states: got u8\[48\]; expected dense u8\[64\]"):
        rnn.plan(request, None, None)


def test_the_host_knows_its_sizes():
    host = dp.device("host")
    x, weights = host.zeros((5, 2, 4)), host.zeros((NETWORK.weight_count,))
    request = RnnRequest(x, weights, NETWORK, training=True)
    size = request.outputs()["reserve"].shape
    assert size != (UNSIZED,)
    with pytest.raises(BadRequest, match="reserve: "):
        request.replace(reserve=host.empty((size[0] + 1,), "u8"))
    with pytest.raises(BadRequest, match=r"expected dense u8\[16\]"):
        DropoutStatesRequest(host, 7, out=host.empty((48,), "u8"))
