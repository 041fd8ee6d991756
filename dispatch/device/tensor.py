"""Tensor: a typed, strided view of device or host memory that knows whether its memory still exists.

It is a pointer, a layout (layout.py) and a storage (storage.py). Nothing here launches work; copies are enqueued on
the current stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as index_of
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from dispatch.checks import check_dtype, check_fits, check_int, check_shape, convert_array, shown
from dispatch.device import dlpack
from dispatch.device.host_memory import needing_memory
from dispatch.device.indexing import by_numpy, indexed
from dispatch.device.operators import apply_function, point_elsewhere, refuse_operators, refuse_product, refuse_ufunc
from dispatch.errors import BadRequest, BadType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dispatch.device.async_copy import Copy
    from dispatch.device.device import Device
    from dispatch.device.layout import Array, Layout
    from dispatch.device.storage import Storage
    from dispatch.keys import Dtype

__all__ = ["Tensor"]

MAX_OFFSET = 2**62  # elements
KEEPS_NO_COPY = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)  # whether np.reshape can refuse to copy


@point_elsewhere
@refuse_operators
class Tensor:
    """A strided view of typed memory on a device, with NumPy's semantics of shape, strides (bytes) and basic indexing.

    It is made by `Device.array`, `empty`, `zeros`, by `from_dlpack`, or as a view of another tensor; do not call the
    class. Using a tensor whose device was closed or replaced raises StaleTensor before any memory access.

    `a @ b` runs `dispatch.matmul`. Elementwise operators, comparisons (also `a == b`) and NumPy's ufuncs raise a
    TypeError that says what to use instead. NumPy's other functions, such as `np.linalg.norm(a)`, read tensors of the
    host without a copy and refuse those of a GPU. A tensor is hashed by identity, so that it may be a dictionary key;
    `a is b` compares identities, and `a == None` is False.
    """

    __slots__ = ("__weakref__", "layout", "ptr", "storage")
    __array_priority__ = 1000  # NumPy's operators call those of this class, which raise: no silent copy to the host
    product: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # set by dispatch/bind, which knows the table

    __hash__ = object.__hash__

    def __init__(self, storage: Storage, ptr: int, layout: Layout) -> None:
        self.storage, self.ptr, self.layout = storage, ptr, layout

    @property
    def device(self) -> Device:
        return self.layout.device

    @property
    def dtype(self) -> Dtype:
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes, as in NumPy (in elements for the packed 4-bit type); see `element_strides`."""
        return tuple(s * (self.dtype.itemsize or 1) for s in self.layout.strides)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements, as in torch, in the text of requests and in `Request.unallocated`."""
        return self.layout.strides

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the gaps between them."""
        return (self.layout.size * self.dtype.bits + 7) // 8

    @property
    def generation(self) -> int:
        """The generation of the device that this memory belongs to; a device that replaces it has the next one."""
        return self.layout.device.generation

    @property
    def T(self) -> Tensor:
        """The view with all axes reversed."""
        return self._view(self.layout.frame().T)

    @property
    def mT(self) -> Tensor:
        """The view with the last two axes exchanged; BadRequest for fewer than two axes."""
        if self.ndim < 2:
            raise BadRequest("mT", str(self.layout), "at least two axes")
        return self._view(np.swapaxes(self.layout.frame(), -1, -2))

    def transpose(self, *axes: int | tuple[int, ...]) -> Tensor:
        """The view with the axes in another order, as in NumPy; all axes reversed if none is given.

        `x.transpose(0, 3, 1, 2)` of an array (N, H, W, C) is a view (N, C, H, W) whose channels are last in memory.
        """
        try:
            return self._view(self.layout.frame().transpose(*axes))
        except Exception as error:  # noqa: BLE001  # as above
            raise BadRequest("axes", shown(axes), f"each axis of {self.layout} once", str(error)) from None

    def __getitem__(self, index: Any) -> Tensor:
        """A view by NumPy's basic indexing (integers, slices, None, ...); index arrays and masks are refused."""
        layout = self.layout
        view = indexed(layout.shape, layout.strides, layout.dtype.bits, index)
        if view is None:
            frame = layout.frame()
            return self._view(by_numpy(frame, index, layout), frame)
        begin, shape, strides = view
        ptr = self.ptr + begin
        return Tensor(self.storage, ptr, layout.device.layout(layout.dtype, shape, strides, ptr, layout.readonly))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("a Tensor has no item assignment: write a[0].copy_from(x) instead of a[0] = x")

    def __iter__(self) -> Iterator[Tensor]:
        """The views along the first axis."""
        if not self.shape:
            raise BadType("iteration", str(self.layout), "at least one axis", "item() returns the only element")
        return (self[place] for place in range(self.shape[0]))

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        """The view with another shape, in which one extent may be -1; BadRequest if that needs a copy."""
        frame = self.layout.frame()
        extents: Any = shape[0] if len(shape) == 1 else shape
        try:
            for extent in (extents,) if hasattr(extents, "__index__") and not np.ndim(extents) else tuple(extents):
                if index_of(extent) < -1:  # which NumPy takes for -1
                    raise ValueError("only -1 may stand for the remaining extent")
            if KEEPS_NO_COPY:
                view = np.reshape(frame, extents, copy=False)
            else:  # NumPy 2.0 would copy, from no memory here; setting `shape` never copies
                view = frame.view()
                view.shape = extents
        except Exception as error:  # noqa: BLE001  # an object's own __index__ may raise anything
            hint = f"{error}".removesuffix(".").replace(" a copy while", " a copy (x.copy() makes one) while")
            raise BadRequest("shape", shown(shape), f"a view of {self.layout}", hint) from None
        return self._view(view, frame)

    def strided(self, shape: int | tuple[int, ...], element_strides: tuple[int, ...], offset: int = 0) -> Tensor:
        """A view of any shape and strides, in elements, that starts at element `offset`, within the memory."""
        extents = check_shape("shape", shape, self.dtype.bits)
        if not isinstance(element_strides, Iterable):
            raise BadRequest("element_strides", shown(element_strides), "a tuple with one integer for each axis")
        steps = tuple(check_int("element_strides", step, -MAX_OFFSET, MAX_OFFSET) for step in element_strides)
        start = check_int("offset", offset, -MAX_OFFSET, MAX_OFFSET) * self.dtype.bits
        if len(steps) != len(extents) or start % 8:
            expected = "one stride for each axis" if len(steps) != len(extents) else "an offset of whole bytes"
            raise BadRequest("element_strides", f"{shown(steps)} from element {offset}", expected)
        ptr = self.ptr + start // 8
        view = Tensor(self.storage, ptr, self.device.layout(self.dtype, extents, steps, ptr, self.layout.readonly))
        if self.storage.nbytes:
            view.check_within()
        elif view.size:  # another library's memory: only this view is known to exist
            one, whole = view.layout, self.layout
            if not self.ptr + whole.low <= ptr + one.low <= ptr + one.high <= self.ptr + whole.high:
                raise BadRequest("element_strides", str(one), f"a view within {whole}")
        return view

    def check_within(self) -> None:
        """BadRequest for a view beyond its memory, for example if strides in bytes were passed as elements."""
        storage, layout = self.storage, self.layout
        first, last = self.ptr + layout.low - storage.base, self.ptr + layout.high - storage.base
        if storage.nbytes and layout.size and not 0 <= first <= last <= storage.nbytes:
            hint = "a layout's strides count elements, as Tensor.element_strides; Tensor.strides are bytes"
            raise BadRequest("view", f"{layout}, bytes {first} to {last}", f"one within {storage.nbytes} bytes", hint)

    def describe_briefly(self) -> str:
        """Dtype, shape and device, for messages."""
        from dispatch.device import tensor_repr  # at first use

        return f"Tensor({tensor_repr.brief(self)})"

    def _view(self, view: Array, frame: Array | None = None) -> Tensor:
        item = self.dtype.numpy.itemsize
        offset = 0
        if frame is not None and view.size:
            offset = (view.__array_interface__["data"][0] - frame.__array_interface__["data"][0]) // item
        strides = tuple(s // item for s in view.strides)
        if offset * self.dtype.bits % 8:
            hint = "begin at an even element, or copy: dev.array(x.numpy()[...], 'f4e2m1')"
            raise BadRequest("view", f"one that begins with element {offset} of {self.layout}", "whole bytes", hint)
        ptr = self.ptr + offset * self.dtype.bits // 8
        return Tensor(self.storage, ptr, self.device.layout(self.dtype, view.shape, strides, ptr, self.layout.readonly))

    def numpy(self) -> Array:
        """The elements as a new NumPy array; waits for the work that writes the tensor, and raises its error."""
        self.device.check(self)
        self.device.look(self)
        return self.device.copy_out(self)

    def copy_from(self, source: Any) -> Tensor:
        """Overwrite with any source of `Device.array` of the same shape, converted on the host; returns self."""
        with needing_memory:
            self.device.copy_in(self, convert_array("source", self._source(source), self.dtype))
        return self

    def _source(self, source: Any) -> Array:
        """The source of a copy as an array of this shape."""
        self.device.check_written(self)
        array: Array = type(self.device).read("source", source, None)
        check_fits("source", source, array, self.dtype)
        if array.shape != self.shape:
            raise BadRequest("source", f"shape {array.shape}", f"shape {self.shape}")
        return array

    def numpy_async(self, out: Array | None = None) -> Copy:
        """Begin to copy out, into new page-locked memory or into `out`; `result()` of the Copy is the array.

        Only a dense C-order tensor is copied asynchronously; other copies are done when this returns.
        """
        self.device.check(self)
        self.device.look(self)
        if out is not None:
            self._check_target(out)
        return self.device.copy_out_async(self, out)

    def _check_target(self, out: Any) -> None:
        description = f"a {type(out).__name__}"
        if isinstance(out, np.ndarray):
            fits = (out.shape, out.dtype) == (self.shape, self.dtype.numpy)
            if fits and out.flags.c_contiguous and out.flags.writeable:
                return
            description = f"{out.dtype}[{', '.join(map(str, out.shape))}]"
        expected = f"a writable C-order array of {self.layout}"
        raise BadRequest("out", description, expected, "dev.pinned(shape, dtype) makes one")

    def copy_from_async(self, source: Any) -> Copy:
        """Begin to overwrite with an array of the same shape; `result()` of the Copy is this tensor.

        An array of `Device.pinned` of the same dtype is copied from directly: do not write to it until the Copy has
        ended. Any other array is first copied on the host. Work on this device is ordered after the copy; on the device
        of a supervisor with isolation="process", wait for the Copy before you submit requests that use the tensor.
        """
        return self.device.copy_in_async(self, self._source(source))

    def item(self) -> Any:
        """The only element as a Python number; waits for it."""
        self.device.check(self)
        if self.size != 1:
            raise BadRequest("item", str(self.layout), "a tensor of one element", "numpy() returns all elements")
        return self.numpy().item()

    def tolist(self) -> Any:
        """The elements as Python numbers in nested lists, one level for each axis; waits for them."""
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self._one("float"))

    def __int__(self) -> int:
        return int(self._one("int"))

    def __complex__(self) -> complex:
        return complex(self._one("complex"))

    def _one(self, kind: str) -> Any:
        if self.size != 1:
            raise BadType(kind, str(self.layout), "a tensor of one element", "numpy() and tolist() return all elements")
        return self.item()

    def __bool__(self) -> bool:
        """The truth of a single element, as in NumPy; a ValueError for any other number of elements."""
        if self.size == 1:
            return bool(self.item())
        hint = "use a.numpy().any() or .all(), `a is not None`, or `a.size`"
        raise BadRequest("truth", str(self.layout), "a tensor of one element, because only that is true or false", hint)

    def __format__(self, spec: str) -> str:
        if spec and self.size == 1:
            return format(self.item(), spec)
        try:
            return format(str(self), spec)
        except ValueError:
            hint = "numpy() and tolist() return the elements"
            raise BadType("format", f"{spec!r} for a Tensor of {self.size} elements", "one element", hint) from None

    def copy(self) -> Tensor:
        """A tensor of the same elements in new memory on the same device.

        On a GPU a dense tensor keeps the order of its axes, and the host does not wait. All others, also those with
        negative strides, are copied to C order; on a GPU that goes through page-locked host memory, and waits.
        """
        self.device.check(self)
        self.device.look(self)
        if not self.device.is_host and self.layout.fills_bytes and not self.layout.low:  # no negative stride
            copy: Tensor = self.device.executor().clone(self)
            return copy
        return self._through_host(self.dtype)

    def __copy__(self) -> Tensor:
        self.device.refuse_pickles()
        return self.copy()

    def astype(self, dtype: Any, *, copy: bool = True) -> Tensor:
        """A tensor of another dtype on the same device; with `copy=False` this one, if it has the dtype already.

        The host converts, with NumPy: elements of a GPU are copied to page-locked memory and back, and this waits.
        To convert on the GPU, make it part of a request: `out_dtype` of a product, an `out` of another dtype, or an
        IDENTITY node of `dispatch.cudnn.Graph`.
        """
        kind = check_dtype("dtype", dtype)
        if kind is not self.dtype:
            return self._through_host(kind)
        return self.copy() if copy else self

    def _through_host(self, kind: Dtype) -> Tensor:
        array = self.numpy_async().result()
        copy = self.device.empty(self.shape, kind)
        copy.copy_from_async(array).result()
        return copy

    def __matmul__(self, other: Any) -> Tensor:
        """`dispatch.matmul(a, b)`; vectors are treated as in NumPy."""
        if not isinstance(other, Tensor):
            return refuse_product("b", other)  # type: ignore[no-any-return]  # or it has raised
        return Tensor.product(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return refuse_product("a", other)

    def __array_ufunc__(self, ufunc: Any, method: str, *_inputs: Any, **_options: Any) -> NoReturn:
        refuse_ufunc(ufunc, method)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return apply_function(Tensor, function, types, args, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        shared = self.device.is_host and self.dtype.bits >= 8  # packed elements have no view
        has_dtype = dtype is None or np.dtype(dtype) == self.dtype.numpy
        if copy is False and not (shared and has_dtype):
            what = "a NumPy array" if has_dtype else f"one of {np.dtype(dtype)} in NumPy"
            raise ValueError(f"a {self.dtype} tensor on {self.device} cannot become {what} without a copy")
        array = self.numpy() if copy or not shared else self.device.view(self)
        with needing_memory:
            return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The DLPack capsule, for `torch.from_dlpack` and others; the consumer's stream waits for the writer.
        BufferError for negative strides, which not all consumers support."""
        return dlpack.export(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3, for CuPy, Numba and others; AttributeError on the host."""
        return dlpack.cuda_array_interface(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """Elements as NumPy prints them, dtype, shape and device; never raises; says why elements are missing."""
        from dispatch.device import tensor_repr  # at first use

        return tensor_repr.text_of(self)

    def _repr_html_(self) -> str:
        from dispatch.device import tensor_repr  # at first use

        return tensor_repr.html_of(self)
