"""Graphs as plain data: what the builder makes and refuses, and the reference against NumPy, SciPy and slopes."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import special

import dispatch as dp
from cudabind.sys.cudnn import cudnnPointwiseMode_t, cudnnReduceTensorOp_t
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BOOL, F16, F32, I32
from dispatch.libraries.cudnn.graph import Builder
from dispatch.libraries.cudnn.modes import ARITY, BACKWARD, REDUCTIONS, pointwise
from dispatch.libraries.cudnn.prefill import Fill, reduction_fills
from dispatch.ops import graph as cudnn

SCIPY = {
    "ERF": special.erf,
    "GELU_FWD": lambda x: x * special.ndtr(x),
    "SIGMOID_FWD": special.expit,
    "SOFTPLUS_FWD": lambda x: np.log1p(np.exp(x)),
    "SWISH_FWD": lambda x: x * special.expit(x),
    "ELU_FWD": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "RELU_FWD": lambda x: np.maximum(x, 0),
    "TANH_FWD": np.tanh,
    "RSQRT": lambda x: np.abs(x) ** -0.5,
}


@pytest.fixture
def host():
    return dp.device("host")


@pytest.mark.parametrize("mode", ARITY)
def test_every_mode_is_nvidia_s(mode):
    assert f"CUDNN_POINTWISE_{mode}" in cudnnPointwiseMode_t.__members__


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_every_reduction_is_nvidia_s(mode):
    assert f"CUDNN_REDUCE_TENSOR_{mode}" in cudnnReduceTensorOp_t.__members__


@pytest.mark.parametrize("mode", SCIPY)
def test_activations_are_scipy_s(mode, rng):
    x = rng.standard_normal((5, 7)) * 2
    if mode == "RSQRT":
        x = np.abs(x)
    assert np.allclose(pointwise(mode, [x], {}), SCIPY[mode](x))


@pytest.mark.parametrize("mode", sorted(BACKWARD))
@pytest.mark.parametrize("numbers", [{}, {"ELU_ALPHA": 0.3, "SWISH_BETA": 1.7, "SOFTPLUS_BETA": 2.0}], ids=str)
def test_a_backward_mode_is_the_slope_of_its_forward(mode, numbers, rng):
    x = rng.standard_normal(50) * 2
    x = x[np.abs(x) > 1e-3]  # ReLU and ELU have a corner at 0
    dy = rng.standard_normal(x.shape)
    up, down = (pointwise(mode.replace("_BWD", "_FWD"), [x + step], numbers) for step in (1e-6, -1e-6))
    assert np.allclose(pointwise(mode, [dy, x], numbers), dy * (up - down) / 2e-6, atol=1e-6)


def test_a_clipped_relu_has_its_slope_below_and_its_limit_above():
    numbers = {"RELU_LOWER_CLIP": 1.0, "RELU_UPPER_CLIP": 3.0, "RELU_LOWER_CLIP_SLOPE": 0.5}
    x = np.array([-1.0, 0.5, 2.0, 5.0])
    assert np.array_equal(pointwise("RELU_FWD", [x], numbers), [0.0, 0.75, 2.0, 3.0])
    assert np.array_equal(pointwise("RELU_BWD", [np.ones(4), x], numbers), [0.5, 0.5, 1.0, 0.0])


def test_an_index_and_a_choice_by_it():
    row = pointwise("GEN_INDEX", [np.zeros((3, 4))], {"AXIS": 0.0})
    assert np.array_equal(row[:, 0], [0, 1, 2])
    lower = pointwise("CMP_GE", [row, pointwise("GEN_INDEX", [np.zeros((3, 4))], {"AXIS": 1.0})], {})
    picked = pointwise("BINARY_SELECT", [np.ones((3, 4)), np.zeros((3, 4)), lower], {})
    assert np.array_equal(picked, np.tri(3, 4))


def test_what_passes_between_nodes_keeps_the_order_and_gets_the_dtype():
    builder = Builder()
    x = builder.tensor((2, 8, 3, 3), (72, 1, 24, 8), F16)
    y = builder.pointwise("RELU_FWD", x)
    assert (y.virtual, y.dtype, y.strides) == (True, F32, (72, 1, 24, 8))
    assert builder.pointwise("GEN_INDEX", y, AXIS=1).dtype is I32
    assert builder.pointwise("CMP_LT", y, builder.scalar(0.5, 4)).dtype is BOOL


def test_a_graph_is_had_with_no_other_import():
    words = "import dispatch as dp; dp.cudnn.Graph(); assert 'cudnn' in dp.__all__"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=120)


def test_equal_graphs_are_equal_and_others_are_not():
    def drawn(extent):
        builder = Builder()
        builder.as_output(builder.pointwise("EXP", builder.tensor((extent, 4), None, F32)), F32)
        return builder.build()

    assert drawn(3) == drawn(3)
    assert hash(drawn(3)) == hash(drawn(3))
    assert drawn(3) != drawn(4)
    assert drawn(3).text() == drawn(3).text() != drawn(4).text()


@pytest.mark.parametrize(
    ("draw", "operand"),
    [
        (lambda g, x: g.pointwise("NOTHING", x), "mode"),
        (lambda g, x: g.pointwise("ADD", x), "operands"),
        (lambda g, x: x + g.tensor("z", (2, 5, 4), "f32"), "operands"),
        (lambda g, x: g.matmul(x, x), "b"),
        (lambda g, _: g.tensor("x", (1,), "f32"), "name"),
        (lambda g, x: g.output("1y", x + 1, "f32"), "name"),
        (lambda _, x: cudnn.Graph().output("y", x, "f32"), "node"),
        (lambda g, _: g.request(), "graph"),
        (lambda g, x: g.request(w=x), "w"),
        (lambda g, x: g.pointwise("ELU_FWD", x, ELU_APLHA=0.5), "ELU_APLHA"),
        (lambda g, x: g.pointwise("RELU_FWD", x, ELU_ALPHA=0.5), "ELU_ALPHA"),
        (lambda g, x: g.pointwise("GEN_INDEX", x), "AXIS"),
        (lambda g, x: g.pointwise("GEN_INDEX", x, AXIS=3), "AXIS"),
        (lambda g, x: g.reduction("SUM", x, 0), "mode"),
        (lambda g, x: g.reduction("ADD", x, 3), "axes"),
        (lambda g, x: g.matmul(x, g.tensor("z", (3, 4, 5), "f32")), "b"),
        (lambda g, x: g.matmul(x, g.tensor("z", (4, 4, 5), "f32")), "b"),
        (lambda g, x: g.convolution(x, g.tensor("z", (2, 3, 2, 1), "f32"), pad=(0,), stride=(1,)), "w"),
        (lambda g, x: g.convolution(x, g.tensor("z", (2, 2, 1), "f32"), pad=(0,), stride=(1,)), "w"),
        (lambda g, x: g.convolution(x, g.tensor("z", (4, 1, 1), "f32"), pad=(0,), stride=(1,)), "w"),
        (lambda g, x: g.convolution(x, g.tensor("z", (2, 3, 1), "f32"), pad=(0, 0), stride=(1,)), "pad"),
        (lambda g, x: g.convolution(x, g.tensor("z", (2, 3, 1), "f32"), pad=(0,), stride=(0,)), "stride"),
        (lambda g, _: g.tensor("z", (2, 3), "f32", (3,)), "strides"),
        (lambda g, x: g.output("y", x * 2, "f32", (1,)), "strides"),
        (lambda g, x: g.output("y", x, "f32"), "node"),
    ],
)
def test_a_drawing_says_what_is_wrong_with_it(draw, operand):
    graph = cudnn.Graph()
    x = graph.tensor("x", (2, 3, 4), "f32")
    with pytest.raises(BadRequest) as caught:
        draw(graph, x)
    assert caught.value.operand == operand


def test_a_node_is_written_once_and_a_copy_of_it_in_another_dtype(host):
    """Its second name would have been the same memory, and the first output never written."""
    graph = cudnn.Graph()
    node = graph.tensor("x", (2, 3), "f32") * 2
    graph.output("y", node, "f32")
    with pytest.raises(BadRequest, match="the node that is already named y"):
        graph.output("z", node, "f16")
    graph.output("z", graph.pointwise("IDENTITY", node), "f16")
    y, z = graph(x=host.array(np.ones((2, 3), np.float32)))
    assert (y.dtype, z.dtype) == (F32, F16)
    assert (y.numpy() == 2).all()
    assert (z.numpy() == 2).all()


def test_heads_of_a_product_are_shared_by_groups_and_other_batch_axes_broadcast(host):
    for a, b, y in (((4, 2, 3), (2, 3, 5), (4, 2, 5)), ((2, 1, 2, 3), (1, 4, 3, 5), (2, 4, 2, 5))):
        graph = cudnn.Graph()
        graph.output("y", graph.matmul(graph.tensor("a", a, "f32"), graph.tensor("b", b, "f32")), "f32")
        assert graph(a=host.zeros(a), b=host.zeros(b)).shape == y


def test_a_run_says_what_does_not_fit_the_drawing(host):
    graph = cudnn.Graph()
    graph.output("y", graph.tensor("x", (2, 3), "f32") * 2, "f32")
    for given in (host.zeros((3, 2)), host.zeros((2, 3), "f16"), host.zeros((3, 2)).T, np.zeros((2, 3)), None):
        with pytest.raises(BadRequest) as caught:
            graph.request(x=given)
        assert caught.value.operand == "x"


def test_a_drawing_runs_on_the_host_as_its_reference_says(host, rng):
    graph = cudnn.Graph()
    x, w, b = (graph.tensor(n, s, "f32") for n, s in (("x", (2, 5, 6)), ("w", (1, 6, 7)), ("b", (1, 1, 7))))
    product = graph.matmul(x, w) + b
    graph.output("y", graph.pointwise("GELU_FWD", product), "f32")
    graph.output("most", graph.reduction("MAX", product, -1), "f32")
    arrays = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (2, 5, 6)), ("w", (1, 6, 7)), ("b", (1, 1, 7)))
    }
    exact = arrays["x"].astype(float) @ arrays["w"] + arrays["b"]
    expected = graph.reference(**arrays)
    assert np.allclose(expected["y"], exact * special.ndtr(exact))
    assert np.allclose(expected["most"], exact.max(axis=-1, keepdims=True))
    y, most = graph(**{name: host.array(array) for name, array in arrays.items()})
    assert np.allclose(y.numpy(), expected["y"], atol=1e-5)
    assert np.allclose(most.numpy(), expected["most"], atol=1e-5)
    out = host.empty((2, 5, 7))
    assert graph(y=out, **{name: host.array(array) for name, array in arrays.items()})[0] is out


def test_a_request_of_a_drawing_can_be_given_other_operands(host):
    graph = cudnn.Graph()
    graph.output("y", graph.tensor("x", (2,), "f32") + 1, "f32")
    call = dp.prepare(graph.request(x=host.array(np.zeros(2, np.float32))))
    assert np.array_equal(call().numpy(), [1, 1])
    assert np.array_equal(call(x=host.array(np.ones(2, np.float32))).numpy(), [2, 2])


@pytest.mark.parametrize(("mode", "start"), [("ADD", 0.0), ("AMAX", 0.0), ("MAX", -np.inf), ("MIN", np.inf)])
def test_what_a_reduction_writes_starts_from_what_changes_nothing(mode, start, rng):
    values = rng.standard_normal((2, 3, 4))
    assert REDUCTIONS[mode](np.append(np.abs(values) if mode == "AMAX" else values, start), 0, keepdims=False) == (
        REDUCTIONS[mode](values, None, keepdims=False)
    )
    graph = cudnn.Graph()
    rows = graph.reduction(mode, graph.tensor("x", (2, 3, 4), "f32") * 2, -1)
    graph.output("y", rows, "f32")
    request = graph.request(x=dp.device("host").zeros((2, 3, 4)))
    (fill,) = reduction_fills(request.graph, request.places)
    assert fill == Fill(1, start, 6)
    assert np.array([fill.bits], np.uint32).view(np.float32)[0] == np.float32(start)


def test_a_reduction_s_output_with_gaps_is_refused_and_one_that_passes_on_is_not_set():
    graph = cudnn.Graph()
    x = graph.tensor("x", (2, 3, 4), "f32")
    graph.output("y", graph.reduction("ADD", x, -1), "f32", (6, 2, 1))
    request = graph.request(x=dp.device("host").zeros((2, 3, 4)))
    with pytest.raises(Refused, match="dense"):
        reduction_fills(request.graph, request.places)
    other = cudnn.Graph()
    summed = other.reduction("ADD", other.tensor("x", (2, 3, 4), "f32"), -1)
    other.output("y", summed * 2, "f32")
    request = other.request(x=dp.device("host").zeros((2, 3, 4)))
    assert reduction_fills(request.graph, request.places) == ()
