"""Structured matrices on the host: every row's cases, pruning against all patterns, StructuredTensors, and refusals."""

# ruff: noqa: E501 - tables of errors

import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops import FAMILIES
from dispatch.ops.structured.cases import cases
from dispatch.row_check import check_row
from dispatch.supervise.request_json import Writer
from dispatch.table.select import select

S = dp.structured
ROWS = [row for row in dp.TABLE if row.op in FAMILIES["structured"][1] and row.on(HOST)]
DTYPES = ("f16", "bf16", "f32", "i8", "f8e4m3", "f8e5m2")
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.mark.parametrize(
    "every", [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_host_passes_its_cases(row, every, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        assert not check_row(row, case, DEV, rng), "cases are those that the row takes"


def drawn(rng, dtype, *shape):
    values = rng.integers(-100, 101, shape) if dtype == "i8" else rng.standard_normal(shape)
    return values.astype(dp.Dtype.of(dtype).numpy)


# -- pruning ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_strip_keeps_the_largest_magnitudes_of_each_group(dtype, rng):
    dense = drawn(rng, dtype, 32, 64)
    group, kept = (2, 1) if dtype == "f32" else (4, 2)
    found = dp.prune_2_4(DEV.array(dense)).numpy()
    for before, after in zip(dense.reshape(-1, group), found.reshape(-1, group), strict=True):
        sizes = [abs(float(x)) for x in before]
        stay = sorted(range(group), key=lambda i: (-sizes[i], i))[:kept]  # of equal ones the first
        assert [float(x) for x in after] == [float(x) if i in stay else 0 for i, x in enumerate(before)]


@pytest.mark.parametrize("dtype", ["f16", "f32", "i8"])
def test_a_tile_keeps_the_largest_sum_with_as_many_in_each_row_and_column(dtype, rng):
    dense = drawn(rng, dtype, 32, 32)
    group, kept = (2, 1) if dtype == "f32" else (4, 2)
    found = dp.prune_2_4(DEV.array(dense), algorithm="tile").numpy()
    lines = [line for line in itertools.product((0, 1), repeat=group) if sum(line) == kept]
    patterns = [p for p in itertools.product(lines, repeat=group) if all(sum(c) == kept for c in zip(*p, strict=True))]
    assert len(patterns) == (2 if dtype == "f32" else 90)
    for i, j in itertools.product(range(0, 32, group), repeat=2):
        before, after = (x[i : i + group, j : j + group].astype("f8") for x in (dense, found))
        best = max(np.abs(before * np.array(pattern)).sum() for pattern in patterns)
        assert np.isclose(np.abs(after).sum(), best)
        assert ((after == 0) | (after == before)).all()
    assert S.is_structured(DEV.array(found))
    assert S.is_structured(DEV.array(np.ascontiguousarray(found.T))), "the transposed matrix, too"


def test_pruning_in_place_and_of_what_is_structured_changes_nothing_more(rng):
    a = DEV.array(drawn(rng, "f16", 16, 32))
    expected = S.prune(a).numpy()
    assert S.prune(a, out=a) is a
    np.testing.assert_array_equal(a.numpy(), expected)
    for algorithm in dp.PruneAlgorithm:
        tile = S.prune(a, algorithm=algorithm)
        np.testing.assert_array_equal(S.prune(tile).numpy(), tile.numpy())


def test_of_equal_magnitudes_the_first_stay():
    ones = S.prune(DEV.array(np.ones((16, 16), "f2"))).numpy()
    np.testing.assert_array_equal(ones[0], [1, 1, 0, 0] * 4)
    tile = S.prune(DEV.array(np.ones((16, 16), "f2")), algorithm="tile").numpy()
    np.testing.assert_array_equal(tile[:4, :4], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])


def test_nan_and_infinities_are_the_largest():
    dense = np.tile(np.array([1, np.nan, 3, np.inf], "f2"), (16, 4))
    found = S.prune(DEV.array(dense)).numpy()
    np.testing.assert_array_equal(found[0, :4], np.array([0, np.nan, 0, np.inf], "f2"))


# -- compressed matrices ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_rows", [True, False])
def test_a_matrix_is_what_it_was_once_it_is_unpacked(dtype, by_rows, rng):
    dense = S.prune(DEV.array(drawn(rng, dtype, 32, 64))).numpy()
    if not by_rows and dp.Dtype.of(dtype).itemsize == 1:
        with pytest.raises(NoRow, match="needs a row-major"):
            S.compress(DEV.array(np.ascontiguousarray(dense.T)).T)
        return
    a = S.compress(DEV.array(dense) if by_rows else DEV.array(np.ascontiguousarray(dense.T)).T, validate=True)
    np.testing.assert_array_equal(a.todense().numpy(), dense)
    np.testing.assert_array_equal(a.T.todense().numpy(), dense.T)
    item = dp.Dtype.of(dtype).itemsize
    assert (a.shape, a.T.shape, a.ndim, a.dtype.name) == ((32, 64), (64, 32), 2, dtype)
    assert (a.made_by, a.device, a.nbytes / dense.size / item) == ("host", DEV, 0.625 if item == 1 else 0.5625)
    pattern = "1:2" if dtype == "f32" else "2:4"
    assert repr(a) == f"StructuredTensor({pattern} {dtype}[32, 64], by host, host)"
    assert repr(a.T) == f"StructuredTensor({pattern} {dtype}[64, 32], transposed, by host, host)"


def test_a_matrix_that_is_not_structured_is_refused(rng):
    dense = DEV.array(drawn(rng, "f16", 16, 32))
    assert not S.is_structured(dense)
    with pytest.raises(
        BadRequest, match=r"a: got f16\[16, 32\]; expected at most 2 of 4 along the columns. Hint: prune"
    ):
        S.compress(dense, validate=True)
    with pytest.raises(BadRequest, match="128 groups with more nonzeros; expected 2 of 4"):
        S.compress(dense)
    found = dp.check_2_4(dense)
    assert (found.dtype.name, found.shape, found.tolist()) == ("i32", (1,), [1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_numpys_from_both_sides(dtype, rng):
    dense = S.prune(DEV.array(drawn(rng, dtype, 32, 64)))
    a, x = S.compress(dense), DEV.array(drawn(rng, dtype, 48, 64))
    exact = dense.numpy().astype("f8") @ x.numpy().astype("f8").T
    tolerance = {"f16": 2e-3, "f32": 1e-5, "i8": 0}.get(dtype, 1e-2)
    for found, expected in ((a @ x.T, exact), (x @ a.T, exact.T)):
        assert found.shape == expected.shape
        assert found.dtype.name == {"i8": "i32", "f8e4m3": "bf16", "f8e5m2": "bf16"}.get(dtype, dtype)
        assert np.abs(found.numpy().astype("f8") - expected).max() <= tolerance * np.abs(expected).max()
    assert (x @ a.T).layout.is_contiguous, "the result of row-major lines is row-major"
    batch = DEV.array(np.stack([x.numpy()] * 3))
    compute = {"compute": "tf32"} if dtype == "f32" else {}
    several = S.compress(DEV.array(np.stack([dense.numpy(), dense.numpy()])))
    # NumPy adds up in another order for other extents: on some processors the last bits differ.
    for found, expected in (
        (S.linear(batch, a, **compute), exact.T),
        (x @ several.mT, exact.T),
        (several @ x.T, exact),
    ):
        assert found.shape[1:] == expected.shape
        assert np.abs(found.numpy().astype("f8") - expected).max() <= tolerance * np.abs(expected).max()


def test_an_epilogue_is_in_the_product(rng):
    dense = S.prune(DEV.array(drawn(rng, "f16", 32, 64)))
    a, x, bias = S.compress(dense), drawn(rng, "f16", 16, 64), drawn(rng, "f16", 32)
    exact = x.astype("f8") @ dense.numpy().astype("f8").T + bias.astype("f8")
    found = S.linear(DEV.array(x), a, DEV.array(bias), activation="relu", upper_bound=4, threshold=1).numpy()
    expected = np.where(exact <= 1, 0, np.minimum(exact, 4))
    clear = np.abs(exact - 1) > 0.02
    np.testing.assert_allclose(found[clear], expected[clear], rtol=2e-3)


def test_whole_numbers_are_exact_and_saturate():
    dense = S.prune(DEV.array(np.full((32, 4096), 127, "i1")))
    a, b = S.compress(dense), DEV.array(np.full((16, 4096), 127, "i1")).T
    assert (dp.matmul_2_4(*a, b).numpy() == 2048 * 127 * 127).all(), "more than f32 holds"
    assert (dp.matmul_2_4(*a, b, out_dtype="i8").numpy() == 127).all()
    factors = np.linspace(-1e-6, 1e-6, 32, dtype="f4")
    found = dp.matmul_2_4(*a, b, out_dtype="i8", alpha_vector=DEV.array(factors)).numpy()
    np.testing.assert_array_equal(found[:, 0], np.rint(factors.astype("f8") * 2048 * 127 * 127))


@pytest.mark.parametrize("kind", ["half", "int8"])
def test_torch_s_tensors_are_operands_and_what_comes_back_is_torch_s(kind, rng):
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(rng.integers(-9, 10, (32, 64))).to(getattr(torch, {"half": "float16"}.get(kind, kind)))
    x = torch.from_numpy(rng.integers(-9, 10, (16, 64))).to(values.dtype)
    pruned = S.prune(values)
    assert isinstance(pruned, torch.Tensor)
    a = S.compress(pruned, validate=True)
    found = S.linear(x, a)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.double(), x.double() @ pruned.double().T)
    torch.testing.assert_close(x @ a.T, found)


def test_a_request_has_a_key_and_a_journal_has_its_form(rng):
    a = S.compress(S.prune(DEV.array(drawn(rng, "f16", 32, 64))))
    b, c = DEV.array(drawn(rng, "f16", 64, 16)), DEV.array(drawn(rng, "f16", 32, 16))
    request = dp.Matmul24Request(*a, b, alpha=2)
    assert request.key() == dp.Matmul24Request(*a, b, alpha=3).key()
    for other in ({"c": c}, {"activation": "relu"}, {"split_k": 1}, {"out": c}, {"autotune": True}):
        assert dp.Matmul24Request(*a, b, **other).key() != request.key()
    assert dp.Matmul24Request(*a, b, c=c, beta=0).key() != dp.Matmul24Request(*a, b, c=c).key()
    entry = Writer().request(request)
    assert entry["fields"]["form"]["fields"]["shape"] == {"tuple": [32, 64]}
    assert pickle.loads(pickle.dumps(request.form)) == request.form


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, rng):
    dense = drawn(rng, "f16", 32, 64)
    with dp.Supervisor("host", streams=1, isolation=isolation) as sup:
        pruned = sup.submit(dp.Prune24Request(sup.device.array(dense))).result(60)
        data = sup.submit(dp.Compress24Request(pruned)).result(60)
        b = sup.device.array(drawn(rng, "f16", 64, 16))
        form = dp.StructuredForm((32, 64), "f16")
        futures = [sup.submit(dp.Matmul24Request(data, form, b, alpha=k)) for k in range(3)]
        product = pruned.numpy().astype("f8") @ b.numpy().astype("f8")
        for k, future in enumerate(futures):
            np.testing.assert_allclose(future.result(60).numpy(), k * product, rtol=2e-3, atol=2e-2)


# -- what is refused --------------------------------------------------------------------------------------------------
def compressed():
    return S.compress(DEV.zeros((32, 64), "f16"))


def clipped(b):
    return dp.matmul_2_4(*compressed(), b, out=b[:32])


BAD = {
    "rows of no multiple": (lambda: S.prune(DEV.zeros((24, 64), "f16")), r"a: got f16\[24, 64\]; expected rows and columns that are multiples of 16"),
    "columns of no multiple": (lambda: S.prune(DEV.zeros((32, 48), "i8")), "multiples of 32, as structured matrices of i8 need"),
    "f32 of no multiple": (lambda: S.prune(DEV.zeros((8, 12), "f32")), "multiples of 8"),
    "no elements": (lambda: S.prune(DEV.zeros((0, 64), "f16")), r"a: got f16\[0, 64\]"),
    "a vector": (lambda: S.prune(DEV.zeros((64,), "f16")), r"expected a matrix \(rows, k\), or a batch"),
    "f64": (lambda: S.prune(DEV.zeros((32, 64), "f64")), "a: got f64.*expected one of f16, bf16, i8, f8e4m3, f8e5m2, f32"),
    "an out of another shape": (lambda: S.prune(DEV.zeros((32, 64), "f16"), out=DEV.zeros((64, 32), "f16")), r"out: got f16\[64, 32\]; expected f16\[32, 64\]"),
    "another algorithm": (lambda: S.prune(DEV.zeros((32, 64), "f16"), algorithm="row"), "algorithm: got 'row'; expected a PruneAlgorithm: TILE, STRIP"),
    "no form": (lambda: dp.matmul_2_4(DEV.zeros((8,), "u8"), (32, 64), DEV.zeros((64, 8), "f16")), "form: got.*expected a StructuredForm. Hint: pass a StructuredTensor as"),
    "another k": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((32, 16), "f16")), r"b: got f16\[32, 16\]; expected f16\[64, n\]"),
    "another dtype": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "bf16")), r"b: got bf16\[64, 16\]; expected f16"),
    "b transposed": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((16, 64), "f16")), "Hint: b.mT exchanges the last two axes"),
    "n of no multiple": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 12), "f16")), "expected n a multiple of 8, as dense matrices of f16"),
    "too few bytes": (lambda: dp.matmul_2_4(compressed().data[:-1], compressed().form, DEV.zeros((64, 16), "f16")), r"a: got u8\[2303\]; expected u8\[2304\]"),
    "bytes of a GPU": (lambda: dp.matmul_2_4(compressed().data, compressed().form._replace(made_by="cusparseLt 0.8.1 sm_90"), DEV.zeros((64, 16), "f16")), "form.made_by: got 'cusparseLt 0.8.1 sm_90'; expected bytes that were compressed on the host"),
    "a bias for columns": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), bias=DEV.zeros((16,), "f16")), r"bias: got f16\[16\]; expected f16\[32\]: a number for each row of D"),
    "a bias of f32": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), bias=DEV.zeros((32,), "f32")), r"bias: got f32\[32\]; expected f16\[32\]"),
    "a beta without c": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), beta=1), "beta: got 1; expected 0 without c"),
    "a beta_vector alone": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), beta_vector=DEV.zeros((32,), "f32")), "beta_vector: got.*None without c and alpha_vector"),
    "alpha twice": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), alpha=2, alpha_vector=DEV.zeros((32,), "f32")), "alpha: got 2; expected 1 with alpha_vector"),
    "a complex alpha": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), alpha=1j), "alpha: got 1j; expected a"),
    "a bound without ReLU": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), upper_bound=6), "activation: got.*expected RELU, the only activation with upper_bound"),
    "a factor without GELU": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), gelu_scaling=2), "activation: got.*expected GELU"),
    "a threshold of infinity": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), activation="relu", threshold=np.inf), "threshold: got inf"),
    "0 parts": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), split_k=0), "split_k: got 0; expected 1 or more parts"),
    "two batches": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((2, 32, 64), "f16")), DEV.zeros((3, 64, 16), "f16")), "expected a batch of 2, like a, or one matrix"),
    "a c to be broadcast": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), c=DEV.zeros((32,), "f16")), r"c: got f16\[32\]; expected \[32, 16\], the shape of D"),
    "an out that overlaps b": (lambda: clipped(DEV.zeros((64, 16), "f16")), "out: got memory that overlaps b"),
    "a product of the other side": (lambda: DEV.zeros((16, 32), "f16") @ compressed(), "expected a transposed matrix, because its groups are along k"),
    "a transposed one on the left": (lambda: compressed().T @ DEV.zeros((32, 16), "f16"), "expected a matrix that is not transposed"),
    "T of a batch": (lambda: S.compress(DEV.zeros((2, 32, 64), "f16")).T, "a.mT exchanges the last two axes"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_by_its_name(what):
    call, said = BAD[what]
    with pytest.raises(BadRequest, match=said):
        call()


NOT_TAKEN = {
    "f32 not in TF32": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((32, 64), "f32")), DEV.zeros((64, 16), "f32")), "needs COMPUTE_32F_FAST_TF32|compute.*TF32"),
    "GELU of f16": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), activation="gelu"), "for GELU, has f16 to f16"),
    "a vector of factors of f16": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), alpha_vector=DEV.zeros((32,), "f32")), "needs i8 for vectors of factors, has f16"),
    "a bias beside a vector of factors": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((32, 64), "i8")), DEV.zeros((16, 64), "i8").T, bias=DEV.zeros((32,), "f32"), alpha_vector=DEV.zeros((32,), "f32"), out_dtype="f16"), "needs no bias for i8 to f16"),
    "row-major b of i8": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((32, 64), "i8")), DEV.zeros((64, 16), "i8")), "needs b column-major, with adjacent elements"),
    "an odd address": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 32), "f16")[:, 1:17]), "needs b at a multiple of 16 bytes, has 2: copy it"),
    "odd lines": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 17), "f16")[:, :16]), "needs lines of b at multiples of 16 bytes"),
    "structured lines of 16 bytes": (lambda: dp.prune_2_4(DEV.zeros((32, 48), "i8")[:, :32]), "needs lines of a at multiples of 32 bytes"),
    "a batch with gaps": (lambda: dp.check_2_4(DEV.zeros((2, 48, 64), "f16")[:, :32]), "needs a without gaps"),
    "c as a number beside a vector": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((32, 64), "i8")), DEV.zeros((16, 64), "i8").T, c=DEV.zeros((32, 16), "i32"), alpha_vector=DEV.zeros((32,), "f32")), "needs beta_vector for c"),
    "steps": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 32), "f16")[:, ::2]), "needs b row-major or column-major"),
    "c of another order": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), c=DEV.zeros((16, 32), "f16").T, out=DEV.zeros((32, 16), "f16")), "needs c with the layout of out"),
    "c that prints as out does": (lambda: dp.matmul_2_4(*S.compress(DEV.zeros((1, 32, 64), "f16")).parts, DEV.zeros((1, 64, 16), "f16"), c=DEV.zeros((2, 32, 16), "f16")[::2]), r"has f16\[1, 32, 16\] with element strides \(1024, 16, 1\) and \(512, 16, 1\)"),
    "a that is no dense memory": (lambda: dp.compress_2_4(DEV.zeros((32, 128), "f16")[:, :64]), "needs a dense in memory"),
    "out of another order": (lambda: dp.prune_2_4(DEV.zeros((32, 64), "f16"), out=DEV.zeros((64, 32), "f16").T), "needs out with the layout of a"),
    "a bias with steps": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), bias=DEV.zeros((64,), "f16")[::2]), "needs bias dense"),
    "a dtype of D": (lambda: dp.matmul_2_4(*compressed(), DEV.zeros((64, 16), "f16"), out_dtype="f32"), "needs dtypes"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_what_no_row_takes_is_refused_with_what_it_needs(what):
    call, said = NOT_TAKEN[what]
    with pytest.raises(NoRow, match=said):
        call()


def test_an_array_is_no_structured_tensor():
    a = compressed()
    with pytest.raises(TypeError, match=r"a.todense\(\) makes a dense tensor"):
        np.asarray(a)
    with pytest.raises(BadType, match="a: got a ndarray; expected a StructuredTensor"):
        S.matmul(np.zeros((32, 64)), DEV.zeros((64, 16), "f16"))
    with pytest.raises(BadRequest, match="expected a matrix that is not transposed"):
        dp.matmul_2_4(*a.T, DEV.zeros((64, 16), "f16"))
    broken = S.StructuredTensor(DEV.array(np.full(144, 255, "u1")), dp.StructuredForm((8, 8), "f32"))
    with pytest.raises(BadRequest, match="indices beyond a group"):
        broken.todense()


@pytest.mark.parametrize(("arch", "dtype"), [(80, "f16"), (89, "f8e4m3"), (90, "i8")])
def test_rows_are_of_the_architectures_that_have_their_tensor_cores(arch, dtype):
    row = select(dp.Prune24Request(DEV.zeros((32, 64), dtype)), Arch(arch))
    assert (row.library, row.min_arch <= arch) == ("cusparseLt", True)
    with pytest.raises(NoRow):
        select(dp.Prune24Request(DEV.zeros((32, 64), dtype)), Arch(75))


def test_what_has_dtypes_of_ml_dtypes_is_taken():
    values = np.ones((32, 64), ml_dtypes.float8_e4m3fn)
    assert S.prune(DEV.array(values)).dtype.name == "f8e4m3"


LINEAR = {  # what is given as x, its dtype, and what is said
    "dtype": ((8, 32), "f4", r"f32\[8, 32\]; expected f16\[…, 32\].*Hint: x\.astype\('f16'\)"),
    "k": ((8, 16), "f2", r"f16\[8, 16\]; expected f16\[…, 32\], because the compressed matrix is \[64, 32\]"),
    "k of a batch": ((2, 4, 16), "f2", r"f16\[2, 4, 16\]; expected f16\[…, 32\]"),
    "lines": (
        (3, 5, 32),
        "f2",
        r"f16\[3, 5, 32\] .lines: 15.; expected a multiple of 8 lines.*pad it with zeros",
    ),
    "one line": ((32,), "f2", r"f16\[32\] .lines: 1.; expected a multiple of 8"),
    "no axis": ((), "f2", r"one number, without axes; expected a tensor f16\[…, 32\]"),
}


@pytest.mark.parametrize("kind", ["ours", "torch", "numpy"])
@pytest.mark.parametrize("name", LINEAR)
def test_what_a_layer_is_given_is_x_in_its_errors(name, kind):
    shape, dtype, said = LINEAR[name]
    weight = S.compress(DEV.zeros((64, 32), "f16"))
    x = np.ones(shape, dtype)
    if kind == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    given = DEV.array(x) if kind == "ours" else x
    with pytest.raises(BadRequest, match=f"x: got {said}"):
        S.linear(given, weight)


def test_an_operand_that_a_layer_s_product_refuses_is_x_too():
    weight = S.compress(DEV.zeros((64, 32), "f16"))
    x = pytest.importorskip("torch").ones(8, 32).half().requires_grad_()
    for call in (lambda: S.linear(x, weight), lambda: S.left_product(weight.mT, x)):
        with pytest.raises(BadRequest, match="x: got a tensor that requires grad"):
            call()
    with pytest.raises(BadType, match=r"x: got a list; expected a tensor f16\[…, 32\]"):
        S.linear([1.0], weight)
    with pytest.raises(BadType, match="weight: got a Tensor; expected a StructuredTensor"):
        S.linear(DEV.zeros((8, 32)), DEV.zeros((64, 32)))
