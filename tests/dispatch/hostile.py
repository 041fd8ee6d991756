"""Hostile values: what a function may be given by mistake or on purpose, of every type; and good requests to put it in.

test_hostile.py sends them. A value is made anew for each use, so that one test leaves nothing to the next.
"""

import contextlib
import dataclasses
import resource
from enum import IntEnum
from fractions import Fraction

import numpy as np

import dispatch
import dispatch as dp
from dispatch import Compute, Epilogue, ScaleMode, Scales
from dispatch.device.host import HostDevice
from dispatch.device.tensor import Tensor
from dispatch.keys import F32, HOST, Dtype
from dispatch.libraries.cutlass import evt
from dispatch.ops import FAMILIES
from dispatch.ops.activation import ActivationMode
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest
from dispatch.ops.rnn.weights import weight_shapes
from dispatch.row_check import cases_of

SIZES = range(4, 450)  # elements of all operands of a request
MEMORY = 3 << 30  # bytes by which the process may grow meanwhile: a huge extent is to end in an error, not in swapping


class Odd:
    """An object whose methods raise, or answer what nobody expects; only its repr is sound, for messages show it."""

    def __init__(self, **answers):
        self.answers = answers

    def _answer(self, name, default):
        answer = self.answers.get(name, default)
        if isinstance(answer, type) and issubclass(answer, BaseException):
            raise answer(f"from {name}")
        return answer

    def __eq__(self, other):
        return self._answer("eq", NotImplemented)

    def __hash__(self):
        return self._answer("hash", 7)

    def __bool__(self):
        return self._answer("bool", True)

    def __len__(self):
        return self._answer("len", 1)

    def __iter__(self):
        return iter(self._answer("iter", (1, 2)))


class Index(Odd):
    def __index__(self):
        return self._answer("index", 2)

    def __int__(self):
        return self._answer("int", 2)

    def __float__(self):
        return self._answer("float", 2.0)


class AsArray(Odd):
    def __array__(self, dtype=None, copy=None):
        return self._answer("array", np.ones((2, 2), np.float32))


class Lent(Odd):
    def __dlpack__(self, **_):
        return self._answer("dlpack", 5)

    def __dlpack_device__(self):
        return self._answer("place", (1, 0))


class AnInt(int):
    """Not an int that arithmetic was meant for."""


class AStr(str):
    """Not a str that a name was meant for."""

    __slots__ = ()


# fmt: off
PLAIN = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63, -(2**63),
    2**64 + 1, 2**200, 10**400,
    0.0, -0.0, 0.5, 1.5, -1.0, 1e-320, 1e300, -1e300, float("nan"), float("inf"), -float("inf"), 1j, complex("nan"),
    "", "x", "f32", "bf16", "RELU", "NONE", "cuda:0", "host", "\x1b[31m", "\0", "a" * 1000, b"", b"f32",
    bytearray(b"ab"),
    (), (1,), (0,), (-1,), (1, 2), (2, 2), (1, 2, 3), (1.5, 2.5), (None,), (None, None), ("a", "b"), ((1, 2), (3, 4)),
    (2**31, 2**31), (2**63,) * 2, (True, False), (1,) * 70, [], [1], [1, 2], [[1]], {}, {"a": 1}, {1: 2}, set(), {1},
    frozenset({1}), range(3), slice(1, 2), ..., NotImplemented, object, int, float, type, np.float32, len,
    Fraction(1, 3),
    np.float32(1.5), np.float64("nan"), np.float16("inf"), np.int64(3), np.int8(-1), np.uint64(2**64 - 1),
    np.bool_(True),
    np.str_("f32"), np.complex64(1j), np.datetime64("2020-01-01"), np.dtype("f4"), np.dtype(">f4"), np.dtype("V3"),
    Epilogue.RELU, Epilogue.DGELU, Compute.COMPUTE_32F, Compute.COMPUTE_16F, Compute.COMPUTE_64F, Compute.COMPUTE_32I,
    ScaleMode.VEC32_UE8M0, ActivationMode.TANH, F32, Dtype.by_name["f4e2m1"], Scales(a=2.0),
    Scales(a="x", b_mode=7), HOST,
    AnInt(2), AStr("f32"), AStr("x"),
)
# fmt: on
MADE = (
    object,
    lambda: Odd(eq=ZeroDivisionError),
    lambda: Odd(eq=np.ones(2)),
    lambda: Odd(eq=True),
    lambda: Odd(hash=ZeroDivisionError),
    lambda: Odd(bool=ZeroDivisionError, len=ZeroDivisionError),
    lambda: Odd(iter=ZeroDivisionError),
    Index,
    lambda: Index(index=2**70, int=-1, float=float("nan")),
    lambda: Index(index=ZeroDivisionError, int=ZeroDivisionError, float=ZeroDivisionError),
    AsArray,
    lambda: AsArray(array=ZeroDivisionError),
    lambda: AsArray(array=5),
    lambda: AsArray(array=[1.0]),
    Lent,
    lambda: Lent(dlpack=ZeroDivisionError),
    lambda: Lent(place=5),
    lambda: np.ones(2, np.float32),
    lambda: np.array(1.0),
    lambda: np.array(["a"]),
    lambda: np.array([object()]),
    lambda: np.zeros((0, 2)),
    lambda: memoryview(b"abc"),
    lambda: iter((1, 2)),
    lambda: (number for number in range(3)),
    lambda: lambda *_, **__: 1,
)


