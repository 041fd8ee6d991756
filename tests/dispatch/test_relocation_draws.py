"""The arguments of made-up calls tell apart what real ones may not: orders in memory, and forms of numbers.

The calls and plans are those of graph_stand_in.py and test_plan_relocation.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from dispatch.execute import learner, plan_relocation, relocation
from dispatch.execute.graph_nodes import NotRelocatable
from dispatch.execute.relocation import LEARNT, MAX_EXACT_INTEGER, PROVING, Form

spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_plan_relocation.py"))
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)

stand_in, call_of, called, right, relocated = plans.stand_in, plans.call_of, plans.called, plans.right, plans.relocated
driver, executor = plans.driver, plans.executor
A, B, C = plans.A, plans.B, plans.C
SEEDS = 60
FIVE = LEARNT + PROVING


def draws(arguments, seed, count=FIVE, **form):
    rng, drawn = stand_in.seeded(seed), []
    for _ in range(count):
        drawn.append(relocation.random_arguments(arguments, Form.of(arguments, **form), rng, drawn))
    return drawn


# -- addresses --------------------------------------------------------------------------------------------------------
def order_of(given):
    return [one < other for one, other in itertools.combinations(given, 2)]


@pytest.mark.parametrize("count", [2, 3, 9])
def test_each_pair_of_operands_is_in_both_orders(count):
    for seed in range(SEEDS):
        drawn = draws(stand_in.random_arguments(stand_in.seeded(seed), count), seed)
        for one, other in ((drawn[0], drawn[1]), (drawn[2], drawn[3])):
            assert order_of(one) == [not is_less for is_less in order_of(other)]
        orders = {tuple(order_of(draws((A, B, C), seed, 1)[0])) for seed in range(SEEDS)}
        assert len(orders) == 6, "and any order comes first"


def test_operands_are_near_each_other_in_both_orders_and_far():
    for seed in range(SEEDS):
        drawn = draws((A, B, C), seed)
        near = [max(given) - min(given) < 1 << 32 for given in drawn]
        assert near[1:3] == [True, True]
    far = [given for seed in range(SEEDS) for given in draws((A, B), seed)[::3]]
    assert sum(abs(one - other) > 1 << 40 for one, other in far) > 0.9 * len(far)


def least(given):
    return min(given[0], given[1]).to_bytes(8, "little")


def greatest(given):
    return max(given[0], given[1]).to_bytes(8, "little")


def distance(given):
    return abs(given[0] - given[1]).to_bytes(8, "little")


def is_ahead(given):
    return bytes([given[0] < given[1], 0, 0, 0])


def is_near(given):
    return bytes([abs(given[0] - given[1]) < 1 << 32, 0, 0, 0])


def first_if_near(given):
    return (given[0] if abs(given[0] - given[1]) < 1 << 32 else given[1]).to_bytes(8, "little")


OF_TWO = [least, greatest, distance, is_ahead, is_near, first_if_near]


def check_of_two(of):
    for seed in range(SEEDS):
        drawn = draws((A, B), seed)
        nodes = [call_of((0, 40, of))(given)[0] for given in drawn]
        with pytest.raises(
            NotRelocatable, match=r"node 0: the word at byte 40|kernel 0: its parameters differ from the predicted"
        ):
            relocation.learn(nodes, drawn, Form.of((A, B)))


@pytest.mark.parametrize("of", OF_TWO)
def test_what_follows_two_addresses_is_refused_whatever_is_drawn(of):
    check_of_two(of)


@pytest.mark.parametrize("of", OF_TWO)
def test_a_plan_is_refused_though_other_plans_of_its_kernels_are_not(executor, of):
    """Theirs are recalled and proven by two captures alone; the real addresses are in one order."""
    for value in (bytes(8), None):
        first = stand_in.address(1) if value is None else lambda _, value=value: value
        for _ in range(20):
            relocated(executor, call_of((0, 40, first)))
            plan = stand_in.LibraryPlan(call_of((0, 40, of)))
            assert executor.relocate(plan, (1 << 35, 1 << 45)) == plan.relocation.why != ""
            called(executor, plan, 3)
            assert plan.launch is None


# -- numbers ----------------------------------------------------------------------------------------------------------
def narrowed_half(place, part="real"):
    """A half as a library makes it that was given a float."""

    def of(given):
        with np.errstate(all="ignore"):
            return np.float16(np.float32(getattr(given[place], part))).tobytes()

    return of


def whole(rounded):
    return lambda given: rounded(given[2]).to_bytes(4, "little", signed=True)


HALVES = {"at once": stand_in.number(2, "e"), "by way of a float": narrowed_half(2)}


def ties(count=50):
    """Numbers of which halves are others by way of a float."""
    found = []
    for seed in range(count):
        found += [given[2] for given in draws((A, B, 0.5), seed)]
    return found


def test_numbers_that_are_drawn_are_other_halves_by_way_of_a_float_and_other_whole_ones_by_any_rounding():
    for number in ties():
        assert np.float16(number) != np.float16(np.float32(number))
        assert struct.pack("<e", number) != struct.pack("<e", ctypes.c_float(number).value)
        assert len({math.trunc(number), round(number)}) == 2
        assert 1 < abs(number) < 8
    for seed in range(SEEDS):
        drawn = [given[2] for given in draws((A, B, 0.5), seed)]
        assert [x > 0 for x in drawn[::2]] == [drawn[0] > 0] * 3 == [x < 0 for x in (drawn[1], drawn[3], -drawn[4])]
    for seed in range(SEEDS):
        one, other = (given[2] for given in draws((A, B, 2j), seed)[:2])
        assert one.real * other.real < 0
        assert one.imag * other.imag < 0


def check_halves(executor, how):
    plan = relocated(executor, call_of((0, 40, HALVES[how])), (A, B, 0.5))
    called(executor, plan, 50, [(A + 256, B, number) for number in ties(10)])
    assert not plan.called
    called(executor, plan, 6, [(A, B, x) for x in (1e300, 7e4, 65519.99, -1e300, 1e-9, math.inf)])


@pytest.mark.parametrize("how", HALVES)
def test_a_half_is_rounded_as_often_as_the_library_s(executor, how):
    check_halves(executor, how)


ROUNDED = {"towards zero": math.trunc, "down": math.floor, "up": math.ceil, "to the nearest": round}
FRACTIONS = [2.0, 3.0, -2.0, 0.5, 2.5, -2.5, 1.75, -1.75, 7.25]


def check_rounding(executor, how, real):
    plan = stand_in.LibraryPlan(call_of((0, 40, whole(ROUNDED[how]))))
    executor.relocate(plan, (A, B, real))
    called(executor, plan, len(FRACTIONS), [(A, B, number) for number in FRACTIONS])
    return plan


@pytest.mark.parametrize("real", [3.0, 2.5])
@pytest.mark.parametrize("how", ROUNDED)
def test_a_whole_word_is_right_for_fractions_also_where_it_was_learnt_from_a_whole_number(executor, how, real):
    plan = check_rounding(executor, how, real)
    if how == "towards zero":
        assert not plan.called, "it is proven for fractions"


WHOLE_ONLY = {
    "as a float": lambda x: struct.pack("<f", x),
    "as a whole one": lambda x: struct.pack("<i", int(x)),
    "its whole part as a float": lambda x: struct.pack("<f", float(int(x))),
}


class Picky:
    """A library's call that refuses fractions where it is captured."""

    def __init__(self, executor, of):
        self.executor, self.of = executor, of

    def __call__(self, given):
        if given[2] % 1 and given in self.executor.seen[-1:]:
            raise ValueError("a fraction")
        return self.of(given[2])


