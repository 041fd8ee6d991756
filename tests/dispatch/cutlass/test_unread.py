"""What a CUTLASS kernel adds and scales: all of c, z, alpha and beta that a request has is read, or refused."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import F16, Arch
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import Config
from dispatch.ops.conv import channels_last, conv_bwd_data, conv_bwd_filter, conv_fwd
from dispatch.ops.matmul import MatmulRequest, cutlass, matmul

ACC = evt.accumulator()
LINEAR = evt.linear_combination(with_source=True)


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def product(dev, rng):
    """A and B of small whole numbers, their product, and a function that makes an `out` of a hundred."""
    a, b = rng.integers(-2, 3, (8, 8)), rng.integers(-2, 3, (8, 8))
    return dev.array(a, "f16"), dev.array(b, "f16"), a @ b, lambda: dev.array(np.full((8, 8), 100.0), "f16")


@pytest.fixture
def images(dev, rng):
    """x, w and dy of a convolution with channels last."""
    shapes = (2, 8, 6, 6), (8, 8, 3, 3), (2, 8, 4, 4)
    return [channels_last(dev.array(rng.integers(-1, 2, shape), "f16")) for shape in shapes]


# -- what beta scales where there is no c -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "choices",
    [
        {"library": "cutlass"},
        {"config": Config((128, 128), (1, 1), "pingpong")},
        {"epilogue": evt.store(LINEAR, "copy")},
        {"epilogue": "relu", "library": "cutlass"},
        {"epilogue": evt.relu(LINEAR)},
    ],
    ids=str,
)
@pytest.mark.parametrize("beta", [2.0, "tensor"])
def test_without_c_beta_scales_out(choices, beta, product, dev):
    a, b, expected, make_out = product
    out = make_out()
    beta = dev.array([2.0], "f32") if beta == "tensor" else beta
    matmul(a, b, out=out, beta=beta, **choices)
    np.testing.assert_array_equal(out.numpy(), expected + 200)
    matmul(a, b, out=out, beta=beta, **choices)  # again, from what is there now
    np.testing.assert_array_equal(out.numpy(), 3 * expected + 400)


def test_the_kernel_of_a_gpu_reads_out_as_c_and_its_plan_is_not_that_without_beta(product):
    a, b, _, make_out = product
    out = make_out()
    adding, plain, given = (
        MatmulRequest(a, b, out=out, library="cutlass", **more) for more in ({"beta": 2.0}, {}, {"c": out, "beta": 2.0})
    )
    specs = [cutlass.spec_of(request.form, Arch(90), Config((128, 128))) for request in (adding, plain, given)]
    assert [spec.c for spec in specs] == [F16, None, F16]
    assert specs[0] == specs[2]
    assert adding.key() != plain.key()
    assert dict(zip(adding.form.names, adding.arguments({}), strict=True))["c"] == out.ptr
    assert not adding.repeatable
    assert plain.repeatable
    named = adding.named_arguments()
    assert named.order[:4] == ("a", "b", "out", "out")
    assert set(named.numbers) == {"alpha"}  # a beta of 0 has the other plan
    assert [name for name, _, _ in adding.tensors()] == ["a", "b", "out"]


def test_a_prepared_call_adds_to_the_out_that_it_is_given(product):
    a, b, expected, make_out = product
    call = dp.prepare(MatmulRequest(a, b, out=make_out(), beta=2.0, library="cutlass"))
    other = make_out()
    assert call(out=other) is other
    np.testing.assert_array_equal(other.numpy(), expected + 200)


def test_beta_without_anything_to_scale_is_refused(product):
    a, b, _, _ = product
    for beta in (2.0, a[:1, :1]):
        with pytest.raises(BadRequest, match=r"beta: got .*; expected 0, because neither c nor out is passed"):
            matmul(a, b, beta=beta, library="cutlass")


@pytest.mark.parametrize("tree", [None, LINEAR, ACC + evt.source()], ids=str)
def test_without_z_beta_scales_a_gradient(tree, images):
    x, w, dy = images
    beta = 2.0 if tree is None or tree is LINEAR else 1.0
    given = {"library": "cutlass"} if tree is None else {"epilogue": tree}
    for run, wanted in (
        (lambda **more: conv_bwd_data(dy, w, **more), x),
        (lambda **more: conv_bwd_filter(dy, x, **more), w),
    ):
        out = channels_last(wanted)
        run(out=out, beta=beta, **given)
        plain = run(**({"w_extents": (3, 3)} if wanted is w else {})).numpy().astype(float)
        np.testing.assert_array_equal(out.numpy(), plain + beta * wanted.numpy().astype(float))


# -- what a tree does not read ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tree", "given", "message"),
    [
        (ACC, {"alpha": 2.0}, r"alpha: got 2\.0; expected 1, because the epilogue does not read alpha"),
        (ACC, {"alpha": "tensor"}, r"alpha: got f32\[1\]; expected 1, because"),
        (ACC, {"c": "matrix"}, r"c: got f16\[8, 8\]; expected None, because the epilogue does not read the source"),
        (ACC, {"out": "matrix", "beta": 2.0}, r"beta: got 2\.0; expected 0, because the epilogue does not read beta"),
        (ACC, {"out": "matrix", "beta": 1.0}, r"beta: got 1\.0; expected 0, because"),
        (ACC, {"beta": "tensor"}, r"beta: got f32\[1\]; expected 0, because"),
        (ACC + evt.source(), {"c": "matrix", "beta": 5.0}, r"beta: got 5\.0; expected 1, because"),
        (ACC + evt.source(), {"c": "matrix", "beta": 0.0}, r"beta: got 0\.0; expected 1, because"),
        (ACC + evt.source(), {"out": "matrix", "beta": 2.0}, r"beta: got 2\.0; expected 1, because"),
        (ACC + evt.source(), {}, r"^c: got nothing; expected a tensor, because the epilogue reads evt\.source\(\)"),
        (ACC + evt.source(), {"out": "matrix"}, "c: got nothing"),
        (evt.scalar("alpha") * ACC, {"operands": {"alpha": 2.0}}, r"operands\['alpha'\]: .* alpha=…, a field"),
    ],
)
def test_what_a_tree_of_a_product_does_not_read_is_refused(tree, given, message, product, dev):
    a, b, _, make_out = product
    made = {"tensor": dev.array([2.0], "f32"), "matrix": make_out()}
    given = {name: made[value] if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(BadRequest, match=message):
        matmul(a, b, epilogue=evt.silu(tree), **given)


def test_a_tree_that_an_epilogue_equals_does_not_drop_beta(product):
    """relu(A · B) is the epilogue RELU, but with a beta RELU adds `out`, which the tree does not."""
    a, b, expected, make_out = product
    for tree in (evt.relu(ACC), evt.relu(evt.linear_combination(with_source=False))):
        with pytest.raises(BadRequest, match="beta: got"):
            matmul(a, b, out=make_out(), beta=2.0, epilogue=tree)
        np.testing.assert_array_equal(matmul(a, b, epilogue=tree).numpy(), np.maximum(expected, 0))


def test_a_tree_may_use_the_factors_in_another_way(product):
    a, b, expected, make_out = product
    got = matmul(a, b, beta=3.0, epilogue=evt.store(ACC * evt.scalar("beta"), "copy"))
    np.testing.assert_array_equal(got[1].numpy(), 3 * expected)
    got = matmul(a, b, c=make_out(), epilogue=evt.store(ACC + evt.source(), "copy"))
    np.testing.assert_array_equal(got[1].numpy(), expected + 100)


@pytest.mark.parametrize(
    ("tree", "given", "message"),
    [
        (ACC, {"alpha": 2.0}, r"alpha: got 2\.0; expected 1, because the epilogue does not read alpha"),
        (ACC, {"z": "image"}, "z: got .*; expected None, because the epilogue does not read the source"),
        (ACC + evt.source(), {"z": "image", "beta": 2.0}, r"beta: got 2\.0; expected 1, because the epilogue"),
        (ACC + evt.source(), {}, r"z: got nothing; expected a tensor, because the epilogue reads evt\.source\(\)"),
    ],
)
def test_what_a_tree_of_a_convolution_does_not_read_is_refused(tree, given, message, images):
    x, w, dy = images
    with pytest.raises(BadRequest, match=message):
        conv_fwd(x, w, epilogue=evt.silu(tree), **{name: dy if y == "image" else y for name, y in given.items()})
    with pytest.raises(BadRequest, match=message):
        conv_bwd_data(dy, w, epilogue=evt.silu(tree), **{name: x if y == "image" else y for name, y in given.items()})


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_a_tree_of_a_gradient_that_does_not_read_out_refuses_beta(beta, images):
    x, w, dy = images
    with pytest.raises(BadRequest, match=r"beta: got .*; expected 0, because the epilogue does not read beta"):
        conv_bwd_data(dy, w, out=channels_last(x), beta=beta, epilogue=evt.silu(ACC))


def test_groups_have_no_source_and_refuse_an_alpha_that_is_not_read(dev):
    a, b = dev.zeros((16, 16), "bf16"), dev.zeros((1, 16, 16), "bf16")
    with pytest.raises(BadRequest, match=r"alpha: got 2\.0; expected 1, because the epilogue does not read alpha"):
        dp.grouped_matmul(a, b, [16], epilogue=evt.silu(ACC), alpha=2.0)
    with pytest.raises(BadRequest, match=r"epilogue: got evt\.source\(\); expected a tree that reads only"):
        dp.grouped_matmul(a, b, [16], epilogue=ACC + evt.source())
