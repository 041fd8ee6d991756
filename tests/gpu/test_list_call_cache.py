"""Repeated calls with lists, mappings and trees of operands give on a GPU what their requests give, to the last bit.

They go on until their plans are relocated, each at other addresses and with other numbers.
"""

from collections import Counter

import numpy as np
import pytest

import dispatch as dp
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.libraries.cutlass import evt
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

CALLS = 80


@pytest.fixture
def gpu(dev):
    if dev.arch != 90:
        pytest.skip(f"needs sm_90, this GPU is {dev.arch}")
    return dev


@pytest.fixture
def ran(monkeypatch):
    """How many requests were run."""
    count = Counter()
    before = CudaExecutor.run

    def counted(self, request):
        count[request.op] += 1
        return before(self, request)

    monkeypatch.setattr(CudaExecutor, "run", counted)
    return count


class Form:
    """A function, what makes its request, and operands that differ from call to call."""

    def __init__(self, dev, rng):
        self.dev, self.rng = dev, rng
        self.board = dp.cudnn.Graph()
        x, w = self.board.tensor("x", (2, 64, 32), "bf16"), self.board.tensor("w", (1, 32, 64), "bf16")
        self.board.output("y", self.board.pointwise("RELU_FWD", self.board.matmul(x, w)), "bf16")

    def new(self, *shape, dtype="bf16"):
        return self.dev.array(self.rng.standard_normal(shape).astype(np.float32), dtype)

    def image(self, *shape):
        return self.new(*shape).transpose(0, 3, 1, 2)

    def product(self, turn):
        tree = evt.relu(evt.scalar("alpha") * evt.accumulator() + evt.source() + evt.row("bias") * evt.scalar("s"))
        given = {"a": self.new(64, 32), "b": self.new(32, 64), "c": self.new(64, 64), "alpha": turn / 4}
        named = {"bias": self.new(64, dtype="f32"), "s": float(turn)}
        return dp.matmul, dp.MatmulRequest, {**given, "epilogue": tree, "operands": named}

    def convolution(self, turn):
        tree = evt.scalar("alpha") * evt.accumulator() + evt.row("bias")
        given = {"x": self.image(1, 8, 8, 64), "w": self.image(64, 3, 3, 64), "alpha": turn / 4}
        return (
            dp.conv_fwd,
            dp.ConvFwdRequest,
            {**given, "epilogue": tree, "operands": {"bias": self.new(64, dtype="f32")}},
        )

    def rows(self, turn):
        ends = self.dev.array(np.array([turn % 64, 64], np.int32))
        given = {"a": self.new(64, 32), "b": self.new(2, 32, 64), "ends": ends, "alpha": turn / 4}
        return dp.grouped_matmul, dp.GroupedMatmulRequest, given

    def lists(self, turn):
        given = {"a": [self.new(m, 32) for m in (64, 16, 8)], "b": [self.new(32, 64) for _ in range(3)]}
        return dp.grouped_matmul, GroupedMatmulListRequest, {**given, "alpha": turn / 4}

    def graph(self, turn):
        del turn
        return self.board, self.board.request, {"x": self.new(2, 64, 32), "w": self.new(1, 32, 64)}

    def states(self, turn):
        return dp.dropout_states, dp.DropoutStatesRequest, {"on": self.dev, "seed": turn}


def bits(tensor):
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8)


STATE, UNWRITTEN = 48, slice(36, 40)  # bytes of a curandStateXORWOW, and those between its float and its double


def written(form, tensor):
    """The bytes of a result that are its own: cuDNN writes states field by field, not what lies between."""
    found = bits(tensor)
    if form == "states":
        found = found.reshape(-1, STATE).copy()
        found[:, UNWRITTEN] = 0
    return found


@pytest.mark.parametrize("form", ["product", "convolution", "rows", "lists", "graph", "states"])
def test_a_repeated_call_gives_what_its_request_gives_and_makes_none(gpu, rng, ran, form):
    forms = Form(gpu, rng)
    function, make, fields = getattr(forms, form)(0)
    made = function(**fields)
    results = made if isinstance(made, tuple) else (made,)
    for turn in range(1, CALLS):
        function, make, fields = getattr(forms, form)(turn)
        ran.clear()
        found = function(**fields)
        assert not ran
        given = [gpu.zeros(one.shape, one.dtype) for one in results]
        outputs = {"out": given} if form == "lists" else {"y" if form == "graph" else "out": given[0]}
        if turn % 2 and all(one.strides == other.strides for one, other in zip(results, given, strict=True)):
            function(**fields, **outputs)
            ran.clear()
            assert function(**fields, **outputs) is not None
            assert not ran
        wanted = dp.run(make(**fields))
        for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, wanted)), strict=True):
            rows = fields["ends"].numpy()[-1] if form == "rows" else None
            np.testing.assert_array_equal(written(form, one)[:rows], written(form, other)[:rows])
