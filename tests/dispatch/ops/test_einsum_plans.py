"""Plans of einsum over stand-ins of cuTENSOR and cuBLASLt: every row through its cases, and drawn contractions."""

import gc
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.core.row import refusals
from dispatch.errors import NoRow, Refused
from dispatch.keys import HOST
from dispatch.ops.contraction import sequence
from dispatch.ops.contraction.cases import cases
from dispatch.ops.contraction.sequence import intermediate_blocks
from dispatch.ops.contraction.steps import Step
from dispatch.table import contract_cublaslt
from dispatch.table.einsum import GPU_ROWS
from dispatch.table.select import candidates, select

spec = importlib.util.spec_from_file_location("einsum_stand_ins", Path(__file__).with_name("einsum_stand_ins.py"))
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
shapes_of, TOTAL, dev, executor = stand_ins.shapes_of, stand_ins.TOTAL, stand_ins.dev, stand_ins.executor
row_of, run = stand_ins.row_of, stand_ins.run


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_over_the_stand_ins(row, dev, executor, each):
    def check(case, rng):
        made = case.check(dev, rng)
        assert not refusals(row, made.request, made.request.signature())
        made.verify(run(made.request, executor, row))

    each(cases(row), check)
    assert {library for library, *_ in executor.planned} <= {row.library, "cublasLt"}
    executor.planned.clear()
    gc.collect()
    assert {one.kind for one in executor.library.alive.values()} <= {"handle"}


def test_drawn_contractions_are_right(dev, executor, rng):
    libraries = set()
    for turn in range(150):
        spec, shapes = shapes_of.drawn(rng)
        kind, dtype = (("f8", "f64"), ("c16", "c128"))[turn % 2]
        arrays = [rng.standard_normal(shape).astype(kind) for shape in shapes]
        request = dp.EinsumRequest(spec, [dev.array(array) for array in arrays])
        got = run(request, executor, row_of(dtype))
        expected = np.einsum(spec, *arrays, optimize=len(arrays) > 2)
        size = np.einsum(spec, *map(np.abs, arrays), optimize=len(arrays) > 2)
        assert (np.abs(got.numpy() - expected) <= 1e-13 * (size + 1)).all(), spec
        libraries |= {library for library, *_ in executor.planned}
    assert libraries == {"cublasLt", "cutensor"}


def test_the_contractions_of_the_benchmark_are_right(dev, executor, rng):
    for spec in shapes_of.TCCG:
        inputs, _ = spec.split("->")
        sizes = {mode: int(rng.integers(2, 5)) for mode in inputs if mode != ","}
        arrays = [rng.standard_normal([sizes[mode] for mode in term]) for term in inputs.split(",")]
        request = dp.EinsumRequest(spec, [dev.array(array) for array in arrays])
        np.testing.assert_allclose(run(request, executor, row_of("f64")).numpy(), np.einsum(spec, *arrays), atol=1e-12)
    assert len(executor.planned) == 48


def test_networks_of_many_tensors_are_right(dev, executor, rng):
    for rows, columns, bond in ((2, 4, 3), (3, 3, 2), (4, 3, 2)):
        spec, shapes = shapes_of.lattice(rows, columns, bond)
        arrays = [rng.standard_normal(shape) for shape in shapes]
        request = dp.EinsumRequest(spec, [dev.array(array) for array in arrays], optimize="greedy")
        expected = np.einsum(spec, *arrays, optimize="greedy")
        np.testing.assert_allclose(run(request, executor, row_of("f64")).numpy(), expected, rtol=1e-9, atol=1e-11)


def test_sums_of_nothing_on_the_way_are_zeros(dev, executor, rng):
    for spec, shapes in (("ab,bc,cd->ad", ((3, 0), (0, 4), (4, 2))), ("ab,bc,cd->ad", ((3, 4), (4, 0), (0, 2)))):
        arrays = [rng.standard_normal(shape) for shape in shapes]
        for optimize in ("left-to-right", [(1, 2), (0, 1)]):
            request = dp.EinsumRequest(spec, [dev.array(array) for array in arrays], optimize=optimize)
            assert (run(request, executor, row_of("f64")).numpy() == np.zeros((3, 2))).all()


def test_one_plan_takes_other_addresses(dev, executor, rng):
    arrays = [rng.standard_normal(shape) for shape in ((3, 4), (4, 5), (5, 2))]
    request = dp.EinsumRequest("ij,jk,kl->li", [dev.array(array) for array in arrays])
    row = row_of("f64")
    plan = row.call(request, executor, row)
    for _ in range(3):
        arrays = [rng.standard_normal(array.shape) for array in arrays]
        again = dp.EinsumRequest("ij,jk,kl->li", [dev.array(array) for array in arrays])
        outputs = dev.executor().outputs(again)
        plan.enqueue(again.arguments(outputs))
        np.testing.assert_allclose(again.result(outputs).numpy(), (arrays[0] @ arrays[1] @ arrays[2]).T, rtol=1e-12)


