"""NaN, infinite, singular, indefinite, 1x1 and empty input of linear algebra and BLAS, as the docs say of each routine.

The table of docs/linear_algebra.md is what is tested: its first column is calls, the others what becomes of them.
"""

import re
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError
from dispatch.keys import C128, F64
from dispatch.ops import FAMILIES
from dispatch.ops.blas.cases import cases

DOCS = Path(__file__).parents[3] / "docs" / "linear_algebra.md"
N = 4
HEADER, LINE, *ROWS = (
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCS.read_text().split("## Input at the edge", 1)[1].split("\n\n")[1].splitlines()
)
SAID = {
    call: dict(zip(HEADER[1:], rest, strict=True)) for calls, *rest in ROWS for call in re.findall("`(.+?)`", calls)
}
ALLOWED = {  # by what the table says
    "NaN": ("NaN", "info"),
    "rank 0": ("rank 0", "info"),
    "any": ("NaN", "info", "info, kept", "fine", "any"),
}


def matrices():
    """A symmetric positive definite matrix with what a column of the table says."""
    rng = np.random.default_rng(4)
    a = rng.standard_normal((N, N))
    a = a @ a.T + N * np.eye(N)
    made = {name: a.copy() for name in ("NaN", "infinite", "singular", "indefinite")}
    made["NaN"][2, 1] = made["NaN"][1, 2] = np.nan
    made["infinite"][2, 1] = made["infinite"][1, 2] = np.inf
    made["singular"][2], made["singular"][:, 2] = 0, 0
    made["indefinite"][2, 2] = -100
    return made | {"1x1": np.array([[4.0]]), "empty": np.zeros((0, 0))}


def results(call, values, dev):
    """What a call of the table gives, by name."""
    n = len(values)
    kind = values.dtype
    names = {"a": dev.array(values), "b": dev.array(np.ones((n, 2), kind)), "p": dev.array(np.eye(n, dtype=kind))}
    names["tau"] = dev.array(np.ones(n, kind))
    names["pivots"] = dev.array(np.arange(1, n + 1), "i64")
    made = eval(f"dp.{call}", {"dp": dp, **names})
    return made if isinstance(made, tuple) else (made,)


def outcome(op, given):
    """In the table's words what results are: "fine", "info", "info, kept", "NaN", "rank 0", or else "any"."""
    arrays = [tensor.numpy() for tensor in given]
    floats = [array for array in arrays if array.dtype.kind in "fc" and array.size]
    info = given[-1] if given[-1].dtype.name == "i32" else None
    if info is not None and info.numpy().any():
        with pytest.raises(LinAlgError):
            dp.linalg.check_info(op, info)
        if all(np.isnan(array).all() for array in floats):
            return "info"
        return "info, kept" if all(np.isfinite(array).all() for array in floats) else "NaN"
    if op == "matrix_rank" and given[0].numpy() == 0:
        return "rank 0"
    if all(np.isfinite(array).all() for array in floats):
        return "fine"
    return "NaN" if all(np.isnan(array).any() for array in floats) else "any"


def complaints_of(dev):
    """Calls that are otherwise than the table says."""
    for call, said in SAID.items():
        for column, values in matrices().items():
            wanted = said.get(column, said["1x1, empty"])
            try:
                found = outcome(call.split("(")[0], results(call, values, dev))
            except BadRequest:
                found = "refused"
            if found not in ALLOWED.get(wanted, (wanted,)) and not (found == "rank 0" and column == "empty"):
                yield f"{call} of a matrix that is {column} is {found!r}, said to be {wanted!r}"


def test_each_op_of_linear_algebra_does_with_such_input_as_its_docs_say():
    pytest.importorskip("scipy")
    assert {call.split("(")[0] for call in SAID} == set(FAMILIES["linalg"][1])
    with np.errstate(all="ignore"):
        assert not list(complaints_of(dp.device("host")))


NUMBERS = {  # those of a 1x1 matrix, by the columns of the table
    "NaN": (np.nan, complex(np.nan, 0), complex(0, np.nan), complex(1, np.nan)),
    "infinite": (np.inf, -np.inf, complex(np.inf, 0), complex(1, np.inf)),
}
ONLY_IN_R = ("qr", "qr_multiply")
HERMITIAN = ("cholesky", "ldl", "ldl_solve")


