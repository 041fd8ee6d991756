"""Relocations: the relocated graphs of one executor, their limit, and the plans that it learns while it is idle.

plan_relocation.py makes and drops the graphs of each plan.
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

MAX_WAITING = 64  # plans of one executor that wait to be learnt
MAX_GRAPHS = 1024  # of one executor; the oldest is dropped first


class Recorder(Protocol):
    """The part of an executor that relocation uses."""

    relocations: Relocations

    @property
    def numbers_in_memory(self) -> int: ...
    def recorded(self, plan: Plan, arguments: tuple[Argument, ...], /) -> ctypes.c_void_p | None: ...
    def launcher(self, executable: ctypes.c_void_p, nodes: int, /) -> Callable[[], int]: ...
    def lasting(self) -> tuple[Any, ...]: ...


class Relocations:
    """The relocated graphs of one executor, and counts of refused, checked and differing calls.

    Plans own their graphs. This class holds only weak references, except to the few plans that wait, so that a dropped
    plan is freed at once.
    """

    def __init__(self) -> None:  # finalizers and other threads may change them, so only copies are iterated
        self._graphs: dict[ref[RelocatedGraph], ref[Plan]] = {}  # in the order in which they were made
        self._waiting: dict[Plan, tuple[Argument, ...]] = {}  # plans called several times, with their latest arguments
        self.refused = self.checked = self.differed = 0

    def add(self, plan: Plan, graph: RelocatedGraph) -> None:
        """Register a graph, and drop the oldest ones if there are too many."""
        self._graphs[ref(graph, partial(_pop, self._graphs))] = ref(plan)
        for oldest in [*self._graphs.copy()][:-MAX_GRAPHS]:
            other = self._graphs.pop(oldest, _gone)()
            old = oldest()
            if other is not None and old is not None:
                other.relocation.drop(other, old)

    def wait(self, plan: Plan, arguments: tuple[Argument, ...]) -> None:
        """Register a plan to be learnt while the executor is idle."""
        self._waiting[plan] = arguments
        for oldest in [*self._waiting.copy()][:-MAX_WAITING]:
            self._waiting.pop(oldest, None)

    def learn(self, executor: Recorder) -> bool:
        """Take one step for one of the waiting plans; False if nothing is left to learn."""
        for plan, arguments in self._waiting.copy().items():
            if plan.relocation.learn_some(executor, plan, arguments):
                return True
            self._waiting.pop(plan, None)
        return False

    def drop(self, graph: RelocatedGraph) -> None:
        """Unregister a graph that its plan drops."""
        self._graphs.pop(ref(graph), None)

    def forget(self) -> None:
        """Drop the waiting plans; plans that are still called are learnt during their calls."""
        self._waiting.clear()

    def stats(self) -> dict[str, int]:
        """The number of graphs, their bytes on the host, and how many forms were refused, checked and differed."""
        return {
            "relocated": len(self._graphs),
            "bytes": sum(graph.nbytes for reference in self._graphs.copy() if (graph := reference()) is not None),
            "refused": self.refused,
            "checked": self.checked,
            "differed": self.differed,
        }


def _pop(graphs: dict[ref[RelocatedGraph], ref[Plan]], graph: ref[RelocatedGraph]) -> None:
    """Remove a dead graph from the list."""
    graphs.pop(graph, None)


def _gone() -> None:
    """Replaces the reference to a plan that another thread has removed from the list."""
