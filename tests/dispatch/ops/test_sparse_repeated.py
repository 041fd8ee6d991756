"""Repeated calls over sparse operands, on a stand-in for a GPU: no request is made again, and all is as by a request."""

# ruff: noqa: E501 - a table of calls

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.call_cache import is_constant
from dispatch.core.operands import OperandRequest

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).parents[1] / "call_cache_cases.py")
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)


@pytest.fixture
def dev():
    device = stand_ins.Gpu()
    yield device
    device.close()


@pytest.fixture
def built(monkeypatch):
    """How many requests are made, by their ops."""
    count = Counter()
    before = OperandRequest.__post_init__

    def counted(self):
        count[type(self).op] += 1
        before(self)

    monkeypatch.setattr(OperandRequest, "__post_init__", counted)
    return count


def sparse(dev, seed=0, shift=0):
    """A matrix of 3 by 3 with five elements; its columns are others for another shift."""
    values = np.random.default_rng(seed).standard_normal(5)
    columns = (np.array([0, 1, 1, 0, 2]) + shift) % 3
    parts = (dev.array(part) for part in (values, np.array([0, 2, 3, 5], "i4"), columns.astype("i4")))
    return dp.sparse.csr(*parts, (3, 3))


def blocks_of(a):
    """The same places with blocks of two by two."""
    values = a.device.array(np.ones((5, 2, 2)))
    return dp.sparse.bsr(values, a.rows, a.columns, (6, 6))


def calls(dev):
    """Functions of a matrix and a turn, which is in the numbers; `a` and the rest lie elsewhere in each."""
    x, b = (lambda: dev.array(np.ones(3))), (lambda: dev.array(np.ones((3, 2))))
    return {
        "sparse_mv": lambda a, turn: (dp.sparse_mv, dp.SparseMvRequest, (*a, x()), {"alpha": float(turn)}),
        "sparse_mv added": lambda a, turn: (dp.sparse_mv, dp.SparseMvRequest, (*a, x()), {"y": x(), "beta": 1.0 + turn}),
        "spmm": lambda a, _: (dp.spmm, dp.SpmmRequest, (*a, b()), {"trans": dp.Operation.T}),
        "sddmm": lambda a, _: (dp.sddmm, dp.SddmmRequest, (*a, b(), dev.array(np.ones((2, 3)))), {"out": dev.zeros((5,), "f64")}),
        "sddmm_batched": lambda a, turn: (dp.sddmm_batched, dp.BatchedSddmmRequest, (*a, dev.array(np.ones((4, 3, 2))), dev.array(np.ones((2, 3)))), {"beta": 1.0 + turn}),
        "spmm_batched": lambda a, _: (dp.spmm_batched, dp.BatchedSpmmRequest, (*a, dev.array(np.ones((4, 3, 2)))), {}),
        "csr2bsr_nnz": lambda a, _: (dp.csr2bsr_nnz, dp.Csr2bsrNnzRequest, tuple(a), {"block": (3, 1)}),
        "csr2bsr": lambda a, _: (dp.csr2bsr, dp.Csr2bsrRequest, tuple(a), {"block": (1, 3), "nnzb": 3}),
        "bsr2csr": lambda a, _: (dp.bsr2csr, dp.Bsr2csrRequest, tuple(blocks_of(a)), {}),
        "spsv": lambda a, _: (dp.spsv, dp.SpsvRequest, (*a, x()), {}),
        "spsm": lambda a, _: (dp.spsm, dp.SpsmRequest, (*a, b()), {"alpha": 2.0}),
        "spgemm": lambda a, _: (dp.spgemm, dp.SpgemmRequest, (*a, *a), {"nnz": 7}),
        "sparse_to_dense": lambda a, _: (dp.sparse_to_dense, dp.SparseToDenseRequest, tuple(a), {}),
        "csr2csc": lambda a, _: (dp.csr2csc, dp.Csr2cscRequest, tuple(a), {}),
        "sparse_check": lambda a, _: (dp.sparse_check, dp.SparseCheckRequest, tuple(a), {}),
        "sparse_axpby": lambda a, turn: (dp.sparse_axpby, dp.SparseAxpbyRequest, (a.values, a.columns, x()), {"beta": 1.0 + turn}),
        "sparse_rot": lambda a, turn: (dp.sparse_rot, dp.SparseRotRequest, (a.values, a.columns, x(), 0.6, 0.8 + turn), {}),
        "spmm_op": lambda a, _: (dp.spmm_op, dp.SpmmOpRequest, (*a, b(), "min_plus"), {"c": b()}),
        "spvv": lambda a, _: (dp.spvv, dp.SpvvRequest, (a.values, a.columns, x()), {}),
    }  # fmt: skip


