"""Learner: captures a plan's call at various addresses and determines how its parameters depend on the operands.

Each step is one capture at random addresses; the last one is at the addresses of a real call.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.execute.cuda_graph import instantiated
from dispatch.execute.graph_nodes import Nodes, NotRelocatable, NumbersInMemory
from dispatch.execute.relocated_graph import Executable, RelocatedGraph, code_of
from dispatch.execute.relocation import LEARNT, PROVING, Form, Word, images, learn, random_arguments

if TYPE_CHECKING:
    import ctypes

    from dispatch.core.request import Argument, Plan
    from dispatch.execute.relocations import Recorder

__all__ = ["Learner", "nodes_of"]

MAX_WORDS = 1024  # entries of `_words`; the oldest is dropped first
SETTLING = 2  # recordings after a failed one
LOST = 3  # recordings ended by other libraries before learning is given up

_words: dict[tuple[Any, ...], tuple[Word, ...]] = {}  # learnt words by kernels; each plan still verifies them


class Learner:
    """The captures of a plan for one form of arguments."""

    def __init__(self, arguments: tuple[Argument, ...], *, exact: bool = False, whole: bool = False) -> None:
        self._form = Form.of(arguments, exact=exact, whole=whole)
        self._is_exact, self._is_whole = exact, whole
        self._arguments: list[tuple[Argument, ...]] = []
        self._captures: list[Nodes] = []
        self._words: tuple[Word, ...] | None = None
        self._is_compiled = False
        self._knows = True  # whether words of other plans with the same kernels have not been tried yet
        self._sizes: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._rng = Random()
        self._lost = 0

    def takes(self, arguments: tuple[Argument, ...]) -> bool:
        """Whether the arguments have its form."""
        if not (self._is_exact or self._is_whole):
            return True
        return Form.of(arguments, exact=self._is_exact, whole=self._is_whole) == self._form

    @property
    def draws_numbers(self) -> bool:
        """Whether it draws random numbers in place of the call's numbers, not only addresses."""
        return bool(self._form.free)

    def step(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> RelocatedGraph | None:
        """Take the next step; the last one returns the graph. Raises NotRelocatable."""
        if self._words is not None:
            if self._is_compiled:
                return self._made(executor, plan, arguments, self._words)
            code_of(self._captures[0].nodes, self._words, self._form)
            self._is_compiled = True
            return None
        captures = self._captures
        if len(captures) < LEARNT + PROVING:
            self._capture(executor, plan, arguments)
            if self._knows and len(captures) == PROVING:
                self._recall()
        else:
            self._words = learn([capture.nodes for capture in captures], self._arguments, self._form)
            if len(_words) >= MAX_WORDS:
                _words.pop(next(iter(_words.copy())), None)
            _words[self._kernels] = self._words
        return None

    @property
    def _kernels(self) -> tuple[Any, ...]:
        """The key of `_words`: plans with the same kernels, even with other grids, likely have the same words."""
        return self._form, *((n.kind, *n.form[:2], n.form[4:5], len(n.image)) for n in self._captures[0].nodes)

    def _recall(self) -> None:
        """Reuse the words of another plan with the same kernels, if they predict the first two captures.

        The first capture has the bytes that are the same at all addresses. Then `_made` checks a third capture, at
        real addresses.
        """
        words, self._knows = _words.get(self._kernels), False
        if words is None:
            return
        first = self._captures[0].nodes
        for capture, arguments in zip(self._captures, self._arguments, strict=True):
            alike = [(node.kind, node.form) for node in capture.nodes] == [(node.kind, node.form) for node in first]
            if not alike or [node.image for node in capture.nodes] != images(first, words, arguments):
                return
        self._words = words

    def _capture(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        drawn = random_arguments(arguments, self._form, self._rng, self._arguments[: len(self._captures)])
        numbers = executor.numbers_in_memory
        try:
            captured = nodes_of(executor, plan, drawn, self._sizes)
        except BaseException:  # Ctrl-C, too, may follow a refused copy
            settle(executor, plan, arguments)
            raise
        if executor.numbers_in_memory != numbers and self._form.free:
            raise NumbersInMemory("the call reads numbers in device memory")
        if captured is None:
            settle(executor, plan, arguments)
            self._note_lost()
            return
        if self._captures and captured.edges != self._captures[0].edges:
            raise NotRelocatable("its nodes depend on other nodes at other addresses")
        self._arguments[len(self._captures) :] = [drawn]  # as many as captures, even after an interrupt
        self._captures.append(captured)

    def _note_lost(self) -> None:
        self._lost += 1
        if self._lost > LOST:
            raise NotRelocatable(
                "its captures are invalidated repeatedly, by calls of other libraries or by its own copies"
            )

    def _made(
        self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...], words: tuple[Word, ...]
    ) -> RelocatedGraph | None:
        """The graph, from one more capture at the addresses of a real call, which must match the prediction, too."""
        graph = executor.recorded(plan, arguments)
        if graph is None:
            self._note_lost()
            return None
        executable = Executable(graph)  # destroys the graph in any case
        nodes = Nodes(graph, self._sizes)
        first = self._captures[0]
        predicted = images(first.nodes, words, arguments)
        alike = [(node.kind, node.form) for node in nodes.nodes] == [(node.kind, node.form) for node in first.nodes]
        if not alike or nodes.edges != first.edges or [node.image for node in nodes.nodes] != predicted:
            raise NotRelocatable(
                "the call at real addresses differs from the prediction made from placeholder addresses"
            )
        executable.handle.value = instantiated(graph)
        relocated = RelocatedGraph(executable, nodes, words, self._form, executor.launcher, executor.lasting())
        if not relocated.fits(arguments):  # else it would be learnt again and again
            raise NotRelocatable(f"its graph rejects the arguments that it was built for: {arguments}")
        return relocated


def settle(executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> None:
    """Record and discard a call at real addresses, to absorb an error that a library reports one call late.

    cuDNN's backward pass of some recurrent networks copies from its operands. At random addresses the driver refuses
    the copy, which ends the capture; the pass reports success, and cuDNN's next call, of any plan, fails because of
    cudaGetLastError (9.19, on an H200).
    """
    for _ in range(SETTLING):
        with suppress(Exception):  # the late error
            graph = executor.recorded(plan, arguments)
            if graph is not None:
                driver.cuGraphDestroy.unchecked(graph)
                return


def nodes_of(
    executor: Recorder,
    plan: Plan,
    arguments: tuple[Argument, ...],
    sizes: dict[tuple[int, int], tuple[tuple[int, int], ...]],
) -> Nodes | None:
    """The nodes of a call at these addresses; None if another library has ended the capture."""
    graph: ctypes.c_void_p | None = executor.recorded(plan, arguments)
    if graph is None:
        return None
    try:
        return Nodes(graph, sizes)
    finally:
        driver.cuGraphDestroy.unchecked(graph)
