"""GradientBuckets: gradients of data parallelism, averaged over all ranks while the remaining ones are still computed.

The gradients' memory is in buckets of a given size. A bucket is reduced as soon as its last gradient is written, on the
side stream, as in PyTorch's DistributedDataParallel: https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from dispatch.checks import check_dtype, check_enum, check_int, check_shape, shown
from dispatch.errors import BadRequest, CollectiveError
from dispatch.keys import F32
from dispatch.ops.collective import RedOp, all_gather, all_reduce
from dispatch.parallel.side_stream import SideStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.communicator import Ranks
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["GradientBuckets"]

ALIGNMENT = 256  # bytes: the alignment of each gradient, because kernels read vectors
BUCKET_BYTES = 25 << 20  # as in PyTorch


class GradientBuckets:
    """The gradients of a model in buckets; each bucket is averaged over the ranks once all its gradients are ready.

    A step: write each gradient (`gradients[i]`, for example as `out=` of a product, or as the `.grad` of torch's
    parameter by `torch.from_dlpack`), call `ready(i)` on the stream that wrote it, and call `wait()` before using the
    averages. The last gradient is in the first bucket, because a backward pass computes the first gradient last. All
    ranks have the same shapes; on the host the first step compares them, and `wait` raises CollectiveError if they
    differ. They may call `ready` in any order, because buckets are reduced in a fixed order.

    Attributes:
        gradients: a dense tensor for each shape, in the order of the shapes, in the memory of the buckets.
        bucket_of: the number of each gradient's bucket.
        count: how many buckets there are.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        *,
        comm: Ranks,
        dtype: Dtype | str = F32,
        bucket_bytes: int = BUCKET_BYTES,
        reduce: RedOp | str = RedOp.AVG,
    ) -> None:
        self._side, self._reduce = SideStream(comm), check_enum("reduce", reduce, RedOp)
        kind = check_dtype("dtype", dtype)
        check_int("bucket_bytes", bucket_bytes, 1)
        if not isinstance(shapes, (tuple, list)):
            hint = "[tuple(p.shape) for p in model.parameters()]"
            raise BadRequest("shapes", shown(shapes), "a list of shapes", hint)
        extents = [check_shape("shapes", shape, 8 * kind.itemsize) for shape in shapes]
        if not extents:
            raise BadRequest("shapes", "none", "the shape of each gradient")
        step = max(1, ALIGNMENT // kind.itemsize)
        self.bucket_of = [0] * len(extents)
        starts, sizes = [0] * len(extents), [0]
        for index in reversed(range(len(extents))):
            elements = -(-math.prod(extents[index]) // step) * step
            if sizes[-1] and (sizes[-1] + elements) * kind.itemsize > bucket_bytes:
                sizes.append(0)
            self.bucket_of[index], starts[index] = len(sizes) - 1, sizes[-1]
            sizes[-1] += elements
        self.count = len(sizes)
        self._buckets = [self._side.device.zeros((size,), kind) for size in sizes]
        self.gradients: tuple[Tensor, ...] = tuple(
            self._buckets[bucket][first : first + math.prod(shape)].reshape(shape)
            for bucket, first, shape in zip(self.bucket_of, starts, extents, strict=True)
        )
        # Other shapes may fill as many aligned elements: then the sums would be of different gradients.
        digest = hashlib.blake2b(repr(extents).encode(), digest_size=8).digest()
        self._digest = int.from_bytes(digest, "little", signed=True)
        self._of_ranks: Tensor | None = None  # the digests of all ranks, in the first step
        self._is_compared = not self._side.device.is_host
        self._begin_step()

    def _begin_step(self) -> None:
        self._missing = [set[int]() for _ in range(self.count)]
        self._written = [set["Stream"]() for _ in range(self.count)]
        for index, bucket in enumerate(self.bucket_of):
            self._missing[bucket].add(index)
        self._next = 0  # the next bucket to reduce; the order is the same on all ranks

    def ready(self, place: int, stream: Stream | None = None) -> None:
        """Declare that a gradient has been enqueued on a stream, by default the current one.

        BadRequest for a gradient that was ready already in this step.
        """
        check_int("place", place, 0, len(self.bucket_of) - 1)
        missing = self._missing[self.bucket_of[place]]
        if place not in missing:
            raise BadRequest("place", str(place), "each gradient once per step", "wait() begins the next step")
        missing.discard(place)
        writer = self._current() if stream is None else stream
        self._written[self.bucket_of[place]].add(writer)
        while self._next < self.count and not self._missing[self._next]:
            self._send(self._next)
            self._next += 1

    def _send(self, number: int) -> None:
        """Average a bucket after the work of all streams that wrote its gradients."""
        bucket, side = self._buckets[number], self._side.stream
        if not self._side.device.is_host:
            for stream in self._written[number]:
                side.wait_for(stream)  # another library's writes, too
                bucket.storage.take_over(side, stream)
        with side:
            if not self._is_compared and self._of_ranks is None:
                self._of_ranks = all_gather(self._side.device.array([self._digest], "i64"), comm=self._side.comm)
            all_reduce(bucket, comm=self._side.comm, out=bucket, reduce=self._reduce)

    def wait(self, stream: Stream | None = None) -> tuple[Tensor, ...]:
        """Make a stream, by default the current one, wait for all averages; returns the gradients.

        This begins the next step. BadRequest if some gradients are not ready.
        """
        not_ready = sorted(index for missing in self._missing for index in missing)
        if not_ready:
            raise BadRequest("gradients", f"{not_ready} not ready", "call ready(i) for each gradient")
        if not self._is_compared:
            self._compare_shapes()
        if not self._side.device.is_host:
            waiting = self._current() if stream is None else stream
            waiting.wait_for(self._side.stream)
            for bucket in self._buckets:  # already now, so that the next step's writes do not wait for its own sums
                bucket.storage.take_over(waiting, self._side.stream)
        self._begin_step()
        return self.gradients

    def _compare_shapes(self) -> None:
        """CollectiveError, on all ranks, if their shapes differ."""
        comm = self._side.comm
        digests = [] if self._of_ranks is None else self._of_ranks.numpy().ravel().tolist()
        self._is_compared, self._of_ranks = True, None
        others = [rank for rank, digest in enumerate(digests) if digest != self._digest]
        if others:
            shapes = shown([gradient.shape for gradient in self.gradients])
            difference = f"this rank has gradients of the shapes {shapes}, rank {others[0]} of others"
            comm.raise_failed(CollectiveError(f"{comm!r}: ranks disagree: {difference}"))

    def _current(self) -> Stream:
        stream: Stream = self._side.device.executor().stream
        return stream
