"""When a plan learns, what becomes of that, and that every call is the library's own, launched or called.

The library, its graphs, the driver and the executor are those of graph_stand_in.py, which take the executor's own way
to launch or to call.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from dispatch.execute import relocations
from dispatch.execute.graph_nodes import KERNEL, Node
from dispatch.execute.learner import LOST, SETTLING
from dispatch.execute.plan_relocation import AGAIN, BACK_OFF, EVERY, FIRST, MAX_FORMS, NEVER, NOT_SAFE
from dispatch.execute.relocated_graph import FIRST_CHECK
from dispatch.execute.relocation import LEARNT, PROVING, Form

spec = importlib.util.spec_from_file_location("graph_stand_in", Path(__file__).with_name("graph_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

STEPS = LEARNT + PROVING + 3  # captures, what is learnt of them, the code, and the capture at real addresses
INVALID_HANDLE = 400  # CUDA_ERROR_INVALID_HANDLE
A, B, C = 0x7F0000001000, 0x7F0000002010, 0x7F0000004004


@pytest.fixture
def driver(monkeypatch):
    return stand_in.install(monkeypatch.setattr)


@pytest.fixture
def executor(driver):
    return stand_in.GraphExecutor(driver)


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr("dispatch.logs.log", lambda *line: lines.append(line))
    return lines


def kernel(number_of=1, size=96):
    return Node(KERNEL, (16 * number_of, None, 7, (1,) * 7, (), ()), bytes(size))


def call_of(*puts, nodes=None):
    """Operands 0 and 1 in two nodes, and further words."""
    own = [(0, 0, stand_in.address(0, 16)), (1, 8, stand_in.address(1)), *puts]
    return stand_in.Call(nodes or [kernel(1), kernel(2)], [stand_in.Put(*put) for put in own])


def addresses(start=0):
    """Pairs of addresses without end."""
    return ((A + 4096 * n, B + 4096 * n) for n in itertools.count(start))


def called(executor, plan, count, given=None, start=1):
    """Calls of a plan at new addresses, each of which is what the library would do."""
    given = given or addresses(start)
    for arguments in itertools.islice(given, count):
        assert executor.run(plan, *arguments) == right(plan, arguments)


def right(plan, arguments):
    return [node.image for node in plan.call(arguments)[0]]


def relocated(executor, call=None, arguments=(A, B)):
    plan = stand_in.LibraryPlan(call or call_of())
    assert executor.relocate(plan, arguments) == ""
    assert plan.launch is not None
    return plan


# -- when -------------------------------------------------------------------------------------------------------------
def check_steps(executor):
    """Nothing before FIRST calls; then a step each EVERY calls, behind the library's own."""
    plan = stand_in.LibraryPlan(call_of())
    begun = []
    executor.on_recorded = lambda: begun.append(len(plan.called))
    called(executor, plan, FIRST - 1)
    assert not begun
    assert plan.relocation.why == "it has not been called often enough"
    called(executor, plan, EVERY * (STEPS - 1) + 1)
    captured = [FIRST + EVERY * step for step in (*range(LEARNT + PROVING), STEPS - 1)]
    assert begun == captured
    assert len(plan.called) == FIRST + EVERY * (STEPS - 1)
    assert plan.launch is not None
    assert plan.relocation.why == ""
    assert executor.relocation_stats()["relocated"] == 1
    called(executor, plan, FIRST_CHECK)
    assert len(plan.called) == FIRST + EVERY * (STEPS - 1)
    assert plan.relocation.launches == FIRST_CHECK
    assert plan.relocation.nodes == 2
    real = executor.seen[-1]
    assert all(Form.of(given) == Form.of(real) and given != real for given in executor.seen[:-1])
    assert len(set(executor.seen)) == LEARNT + PROVING + 1


def test_a_plan_is_learnt_a_step_at_a_time_behind_calls(executor):
    check_steps(executor)


