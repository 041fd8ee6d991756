"""Plans of einsum over stand-ins of cuTENSOR and cuBLASLt: every row through its cases, drawn contractions, memory."""

import ctypes
import gc
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.core.row import accepts, refusals
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.keys import HALF, HOST
from dispatch.ops.contraction import orders, product, sequence
from dispatch.ops.contraction.cases import cases
from dispatch.ops.contraction.orders import arrangement
from dispatch.ops.contraction.sequence import blocks
from dispatch.ops.contraction.steps import Step
from dispatch.table import contract_cublaslt, contract_permuted, cutensor
from dispatch.table.einsum import GPU_ROWS
from dispatch.table.select import candidates, select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
stand_in = loaded(HERE.parent / "cutensor_stand_in.py")
products = loaded(HERE.parent / "cublaslt_stand_in.py")
shapes_of = loaded(HERE.parent / "contraction_shapes.py")
TOTAL = 1 << 30  # bytes of the device


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def executor(monkeypatch, dev):
    """An executor whose plans of steps are those of the first row for GPUs that takes them."""
    made = stand_in.executor_of(monkeypatch)
    products.install(monkeypatch, made)
    made.rows, made.versions = (*contract_cublaslt.GPU_ROWS, *cutensor.GPU_ROWS), {}
    made.planned = []

    def plan(request):
        tried = []
        for row in made.rows:
            if row.op == request.op and accepts(row, request, request.signature()):
                try:
                    made.planned.append((row.library, request.op, request.spec))
                    return row.call(request, made, row)
                except Refused as refusal:
                    tried.append((row.name, [refusal]))
        raise NoRow(request.describe(), [], f"{len(tried)} refused")

    made.plan = plan
    made.device.layout = dev.layout
    memory = SimpleNamespace(
        cuMemGetInfo=lambda: (TOTAL, TOTAL),
        cuMemsetD8Async=lambda address, value, nbytes, _: ctypes.memset(address, value, nbytes),
    )
    monkeypatch.setattr(sequence, "driver", memory)
    monkeypatch.setattr(sequence, "Storage", lambda *given: SimpleNamespace(device=dev, base=given[1], nbytes=given[2]))
    made.device.allocate = lambda nbytes, _: on(dev, stand_in.Memory(nbytes))
    return made


def on(device, memory):
    memory.device = device
    return memory


def row_of(dtype, library="cutensor"):
    return next(row for row in GPU_ROWS if (row.library, row.dtypes[0]) == (library, dtype))


def run(request, executor, row):
    """A request's result by the plan of a row for GPUs, over memory of the host."""
    outputs = request.device.executor().outputs(request)
    for tensor in outputs.values():
        if tensor.size:
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    return request.result(outputs)


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
    row = next(candidates(request, dp.Arch(90), versions))
    assert row.library == "cublasLt"
    np.testing.assert_allclose(run(request, executor, row).numpy(), arrays[0] @ arrays[1] @ arrays[2], rtol=1e-12)
    wide = [dev.zeros((2, 3, 4), "f64"), dev.zeros((4, 2, 3), "f64")]
    for spec, operands, words in (
        ("ij->ji", [dev.array(arrays[0])], r"has permute\('ij->ji'\)"),
        ("ij->i", [dev.array(arrays[0])], r"has reduce_modes\('ij->i'\)"),
        ("aij,jbk->kiba", wide, r"as one axis of .*\('aij,jbk->kiba'\)"),
    ):
        request = dp.EinsumRequest(spec, operands, order="C")
        why = refusals(row, request, request.signature())
        assert re.search(words, str(why[0]))
        with pytest.raises(NoRow, match=r"needs cutensor, which is not installed: .*pip install cutensor-cu13"):
            select(request, dp.Arch(90), versions)


