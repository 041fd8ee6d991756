"""The kernels for small matrices: compiled for the CPU and run through their rows' cases; mutants; the rows."""

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from dispatch.errors import NoRow
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.nvrtc import kernel as launching
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.libraries.nvrtc.launching import Strides
from dispatch.libraries.nvrtc.small_kernels import SOURCES, WIDTHS, Variant
from dispatch.ops.linalg import own_small
from dispatch.ops.linalg.cases import cases
from dispatch.table.own_linalg import GPU_ROWS, HOST_ROWS
from dispatch.table.select import candidates, select
from dispatch.testing.memory import Mismatch

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

H100 = Arch(90)
DTYPES = (F32, F64, C64, C128)
rows = pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("small"))


KINDS = {"Strides": Strides, "int": ctypes.c_int, "Int": ctypes.c_int64}


class Launches:
    """What stands for the driver: kernels that are launched run on the CPU, with what they are handed."""

    def __init__(self, on_cpu):
        self.on_cpu, self.kernels, self.launched, self.shared = on_cpu, [], [], {}
        self.cuLaunchKernel = SimpleNamespace(unchecked=self.launch)
        self.change = lambda source: source

    def load(self, source, function, options, _):
        self.kernels.append((source, function, options))
        return len(self.kernels)

    def cuFuncSetAttribute(self, function, _, value):
        self.shared[function] = value

    def launch(self, function, *rest):
        blocks, _, _, threads, _, _, shared, _, pointers, _ = rest
        source, name, options = self.kernels[function.value - 1]
        assert shared <= self.shared.get(function.value, 48 << 10)
        source = self.change(source)
        declared = re.search(rf"\n{name}\((.*?)\)\n", source, re.DOTALL)[1].replace("\n", " ").split(",")
        parameters = tuple(" ".join(one.split()) for one in declared)
        kinds = [KINDS.get(one.split()[0], ctypes.c_void_p) for one in parameters]
        kinds = [ctypes.c_void_p if "*" in one else kind for one, kind in zip(parameters, kinds, strict=True)]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        self.on_cpu.launched(source, name, options, parameters, (blocks, threads), given)
        self.launched.append((name, blocks, threads))
        return 0


@pytest.fixture
def driver(on_cpu, monkeypatch):
    made = Launches(on_cpu)
    made.CUfunction_attribute = launching.driver.CUfunction_attribute
    monkeypatch.setattr(launching, "driver", made)
    monkeypatch.setattr(launching, "loaded", made.load)
    return made


@pytest.fixture
def executor(driver):
    return SimpleNamespace(device=None, target=ctypes.c_void_p(), stream=None, driver=driver)


def run(request, executor, row=GPU_ROWS[0]):
    """What the kernel gives for a request over the host's memory."""
    outputs = request.device.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    return request.result(outputs)


# -- rows -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "every",
    [pytest.param(32, id="sample"), pytest.param(len(DTYPES), id="in one dtype each", marks=pytest.mark.exhaustive)],
)
@rows
def test_a_plan_run_on_the_cpu_passes_the_cases_in_one_launch_each(row, every, dev, executor, each):
    """A GPU runs all of them in all dtypes; a kernel is the same template for each."""

    def verify(case, rng):
        check = case.check(dev, rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            return
        plan, before = row.call(request, executor, row), len(executor.driver.launched)
        for _ in range(2):
            outputs = dev.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            check.renew(request.result(outputs))
        assert len(executor.driver.launched) == before + 2 * (0 not in request.batch)

    each(cases(row)[GPU_ROWS.index(row) % every :: every], verify)


def requests_of(a):
    """One of each op, for square matrices."""
    pivots = dp.device("host").zeros(a.shape[:-1], "i64")
    return (
        *(dp.CholeskyRequest(a), dp.ChoSolveRequest(a, a), dp.LuFactorRequest(a), dp.LuSolveRequest(a, pivots, a)),
        *(dp.SolveRequest(a, a), dp.SolveRequest(a, a, assume_a="pos"), dp.InvRequest(a)),
    )


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (64, 64), (10, 32, 32), (2, 64, 64), (0, 0), (0, 4, 4)], ids=str)
def test_small_matrices_are_this_library_s_and_others_can_be_asked_for(shape, dev):
    for request in requests_of(dev.zeros(shape)):
        assert select(request, H100) in GPU_ROWS
        assert select(request, HOST) in HOST_ROWS
        assert select(request.replace(library="own"), H100) in GPU_ROWS
        other = "cublas" if request.op == "lu_solve" else "cusolverDn"  # whose systems are cuBLAS's in any case
        assert select(request.replace(library=other), H100).library == other
        libraries = [row.library for row in candidates(request, H100)]
        assert libraries[0] == "own"
        assert len(libraries) > 1


