"""The reference of epilogue trees against NumPy written out by hand, node by node and for random trees."""

import math

import numpy as np
import pytest
from scipy import special

from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.arithmetic import evaluate

M, N = 7, 5


@pytest.fixture
def operands(rng):
    shapes = {"row": (N,), "col": (M,), "load": (M, N), "scalar": (1,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


# fmt: off
ONE_NODE = {
    "relu":      (evt.relu,      lambda x: np.where(x > 0, x, 0)),
    "gelu":      (evt.gelu,      lambda x: x * special.ndtr(x)),
    "gelu_tanh": (evt.gelu_tanh, lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "silu":      (evt.silu,      lambda x: x * special.expit(x)),
    "sigmoid":   (evt.sigmoid,   special.expit),
    "tanh":      (evt.tanh,      lambda x: (np.exp(x) - np.exp(-x)) / (np.exp(x) + np.exp(-x))),
    "clamp":     (lambda x: evt.clamp(x, -0.5, 0.25), lambda x: np.minimum(np.maximum(x, -0.5), 0.25)),
    "row":       (lambda x: x + evt.row("row"),       lambda x, o: x + o["row"][None, :]),
    "col":       (lambda x: x + evt.col("col"),       lambda x, o: x + o["col"][:, None]),
    "load":      (lambda x: x * evt.load("load"),     lambda x, o: x * o["load"]),
    "scalar":    (lambda x: evt.scalar("scalar") - x, lambda x, o: o["scalar"][0] - x),
    "maximum":   (lambda x: evt.maximum(x, 0.5),      lambda x: np.where(x > 0.5, x, 0.5)),
    "minimum":   (lambda x: evt.minimum(x, 0.5),      lambda x: np.where(x < 0.5, x, 0.5)),
    "fma":       (lambda x: evt.fma(x, 2.0, evt.row("row")), lambda x, o: 2 * x + o["row"]),
}
# fmt: on
OF_OPERANDS = ("row", "col", "load", "scalar", "fma")


@pytest.mark.parametrize("name", ONE_NODE)
def test_a_node_is_what_its_formula_says(name, rng, operands):
    build, formula = ONE_NODE[name]
    x = 2 * rng.standard_normal((M, N))
    expected = formula(x, operands) if name in OF_OPERANDS else formula(x)
    got = evaluate(build(evt.accumulator()), x, operands, None)["out"]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("over", ["m", "n", "mn"])
@pytest.mark.parametrize("function", evt.REDUCTIONS)
def test_a_reduction_passes_its_input_on(function, over, rng):
    x = rng.standard_normal((3, M, N))
    got = evaluate(evt.reduce(evt.accumulator(), "r", function, over=over), x, {}, None)
    np.testing.assert_array_equal(got["out"], x)
    loops = {"sum": sum, "max": max, "min": min, "mean": lambda v: sum(v) / len(v), "amax": lambda v: max(map(abs, v))}
    lines = {"m": np.moveaxis(x, 1, -1), "n": x, "mn": x.reshape(3, -1)}[over]
    flat = lines.reshape(-1, lines.shape[-1])
    expected = np.array([loops[function](line.tolist()) for line in flat]).reshape(lines.shape[:-1])
    np.testing.assert_allclose(got["r"], expected, rtol=1e-9, atol=1e-15)


def test_the_source_and_a_store_in_the_middle(rng):
    x, c = rng.standard_normal((M, N)), rng.standard_normal((M, N))
    tree = evt.relu(evt.store(evt.linear_combination(with_source=True), "before"))
    got = evaluate(tree, x, {"alpha": np.array(0.5), "beta": np.array(-2.0)}, c)
    np.testing.assert_allclose(got["before"], 0.5 * x - 2 * c)
    np.testing.assert_allclose(got["out"], np.where(0.5 * x - 2 * c > 0, 0.5 * x - 2 * c, 0))


def grow(rng, x, value, operands, left):
    """A random tree, and its value computed beside it with NumPy alone."""
    if left == 0:
        return x, value
    choice = rng.integers(6)
    if choice == 0:
        x, value = evt.silu(x), value / (1 + np.exp(-value))
    elif choice == 1:
        x, value = x + evt.row("row"), value + operands["row"]
    elif choice == 2:
        x, value = evt.col("col") * x, operands["col"][:, None] * value
    elif choice == 3:
        x, value = evt.fma(x, x, evt.load("load")), value**2 + operands["load"]
    elif choice == 4:
        x, value = evt.minimum(3.0, x), np.minimum(3.0, value)
    else:
        x, value = evt.tanh(x) - evt.scalar("scalar"), np.tanh(value) - operands["scalar"]
    return grow(rng, x, value, operands, left - 1)


@pytest.mark.parametrize("number", range(20))
def test_a_random_tree_is_what_numpy_makes_of_it(number, rng, operands):
    x = rng.standard_normal((M, N))
    tree, expected = grow(rng, evt.accumulator(), x, operands, 1 + number % 7)
    np.testing.assert_allclose(evaluate(tree, x, operands, None)["out"], expected, rtol=1e-9, atol=1e-12)