def test_what_asks_for_one_library_is_not_refused_for_another_that_is_missing(dev):
    a = dev.zeros((2, 3), "f64")
    request = dp.ContractRequest("ij,ij->ij", a, a, library="cublasLt")
    with pytest.raises(NoRow, match="has products of elements: elementwise_binary"):
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
    assert "contract_trinary" not in [step.op for step in request.course.steps]
    assert request.course.steps[0].inputs == first
    result = run(request, executor, row_of("f64"))
    np.testing.assert_allclose(np.asarray(result), np.einsum(spec, *arrays), rtol=1e-12)


def test_results_on_the_way_share_memory_that_nobody_reads_any_more():
    steps = [
        Step("contract", (0, 1), "", (), (), 0),
        Step("contract", (4, 2), "", (), (), 0),
        Step("contract", (5, 3), "", (), (), 0),
        Step("contract", (6, 5), "", (), (), 0),
    ]
    offsets, nbytes = blocks(steps, [512, 256, 512], 4)
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
        offsets, nbytes = blocks(steps, sizes, count)
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
    with pytest.raises(Refused, match=r"results on the way take 8,589,934,592 bytes, and the device has 1,073,741,824"):
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
    assert "needs jit False, has True: that is cuTENSOR's" in str(why[0])
    np.testing.assert_allclose(run(request, executor, row_of("f64")).numpy(), a.numpy() @ b.numpy() @ c.numpy())
    assert {library for library, *_ in executor.planned} == {"cutensor"}
    assert len(executor.library.kernels) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["library-kernels-NVIDIA-H100-cutensor-.cache"]
    plain = dp.EinsumRequest("ij,jk,kl->il", [a, b, c])
    assert plain.key() != request.key()
    np.testing.assert_allclose(dp.einsum("ij,jk,kl->il", a, b, c, jit=True).numpy(), dp.run(plain).numpy())


# -- contractions that are products once operands are permuted ---------------------------------------------------------
@pytest.mark.parametrize("row", contract_permuted.GPU_ROWS, ids=lambda row: row.name)
def test_what_is_a_product_once_permuted_is_right_as_one(row, dev, executor, each):
    taken = set()

    def check(case, rng):
        made = case.check(dev, rng)
        if not refusals(row, made.request, made.request.signature()):
            taken.add(case.name)
            made.verify(run(made.request, executor, row))

    each(cases(row), check)
    wanted = {"modes that do not", "an outer product", "six modes", "gaps", "a sum of all", "two modes to sum over"}
    wanted |= {"a scalar and a tensor"}
    assert taken == (wanted if row.dtypes[0] in HALF else {*wanted, "added, lying otherwise"})


@pytest.mark.parametrize("spec", shapes_of.TCCG)
def test_contractions_of_chemistry_are_products_that_move_no_more_than_they_must(spec, dev, executor, rng):
    inputs, output = spec.split("->")
    sizes = {mode: 2 + number % 4 for number, mode in enumerate(sorted({*inputs, *output} - {","}))}
    arrays = [rng.standard_normal([sizes[mode] for mode in term]) for term in inputs.split(",")]
    tensors = [dev.array(array) for array in arrays]
    c = rng.standard_normal([sizes[mode] for mode in output])
    request = dp.ContractRequest(spec, *tensors, c=dev.array(c), alpha=0.5, beta=-2.0)
    rows = (contract_permuted.GPU_ROWS, contract_cublaslt.GPU_ROWS)
    taking = [row for some in rows for row in some if accepts(row, request, request.signature())]
    assert len(taking) == 1, "each is a product, as it lies or not"
    expected = 0.5 * np.einsum(spec, *arrays) - 2 * c
    for _ in range(2):
        result = run(request, executor, taking[0])
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)
    if taking[0].variant == "permuted":
        moved = arrangement(request)
        steps = [op for _, op, _ in executor.planned]
        assert steps == 2 * (["permute"] * len(moved.keys() - {"out"}) + ["contract"] + ["permute"] * ("out" in moved))
        for left_out in moved:  # each of them must be
            fewer = {name: order for name, order in moved.items() if name != left_out}
            lying = {
                name: orders.along(fewer[name], sizes) if name in fewer else own
                for name, own in product.steps_of(request).items()
            }
            assert isinstance(product.product_along(sizes, lying), str)


