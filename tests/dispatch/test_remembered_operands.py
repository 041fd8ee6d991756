"""Repeated calls with lists and mappings of operands, or numbers, end as a request on a fresh executor would.

The stand-ins for a GPU and its executor are those of test_remembered.py.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import pickle
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import operand_code, remembered, remembered_operands
from dispatch.core.request import Request
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, StaleTensor
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import CONFIGS
from dispatch.ops.dropout import DropoutStatesRequest
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).with_name("test_remembered.py"))
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


# -- what is called ---------------------------------------------------------------------------------------------------
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


def both(dev, function, make, given):
    call = stand_ins.outcome(dev.executor(), lambda: function(**given))
    fresh = stand_ins.NotingExecutor(dev.executor().stream)
    return call, stand_ins.outcome(fresh, lambda: fresh.run(make(**given)))


def judge(dev, rng, rounds=ROUNDS):
    """What ends otherwise by a call than by a request, up to the first; how many calls of each form made no request."""
    drawn, quick, executor = Drawn(dev, rng), Counter(), dev.executor()
    before, runs = stand_ins.NotingExecutor.run, Counter()

    def counted(self, request):
        runs[self is executor] += 1
        return before(self, request)

    stand_ins.NotingExecutor.run = counted
    try:
        for turn in range(rounds):
            function, make, fields = drawn.form(turn)
            variants = [fields, drawn.again(fields), drawn.changed(fields)]
            variants += [drawn.again(variants[-1]), drawn.changed(fields), drawn.again(fields)]
            for given in variants:
                if any(isinstance(one, Tensor) and one.device is not dev for _, one in within(given)):
                    continue  # it is for another device to run
                if function is dp.grouped_matmul and not all(isinstance(given[n], FORMS[make]) for n in ("a", "b")):
                    continue  # it is for the other request, or for none
                if "ends" in given and not isinstance(given["ends"], Tensor):
                    continue  # each run copies them to another place
                count = runs[True]
                call, request = both(dev, function, make, given)
                name = "numbers" if make in drawn.numbered else getattr(make, "__name__", "graph")
                quick[name] += runs[True] == count and bool(call[1])
                if call != request:
                    return [(name, changed_in(given, told), call, request)], quick
    finally:
        stand_ins.NotingExecutor.run = before
        drawn.close()
    return [], quick


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    assert len(quick) == 8
    assert all(count > 60 for count in quick.values()), quick


def replaced(module, name, other):
    return lambda monkeypatch: monkeypatch.setattr(module, name, other)


def coursed(change):
    """A mutation of what becomes of the operands."""

    def mutate(monkeypatch):
        course = remembered_operands._course

        def changed(*given):
            found = course(*given)
            return None if found is None else change(found)

        monkeypatch.setattr(remembered_operands, "_course", changed)

    return mutate


def formed(change):
    return coursed(lambda course: course._replace(form=course.form._replace(**change(course.form))))


def unheld(course):
    choices = course.form.pattern.places(operand_code.CHOICE)
    return course._replace(held=course.held[: len(choices)], form=course.form._replace(held=choices))


def frozen(course):
    """The first number stays as it was."""
    form = course.form
    if not form.numbers:
        return course
    (place, _), *others = form.numbers
    word = f"_number_{place}"
    arguments = tuple(f"_argument_{form.constants}" if name == word else name for name in form.arguments)
    form = form._replace(numbers=tuple(others), arguments=arguments, constants=form.constants + 1)
    return course._replace(form=form, ranges=course.ranges[1:], constants=(*course.constants, 1.25))


swapped = stand_ins.swapped
MUTATIONS = {
    "arguments in another order": formed(lambda form: {"arguments": swapped(form.arguments)}),
    "reads in another order": formed(lambda form: {"reads": swapped(form.reads)}),
    "a write is left out": formed(lambda form: {"writes": form.writes[1:]}),
    "results in another order": formed(lambda form: {"results": swapped(form.results)}),
    "never a tuple": formed(lambda _: {"is_tuple": False}),
    "always a tuple": formed(lambda _: {"is_tuple": True}),
    "no pair is looked at": coursed(lambda course: course._replace(bounds=(), form=course.form._replace(pairs=()))),
    "all may be one view": formed(lambda form: {"pairs": tuple((*pair[:2], True) for pair in form.pairs)}),
    "no span is looked at": formed(lambda _: {"spans": ()}),
    "numbers are not held": coursed(unheld),
    "numbers stay as they were": coursed(frozen),
    "equal choices are the same": replaced(operand_code, "same", lambda *_: True),
    "no span meets another": replaced(operand_code, "_meet", lambda *_: False),
    "any number will do": coursed(lambda course: course._replace(ranges=((-np.inf, np.inf),) * len(course.ranges))),
    "whole numbers as they are": formed(lambda form: {"numbers": tuple((place, True) for place, _ in form.numbers)}),
}


def in_part(mutations):
    """One in three at once, the others with what takes long."""
    marks = [[pytest.mark.exhaustive] if number % 3 else [] for number in range(len(mutations))]
    return [pytest.param(mutations[name], id=name, marks=mark) for name, mark in zip(mutations, marks, strict=True)]


@pytest.mark.parametrize("mutate", in_part(MUTATIONS))
def test_a_wrong_way_in_is_found(dev, rng, mutate, monkeypatch):
    clear = operand_code._maker.cache_clear
    clear()
    mutate(monkeypatch)
    try:
        differences, _ = judge(dev, rng, 5 * ROUNDS)
    except (IndexError, TypeError):  # it has come to nothing
        return
    finally:
        clear()
    assert differences


# -- no request -------------------------------------------------------------------------------------------------------
def test_a_repeated_call_of_any_form_makes_no_request(dev, rng, built):
    drawn = Drawn(dev, rng)
    for turn in range(140):
        function, make, fields = drawn.form(turn)
        if fields.get("library") == "cublasLt" and fields.get("beta"):
            continue
        if fields.get("alpha") is not None and "c" in fields and fields["c"] is fields.get("out"):
            continue  # D is C, which is another plan: see `MatmulRequest.named_arguments`
        function(**fields)
        built.clear()
        function(**drawn.again(fields))
        assert not built, f"{make} {changed_in(fields, told)}"
    drawn.close()


def test_every_request_class_has_a_way_without_a_request(rng):
    pool = stand_ins.hostile.Pool(rng)
    without = [kind.op for kind in pool.requests if kind.plain_reads() is None and kind.unpacked is None]
    pool.other.close()
    assert not without


def test_numbers_change_from_call_to_call_and_one_call_is_remembered(dev, built):
    a, b, bias = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16"), dev.zeros((8,))
    tree = evt.scalar("alpha") * evt.accumulator() + evt.scalar("s") * evt.row("bias")
    for turn in range(20):
        dp.matmul(a, b, epilogue=tree, alpha=float(turn), operands={"bias": bias, "s": turn / 4})
    assert built == {"matmul": 1}
    assert [run[1][-3:] for run in dev.executor().runs] == [(float(n), n / 4, bias.ptr) for n in range(20)]
    assert len(dev.executor().calls) == 1


def test_a_tree_made_anew_is_the_tree_that_it_equals(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    for _ in range(3):
        dp.matmul(a, b, epilogue=evt.relu(evt.accumulator() + evt.row("r")), operands={"r": dev.zeros((8,))})
    assert built == {"matmul": 1}
    dp.matmul(a, b, epilogue=evt.relu(evt.accumulator() + evt.col("r")), operands={"r": dev.zeros((8,))})
    assert built == {"matmul": 2}


@pytest.mark.parametrize("bounds", [((0.0, 6.0), (-0.0, 6.0)), ((0.0, 1.0), (False, True))], ids=str)
def test_trees_that_are_equal_and_not_the_same_are_told_apart(dev, built, bounds):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    first, second = (evt.Clamp(evt.accumulator(), *pair) for pair in bounds)
    assert first == second
    for tree, requests in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 3)):
        dp.matmul(a, b, epilogue=tree)
        assert built["matmul"] == requests


def test_a_tree_that_was_changed_is_another(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    tree = evt.silu(evt.accumulator())
    for _ in range(2):
        dp.matmul(a, b, epilogue=tree)
    object.__setattr__(tree, "function", "tanh")
    dp.matmul(a, b, epilogue=tree)
    assert built["matmul"] == 2
    dp.matmul(a, b, epilogue=evt.silu(evt.accumulator()))
    assert built["matmul"] == 3
    first, again, other, new = (id(plan) for plan, *_ in dev.executor().runs)
    assert first == again != other
    assert new not in (first, other)


def test_a_drawing_that_goes_on_is_another(dev, built):
    drawn = dp.cudnn.Graph()
    x = drawn.tensor("x", (2, 4), "f32")
    y = drawn.pointwise("RELU_FWD", x)
    drawn.output("y", y, "f32")
    given = {"x": dev.zeros((2, 4))}
    assert [isinstance(drawn(**given), Tensor) for _ in range(3)] == [True] * 3
    assert built == {"cudnn_graph": 1}
    drawn.output("z", drawn.pointwise("TANH_FWD", x), "f32")
    assert len(drawn(**given)) == 2
    assert built == {"cudnn_graph": 2}
    with pytest.raises(BadRequest, match="an operand"):
        drawn(**given, q=given["x"])


def test_a_drawing_in_another_process_has_a_hash_of_its_own():
    graph = board(4)[0]._builder.build()
    assert "_hash" in vars(graph) or hash(graph)
    twin = pickle.loads(pickle.dumps(graph))
    assert "_hash" not in vars(twin)
    assert twin == graph
    assert hash(twin) == hash(graph)


def test_ends_of_the_host_are_copied_in_each_call(dev, built, monkeypatch):
    """What a call copies is part of it: no plan knows the numbers."""
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((2, 16, 8), "f16")
    copied = []
    array = type(dev).array
    monkeypatch.setattr(type(dev), "array", lambda self, x, *rest: copied.append([*x]) or array(self, x, *rest))
    for ends in ([4, 8], [2, 8], (2, 8)):
        dp.grouped_matmul(a, b, ends)
    assert built == {"grouped_matmul": 3}
    assert copied == [[4, 8], [2, 8], [2, 8]]
    with pytest.raises(BadRequest, match="do not fall"):
        dp.grouped_matmul(a, b, [8, 4])


def test_a_list_that_changes_is_another_call(dev, built):
    a = [dev.zeros((8, 16), "f16") for _ in range(3)]
    b = [dev.zeros((16, 8), "f16") for _ in range(3)]
    for _ in range(2):
        dp.grouped_matmul(a, b)
    assert built == {"grouped_matmul": 1}
    a[1] = dev.zeros((24, 16), "f16")
    assert [one.shape for one in dp.grouped_matmul(a, b)] == [(8, 8), (24, 8), (8, 8)]
    assert built == {"grouped_matmul": 2}
    assert [run[1][1] for run in dev.executor().runs][2] == a[1].ptr
    a.pop()
    with pytest.raises(BadRequest, match="as many of each"):
        dp.grouped_matmul(a, b)


# -- what depends on addresses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [2, 5, 12])
def test_outputs_of_a_list_are_apart(dev, built, groups):
    def new(*shape):
        return [dev.zeros(shape, "f16") for _ in range(groups)]

    a, b, memory = new(8, 16), new(16, 16), dev.zeros((groups + 2, 8, 16), "f16")
    out = [memory[place] for place in range(groups)]
    for _ in range(2):
        assert dp.grouped_matmul(a, b, out=out) == tuple(out)
    assert built == {"grouped_matmul": 1}
    assert dp.grouped_matmul(a, b, out=out[::-1]) == tuple(out[::-1])
    assert built == {"grouped_matmul": 1}
    # Such as no address has: alignment cannot tell them apart.
    near = [*out[:-1], Tensor(memory.storage, out[-1].ptr - 2, out[-1].layout)]
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, b, out=near)
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, b, out=[*out[:-1], out[0]])
    wide = [*b[:-1], Tensor(memory.storage, out[-1].ptr + 254, b[-1].layout)]
    with pytest.raises(BadRequest, match="overlaps"):
        dp.grouped_matmul(a, wide, out=out)


def test_the_result_of_a_tree_may_be_its_source_itself(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    c, out = dev.zeros((16, 8), "f16")[:8], dev.zeros((8, 8), "f16")
    tree = evt.accumulator() + evt.scalar("beta") * evt.source()
    for target in (out, c, out, c):
        assert dp.matmul(a, b, c=c, out=target, epilogue=tree) is target
    assert built == {"matmul": 1}
    with pytest.raises(BadRequest, match="overlaps c"):
        dp.matmul(a, b, c=c, out=Tensor(c.storage, c.ptr + 2, c.layout), epilogue=tree)


# -- devices, threads, what is kept -----------------------------------------------------------------------------------
def test_tensors_of_a_closed_device_are_refused(dev):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    for _ in range(2):
        dp.grouped_matmul(a, b)
        dp.dropout_states(dev, 1)
    dev.close()
    for call in (lambda: dp.grouped_matmul(a, b), lambda: dp.dropout_states(dev, 1)):
        with pytest.raises(StaleTensor):
            call()


@pytest.mark.parametrize("forget", [stand_ins.Gpu.forget_plans, lambda dev: dev.executor().release()])
def test_a_forgotten_plan_is_taken_no_more(dev, forget):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    for _ in range(2):
        dp.grouped_matmul(a, b)
    old = stand_ins.taken(dev)
    forget(dev)
    dp.grouped_matmul(a, b)
    assert stand_ins.taken(dev) is not old


def test_threads_take_their_own_plans(dev):
    a = [dev.zeros((8, 16), "f16") for _ in range(2)]
    b = [dev.zeros((16, 8), "f16") for _ in range(2)]
    drawn, _ = board(4)
    found, failed = {}, []

    def run(number):
        try:
            for turn in range(200):
                dp.grouped_matmul(a, b, alpha=float(turn))
                drawn(x=dev.zeros((2, 3, 4)), w=dev.zeros((1, 4, 5)))
            executor = dev.executor()
            found[number] = executor, {id(plan) for plan, *_ in executor.runs}, len(executor.calls)
        except Exception as error:  # noqa: BLE001  # the test tells of it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({id(executor) for executor, *_ in found.values()}) == 3
    assert all(len(plans) == calls == 2 for _, plans, calls in found.values())


def test_on_the_host_nothing_is_remembered():
    host = dp.device("host")
    for _ in range(3):
        dp.dropout_states(host, 7)
        dp.grouped_matmul([host.zeros((8, 16), "f16")], [host.zeros((16, 8), "f16")])
    assert not host.executor().calls


def test_no_tensor_and_no_request_is_kept(dev, rng, monkeypatch):
    drawn, seen = Drawn(dev, rng), []
    before = Request.__getstate__  # any function of the class: what is made is noted as it runs
    assert before
    run = stand_ins.NotingExecutor.run

    def noted(self, request):
        seen.append(weakref.ref(request))
        return run(self, request)

    monkeypatch.setattr(stand_ins.NotingExecutor, "run", noted)
    for turn in range(70):
        function, _, fields = drawn.form(turn)
        seen += [weakref.ref(one) for _, one in within(fields) if isinstance(one, Tensor)]
        function(**fields)
        function(**fields)
    del fields, function
    dev.executor().runs.clear()
    gc.collect()
    assert dev.executor().calls
    assert not any(ref() is not None for ref in seen)
    drawn.close()


def test_as_many_calls_are_kept_as_are_said(dev, built, monkeypatch):
    monkeypatch.setattr(remembered, "MAX_CALLS", 4)
    lists = [[dev.zeros((n, 16), "f16")] for n in range(1, 9)]
    b = [dev.zeros((16, 8), "f16")]
    for a in lists:
        dp.grouped_matmul(a, b)
        assert len(dev.executor().calls) <= 4
    built.clear()
    for a in lists[4:]:
        dp.grouped_matmul(a, b)
    assert not built


def test_the_code_of_a_pattern_is_compiled_once_also_where_no_call_is_remembered(dev, monkeypatch):
    made = []
    way_of = remembered_operands.way_of
    monkeypatch.setattr(remembered_operands, "way_of", lambda pattern: made.append(pattern) or way_of(pattern))
    monkeypatch.setattr(remembered_operands, "_course", lambda *_: None)
    a, b = [dev.zeros((8, 16), "f16") for _ in range(5)], [dev.zeros((16, 8), "f16") for _ in range(5)]
    for _ in range(3):
        dp.grouped_matmul(a, b)
    assert len(made) <= 1  # none, where another test had such a call


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan"), float("inf"), 1e39], ids=repr)
def test_numbers_out_of_the_range_go_by_a_request_each_time(dev, built, value):
    a, b = [dev.zeros((8, 16), "f16")], [dev.zeros((16, 8), "f16")]
    dp.grouped_matmul(a, b, alpha=type(value)(1))
    for turn in range(2):
        with contextlib.suppress(BadRequest):
            dp.grouped_matmul(a, b, alpha=value)
        assert built["grouped_matmul"] in (1 + turn + 1, 1, 2)  # those that are refused never ran


# -- prepared calls over other operands -------------------------------------------------------------------------------
def test_prepared_calls_over_other_operands_make_no_request(dev, rng, built):
    """But for those of lists, whose names no parameter can have."""
    drawn, quick, executor = Drawn(dev, rng), Counter(), dev.executor()
    for turn in range(280):
        _, make, fields = drawn.form(turn)
        prepared = dp.prepare(make(**fields))
        request = prepared.request
        tensors = {name: tensor for name, tensor, _ in request.tensors()}
        names = [drawn.pool.pick(list(tensors)) for _ in range(2)]
        for step in range(6):
            given = {name: drawn.fresh(tensors[name].layout) for name in names}
            if drawn.maybe(0.3):
                given[names[0]] = drawn.pool.pick([*tensors.values(), *given.values()])
            built.clear()
            call = stand_ins.outcome(executor, partial(prepared, **given))
            name = "numbers" if make in drawn.numbered else request.op
            quick[name] += bool(call[1]) and not built
            fresh = stand_ins.NotingExecutor(executor.stream)
            wanted = stand_ins.outcome(fresh, partial(stand_ins.run_over, fresh, request, given))
            assert call == wanted, (step, request, changed_in(given, told))
    drawn.close()
    named = {"matmul", "conv_fwd", "conv_bwd_data", "grouped_matmul", "cudnn_graph", "dropout_states", "numbers"}
    assert quick.keys() == named
    assert all(count > 30 for count in quick.values()), quick


def test_an_operand_of_a_drawing_may_have_any_name(dev):
    drawn = dp.cudnn.Graph()
    names = ("lambda", "_executor", "_plan", "take")
    nodes = [drawn.tensor(name, (4, 4), "f32") for name in names]
    drawn.output("None", drawn.pointwise("ADD", nodes[0], drawn.pointwise("ADD", nodes[1], nodes[2])), "f32")
    drawn.output("False", drawn.pointwise("RELU_FWD", nodes[3]), "f32")
    given = {name: dev.zeros((4, 4)) for name in names}
    prepared = dp.prepare(drawn.request(**given))
    for name in (*names, "None"):
        for _ in range(3):
            other = dev.zeros((4, 4))
            found = prepared(**{name: other})
            assert (found[0] is other) == (name == "None")
            assert other.ptr in dev.executor().runs[-1][1]
