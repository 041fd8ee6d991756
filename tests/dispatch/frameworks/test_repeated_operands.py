"""Repeated calls over torch's tensors in lists and mappings, or beside numbers, end as a request on a fresh executor.

The device is that of test_repeated_calls.py, host memory under the name of a GPU; the calls those of
list_call_cache_cases.py, with torch's tensors for some of ours or for all.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections import Counter
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core import list_call_cache, list_call_code
from dispatch.device.frameworks import frameworks
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.dropout import DropoutStatesRequest
from dispatch.ops.sparse.tensor import as_tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def module(name, place):
    spec = importlib.util.spec_from_file_location(name, place)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


calls = module("repeated_calls", Path(__file__).with_name("test_repeated_calls.py"))
operands = module("list_call_cache_cases", Path(__file__).parents[1] / "list_call_cache_cases.py")
dev, randn, aligned = calls.dev, calls.randn, calls.aligned

ROUNDS = 400
ALL, MOST = 1.0, 0.8  # of the tensors of a call that are torch's


EVERY = [getattr(dp, name) for name in dir(dp)]  # families are imported as they are asked for
REMEMBERED = [one for one in gc.get_objects() if type(one) is list_call_cache.ListCallCache]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Each test has a library of its own, and with it ways of its own."""
    for one in REMEMBERED:
        monkeypatch.setattr(one, "_lookups", {})
    monkeypatch.setattr(DropoutStatesRequest, "bytes_of", lambda *_: operands.STATES)


@pytest.fixture
def run_count(monkeypatch):
    """How many requests of each op were run."""
    count = Counter()
    before = calls.NotingExecutor.run

    def counted(self, request):
        count[request.op] += 1
        return before(self, request)

    monkeypatch.setattr(calls.NotingExecutor, "run", counted)
    return count


def converted(fields, chosen):
    """The same fields with torch's tensors where those are `chosen`; what is one tensor stays one."""
    known = {}

    def other(tensor):
        if id(tensor) not in known:
            found = calls.theirs(tensor) if chosen() else None
            known[id(tensor)] = tensor if found is None else found
        return known[id(tensor)]

    return operands.changed_in(fields, other)


def tensors_in(fields):
    return [one for _, one in operands.within(fields) if isinstance(one, (Tensor, torch.Tensor))]


def address(one):
    return one.ptr if isinstance(one, Tensor) else one.data_ptr()


def shown(value, given):
    if isinstance(value, (tuple, list)):
        return [shown(one, given) for one in value]
    if isinstance(value, torch.Tensor):
        where = given.get(value.data_ptr(), "made") if value.numel() else "nowhere"
        return where, value.dtype, value.shape, value.stride()
    if isinstance(value, Tensor):
        return given.get(value.ptr, "made") if value.size else "nowhere", str(value.layout)
    return repr(value)


def outcome(executor, action, given):
    executor.runs.clear()
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  # it is compared
        return (type(error), str(error)), []
    results = result if isinstance(result, (tuple, list)) else [result]
    kinds = (Tensor, torch.Tensor)
    places = {address(one): f"result {n}" for n, one in enumerate(results) if isinstance(one, kinds)} | given
    runs = [(getattr(plan, "key", plan), [places.get(word, repr(word)) for word in words])
            for plan, words, *_ in executor.runs]  # fmt: skip
    return shown(result, given), runs


def judge(dev, rng, rounds=ROUNDS):
    """What ends otherwise by a call than by a request, up to the first; how many calls of each form made no request."""
    drawn, quick, executor = operands.Drawn(dev, rng), Counter(), dev.executor()
    before, runs = calls.NotingExecutor.run, Counter()

    def counted(self, request):
        runs[self is executor] += 1
        return before(self, request)

    calls.NotingExecutor.run = counted
    try:
        for turn in range(rounds):
            function, make, fields = drawn.form(turn)
            share = ALL if rng.random() < 0.6 else MOST
            seed = int(rng.integers(1 << 30))
            variants = [fields, drawn.again(fields), drawn.changed(fields)]
            variants += [drawn.again(variants[-1]), drawn.changed(fields), drawn.again(fields)]
            for given in variants:
                if any(one.device is not dev for one in tensors_in(given)):
                    continue  # it is for another device to run
                if function is dp.grouped_matmul and not all(
                    isinstance(given[name], operands.FORMS[make]) for name in ("a", "b")
                ):
                    continue  # it is for the other request, or for none
                if "ends" in given and not isinstance(given["ends"], Tensor):
                    continue  # each run copies them to another place
                draw = torch.Generator().manual_seed(seed)  # the same places are torch's in all of the variants
                theirs = converted(given, lambda: float(torch.rand((), generator=draw)) < share)  # noqa: B023
                places = {address(one): n for n, one in enumerate(tensors_in(theirs))}
                count = runs[True]
                call = outcome(executor, lambda: function(**theirs), places)  # noqa: B023
                fresh = calls.NotingExecutor(executor.stream)
                wanted = outcome(fresh, lambda: fresh_run(fresh, make(**theirs)), places)  # noqa: B023
                name = "numbers" if make in drawn.numbered else getattr(make, "__name__", "graph")
                quick[name] += runs[True] == count and bool(call[1])
                if call != wanted:
                    return [(name, theirs, call, wanted)], quick
    finally:
        calls.NotingExecutor.run = before
        drawn.close()
    return [], quick