def check_whole_only(executor, how):
    plan = stand_in.LibraryPlan(call_of((0, 40, Picky(executor, WHOLE_ONLY[how]))))
    assert executor.relocate(plan, (A, B, 3.0)) == ""
    assert plan.relocation.graphs[0].form.whole == (2,)
    called(executor, plan, 4, [(A, B, 4.0), (B, A, -7.0), (A, B, 2047.0), (C, B, 2.0)])
    assert not plan.called
    strange = [0.5, 2.5, -0.25, float(MAX_EXACT_INTEGER), 2.0**30]
    for number in strange:
        executor.seen.append(())
        assert executor.run(plan, A, B, number) == right(plan, (A, B, number))
    assert len(plan.called) == len(strange)
    assert not any(
        plan.relocation.graphs[0].fits((A, B, number)) for number in (*strange, 1e300, math.nan, math.inf, 2j)
    )


@pytest.mark.parametrize("how", WHOLE_ONLY)
def test_what_is_learnt_from_whole_numbers_alone_is_for_small_whole_ones(executor, how):
    check_whole_only(executor, how)


def test_a_call_that_takes_no_other_whole_number_is_learnt_with_its_own(executor):
    def of(given):
        if given[2] != 5.0 and given in executor.seen[-1:]:
            raise NotRelocatable("another number")
        return struct.pack("<f", given[2])

    plan = stand_in.LibraryPlan(call_of((0, 40, of)))
    assert executor.relocate(plan, (A, B, 5.0)) == ""
    assert plan.relocation.graphs[0].form.fixed[2] == 5.0
    called(executor, plan, 5, [(A + 64 * n, B, 5.0) for n in range(5)])
    assert not plan.called


