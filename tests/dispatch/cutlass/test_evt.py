"""Epilogue trees as values: what can be built, what is refused, and what two equal trees are."""

import pickle

import numpy as np
import pytest

from dispatch.errors import BadRequest
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.visitors import operands_of


def test_equal_trees_are_equal_and_hash_alike():
    def tree():
        return evt.silu(evt.accumulator() + evt.row("bias")) * evt.load("gate")

    assert tree() == tree()
    assert len({tree(), tree()}) == 1
    assert tree() != evt.silu(evt.accumulator() + evt.col("bias")) * evt.load("gate")


def test_a_tree_survives_pickling():
    tree = evt.reduce(evt.clamp(evt.accumulator(), -1, 1), "largest", "max", over="mn")
    assert pickle.loads(pickle.dumps(tree)) == tree


def test_numbers_stand_for_constants_on_either_side():
    x = evt.accumulator()
    assert x + 1 == evt.Binary("add", x, evt.constant(1.0))
    assert 1 - x == evt.Binary("sub", evt.constant(1.0), x)
    assert 2 * x == evt.Binary("mul", evt.constant(2.0), x)


def test_a_node_says_what_it_is():
    tree = evt.reduce(evt.gelu(evt.scalar("alpha") * evt.accumulator()), "largest", "amax", over="n")
    assert str(tree) == "amax[n](gelu(mul(scalar(alpha), acc)), largest)"


def test_walk_gives_inputs_first_and_a_shared_node_once():
    x = evt.accumulator() + evt.row("bias")
    nodes = list(evt.walk(evt.sigmoid(x) * x))
    assert nodes.count(x) == 1
    for place, node in enumerate(nodes):
        assert all(child in nodes[:place] for child in node.inputs)


def test_quantize_takes_the_magnitude_before_the_scale():
    tree = evt.quantize(evt.accumulator(), evt.scalar("scale"), "amax")
    assert tree == evt.Binary("mul", evt.Reduce(evt.accumulator(), "amax", "amax", "mn"), evt.scalar("scale"))


def test_quantize_by_channels_takes_a_magnitude_of_each():
    columns = evt.quantize(evt.accumulator(), evt.row("scale"), "top")
    rows = evt.quantize(evt.accumulator(), evt.col("scale"), "top")
    assert [tree.x for tree in (columns, rows)] == [
        evt.reduce(evt.accumulator(), "top", "amax", over=over) for over in ("m", "n")
    ]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: evt.accumulator() + "x", "a node"),
        (lambda: evt.relu(True), "a node"),
        (lambda: evt.constant(float("nan")), "a finite number"),
        (lambda: evt.constant("x"), r"got 'x'; expected a number"),
        (lambda: evt.constant(None), r"got None; expected a number"),
        (lambda: evt.clamp(evt.accumulator(), "a", 1), r"low: got 'a'; expected a number"),
        (lambda: evt.clamp(evt.accumulator(), 0, "b"), r"high: got 'b'; expected a number"),
        (lambda: evt.store(evt.accumulator(), "x", "nope"), r"dtype: got 'nope'; expected a dtype"),
        (lambda: evt.reduce(evt.accumulator(), "x", ["sum"], over="m"), "one of sum"),
        (lambda: evt.relu(np.full((2, 3), 0.123)), r"a numpy ndarray of float64\[2, 3\]; expected a node"),
        (lambda: evt.row("not a name"), "an identifier"),
        (lambda: evt.row(3), "an identifier"),
        (lambda: evt.row("out"), "a name other than a, b"),
        (lambda: evt.load("x_pitch"), "a name other than a, b"),
        (lambda: evt.clamp(evt.accumulator(), 1, -1), "low <= high"),
        (lambda: evt.reduce(evt.accumulator(), "x", "median", over="m"), "one of sum"),
        (lambda: evt.reduce(evt.accumulator(), "x", "sum", over="k"), "one of sum"),
    ],
)
def test_what_is_no_tree_is_refused_where_it_is_built(build, expected):
    with pytest.raises(BadRequest, match=expected):
        build()


def test_operands_are_told_by_name_and_kind():
    tree = evt.store(evt.fma(evt.scalar("alpha"), evt.accumulator(), evt.col("bias")), "before")
    tree = evt.reduce(evt.relu(tree), "total", over="m")
    assert operands_of(tree) == {"alpha": "scalar", "bias": "col", "before": "store", "total": "reduce"}


@pytest.mark.parametrize(
    "tree",
    [
        evt.accumulator() + evt.row("x") + evt.col("x"),
        evt.store(evt.accumulator() + evt.load("x"), "x"),
        evt.store(evt.store(evt.accumulator(), "x") * 2, "x"),
    ],
)
def test_one_name_for_two_operands_is_refused(tree):
    with pytest.raises(BadRequest, match=r"epilogue: got the name 'x' for two operands; expected a different name"):
        operands_of(tree)
