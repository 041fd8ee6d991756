"""What a plan takes over of others of the same kernels: which words follow which argument, proven and not learnt again.

Plans and executors are those of test_plan_relocation.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.execute import learner
from dispatch.execute.relocation import LEARNT, PROVING

spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_plan_relocation.py"))
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)

stand_in, kernel, call_of, called, relocated = (
    plans.stand_in,
    plans.kernel,
    plans.call_of,
    plans.called,
    plans.relocated,
)
A = plans.A
driver, executor = plans.driver, plans.executor


def recorded_by(executor, action):
    before = len(executor.seen)
    action()
    return len(executor.seen) - before


def check_recall(executor):
    assert recorded_by(executor, lambda: relocated(executor)) == LEARNT + PROVING + 1
    again = []
    assert recorded_by(executor, lambda: again.append(relocated(executor))) == PROVING + 1
    called(executor, again[0], 20)
    other = call_of(nodes=[kernel(1), kernel(2)._replace(image=bytes(range(96)))])
    assert recorded_by(executor, lambda: again.append(relocated(executor, other))) == PROVING + 1
    called(executor, again[1], 20)
    assert not again[1].called


def test_words_of_the_same_kernels_are_proven_and_not_learnt(executor):
    check_recall(executor)


WRONG = {
    "another operand": [(0, 0, stand_in.address(1, 16)), (1, 8, stand_in.address(0))],
    "another step": [(0, 0, stand_in.address(0, 32)), (1, 8, stand_in.address(1))],
    "another place": [(0, 8, stand_in.address(0, 16)), (1, 8, stand_in.address(1))],
    "one more": [(0, 0, stand_in.address(0, 16)), (1, 8, stand_in.address(1)), (1, 64, stand_in.address(0))],
    "one less": [(0, 0, stand_in.address(0, 16))],
}


def check_wrong_recall(executor, what):
    relocated(executor)
    call = stand_in.Call([kernel(1), kernel(2)], [stand_in.Put(*put) for put in WRONG[what]])
    made = []
    assert recorded_by(executor, lambda: made.append(relocated(executor, call))) == LEARNT + PROVING + 1
    called(executor, made[0], 30)
    assert not made[0].called


@pytest.mark.parametrize("what", WRONG)
def test_words_that_are_wrong_for_a_plan_are_not_believed(executor, what):
    check_wrong_recall(executor, what)


def test_words_of_other_kernels_or_forms_are_not_asked_for(executor):
    relocated(executor)
    others = [call_of(nodes=[kernel(1), kernel(3)]), call_of(nodes=[kernel(1), kernel(2, 104)])]
    for call in others:
        assert recorded_by(executor, lambda call=call: relocated(executor, call)) == LEARNT + PROVING + 1
    assert recorded_by(executor, lambda: relocated(executor, arguments=(A, A))) == LEARNT + PROVING + 1


def test_the_words_that_are_remembered_are_bounded(executor, monkeypatch):
    monkeypatch.setattr(learner, "MAX_WORDS", 3)
    for number in range(1, 9):
        relocated(executor, call_of(nodes=[kernel(number), kernel(100)]))
        assert len(learner._words) <= 3
    assert recorded_by(executor, lambda: relocated(executor, call_of(nodes=[kernel(8), kernel(100)]))) == PROVING + 1
