"""What comes in between a launch of a relocated graph: other launches, interrupts; and defects that must be found.

The graph and its arguments are those of test_relocated_graph.py.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from dispatch.execute import relocated_graph
from dispatch.execute.graph_nodes import KERNEL, MEMCPY
from dispatch.execute.relocated_graph import MISFIT

spec = importlib.util.spec_from_file_location("relocated", Path(__file__).with_name("test_relocated_graph.py"))
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)

stand_in, Made, two_nodes = tests.stand_in, tests.Made, tests.two_nodes
A, B, C, SET, SECOND, THIRD = tests.A, tests.B, tests.C, tests.SET, tests.SECOND, tests.THIRD
CODE = "<relocated graph>"


@pytest.fixture
def driver(monkeypatch):
    return stand_in.install(monkeypatch.setattr)


# -- what comes in between --------------------------------------------------------------------------------------------
def check_entered(driver, made, hook):
    """Launches from within a launch, with every pair of arguments: the outer one has its own, the inner no others."""
    inner, seen = [None], []

    def enter():
        if inner[0] is not None:
            given, inner[0] = inner[0], None
            before = len(driver.launched)
            status = made.graph.launch(given)
            launched = driver.launched[before : before + 1]
            seen.append(status)
            assert status == MISFIT if not launched else launched == [made.right(given)]
            made.graph.write(given)

    setattr(driver, hook, enter)
    for first, outer, given in itertools.product((SET, SECOND), (SET, SECOND, THIRD), (SET, SECOND, THIRD)):
        made.graph.launch(first)
        inner[0] = given
        before = len(driver.launched)
        assert made.graph.launch(outer) == 0
        inner[0] = None
        assert driver.launched[before] == made.right(outer)
        assert made.launch(given)
        assert made.launch(first)
    setattr(driver, hook, lambda: None)
    assert seen


@pytest.mark.parametrize("hook", ["on_put", "on_run"])
def test_a_launch_from_within_a_launch(driver, hook):
    check_entered(driver, Made(driver, two_nodes(), SET), hook)


def test_a_launch_from_within_a_collection(driver):
    made = Made(driver, two_nodes(), SET)
    turns, errors = itertools.cycle((SECOND, THIRD, SET)), []
    entered = []

    def collect(phase, _info):
        if phase == "start" and not entered:
            entered.append(0)
            given = next(turns)
            before = len(driver.launched)
            if made.graph.launch(given) != MISFIT and driver.launched[before] != made.right(given):
                errors.append(given)
            entered.clear()

    driver.on_put = driver.on_run = gc.collect
    gc.callbacks.append(collect)
    try:
        for given in (SET, SECOND, THIRD, THIRD, SET) * 3:
            before = len(driver.launched)
            status = made.graph.launch(given)
            assert status == 0
            assert made.right(given) in driver.launched[before:]
    finally:
        gc.callbacks.remove(collect)
    assert not errors


class Tracer:
    """Calls `act` at line event number `at` of the graph's own code; `events` are the lines."""

    def __init__(self, at, act):
        self.at, self.act, self.events = at, act, []

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != CODE:
            return None
        if event == "line":
            self.events.append(frame.f_lineno)
            if len(self.events) - 1 == self.at:
                self.act()
        return self

    def trace(self, function, *given):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return function(*given)
        finally:
            sys.settrace(before)


def lines_of(made, first, given, name="launch"):
    made.graph.launch(first)
    tracer = Tracer(-1, None)
    tracer.trace(getattr(made.graph, name), given)
    return len(tracer.events)


PAIRS = [(SET, SECOND), (SET, THIRD), (SET, SET), (SECOND, SET), (SET, (0, B, C, 0.5)), (SET, (A, B, C, 1.0))]


