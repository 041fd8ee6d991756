"""Linear algebra on the host: every row through its cases, against NumPy and SciPy, refusals, and checked statuses."""

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch import TABLE
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import C64, C128, F32, F64, HOST
from dispatch.libraries.cusolver import reductions
from dispatch.libraries.cusolver.copies import SOURCE, options
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import F, cases, check
from dispatch.ops.linalg.norms import THRESHOLD
from dispatch.ops.linalg.residuals import residuals
from dispatch.row_check import check_row
from dispatch.testing.memory import Mismatch

OPS = FAMILIES["linalg"][1]
QUICK = 64
ROWS = [row for row in TABLE if row.op in OPS and row.on(HOST)]


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def cases_of_rows():
    """The cases of each row: one in `QUICK`, and all others, which are exhaustive."""
    for first, row in enumerate(ROWS):
        of_row = list(cases(row))
        few = of_row[-first % QUICK :: QUICK]
        others = [case for case in of_row if case not in few]
        if few:
            yield pytest.param(row, few, id=f"{row.name}-sample")
        yield pytest.param(row, others, id=f"{row.name}-others", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("row", "chosen"), list(cases_of_rows()))
def test_a_row_passes_its_cases_or_refuses_them_with_its_reasons(row, chosen, dev, each):
    each(chosen, lambda case, rng: check_row(row, case, dev, rng))


# -- what NumPy and SciPy give ----------------------------------------------------------------------------------------
DTYPES = ("f4", "f8", "c8", "c16")


def drawn(rng, dtype, shape):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype[0] == "c" else a).astype(dtype)


