"""The requests of grouped_matmul carried out by a grouped kernel, and a small one that says where all lies.

The table's GPU rows end here, by `plan`. Groups of rows are told by where they end, which never comes to the host:
`arrange` reads it. Products that share nothing are told by the host, as arguments of `place`. Both write the arrays
that the grouped kernel reads, in memory of the plan's own.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.keys import F32, U8, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import PLACED, GroupedSpec, emit
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.layout import order_of, pitch
from dispatch.libraries.cutlass.staged import Lines, Staged
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.ops.grouped_matmul.config import choose
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest

    Requests = GroupedMatmulRequest | GroupedMatmulListRequest

__all__ = ["GroupedPlan", "ListPlan", "chunks", "places", "plan", "spec_of"]

ARRAYS = ("addresses_a", "addresses_b", "addresses_d", "steps_a", "steps_b", "steps_d")
SHAPE_BYTES = 12  # three extents of a group
THREADS = 256


def plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, learn its parameters."""
    if isinstance(request, GroupedMatmulListRequest):
        return ListPlan(request, executor, row)
    return GroupedPlan(request, executor, row)


def spec_of(request: Requests, arch: Arch, config: Config) -> GroupedSpec:
    """The kernel of a request, which is the same for both."""
    a, b = request.first("a"), request.first("b")
    return GroupedSpec(
        arch=arch,
        a=a.dtype,
        b=b.dtype,
        d=request.d_dtype,
        orders=(order_of(a), order_of(b)),
        tile=(*config.tile, 1024 // a.dtype.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        epilogue=request.tree,
        operands=(("alpha", Operand("scalar", F32)),) if "alpha" in str(request.tree) else (),
        fast_accumulation=request.fast_accum,
    )


def places(groups: int) -> tuple[dict[str, int], int]:
    """Where the arrays begin, and how many bytes they take.

    Each begins at a multiple of 16 bytes: CUTLASS first makes its tensor maps of the arrays' own addresses.
    """
    step = 8 * (groups + groups % 2)
    offsets = {name: step * index for index, name in enumerate((*ARRAYS, "shapes"))}
    return offsets, offsets["shapes"] + SHAPE_BYTES * groups


class _Plan(Plan):
    """What both have in common: the kernel, and memory for the arrays that it reads."""

    __slots__ = ("_executor", "_launch", "_memory", "_place", "_values", "spec")
    entry: bytes  # of the small kernel

    def __init__(self, request: Requests, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        device = executor.device
        processors = device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        config = choose(request.rows, request.groups, request.n, processors, request.config)
        self.spec = spec_of(request, Arch(90), config)
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name} {config}: {request.tree}")
        loaded = module(device, compiler.kernel_id(source, self.spec.target), future.result(), source.words)
        self._place = loaded.function(self.entry)
        groups = request.groups
        offsets, size = places(groups)
        self._memory: Tensor = executor.empty((size,), (1,), U8)
        self._values = {
            "groups": groups,
            "multiprocessors": processors,
            **{name: self._memory.ptr + offset for name, offset in offsets.items()},
            "alpha": 0 if not hasattr(request.alpha, "ptr") else 1,
        }
        self._launch = Launch(loaded, executor, self._values, config.cluster)

    def _small(self, arguments: Sequence[ctypes.Array[ctypes.c_int64] | ctypes.c_int64]) -> None:
        """Launch the small kernel; its arguments are read before this returns."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = self._executor.target.value or 0
        driver.cuLaunchKernel(self._place, 1, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)

    def _grouped(self, alpha: Argument) -> None:
        values = dict(self._values)
        if type(alpha) is int:
            values["alpha"] = alpha
        else:
            values["alpha.value"] = int(struct.unpack("<I", struct.pack("<f", alpha.real))[0])
        self._launch.enqueue(values, self._executor.target.value or 0)


class GroupedPlan(_Plan):
    """One kernel for one set of layouts and any ends of groups."""

    __slots__ = ("_fixed", "_staged")
    entry = b"arrange"

    def __init__(self, request: GroupedMatmulRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        out = request.unallocated().get("out")
        d_strides = out[1] if out is not None else request.out.layout.strides  # type: ignore[union-attr]
        steps = (pitch(t.shape, t.layout.strides) for t in (request.a, request.b))
        self._staged = Staged(executor, {} if request.out is None else {"out": Lines.of(request.out, "row")})
        self._fixed = (
            request.groups,
            request.n,
            request.k,
            *steps,
            request.b.layout.strides[0],
            self._staged.words.get("out.pitch", pitch(request.shape, d_strides)),
        )

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        a, b, ends, out, alpha = arguments
        groups, n, k, a_step, b_step, b_group, d_step = self._fixed
        given, stream = {"out": int(out.real)}, self._executor.target.value or 0
        d = self._staged.addresses.get("out", given["out"])
        numbers = (ends, groups, n, k, a, a_step, b, b_step, b_group, d, d_step)
        words = (*numbers, self._values["shapes"], self._values["addresses_a"])
        self._staged.copy_in(given, stream)  # the host does not know which rows are behind the last group
        self._small([ctypes.c_int64(int(word.real)) for word in words])
        self._grouped(alpha)
        self._staged.copy_out(given, stream)


class ListPlan(_Plan):
    """One kernel for one set of layouts at any addresses."""

    __slots__ = ("_groups", "_staged")
    entry = b"place"

    def __init__(self, request: GroupedMatmulListRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        made = request.unallocated()
        steps = [[pitch(t.shape, t.layout.strides) for t in tensors] for tensors in (request.a, request.b)]
        if request.out is None:
            steps.append([pitch(shape, strides) for shape, strides, _ in made.values()])
        else:
            steps.append([pitch(t.shape, t.layout.strides) for t in request.out])
        given = () if request.out is None else request.out
        self._staged = Staged(executor, {f"out[{g}]": Lines.of(t, "row") for g, t in enumerate(given)})
        words = self._staged.words
        steps[2] = [words.get(f"out[{g}].pitch", step) for g, step in enumerate(steps[2])]
        self._groups = tuple(zip(request.extents, *steps, strict=True))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        *addresses, alpha = arguments
        count = len(self._groups)
        a, b, out = (addresses[i * count : (i + 1) * count] for i in range(3))
        given = {f"out[{g}]": int(address.real) for g, address in enumerate(out)}
        d = [self._staged.addresses.get(name, address) for name, address in given.items()]
        # As many groups at a time as a launch takes by value: a recorded launch then holds them, too.
        fixed = [ctypes.c_int64(x) for x in (count, self._values["shapes"], self._values["addresses_a"])]
        for first, number, words in chunks(self._groups, a, b, d):
            self._small([words, ctypes.c_int64(first), ctypes.c_int64(number), *fixed])
        self._grouped(alpha)
        self._staged.copy_out(given, self._executor.target.value or 0)


def chunks(
    groups: Sequence[tuple[tuple[int, int, int], int, int, int]],
    a: Sequence[Argument],
    b: Sequence[Argument],
    out: Sequence[Argument],
) -> Iterator[tuple[int, int, ctypes.Array[ctypes.c_int64]]]:
    """The first group, how many, and nine words for each, in the order of `place`: extents, addresses, steps."""
    for first in range(0, len(groups), PLACED):
        part = range(first, min(first + PLACED, len(groups)))
        words = (ctypes.c_int64 * (9 * PLACED))()
        for place, g in enumerate(part):
            extents, *steps = groups[g]
            addresses = (int(x[g].real) for x in (a, b, out))
            words[9 * place : 9 * place + 9] = [*extents, *addresses, *steps]
        yield first, len(part), words
