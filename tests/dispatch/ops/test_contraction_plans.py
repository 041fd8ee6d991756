"""Plans of cuTENSOR's over a stand-in of it: every row for GPUs through its cases, and what is called with what."""

import ctypes
import gc
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CutensorError
from dispatch.core.row import refusals
from dispatch.errors import NoRow, Refused
from dispatch.keys import HALF
from dispatch.ops.contraction import empty_product, tune
from dispatch.ops.contraction.cases import cases
from dispatch.ops.contraction.product import product_of
from dispatch.table import contract_cublaslt
from dispatch.table.cutensor import GPU_ROWS

spec = importlib.util.spec_from_file_location(
    "contraction_stand_ins", Path(__file__).with_name("contraction_stand_ins.py")
)
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
loaded, stand_in, REQUIRED, WORKSPACE = stand_ins.loaded, stand_ins.stand_in, stand_ins.REQUIRED, stand_ins.WORKSPACE
Memory, dev, executor, run = stand_ins.Memory, stand_ins.dev, stand_ins.executor, stand_ins.run
row_of = stand_ins.row_of

stand_in_lt = loaded(Path(__file__).parents[1] / "cublaslt_stand_in.py")

# The cases that ask what cuTENSOR has not: seen with 2.8.1.
REFUSED_OF_COMPLEX = {
    "reduce_modes": {"magnitudes"},
    "permute": {"an operator"},
    "elementwise_binary": {"operators"},
    "elementwise_trinary": {"operators"},
}
REFUSED = {"contract_trinary": {"one to a scalar"}}


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_over_the_stand_in(row, dev, executor, each):
    refused = {}

    def check(case, rng):
        made = case.check(dev, rng)
        why = refusals(row, made.request, made.request.signature())
        if why:
            refused[case.name] = str(why[0])
            return
        _, result = run(made.request, executor, row)
        made.verify(result)

    each(cases(row), check)
    is_complex = any(dtype.is_complex for dtype in row.dtypes)
    assert refused.keys() == (REFUSED_OF_COMPLEX.get(row.op, set()) if is_complex else set()) | REFUSED.get(
        row.op, set()
    )
    gc.collect()
    assert {one.kind for one in executor.library.alive.values()} <= {"handle"}, "descriptors that nobody destroys"


def test_the_choices_of_a_request_reach_the_library(dev, executor, rng):
    a, b = (dev.array(rng.standard_normal((3, 3)).astype("f4")) for _ in range(2))
    for choices, expected in (
        ({}, (-1, 0)),
        ({"algo": "ttgt", "kernel_rank": 1}, (-2, 1)),
        ({"algo": "default_patient", "jit": True}, (-6, 0)),
    ):
        request = dp.ContractRequest("ik,kj->ij", a, b, **choices)
        _, result = run(request, executor, row_of("contract", "f32"))
        assert executor.library.executed[-1] == ("Contraction", *expected, 7)
        np.testing.assert_allclose(result.numpy(), a.numpy() @ b.numpy(), rtol=1e-5)


def test_what_the_library_has_no_kernel_for_is_refused(dev, executor):
    a = dev.zeros((2, 2), "f32")
    with pytest.raises(Refused, match=r"cuTENSOR has no kernel for this.*NOT_SUPPORTED"):
        run(dp.ContractRequest("ik,kj->ij", a, a, kernel_rank=3), executor, row_of("contract", "f32"))
    with pytest.raises(Refused, match="INSUFFICIENT_WORKSPACE"):
        run(dp.ContractRequest("ik,kj->ij", a, a, workspace=REQUIRED - 1), executor, row_of("contract", "f32"))
    gc.collect()
    assert {one.kind for one in executor.library.alive.values()} == {"handle"}


