"""Random calls with lists and mappings of operands, or numbers, and ways in which the way to their plan may be wrong.

The stand-ins for a GPU and its executor are those of call_cache_cases.py.
"""

import dataclasses
import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import list_call_cache, list_call_code
from dispatch.device.tensor import Tensor
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import CONFIGS
from dispatch.ops.dropout import DropoutStatesRequest
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).with_name("call_cache_cases.py"))
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)

ROUNDS = 600
NEEDED = ("a", "b", "ends", "x", "w", "dy", "on", "seed")  # without them a call is none
FORMS = {dp.GroupedMatmulRequest: Tensor, GroupedMatmulListRequest: (list, tuple)}
# Ops whose operands come in other ways, and one over bytes that are a library's on each device.
OTHER_FORMS = ("conv", "grouped", "cudnn", "callback", "einsum", "matmul_2_4")
STATES = 4096  # bytes of the state of dropout


@pytest.fixture
def dev(monkeypatch):
    monkeypatch.setattr(DropoutStatesRequest, "bytes_of", lambda *_: STATES)
    device = stand_ins.Gpu()
    yield device
    device.close()


@pytest.fixture
def built(monkeypatch):
    """How many requests were run."""
    count = Counter()
    before = stand_ins.NotingExecutor.run

    def counted(self, request):
        count[request.op] += 1
        return before(self, request)

    monkeypatch.setattr(stand_ins.NotingExecutor, "run", counted)
    return count


