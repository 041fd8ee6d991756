"""Finds the bytes of a captured call that depend on its operands, from captures at random addresses.

A capture reads no memory, so a plan can be captured at any addresses of the right alignment. Between such captures, the
parameters of the enqueued kernels differ in words that are an operand's address plus a constant (also inside tensor
maps), or a number passed by value, or that grow by a fixed step with the number of the call. `learn` finds these
words in some captures, and returns them only if they predict every byte of further captures; otherwise the library's
own call runs the plan. relocated_graph.py launches with the words, plan_relocation.py decides when to learn. This
module calls neither a library nor the driver.
"""

from __future__ import annotations

import ctypes
import math
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dispatch.core.call_counter import CallNumber
from dispatch.execute.graph_nodes import Node, NotRelocatable

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from dispatch.core.request import Argument

__all__ = ["COMPLEX", "LEARNT", "PROVING", "SPECIAL", "Form", "Word", "images", "learn", "narrowed", "random_arguments"]

LEARNT = 3  # captures in which words are found
PROVING = 2  # further captures that the words must predict, at least
MAX_ALIGNMENT = 256  # bytes: the largest alignment that a layout guarantees
LOWEST, HIGHEST = 1 << 33, 1 << 46  # the range of random addresses
NEAR = 1 << 32  # bytes: in some captures all operands lie within this, as differences in 32 bits would require
SPANS = (HIGHEST - LOWEST, NEAR, NEAR, HIGHEST - LOWEST)  # of the addresses of the captures, in turn
SPECIAL = (0.0, 1.0)  # numbers for which libraries use other code paths
COMPLEX = (complex, np.complexfloating)  # np.complex64 is no subclass of complex
NEXT = 2  # index of the captured call whose number is the successor of the previous one
MAX_CALLS = 1 << 32  # the library runs calls with the number 0, or this number and above
MAX_EXACT_INTEGER = 1 << 11  # smaller integers are exact in every format, including f16
ADDRESS, LOW, REAL, IMAGINARY, WHOLE, NARROWED, NUMBER = range(7)
WRAP, HALF = 1 << 64, 1 << 32


class Word(NamedTuple):
    """Bytes that depend on an argument: a value of the `struct` code `code` at `offset` in the image of a node."""

    node: int
    offset: int
    code: str
    argument: int
    part: int  # the part of the argument: the address, its low 32 bits, a part of a number, the number of the call
    step: int = 0  # the constant that is added
    growth: int = 0  # the factor of the number of the call

    def value(self, arguments: Sequence[Argument]) -> int | float:
        """The value of the word for these arguments."""
        argument = arguments[self.argument]
        if self.part == ADDRESS:
            return (int(argument.real) + self.step) % WRAP
        if self.part == LOW:
            return (int(argument.real) + self.step) % HALF
        if self.part == NUMBER:
            return (int(argument.real) * self.growth + self.step) % (WRAP if self.code == "Q" else HALF)
        if self.part == WHOLE:
            return int(argument.real)
        number = argument.imag if self.part == IMAGINARY else argument.real
        if self.part == NARROWED:
            return narrowed(number)
        return ctypes.c_float(number).value if self.code == "f" else number  # infinity if it is too large


def narrowed(number: float) -> float:
    """A number rounded to f32, before it is rounded to f16: rounding twice changes one number in 8,192."""
    return ctypes.c_float(number).value