def check_lines(driver, made):
    """A launch of other arguments at every line of a launch and of `write`."""
    for name, (first, outer), given in itertools.product(("launch", "write"), PAIRS, (SET, SECOND, THIRD)):
        for at in range(lines_of(made, first, outer, name)):
            made.graph.launch(first)
            inner = []

            def enter(given=given, inner=inner):
                before = len(driver.launched)
                inner.append((made.graph.launch(given), driver.launched[before:], made.graph.write(THIRD)))

            before = len(driver.launched)
            Tracer(at, enter).trace(getattr(made.graph, name), outer)
            (status, own, _), launched = inner[0], driver.launched[before:]
            assert own == ([] if status == MISFIT else [made.right(given)])
            if name == "launch" and outer in (SET, SECOND, THIRD):
                assert [one for one in launched if one not in own or own == [made.right(outer)]]
                assert launched[-1] == made.right(outer) or launched == [made.right(outer), *own]
            for again in (outer, given, first) if outer in (SET, SECOND, THIRD) else (given, first):
                assert made.launch(again)


@pytest.mark.parametrize("second", [KERNEL, MEMCPY])
def test_a_launch_from_within_every_line(driver, second):
    check_lines(driver, Made(driver, two_nodes(second), SET))


def finally_lines(made):
    """The lines of `finally`, where the interpreter takes no signal before their one call is done, and of `try`, where
    nothing is done.
    """
    source = [line.strip() for line in made.source.splitlines()]
    first = {n + 1 for n, line in enumerate(source) if n and source[n - 1] == "finally:"}
    tries = {n + 1 for n, line in enumerate(source) if line == "try:"}
    return first | tries | {n + 1 for n in first if source[n - 1].startswith("if ")}


def check_interrupts(made):
    """KeyboardInterrupt at every line: what comes after it is right, and launched."""
    interrupted, safe = 0, finally_lines(made)
    for name, (first, given), turn in itertools.product(("launch", "write"), PAIRS, (0, 1)):
        for at in range(lines_of(made, first, given, name)):
            made.graph.launch(first)
            tracer = Tracer(at, None)
            tracer.act = lambda tracer=tracer: tracer.events[-1] in safe or raise_interrupt()
            try:
                tracer.trace(getattr(made.graph, name), given)
            except KeyboardInterrupt:
                interrupted += 1
            for again in (SECOND, first, SET, THIRD, THIRD)[turn:]:
                assert made.launch(again)
    assert interrupted > 50


def raise_interrupt():
    raise KeyboardInterrupt


@pytest.fixture
def with_source(monkeypatch):
    """Have the code of each graph made from now on be kept as text."""
    kept = []
    real = compile
    relocated_graph._code.cache_clear()
    monkeypatch.setattr(
        relocated_graph, "compile", lambda text, *rest: kept.append(text) or real(text, *rest), raising=False
    )
    yield kept
    relocated_graph._code.cache_clear()


@pytest.mark.parametrize("second", [KERNEL, MEMCPY])
def test_an_interrupt_at_every_line(driver, with_source, second):
    made = Made(driver, two_nodes(second), SET)
    made.source = with_source[-1]
    check_interrupts(made)
    assert driver.mode == 0, "the thread's own mode is as it was"


@pytest.mark.parametrize("hook", ["on_put", "on_run"])
def test_an_interrupt_behind_a_call(driver, hook):
    made = Made(driver, two_nodes(), SET)
    for first, given in PAIRS[:4]:
        made.graph.launch(first)
        setattr(driver, hook, raise_interrupt)
        if given != first or hook == "on_run":
            with pytest.raises(KeyboardInterrupt):
                made.graph.launch(given)
        setattr(driver, hook, lambda: None)
        for again in (given, first, given):
            assert made.launch(again)


# -- defects that must be found ---------------------------------------------------------------------------------------
def every_check(driver, kept):
    for seed in range(25):
        tests.check_sequence(driver, seed)
    made = Made(driver, two_nodes(MEMCPY), SET)
    made.source = kept[-1]
    for hook in ("on_put", "on_run"):
        check_entered(driver, made, hook)
    tests.check_status(driver, made)
    check_interrupts(made)
    check_lines(driver, made)
    assert driver.mode == 0, "the thread's own mode is as it was"
    tests.check_countdown(made)
    for part in ("real", "imag"):
        tests.test_zeros_of_both_signs_in_a_part_of_a_number_are_two(driver, part)


