"""data_parallel: a module of torch on several ranks, whose gradients are averaged over them as they are computed.

As torch.nn.parallel.DistributedDataParallel does it (https://arxiv.org/abs/2006.15704), over this library's worlds and
`GradientBuckets`, and with the module as it is: neither its class nor its parameters' names change, and a training loop
stays what it was. Gradients are copied into a bucket by one call once all of it are there, and lie there from then on.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.utils.dlpack import from_dlpack as from_ours

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
    """Gradients that go round together: who is still missing, and where they lie."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self.places: list[int] = []  # in `buckets`
        self.parameters: list[torch.nn.Parameter] = []
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.missing = 0
        self.streams: set[int] = set()


class DataParallel:
    """What `data_parallel` has made of a module: its gradients come out of `backward` as the mean over all ranks.

    Attributes:
        module: the module itself.
        comm: the communicator whose ranks take part.
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
        # The module keeps this by its hooks: what nobody else keeps goes on as long as the module does.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]
        self._begin()

    def _check(self, parameters: list[torch.nn.Parameter]) -> None:
        if not parameters:
            raise BadRequest("module", "one without parameters that take a gradient", "at least one")
        for parameter in parameters:
            here = "cpu" if self.comm.device.is_host else f"cuda:{self.comm.device.ordinal}"
            there = str(parameter.device)
            if there != here:
                hint = f"module.to({here!r}) before data_parallel"
                raise BadRequest("module", f"a parameter on {there}", f"all of them on {here}, as comm is", hint)
            if not parameter.is_floating_point():
                raise BadRequest("module", f"a parameter of {parameter.dtype}", "floating-point ones")

    def _stream(self) -> Stream | None:
        """torch's current stream as ours, which is kept: torch has some dozens of them, and finding one takes long."""
        if self._on_host:
            return None
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        found = self._streams.get(handle)
        if found is None or found.closed:
            found = self._streams[handle] = Stream(torch.cuda.current_stream(self._index))
        return found

    def _broadcast_state(self, module: torch.nn.Module) -> None:
        """Begin with rank 0's parameters and buffers on all ranks."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                dense = tensor.detach().contiguous()
                whole = from_dlpack(dense if dense.dtype != torch.bool else dense.view(torch.uint8))
                broadcast(whole, comm=self.comm, root=0, out=whole)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(dense)

    def _make_buckets(
        self, parameters: list[torch.nn.Parameter], bucket_bytes: int, reduce: RedOp | str
    ) -> list[_Bucket]:
        found: list[_Bucket] = []
        for dtype in dict.fromkeys(each.dtype for each in parameters):
            mine = [each for each in parameters if each.dtype == dtype]
            shapes = [tuple(each.shape) for each in mine]
            kind = Dtype.of(str(dtype).removeprefix("torch."))
            made = GradientBuckets(shapes, comm=self.comm, dtype=kind, bucket_bytes=bucket_bytes, reduce=reduce)
            of_this = [_Bucket(made) for _ in range(made.count)]
            for place, (parameter, gradient) in enumerate(zip(mine, made.gradients, strict=True)):
                bucket, view = of_this[made.bucket_of[place]], from_ours(gradient)
                bucket.places.append(place)
                bucket.parameters.append(parameter)
                bucket.views.append(view)
                bucket.addresses.append(view.data_ptr())
            found += of_this
        return found

    # -- a backward pass ------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._next_bucket = 0  # the bucket that goes next: in the same order on all ranks
        self._pass_id = NO_PASS  # the backward pass that is under way
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.streams.clear()

    def _make_hook(self, bucket: _Bucket) -> Any:
        return lambda _: self._gradient_ready(bucket)

    def _gradient_ready(self, bucket: _Bucket) -> None:
        """One more gradient of a bucket has been accumulated, on the autograd thread's current stream."""
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
            what = f"{self!r}: a backward pass was left by an error, and the other ranks wait for its gradients"
            self.comm.raise_failed(CollectiveError(what))
        self._pass_id = task
        Variable._execution_engine.queue_callback(self._pass_ended)

    def _send(self, bucket: _Bucket) -> None:
        """Have a bucket's gradients in its memory, and that averaged beside what is computed still."""
        if len(bucket.streams) > 1:
            current = torch.cuda.current_stream(self._index)
            for handle in bucket.streams - {current.cuda_stream}:
                other: Any = torch.cuda.ExternalStream(handle, device=self._index)  # type: ignore[no-untyped-call]
                current.wait_stream(other)
        outside, views = [], []
        for parameter, view, address in zip(bucket.parameters, bucket.views, bucket.addresses, strict=True):
            gradient = parameter.grad
            if gradient is None:  # of no use in this pass
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
        """The backward pass has ended: what it had no use for counts as zeros, and torch's stream waits for all."""
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
        """In this block gradients are accumulated on each rank alone; the next backward pass averages their sum."""
        if self.closed:
            raise Closed("this data_parallel was closed")
        before, self._is_enabled = self._is_enabled, False
        try:
            yield
        finally:
            self._is_enabled = before

    def close(self) -> None:
        """Leave the module alone from now on; a second call does nothing."""
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
    """Have a module's gradients averaged over ranks in each backward pass, from the next one on.

    Each rank has the module on its device, and calls this; then all have rank 0's parameters and buffers. In a backward
    pass a bucket goes round as soon as its gradients are there, beside the rest of it; what follows `backward()` on
    torch's current stream, such as the optimizer's step, waits for the averages. All ranks make as many passes.

        parallel = dispatch.torch.data_parallel(model, comm=world)
        for x, y in batches:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: whose parameters that take a gradient are on the device of `comm`, of any floating-point dtypes.
        comm: a World, or one of its communicators. After `world.rebuild()` close this and make another.
        bucket_bytes: of gradients that go round together.
        reduce: how gradients of the ranks become one: "avg", "sum", …

    Gives back a DataParallel: `no_sync()` is for accumulation over several passes, and `close()` ends it, which goes on
    as long as the module otherwise. Parameters that a pass had no use for count as zeros, on all ranks alike. Gradients
    lie in the buckets, so `p.grad` of the pass before is overwritten by the next. Buffers are each rank's own after the
    beginning.

    BadType, BadRequest for what is no module, or is on another device; CollectiveError out of `backward` where a rank
    is lost.
    """
    if not isinstance(module, torch.nn.Module):
        raise BadType("module", f"a {type(module).__name__}", "a torch.nn.Module")
    return DataParallel(module, comm, bucket_bytes, reduce)
