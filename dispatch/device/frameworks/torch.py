"""PyTorch's tensors as operands: on its current stream, results from its allocator.

Tensors that autograd tracks, and tensors of a transformation such as vmap, are refused: torch would miss the ops that
run here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch.nn import Buffer, Parameter

from dispatch.device.frameworks.framework import Code, ForeignStorage, Framework
from dispatch.device.frameworks.torch_synchronize import excluding_recordings
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.keys import BF16, BOOL, C64, C128, E8M0, F4E2M1, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["FRAMEWORK"]

Shape = tuple[int, ...]
# fmt: off
NAMES: dict[Dtype, str] = {
    F64: "float64", F32: "float32", F16: "float16", BF16: "bfloat16",
    F8E4M3: "float8_e4m3fn", F8E5M2: "float8_e5m2", E8M0: "float8_e8m0fnu",
    F4E2M1: "float4_e2m1fn_x2",  # each torch element holds two elements of this library
    I8: "int8", U8: "uint8", I32: "int32", U32: "uint32", I64: "int64", U64: "uint64",
    BOOL: "bool", C64: "complex64", C128: "complex128",
}
# fmt: on
THEIRS = {ours: getattr(torch, name) for ours, name in NAMES.items() if hasattr(torch, name)}
OURS = {theirs: ours for ours, theirs in THEIRS.items()}
TYPES = frozenset((torch.Tensor, Parameter, Buffer))
CPU = torch.device("cpu")
# The functions with which torch's own compiled code allocates on the current device. They bypass its dispatcher and
# take half the time of torch.empty_strided (0.33 of 0.71 us), which is used with several GPUs or if they are missing.
QUICK = {
    place: getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), f"_empty_strided_{place}", None)
    for place in ("cpu", "cuda")
}
BYTE = 8  # bits
UNNAMED = (1, 2)  # handles of the default streams, which depend on the current thread or context
VIEWS = {
    **dict.fromkeys((F16, F32, F64), "{x}.is_neg()"),  # the imaginary part of a conjugated view
    **dict.fromkeys((C64, C128), "{x}.is_conj() or {x}.is_neg()"),
}
# What torch.autograd.graph.increment_version calls, which takes 0.4 us more. Older releases take one tensor.
try:
    torch._C._increment_version((torch.empty(0, device=CPU),))
    increment_version: Any = torch._C._increment_version
except (AttributeError, TypeError):
    increment_version = torch.autograd.graph.increment_version
HAS_STREAMS = hasattr(torch._C, "_cuda_getCurrentRawStream")  # torch was built with CUDA


class Torch(Framework):
    """PyTorch."""

    name = "torch"
    # `x.device` and `torch.cuda.current_stream()` would make objects; these expressions take at least 50 ns each.
    code = Code(
        kinds=TYPES,
        scope={
            "_handle": torch._C._cuda_getCurrentRawStream if HAS_STREAMS else None,
            "_follows": torch.is_grad_enabled,
        },
        ordinal="{x}.get_device()",
        handle="_handle(_ordinal)",
        pointer="{x}.data_ptr()",
        layout="{x}.dtype, {x}.shape, {x}.stride(), {x}.get_device()",
        watching="_follows()",
        watched="{x}.requires_grad",
    )

    def owns(self, kind: type) -> bool:
        return issubclass(kind, torch.Tensor)

    def tensor(self, operand: str, given: Any) -> Tensor:
        _check_kind(operand, given)
        if given.requires_grad and torch.is_grad_enabled():
            hint = "x.detach(), or torch.no_grad() around the call"
            raise BadRequest(operand, "a tensor that requires grad", "one that does not require grad", hint)
        if given.is_neg() or given.is_conj():
            how, hint = ("conjugated", "x.resolve_conj()") if given.is_conj() else ("negated", "x.resolve_neg()")
            raise BadRequest(operand, f"a view that is {how} in name only", "its elements in memory", hint)
        dtype, place = OURS.get(given.dtype), given.device
        if dtype is None:
            raise BadRequest(operand, f"a tensor of {given.dtype}", f"one of {', '.join(map(str, OURS))}", "x.to(…)")
        if place.type not in ("cpu", "cuda"):
            what = "which has no memory" if place.type == "meta" else "which this library does not run on"
            raise BadRequest(operand, f"a tensor on {place}, {what}", "one on cpu or cuda")
        try:
            ptr = given.data_ptr()
        except RuntimeError as error:
            what = "a tensor inside a transformation of torch (vmap, grad, functionalize, …)"
            raise BadRequest(operand, what, "one with memory", str(error)) from None
        if not ptr and given.numel():  # FSDP frees parameters in this way between their uses
            what, hint = (
                "a tensor whose memory was freed or not yet allocated",
                "call x.clone() while its memory is allocated",
            )
            raise BadRequest(operand, what, "one with memory", hint)
        shape, strides = (tuple(given.shape), given.stride()) if dtype.bits >= BYTE else _of_pairs(operand, given)
        target_device = device_of("host" if place.type == "cpu" else f"cuda:{place.index}")
        return self._storage(target_device, given, ptr).tensor(dtype, shape, strides)

    def _storage(self, device: Device, given: Any, ptr: int) -> ForeignStorage:
        """The storage of a torch tensor, which keeps its memory alive, too.

        The caller may give the tensor other memory at any time, by x.data = y, x.set_(y) or module.to(dtype), and free
        or move this memory by x.untyped_storage().resize_(), as FSDP does, or by x.resize_().
        """
        storage = ForeignStorage(self, device, self._used_on(device), given, ptr)
        storage.held = given.untyped_storage()
        storage.held_at = storage.held.data_ptr()
        return storage

    def is_on_gpu(self, given: Any) -> bool:
        return bool(given.is_cuda)

    def readable(self, given: Any) -> Any:
        return given.detach().resolve_conj().resolve_neg()

    def stream(self, device: Device) -> Stream | None:
        if device.is_host:
            return None
        handle = torch._C._cuda_getCurrentRawStream(device.ordinal)
        external: Any = device.external(handle)
        if not external.lasting and self.lasting(device) == handle:
            external.last()
        stream: Stream = external
        return stream

    def is_current(self, device: Device, handle: int) -> bool:
        return bool(torch._C._cuda_getCurrentRawStream(device.ordinal) == handle)

    def lasting(self, device: Device) -> int | None:
        """Torch never destroys its own streams. An external stream that is current in torch has its handle as id."""
        if device.is_host:
            return None
        number, _, _ = torch._C._cuda_getCurrentStream(device.ordinal)
        handle: int = torch._C._cuda_getCurrentRawStream(device.ordinal)
        return None if handle in UNNAMED or (number == handle != 0) else handle

    def maker(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Callable[[], Any] | None:
        theirs = THEIRS.get(dtype)
        if theirs is None or dtype.bits < BYTE:
            return None
        allocate = QUICK["cpu" if device.is_host else "cuda"]
        if allocate is not None and (device.is_host or torch.cuda.device_count() == 1):
            return partial(allocate, shape, strides, theirs)
        place = CPU if device.is_host else torch.device("cuda", device.ordinal)
        return partial(torch.empty_strided, shape, strides, dtype=theirs, device=place)

    def guard(self, dtype: Dtype) -> str | None:
        return VIEWS.get(dtype)

    def _used_on(self, device: Device) -> Stream:
        """The stream on which a tensor counts as used first."""
        stream = self.stream(device)
        return device.stream() if stream is None else stream

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        make = self.maker(device, shape, strides, dtype)
        if make is None:
            return None
        empty = make()
        return self._storage(device, empty, empty.data_ptr()).tensor(dtype, shape, strides)

    def wrapped(self, tensor: Tensor) -> Any:
        return torch.utils.dlpack.from_dlpack(tensor)

    def written(self, given: Any) -> None:
        """Increment the version counter, so that autograd detects that a saved tensor has changed."""
        if not given.is_inference():
            increment_version((given,))


def _check_kind(operand: str, given: Any) -> None:
    """BadRequest for a subclass of torch.Tensor, another layout than strided, or a nested tensor."""
    kind = type(given)
    if given.is_nested:
        hint = "torch.nested.to_padded_tensor(x, 0.0) has all of them in one, x.unbind() each"
        raise BadRequest(operand, f"a nested tensor of {given.size(0)}", "a tensor of one shape", hint)
    if kind in TYPES:
        if given.layout is not torch.strided:
            raise BadRequest(operand, f"a tensor of layout {given.layout}", "a strided one", "x.to_dense()")
        return
    if hasattr(given, "to_local"):
        hint = "x.to_local(), and the op over each rank's part"
    elif hasattr(given, "fake_mode"):
        hint = "it has no memory: run the model directly, outside of torch.compile and torch.export"
    else:
        hint = "x.as_subclass(torch.Tensor), if only the elements in memory are meant"
    raise BadRequest(operand, f"a {kind.__module__}.{kind.__qualname__}", "a torch.Tensor or Parameter itself", hint)


def _of_pairs(operand: str, given: Any) -> tuple[Shape, Shape]:
    """Shape and strides in 4-bit elements of a torch tensor whose elements hold two each."""
    if not given.ndim or (given.stride(-1) != 1 and given.shape[-1] > 1):
        what = f"pairs of elements with strides {given.stride()}"
        raise BadRequest(
            operand, what, "an axis along which the two elements of each pair are adjacent", "x.contiguous()"
        )
    shape = (*given.shape[:-1], 2 * given.shape[-1])
    return shape, (*(2 * stride for stride in given.stride()[:-1]), 1)


FRAMEWORK = Torch()
if HAS_STREAMS:
    namespaces: Any = (torch.cuda, getattr(torch, "accelerator", None))
    for namespace in filter(None, namespaces):
        namespace.synchronize = excluding_recordings(namespace.synchronize)