def test_a_fraction_for_a_call_that_takes_none_is_learnt_alone(executor):
    def of(given):
        if given[2] % 1 and given[2] != 0.5 and given in executor.seen[-1:]:
            raise ValueError("a fraction")
        return struct.pack("<f", given[2])

    plan = stand_in.LibraryPlan(call_of((0, 40, of)))
    for number in (3.0, 0.5):
        assert executor.relocate(plan, (A, B, number)) == ""
    called(executor, plan, 8, [(A + 64 * n, B, (0.5, 3.0, 9.0, -4.0)[n % 4]) for n in range(8)])
    assert not plan.called


# -- defects that must be found ---------------------------------------------------------------------------------------
def every_check(executor):
    for of in OF_TWO:
        check_of_two(of)
    for how in HALVES:
        check_halves(executor, how)
    test_numbers_that_are_drawn_are_other_halves_by_way_of_a_float_and_other_whole_ones_by_any_rounding()
    for how in WHOLE_ONLY:
        check_whole_only(executor, how)


DEFECTS = {
    "any order": ("random_arguments", "last if len(before) % 2 else None", "None"),
    "never near": ("_pages", "base = rng", "span = HIGHEST - LOWEST; base = rng"),
    "the same order": ("_pages", "-int(last", "int(last"),
    "a half at once": ("Word", "return narrowed(number)", "return number"),
    "halves in one way": ("_half", "(REAL, NARROWED)", "(REAL,)"),
    "numbers of one form": ("_number", "if half % 2 else beyond", "if True else beyond"),
    "numbers of one sign": ("_number", "last > 0", "last < 0"),
    "fractions where there may be none": ("random_arguments", "if place in form.whole", "if False"),
    "whole numbers are any": ("Form", "zeros, only)", "zeros, ())"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(monkeypatch, executor, defect):
    stand_in.mutate(monkeypatch, relocation, *DEFECTS[defect])
    monkeypatch.setitem(globals(), "Form", relocation.Form)
    monkeypatch.setattr(plan_relocation, "Form", relocation.Form)
    for name in ("Form", "random_arguments"):
        monkeypatch.setattr(learner, name, getattr(relocation, name))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        every_check(executor)


def test_without_a_defect_every_check_passes(executor):
    every_check(executor)
