"""What becomes of plans that are launched at any addresses: comparisons, evictions, calls within calls.

Plans and executors are those of test_plan_relocation.py.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from dispatch.execute import plan_relocation, relocations
from dispatch.execute.graph_nodes import Node
from dispatch.execute.plan_relocation import EVERY, FIRST
from dispatch.execute.relocated_graph import FIRST_CHECK, LAST_CHECK
from dispatch.execute.relocation import LEARNT, PROVING

spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_plan_relocation.py"))
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)

stand_in, call_of, called, right, relocated = plans.stand_in, plans.call_of, plans.called, plans.right, plans.relocated
A, B, C, STEPS = plans.A, plans.B, plans.C, plans.STEPS
driver, executor, logged = plans.driver, plans.executor, plans.logged


# -- comparisons ------------------------------------------------------------------------------------------------------
def check_comparisons(executor):
    """The first after FIRST_CHECK launches at other addresses, then ever eight times as many."""
    plan = relocated(executor)
    counts = plan.relocation.graphs[0].counts
    for turn, until in enumerate((FIRST_CHECK, 8 * FIRST_CHECK)):
        called(executor, plan, until, start=1 + 10_000 * turn)
        assert len(plan.called) == turn
        assert counts.until_check == 0
        called(executor, plan, 1, start=0)
        assert len(plan.called) == turn + 1
        assert executor.relocation_stats()["checked"] == turn + 1
        assert counts.until_check == 8 * counts.launches
    counts.compare_after(LAST_CHECK)
    counts.until_check = 0
    called(executor, plan, 1, start=5)
    assert counts.until_check == LAST_CHECK
    assert executor.relocation_stats()["differed"] == 0


def test_later_calls_are_compared_ever_more_rarely(executor):
    check_comparisons(executor)


def test_a_comparison_is_of_the_call_that_was_made(executor):
    plan = relocated(executor)
    plan.relocation.graphs[0].counts.until_check = 0
    called(executor, plan, 1, start=77)
    assert executor.seen[-1] == plan.called[-1] == next(plans.addresses(77))


DIFFERENT = {
    "image": lambda node: node._replace(image=node.image[:-1] + b"\1"),
    "grid": lambda node: node._replace(form=(*node.form[:3], (2,) * 7, *node.form[4:])),
    "kernel": lambda node: node._replace(form=(16 * 9, *node.form[1:])),
    "size": lambda node: node._replace(image=node.image + bytes(8)),
}


def check_difference(executor, logged, what):
    """A library that does otherwise from some call on: all graphs of the plan go, once and for good."""
    logged.clear()
    before = executor.relocation_stats()["differed"]
    plan = relocated(executor)
    assert executor.relocate(plan, (A, A)) == ""
    ordinary = plan.call
    called(executor, plan, FIRST_CHECK)

    def call(given):
        nodes, edges = ordinary(given)
        nodes = nodes[:1] if what == "fewer" else [nodes[0], DIFFERENT[what](nodes[1])]
        return nodes, edges if len(nodes) > 1 else []

    plan.call = call
    seen = len(executor.seen)
    plan.relocation.graphs[0].counts.until_check = 0
    called(executor, plan, 300)
    called(executor, plan, 3, [(address, address) for address in (A, B, C)])
    assert len(plan.called) == 303
    assert plan.launch is None
    assert not plan.relocation.graphs
    assert len(executor.seen) == seen + 1
    assert executor.relocation_stats()["differed"] == before + 1
    why = "a later call of the library had other parameters than predicted"
    assert logged == [("not relocated", {"row": "of this test", "cause": why})]
    assert plan.relocation.why == why == executor.relocate(plan, (A, B))


@pytest.mark.parametrize("what", [*DIFFERENT, "fewer"])
def test_a_plan_that_differs_is_called_by_its_library_for_good(executor, logged, what):
    check_difference(executor, logged, what)
    assert executor.relocation_stats()["relocated"] == 0


def check_edges(executor, logged):
    plan = relocated(executor)
    ordinary = plan.call
    called(executor, plan, FIRST_CHECK)
    plan.call = lambda given: (ordinary(given)[0], [])
    called(executor, plan, 2)
    assert plan.launch is None
    assert len(plan.called) == 2
    assert len(logged) == 1


def test_a_library_that_enqueues_in_another_order_is_called_for_good(executor, logged):
    check_edges(executor, logged)


@pytest.mark.parametrize("what", ["node", "error"])
def test_a_comparison_that_cannot_be_made_is_no_error_of_the_call(executor, logged, what):
    plan, host_node = relocated(executor), Node(3, (), bytes(8))
    called(executor, plan, FIRST_CHECK)

    def refuse():
        raise RuntimeError("another kind of node")

    if what == "error":
        executor.on_recorded = refuse
    ordinary, seen = plan.call, len(executor.seen)
    for arguments in itertools.islice(plans.addresses(), 300):
        plan.call = lambda given: ([ordinary(given)[0][0], host_node], [(0, 1)])
        executor.enqueue(plan, arguments, (), ())
        plan.call = ordinary
    assert len(plan.called) == 300
    assert plan.launch is None
    assert len(executor.seen) == seen + 1
    (line,) = logged
    assert line[1]["cause"].startswith("a later call of the library cannot be compared: ")
    assert plan.relocation.why == line[1]["cause"]


def check_status(executor, driver, logged):
    plan = relocated(executor)
    driver.put_status = 1
    called(executor, plan, 50)
    driver.put_status = 0
    called(executor, plan, 50)
    assert len(plan.called) == 100
    assert plan.relocation.why == "its graph accepts no other parameters: status 1"
    assert executor.relocation_stats()["differed"] == len(logged) == 1


def test_a_node_that_takes_no_parameters_ends_its_plan_s_graphs(executor, driver, logged):
    check_status(executor, driver, logged)


def test_a_call_that_reads_memory_which_is_elsewhere_now_is_learnt_again(executor, logged):
    """Zeros that more were asked for, or numbers that began anew: what is kept with the graph is not the latest."""
    place = [0x5000]
    plan = relocated(executor, call_of((1, 40, lambda _: place[0].to_bytes(8, "little"))))
    called(executor, plan, FIRST_CHECK)
    place[0], executor.memory = 0x6000, object()
    called_before = [node.image for node in plan.call((A, B))[0]]
    assert executor.run(plan, A, B) == called_before
    assert not logged
    assert plan.launch is None
    assert executor.relocation_stats()["relocated"] == 0
    called(executor, plan, FIRST + EVERY * STEPS)
    assert plan.launch is not None
    assert executor.relocation_stats()["differed"] == 0


def test_numbers_that_a_word_cannot_hold_are_the_library_s_own_also_when_a_comparison_is_due(executor):
    plan = relocated(executor, call_of((1, 32, stand_in.number(2, "e"))), (A, B, 0.5))
    plan.relocation.graphs[0].counts.until_check = 0
    called(executor, plan, 3, [(A, B + 64 * turn, 1e6) for turn in range(3)])
    called(executor, plan, 3, [(A, B + 64 * turn, 0j) for turn in range(3)])
    assert executor.relocation_stats()["checked"] == 0
    called(executor, plan, 20, [(A, B + 64 * turn, 0.5) for turn in range(20)])
    assert executor.relocation_stats()["checked"] == 1
    assert plan.launch is not None


# -- what goes --------------------------------------------------------------------------------------------------------
def test_the_oldest_graph_goes_and_may_be_learnt_again(executor, driver, monkeypatch):
    monkeypatch.setattr(relocations, "MAX_GRAPHS", 3)
    made = [stand_in.LibraryPlan(call_of()) for _ in range(5)]
    for plan in made:
        assert executor.relocate(plan, (A, B)) == ""
    gc.collect()
    assert [plan.launch is not None for plan in made] == [False, False, True, True, True]
    assert len(driver.executables) == len(driver.graphs) == executor.relocation_stats()["relocated"] == 3
    for plan in made:
        called(executor, plan, FIRST + EVERY * STEPS)
        assert plan.launch is not None
    assert made[0].called
    assert [plan.launch is not None for plan in made] == [False, False, True, True, True]


def test_a_plan_of_all_forms_whose_graph_goes_learns_again(executor):
    plan = stand_in.LibraryPlan(call_of())
    forms = [(A, B), (A, A), (A, 0), (0, B)]
    for arguments in forms:
        assert executor.relocate(plan, arguments) == ""
    called(executor, plan, FIRST + EVERY, [(0, 0)] * (FIRST + EVERY))
    assert plan.relocation.due == plan_relocation.NEVER
    graph = next(graph for graph in plan.relocation.graphs if graph.fits((A, B)))
    executor.relocations.drop(graph)
    plan.relocation.drop(plan, graph)
    called(executor, plan, EVERY * (STEPS + 2), ((A + 64 * n, B) for n in range(10_000)))
    assert any(graph.fits((A, B)) for graph in plan.relocation.graphs)


class Counted:
    """Something with a size that takes a moment to tell."""

    @property
    def nbytes(self):
        return sum(range(20))


@pytest.fixture
def beside():
    """`beside(act)`: another thread that does something again and again, and comes in between wherever it may."""
    is_over, threads, interval = threading.Event(), [], sys.getswitchinterval()

    def begin(act):
        def go_on():
            while not is_over.is_set():
                act()

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()

    sys.setswitchinterval(1e-6)
    yield begin
    is_over.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)


def test_stats_are_told_while_another_thread_learns(executor, beside):
    graphs = []

    class HoldingPlan:
        relocation = SimpleNamespace(drop=lambda *_: None)

    plan = HoldingPlan()

    def add():
        graphs.append(Counted())
        executor.relocations.add(plan, graphs[-1])
        del graphs[: -2 * relocations.MAX_GRAPHS]

    for _ in range(relocations.MAX_GRAPHS):
        add()
    beside(add)
    for _ in range(300):
        assert executor.relocations.stats()["relocated"] >= relocations.MAX_GRAPHS


def test_plans_that_wait_are_forgotten_while_one_is_learnt(executor, beside):
    made = [stand_in.LibraryPlan(call_of()) for _ in range(relocations.MAX_WAITING + 8)]
    for plan in made:
        plan.relocation = SimpleNamespace(learn_some=lambda *_: False)
    beside(executor.relocations.forget)
    for plan in itertools.islice(itertools.cycle(made), 30_000):
        executor.relocations.wait(plan, ())
        assert not executor.relocations.learn(executor)


# -- calls within calls -----------------------------------------------------------------------------------------------
def test_calls_of_a_finalizer_within_a_step_learn_nothing_and_are_right(executor):
    plan, depth, seen = stand_in.LibraryPlan(call_of()), [], []

    def enter():
        if not depth:
            depth.append(0)
            for arguments in ((A, B), (B, A)):
                before = len(executor.seen)
                is_right = [executor.run(plan, *arguments) == right(plan, arguments)]
                plan.relocation.calls = max(plan.relocation.calls, plan.relocation.due)
                is_right.append(executor.run(plan, *arguments) == right(plan, arguments))
                seen.append((*is_right, executor.relocate(plan, arguments), len(executor.seen) - before))
            depth.clear()

    executor.on_recorded = enter
    called(executor, plan, 400)
    assert plan.launch is not None
    plan = stand_in.LibraryPlan(call_of())
    assert executor.relocate(plan, (A, B)) == ""
    called(executor, plan, 20)
    assert set(seen) == {(True, True, "it is being learnt", 0)}


def test_a_comparison_within_which_the_graph_is_launched(executor, driver, logged):
    plan = relocated(executor)
    called(executor, plan, FIRST_CHECK)
    executor.on_recorded = driver.on_put = lambda: executor.enqueue(plan, (C, A), (), ())
    for arguments in itertools.islice(plans.addresses(500), 100):
        before, number_of = len(driver.launched), len(plan.called)
        executor.enqueue(plan, arguments, (), ())
        assert right(plan, arguments) in driver.launched[before:] or arguments in plan.called[number_of:]
        assert all(one in (right(plan, arguments), right(plan, (C, A))) for one in driver.launched[before:])
    assert executor.relocation_stats()["checked"] >= 1
    assert not logged
    assert plan.launch is not None


def test_a_graph_that_goes_while_it_is_launched(executor, driver):
    plan = relocated(executor)
    assert executor.relocate(plan, (A, A)) == ""
    graph = plan.relocation.graphs[1]
    driver.on_run = lambda: plan.relocation.drop(plan, graph)
    called(executor, plan, 1)
    driver.on_run = lambda: None
    assert graph not in plan.relocation.graphs
    called(executor, plan, 100)


def test_an_interrupt_within_a_step_leaves_a_plan_that_learns(executor):
    plan, turns = stand_in.LibraryPlan(call_of()), []

    def interrupt():
        turns.append(0)
        if len(turns) % 3 == 1:  # every other capture, for another recording follows one that is interrupted
            raise KeyboardInterrupt

    executor.on_recorded = interrupt
    for number_of in range(400):
        with suppress(KeyboardInterrupt):
            called(executor, plan, 1, [(A + 64 * number_of, B)])
        assert plan.relocation is None or not plan.relocation._is_learning
    assert plan.launch is not None
    assert len(turns) >= 3 * (LEARNT + PROVING)