class Drawn(stand_ins.Drawn):
    """Random calls of each form: a function, what makes its request, and the arguments by name."""

    def __init__(self, dev, rng):
        super().__init__(dev, rng)
        self.boards = [board(extent) for extent in (4, 6)]
        others = (dp.MatmulRequest, dp.GroupedMatmulRequest, dp.DropoutStatesRequest)
        kinds = (kind for kind in self.pool.requests if kind.unpacked is not None and kind not in others)
        self.numbered = [kind for kind in kinds if not kind.op.startswith(OTHER_FORMS)]
        given = (field for kind in self.numbered for field in dataclasses.fields(kind))
        self.needed = {*NEEDED, *(field.name for field in given if field.default is dataclasses.MISSING)}

    def new(self, *shape, dtype="f32"):
        return self.fresh(self.dev.layout(dp.keys.Dtype.of(dtype), shape, c_strides(shape), 256))

    def form(self, turn):
        forms = (self.product, self.convolution, self.gradient, self.rows, self.lists, self.graph, self.states)
        return (*forms, self.numbers)[turn % (len(forms) + 1)]()

    def named(self, names, items):
        """Operands as a mapping or as pairs."""
        pairs = tuple(zip(names, items, strict=True))
        return dict(pairs) if self.maybe(0.7) else pairs

    def number(self):
        return self.pool.pick((1.0, 0.5, -0.0, 0.0, 2, 0, -3.5, np.float32(0.1), np.float64(7.5)))

    def product(self):
        m, k, n = (8 * int(self.rng.integers(1, 4)) for _ in range(3))
        dtype = self.pool.pick(("f16", "bf16"))
        given = {"a": self.new(m, k, dtype=dtype), "b": self.new(k, n, dtype=dtype)}
        turn = int(self.rng.integers(6))
        x = evt.accumulator()
        if turn == 0:
            tree = evt.relu(evt.scalar("alpha") * x + evt.scalar("beta") * evt.source() + evt.row("bias") * 0.5)
            given |= {"c": self.new(m, n, dtype=dtype), "operands": self.named(["bias"], [self.new(n)])}
            given |= {"epilogue": tree, "alpha": self.number(), "beta": self.number()}
        elif turn == 1:
            tree = evt.reduce(evt.store(x * evt.scalar("s") + evt.load("gate"), "kept"), "top", "amax", over="mn")
            items = [self.number() if self.maybe(0.6) else self.new(1), self.new(m, n, dtype=dtype)]
            names = ["s", "gate"]
            if self.maybe(0.5):
                names, items = [*names, "kept"], [*items, self.new(m, n, dtype=dtype)]
            given |= {"operands": self.named(names, items), "epilogue": tree}
        elif turn == 2:
            given |= {"library": self.pool.pick(("cutlass", "cublasLt")), "alpha": self.number()}
        elif turn == 3:
            given |= {"config": CONFIGS[int(self.rng.integers(3))], "alpha": self.number()}
        elif turn == 4:  # both on the device
            given |= {"alpha": self.new(1).reshape(()), "beta": self.new(1).reshape(())}
            given |= {"c": self.new(m, n, dtype=dtype)} if self.maybe(0.5) else {}
            given |= {} if "c" in given else {"out": self.new(m, n, dtype=dtype)}
        else:  # an Epilogue by another name
            tree = evt.relu(evt.scalar("alpha") * x + evt.row("bias"))
            given |= {"epilogue": tree, "operands": self.named(["bias"], [self.new(n, dtype=dtype)])}
        if self.maybe(0.5):
            given["out"] = given["c"] if "c" in given and self.maybe(0.3) else self.new(m, n, dtype=dtype)
        if self.maybe(0.3):
            given |= {"autotune": True, "compute": self.pool.pick((None, "32f", dp.Compute.COMPUTE_32F))}
        return dp.matmul, dp.MatmulRequest, given

    def images(self, *shape):
        n, h, w, c = shape
        layout = self.dev.layout(dp.keys.Dtype.of("bf16"), (n, c, h, w), (h * w * c, 1, w * c, c), 256)
        return self.fresh(layout)

    def convolution(self):
        extent = int(self.rng.integers(4, 6))
        given = {"x": self.images(1, extent, extent, 8), "w": self.images(8, 3, 3, 8), "pad": 1}
        x = evt.accumulator()
        turn = int(self.rng.integers(3))
        if turn == 0:
            tree = evt.relu(evt.scalar("alpha") * x + evt.row("bias"))
            given |= {"epilogue": tree, "operands": self.named(["bias"], [self.new(8)]), "alpha": self.number()}
        elif turn == 1:
            tree = evt.scalar("s") * x + evt.scalar("beta") * evt.source()
            given |= {"epilogue": tree, "operands": self.named(["s"], [self.number()]), "beta": self.number()}
            given["z"] = self.images(1, extent, extent, 8)
        else:
            given |= {"library": "cutlass", "alpha": self.number()}
        if self.maybe(0.5):
            given["out"] = given["z"] if "z" in given and self.maybe(0.3) else self.images(1, extent, extent, 8)
        return dp.conv_fwd, dp.ConvFwdRequest, given

    def gradient(self):
        given = {"dy": self.images(1, 3, 3, 8), "w": self.images(8, 3, 3, 8), "alpha": self.number()}
        out = self.images(1, 5, 5, 8)
        if self.maybe(0.5):
            given |= {"library": "cutlass"}
        if self.maybe(0.5):
            given |= {"z": self.images(1, 5, 5, 8), "beta": self.number()}
        elif self.maybe(0.5):
            given |= {"out": out, "beta": self.number()}
        if self.maybe(0.5):
            given["out"] = out
        return dp.conv_bwd_data, dp.ConvBwdDataRequest, given

    def rows(self):
        groups, total = int(self.rng.integers(1, 4)), 8 * int(self.rng.integers(1, 4))
        given = {"a": self.new(total, 16, dtype="f16"), "b": self.new(groups, 16, 8, dtype="f16")}
        given |= {"ends": self.new(groups, dtype="i32"), "alpha": self.number()}
        if self.maybe(0.5):
            given["out"] = self.new(total, 8, dtype="f16")
        if self.maybe(0.3):
            given |= {"epilogue": evt.relu(evt.accumulator()), "alpha": 1.0}
        if self.maybe(0.3):
            given["alpha"] = self.new(1) if "epilogue" not in given else 1
        return dp.grouped_matmul, dp.GroupedMatmulRequest, given

    def lists(self):
        groups = int(self.rng.integers(1, 9))
        kind = self.pool.pick((list, tuple))
        sizes = [8 * int(self.rng.integers(1, 3)) for _ in range(groups)]
        given = {"a": kind(self.new(m, 16, dtype="f16") for m in sizes)}
        given |= {"b": kind(self.new(16, 8, dtype="f16") for _ in sizes), "alpha": self.number()}
        if self.maybe(0.5):
            given["out"] = kind(self.new(m, 8, dtype="f16") for m in sizes)
        return dp.grouped_matmul, GroupedMatmulListRequest, given

    def graph(self):
        drawn, extent = self.pool.pick(self.boards)
        given = {"x": self.new(2, 3, extent), "w": self.new(1, extent, 5)}
        given |= {name: self.new(*shape) for name, shape in (("y", (2, 3, 5)), ("top", (2, 1, 5))) if self.maybe(0.5)}
        given |= {name: self.pool.pick((True, False)) for name in ("tf32", "deterministic") if self.maybe(0.3)}
        return drawn, drawn.request, given

    def states(self):
        given = {"on": self.dev, "seed": int(self.rng.integers(5))}
        if self.maybe(0.5):
            given["out"] = self.new(STATES, dtype="u8")
        return dp.dropout_states, dp.DropoutStatesRequest, given

    def numbers(self):
        """An op whose plans take numbers, such as a factor, or a seed and an offset, in some layout of its cases."""
        kind = self.pool.pick(self.numbered)
        fields = self.base(kind)
        if any(isinstance(one, Tensor) and one.shape[:1] == (stand_ins.REFUSED,) for one in fields.values()):
            return self.numbers()  # the stand-in takes no such request
        for name in ("alpha", "beta"):
            if fields.get(name) and not isinstance(fields[name], Tensor) and self.maybe(0.5):  # 0 leaves an operand out
                fields[name] = self.number()
        return stand_ins.function_of(kind), kind, fields

    # -- the same and others ------------------------------------------------------------------------------------------
    def again(self, fields):
        twins = {}

        def other(tensor):
            if tensor.device is not self.dev or tensor.layout.alignment < 256:
                return tensor
            if id(tensor) not in twins:
                twins[id(tensor)] = self.fresh(tensor.layout)
            return twins[id(tensor)]

        return {name: changed_in(value, other) for name, value in fields.items()}

    def changed(self, fields):
        """With one operand near another, another number or choice, or something that is nothing like it."""
        found = [*within(fields)]
        tensors = [(path, value) for path, value in found if isinstance(value, Tensor)]
        turn = self.rng.random()
        if turn < 0.4 and tensors:
            path, tensor = self.pool.pick(tensors)
            outs = [one for one in tensors if one[0][0] in ("out", "y", "top") or one[0][-1] == "kept"]
            if outs:
                path, tensor = self.pool.pick(outs)
            other = self.pool.pick(tensors)[1]
            size = other.layout.high // max(other.dtype.itemsize, 1)
            near = self.moved(other, self.pool.pick((0, 0, 0, 1, -1, size, size - 1, 64, -64)))
            layout = tensor.layout
            place = self.dev.layout(layout.dtype, layout.shape, layout.strides, near.ptr)
            one = other if near.layout is tensor.layout and self.maybe(0.5) else Tensor(near.storage, near.ptr, place)
            return put(fields, path, one)
        path, value = self.pool.pick(found)
        if turn < 0.7:
            path, value = self.pool.pick([one for one in found if not isinstance(one[1], Tensor)] or found)
            return put(fields, path, self.pool.pick(stand_ins.alike(value)))
        if turn < 0.8 and path[0] not in self.needed:
            return {name: one for name, one in fields.items() if name != path[0]}
        if turn < 0.85:
            return {name: one[::-1] if isinstance(one, (list, tuple)) else one for name, one in fields.items()}
        return put(fields, path, self.pool.value(value))


