"""einsum on the host against NumPy: drawn contractions, benchmarks, networks, paths, gradients, refusals."""

import builtins
import importlib.util
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.ops.contraction.paths import find_path
from dispatch.ops.contraction.steps import find_schedule

T = dp.tensors
EPS = {"f2": 2.0**-11, "f4": 2.0**-24, "f8": 2.0**-53, "c8": 2.0**-24, "c16": 2.0**-53}


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shapes_of = loaded(Path(__file__).parents[1] / "contraction_shapes.py")


@pytest.fixture
def dev():
    return dp.device("host")


def normal(rng, shape, kind="f8"):
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if kind[0] == "c" else made).astype(kind)


def close(got, spec, arrays, kind="f8"):
    """A result against NumPy's in double precision, as far off as sums of its terms may be."""
    wide = [array.astype("c16" if array.dtype.kind == "c" else "f8") for array in arrays]
    expected = np.einsum(spec, *wide, optimize=len(arrays) > 2)
    size = np.einsum(spec, *map(np.abs, wide), optimize=len(arrays) > 2)
    assert (got.shape, got.dtype.numpy) == (expected.shape, np.dtype(kind))
    count = 2 ** len(arrays) * math.sqrt(sum(array.size for array in arrays) + 8)
    assert (np.abs(got.numpy() - expected) <= count * EPS[kind] * size + np.abs(expected) * EPS[kind]).all(), spec


def test_drawn_contractions_are_numpys(dev, rng):
    for turn in range(300):
        spec, shapes = shapes_of.drawn(rng)
        kind = ("f8", "f4", "c16", "f2", "c8")[turn % 5]
        arrays = [normal(rng, shape, kind) for shape in shapes]
        close(dp.einsum(spec, *map(dev.array, arrays)), spec, arrays, kind)


def test_drawn_contractions_of_views_are_numpys(dev, rng):
    for _ in range(100):
        spec, shapes = shapes_of.drawn(rng)
        arrays, views = [], []
        for shape in shapes:
            order = rng.permutation(len(shape))
            whole = normal(rng, [2 * shape[axis] for axis in order])
            steps = (slice(1, None, 2),) * len(shape)
            back = tuple(int(axis) for axis in np.argsort(order))
            arrays.append(whole[steps].transpose(back))
            views.append(dev.array(whole)[steps].transpose(back))
        close(dp.einsum(spec, views), spec, arrays)


def test_the_contractions_of_the_benchmark_are_numpys(dev, rng):
    assert len(shapes_of.TCCG) == len({*shapes_of.TCCG}) == 48
    for spec in shapes_of.TCCG:
        inputs, output = spec.split("->")
        sizes = {mode: int(rng.choice([1, 2, 3, 4, 5])) for mode in inputs if mode != ","}
        arrays = [normal(rng, [sizes[mode] for mode in term]) for term in inputs.split(",")]
        a, b = map(dev.array, arrays)
        close(dp.einsum(spec, a, b), spec, arrays)
        close(dp.contract(spec, a, b), spec, arrays)
        assert len(output) == len({*output})


def test_attention_is_what_it_is_in_numpy(dev, rng):
    q, k, v = (normal(rng, (2, 5, 3, 4)) for _ in range(3))  # batch, sequence, heads, width
    scores = dp.einsum("bqhd,bkhd->bhqk", dev.array(q), dev.array(k))
    close(scores, "bqhd,bkhd->bhqk", [q, k])
    weights = np.exp(scores.numpy())
    weights /= weights.sum(-1, keepdims=True)
    close(dp.einsum("bhqk,bkhd->bqhd", dev.array(weights), dev.array(v)), "bhqk,bkhd->bqhd", [weights, v])


def test_a_sweep_over_a_matrix_product_state_is_its_vector(dev, rng):
    bonds, sites = [1, 2, 4, 3, 2, 1], 5
    state = [normal(rng, (bonds[n], 2, bonds[n + 1]), "c16") for n in range(sites)]
    whole = np.einsum("aib,bjc,ckd,dle,emf->ijklm", *state, optimize=True)
    left = dev.array(np.ones((1, 1), "c16"))
    for tensor in map(dev.array, state):
        left = dp.einsum("ab,aic,bid->cd", left, tensor, tensor, conj=(1,))
    np.testing.assert_allclose(left.numpy()[0, 0], np.vdot(whole, whole), rtol=1e-12)