def test_a_plan_that_cannot_be_captured_never_is(executor):
    plan = stand_in.LibraryPlan(call_of(), capture_safe=False)
    called(executor, plan, 200)
    assert not executor.seen
    assert plan.relocation.why == NOT_SAFE == executor.relocate(plan, (A, B))
    assert plan.relocation.due == NEVER
    assert plan.launch is None


def refusing(executor, call):
    """A plan whose call is refused, with each capture's number of calls before it."""
    plan, begun = stand_in.LibraryPlan(call), []
    executor.on_recorded = lambda: begun.append(len(plan.called))
    for arguments in itertools.islice(addresses(), 2000):
        executor.run(plan, *arguments)
    return plan, begun


def garbage():
    rng = stand_in.seeded(1)
    return lambda _: rng.randbytes(4)


def test_refusals_back_off(executor):
    plan, begun = refusing(executor, call_of((0, 40, garbage())))
    assert len(plan.called) == 2000
    assert plan.launch is None
    assert len(begun) == LEARNT + PROVING
    assert "node 0: the word at byte 40 depends on no operand" in plan.relocation.why
    assert executor.relocation_stats()["refused"] == 1
    assert plan.relocation._every >= 1024
    for _ in range(20):
        plan.relocation.calls = plan.relocation.due
        executor.run(plan, A, B)
    assert plan.relocation._every == BACK_OFF
    assert plan.relocation.why == executor.relocate(plan, (A, B))


def test_a_library_that_refuses_made_up_addresses_is_called(executor):
    def of(given):
        if given[0] > A + (1 << 30) or given[0] < A:
            raise ValueError("misaligned")
        return bytes(4)

    plan, begun = refusing(executor, call_of((0, 40, of)))
    assert len(plan.called) == 2000
    assert begun == [FIRST]  # at the addresses of the call, behind the one that was refused
    assert plan.relocation.why == "ValueError: misaligned"
    assert len(executor.seen) == 2


MAX_LOST = (LOST + 1) * (1 + SETTLING)  # recordings until a plan is given up


@pytest.mark.parametrize("lost", [1, LOST, MAX_LOST - SETTLING - 1, MAX_LOST - SETTLING, 100])
def test_captures_that_are_lost_are_made_again_a_few_times(executor, lost):
    plan = stand_in.LibraryPlan(call_of())
    executor.lost = lost
    called(executor, plan, FIRST + EVERY * (STEPS + LOST + 2))
    if lost < MAX_LOST - SETTLING:
        assert plan.launch is not None
    else:
        assert plan.launch is None
        assert "invalidated repeatedly, by calls of other libraries" in plan.relocation.why
        assert len(executor.seen) == (MAX_LOST if lost == 100 else MAX_LOST - SETTLING + 1)


@pytest.mark.parametrize("how", ["lost", "raised", "interrupted"])
def test_what_a_library_tells_one_call_late_is_told_while_it_is_learnt(executor, monkeypatch, how):
    """As cuDNN does: a capture at made-up addresses fails, and leaves an error that the next call ends in."""
    plan, other = stand_in.LibraryPlan(call_of()), stand_in.LibraryPlan(call_of())
    real, held = set(itertools.islice(addresses(), 2000)), []
    recorded, call = executor.recorded, executor.call

    def told():
        if held:
            raise RuntimeError(held.pop())

    def record(plan, arguments):
        if arguments in real:
            told()
            return recorded(plan, arguments)
        executor.seen.append(arguments)
        held[:] = ["invalid argument"]
        if how != "lost":
            raise KeyboardInterrupt if how == "interrupted" else ValueError("invalid argument")
        return None

    monkeypatch.setattr(executor, "recorded", record)
    monkeypatch.setattr(executor, "call", lambda *given: (told(), call(*given)))
    interrupts = 0
    for given in itertools.islice(addresses(), FIRST + EVERY * (LOST + 2)):
        for each in (plan, other):
            try:
                assert executor.run(each, *given) == right(each, given)
            except KeyboardInterrupt:  # noqa: PERF203  # behind the call, which was made
                interrupts += 1
    assert not held
    assert bool(interrupts) == (how == "interrupted")
    assert plan.launch is other.launch is None
    assert len(executor.seen) >= 2


