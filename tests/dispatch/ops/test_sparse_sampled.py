"""The kernel of SDDMM, compiled by g++ and run over the host's memory: its rows' cases, widths, batches, NVRTC."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import C64, C128, F32, F64, HOST, Dtype
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import own_sampled, sampled_kernels
from dispatch.ops.sparse.cases import cases
from dispatch.testing.check import ROUNDOFF


def loaded_beside(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


blocks_on_cpu = loaded_beside(Path(__file__).with_name("blocks_on_cpu.py"))
stand_in = loaded_beside(Path(__file__).parents[1] / "cusparse_stand_in.py")

OPS = ("sddmm", "sddmm_batched")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.min_arch != HOST and row.library == "own"]
# Kernels are compiled for each dtype, width and pair of indices, which takes a second: other dtypes are exhaustive.
QUICK = ("f32", "c128")
DEV = None
LANES = """
template <class E> static E __shfl_sync(unsigned, E x, int from, int width)
{
    static E given[1024];
    given[threadIdx.x] = x;
    __syncthreads();
    const E theirs = given[threadIdx.x / width * width + from];
    __syncthreads();
    return theirs;
}
"""
PARAMETERS = (
    *("const Number* added", "const LINE* owners", "const PLACE* places", "const Number* x", "const Number* y"),
    *("Number* out", "Sum alpha", "Sum beta", "Int count", "Int lines", "Int terms", "Int x_line", "Int y_line"),
    *("Int base", "int pairs", "Int batch", "BatchStrides strides"),
)


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("sampled"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What plans are made for: copies are the stand-in's, and the launches run on the CPU."""
    pytest.importorskip("scipy")
    made = stand_in.executor_of(monkeypatch)
    made.launched, known = [], []

    def loaded(source, name, chosen, _):
        assert (source, name) == (sampled_kernels.SOURCE, sampled_kernels.NAME)
        known.append(chosen)
        return len(known)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        assert tuple(extents) == (1, 1, sampled_kernels.THREADS, 1, 1, 0)
        assert target is made.target
        chosen = known[function.value - 1]
        words = dict(option[2:].split("=") for option in chosen[1:])
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        sum_of = type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})
        by_value = {"Sum": sum_of, "Int": ctypes.c_int64, "int": ctypes.c_int, "BatchStrides": own_sampled.BatchStrides}
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in PARAMETERS]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        made.launched.append((int(words["VECTOR"]), int(words["GROUP"])))
        source = LANES + sampled_kernels.SOURCE
        grid = (blocks, sampled_kernels.THREADS)
        on_cpu.launched(source, sampled_kernels.NAME, chosen, PARAMETERS, grid, given)
        return 0

    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    return made


def result_of(request, executor, turns=1):
    row = next(row for row in ROWS if (row.op, row.dtypes[0]) == (request.op, request.values.dtype))
    assert not any(rule(request) for rule in row.rules)
    plan = own_sampled.plan(request, executor, row)
    for _ in range(turns):
        outputs = DEV.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def compiled_quickly(row):
    return pytest.param(row, id=row.name, marks=() if str(row.dtypes[0]) in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "every", [pytest.param(6, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", [compiled_quickly(row) for row in ROWS])
def test_cases_of_the_rows_on_the_cpu(row, every, executor, rng):
    ran = 0
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            continue
        plan = own_sampled.plan(request, executor, row)
        for _ in range(2):
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            ran += 1
            if request.in_place and not request.repeatable:
                break  # it has overwritten what it reads
    assert ran


def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    return values.astype(dtype.numpy)


def pattern(rng, m, n, count, dtype):
    """A matrix in CSR with so many elements at random, some of them stored twice."""
    row = np.sort(rng.integers(0, m, count))
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=m))]).astype(np.int32)
    columns = rng.integers(0, n, count).astype(np.int32)
    parts = (DEV.array(part) for part in (drawn(rng, dtype, count), ends, columns))
    return row, columns, dp.sparse.csr(*parts, (m, n))


@pytest.mark.parametrize(
    ("dtype", "terms", "step", "wanted"),
    [
        (F32, 64, 1, (4, 8)),
        (F32, 64, 2, (4, 8)),  # every other term: copied, and then as above
        (F32, 300, 1, (4, 32)),
        (F32, 30, 1, (2, 8)),
        (F32, 7, 1, (1, 4)),
        (F64, 64, 1, (2, 16)),
        (C64, 8, 1, (2, 4)),
        (C128, 3, 1, (1, 4)),
        (Dtype.of("f16"), 64, 1, (8, 4)),
        (Dtype.of("bf16"), 20, 1, (4, 4)),
    ],
    ids=str,
)
def test_as_many_terms_as_lie_side_by_side_are_read_at_once(dtype, terms, step, wanted, executor, rng):
    m, n, count = 41, 300, 700  # more than a block has threads, and no multiple of a group
    row, column, c = pattern(rng, m, n, count, dtype)
    a, b = drawn(rng, dtype, m, terms * step), drawn(rng, dtype, n, terms * step)
    request = dp.SddmmRequest(*c, DEV.array(a)[:, ::step], DEV.array(b)[:, ::step].T, alpha=0.5, beta=-2.0)
    exact = "c16" if dtype.is_complex else "f8"
    wide = (a[:, ::step].astype(exact)[row] * b[:, ::step].astype(exact)[column]).sum(axis=1)
    expected = 0.5 * wide - 2 * c.values.numpy().astype(exact)
    found = result_of(request, executor).numpy().astype(exact)
    unit = ROUNDOFF[dtype][0] + terms * ROUNDOFF[F64 if dtype in (F64, C128) else F32][0]
    assert np.abs(found - expected).max() <= 8 * unit * np.abs(expected).max()
    assert executor.launched == [wanted]


