"""Repeated calls with lists and mappings of operands, or numbers, end as a request on a fresh executor would.

The stand-ins for a GPU and its executor are those of call_cache_cases.py.
"""

import importlib.util
import pickle
from collections import Counter
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core import list_call_code
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.libraries.cutlass import evt

spec = importlib.util.spec_from_file_location(
    "list_call_cache_cases", Path(__file__).with_name("list_call_cache_cases.py")
)
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)
stand_ins, ROUNDS, FORMS, dev, built = calls.stand_ins, calls.ROUNDS, calls.FORMS, calls.dev, calls.built
Drawn, board, changed_in, told, within = calls.Drawn, calls.board, calls.changed_in, calls.told, calls.within
MUTATIONS = calls.MUTATIONS


def both(dev, function, make, given):
    call = stand_ins.outcome(dev.executor(), lambda: function(**given))
    fresh = stand_ins.NotingExecutor(dev.executor().stream)
    return call, stand_ins.outcome(fresh, lambda: fresh.run(make(**given)))


def judge(dev, rng, rounds=ROUNDS):
    """What ends otherwise by a call than by a request, up to the first; how many calls of each form made no request."""
    drawn, quick, executor = Drawn(dev, rng), Counter(), dev.executor()
    before, runs = stand_ins.NotingExecutor.run, Counter()

    def counted(self, request):
        runs[self is executor] += 1
        return before(self, request)

    stand_ins.NotingExecutor.run = counted
    try:
        for turn in range(rounds):
            function, make, fields = drawn.form(turn)
            variants = [fields, drawn.again(fields), drawn.changed(fields)]
            variants += [drawn.again(variants[-1]), drawn.changed(fields), drawn.again(fields)]
            for given in variants:
                if any(isinstance(one, Tensor) and one.device is not dev for _, one in within(given)):
                    continue  # it is for another device to run
                if function is dp.grouped_matmul and not all(isinstance(given[n], FORMS[make]) for n in ("a", "b")):
                    continue  # it is for the other request, or for none
                if "ends" in given and not isinstance(given["ends"], Tensor):
                    continue  # each run copies them to another place
                count = runs[True]
                call, request = both(dev, function, make, given)
                name = "numbers" if make in drawn.numbered else getattr(make, "__name__", "graph")
                quick[name] += runs[True] == count and bool(call[1])
                if call != request:
                    return [(name, changed_in(given, told), call, request)], quick
    finally:
        stand_ins.NotingExecutor.run = before
        drawn.close()
    return [], quick


def test_each_call_is_what_its_request_is_on_a_fresh_executor(dev, rng):
    differences, quick = judge(dev, rng)
    assert not differences, "\n".join(map(str, differences[0]))
    assert len(quick) == 8
    assert all(count > 60 for count in quick.values()), quick


def in_part(mutations):
    """One in three at once, the others with what takes long."""
    marks = [[pytest.mark.exhaustive] if number % 3 else [] for number in range(len(mutations))]
    return [pytest.param(mutations[name], id=name, marks=mark) for name, mark in zip(mutations, marks, strict=True)]


@pytest.mark.parametrize("mutate", in_part(MUTATIONS))
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


def test_a_repeated_call_of_any_form_makes_no_request(dev, rng, built):
    drawn = Drawn(dev, rng)
    for turn in range(140):
        function, make, fields = drawn.form(turn)
        if fields.get("library") == "cublasLt" and fields.get("beta"):
            continue
        if fields.get("alpha") is not None and "c" in fields and fields["c"] is fields.get("out"):
            continue  # D is C, which is another plan: see `MatmulRequest.named_arguments`
        function(**fields)
        built.clear()
        function(**drawn.again(fields))
        assert not built, f"{make} {changed_in(fields, told)}"
    drawn.close()


def test_every_request_class_has_a_way_without_a_request(rng):
    pool = stand_ins.hostile.Pool(rng)
    without = [kind.op for kind in pool.requests if kind.plain_reads() is None and kind.unpacked is None]
    pool.other.close()
    assert not without


def test_numbers_change_from_call_to_call_and_one_call_is_remembered(dev, built):
    a, b, bias = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16"), dev.zeros((8,))
    tree = evt.scalar("alpha") * evt.accumulator() + evt.scalar("s") * evt.row("bias")
    for turn in range(20):
        dp.matmul(a, b, epilogue=tree, alpha=float(turn), operands={"bias": bias, "s": turn / 4})
    assert built == {"matmul": 1}
    assert [run[1][-3:] for run in dev.executor().runs] == [(float(n), n / 4, bias.ptr) for n in range(20)]
    assert len(dev.executor().calls) == 1


