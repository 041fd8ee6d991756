"""What a forked child needs of locks: a thread that holds one as another forks is not in the child, and never lets go.

`cudabind` and `dispatch` name here what they lock by. Python sees to its own locks, but for those of modules that are
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
    """Have a forked child set an attribute of a module, a class or an object to what `make()` gives.

    For locks that are held for a moment, and guard what is published in one step: a child sees all of that or none.
    """
    _owners.setdefault(owner, {})[name] = make


def guard(lock: Lock) -> None:
    """Have every fork wait until nobody holds a lock. Who holds one may take those that were named before it."""
    _guards.append(lock)


def _before() -> None:
    for left in reversed(range(ROUNDS)):
        _settle_imports()
        for lock in reversed(_guards):
            lock.acquire()
        # No import begins while this is held: a thread that begins one asks for the module's lock under it.
        _imp.acquire_lock()
        if not _being_imported() or not left:  # it may be this very thread that imports one
            return
        _let_go()  # the import may need what is held here


def _let_go() -> None:
    _imp.release_lock()
    for lock in _guards:
        lock.release()


def _being_imported() -> list[str]:
    """The modules of these packages that a thread is importing, found or not: Python's own list of their locks."""
    return [name for name in list(getattr(_bootstrap, "_module_locks", ())) if name.startswith(PACKAGES)]


def _settle_imports() -> None:
    """Wait until no other thread is in the middle of importing a module of these packages."""
    settled: set[str] = set()
    while waiting := [name for name in _being_imported() if name not in settled]:
        for name in waiting:
            with suppress(Exception):  # one that fails is its importer's to hear of
                import_module(name)
        settled.update(waiting)


def _in_child() -> None:
    _let_go()
    for owner, attributes in list(_owners.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(before=_before, after_in_parent=_let_go, after_in_child=_in_child)
