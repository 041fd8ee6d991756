"""Contractions, reductions over modes and elementwise operations on the host: rows, NumPy, operators, refusals."""

import itertools

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from cudabind.sys import cutensor
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.libraries.cutensor.descriptors import COMPUTE
from dispatch.ops.contraction.cases import FORMS, cases
from dispatch.ops.contraction.choices import BINARY
from dispatch.ops.contraction.reference import UNARY_OF
from dispatch.row_check import check_row

ROWS = [row for op in (*FORMS, "einsum") for row in dp.TABLE.of(op) if row.min_arch == HOST]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if n % 4 else []) for n, row in enumerate(ROWS)],
)
def test_a_row_passes_its_cases(row, dev, each):
    each(cases(row), lambda case, rng: check_row(row, case, dev, rng))


def test_the_numbers_of_operators_and_ways_are_nvidias():
    for kind, theirs, start in (
        (dp.TensorOp, cutensor.cutensorOperator_t, "CUTENSOR_OP_"),
        (dp.ContractionAlgo, cutensor.cutensorAlgo_t, "CUTENSOR_ALGO_"),
    ):
        assert {f"{start}{member.name}": int(member) for member in kind} == {
            member.name: int(member) for member in theirs if "UNKNOWN" not in member.name
        }
    assert set(UNARY_OF) == {op for op in dp.TensorOp if op not in BINARY}


def test_every_operator_is_what_its_name_says(dev):
    x = np.array([0.25, 0.5, 0.875])
    known = {
        "IDENTITY": x,
        "SQRT": x**0.5,
        "RELU": x,
        "CONJ": x,
        "RCP": x**-1,
        "SIGMOID": 1 / (1 + np.exp(-x)),
        "LOG": np.log(x),
        "ABS": x,
        "NEG": -x,
        "CEIL": [1, 1, 1],
        "FLOOR": [0, 0, 0],
        "ACOSH": np.arccosh(1 + x),
        "SOFT_PLUS": np.log(1 + np.exp(x)),
        "SOFT_SIGN": x / (1 + x),
        "SWISH": x / (1 + np.exp(-x)),
        "MISH": x * np.tanh(np.log(1 + np.exp(x))),
    }
    for name in ("TANH", "EXP", "SIN", "COS", "TAN", "SINH", "COSH"):
        known[name] = getattr(np, name.lower())(x)
    for name in ("ASIN", "ACOS", "ATAN", "ASINH", "ATANH"):
        known[name] = getattr(np, f"arc{name.lower()[1:]}")(x)
    assert {op.name for op in UNARY_OF} == known.keys()
    for name, expected in known.items():
        given = dev.array(1 + x if name == "ACOSH" else x)
        np.testing.assert_allclose(dp.permute("i->i", given, op_a=name).numpy(), expected, rtol=1e-14)
    negative = dev.array(-x)
    assert (dp.permute("i->i", negative, op_a="relu").numpy() == 0).all()
    assert (dp.permute("i->i", negative, op_a="floor").numpy() == -1).all()


def test_modes_may_be_letters_or_lists(dev, rng):
    a, b = rng.standard_normal((3, 4, 5)), rng.standard_normal((5, 4, 2))
    x, y = dev.array(a), dev.array(b)
    expected = np.einsum("ikl,lkj->ji", a, b)
    for spec in (
        *("ikl,lkj->ji", " i k l , l k j -> j i ", [["row", "k", "l"], ["l", "k", "col"], ["col", "row"]]),
        *(((7, 2, 100), (100, 2, "x"), ("x", 7)), ["ikl", "lkj", "ji"]),
    ):
        np.testing.assert_allclose(dp.contract(spec, x, y).numpy(), expected)
    many = [[*range(200, 203)], [202, 201, 500], [500, 200]]
    np.testing.assert_allclose(dp.contract(many, x, y).numpy(), expected)