TEMPLATES = {
    "remembered before it is set": (
        "                at = None\n{setting}",
        "                at = arguments\n{setting}",
    ),
    "not forgotten while it is set": ("                at = None\n{setting}", "{setting}"),
    "never busy": ("            busy = True\n            if arg", "            busy = False\n            if arg"),
    "always busy": ("busy = False\n\n    def fits", "pass\n\n    def fits"),
    "write forgets nothing": ("            at = {nothing} = None", "            {nothing} = None"),
    "write does not look whether it may": ('            return b""\n        try', "            pass\n        try"),
    "forms are not looked at": (" or {misfit}:", ":"),
    "equal is the same": ("arguments != at{other_numbers}", "arguments != at"),
    "nothing is new": ("if arguments != at{other_numbers}", "if at is None"),
    "status is not noted": ("counts.status = refused.args[0]", "pass"),
    "launches are not counted": ("counts.until_check -= 1", "pass"),
    "launched though a comparison is due": ("counts.until_check <= 0 or", ""),
}
FUNCTIONS = {
    "set in the thread's own mode": ("_quiet", '"    exchange(mode)"', '"    pass"'),
    "the thread's mode is not given back": ("_quiet", '"        exchange(mode)"', '"        pass"'),
    "memory set as kernels are": ("code_of", "all(", "any("),
    "operands at one address": ("_misfits", '[f"x{one} == x{two}" for i', '["False" for i'),
    "many operands at one address": ("_misfits", '!= {len(operands)}"', '== 99"'),
    "operands that are no longer one": ("_misfits", 'f"x{place} != x{same}"', '"False"'),
    "operands that were not there": ("_misfits", 'f"x{place}" for place, number', '"False" for place, number'),
    "operands that are not there": ("_misfits", "if operands:", "if False:"),
    "fixed numbers are not compared": ("_misfits", "{is_other} x{place} != fixed_{place}", "False"),
    "numbers that are fixed now": ("_misfits", "x{place} == 0 or x{place} == 1", "False"),
    "signs of zero": ("_misfits", 'tests += _other_zeros(form, "x{}")', "pass"),
    "signs of zero in parts": ("_differs", 'f"repr({x}) != repr({y})" if', 'f"{x} != {y}" if'),
    "one operand's old words": ("_code", "{_differs(form, place)}:", "{_differs(form, max(place, 1))}:"),
    "a node's old words": ("_code", "_differs(form, place) for place in following)", "'False' for _ in following)"),
    "one operand's old node": (
        "_code",
        "place) for place in following)",
        "place) for place in following[1:] or following)",
    ),
    "a status is passed over": ("_code", "if status: raise", "if False: raise"),
    "halves of an address exchanged": ("_statement", "{place // 4}] = t &", "{place // 4 + 1}] = t &"),
    "no step": ("_statement", '{value} + {word.step}" if word.step < FAR', '{value}" if word.step < FAR'),
    "a step backwards": ("_statement", "({value} + {word.step}) & {(1", "({value} - {word.step}) & {(1"),
    "the real part for the imaginary": ("_statement", "'imag' if", "'real' if"),
}


@pytest.mark.parametrize("defect", [*TEMPLATES, *FUNCTIONS])
def test_a_defect_is_found(monkeypatch, driver, with_source, defect):
    if defect in TEMPLATES:
        old, new = TEMPLATES[defect]
        assert relocated_graph.TEMPLATE.count(old) == 1
        monkeypatch.setattr(relocated_graph, "TEMPLATE", relocated_graph.TEMPLATE.replace(old, new))
    else:
        stand_in.mutate(monkeypatch, relocated_graph, *FUNCTIONS[defect])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        every_check(driver, with_source)


def test_without_a_defect_every_check_passes(driver, with_source):
    every_check(driver, with_source)
