"""RelocatedGraph: one executable graph of a plan, launched at any addresses after its parameters are rewritten.

relocation.py determines what is written, plan_relocation.py makes the graph. Launches that are already enqueued keep
the parameters that they were enqueued with.

A graph of one kernel is faster than launching the kernel. Setting its node and launching the graph takes 2.4 us on an
H200's host, 1.7 us of it for the launch; `cuLaunchKernelEx` of the same kernel with the same bytes takes 3.5 to 4.1 us.
For a kernel with 45 bytes of parameters it is 2.2 and 3.9 us.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.call_counter import CallNumber
from dispatch.device.disposal import dispose
from dispatch.device.stream import RELAXED, exchange_mode, relaxed
from dispatch.execute.graph_nodes import KERNEL, setter
from dispatch.execute.relocation import (
    ADDRESS,
    COMPLEX,
    HALF,
    IMAGINARY,
    LOW,
    MAX_CALLS,
    MAX_EXACT_INTEGER,
    NARROWED,
    NUMBER,
    WHOLE,
    Form,
    Word,
    narrowed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Argument
    from dispatch.execute.graph_nodes import Node, Nodes

__all__ = ["MISFIT", "Executable", "RelocatedGraph", "code_of"]

MISFIT = -1  # in place of a status: nothing was launched, because the arguments do not have the graph's form
ALIGNED = 64  # bytes: the alignment of a node's image in the buffer
FIRST_CHECK, LAST_CHECK = 64, 1 << 18  # launches at other addresses between two comparisons with the library's call
SIZES = {"Q": 8, "d": 8, "I": 4, "i": 4, "f": 4, "e": 2}  # bytes of a word, by its `struct` code


class Executable:
    """Owns a captured graph and, after instantiation, its executable graph; counts the launches."""

    __slots__ = ("_end", "begun", "graph", "handle", "status", "until_check")

    def __init__(self, graph: ctypes.c_void_p, handle: int | None = None) -> None:
        self.graph, self.handle = graph, ctypes.c_void_p(handle)
        self._end = driver.cuGraphExecDestroy.unchecked, driver.cuGraphDestroy.unchecked
        self.status = 0  # of the driver, if a node refused other parameters
        self.begun = self.until_check = FIRST_CHECK  # launches to the next comparison: initial, left

    @property
    def launches(self) -> int:
        """How many launches had other addresses than the launch before them."""
        return self.begun - self.until_check

    def compare_after(self, launches: int) -> None:
        """Set when the next comparison is due."""
        self.begun += launches - self.until_check
        self.until_check = launches

    def __del__(self) -> None:
        if not sys.is_finalizing():
            dispose(_destroy, (*self._end, self.handle, self.graph))


def _destroy(handles: tuple[Any, Any, ctypes.c_void_p, ctypes.c_void_p]) -> None:
    end_executable, end_graph, executable, graph = handles
    with relaxed():  # the driver frees a graph that is still running once it is done
        if executable.value is not None:
            end_executable(executable)
        end_graph(graph)


class RelocatedGraph:
    """An executable graph, and the words of its nodes that depend on the arguments.

    `launch(arguments)` returns the driver's status, or MISFIT. Guarantees: a launch has the parameters of its own
    arguments; a finalizer or signal handler that runs meanwhile and calls the same graph gets MISFIT. `until_check`
    counts down the launches with other addresses than the previous launch; at 0 they return MISFIT until the call has
    been compared with the library's.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_keep",
        "_places",
        "counts",
        "edges",
        "fits",
        "form",
        "launch",
        "nodes",
        "words",
        "write",
    )

    launch: Callable[[tuple[Argument, ...]], int]
    fits: Callable[[tuple[Argument, ...]], bool]  # whether arguments have its form
    # Writes the parameters for some arguments into the images, without setting nodes, and returns all; b"" if in use.
    write: Callable[[tuple[Argument, ...]], bytes]

    def __init__(
        self,
        executable: Executable,
        nodes: Nodes,
        words: Sequence[Word],
        form: Form,
        launch: Callable[[ctypes.c_void_p, int], Callable[[], int]],
        keep: Any = None,
    ) -> None:
        """`launch(handle, nodes)` returns the function that launches the graph; `keep` has its memory."""
        self.counts, self.nodes, self.words, self.form = executable, nodes.nodes, tuple(words), form
        self._places, self.edges = _places(self.nodes), nodes.edges
        spans = zip(self.nodes, pairwise(self._places), strict=True)
        contents = b"".join(node.image.ljust(end - start, b"\0") for node, (start, end) in spans)
        self._buffer = (ctypes.c_char * max(len(contents), ALIGNED)).from_buffer_copy(contents.ljust(ALIGNED, b"\0"))
        raw = memoryview(self._buffer).cast("B")
        changed, base = sorted({word.node for word in self.words}), ctypes.addressof(self._buffer)
        setters = [setter(executable.handle, nodes.handles[n], self.nodes[n], base + self._places[n]) for n in changed]
        self._keep = keep, tuple(kept for _, kept in setters)
        # The generated code of `_quiet` inlines `relaxed()`, with this int as the mode; `busy` excludes nested use.
        before = ctypes.c_int(RELAXED)
        scope: dict[str, Any] = {
            **{f"fixed_{place}": number for place, number in enumerate(form.fixed)},
            **{f"put_{n}": put for n, (put, _) in zip(changed, setters, strict=True)},
            "raw": raw,
            "Qs": raw.cast("Q"),
            "ds": raw.cast("d"),
            "Is": raw.cast("I"),
            "is_": raw.cast("i"),
            "fs": raw.cast("f"),
            "half": partial(struct.pack_into, "<e", raw),
            "double": partial(struct.pack_into, "<d", raw),
            "narrowed": narrowed,
            "copysign": math.copysign,
            "before": before,
            "mode": ctypes.byref(before),
            "exchange": exchange_mode(),
            "RELAXED": RELAXED,
            "COMPLEX": COMPLEX,
            "run": launch(executable.handle, len(self.nodes)),
            "kept": self._keep,
            "MISFIT": MISFIT,
            "NotSet": NotSet,
        }
        exec(code_of(self.nodes, self.words, form), scope)
        self.launch, self.fits, self.write = scope.pop("make")(executable)

    def images(self, written: bytes = b"") -> list[bytes]:
        """The image of each node, from what `write` returned, or as last written."""
        raw = written or self._buffer.raw
        return [raw[place : place + len(node.image)] for place, node in zip(self._places, self.nodes, strict=False)]

    def compared(self) -> None:
        """Record a successful comparison; the next one comes after eight times as many launches."""
        self.counts.compare_after(min(8 * max(self.counts.launches, FIRST_CHECK), LAST_CHECK))

    @property
    def kept(self) -> Any:
        """The `keep` that was passed to the constructor."""
        return self._keep[0]

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters on the host."""
        return len(self._buffer)


# -- the generated code -----------------------------------------------------------------------------------------------
FEW = 4  # up to so many operands are compared pair by pair
FAR = 1 << 47  # bytes: a larger step is a negative one, modulo 2^64

TEMPLATE = """\
def make(counts):
    at, busy = None, False

    def launch(arguments):
        nonlocal at, busy
        if busy:
            return MISFIT
        try:
            busy = True
            if arguments != at{other_numbers}:
                {new}, = arguments
                if counts.until_check <= 0 or {misfit}:
                    return MISFIT
                counts.until_check -= 1
                if at is None:
                    {nothing} = None
                else:
                    {old}, = at
                at = None
{setting}
                at = arguments
            return run()
        except (TypeError, ValueError, OverflowError):  # a word cannot hold the value: left to the library
            return MISFIT
        except NotSet as refused:
            counts.status = refused.args[0]
            return MISFIT
        finally:
            busy = False

    def fits(arguments):
        {new}, = arguments
        return not ({misfit})

    def write(arguments):
        nonlocal at, busy
        if busy:
            return b""
        try:
            busy = True
            at = {nothing} = None
            {new}, = arguments
{writing}
            return bytes(raw)
        except (TypeError, ValueError, OverflowError):
            return b""
        finally:
            busy = False

    return launch, fits, write
