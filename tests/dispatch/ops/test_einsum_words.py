"""einsum and its kind as NumPy's and torch's users call them: edges, empty tensors, many modes, words of errors."""

import re

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow

T = dp.tensors


@pytest.mark.parametrize("spec", ["i,i->", "ij,jk->ik", "ij,jk,kl->il", "ij,ij->j", "aij,j->ai"])
def test_gradients_are_torchs_where_operands_repeat_along_modes(spec, rng):
    torch = pytest.importorskip("torch")
    inputs, _ = spec.split("->")
    sizes = dict(zip("aijkl", (2, 3, 4, 5, 2), strict=True))
    for turn in range(12):
        terms = inputs.split(",")
        ones = [{mode for mode in term if rng.random() < 0.3} for term in terms]
        arrays = [
            torch.from_numpy(rng.standard_normal([1 if mode in one else sizes[mode] for mode in term])).requires_grad_()
            for term, one in zip(terms, ones, strict=True)
        ]
        result = torch.einsum(spec, *arrays)
        grad = torch.from_numpy(rng.standard_normal(tuple(result.shape)))
        expected = torch.autograd.grad(result, arrays, grad)
        with torch.no_grad():
            requests = T.einsum_vjp(spec, *arrays, grad=grad)
            for request, right in zip(requests, expected, strict=True):
                found = dp.run(request)
                assert found.shape == right.shape, (spec, turn)
                np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-12)


def test_an_ellipsis_is_no_letter_that_is_there(rng):
    x = rng.standard_normal((2, 2, 2))
    for number in range(990, 1010):
        letter = dp.ops.contraction.modes.mode_letter(number)
        np.testing.assert_allclose(dp.einsum(f"...{letter}->...", x), x.sum(-1))


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_axes_that_are_kept_are_kept_in_out_too(name, rng):
    x = rng.standard_normal((2, 3, 4))
    for axis in (0, (0, 2), None, -1):
        expected = getattr(np, name)(x, axis=axis, keepdims=True)
        out = np.zeros(expected.shape)
        assert getattr(T, name)(x, axis, keepdims=True, out=out) is out
        np.testing.assert_allclose(out, expected)
    with pytest.raises(
        BadRequest, match=r"out: got shape \[3, 4\]; expected \[1, 3, 4\], the shape of the result with keepdims"
    ):
        getattr(T, name)(x, 0, keepdims=True, out=np.zeros((3, 4)))
    with pytest.raises(BadRequest, match="keepdims: got 'a'; expected a bool"):
        getattr(T, name)(x, 0, keepdims="a")


def test_modes_of_one_element_are_as_many_as_one_likes(rng):
    x = rng.standard_normal((2, *(1,) * 57, 3))
    np.testing.assert_allclose(T.sum(x), x.sum())
    np.testing.assert_array_equal(T.transpose(x), x.transpose())
    assert T.outer(np.ones((1,) * 30), np.ones((1,) * 30)).shape == (1, 1)


def test_tensors_without_elements(rng):
    del rng
    np.testing.assert_array_equal(dp.einsum("ik,kj->ij", np.zeros((2, 0)), np.zeros((0, 3))), np.zeros((2, 3)))
    np.testing.assert_array_equal(T.sum(np.zeros((2, 0)), 1), np.zeros(2))
    assert T.transpose(np.zeros((2, 0))).shape == (0, 2)
    empty = [np.ones(shape) for shape in ((2, 3), (0, 3), (2, 1))]
    for optimize in ("auto", "dp", "greedy", "optimal"):
        assert dp.einsum("eg,ac,eb->a", *empty, optimize=optimize).shape == (0,)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_products_over_an_empty_axis_are_ones_as_in_numpy(dtype):
    x = np.zeros((0, 3), dtype)
    for axis in (0, None):
        np.testing.assert_array_equal(T.prod(x, axis), np.prod(x, axis))
    assert T.prod(x, 1).shape == (0,)
    np.testing.assert_array_equal(dp.reduce_modes("ab->b", x, reduce="mul", alpha=2.5), np.full(3, 2.5, dtype))
    with pytest.raises(NoRow, match=r"an empty product must be written to a result .* without an added operand"):
        dp.reduce_modes("ab->b", x, reduce="mul", c=np.ones(3, dtype))
    for largest in (T.max, T.min):  # NumPy raises a ValueError, too
        with pytest.raises(BadRequest, match="empty along a; expected at least one element, for MAX and MIN"):
            largest(x.real, 0)


