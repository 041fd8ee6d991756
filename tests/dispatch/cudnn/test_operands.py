"""OperandRequest: the contract that the ops of one call share, on a request made for these tests."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import dispatch
from dispatch import Tensor
from dispatch.checks import check_int
from dispatch.core.operands import OperandRequest, Output, dense, like, same_as
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, StaleTensor
from dispatch.keys import F32, I32


@dataclass(frozen=True, eq=False)
class Twice(OperandRequest):
    """out = 2 x, index = its places, and `state` counts the runs."""

    op: ClassVar[str] = "twice"
    reads: ClassVar[tuple[str, ...]] = ("x", "state", "weight")
    writes: ClassVar[tuple[str, ...]] = ("out", "index")
    updates: ClassVar[tuple[str, ...]] = ("state",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    state: Tensor
    weight: Tensor | None = None
    indices: bool = False
    out: Tensor | None = None
    index: Tensor | None = None

    @property
    def required(self):
        return ("x", "state")

    def check_fields(self):
        pass

    def outputs(self):
        return {"out": like(self.x.layout), **({"index": dense(self.x.shape, I32)} if self.indices else {})}

    def attributes(self):
        return (self.indices,)


@pytest.fixture
def dev():
    return dispatch.device("host")


@pytest.fixture
def x(dev):
    return dev.zeros((3, 4))


@pytest.fixture
def state(dev):
    return dev.zeros((1,))


def test_what_it_says_of_itself(x, state):
    request = Twice(x, state)
    assert request.signature().dtypes == (F32, F32)
    assert request.key() == (x.layout, state.layout, None, None, None, False)
    assert [(name, written) for name, _, written in request.tensors()] == [("x", False), ("state", True)]
    assert request.unallocated() == {"out": ((3, 4), (4, 1), F32)}
    assert request.describe() == "twice(x f32[3, 4], state f32[1], indices=False)"
    assert not request.repeatable


def test_arguments_are_addresses_in_a_fixed_order_and_0_for_what_is_not_there(dev, x, state):
    out, index = dev.zeros((3, 4)), dev.zeros((3, 4), "i32")
    assert Twice(x, state).arguments({"out": out}) == (x.ptr, state.ptr, 0, out.ptr, 0)
    given = Twice(x, state, indices=True, out=out)
    assert given.arguments({"index": index}) == (x.ptr, state.ptr, 0, out.ptr, index.ptr)
    assert given.result({"index": index}) == (out, index)
    assert Twice(x, state, out=out).result({}) is out


def test_an_output_lies_in_memory_as_its_model_does(dev):
    last = dev.layout(F32, (2, 3, 4, 5), (60, 1, 15, 3), 256)
    assert like(last) == Output((2, 3, 4, 5), (60, 1, 15, 3), F32)
    assert like(last, (2, 7, 2, 2)).strides == (28, 1, 14, 7)
    gaps = dev.layout(F32, (2, 3), (10, 1), 256)
    assert like(gaps).strides == (3, 1)


def test_replace_takes_operands_by_name_and_checks_them(dev, x, state):
    other = dev.zeros((5, 4))
    assert Twice(x, state).replace(x=other).x is other
    with pytest.raises(
        BadRequest,
        match="z: got an argument of this name; expected the name of an operand: x, state, weight, out, index",
    ):
        Twice(x, state).replace(z=other)
    with pytest.raises(BadRequest, match="out: got"):
        Twice(x, state, out=dev.zeros((3, 4))).replace(x=other)


def test_what_a_pickle_holds_is_the_fields_alone(x, state):
    request = Twice(x, state)
    request.key(), request.unallocated(), request.tensors()
    assert set(request.__getstate__()) == {"x", "state", "weight", "indices", "out", "index"}


def test_outputs_of_another_shape_or_dtype_or_that_are_not_made_are_refused(dev, x, state):
    for out in (dev.zeros((4, 3)), dev.zeros((3, 4), "f16")):
        with pytest.raises(BadRequest, match=r"expected f32\[3, 4\]. Hint: leave out=None"):
            Twice(x, state, out=out)
    with pytest.raises(BadRequest, match="this twice has no index"):
        Twice(x, state, index=dev.zeros((3, 4), "i32"))


def test_only_the_pairs_of_in_place_may_be_one_view(dev, x, state):
    assert Twice(x, state, out=x).out is x
    whole = dev.zeros((4, 4))
    with pytest.raises(BadRequest, match="overlaps x"):
        Twice(whole[:3], state, out=whole[1:])
    with pytest.raises(BadRequest, match="overlaps"):
        Twice(whole[:3], whole[0, :1])
    with pytest.raises(BadRequest, match="overlaps weight"):
        Twice(x, state, whole[0], out=whole[:3])


def test_memory_that_cannot_be_written_is_refused(dev, x, state):
    frozen = np.zeros((3, 4), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(BadRequest, match="read-only"):
        Twice(x, state, out=dispatch.from_dlpack(frozen))
    row = dev.zeros((1, 4))
    spread = Tensor(row.storage, row.ptr, dev.layout(F32, (3, 4), (0, 1), row.ptr))
    with pytest.raises(BadRequest, match="elements that have different addresses"):
        Twice(x, state, out=spread)


def test_operands_are_tensors_that_are_there(x, state):
    with pytest.raises(BadRequest, match="x: got a list; expected a dispatch Tensor"):
        Twice([1], state)
    with pytest.raises(BadRequest, match="state: got None"):
        Twice(x, None)
    x.device.close()
    with pytest.raises(StaleTensor):
        Twice(x, state)


# -- every check, at both of its sides ------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [1, 2, 7, 8])
def test_a_whole_number_in_its_range_is_taken(value):
    assert check_int("n", value, 1, 8) == value


@pytest.mark.parametrize("value", [0, 9, -1, True, False, 1.0, "1", None])
def test_what_is_no_whole_number_in_its_range_is_refused(value):
    with pytest.raises(BadRequest, match="whole number from 1 to 8"):
        check_int("n", value, 1, 8)


def test_a_whole_number_is_one_of_32_bits_unless_said_otherwise():
    assert check_int("n", 2**31 - 1, 0) == 2**31 - 1
    with pytest.raises(BadRequest, match="2147483647"):
        check_int("n", 2**31, 0)


def test_an_operand_of_another_kind_of_device_is_refused(x):
    other = HostDevice(99)
    with pytest.raises(BadRequest, match="state"):
        Twice(x, other.zeros((1,)))


@pytest.mark.parametrize("given", [True, False])
def test_the_layout_of_an_operand_is_its_own_or_that_which_it_will_have(dev, x, state, given):
    out = dev.zeros((4, 3)).T if given else None
    request = Twice(x, state, out=out)
    assert request.layout_of("out") is (out.layout if given else dev.layout(F32, (3, 4), (4, 1), 256))
    assert request.layout_of("out").alignment == 256
    assert request.layout_of("x") is x.layout


def test_broadcast_memory_is_read_but_never_written(dev, x, state):
    row = dev.zeros((1, 4))
    wide = dispatch.from_dlpack(np.broadcast_to(np.zeros((1, 4), np.float32), (3, 4)))
    with pytest.raises(BadRequest):
        Twice(x, state, out=wide)
    Twice(wide, state)
    one = dispatch.from_dlpack(np.zeros((3, 4), np.float32))[:1]  # an axis of one element may have any step
    assert Twice(row, state, out=one).out is one


def test_only_an_output_that_may_be_an_operand_may_share_its_memory(dev, x, state):
    assert Twice(x, state, out=x).out is x
    for fields in ({"weight": x, "out": x}, {"out": x[::-1]}, {"out": x, "index": None, "weight": x[:1]}):
        with pytest.raises(BadRequest, match="memory"):
            Twice(x, state, **fields)
    ints = dev.zeros((3, 4), "i32")
    with pytest.raises(BadRequest, match="overlaps"):
        Twice(x, state, indices=True, out=_as_floats(ints), index=ints)


def test_the_hint_names_what_an_output_may_be(x, state):
    with pytest.raises(BadRequest, match="x may be out itself"):
        Twice(x, state, out=x, weight=x)
    with pytest.raises(BadRequest, match="memory of its own"):
        Twice(x, x[0, :1])


def _as_floats(ints):
    """The memory of an i32 tensor as f32."""
    return dispatch.from_dlpack(np.asarray(ints).view(np.float32))


@pytest.mark.parametrize("name", ["shape", "dtype"])
def test_an_operand_that_must_be_like_another_differs_in_nothing(dev, x, name):
    same_as("y", dev.zeros((3, 4)), "x", x)
    other = dev.zeros((4, 3)) if name == "shape" else dev.zeros((3, 4), "i32")
    with pytest.raises(BadRequest, match="as x is"):
        same_as("y", other, "x", x)