def test_operators_that_the_library_has_not_are_refused_before_it_is_asked(dev, executor):
    z, a = dev.zeros((2, 2), "c64"), dev.zeros((2, 2), "f32")
    for request, row, words in (
        (
            dp.PermuteRequest("ij->ji", z, op_a="neg"),
            row_of("permute", "c64"),
            "op_a IDENTITY or CONJ for c64, has NEG",
        ),
        (dp.ReduceModesRequest("ij->i", z, op_a="abs"), row_of("reduce_modes", "c64"), "op_a IDENTITY or CONJ for c64"),
        (dp.ContractRequest("ik,kj->ij", a, a, op_b="exp"), row_of("contract", "f32"), "op_b IDENTITY or CONJ of what"),
    ):
        assert words in str(refusals(row, request, request.signature())[0])
        with pytest.raises(Refused, match="cuTENSOR has no kernel for this"):
            run(request, executor, row)
        with pytest.raises(NoRow, match=words):
            dp.run(request)  # nor on the host: what runs there runs on a GPU
    for request in (dp.PermuteRequest("ij->ji", z, op_a="conj"), dp.PermuteRequest("ij->ji", a, op_a="neg")):
        row = row_of("permute", str(request.a.dtype))
        assert not refusals(row, request, request.signature())
        run(request, executor, row)


def test_three_tensors_to_one_element_are_refused_before_the_library_fails(dev, executor):
    a, row = dev.zeros((2, 2), "f32"), row_of("contract_trinary", "f32")
    one = dev.zeros((1, 2), "f32")
    for request in (
        dp.ContractTrinaryRequest("ij,jk,ki->", a, a, a),
        dp.ContractTrinaryRequest("aj,jk,kb->ab", one, a, dev.zeros((2, 1), "f32")),
    ):
        words = "a result of two elements at least, has one element"
        assert words in str(refusals(row, request, request.signature())[0])
        with pytest.raises(CutensorError, match="CUDA_ERROR"):
            run(request, executor, row)
        with pytest.raises(NoRow, match="einsum contracts two tensors at a time"):
            dp.run(request)


def test_three_tensors_are_contracted_once_what_was_enqueued_is_done(dev, executor):
    """With operands that were still being written the results were wrong on an H200."""
    a = dev.zeros((3, 3), "f32")
    plan, _ = run(dp.ContractTrinaryRequest("ij,jk,kl->il", a, a, a), executor, row_of("contract_trinary", "f32"))
    assert not plan.capture_safe
    assert executor.library.waited == [executor.target.value]


def test_contractions_to_a_scalar_are_not_recorded(dev, executor):
    a, one, row = dev.zeros((3, 3), "f32"), dev.zeros((1, 3), "f32"), row_of("contract", "f32")
    for request, is_safe in (
        (dp.ContractRequest("ab,ba->", a, a), False),
        (dp.ContractRequest("ak,kb->ab", one, dev.zeros((3, 1), "f32")), False),
        (dp.ContractRequest("ab,ba->a", a, a), True),
        (dp.ContractRequest(",->", a[0, 0], a[0, 0]), True),
    ):
        executor.library.waited.clear()
        plan, _ = run(request, executor, row)
        assert plan.capture_safe is is_safe, request.describe()
        assert executor.library.waited == ([] if is_safe else [executor.target.value]), (
            "a part may run beside the stream"
        )
    assert run(dp.ReduceModesRequest("ab->", a), executor, row_of("reduce_modes", "f32"))[0].capture_safe


def test_what_is_added_is_copied_only_where_it_lies_otherwise(dev, executor, rng):
    row, values = row_of("contract", "f64", "64F"), [rng.standard_normal((3, 3)) for _ in range(3)]
    a, b, c = map(dev.array, values)
    expected = values[0] @ values[1] + 2 * values[2]
    for operands, calls in (
        ({"c": c}, ["Contraction"]),
        ({"c": dev.array(values[2].T.copy()).T, "out": dev.zeros((3, 3), "f64")}, ["Permutation", "Contraction"]),
    ):
        executor.library.executed.clear()
        _, result = run(dp.ContractRequest("ik,kj->ij", a, b, beta=2.0, **operands), executor, row)
        assert [one[0] for one in executor.library.executed] == calls
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-13)
    with_operator = dp.ReduceModesRequest("ik->i", a, c=c[:, 0], op_c="neg", out=dev.zeros((3,), "f64"))
    _, result = run(with_operator, executor, row_of("reduce_modes", "f64", "64F"))
    np.testing.assert_allclose(result.numpy(), values[0].sum(1) - values[2][:, 0], rtol=1e-13)