@pytest.mark.parametrize("shape", [(0, 0), (2, 2), (3, 5), (0, 3)])
def test_traces_beside_the_matrix_are_0(shape, rng):
    x = rng.standard_normal(shape)
    for offset in range(-6, 7):
        np.testing.assert_allclose(T.trace(x, offset), np.trace(x, offset))


def test_one_shape_is_one_operand():
    assert T.contract_expression("ij->ji", (2, 3))(np.ones((2, 3))).shape == (3, 2)
    assert T.contract_expression("->", ())(np.ones(())) == 1
    assert T.contract_expression("ij,jk->ik", [(2, 3), (3, 4)])(np.ones((2, 3)), np.ones((3, 4))).shape == (2, 4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"compute": "bogus"}, BadRequest, "compute: got 'bogus'"),
        ({"autotune": "yes"}, BadRequest, "autotune: got 'yes'; expected a bool"),
        ({"conj": (2,)}, BadRequest, "conj: got 2"),
        ({"order": "Z"}, BadRequest, "order: got 'Z'"),
        (
            {"optimise": "greedy"},
            TypeError,
            r"argument 'optimise'\. Did you mean optimize\? It takes spec, shapes, conj",
        ),
        ({"out": None}, TypeError, "argument 'out': pass it to each call"),
    ],
)
def test_an_expression_checks_its_options_as_it_is_made(options, error, text):
    with pytest.raises(error, match=text):
        T.contract_expression("ij,jk->ik", (2, 3), (3, 4), **options)


def test_an_expression_keeps_its_options():
    x = np.array([[1 + 2j, 3 - 1j]])
    expression = T.contract_expression("ij,kj->ik", (1, 2), (1, 2), conj=(1,), compute="64f", order="F")
    np.testing.assert_allclose(expression(x, x), x @ x.conj().T)


SQUARE = (10, 10)  # of 100 elements


@pytest.mark.parametrize(("dtype", "limit"), [("f2", 200), ("f4", 400), ("f8", 800), ("c16", 1600)])
def test_the_memory_limit_of_an_expression_is_that_of_its_operands_dtype(dtype, limit):
    x = np.ones(SQUARE, dtype)
    for given in (SQUARE, x):
        expression = T.contract_expression("ij,jk,kl->il", *(given,) * 3, memory_limit=limit)
        np.testing.assert_array_equal(expression(x, x, x), np.full(SQUARE, 100, dtype))
    assert "path (0,1)" in T.einsum_path("ij,jk,kl->il", x, x, x, memory_limit=limit)


def test_a_memory_limit_that_is_too_small_is_refused_as_soon_as_the_dtypes_are_known():
    x = np.ones(SQUARE)  # f64
    for make in (T.contract_expression, T.einsum_path):
        with pytest.raises(BadRequest, match="memory_limit"):
            make("ij,jk,kl->il", x, x, x, memory_limit=799)
    with pytest.raises(BadRequest, match="memory_limit"):
        T.contract_expression("ij,jk,kl->il", *(SQUARE,) * 3, memory_limit=199)
    expression = T.contract_expression("ij,jk,kl->il", *(SQUARE,) * 3, memory_limit=799)
    with pytest.raises(BadRequest, match="memory_limit"):
        expression(x, x, x)


def test_an_expression_takes_another_path_for_what_is_larger():
    """The fewest operations have 60 elements on the way; another path has 40."""
    shapes = (2, 10), (10, 30), (30, 4)
    expression = T.contract_expression("ij,jk,kl->il", *shapes, memory_limit=400)
    for dtype in ("f4", "f8"):
        arrays = [np.ones(shape, dtype) for shape in shapes]
        np.testing.assert_array_equal(expression(*arrays), np.full((2, 4), 300, dtype))


def test_the_path_of_tensors_has_the_conversions_between_their_dtypes():
    x = np.ones((3, 3), "f4")
    assert "permute([0])" in T.einsum_path("ij,jk->ik", x, x.astype("f8"))
    T.einsum_path("ij,jk->ik", x.astype("i8"), (3, 3))  # a path of shapes alone: einsum takes no i64