def close(got, expected, tolerance=2e-4):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_functions_give_what_numpy_gives(dtype, dev, rng):
    a, b = drawn(rng, dtype, (2, 6, 6)), drawn(rng, dtype, (2, 6, 3))
    p = a @ a.conj().mT + np.eye(6).astype(dtype)
    given = dev.array(a)
    close(dp.linalg.cholesky(dev.array(p), lower=True).numpy(), np.linalg.cholesky(p))
    close(dp.linalg.solve(given, dev.array(b)).numpy(), np.linalg.solve(a, b))
    close(dp.linalg.solve(dev.array(p), dev.array(b), assume_a="pos").numpy(), np.linalg.solve(p, b))
    close(dp.linalg.inv(given).numpy(), np.linalg.inv(a))
    close(dp.linalg.eigvalsh(dev.array(p)).numpy(), np.linalg.eigvalsh(p))
    close(dp.linalg.svdvals(given).numpy(), np.linalg.svd(a, compute_uv=False))
    close(dp.linalg.lu_solve(dp.linalg.lu_factor(given), dev.array(b)).numpy(), np.linalg.solve(a, b))
    factor = dp.linalg.cholesky(dev.array(p))
    close(dp.linalg.cho_solve((factor, False), dev.array(b)).numpy(), np.linalg.solve(p, b))
    q, r = dp.linalg.qr(given)
    close(q.numpy() @ r.numpy(), a)
    w, v = dp.linalg.eigh(dev.array(p))
    close((v.numpy() * w.numpy()[:, None]) @ v.numpy().conj().mT, p)
    u, s, vh = dp.linalg.svd(given)
    close((u.numpy() * s.numpy()[:, None]) @ vh.numpy(), a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_derived_functions_give_what_numpy_gives(dtype, dev, rng):
    a, b = drawn(rng, dtype, (2, 6, 6)), drawn(rng, dtype, (7, 3))
    p, oblong = a @ a.conj().mT + np.eye(6).astype(dtype), drawn(rng, dtype, (7, 4))
    given = dev.array(a)
    close(dp.linalg.inv(dev.array(p), assume_a="pos").numpy(), np.linalg.inv(p))
    triangle = np.triu(a) + 6 * np.eye(6)
    close(
        dp.linalg.inv(dev.array(triangle.astype(dtype)), assume_a="upper triangular").numpy(), np.linalg.inv(triangle)
    )
    close(dp.linalg.det(given).numpy(), np.linalg.det(a))
    for one, other in zip(dp.linalg.slogdet(given), np.linalg.slogdet(a), strict=True):
        close(one.numpy(), other)
    for order in (None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf):
        close(dp.linalg.norm(given, order).numpy(), np.linalg.matrix_norm(a, ord=order or "fro"))
    assert dp.linalg.matrix_rank(dev.array(oblong)).numpy() == 4
    close(dp.linalg.pinv(dev.array(oblong)).numpy(), np.linalg.pinv(oblong))
    expected = np.linalg.lstsq(oblong, b)
    for one, other in zip(dp.linalg.lstsq(dev.array(oblong), dev.array(b)), expected, strict=True):
        close(one.numpy(), other)
    x, residuals = dp.linalg.lstsq(dev.array(oblong), dev.array(b[:, 0]), driver="gels")
    close(x.numpy(), expected[0][:, 0])
    close(residuals.numpy(), expected[1][0])


def test_what_is_small_or_large_neither_vanishes_nor_overflows_on_its_way(dev):
    big = dev.array(np.full((3, 4), 1e200))
    close(dp.linalg.norm(big).numpy(), 1e200 * np.sqrt(12), 1e-12)
    scale = np.diag([1e200, 1e-200] * 3)
    close(dp.linalg.det(dev.array(scale)).numpy(), 1.0, 1e-12)
    assert dp.linalg.det(dev.array(np.eye(3) * 1e200)).numpy() == np.inf
    sign, logarithm = dp.linalg.slogdet(dev.array(np.diag([1e200, -1e200, 1e200])))
    assert sign.numpy() == -1
    close(logarithm.numpy(), 600 * np.log(10), 1e-12)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_factors_of_a_determinant_have_exponents_of_their_own(dtype, dev, rng):
    """Powers of 2 are exact in whatever order rows stand: no logarithm is taken where a partial product overflows."""
    most = np.finfo(dtype).maxexp
    unit = 1j if dtype[0] == "c" else -1
    for power in (most * 4 // 5, most - 2):  # LAPACK may take less than the smallest normal number for 0
        factors = np.array([2.0**power] * 3 + [2.0**-power] * 3, dtype) * unit
        expected = unit**6
        order = rng.permutation(6)
        sign = np.linalg.det(np.eye(6)[order]).round()
        matrix = np.diag(factors)[order]
        assert dp.det(dev.array(matrix)).numpy() == sign * expected
        found = dp.slogdet(dev.array(matrix))
        assert (found[0].numpy(), found[1].numpy()) == (sign * expected, 0)
    many = np.array(
        [[2.0 ** (most - 2), 4.0], [2.0 ** (most - 2), 2.0], [2.0 ** (2 - most), 2.0 ** -(most // 2)]], dtype
    )
    batch = dp.det(dev.array(many[:, None, :] * np.eye(2, dtype=dtype))).numpy()
    assert batch.tolist() == [np.inf, 2.0 ** (most - 1), 0]


def test_a_determinant_of_many_factors_neither_overflows_nor_underflows(dev, rng):
    factors = np.concatenate([np.full(700, 2.0**900), np.full(700, 2.0**-900)])
    assert dp.det(dev.array(np.diag(rng.permutation(factors)))).numpy() == 1


def test_a_determinant_beyond_all_numbers_is_held_to_its_bound_too(dev, rng):
    one = check("slogdet", F64, F("random", (515, 515)), "large", dev, rng)
    sign, logarithm = dp.run(one.request)
    assert logarithm.item() > np.log(np.finfo(np.float64).max)
    one.verify((sign, logarithm))
    with pytest.raises(Mismatch, match="the determinant's error"):
        one.verify((sign, dev.array(logarithm.numpy() * (1 + 1e-9))))


def test_pivots_are_scipys_and_one(dev, rng):
    from scipy import linalg

    a = rng.standard_normal((7, 7))
    lu, pivots, info = dp.lu_factor(dev.array(a))
    expected, order = linalg.lu_factor(a)
    np.testing.assert_allclose(lu.numpy(), expected, rtol=1e-12)
    assert pivots.numpy().tolist() == (order + 1).tolist()
    assert info.numpy() == 0


def test_a_factor_may_take_the_place_of_its_matrix(dev, rng):
    a = rng.standard_normal((5, 5))
    p = a @ a.T + np.eye(5)
    given = dev.array(p)
    factor = dp.linalg.cholesky(given, lower=True, overwrite_a=True)
    assert factor.ptr == given.ptr
    close(given.numpy(), np.linalg.cholesky(p), 1e-12)
    untouched = dev.array(p)
    dp.linalg.cholesky(untouched)
    assert (untouched.numpy() == p).all()


def test_numpys_arrays_come_and_go(rng):
    pytest.importorskip("scipy")
    a = rng.standard_normal((4, 4))
    x = dp.linalg.solve(a, a)
    assert isinstance(x, np.ndarray)
    close(x, np.eye(4), 1e-9)


def shifted(s, by, norm, driver, dev):
    """The largest error of singular values that are all off by so many n·eps of a norm."""
    request = dp.SvdRequest(dev.array(s), driver=driver, compute_uv=False)
    found = {"s": np.diag(s) + by * 5 * 2.0**-53 * norm, "info": 0}
    return max(ratio for _, ratio in residuals(request, {"a": s}, found))


def test_singular_values_are_held_to_the_sum_of_their_errors_and_those_of_jacobis_method_to_the_largest(dev):
    for s in (np.diag([5.0, 4, 3, 2, 0]), np.diag([5.0, 4, 3, 2, 1])):
        for driver in ("gesvd", "gesvdp"):
            assert shifted(s, 5, 5, driver, dev) <= THRESHOLD  # five of them: 25 n·eps
            assert shifted(s, 12, 5, driver, dev) > THRESHOLD
        assert shifted(s, 25, 5, "gesvdj", dev) <= THRESHOLD
        assert shifted(s, 35, 5, "gesvdj", dev) > THRESHOLD


# -- what fails -------------------------------------------------------------------------------------------------------
def test_a_failure_names_the_routine_the_position_and_what_to_do(dev):
    p = np.eye(6)
    p[3, 3] = -1
    with pytest.raises(LinAlgError, match=r"cholesky: the leading minor of order 4 is not positive.*Hint: add") as one:
        dp.linalg.cholesky(dev.array(p))
    assert isinstance(one.value, np.linalg.LinAlgError)
    assert pickle.loads(pickle.dumps(one.value)).statuses == {(): 4}
    with pytest.raises(LinAlgError, match=r"solve: the leading minor of order 4 .*Hint: assume_a=\"gen\""):
        dp.linalg.solve(dev.array(p), dev.array(np.ones(6)), assume_a="positive definite")
    p[3, 3] = 0
    for failing in (lambda: dp.linalg.lu_factor(dev.array(p)), lambda: dp.linalg.inv(dev.array(p))):
        with pytest.raises(LinAlgError, match=r"singular: U\[3, 3\] of its LU factorization is exactly 0"):
            failing()
    with pytest.raises(LinAlgError, match=r"triangle is singular: its diagonal is exactly 0 at \[3, 3\].*pinv"):
        dp.linalg.inv(dev.array(p), assume_a="lower triangular")
    with pytest.raises(LinAlgError, match=r"inv: the leading minor of order 4 .*Hint: assume_a=\"gen\""):
        dp.linalg.inv(dev.array(p), assume_a="pos")
    with pytest.raises(LinAlgError, match=r"lstsq: .* lacks full rank: R .* \[0, 0\].*gelss"):
        dp.linalg.lstsq(dev.zeros((5, 3)), dev.zeros((5, 2)), driver="gels")
    for failing in (dp.linalg.pinv, dp.linalg.matrix_rank):
        with pytest.raises(LinAlgError, match="the method did not converge"):
            failing(dev.array(np.full((2, 2), np.nan)))
    with pytest.raises(LinAlgError, match="the method did not converge"):
        dp.linalg.eigh(dev.array(np.full((2, 2), np.nan)))


def test_a_batch_says_which_failed_and_what_failed_is_nan(dev):
    p = np.stack([np.eye(3), -np.eye(3), np.eye(3), np.diag([1.0, 1, -1])]).reshape(2, 2, 3, 3)
    with pytest.raises(LinAlgError, match=r"order 1 .* of matrix \[0, 1\] \(2 matrices failed\)") as caught:
        dp.linalg.cholesky(dev.array(p))
    assert caught.value.statuses == {(0, 1): 1, (1, 1): 3}
    out, info = dp.linalg.cholesky(dev.array(p), check=False)
    assert info.numpy().tolist() == [[0, 1], [0, 3]]
    assert np.isnan(out.numpy()).all(axis=(2, 3)).tolist() == [[False, True], [False, True]]


def solved_beside(memory):
    dp.solve(memory.device.zeros((3, 3)), memory[:, :3], out=memory[:, 1:])


def decomposed_in_place(a):
    dp.eigh(a, v=a)


REFUSED = {
    "as many rows as columns": lambda dev: dp.cholesky(dev.zeros((3, 4))),
    "a: got f32.5.; expected a matrix": lambda dev: dp.svd(dev.zeros((5,))),
    "f32, f64, c64 or c128.*dev.array.x, 'f64'": lambda dev: dp.qr(dev.zeros((3, 3), "i32")),
    "b: got f32.4, 2.; expected f32.3, k., or f32.3.": lambda dev: dp.solve(dev.zeros((3, 3)), dev.zeros((4, 2))),
    "b: got f64.3, 2.; expected f32, the dtype of a": lambda dev: dp.solve(dev.zeros((3, 3)), dev.zeros((3, 2), "f64")),
    "x.*None. makes each vector a column": lambda dev: dp.solve(dev.zeros((2, 3, 3)), dev.zeros((2, 3))),
    "trans: got 3": lambda dev: dp.lu_solve(dev.zeros((3, 3)), dev.zeros((3,), "i64"), dev.zeros((3,)), trans=3),
    "pivots: got i32.3.; expected i64": lambda dev: dp.lu_solve(
        dev.zeros((3, 3)), dev.zeros((3,), "i32"), dev.zeros((3,))
    ),
    "pivots from 0 to 2": lambda dev: dp.lu_solve(
        dev.array(np.eye(3)), dev.array(np.arange(3)), dev.zeros((3,), "f64")
    ),
    "QrMode: REDUCED, COMPLETE, R, RAW": lambda dev: dp.qr(dev.zeros((3, 3)), mode="economy class"),
    "SvdDriver: GESVD, GESVDJ, GESVDP, GESVDA": lambda dev: dp.svd(dev.zeros((3, 3)), driver="gesdd"),
    "lower: got 1; expected a bool": lambda dev: dp.cholesky(dev.zeros((3, 3)), lower=1),
    "b: got f32.4.; expected f32.3, k., or f32.3.": lambda dev: dp.lstsq(dev.zeros((3, 2)), dev.zeros((4,))),
    "b: got f64.3.; expected f32": lambda dev: dp.lstsq(dev.zeros((3, 2)), dev.zeros((3,), "f64")),
    "rtol: got -1; expected a number from 0 to 1": lambda dev: dp.pinv(dev.zeros((3, 2)), rtol=-1),
    "rtol: got 'x'": lambda dev: dp.matrix_rank(dev.zeros((3, 2)), rtol="x"),
    "a: got f32.3, 2.*as many rows": lambda dev: dp.det(dev.zeros((3, 2))),
    "sign: got .*dense": lambda dev: dp.slogdet(dev.zeros((4, 2, 2)), sign=dev.zeros((8,))[::2]),
    "NormOrder: FRO": lambda dev: dp.matrix_norm(dev.zeros((3, 2)), order="max"),
    "ord: got 3; expected None, 'fro'": lambda dev: dp.linalg.norm(dev.zeros((3, 2)), 3),
    "ord: got True": lambda dev: dp.linalg.norm(dev.zeros((3, 2)), True),
    "InverseKind: GEN, POS, LOWER, UPPER": lambda dev: dp.inv(dev.zeros((3, 3)), assume_a="banded"),
    "LstsqDriver: GELSS, GELS": lambda dev: dp.lstsq(dev.zeros((3, 3)), dev.zeros((3,)), driver="gelsy"),
    "this lstsq has no rank": lambda dev: dp.lstsq(
        dev.zeros((3, 3)), dev.zeros((3,)), driver="gels", rank=dev.zeros((), "i64")
    ),
    "this qr has no h": lambda dev: dp.qr(dev.zeros((3, 3)), h=dev.zeros((3, 3))),
    "overlaps b.*b may be out itself": lambda dev: solved_beside(dev.zeros((3, 4))),
    "overlaps a": lambda dev: decomposed_in_place(dev.zeros((3, 3))),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_before_a_call(said, dev):
    with pytest.raises(BadRequest, match=said):
        REFUSED[said](dev)


def test_matrices_of_a_batch_at_unequal_distances_are_refused(dev):
    a = dev.zeros((4, 3, 5, 5))[:, :2]
    with pytest.raises(NoRow, match="needs the matrices of a at equal distances"):
        dp.cholesky(a)


def test_without_scipy_the_host_says_what_to_install(monkeypatch):
    for name in ("scipy", "scipy.linalg", "scipy.linalg.lapack"):
        monkeypatch.setitem(sys.modules, name, None)
    dev = dp.device("host")
    with pytest.raises(NoRow, match=r"pip install 'cudabind\[host\]'"):
        dp.svd(dev.array(np.ones((3, 11))))


@pytest.mark.parametrize("source", [SOURCE, reductions.SOURCE], ids=["copies", "reductions"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
def test_the_kernels_between_the_calls_compile(dtype, arch, source):
    nvrtc = pytest.importorskip("cudabind.nvrtc")
    try:
        code = nvrtc.compile(source, "kernels.cu", (f"-arch={arch}", *options(dtype))).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert code


def test_each_case_that_fails_is_told(each):
    def check(case, rng):
        assert rng.random() < 1
        if case.id == "second":
            raise ValueError("no number")
        assert case.id == "first", "another one"

    cases = [SimpleNamespace(id=name) for name in ("first", "second", "third")]
    with pytest.raises(
        AssertionError, match=r"2 of 3 cases fail(?s:.*)second: ValueError: no number(?s:.*)third: Asser"
    ):
        each(cases, check)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5), (2, 3, 3), (1, 1)])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_polar_decompositions_are_scipys(dtype, shape, dev, rng):
    from scipy import linalg

    a = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype == "c16" else 0)
    for side in ("right", "left"):
        u, p = (one.numpy() for one in dp.linalg.polar(dev.array(a), side))
        expected = [linalg.polar(one, side) for one in a.reshape(-1, *shape[-2:])]
        for found, right in zip((u, p), zip(*expected, strict=True), strict=True):
            np.testing.assert_allclose(found.reshape(-1, *found.shape[-2:]), right, atol=1e-12)
        assert u.shape == shape
    with pytest.raises(LinAlgError, match="polar: the method did not converge"):
        dp.linalg.polar(dev.array(np.full((2, 2), np.nan)))
    u, p, info = dp.polar(dev.zeros((0, 3)), side="right")
    assert (u.shape, p.shape, info.item(), p.numpy().any()) == ((0, 3), (3, 3), 0, False)
