"""Messages that first readers meet: short, they name the field, list what there is, and say what to write instead."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, DispatchError, NoRow, shown
from dispatch.keys import HOST, Arch, Choice, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.activation import ActivationMode
from dispatch.ops.conv.base import Activation
from dispatch.ops.norm.request import NormMode
from dispatch.ops.pooling import PoolingMode
from dispatch.ops.reduction import ReduceOp
from dispatch.ops.rnn.network import RnnBiasMode, RnnMode
from dispatch.ops.sdpa.base import Diagonal
from dispatch.ops.softmax import SoftmaxAlgorithm
from dispatch.refusal import Kind
from dispatch.row_check import cases_of
from dispatch.table.select import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST = 2000  # characters of any message
ENUMS: list[type[Choice]] = [
    *(Compute, Epilogue, ScaleMode, ActivationMode, Activation, NormMode, PoolingMode, ReduceOp, RnnMode, RnnBiasMode),
    *(Diagonal, SoftmaxAlgorithm),
]


def zeros(*shape: int, dtype: Any = "f32") -> dp.Tensor:
    return dp.device("host").zeros(shape, dtype)


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_a_name_that_an_enum_has_not_is_told_with_those_that_it_has(kind: type[Choice]) -> None:
    member = list(kind)[-1]
    for ask in (kind, kind.__getitem__):
        with pytest.raises((ValueError, KeyError)) as caught:
            ask(f"{member.name}X")
        text = str(caught.value)
        assert all(name in text for name in kind.__members__)
        assert f"Did you mean {kind.__name__}.{member.name}?" in text
    with pytest.raises(ValueError, match="'zzzz' is no") as other:
        kind("zzzz")
    assert "Did you mean" not in str(other.value)
    assert kind(member.value) is kind[member.name] is pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize("given", ["GELU_BAIS", "gelu_bais", "gelu-bais", "Epilogue.GELU_BAIS"])
def test_a_request_says_which_epilogue_was_meant(given: str) -> None:
    with pytest.raises(BadRequest, match=r"epilogue: got '.*'; expected an Epilogue: NONE, RELU, .* tree") as caught:
        dp.matmul(zeros(4, 4), zeros(4, 4), epilogue=given)
    assert str(caught.value).endswith("Did you mean Epilogue.GELU_BIAS?")


def test_a_request_lists_the_compute_types() -> None:
    with pytest.raises(BadRequest, match=r"compute: got 'f31'; expected a Compute: COMPUTE_16F, .* or None"):
        dp.matmul(zeros(4, 4), zeros(4, 4), compute="f31")


@pytest.mark.parametrize("make", [lambda d: zeros(2, dtype=d), lambda d: dp.device("host").empty((2,), d)])
def test_an_unknown_dtype_is_told_with_those_that_there_are(make: Callable[[object], object]) -> None:
    for given in ("fp8", "f33", 3):
        with pytest.raises(BadRequest) as caught:
            make(given)
        assert caught.value.operand == "dtype"
        assert all(name in str(caught.value) for name in Dtype.by_name)


@pytest.mark.parametrize("shape", ["ab", 2.5, (2, "x"), (2.0,), True, None, {2}, -1], ids=str)
def test_a_shape_of_a_wrong_kind_says_so(shape: object) -> None:
    with pytest.raises(BadRequest, match=r"^shape: got .*; expected (an integer, or a tuple|integers)"):
        dp.device("host").zeros(shape)  # type: ignore[arg-type]


# -- one request where several are asked for --------------------------------------------------------------------------
def test_one_request_in_place_of_a_list_is_told_so() -> None:
    request = dp.MatmulRequest(zeros(4, 4), zeros(4, 4))
    with dp.Supervisor("host") as sup:
        for ask in (dp.prepare_all, sup.submit_many):
            with pytest.raises(TypeError, match=r"^requests: got one MatmulRequest; expected a list: \[request\]$"):
                ask(request)  # type: ignore[operator]
            with pytest.raises(TypeError, match=r"^requests: got int; expected a list of requests$"):
                ask(3)  # type: ignore[operator]
        assert len(sup.submit_many(iter([request]))) == len(dp.prepare_all(iter([request]))) == 1


# -- whole numbers ----------------------------------------------------------------------------------------------------
def x() -> dp.Tensor:
    """Made anew, for other tests close the device."""
    return zeros(2, 8, 5, 5)


FIELDS: dict[str, Callable[[Any], dp.Request]] = {
    "pad": lambda value: dp.ConvFwdRequest(x(), zeros(8, 8, 3, 3), pad=value),
    "stride": lambda value: dp.ConvFwdRequest(x(), zeros(8, 8, 3, 3), stride=value),
    "dilation": lambda value: dp.ConvFwdRequest(x(), zeros(8, 8, 3, 3), dilation=value),
    "window": lambda value: dp.PoolingRequest(x(), value),
    "padding": lambda value: dp.PoolingRequest(x(), 3, padding=value),
    "axes": lambda value: dp.ReduceRequest(x(), value),
    "axis": lambda value: dp.SoftmaxRequest(x(), axis=value),
    "groups": lambda value: dp.NormFwdRequest(x(), zeros(8), mode=NormMode.GROUP_NORM, groups=value, bias=zeros(8)),
}
SEVERAL = ("pad", "stride", "dilation", "window", "padding")


@pytest.mark.parametrize("field", FIELDS)
def test_numpy_s_integers_are_python_s(field: str) -> None:
    make = FIELDS[field]
    for kind in (np.int64, np.int32, np.uint8, np.array):
        request = make(kind(1))
        assert type(getattr(request, field)) is int
        assert request.key() == make(1).key()


@pytest.mark.parametrize("field", SEVERAL)
def test_a_list_or_an_array_is_a_tuple(field: str) -> None:
    make = FIELDS[field]
    for value in ([1, 1], np.array([1, 1]), (np.int64(1), 1), [np.int32(1), np.uint8(1)]):
        request = make(value)
        assert getattr(request, field) == (1, 1)
        assert {type(one) for one in getattr(request, field)} == {int}
        assert request.key() == make((1, 1)).key()
        hash(request.key())
    assert getattr(FIELDS["pad"]([[1, 2], [0, np.int64(1)]]), "pad") == ((1, 2), (0, 1))  # noqa: B009
    assert dp.reduce(x(), [0, np.int64(1)]).shape == (5, 5)
    assert dp.conv_fwd(x(), zeros(8, 8, 3, 3), pad=[1, 1], stride=np.array([2, 2])).shape == (2, 8, 3, 3)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [True, np.True_, [True, 1], (1, False), np.array([True, True])], ids=repr)
def test_a_bool_is_no_whole_number_and_the_message_names_the_field(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{field}: got .*; expected a whole number, not a bool"):
        FIELDS[field](value)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["1", 1.0, np.float32(1), [1.0, 1], np.timedelta64(1)], ids=repr)
def test_what_is_no_whole_number_is_told_with_its_field(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{field}: got .*; expected "):
        FIELDS[field](value)


def test_a_network_takes_numpy_s_integers() -> None:
    network = dp.Network(RnnMode.LSTM, np.int64(4), np.int32(3), layers=np.uint8(2))
    assert [type(value) for value in (network.input_size, network.hidden_size, network.layers)] == [int] * 3
    with pytest.raises(BadRequest, match=r"^layers: got True"):
        dp.Network(RnnMode.LSTM, 4, 3, layers=True)


# -- lengths ----------------------------------------------------------------------------------------------------------
WITHOUT_REQUESTS = (
    "cudnn_graph",
    "send",
    "recv",
    "barrier",
)  # that one rank can make here, or whose operands are wrong
OPS = dict.fromkeys(row.op for row in dp.TABLE if row.on(HOST) and row.op not in WITHOUT_REQUESTS)


def drawn(op: str) -> Any:
    """A request of an op, the one with the most operands among the first cases of its rows."""
    rng, home = np.random.default_rng(0), dp.device("host")
    rows = [row for row in dp.TABLE.of(op) if row.on(HOST)][:3]
    found = [case.check(home, rng).request for row in rows for case in cases_of(row)[:4]]
    return max(found, key=lambda request: len(request.tensors()))


def changed(request: Any, change: Callable[[dp.Tensor], dp.Tensor], *names: str) -> Callable[[], Any]:
    """A request over other operands, all of them or those named, and what it is refused with by a GPU's rows."""
    known = {field.name for field in dataclasses.fields(request)}
    given = {name: tensor for name, tensor, _ in request.tensors() if name in (names or known)}

    def make() -> None:
        made = dataclasses.replace(request, **{name: change(tensor) for name, tensor in given.items()})
        for arch in (Arch(90), HOST):
            select(made, arch)

    return make