def test_a_tree_made_anew_is_the_tree_that_it_equals(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    for _ in range(3):
        dp.matmul(a, b, epilogue=evt.relu(evt.accumulator() + evt.row("r")), operands={"r": dev.zeros((8,))})
    assert built == {"matmul": 1}
    dp.matmul(a, b, epilogue=evt.relu(evt.accumulator() + evt.col("r")), operands={"r": dev.zeros((8,))})
    assert built == {"matmul": 2}


@pytest.mark.parametrize("bounds", [((0.0, 6.0), (-0.0, 6.0)), ((0.0, 1.0), (False, True))], ids=str)
def test_trees_that_are_equal_and_not_the_same_are_told_apart(dev, built, bounds):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    first, second = (evt.Clamp(evt.accumulator(), *pair) for pair in bounds)
    assert first == second
    for tree, requests in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 3)):
        dp.matmul(a, b, epilogue=tree)
        assert built["matmul"] == requests


def test_a_tree_that_was_changed_is_another(dev, built):
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((16, 8), "f16")
    tree = evt.silu(evt.accumulator())
    for _ in range(2):
        dp.matmul(a, b, epilogue=tree)
    object.__setattr__(tree, "function", "tanh")
    dp.matmul(a, b, epilogue=tree)
    assert built["matmul"] == 2
    dp.matmul(a, b, epilogue=evt.silu(evt.accumulator()))
    assert built["matmul"] == 3
    first, again, other, new = (id(plan) for plan, *_ in dev.executor().runs)
    assert first == again != other
    assert new not in (first, other)


def test_a_drawing_that_goes_on_is_another(dev, built):
    drawn = dp.cudnn.Graph()
    x = drawn.tensor("x", (2, 4), "f32")
    y = drawn.pointwise("RELU_FWD", x)
    drawn.output("y", y, "f32")
    given = {"x": dev.zeros((2, 4))}
    assert [isinstance(drawn(**given), Tensor) for _ in range(3)] == [True] * 3
    assert built == {"cudnn_graph": 1}
    drawn.output("z", drawn.pointwise("TANH_FWD", x), "f32")
    assert len(drawn(**given)) == 2
    assert built == {"cudnn_graph": 2}
    with pytest.raises(BadRequest, match="an operand"):
        drawn(**given, q=given["x"])


def test_a_drawing_in_another_process_has_a_hash_of_its_own():
    graph = board(4)[0]._builder.build()
    assert "_hash" in vars(graph) or hash(graph)
    twin = pickle.loads(pickle.dumps(graph))
    assert "_hash" not in vars(twin)
    assert twin == graph
    assert hash(twin) == hash(graph)


def test_ends_of_the_host_are_copied_in_each_call(dev, built, monkeypatch):
    """What a call copies is part of it: no plan knows the numbers."""
    a, b = dev.zeros((8, 16), "f16"), dev.zeros((2, 16, 8), "f16")
    copied = []
    array = type(dev).array
    monkeypatch.setattr(type(dev), "array", lambda self, x, *rest: copied.append([*x]) or array(self, x, *rest))
    for ends in ([4, 8], [2, 8], (2, 8)):
        dp.grouped_matmul(a, b, ends)
    assert built == {"grouped_matmul": 3}
    assert copied == [[4, 8], [2, 8], [2, 8]]
    with pytest.raises(BadRequest, match="non-decreasing"):
        dp.grouped_matmul(a, b, [8, 4])


def test_a_list_that_changes_is_another_call(dev, built):
    a = [dev.zeros((8, 16), "f16") for _ in range(3)]
    b = [dev.zeros((16, 8), "f16") for _ in range(3)]
    for _ in range(2):
        dp.grouped_matmul(a, b)
    assert built == {"grouped_matmul": 1}
    a[1] = dev.zeros((24, 16), "f16")
    assert [one.shape for one in dp.grouped_matmul(a, b)] == [(8, 8), (24, 8), (8, 8)]
    assert built == {"grouped_matmul": 2}
    assert [run[1][1] for run in dev.executor().runs][2] == a[1].ptr
    a.pop()
    with pytest.raises(BadRequest, match="as many of each"):
        dp.grouped_matmul(a, b)