def size_of(request):
    """How many elements its operands have."""
    return sum(tensor.layout.size for _, tensor, _ in request.tensors())


class Pool:
    """A host device, good requests of every class, and tensors that are wrong in one way or another."""

    def __init__(self, rng):
        self.rng = rng
        gone = HostDevice(generation=1 << 21)
        self.gone = [gone.zeros(shape, kind) for shape, kind in (((), "f32"), ((2, 2), "f32"), ((4,), "i32"))]
        gone.close()
        self.device = dispatch.device("host")
        self.other = HostDevice(generation=1 << 20)
        made = [*self._products(), *self._convolutions(), *self._layers(), *self._attention(), *self._sequences()]
        self.requests = {}
        for request in made:
            self.requests.setdefault(type(request), []).append(request)
        for request in self._of_cases({kind.op for kind in self.requests}):
            self.requests.setdefault(type(request), []).append(request)

    def new(self, *shape, dtype="f32"):
        return self.device.array(self.rng.standard_normal(shape).astype(np.float32), dtype)

    def _products(self):
        dev, f16 = self.device, {"dtype": "f16"}
        a, b = self.new(6, 8), self.new(8, 4)
        yield dp.MatmulRequest(a, b)
        yield dp.MatmulRequest(a, b, bias=self.new(4), epilogue=Epilogue.GELU_AUX_BIAS, aux=self.new(6, 8)[:, :4])
        yield dp.MatmulRequest(self.new(2, 6, 8), b, c=self.new(2, 6, 4), out=self.new(2, 6, 4), beta=0.5, alpha=2.0)
        a8, b8 = self.new(16, 16, dtype="f8e4m3"), self.new(16, 16, dtype="f8e4m3").mT
        yield dp.MatmulRequest(a8, b8, scales=Scales(a=2.0, b=self.new(1)), out_dtype="bf16")
        sums = evt.accumulator() + evt.source() + evt.row("bias")
        tree = {"epilogue": sums, "operands": {"bias": self.new(8)}}
        yield dp.MatmulRequest(self.new(8, 8, **f16), self.new(8, 8, **f16), library="cutlass")
        yield dp.MatmulRequest(
            self.new(8, 8, **f16), self.new(8, 8, **f16), c=self.new(8, 8, **f16), **tree, library="cutlass"
        )
        ends, groups = dev.array(np.array([2, 6], np.int32)), self.new(2, 16, 8, **f16)
        yield dp.GroupedMatmulRequest(self.new(6, 16, **f16), groups, ends)
        pairs = tuple(self.new(4, 8, **f16) for _ in range(2)), tuple(self.new(8, 8, **f16) for _ in range(2))
        yield GroupedMatmulListRequest(*pairs)

    def _convolutions(self):
        x, w, y = self.new(1, 4, 5, 5), self.new(4, 4, 3, 3), self.new(1, 4, 3, 3)
        yield dp.ConvFwdRequest(x, w)
        yield dp.ConvFwdRequest(
            x, w, bias=self.new(4), z=self.new(1, 4, 3, 3), activation=dp.Activation.RELU_FWD, pad=0, stride=1
        )
        yield dp.ConvBwdDataRequest(y, w, x_extents=(5, 5))
        yield dp.ConvBwdFilterRequest(y, x, w_extents=(3, 3))
        x, w, y = (tensor_of(self, *shape) for shape in ((1, 5, 5, 8), (8, 3, 3, 8), (1, 3, 3, 8)))
        yield dp.ConvFwdRequest(x, w, library="cutlass")
        tree = {"epilogue": evt.accumulator() + evt.row("bias"), "operands": {"bias": self.new(8)}}
        yield dp.ConvFwdRequest(x, w, **tree)
        yield dp.ConvBwdDataRequest(y, w, x_extents=(5, 5), library="cutlass")
        yield dp.ConvBwdFilterRequest(y, x, w_extents=(3, 3), library="cutlass")

    def _layers(self):
        x, dy = self.new(2, 4, 6, 6), self.new(2, 4, 6, 6)
        yield dp.ActivationRequest(x, mode=ActivationMode.ELU, coef=0.5)
        yield dp.ActivationBwdRequest(x, x, dy, out=self.new(2, 4, 6, 6))
        yield dp.SoftmaxRequest(x, axis=1)
        yield dp.SoftmaxBwdRequest(dp.softmax(x), dy)
        yield dp.PoolingRequest(x, 2)
        yield dp.PoolingBwdRequest(x, dp.pooling(x, 2), self.new(2, 4, 3, 3), 2)
        yield dp.ReduceRequest(x, (1, 3))
        yield dp.ReduceRequest(x, 1, reduce=dp.ReduceOp.MAX, indices=True)
        yield dp.NormFwdRequest(x.reshape(8, 36), self.new(36))
        scale, bias, mean, var = self.new(4), self.new(4), self.new(4), self.device.array(np.ones(4, np.float32))
        norms = {"mode": dp.NormMode.BATCH_NORM, "training": True, "running_mean": mean, "running_var": var}
        yield dp.NormFwdRequest(x, scale, bias, **norms)
        yield dp.NormFwdRequest(x, scale, bias, mode=dp.NormMode.GROUP_NORM, groups=2, training=True)
        yield dp.NormBwdRequest(dy, x, scale, var, mean, mode=dp.NormMode.BATCH_NORM)
        states = dp.dropout_states(self.device, 7)
        yield dp.DropoutStatesRequest(self.device, 7)
        yield dp.DropoutRequest(x, states)
        yield dp.DropoutBwdRequest(dy, dp.dropout(x, states)[1])
        graph = dp.cudnn.Graph()
        a, b = graph.tensor("x", (2, 3, 4), "f32"), graph.tensor("w", (1, 4, 5), "f32")
        graph.output("y", graph.pointwise("RELU_FWD", graph.matmul(a, b)), "f32")
        yield graph.request(x=self.new(2, 3, 4), w=self.new(1, 4, 5))

    def _attention(self):
        q, k, v = (self.new(1, 2, 8, 8, dtype="f16") for _ in range(3))
        yield dp.SdpaFwdRequest(q, k, v)
        lengths = [self.device.array(np.full(1, 5, np.int32)) for _ in range(2)]
        sizes = {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
        yield dp.SdpaFwdRequest(q, k, v, bias=self.new(1, 2, 8, 8, dtype="f16"), **sizes, stats=True, right_bound=0)
        pages = [self.device.array(np.arange(2, dtype=np.int32).reshape(1, 2)) for _ in range(2)]
        held = {"page_table_k": pages[0], "page_table_v": pages[1]}
        k4, v4 = (self.new(2, 2, 4, 8, dtype="f16") for _ in range(2))
        yield dp.SdpaFwdRequest(q, k4, v4, **held, **sizes)
        o, stats = dp.sdpa_fwd(q, k, v, stats=True)
        yield dp.SdpaBwdRequest(q, k, v, o, self.new(1, 2, 8, 8, dtype="f16"), stats)

    def _sequences(self):
        numbers = [self.device.array(np.array(n, np.int32)) for n in ([1, 2, 2], [2, 1], [6, 4])]
        yield dp.CtcRequest(self.new(6, 2, 4), *numbers, max_label_length=2)
        network = dp.Network(dp.RnnMode.LSTM, 3, 4)
        named = {name: self.new(*shape) for name, shape in weight_shapes(network).items()}
        weights, x = dp.pack_weights(network, named, self.device), self.new(5, 2, 3)
        yield dp.RnnRequest(x, weights, network, lengths=(5, 3))
        made = dp.RnnRequest(x, weights, network, hx=self.new(1, 2, 4), cx=self.new(1, 2, 4), training=True)
        yield made
        y, reserve = (outputs := dp.run(made))[0], outputs[-1]
        yield dp.RnnBwdDataRequest(y, self.new(5, 2, 4), weights, reserve, network, hx=made.hx, cx=made.cx)
        data = dp.RnnBwdDataRequest(y, self.new(5, 2, 4), weights, reserve, network, hx=made.hx, cx=made.cx)
        dp.run(data)
        yield dp.RnnBwdWeightsRequest(x, y, reserve, network, hx=made.hx)

    def _of_cases(self, known):
        """One of their rows' cases, for ops that have no request here: the first that is neither large nor tiny.

        Collectives are of a communicator, which fails for good by a wrong call: tests/dispatch/world has theirs.
        """
        known = {*known, *FAMILIES["collective"][1]}
        for op in dict.fromkeys(row.op for row in dispatch.TABLE if row.op not in known):
            rows = [row for row in dispatch.TABLE if row.op == op and HOST in (row.min_arch, row.max_arch)]
            row = next((row for row in rows if row.variant != "large"), rows[0])
            made = (case.check(self.device, self.rng).request for case in cases_of(row))
            yield next(each for each in made if size_of(each) in SIZES or not each.reads)

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def request(self, kind=None):
        kind = kind or self.pick(list(self.requests))
        return self.pick(self.requests[kind])

    def value(self, near=None):
        """A hostile value; `near` is the good one in its place, which some of them resemble."""
        turn = int(self.rng.integers(12))
        if turn < 3:
            return self.pick(PLAIN)
        if turn < 5:
            return self.pick(MADE)()
        if turn == 5:
            return self.pick((self.device, self.request(), type(self.request())))
        if turn < 9 and not isinstance(near, Tensor):
            return self._akin(near)
        return self.tensor(near if isinstance(near, Tensor) else self._any_tensor())

    def _akin(self, near):
        """What is of the type that a good value has, and may not fit."""
        if isinstance(near, bool):
            return not near
        if isinstance(near, IntEnum):
            return self.pick(list(type(near)))
        if isinstance(near, int):
            return near + self.pick((-2, -1, 1, 2, 7, 2**31))
        if isinstance(near, float):
            return near * self.pick((-1.0, 0.0, 0.5, 1e30, 1e300, float("nan"), float("inf")))
        if isinstance(near, tuple):
            return self.pick((near[1:], near + near, near[::-1], tuple(self.value() for _ in near), list(near)))
        if isinstance(near, (dp.Network, Scales)):
            return self._bent(near)
        return self.pick((None, 1, True, 0.5, (1, 2), (2, 2), Compute.COMPUTE_32F, self._any_tensor()))

    def _bent(self, good):
        """A dataclass that is a field, with a field of its own replaced; what refuses it, refuses it here."""
        names = [field.name for field in dataclasses.fields(good) if field.init]
        return dataclasses.replace(good, **{self.pick(names): self.value()}) if names else good

    def _any_tensor(self):
        return self.pick(self.request(dp.MatmulRequest).tensors())[1]

    def tensor(self, near):
        """A tensor that is nearly `near`, or nothing like it."""
        device, rng = self.device, self.rng
        kind, shape, strides = near.dtype, near.shape, near.layout.strides

        def strided(steps, readonly=False, extents=shape):
            return Tensor(near.storage, near.ptr, device.layout(kind, extents, steps, near.ptr, readonly))

        ways = (
            lambda: device.zeros(shape, self.pick(list(Dtype.by_name))),
            lambda: device.zeros(tuple(int(n) for n in rng.integers(0, 5, int(rng.integers(0, 7)))), kind),
            lambda: device.zeros((), self.pick((kind, "f32", "i32"))),
            lambda: device.zeros((4,), self.pick((kind, "f32", "i32"))),
            lambda: device.zeros((*shape, 1), kind),
            lambda: device.zeros(shape[1:], kind),
            lambda: device.zeros(tuple(n + int(rng.integers(-1, 2)) if n else n for n in shape), kind),
            lambda: device.zeros((0, *shape[1:]), kind),
            lambda: device.zeros(shape[::-1], kind).T,
            lambda: device.zeros(tuple(2 * n for n in shape), kind)[tuple(slice(None, None, 2) for _ in shape)],
            lambda: device.zeros(shape, kind)[tuple(slice(None, None, -1) for _ in shape)],
            lambda: strided(strides, readonly=True),
            lambda: strided((0,) * len(shape)),
            lambda: self.other.zeros(shape, kind),
            lambda: self.pick(self.gone),
            lambda: near,
            lambda: near.reshape(near.size),
            lambda: near[None],
            lambda: near[1:],
        )
        try:
            return self.pick(ways)()
        except dispatch.errors.BadRequest:  # no such view of this one
            return near


def tensor_of(pool, *shape):
    """bf16 images with channels last, as CUTLASS has them: (N, C, H, W) of (N, H, W, C)."""
    return pool.new(*shape, dtype="bf16").transpose(0, 3, 1, 2)


@contextlib.contextmanager
def little_memory():
    """So much more memory and no more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