def shown(run):
    """A run by what it enqueued, and where the outputs made for it are counted from."""
    plan, arguments, reads, writes = run
    places = [
        argument if not isinstance(argument, int) or argument < stand_ins.MADE else "made" for argument in arguments
    ]
    return plan.key, places, [t.ptr for t in reads], [t.ptr if t.ptr < stand_ins.MADE else "made" for t in writes]


@pytest.mark.parametrize("name", calls(None))
def test_a_repeated_call_makes_no_request_and_runs_as_one(name, dev, built):
    call = calls(dev)[name]
    executor = dev.executor()
    for turn in range(5):
        a = sparse(dev, turn, turn)
        function, kind, operands, choices = call(a, turn)
        function(*operands, **choices)
        quick = executor.runs[-1]
        assert sum(built.values()) == 1 + turn, "the first call alone makes a request, and each run below"
        dp.run(kind(*operands, **choices))
        assert shown(quick) == shown(executor.runs[-1])


def test_a_form_is_a_constant_of_a_call_and_another_pattern_is_another_call(dev, built):
    a, x = sparse(dev), dev.array(np.ones(3))
    assert is_constant(a.form)
    assert is_constant(a.fixed().form)
    one, other = a.fixed(), a.fixed()
    for matrix in (a, one, other, a, one, other):
        dp.spsv(*matrix, x)
    assert built["spsv"] == 3


def test_an_output_among_the_tensors_of_a_sparse_operand_is_refused_though_the_call_is_known(dev):
    a, x = sparse(dev), dev.array(np.ones(3))
    out = dev.zeros((3,), "f64")
    dp.sparse_mv(*a, x, out=out)
    dp.sparse_mv(*a, x, out=out)
    for inside in (a.values[:3], a.values[2:], x):
        with pytest.raises(dp.errors.BadRequest, match="out: got memory that overlaps"):
            dp.sparse_mv(*a, x, out=inside)


def test_a_matrix_of_a_closed_device_is_stale_though_the_call_is_known(dev):
    a, x = sparse(dev), dev.array(np.ones(3))
    dp.sparse_mv(*a, x)
    dp.sparse_mv(*a, x)
    dev.close()
    with pytest.raises(dp.errors.DispatchError):
        dp.sparse_mv(*a, x)


def test_same_bits_are_said_of_what_the_library_promises_them_for():
    dev = dp.device("host")
    parts = (dev.array(np.ones(1)), dev.array(np.array([0, 1])), dev.array(np.array([0])))
    a, x = dp.sparse.csr(*parts, (1, 1)), dev.array(np.ones(1))
    for algorithm, trans, expected in (("csr_alg2", "n", True), ("csr_alg2", "t", False), ("default", "n", False)):
        assert dp.SparseMvRequest(*a, x, algorithm=algorithm, trans=trans).same_bits is expected
    b = dev.array(np.ones((1, 1)))
    for algorithm, trans, expected in (("csr_alg3", "n", True), ("csr_alg3", "c", False), ("csr_alg2", "n", False)):
        assert dp.SpmmRequest(*a, b, algorithm=algorithm, trans=trans).same_bits is expected


def test_every_format_of_a_product_has_cases_of_both_bases():
    from dispatch.ops.sparse.cases import forms

    for op in ("spmm", "sparse_mv", "csr2csc", "sparse_to_dense", "spsv"):
        found = {(form.kind, form.base) for form in forms(op, dp.keys.F32)}
        assert len(found) == 2 * len({kind for kind, _ in found}), op


@pytest.mark.parametrize("base", [0, 1])
def test_a_matrix_of_results_is_as_one_whose_parts_were_looked_at(base):
    host = dp.device("host")
    indices = (np.array([0, 2, 3], np.int32) + base, np.array([0, 1, 2], np.int32) + base)
    parts = [host.array(one) for one in (np.arange(1.0, 4), *indices)]
    a = dp.sparse.csr(*parts, (2, 3), base=base)
    b = dp.sparse.csr(*parts, (2, 3), base=base).T
    for found in (dp.sparse.spgemm(a, dp.sparse.tocsr(b)) if not base else a, a.T, a.T.T):
        looked_at = dp.sparse.SparseTensor(*found.parts)
        assert found.form == looked_at.form
        assert [type(x) for x in found.form] == [type(x) for x in looked_at.form]
        assert all(one is other for one, other in zip(found.parts[:3], looked_at.parts[:3], strict=True))
        np.testing.assert_array_equal(found.todense().numpy(), looked_at.todense().numpy())