def is_excepted(call, number):
    """Whether the docs say that a 1x1 matrix of that number does otherwise than the table."""
    op = call.split("(")[0]
    if op in ("orgqr", "ormqr", "randomized_svd"):  # which read nothing of it, or refuse it
        return True
    if op in ONLY_IN_R:
        return not np.isnan(number.imag)
    return np.isfinite(number.real) and number.imag != 0 and (op in HERMITIAN or 'assume_a="pos"' in call)


@pytest.mark.parametrize("call", SAID)
def test_a_matrix_of_one_number_is_like_any_other_but_for_what_the_docs_say(call):
    pytest.importorskip("scipy")
    dev, said = dp.device("host"), SAID[call]
    with np.errstate(all="ignore"):
        for column, numbers in NUMBERS.items():
            for number in numbers:
                if is_excepted(call, complex(number)):
                    continue
                found = outcome(call.split("(")[0], results(call, np.array([[number]]), dev))
                assert found in ALLOWED.get(said[column], (said[column],)), (number, found)


@pytest.mark.parametrize("number", [np.nan, np.inf, complex(np.nan, 0), complex(np.inf, 0), complex(1, np.inf)])
def test_of_a_matrix_of_one_number_r_alone_is_not_finite(number):
    dev = dp.device("host")
    a = dev.array([[number]])
    q, r = (one.numpy() for one in dp.qr(a))
    h, tau = (one.numpy() for one in dp.qr(a, mode="raw"))
    assert not np.isfinite(r).any()
    assert not np.isfinite(h).any()
    is_real = complex(number).imag == 0
    assert np.isfinite(q).all() == np.isfinite(tau).all() == is_real
    ones = dev.array(np.ones((1, 1), a.dtype.numpy))
    assert np.isfinite(dp.orgqr(a, ones[0]).numpy()).all()
    assert np.isfinite(dp.ormqr(a, ones[0], ones).numpy()).all()


def lengths(request):
    """The extents of operands but for the diagonals of bands, and the parameters of a rotation."""
    named = ((tensor, {"ab": 1, "param": 1}.get(name, 0)) for name, tensor, _ in request.tensors())
    return [extent for tensor, first in named for extent in tensor.shape[first:]]


def test_each_routine_of_blas_has_cases_without_elements_and_of_one_and_passes_them(rng):
    """Of each in double precision, real or complex; numbers of rotations are as any other."""
    host, without = dp.device("host"), []
    for op in FAMILIES["blas"][1]:
        rows = (row for row in dp.TABLE if row.op == op and row.library == "numpy" and row.variant != "large")
        row = next(row for row in rows if row.dtypes[0] in (F64, C128))
        wanted = {"1x1"} if op in ("rotg", "rotmg") else {"empty", "1x1"}
        found = {}
        for case in cases(row):
            check = case.check(host, rng)
            kind = lengths(check.request)
            name = "empty" if 0 in kind else "1x1" if set(kind) <= {1} else "any"
            if name not in found:
                found[name] = True
                check.verify(dp.run(check.request))
            if wanted <= found.keys():
                break
        without += [f"{op}: {name}" for name in wanted - found.keys()]
    assert without == []


TRIANGLE = np.array([[2.0, 0, 0], [1, 0, 0], [3, 4, 5]])


@pytest.mark.parametrize("call", ["trsv(a, x)", "tbsv(band, x)", "tpsv(packed, x)", "trsm(a, x[:, None])"])
def test_a_zero_on_the_diagonal_of_a_triangle_divides_and_raises_nothing(call):
    dev = dp.device("host")
    packed = np.concatenate([TRIANGLE[column:, column] for column in range(3)])
    band = np.asfortranarray([np.diag(TRIANGLE), [1, 4, 0], [3, 0, 0]])
    names = {"a": dev.array(TRIANGLE), "x": dev.array(np.ones(3)), "packed": dev.array(packed)}
    names["band"] = dev.array(band.T.copy()).mT
    with np.errstate(all="ignore"):
        x = eval(f"dp.{call}", {"dp": dp, **names}).numpy().ravel()
    assert x[0] == 0.5
    assert not np.isfinite(x[1:]).any()