def test_the_last_capture_may_be_lost(executor):
    plan = stand_in.LibraryPlan(call_of())
    executor.on_recorded = lambda: setattr(executor, "lost", int(len(executor.seen) == LEARNT + PROVING))
    assert executor.relocate(plan, (A, B)) == ""
    assert len(executor.seen) == LEARNT + PROVING + 2


@pytest.mark.parametrize("what", ["image", "grid", "edges", "fewer", "garbage"])
def test_a_real_call_that_is_not_what_was_predicted_is_refused(executor, driver, what):
    """Addresses of one kind have another call, which no made-up one had."""
    plan, ordinary = stand_in.LibraryPlan(call_of()), call_of()
    graphs, executables = dict(driver.graphs), dict(driver.executables)

    def call(given):
        nodes, edges = ordinary(given)
        if given == (A, B):
            if what == "image":
                nodes[1] = nodes[1]._replace(image=bytes(96))
            elif what == "grid":
                nodes[1] = nodes[1]._replace(form=(*nodes[1].form[:3], (2,) * 7, *nodes[1].form[4:]))
            elif what == "edges":
                edges = []
            elif what == "fewer":
                nodes, edges = nodes[:1], []
            else:
                nodes[0] = nodes[0]._replace(image=nodes[0].image[:-1] + b"\1")
        return nodes, edges

    plan.call = call
    assert "differs from the prediction made from placeholder addresses" in executor.relocate(plan, (A, B))
    assert plan.launch is None
    assert executor.run(plan, A, B) == right(plan, (A, B))
    assert (driver.graphs, driver.executables) == (graphs, executables)


def test_edges_that_differ_at_other_addresses_are_refused(executor):
    plan, turns = stand_in.LibraryPlan(call_of()), itertools.cycle(([(0, 1)], []))
    ordinary = plan.call
    plan.call = lambda given: (ordinary(given)[0], next(turns))
    assert executor.relocate(plan, (A, B)) == "its nodes depend on other nodes at other addresses"


@pytest.mark.parametrize("told", [0, 1])
def test_a_kernel_whose_parameters_the_driver_does_not_tell_is_refused(executor, driver, monkeypatch, told):
    """Else those that nobody sees would be the same at all addresses, and stay."""
    ask = driver._cuFuncGetParamInfo
    monkeypatch.setattr(
        type(driver),
        "_cuFuncGetParamInfo",
        lambda _, func, index, *given: ask(func, index, *given) if index.value < told else INVALID_HANDLE,
    )
    kernels = [Node(KERNEL, (16 * n, None, 7, (1,) * 7, ((0, 8), (8, 8)), ()), bytes(16)) for n in (1, 2)]
    plan = stand_in.LibraryPlan(stand_in.Call(kernels, [stand_in.Put(n, 8, stand_in.address(n)) for n in (0, 1)]))
    assert executor.relocate(plan, (A, B)) == f"the parameters of a kernel cannot be read: status {INVALID_HANDLE}"
    called(executor, plan, 3)


# -- numbers and forms ------------------------------------------------------------------------------------------------
class Numbers:
    """A library that has numbers in device memory: their places are what its nodes have."""

    def __init__(self, executor):
        self.executor, self.places = executor, {}

    def __call__(self, given):
        place = self.places.setdefault(given[2], 0x10000 + 16 * len(self.places))
        self.executor.numbers_in_memory = len(self.places)
        return place.to_bytes(8, "little")


