"""Calls that were made before go to their plan without a request, and end as a request on a fresh executor would.

No GPU is needed to see that: the device here has host memory, its executor binds each request to a plan that knows what
it was made for, and notes what it is told to enqueue. Memory that is made for outputs has addresses by their number, so
that two runs can be compared to the letter.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import threading
import weakref
from collections import Counter
from enum import IntEnum
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import other_operands, remembered
from dispatch.core.operands import OperandRequest
from dispatch.core.request import Plan
from dispatch.device.host import HostDevice
from dispatch.device.storage import Storage
from dispatch.device.stream import DeviceStream
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, Refused, StaleTensor
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor
from dispatch.keys import Arch
from dispatch.ops import FAMILIES
from dispatch.ops.conv.trees import TreedConvRequest
from dispatch.ops.rnn.request import RnnRequest
from dispatch.ops.softmax import SoftmaxAlgorithm
from dispatch.ops.structured.compression import Compress24Request

spec = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
hostile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hostile)

MADE = 1 << 50  # where memory for outputs begins
ROUNDS = 1700
HANDLES = itertools.count(1000)
REFUSED = 101  # so many elements along the first axis no row takes; no drawn operand has them


class Gpu(HostDevice):
    """Host memory under the name of a GPU."""

    is_host = False

    def __init__(self, number=7):
        super().__init__(number)
        self.name, self.arch = f"cuda:{number}", Arch(90)

    def stream(self):
        stream = DeviceStream(self, next(HANDLES), owned=False)
        stream.external = False
        return stream


class NotingPlan(Plan):
    """Knows the key that it was made for."""

    __slots__ = ("key",)

    def __init__(self, request):
        super().__init__(None, capture_safe=False)
        self.key = (type(request), *request.key())


class NotingExecutor(CudaExecutor):
    """Notes what it is told to enqueue."""

    versions = {}  # noqa: RUF012

    def __init__(self, stream):
        Executor.__init__(self, stream)
        self.runs, self.made = [], 0

    def _make(self, request):
        if any(tensor.shape[:1] == (REFUSED,) for _, tensor, _ in request.tensors()):
            raise Refused(request.describe())
        return NotingPlan(request)

    def empty(self, shape, strides, dtype):
        self.made += 1
        base = MADE + (self.made << 30)
        storage = Storage(self.device, base, 1 << 30, self.stream, lambda _: None)
        return Tensor(storage, base, self.device.layout(dtype, shape, strides, base))

    def enqueue(self, plan, arguments, reads, writes):
        self.runs.append((plan, arguments, reads, writes))

    def release(self):
        Executor.release(self)

    def forget(self):
        Executor.forget(self)

    def close(self):
        Executor.close(self)

    def __del__(self):
        pass


Gpu.open_executor = NotingExecutor


@pytest.fixture
def dev(monkeypatch):
    for kind in (RnnRequest, Compress24Request):
        monkeypatch.setattr(kind, "bytes_of", lambda *_: 4096)
    device = Gpu()
    yield device
    device.close()


@pytest.fixture
def built(monkeypatch):
    """How many requests are made, by their classes."""
    count = Counter()
    before = OperandRequest.__post_init__

    def counted(self):
        count[type(self).op] += 1
        before(self)

    monkeypatch.setattr(OperandRequest, "__post_init__", counted)
    return count


def function_of(kind):
    return getattr(dp, kind.op)


def plain_kinds(pool):
    return [kind for kind in pool.requests if kind.plain_reads() is not None]


# -- the same as a request on a fresh executor ------------------------------------------------------------------------
def shown(value):
    """Tensors by what and where they are, for those that are made at each run are other objects."""
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    if isinstance(value, np.ndarray):  # of a call with an array among its operands; the stand-in has computed nothing
        return value.shape, str(value.dtype)
    return (value.ptr, value.layout) if isinstance(value, Tensor) else value


def outcome(executor, action):
    """What an action gives, or raises, and what it has the executor enqueue."""
    executor.runs.clear()
    executor.made = 0
    try:
        result = shown(action())
    except Exception as error:  # noqa: BLE001  # it is compared
        result = type(error), str(error)
    # Arguments as text, for a number may be NaN.
    runs = [
        (plan.key, repr(addresses), shown(reads), shown(writes)) for plan, addresses, reads, writes in executor.runs
    ]
    return result, runs


def both(dev, kind, fields):
    """The outcomes of the request function, and of a request on an executor that remembers nothing."""
    positional = [field.name for field in dataclasses.fields(kind) if not field.kw_only and field.name in fields]
    named = {name: value for name, value in fields.items() if name not in positional}
    call = outcome(dev.executor(), lambda: function_of(kind)(*(fields[name] for name in positional), **named))
    fresh = NotingExecutor(dev.executor().stream)
    return call, outcome(fresh, lambda: fresh.run(kind(**fields)))


class Drawn:
    """Random calls of all classes: at other addresses each time, and with a mistake or a neighbour now and then."""

    def __init__(self, dev, rng):
        self.pool = hostile.Pool(rng)
        self.dev, self.rng, self.kinds = dev, rng, plain_kinds(self.pool)
        self.pool.device, self.twins = dev, {}

    def close(self):
        self.pool.other.close()

    def maybe(self, chance):
        return self.rng.random() < chance

    def fresh(self, layout, shift=0):
        """A tensor of a layout in memory of its own; where it is shifted, the alignment may be another one."""
        storage = self.dev.allocate(layout.high - layout.low + 8192, self.dev.executor().stream)
        ptr = storage.base + 512 - layout.low // 256 * 256 + 16 * shift
        return Tensor(storage, ptr, self.dev.layout(layout.dtype, layout.shape, layout.strides, ptr, layout.readonly))

    def moved(self, tensor, elements):
        """The same view, so many elements further on in memory."""
        layout = tensor.layout
        ptr = tensor.ptr + elements * max(layout.dtype.itemsize, 1)
        return Tensor(tensor.storage, ptr, self.dev.layout(layout.dtype, layout.shape, layout.strides, ptr))

    def base(self, kind, gaps=0.0):
        """The fields of a good request, with outputs given or left out, now and then with gaps between elements."""
        request = self.pool.request(kind)
        fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        if "on" in fields:
            fields["on"] = self.dev
        if hasattr(request, "operands") and request.operands:
            fields["operands"] = tuple(
                (name, self.fresh(one.layout) if isinstance(one, Tensor) else one) for name, one in request.operands
            )
        twins = {}  # operands that were one stay one
        for name, value in fields.items():
            if isinstance(value, Tensor):
                if id(value) not in twins:
                    twins[id(value)] = self.fresh(value.layout, int(self.maybe(0.1)))
                fields[name] = twins[id(value)]
        if "beta" in fields and kind.op.startswith("conv") and self.maybe(0.5):
            fields["beta"] = None
        given = self.rng.random()
        made_by = getattr(kind, "outputs", lambda _: {})
        for name, made in made_by(kind(**fields)).items():
            if name in fields and self.rng.random() < given and -1 not in made.shape:
                apart = 1 + self.maybe(gaps)
                steps = tuple(step * apart for step in made.strides)
                fields[name] = self.fresh(self.dev.layout(made.dtype, made.shape, steps, 256))
        return fields

    def again(self, fields):
        """The same call at other addresses; operands that were one stay one."""
        other = {}
        for name, value in fields.items():
            twin = next((other[n] for n, one in fields.items() if n in other and one is value), None)
            is_tensor = isinstance(value, Tensor) and value.device is self.dev and value.layout.alignment == 256
            other[name] = value if not is_tensor else self.fresh(value.layout) if twin is None else twin
        return other

    def changed(self, kind, fields):
        """The same call with an operand in the place of another, or near it, or a choice that is nearly the same."""
        fields = dict(fields)
        tensors = [name for name, value in fields.items() if isinstance(value, Tensor)]
        outputs = [name for name in kind.writes if fields[name] is not None]
        turn = self.rng.random()
        if turn < 0.35 and outputs:
            name, other = self.pool.pick(outputs), self.pool.pick(tensors)
            size = fields[other].layout.high // max(fields[other].dtype.itemsize, 1)
            by = self.pool.pick((0, 0, 0, 1, -1, size, size - 1, 64, -64))
            if fields[name].layout is fields[other].layout and not by:
                fields[name] = fields[other]
            else:
                near = self.moved(fields[other], by)
                layout = fields[name].layout
                place = self.dev.layout(layout.dtype, layout.shape, layout.strides, near.ptr)
                fields[name] = Tensor(near.storage, near.ptr, place)
        elif turn < 0.6:
            choices = [name for name, value in fields.items() if name not in tensors and name not in kind.writes]
            name = self.pool.pick(choices or tensors)
            fields[name] = self.pool.pick(alike(fields[name]))
        elif turn < 0.8:
            name = self.pool.pick(list(fields))
            with contextlib.suppress(BadRequest):  # of a dataclass that refuses its own fields
                fields[name] = self.pool.value(fields[name])
        elif outputs:
            fields[self.pool.pick(outputs)] = None
        return fields


class One(IntEnum):
    ONE = 1
    TWO = 2


def alike(value):
    """What equals a choice, or nearly does."""
    if isinstance(value, tuple):
        return [value, (*value,), *(tuple(pair) for pair in zip(*map(alike, value), strict=False))]
    if isinstance(value, IntEnum):
        return [value, int(value), float(value)]
    if isinstance(value, (bool, int, float)):
        found = [value, float(value), np.float64(value), np.float32(value), -value, float(str(float(value)))]
        if value == int(value):
            found += [
                int(value),
                *([bool(value)] if value in (0, 1) else []),
                *([One(value)] if value in (1, 2) else []),
            ]
        return found
    return [value]


def judge(dev, rng, rounds=ROUNDS, both=both, converted=lambda fields: fields):
    """What ends otherwise by a call than by a request, up to the first; how many calls of each op made no request.

    `converted` makes the operands those of another library, or gives None where it has no such.
    """
    drawn, differences, quick = Drawn(dev, rng), [], Counter()
    before = OperandRequest.__post_init__
    made = Counter()

    def counted(self):
        made[type(self).op] += 1
        before(self)

    OperandRequest.__post_init__ = counted
    try:
        for turn in range(rounds):
            if differences:
                break
            kind = drawn.kinds[turn % len(drawn.kinds)]
            fields = drawn.base(kind, gaps=0.1)
            variants = [fields, drawn.again(fields), drawn.changed(kind, fields)]
            variants += [drawn.again(variants[-1]), drawn.changed(kind, fields), drawn.again(fields)]
            for given in filter(None, map(converted, variants)):
                first = given[kind.plain_reads()[0]]
                if isinstance(first, np.ndarray) or (isinstance(first, Tensor) and first.device is drawn.pool.other):
                    continue  # it is for that device to run
                count = made[kind.op]
                call, request = both(dev, kind, given)
                quick[kind.op] += made[kind.op] < count + 2 and bool(call[1])
                if call != request:
                    differences.append((kind.op, given, call, request))
    finally:
        OperandRequest.__post_init__ = before
        drawn.close()
    return differences, quick, drawn


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick, drawn = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    assert all(quick[kind.op] > 30 for kind in drawn.kinds), quick
    assert len(dev.executor().calls) > 100


def reordered(change, module=remembered):
    """A mutation of a form."""

    def mutate(monkeypatch):
        maker = module._maker
        monkeypatch.setattr(module, "_maker", lambda form: maker(change(form)))

    return mutate


def replaced(name, other, module=remembered):
    return lambda monkeypatch: monkeypatch.setattr(module, name, other)


def swapped(names):
    return (names[1], names[0], *names[2:]) if len(names) > 1 else names


MUTATIONS = {
    "addresses in another order": reordered(lambda form: form._replace(order=swapped(form.order))),
    "reads in another order": reordered(lambda form: form._replace(reads=swapped(form.reads))),
    "a read is left out": reordered(lambda form: form._replace(reads=form.reads[1:])),
    "writes in another order": reordered(lambda form: form._replace(writes=swapped(form.writes))),
    "results in another order": reordered(lambda form: form._replace(results=swapped(form.results))),
    "one result of several": reordered(lambda form: form._replace(results=form.results[:1])),
    "no pair is looked at": reordered(lambda form: form._replace(pairs=())),
    "the first pair is not looked at": reordered(lambda form: form._replace(pairs=form.pairs[1:])),
    "all may be one view": reordered(lambda form: form._replace(pairs=tuple((*pair[:2], True) for pair in form.pairs))),
    "no two overlap": replaced("bounds_of", lambda *_: (0, 0, None)),
    "bounds of one operand alone": replaced("bounds_of", lambda one, _: (one.low, one.high, 0)),
    "any layouts are one view": replaced(
        "bounds_of", lambda one, other: (one.low - other.high, one.high - other.low, 0)
    ),
    "equal choices are the same": replaced("same", lambda *_: True),
    "classes of a tuple's elements do not count": replaced("same", lambda one, other: type(one) is type(other)),
    "trees are plain": lambda monkeypatch: monkeypatch.setattr(TreedConvRequest, "is_plain", True),
}


def in_part(mutations):
    """One in three at once, the others with what takes long."""
    marks = [[pytest.mark.exhaustive] if number % 3 else [] for number in range(len(mutations))]
    return [pytest.param(mutations[name], id=name, marks=mark) for name, mark in zip(mutations, marks, strict=True)]


@pytest.mark.parametrize("mutate", in_part(MUTATIONS))
def test_a_wrong_way_in_is_found(dev, rng, mutate, monkeypatch):
    clear = remembered._maker.cache_clear
    clear()
    mutate(monkeypatch)
    try:
        differences, _, _ = judge(dev, rng, 5 * ROUNDS)
    finally:
        clear()  # else other tests would have the wrong way
    assert differences


# -- no request -------------------------------------------------------------------------------------------------------
def test_a_repeated_call_of_any_op_makes_no_request(dev, rng, built):
    drawn = Drawn(dev, rng)
    for kind in drawn.kinds:
        for _ in range(20):
            fields = drawn.base(kind)
            if fields.get("epilogue") is None and fields.get("library") is None:
                call(kind, fields)
                built.clear()
                call(kind, drawn.again(fields))
                assert not built, f"{kind.op} {fields}"
    drawn.close()


def call(kind, fields):
    needed = [field.name for field in dataclasses.fields(kind) if not field.kw_only]
    named = {name: value for name, value in fields.items() if name not in needed}
    return function_of(kind)(*(fields[name] for name in needed), **named)


def test_all_ops_are_remembered(rng):
    """Those with numbers or lists among their operands in a way of their own (test_remembered_operands.py)."""
    pool = hostile.Pool(rng)
    assert {kind.op for kind in pool.requests} == {
        row.op for row in dp.TABLE if row.op not in FAMILIES["collective"][1]
    } | {"cudnn_graph"}
    assert [kind.op for kind in pool.requests if kind.plain_reads() is None and kind.unpacked is None] == []
    pool.other.close()


def test_a_class_with_its_own_arguments_goes_by_requests():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Own(dp.SoftmaxRequest):
        """With a number."""

        def arguments(self, outputs):
            return (*super().arguments(outputs), self.axis)

    assert dp.SoftmaxRequest.plain_reads() == ("x",)
    assert Own.plain_reads() is None


CLOSE = {
    "1 is not true": (dp.ActivationRequest, {"coef": 1.0}, {"coef": True}),
    "0 is not false": (dp.SoftmaxRequest, {"axis": 0}, {"axis": False}),
    "a float is no whole number": (dp.SoftmaxRequest, {"axis": 1}, {"axis": 1.0}),
    "a number is no mode": (dp.SoftmaxRequest, {"algorithm": dp.SoftmaxAlgorithm.ACCURATE}, {"algorithm": 1}),
    "minus zero": (dp.LrnRequest, {"alpha": 0.0}, {"alpha": -0.0}),
    "minus zero of NumPy": (dp.LrnRequest, {"alpha": np.float32(0.0)}, {"alpha": np.float32(-0.0)}),
    "in a tuple": (dp.PoolingRequest, {"window": (2, 2), "padding": (1, 0)}, {"window": (2, 2), "padding": (True, 0)}),
    "false in a tuple": (dp.ReduceRequest, {"axes": (0, 1)}, {"axes": (False, 1)}),
}


@pytest.mark.parametrize(("kind", "first", "second"), CLOSE.values(), ids=CLOSE.keys())
def test_choices_that_are_equal_are_told_apart(dev, built, kind, first, second):
    x = dev.zeros((2, 4, 6, 6))
    for _ in range(2):
        function_of(kind)(x, **first)
    built.clear()
    function_of(kind)(x, **first)
    assert not built
    try:
        function_of(kind)(x, **second)
    except BadRequest:
        assert built[kind.op] == 1
    else:
        assert built[kind.op] == 1
    first = {name: (*value,) if isinstance(value, tuple) else value for name, value in first.items()}
    built.clear()
    function_of(kind)(x, **first)
    assert built[kind.op] == (1 if "alpha" in first else 0)  # the last one that was right is remembered
    function_of(kind)(x, **first)
    assert built[kind.op] == (1 if "alpha" in first else 0)


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan")], ids=repr)
def test_nan_is_never_remembered(dev, value):
    q = dev.zeros((1, 2, 8, 8), "f16")
    for _ in range(3):
        with pytest.raises(BadRequest, match="scale"):
            dp.sdpa_fwd(q, q, q, scale=value)
    x, w = dev.zeros((1, 4, 5, 5)), dev.zeros((4, 4, 3, 3))
    for _ in range(3):
        dp.conv_fwd(x, w, alpha=value)
    assert len(dev.executor().runs) == 3
    assert not dev.executor().calls


# -- what depends on addresses ----------------------------------------------------------------------------------------
def test_an_output_may_be_the_input_itself_and_no_neighbour_of_it(dev, built):
    memory = dev.zeros((100,))
    x, apart = memory[:32], memory[64:96]
    dp.softmax(x, out=apart)
    built.clear()
    dp.softmax(apart, out=apart)
    dp.softmax(x, out=x)
    dp.softmax(apart, out=x)
    assert not built
    near = Tensor(x.storage, x.ptr + 4, x.layout)  # such as no address has: alignment cannot tell them apart
    for one, other in ((x, near), (near, x)):
        with pytest.raises(BadRequest, match="overlaps x"):
            dp.softmax(one, out=other)
    assert len(dev.executor().calls) == 1


def test_memory_that_ends_where_another_begins_is_apart(dev, built):
    memory = dev.zeros((2, 64))
    x, y = memory[:1], memory[1:]
    dp.lrn(dev.zeros((2, 64))[:1], out=dev.zeros((2, 64))[1:])
    built.clear()
    dp.lrn(x, out=y)
    dp.lrn(y, out=x)
    assert not built
    with pytest.raises(BadRequest, match="overlaps"):
        dp.lrn(x, out=x)


def test_alignment_is_another_key(dev):
    memory = dev.zeros((100,))
    dp.softmax(memory[:32])
    dp.softmax(memory[1:33])
    (one, *_), (other, *_) = (run for run in dev.executor().runs)
    assert one.key[1].alignment > other.key[1].alignment == 4


# -- devices, executors, streams, threads -----------------------------------------------------------------------------
def taken(dev):
    return dev.executor().runs[-1][0]


def test_tensors_of_a_closed_device_are_refused(dev):
    x = dev.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
    dev.close()
    with pytest.raises(StaleTensor):
        dp.softmax(x)


def test_a_closed_executor_runs_nothing(dev):
    x, executor = dev.zeros((4, 4)), dev.executor()
    with dev.stream() as stream:
        for _ in range(2):
            dp.softmax(x)
        inner = dev.executor()
        assert inner.calls
        inner.close()
        with pytest.raises(Closed):
            dp.softmax(x)
        assert not inner.calls
    assert inner.stream is stream
    assert not executor.runs


@pytest.mark.parametrize("forget", [Gpu.forget_plans, lambda dev: dev.executor().release()], ids=["forget", "release"])
def test_a_forgotten_plan_is_taken_no_more(dev, forget):
    x = dev.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
    old = taken(dev)
    forget(dev)
    dp.softmax(x)
    assert taken(dev) is not old


def test_plans_that_are_forgotten_while_a_call_runs_are_not_remembered(dev, monkeypatch):
    x, executor = dev.zeros((4, 4)), dev.executor()
    monkeypatch.setattr(NotingExecutor, "enqueue", lambda self, *_: self.forget())
    dp.softmax(x)
    assert not executor.calls


def test_what_no_row_takes_is_refused_each_time(dev):
    for _ in range(3):
        with pytest.raises(Refused):
            dp.softmax(dev.zeros((REFUSED, 2)))
    assert not dev.executor().calls


def test_each_stream_and_each_device_has_its_own(dev):
    x, other = dev.zeros((4, 4)), Gpu(8)
    z = other.zeros((4, 4))
    for _ in range(2):
        dp.softmax(x)
        dp.softmax(z)
    first = taken(dev)
    with dev.stream():
        for _ in range(2):
            dp.softmax(x)
            assert taken(dev) is not first
            assert len(other.executor().runs) == 2
            dp.softmax(z)  # on its own device's stream, whatever is current here
            other.executor().runs.pop()
        assert len(dev.executor().runs) == 2
    assert len(dev.executor().runs) == 2
    with pytest.raises(BadRequest, match="cuda:8"):
        dp.softmax(x, out=z)
    other.close()


def test_threads_take_their_own_plans(dev):
    x, out = dev.zeros((4, 4)), dev.zeros((4, 4))
    found, failed = {}, []

    def run(number):
        try:
            for turn in range(300):
                dp.softmax(x, axis=turn % 2, out=out)
                dp.softmax(x)
            executor = dev.executor()
            found[number] = executor, {id(plan) for plan, *_ in executor.runs}, len(executor.runs)
        except Exception as error:  # noqa: BLE001  # the test tells of it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    (one, plans, count), (other, others, _) = found.values()
    assert one is not other
    assert count == 600
    assert len(plans) == len(others) == 3
    assert not plans & others


def test_on_the_host_nothing_is_remembered(built):
    host = dp.device("host")
    x = host.zeros((4, 4))
    for _ in range(3):
        dp.softmax(x)
    assert built["softmax"] == 3
    assert not host.executor().calls


# -- what is kept -----------------------------------------------------------------------------------------------------
def test_no_tensor_and_no_request_is_kept(dev, rng):
    drawn, seen = Drawn(dev, rng), []
    for kind in drawn.kinds * 8:
        fields = drawn.base(kind)
        seen += [weakref.ref(value) for value in fields.values() if isinstance(value, Tensor)]
        named = fields.get("operands") or ()
        seen += [weakref.ref(value) for _, value in named if isinstance(value, Tensor)]
        call(kind, fields)
        call(kind, fields)
    del fields, named
    dev.executor().runs.clear()
    gc.collect()
    assert dev.executor().calls
    assert not any(ref() is not None for ref in seen)
    drawn.close()


def test_as_many_calls_are_kept_as_are_said(dev, built, monkeypatch):
    monkeypatch.setattr(remembered, "MAX_CALLS", 4)
    tensors = [dev.zeros((4, n)) for n in range(1, 9)]
    for x in tensors:
        dp.softmax(x)
        assert len(dev.executor().calls) <= 4
    built.clear()
    for x in tensors[4:]:
        dp.softmax(x)
    assert not built
    dp.softmax(tensors[0])
    assert built["softmax"] == 1


def test_what_looks_like_a_tensor_goes_by_a_request(dev):
    x = dev.zeros((4, 4))

    class Like:
        layout, ptr, storage = x.layout, x.ptr, x.storage

    for _ in range(2):
        dp.softmax(x, out=dev.zeros((4, 4)))
    for wrong in ((Like(), x), (x, Like())):
        with pytest.raises(BadRequest, match="a Like"):
            dp.softmax(wrong[0], out=wrong[1])


# -- prepared calls over other operands -------------------------------------------------------------------------------
class DrawnCalls(Drawn):
    """Random prepared calls, each over other operands several times."""

    def __init__(self, dev, rng):
        super().__init__(dev, rng)
        self.pool.device = dp.device("host")
        self.kinds = [*self.kinds, *[dp.MatmulRequest] * 8]
        self.pool.requests[dp.MatmulRequest] += list(self.products())
        self.pool.device = dev

    def products(self):
        new = self.pool.new
        a, b, c, one = new(16, 16), new(16, 16), new(16, 16), new(1).reshape(())
        yield dp.MatmulRequest(a, b, out=c, beta=0.5)
        yield dp.MatmulRequest(a, b, c=c, out=c, beta=0.5)
        yield dp.MatmulRequest(a, b, c=c, alpha=one, beta=one)
        yield dp.MatmulRequest(a, b, c=c, alpha=2.0, beta=-0.0)
        yield dp.MatmulRequest(a, b, bias=new(16), epilogue=dp.Epilogue.RELU_BIAS)
        yield dp.MatmulRequest(a.T, b, epilogue=dp.Epilogue.BGRADA)

    def request(self, kind):
        """A good one; some ops take no outputs with gaps."""
        while True:
            with contextlib.suppress(BadRequest):
                return self.drawn(kind)

    def drawn(self, kind):
        fields = self.base(kind, gaps=0.1)
        scales = fields.get("scales")
        if scales is not None:
            parts = {field.name: getattr(scales, field.name) for field in dataclasses.fields(scales)}
            found = {name: self.fresh(one.layout) for name, one in parts.items() if isinstance(one, Tensor)}
            fields["scales"] = dataclasses.replace(scales, **found)
        return kind(**fields)

    def chosen(self, request):
        """The names of one to three operands."""
        names = [name for name, *_ in request.tensors() if not name.startswith("scales.")]
        return [self.pool.pick(names) for _ in range(int(self.rng.integers(1, 4)))]

    def others(self, request, chosen):
        """Other operands of some names, most of them of the same layouts."""
        tensors = {name: tensor for name, tensor, _ in request.tensors() if not name.startswith("scales.")}
        given = {name: self.fresh(tensors[name].layout) for name in chosen}
        turn, name = self.rng.random(), self.pool.pick(chosen)
        if turn < 0.3:
            other = self.pool.pick(list(tensors))
            near = self.moved(given.get(other, tensors[other]), self.pool.pick((0, 0, 0, 1, -1, 16)))
            layout = tensors[name].layout
            given[name] = Tensor(
                near.storage, near.ptr, self.dev.layout(layout.dtype, layout.shape, layout.strides, near.ptr)
            )
        elif turn < 0.4:
            given[name] = tensors[self.pool.pick(list(tensors))]
        elif turn < 0.5:
            given[name] = self.pool.value(tensors[name])
        elif turn < 0.55:
            given[self.pool.pick(("nothing", "alpha", "axis", "scales", "out"))] = given[name]
        return given


def run_over(executor, request, given):
    return executor.run(request.replace(**given))


def judge_calls(dev, rng, rounds):
    """What ends otherwise by a prepared call than by a request, up to the first; and how many enqueued no request's."""
    drawn, quick = DrawnCalls(dev, rng), Counter()
    executor, runs = dev.executor(), Counter()
    before = NotingExecutor.run

    def counted(self, request):
        runs[self is executor] += 1
        return before(self, request)

    NotingExecutor.run = counted
    try:
        for turn in range(rounds):
            kind = drawn.kinds[turn % len(drawn.kinds)]
            prepared = dp.prepare(drawn.request(kind))
            request = prepared.request
            names = drawn.chosen(request), drawn.chosen(request)
            for step in range(10):
                given = drawn.others(request, names[step % 2])
                count, fresh = runs[True], NotingExecutor(executor.stream)
                call = outcome(executor, partial(prepared, **given))
                quick[kind.op] += bool(call[1]) and runs[True] == count
                wanted = outcome(fresh, partial(run_over, fresh, request, given))
                if call != wanted:
                    return [(request, given, call, wanted)], quick, drawn
    finally:
        NotingExecutor.run = before
        drawn.close()
    return [], quick, drawn


