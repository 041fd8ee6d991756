"""Plans of einsum for contractions that are products once operands are permuted."""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import accepts, refusals
from dispatch.errors import BadRequest, Refused
from dispatch.keys import HALF
from dispatch.ops.contraction import orders, product
from dispatch.ops.contraction.cases import cases
from dispatch.ops.contraction.orders import arrangement
from dispatch.table import contract_cublaslt, contract_permuted, cutensor
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("einsum_stand_ins", Path(__file__).with_name("einsum_stand_ins.py"))
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
shapes_of, dev, executor, run = stand_ins.shapes_of, stand_ins.dev, stand_ins.executor, stand_ins.run


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
                name: orders.dense_strides(fewer[name], sizes) if name in fewer else own
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
        costs[order] = orders.cheapest_arrangement(sizes, steps).cost
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
        "needs an operand that must be permuted",  # it is a product as it lies
        "needs each mode in at least two tensors",
        "needs a mode that is summed over or that only one operand has",
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
