"""Axes that lie in memory as one are merged; a merged description reaches the very same elements."""

import itertools

import pytest

import dispatch
from dispatch.core.axes import LIMIT, alike, describable, merge
from dispatch.keys import F32, Arch
from dispatch.libraries.cudnn.prefill import zero_fills
from dispatch.table.select import select


@pytest.fixture
def dev():
    return dispatch.device("host")


def layout(dev, shape, strides):
    return dev.layout(F32, shape, strides, 256)


def places(extents, strides):
    """The offset of every element, in the order of the axes."""
    return [
        sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*(range(n) for n in extents))
    ]


# fmt: off
SHAPES = [  # shape, strides, the extents that are left
    ((2, 3, 4),    (12, 4, 1),     [24]),
    ((2, 3, 4),    (1, 2, 6),      [24]),          # reversed in memory
    ((2, 3, 4, 5), (60, 1, 15, 3), [120]),         # channels last
    ((2, 3, 4),    (15, 5, 1),     [6, 4]),        # a gap behind the rows
    ((2, 3, 4),    (24, 8, 2),     [24]),          # every other element
    ((1, 5, 1),    (99, 1, 7),     [5]),
    ((1, 1),       (3, 3),         []),
    ((),           (),             []),
    ((3, 2),       (7, 5),         [3, 2]),
]
# fmt: on


@pytest.mark.parametrize(("shape", "strides", "left"), SHAPES)
def test_neighbours_are_merged_and_every_element_is_still_reached(shape, strides, left, dev):
    axes = merge([layout(dev, shape, strides)], [0] * len(shape))
    assert [axis.extent for axis in axes] == left
    reached = places([axis.extent for axis in axes], [axis.strides[0] for axis in axes])
    assert sorted(reached) == sorted(places(shape, strides))


def test_two_tensors_merge_only_where_both_step_evenly_and_stay_paired(dev):
    one, other = layout(dev, (2, 3, 4), (12, 4, 1)), layout(dev, (2, 3, 4), (24, 4, 1))
    axes = merge([one, other], [0, 0, 0])
    assert [(axis.extent, axis.strides) for axis in axes] == [(2, (12, 24)), (12, (1, 1))]
    pairs = [
        list(zip(*(places([a.extent for a in axes], [a.strides[i] for a in axes]) for i in range(2)), strict=True)),
        list(zip(places(one.shape, one.strides), places(other.shape, other.strides), strict=True)),
    ]
    assert sorted(pairs[0]) == sorted(pairs[1])


def test_groups_are_kept_apart(dev):
    axes = merge([layout(dev, (2, 3, 4, 5), (60, 20, 5, 1))], [0, 1, 1, 0])
    assert [(axis.extent, axis.group) for axis in axes] == [(2, 0), (12, 1), (5, 0)]


def test_in_order_keeps_the_order_of_the_shape(dev):
    reversed_in_memory = layout(dev, (2, 3), (1, 2))
    assert len(merge([reversed_in_memory], [0, 0])) == 1
    assert [axis.extent for axis in merge([reversed_in_memory], [0, 0], in_order=True)] == [2, 3]


def test_an_axis_of_one_element_in_another_tensor_has_no_step(dev):
    axes = merge([layout(dev, (2, 3), (3, 1)), layout(dev, (2, 1), (1, 1))], [0, 1])
    assert [axis.strides for axis in axes] == [(3, 1), (1, 0)]


def test_what_no_descriptor_can_say(dev):
    assert describable(dev.zeros((3, 4)).layout, layout(dev, (1, 4), (-7, 1))) == ""
    assert "positive strides" in describable(layout(dev, (3,), (-1,)))
    assert "positive strides" in describable(layout(dev, (3,), (0,)))
    assert f"up to {LIMIT}" in describable(layout(dev, (2, 2), (2**31, 1)))
    assert "needs f32 at multiples of 4 bytes, has 2" in describable(dev.layout(F32, (3,), (1,), 2))


def test_strides_of_a_tensor_without_elements_do_not_matter(dev):
    """Nor do its axes, by whatever it steps: nothing is launched."""
    empty, dense = layout(dev, (2, 0, 3), (2**31, -1, 0)), layout(dev, (2, 0, 3), (3, 3, 1))
    assert describable(empty, dense) == ""
    assert alike(empty, dense)
    assert not alike(layout(dev, (2, 3), (1, 2)), layout(dev, (2, 3), (3, 1)))
    assert merge([empty, dense], [0, 1, 0]) == []
    assert zero_fills(0, empty) == ()


# fmt: off
WITHOUT_ELEMENTS = {  # a view without elements, of a dense tensor of ones
    "no channels":        ((17, 5, 3, 3),   lambda x: x[:, :0]),
    "no images":          ((17, 5, 3, 3),   lambda x: x[:0]),
    "channels last":      ((4, 3, 3, 5),    lambda x: x.transpose(0, 3, 1, 2)[:0]),
    "no channels, last":  ((4, 3, 3, 5),    lambda x: x[..., :0].transpose(0, 3, 1, 2)),
    "axes in disorder":   ((4, 5, 3, 6),    lambda x: x.transpose(3, 2, 0, 1)[:, :, :0]),
    "steps backwards":    ((4, 5, 3, 3),    lambda x: x[:0, ::-1]),
    "axes that do not merge": ((3,) * 10,   lambda x: x[(slice(0, 0), *[slice(1, None)] * 9)]),
}
OF_ONE_SHAPE = {  # a request of an operand x, and of a dense tensor of its shape, z
    "softmax":            lambda x, z: dispatch.SoftmaxRequest(x, axis=0, out=z),
    "softmax_bwd":        dispatch.SoftmaxBwdRequest,
    "activation":         lambda x, z: dispatch.ActivationRequest(x, out=z),
    "activation_bwd":     lambda x, z: dispatch.ActivationBwdRequest(x, z, x),
    "lrn":                lambda x, z: dispatch.LrnRequest(x, out=z),
    "lrn_bwd":            lambda x, z: dispatch.LrnBwdRequest(x, z, x),
    "divisive_norm":      dispatch.DivisiveNormRequest,
    "gated_activation":   dispatch.GatedActivationRequest,
}
# fmt: on


@pytest.mark.parametrize("view", WITHOUT_ELEMENTS)
@pytest.mark.parametrize("op", OF_ONE_SHAPE)
def test_an_operand_without_elements_gives_a_result_without_elements(op, view, dev):
    shape, cut = WITHOUT_ELEMENTS[view]
    x = cut(dev.zeros(shape))
    if "norm" in op or "lrn" in op:
        x = x if x.ndim == 4 else x.reshape(0, 2, 8, 32)
    request = OF_ONE_SHAPE[op](x, dev.zeros(x.shape))
    select(request, Arch(90))
    assert dispatch.run(request).shape == x.shape


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_reduction_without_elements_gives_a_result_without_elements(dtype, dev):
    x = dev.zeros((4, 5, 3), dtype)[:, :0]
    request = dispatch.ReduceRequest(x, 0, out_dtype="f32")
    select(request, Arch(90))
    assert dispatch.run(request).shape == (0, 3)
