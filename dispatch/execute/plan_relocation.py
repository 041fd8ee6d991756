"""PlanRelocation: decides when a plan's call is learnt, compared with the library's call, and given up.

Until it is learnt, the library's own call runs the plan. Learning takes one step at a time, each after a library call,
so that no call waits for all steps. A step is one capture at random addresses. The words found in the first captures
must predict the other captures, and one at the addresses of a real call. Later calls are sometimes compared with the
library's call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dispatch.execute.graph_nodes import NotRelocatable, NumbersInMemory
from dispatch.execute.relocated_graph import MISFIT, RelocatedGraph
from dispatch.execute.relocation import Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Plan
    from dispatch.execute.learner import Learner
    from dispatch.execute.relocations import Recorder

__all__ = ["AGAIN", "PlanRelocation"]

# Calls of the library before the first step. Learning takes 1 to 2 ms on an H100's host, as much as 120 to 250 launches
# save: a plan that was called so often is likely to be called again. With 48, streams of changing shapes lost 5%.
FIRST = 160
EVERY = 8  # calls between two steps; a step takes as long as five to fifty calls
AGAIN = 3  # the call after which an idle worker may learn the plan
MAX_FORMS = 4  # of one plan; a form says which operands coincide and which numbers are 0 or 1
BACK_OFF = 1 << 16
NOT_SAFE = "its call cannot be captured"
NEVER = sys.maxsize


class PlanRelocation:
    """The state of relocating a plan's call; `why` is the reason why it is not, or not yet, launched as a graph.

    `calls` counts the library's calls; the next step of learning follows the call with the number `due`.
    """

    __slots__ = ("_every", "_exact", "_is_learning", "_learners", "_whole", "calls", "due", "graphs", "refused")

    def __init__(self, plan: Plan) -> None:
        self.graphs: list[RelocatedGraph] = []
        self.refused: dict[Form | None, str] = {} if plan.capture_safe else {None: NOT_SAFE}
        self._learners: dict[Form, Learner] = {}
        self._whole: set[Form] = set()  # forms whose call seems to support only integers
        self._exact: set[Form] = set()  # forms whose call reads its numbers from device memory
        self.calls, self.due, self._every = 1, FIRST if plan.capture_safe else NEVER, EVERY
        self._is_learning = False

    @property
    def why(self) -> str:
        """The reason why the library is called; "" if a graph is launched instead."""
        if self.graphs:
            return ""
        return next(iter(self.refused.values()), "it has not been called often enough")

    @property
    def launches(self) -> int:
        return sum(graph.counts.launches for graph in self.graphs)

    @property
    def nodes(self) -> int:
        return max((len(graph.nodes) for graph in self.graphs), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether learning has ended."""
        return None in self.refused or len(self.graphs) + len(self.refused) >= MAX_FORMS

    def other(self, plan: Plan, arguments: tuple[Argument, ...]) -> int:
        """Launch the graph of a form other than the latest one; returns the status, or MISFIT if no graph fits."""
        for graph in self.graphs[1:]:
            status = graph.launch(arguments)
            if status != MISFIT:
                if graph in self.graphs:  # a finalizer may have dropped it during the launch
                    self.graphs.remove(graph)
                    self._add(plan, graph)
                return status
        return MISFIT

    def follow(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        """Learn or compare, after a library call with these arguments."""
        if self._is_learning:  # a finalizer's call, inside a step
            return
        self._is_learning = True
        try:
            for graph in self.graphs:
                counts = graph.counts
                if counts.status or (counts.until_check <= 0 and graph.fits(arguments)):
                    self._compare(executor, plan, graph, arguments)
                    return
            if self.calls >= self.due:
                self.due = NEVER if self.is_settled else self.calls + self._every
                if self.due != NEVER:
                    self._step(executor, plan, arguments)
        finally:
            self._is_learning = False

    def learn_now(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> str:
        """Take all steps at once; returns "" if a graph then fits these arguments, else the reason why none does."""
        if self._is_learning:  # a finalizer's call, inside a step
            return "it is being learnt"
        self._is_learning = True
        try:
            while not any(graph.fits(arguments) for graph in self.graphs):
                refused = self.refused.get(None) or self.refused.get(Form.of(arguments))
                if refused:
                    return refused
                if self.is_settled:
                    return f"the plan has been learnt for {MAX_FORMS} forms of arguments already"
                self._step(executor, plan, arguments)
        finally:
            self._is_learning = False
        return ""

    def learn_some(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> bool:
        """Take the next step while the executor is idle; False if there is none."""
        if self._is_learning or self.is_settled or Form.of(arguments) in self.refused:
            return False
        if any(graph.fits(arguments) for graph in self.graphs):
            return False
        self._is_learning = True
        try:
            self._step(executor, plan, arguments)
        finally:
            self._is_learning = False
        return True

    def drop(self, plan: Plan, graph: RelocatedGraph) -> None:
        """Drop a graph; its form may be learnt again."""
        if graph in self.graphs:
            self.graphs.remove(graph)
        plan.launch = _launch_of(plan, self.graphs[0]) if self.graphs else None
        if self.due == NEVER and not self.is_settled:
            self.due = self.calls + self._every

    def _add(self, plan: Plan, graph: RelocatedGraph) -> None:
        self.graphs.insert(0, graph)
        plan.launch = _launch_of(plan, graph)

    def _refuse(self, plan: Plan, form: Form | None, why: str) -> None:
        self.refused[form] = why
        self._learners.pop(form, None)  # type: ignore[arg-type]
        self._every = min(2 * self._every, BACK_OFF)

    def _step(self, executor: Recorder, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        form = Form.of(arguments)
        if form in self.refused:
            self._every = min(2 * self._every, BACK_OFF)
            return
        learner = self._learners.get(form)
        if learner is not None and not learner.takes(arguments):
            self._every = min(2 * self._every, BACK_OFF)  # an exact form, and the numbers differ this time
            learner = None
        if learner is None:
            learner = self._learners[form] = self._learner(form, arguments)
        try:
            graph = learner.step(executor, plan, arguments)
        except NotRelocatable as why:
            if self._tries_other_numbers(form, arguments, why):
                return
            self._refuse(plan, form, str(why))
            executor.relocations.refused += 1
            return
        except Exception as error:  # noqa: BLE001  # a library's error, at random addresses; a real fault will recur
            if self._tries_other_numbers(form, arguments, error):
                return
            self._refuse(plan, form, f"{type(error).__name__}: {error}")
            executor.relocations.refused += 1
            return
        if graph is not None:
            del self._learners[form]
            self._add(plan, graph)
            executor.relocations.add(plan, graph)

    def _learner(self, form: Form, arguments: tuple[Argument, ...]) -> Learner:
        """A learner that draws any numbers; or only integers for integers, or none, if that has failed before."""
        from dispatch.execute.learner import Learner  # here, for a fast `import dispatch`

        is_whole = form in self._whole
        is_exact = form in self._exact or (is_whole and not Form.of(arguments, whole=True).whole)
        return Learner(arguments, exact=is_exact, whole=is_whole and not is_exact)

    def _tries_other_numbers(self, form: Form, arguments: tuple[Argument, ...], error: Exception) -> bool:
        """After an error with random numbers: whether learning continues with integers only, or with none."""
        if not self._learners[form].draws_numbers:
            return False
        if not isinstance(error, NumbersInMemory) and form not in self._whole and Form.of(arguments, whole=True).whole:
            self._whole.add(form)
        elif isinstance(error, NotRelocatable):
            self._exact.add(form)
        else:
            return False
        del self._learners[form]
        return True

    def _compare(self, executor: Recorder, plan: Plan, graph: RelocatedGraph, arguments: tuple[Argument, ...]) -> None:
        """Compare the graph with the library's call; if they differ, the library runs the plan from now on."""
        try:
            why = self._difference(executor, plan, graph, arguments)
        except Exception as error:  # noqa: BLE001  # as in a step; the call itself has run, and a real fault will recur
            why = f"a later call of the library cannot be compared: {error}"
        if not why:
            return
        self._refuse(plan, None, why)
        for other in tuple(self.graphs):
            executor.relocations.drop(other)
            self.drop(plan, other)
        executor.relocations.differed += 1
        from dispatch.logs import log  # rarely needed

        log("not relocated", {"row": plan.row.name, "cause": why})

    def _difference(
        self, executor: Recorder, plan: Plan, graph: RelocatedGraph, arguments: tuple[Argument, ...]
    ) -> str:
        """Why the graph no longer matches the library's call; "" if it matches, or was dropped to be learnt again."""
        if graph.counts.status:
            return f"its graph accepts no other parameters: status {graph.counts.status}"
        from dispatch.execute.learner import nodes_of

        captured = nodes_of(executor, plan, arguments, {})
        written = b"" if captured is None else graph.write(arguments)
        if captured is None or not written:
            return ""
        predicted = graph.images(written)
        executor.relocations.checked += 1
        nodes = captured.nodes
        if [(n.kind, n.form, n.image) for n in nodes] == [
            (n.kind, n.form, image) for n, image in zip(graph.nodes, predicted, strict=True)
        ] and captured.edges == graph.edges:
            graph.compared()
            return ""
        if graph.kept != executor.lasting():  # zeros or numbers that its call reads have moved since
            executor.relocations.drop(graph)
            self.drop(plan, graph)
            return ""
        return "a later call of the library had other parameters than predicted"


def _launch_of(plan: Plan, graph: RelocatedGraph) -> Callable[[tuple[Argument, ...]], int]:
    """The launch function of a plan's graph; it appends the number of each call if the plan has a counter."""
    launch, counter = graph.launch, plan.counter
    if counter is None:
        return launch

    def launch_numbered(arguments: tuple[Argument, ...]) -> int:
        number = counter.take()
        status = launch((*arguments, number))
        if status == MISFIT:
            counter.give_back(number)  # for the library's own call, which comes next
        return status

    return launch_numbered
