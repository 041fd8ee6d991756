"""One executable graph of a plan, launched at any addresses: its parameters are written anew, then it is launched.

relocation.py says what is written, plan_launch.py when there is such a graph. What is enqueued already keeps the
parameters that it was enqueued with.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from functools import partial
from itertools import accumulate
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.device.stream import relaxed
from dispatch.execute.graph_nodes import setter
from dispatch.execute.relocation import ADDRESS, REAL, Form, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Argument
    from dispatch.execute.graph_nodes import Nodes

__all__ = ["MISFIT", "RelocatedGraph"]

MISFIT = -1  # in place of a status: nothing was launched, for these arguments are not of the graph's form
ALIGNED = 64  # bytes: where the image of a node begins
FIRST_CHECK, LAST_CHECK = 64, 1 << 18  # launches at other addresses between two comparisons with the library's call


class RelocatedGraph:
    """An executable graph and the words of its nodes that follow the arguments.

    Guarantees: a launch has the parameters of its own arguments, also where a finalizer or a signal handler comes in
    between and wants the same graph: it is told MISFIT. `due` says that the next call should be compared.
    """

    __slots__ = (
        *("_addresses", "_at", "_buffer", "_busy", "_constants", "_count", "_derived", "_exec", "_fixed", "_fixed_at"),
        *("_free", "_graph", "_keep", "_launch", "_pack", "_pick", "_places", "_repeated", "_setters", "_start"),
        *("_zeros", "due", "form", "keep", "launches", "nodes", "status", "until_check", "words"),
    )

    def __init__(
        self,
        graph: ctypes.c_void_p,
        executable: int,
        nodes: Nodes,
        words: Sequence[Word],
        form: Form,
        launch: Callable[[ctypes.c_void_p], Callable[[], int]],
    ) -> None:
        """`graph` and `executable` become this object's own; `launch(executable)` gives what launches it."""
        self._graph, self._exec = graph, ctypes.c_void_p(executable)
        self.nodes, self.words, self.form = nodes.nodes, tuple(words), form
        self._launch = launch(self._exec)
        self._at: tuple[Argument, ...] | None = None  # the arguments whose parameters it has
        self._busy = False
        self.launches = self.status = 0
        self.keep: Any = None  # memory whose addresses are in the graph
        self.until_check, self.due = FIRST_CHECK, False
        self._lay_out(nodes)
        self._read_form()

    def _lay_out(self, nodes: Nodes) -> None:
        """Put all images into one buffer, and what follows the arguments into one call of `struct`."""
        sizes = [-(-len(node.image) // ALIGNED) * ALIGNED for node in nodes.nodes]
        self._places = [0, *accumulate(sizes)]
        whole = b"".join(node.image.ljust(size, b"\0") for node, size in zip(nodes.nodes, sizes, strict=True))
        self._buffer = ctypes.create_string_buffer(whole)
        changed = sorted({word.node for word in self.words})
        base = ctypes.addressof(self._buffer)
        made = [setter(self._exec, nodes.handles[n], nodes.nodes[n], base + self._places[n]) for n in changed]
        self._setters, self._keep = tuple(one for one, _ in made), tuple(kept for _, kept in made)
        self._derived: list[tuple[int, Callable[[Argument], Any]]] = []
        self._pack: Callable[..., None] | None = None
        if not self.words:
            return
        words = sorted(self.words, key=lambda word: (word.node, word.offset))
        codes, sources = ["<"], list[int]()
        constants: list[bytes] = []
        count = len(self.form.kinds)
        start = end = self._places[words[0].node] + words[0].offset
        derived = {
            word: place for place, word in enumerate(w for w in words if w.step or w.part not in (ADDRESS, REAL))
        }
        for word in words:
            place = self._places[word.node] + word.offset
            if place > end:  # what lies between two words is written as it is
                codes.append(f"{place - end}s")
                sources.append(count + len(derived) + len(constants))
                constants.append(self._buffer.raw[end:place])
            codes.append(word.code)
            sources.append(count + derived[word] if word in derived else word.argument)
            end = place + struct.calcsize(f"<{word.code}")
        self._derived = [(word.argument, _part(word)) for word in derived]
        self._constants = tuple(constants)
        self._start, self._pick = start, _getter(sources)
        self._pack = struct.Struct("".join(codes)).pack_into

    def _read_form(self) -> None:
        """What tells arguments of another form."""
        form = self.form
        fixed = [place for place, number in enumerate(form.fixed) if number is not None]
        self._fixed_at = _getter(fixed)
        self._fixed = tuple(form.fixed[place] for place in fixed)
        self._zeros = tuple(
            (place, math.copysign(1, form.fixed[place].real))  # type: ignore[union-attr]
            for place in fixed
            if form.kinds[place] is float and form.fixed[place] == 0
        )
        self._free = tuple((place, form.kinds[place]) for place in form.free)
        operands = form.operands
        self._addresses, self._count = _getter(operands), len(operands)
        twice = [place for place, same in enumerate(form.same) if same != place]
        self._repeated = (_getter(twice), _getter([form.same[place] for place in twice])) if twice else None

    def fits(self, arguments: tuple[Argument, ...]) -> bool:
        """Whether the arguments are of this form."""
        if self._fixed_at(arguments) != self._fixed:
            return False
        for place, sign in self._zeros:
            if math.copysign(1.0, arguments[place]) != sign:  # type: ignore[arg-type]
                return False
        for place, kind in self._free:
            if arguments[place] == 0 or arguments[place] == 1 or arguments[place].__class__ is not kind:
                return False
        if self._count > 1 and len(set(self._addresses(arguments))) != self._count:
            return False
        if self._repeated is not None:
            these, those = self._repeated
            return bool(these(arguments) == those(arguments))
        return True

    def launch(self, arguments: tuple[Argument, ...]) -> int:
        """Launch it for these arguments: the driver's status, or MISFIT."""
        if self._busy:
            return MISFIT
        self._busy = True
        try:
            if arguments != self._at and not self._write(arguments):
                return MISFIT
            self.launches += 1
            return self._launch()
        finally:
            self._busy = False

    def _write(self, arguments: tuple[Argument, ...]) -> bool:
        """Give the graph the parameters of these arguments, unless they are of another form, or to be compared."""
        if self.due or not self.fits(arguments):
            return False
        self.until_check -= 1
        if not self.until_check:
            self.due = True
            return False
        self._at = None
        if self._pack is not None:
            values = arguments
            if self._derived:
                values = (*arguments, *[part(arguments[place]) for place, part in self._derived])
            try:
                self._pack(self._buffer, self._start, *self._pick(values + self._constants))
            except (struct.error, OverflowError, TypeError):  # what the word cannot hold: the library knows what to do
                return False
            for put in self._setters:
                status = put()
                if status:
                    self.status = status
                    return False
        self._at = arguments
        return True

    def predicted(self, arguments: tuple[Argument, ...]) -> list[bytes] | None:
        """The images of the nodes for some arguments, as `launch` would write them; None within a launch."""
        if self._busy:
            return None
        self._busy = True
        try:
            self._at = None
            if self._pack is not None:
                values = (*arguments, *[part(arguments[place]) for place, part in self._derived], *self._constants)
                self._pack(self._buffer, self._start, *self._pick(values))
            raw = self._buffer.raw
            return [raw[place : place + len(node.image)] for place, node in zip(self._places, self.nodes, strict=False)]
        finally:
            self._busy = False

    def compared(self, *, next_in: int) -> None:
        """Note that a call was compared with the library's; the next is in so many launches at other addresses."""
        self.due, self.until_check = False, min(next_in, LAST_CHECK)

    @property
    def nbytes(self) -> int:
        """What its parameters take on the host."""
        return len(self._buffer)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        with relaxed():  # the driver frees a graph that is still running once it is done
            driver.cuGraphExecDestroy.unchecked(self._exec)
            driver.cuGraphDestroy.unchecked(self._graph)


def _getter(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A tuple of what stands at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    if places:
        place = places[0]
        return lambda values: (values[place],)
    return lambda _: ()


def _part(word: Word) -> Callable[[Argument], Any]:
    """What a word has of its argument."""
    if word.part == ADDRESS and 0 < word.step < 1 << 47:
        return partial(add, word.step)
    return lambda argument: word._replace(argument=0).value((argument,))
