"""Modes that an op has not: the error names what does the work, and what it names runs."""

import numpy as np
import pytest

import dispatch as dp
from dispatch import cudnn
from dispatch.errors import BadRequest


@pytest.fixture
def x():
    return dp.device("host").array(np.linspace(-3, 3, 32, dtype=np.float32).reshape(1, 4, 8))


def drawn(x, mode, **attributes):
    graph = cudnn.Graph()
    graph.output("y", graph.pointwise(mode, graph.tensor("x", x.shape, x.dtype), **attributes), x.dtype)
    return graph(x=x).numpy()


@pytest.mark.parametrize("name", ["gelu", "GELU", "ActivationMode.GELU", "gelu_tanh"])
def test_gelu_is_behind_a_product_or_in_a_graph(x, name):
    for call in (lambda: dp.activation(x, mode=name), lambda: dp.ActivationBwdRequest(x, x, x, mode=name)):
        with pytest.raises(
            BadRequest, match=r"dispatch\.matmul\(a, b, epilogue='gelu'\).*dispatch\.cudnn\.Graph has"
        ) as e:
            call()
        assert "ELU?" not in str(e.value)


def test_what_the_hints_name_runs(x):
    there = x.numpy()
    inner = np.sqrt(2 / np.pi) * (there + 0.044715 * there**3)
    np.testing.assert_allclose(drawn(x, "GELU_APPROX_TANH_FWD"), there / 2 * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(drawn(x, "GELU_FWD"), there / 2 * (1 + np.tanh(inner)), atol=1e-3)
    np.testing.assert_allclose(drawn(x, "SOFTPLUS_FWD"), np.log1p(np.exp(there)), rtol=1e-5)
    leaky = drawn(x, "RELU_FWD", RELU_LOWER_CLIP_SLOPE=0.01)
    np.testing.assert_allclose(leaky, np.where(there > 0, there, 0.01 * there), rtol=1e-6)
    np.testing.assert_array_equal(dp.activation(x, mode="clipped_relu", coef=6.0).numpy(), np.clip(there, 0, 6))
    product = dp.matmul(x[0], dp.device("host").array(np.eye(8, dtype=np.float32)), epilogue="gelu")
    np.testing.assert_allclose(product.numpy(), drawn(x, "GELU_APPROX_TANH_FWD")[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("softplus", "SOFTPLUS_FWD"),
        ("leaky_relu", "RELU_LOWER_CLIP_SLOPE"),
        ("relu6", "mode='clipped_relu' with coef=6"),
        ("softmax", r"dispatch\.softmax"),
        ("identity", r"x\.copy\(\)"),
        ("relux", "Did you mean ActivationMode.RELU"),
    ],
)
def test_other_names(x, name, way):
    with pytest.raises(BadRequest, match=way):
        dp.activation(x, mode=name)
    with pytest.raises(ValueError, match=way):
        dp.ActivationMode(name)


def test_silu_is_swish(x):
    assert dp.ActivationMode("silu") is dp.ActivationMode.SWISH
    np.testing.assert_array_equal(dp.activation(x, mode="SiLU").numpy(), dp.activation(x, mode="swish").numpy())
