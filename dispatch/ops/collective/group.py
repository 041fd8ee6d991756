"""Groups of collective calls: `with collective_group():`.

Calls in a group begin one after the other and are waited for, or handed to the GPU, when the outermost block ends. So
two ranks that send to each other do not wait for one another, and one thread may make the calls of several
communicators. NCCL's group is opened where the first call is one of NCCL's.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.tensor import Tensor

__all__ = ["collective_group", "finish", "is_open", "keep", "open_nccl"]


class _Open(threading.local):
    """The group that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.endings: list[Callable[[], object]] = []  # of calls on the host, in their order
        self.nccl: ExitStack | None = None
        self.kept: list[tuple[Tensor, ...]] = []  # operands of calls that begin at the end


_open = _Open()


@contextmanager
def collective_group() -> Iterator[None]:
    """Have the collective calls in this block go together; their results are there when the outermost block has ended.

    The calls of a rank may be any, in the same order on all ranks but for `send` and `recv`, each of which needs its
    counterpart in that rank's group. Outputs are not to be read or overwritten before the end of the block, and arrays
    of other libraries are to be kept until then; tensors are.
    """
    _open.depth += 1
    try:
        yield
    except BaseException:
        if _open.depth == 1:
            _open.endings.clear()
        raise
    finally:
        _open.depth -= 1
        if _open.depth == 0:
            _end()


def _end() -> None:
    endings, _open.endings = _open.endings, []
    stack, _open.nccl = _open.nccl, None
    if stack is not None:
        stack.close()
    _open.kept.clear()
    for ending in endings:
        ending()


def finish(ending: Callable[[], object]) -> None:
    """Wait for a call of the host, now or at the end of the group that this thread is in."""
    if _open.depth:
        _open.endings.append(ending)
    else:
        ending()


def is_open() -> bool:
    """Whether this thread is in a group."""
    return _open.depth > 0


def keep(tensors: tuple[Tensor, ...]) -> None:
    """Keep operands until the group that this thread is in has ended: its calls have not begun before that."""
    if _open.depth:
        _open.kept.append(tensors)


def open_nccl() -> None:
    """Open NCCL's group where this thread is in a group of ours, before its first call of NCCL there."""
    if _open.depth and _open.nccl is None:
        from dispatch.libraries.nccl.group import grouped

        _open.nccl = ExitStack()
        _open.nccl.enter_context(grouped())
