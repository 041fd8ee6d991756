"""The plans of cuBLASLt and CUTLASS: a setup kernel writes extents, strides and addresses, then the library runs.

Groups of rows are defined by their ends, which stay on the device: the kernel `arrange` reads them. The host passes
independent products as arguments of a kernel `place`. Both kernels write arrays that the library reads, in memory that
belongs to its Product, and each library has its own two kernels.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import PLACED
from dispatch.libraries.cutlass.layout import pitch
from dispatch.libraries.cutlass.staged import Lines, Staged
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest

    Requests = GroupedMatmulRequest | GroupedMatmulListRequest

__all__ = ["GroupedPlan", "ListPlan", "Product", "chunks", "plan"]

THREADS = 256


class Product(Protocol):
    """A library's product over all groups."""

    @property
    def shapes(self) -> int:
        """The address of the groups' extents, which the setup kernels write."""

    @property
    def arrays(self) -> int:
        """The address of the matrices' addresses, which they write."""

    def setup_kernel(self, entry: str) -> Any:
        """The setup kernel of this name."""

    def enqueue(self, alpha: Argument) -> None:
        """Compute all groups from the arrays that the setup kernel has written."""


def plan(request: Requests, executor: CudaExecutor, row: Row, product: Product) -> Plan:
    """The plan of either request."""
    if isinstance(request, GroupedMatmulListRequest):
        return ListPlan(request, executor, row, product)
    return GroupedPlan(request, executor, row, product)


class _Plan(Plan):
    """The part that both plans share: the library's product, and a setup kernel before it."""

    __slots__ = ("_executor", "_product", "_setup_kernel")
    entry: str  # the name of the setup kernel

    def __init__(self, executor: CudaExecutor, row: Row, product: Product) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._product = executor, product
        self._setup_kernel = product.setup_kernel(self.entry)

    def _launch_setup(self, arguments: Sequence[ctypes.Array[ctypes.c_int64] | ctypes.c_int64]) -> None:
        """Launch the setup kernel; its arguments are read before this returns."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = self._executor.target.value or 0
        driver.cuLaunchKernel(self._setup_kernel, 1, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)


class GroupedPlan(_Plan):
    """One kernel for one set of layouts and any ends of groups."""

    __slots__ = ("_fixed", "_staged")
    entry = "arrange"

    def __init__(self, request: GroupedMatmulRequest, executor: CudaExecutor, row: Row, product: Product) -> None:
        super().__init__(executor, row, product)
        out = request.unallocated().get("out")
        d_strides = out[1] if out is not None else request.out.layout.strides  # type: ignore[union-attr]
        strides = (pitch(t.shape, t.layout.strides) for t in (request.a, request.b))
        self._staged = Staged(executor, {} if request.out is None else {"out": Lines.of(request.out, "row")})
        self._fixed = (
            request.groups,
            request.n,
            request.k,
            *strides,
            request.b.layout.strides[0],
            self._staged.words.get("out.pitch", pitch(request.shape, d_strides)),
        )

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        a, b, ends, out, alpha = arguments
        groups, n, k, a_step, b_step, b_group, d_step = self._fixed
        outputs, stream = {"out": int(out.real)}, self._executor.target.value or 0
        d = self._staged.addresses.get("out", outputs["out"])
        numbers = (ends, groups, n, k, a, a_step, b, b_step, b_group, d, d_step)
        words = (*numbers, self._product.shapes, self._product.arrays)
        self._staged.copy_in(outputs, stream)  # the host does not know which rows come after the last group
        self._launch_setup([ctypes.c_int64(int(word.real)) for word in words])
        self._product.enqueue(alpha)
        self._staged.copy_out(outputs, stream)


class ListPlan(_Plan):
    """One kernel for one set of layouts at any addresses."""

    __slots__ = ("_groups", "_staged")
    entry = "place"

    def __init__(self, request: GroupedMatmulListRequest, executor: CudaExecutor, row: Row, product: Product) -> None:
        super().__init__(executor, row, product)
        unallocated = request.unallocated()
        steps = [[pitch(t.shape, t.layout.strides) for t in tensors] for tensors in (request.a, request.b)]
        if request.out is None:
            steps.append([pitch(shape, strides) for shape, strides, _ in unallocated.values()])
        else:
            steps.append([pitch(t.shape, t.layout.strides) for t in request.out])
        outputs = () if request.out is None else request.out
        self._staged = Staged(executor, {f"out[{g}]": Lines.of(t, "row") for g, t in enumerate(outputs)})
        words = self._staged.words
        steps[2] = [words.get(f"out[{g}].pitch", step) for g, step in enumerate(steps[2])]
        self._groups = tuple(zip(request.extents, *steps, strict=True))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        *addresses, alpha = arguments
        count = len(self._groups)
        a, b, out = (addresses[i * count : (i + 1) * count] for i in range(3))
        outputs = {f"out[{g}]": int(address.real) for g, address in enumerate(out)}
        d = [self._staged.addresses.get(name, address) for name, address in outputs.items()]
        # A launch takes a limited number of groups by value; a captured launch contains them, too.
        fixed = [ctypes.c_int64(x) for x in (count, self._product.shapes, self._product.arrays)]
        for first, number, words in chunks(self._groups, a, b, d):
            self._launch_setup([words, ctypes.c_int64(first), ctypes.c_int64(number), *fixed])
        self._product.enqueue(alpha)
        self._staged.copy_out(outputs, self._executor.target.value or 0)


def chunks(
    groups: Sequence[tuple[tuple[int, int, int], int, int, int]],
    a: Sequence[Argument],
    b: Sequence[Argument],
    out: Sequence[Argument],
) -> Iterator[tuple[int, int, ctypes.Array[ctypes.c_int64]]]:
    """The first group, their number, and nine words for each, in the order of `place`: extents, addresses, strides."""
    for first in range(0, len(groups), PLACED):
        part = range(first, min(first + PLACED, len(groups)))
        words = (ctypes.c_int64 * (9 * PLACED))()
        for number, g in enumerate(part):
            extents, *strides = groups[g]
            addresses = (int(x[g].real) for x in (a, b, out))
            words[9 * number : 9 * number + 9] = [*extents, *addresses, *strides]
        yield first, len(part), words
