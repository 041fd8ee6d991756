"""Framework: the interface to another array library: operands as tensors, its current stream, memory for results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dispatch.device.device import Device
    from dispatch.device.stream import Stream
    from dispatch.keys import Dtype

__all__ = ["Code", "ForeignStorage", "Framework", "ordered_with"]

Shape = tuple[int, ...]


class ForeignStorage(Storage):
    """The memory of another library's operand, which it keeps alive; `tensor` makes the tensor that represents it.

    Its first use counts as a use on that library's current stream, as if the library itself used it: nothing waits.
    """

    __slots__ = ("at", "first", "framework", "held", "held_at", "layout")

    def __init__(self, framework: Framework, device: Device, stream: Stream, given: Any, ptr: int) -> None:
        super().__init__(device, ptr, 0, stream, _let_go, given)
        self.framework, self.first, self.at = framework, stream, ptr
        self.layout: Any = None
        self.held: Any = None  # another object that keeps the memory alive
        self.held_at: int | None = None  # its `data_ptr()`, if the caller may resize or free its memory

    @property
    def is_moved(self) -> bool:
        """Whether its library has freed or moved the memory, though this object keeps it alive."""
        return self.held_at is not None and self.held.data_ptr() != self.held_at

    @property
    def has_other_memory(self) -> bool:
        """Whether the operand was given other memory, and so would not show what is written to this one."""
        return self.held_at is not None and self.keep.data_ptr() != self.at

    def tensor(self, dtype: Dtype, shape: Shape, strides: Shape, *, readonly: bool = False) -> Tensor:
        """The tensor that represents the whole operand; strides count elements.

        NumPy may report strides of 0 for an array without elements; they are replaced by those of a dense array.
        """
        if 0 in shape:
            strides = c_strides(shape)
        self.layout = self.device.layout(dtype, shape, strides, self.at, readonly)
        return Tensor(self, self.at, self.layout)


def _let_go(storage: Storage) -> None:
    """Release the operand: at once if only its library's own stream has used it, because that library reuses memory in
    the order of that stream; else when our streams are done with it.
    """
    device = storage.device
    if isinstance(storage, ForeignStorage) and storage.owner is storage.first:
        return
    if device.alive and device.fault is None:
        device.park(storage)


@contextmanager
def ordered_with(
    stream: Stream, uses: Iterable[tuple[str, Tensor, bool]], home: Framework | None = None
) -> Iterator[None]:
    """A block of work on `stream`, which waits for the streams of other libraries' operands; these then wait for it.

    While a user captures `stream`, which belongs to the library `home`, nothing waits for an operand of `home`: it was
    imported on another stream of that library, and the order of captured work is set when the graph is launched.
    """
    others: dict[Any, None] = {}
    for _, tensor, _ in uses:
        storage = tensor.storage
        if isinstance(storage, ForeignStorage) and storage.first is not stream and not storage.first.is_ours:
            if storage.framework is home and stream.capture():
                continue
            others[storage.first] = None
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(other.claimed())
            stream.wait_for_uses(other)
        yield
        for other in others:
            other.wait_for_uses(stream)


class Code(NamedTuple):
    """Expressions in an operand `{x}`, from which core/framework_call_cache.py generates code for repeated calls.

    They may use the names in `scope` and the GPU number `_ordinal`.
    """

    kinds: frozenset[type]  # the types that the expressions support, without subclasses
    scope: dict[str, Any]
    ordinal: str  # the number of the GPU that x is on; negative for none
    handle: str  # the handle of the library's current stream there
    pointer: str
    layout: str  # everything that a layout depends on, except the pointer
    watching: str = "False"  # whether autograd is enabled in this thread,
    watched: str = "False"  # and whether it tracks x: if so, a request is made, which refuses x


class Framework(ABC):
    """One array library."""

    name: str
    readonly = False  # whether its arrays must never be written, even if they claim to be writable
    code: Code | None = None  # None if calls with its operands are not cached

    @abstractmethod
    def owns(self, kind: type) -> bool:
        """Whether a type of its package is one of its array types."""

    @abstractmethod
    def tensor(self, operand: str, given: Any) -> Tensor:
        """The tensor that represents an operand of this library, without a copy.

        BadRequest, with the operand's name, for an array without such memory, or one that must not be used here.
        """

    def readable(self, given: Any) -> Any:
        """The array in a form that `tensor` accepts for reading only, for example detached from autograd."""
        return given

    def is_on_gpu(self, given: Any) -> bool:
        """Whether an array is in the memory of a GPU; False if that cannot be determined cheaply."""
        return False

    def stream(self, device: Device) -> Stream | None:
        """The library's current stream in this thread; None to use our own current stream, as on the host."""
        return None

    def is_current(self, device: Device, handle: int) -> bool:
        """Whether it is the library's current stream in this thread; False if that cannot be checked quickly."""
        return False

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        """An uninitialized array of this library, as a tensor; None if dispatch allocates and `wrapped` converts."""
        return None

    def lasting(self, device: Device) -> int | None:
        """The handle of the library's current stream in this thread, if that is never destroyed; else None."""
        return None

    def maker(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Callable[[], Any] | None:
        """A function that allocates uninitialized arrays on the library's current stream; None: dispatch allocates."""
        return None

    def guard(self, dtype: Dtype) -> str | None:
        """An expression that is true if x's elements differ from its memory (conjugated views); None if never."""
        return None

    @abstractmethod
    def wrapped(self, tensor: Tensor) -> Any:
        """An array of this library over a tensor; the tensor itself if the library cannot represent it."""

    def written(self, given: Any) -> None:  # noqa: B027  # most libraries do not need it
        """Tell the library that an operand was written in place."""

    # -- results --------------------------------------------------------------------------------------------------
    def given_back(self, result: Any, made: Any) -> Any:
        """A result in this library's objects: operands as they were passed, and new outputs as its arrays."""
        if isinstance(result, tuple):
            return tuple(self.given_back(one, made) for one in result)
        if isinstance(result, list):
            return [self.given_back(one, made) for one in result]
        if not isinstance(result, Tensor):
            return result
        storage = result.storage
        if isinstance(storage, ForeignStorage) and result.layout is storage.layout and result.ptr == storage.at:
            return storage.keep
        return self.wrapped(result) if any(result is one for one in made) else result