def test_each_prepared_call_over_other_operands_is_what_its_request_is(dev, rng):
    differences, quick, drawn = judge_calls(dev, rng, 1600)
    assert not differences, "\n".join(map(str, differences[0]))
    assert all(quick[kind.op] > 20 for kind in drawn.kinds), quick


def formed(change):
    """A mutation of the form of calls over other operands."""

    def mutate(monkeypatch):
        maker = other_operands._maker
        monkeypatch.setattr(other_operands, "_maker", lambda form: maker(change(form)))

    return mutate


MUTATIONS_OF_CALLS = {
    "addresses in another order": formed(lambda form: form._replace(addresses=swapped(form.addresses))),
    "reads in another order": formed(lambda form: form._replace(reads=swapped(form.reads))),
    "a write is left out": formed(lambda form: form._replace(writes=form.writes[1:])),
    "results in another order": formed(lambda form: form._replace(results=swapped(form.results))),
    "always a tuple": formed(lambda form: form._replace(is_tuple=True)),
    "no pair is looked at": formed(lambda form: form._replace(pairs=())),
    "the first pair is not looked at": formed(lambda form: form._replace(pairs=form.pairs[1:])),
    "all may be one view": formed(lambda form: form._replace(pairs=tuple((*pair[:2], True) for pair in form.pairs))),
    "any layouts are one view": lambda monkeypatch: monkeypatch.setattr(
        other_operands, "bounds_of", lambda one, other: (one.low - other.high, one.high - other.low, 0)
    ),
    "C is never D": lambda monkeypatch: monkeypatch.setattr(
        dp.MatmulRequest, "addresses", lambda _: ("a", "b", "c", "bias", "aux", "bgrad", "out", None, None)
    ),
    "trees are plain": lambda monkeypatch: monkeypatch.setattr(TreedConvRequest, "is_plain", True),
}


