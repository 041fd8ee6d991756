"""BlockSparseTensor: the blocks of a tensor that are there, and its form, over the memory of whoever has it."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dispatch.core.operand_checks import taken_in
from dispatch.device.layout import c_strides
from dispatch.device.registry import device as device_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.contraction.block_sparse import BlockSparseForm, block_offsets, check_form, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["BlockSparseTensor"]

Shape = tuple[int, ...]
Field = Tensor | BlockSparseForm


class BlockSparseTensor:
    """A tensor of which some blocks are there, and all else is 0: the blocks' elements and their `form`.

    It unpacks into the two fields that a request has: `dispatch.contract_block_sparse("ik,kj->ij", *a, *b)`.
    """

    __slots__ = ("form", "values")
    __array_priority__ = 1000  # NumPy's operators give way
    __array_ufunc__ = None

    def __init__(self, values: Any, form: BlockSparseForm) -> None:
        """A dense tensor of one axis, or an array of another library, with the blocks of a form one behind another.

        Raises BadRequest for another size than the form says, BadType for what is no tensor.
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
        """A tensor of arrays by their places, {(0, 1): x, …}, copied to a device; BadRequest for one that does not fit.

        `sections` are the extents of the sections of each axis. All blocks are of one dtype. `device` is
        `dispatch.device()` if it is left open.
        """
        form = BlockSparseForm(tuple(tuple(one) for one in sections), tuple(blocks))
        arrays = [np.asarray(one) for one in blocks.values()]
        if not arrays:
            raise BadRequest("blocks", "none", "a block at least, which says the dtype")
        home = device_of() if device is None else device
        dtype = home.array(arrays[0]).dtype
        offsets = block_offsets(form, dtype)
        flat = np.zeros(offsets[-1], dtype.numpy)
        for block, offset, array in zip(form.blocks, offsets, arrays, strict=False):
            if array.shape != form.shape_of(block) or array.dtype != flat.dtype:
                given = f"{array.dtype}{list(array.shape)}"
                raise BadRequest(f"blocks[{block}]", given, f"{flat.dtype}{list(form.shape_of(block))}")
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
        """The blocks of a dense array; unless said, those in which an element is not 0. It is read on the host.

        They are copied to `device`, `dispatch.device()` if that is left open, wherever the array was.
        """
        array = np.asarray(dense)
        whole = BlockSparseForm(tuple(tuple(one) for one in sections), ())
        if whole.shape != array.shape:
            raise BadRequest("sections", f"of {list(whole.shape)} in all", f"{list(array.shape)}, as dense has")
        places_of = product(*(range(len(one)) for one in whole.sections)) if blocks is None else blocks
        form = BlockSparseForm(whole.sections, tuple(tuple(block) for block in places_of))
        found = {block: array[form.slices_of(block)] for block in form.blocks}
        if blocks is None:
            found = {block: part for block, part in found.items() if part.any()}
        if not found:
            home = device_of() if device is None else device
            return cls(home.array(np.zeros(0, array.dtype)), whole)
        return cls.from_blocks(found, whole.sections, device)

    def __iter__(self) -> Iterator[Field]:
        """The two fields of a request: values and form."""
        return iter((self.values, self.form))

    # -- what it is ---------------------------------------------------------------------------------------------------
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
        """A block by the numbers of its sections, as a view; BadRequest for one that is not there."""
        if place not in self.form.blocks:
            raise BadRequest("place", str(place), f"a block of {self.form!r}", "form.blocks lists them")
        offset = block_offsets(self.form, self.dtype)[self.form.blocks.index(place)]
        shape = self.form.shape_of(place)
        at = self.values.ptr + offset * self.dtype.itemsize
        layout = self.device.layout(self.dtype, shape, c_strides(shape), at, self.values.layout.readonly)
        return Tensor(self.values.storage, at, layout)

    def numpy(self) -> Any:
        """The dense array, in host memory; waits."""
        flat, found = self.values.numpy(), np.zeros(self.shape, self.dtype.numpy)
        for block, offset in zip(self.form.blocks, block_offsets(self.form, self.dtype), strict=False):
            shape = self.form.shape_of(block)
            found[self.form.slices_of(block)] = flat[offset : offset + prod(shape)].reshape(shape)
        return found

    def __array__(self, *_given: Any, **_choices: Any) -> NoReturn:
        """Refused: NumPy would hold the object itself."""
        raise TypeError("a BlockSparseTensor is no array of NumPy's: a.numpy() makes a dense one")

    def __repr__(self) -> str:
        return f"BlockSparseTensor({self.dtype}, {self.form!r}, {self.device})"