def test_what_the_kernels_do_not_take_is_refused_in_plain_words(dev):
    large, small, oblong = dev.zeros((65, 65)), dev.zeros((8, 8)), dev.zeros((4, 5))
    refused = {
        "needs matrices of at most 64 rows, has 65": requests_of(large),
        "needs at most 64 right-hand sides, has 65": (dp.SolveRequest(small, dev.zeros((8, 65))),),
        "needs square matrices, has 4 x 5": (dp.LuFactorRequest(oblong),),
        "needs assume_a=GEN or POS, has SYM": (dp.SolveRequest(small, small, assume_a="sym"),),
        "needs assume_a=GEN, has LOWER": (dp.InvRequest(small, assume_a="lower"),),
    }
    for text, requests in refused.items():
        for request in requests:
            assert select(request, H100).library != "own"
            with pytest.raises(NoRow, match=text):
                select(request.replace(library="own"), H100)


# -- at the edge ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [3, 32, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_and_pivots_are_lapack_s_with_ties_zeros_and_other_signs(n, dtype, dev, executor, rng):
    """Of whole numbers, so that elements are equal and zeros exact."""
    from scipy.linalg import lapack

    a = rng.integers(-2, 3, (4, n, n)).astype(dtype.numpy)
    a[1, :, n // 2] = 0
    a[2] = 0
    a[3] = np.eye(n)[::-1]
    row = next(row for row in GPU_ROWS if row.op == "lu_factor" and row.dtypes[0] is dtype)
    out, pivots, info = (one.numpy() for one in run(dp.LuFactorRequest(dev.array(a)), executor, row))
    getrf = lapack.get_lapack_funcs("getrf", dtype=dtype.numpy)
    for number in (0, 2, 3):
        expected, order, status = getrf(a[number])
        if n == 3 or number > 0:  # before roundoff decides
            assert pivots[number].tolist() == (order + 1).tolist()
        np.testing.assert_allclose(out[number], expected, atol=1e-3) if n == 3 or number > 0 else None
        assert info[number] == status
    assert info[1] == n // 2 + 1


@pytest.mark.parametrize("n", [4, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_the_results_and_in_its_own_matrix(n, dtype, dev, executor, rng):
    a = rng.standard_normal((3, n, n)).astype(dtype.numpy)
    a = a @ a.conj().mT + n * np.eye(n, dtype=dtype.numpy)
    a[1, n - 1, 1] = np.nan
    given, b = dev.array(a), dev.array(np.ones((3, n, 1), dtype.numpy))
    requests = (
        dp.CholeskyRequest(given),
        dp.LuFactorRequest(given),
        dp.SolveRequest(given, b),
        dp.SolveRequest(given, b, assume_a="pos", lower=True),
        dp.InvRequest(given),
    )
    for request in requests:
        row = next(row for row in GPU_ROWS if row.op == request.op and row.dtypes[0] is dtype)
        found = run(request, executor, row)[0].numpy()
        assert np.isnan(found[1]).any()
        assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e30, 1e38])
@pytest.mark.parametrize("dtype", [F32, C64], ids=str)
def test_large_and_small_numbers_are_solved_with(scale, dtype, dev, executor):
    a = np.array([[0.5, 1, 0], [2, 1, 0], [1, 0, 0.5]], dtype.numpy) * dtype.numpy.type(scale)
    if dtype.is_complex:
        a = a * dtype.numpy.type(0.6 + 0.8j)
    b = a @ np.array([0.25, 0.5, 0.125], dtype.numpy)
    row = next(row for row in GPU_ROWS if row.op == "solve" and row.dtypes[0] is dtype)
    x, info = run(dp.SolveRequest(dev.array(a), dev.array(b)), executor, row)
    assert info.numpy() == 0
    np.testing.assert_allclose(x.numpy(), [0.25, 0.5, 0.125], rtol=2e-2 if scale < 1e-40 else 1e-5)


# -- kernels ----------------------------------------------------------------------------------------------------------
@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", SOURCES)
def test_every_kernel_compiles(function, dtype, arch):
    """Optimized as it is when it runs for one architecture, which is three quarters of the time that NVRTC takes."""
    try:
        quick = ("--Ofast-compile=max",) if arch != "sm_90" and nvrtc.nvrtcVersion() >= (13, 0) else ()
    except LibraryNotFound as error:
        pytest.skip(str(error))
    for width in WIDTHS:
        variant = Variant(function, dtype, width)
        code = compiled(variant.source, function, (f"-arch={arch}", *variant.options, *quick))
        assert len(code) > 1000


# Each is a slip that compiles; a case of some size finds it.
MUTANTS = {
    "cholesky": {
        "the root of another column": ("square = line[k]", "square = line[first]"),
        "no conjugate": ("factor, conjugate(pack.at[e])", "factor, pack.at[e]"),
        "a status too low": ("status = k + 1", "status = k"),
        "the next columns do not move up": ("a[j] = a[j + STEP]", "a[j] = a[j]"),
        "a column too few": ("if (j + e > s) subtract", "if (j + e > s + 1) subtract"),
        "what is above the diagonal stays": ("lane < first + s ? number(0)", "lane < 0 ? number(0)"),
        "all matrices are the first": ("a + number * from.batch", "a"),
    },
    "lu_factor": {
        "always the first pivot": ("high == top && low == rest ? (unsigned)place", "true ? (unsigned)place"),
        "pivots from 0": ("pivot = chosen + 1", "pivot = chosen"),
        "rows where they were": ("room.tile[room.where[row]][col]", "room.tile[row][col]"),
        "a row too many": ("} else if (place > k) {", "} else {"),
        "rows and columns": ("row = by_rows ? other : lane, col", "row = by_rows ? lane : other, col"),
    },
    "solve": {
        "no exchange of the right sides": ("give(x, out, to, place", "give(x, out, to, lane"),
        "L alone": ("substitute<true, false, false>(room, x, lane, place, n, false);", ""),
        "U's diagonal is 1": ("substitute<true, false, false>(room", "substitute<true, true, false>(room"),
        "the first columns alone": ("first < columns; first += COLUMNS", "first < COLUMNS; first += COLUMNS"),
        "a singular matrix has a solution": ("columns, status != 0)", "columns, false)"),
    },
    "inv": {"the identity is not b": ("number(!b && row == first + c)", "number(!b && row == c)")},
    "cho_solve": {
        "no adjoint": (
            "substitute<true, false, true>(room, x, lane, lane, n, true)",
            "substitute<true, false, true>(room, x, lane, lane, n, false)",
        ),
        "the other triangle": ("room.tile[k][place] : room.tile[row][k]", "room.tile[row][k] : room.tile[row][k]"),
        "the triangle as it lies": ("conjugated ? conjugate(held[s]) : held[s]", "held[s]"),
    },
    "lu_solve": {
        "rows of b where they are": ("trans ? place : lane, n", "place, n"),
        "rows of x where they are": ("trans ? lane : place, n", "place, n"),
        "the transposed for the adjoint": ("trans == 2", "false"),
    },
}
SLIPS = [(op, name) for op, slips in MUTANTS.items() for name in slips]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("op", "name"), SLIPS)
def test_a_mutant_is_found(op, name, dev, executor, rng):
    before, after = MUTANTS[op][name]
    executor.driver.change = lambda source: source.replace(before, after)
    row = next(row for row in GPU_ROWS if row.op == op and row.dtypes[0] is C128)
    checks = [case.check(dev, rng) for case in cases(row)]
    checks = [one for one in checks if not any(rule(one.request) for rule in row.rules) and one.request.matrices.size]
    checks = [one for one in checks if before in own_small.kernel_of(one.request).source]
    checks.sort(
        key=lambda one: own_small.kernel_of(one.request).options
    )  # each kernel is compiled once, for all of its

    def rejects(check):
        try:
            check.verify(run(check.request, executor, row))
        except Mismatch:
            return True
        return False

    assert any(map(rejects, checks)), "no case finds it"