def test_a_step_goes_to_cublaslt_where_its_modes_merge(dev, executor, rng):
    arrays = [dev.array(rng.standard_normal(shape)) for shape in ((2, 3, 4), (4, 5), (5, 2))]
    run(dp.EinsumRequest("abi,ij,jk->kab", arrays, optimize="left-to-right"), executor, row_of("f64"))
    assert executor.planned == [("cublasLt", "contract", "abi,ij->abj"), ("cublasLt", "contract", "jk,abj->kab")]
    executor.planned.clear()
    run(dp.EinsumRequest("abi,ij->ajb", arrays[:2], library="cutensor"), executor, row_of("f64"))
    assert executor.planned == [("cutensor", "contract", "abi,ij->ajb")]


def test_elements_are_multiplied_where_nothing_is_summed_over(dev, executor, rng):
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((4, 3))
    z = b + 1j * a.T
    for spec, arrays, conj, expected in (
        ("ab,ba->ba", [a, b], (), a.T * b),
        ("a,ab->ba", [a[:, 0], a], (), a.T * a[:, 0]),
        ("ab,ab->ab", [z, z], (1,), z * z.conj()),
    ):
        request = dp.EinsumRequest(spec, [dev.array(array) for array in arrays], conj=conj)
        got = run(request, executor, row_of("c128" if conj else "f64")).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-13)
    assert {op for _, op, _ in executor.planned} == {"elementwise_binary"}
    run(dp.EinsumRequest("ab,ab->ab", [dev.array(a[:1]), dev.array(b.T)]), executor, row_of("f64"))
    run(dp.EinsumRequest("a,b->ab", [dev.array(a[0]), dev.array(b[0])]), executor, row_of("f64"))
    assert [op for _, op, _ in executor.planned[3:]] == ["elementwise_binary", "contract"]


class WithoutCutensor(dict):
    """The versions of the libraries where cuTENSOR is not installed."""

    def get(self, name, default=None):
        if name == "cutensor":
            raise LibraryNotFound("cutensor is not installed: pip install cutensor-cu13")
        return super().get(name, default)


def test_without_cutensor_products_run_and_others_say_what_to_install(dev, executor, rng):
    executor.rows, versions = contract_cublaslt.GPU_ROWS, WithoutCutensor(cublasLt=(13, 1))
    arrays = [rng.standard_normal(shape) for shape in ((3, 4), (4, 5), (5, 2))]
    request = dp.EinsumRequest("ij,jk,kl->il", [dev.array(array) for array in arrays])
    row = next(row for row in candidates(request, dp.Arch(90), versions) if row.library != "own")
    assert row.library == "cublasLt"
    np.testing.assert_allclose(run(request, executor, row).numpy(), arrays[0] @ arrays[1] @ arrays[2], rtol=1e-12)
    wide = [dev.zeros((2, 3, 4), "f64"), dev.zeros((4, 2, 3), "f64")]
    for spec, operands, words in (
        ("ij->ji", [dev.array(arrays[0])], r"has permute\('ij->ji'\)"),
        ("ij->i", [dev.array(arrays[0])], r"has reduce_modes\('ij->i'\)"),
        ("aij,jbk->kiba", wide, r"to merge into one axis of .*\('aij,jbk->kiba'\)"),
    ):
        request = dp.EinsumRequest(spec, operands, order="C")
        why = refusals(row, request, request.signature())
        assert re.search(words, str(why[0]))
        with pytest.raises(NoRow, match=r"needs cutensor, which is not installed: .*pip install cutensor-cu13"):
            select(request, dp.Arch(90), versions)


def test_what_asks_for_one_library_is_not_refused_for_another_that_is_missing(dev):
    a = dev.zeros((2, 3), "f64")
    request = dp.ContractRequest("ij,ij->ij", a, a, library="cublasLt")
    with pytest.raises(NoRow, match="has elementwise products: use elementwise_binary"):
        select(request, dp.Arch(90), WithoutCutensor(cublasLt=(13, 1)))


def test_a_step_that_no_row_takes_is_named(dev, executor):
    executor.rows = ()
    request = dp.EinsumRequest("ij,jk->ik", [dev.zeros((2, 2), "f64")] * 2)
    with pytest.raises(Refused, match=r"no row takes the step contract\('ij,jk->ik'"):
        run(request, executor, row_of("f64"))


