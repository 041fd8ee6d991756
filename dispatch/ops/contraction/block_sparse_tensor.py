"""BlockSparseTensor: the stored blocks of a tensor, and its form; the memory may belong to another library."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dispatch.checks import check_type
from dispatch.core.operand_checks import taken_in
from dispatch.device.device import Device
from dispatch.device.layout import c_strides
from dispatch.device.registry import device as device_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.contraction.block_sparse import BlockSparseForm, block_offsets, check_form, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.keys import Dtype

__all__ = ["BlockSparseTensor"]

Shape = tuple[int, ...]
Field = Tensor | BlockSparseForm


class BlockSparseTensor:
    """A tensor that stores some blocks and is 0 elsewhere: the blocks' elements and their `form`.

    It unpacks into the two fields of a request: `dispatch.contract_block_sparse("ik,kj->ij", *a, *b)`.
    """

    __slots__ = ("form", "values")
    __array_priority__ = 1000  # NumPy's operators defer to this class
    __array_ufunc__ = None

    def __init__(self, values: Any, form: BlockSparseForm) -> None:
        """A dense tensor of one axis, or an array of another library, with the blocks of a form in sequence.

        Raises BadRequest if the size is not that of the form, BadType if it is not a tensor.
        """
        self.form = check_form("form", form)
        values = taken_in("values", values)
        count = size_of(form, values.dtype)
        if values.shape != (count,) or (count > 1 and not values.layout.is_contiguous):
            raise BadRequest("values", str(values.layout), f"dense {values.dtype}[{count}], the blocks of {form!r}")
        self.values: Tensor = values

    @classmethod
    def from_blocks(
        cls, blocks: Mapping[Shape, Any], sections: Sequence[Sequence[int]], device: Device | None = None
    ) -> BlockSparseTensor:
        """A tensor from arrays by block index, {(0, 1): x, …}, copied to a device; BadRequest if one does not fit.

        `sections` are the extents of the sections of each axis. All blocks have one dtype. The default for `device` is
        `dispatch.device()`.
        """
        check_type("blocks", blocks, Mapping)
        form = BlockSparseForm(sections, tuple(blocks))  # type: ignore[arg-type]  # it takes any sequences
        arrays = [np.asarray(one) for one in blocks.values()]
        if not arrays:
            raise BadRequest("blocks", "none", "at least one block, which determines the dtype")
        home = device if isinstance(device, Device) else device_of(device)
        dtype = home.array(arrays[0]).dtype
        offsets = block_offsets(form, dtype)
        flat = np.zeros(offsets[-1], dtype.numpy)
        for block, offset, array in zip(form.blocks, offsets, arrays, strict=False):
            if array.shape != form.shape_of(block) or array.dtype != flat.dtype:
                actual = f"{array.dtype}{list(array.shape)}"
                raise BadRequest(f"blocks[{block}]", actual, f"{flat.dtype}{list(form.shape_of(block))}")
            flat[offset : offset + array.size] = array.ravel()
        return cls(home.array(flat), form)

    @classmethod
    def from_dense(
        cls,
        dense: Any,
        sections: Sequence[Sequence[int]],
        blocks: Sequence[Shape] | None = None,
        device: Device | None = None,
    ) -> BlockSparseTensor:
        """The blocks of a dense array; by default those with an element that is not 0. The array is read on the host.

        The blocks are copied to `device`, by default `dispatch.device()`, wherever the array was.
        """
        array = np.asarray(dense)
        empty_form = BlockSparseForm(sections, ())  # type: ignore[arg-type]
        if empty_form.shape != array.shape:
            raise BadRequest(
                "sections",
                f"sections of a tensor of shape {list(empty_form.shape)}",
                f"the shape of dense, {list(array.shape)}",
            )
        every = product(*(range(len(one)) for one in empty_form.sections))
        form = BlockSparseForm(empty_form.sections, tuple(every) if blocks is None else blocks)  # type: ignore[arg-type]
        parts = {block: array[form.slices_of(block)] for block in form.blocks}
        if blocks is None:
            parts = {block: part for block, part in parts.items() if part.any()}
        if not parts:
            home = device if isinstance(device, Device) else device_of(device)
            return cls(home.array(np.zeros(0, array.dtype)), empty_form)
        return cls.from_blocks(parts, empty_form.sections, device)

    def __iter__(self) -> Iterator[Field]:
        """The two fields of a request: values and form."""
        return iter((self.values, self.form))

    # -- properties ---------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> Shape:
        return self.form.shape

    @property
    def ndim(self) -> int:
        return self.form.ndim

    @property
    def dtype(self) -> Dtype:
        return self.values.dtype

    @property
    def device(self) -> Device:
        return self.values.device

    def block(self, *place: int) -> Tensor:
        """A block, by the indices of its sections, as a view; BadRequest if it is not stored."""
        if place not in self.form.blocks:
            raise BadRequest("place", str(place), f"a block of {self.form!r}", "form.blocks lists the blocks")
        offset = block_offsets(self.form, self.dtype)[self.form.blocks.index(place)]
        shape = self.form.shape_of(place)
        at = self.values.ptr + offset * self.dtype.itemsize
        layout = self.device.layout(self.dtype, shape, c_strides(shape), at, self.values.layout.readonly)
        return Tensor(self.values.storage, at, layout)

    def numpy(self) -> Any:
        """The dense array, in host memory; waits."""
        flat, dense = self.values.numpy(), np.zeros(self.shape, self.dtype.numpy)
        for block, offset in zip(self.form.blocks, block_offsets(self.form, self.dtype), strict=False):
            shape = self.form.shape_of(block)
            dense[self.form.slices_of(block)] = flat[offset : offset + prod(shape)].reshape(shape)
        return dense

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        """Refused: otherwise NumPy would make an array that holds this object."""
        raise TypeError("a BlockSparseTensor is not a NumPy array: a.numpy() makes a dense array")

    def __repr__(self) -> str:
        return f"BlockSparseTensor({self.dtype}, {self.form!r}, {self.device})"