def refusals_of(op: str) -> Iterator[Callable[[], Any]]:
    """Wrong dtypes of all operands and of one, wrong ranks, wrong devices, wrong libraries."""
    request, home, other = drawn(op), dp.device("host"), HostDevice(generation=1 << 20)
    names = [name for name, _, _ in request.tensors() if "." not in name and "[" not in name]
    for dtype in Dtype.by_name.values():
        yield changed(request, lambda tensor, dtype=dtype: home.empty(tensor.shape, dtype))
    for dtype, name in product(("f64", "i64", "f8e4m3", "bool"), names):
        yield changed(request, lambda tensor, dtype=dtype: home.empty(tensor.shape, dtype), name)
    for name in (None, *names):
        of = () if name is None else (name,)
        yield changed(request, lambda tensor: home.empty((1, *tensor.shape), tensor.dtype), *of)
        yield changed(request, lambda tensor: home.empty((), tensor.dtype), *of)
        yield changed(request, lambda tensor: home.empty((1,) * 60, tensor.dtype), *of)
        yield changed(request, lambda tensor: other.empty(tensor.shape, tensor.dtype), *of)
    for field in dataclasses.fields(request):
        for value in ("no such", True, 7, -1.5, ("a",) * 50, object(), "x" * 5000):
            yield lambda field=field, value=value: select(dataclasses.replace(request, **{field.name: value}), HOST)


