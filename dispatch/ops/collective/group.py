"""Groups of collective calls: `with collective_group():`.

Calls in a group begin one after the other. The end of the outermost block waits for them, or enqueues them on the GPU.
So two ranks that send to each other do not wait for one another, and one thread may make the calls of several
communicators. NCCL's group is opened before the first call of NCCL.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.tensor import Tensor

__all__ = ["collective_group", "finish_call", "is_group_open", "keep_operands", "open_nccl_group"]


class _GroupState(threading.local):
    """The group that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.waits: list[Callable[[], object]] = []  # functions that wait for the calls on the host, in order
        self.nccl: ExitStack | None = None
        self.kept: list[tuple[Tensor, ...]] = []  # operands of calls that begin at the end of the group


_state = _GroupState()


@contextmanager
def collective_group() -> Iterator[None]:
    """Group the collective calls in this block; their results are ready when the outermost block has ended.

    Calls must be in the same order on all ranks, except `send` and `recv`, each of which needs its counterpart in the
    other rank's group. Outputs must not be read or overwritten before the end of the block. Arrays of other libraries
    must be kept alive until then; tensors are kept automatically.
    """
    _state.depth += 1
    try:
        yield
    except BaseException:
        if _state.depth == 1:
            _state.waits.clear()
        raise
    finally:
        _state.depth -= 1
        if _state.depth == 0:
            _end_group()


def _end_group() -> None:
    waits, _state.waits = _state.waits, []
    stack, _state.nccl = _state.nccl, None
    if stack is not None:
        stack.close()
    _state.kept.clear()
    for wait in waits:
        wait()


def finish_call(wait: Callable[[], object]) -> None:
    """Wait for a call on the host: now, or at the end of this thread's group."""
    if _state.depth:
        _state.waits.append(wait)
    else:
        wait()


def is_group_open() -> bool:
    """Whether this thread is in a group."""
    return _state.depth > 0


def keep_operands(tensors: tuple[Tensor, ...]) -> None:
    """Keep operands until this thread's group has ended, because its calls begin only then."""
    if _state.depth:
        _state.kept.append(tensors)


def open_nccl_group() -> None:
    """Open NCCL's group before the first call of NCCL if this thread is in a collective_group."""
    if _state.depth and _state.nccl is None:
        from dispatch.libraries.nccl.group import grouped

        _state.nccl = ExitStack()
        _state.nccl.enter_context(grouped())
