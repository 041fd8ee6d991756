"""data_parallel: a torch module on several ranks, whose gradients are averaged during the backward pass.

It works like torch.nn.parallel.DistributedDataParallel (https://arxiv.org/abs/2006.15704), with this library's worlds
and `GradientBuckets`. It does not wrap the module: its class and its parameters' names do not change, and the training
loop stays the same. When all gradients of a bucket are computed, one call copies them into the bucket; from then on
they are views of the bucket's memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.utils.dlpack import from_dlpack as torch_from_dlpack

from dispatch.core.communicator import communicator_of
from dispatch.device.external_memory import from_dlpack
from dispatch.device.stream import NULL_CONTEXT, Stream
from dispatch.errors import BadRequest, BadType, Closed, CollectiveError
from dispatch.keys import Dtype
from dispatch.ops.collective import RedOp, broadcast
from dispatch.parallel.buckets import BUCKET_BYTES, GradientBuckets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from dispatch.core.communicator import Ranks

__all__ = ["DataParallel", "data_parallel"]

NO_PASS = -1  # no backward pass


class _Bucket:
    """Gradients that are reduced together: how many are not computed yet, and where they are stored."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self.places: list[int] = []  # indices of the gradients in `buckets`
        self.parameters: list[torch.nn.Parameter] = []
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.missing = 0
        self.streams: set[int] = set()


