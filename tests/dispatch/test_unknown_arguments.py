"""Arguments that an op does not have: a TypeError that names the nearest one and says where all are."""

import copy
import inspect
import pickle
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


def test_signatures_have_no_argument_more():
    for made in (dp.matmul, dp.softmax, dp.MatmulRequest, dp.SoftmaxRequest, dp.grouped_matmul):
        kinds = {parameter.kind for parameter in inspect.signature(made).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert list(inspect.signature(dp.MatmulRequest).parameters) == list(inspect.signature(dp.matmul).parameters)


def test_a_bound_call_names_the_nearest_operand(x):
    call = dp.prepare(dp.SoftmaxRequest(x))
    for kind in (BadType, BadRequest, TypeError):
        with pytest.raises(kind, match=r"outt: got an operand; expected one of x, out\. Did you mean out\?"):
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