def test_repeated_calls_with_other_numbers_and_layouts_are_right(dev, rng):
    for turn, (m, k, n) in enumerate(itertools.product((1, 3), (2, 5), (1, 4))):
        a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal((n, m))
        for alpha, beta in ((1.0, 0.0), (2.0, -1.5), (0.0, 1.0)):
            got = dp.contract(
                "ik,kj->ji", dev.array(a), dev.array(b.T.copy()).T, c=dev.array(c), alpha=alpha, beta=beta
            )
            np.testing.assert_allclose(got.numpy(), alpha * (a @ b).T + beta * c, atol=1e-13)
        view = dev.array(np.repeat(a, 2, axis=1))[:, ::2]
        np.testing.assert_allclose(dp.reduce_modes("ik->k", view, alpha=turn).numpy(), turn * a.sum(0), atol=1e-13)


def test_a_tensor_is_repeated_along_modes_that_the_result_has_alone(dev, rng):
    a = rng.standard_normal((3, 1))
    out = dev.zeros((3, 4, 2), "f64")
    dp.permute("ij->ijk", dev.array(a), out=out, alpha=2.0)
    np.testing.assert_allclose(out.numpy(), np.broadcast_to(2 * a[:, :, None], (3, 4, 2)))
    c = rng.standard_normal((2, 3))
    got = dp.elementwise_binary("j->ij", dev.array(c[0]), dev.array(c), op_ac="mul", gamma=-1.0)
    np.testing.assert_allclose(got.numpy(), -c[0] * c)


def test_the_installed_library_has_every_compute_type():
    try:
        cutensor.cutensorGetVersion()
    except LibraryNotFound as error:
        pytest.skip(str(error))
    for compute, name in COMPUTE.items():
        assert getattr(cutensor, f"CUTENSOR_COMPUTE_DESC_{name}").value, compute


def test_nothing_is_read_where_the_factor_is_zero(dev):
    nan, one = dev.array(np.full((2, 2), np.nan)), dev.array(np.ones((2, 2)))
    assert (dp.contract("ik,kj->ij", one, one, c=nan, beta=0.0).numpy() == 2).all()
    assert (dp.contract("ik,kj->ij", nan, one, c=one, alpha=0.0, beta=3.0).numpy() == 3).all()
    assert (dp.elementwise_trinary("ij,ij->ij", one, nan, one, beta=0.0).numpy() == 2).all()