@pytest.mark.parametrize(
    ("spec", "shapes", "first"),
    [
        ("ab,bc,ca->", [(3, 4), (4, 5), (5, 3)], (1, 2)),  # 60 in any case, of which 12, 15 or 20 are left
        ("ab,bc,ca->a", [(3, 4), (4, 5), (5, 3)], (1, 2)),
        ("ab,bc,cd->ad", [(30, 20), (20, 2), (2, 3)], (1, 2)),  # 120 and 1,800 products; 1,200 and 180 the other way
        ("a,b,ab->", [(6,), (7,), (6, 7)], (1, 2)),  # 6 are left of 42; 7 the other way, and 42 of an outer product
        ("ab,c,d,bcd->a", [(2, 9), (3,), (4,), (9, 3, 4)], (1, 2)),
    ],
)
def test_several_at_once_are_pairs_the_cheapest_first(spec, shapes, first, dev, executor, rng):
    """cuTENSOR's contraction of three waits for the GPU: an einsum with one was no graph, and took 4 times torch's."""
    arrays = [rng.standard_normal(shape) for shape in shapes]
    request = dp.EinsumRequest(spec, [*map(dev.array, arrays)], optimize=(tuple(range(len(arrays))),))
    assert "contract_trinary" not in [step.op for step in request.schedule.steps]
    assert request.schedule.steps[0].inputs == first
    result = run(request, executor, row_of("f64"))
    np.testing.assert_allclose(np.asarray(result), np.einsum(spec, *arrays), rtol=1e-12)


def test_results_on_the_way_share_memory_that_nobody_reads_any_more():
    steps = [
        Step("contract", (0, 1), "", (), (), 0),
        Step("contract", (4, 2), "", (), (), 0),
        Step("contract", (5, 3), "", (), (), 0),
        Step("contract", (6, 5), "", (), (), 0),
    ]
    offsets, nbytes = intermediate_blocks(steps, [512, 256, 512], 4)
    assert offsets == (0, 512, 0)
    assert nbytes == 768


def test_blocks_that_are_read_at_a_time_are_apart(rng):
    for _ in range(50):
        count = int(rng.integers(2, 8))
        left, steps = list(range(count)), []
        while len(left) > 1:
            pair = [left.pop(int(rng.integers(len(left)))) for _ in range(2)]
            steps.append(Step("contract", tuple(pair), "", (), (), 0))
            left.append(count + len(steps) - 1)
        sizes = [256 * int(rng.integers(1, 5)) for _ in steps[:-1]]
        offsets, nbytes = intermediate_blocks(steps, sizes, count)
        last = {number: place for place, step in enumerate(steps) for number in step.inputs}
        spans = [
            (begin, begin + size, made, last[count + made])
            for made, (begin, size) in enumerate(zip(offsets, sizes, strict=True))
        ]
        for one in spans:
            assert one[1] <= nbytes
            for other in spans:
                if one is not other and max(one[2], other[2]) <= min(one[3], other[3]):
                    assert one[1] <= other[0] or other[1] <= one[0]


def test_what_does_not_fit_on_the_device_is_refused(dev, executor):
    one = dev.zeros((), "f64")
    wide = one.strided((1 << 15, 4), (0, 0)), one.strided((4, 1 << 15), (0, 0))
    request = dp.EinsumRequest("ij,jk,kl->il", [*wide, one.strided((1 << 15, 2), (0, 0))], optimize="left-to-right")
    with pytest.raises(
        Refused, match=r"intermediate results need 8,589,934,592 bytes, and the device has 1,073,741,824"
    ):
        sequence.plan(request, executor, row_of("f64"))


def test_the_path_keeps_within_what_the_device_has(dev, executor, rng, monkeypatch):
    arrays = [rng.standard_normal(shape) for shape in ((10, 2), (2, 3), (3, 20))]
    request = dp.EinsumRequest("ij,jk,kl->il", [dev.array(array) for array in arrays])
    for total, spec in ((TOTAL, "jk,kl->jl"), (300, "ij,jk->ik")):
        monkeypatch.setattr(sequence.driver, "cuMemGetInfo", lambda total=total: (total, total))
        executor.planned.clear()
        np.testing.assert_allclose(run(request, executor, row_of("f64")).numpy(), arrays[0] @ arrays[1] @ arrays[2])
        assert executor.planned[0][2] == spec


def test_every_op_has_the_rows_of_gpus_on_the_host():
    on_host = {row.dtypes for row in dp.TABLE.of("einsum") if row.min_arch == HOST}
    assert on_host == {row.dtypes for row in GPU_ROWS}


def test_compiled_kernels_are_cutensors_in_each_step(dev, executor, rng, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    a, b, c = (dev.array(rng.standard_normal(shape)) for shape in ((4, 6), (6, 5), (5, 3)))
    request = dp.EinsumRequest("ij,jk,kl->il", [a, b, c], jit=True)
    why = refusals(row_of("f64", "cublasLt"), request, request.signature())
    assert "needs jit False, has True, which only cuTENSOR supports" in str(why[0])
    np.testing.assert_allclose(run(request, executor, row_of("f64")).numpy(), a.numpy() @ b.numpy() @ c.numpy())
    assert {library for library, *_ in executor.planned} == {"cutensor"}
    assert len(executor.library.kernels) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["library-kernels-NVIDIA-H100-cutensor-.cache"]
    plain = dp.EinsumRequest("ij,jk,kl->il", [a, b, c])
    assert plain.key() != request.key()
    np.testing.assert_allclose(dp.einsum("ij,jk,kl->il", a, b, c, jit=True).numpy(), dp.run(plain).numpy())