def test_what_is_missing_is_named():
    for call in (lambda: dp.einsum("ij->ji"), dp.einsum, lambda: dp.einsum(operands=np.ones(2))):
        with pytest.raises(TypeError, match=r"einsum\(\) takes a spec and operands"):
            call()
    x = np.ones((3, 4))
    for call in (lambda: dp.einsum(None, x), lambda: dp.einsum(None, [x]), lambda: T.einsum_path(None, (2, 3))):
        with pytest.raises(BadRequest, match="spec: got None; expected a spec such as"):
            call()
    for given, shown in ((None, "None"), (3, "an int"), ("x", "a str")):
        with pytest.raises(
            BadRequest, match=rf"operands\[0\]: got {shown}; expected a dispatch Tensor, or an array of"
        ):
            dp.einsum("ij->ji", given)
    with pytest.raises(BadRequest, match="grad: got None; expected f64"):
        T.einsum_vjp("i->", np.ones(2), grad=None)


@pytest.mark.parametrize(("spec", "sign"), [("i$->i", "$"), ("i1->i", "1"), ("i(->i", "("), ("ij->j_", "_")])
def test_modes_of_a_string_are_letters(spec, sign):
    x = np.ones((2, 3))
    for call in (lambda: dp.einsum(spec, x), lambda: dp.reduce_modes(spec, x), lambda: T.einsum_path(spec, x)):
        with pytest.raises(
            BadRequest, match=rf"spec: got '.*'; expected letters, .* not '{re.escape(sign)}'. Hint: lists"
        ):
            call()


def test_modes_of_lists_have_any_names_and_letters_beyond_ascii_are_letters():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(dp.einsum([["$", 1], [1]], x), x.sum(0))
    np.testing.assert_array_equal(dp.einsum("\u00e9\u0142->\u0142", x), x.sum(0))


def test_an_ellipsis_is_shown_as_dots():
    dev = dp.device("host")
    request = dp.EinsumRequest("...ij,...jk->...ik", [dev.zeros((2, 7, 3, 4)), dev.zeros((7, 4, 6))])
    wrong = dp.EinsumRequest("...ij,jk", [dev.zeros((2, 3, 4), "bf16"), dev.zeros((4, 6), "bf16")], compute="64f")
    shown = [
        request.describe(),
        repr(request),
        str(dp.explain(request)),
        str(dp.explain(wrong)),
        str(dp.explain(wrong, dp.Arch(90))),
        repr(T.contract_expression("...ij,jk", (2, 3, 4), (4, 5))),
        T.einsum_path("...ij,...jk,kl", (2, 3, 4), (7, 1, 4, 5), (5, 6)),
    ]
    for text in shown:
        assert "...ij" in text, text
        assert text.replace("×", "x").replace("→", "->").isascii(), text  # noqa: RUF001
    assert request.describe().startswith("einsum('...ij,...jk->...ik', operands[0] f32[2, 7, 3, 4]")


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (
            (5, 2, 4, 6),
            r"got 5 along \.\.\.\[0\] of '\.\.\.ij,\.\.\.jk->\.\.\.ik'; expected 3, the extent of operands\[0\]",
        ),
        ((2, 5, 6), r"got 5 along j of '\.\.\.ij,\.\.\.jk->\.\.\.ik'"),
    ],
)
def test_an_error_says_which_axis_of_an_ellipsis_does_not_fit(b, said):
    with pytest.raises(BadRequest, match=said):
        dp.einsum("...ij,...jk->...ik", np.ones((3, 2, 3, 4)), np.ones(b))


def test_an_axis_of_an_ellipsis_that_stands_alone_is_shown_by_its_number():
    first, last = dp.ops.contraction.modes.ellipsis_modes(2, "ij->i")
    shown_spec = dp.ops.contraction.modes.shown_spec
    assert shown_spec(f"{first}{last}i,{last}j->{first}{last}ij") == "...i,...j->...ij"
    assert shown_spec(f"{first}{last}i->{first}i") == "...i->...[0]i"
    assert shown_spec("ij->i") == "ij->i"