@pytest.mark.parametrize("spec", shapes_of.TCCG)
def test_a_result_that_lies_as_it_will_costs_no_more_than_in_c_order(spec, dev, executor, rng):
    inputs, output = spec.split("->")
    sizes = {mode: 8 + number % 3 for number, mode in enumerate(sorted({*inputs, *output} - {","}))}
    if len(output) > 4:
        sizes = dict.fromkeys(sizes, 8)
    arrays = [rng.standard_normal([sizes[mode] for mode in term]) for term in inputs.split(",")]
    tensors = [dev.array(array) for array in arrays]
    executor.rows = (*contract_cublaslt.GPU_ROWS, *contract_permuted.GPU_ROWS, *cutensor.GPU_ROWS)
    found, costs = {}, {}
    for order in "CK":
        request = dp.EinsumRequest(spec, tensors, order=order)
        found[order] = run(request, executor, select(request, dp.Arch(90)))
        np.testing.assert_allclose(found[order].numpy(), np.einsum(spec, *arrays), rtol=1e-11, atol=1e-11)
        steps = product.steps_of(dp.ContractRequest(spec, *tensors, out=found[order]))
        costs[order] = orders.cheapest(sizes, steps).cost
    assert costs["K"] <= costs["C"]
    assert found["C"].numpy().flags.c_contiguous
    assert costs["K"] < costs["C"] or found["K"].strides == found["C"].strides
    assert found["K"].layout.high == found["C"].layout.high, "it is dense"