def test_numbers_in_device_memory_have_a_graph_each(executor):
    plan = stand_in.LibraryPlan(call_of((1, 32, Numbers(executor))))
    for number in (0.5, 2.0, -3.5, 7.0):
        assert executor.relocate(plan, (A, B, number)) == ""
        called(executor, plan, 5, ((*given, number) for given in addresses()))
    assert not plan.called
    assert len(plan.relocation.graphs) == MAX_FORMS
    assert (
        executor.relocate(plan, (A, B, 9.0)) == f"the plan has been learnt for {MAX_FORMS} forms of arguments already"
    )
    for turn in range(40):
        called(executor, plan, 1, [(A + 64 * turn, B, (0.5, 2.0, -3.5, 7.0)[turn % 4])])
    assert not plan.called


def test_numbers_in_device_memory_that_change_at_each_call_are_followed_ever_more_rarely(executor):
    plan = stand_in.LibraryPlan(call_of((1, 32, Numbers(executor))))
    called(executor, plan, 4000, ((*given, n + 0.5) for n, given in enumerate(addresses())))
    assert plan.launch is None
    assert len(executor.seen) < 20


def test_each_form_has_its_own_graph_and_the_latest_is_first(executor):
    plan = stand_in.LibraryPlan(call_of((1, 32, stand_in.number(2, "f"))))
    forms = [(A, B, 0.5), (A, A, 0.5), (A, B, 1.0), (A, B, 0.0)]
    for arguments in forms:
        assert executor.relocate(plan, arguments) == ""
    rng = stand_in.seeded(3)
    for turn in range(300):
        arguments = rng.choice(forms)
        arguments = (arguments[0] + 256 * turn, arguments[1] + 256 * turn, arguments[2])
        assert executor.run(plan, *arguments) == right(plan, arguments)
        assert plan.relocation.graphs[0].fits(arguments) or plan.called[-1:] == [arguments]
        assert plan.launch is plan.relocation.graphs[0].launch
    assert len(plan.called) < 20, "comparisons"
    assert len(plan.relocation.graphs) == 4
    assert executor.run(plan, A, B, -0.0) == right(plan, (A, B, -0.0))
    assert executor.run(plan, A, B, 2 + 1j) == right(plan, (A, B, 2 + 1j))


def test_numbers_of_numpy_are_learnt_as_pythons(executor):
    for number in (np.float64(0.5), np.float32(0.25), 0.5, np.complex64(2 + 1j), 3j):
        plan = relocated(
            executor,
            call_of((1, 32, stand_in.number(2, "f")), (1, 36, stand_in.number(2, "f", "imag"))),
            (A, B, number),
        )
        called(executor, plan, 5, [(A, B, number), (B, A, number), (A, B, 0.75), (A, B, 2j), (A, C, complex(2, -0.0))])


# -- while there is nothing else to do --------------------------------------------------------------------------------
def test_a_plan_that_was_called_again_may_be_learnt_while_nothing_is_to_be_done(executor, monkeypatch):
    plan, steps = stand_in.LibraryPlan(call_of()), 0
    assert not executor.relocations.learn(executor)
    called(executor, plan, AGAIN - 1)
    assert not executor.relocations.learn(executor)
    called(executor, plan, 1)
    while executor.relocations.learn(executor):
        steps += 1
        assert len(executor.seen) <= steps
    assert steps == STEPS
    assert plan.launch is not None
    called(executor, plan, 20)
    assert len(plan.called) == AGAIN
    monkeypatch.setattr(relocations, "MAX_WAITING", 2)
    others = [stand_in.LibraryPlan(call_of((0, 40, garbage()))), *(stand_in.LibraryPlan(call_of()) for _ in range(3))]
    for other, given in itertools.product((*others[1:], others[0]), ((A, B), (B, A), (A, C))):
        executor.run(other, *given)
    while executor.relocations.learn(executor):
        assert len(executor.seen) < 100
    assert [other.launch is not None for other in others] == [False, False, False, True]
    assert "depends on no operand" in others[0].relocation.why
