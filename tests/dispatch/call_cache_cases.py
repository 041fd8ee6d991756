"""Random calls on a device that has host memory, held against a request on a fresh executor.

Its executor binds each request to a plan that knows what it was made for, and notes what it is told to enqueue. Memory
that is made for outputs has addresses by their number, so that two runs can be compared to the letter.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
from collections import Counter
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core import call_cache
from dispatch.core.operands import OperandRequest
from dispatch.core.request import Plan
from dispatch.device.host import HostDevice
from dispatch.device.storage import Storage
from dispatch.device.stream import DeviceStream
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Refused
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor
from dispatch.keys import Arch
from dispatch.ops.rnn.request import RnnRequest
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


def reordered(change, module=call_cache):
    """A mutation of a form."""

    def mutate(monkeypatch):
        maker = module._maker
        monkeypatch.setattr(module, "_maker", lambda form: maker(change(form)))

    return mutate


def replaced(name, other, module=call_cache):
    return lambda monkeypatch: monkeypatch.setattr(module, name, other)


def swapped(names):
    return (names[1], names[0], *names[2:]) if len(names) > 1 else names


def in_part(mutations):
    """One in three at once, the others with what takes long."""
    marks = [[pytest.mark.exhaustive] if number % 3 else [] for number in range(len(mutations))]
    return [pytest.param(mutations[name], id=name, marks=mark) for name, mark in zip(mutations, marks, strict=True)]


def call(kind, fields):
    needed = [field.name for field in dataclasses.fields(kind) if not field.kw_only]
    named = {name: value for name, value in fields.items() if name not in needed}
    return function_of(kind)(*(fields[name] for name in needed), **named)


# -- devices, executors, streams, threads -----------------------------------------------------------------------------
def taken(dev):
    return dev.executor().runs[-1][0]


def run_over(executor, request, given):
    return executor.run(request.replace(**given))