def test_a_lattice_of_tensors_is_the_sum_over_its_bonds(dev, rng):
    spec, shapes = shapes_of.lattice(3, 3, bond=2)
    arrays = [normal(rng, shape) for shape in shapes]
    expected = np.einsum(spec, *arrays, optimize="greedy")
    for optimize in ("auto", "greedy", "branch-2", "left-to-right"):
        got = dp.einsum(spec, *map(dev.array, arrays), optimize=optimize)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_specs_are_read_as_numpy_reads_them(dev, rng):
    a, b = normal(rng, (3, 4, 4)), normal(rng, (3, 4, 2))
    x, y = dev.array(a), dev.array(b)
    for spec in ("aij,ajk", "aij,ajk->aik", "...ij,...jk", "...ij,...jk->...ik", " a i j , a j k -> i k a ", "bij,bjk"):
        np.testing.assert_allclose(dp.einsum(spec, x, y).numpy(), np.einsum(spec.replace(" ", ""), a, b))
    for spec in ("aii->a", "aii", "aii->ai", "ijk->kij", "...ii->...i", "...", "a...->...a", "ijk->", "zyx"):
        np.testing.assert_allclose(dp.einsum(spec, x).numpy(), np.einsum(spec, a))
    np.testing.assert_allclose(
        dp.einsum(x, [0, 1, 2], y, [0, 2, 3], [3, 1]).numpy(), np.einsum(a, [0, 1, 2], b, [0, 2, 3], [3, 1])
    )
    np.testing.assert_allclose(dp.einsum(x, [2, 1, 0]).numpy(), np.einsum(a, [2, 1, 0]))
    np.testing.assert_allclose(dp.einsum(x, [..., 0], [0, ...]).numpy(), np.einsum(a, [..., 0], [0, ...]))
    named = [["batch", "i", "j"], ["batch", "j", "k"], ["batch", "i", "k"]]
    np.testing.assert_allclose(dp.einsum(named, [x, y]).numpy(), a @ b)
    np.testing.assert_allclose(dp.einsum("aij,...->...a", x, dev.array(np.float64(2.0))).numpy(), 2 * a.sum((1, 2)))
    np.testing.assert_allclose(dp.einsum("ij,bj->bi", x[0], y[:, :, 0]).numpy(), b[:, :, 0] @ a[0].T)


def test_what_broadcasts_does(dev, rng):
    a, b = normal(rng, (1, 3)), normal(rng, (4, 3))
    np.testing.assert_allclose(dp.einsum("ij,ij->ij", dev.array(a), dev.array(b)).numpy(), a * b)
    np.testing.assert_allclose(dp.einsum("...,...", dev.array(a[0]), dev.array(b)).numpy(), a * b)


def test_a_diagonal_may_be_written(dev, rng):
    a = normal(rng, (3, 4))
    made = dp.einsum("ij->iji", dev.array(a)).numpy()
    for i, j, k in itertools.product(range(3), range(4), range(3)):
        assert made[i, j, k] == (a[i, j] if i == k else 0)
    out = dev.array(np.full((3, 3), np.nan))
    assert dp.einsum("ij->ii", dev.array(a), out=out) is out
    np.testing.assert_allclose(out.numpy(), np.diag(a.sum(1)))


def test_operands_of_other_precision_are_converted(dev, rng):
    arrays = [normal(rng, (3, 4), "f2"), normal(rng, (4, 5), "f4"), normal(rng, (5, 2), "f8")]
    close(dp.einsum("ij,jk,kl->il", *map(dev.array, arrays)), "ij,jk,kl->il", arrays)
    arrays = [normal(rng, (3, 4), "c8"), normal(rng, (4, 5), "f8")]
    close(dp.einsum("ij,jk->ik", *map(dev.array, arrays)), "ij,jk->ik", arrays, "c16")


def test_numpys_functions_are_there(dev, rng):
    a, b = normal(rng, (3, 4, 5)), normal(rng, (4, 5, 2))
    x, y = dev.array(a), dev.array(b)
    pairs = [
        *((T.tensordot(x, y, axes), np.tensordot(a, b, axes)) for axes in (2, 0, ((1,), (0,)), ((-1, 1), (1, 0)))),
        *((T.trace(x, offset, 0, 2), np.trace(a, offset, 0, 2)) for offset in range(-2, 5)),
        *((T.transpose(x, axes), np.transpose(a, axes)) for axes in (None, (1, 2, 0), (-1, 0, 1))),
        *((T.inner(x, x[0]), np.inner(a, a[0])), (T.inner(x, dev.array(np.float64(2))), 2 * a)),
        *(
            (T.outer(x[0], y), np.outer(a[0], b)),
            (T.kron(x[0], y), np.kron(a[0], b)),
            (T.kron(y, x[0]), np.kron(b, a[0])),
        ),
    ]
    for name, axis, keep in itertools.product(
        ("sum", "mean", "max", "min", "prod"), (None, 1, -1, (0, 2), (0, 1, 2)), (False, True)
    ):
        pairs.append((getattr(T, name)(x, axis, keep), getattr(np, name)(a, axis=axis, keepdims=keep)))
    for got, expected in pairs:
        assert got.shape == expected.shape
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_an_expression_is_called_with_operands_of_its_shapes(dev, rng):
    expression = T.contract_expression("ij,jk,kl->il", (3, 4), (4, 5), (5, 2))
    for _ in range(3):
        arrays = [normal(rng, shape) for shape in ((3, 4), (4, 5), (5, 2))]
        close(expression(*map(dev.array, arrays)), "ij,jk,kl->il", arrays)
    with pytest.raises(BadRequest, match="tensors of the shapes"):
        expression(dev.zeros((3, 4)), dev.zeros((4, 5)))
    assert "ij,jk,kl->il of (3, 4)" in repr(expression)


