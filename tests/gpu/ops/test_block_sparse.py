"""Block-sparse contractions on the GPU: every row's cases, dense tensors, what cuTENSOR refuses."""

import itertools

import numpy as np
import pytest

import dispatch as dp
from dispatch import tensors
from dispatch.errors import DispatchError, NoRow
from dispatch.keys import HOST
from dispatch.ops.contraction.cases import cases
from dispatch.row_check import check_row

ROWS = [row for row in dp.TABLE.of("contract_block_sparse") if row.min_arch != HOST]
KINDS = ("f4", "f8", "c8", "c16")


@pytest.fixture(autouse=True)
def _cutensor(skip_without):
    skip_without(ROWS[0])


def drawn(gpu, rng, modes, cuts, kind, share=0.5):
    """A dense array with blocks of zeros, and the tensor of the others."""
    sections = tuple(cuts[mode] for mode in modes)
    parts = [rng.standard_normal([sum(cut) for cut in sections]) for _ in range(2)]
    array = np.array(parts[0] + 1j * parts[1] if kind[0] == "c" else parts[0], kind)
    form = dp.BlockSparseForm(sections, tuple(itertools.product(*(range(len(cut)) for cut in sections))))
    for block in form.blocks:
        if any(block) and rng.random() > share:
            array[form.slices_of(block)] = 0
    return array, dp.BlockSparseTensor.from_dense(array, sections, device=gpu)


def off(got, expected, kind):
    """How far a result is off, in roundoffs of its largest element."""
    return float(np.abs(got - expected).max(initial=0) / (np.finfo(kind).eps * max(np.abs(expected).max(initial=0), 1)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases_or_refuses_them_with_its_reasons(row, gpu, rng):
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_contractions_are_those_of_the_dense_tensors(gpu, rng, kind):
    worst = {}
    for spec in ("ik,kj->ij", "ki,jk->ji", "ikl,lkj->ji", "aibj,jkbl->laki", "abcd,dceb->ea") * 10:
        inputs, output = spec.split("->")
        cuts = {mode: tuple(map(int, rng.integers(1, 9, rng.integers(1, 4)))) for mode in spec if mode.isalpha()}
        (x, a), (y, b) = (drawn(gpu, rng, modes, cuts, kind) for modes in inputs.split(","))
        expected = np.einsum(spec, x.astype("c16"), y.astype("c16"))
        found = off(tensors.contract_block_sparse(spec, a, b).numpy(), expected, kind)
        z, c = drawn(gpu, rng, output, cuts, kind)
        there = np.zeros(z.shape, bool)
        for block in c.form.blocks:
            there[c.form.slices_of(block)] = True
        added = tensors.contract_block_sparse(spec, a, b, c=c, alpha=0.5, beta=-2.0, out=c)
        more = off(added.numpy(), np.where(there, 0.5 * expected - 2 * z, 0), kind)
        worst[spec] = max(worst.get(spec, 0), found, more)
    assert max(worst.values()) < 200, worst


def test_repeated_calls_at_other_addresses_are_right(gpu, rng):
    cuts = {"i": (64, 32, 48), "k": (40, 24), "j": (16, 80, 8)}
    for turn in range(60):
        (x, a), (y, b) = drawn(gpu, rng, "ik", cuts, "f8", 1.0), drawn(gpu, rng, "kj", cuts, "f8", 1.0)
        got = tensors.contract_block_sparse("ik,kj->ij", a, b, alpha=1.0 + turn)
        assert off(got.numpy(), (1.0 + turn) * (x @ y), "f8") < 200, turn


def test_a_reproducible_result_is_the_same_in_each_run(gpu, rng):
    cuts = {"i": (3, 5), "k": (64,) * 32, "j": (4, 2)}
    (_, a), (_, b) = drawn(gpu, rng, "ik", cuts, "f4"), drawn(gpu, rng, "kj", cuts, "f4")
    found = {tensors.contract_block_sparse("ik,kj->ij", a, b, reproducible=True).numpy().tobytes() for _ in range(20)}
    assert len(found) == 1


@pytest.mark.parametrize(
    "spec", ["ik,k->i", "ik,ik->", "i,j->ij", "ak,ak->a", "aik,akj->aij", "mkc,nk->mn", "mk,nkd->nm", ",ij->ji"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_contraction_is_right_or_refused(gpu, rng, spec, kind):
    """Batches, sums over modes of one tensor alone, scalars: the documentation says nothing of them."""
    inputs, _ = spec.split("->")
    cuts = {mode: tuple(map(int, rng.integers(1, 9, 2))) for mode in spec if mode.isalpha()}
    (x, a), (y, b) = (drawn(gpu, rng, modes, cuts, kind, 0.8) for modes in inputs.split(","))
    try:
        got = tensors.contract_block_sparse(spec, a, b).numpy()
    except NoRow as error:
        print(f"{spec} {kind} is refused: {str(error)[:400]}")
        return
    except DispatchError as error:
        pytest.fail(f"{spec} {kind}: {type(error).__name__}: {error}")
    found = off(got, np.einsum(spec, x.astype("c16"), y.astype("c16")), kind)
    print(f"{spec} {kind} is right within {found:.3g} roundoffs")
    assert found < 200
