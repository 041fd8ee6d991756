"""Locks across os.fork(): a thread that holds a lock while another thread forks does not exist in the child, where the
lock would be held for ever.

`cudabind` and `dispatch` register their locks here. Python handles its own locks, except those of modules that are
being imported.
"""

from __future__ import annotations

import _imp
import os
from contextlib import suppress
from importlib import _bootstrap, import_module
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["anew", "guard"]

PACKAGES = ("cudabind.", "dispatch.")
ROUNDS = 100


class Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


_owners: WeakKeyDictionary[Any, dict[str, Callable[[], object]]] = WeakKeyDictionary()
_guards: list[Lock] = []


def anew(owner: object, name: str, make: Callable[[], object]) -> None:
    """Make a forked child set an attribute of a module, a class or an object to `make()`, such as a new lock.

    For locks that are held briefly and guard data which is published in one step: a child sees all of it or none.
    """
    _owners.setdefault(owner, {})[name] = make


def guard(lock: Lock) -> None:
    """Make every fork wait until a lock is free. A thread that holds it may take locks that were registered earlier."""
    _guards.append(lock)


def _before() -> None:
    for left in reversed(range(ROUNDS)):
        _settle_imports()
        for lock in reversed(_guards):
            lock.acquire()
        # No import starts while this is held: it is needed to create a module's lock.
        _imp.acquire_lock()
        if not _being_imported() or not left:  # this very thread may be importing one
            return
        _let_go()  # the import may need the locks held here


def _let_go() -> None:
    _imp.release_lock()
    for lock in _guards:
        lock.release()


def _being_imported() -> list[str]:
    """The modules of these packages that some thread is importing, from Python's own list of module locks."""
    return [name for name in list(getattr(_bootstrap, "_module_locks", ())) if name.startswith(PACKAGES)]


def _settle_imports() -> None:
    """Wait until no other thread is in the middle of importing a module of these packages."""
    settled: set[str] = set()
    while waiting := [name for name in _being_imported() if name not in settled]:
        for name in waiting:
            with suppress(Exception):  # the importing thread gets the error
                import_module(name)
        settled.update(waiting)


def _in_child() -> None:
    _let_go()
    for owner, attributes in list(_owners.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(before=_before, after_in_parent=_let_go, after_in_child=_in_child)
