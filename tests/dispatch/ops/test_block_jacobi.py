"""The inverses of blocks by their plan, whose kernel the CPU runs, and by the host; what is refused or told, how."""

import ctypes
import importlib.util
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.nvrtc import kernel as nvrtc_kernel
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.sparse import own_block_jacobi
from dispatch.ops.sparse.block_jacobi_kernels import NAME
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.own_block_jacobi import BlockParameters, kernel_of
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

ROWS = [row for row in dp.TABLE.of("block_jacobi") if row.min_arch != HOST]
DEV = None
S = dp.sparse
FUNCTION = 0x70
PARAMETERS = (
    *("const Element* given", "const ROW* rows", "const COLUMN* columns", "Element* out", "int* info"),
    "Blocks s",
)
ATOMIC = """
static int atomicCAS(int* at, int expected, int next)
{
    const int old = *at;
    if (old == expected) *at = next;
    return old;
}
"""


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


class OnCpu(blocks_on_cpu.InBlocks):
    """Runs the plan of a request, whose kernel is compiled by g++."""

    def invert(self, request):
        """The results of the plan; what it is to write holds another status before."""
        kernel, row = kernel_of(request), select(request, Arch(90))

        def launched(function, *given):
            *extents, shared, _, pointers, extra = given
            assert (function.value, extents[1:3], extents[4:], shared, extra) == (FUNCTION, [1, 1], [1, 1], 0, None)
            addresses = [ctypes.c_void_p.from_address(pointers[place]) for place in range(5)]
            taken = [*addresses, BlockParameters.from_address(pointers[5])]
            chosen = ATOMIC + kernel.source, kernel.function, kernel.options, PARAMETERS
            self.launched(*chosen, (extents[0], extents[3]), taken)
            return 0

        def cleared(address, value, count, _):
            ctypes.memset(address, value, count)

        driver = SimpleNamespace(cuMemsetD8Async=cleared, cuLaunchKernel=SimpleNamespace(unchecked=launched))
        outputs = DEV.executor().outputs(request)
        outputs.get("info", request.info).copy_from(np.int32(-9))
        with (
            mock.patch.object(own_block_jacobi, "driver", driver),
            mock.patch.object(own_block_jacobi, "loaded", return_value=FUNCTION),
            mock.patch.object(nvrtc_kernel, "driver", driver),
        ):
            plan = row.call(request, SimpleNamespace(device=None, target=ctypes.c_void_p(0)), row)
            assert plan.capture_safe
            plan.enqueue(request.arguments(outputs))
        return request.result(outputs)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return OnCpu(tmp_path_factory.mktemp("blocks"))


# -- the inverses -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_kernel_inverts_every_case_of_a_row(row, on_cpu, rng):
    found = cases(row)
    for case in found if row.dtypes[0].name in ("f64", "c128") else found[::3]:
        check = case.check(DEV, rng)
        assert not any(rule(check.request) for rule in row.rules), check.request.describe()
        check.verify(on_cpu.invert(check.request))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("size", range(1, 33))
