"""What relocation.py learns of captures: words that predict any arguments to the last byte, or a reason.

The calls, their graphs and the driver's functions that read them are those of graph_stand_in.py.
"""

from __future__ import annotations

import cmath
import ctypes
import importlib.util
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as driver_types

from dispatch.execute import relocation
from dispatch.execute.graph_nodes import KERNEL, MEMCPY, MEMCPY_BYTES, MEMSET, Node, Nodes, NotRelocatable
from dispatch.execute.relocation import (
    HIGHEST,
    LEARNT,
    LOWEST,
    MAX_ALIGNMENT,
    PROVING,
    Form,
    images,
    learn,
    random_arguments,
)

spec = importlib.util.spec_from_file_location("graph_stand_in", Path(__file__).with_name("graph_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

A, B, C = 0x7F0000001000, 0x7F0000002010, 0x7F0000004004
NUMBERS = (2.0, 0.37, -5.25, 3 + 4.5j, np.float32(0.7), np.float64(3.0), np.complex64(1 - 2j), np.complex128(0.5 + 8j))
CALLS = 150


@pytest.fixture
def driver(monkeypatch):
    return stand_in.install(monkeypatch.setattr)


def captures(call, arguments, rng, count=LEARNT + PROVING, form=None):
    """The nodes of captures at made-up arguments, and these."""
    form = form or Form.of(arguments)
    drawn = []
    for _ in range(count):
        drawn.append(random_arguments(arguments, form, rng, drawn))
    return [call(given)[0] for given in drawn], drawn


def learnt(call, arguments, rng):
    form = Form.of(arguments)
    return learn(*captures(call, arguments, rng), form)


def kernel(size=64):
    return Node(KERNEL, (16, None, 7, (1,) * 7, (), ()), bytes(range(256))[: size % 256] + bytes(size - size % 256))


def call_of(*puts, nodes=None):
    return stand_in.Call(nodes or [kernel(), kernel()], [stand_in.Put(*put) for put in puts])


# -- what is predicted ------------------------------------------------------------------------------------------------
def check_predictions(seed):
    rng = stand_in.seeded(seed)
    numbers = [rng.choice((*NUMBERS, 0.0, 1.0, -0.0)) for _ in range(rng.randrange(4))]
    arguments = stand_in.random_arguments(rng, rng.randrange(1, 7), numbers)
    if rng.random() < 0.5:
        arguments = (*arguments, arguments[0], 0)  # an operand twice, and one that is not there
    call = stand_in.random_call(rng, arguments)
    words = learnt(call, arguments, rng)
    first = call(random_arguments(arguments, Form.of(arguments), rng))[0]
    for _ in range(4):
        given = random_arguments(arguments, Form.of(arguments), rng)
        assert images(first, words, given) == [node.image for node in call(given)[0]]
    assert images(first, words, arguments) == [node.image for node in call(arguments)[0]]


@pytest.mark.parametrize("seed", range(CALLS))
def test_what_is_learnt_predicts_other_arguments_exactly(seed):
    check_predictions(seed)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_what_the_driver_tells(driver, seed):
    rng = stand_in.seeded(seed)
    arguments = stand_in.random_arguments(rng)
    nodes, edges = stand_in.random_call(rng, arguments)(arguments)
    read = Nodes(driver.captured(nodes, edges), {})
    for one, other in zip(read.nodes, nodes, strict=True):
        assert (one.kind, one.image) == (other.kind, other.image)
        assert one.form[:5] == other.form[:5]
        assert [name for name, _ in one.form[5]] == [name for name, _ in other.form[5]] if one.form else True
    assert read.edges == tuple((one, other, 0) for one, other in edges)
    assert read.handles == tuple(driver.graphs[next(iter(driver.graphs))][0])


def test_a_node_of_another_kind_or_a_function_that_tells_nothing_is_a_reason(driver):
    graph = driver.captured([Node(6, (), b"")], [])
    with pytest.raises(NotRelocatable, match="node of type 6"):
        Nodes(graph, {})
    driver._cuGraphNodeGetType = lambda *_: 999
    driver.__dict__["cuGraphNodeGetType"] = stand_in.Function(driver._cuGraphNodeGetType)
    with pytest.raises(NotRelocatable, match="cuGraphNodeGetType returned status 999"):
        Nodes(graph, {})


def test_two_halves_in_one_word_are_two_numbers():
    rng = stand_in.seeded(1)
    arguments = (A, 0.3, 7.5)
    for one, other in ((1, 2), (2, 1), (1, 1)):
        call = call_of((0, 8, stand_in.number(one, "e")), (0, 10, stand_in.number(other, "e")))
        words = learnt(call, arguments, rng)
        assert sorted((word.offset, word.argument) for word in words) == [(8, one), (10, other)]


def test_a_whole_number_is_a_half_too():
    call = call_of((0, 8, stand_in.number(1, "e")), (1, 2, stand_in.number(1, "e")))
    for seed in range(20):
        assert len(learnt(call, (A, 3.0), stand_in.seeded(seed))) == 2


# -- what is refused --------------------------------------------------------------------------------------------------
def later(rng, value=None, after=LEARNT):
    """Bytes that are the same in the first captures alone."""
    seen = []

    def of(_given):
        seen.append(0)
        return rng.randbytes(4) if len(seen) > after else value or bytes(4)

    return of


def in_turn(*of):
    """What each function gives in turn, and the last of them from then on."""
    seen = []

    def next_of(given):
        seen.append(0)
        return of[min(len(seen), len(of)) - 1](given)

    return next_of


def product(one, other):
    return lambda given: (given[one] * given[other] % (1 << 64)).to_bytes(8, "little")


def difference(one, other):
    return lambda given: ((given[one] - given[other]) % (1 << 64)).to_bytes(8, "little")


RNG = stand_in.seeded(5)
FOLLOWS_NOTHING = {
    "garbage": lambda: lambda _: RNG.randbytes(4),
    "garbage in some captures": lambda: in_turn(*([lambda _: bytes(4)] * 2), lambda _: bytes([9] * 4)),
    "a product": lambda: product(0, 1),
    "a difference": lambda: difference(0, 1),
    "the upper half": lambda: lambda given: (given[0] >> 20).to_bytes(4, "little"),
    "a number of bits": lambda: lambda given: bytes([given[0] % 251, 0, 0, 0]),
    "a number's square": lambda: lambda given: struct.pack("<f", given[2] ** 2),
    "a number's negative": lambda: lambda given: struct.pack("<d", -given[2]),
}


@pytest.mark.parametrize("what", FOLLOWS_NOTHING)
def test_a_word_that_follows_nothing_is_named(what):
    call = call_of((0, 0, stand_in.address(0)), (1, 24, FOLLOWS_NOTHING[what]()))
    with pytest.raises(NotRelocatable, match=r"node 1: the word at byte (24|28) depends on no operand or number \("):
        learnt(call, (A, B, 0.3), stand_in.seeded(3))


@pytest.mark.parametrize(
    "of",
    [
        lambda: later(stand_in.seeded(4)),
        lambda: in_turn(*[stand_in.address(0)] * LEARNT, stand_in.address(1)),
        lambda: later(stand_in.seeded(4), after=LEARNT + PROVING - 1),
    ],
    ids=["garbage", "an operand in some", "garbage in the last"],
)
def test_what_differs_in_the_captures_that_prove_alone_is_named(of):
    call = call_of((0, 0, stand_in.address(0)), (1, 24, of()))
    with pytest.raises(NotRelocatable, match="kernel 1: its parameters differ from the predicted ones"):
        learnt(call, (A, B, 0.3), stand_in.seeded(3))


@pytest.mark.parametrize("size", [61, 62, 63, 3, 1])
def test_tail_bytes_that_follow_something_are_named(size):
    of = stand_in.seeded(6)
    call = call_of((1, size // 4 * 4, lambda _: of.randbytes(size % 4)), nodes=[kernel(), kernel(size)])
    with pytest.raises(NotRelocatable, match=f"node 1: its last {size % 4} bytes depend on no known argument"):
        learnt(call, (A, B), stand_in.seeded(3))


def changed(node, capture):
    """Nodes of which capture number `capture` is another than before."""
    found, drawn = captures(call_of((0, 0, stand_in.address(0))), (A, B), stand_in.seeded(7))
    found[capture][1] = node
    return found, drawn


FORM = kernel().form
OTHERS = {
    "kernel": kernel()._replace(form=(32, *FORM[1:])),
    "grid": kernel()._replace(form=(*FORM[:3], (2,) * 7, *FORM[4:])),
    "places": kernel()._replace(form=(*FORM[:4], ((0, 8),), ())),
    "attribute": kernel()._replace(form=(*FORM[:5], ((1, bytes(64)),))),
    "size": kernel()._replace(image=bytes(68)),
    "kind": kernel()._replace(kind=MEMSET),
}


@pytest.mark.parametrize("capture", range(1, LEARNT + PROVING))
@pytest.mark.parametrize("what", OTHERS)
def test_another_form_at_other_addresses_is_named(what, capture):
    with pytest.raises(NotRelocatable, match="kernel 1: its kernel, grid or an attribute differs at other addresses"):
        learn(*changed(OTHERS[what], capture), Form.of((A, B)))


@pytest.mark.parametrize("kind", [MEMSET, MEMCPY, KERNEL])
def test_kinds_are_named_by_their_names(kind):
    name = {KERNEL: "kernel", MEMSET: "memset", MEMCPY: "memcpy"}[kind]
    found = [[Node(kind, (n > 3,), bytes(40))] for n in range(LEARNT + PROVING)]
    with pytest.raises(NotRelocatable, match=f"{name} 0: its kernel, grid or an attribute"):
        learn(found, [(A,)] * len(found), Form.of((A,)))


@pytest.mark.parametrize("end", ["src", "dst"])
def test_a_copy_from_or_to_the_host_keeps_the_library_s_call(driver, end):
    """Its parameters would be the same though the host's memory holds something else at the next call."""

    def of(params):
        return Node(MEMCPY, (), ctypes.string_at(params.getPtr(), MEMCPY_BYTES))

    copy = driver_types.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver_types.CUmemorytype.CU_MEMORYTYPE_DEVICE
    Nodes(driver.captured([of(copy)], ()), {})
    setattr(copy, f"{end}MemoryType", driver_types.CUmemorytype.CU_MEMORYTYPE_HOST)
    with pytest.raises(NotRelocatable, match="host's memory"):
        Nodes(driver.captured([of(copy)], ()), {})


def test_another_number_of_nodes_is_a_reason():
    found, drawn = captures(call_of((0, 0, stand_in.address(0))), (A, B), stand_in.seeded(7))
    found[4] = found[4][:1]
    with pytest.raises(NotRelocatable, match="enqueues 2 nodes at some addresses and 1 at others"):
        learn(found, drawn, Form.of((A, B)))


# -- forms ------------------------------------------------------------------------------------------------------------
def test_operands_at_one_address_are_one_operand():
    form = Form.of((A, B, A, 0, 0, B))
    assert form.same == (0, 1, 0, 3, 4, 1)
    assert form.operands == (0, 1)
    assert form.fixed == (None, None, None, 0, 0, None)
    assert form != Form.of((A, B, C, 0, 0, B))
    assert form == Form.of((C, A, C, 0, 0, A))
    assert Form.of((A, 0)) != Form.of((0, A))


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, 0j, -0j, complex(0, -0.0), 1 + 0j, complex(1, -0.0), np.float32(1)])
def test_special_numbers_are_fixed_and_zeros_apart(number):
    form = Form.of((A, number))
    assert form.fixed[1] == number
    assert form.free == ()
    assert repr(random_arguments((A, number), form, stand_in.seeded(1))[1]) == repr(number)
    others = [
        x for x in (0.0, -0.0, 1.0, 0j, -0j, complex(0, -0.0), 1 + 0j, complex(1, -0.0)) if repr(x) != repr(number)
    ]
    for other in others:
        if repr(other) != repr(float(number.real)) or isinstance(number, complex):
            assert Form.of((A, other)) != form


@pytest.mark.parametrize("number", [*NUMBERS, math.nan, math.inf, -math.inf, complex(math.nan, 1), 1e300, -1.0])
def test_other_numbers_are_free_and_drawn_anew(number):
    form = Form.of((A, number))
    is_complex = isinstance(number, complex | np.complexfloating)
    assert form == Form.of((B, 4 + 4j if is_complex else 4.5))
    assert form != Form.of((B, 4.5 if is_complex else 4 + 4j))
    assert form.free == (1,)
    drawn = [random_arguments((A, number), form, stand_in.seeded(seed))[1] for seed in range(9)]
    assert len(set(drawn)) == 9
    assert all(cmath.isfinite(x) and x not in (0, 1) for x in drawn)
    assert all(isinstance(x, complex) == is_complex for x in drawn)
    if is_complex:
        assert len({x.imag for x in drawn}) == 9
    elif float(number).is_integer():
        whole = Form.of((A, number), whole=True)
        assert (whole.whole, whole.free) == ((1,), (1,))
        only = [random_arguments((A, number), whole, stand_in.seeded(seed))[1] for seed in range(9)]
        assert all(float(x).is_integer() for x in only)
        assert len(set(only)) == 9
    exact = Form.of((A, number), exact=True)
    assert exact.free == ()
    assert exact.fixed[1] is number
    assert random_arguments((A, number), exact, stand_in.seeded(1))[1] is number


def check_random_arguments(seed):
    rng = stand_in.seeded(seed)
    arguments = [*stand_in.random_arguments(rng, rng.randrange(1, 9)), 0, 0.0, 2.5]
    arguments.insert(rng.randrange(len(arguments)), arguments[0])
    rng.shuffle(arguments)
    form = Form.of(arguments)
    for _ in range(20):
        drawn = random_arguments(arguments, form, rng)
        assert Form.of(drawn) == form
        for real, one in zip(arguments, drawn, strict=True):
            if type(real) is int and real:
                assert min(one & -one, MAX_ALIGNMENT) == min(real & -real, MAX_ALIGNMENT)
                assert LOWEST <= one < HIGHEST
                assert one != real
            elif real != 2.5:
                assert repr(one) == repr(real)


@pytest.mark.parametrize("seed", range(60))
def test_made_up_addresses_are_as_aligned_as_the_real_ones(seed):
    check_random_arguments(seed)


# -- defects that must be found ---------------------------------------------------------------------------------------
def every_check():
    for seed in range(40):
        check_predictions(seed)
        check_random_arguments(seed)
    for what in FOLLOWS_NOTHING:
        test_a_word_that_follows_nothing_is_named(what)
    test_what_differs_in_the_captures_that_prove_alone_is_named(lambda: later(stand_in.seeded(4)))
    test_tail_bytes_that_follow_something_are_named(62)
    for what in OTHERS:
        test_another_form_at_other_addresses_is_named(what, 4)
    test_another_number_of_nodes_is_a_reason()
    test_operands_at_one_address_are_one_operand()
    test_special_numbers_are_fixed_and_zeros_apart(0.0)
    test_other_numbers_are_free_and_drawn_anew(np.complex64(1 - 2j))


MUTATIONS = {
    "the step is ignored": ("Word", "(int(argument.real) + self.step) % WRAP", "int(argument.real) % WRAP"),
    "the low half's step is ignored": ("Word", "(int(argument.real) + self.step) % HALF", "int(argument.real) % HALF"),
    "real for imaginary": ("Word", "argument.imag if", "argument.real if"),
    "any operand": ("_word", "steps) == 1:\n                return", "steps):\n                return"),
    "numbers that hold in none": ("_word", "_holds_in_all(word, found, arguments)", "True"),
    "captures that prove are not looked at": ("learn", "if node.image != predicted", "if False"),
    "tails are not looked at": ("_words", "image[size:] != found[0][size:]", "False"),
    "what follows nothing is passed over": (
        "_words",
        'raise NotRelocatable(f"node {number}: the word',
        'continue; (f"',
    ),
    "forms are not compared": ("_same_form", "(one.kind, one.form, len(one.image)) !=", "() and"),
    "kinds are not compared": (
        "_same_form",
        "(one.kind, one.form, len(one.image))",
        "(two.kind, one.form, len(one.image))",
    ),
    "sizes are not compared": (
        "_same_form",
        "(one.kind, one.form, len(one.image))",
        "(one.kind, one.form, len(two.image))",
    ),
    "numbers of nodes are not compared": ("_same_form", "len(first) != len(other)", "False"),
    "more aligned than the real one": ("_alignment_offset", "if alignment == MAX_ALIGNMENT", "if True"),
    "one address for all": ("_pages", "base + MAX_ALIGNMENT * number for", "base for"),
    "operands that are one are drawn apart": ("random_arguments", "drawn[place] for place in form.same", "drawn"),
    "signs of zero are dropped": (
        "Form",
        "return cls(kinds, fixed, same, zeros, only)",
        "return cls(kinds, fixed, same, (), only)",
    ),
    "numbers of NumPy are no complex ones": ("Form", "isinstance(argument, COMPLEX)", "isinstance(argument, complex)"),
}


@pytest.mark.parametrize("defect", MUTATIONS)
def test_a_defect_is_found(monkeypatch, defect):
    stand_in.mutate(monkeypatch, relocation, *MUTATIONS[defect])
    for name in ("Form", "images", "learn", "random_arguments"):  # as they are named here
        monkeypatch.setitem(globals(), name, getattr(relocation, name))
    monkeypatch.setattr(stand_in, "Form", relocation.Form)
    with pytest.raises((AssertionError, ValueError, NotRelocatable, pytest.fail.Exception)):
        every_check()


def test_without_a_defect_every_check_passes():
    every_check()