def fresh_run(executor, request):
    """A run on another executor than the device's own, which `dispatch.run` would take."""
    return executor.run(request)


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    assert all(count > 20 for name, count in quick.items() if name != "DropoutStatesRequest"), quick
    assert len(quick) == 8


MUTATIONS = dict(operands.MUTATIONS)
MUTATIONS["no alignment is looked at"] = operands.replaced(list_call_code, "ALIGNED", 0)
# Their library keeps the order of uses, and those of ours are not written.
for name in ("reads in another order", "a write is left out", "no span is looked at", "no span meets another"):
    del MUTATIONS[name]


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_way_in_is_found(dev, rng, mutate, monkeypatch):
    clear = list_call_code._maker.cache_clear
    clear()
    mutate(monkeypatch)
    try:
        differences, _ = judge(dev, rng, 5 * ROUNDS)
    except (IndexError, TypeError):  # it has come to nothing
        return
    finally:
        clear()
    assert differences


# -- no request -------------------------------------------------------------------------------------------------------
def half(*shape):
    return aligned(lambda: torch.randn(*shape).half())


def grouped():
    return [half(8, 16) for _ in range(3)], [half(16, 8) for _ in range(3)]


def pattern(wrapped):
    """A matrix of two elements, its parts as `wrapped` has them."""
    parts = {"values": [2.0, 3.0], "rows": [0, 1, 2], "columns": [1, 0]}
    dtypes = {"values": torch.float32, "rows": torch.int32, "columns": torch.int32}
    made = {}
    for name, numbers in parts.items():
        memory = aligned(lambda: torch.empty(len(numbers), dtype=dtypes[name]))  # noqa: B023
        made[name] = wrapped(memory.copy_(torch.tensor(numbers, dtype=dtypes[name])))
    return dp.sparse.csr(made["values"], made["rows"], made["columns"], shape=(2, 2))