def test_one_plan_takes_other_addresses_and_numbers(dev, executor, rng):
    row = row_of("elementwise_trinary", "f64", "64F")
    plan = None
    for alpha, beta, gamma in ((1.0, 2.0, 3.0), (0.0, -1.0, 0.5), (2.5, 0.0, 0.0)):
        a, b, c = rng.standard_normal((3, 2)), rng.standard_normal(2), rng.standard_normal((2, 3))
        request = dp.ElementwiseTrinaryRequest(
            "ij,j->ji", *map(dev.array, (a, b, c)), alpha=alpha, beta=beta, gamma=gamma, op_abc="max"
        )
        plan = plan or row.call(request, executor, row)
        outputs = dev.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        expected = np.maximum(alpha * a.T + beta * b[:, None], gamma * c)
        np.testing.assert_allclose(request.result(outputs).numpy(), expected, rtol=1e-13)


def test_plans_share_memory_beyond_the_workspace(dev, executor, monkeypatch):
    monkeypatch.setattr(stand_in, "REQUIRED", WORKSPACE + 1)
    monkeypatch.setattr(stand_in, "SUGGESTED", WORKSPACE + 1)
    made = []
    executor.device.allocate = lambda nbytes, _: made.append(nbytes) or Memory(nbytes)
    a = dev.zeros((2, 2), "f32")
    plans = [
        run(dp.ContractRequest(spec, a, a), executor, row_of("contract", "f32"))[0]
        for spec in ("ik,kj->ij", "ik,kj->ji")
    ]
    assert made == [2 * WORKSPACE]
    assert len(plans) == 2


def test_kernels_race_and_the_winner_is_remembered(dev, executor, monkeypatch, rng):
    known, raced = {}, []
    memory = SimpleNamespace(
        get=lambda *key: known.get(key), put=lambda op, key, found: known.update({(op, key): found})
    )
    executor.algorithms = lambda library: {"cutensor": memory}[library]

    def fastest(_, request, run, count):
        outputs = dev.executor().outputs(request)
        for number in range(count):
            run(number, request.arguments(outputs))
        raced.append(count)
        return 2

    monkeypatch.setattr(tune, "fastest", fastest)
    a = dev.array(rng.standard_normal((4, 4)).astype("f4"))
    request, row = dp.ContractRequest("ik,kj->ij", a, a, autotune=True), row_of("contract", "f32")
    for _ in range(2):
        _, result = run(request, executor, row)
        np.testing.assert_allclose(result.numpy(), a.numpy() @ a.numpy(), rtol=1e-5)
        assert executor.library.executed[-1][:3] == ("Contraction", -4, 1)
    assert raced == [8]  # its own choice, two kernels of each of three ways, and the patient choice


@pytest.fixture
def products(executor, monkeypatch):
    """An executor over a stand-in of cuBLASLt, too."""
    stand_in_lt.install(monkeypatch, executor)
    return executor


PRODUCTS = [row for row in contract_cublaslt.GPU_ROWS if row.variant == "product"]


@pytest.mark.parametrize("row", PRODUCTS, ids=lambda row: row.name)
def test_what_is_a_product_is_right_as_one(row, dev, products, each):
    taken = []

    def check(case, rng):
        made = case.check(dev, rng)
        why = refusals(row, made.request, made.request.signature())
        if not why:
            taken.append(case.name)
            _, result = run(made.request, products, row)
            made.verify(result)

    each(cases(row), check)
    assert {"a matrix product", "a batch", "modes that merge", "columns"} <= {*taken}
    assert ({"added", "added in place"} <= {*taken}) == (row.dtypes[0] not in HALF)
    others = {"modes that do not", "a mode of one operand alone", "an outer product", "nothing to sum", "six modes"}
    assert not others & {*taken}  # of that product the result has the modes of both in turns


def test_products_lie_as_matmul_has_them(dev, rng):
    asked = {
        "abk,kcd->abcd": ((6, 5), (5, 20), (6, 20)),
        "kab,kcd->cdab": ((20, 5), (5, 6), (20, 6)),
        "zak,zkc->zca": ((7, 4, 5), (7, 5, 2), (7, 4, 2)),
        "kl,kl->": ((1, 15), (15, 1), (1, 1)),
        "a,b->ab": ((2, 1), (1, 3), (2, 3)),
    }
    sizes = {"a": 2, "b": 3, "k": 5, "c": 4, "d": 5, "z": 7, "l": 3}
    for spec, shapes in asked.items():
        terms = spec.split("->")[0].split(",")
        a, b = (dev.array(rng.standard_normal([sizes[mode] for mode in term])) for term in terms)
        found = product_of(dp.ContractRequest(spec, a, b))
        assert (found.a.shape, found.b.shape, found.out.shape) == shapes, spec