def test_a_path_shows_what_it_costs(dev):
    text = T.einsum_path("ij,jk,kl->il", (2, 30), (30, 40), (40, 3))
    assert text.splitlines()[0] == "ij,jk,kl->il  path (0,1) (0,1)"
    assert "5.28e+03 operations in all, 80 elements of intermediate results at most" in text
    request = dp.EinsumRequest("ij,jk,kl->il", [dev.zeros(shape) for shape in ((2, 30), (30, 40), (40, 3))])
    assert "path (0,1) (0,1), 5.28e+03 operations, 320 bytes of intermediate results at most" in str(
        dp.explain(request)
    )
    assert request.schedule.flops == 2 * 2 * 30 * 40 + 2 * 2 * 40 * 3


def test_paths_keep_within_memory_or_say_so(dev):
    spec, shapes = "ab,bc,cd,de->ae", ((2, 9), (9, 9), (9, 9), (9, 2))
    tensors = [dev.zeros(shape, "f8" and "f64") for shape in shapes]
    request = dp.EinsumRequest(spec, tensors, memory_limit=18 * 8)
    assert request.schedule.largest <= 18
    with pytest.raises(BadRequest, match="memory_limit"):
        dp.EinsumRequest(spec, tensors, memory_limit=8)
    with pytest.raises(BadRequest, match=r"memory_limit: got 100 bytes; expected 648 or more for this path"):
        dp.EinsumRequest(spec, tensors, memory_limit=100, optimize=[(1, 2), (0, 2), (0, 1)])


def test_without_opt_einsum_numpy_finds_the_path(dev, rng, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "opt_einsum", None)
    find_path.cache_clear()
    find_schedule.cache_clear()
    spec, shapes = shapes_of.lattice(2, 3, bond=3)
    arrays = [normal(rng, shape) for shape in shapes]
    for optimize in ("auto", "greedy", "optimal", "left-to-right"):
        close(dp.einsum(spec, *map(dev.array, arrays), optimize=optimize), spec, arrays)
    with pytest.raises(BadRequest, match=r"pip install cudabind\[einsum\] installs opt_einsum"):
        dp.einsum(spec, *map(dev.array, arrays), optimize="dp")
    find_path.cache_clear()
    find_schedule.cache_clear()


