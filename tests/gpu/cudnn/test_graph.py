"""Graphs that users draw, on the GPU: each chain against its reference in float64, and a refusal in cuDNN's words."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.ops import graph as cudnn


@pytest.fixture
def gpu():
    return dp.device("cuda:0")


def check(graph, gpu, rng, dtype, terms, **shapes):
    """Run a drawing on fresh operands; sums of `terms` products in f32, and rounding on the way out."""
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tensors = {name: gpu.array(array) for name, array in arrays.items()}
    expected = graph.reference(**arrays)
    for _ in range(3):  # plain, recorded, replayed
        found = graph(**tensors)
        for tensor, (name, exact) in zip(
            found if isinstance(found, tuple) else (found,), expected.items(), strict=True
        ):
            got = tensor.numpy().astype(np.float64)
            relative = 2.0**-8 if tensor.dtype.bits == 16 else 2.0**-20 * np.sqrt(terms)
            assert np.abs(got - exact).max() <= relative * np.abs(exact).max(), name


@pytest.mark.parametrize("mode", ["RELU_FWD", "GELU_FWD", "SWISH_FWD", "ELU_FWD", "TANH_FWD", "SOFTPLUS_FWD"])
def test_a_product_with_what_follows_it(mode, gpu, rng):
    graph = cudnn.Graph()
    x, w, b = (graph.tensor(*given, "f16") for given in (("x", (3, 56, 64)), ("w", (3, 64, 40)), ("b", (1, 1, 40))))
    graph.output("y", graph.pointwise(mode, graph.matmul(x, w) * 0.125 + b), "f16")
    check(graph, gpu, rng, np.float16, 64, x=(3, 56, 64), w=(3, 64, 40), b=(1, 1, 40))


def test_a_product_in_f64(gpu, rng):
    graph = cudnn.Graph("f64")
    a, b = graph.tensor("a", (2, 24, 40), "f64"), graph.tensor("b", (2, 40, 16), "f64")
    graph.output("y", graph.matmul(a, b), "f64")
    check_f64(graph, gpu, a=rng.standard_normal((2, 24, 40)), b=rng.standard_normal((2, 40, 16)))


def test_a_convolution_in_f64(gpu, rng):
    graph = cudnn.Graph("f64")
    x, w = graph.tensor("x", (2, 8, 11, 9), "f64"), graph.tensor("w", (4, 8, 3, 3), "f64")
    graph.output("y", graph.convolution(x, w, pad=(1, 1), stride=(1, 2)), "f64")
    check_f64(graph, gpu, x=rng.standard_normal((2, 8, 11, 9)), w=rng.standard_normal((4, 8, 3, 3)))


def check_f64(graph, gpu, **arrays):
    got = graph(**{name: gpu.array(array) for name, array in arrays.items()}).numpy()
    expected = graph.reference(**arrays)["y"]
    assert np.abs(got - expected).max() <= 2.0**-44 * np.abs(expected).max()


def test_a_gated_product(gpu, rng):
    graph = cudnn.Graph()
    x, w, gate = (graph.tensor(n, s, "f16") for n, s in (("x", (1, 64, 64)), ("w", (1, 64, 64)), ("gate", (1, 64, 64))))
    graph.output("y", graph.matmul(x, w) * graph.pointwise("SIGMOID_FWD", gate), "f16")
    check(graph, gpu, rng, np.float16, 64, x=(1, 64, 64), w=(1, 64, 64), gate=(1, 64, 64))


def test_a_pointwise_chain(gpu, rng):
    graph = cudnn.Graph()
    a, b = (graph.tensor(name, (4, 16, 24), "f32") for name in "ab")
    graph.output("y", graph.pointwise("MAX", (a - b) * 0.5, graph.pointwise("EXP", b)), "f32")
    check(graph, gpu, rng, np.float32, 4, a=(4, 16, 24), b=(4, 16, 24))


def test_a_gradient_of_an_activation(gpu, rng):
    graph = cudnn.Graph()
    dy, x = (graph.tensor(name, (4, 16, 24), "f32") for name in ("dy", "x"))
    graph.output("dx", graph.pointwise("GELU_APPROX_TANH_BWD", dy, x), "f32")
    arrays = {name: rng.standard_normal((4, 16, 24)).astype(np.float32) for name in ("dy", "x")}
    got = graph(**{name: gpu.array(array) for name, array in arrays.items()}).numpy()
    expected = graph.reference(**arrays)["dx"]
    assert np.abs(got - expected).max() <= 2.0**-10 * np.abs(expected).max()


def test_a_product_and_a_reduction_of_it(gpu, rng):
    graph = cudnn.Graph()
    x, w = graph.tensor("x", (2, 64, 32), "f16"), graph.tensor("w", (2, 32, 48), "f16")
    graph.output("rows", graph.reduction("ADD", graph.matmul(x, w), -1), "f32")
    check(graph, gpu, rng, np.float16, 32 * 48, x=(2, 64, 32), w=(2, 32, 48))


@pytest.mark.parametrize("mode", ["ADD", "AMAX", "MAX", "MIN"])
@pytest.mark.parametrize("axes", [(1,), (0, 2, 3), (0, 1, 2, 3)], ids=str)
def test_a_reduction_does_not_see_what_was_in_its_output(mode, axes, gpu, rng):
    """Of an image with channels last: each pixel's channels, each channel's pixels, and all."""
    graph = cudnn.Graph()
    strides = (64 * 63, 1, 9 * 64, 64)
    y = graph.reduction(mode, graph.tensor("x", (3, 64, 7, 9), "f16", strides) * 0.5, *axes)
    shape = y.shape
    graph.output("y", y, "f32", (shape[1] * shape[2] * shape[3], 1, shape[1] * shape[3], shape[1]))
    array = rng.standard_normal((3, 64, 7, 9)).astype(np.float16)
    expected = graph.reference(x=array)["y"]
    wrong = gpu.array(np.full(expected.size, np.nan, np.float32))
    steps = (shape[1] * shape[2] * shape[3], 1, shape[1] * shape[3], shape[1])
    out = dp.Tensor(wrong.storage, wrong.ptr, gpu.layout(wrong.dtype, shape, steps, wrong.ptr))
    for _ in range(4):
        graph(x=_last(gpu, array), y=out)
        assert np.abs(out.numpy() - expected).max() <= 2.0**-20 * 64 * np.abs(expected).max()


def test_a_convolution_with_what_follows_it(gpu, rng):
    graph = cudnn.Graph()
    strides = {"x": (32 * 81, 1, 9 * 32, 32), "w": (32 * 9, 1, 3 * 32, 32), "z": (48 * 81, 1, 9 * 48, 48)}
    shapes = {"x": (2, 32, 9, 9), "w": (48, 32, 3, 3), "z": (2, 48, 9, 9)}
    x, w, z = (graph.tensor(name, shapes[name], "f16", strides[name]) for name in shapes)
    y = graph.convolution(x, w, pad=(1, 1), stride=(1, 1))
    graph.output("y", graph.pointwise("SWISH_FWD", y * 0.1 + z), "f16", strides["z"])
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    tensors = {name: _last(gpu, array) for name, array in arrays.items()}
    got = graph(**tensors).numpy().astype(np.float64)
    expected = graph.reference(**arrays)["y"]
    assert np.abs(got - expected).max() <= 2.0**-8 * np.abs(expected).max()


def test_what_cudnn_does_not_fuse_is_refused_with_its_words(gpu):
    graph = cudnn.Graph("f64")
    a, b = graph.tensor("a", (1, 8, 8), "f64"), graph.tensor("b", (1, 8, 8), "f64")
    graph.output("y", graph.matmul(graph.pointwise("GELU_FWD", graph.matmul(a, b)), b), "f64")  # no engine has two
    one = gpu.zeros((1, 8, 8), "f64")
    with pytest.raises(NoRow, match=r"cudnnBackendFinalize returns no plan|cuDNN does not support this graph"):
        graph(a=one, b=gpu.zeros((1, 8, 8), "f64"))


def _last(gpu, array):
    """Values on the GPU with their channels last."""
    whole = gpu.array(np.ascontiguousarray(np.moveaxis(array, 1, -1)))
    _, c, h, w = array.shape
    return dp.Tensor(
        whole.storage, whole.ptr, gpu.layout(whole.dtype, array.shape, (h * w * c, 1, w * c, c), whole.ptr)
    )
