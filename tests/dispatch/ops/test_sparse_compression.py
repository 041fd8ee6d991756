"""The kernels that make a dense matrix sparse, compiled by g++ and run over the host's memory, against NumPy."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST, Dtype
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import compression_kernels, own_compression
from dispatch.ops.sparse.cases import cases

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

ROWS = [row for op in ("dense_nnz", "dense_to_sparse") for row in dp.TABLE.of(op) if row.min_arch != HOST]
DEV = None
LANES = """
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
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
NUMBERS = ("Int lines", "Int across", "Int line_step", "Int step", "Int segments")
PARAMETERS = {
    "count_elements": ("const Element* at", "Int* counts", *NUMBERS),
    "scan_counts": ("Int* counts", "Int* sums", "Int count", "Int chunk"),
    "fill_elements": (
        *("const Element* at", "const Int* counts", "const Int* sums", "const Int* total", "Element* held"),
        *("INDEX* minor", "INDEX* major", "INDEX* ends", *NUMBERS),
    ),
}


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("compression"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What plans are made for: launches run on the CPU, copies are `memmove`, and workspace holds NaN."""
    stream = SimpleNamespace(done=lambda: None)
    synced = []

    def launch(function, blocks, *rest):
        *extents, target, taken, _ = rest
        assert tuple(extents) == (1, 1, compression_kernels.THREADS, 1, 1, 0)
        assert target is stream
        name, chosen = NAMES[function.value]
        kinds = [ctypes.c_void_p if "*" in one else ctypes.c_int64 for one in PARAMETERS[name]]
        assert len(taken) == len(kinds)
        given = [kind.from_address(at) for kind, at in zip(kinds, taken, strict=True)]
        grid = (blocks, compression_kernels.THREADS)
        on_cpu.launched(f"{LANES}{compression_kernels.SOURCE}// {name}\n", name, chosen, PARAMETERS[name], grid, given)
        return 0

    NAMES = {}

    def loaded(source, name, chosen, _):
        assert source == compression_kernels.SOURCE
        NAMES[len(NAMES) + 1] = name, chosen
        return len(NAMES)

    def allocate(nbytes, owner):
        array = np.full(nbytes, 0xFF, np.uint8)
        return SimpleNamespace(array=array, base=array.ctypes.data, owner=owner, writer=owner)

    stream.value = 5
    driver = SimpleNamespace(
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
        cuMemcpyDtoHAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda at, value, nbytes, _: ctypes.memset(at, value, nbytes),
        cuStreamSynchronize=synced.append,
    )
    monkeypatch.setattr(own_compression, "driver", driver)
    monkeypatch.setattr(own_compression, "loaded", loaded)
    device = SimpleNamespace(allocate=allocate)
    return SimpleNamespace(device=device, stream=stream, target=stream, synced=synced)


def run(request, executor):
    row = next(row for row in ROWS if (row.op, row.dtypes[0]) == (request.op, request.a.dtype))
    plan = own_compression.plan(request, executor, row)
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


# Kernels are compiled for each dtype, which takes a second: of the others all cases are exhaustive.
QUICK, DTYPES = ("f16", "f32", "c128"), ("f16", "bf16", "f32", "f64", "c64", "c128")


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "every", [pytest.param(6, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_some_or_all_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        request = check.request
        plan = own_compression.plan(request, executor, row)
        for _ in range(2):
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
        assert plan.capture_safe is (row.op == "dense_nnz" and request.a.size > 0)


SHAPES = {
    "lines and tiles that are not full": (70, 45),
    "one line of three segments": (1, 2500),
    "lines of one element": (2500, 1),
    "several segments of several lines": (37, 1100),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_large_matrices_come_sorted_in_every_format_and_order(shape, executor, rng):
    values = rng.standard_normal(shape).astype("f4") * (rng.random(shape) < 0.3)
    rows, _ = np.nonzero(values)
    for a in (DEV.array(values), DEV.array(np.ascontiguousarray(values.T)).T):
        assert run(dp.DenseNnzRequest(a), executor).tolist() == [len(rows)]
        assert not executor.synced, "a count is waited for by nobody"
        for kind in ("csr", "csc", "coo"):
            found = run(dp.DenseToSparseRequest(a, nnz=len(rows), format=kind, index_dtype="i64"), executor)
            executor.synced.clear()
            expected = dp.dense_to_sparse(DEV.array(values), nnz=len(rows), format=kind, index_dtype="i64")
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_counts_of_several_chunks_are_scanned(executor, monkeypatch, rng):
    for module in (compression_kernels, own_compression):
        monkeypatch.setattr(module, "CHUNK", 16)
    values = rng.standard_normal((200, 3)) * (rng.random((200, 3)) < 0.5)
    count = np.count_nonzero(values)
    assert own_compression.Compression(dp.DenseNnzRequest(DEV.array(values))).chunks == 13
    found = run(dp.DenseToSparseRequest(DEV.array(values), nnz=count), executor)
    for one, other in zip(found, dp.dense_to_sparse(DEV.array(values), nnz=count), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=() if one in QUICK else pytest.mark.exhaustive) for one in DTYPES]
)
def test_nan_and_the_least_numbers_are_elements_and_both_zeros_are_none(dtype, executor):
    tiny = {"f16": 6e-8, "bf16": 1e-40, "f32": 1e-45, "f64": 5e-324, "c64": 1e-45j, "c128": 5e-324j}[dtype]
    values = np.array([[0.0, -0.0, np.nan], [tiny, np.inf, 0.0]])
    values[0, 1] = -0.0 if values.dtype.kind != "c" else complex(-0.0, -0.0)
    a = DEV.array(values, dtype)
    count = run(dp.DenseNnzRequest(a), executor).item()
    assert count == 3
    _, ends, columns = run(dp.DenseToSparseRequest(a, nnz=3), executor)
    assert (ends.tolist(), columns.tolist()) == ([0, 1, 3], [2, 0, 1])
    assert dp.dense_nnz(a).item() == 3, "as on the host"


@pytest.mark.parametrize("nnz", [0, 3, 5, 12])
@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_another_number_of_elements_is_refused_and_nothing_is_written(nnz, kind, executor):
    a = DEV.array(np.diag([1.0, 2.0, 3.0, 4.0]))
    request = dp.DenseToSparseRequest(a, nnz=nnz, format=kind)
    compression = {name: DEV.array(np.full(out.shape, 7), out.dtype) for name, out in request.outputs().items()}
    with pytest.raises(BadRequest, match=f"nnz: got {nnz}; expected 4, the number that dense_nnz counts"):
        run(request.replace(**compression), executor)
    assert all((tensor.numpy() == 7).all() for tensor in compression.values())
    with pytest.raises(BadRequest, match="nnz: got 1; expected a whole number from 0 to 0"):
        dp.DenseToSparseRequest(DEV.zeros((0, 3), "f64"), nnz=1)


def test_an_empty_matrix_has_no_elements(executor):
    for kind in ("csr", "csc", "coo"):
        values, *indices = run(dp.DenseToSparseRequest(DEV.zeros((4, 5), "f64"), nnz=0, format=kind), executor)
        assert values.size == 0
        assert all((one.numpy() == 0).all() for one in indices)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["f16", "f32", "c64", "c128"])
def test_nvrtc_compiles_them(dtype):
    chosen = compression_kernels.options(Dtype.of(dtype), 4)
    for name in PARAMETERS:
        kernel = Kernel(compression_kernels.SOURCE, name, lambda _: None, chosen)
        assert blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0