def test_what_a_plan_was_made_of_goes_behind_it(dev, executor):
    a = dev.zeros((3, 3), "f32")
    plan, _ = run(dp.ContractRequest("ik,kj->ij", a, a), executor, row_of("contract", "f32"))
    executor.library.destroyed.clear()
    del plan
    gc.collect()
    found = executor.library.destroyed
    assert sorted(found) == ["operation", "plan", "preference", "tensor", "tensor", "tensor"]
    assert found[0] == "plan"
    assert found.index("operation") < found.index("tensor")


def test_a_choice_of_cutensors_kernel_is_nothing_to_cublaslt(dev):
    a = dev.zeros((4, 4), "f32")
    product = next(row for row in contract_cublaslt.GPU_ROWS if str(row.dtypes[0]) == "f32")
    plain = dp.ContractRequest("ik,kj->ij", a, a)
    assert not refusals(product, plain, plain.signature())
    for choices, words in (
        ({"algo": "ttgt"}, "needs algo None, has TTGT, which only cuTENSOR supports"),
        ({"kernel_rank": 0}, "needs kernel_rank None, has 0"),
        ({"incremental_count": 4}, "needs incremental_count None, has 4"),
        ({"jit": True}, "needs jit False, has True"),
    ):
        request = dp.ContractRequest("ik,kj->ij", a, a, **choices)
        assert words in str(refusals(product, request, request.signature())[0])
        assert "cutensor" in (dp.explain(request).row.stands_for, dp.explain(request).row.library)


class Memsets:
    """The driver's memsets, over memory of the host; `called` has their names."""

    def __init__(self):
        self.called = []

    def cuMemsetD16Async(self, at, value, count, _):
        self._fill("D16", at, np.uint16, 1, value, 1, count)

    def cuMemsetD32Async(self, at, value, count, _):
        self._fill("D32", at, np.uint32, 1, value, 1, count)

    def cuMemsetD2D32Async(self, at, pitch, value, width, height, _):
        self._fill("D2D32", at, np.uint32, pitch // 4, value, width, height)

    def _fill(self, name, at, kind, pitch, value, width, height):
        self.called.append(name)
        size = ((height - 1) * pitch + width) * np.dtype(kind).itemsize
        memory = np.frombuffer((ctypes.c_char * size).from_address(at), kind)
        for line in range(height):
            memory[line * pitch : line * pitch + width] = value


@pytest.mark.parametrize(("dtype", "called"), [
    ("f16", ["D16"]), ("bf16", ["D16"]), ("f32", ["D32"]), ("f64", ["D2D32"] * 2), ("c64", ["D2D32"] * 2),
    ("c128", ["D2D32"] * 4),
])  # fmt: skip
def test_products_over_an_empty_mode_are_alpha(dtype, called, dev, executor, monkeypatch):
    driver = Memsets()
    monkeypatch.setattr(empty_product, "driver", driver)
    row = row_of("reduce_modes", dtype, "64F" if dtype in ("f64", "c128") else "32F")
    a = dev.zeros((2, 0, 3), dtype)
    for alpha in (1.0, -2.5, 1 + 2j if dtype[0] == "c" else 3.0):
        driver.called.clear()
        request = dp.ReduceModesRequest("abc->ca", a, reduce="mul", alpha=alpha)
        assert not refusals(row, request, request.signature())
        plan, result = run(request, executor, row)
        assert plan.is_bare
        np.testing.assert_array_equal(result.numpy(), np.full((3, 2), alpha, result.numpy().dtype))
        np.testing.assert_array_equal(dp.run(request).numpy(), result.numpy())
        assert driver.called == called
    assert not executor.library.executed
    _, zeros = run(dp.ReduceModesRequest("abc->ca", a, reduce="mul", alpha=0.0), executor, row)
    assert (zeros.numpy() == 0).all()
    gaps = dev.zeros((3, 4), dtype)[:, :2]
    request = dp.ReduceModesRequest("abc->ca", a, reduce="mul", out=gaps)
    assert "an empty product must be written to a result without gaps" in str(
        refusals(row, request, request.signature())
    )
