"""A relocated graph: each launch has the parameters of its own arguments, or nothing is launched.

The library's call, its graph and the driver are those of graph_stand_in.py, which looks at what a launch has at the
moment at which it is enqueued.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import weakref
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.execute.graph_nodes import KERNEL, MEMCPY, MEMCPY_BYTES, Node, Nodes
from dispatch.execute.relocated_graph import FIRST_CHECK, MISFIT, Executable, RelocatedGraph
from dispatch.execute.relocation import LEARNT, PROVING, Form, images, learn, random_arguments

spec = importlib.util.spec_from_file_location("graph_stand_in", Path(__file__).with_name("graph_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

OTHER_NUMBERS = (
    *(0.0, -0.0, 1.0, 2.5, -0.1, 3.0, 70000.0, 1e300, -1e300, math.inf, math.nan, 2.0**40),
    *(0j, 2 + 0j, complex(2, -0.0), complex(-0.0, 3), complex(0.0, 3), 1 + 0j, 1e300 + 1j, complex(math.nan, 1)),
    *(np.float64(-0.1), np.complex128(2)),  # others of NumPy's equal what they are not: requests give none
)


@pytest.fixture
def driver(monkeypatch):
    return stand_in.install(monkeypatch.setattr)


class Made:
    """A relocated graph of a call, learnt from made-up arguments as a plan does it."""

    def __init__(self, driver, call, arguments, seed=0, keep=None):
        rng, self.form = stand_in.seeded(seed), Form.of(arguments)
        self.driver, self.call = driver, call
        drawn = []
        for _ in range(LEARNT + PROVING):
            drawn.append(random_arguments(arguments, self.form, rng, drawn))
        self.words = learn([call(given)[0] for given in drawn], drawn, self.form)
        graph = driver.captured(*call(arguments))
        self.nodes = Nodes(graph, {})
        executable = Executable(graph, driver.instantiated(graph))
        handle = executable.handle.value
        self.graph = RelocatedGraph(executable, self.nodes, self.words, self.form, lambda *_: self.run_of(handle), keep)
        self.graph.counts.compare_after(1 << 30)

    def run_of(self, handle):
        return lambda driver=self.driver: driver.run(handle)

    def right(self, arguments):
        """What the library would have its nodes be; None where it refuses the arguments."""
        try:
            return [node.image for node in self.call(arguments)[0]]
        except (ValueError, OverflowError):
            return None

    def launch(self, arguments):
        """Launch, and look at what was: whether it was launched."""
        before = len(self.driver.launched)
        status = self.graph.launch(arguments)
        launched = self.driver.launched[before:]
        if status == MISFIT:
            assert not launched
            return False
        assert status == 0
        assert launched == [self.right(arguments)]
        return True


def two_nodes(second=KERNEL, **more):
    """A call of three operands and a number, whose words are in two nodes, in a made-up order."""
    nodes = [Node(KERNEL, (16, None, 7, (1,) * 7, (), ()), bytes(96))]
    if second == MEMCPY:
        nodes.append(Node(MEMCPY, (), bytes(MEMCPY_BYTES)))
    else:
        nodes.append(Node(KERNEL, (32, None, 7, (1,) * 7, (), ()), bytes(96)))
    puts = [(0, 4, stand_in.address(0, 64)), (0, 16, stand_in.address(1, -8)), (1, 0, stand_in.address(1))]
    puts += [(1, 36, stand_in.address(2)), (1, 64, stand_in.number(3, "f")), (0, 60, stand_in.number(3, "d"))]
    return stand_in.Call(nodes, [stand_in.Put(*put) for put in puts], **more)


A, B, C = 0x7F0000001000, 0x7F0000002010, 0x7F0000004004
SET, SECOND, THIRD = (A, B, C, 0.5), (A + 256, B + 512, C + 1024, 0.25), (A + 4096, B, C, -0.5)


# -- any sequence -----------------------------------------------------------------------------------------------------
def drawn_next(rng, arguments, last):
    """Arguments that come after others: the same, some changed, all changed, or of another form."""
    kinds = [type(argument) is int for argument in arguments]
    places = range(len(arguments))
    made = list(last)
    choice = rng.randrange(8)
    if choice == 0:
        return last
    changed = places if choice == 1 else rng.sample(places, rng.randrange(1, 3)) if len(made) > 2 else places
    for place in changed:
        if not kinds[place]:
            made[place] = rng.choice((*OTHER_NUMBERS, arguments[place], arguments[place]))
        elif choice == 2:
            made[place] = rng.choice((0, made[rng.choice([p for p in places if kinds[p]])]))
        elif arguments[place]:
            made[place] = rng.randrange(1 << 30, 1 << 46)
    if choice == 3:  # back to the form that was learnt
        made = [made[p] if kinds[p] else arguments[p] for p in places]
        made = [made[same] for same in Form.of(arguments).same]
    return tuple(made)


def as_in(form, arguments):
    """Arguments with equal numbers of the kinds that a form has: 2+0j is 2.0, and the other way."""
    pairs = zip(form.kinds, arguments, strict=True)
    return [complex(x) if kind is complex else x.real if kind is float and not x.imag else x for kind, x in pairs]


def check_sequence(driver, seed, steps=60):
    rng = stand_in.seeded(seed)
    numbers = [rng.choice((0.0, 1.0, -0.0, 0.5, 3.0, 3j, 1 + 0j, complex(2, -0.0))) for _ in range(rng.randrange(3))]
    arguments = stand_in.random_arguments(rng, rng.randrange(1, 7), numbers)
    if rng.random() < 0.4:
        arguments = (*arguments, arguments[0], 0)
    made = Made(driver, stand_in.random_call(rng, arguments, most=4), arguments, seed)
    last = arguments
    assert made.launch(arguments)
    for _ in range(steps):
        last = drawn_next(rng, arguments, last)
        was_launched = made.launch(last)
        fits = Form.of(last) == made.form
        if was_launched:
            assert Form.of(as_in(made.form, last)) == made.form
        elif fits:
            assert made.right(last) is None or any(
                abs(x) > 60000 or math.isnan(abs(x)) for x in last if type(x) is not int
            )
        if rng.random() < 0.1 and fits and made.graph.write(last):
            assert made.graph.images() == made.right(last)
            assert images(made.nodes.nodes, made.words, last) == made.right(last)
    assert made.graph.nbytes >= sum(len(node.image) for node in made.nodes.nodes)


@pytest.mark.parametrize("seed", range(150))
def test_each_launch_has_the_parameters_of_its_own_arguments(driver, seed):
    check_sequence(driver, seed)


@pytest.mark.parametrize(
    ("learnt", "other"),
    [
        ((A, B, C, 0.0), (A, B, C, -0.0)),
        ((A, B, C, -0.0), (A, B, C, 0.0)),
        ((A, B, C, 1.0), (A, B, C, 0.5)),
        ((A, B, C, 0.5), (A, B, C, 1.0)),
        ((A, B, C, 0.5), (A, B, C, -0.0)),
        ((A, B, C, 0.5), (A, B, C, 0.5j)),
        ((A, B, C, 0.5), (A, B, C, np.complex64(1 - 2j))),
        ((A, B, C, 0.0), (A, B, C, 0j)),
        ((A, B, C, 1 + 0j), (A, B, C, complex(1, -0.0))),
        ((A, B, A, 0.5), (A, B, C, 0.5)),
        ((A, B, C, 0.5), (A, B, B, 0.5)),
        ((A, B, C, 0.5), (0, B, C, 0.5)),
        ((A, B, 0, 0.5), (A, B, C, 0.5)),
        ((A, B, C, A + 8, B + 8, C + 8, 0.5), (A, B, C, A + 8, B + 8, A, 0.5)),
        ((A, B, C, A + 8, B + 8, C + 8, 0.5), (A, B, 0, A + 8, B + 8, A, 0.5)),
    ],
)
def test_arguments_of_another_form_are_misfits(driver, learnt, other):
    number = len(learnt) - 1
    puts = [stand_in.Put(0, 8 * n, stand_in.address(n)) for n, x in enumerate(learnt) if n < number and x]
    if Form.of(learnt).free:
        puts.append(stand_in.Put(0, 120, stand_in.number(number, "f")))
    made = Made(driver, stand_in.Call([Node(KERNEL, (16, None, 7, (1,) * 7, (), ()), bytes(128))], puts), learnt)
    for _ in range(2):
        assert made.launch(learnt)
        assert made.graph.fits(learnt)
        assert not made.launch(other)
        assert not made.graph.fits(other)
    assert made.graph.counts.launches == 1


@pytest.mark.parametrize("part", ["real", "imag"])
def test_zeros_of_both_signs_in_a_part_of_a_number_are_two(driver, part):
    call = stand_in.Call(two_nodes().nodes, [stand_in.Put(n, 8, stand_in.number(1, "f", part)) for n in (0, 1)])
    made = Made(driver, call, (A, 2 + 3j))
    pairs = [complex(2, 0.0), complex(2, -0.0), complex(2, 0.0), complex(0.0, 3), complex(-0.0, 3), complex(0.0, 3)]
    for address, value in itertools.product((A, B), pairs):
        assert made.launch((address, value))


@pytest.mark.parametrize("offset", range(0, 32, 4))
@pytest.mark.parametrize("code", "dfei")
def test_a_number_may_stand_at_any_multiple_of_four(driver, code, offset):
    call = stand_in.Call(two_nodes().nodes, [stand_in.Put(1, offset, stand_in.number(1, code))])
    made = Made(driver, call, (A, 3.0))
    for value in (3.0, 5.0, -7.0, 2.0):
        assert made.launch((A, value))
        assert made.graph.write((A, value))


@pytest.mark.parametrize(("code", "huge"), [("e", 1e6), ("i", 2.0**40), ("i", math.nan), ("i", math.inf)])
def test_a_number_that_a_word_cannot_hold_is_a_misfit(driver, code, huge):
    call = stand_in.Call(two_nodes().nodes, [stand_in.Put(n, 8, stand_in.number(1, code)) for n in (0, 1)])
    made = Made(driver, call, (A, 3.0))
    for _ in range(2):
        assert made.launch((A, 3.0))
        assert not made.launch((B, huge))
        assert not made.graph.write((B, huge))
        assert made.launch((A, 3.0))
        assert made.launch((B, 3.0))


# -- what the driver says, and what is kept ---------------------------------------------------------------------------
def check_status(driver, made):
    assert made.launch(SET)
    driver.put_status = 1
    assert not made.launch(SET[:1] + SECOND[1:])
    assert not made.launch(SECOND)
    assert made.graph.counts.status == 1
    driver.put_status = 0
    assert made.launch(SECOND)
    assert made.launch(SET)


def test_a_node_that_takes_no_parameters_is_a_misfit_and_noted(driver):
    check_status(driver, Made(driver, two_nodes(), SET))


def check_countdown(made):
    made.launch(SET)
    made.graph.counts.compare_after(2)
    before = made.graph.counts.launches
    assert [made.launch(given) for given in (SET, SECOND, SECOND, THIRD, SET)] == [True, True, True, True, False]
    assert made.launch(THIRD), "as before: nothing is written"
    assert made.graph.counts.launches == before + 2
    made.graph.compared()
    assert made.graph.counts.until_check == 8 * max(FIRST_CHECK, before + 2)
    assert made.graph.counts.launches == before + 2
    assert made.launch(SET)


def test_launches_end_where_a_comparison_is_due(driver):
    made = Made(driver, two_nodes(), SET)
    check_countdown(made)


def test_it_is_freed_once_and_only_when_nothing_can_launch_it(driver):
    keep = type("Memory", (), {})()
    gone = []
    weakref.finalize(keep, gone.append, 1)
    made = Made(driver, two_nodes(), SET, keep=keep)
    del keep
    launch, counts = made.graph.launch, made.graph.counts
    handles = {counts.graph.value, counts.handle.value}
    right = made.right(SECOND)
    made = counts = None
    gc.collect()
    assert not driver.freed
    assert not gone
    assert launch(SECOND) == 0
    assert driver.launched[-1] == right
    launch = None
    gc.collect()
    assert sorted(driver.freed) == sorted(handles)
    assert gone


def test_a_graph_that_never_became_executable_ends_alone(driver):
    graph = driver.captured(*two_nodes()(SET))
    executable = Executable(graph)
    del executable
    assert driver.freed == [graph.value]


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.float16(0), np.complex64(1 - 2j), 3, -0.0, 2j])
def test_a_product_gives_its_plan_numbers_of_python(number):
    """Those of NumPy equal others: np.float32(0.1) == 0.1."""
    host = dp.device("host")
    dtype = "c64" if isinstance(number, complex | np.complexfloating) else "f32"
    request = dp.MatmulRequest(
        host.zeros((4, 4), dtype), host.zeros((4, 4), dtype), alpha=number, out=host.zeros((4, 4), dtype)
    )
    alpha, beta = request.arguments({})[7:9]
    assert (type(alpha), type(beta)) == (complex if number.imag else float, float)
    assert repr(alpha) == repr(complex(number) if number.imag else float(number) + 0.0)