"""


def _places(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The offset of each node's image in the buffer, and the end of the last."""
    return (0, *accumulate(-(-len(node.image) // ALIGNED) * ALIGNED for node in nodes))


def code_of(nodes: Sequence[Node], words: tuple[Word, ...], form: Form) -> Any:
    """The code of a relocated graph; compiling it takes one to two milliseconds, once for each form."""
    return _code(words, form, _places(nodes), all(nodes[word.node].kind == KERNEL for word in words))


@lru_cache(1024)
def _code(words: tuple[Word, ...], form: Form, places: tuple[int, ...], kernels: bool) -> Any:
    """The generated code of `launch`, `fits` and `write`; it has no loops, which took 1.2 us more.

    Only words whose arguments have changed since the last launch are written, and only nodes with such words are set.
    Plans with the same kernel have the same words, and so share the code.
    """
    new, old = (", ".join(f"{letter}{place}" for place in range(len(form.kinds))) for letter in "xy")
    writing: list[str] = []
    setting: list[str] = []
    nodes = sorted({word.node for word in words})
    for node in nodes:
        node_words = [word for word in words if word.node == node]
        following = sorted({word.argument for word in node_words})
        lines = []
        for place in following:
            lines.append(f"if {_differs(form, place)}:")
            lines += [f"    {_statement(word, form, places)}" for word in node_words if word.argument == place]
        writing += lines
        lines += [f"status = put_{node}()", "if status: raise NotSet(status)"]
        if len(nodes) > 1:
            is_other = " or ".join(_differs(form, place) for place in following)
            lines = [f"if {is_other}:", *(f"    {line}" for line in lines)]
        setting += lines
    if not kernels:
        setting = _quiet(setting)
    source = TEMPLATE.format(
        new=new,
        old=old,
        misfit=" or ".join(_misfits(form)) or "False",
        other_numbers="".join(f" or {test}" for test in _other_numbers(form)),
        nothing=" = ".join(f"y{place}" for place in range(len(form.kinds))),
        setting="\n".join(f"{' ' * 16}{line}" for line in setting),
        writing="\n".join(f"{' ' * 12}{line}" for line in writing),
    )
    return compile(source, "<relocated graph>", "exec")


def _quiet(setting: list[str]) -> list[str]:
    """The same lines in the relaxed capture mode, so that they cannot end another thread's capture.

    Setting a kernel node ended no capture in any mode (driver 580), so kernels do not need it, which saves 0.3 us a
    launch. For memset and memcpy nodes, whose addresses the driver inspects, this is not documented.
    """
    return [
        "try:",
        "    exchange(mode)",
        *(f"    {line}" for line in setting),
        "finally:",
        "    if before.value != RELAXED:  # else the mode was relaxed before, or is not exchanged yet",
        "        exchange(mode)",
    ]


def _misfits(form: Form) -> list[str]:
    """Conditions, as code, that are true for arguments of another form; the cheapest first."""
    tests = [f"x{place}" for place, number in enumerate(form.fixed) if number == 0 and form.kinds[place] is int]
    for place, (kind, number) in enumerate(zip(form.kinds, form.fixed, strict=True)):
        if kind is CallNumber:
            tests.append(f"not 0 < x{place} < {MAX_CALLS}")
        elif kind is not int and number is not None:
            is_other = f"x{place} is not fixed_{place} and"  # usually the same object
            tests.append(f"{is_other} x{place} != fixed_{place}")
            if kind is float:
                tests.append(f"{is_other} isinstance(x{place}, COMPLEX)")
        elif kind is not int:
            tests.append(f"x{place} == 0 or x{place} == 1")
            if kind is float:
                tests.append(f"isinstance(x{place}, COMPLEX)")
    tests += [f"x{place} % 1 != 0 or not -{MAX_EXACT_INTEGER} < x{place} < {MAX_EXACT_INTEGER}" for place in form.whole]
    tests += _other_zeros(form, "x{}")
    operands = form.operands
    if operands:
        tests.append(f"not ({' and '.join(f'x{place}' for place in operands)})")
    if len(operands) > FEW:
        tests.append(f"len({{{', '.join(f'x{place}' for place in operands)}}}) != {len(operands)}")
    else:
        tests += [f"x{one} == x{two}" for i, one in enumerate(operands) for two in operands[i + 1 :]]
    return [*tests, *(f"x{place} != x{same}" for place, same in enumerate(form.same) if place != same)]


def _other_zeros(form: Form, name: str) -> list[str]:
    """Conditions, as code, that numbers equal the fixed ones without being identical: 0.0 equals -0.0."""
    tests = []
    for place, (kind, number) in enumerate(zip(form.kinds, form.fixed, strict=True)):
        variable = name.format(place)
        if kind is float and number == 0:
            sign = ">" if math.copysign(1, number.real) < 0 else "<"
            tests.append(f"{variable} is not fixed_{place} and copysign(1.0, {variable}) {sign} 0")
        elif kind is complex and number is not None:
            tests.append(f"repr(complex({variable})) != {repr(complex(number))!r}")
    return tests


def _other_numbers(form: Form) -> list[str]:
    """Conditions, as code, that numbers equal those of the last launch without being identical."""
    free = [place for place in form.free if form.kinds[place] is complex]
    return _other_zeros(form, "arguments[{}]") + [f"repr(arguments[{n}]) != repr(at[{n}])" for n in free]


def _differs(form: Form, place: int) -> str:
    """The condition, as code, that an argument differs from the last launch; in a complex one -0.0 differs from 0.0."""
    x, y = f"x{place}", f"y{place}"
    return f"repr({x}) != repr({y})" if form.kinds[place] is complex else f"{x} != {y}"


def _statement(word: Word, form: Form, places: tuple[int, ...]) -> str:
    """The assignment of a word, as code."""
    place, value = places[word.node] + word.offset, f"x{word.argument}"
    if word.part == ADDRESS and word.step:
        value = f"{value} + {word.step}" if word.step < FAR else f"({value} + {word.step}) & {(1 << 64) - 1}"
    elif word.part == LOW:
        value = f"({value} + {word.step}) & {HALF - 1}"
    elif word.part == NUMBER:
        value = f"({value} * {word.growth} + {word.step}) & {(1 << 8 * SIZES[word.code]) - 1}"
    elif word.part == WHOLE:
        value = f"int({value}.real)"
    elif word.part == NARROWED:
        value = f"narrowed({value}.real)"
    elif form.kinds[word.argument] is complex:
        value = f"{value}.{'imag' if word.part == IMAGINARY else 'real'}"
    if word.code == "e":
        return f"half({place}, {value})"
    size = SIZES[word.code]
    if word.code == "d" and place % size:
        return f"double({place}, {value})"
    if place % size:  # 8 bytes at a multiple of 4
        return f"t = {value}; Is[{place // 4}] = t & {HALF - 1}; Is[{place // 4 + 1}] = t >> 32"
    view = "is_" if word.code == "i" else f"{word.code}s"
    return f"{view}[{place // size}] = {value}"


class NotSet(Exception):
    """A node of an executable graph has refused other parameters; the argument is the driver's status."""