BAD = {
    "sizes that disagree": (
        "ik,kj->ij",
        (3, 4),
        (5, 2),
        {},
        r"b: got 5 along k of 'ik,kj->ij'; expected 4, the extent of a",
    ),
    "axes without a mode": ("ik,kj->ij", (3, 4, 2), (4, 2), {}, r"a: got 3 axes, \[3, 4, 2\]; expected 2"),
    "a mode of nobody": ("ik,kj->ix", (3, 4), (4, 2), {}, "no operand has x"),
    "a result that is not said": ("ik,kj", (3, 4), (4, 2), {}, r'such as "ik,kj->ij"'),
    "three operands": ("ik,kj,jl->il", (3, 4), (4, 2), {}, "has 3 operands; expected modes of 2 operands"),
    "a mode twice": ("ik,kj->iji", (3, 4), (4, 2), {}, "the result has i 2 times"),
    "an ellipsis": ("...k,kj->j", (3, 4), (4, 2), {}, "letters, one for each axis"),
    "an operator of two": ("ik,kj->ij", (3, 4), (4, 2), {"op_a": "add"}, "op_a: got ADD"),
    "no operator": ("ik,kj->ij", (3, 4), (4, 2), {"op_a": "cube"}, "op_a: got 'cube'"),
    "no number": ("ik,kj->ij", (3, 4), (4, 2), {"alpha": "2"}, "alpha: got '2'"),
    "a complex factor": ("ik,kj->ij", (3, 4), (4, 2), {"alpha": 2j}, "alpha: got 2j; expected a real number"),
    "a beta of nothing": ("ik,kj->ij", (3, 4), (4, 2), {"beta": 1.0}, "beta: got 1.0; expected 0 without c"),
    "a rank below 0": ("ik,kj->ij", (3, 4), (4, 2), {"kernel_rank": -1}, "kernel_rank: got -1"),
    "both choices": (
        "ik,kj->ij",
        (3, 4),
        (4, 2),
        {"autotune": True, "algo": "gett"},
        "autotune chooses algo and kernel_rank",
    ),
    "no spec": (7, (3, 4), (4, 2), {}, 'a string such as "ik,kj->ij"'),
    "no library": ("ik,kj->ij", (3, 4), (4, 2), {"library": 5}, "library"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_runs(dev, what):
    spec, a, b, options, words = BAD[what]
    with pytest.raises(BadRequest, match=words):
        dp.contract(spec, dev.zeros(a, "f64"), dev.zeros(b, "f64"), **options)


def test_other_bad_input_is_refused(dev):
    a, z = dev.zeros((3, 4), "f64"), dev.zeros((3, 4), "c64")
    for words, ask in {
        "reduce_modes sums over the others": lambda: dp.permute("ij->i", a),
        "has 2 operands; expected modes of 1 operand. Hint: an added operand": lambda: dp.elementwise_binary(
            "ij,ji->ji", a, a.mT
        ),
        "ADD or MUL: c64 numbers have no order": lambda: dp.reduce_modes("ij->i", z, reduce="max"),
        "complex numbers have no order": lambda: dp.permute("ij->ji", z, op_a="relu"),
        "f16, bf16, f32, f64, c64 or c128": lambda: dp.permute("ij->ji", dev.zeros((3, 4), "i32")),
        "at least one element, for MAX and MIN": lambda: dp.reduce_modes("ij->i", a[:, :0], reduce="min"),
        "memory that overlaps a": lambda: dp.permute("ij->ij", a, out=a),
        "out: got 3 along j of 'ij->ji'; expected 4": lambda: dp.permute("ij->ji", a, out=a),
        "c: got 3 along j of 'ij->ji'; expected 4": lambda: dp.elementwise_binary("ij->ji", a, a),
        r"out: got f32\[3, 3\]; expected f64\[3, 3\]": lambda: dp.contract(
            "ij,kj->ik", a, a, out=dev.zeros((3, 3), "f32")
        ),
        "complex numbers, like a": lambda: dp.permute("ij->ij", z, out_dtype="f32"),
    }.items():
        with pytest.raises(BadRequest, match=words):
            ask()


def test_rows_refuse_with_reasons(dev):
    a = dev.zeros((3, 4), "f64")
    for words, ask in {
        "needs strides of 0 or more, has a": lambda: dp.permute("ij->ji", a[:, ::-1]),
        "needs an operand with a nonzero stride along j": lambda: dp.reduce_modes(
            "ij->i", a[:, :1].strided((3, 4), (4, 0))
        ),
        "needs dtypes": lambda: dp.contract("ij,ij->", a, dev.zeros((3, 4), "f32")),
        "needs compute": lambda: dp.contract("ij,ij->", a, a, compute="tf32"),
        "needs each mode in at least two tensors, has i in one": lambda: dp.contract(
            "ij,j->j", a, a[0], library="cublasLt"
        ),
        "needs op_a IDENTITY, has EXP": lambda: dp.contract("ij,kj->ik", a, a, op_a="exp", library="cublasLt"),
    }.items():
        with pytest.raises(NoRow, match=words):
            ask()


def test_sums_in_single_precision_are_for_those_who_ask(dev):
    a = dev.zeros((2, 2), "f64")
    assert "64F" in str(dp.explain(dp.ContractRequest("ij,jk->ik", a, a)))
    assert " 32F host" in str(dp.explain(dp.ContractRequest("ij,jk->ik", a, a, compute="32f")))
