"""Arguments that an op does not have: a TypeError that names the nearest one and says where all are."""

import copy
import inspect
import operator
import pickle
import re
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import ClassVar

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType


@pytest.fixture
def x():
    return dp.device("host").array(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    ("op", "operands", "wrong", "right"),
    [
        ("matmul", 2, "epilog", "epilogue"),
        ("matmul", 2, "activation", "epilogue"),
        ("matmul", 2, "dtype", "out_dtype"),
        ("matmul", 2, "transpose_b", "b=b.T"),
        ("matmul", 2, "tune", "autotune"),
        ("softmax", 1, "dim", "axis"),
        ("reduce", 1, "axis", "axes"),
        ("activation", 1, "Mode", "mode"),
        ("sdpa_fwd", 3, "is_causal", "right_bound=0"),
        ("conv_fwd", 2, "padding", "pad"),
        ("norm_fwd", 2, "eps", "epsilon"),
        ("grouped_matmul", 3, "epilog", "epilogue"),
    ],
)
def test_the_nearest_is_named_and_where_all_are(x, op, operands, wrong, right):
    function = getattr(dp, op)
    text = rf"{op}\(\) got an unexpected keyword argument '{wrong}'. Did you mean {right}\? It takes .*help\(dispatch\."
    with pytest.raises(TypeError, match=text):
        function(*[x] * operands, **{wrong: 1})
    kind = next(kind for kind in (getattr(dp, name) for name in dir(dp)) if getattr(kind, "op", None) == op)
    with pytest.raises(TypeError, match=text.replace(op, kind.__name__)):
        kind(*[x] * operands, **{wrong: 1})


def test_of_what_nothing_is_like_all_are_listed(x):
    with pytest.raises(TypeError, match=r"argument 'zzz'\. It takes x, .*out.*: see help\(dispatch\.pooling\)"):
        dp.pooling(x, 2, zzz=1)


def test_the_first_unknown_one_is_named_among_known_ones(x):
    with pytest.raises(TypeError, match="'epilog'"):
        dp.matmul(x, x, alpha=2.0, epilog="gelu", biass=x)


@pytest.mark.parametrize(
    ("name", "place", "wrong", "right"),
    [
        ("Supervisor", (), "stream", "streams"),
        ("Supervisor.submit_many", (None, ()), "workers", "worker"),
        ("device", (), "nam", "name"),
        ("Device", (), "arc", "arch"),
        ("Device.zeros", (None, 3), "type", "dtype"),
        ("Stream", (), "devic", "device"),
        ("use_torch_stream", (), "dev", "device"),
        ("Scales", (), "amax", "amax_d"),
        ("Row", (), "opp", "op"),
        ("Fusion", (), "epilog", "epilogues"),
        ("Kernel", (), "option", "options"),
        ("Launch", (), "blocks", "block"),
        ("Output", (), "stride", "strides"),
        ("Network", (), "hidden", "hidden_size"),
        ("CallCounter", (), "frist", "first"),
        ("prepare", (), "req", "request"),
        ("explain", (), "archs", "arch"),
        ("from_dlpack", (), "src", "source"),
        ("request_function", (), "request", "request_class"),
        ("numpy_call", (), "formular", "formula"),
        ("evt.reduce", (), "ovr", "over"),
        ("trace.add", (), "befor", "before"),
        ("cudnn.Graph", (), "compute_type", "compute"),
    ],
)
def test_constructors_and_functions_name_the_nearest_and_where_all_are(name, place, wrong, right):
    made = operator.attrgetter(name)(dp)
    called = name.removeprefix("evt.").removeprefix("trace.").removeprefix("cudnn.")
    with pytest.raises(TypeError) as caught:
        made(*place, **{wrong: 1})
    text = rf"{called}\(\) got an unexpected keyword argument '{wrong}'\. Did you mean {right}\? It takes .*"
    assert re.fullmatch(rf"{text}: see help\(dispatch\.{name}\)", str(caught.value))
    assert caught.value.__suppress_context__  # Python's own sentence says less