@pytest.mark.parametrize("mutate", in_part(MUTATIONS_OF_CALLS))
def test_a_wrong_way_to_other_operands_is_found(dev, rng, mutate, monkeypatch):
    mutate(monkeypatch)
    differences, _, _ = judge_calls(dev, rng, 20000)
    assert differences


def test_a_prepared_call_over_other_operands_follows_its_executor(dev):
    x, out = dev.zeros((4, 4)), dev.zeros((4, 4))
    prepared = dp.prepare(dp.SoftmaxRequest(x, out=out))
    others = [dev.zeros((4, 4)) for _ in range(3)]
    for other in others:
        assert prepared(x=other) is out
        assert prepared(x=other, out=other) is other
    old = taken(dev)
    dev.forget_plans()
    for other in others:
        prepared(x=other)
        assert taken(dev) is not old
    dev.executor().close()
    with pytest.raises(Closed):
        prepared(x=others[0])
    dev.close()
    with pytest.raises(StaleTensor):
        prepared(x=others[0])


def test_a_choice_by_its_name_is_remembered_as_its_member_is(dev, built):
    x = dev.zeros((4, 8))
    runs = dev.executor().runs
    for algorithm in ("log", "LOG", SoftmaxAlgorithm.LOG, "log", "LOG", SoftmaxAlgorithm.LOG):
        dp.softmax(x, algorithm=algorithm)
    assert built["softmax"] == 3  # once for each spelling
    assert len({plan.key for plan, *_ in runs}) == 1
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"^algorithm: got 'lgo'"):
            dp.softmax(x, algorithm="lgo")
