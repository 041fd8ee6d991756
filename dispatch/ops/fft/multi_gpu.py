"""MultiGpuPlan: Fourier transforms over several GPUs of one machine, in place in memory that is split between them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind._fork import anew
from dispatch.checks import as_array, check_enum, shown
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed
from dispatch.keys import U8
from dispatch.libraries.cufft.peer_copies import copy
from dispatch.libraries.cufft.xt_layouts import Problem, layouts_of
from dispatch.ops.fft import DftKind, DftNorm, dft
from dispatch.ops.fft import multi_gpu_checks as checks
from dispatch.ops.fft.multi_gpu_checks import SPECTRUM, operand_of, shape_text
from dispatch.ops.fft.multi_gpu_host import computed, factor_of, factors_on_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.storage import Storage
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.xt_layouts import Layout
    from dispatch.libraries.cufft.xt_plan import XtPlan

__all__ = ["MultiGpuPlan"]

Shape = tuple[int, ...]


class MultiGpuPlan:
    """A Fourier transform over several GPUs of one machine, for arrays that are too large for one, or too slow on one.

    `with MultiGpuPlan(["cuda:0", "cuda:1"], (4096, 4096)) as plan:` allocates memory on each GPU, which cuFFT
    transforms in place: `write` distributes an array, `forward` and `inverse` transform it, `read` gathers it in
    natural order.

    Args:
        devices: 2 to 16 GPUs of one architecture, or their names; parts go to them in this order. For tests of the code
            around it, one GPU may be named several times, and "host" too, where NumPy computes.
        shape: the points along the one to three axes that are transformed.
        dtype: the input of `forward`: c64 and c128 for complex numbers, f32 and f64 for real ones. Real numbers are
            transformed to half a spectrum, n // 2 + 1 points along the last axis, as with `rfftn`; `inverse` takes
            that.
        batch: the number of transforms, a first axis that is not transformed; at least one for each GPU. Each transform
            is on one GPU, so that the GPUs exchange nothing. None for one transform, split over all GPUs.

    Attributes:
        devices: the devices of the parts.
        closed: whether the memory was freed.

    BadRequest is raised, before a GPU is used, for what cuFFT does not support. One transform along one axis: c64 and
    c128 only, a power of 2 from 64 on (128 on 8 GPUs, 1024 on 16), over 2, 4, 8 or 16 GPUs. One along two or three
    axes: 32 points or more along the first two; more than 4096 (in double precision 2048) only with prime factors up to
    127; for real numbers an even number along the last axis. Batches have no such limits. Refused means that cuFFT has
    no plan for another reason, OutOfMemory that a GPU has too little memory: cuFFT's work area is about as large as the
    data, for real numbers twice as large.

    Order: `write` waits for the enqueued work of the array, and work that is enqueued with `parts` or a result of
    `read` afterwards waits for the plan. The host does not wait for `forward` and `inverse`, with one exception: an
    inverse after another transform along one axis first brings the result into natural order, in memory that the plan
    keeps. None of it can be captured into a graph. The current CUDA context does not change. Threads may share a plan;
    their calls are serialized. Closing it, or leaving its block, frees all memory except that which tensors of `parts`
    still use.
    """

    def __init__(
        self,
        devices: Sequence[Device | str],
        shape: int | tuple[int, ...],
        dtype: Dtype | str = "c64",
        *,
        batch: int | None = None,
    ) -> None:
        self.closed = True  # until the plan is complete
        self._lock = threading.RLock()
        anew(self, "_lock", threading.RLock)
        given, names = checks.check_dtype_of(dtype), checks.check_names(devices)
        count = len(names)
        transforms = checks.check_batch(batch, count)
        sizes = checks.check_sizes(shape, given, transforms, count)
        self.devices: tuple[Device, ...] = tuple(checks.check_devices(names))
        problem = self._problem = Problem(sizes, transforms, given, SPECTRUM[given])
        self._xt: XtPlan | None = None
        if self.devices[0].is_host:
            factors = factors_on_host(sizes[0], count) if problem.in_strings else None
        else:
            from dispatch.libraries.cufft.xt_plan import XtPlan

            self._xt = XtPlan(self.devices, problem)
            factors = self._xt.factors
        self._signal, self._spectrum = layouts_of(problem, factors, count)
        self._layout = self._signal[0]
        every = [*self._signal, *self._spectrum]
        nbytes = [max(one.parts[i].nbytes(one.dtype) for one in every) for i in range(count)]
        self._host: list[Tensor] = []
        if self._xt is None:
            self._host = [device.empty((n,), U8) for device, n in zip(self.devices, nbytes, strict=True)]
        else:
            self._xt.check_sizes(nbytes)
        self._scalars: dict[tuple[Device, float], Tensor] = {}
        self.closed = False

    # -- the contents ---------------------------------------------------------------------------------------------
    @property
    def shape(self) -> Shape:
        """The shape of what the parts hold now, in natural order: that of `read`'s result."""
        return self._layout.shape

    @property
    def dtype(self) -> Dtype:
        """The dtype of what the parts hold now."""
        return self._layout.dtype

    @property
    def parts(self) -> list[Tensor]:
        """A tensor on each GPU, over the memory that is transformed: for your own work on the elements, in place.

        They hold the pieces that `split` returns for an array in natural order. Before a transform that is x[a:b], a
        part of the first axis; for a batch it always is. After every other transform along several axes it is x[:,
        a:b]; for real numbers the signal is cut along the first axis, the spectrum along the second. Along one axis
        results are in strings, [strings, factor2, length]: element [s, j, k] of the g-th GPU is point (g · strings + s)
        · length + k + j · (number of all strings) · length.

        They are valid for what the memory holds now: get them again after each call of this plan. Rows of real numbers
        may have padding after them. As long as a tensor exists, its memory stays allocated, even after the plan is
        closed.
        """
        with self._lock:
            self._check()
            return self._tensors([(part.shape, part.strides) for part in self._layout.parts])

    def split(self, x: Any) -> list[Array]:
        """The pieces of an array like `read`'s result that the parts hold now, in the parts' shapes: NumPy views.

        They allow to multiply a spectrum by another array part by part. Any dtype; BadRequest for another shape.
        """
        with self._lock:
            self._check()
            array = as_array("x", x)
            if array.shape != self.shape:
                raise BadRequest("x", shape_text(array.shape, array.dtype), f"the shape {list(self.shape)}")
            return self._layout.split(array)

    @property
    def _storages(self) -> list[Storage]:
        return [tensor.storage for tensor in self._host] if self._xt is None else self._xt.storages

    def _tensors(self, views: Iterable[tuple[Shape, Shape]], dtype: Dtype | None = None) -> list[Tensor]:
        """Views of the parts' memory, by shapes and strides in elements."""
        tensors, kind = [], dtype or self._layout.dtype
        for storage, (shape, strides) in zip(self._storages, views, strict=True):
            layout = storage.device.layout(kind, shape, strides, storage.base)
            tensors.append(Tensor(storage, storage.base, layout))
        return tensors

    def _frames(self) -> list[Tensor]:
        """The parts in the axes of the layout's frame, which the pieces of an array in natural order have."""
        return self._tensors([(part.extents, part.steps) for part in self._layout.parts])

    def _check(self) -> None:
        if self.closed:
            raise Closed(f"{self!r} was closed")
        for device in self.devices:
            device.check()

    def _set_layout(self, layout: Layout) -> None:
        """Mark the memory as holding an array of this layout."""
        self._layout = layout
        if self._xt is not None:
            is_cut = layout is self._spectrum[1] and layout is not self._signal[0]
            self._xt.is_shuffled = is_cut and self._problem.batch == 1

    # -- in and out -----------------------------------------------------------------------------------------------
    def write(self, x: Any) -> Self:
        """Distribute an array to the GPUs; work that is enqueued with it afterwards runs after it was read.

        Args:
            x: of the plan's shape, a batch first, and dtype; for a real plan also half a spectrum. A NumPy array, a
                tensor on any device, or one of torch, CuPy or JAX. An array on a GPU is copied directly if it is dense
                in C order, else by way of the host.

        BadType and BadRequest for anything else: the argument, and what is expected.
        """
        with self._lock:
            self._check()
            tensor, stream = operand_of("x", x)
            if tensor is not None:
                tensor.device.check(tensor)
                tensor.device.look(tensor)
            array = None if tensor is not None and not tensor.device.is_host else as_array("x", x)
            shape, dtype = (array.shape, array.dtype) if array is not None else (tensor.shape, tensor.dtype.numpy)  # type: ignore[union-attr]  # one is there
            layout = self._layout_of(shape, dtype)
            with stream:
                if array is None and tensor is not None and not self._is_direct(tensor):
                    array = tensor.numpy()
                self._set_layout(layout)
                if array is not None:
                    self._scatter(array)
                elif tensor is not None:
                    self._exchange(tensor, out=False)
            return self

    def read(self, out: Any = None) -> Any:
        """Gather the parts in natural order.

        Args:
            out: the destination: a NumPy array, a tensor on any device, or one of torch or CuPy, of `shape` and
                `dtype`; on a GPU it must be dense in C order to avoid a copy through the host. None for a new NumPy
                array.

        Returns:
            `out`, or the new array. The host waits, unless `out` is on a GPU: then its stream waits.
        """
        with self._lock:
            self._check()
            if out is None:
                return self._gather(np.empty(self.shape, self.dtype.numpy))
            tensor, stream = operand_of("out", out)
            if isinstance(out, np.ndarray):
                self._check_out(out.shape, out.dtype)
                if not out.flags.writeable:
                    raise BadRequest("out", "a read-only array", "a writable array")
                self._into(out)
                return out
            if tensor is None:
                raise BadRequest("out", shown(out), f"an array or a tensor, {self._layout}")
            self._check_out(tensor.shape, tensor.dtype.numpy)
            tensor.device.check_written(tensor)
            with stream:
                if not self._is_direct(tensor):
                    tensor.copy_from(self._gather(np.empty(self.shape, self.dtype.numpy)))
                else:
                    self._exchange(tensor, out=True)
            framework = framework_of(type(out))
            if framework is not None:
                framework.written(out)
            return out

    def _is_direct(self, tensor: Tensor) -> bool:
        """Whether copies between it and the parts need no array on the host."""
        return self._xt is not None and not tensor.device.is_host and tensor.layout.is_contiguous

    def _layout_of(self, shape: Shape, dtype: Any) -> Layout:
        """The layout that an array is written in; BadRequest if there is none."""
        layouts = [self._signal[0], self._spectrum[0]][: 1 + self._problem.is_real]
        for layout in layouts:
            if (shape, dtype) == (layout.shape, layout.dtype.numpy):
                return layout
        hint = ""
        if any(shape == layout.shape for layout in layouts):
            hint = f"x.astype({str(self._signal[0].dtype.numpy)!r}) converts a NumPy array"
        raise BadRequest("x", shape_text(shape, dtype), " or ".join(map(str, layouts)), hint)

    def _check_out(self, shape: Shape, dtype: Any) -> None:
        if (shape, dtype) != (self.shape, self.dtype.numpy):
            hint = "plan.shape and plan.dtype describe the data that it holds"
            raise BadRequest("out", shape_text(shape, dtype), str(self._layout), hint)

    def _scatter(self, array: Array) -> None:
        for part, piece in zip(self._frames(), self._layout.pieces(array), strict=True):
            with part.device:
                part.copy_from(piece)

    def _into(self, out: Array) -> None:
        """Gather into an array of any strides."""
        if out.flags.c_contiguous:
            self._gather(out)
        else:
            out[...] = self._gather(np.empty(self.shape, self.dtype.numpy))

    def _gather(self, out: Array) -> Array:
        """Gather into an array that is dense in C order."""
        for part, piece in zip(self._frames(), self._layout.pieces(out), strict=True):
            with part.device:
                piece[...] = part.numpy()
        return out

    def _exchange(self, tensor: Tensor, *, out: bool) -> None:
        """Copy between a dense tensor on a GPU and the parts, on its device's current stream."""
        for device in (tensor.device, *self.devices):
            device.refuse_capture("to copy between GPUs")
        frame = self._layout.frame
        framed = tensor.reshape(frame)
        with tensor.device:
            stream = tensor.device.executor().stream
            tensor.storage.use(stream, write=out)
            for part, gpu_part in zip(self._frames(), self._layout.parts, strict=True):
                piece, home = framed[gpu_part.place], part.storage.keep[1]
                part.storage.use(home, write=not out)
                stream.wait_for_uses(home)
                copy(*((part, piece) if out else (piece, part)), stream)
                home.wait_for_uses(stream)

    # -- transforms -----------------------------------------------------------------------------------------------
    def forward(self, norm: DftNorm | str | None = None) -> Self:
        """`fftn` of what the parts hold, in place, or `rfftn` of real numbers; each transform of a batch separately.

        Args:
            norm: "backward" (None) has no factor, "ortho" 1/√n, "forward" 1/n, where n is the points of one transform.

        BadRequest if a real plan holds a spectrum.
        """
        return self._transform(norm, inverse=False)

    def inverse(self, norm: DftNorm | str | None = None) -> Self:
        """`ifftn` of what the parts hold, in place, or `irfftn` of half a spectrum.

        Args:
            norm: "backward" (None) has the factor 1/n, "ortho" 1/√n, "forward" none; n is the points of one transform.

        BadRequest if a real plan holds real numbers. In half a spectrum the imaginary parts that no spectrum of real
        numbers has, at 0 and n/2 along the last axis, must be 0: otherwise cuFFT's result is undefined.
        """
        return self._transform(norm, inverse=True)

    def _transform(self, norm: DftNorm | str | None, *, inverse: bool) -> Self:
        factor_norm = DftNorm.BACKWARD if norm is None else check_enum("norm", norm, DftNorm)
        with self._lock:
            self._check()
            before, after = (self._spectrum, self._signal) if inverse else (self._signal, self._spectrum)
            if self._problem.is_real and self._layout is not before[0]:
                name, hint = ("inverse", "call forward() first") if inverse else ("forward", "call inverse() first")
                expected = f"half a spectrum, {before[0]}" if inverse else f"real numbers, {before[0]}"
                raise BadRequest(name, f"a plan that holds {self._layout}", expected, f"{hint}, or write it")
            if self._xt is None:
                self._compute(factor_norm, inverse=inverse, made=after)
                return self
            for device in self.devices:
                device.refuse_capture("to transform over several GPUs")
            if self._problem.in_strings and self._xt.is_shuffled:
                self._xt.restore()
                self._layout = self._signal[0]
            self._xt.execute(inverse=inverse)
            self._layout = after[self._xt.is_shuffled]
            self._scale(factor_norm, inverse=inverse)
            return self

    def _scale(self, norm: DftNorm, *, inverse: bool) -> None:
        """Multiply by the factor, in a pass over each part, including its padding."""
        factor = factor_of(self._problem.sizes, norm, inverse=inverse)
        if factor == 1:
            return
        kind = self._problem.spectrum
        counts = [part.nbytes(self._layout.dtype) // kind.itemsize for part in self._layout.parts]
        for part in self._tensors((((count,), (1,)) for count in counts), kind):
            with part.device:
                key = part.device, factor
                if key not in self._scalars:
                    self._scalars[key] = part.device.array(np.asarray(factor, kind.numpy.type(0).real.dtype))
                dft(part, DftKind.C2C, axes=(), factors=self._scalars[key], out=part)

    def _compute(self, norm: DftNorm, *, inverse: bool, made: list[Layout]) -> None:
        """Transform with NumPy, and leave the result in the layout that cuFFT would leave it in."""
        values = self._gather(np.empty(self.shape, self.dtype.numpy))
        is_cut = self._problem.in_strings or self._layout is self._signal[0]
        self._layout = made[is_cut]
        self._scatter(computed(values, self._problem, norm, inverse=inverse).astype(self.dtype.numpy, copy=False))

    # -- closing --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Wait for the work of the parts, and free their memory and cuFFT's plans; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._host, self._scalars = [], {}
            xt, self._xt = self._xt, None
            if xt is not None:
                xt.close()

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        names, problem = ", ".join(map(str, getattr(self, "devices", ()))), getattr(self, "_problem", None)
        what = "" if problem is None else f" {problem.batch} of {problem.signal}{list(problem.sizes)}"
        return f"<MultiGpuPlan:{what} over {names}{', closed' if self.closed else ''}>"
