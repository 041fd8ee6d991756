"""Which products of a sparse matrix and a vector are this library's kernel's, what is said of them, and its tiles."""

import importlib.util
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import HOST, Arch, Dtype
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import own_product, product_kernels, rules
from dispatch.ops.sparse.product_kernels import Tile
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("products_on_cpu", Path(__file__).with_name("products_on_cpu.py"))
on_cpu_of = importlib.util.module_from_spec(spec)
spec.loader.exec_module(on_cpu_of)

H200 = Arch(90)
SMALL = Tile(threads=64, items=3, max_row=32, load="__ldg")
DEV = None
N, T, C = dp.Operation


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


def requests(**more):
    parts = [DEV.array(np.ones(2)), DEV.array(np.array([0, 1, 2], "i4")), DEV.array(np.array([0, 1], "i4"))]
    csr, csc = (dp.SparseForm(kind, (2, 2)) for kind in ("csr", "csc"))
    coo = (parts[0], parts[2], parts[2], dp.SparseForm("coo", (2, 2)))
    x = DEV.array(np.ones(2))
    of = {"csr": (*parts, csr), "csc": (parts[0], parts[2], parts[1], csc), "coo": coo}
    return {name: (lambda part=part, **also: dp.SparseMvRequest(*part, x, **more, **also)) for name, part in of.items()}


def test_what_has_its_rows_together_is_this_library_s_and_all_else_cusparse_s():
    made = requests()
    for kind, trans in product(made, (N, T, C)):
        request = made[kind](trans=trans)
        is_own = (kind == "csr") == (trans is N) and kind != "coo"
        assert select(request, H200).library == ("own" if is_own else "cusparse")
        assert select(request, HOST).stands_for == ("own" if is_own else "cusparse")
        assert select(request.replace(library="cusparse"), H200).library == "cusparse"
        if not is_own:
            with pytest.raises(
                NoRow, match=f"needs CSR with trans n, or CSC .*, has {kind.upper()} with {trans.name.lower()}"
            ):
                select(request.replace(library="own"), H200)


def test_an_algorithm_of_cusparse_is_cusparse_s():
    made = requests()
    for algorithm in ("csr_alg1", "csr_alg2"):
        assert select(made["csr"](algorithm=algorithm), H200).library == "cusparse"
        with pytest.raises(NoRow, match=f"needs algorithm default, has {algorithm}"):
            select(made["csr"](algorithm=algorithm, library="own"), H200)
    assert select(made["csr"](algorithm="default"), H200).library == "own"


@pytest.mark.parametrize("more", [0, 1])
def test_large_products_are_cusparses_unless_they_are_asked_for(more):
    n = rules.MAX_STEPS // 2
    values, columns = DEV.zeros((n + more,), "f32"), DEV.zeros((n + more,), "i32")
    rows, x = DEV.zeros((n + 1,), "i32"), DEV.zeros((1,), "f32")
    parts = values, rows, columns, dp.SparseForm("csr", (n, 1)), x
    for chosen, library in (
        ({}, "cusparse" if more else "own"),
        ({"library": "own"}, "own"),
        ({"autotune": True}, "own"),
    ):
        assert select(dp.SparseMvRequest(*parts, **chosen), H200).library == library
    reason = rules.few_elements(dp.SparseMvRequest(*parts))
    assert reason == (
        "needs at most 262,144 rows and elements, or library own or autotune, has 262,145" if more else ""
    )


def test_the_same_bits_are_promised_where_this_library_is_asked_for():
    made = requests()
    assert made["csr"](library="own").same_bits
    assert made["csc"](library="own", trans="c").same_bits
    assert not made["csr"](library="cusparse").same_bits
    assert not made["csr"]().same_bits  # without NVRTC it is cuSPARSE's
    assert made["csr"](algorithm="csr_alg2").same_bits


def test_a_result_without_elements_launches_nothing(tmp_path, monkeypatch):
    executor = on_cpu_of.executor_on(on_cpu_of.blocks_on_cpu.InBlocks(tmp_path), monkeypatch)
    a = [DEV.zeros((0,), "f64"), DEV.zeros((1,), "i32"), DEV.zeros((0,), "i32"), dp.SparseForm("csr", (0, 3))]
    request = dp.SparseMvRequest(*a, DEV.array(np.ones(3)))
    plan = own_product.plan(request, executor, select(request, H200))
    plan.enqueue(request.arguments(DEV.executor().outputs(request)))
    assert not executor.launched


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_it(dtype):
    dtype = Dtype.of(dtype)
    for tile, strided in ((product_kernels.tile_of(dtype, 10**6), False), (SMALL, True)):
        chosen = product_kernels.options(dtype, dtype, (8, 4), tile, conj=True, strided=strided)
        kernel = Kernel(product_kernels.SOURCE, product_kernels.NAME, lambda _: None, chosen)
        assert on_cpu_of.blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0


def test_tiles_leave_what_a_kernel_needs():
    for dtype, steps in product(("f16", "f32", "f64", "c64", "c128"), (10**i for i in range(1, 11))):
        tile = product_kernels.tile_of(Dtype.of(dtype), steps)
        assert tile.threads % 32 == 0
        assert 2 * tile.max_row < tile.threads * tile.items
        width = max(4, Dtype.of(dtype).itemsize)
        assert tile.threads * tile.items * width + 4 * (tile.threads + 4) + 1024 <= 48 << 10