def refused(make: Callable[[], Any]) -> str:
    """What a call is refused with."""
    try:
        make()
    except NoRow as error:
        text = str(error)
        first, second, *rows, last = text.split("\n")
        assert len(first) <= 160
        assert first.startswith("no row of the table takes ")
        assert second.startswith("Nearest that works: ")
        assert 1 <= len(rows) <= 8
        assert "error.tried" in last
        elsewhere = [any(reason.kind is Kind.ARCH for reason in why) for _, why in error.nearest_first]
        assert elsewhere == sorted(elsewhere)
        return text
    except DispatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", OPS)
def test_no_message_is_long(op: str) -> None:
    said = [text for make in refusals_of(op) if (text := refused(make))]
    assert len(said) > 20
    longest = max(said, key=len)
    assert len(longest) < LONGEST, longest


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.full((2, 3), 0.123, np.float32), "a numpy ndarray of float32[2, 3]"),
        ([("r", np.full(3, 0.123))], "[('r', a numpy ndarray of float64[3])]"),
        ({"r": (np.full((), 0.123),)}, "{'r': (a numpy ndarray of float64[],)}"),
        ({"r": np.full(3, 0.123)}.items(), "a dict_items"),
        ([[[[[np.full(3, 0.123)]]]]], "[[[[…]]]]"),
        (np.float32(0.5), repr(np.float32(0.5))),
        ((1, 2.5, "x", None), "(1, 2.5, 'x', None)"),
        ((), "()"),
        ([3], "[3]"),
        ({"a": (1,)}, "{'a': (1,)}"),
    ],
    ids=str,
)
def test_a_value_in_a_message_has_no_elements_of_arrays(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_tensor_in_a_message_has_no_elements_either() -> None:
    tensor = dp.device("host").array(np.full((2, 3), 0.123))
    assert shown(tensor) == "Tensor(f64[2, 3] on host)"
    assert shown([("r", tensor)]) == "[('r', Tensor(f64[2, 3] on host))]"
    torch = pytest.importorskip("torch")
    assert shown({"r": torch.full((3,), 0.123)}) == "{'r': a torch Tensor of float32[3]}"


def test_what_requests_say_of_arrays_at_the_wrong_place_has_no_elements() -> None:
    from dispatch import evt

    a, wrong = zeros(8, 8, dtype="f16"), dp.device("host").array(np.full((2, 3), 0.123))
    calls: list[Callable[[], object]] = [
        lambda: dp.matmul(a, a, operands=[("r", wrong)]),
        lambda: dp.matmul(a, a, epilogue=wrong),
        lambda: dp.matmul(a, a, epilogue=evt.accumulator(), operands=[("r", wrong, wrong)]),
        lambda: dp.matmul(a, a, alpha=[wrong]),
        lambda: dp.conv_fwd(zeros(1, 4, 4, 4), zeros(4, 4, 1, 1), pad=np.full(3, 0.123)),
        lambda: dp.grouped_matmul(a, zeros(1, 8, 8, dtype="f16"), [8], alpha=[wrong]),
    ]
    for call in calls:
        with pytest.raises(BadRequest) as caught:
            call()
        assert "[" in caught.value.given
        assert "0.1" not in str(caught.value)