def test_sums_without_terms_are_what_is_added(executor, rng):
    _, _, c = pattern(rng, 9, 12, 30, F32)
    before = c.values.numpy()
    given = DEV.zeros((9, 0), "f32"), DEV.zeros((0, 12), "f32")
    np.testing.assert_array_equal(result_of(dp.SddmmRequest(*c, *given, beta=3.0), executor).numpy(), 3 * before)
    np.testing.assert_array_equal(result_of(dp.SddmmRequest(*c, *given), executor).numpy(), 0 * before)


def test_elements_amid_lines_without_any_are_found(executor, rng):
    ends = np.zeros(2000, np.int64)
    ends[700:] += 1
    ends[1500:] += 300
    columns = rng.integers(0, 50, 301)
    c = dp.sparse.csr(*(DEV.array(x) for x in (np.ones(301), ends, columns)), (1999, 50))
    a, b = rng.standard_normal((1999, 5)), rng.standard_normal((5, 50))
    row = np.repeat([699, 1499], [1, 300])
    found = result_of(dp.SddmmRequest(*c, DEV.array(a), DEV.array(b)), executor, turns=2)
    np.testing.assert_allclose(found.numpy(), (a[row] * b.T[columns]).sum(axis=1), atol=1e-14)


@pytest.mark.parametrize(
    ("extents", "apart", "wanted"),
    [
        ((5, 64, 7), None, (4, 8)),
        ((5, 64, 7), "a for all", (4, 8)),
        ((5, 64, 7), "b for all", (4, 8)),
        ((5, 64, 7), "every other term", (4, 8)),  # of both, which are copied, each matrix behind the one before
        ((5, 64, 7), "a word between matrices", (1, 32)),
    ],
    ids=str,
)
def test_a_batch_is_one_launch_whatever_is_for_all(extents, apart, wanted, executor, rng):
    (m, terms, n), batch, count = extents, 70, 11  # so few elements of each that a block has those of many
    places = np.array([np.sort(rng.permutation(m * n)[:count]) for _ in range(batch)])
    row, column = places // n, places % n
    a, b = drawn(rng, F32, batch, m, 2 * terms), drawn(rng, F32, batch, n, 2 * terms)
    if apart == "a word between matrices":
        a, b = (np.pad(one[:, :, :terms].reshape(batch, -1), ((0, 0), (0, 1))) for one in (a, b))
        left, right = (DEV.array(one)[:, :-1] for one in (a, b))
        left, right = (one.reshape(batch, -1, terms) for one in (left, right))
    else:
        kept = slice(None, None, 2) if apart == "every other term" else slice(terms)
        left, right = (DEV.array(one)[:, :, kept] for one in (a, b))
        if apart != "every other term":
            left, right = left.copy(), right.copy()
    left, right = left[3] if apart == "a for all" else left, right[3] if apart == "b for all" else right
    before = drawn(rng, F32, batch, count)
    form = dp.SparseForm("coo", (m, n))
    parts = (DEV.array(one) for one in (before, row.astype("i4"), column.astype("i8")))
    request = dp.BatchedSddmmRequest(*parts, form, left, right.mT, alpha=0.5, beta=-2.0)
    lines, across = (np.broadcast_to(np.asarray(one, "f8"), (batch, *one.shape[-2:])) for one in (left, right))
    wide = np.einsum(
        "bik,bik->bi", *(np.take_along_axis(x, at[:, :, None], 1) for x, at in ((lines, row), (across, column)))
    )
    found = result_of(request, executor, turns=2).numpy()
    assert np.abs(found - (0.5 * wide - 2 * before)).max() < 1e-4
    assert executor.launched == [wanted] * 2


def test_a_pattern_for_all_has_elements_for_each_or_for_all(executor, rng):
    _, _, c = pattern(rng, 9, 12, 30, F32)
    a, b = (DEV.array(drawn(rng, F32, 4, *shape)) for shape in ((9, 6), (6, 12)))
    each = DEV.array(drawn(rng, F32, 4, 30))
    for values in (c.values, each):
        given = dp.BatchedSddmmRequest(values, *c.parts[1:], a, b, beta=2.0)
        found = result_of(given, executor).numpy()
        for number in range(4):
            own = c.with_values(each[number]) if values is each else c
            one = dp.SddmmRequest(*own, a[number], b[number], beta=2.0)
            np.testing.assert_array_equal(found[number], result_of(one, executor).numpy())


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_it(dtype, batched):
    chosen = sampled_kernels.options(Dtype.of(dtype), 4, 8, 1, 8, batched=batched)
    kernel = Kernel(sampled_kernels.SOURCE, sampled_kernels.NAME, lambda _: None, chosen)
    assert blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0