CALLS = {
    "axpy": ("axpy", lambda: dp.axpy(randn(64), randn(64), alpha=2.5)),
    "gemv with numbers": ("gemv", lambda: dp.gemv(randn(8, 16), randn(16), alpha=0.5, beta=2.0, y=randn(8))),
    "lists": ("grouped_matmul", lambda: dp.grouped_matmul(*grouped())),
    "einsum": ("einsum", lambda: dp.einsum("ij,jk->ik", randn(4, 8), randn(8, 4))),
    "a transform with callbacks": (
        "callback_dft",
        lambda: dp.callback_dft(randn(4, 64), "r2c", axes=1, load=dp.fft.Callback.window(randn(64))),
    ),
    "a product by its library": ("matmul", lambda: dp.matmul(half(8, 16), half(16, 8), library="cutlass")),
    "a product with alpha there": (
        "matmul",
        lambda: dp.matmul(half(8, 16), half(16, 8), alpha=randn(1).reshape(()), beta=randn(1).reshape(()),
                          out=half(8, 8)),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize(("op", "call"), CALLS.values(), ids=CALLS.keys())
def test_a_repeated_call_makes_no_request(run_count, op, call):
    for _ in range(4):
        assert isinstance(first(call()), torch.Tensor)
    assert run_count == {op: 1}


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def test_a_sparse_matrix_of_torch_s_memory_and_one_of_ours(dev, run_count):
    theirs = pattern(lambda memory: memory)
    for _ in range(4):
        assert isinstance(dp.sparse_mv(*theirs, randn(2)), torch.Tensor)
    assert run_count == {"sparse_mv": 1}

    ours = pattern(lambda memory: owned(dev, memory))
    run_count.clear()
    for _ in range(4):
        assert isinstance(dp.sparse_mv(*ours, randn(2)), torch.Tensor)
    assert not run_count  # it is the same plan
    # Once another stream has written what is ours, that has to be waited for: by a request, which notes the use.
    ours.values.storage.owner = ours.values.storage.writer = dev.stream()
    assert isinstance(dp.sparse_mv(*ours, randn(2)), torch.Tensor)
    assert run_count == {"sparse_mv": 1}


def test_a_matrix_of_torch_s_memory_without_an_operand_of_torch_s_beside_it(dev, run_count):
    theirs = pattern(lambda memory: memory)
    run = lambda a: dp.spgemm(*a, *a, nnz=2, stamp=None)  # noqa: E731
    for _ in range(4):
        assert [type(part) for part in run(theirs)] == [torch.Tensor] * 3
    assert run_count == {"spgemm": 1}
    run(pattern(lambda memory: memory))
    assert run_count == {"spgemm": 1}, "other memory of the same layouts"

    ours = pattern(lambda memory: owned(dev, memory))
    for _ in range(4):
        assert [type(part) for part in run(ours)] == [Tensor] * 3
        assert [type(part) for part in run(theirs)] == [torch.Tensor] * 3
    assert run_count == {"spgemm": 2}
    rows = pattern(lambda memory: memory).rows
    mixed = dp.sparse.csr(theirs.values, rows, ours.columns, shape=(2, 2))
    whole = as_tensor("values", aligned(lambda: torch.ones(3)))
    part = dp.sparse.csr(whole[:2], theirs.rows, theirs.columns, (2, 2))
    for number, matrix in enumerate((mixed, mixed, part, part), 3):
        assert [type(part) for part in run(matrix)] == [torch.Tensor] * 3
        assert run_count == {"spgemm": number}, "some is ours, or a part of what is torch's: a request each time"
    # Once another stream has written what is torch's, that has to be waited for, by a request.
    theirs.values.storage.owner = theirs.values.storage.writer = dev.stream()
    assert [type(part) for part in run(theirs)] == [torch.Tensor] * 3
    assert run_count == {"spgemm": 7}


@pytest.mark.usefixtures("dev")
def test_what_has_other_memory_since_it_was_taken_in_is_not_learnt(run_count):
    """Its plan is of the memory that was, and its key would be of what is there now."""
    matrix = pattern(lambda memory: memory)
    given = matrix.values.storage.keep
    held = given[:]  # the memory that was stays
    given.set_(aligned(lambda: torch.ones(2)))
    for count in range(1, 4):
        dp.spgemm(*matrix, *matrix, nnz=2)
        assert run_count == {"spgemm": count}
    assert held.data_ptr() == matrix.values.ptr != given.data_ptr()


def owned(dev, memory):
    found = dev.empty(tuple(memory.shape), str(memory.dtype).removeprefix("torch."))
    calls.theirs(found).copy_(memory)
    return found


@pytest.mark.usefixtures("dev")
def test_the_version_of_what_is_written_counts_on(run_count):
    y, x = randn(64), randn(64)
    for turn in range(y._version + 1, 6):
        assert dp.axpy(x, y, alpha=1.5, out=y) is y
        assert y._version == turn
    assert run_count == {"axpy": 1}


@pytest.mark.usefixtures("dev")
def test_memory_that_was_let_go_is_refused_after_good_calls():
    for _ in range(2):
        dp.axpy(randn(64), randn(64), alpha=2.5)
    gone = torch.empty(64)
    gone.untyped_storage().resize_(0)
    with pytest.raises(BadRequest, match="was freed or not yet allocated"):
        dp.axpy(gone, randn(64), alpha=2.5)


@pytest.mark.usefixtures("dev")
def test_one_that_autograd_follows_is_refused_after_good_calls():
    for _ in range(2):
        dp.axpy(randn(64), randn(64), alpha=2.5)
    with pytest.raises(BadRequest, match="requires grad"):
        dp.axpy(randn(64).requires_grad_(), randn(64), alpha=2.5)


@pytest.mark.usefixtures("dev")
def test_a_view_that_is_conjugated_in_name_only_is_refused_after_good_calls():
    def new():
        return aligned(lambda: torch.empty(64, dtype=torch.complex64)).fill_(1)

    for _ in range(2):
        dp.axpy(new(), new(), alpha=2.5)
    with pytest.raises(BadRequest, match="conjugated"):
        dp.axpy(new().conj(), new(), alpha=2.5)


def test_nothing_that_was_given_is_kept(dev):
    x, (a, b) = randn(64), grouped()
    gone = [weakref.ref(one) for one in (x, *a, *b)]
    for _ in range(2):
        dp.axpy(x, randn(64), alpha=2.5)
        dp.grouped_matmul(a, b)
    del x, a, b
    dev.executor().runs.clear()
    gc.collect()
    assert not any(one() is not None for one in gone)


def test_operands_of_two_libraries_make_a_request(dev, run_count, monkeypatch):
    there = frameworks._known[torch.Tensor]

    class Other(torch.Tensor):
        pass

    second = type(there)(dev)
    second.name, second.code = "another", second.code._replace(kinds=frozenset((Other,)))
    monkeypatch.setitem(frameworks._known, Other, second)
    monkeypatch.setattr(calls.torch_s, "TYPES", frozenset((*calls.torch_s.TYPES, Other)))
    for _ in range(3):
        dp.axpy(randn(64), randn(64).as_subclass(Other), alpha=2.5)
    assert run_count == {"axpy": 3}
