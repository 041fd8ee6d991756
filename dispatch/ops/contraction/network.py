"""The program of a network of small tensors: the words that the kernel of network_kernel.py reads and executes.

Its steps are those of the request's schedule, see `steps.py`. Steps that do not depend on each other are computed in
one round, each by some of the warps. Nothing here calls a library.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dispatch.device.layout import c_strides
from dispatch.errors import Refused
from dispatch.ops.contraction.network_cost import Tiling, choose_tiling, copy_cycles, round_cycles
from dispatch.ops.contraction.network_kernel import KINDS, POINTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.ops.contraction.einsum import EinsumRequest
    from dispatch.ops.contraction.steps import Step

__all__ = ["MAX_ELEMENTS", "MAX_OPERANDS", "MAX_STRIDES", "Program", "elements_of", "program_of"]

MAX_OPERANDS = POINTERS - 1
MAX_ELEMENTS = 1 << 18  # of all operands and intermediate results
MAX_STRIDES = 1 << 31  # elements, from the first to the last of an operand
WARPS = (4, 8, 16)  # of a block
CHUNK = 32  # elements that a warp copies at once
TILES = ((1, 1), (1, 4), (2, 2), (4, 4))

Modes = tuple[str, ...]
Axes = list[tuple[int, int]]  # extents and strides, the fastest first


class Program(NamedTuple):
    """A network in the form that the kernel reads.

    Attributes:
        words: the program, padded to multiples of 16 bytes.
        warps: warps of the block.
        elements: the most elements of copied operands and intermediate results at a time.
        cycles: an estimate of the duration, without the launch itself.
    """

    words: Array
    warps: int
    elements: int
    cycles: float


class Pair(NamedTuple):
    """A step of two operands, by their numbers, or of one (`b` is None); `out` is the number of its result."""

    a: int
    b: int | None
    out: int
    shape: tuple[int, int, int, int]  # extents of the batch, the rows, the columns and the sum
    modes: tuple[str, str, str]  # of the result: the batch's, the rows', the columns'


class Operand(NamedTuple):
    """An operand along its modes, each once: strides in elements."""

    modes: str
    strides: tuple[int, ...]
    kind: int
    is_conjugated: bool


def elements_of(request: EinsumRequest) -> int:
    """The elements of all operands, each along all its modes, and of all intermediate results."""
    elements = sum(_count(set(modes), request.sizes) for modes in request.parsed[0])
    return elements + sum(
        _count(set(step.spec.partition("->")[2]), request.sizes) for step in request.schedule.steps[:-1]
    )


def program_of(request: EinsumRequest) -> Program:
    """The program of a request of few elements; Refused for steps that the kernel cannot compute."""
    layouts = tuple((one.layout.shape, one.layout.strides, one.dtype) for one in request.operands)
    inputs, output = request.parsed
    out = request.out_layout().strides, request.dtype
    conj = tuple(number in request.conj for number in range(len(layouts)))
    return _program(inputs, output, tuple(request.sizes.items()), request.schedule.steps, layouts, conj, out)


@lru_cache(256)
def _program(
    inputs: tuple[str, ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    steps: tuple[Step, ...],
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], Dtype], ...],
    conj: tuple[bool, ...],
    out: tuple[tuple[int, ...], Dtype],
) -> Program:
    extents = dict(sizes)
    operands = [
        _operand(modes, extents, layout, conjugated)
        for modes, layout, conjugated in zip(inputs, layouts, conj, strict=True)
    ]
    lowered = _Lowered(operands, steps, extents)
    strides, dtype = out
    return min(
        (_Writer(lowered, extents, output, strides, dtype, warps).program() for warps in WARPS),
        key=lambda program: program.cycles,
    )


def _operand(
    modes: str, extents: dict[str, int], layout: tuple[tuple[int, ...], tuple[int, ...], Dtype], conjugated: bool
) -> Operand:
    """An operand along its modes: its diagonal if it has a mode twice, stride 0 where it has extent 1."""
    shape, strides, dtype = layout
    steps: dict[str, int] = {}
    for mode, extent, stride in zip(modes, shape, strides, strict=True):
        if extents[mode] != 1:
            steps[mode] = steps.get(mode, 0) + (stride if extent != 1 else 0)
    order = sorted(steps, key=lambda mode: -abs(steps[mode]))  # in the order of its memory
    return Operand("".join(order), tuple(steps[mode] for mode in order), KINDS[dtype], conjugated)


def _count(modes: Sequence[str] | set[str], extents: dict[str, int]) -> int:
    count = 1
    for mode in modes:
        count *= extents[mode]
    return count


class _Lowered:
    """The steps as pairs, in order; and the order of modes in which each step wants its operands in shared memory."""

    def __init__(self, operands: list[Operand], steps: Sequence[Step], extents: dict[str, int]) -> None:
        self.operands, self._extents = operands, extents
        self.pairs: list[Pair] = []
        self.mode_orders: dict[int, str] = {}
        natural = {number: operand.modes for number, operand in enumerate(operands)}
        sources = {number: number for number in natural}  # the operand or step whose result a number refers to
        for place, step in enumerate(steps):
            number, is_last = len(operands) + place, place == len(steps) - 1
            inputs = [sources[one] for one in step.inputs]
            if step.op == "permute" and not is_last:  # its operand is converted and reordered as it is copied
                sources[number] = inputs[0]
                continue
            output = step.spec.partition("->")[2]
            pair = self._pair(inputs, number, [natural[one] for one in inputs], output)
            self.pairs.append(pair)
            sources[number], natural[number] = number, "".join(pair.modes)

    def _pair(self, inputs: list[int], out: int, modes: list[str], output: str) -> Pair:
        if len(inputs) == 1:
            (only,) = modes
            remaining, summed = (
                "".join(mode for mode in only if (mode in output) is is_kept) for is_kept in (True, False)
            )
            self.mode_orders[inputs[0]] = summed + remaining
            return Pair(
                inputs[0], None, out, (1, self._extent(remaining), 1, self._extent(summed)), ("", remaining, "")
            )
        a, b = inputs
        of_a, of_b = modes
        first = of_a if len(of_a) >= len(of_b) else of_b  # the larger one keeps its order of modes
        both = [mode for mode in first if mode in of_a and mode in of_b]
        batch, summed = ("".join(mode for mode in both if (mode in output) is is_kept) for is_kept in (True, False))
        rows, columns = ("".join(mode for mode in one if mode not in both) for one in (of_a, of_b))
        if not {*rows, *columns} <= {*output}:
            raise Refused(f"a step of two operands sums over modes that only one of them has: {of_a},{of_b}->{output}")
        if self._extent(rows) > self._extent(columns):
            a, b, rows, columns = b, a, columns, rows
        self.mode_orders[a], self.mode_orders[b] = batch + summed + rows, batch + summed + columns
        shape = (self._extent(batch), self._extent(rows), self._extent(columns), self._extent(summed))
        return Pair(a, b, out, shape, (batch, rows, columns))

    def _extent(self, modes: str) -> int:
        return _count(modes, self._extents)


class _Writer:
    """Writes the program for a number of warps."""

    def __init__(
        self,
        lowered: _Lowered,
        extents: dict[str, int],
        output: str,
        strides: tuple[int, ...],
        dtype: Dtype,
        warps: int,
    ) -> None:
        self._lowered, self._extents, self._warps, self._dtype = lowered, extents, warps, dtype
        self._output, self._strides = output, strides
        self._width = max(dtype.itemsize, 4)
        self._result: dict[str, int] = {}
        for mode, stride in zip(output, strides, strict=True):
            self._result[mode] = self._result.get(mode, 0) + stride
        self._words: list[int] = []
        self._cycles = 0.0

    def program(self) -> Program:
        lowered = self._lowered
        rounds = self._rounds()
        places, elements = self._allocate(rounds)
        self._words = [0] * 8  # the header
        chunks: list[int] = []
        for number, operand in enumerate(lowered.operands):
            modes = lowered.mode_orders[number]
            steps = dict(zip(operand.modes, operand.strides, strict=True))
            count = _count(modes, self._extents)
            axes = self._axes(modes, steps)
            fields = (number, operand.kind, operand.is_conjugated, len(chunks), count, places[number], len(axes), 0)
            at = self._add(map(int, fields), axes)
            chunks += [at // 4] * -(-count // CHUNK)
        self._cycles += copy_cycles(len(chunks), self._warps)
        zeros = self._add_zero_fill()
        schedule = [self._assign_warps(steps, places) for steps in rounds]
        chunks_at = self._add(np.array([*chunks, *[0] * (len(chunks) % 2)], np.uint16).view(np.int32).tolist())
        schedule_at = self._add([at for line in schedule for at in line])
        self._words[:8] = (len(rounds), len(chunks), chunks_at, schedule_at, zeros, len(lowered.operands), 0, 0)
        words = np.array(self._words, np.int64).astype(np.uint32)
        return Program(words, self._warps, elements, self._cycles)

    def _add(self, fields: Sequence[int] | map[int], axes: Axes = []) -> int:  # noqa: B006  # never modified
        """Append words, and return the index of the first."""
        at = len(self._words)
        self._words += fields
        for extent, stride in axes:
            self._words += (extent, *reciprocal(extent), stride)
        self._words += [0] * (-len(self._words) % 4)
        return at

    def _axes(self, modes: str, steps: dict[str, int]) -> Axes:
        """The axes of modes, the last of them the fastest; modes whose strides merge are one axis."""
        merged: Axes = []
        for mode in reversed(modes):
            extent, stride = self._extents[mode], steps[mode]
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = merged[-1][0] * extent, merged[-1][1]
            elif extent != 1:
                merged.append((extent, stride))
        return merged if 0 not in [extent for extent, _ in merged] else []

    def _rounds(self) -> list[list[Pair]]:
        """The steps by rounds, each as late as possible, so that fewer intermediate results exist at a time."""
        levels: dict[int, int] = {}
        by_level: dict[int, list[Pair]] = {}
        for pair in reversed(self._lowered.pairs):
            level = levels.get(pair.out, 0)
            by_level.setdefault(level, []).append(pair)
            for one in (pair.a, pair.b):
                if one is not None:
                    levels[one] = level + 1
        most = self._warps
        return [
            steps[first : first + most]
            for _, steps in sorted(by_level.items(), reverse=True)
            for first in range(0, len(steps), most)
        ]

    def _allocate(self, rounds: list[list[Pair]]) -> tuple[dict[int, int], int]:
        """The offset of each operand and intermediate result, and how many elements they need in all.

        What is written in a round overlaps nothing that this or a later round reads.
        """
        written = dict.fromkeys(range(len(self._lowered.operands)), -1)
        read: dict[int, int] = {}
        for turn, steps in enumerate(rounds):
            for pair in steps:
                written[pair.out] = turn
                read |= {one: turn for one in (pair.a, pair.b) if one is not None}
        places: dict[int, int] = {}
        blocks: list[tuple[int, int, int]] = []  # begin, end, the last round that reads it
        most = 0
        for number in sorted(read, key=lambda one: written[one]):
            blocks = sorted(block for block in blocks if block[2] >= written[number])
            begin, size = 0, _count(self._lowered.mode_orders[number], self._extents)
            for block in blocks:
                if block[0] - begin >= size:
                    break
                begin = max(begin, block[1])
            blocks.append((begin, begin + size, read[number]))
            places[number] = begin
            most = max(most, begin + size)
        return places, most

    def _add_zero_fill(self) -> int:
        """Append the record that sets the result to 0 first, and return its index; 0 if that is not needed."""
        if len(self._result) == len(self._output):
            return 0
        axes: Axes = []
        count = 1
        for mode, stride in zip(reversed(self._output), reversed(self._strides), strict=True):
            count *= self._extents[mode]
            if self._extents[mode] != 1:
                axes.append((self._extents[mode], stride))
        return self._add((0, 0, 0, 0, count, 0, len(axes), 0), axes)

    def _assign_warps(self, steps: list[Pair], places: dict[int, int]) -> list[int]:
        """Assign the warps to the steps of a round: for each warp the index of the record of its step."""
        axes = [[self._axes(modes, self._result_strides(pair)) for modes in pair.modes[::-1]] for pair in steps]
        shares = [1] * len(steps)
        tilings = [self._choose_tiling(*each) for each in zip(steps, axes, shares, strict=True)]
        for _ in range(self._warps - len(steps)):
            slowest = max(range(len(steps)), key=lambda one: tilings[one].cycles)
            shares[slowest] += 1
            tilings[slowest] = self._choose_tiling(steps[slowest], axes[slowest], shares[slowest])
        self._cycles += round_cycles(tilings, self._warps)
        line: list[int] = []
        for pair, pair_axes, warps, tiling in zip(steps, axes, shares, tilings, strict=True):
            of_columns, of_rows, of_batch = pair_axes
            fields = self._step_fields(pair, places, (len(line), warps), tiling)
            at = self._add((*fields, *map(len, pair_axes)), [*of_columns, *of_rows, *of_batch])
            line += [at] * warps
        return line

    def _choose_tiling(self, pair: Pair, axes: list[Axes], warps: int) -> Tiling:
        return choose_tiling(pair.shape, self._width, warps, sum(map(len, axes)), alone=pair.b is None)

    def _result_strides(self, pair: Pair) -> dict[str, int]:
        """The strides of a step's result: those that the step that reads it wants, or those of the final result."""
        modes = self._lowered.mode_orders.get(pair.out)
        if modes is None:
            return self._result
        return dict(zip(modes, c_strides(tuple(self._extents[mode] for mode in modes)), strict=True))

    def _step_fields(
        self, pair: Pair, places: dict[int, int], part: tuple[int, int], tiling: Tiling
    ) -> tuple[int, ...]:
        """The record of a step without its axes; `part` is the first of its warps and their number."""
        batch, rows, columns, terms = pair.shape
        high, wide = TILES[tiling.tile]
        row_tiles, column_tiles = -(-rows // high), -(-columns // wide)
        b = -1 if pair.b is None else places[pair.b]
        of_b = (columns * terms, columns) if pair.b is not None else (0, 0)
        return (
            *(places[pair.a], b, places.get(pair.out, -1), batch * row_tiles * column_tiles),
            *(rows * terms, rows, *of_b),
            *(rows, columns, terms, tiling.tile),
            *(row_tiles, *reciprocal(row_tiles), tiling.split),
            *(column_tiles, *reciprocal(column_tiles), *part),
        )


def reciprocal(extent: int) -> tuple[int, int]:
    """A magic number and a shift that divide whole numbers below 2^31: (x · magic >> 32) >> shift.

    The magic number is 2^(32 + shift) / extent, rounded up: it is too large by less than one, and so the quotient by
    less than 1 / extent. For an extent of 1 it is 0, and nothing is divided.
    """
    if extent <= 1:
        return 0, 0
    bits = (extent - 1).bit_length()
    return -(-(1 << (31 + bits)) // extent), bits - 1