class Form(NamedTuple):
    """The properties that arguments share if they share a relocated graph: operands that are present or coincide.

    `kinds` has int for an address, float or complex for a number, CallNumber for the number of the call. `fixed` has
    None for an address and for a number that may vary, else the number, or 0 for an absent operand. `same` has the
    position of the first operand with the same address. `zeros` has the text of fixed numbers that are equal to others
    with another text, such as 0.0 and -0.0. `whole` has the positions of numbers that may vary among small integers,
    for a call that supports no fractions.
    """

    kinds: tuple[type, ...]
    fixed: tuple[Argument | None, ...]
    same: tuple[int, ...]
    zeros: tuple[str, ...]
    whole: tuple[int, ...] = ()

    @classmethod
    def of(cls, arguments: Sequence[Argument], *, exact: bool = False, whole: bool = False) -> Form:
        """The form of arguments, in which all numbers but SPECIAL ones may vary; with `exact`, none may.

        With `whole`, integral numbers may only become other integers.
        """
        first: dict[Argument, int] = {}
        kinds = tuple(
            kind
            if (kind := type(argument)) is int or kind is CallNumber
            else (complex if isinstance(argument, COMPLEX) else float)
            for argument in arguments
        )
        fixed = tuple(
            argument
            if kind is not CallNumber and (not argument if kind is int else exact or argument in SPECIAL)
            else None
            for argument, kind in zip(arguments, kinds, strict=True)
        )
        same = tuple(
            first.setdefault(argument, place) if kind is int and argument else place
            for place, (argument, kind) in enumerate(zip(arguments, kinds, strict=True))
        )
        zeros = tuple(
            repr(complex(number) if kind is complex else float(number.real))
            for kind, number in zip(kinds, fixed, strict=True)
            if number is not None and (kind is complex or (kind is float and number == 0))
        )
        only = tuple(
            place
            for place, (argument, kind, number) in enumerate(zip(arguments, kinds, fixed, strict=True))
            if whole and kind is float and number is None and float(argument.real).is_integer()
        )
        return cls(kinds, fixed, same, zeros, only)

    @property
    def operands(self) -> tuple[int, ...]:
        """The positions of the operands that are present, one for each address."""
        return tuple(place for place in self._open if self.kinds[place] is int and self.same[place] == place)

    @property
    def free(self) -> tuple[int, ...]:
        """The positions of numbers that may vary."""
        return tuple(place for place in self._open if self.kinds[place] not in (int, CallNumber))

    @property
    def numbered(self) -> tuple[int, ...]:
        """The position of the number of the call, if it has one."""
        return tuple(place for place in self._open if self.kinds[place] is CallNumber)

    @property
    def _open(self) -> list[int]:
        return [place for place, number in enumerate(self.fixed) if number is None]


def random_arguments(
    arguments: Sequence[Argument], form: Form, rng: random.Random, before: Sequence[Sequence[Argument]] = ()
) -> tuple[Argument, ...]:
    """Random arguments of a form: addresses are drawn independently, each with exactly the alignment of the original.

    `before` has the arguments drawn for earlier captures of the call. Every second capture has the operands in the
    opposite order in memory, and numbers of the opposite sign. So a word that holds, for example, the lesser of two
    addresses is not mistaken for one of them.
    """
    drawn = list(arguments)
    last = before[-1] if before else None
    pages = _pages(form, rng, last if len(before) % 2 else None, SPANS[len(before) % len(SPANS)])
    for place, page in zip(form.operands, pages, strict=True):
        drawn[place] = page + _alignment_offset(int(arguments[place].real), rng)
    for place in form.free:
        if place in form.whole:
            drawn[place] = float(rng.randrange(2, MAX_EXACT_INTEGER))
        elif form.kinds[place] is complex:
            parts = (None, None) if last is None else (last[place].real, last[place].imag)
            drawn[place] = complex(*(_number(part, rng) for part in parts))
        else:
            drawn[place] = _number(None if last is None else last[place].real, rng)
    for place in form.numbered:
        drawn[place] = CallNumber(_call(len(before), None if last is None else int(last[place].real), rng))
    return tuple(drawn[place] for place in form.same)