BAD = {
    "sizes that disagree": (
        ("ij,jk->ik", (3, 4), (5, 2)),
        {},
        r"operands\[1\]: got 5 along j of .* expected 4, the extent of operands\[0\]",
    ),
    "axes without a mode": (("ij,jk->ik", (3, 4, 2), (4, 2)), {}, r"operands\[0\]: got 3 axes"),
    "a mode of nobody": (("ij,jk->ix", (3, 4), (4, 2)), {}, "no operand has x"),
    "too few operands": (("ij,jk->ik", (3, 4)), {}, "which has 2 operands; expected modes of 1 operands"),
    "an ellipsis that ends": (("...i->i", (3, 4)), {}, "an ellipsis in the result as well"),
    "an ellipsis of nothing": (("...ijk->ijk", (3, 4)), {}, "at most as many modes as axes"),
    "signs": (("i-j->ij", (3, 4)), {}, "letters, one for each axis"),
    "no way": (("ij->ji", (3, 4)), {"optimize": "best"}, "optimize: got 'best'"),
    "no path": (("ij,jk->ik", (3, 4), (4, 2)), {"optimize": [(0, 2)]}, "optimize: got .* expected a path for 2"),
    "half a path": (("ij,jk,kl->il", (3, 4), (4, 2), (2, 2)), {"optimize": [(0, 1)]}, "it leaves 2 operands"),
    "conjugates of nobody": (("ij->ji", (3, 4)), {"conj": (1,)}, "conj"),
    "a limit of nothing": (("ij->ji", (3, 4)), {"memory_limit": 0}, "memory_limit"),
    "no spec": ((7, (3, 4)), {}, "."),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_runs(dev, what):
    (spec, *shapes), options, words = BAD[what]
    with pytest.raises((BadRequest, TypeError), match=words):
        dp.einsum(spec, *(dev.zeros(shape, "f64") for shape in shapes), **options)


def test_other_bad_input_is_refused(dev):
    a = dev.zeros((3, 3), "f64")
    for words, ask in {
        r"f16, bf16, f32, f64, c64 or c128": lambda: dp.einsum("ij->ji", dev.zeros((3, 3), "i64")),
        "bf16 is never converted": lambda: dp.einsum("ij,jk", dev.zeros((3, 3), "bf16"), dev.zeros((3, 3), "f32")),
        "real numbers can be combined only with c128": lambda: dp.einsum(
            "ij,jk", dev.zeros((3, 3), "c64"), dev.zeros((3, 3), "f32")
        ),
        r"memory that overlaps operands\[0\]": lambda: dp.einsum("ij->ji", a, out=a),
        r"out: got f64\[3, 3\]; expected f64\[3\]": lambda: dp.einsum("ij->j", a, out=a),
        "a dispatch Tensor": lambda: dp.einsum("ij,jk", a, 3.0),
        "a list of at least one tensor": lambda: dp.EinsumRequest("->", []),
        r"grad: got f64\[3, 3\]; expected f64\[3\]": lambda: T.einsum_vjp("ij->j", a, grad=a),
        "axis: got -1; expected None, because there are no axes": lambda: T.sum(dev.array(3.0), axis=-1),
        "the extent of a along axis 1": lambda: T.tensordot(a, dev.zeros((1, 3), "f64"), 1),
    }.items():
        with pytest.raises(BadRequest, match=words):
            ask()
    for words, ask in {
        "needs strides of 0 or more": lambda: dp.einsum("ij->ji", a[::-1]),
        "needs compute .* for f64": lambda: dp.einsum("ij,jk->ik", a, a, compute="tf32"),
        "needs an operand with a nonzero stride along j": lambda: dp.einsum("ij->i", a[:, :1].strided((3, 4), (3, 0))),
    }.items():
        with pytest.raises(NoRow, match=words):
            ask()


def numerical(spec, arrays, grad, number, conj):
    """The gradient of Re Σ conj(grad) · einsum(...) by an operand: it is linear in it, and so differences are exact."""
    made = np.zeros_like(arrays[number])

    def loss(value):
        given = [value if n == number else array for n, array in enumerate(arrays)]
        given = [array.conj() if n in conj else array for n, array in enumerate(given)]
        return np.vdot(grad, np.einsum(spec, *given, optimize=len(given) > 2)).real

    for place in np.ndindex(made.shape):
        one = np.zeros_like(made)
        one[place] = 1
        made[place] = loss(one)
        if made.dtype.kind == "c":
            one[place] = 1j
            made[place] += 1j * loss(one)
    return made


def test_gradients_are_those_of_differences(dev, rng):
    asked = (
        *(
            ("ij,jk,kl->il", ((3, 4), (4, 2), (2, 3)), ()),
            ("ij,jk->ik", ((3, 4), (4, 2)), (1,)),
            ("ij->", ((3, 4),), ()),
        ),
        *(("ii->i", ((3, 3),), (0,)), ("iij,j->i", ((3, 3, 2), (2,)), ()), ("ij,ij->ij", ((1, 3), (4, 3)), ())),
        *(("abk,k->b", ((2, 3, 4), (4,)), (0, 1)), ("i,j->ji", ((2,), (3,)), ()), ("ij->ji", ((2, 3),), ())),
    )
    for (spec, shapes, conj), kind in itertools.product(asked, ("f8", "c16")):
        arrays = [normal(rng, shape, kind) for shape in shapes]
        tensors = [dev.array(array) for array in arrays]
        result = dp.einsum(spec, *tensors, conj=conj)
        grad = normal(rng, result.shape, kind)
        requests = T.einsum_vjp(spec, *tensors, grad=dev.array(grad), conj=conj)
        assert len(requests) == len(arrays)
        for number, request in enumerate(requests):
            got = dp.run(request).numpy()
            flags = conj if kind == "c16" else ()
            np.testing.assert_allclose(got, numerical(spec, arrays, grad, number, flags), atol=1e-12)


def test_a_prepared_call_takes_other_operands(dev, rng):
    arrays = [normal(rng, shape) for shape in ((3, 4), (4, 5), (5, 2))]
    call = dp.prepare(dp.EinsumRequest("ij,jk,kl->il", [dev.array(array) for array in arrays]))
    close(call(), "ij,jk,kl->il", arrays)
    request = call.request
    other = normal(rng, (3, 4))
    close(dp.run(request.replace(**{"operands[0]": dev.array(other)})), "ij,jk,kl->il", [other, *arrays[1:]])
    with pytest.raises(BadRequest, match="a name that is not an operand of this request"):
        request.replace(b=dev.array(other))


def test_names_of_python_are_not_hidden_from_its_users():
    assert dp.tensors.sum is not builtins.sum
    assert not {"sum", "max", "min"} & {*dir(dp)}