def c_strides(shape):
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def board(extent):
    drawn = dp.cudnn.Graph()
    a, b = drawn.tensor("x", (2, 3, extent), "f32"), drawn.tensor("w", (1, extent, 5), "f32")
    y = drawn.pointwise("RELU_FWD", drawn.matmul(a, b))
    drawn.output("top", drawn.reduction("MAX", y, 1), "f32")
    drawn.output("y", y, "f32")
    return drawn, extent


def changed_in(value, change):
    """The same with other tensors, at any depth."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: changed_in(one, change) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(changed_in(one, change) for one in value)
    return value


def told(tensor):
    return f"{tensor.layout} at {tensor.ptr}"


def within(value, path=()):
    """What lies in arguments, each with the way there."""
    if isinstance(value, dict) or type(value) in (tuple, list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for place, one in items:
            yield from within(one, (*path, place))
    else:
        yield path, value


def put(value, path, new):
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return {name: put(one, rest, new) if name == first else one for name, one in value.items()}
    return type(value)(put(one, rest, new) if place == first else one for place, one in enumerate(value))


def replaced(module, name, other):
    return lambda monkeypatch: monkeypatch.setattr(module, name, other)


def rebound(change):
    """A mutation of what becomes of the operands."""

    def mutate(monkeypatch):
        binding = list_call_cache._binding

        def changed(*given):
            found = binding(*given)
            return None if found is None else change(found)

        monkeypatch.setattr(list_call_cache, "_binding", changed)

    return mutate


def formed(change):
    return rebound(lambda binding: binding._replace(form=binding.form._replace(**change(binding.form))))


def unheld(binding):
    choices = binding.form.pattern.places(list_call_code.CHOICE)
    return binding._replace(unchanged=binding.unchanged[: len(choices)], form=binding.form._replace(unchanged=choices))


def frozen(binding):
    """The first number stays as it was."""
    form = binding.form
    if not form.numbers:
        return binding
    (place, _), *others = form.numbers
    word = f"_number_{place}"
    arguments = tuple(f"_argument_{form.constants}" if name == word else name for name in form.arguments)
    form = form._replace(numbers=tuple(others), arguments=arguments, constants=form.constants + 1)
    return binding._replace(form=form, ranges=binding.ranges[1:], constants=(*binding.constants, 1.25))


swapped = stand_ins.swapped
MUTATIONS = {
    "arguments in another order": formed(lambda form: {"arguments": swapped(form.arguments)}),
    "reads in another order": formed(lambda form: {"reads": swapped(form.reads)}),
    "a write is left out": formed(lambda form: {"writes": form.writes[1:]}),
    "results in another order": formed(lambda form: {"results": swapped(form.results)}),
    "never a tuple": formed(lambda _: {"is_tuple": False}),
    "always a tuple": formed(lambda _: {"is_tuple": True}),
    "no pair is looked at": rebound(lambda binding: binding._replace(bounds=(), form=binding.form._replace(pairs=()))),
    "all may be one view": formed(lambda form: {"pairs": tuple((*pair[:2], True) for pair in form.pairs)}),
    "no span is looked at": formed(lambda _: {"spans": ()}),
    "numbers are not held": rebound(unheld),
    "numbers stay as they were": rebound(frozen),
    "equal choices are the same": replaced(list_call_code, "is_same_choice", lambda *_: True),
    "no span meets another": replaced(list_call_code, "_meet", lambda *_: False),
    "any number will do": rebound(lambda binding: binding._replace(ranges=((-np.inf, np.inf),) * len(binding.ranges))),
    "whole numbers as they are": formed(lambda form: {"numbers": tuple((place, True) for place, _ in form.numbers)}),
}
