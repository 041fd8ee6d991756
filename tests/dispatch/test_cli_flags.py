"""The flags of a request class: which there are, how their words are read, and how operands lie."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.cli.expression import evaluate
from dispatch.cli.operands import COMPLETIONS, tensor_of
from dispatch.cli.probe import request_classes
from dispatch.cli.request_flags import Partial, Spec, field_docs, field_types, reader
from dispatch.core.operands import OperandRequest, Output, like
from dispatch.keys import BF16, F16, F32, HOST, Compute, Epilogue
from dispatch.ops.conv import ConvFwdRequest
from dispatch.ops.rnn import RnnMode, RnnRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.ops.pooling import PoolingMode


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[pytest.mark.exhaustive] if n % 4 else []) for n, op in enumerate(dp.TABLE.ops)]
)
def test_every_field_of_a_request_class_is_a_flag_with_a_word_about_it(op, capsys):
    kind: Any = request_classes(op)[0]
    found = field_types(kind)
    with pytest.raises(SystemExit):
        main(["explain", op, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(kind):
        if field.name == "on":  # the device: that of the host
            continue
        assert reader(field.name, found[field.name]) is not None, field.name
        assert f"--{field.name.replace('_', '-')}" in text
    assert {"--shape", "--dtype", "--arch", "--all", "--json"} <= set(text.replace("[", " ").split())


def test_what_is_filled_in_is_of_classes_that_there_are():
    known = {base.__name__ for op in dp.TABLE.ops for kind in request_classes(op) for base in kind.__mro__}
    assert COMPLETIONS.keys() <= known


@dataclass(frozen=True)
class Mine:
    """A user's own.

    Attributes:
        x, y: of any shape,
            but not empty.
        mode: how.
    """

    op: ClassVar[str] = "mine"
    x: dp.Tensor
    mode: "PoolingMode"
    y: "dp.Tensor | None" = None
    pairs: "tuple[tuple[int, int], ...]" = ()
    compute: Compute | None = None
    stranger: "Nowhere" = None  # type: ignore[name-defined]  # noqa: F821


def test_types_are_read_as_they_are_written_and_those_for_type_checkers_too():
    found = field_types(Mine)
    assert found["x"] is dp.Tensor
    assert found["mode"] is dp.PoolingMode
    assert found["compute"] == Compute | None
    assert reader("stranger", found["stranger"]) is None
    assert field_docs(Mine) == dict.fromkeys("xy", "of any shape, but not empty") | {"mode": "how"}


READ = [
    ("mode", Mine, "max", dp.PoolingMode.MAX),
    ("y", Mine, "none", None),
    ("y", Mine, "8x4:bf16:columns", Spec((8, 4), BF16, "columns")),
    ("y", Mine, "rows:f16", Spec(None, F16, "rows")),
    ("pairs", Mine, "1,2;3,4", ((1, 2), (3, 4))),
    ("compute", Mine, "32f", Compute.COMPUTE_32F),
    ("compute", Mine, "COMPUTE_64F", Compute.COMPUTE_64F),
    ("pad", ConvFwdRequest, "1", 1),
    ("pad", ConvFwdRequest, "1x2", (1, 2)),
    ("pad", ConvFwdRequest, "0,1;2,0", ((0, 1), (2, 0))),
    ("beta", ConvFwdRequest, "0.5", 0.5),
    ("out_dtype", ConvFwdRequest, "f32", F32),
    ("lengths", RnnRequest, "3,2,1", (3, 2, 1)),
    ("epilogue", dp.MatmulRequest, "relu_aux_bias", Epilogue.RELU_AUX_BIAS),
    ("alpha", dp.MatmulRequest, "2", 2),
    ("alpha", dp.MatmulRequest, "1+2j", 1 + 2j),
    ("alpha", dp.MatmulRequest, "1:f32", Spec((1,), F32)),
]


@pytest.mark.parametrize(("name", "kind", "text", "value"), READ)
def test_a_word_is_read_by_the_type_of_its_field(name, kind, text, value):
    each: Any = reader(name, field_types(kind)[name])
    found = each.read(text)
    assert (found, type(found)) == (value, type(value))


def test_a_record_is_read_by_the_names_of_its_fields():
    each: Any = reader("network", field_types(RnnRequest)["network"])
    kind, values = each.read("mode=GRU,input_size=3,hidden_size=4,bidirectional=true,bias=false")
    assert kind is dp.Network
    assert values == {"mode": RnnMode.GRU, "input_size": 3, "hidden_size": 4, "bidirectional": True, "bias": False}
    for text in ("mode", "mode=GRU,mode=LSTM", "gates=3", "mode=GRU,input_size=x,hidden_size=3", "mode=LSTM"):
        with pytest.raises(ValueError):  # noqa: PT011  # argparse makes the words of it
            each.read(text)
    assert isinstance(each.read("mode=LSTM,hidden_size=1,input_size=2"), Partial)


def test_a_record_takes_numbers_as_its_own_help_writes_them():
    each: Any = reader("form", field_types(dp.SparseMvRequest)["form"])
    assert "shape is numbers like 3,3" in each.expected
    wanted = {"format": SparseFormat.CSR, "shape": (3, 3), "block": (1, 1)}
    for text in ("format=CSR,shape=3,3,block=1,1", "shape=3x3,block=1,1,format=CSR", "block=1x1,format=CSR,shape=3,3"):
        assert each.read(text).values == wanted
    for text in ("format=CSR,shape=3", "format=CSR,shape=3,,3", "format=CSR,shape=3,3,", "format=CSR,3,shape=3,3"):
        with pytest.raises(ValueError):  # noqa: PT011
            each.read(text)


@pytest.mark.parametrize(
    ("spec", "strides"),
    [
        (Spec((2, 3, 4, 5)), (60, 20, 5, 1)),
        (Spec((2, 3, 4, 5), order="columns"), (60, 20, 1, 4)),
        (Spec((2, 3, 4, 5), order="channels_last"), (60, 1, 15, 3)),
        (Spec((7,), order="channels_last"), (1,)),
        (Spec((4, 5), strides=(8, 1)), (8, 1)),
        (Spec((), F16), ()),
    ],
)
def test_an_operand_lies_as_its_order_says(spec, strides):
    tensor = tensor_of(spec)
    assert (tensor.shape, tensor.layout.strides) == (spec.shape, strides)


@pytest.mark.parametrize(
    "text", ["x.real", "f(*a)", "[1]", "lambda: 1", "1 if 1 else 2", "unknown", "f(", "f(k=1, **a)", "f()()", "x / 0"]
)
def test_an_expression_is_names_numbers_and_calls_alone(text):
    with pytest.raises(ValueError):  # noqa: PT011
        evaluate(text, {"x": 1, "a": (1,), "f": lambda *_, **__: 0})


def test_an_expression_is_what_python_makes_of_it():
    names = {"x": 3, "f": lambda *values, by=1: sum(values) * by}
    assert evaluate(" f(x, -2, 1.5, by=x) / 2 + x * x - 1", names) == 11.75


# -- the op of a user -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Scaled(OperandRequest):
    """y = x times a whole number.

    Attributes:
        x: any tensor.
        times: the number.
    """

    op: ClassVar[str] = "scaled"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    writes: ClassVar[tuple[str, ...]] = ("out",)

    x: dp.Tensor
    times: int = 2
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        if self.times == 0:
            raise dp.errors.BadRequest("times", "0", "another number")

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.x.layout)}

    def attributes(self) -> tuple[int, ...]:
        return (self.times,)


@dataclass(frozen=True, eq=False)
class ScaledByTensor(Scaled):
    """The same with a factor in memory."""

    reads: ClassVar[tuple[str, ...]] = ("x", "factor")
    factor: dp.Tensor | None = None

    @property
    def required(self) -> tuple[str, ...]:
        return ("x",)


def by_columns(request: Scaled) -> str:
    """x has dense columns."""
    return "" if request.x.layout.strides[0] == 1 else "needs x in columns, has rows"


@pytest.fixture
def _scaled() -> Iterator[None]:
    """A row of the op, which only takes columns."""
    host = next(row for row in dp.TABLE if row.min_arch == HOST)
    names = {"op": "scaled", "library": "mine", "function": "scale"}
    row = replace(host, dtypes=(F32, F32), compute=None, fusion=None, rules=(by_columns,), variant="", **names)
    dp.register(row)
    yield
    dp.TABLE.unregister(row)


@pytest.mark.usefixtures("_scaled")
def test_the_op_of_a_user_is_explained_by_its_own_request_class(capsys):
    assert main(["explain", "scaled", "--shape", "3x4:f32", "--times", "3", "--arch", "host", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["library"], facts["request"]) == ("mine", "scaled(x f32[3, 4] element strides (1, 3), times=3)")
    assert main(["explain", "scaled", "--shape", "3x4:f32:rows", "--arch", "host"]) == 1
    assert "needs x in columns, has rows" in capsys.readouterr().out
    assert main(["explain", "scaled", "--shape", "3x4:f32", "--times", "0", "--arch", "host"]) == 2
    assert "--times: got 0; expected another number" in capsys.readouterr().err


@pytest.mark.usefixtures("_scaled")
def test_of_several_classes_the_one_that_has_the_flags_makes_the_request(capsys):
    assert main(["explain", "scaled", "--shape", "3x4:f32", "--factor", "1", "--arch", "host", "--json"]) == 0
    assert "factor f32[1]" in json.loads(capsys.readouterr().out)["request"]
