"""Calls that are numbered: each has the words of its own number, launched or by its library, and each number once.

The library, its graphs and the driver are those of graph_stand_in.py; a call's number is the last of its arguments.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dispatch.core import call_counter
from dispatch.core.call_counter import CallCounter, CallNumber
from dispatch.execute import cuda_executor, learner, plan_relocation, relocated_graph, relocation
from dispatch.execute.relocation import MAX_CALLS, Form
from dispatch.libraries.nvrtc import kernel

spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_plan_relocation.py"))
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)

stand_in, call_of = plans.stand_in, plans.call_of
driver, executor, logged = plans.driver, plans.executor, plans.logged
A, B, C = plans.A, plans.B, plans.C
LONG = 900  # calls: the library's, a step of learning now and then, launches, two comparisons


def grows(by, first=0, size=8):
    return lambda given: ((first + by * int(given[-1])) % (1 << 8 * size)).to_bytes(size, "little")


class NumberedPlan(stand_in.LibraryPlan):
    __slots__ = ("fails",)

    def __init__(self, call, counter):
        super().__init__(call)
        self.counter, self.fails = counter, False

    def enqueue(self, arguments):
        assert type(arguments[-1]) is CallNumber
        if self.fails:
            raise ValueError("refused")
        super().enqueue(arguments)


def numbered(*of, offset=40, counter=None):
    puts = [(node, offset, each) for node, each in enumerate(of)]
    return NumberedPlan(call_of(*puts), counter or CallCounter())


def images(plan, arguments, number):
    return [node.image for node in plan.call((*arguments, CallNumber(number)))[0]]


def check_calls(executor, plan, numbers, given=None):
    """Each call has the words of its addresses and of the next number, whoever makes it."""
    given = given or plans.addresses(1)
    for number, arguments in zip(numbers, given, strict=False):
        assert executor.run_numbered(plan, arguments) == images(plan, arguments, number)


@pytest.fixture(autouse=True)
def by_number(monkeypatch):
    def run_numbered(self, plan, arguments):
        """What reached the device."""
        before, called = len(self.driver.launched), len(plan.called)
        self.enqueue(plan, arguments, (), ())
        found = [*self.driver.launched[before:]]
        found += [[node.image for node in plan.call(one)[0]] for one in plan.called[called:]]
        assert len(found) == 1
        return found[0]

    monkeypatch.setattr(stand_in.GraphExecutor, "run_numbered", run_numbered, raising=False)
    monkeypatch.setattr(plan_relocation, "FIRST", 48)  # calls that are the library's before a plan is learnt


# -- words that grow --------------------------------------------------------------------------------------------------
GROWTHS = {
    "by 250": (grows(250), 40),
    "by one from a first one": (grows(1, 0x1234567800), 40),
    "at a multiple of four": (grows(1000, 77), 44),
    "four bytes": (grows(4, 9, 4), 40),
    "four bytes that wrap": (grows(0x9E3779B9, 5, 4), 40),
    "backwards": (grows(-3, 1 << 60), 40),
    "beyond the largest": (grows(1 << 40, (1 << 64) - (1 << 42)), 40),
    "in its upper half": (grows(1 << 32, 3), 40),
    "the last word": (grows(7, 1, 4), 92),
}


def check_growth(executor, what):
    of, offset = GROWTHS[what]
    plan = numbered(of, of, offset=offset)
    check_calls(executor, plan, range(LONG))
    assert plan.launch is not None
    assert len(plan.called) < 200
    assert executor.relocation_stats()["differed"] == 0
    return plan


@pytest.mark.parametrize("what", GROWTHS)
def test_a_word_that_grows_by_a_fixed_step_is_launched_with_its_number(executor, what):
    check_growth(executor, what)
    assert executor.relocation_stats()["checked"] >= 1


STRANGE = {
    "its square": lambda given: (int(given[-1]) ** 2 % (1 << 64)).to_bytes(8, "little"),
    "a third of it": lambda given: (int(given[-1]) // 3).to_bytes(8, "little"),
    "at most so much": lambda given: min(int(given[-1]), 1 << 20).to_bytes(8, "little"),
    "other words for large ones": lambda given: bytes([given[-1] > 1 << 31, 0, 0, 0]),
    "its lower bits": lambda given: bytes([int(given[-1]) % 5, 0, 0, 0]),
    "with an address": lambda given: ((int(given[-1]) + given[0]) % (1 << 64)).to_bytes(8, "little"),
    "with two addresses": lambda given: ((int(given[-1]) * given[0]) % (1 << 64)).to_bytes(8, "little"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_does_not_grow_by_a_fixed_step_keeps_the_library_s_call(executor, what):
    plan = numbered(STRANGE[what])
    check_calls(executor, plan, range(300))
    assert plan.launch is None
    assert plan.relocation.refused


def own_counter():
    steps = itertools.count()
    return lambda _: (250 * next(steps)).to_bytes(8, "little")


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_library_that_counts_by_itself_keeps_its_own_call(executor, is_declared):
    """Also where the plan is numbered: what grows in each capture does not follow the number."""
    plan = numbered(own_counter()) if is_declared else stand_in.LibraryPlan(call_of((0, 40, own_counter())))
    assert "depends on no operand or number" in executor.relocate(plan, (A, B))
    assert plan.launch is None


def test_the_numbers_that_are_drawn_are_the_last_two_in_turn_and_any():
    for seed in range(40):
        rng, drawn = stand_in.seeded(seed), []
        for _ in range(5):
            drawn.append(relocation.random_arguments((A, CallNumber(9)), Form.of((A, CallNumber(9))), rng, drawn))
        numbers = [given[-1] for given in drawn]
        assert all(type(number) is CallNumber and 0 < number < MAX_CALLS for number in numbers)
        assert numbers[0] == MAX_CALLS - 1
        assert numbers[2] == numbers[1] + 1 < 1 << 11
    form = Form.of((A, CallNumber(0)))
    assert form == Form.of((B, CallNumber(1)), exact=True, whole=True) == Form.of((B, CallNumber(77)))
    assert (form.operands, form.free, form.numbered) == ((0,), (), (1,))


# -- one counter ------------------------------------------------------------------------------------------------------
def check_forms(executor):
    """Calls of several forms, of which some have graphs, by the library and launched in turn."""
    plan = numbered(grows(250), grows(4, 1, 4))
    for arguments in ((A, B), (A, A)):
        assert executor.relocate(plan, arguments) == ""
    rng = stand_in.seeded(3)
    given = [rng.choice([(A + 256 * n, B), (A, A), (A, 0), (0, B), (B, A)]) for n in range(600)]
    check_calls(executor, plan, range(600), given)
    assert 100 < len(plan.called) < 400


def test_calls_of_all_forms_have_one_sequence(executor):
    check_forms(executor)


def check_ends(executor):
    """The first number, and those beyond what was proven, are the library's; and it begins anew."""
    plan = check_growth(executor, "by 250")
    for first in (0, 1, MAX_CALLS - 3, 1 << 40, 0, 5):
        plan.counter.reset(first)
        called = len(plan.called)
        check_calls(executor, plan, range(first, first + 6))
        is_library_s = sum(not 0 < number < MAX_CALLS for number in range(first, first + 6))
        assert is_library_s <= len(plan.called) - called <= is_library_s + 1