class DataParallel:
    """The result of `data_parallel`: after `backward`, the module's gradients are the mean over all ranks.

    Attributes:
        module: the module itself.
        comm: the communicator of the participating ranks.
    """

    def __init__(self, module: torch.nn.Module, comm: Ranks, bucket_bytes: int, reduce: RedOp | str) -> None:
        self.module, self.comm = module, communicator_of(comm)
        self._is_enabled, self.closed = True, False
        parameters = [each for each in module.parameters() if each.requires_grad]
        self._check(parameters)
        self._on_host = self.comm.device.is_host
        self._index = 0 if self._on_host else self.comm.device.ordinal
        self._streams: dict[int, Stream] = {}
        with self._stream() or NULL_CONTEXT:
            self._broadcast_state(module)
            self._buckets = self._make_buckets(parameters, bucket_bytes, reduce)
        self._all_buckets = tuple(dict.fromkeys(bucket.buckets for bucket in self._buckets))
        # The hooks keep a reference to this object, so it lives at least as long as the module.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]
        self._begin()

    def _check(self, parameters: list[torch.nn.Parameter]) -> None:
        if not parameters:
            raise BadRequest(
                "module",
                "a module without parameters that require a gradient",
                "a module with at least one such parameter",
            )
        for parameter in parameters:
            expected = "cpu" if self.comm.device.is_host else f"cuda:{self.comm.device.ordinal}"
            actual = str(parameter.device)
            if actual != expected:
                hint = f"module.to({expected!r}) before data_parallel"
                raise BadRequest(
                    "module", f"a parameter on {actual}", f"all parameters on {expected}, the device of comm", hint
                )
            if not parameter.is_floating_point():
                raise BadRequest("module", f"a parameter of {parameter.dtype}", "floating-point ones")

    def _stream(self) -> Stream | None:
        """torch's current stream as a Stream. Streams are cached: creating one is slow, and torch has some dozens."""
        if self._on_host:
            return None
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None or stream.closed:
            stream = self._streams[handle] = Stream(torch.cuda.current_stream(self._index))
        return stream

    def _broadcast_state(self, module: torch.nn.Module) -> None:
        """Copy rank 0's parameters and buffers to all ranks."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                dense = tensor.detach().contiguous()
                buffer = from_dlpack(dense if dense.dtype != torch.bool else dense.view(torch.uint8))
                broadcast(buffer, comm=self.comm, root=0, out=buffer)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(dense)

    def _make_buckets(
        self, parameters: list[torch.nn.Parameter], bucket_bytes: int, reduce: RedOp | str
    ) -> list[_Bucket]:
        all_buckets: list[_Bucket] = []
        for torch_dtype in dict.fromkeys(each.dtype for each in parameters):
            same_dtype = [each for each in parameters if each.dtype == torch_dtype]
            shapes = [tuple(each.shape) for each in same_dtype]
            dtype = Dtype.of(str(torch_dtype).removeprefix("torch."))
            buckets = GradientBuckets(shapes, comm=self.comm, dtype=dtype, bucket_bytes=bucket_bytes, reduce=reduce)
            of_dtype = [_Bucket(buckets) for _ in range(buckets.count)]
            for place, (parameter, gradient) in enumerate(zip(same_dtype, buckets.gradients, strict=True)):
                bucket, view = of_dtype[buckets.bucket_of[place]], torch_from_dlpack(gradient)
                bucket.places.append(place)
                bucket.parameters.append(parameter)
                bucket.views.append(view)
                bucket.addresses.append(view.data_ptr())
            all_buckets += of_dtype
        return all_buckets

    # -- a backward pass ------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._next_bucket = 0  # the next bucket to reduce: the order is the same on all ranks
        self._pass_id = NO_PASS  # the current backward pass
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.streams.clear()

    def _make_hook(self, bucket: _Bucket) -> Any:
        return lambda _: self._gradient_ready(bucket)

    def _gradient_ready(self, bucket: _Bucket) -> None:
        """Called after a gradient of a bucket was accumulated, on the autograd thread's current stream."""
        if not self._is_enabled:
            return
        task = torch._C._current_graph_task_id()
        if task != self._pass_id:
            self._pass_started(task)
        bucket.missing -= 1
        if not self._on_host:
            bucket.streams.add(torch._C._cuda_getCurrentRawStream(self._index))
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing:
            self._send(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def _pass_started(self, task: int) -> None:
        if self._pass_id != NO_PASS:
            what = f"{self!r}: a backward pass raised an error, and the other ranks wait for its gradients"
            self.comm.raise_failed(CollectiveError(what))
        self._pass_id = task
        Variable._execution_engine.queue_callback(self._pass_ended)

    def _send(self, bucket: _Bucket) -> None:
        """Copy a bucket's gradients to its memory and average them while the backward pass continues."""
        if len(bucket.streams) > 1:
            current = torch.cuda.current_stream(self._index)
            for handle in bucket.streams - {current.cuda_stream}:
                other: Any = torch.cuda.ExternalStream(handle, device=self._index)  # type: ignore[no-untyped-call]
                current.wait_stream(other)
        outside, views = [], []
        for parameter, view, address in zip(bucket.parameters, bucket.views, bucket.addresses, strict=True):
            gradient = parameter.grad
            if gradient is None:  # the parameter was not used in this pass
                view.zero_()
            elif gradient.is_sparse:
                raise BadRequest("module", "a sparse gradient", "dense ones", "Embedding(…, sparse=False)")
            elif gradient.data_ptr() != address:
                outside.append(gradient)
                views.append(view)
            parameter.grad = view
        with torch.no_grad():
            if outside:
                torch._foreach_copy_(views, outside)
        stream = self._stream()
        for place in bucket.places:
            bucket.buckets.ready(place, stream)

    def _pass_ended(self) -> None:
        """Called at the end of a backward pass: unused gradients become zeros; torch's stream waits for all buckets."""
        while self._next_bucket < len(self._buckets):
            self._send(self._buckets[self._next_bucket])
            self._next_bucket += 1
        stream = self._stream()
        for buckets in self._all_buckets:
            buckets.wait(stream)
        self._begin()

    # -- what users call ------------------------------------------------------------------------------------------
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block each rank accumulates its own gradients; the next backward pass averages their sum."""
        if self.closed:
            raise Closed("this data_parallel was closed")
        before, self._is_enabled = self._is_enabled, False
        try:
            yield
        finally:
            self._is_enabled = before

    def close(self) -> None:
        """Stop averaging the module's gradients; a second call does nothing."""
        self.closed, self._is_enabled = True, False
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<DataParallel: {type(self.module).__name__} on {self.comm!r}, {len(self._buckets)} buckets>"


def data_parallel(
    module: torch.nn.Module, *, comm: Ranks, bucket_bytes: int = BUCKET_BYTES, reduce: RedOp | str = RedOp.AVG
) -> DataParallel:
    """Average a module's gradients over ranks in each backward pass, from the next one on.

    Each rank calls this with the module on its device; rank 0's parameters and buffers are copied to all ranks. In a
    backward pass, each bucket is reduced as soon as its gradients are computed, while the pass continues. Work that
    follows `backward()` on torch's current stream, such as the optimizer's step, waits for the averages. All ranks must
    run the same number of backward passes.

        parallel = dispatch.torch.data_parallel(model, comm=world)
        for x, y in batches:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: its parameters that require a gradient are on the device of `comm`, in any floating-point dtypes.
        comm: a World, or one of its communicators. After `world.rebuild()`, close this object and create another one.
        bucket_bytes: the size of a bucket, i.e. of the gradients that are reduced together.
        reduce: the reduction over ranks: "avg", "sum", …

    Returns a DataParallel. Use `no_sync()` to accumulate over several passes. Averaging goes on as long as the module
    exists, or until `close()`. The gradients of parameters that a pass did not use count as zeros, on every rank.
    Gradients are views of the buckets, so the next pass overwrites `p.grad` of the previous one. Buffers are not
    synchronized after the initial copy.

    Raises BadType if `module` is no module, BadRequest if it is on another device. `backward` raises CollectiveError
    if a rank is lost.
    """
    if not isinstance(module, torch.nn.Module):
        raise BadType("module", f"a {type(module).__name__}", "a torch.nn.Module")
    return DataParallel(module, comm, bucket_bytes, reduce)
