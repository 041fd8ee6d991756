"""What a library of arrays is asked: its operands as tensors of ours, its current stream, its memory for results."""

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

__all__ = ["Adopted", "Code", "Framework", "beside"]

Shape = tuple[int, ...]


class Adopted(Storage):
    """The memory of another library's operand, which lives as long; `whole` is the tensor that stands for it.

    It is first used on the stream that is current in that library, as the library itself would use it: nothing waits.
    """

    __slots__ = ("at", "first", "framework", "held", "layout")

    def __init__(self, framework: Framework, device: Device, stream: Stream, given: Any, ptr: int) -> None:
        super().__init__(device, ptr, 0, stream, _let_go, given)
        self.framework, self.first, self.at = framework, stream, ptr
        self.layout: Any = None
        self.held: Any = None  # what keeps the memory beside the operand

    def tensor(self, dtype: Dtype, shape: Shape, strides: Shape, *, readonly: bool = False) -> Tensor:
        """The tensor that stands for the whole operand; strides count elements.

        Of an array without elements NumPy may tell strides of 0; those of a dense one mean the same.
        """
        if 0 in shape:
            strides = c_strides(shape)
        self.layout = self.device.layout(dtype, shape, strides, self.at, readonly)
        return Tensor(self, self.at, self.layout)


def _let_go(storage: Storage) -> None:
    """Let the operand go: at once where only its library's own stream used it, for that library reuses memory in the
    order of that stream; else once our streams are done with it.
    """
    device = storage.device
    if isinstance(storage, Adopted) and storage.owner is storage.first:
        return
    if device.alive and device.fault is None:
        device.park(storage)


@contextmanager
def beside(stream: Stream, uses: Iterable[tuple[str, Tensor, bool]]) -> Iterator[None]:
    """Run on `stream` in here, behind what other libraries have enqueued on theirs; and they go on behind that."""
    others: dict[Any, None] = {}
    for _, tensor, _ in uses:
        storage = tensor.storage
        if isinstance(storage, Adopted) and storage.first is not stream and not storage.first.is_ours:
            others[storage.first] = None
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(other.claimed())
            stream.wait_for_uses(other)
        yield
        for other in others:
            other.wait_for_uses(stream)


class Code(NamedTuple):
    """What repeated calls over a library's operands are compiled of (core/framework_calls.py): expressions in `{x}`.

    They name what is in `scope`, and `_ordinal`, the GPU's.
    """

    kinds: frozenset[type]  # the very types that these expressions are for
    scope: dict[str, Any]
    ordinal: str  # of the GPU that x is on; negative for none
    handle: str  # of the library's current stream there
    pointer: str
    layout: str  # all that a layout depends on, but the pointer
    watching: str = "False"  # whether the library follows calls now,
    watched: str = "False"  # and that over x: then a request is made, which refuses it


class Framework(ABC):
    """One library of arrays."""

    name: str
    readonly = False  # whether its arrays are never written, whatever they say
    code: Code | None = None  # None where no call over its operands is remembered

    @abstractmethod
    def owns(self, kind: type) -> bool:
        """Whether a type of its package is an array of it."""

    @abstractmethod
    def tensor(self, operand: str, given: Any) -> Tensor:
        """The tensor that stands for an operand of this library, without a copy.

        BadRequest, by the operand's name, for what has no memory of that kind or must not be used so.
        """

    def readable(self, given: Any) -> Any:
        """What `tensor` takes for an array that is only to be copied, and has nothing to say in that."""
        return given

    def is_on_gpu(self, given: Any) -> bool:
        """Whether an array is in the memory of a GPU; False where that is not known at once."""
        return False

    def stream(self, device: Device) -> Stream | None:
        """The stream that is current in this library and thread; None where ours is, as on the host."""
        return None

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        """An uninitialized result of this library, as a tensor; None where we are to allocate it, and it wraps that."""
        return None

    def lasting(self, device: Device) -> int | None:
        """The handle of the stream that is current in this library and thread, if it lives as long as the process."""
        return None

    def maker(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Callable[[], Any] | None:
        """What makes uninitialized results on the library's current stream; None where we are to allocate them."""
        return None

    def guard(self, dtype: Dtype) -> str | None:
        """A condition that elements of x are not what lies in memory; None where that cannot be."""
        return None

    @abstractmethod
    def wrapped(self, tensor: Tensor) -> Any:
        """An object of this library over a tensor of ours; the tensor itself where it can have none."""

    def written(self, given: Any) -> None:  # noqa: B027  # most libraries do not want to know
        """Note that an operand was written in place."""

    # -- what follows from it -------------------------------------------------------------------------------------
    def given_back(self, result: Any, made: Any) -> Any:
        """A result as this library has it: what was given as it was given, and what was made as an object of it."""
        if isinstance(result, tuple):
            return tuple(self.given_back(one, made) for one in result)
        if isinstance(result, list):
            return [self.given_back(one, made) for one in result]
        if not isinstance(result, Tensor):
            return result
        storage = result.storage
        if isinstance(storage, Adopted) and result.layout is storage.layout and result.ptr == storage.at:
            return storage.keep
        return self.wrapped(result) if any(result is one for one in made) else result
