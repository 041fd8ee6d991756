"""Block-sparse contractions: on the host, against dense NumPy; plans over a stand-in of cuTENSOR; what is refused."""

import gc
import importlib.util
import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch import tensors
from dispatch.errors import BadRequest, BadType, NoRow, Refused
from dispatch.keys import HOST
from dispatch.ops.contraction.block_sparse import block_offsets
from dispatch.ops.contraction.block_sparse_rules import aligned_blocks
from dispatch.ops.contraction.cases import cases
from dispatch.row_check import check_row
from dispatch.table.cutensor_block_sparse import GPU_ROWS


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cutensor_stand_in.py")
HOST_ROWS = [row for row in dp.TABLE.of("contract_block_sparse") if row.min_arch == HOST]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    return stand_in.executor_of(monkeypatch)


@pytest.mark.parametrize("row", HOST_ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, dev, each):
    each(cases(row), lambda case, rng: check_row(row, case, dev, rng))


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_over_the_stand_in(row, dev, executor, each):
    def check(case, rng):
        made = case.check(dev, rng)
        outputs = dev.executor().outputs(made.request)
        plan = row.call(made.request, executor, row)
        for tensor in outputs.values():
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
        plan.enqueue(made.request.arguments(outputs))
        made.verify(made.request.result(outputs))

    each(cases(row), check)
    gc.collect()
    assert {one.kind for one in executor.library.alive.values()} <= {"handle"}, "descriptors that nobody destroys"
    assert {how for name, how, _ in executor.library.executed if name == "BlockSparse"} == {False, True}


def drawn(rng, modes, cuts, kind):
    """A dense array of which about half of the blocks are 0, and its sections."""
    sections = tuple(cuts[mode] for mode in modes)
    array = np.asarray(rng.standard_normal([sum(cut) for cut in sections]))
    if kind[0] == "c":
        array = array + 1j * rng.standard_normal(array.shape)
    array = np.array(array, kind)
    form = dp.BlockSparseForm(sections, tuple(itertools.product(*(range(len(cut)) for cut in sections))))
    for block in form.blocks:
        if rng.random() < 0.5 and any(block):  # the first is there
            array[form.slices_of(block)] = 0
    return array, sections


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_drawn_contractions_are_those_of_the_dense_tensors(dev, rng, kind):
    bound = 300 * np.finfo(kind).eps
    for spec in ("ik,kj->ij", "ikl,lkj->ji", "abk,kcb->ca", "kab,ckd->dbac", "ak,ak->a", "ik,k->i", "ik,ik->"):
        inputs, output = spec.split("->")
        cuts = {mode: tuple(map(int, rng.integers(1, 5, rng.integers(1, 4)))) for mode in spec if mode.isalpha()}
        (x, of_x), (y, of_y) = (drawn(rng, modes, cuts, kind) for modes in inputs.split(","))
        a, b = (
            dp.BlockSparseTensor.from_dense(x, of_x, device=dev),
            dp.BlockSparseTensor.from_dense(y, of_y, device=dev),
        )
        np.testing.assert_array_equal(a.numpy(), x)
        expected = np.einsum(spec, x, y)
        got = tensors.contract_block_sparse(spec, a, b, alpha=0.5)
        np.testing.assert_allclose(got.numpy(), 0.5 * expected, atol=bound)
        z, of_z = drawn(rng, output, cuts, kind)
        c = dp.BlockSparseTensor.from_dense(z, of_z, device=dev)
        added = tensors.contract_block_sparse(spec, a, b, c=c, beta=-2.0)
        there = np.zeros(z.shape, bool)
        for block in c.form.blocks:
            there[c.form.slices_of(block)] = True
        np.testing.assert_allclose(added.numpy(), np.where(there, expected - 2 * z, 0), atol=bound)
        assert tensors.contract_block_sparse(spec, a, b, c=c, out=c) is c
        np.testing.assert_allclose(c.numpy(), np.where(there, expected + z, 0), atol=bound)


def test_a_tensor_has_its_blocks_as_views(dev):
    blocks = {(1, 0): np.full((2, 3), 2.0), (0, 1): np.arange(4.0).reshape(4, 1)}
    a = dp.BlockSparseTensor.from_blocks(blocks, ((4, 2), (3, 1)), dev)
    assert (a.shape, a.ndim, str(a.dtype), a.form.blocks) == ((6, 4), 2, "f64", ((1, 0), (0, 1)))
    assert block_offsets(a.form, a.dtype) == (0, 32, 36)  # blocks begin at multiples of 256 bytes
    np.testing.assert_array_equal(a.block(0, 1).numpy(), blocks[0, 1])
    a.block(1, 0).copy_from(np.ones((2, 3)))
    assert a.numpy().sum() == 6 + 6
    with pytest.raises(BadRequest, match=r"place: got \(0, 0\); expected a block of <BlockSparseForm 6x4, 2 of 4"):
        a.block(0, 0)
    with pytest.raises(TypeError, match=r"a.numpy\(\) makes a dense array"):
        np.asarray(a)
    assert "BlockSparseTensor(f64, <BlockSparseForm 6x4, 2 of 4 blocks>, host)" in repr(a)