def test_blocks_of_every_size(size, absolute, on_cpu, rng):
    n = 2 * size + max(1, size // 2)
    dense = rng.standard_normal((n, n))
    dense = dense + dense.T if absolute else dense
    request = dp.BlockJacobiRequest(*S.sparse_tensor(sp.csr_array(dense)), block_size=size, absolute=absolute)
    for out, info in (on_cpu.invert(request), dp.run(request)):
        assert info.item() == 0
        for number, found in enumerate(out.numpy()):
            part = dense[number * size : (number + 1) * size, number * size : (number + 1) * size]
            extent = len(part)
            if absolute:
                values, vectors = np.linalg.eigh(part)
                part = (vectors * np.abs(values)) @ vectors.T
            condition = np.linalg.cond(part)
            np.testing.assert_allclose(found[:extent, :extent] @ part, np.eye(extent), atol=1e-14 * condition * extent)
            assert not found[extent:].any()
            assert not found[:, extent:].any()
            if absolute:
                np.testing.assert_array_equal(found, found.T)
                assert np.linalg.eigvalsh(found[:extent, :extent]).min() > 0


def both(on_cpu, dense, size, dtype="f64", **choices):
    """What the kernel and the host give for a dense matrix."""
    matrix = S.sparse_tensor(sp.csr_array(np.asarray(dense, dp.keys.Dtype.of(dtype).numpy)))
    request = dp.BlockJacobiRequest(*matrix, block_size=size, **choices)
    return [(out.numpy(), info.item()) for out, info in (on_cpu.invert(request), dp.run(request))]


def test_a_block_without_an_inverse_is_told_and_nan_and_the_others_are_right(on_cpu, rng):
    good = rng.standard_normal((4, 4)) + 4 * np.eye(4)
    for bad in (
        np.zeros((4, 4)),
        np.ones((4, 4)),
        np.outer([1.0, 2, 3, 4], [4.0, 3, 2, 1]) / 3,  # of rank 1, with roundoff
        np.diag([1.0, 1, 0, 1]),
        np.where(np.eye(4), np.inf, 1.0),
        np.where(np.eye(4), np.nan, 1.0),
        good @ np.diag([1, 1, 1, 0.0]),
        np.arange(16.0).reshape(4, 4) / 7,  # of rank 2
    ):
        dense = sp.block_diag([good, bad, good, bad, good[:3, :3]]).toarray()
        for out, info in both(on_cpu, dense, 4):
            assert info == 2, "the first of them"
            assert np.isnan(out[[1, 3]]).all()
            np.testing.assert_allclose(out[[0, 2]], np.linalg.inv([good, good]))
            np.testing.assert_allclose(out[4, :3, :3], np.linalg.inv(good[:3, :3]))


@pytest.mark.parametrize("size", [2, 5, 17, 32])
@pytest.mark.parametrize("absolute", [False, True])
def test_random_blocks_that_lack_one_rank_are_all_seen_and_those_of_a_bad_condition_are_not(
    size, absolute, on_cpu, rng
):
    count = 12
    left, right = (np.linalg.qr(rng.standard_normal((count, size, size)))[0] for _ in range(2))
    right = left if absolute else right
    for least, is_singular in ((0.0, True), (1e-10, False)):
        values = np.r_[rng.uniform(0.5, 2, size - 1), least]
        blocks = (left * values) @ right.transpose(0, 2, 1)
        for out, info in both(on_cpu, sp.block_diag(list(blocks)).toarray(), size, absolute=absolute):
            assert (info == 1) == is_singular
            assert np.isnan(out).any(axis=(1, 2)).tolist() == [is_singular] * count


def test_units_of_rows_and_columns_make_no_block_singular(on_cpu):
    """A penalty of 1e30 on a row stands for a boundary condition; a block of 1e-200 is as regular as one of 1."""
    penalty = np.array([[1e30, 1.0], [1.0, 2.0]])
    small = np.array([[2e-200, 1e-200], [1e-200, 3e-200]])
    crossed = np.array([[1e-150, 1e80], [2e80, 1e100]])
    for block in (penalty, small, crossed, np.array([[0.0, 1e-30], [1e30, 0.0]])):
        for out, info in both(on_cpu, block, 2):
            assert info == 0
            a, b, c, d = map(Fraction, block.ravel())
            exact = [[float(part / (a * d - b * c)) for part in line] for line in ((d, -b), (-c, a))]
            np.testing.assert_allclose(out[0], exact)


def test_an_inverse_that_the_dtype_cannot_hold_is_none(on_cpu):
    for out, info in both(on_cpu, np.diag([1.0, 1e-39]), 1, "f32"):
        assert info == 2
        assert out[0] == 1
        assert np.isnan(out[1])


def test_elements_that_are_stored_twice_count_twice_and_order_does_not_count(on_cpu):
    values, columns, rows = [1.0, 2, 0.5, 3, 1], [1, 0, 0, 1, 0], [0, 3, 5]
    dense = np.array([[2.5, 1.0], [1.0, 3.0]])
    parts = DEV.array(values), DEV.array(rows, "i32"), DEV.array(columns, "i32")
    for matrix in (S.csr(*parts, (2, 2)), S.csc(parts[0], parts[2], parts[1], (2, 2))):
        request = dp.BlockJacobiRequest(*matrix, block_size=2)
        for out, info in (on_cpu.invert(request), dp.run(request)):
            assert info.item() == 0
            np.testing.assert_allclose(out.numpy()[0], np.linalg.inv(dense))


def test_bad_requests_are_refused_by_name():
    a = S.sparse_tensor(sp.eye_array(9, format="csr"))
    for given, words in (
        ({"block_size": 0}, "block_size"),
        ({"block_size": 33}, "block_size: got 33; expected .*32"),
        ({"block_size": 2.5}, "block_size"),
        ({"block_size": 2, "absolute": 1}, "absolute"),
        ({"block_size": 4, "out": DEV.zeros((2, 4, 4), "f64")}, r"out: .*f64\[3, 4, 4\]"),
        ({"block_size": 4, "info": DEV.zeros((1,), "i32")}, "info"),
    ):
        with pytest.raises(BadRequest, match=words):
            dp.block_jacobi(*a, **given)
    with pytest.raises(BadRequest, match=r"form\.shape: got \(9, 8\); expected a square matrix"):
        dp.block_jacobi(*S.sparse_tensor(sp.eye_array(9, 8, format="csr")), block_size=2)
    whole = S.sparse_tensor(sp.eye_array(4, format="csr", dtype="c16"))
    with pytest.raises(BadRequest, match="absolute: got True; expected False for c128"):
        dp.block_jacobi(*whole, block_size=2, absolute=True)
    half = S.sparse_tensor(sp.eye_array(4, format="csr"))
    parts = half.values.astype("f16"), *half.parts[1:]
    with pytest.raises(NoRow, match="f16"):
        dp.block_jacobi(*parts, block_size=2)


def test_what_the_kernel_takes_is_as_large_as_its_structure(on_cpu):
    request = dp.BlockJacobiRequest(*S.sparse_tensor(sp.eye_array(9, format="csr")), block_size=2)
    kernel = kernel_of(request)
    parameters = "unsigned long long* at"
    source = (
        ATOMIC + kernel.source + '\nextern "C" __global__ void tell(unsigned long long* at) { *at = sizeof(Blocks); }'
    )
    size = ctypes.c_uint64()
    on_cpu.launched(source, "tell", kernel.options, (parameters,), (1, 1), [ctypes.c_void_p(ctypes.addressof(size))])
    assert size.value == ctypes.sizeof(BlockParameters)


@pytest.mark.compiles
@pytest.mark.parametrize("size", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_nvrtc_compiles_the_kernel_for_sm_90(dtype, size):
    a = sp.eye_array(40, format="csr", dtype=dp.keys.Dtype.of(dtype).numpy)
    for matrix in (a, a.tocsc(), a.tocoo(), a.tobsr((2, 4))):
        for absolute in {False, dtype == "f32"}:
            request = dp.BlockJacobiRequest(*S.sparse_tensor(matrix), block_size=size, absolute=absolute)
            kernel = kernel_of(request)
            assert len(compiled(kernel.source, NAME, ("-arch=sm_90", *kernel.options))) > 1000


def test_inverses_of_other_elements_take_the_place_of_those_before():
    a = sp.csr_array(np.array([[2.0, 1, 0, 0], [1, 2, 0, 0], [0, 0, 4, 1], [0, 0, 1, 4]]))
    blocks = S.block_jacobi(a, 2)
    before = blocks.inverses.numpy().copy()
    assert blocks.refactorize(DEV.array(2 * a.data)) is blocks
    np.testing.assert_allclose(blocks.inverses.numpy(), before / 2)
    with pytest.raises(LinAlgError, match="block_jacobi: block 1, from row 2 on, has no inverse"):
        blocks.refactorize(DEV.array(np.r_[a.data[:4], np.zeros(4)]))
    for wrong in (np.ones(7), np.ones(8, "f4")):
        with pytest.raises(BadRequest, match=r"values: got .*expected f64\[8\]"):
            blocks.refactorize(DEV.array(wrong))
    np.testing.assert_allclose(blocks.inverses.numpy(), before / 2, err_msg="those of before stay")
    unchecked = S.block_jacobi(sp.csr_array(np.diag([1.0, 0, 2])), 1, check=False)
    assert np.isnan(unchecked.inverses.numpy()).ravel().tolist() == [False, True, False]
