"""Hostile values of every type in every place that users can reach: a result or an error of this library, or TypeError.

Never another exception, a crash or a hang. The values and the good requests that they are put into are in hostile.py.
tests/dispatch/test_fuzz.py makes mistakes that are named, one at a time; here nobody knows what is wrong.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import pickle
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.checks import _enum_fields as choices_of
from dispatch.errors import BadRequest, DispatchError, Undelivered
from dispatch.ops.activation import ActivationMode

spec = importlib.util.spec_from_file_location("hostile", Path(__file__).with_name("hostile.py"))
hostile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hostile)

REQUESTS, CALLS, SUBMITTED = 20_000, 6_000, 400
TAKEN = (DispatchError, TypeError)


@pytest.fixture
def pool(rng):
    made = hostile.Pool(rng)
    with hostile.little_memory():
        yield made
    made.other.close()


def ends_well(action, *words):
    """Whether an action gives a result; another error than ours fails the test, with the words of what led to it."""
    try:
        action()
    except TAKEN:
        return False
    except Exception as error:
        raise AssertionError(f"{' '.join(map(str, words))} raised {error!r}") from error
    return True


def changes(pool, request):
    """One to three fields of a request with hostile values in their places."""
    names = [field.name for field in dataclasses.fields(request)]
    chosen = {pool.pick(names) for _ in range(int(pool.rng.integers(1, 4)))}
    return {name: pool.value(getattr(request, name)) for name in sorted(chosen)}


def change_and_run(pool, request, changed):
    """Run a request with other fields, of which `changed` then tells; a dataclass in a field may refuse its own."""
    changed |= changes(pool, request)
    dp.run(dataclasses.replace(request, **changed))


def test_requests(pool):
    kinds = list(pool.requests)
    good = 0
    for number in range(REQUESTS):
        request = pool.request(kinds[number % len(kinds)])
        changed = {}
        good += ends_well(partial(change_and_run, pool, request, changed), number, request.describe(), "with", changed)
    assert 0 < good < REQUESTS
    for requests in pool.requests.values():
        for request in requests:
            dp.run(request)  # what was refused has left nothing behind


def test_every_value_in_every_field_that_is_no_tensor(pool):
    """As far as the values are the same for all: there are some twenty thousand such requests, and none runs."""
    for requests in pool.requests.values():
        request = requests[-1]
        for field in dataclasses.fields(request):
            if isinstance(getattr(request, field.name), dp.Tensor) or "Tensor" in str(field.type):
                continue
            for value in (*hostile.PLAIN, *(make() for make in hostile.MADE)):
                changed = {field.name: value}
                ends_well(partial(dataclasses.replace, request, **changed), request.describe(), "with", changed)


def test_what_is_no_member_of_an_enum_is_refused_by_the_name_of_its_field(pool):
    """That of each class, whatever its module calls the enum."""
    tried = 0
    for requests in pool.requests.values():
        for name, enum in choices_of(type(requests[-1])):
            for value in ("foo", 999):
                with pytest.raises(BadRequest, match=rf"^{name}: got {value!r}; expected .*{next(iter(enum)).name}"):
                    dataclasses.replace(requests[-1], **{name: value})
                tried += 1
    assert tried > 100


FUNCTIONS = (
    "matmul", "conv_fwd", "conv_bwd_data", "conv_bwd_filter", "grouped_matmul",
    "norm_fwd", "norm_bwd", "pooling", "pooling_bwd", "reduce", "softmax", "softmax_bwd",
    "activation", "activation_bwd", "sdpa_fwd", "sdpa_bwd", "ctc_loss", "dropout", "dropout_bwd", "dropout_states",
    "rnn", "rnn_bwd_data", "rnn_bwd_weights", "run", "prepare", "explain", "from_dlpack",
    "from_cuda_array_interface", "device", "pack_weights", "unpack_weights", "aux_shape", "ragged_offsets",
)  # fmt: skip
OF_DEVICE = ("empty", "zeros", "array", "pinned", "fill_zero")
OF_TENSOR = (
    "transpose", "__getitem__", "reshape", "copy_from", "copy_from_async", "numpy_async", "item",
    "__len__", "__eq__", "numpy",
)  # fmt: skip


def arguments(pool):
    """Up to four arguments, some of them tensors that a function may take."""
    count = int(pool.rng.integers(5))
    return [pool.value(pool.pick(list(pool.requests.values()))[0].tensors()[:1] or None) for _ in range(count)]


def test_functions(pool):
    for number in range(CALLS):
        name = FUNCTIONS[number % len(FUNCTIONS)]
        given = arguments(pool)
        ends_well(partial(getattr(dp, name), *given), name, given)


@pytest.mark.parametrize("names", [OF_DEVICE, OF_TENSOR], ids=["device", "tensor"])
def test_methods(names, pool):
    for number in range(CALLS // 2):
        name = names[number % len(names)]
        owner = pool.device if names is OF_DEVICE else pool.tensor(pool._any_tensor())
        given = arguments(pool)
        if name in ("__getitem__", "__eq__"):
            given = [pool.value(1)]
        ends_well(partial(getattr(owner, name), *given), owner, name, given)


SUPERVISOR = {
    "device": "host", "streams": 1, "isolation": "thread", "queue_size": 8, "when_full": "block", "placement": "affine",
    "max_restarts": 1, "max_seconds": 1.0, "setup": (), "spare": 0, "hang_seconds": 1.0, "completion": "poll",
    "journal": None, "cooldown": None,
}  # fmt: skip
SUBMIT = {"timeout": 5.0, "worker": 0, "priority": 0, "after": ()}
LARGE = 64  # workers, at most: what asks for more may well be meant


def test_supervisors(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a name is a journal's
    before = threading.active_count()

    def open_and_close(fields):
        if type(streams := fields["streams"]) is int and streams > LARGE:
            return
        try:
            dp.Supervisor(**fields).close()
        except (OSError, ValueError) as error:  # the system's own, of a journal's path
            if isinstance(error, DispatchError):
                raise

    names = list(SUPERVISOR)
    opened = 0
    for number in range(SUBMITTED):
        name = names[number % len(names)]
        fields = {**SUPERVISOR, name: pool.value(SUPERVISOR[name])}
        opened += ends_well(partial(open_and_close, fields), "Supervisor", fields)
    assert 0 < opened < SUBMITTED
    assert threading.active_count() <= before + 2  # a compiler of nothing, a timer


def test_what_is_submitted(pool):
    sup = dp.Supervisor("host", streams=2)

    def submit(fields):
        future = sup.submit(**fields)
        with contextlib.suppress(*TAKEN):
            future.result(120)

    names = ["request", *SUBMIT]
    for number in range(SUBMITTED):
        name = names[number % len(names)]
        good = {"request": pool.request(dp.MatmulRequest), **SUBMIT}
        fields = {**good, name: pool.value(good[name])}
        ends_well(partial(submit, fields), "submit", fields)
        ends_well(partial(sup.submit_many, [pool.value() for _ in range(3)]), "submit_many")
    with pytest.raises(Undelivered):  # of what was no request
        sup.close()


def test_callbacks_that_cannot_be_called(pool):
    with dp.Supervisor("host", streams=1) as sup:
        future = sup.submit(pool.request(dp.MatmulRequest))
        for value in (None, 5, "x", ()):
            with pytest.raises(TypeError, match="is not callable"):
                future.add_done_callback(value)
        future.result(120)


class Liar(int):
    """A number that compares as it likes."""

    def __le__(self, other):
        return True

    __lt__ = __gt__ = __ge__ = __le__

    def __abs__(self):
        return 1


class Short(tuple):
    """A tuple that says it is shorter than it is."""

    __slots__ = ()

    def __len__(self):
        return 1


class Unhashable:
    def __init__(self, error):
        self.error = error

    def __hash__(self):
        raise self.error


SPAN = np.timedelta64(3, "s")  # to NumPy it is an integer


@pytest.mark.parametrize(
    ("operand", "call"),
    [
        ("alpha", lambda g: dp.matmul(g.x, g.x, alpha=SPAN)),
        ("scales.a", lambda g: dp.matmul(g.x, g.x, scales=dp.Scales(a=SPAN))),
        ("alpha", lambda g: dp.matmul(g.h, g.h, alpha=SPAN, library="cutlass")),
        ("alpha", lambda g: dp.grouped_matmul(g.h, g.dev.zeros((1, 16, 16), "f2"), [16], alpha=SPAN)),
        ("coef", lambda g: dp.activation(g.x, mode=ActivationMode.ELU, coef=SPAN)),
        ("shape", lambda g: g.dev.empty(SPAN)),
        ("shape", lambda g: g.dev.empty((2, SPAN))),
        ("shape", lambda g: g.dev.empty(Liar(-5))),
        ("shape", lambda g: g.dev.empty(Short((1,) * 65))),
        ("seed", lambda g: dp.dropout_states(g.dev, Liar(-5))),
        ("axis", lambda g: dp.softmax(g.x, axis=Liar(9))),
        ("input_size", lambda _: dp.Network(dp.RnnMode.LSTM, Liar(-5), 2)),
        ("pad", lambda g: dp.conv_fwd(*[g.dev.zeros((1, 1, 4, 4))] * 2, pad=Liar(-1))),
        ("source", lambda g: g.dev.array(np.ma.masked_array([1.0, 2.0], [0, 1]))),
        ("source", lambda g: g.dev.zeros(2).copy_from(np.ma.masked_array([1.0, 2.0], [0, 1]))),
        ("from_dlpack", lambda _: dp.from_dlpack(np.ma.masked_array([1.0, 2.0], [0, 1]))),
        (
            "b",
            lambda g: dp.prepare(dp.MatmulRequest(g.x, g.x)).refit(np.ma.masked_array(np.ones((16, 16), "f4"), 1)),
        ),
        ("b", lambda g: dp.prepare(dp.MatmulRequest(g.x, g.x)).refit([[1], [2, 3]])),
        ("scales", lambda g: dp.matmul(g.x, g.x, scales=memoryview(np.ones(2)))),
        ("workspace", lambda g: dp.matmul(g.x, g.x, workspace=Unhashable(ValueError("no hash")))),
        ("out_dtype", lambda g: dp.matmul(g.x, g.x, out_dtype=np.timedelta64(5, "s"))),
        ("operands", lambda g: dp.matmul(g.h, g.h, operands=np.ones(2), library="cutlass")),
        ("operands", lambda g: dp.matmul(g.h, g.h, operands=0, library="cutlass")),
        ("lengths", lambda g: dp.ragged_offsets(np.array(3), g.dev.zeros((4, 4, 4)))),
        ("handle", lambda g: dp.Stream.from_handle(g.dev, "x")),
        ("handle", lambda g: dp.Stream.from_handle(g.dev, -1)),
        ("handle", lambda g: dp.Stream.from_handle(g.dev, 2**64)),
        ("before", lambda _: dp.trace.add(before=5)),
        ("ended", lambda _: dp.trace.add(ended="x")),
    ],
)
def test_what_only_passes_for_a_good_value_is_refused_by_name(operand, call):
    dev = dp.device("host")
    with pytest.raises(BadRequest) as caught:
        call(SimpleNamespace(dev=dev, x=dev.zeros((16, 16), "f4"), h=dev.zeros((16, 16), "f2")))
    assert caught.value.operand == operand


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "made",
    [
        lambda g: g.dev, lambda g: g.dev.stream(), lambda g: dp.prepare(dp.MatmulRequest(g.x, g.x)),
    ],
    ids=["device", "stream", "call"],
)  # fmt: skip
def test_what_belongs_to_this_process_is_neither_copied_nor_pickled(way, made):
    dev = dp.device("host")
    with pytest.raises(TypeError, match=r"belongs to this process: .* x\.numpy\(\)"):
        way(made(SimpleNamespace(dev=dev, x=dev.zeros((4, 4)))))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_tensor_of_a_gpu_is_neither_copied_nor_pickled(way, monkeypatch):
    dev = dp.device("host")
    x = dev.zeros((4, 4))
    request = dp.MatmulRequest(x, x)
    monkeypatch.setattr(type(dev), "is_host", False)
    for made in (x, request) if way is not copy.copy else (x,):  # a shallow copy of a request has the same tensors
        with pytest.raises(TypeError, match=r"belongs to this process: .* x\.numpy\(\).*x\.copy\(\).*from_dlpack"):
            way(made)


@pytest.mark.parametrize("made", [lambda dev: dev, lambda dev: dev.stream()], ids=["device", "stream"])
def test_what_is_destroyed_once_is_not_copied_at_all(made):
    with pytest.raises(TypeError, match="belongs to this process"):
        copy.copy(made(dp.device("host")))


def test_a_masked_array_without_a_masked_element_is_an_array():
    source = np.ma.masked_array([1.0, 2.0], [0, 0])
    assert dp.device("host").array(source).numpy().tolist() == [1.0, 2.0]
    assert dp.from_dlpack(source).numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("spec", [None, 5.0, (90,), b"sm_90", np.int64(90), True, -90, "sm_\u00b2", "9" * 5000, ""])
def test_what_is_no_architecture_is_a_value_error(spec):
    with pytest.raises(ValueError, match="is not an architecture; write it like sm_90, or host"):
        dp.Arch.of(spec)


def test_a_dtype_whose_own_methods_raise_is_no_dtype():
    class Name(str):
        __slots__ = ()

        def __hash__(self):
            raise ZeroDivisionError

    with pytest.raises(BadRequest, match="dtype: got 'f32'; expected a dtype, one of"):
        dp.device("host").empty(2, Name("f32"))