def _pages(form: Form, rng: random.Random, last: Sequence[Argument] | None, span: int) -> list[int]:
    """A multiple of MAX_ALIGNMENT for each operand, all within `span`; in the opposite order of `last`, if given."""
    count = len(form.operands)
    base = rng.randrange(LOWEST, HIGHEST - span + 1) // MAX_ALIGNMENT * MAX_ALIGNMENT
    pages = [base + MAX_ALIGNMENT * number for number in rng.sample(range(span // MAX_ALIGNMENT), count)]
    if last is None:
        return pages
    ordered = sorted(range(count), key=lambda number: -int(last[form.operands[number]].real))
    page_of = dict(zip(ordered, sorted(pages), strict=True))
    return [page_of[number] for number in range(count)]


def _alignment_offset(real: int, rng: random.Random) -> int:
    """A random offset from a multiple of MAX_ALIGNMENT that gives exactly the alignment of an address."""
    alignment = min(MAX_ALIGNMENT, real & -real)
    if alignment == MAX_ALIGNMENT:
        return 0
    return alignment * (2 * rng.randrange(MAX_ALIGNMENT // alignment // 2) + 1)


def _number(last: float | None, rng: random.Random) -> float:
    """A random number whose conversions all differ: to an integer by any rounding, to f16 directly, to f16 through f32.

    It is closer to the middle between two f16 numbers than f32 can resolve, on the side of the odd one. Directly, it
    rounds to the odd one; as an f32 it is exactly in the middle, and rounds to the even one.
    """
    size = rng.randrange(1, 8) + rng.uniform(0.5, 1)
    exponent = math.frexp(size)[1] - 11  # of the last bit of an f16
    half = int(math.ldexp(size, -exponent))
    beyond = math.ldexp(rng.uniform(0.1, 0.9), exponent - 15)
    size = math.ldexp(half + 0.5, exponent) + (-beyond if half % 2 else beyond)
    is_negative = rng.random() < 0.5 if last is None else last > 0
    return -size if is_negative else size


def _call(turn: int, last: int | None, rng: random.Random) -> int:
    """The number of a captured call: first the largest, then a small one and its successor, then any."""
    if turn == 0 or last is None:
        return MAX_CALLS - 1
    if turn == 1:
        return rng.randrange(1, 1 << 10)
    return last + 1 if turn == NEXT else rng.randrange(1, 1 << rng.randrange(1, MAX_CALLS.bit_length()))


def learn(captures: Sequence[Sequence[Node]], arguments: Sequence[Sequence[Argument]], form: Form) -> tuple[Word, ...]:
    """The words that depend on the arguments; NotRelocatable unless they predict every byte of all captures.

    They are found in the first LEARNT captures and must predict all others, which are at least PROVING.
    """
    first = captures[0]
    for capture in captures[1:]:
        _same_form(first, capture)
    words: list[Word] = []
    for number in range(len(first)):
        captured = [capture[number].image for capture in captures[:LEARNT]]
        words += _words(number, captured, arguments[:LEARNT], form)
    for capture, drawn in zip(captures, arguments, strict=True):
        for number, (node, predicted) in enumerate(zip(capture, images(first, words, drawn), strict=True)):
            if node.image != predicted:
                raise NotRelocatable(f"{_named(number, node)}: its parameters differ from the predicted ones")
    return tuple(words)


def images(nodes: Sequence[Node], words: Sequence[Word], arguments: Sequence[Argument]) -> list[bytes]:
    """The images of a call's nodes for these arguments, predicted from the nodes of one capture."""
    changed = [bytearray(node.image) for node in nodes]
    for word in words:
        struct.pack_into(f"<{word.code}", changed[word.node], word.offset, word.value(arguments))
    return [bytes(image) for image in changed]


def _same_form(first: Sequence[Node], other: Sequence[Node]) -> None:
    if len(first) != len(other):
        raise NotRelocatable(f"it enqueues {len(first)} nodes at some addresses and {len(other)} at others")
    for number, (one, two) in enumerate(zip(first, other, strict=True)):
        if (one.kind, one.form, len(one.image)) != (two.kind, two.form, len(two.image)):
            raise NotRelocatable(f"{_named(number, one)}: its kernel, grid or an attribute differs at other addresses")


def _words(number: int, found: Sequence[bytes], arguments: Sequence[Sequence[Argument]], form: Form) -> list[Word]:
    """The words of one node that differ between captures."""
    size = len(found[0]) // 4 * 4
    if any(image[size:] != found[0][size:] for image in found):
        raise NotRelocatable(f"node {number}: its last {len(found[0]) - size} bytes depend on no known argument")
    halves = zip(*(struct.unpack_from(f"<{size // 2}H", image) for image in found), strict=True)
    differing = [2 * place for place, these in enumerate(halves) if len(set(these)) > 1]
    words: list[Word] = []
    end = 0  # of the words found so far
    for offset in differing:
        if offset < end:
            continue
        start = offset // 4 * 4
        word = _word(number, start, end, found, arguments, form) or _half(number, offset, found, arguments, form)
        if word is None:
            data = ", ".join(image[start : start + 4].hex() for image in found)
            raise NotRelocatable(f"node {number}: the word at byte {start} depends on no operand or number ({data})")
        words.append(word)
        end = word.offset + struct.calcsize(f"<{word.code}")
    return words


def _word(
    number: int, offset: int, end: int, found: Sequence[bytes], arguments: Sequence[Sequence[Argument]], form: Form
) -> Word | None:
    if offset < end:
        return None
    if offset + 8 <= len(found[0]):
        wholes = [int.from_bytes(image[offset : offset + 8], "little") for image in found]
        for place in form.operands:
            steps = {(whole - int(drawn[place].real)) % WRAP for whole, drawn in zip(wholes, arguments, strict=True)}
            if len(steps) == 1:
                return Word(number, offset, "Q", place, ADDRESS, steps.pop())
    for place in form.free:
        for code, part in (("d", REAL), ("d", IMAGINARY), ("f", REAL), ("f", IMAGINARY), ("i", WHOLE)):
            for at in (offset, offset - 4) if code == "d" else (offset,):  # integers have no lower bits
                word = Word(number, at, code, place, part)
                if at >= end and _holds_in_all(word, found, arguments):
                    return word
    for place in form.numbered:
        for code, size in (("Q", 8), ("I", 4)):
            growing = _growing(number, offset, code, size, place, found, arguments)
            if growing is not None:
                return growing
    halves = [int.from_bytes(image[offset : offset + 4], "little") for image in found]
    for place in form.operands:  # half of an address left in padding (seen with cuDNN)
        steps = {(half - int(drawn[place].real)) % HALF for half, drawn in zip(halves, arguments, strict=True)}
        if len(steps) == 1:
            return Word(number, offset, "I", place, LOW, steps.pop())
    return None


def _growing(
    number: int,
    offset: int,
    code: str,
    size: int,
    place: int,
    found: Sequence[bytes],
    arguments: Sequence[Sequence[Argument]],
) -> Word | None:
    """A word that grows by a fixed step with the number of the call, found from two successive numbers."""
    if offset + size > len(found[0]):
        return None
    numbers = [int(drawn[place].real) for drawn in arguments]
    values = [int.from_bytes(image[offset : offset + size], "little") for image in found]
    for (one, before), (other, behind) in pairwise(zip(numbers, values, strict=True)):
        if other == one + 1:
            growth = (behind - before) % (1 << 8 * size)
            word = Word(number, offset, code, place, NUMBER, (before - one * growth) % (1 << 8 * size), growth)
            return word if _holds_in_all(word, found, arguments) else None
    return None


def _half(
    number: int, offset: int, found: Sequence[bytes], arguments: Sequence[Sequence[Argument]], form: Form
) -> Word | None:
    """A number of 16 bits; two of them may share a word."""
    for place in form.free:
        for part in (REAL, NARROWED):
            word = Word(number, offset, "e", place, part)
            if _holds_in_all(word, found, arguments):
                return word
    return None


def _holds_in_all(word: Word, found: Sequence[bytes], arguments: Sequence[Sequence[Argument]]) -> bool:
    return all(_holds(word, image, drawn) for image, drawn in zip(found, arguments, strict=True))


def _holds(word: Word, image: bytes, arguments: Sequence[Argument]) -> bool:
    """Whether an image contains the value of a word."""
    try:
        bits = struct.pack(f"<{word.code}", word.value(arguments))
    except (struct.error, OverflowError):
        return False
    return image[word.offset : word.offset + len(bits)] == bits


def _named(number: int, node: Node) -> str:
    return f"{('kernel', 'memcpy', 'memset')[node.kind]} {number}"