def test_forms_are_equal_by_what_they_say_and_survive_pickling():
    one, other = (dp.BlockSparseForm([[4, 2], [3]], [[0, 0], (1, 0)]) for _ in range(2))
    assert one == other == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(other)
    assert one != dp.BlockSparseForm(((4, 2), (3,)), ((1, 0), (0, 0)))


@pytest.mark.parametrize(
    ("sections", "blocks", "words"),
    [
        (((4, 0),), (), r"sections\[0\]: got 0; expected .*1"),
        (((4,), ()), (), r"sections\[1\]: got none; expected at least one section"),
        (4, (), "sections: got 4; expected a tuple"),
        (((4, 2),), ((2,),), r"blocks\[0\]: got 2"),
        (((4, 2),), ((0, 0),), r"blocks\[0\]: got .* one for each axis"),
        (((4, 2),), ((1,), (1,)), r"blocks: got \[1\] twice"),
    ],
)
def test_a_form_that_is_none_is_refused(sections, blocks, words):
    with pytest.raises(BadRequest, match=words):
        dp.BlockSparseForm(sections, blocks)


def test_bad_requests_name_the_operand(dev):
    form = dp.BlockSparseForm(((4, 2), (3, 1)), ((0, 0), (1, 1)))
    flat = dev.zeros((block_offsets(form, dev.zeros((1,), "f32").dtype)[-1],), "f32")
    square = dp.BlockSparseForm(((3, 1), (3, 1)), ((0, 0),))
    small = dev.zeros((9,), "f32")

    def made(spec="ik,kj->ij", a=flat, a_form=form, b=small, b_form=square, **more):
        return dp.ContractBlockSparseRequest(spec, a, a_form, b, b_form, **more)

    assert dp.run(made()).shape == (12,)
    for fields, words in (
        ({"spec": "ki,kj->ij"}, r"b_form: got the sections \(3, 1\) along k .* expected \(4, 2\), the sections of a"),
        ({"spec": "ikl,kj->ij"}, r"a_form: got 2 axes"),
        ({"spec": "ii,kj->kj"}, r"spec: .* a has a mode twice"),
        ({"spec": "ik,kj->iz"}, "no operand has z"),
        ({"a": small}, r"a: got f32\[9\]; expected dense f32\[66\], the 2 blocks"),
        ({"b": dev.zeros((9,), "f64")}, "b: got f64.* expected f32, the dtype of a"),
        ({"a": dev.zeros((66,), "f16")}, "a: got f16.* expected f32, f64, c64 or c128"),
        ({"a_form": ((4, 2),)}, "a_form: .* expected a BlockSparseForm"),
        ({"out_form": dp.BlockSparseForm(((4, 2), (2, 2)), ())}, r"out_form: got the sections \(2, 2\) along j"),
        ({"out_form": dp.BlockSparseForm(((4, 2),), ())}, "out_form: got 1 axes"),
        ({"c": flat}, "out_form: got None; expected the form of c"),
        ({"beta": 2.0}, "beta: .* expected 0 without c"),
        ({"alpha": 1j}, "alpha: .* a real number"),
        ({"out": flat}, r"out: got f32\[66\]"),
    ):
        with pytest.raises(BadRequest, match=words):
            made(**fields)
    with pytest.raises(BadRequest, match=r"a: got a Tensor; expected a BlockSparseTensor"):
        tensors.contract_block_sparse("ik,kj->ij", flat, flat)
    with pytest.raises(BadType, match="values"):
        dp.BlockSparseTensor([1.0], form)
    with pytest.raises(BadRequest, match=r"values: got f32\[9\]"):
        dp.BlockSparseTensor(small, form)


def test_what_cutensor_has_not_is_refused_by_rule(dev):
    form = dp.BlockSparseForm(((2, 2),), ((0,), (1,)))
    x = dev.zeros((66,), "f32")
    whole = dev.zeros((67,), "f32")
    given = SimpleNamespace(device=SimpleNamespace(is_host=False), tensors=lambda: [("a", whole[1:], False)])
    assert aligned_blocks(given) == "needs a at a multiple of 256 bytes, has 4: copy it"
    dp.run(dp.ContractBlockSparseRequest("i,i->i", whole[1:], form, x, form))  # on the host memory begins anywhere
    none = dp.BlockSparseForm(((2, 2),), ())
    with pytest.raises(NoRow, match="needs a block of b where c is added"):
        dp.run(dp.ContractBlockSparseRequest("i,i->i", x, form, dev.zeros((0,), "f32"), none, out_form=form, c=x))
    many = dp.BlockSparseForm(((1,),) * 33, ((0,) * 33,))
    one = dev.array(np.ones(1, "f4"))
    modes = [*range(33)]
    with pytest.raises(NoRow, match="needs 32 modes at most of a, has 33"):
        dp.run(dp.ContractBlockSparseRequest([modes, modes, [0]], one, many, one, many))


def test_what_the_library_has_no_kernel_for_is_refused(dev, executor):
    form = dp.BlockSparseForm(((2,), (3,)), ((0, 0),))
    x, row = dev.zeros((6,), "f32"), GPU_ROWS[1]  # of f64
    with pytest.raises(Refused, match=r"cuTENSOR has no kernel for this.*NOT_SUPPORTED"):
        row.call(dp.ContractBlockSparseRequest("ik,jk->ij", x, form, x, form), executor, row)
