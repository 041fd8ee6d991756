"""The relocated graphs of one executor: how many there may be, and which plans are to be learnt where there is time.

plan_relocation.py makes them, a plan's own, and lets them go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dispatch.core.request import Argument, Plan
    from dispatch.execute.relocated_graph import RelocatedGraph

__all__ = ["Recorder", "Relocations"]

MAX_WAITING = 64  # plans of one executor that are to be learnt when nothing else is to be done
MAX_GRAPHS = 1024  # of one executor; the oldest goes first


class Recorder(Protocol):
    """What is asked of an executor here."""

    relocations: Relocations

    @property
    def numbers_in_memory(self) -> int: ...
    def recorded(self, plan: Plan, arguments: tuple[Argument, ...], /) -> ctypes.c_void_p | None: ...
    def launcher(self, executable: ctypes.c_void_p, nodes: int, /) -> Callable[[], int]: ...
    def lasting(self) -> tuple[Any, ...]: ...


class Relocations:
    """The relocated graphs of one executor, and what became of the others; the oldest graph goes first.

    A plan holds its graphs, and nothing here holds a plan but for the few that wait: what is forgotten goes at once.
    """

    def __init__(self) -> None:  # finalizers, and other threads, come in between: only copies of these are walked
        self._graphs: dict[ref[RelocatedGraph], ref[Plan]] = {}  # in the order in which they were made
        self._waiting: dict[Plan, tuple[Argument, ...]] = {}  # plans that have been called again, and how
        self.refused = self.checked = self.differed = 0

    def add(self, plan: Plan, graph: RelocatedGraph) -> None:
        """Note a graph, and let the oldest go where there are too many."""
        self._graphs[ref(graph, partial(_pop, self._graphs))] = ref(plan)
        for oldest in [*self._graphs.copy()][:-MAX_GRAPHS]:
            other = self._graphs.pop(oldest, _gone)()
            old = oldest()
            if other is not None and old is not None:
                other.relocation.drop(other, old)

    def wait(self, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        """Note a plan that may be learnt where the executor has nothing else to do."""
        self._waiting[plan] = arguments
        for oldest in [*self._waiting.copy()][:-MAX_WAITING]:
            self._waiting.pop(oldest, None)

    def learn(self, executor: Recorder) -> bool:
        """A step of one of those plans; False where nothing is left to learn."""
        for plan, arguments in self._waiting.copy().items():
            if plan.relocation.learn_some(executor, plan, arguments):
                return True
            self._waiting.pop(plan, None)
        return False

    def drop(self, graph: RelocatedGraph) -> None:
        """Forget a graph that is let go."""
        self._graphs.pop(ref(graph), None)

    def forget(self) -> None:
        """Let the plans go that wait: who still has one may call it, and it is learnt by that."""
        self._waiting.clear()

    def stats(self) -> dict[str, int]:
        """How many graphs there are and what they take, how many forms of calls were refused, compared and differed."""
        return {
            "relocated": len(self._graphs),
            "bytes": sum(graph.nbytes for known in self._graphs.copy() if (graph := known()) is not None),
            "refused": self.refused,
            "checked": self.checked,
            "differed": self.differed,
        }


def _pop(graphs: dict[ref[RelocatedGraph], ref[Plan]], graph: ref[RelocatedGraph]) -> None:
    """Take a graph that is gone off the list."""
    graphs.pop(graph, None)


def _gone() -> None:
    """In place of a plan that another thread has taken off the list."""