def test_arguments_beyond_those_by_place_are_told_which_these_are(x):
    for made, count in (
        (dp.matmul, 3),
        (dp.MatmulRequest, 3),
        (dp.softmax, 2),
        (dp.pooling, 4),
        (dp.SoftmaxRequest, 2),
    ):
        with pytest.raises(
            TypeError, match=rf"positional arguments? but {count} were given\. .* takes \w+.*; by keyword"
        ):
            made(*[x] * count)
    with pytest.raises(
        TypeError, match=r"Supervisor\(\) takes at most 14 positional arguments but 15 were given\. .*device,"
    ):
        dp.Supervisor(*range(15))
    with pytest.raises(
        TypeError, match=r"Device\.zeros\(\) takes at most 2 .* but 3 were given\. .* shape, dtype by position"
    ):
        dp.device("host").zeros(2, 3, 4)


def test_what_is_missing_is_told_in_pythons_words_and_where_all_are():
    with pytest.raises(TypeError, match=r"^Launch\(\) missing 1 .*'block': see help\(dispatch\.Launch\)$"):
        dp.Launch((1,))


def test_a_type_error_from_inside_is_as_it_was():
    with pytest.raises(TypeError) as caught:
        dp.evt.constant("one")
    assert "see help" not in str(caught.value)
    assert caught.traceback[-1].name == "constant"


def test_signatures_have_no_argument_more():
    for made in (dp.matmul, dp.softmax, dp.MatmulRequest, dp.SoftmaxRequest, dp.grouped_matmul, dp.Supervisor.submit):
        kinds = {parameter.kind for parameter in inspect.signature(made).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    for made, first in ((dp.Supervisor, "device"), (dp.Stream, "stream"), (dp.Launch, "grid"), (dp.device, "name")):
        assert next(iter(inspect.signature(made).parameters)) == first
    assert list(inspect.signature(dp.MatmulRequest).parameters) == list(inspect.signature(dp.matmul).parameters)


def test_a_bound_call_names_the_nearest_operand(x):
    call = dp.prepare(dp.SoftmaxRequest(x))
    for kind in (BadType, BadRequest, TypeError):
        with pytest.raises(kind, match=r"outt: got an argument .*the name of an operand: x, out\. Did you mean out\?"):
            call(outt=x)
    with pytest.raises(TypeError, match=r"biass: .*Did you mean bias\?"):
        dp.prepare(dp.MatmulRequest(x, x))(biass=x)


def test_requests_are_copied_pickled_and_made_as_before(x):
    request = dp.MatmulRequest(x, x, alpha=2.0)
    for other in (copy.deepcopy(request), pickle.loads(pickle.dumps(request)), request.replace(a=x)):
        np.testing.assert_array_equal(dp.run(other).numpy(), dp.run(request).numpy())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        dp.MatmulRequest(x)
    with pytest.raises(TypeError, match="positional arguments but"):
        dp.MatmulRequest(x, x, x)


@dataclass(frozen=True, eq=False)
class Base(dp.OperandRequest["dp.Tensor"]):
    op: ClassVar[str] = "test_unknown"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: dp.Tensor
    _: KW_ONLY
    slope: float = 0.5
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        assert isinstance(self.slope, float)


def test_classes_of_ones_own_and_what_derives_from_them(x):
    function = dp.request_function(Base, "test_unknown")

    @dataclass(frozen=True, eq=False)
    class Derived(Base):
        scale: float = 1.0

    dp.request_function(Derived, "derived")
    for made in (function, Base, Derived):
        with pytest.raises(TypeError, match=r"'slop'\. Did you mean slope\?"):
            made(x, slop=1.0)
    assert Derived(x, slope=2.0, scale=3.0).scale == 3.0
    assert list(inspect.signature(Derived).parameters) == ["x", "scale", "slope", "out"]


def test_an_init_of_ones_own_stays(x):
    @dataclass(frozen=True, eq=False)
    class Own(Base):
        def __init__(self, x, steepness):
            object.__setattr__(self, "x", x)
            object.__setattr__(self, "slope", steepness)
            object.__setattr__(self, "out", None)
            self.__post_init__()

    @dataclass(frozen=True, eq=False)
    class WithInitVar(Base):
        half: InitVar[float] = 0.5

        def __post_init__(self, half):
            object.__setattr__(self, "slope", half)
            super().__post_init__()

    dp.request_function(Own, "own")
    dp.request_function(WithInitVar, "with_init_var")
    assert Own(x, steepness=2.0).slope == 2.0
    assert WithInitVar(x, half=2.0).slope == 2.0