@pytest.mark.parametrize(
    ("spec", "shapes", "strides"),
    [
        ("aebd,ce->acbd", ((3, 8, 4, 5), (9, 8)), None),  # a batch over a, in which B is the same all along
        ("ce,aebd->acbd", ((9, 8), (3, 8, 4, 5)), None),
        ("dca,bd->cba", ((8, 9, 10), (11, 8)), None),
        ("aebfd,ce->acbfd", ((3, 8, 4, 5, 3), (9, 8)), None),
        ("bhqk,bkhd->bqhd", ((3, 2, 4, 5), (3, 5, 2, 6)), 3),  # calls over b
        ("bqhd,bkhd->bhqk", ((4, 3, 2, 5), (4, 7, 2, 5)), 4),
        ("xbhqk,xbkhd->xbqhd", ((2, 3, 2, 4, 5), (2, 3, 5, 2, 6)), 6),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_batches_that_repeat_an_operand_or_lie_as_two_axes_are_products(
    spec, shapes, strides, added, dev, executor, rng
):
    arrays = [rng.standard_normal(shape) for shape in shapes]
    given = {}
    expected = 0.5 * np.einsum(spec, *arrays)
    if added:
        c = rng.standard_normal(expected.shape)
        given, expected = {"c": dev.array(c), "beta": -2.0}, expected - 2 * c
    request = dp.ContractRequest(spec, *map(dev.array, arrays), alpha=0.5, **given)
    row = next(row for row in contract_cublaslt.GPU_ROWS if accepts(row, request, request.signature()))
    assert product.product_of(request).calls == (strides or 1)
    for _ in range(2):
        np.testing.assert_allclose(run(request, executor, row).numpy(), expected, rtol=1e-11, atol=1e-11)


def test_tiny_matrices_are_no_batch_for_their_layouts_sake(dev):
    a, b = dev.zeros((3, 7, 4, 5), "f64"), dev.zeros((9, 7), "f64")
    assert "permute" in product.product_of(dp.ContractRequest("aebd,ce->acbd", a, b))


def test_more_calls_than_sixteen_are_a_permutation(dev):
    a, b = dev.zeros((17, 2, 4, 5), "f64"), dev.zeros((17, 5, 2, 6), "f64")
    request = dp.ContractRequest("bhqk,bkhd->bqhd", a, b)
    assert "permute" in product.product_of(request)
    assert orders.arrangement(request).keys() == {"b", "out"}


def test_orders_are_numpys(dev, rng):
    a, b = rng.standard_normal((4, 5)), rng.standard_normal((5, 6))
    ours = [dev.array(a), dev.array(b)]
    for order, operands in (("C", ours), ("F", ours), ("A", ours), ("A", [dev.array(a.T).T, dev.array(b.T).T])):
        twins = [np.asfortranarray(one.numpy()) if one.layout.strides[0] == 1 else one.numpy() for one in operands]
        expected = np.einsum("ij,jk->ki", *twins, order=order)
        found = dp.einsum("ij,jk->ki", *operands, order=order)
        assert tuple(8 * stride for stride in found.layout.strides) == expected.strides, order
        np.testing.assert_allclose(found.numpy(), expected)
    assert dp.einsum("ij,jk->ki", *ours).layout.strides == (4, 1), "it costs no more in C order"
    with pytest.raises(BadRequest, match="order: got 'X'; expected 'C', 'F', 'A', 'K'"):
        dp.einsum("ij,jk->ki", *ours, order="X")


def test_drawn_contractions_are_products_once_permuted(dev, executor, rng):
    counts = Counter()
    f64 = next(row for row in contract_permuted.GPU_ROWS if row.dtypes[0].name == "f64")
    while counts["taken"] < 60:
        spec, shapes = shapes_of.drawn(rng)
        if len(shapes) != 2 or (len(set(spec.split("->")[1])) != len(spec.split("->")[1])):
            continue
        arrays = [np.asarray(rng.standard_normal(shape)) for shape in shapes]
        orders = [rng.permutation(array.ndim) for array in arrays]
        pairs = zip(arrays, orders, strict=True)
        lying = [each.transpose(order).copy().transpose(np.argsort(order)) for each, order in pairs]
        request = dp.ContractRequest(spec, *map(dev.array, lying), alpha=1.5)
        why = refusals(f64, request, request.signature())
        counts["taken" if not why else str(why[0]).split(",")[0]] += 1
        if not why:
            result = run(request, executor, f64)
            np.testing.assert_allclose(result.numpy(), 1.5 * np.einsum(spec, *arrays), rtol=1e-11, atol=1e-11)
    assert counts.keys() == {  # whatever could be permuted was
        "taken",
        "needs an operand to permute",  # it is a product as it lies
        "needs modes of two tensors at least",
        "needs a mode that is summed over or of one operand alone",
    }


def test_numbers_and_addresses_of_a_permuted_product_are_those_of_the_run(dev, executor, rng):
    row = next(row for row in contract_permuted.GPU_ROWS if row.dtypes[0].name == "f64")
    shapes = {"a": (3, 4, 2), "b": (2, 5, 4), "c": (5, 3)}
    first = {name: dev.array(rng.standard_normal(shape)) for name, shape in shapes.items()}
    request = dp.ContractRequest("iak,kja->ji", first["a"], first["b"], c=first["c"], beta=1.0)
    made = row.call(request, executor, row)
    assert made.capture_safe
    for turn in range(3):
        arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        tensors = {name: dev.array(array) for name, array in arrays.items()}
        other = request.replace(**tensors, alpha=0.5 + turn, beta=2.0 - turn / 4, out=dev.zeros((5, 3), "f64"))
        made.enqueue(other.arguments({}))
        expected = (0.5 + turn) * np.einsum("iak,kja->ji", arrays["a"], arrays["b"]) + (2.0 - turn / 4) * arrays["c"]
        np.testing.assert_allclose(other.out.numpy(), expected, rtol=1e-12)


def test_without_cutensor_a_permutation_is_what_is_missing(dev, executor):
    executor.rows = (*contract_cublaslt.GPU_ROWS, *contract_permuted.GPU_ROWS)
    row = next(row for row in contract_permuted.GPU_ROWS if row.dtypes[0].name == "f64")
    a, b = dev.zeros((2, 3, 4), "f64"), dev.zeros((4, 2, 3), "f64")
    with pytest.raises(Refused, match=r"no row takes the step permute"):
        row.call(dp.ContractRequest("aij,jbi->ab", a, b), executor, row)
