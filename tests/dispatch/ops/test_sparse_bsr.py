"""Blocks to and from other formats: the kernels compiled by g++ and run over the host's memory; functions against SciPy."""

# ruff: noqa: E501 - a table of errors

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Dtype
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import bsr_kernels, own_bsr
from dispatch.ops.sparse.cases import cases

sp = pytest.importorskip("scipy.sparse")


def loaded_beside(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


blocks_on_cpu = loaded_beside(Path(__file__).with_name("blocks_on_cpu.py"))
stand_in = loaded_beside(Path(__file__).parents[1] / "cusparse_stand_in.py")

S = dp.sparse
OPS = ("csr2bsr_nnz", "csr2bsr", "bsr2csr", "sparse_to_dense")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.min_arch != HOST and row.library == "own"]
QUICK = ("f16", "c128")  # a kernel is compiled for each dtype and pair of widths: other dtypes are exhaustive
DEV = None
LANES = """
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static void atomicAdd(unsigned long long* at, unsigned long long more) { *at += more; }
static unsigned __ballot_sync(unsigned, bool mine)
{
    static bool given[1024];
    given[threadIdx.x] = mine;
    __syncwarp();
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; ++lane) all |= unsigned(given[threadIdx.x / 32 * 32 + lane]) << lane;
    __syncwarp();
    return all;
}
"""
MATRIX = ("const OFFSET* rows", "const INDEX* columns")
OF_ELEMENTS = ("Int count", "Int m", "Int base", "Int high", "Int wide")
OF_BLOCKS = ("Int held_blocks", "Int lines", "Int base", "Int high", "Int wide")
PARAMETERS = {
    "mark_blocks": (*MATRIX, "unsigned* bits", "Int* counts", "unsigned long long* unsorted", *OF_ELEMENTS),
    "tell_count": ("const unsigned long long* unsorted", "Int* total"),
    "scan_counts": ("Int* counts", "Int* sums", "Int count", "Int chunk"),
    "place_blocks": (
        *(*MATRIX, "const unsigned* bits", "const Int* counts", "const Int* sums", "OFFSET* out_rows"),
        *("INDEX* out_columns", *OF_ELEMENTS),
    ),
    "fill_blocks": (
        *("const Number* held", *MATRIX, "Number* out", "const OFFSET* out_rows", "const INDEX* out_columns"),
        *OF_BLOCKS,
    ),
    "expand_blocks": (
        *("const Number* held", *MATRIX, "Number* out", "OFFSET* out_rows", "INDEX* out_columns", *OF_BLOCKS),
    ),
    "unpack_blocks": ("const Number* held", *MATRIX, "Number* out", *OF_BLOCKS, "Int row_step", "Int column_step"),
}


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("bsr"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What plans are made for: launches run on the CPU, copies are `memmove`, and workspace holds NaN."""
    made = stand_in.executor_of(monkeypatch)
    made.synced, known = [], []

    def loaded(source, name, chosen, _):
        assert source == bsr_kernels.SOURCE
        known.append((name, chosen))
        return len(known)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        assert tuple(extents) == (1, 1, own_bsr.THREADS, 1, 1, 0)
        assert target is made.target
        assert blocks > 0
        name, chosen = known[function.value - 1]
        kinds = [ctypes.c_void_p if "*" in one else ctypes.c_int64 for one in PARAMETERS[name]]
        assert len(pointers) == len(kinds)
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        source = f"{LANES}{bsr_kernels.SOURCE}// {name}\n"
        on_cpu.launched(source, name, chosen, PARAMETERS[name], (blocks, own_bsr.THREADS), given)
        return 0

    copied = SimpleNamespace(
        cuMemcpyDtoHAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda at, value, nbytes, _: ctypes.memset(at, value, nbytes),
        cuStreamSynchronize=made.synced.append,
    )
    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    monkeypatch.setattr(own_bsr, "driver", copied)
    monkeypatch.setattr(own_bsr, "Copy", stand_in.Copy)
    return made


def run(request, executor, turns=1):
    row = next(row for row in ROWS if (row.op, row.dtypes[0]) == (request.op, request.values.dtype))
    assert not any(rule(request) for rule in row.rules)
    plan = own_bsr.plan(request, executor, row)
    for _ in range(turns):
        outputs = DEV.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "every", [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_some_or_all_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    found, ran = cases(row), 0
    if row.op == "sparse_to_dense":  # of other formats the library unpacks them
        found = [case for case in found if case.make.args[2].kind is dp.SparseFormat.BSR]
    # Values are moved alone: each other dtype has a part of the cases, and all of them have all.
    step = every if str(row.dtypes[0]) in QUICK else max(every, 4)
    for case in found[ROWS.index(row) % step :: step]:
        check = case.check(DEV, rng)
        request = check.request
        assert not any(rule(request) for rule in row.rules)
        plan = own_bsr.plan(request, executor, row)
        for _ in range(2):
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
        ran += 1
        is_empty = row.op == "sparse_to_dense" and not request.layout_of("out").size
        assert plan.capture_safe is (row.op != "csr2bsr" and not is_empty)
    assert ran


def random_csr(rng, shape, density, dtype="f8", index="i4"):
    matrix = sp.random_array(shape, density=density, rng=rng, format="csr").astype(dtype)
    matrix.sort_indices()
    return sp.csr_array((matrix.data, matrix.indices.astype(index), matrix.indptr.astype(index)), matrix.shape)


SIZES = {
    "many words and blocks": ((600, 700), (4, 5), 0.05),
    "one row of blocks": ((64, 900), (64, 3), 0.05),
    "a long row": ((3, 12_000), (3, 4), 0.4),
    "one column": ((4000, 1), (2, 1), 0.3),
    "blocks as large as the matrix": ((50, 30), (50, 30), 0.1),
    "blocks of one element": ((70, 90), (1, 1), 0.2),
}


@pytest.mark.parametrize(("shape", "block", "density"), SIZES.values(), ids=SIZES)
def test_large_matrices_become_blocks_as_scipy_makes_them_and_elements_again(shape, block, density, executor, rng):
    matrix = random_csr(rng, shape, density)
    a = S.sparse_tensor(matrix, device=DEV)
    expected = matrix.tobsr(blocksize=block)
    expected.sort_indices()
    nnzb = run(dp.Csr2bsrNnzRequest(*a, block=block), executor, turns=2).item()
    assert nnzb == len(expected.indices)
    assert not executor.synced, "a count is waited for by nobody"
    values, rows, columns = run(dp.Csr2bsrRequest(*a, block=block, nnzb=nnzb), executor, turns=2)
    np.testing.assert_array_equal(rows.numpy(), expected.indptr)
    np.testing.assert_array_equal(columns.numpy(), expected.indices)
    np.testing.assert_array_equal(values.numpy(), expected.data)
    blocks = S.bsr(values, rows, columns, shape)
    spread, again = run(dp.Bsr2csrRequest(*blocks), executor), expected.tocsr()
    for one, other in zip(spread, (again.data, again.indptr, again.indices), strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    np.testing.assert_array_equal(run(dp.SparseToDenseRequest(*blocks), executor).numpy(), matrix.toarray())


def test_marks_of_several_chunks_are_scanned(executor, monkeypatch, rng):
    for module in (bsr_kernels, own_bsr):
        monkeypatch.setattr(module, "CHUNK", 4)
    matrix = random_csr(rng, (90, 80), 0.3)
    a = S.sparse_tensor(matrix, device=DEV)
    expected = matrix.tobsr(blocksize=(3, 2))
    expected.sort_indices()
    assert a.nnz // 32 // 4 > 10
    values, rows, columns = run(dp.Csr2bsrRequest(*a, block=(3, 2), nnzb=len(expected.indices)), executor)
    np.testing.assert_array_equal(rows.numpy(), expected.indptr)
    np.testing.assert_array_equal(columns.numpy(), expected.indices)
    np.testing.assert_array_equal(values.numpy(), expected.data)


@pytest.mark.parametrize("count", [0, 31, 32, 33, 64, 255, 256, 257])
def test_elements_that_fill_words_and_blocks_of_threads_exactly(count, executor):
    ends = DEV.array(np.array([0, count, count], "i8"))
    a = S.csr(DEV.array(np.ones(count)), ends, DEV.array(np.arange(count, dtype="i4")), (2, 300))
    values, rows, columns = run(dp.Csr2bsrRequest(*a, block=(2, 1), nnzb=count), executor)
    assert run(dp.Csr2bsrNnzRequest(*a, block=(2, 1)), executor).tolist() == [count]
    assert rows.tolist() == [0, count]
    assert columns.tolist() == list(range(count))
    assert (values.numpy() == np.tile([[1.0], [0.0]], (count, 1, 1))).all()


@pytest.mark.parametrize("dtype", ["f16", "f32", "c128"])
def test_elements_of_one_place_add_up_on_the_kernel_as_on_the_host(dtype, executor):
    ends, columns = np.array([0, 3, 4, 6, 6], "i4"), np.array([1, 1, 1, 2, 0, 0], "i4")
    values = np.array([1000.0, 0.25, 0.25, -0.0, 3.0, 4.0]) * (1j if dtype == "c128" else 1)
    a = S.csr(DEV.array(values, dtype), DEV.array(ends), DEV.array(columns), (4, 4))
    expected = sp.csr_array((values, columns, ends), (4, 4)).toarray()
    for found in (run(dp.Csr2bsrRequest(*a, block=(2, 2), nnzb=3), executor), dp.csr2bsr(*a, block=(2, 2), nnzb=3)):
        blocks = S.bsr(*found, (4, 4))
        assert blocks.columns.tolist() == [0, 1, 0]
        # of f16 the sum is rounded once: 1000.25 is none, but 1000.5 is
        np.testing.assert_array_equal(blocks.todense().numpy().astype(expected.dtype), expected)


def test_another_number_of_blocks_is_refused_and_nothing_is_written(executor):
    a = S.sparse_tensor(sp.csr_array(np.diag([1.0, 2, 3, 4])), device=DEV)
    for nnzb in (0, 1, 3, 4):
        request = dp.Csr2bsrRequest(*a, block=(2, 2), nnzb=nnzb)
        made = {name: DEV.array(np.full(out.shape, 7), out.dtype) for name, out in request.outputs().items()}
        for call in (lambda request: run(request, executor), dp.run):
            with pytest.raises(BadRequest, match=f"nnzb: got {nnzb}; expected 2, the number that csr2bsr_nnz counts"):
                call(request.replace(**made))
        assert all((tensor.numpy() == 7).all() for tensor in made.values())


def test_rows_that_are_not_sorted_are_refused_and_counted(executor):
    parts = (np.ones(5), np.array([0, 3, 5], "i4"), np.array([2, 0, 1, 3, 1], "i4"))
    a = S.csr(*map(DEV.array, parts), (2, 4))
    request = dp.Csr2bsrRequest(*a, block=(2, 2), nnzb=2)
    made = {name: DEV.array(np.full(out.shape, 7), out.dtype) for name, out in request.outputs().items()}
    for call in (lambda request: run(request, executor), dp.run):
        with pytest.raises(
            BadRequest,
            match=r"columns: got 2 unsorted elements; expected sorted elements in each row. Hint: dispatch\.sparse\.sort",
        ):
            call(request.replace(**made))
    assert all((tensor.numpy() == 7).all() for tensor in made.values())
    assert run(dp.Csr2bsrNnzRequest(*a, block=(2, 2)), executor, turns=2).tolist() == [-2]
    assert dp.csr2bsr_nnz(*a, block=(2, 2)).tolist() == [-2], "as on the host"


@pytest.mark.parametrize("index", ["i4", "i8"])
def test_unsorted_rows_are_sorted_before_they_become_blocks(index, rng):
    dense = rng.standard_normal((6, 8)) * (rng.random((6, 8)) < 0.5)
    matrix = sp.csr_array(dense)
    for begin, end in zip(matrix.indptr, matrix.indptr[1:], strict=False):
        order = rng.permutation(end - begin)[::-1] + begin
        matrix.indices[begin:end], matrix.data[begin:end] = matrix.indices[order], matrix.data[order]
    a = S.csr(*map(DEV.array, (matrix.data, matrix.indptr.astype(index), matrix.indices.astype(index))), (6, 8))
    found = S.tobsr(a, (2, 2)).validate()
    np.testing.assert_array_equal(found.todense().numpy(), dense)
    assert found.index_dtype.name == "i32"
    # SciPy's own blocks come in the order of their first elements
    np.testing.assert_array_equal(S.tobsr(matrix.tobsr(blocksize=(2, 2)), (3, 4)).todense().numpy(), dense)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_them(dtype):
    for name in PARAMETERS:
        kernel = Kernel(bsr_kernels.SOURCE, name, lambda _: None, bsr_kernels.options(Dtype.of(dtype), 8, 4))
        assert blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0


# -- the functions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_blocks_from_csr_and_back(dtype, index, base, rng):
    matrix = random_csr(rng, (12, 20), 0.2, index=index)
    parts = (DEV.array(matrix.data, dtype), DEV.array(matrix.indptr + base), DEV.array(matrix.indices + base))
    a = S.csr(*parts, (12, 20), base=base)
    blocks = S.tobsr(a, (3, 4))
    theirs = matrix.tobsr(blocksize=(3, 4))
    theirs.sort_indices()
    assert (blocks.format.name, blocks.form.block, blocks.form.base) == ("BSR", (3, 4), base)
    assert (blocks.dtype, blocks.index_dtype) == (a.dtype, a.index_dtype)
    np.testing.assert_array_equal(blocks.columns.numpy(), theirs.indices + base)
    blocks.validate()
    for found in (blocks, S.tocsr(blocks).validate()):
        np.testing.assert_array_equal(S.todense(found).numpy(), a.todense().numpy())
    assert S.tocsr(blocks).nnz == theirs.tocsr().nnz == blocks.nnz, "every element of a block is kept"
    assert S.tobsr(blocks, (3, 4)) is blocks
    other = S.tobsr(blocks, [4, 2], nnzb=len(theirs.tocsr().tobsr(blocksize=(4, 2)).indices))
    assert other.form.block == (4, 2)
    np.testing.assert_array_equal(other.todense().numpy(), a.todense().numpy())


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr"])
def test_blocks_from_every_format_and_to_every_other(kind, rng):
    matrix = random_csr(rng, (8, 12), 0.3)
    blocks = S.tobsr(matrix.tobsr(blocksize=(2, 3)) if kind == "bsr" else matrix.asformat(kind), (2, 2))
    np.testing.assert_array_equal(blocks.todense().numpy(), matrix.toarray())
    np.testing.assert_array_equal(S.to_scipy(blocks).toarray(), matrix.toarray())
    for name in ("csr", "csc", "coo"):
        found = getattr(S, f"to{name}")(blocks).validate()
        assert found.format.name.lower() == name
        np.testing.assert_array_equal(S.to_scipy(found).toarray(), matrix.toarray())
    x = rng.standard_normal(12)
    np.testing.assert_allclose((blocks @ DEV.array(x)).numpy(), matrix @ x)


def test_a_stored_0_is_an_element_and_an_empty_matrix_has_no_blocks():
    a = S.csr(np.zeros(1), np.array([0, 0, 1], "i4"), np.array([3], "i4"), (2, 4))
    assert (S.tobsr(a, (2, 2)).columns.tolist(), S.tocsr(S.tobsr(a, (2, 2))).nnz) == ([1], 4)
    for shape in ((4, 6), (0, 6), (4, 0)):
        empty = S.tobsr(sp.csr_array(shape), (2, 3))
        assert (empty.nnz, S.tocsr(empty).nnz, S.tocsr(empty).shape) == (0, 0, shape)
        assert not empty.todense().numpy().any()


OWN = HostDevice(generation=1 << 24)  # of its own: another file's test may close the host


def refused():
    a = S.sparse_tensor(sp.csr_array(np.arange(12.0).reshape(3, 4)), device=OWN)
    blocks = S.tobsr(a, (3, 2))
    wide = blocks.form._replace(shape=(3, 2**31), block=(3, 2))
    return {
        "blocks that do not divide the rows": (lambda: S.tobsr(a, (2, 2)), r"blocksize: got \(2, 2\); expected rows and columns that divide those of a matrix \[3, 4\]. Hint: pad"),
        "blocks that do not divide the columns": (lambda: dp.csr2bsr_nnz(*a, block=(3, 3)), r"block: got \(3, 3\); expected rows and columns that divide"),
        "blocks larger than the matrix": (lambda: S.tobsr(a, (6, 4)), r"blocksize: got \(6, 4\)"),
        "blocks of nothing": (lambda: S.tobsr(a, (0, 2)), "blocksize: got 0"),
        "one number for a block": (lambda: S.tobsr(a, 2), r"blocksize: got 2; expected rows and columns of a block, such as \(2, 2\)"),
        "half a row": (lambda: S.tobsr(a, (1.5, 2)), "blocksize: got 1.5"),
        "blocks of blocks": (lambda: dp.csr2bsr(*blocks, block=(3, 2), nnzb=2), "form.format: got BSR; expected CSR. Hint: dispatch.sparse.tocsr converts to CSR"),
        "blocks of columns": (lambda: dp.csr2bsr_nnz(*a.T, block=(2, 3)), "form.format: got CSC; expected CSR"),
        "elements of elements": (lambda: dp.bsr2csr(*a), "form.format: got CSR; expected BSR"),
        "fewer than no blocks": (lambda: dp.csr2bsr(*a, block=(3, 2), nnzb=-1), "nnzb: got -1"),
        "more blocks than elements": (lambda: dp.csr2bsr(*a, block=(3, 2), nnzb=12), "nnzb: got 12"),
        "another number": (lambda: S.tobsr(a, (3, 2), nnzb=1), "nnzb: got 1; expected 2, the number that csr2bsr_nnz counts"),
        "columns beyond 31 bits": (lambda: dp.bsr2csr(*blocks.parts[:3], wide), "columns: got i32.*; expected i64, because there are 2147483648 columns"),
        "an index beyond the matrix": (lambda: dp.bsr2csr(blocks.values, blocks.rows, OWN.array(np.array([0, 2], "i4")), blocks.form), "columns: got 1 indices beyond the matrix"),
        "an element beyond the matrix": (lambda: dp.csr2bsr_nnz(a.values, a.rows, OWN.array(np.full(a.nnz, 4, "i4")), a.form, block=(3, 2)), "columns: got 11 indices beyond the matrix"),
        "offsets for results of another dtype": (lambda: dp.bsr2csr(*blocks, out_rows=OWN.zeros((4,), "i64")), r"out_rows: got i64\[4\]; expected i32\[4\]"),
        "a result among what is read": (lambda: dp.bsr2csr(*blocks, out_values=blocks.values.reshape(12)), "out_values: got memory that overlaps values"),
        "a result with gaps": (lambda: dp.csr2bsr(*a, block=(3, 2), nnzb=2, out_values=OWN.zeros((2, 3, 4), "f64")[:, :, ::2]), "needs out_values dense, has"),
    }  # fmt: skip


@pytest.mark.parametrize("what", refused())
def test_a_request_is_refused_by_the_name_of_what_is_wrong(what):
    call, said = refused()[what]
    with pytest.raises((BadRequest, NoRow), match=said):
        call()


def test_elements_beyond_31_bits_need_wide_offsets(monkeypatch):
    from dispatch.ops.sparse import bsr_conversions

    a = S.sparse_tensor(sp.csr_array(np.ones((4, 4))), device=DEV)
    blocks = S.tobsr(a, (2, 2))
    monkeypatch.setattr(bsr_conversions, "MAX_I32", 15)
    with pytest.raises(BadRequest, match=r"rows: got i32\[3\]; expected i64, because there are 16 elements"):
        dp.bsr2csr(*blocks)
    wide = S.bsr(blocks.values, blocks.rows.astype("i64"), blocks.columns, (4, 4))
    _, rows, columns = dp.bsr2csr(*wide)
    assert (rows.dtype.name, columns.dtype.name, rows.tolist()) == ("i64", "i32", [0, 4, 8, 12, 16])