def test_numbers_that_nothing_was_proven_for_are_the_library_s(executor):
    check_ends(executor)


def test_what_is_forgotten_goes_on_with_the_next_number(executor):
    counter = CallCounter()
    for turn in range(4):
        plan = numbered(grows(250), counter=counter)
        assert executor.relocate(plan, (A, B)) == "", "which takes no number"
        check_calls(executor, plan, range(50 * turn, 50 * turn + 50))
        assert len(plan.called) == (turn == 0)


def test_plans_of_one_counter_take_turns(executor):
    counter = CallCounter(7)
    made = [numbered(grows(250), counter=counter), numbered(grows(500, 3), counter=counter)]
    for number in range(7, 400):
        check_calls(executor, made[number % 3 % 2], [number])
    assert all(plan.launch is not None for plan in made)


def test_a_call_that_fails_uses_its_number_up(executor):
    plan = numbered(grows(250))
    check_calls(executor, plan, range(3))
    plan.fails = True
    with pytest.raises(ValueError, match="refused"):
        executor.enqueue(plan, (A, B), (), ())
    plan.fails = False
    check_calls(executor, plan, range(4, 200))


def test_calls_of_a_finalizer_have_numbers_of_their_own(executor, driver):
    plan, entered = numbered(grows(250)), []

    def enter():
        if not entered:
            entered.append(0)
            executor.enqueue(plan, (C, A), (), ())
            entered.clear()

    driver.on_run = driver.on_put = executor.on_recorded = enter
    for arguments in itertools.islice(plans.addresses(), 600):
        executor.enqueue(plan, arguments, (), ())
    check_numbers(driver, [plan])
    assert plan.launch is not None


def check_numbers(driver, made):
    """Each number from 0 on was enqueued once; those of the images of node 0 at byte 40, in steps of 250."""
    numbers = [int.from_bytes(one[0][40:48], "little") // 250 for one in driver.launched]
    numbers += [int(arguments[-1]) for plan in made for arguments in plan.called]
    assert sorted(numbers) == list(range(len(numbers)))


def check_threads(driver):
    """Four threads with an executor and a plan each, and one counter."""
    counter, errors, made = CallCounter(), [], []
    driver.on_run = lambda: time.sleep(0)
    start = threading.Barrier(4)

    def run():
        executor = stand_in.GraphExecutor(driver)
        plan = numbered(grows(250), counter=counter)
        made.append(plan)
        start.wait(60)
        try:
            for arguments in itertools.islice(plans.addresses(), 400):
                executor.enqueue(plan, arguments, (), ())
                time.sleep(0)
        except BaseException as error:  # noqa: BLE001  # shown below
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors
    assert all(plan.launch is not None for plan in made)
    check_numbers(driver, made)


def test_threads_share_the_numbers_of_one_counter(driver):
    check_threads(driver)


def test_a_kernel_takes_the_number_behind_its_values(monkeypatch):
    taken = []

    def launch(*given):
        values = (ctypes.c_uint64.from_address(pointer).value for pointer in given[-2])
        taken.append((*values,))
        return 0

    monkeypatch.setattr(kernel, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    counter = CallCounter()
    given = kernel.Launch((1,), (32,), (ctypes.c_int64(7),), counter=counter)
    plan = kernel.KernelPlan(SimpleNamespace(target=ctypes.c_void_p()), None, 16, given, 2)
    assert plan.counter is counter
    for number in (0, 5, (1 << 40) + 1):
        plan.enqueue((A, 0, CallNumber(number)))
    assert taken == [(A, 0, 7, 0), (A, 0, 7, 5), (A, 0, 7, (1 << 40) + 1)]


# -- defects that must be found ---------------------------------------------------------------------------------------
def every_check(executor):
    for what in GROWTHS:
        executor.relocations.differed = 0
        learner._words.clear()
        check_growth(executor, what)
    check_forms(executor)
    check_ends(executor)
    for what in STRANGE:
        learner._words.clear()
        test_what_does_not_grow_by_a_fixed_step_keeps_the_library_s_call(executor, what)


DEFECTS = {
    "a number is lost": (plan_relocation, "_launch_of", "counter.give_back(number)", "pass"),
    "a number twice": (plan_relocation, "_launch_of", "if status == MISFIT", "if True"),
    "a trial takes a number": (
        cuda_executor,
        "as_trial",
        "CallNumber(1)",
        "plan.counter.take()",
    ),
    "the growth is ignored": (relocated_graph, "_statement", "* {word.growth}", "* 1"),
    "the first is ignored": (relocated_graph, "_statement", "* {word.growth} + {word.step}", "* {word.growth}"),
    "never wraps": (relocated_graph, "_statement", "SIZES[word.code]) - 1", "9) - 1"),
    "any number": (relocated_graph, "_misfits", 'f"not 0 < x{place} < {MAX_CALLS}"', '"False"'),
    "no large number is tried": (relocation, "_call", "return MAX_CALLS - 1", "return 999"),
    "eight bytes alone": (relocation, "_word", '(("Q", 8), ("I", 4))', '(("Q", 8),)'),
    "four bytes alone": (relocation, "_word", '(("Q", 8), ("I", 4))', '(("I", 4),)'),
    "growth that is not looked at": (relocation, "_growing", "if _holds_in_all(word, found, arguments) else None", ""),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(monkeypatch, executor, defect):
    module, name, old, new = DEFECTS[defect]
    if module is cuda_executor:
        stand_in.mutate(monkeypatch, call_counter, name, old, new)
        monkeypatch.setattr(cuda_executor, name, call_counter.as_trial)
    else:
        stand_in.mutate(monkeypatch, module, name, old, new)
    relocated_graph._code.cache_clear()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        every_check(executor)
    relocated_graph._code.cache_clear()


def test_without_a_defect_every_check_passes(executor):
    every_check(executor)
