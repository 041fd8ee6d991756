"""The steps of einsum: contractions of two tensors, sums over modes of one tensor, permutations.

Only modes are considered here, no memory layouts and no libraries.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from dispatch.ops.contraction.paths import find_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.ops.contraction.paths import Path

__all__ = ["Schedule", "Step", "find_schedule"]

Shape = tuple[int, ...]


class Step(NamedTuple):
    """One request of this family: its op, the numbers of its operands, its spec, the shape of its result.

    The operands of einsum have the first numbers, the results of the steps the next ones. `conj` marks the operands
    that are conjugated.
    """

    op: str
    inputs: tuple[int, ...]
    spec: str
    shape: Shape
    conj: tuple[bool, ...]
    flops: int


class Schedule(NamedTuple):
    """All steps, the last of which gives the result, and the path that they follow."""

    steps: tuple[Step, ...]
    path: Path

    @property
    def flops(self) -> int:
        """Additions and multiplications, counted as for real numbers; complex ones take up to four times as many."""
        return sum(step.flops for step in self.steps)

    @property
    def largest(self) -> int:
        """The elements of the largest intermediate result."""
        return max((math.prod(step.shape) for step in self.steps[:-1]), default=0)


class _Term(NamedTuple):
    number: int
    modes: str
    conj: bool


@lru_cache(1024)
def find_schedule(
    inputs: tuple[str, ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    conj: tuple[bool, ...],
    converted: tuple[bool, ...],
    full: tuple[bool, ...],
    optimize: str | Path,
    limit: int | None,
) -> Schedule:
    """The steps of a sum of products over modes.

    `converted` marks the operands whose precision differs from the result's. `full` marks those that have the dtype of
    the result, each mode once, and along each mode its full extent.
    """
    return _ScheduleBuilder(inputs, output, dict(sizes), full).build(conj, converted, optimize, limit)


class _ScheduleBuilder:
    """Collects the steps of one einsum."""

    def __init__(self, inputs: tuple[str, ...], output: str, sizes: dict[str, int], full: tuple[bool, ...]) -> None:
        self._inputs, self._output, self._sizes = inputs, "".join(dict.fromkeys(output)), sizes
        self._full = full
        self._steps: list[Step] = []

    def build(
        self, conj: tuple[bool, ...], converted: tuple[bool, ...], optimize: str | Path, limit: int | None
    ) -> Schedule:
        terms = [_Term(number, modes, conj[number]) for number, modes in enumerate(self._inputs)]
        counts = Counter(mode for term in terms for mode in set(term.modes))
        for place, unconverted in enumerate(terms):
            term = unconverted
            unique = "".join(dict.fromkeys(term.modes))
            needed = "".join(mode for mode in unique if counts[mode] > 1 or mode in self._output)
            if converted[place]:
                term = terms[place] = self._single_operand_step("permute", term, unique)
            if len(terms) > 1 and any(self._sizes[mode] != 1 for mode in unique if mode not in needed):
                terms[place] = self._single_operand_step("reduce_modes", term, needed)
        shapes = tuple(tuple(self._sizes[mode] for mode in term.modes) for term in terms)
        path = find_path(tuple(term.modes for term in terms), self._output, shapes, optimize, limit)
        for places in path:
            if len(places) > 1:
                contracted = [terms[place] for place in places]
                terms = [term for place, term in enumerate(terms) if place not in places]
                terms.append(self._contraction(contracted, terms))
        (last,) = terms
        if last.modes != self._output or not self._steps or last.conj:
            is_sum = set(last.modes) != set(self._output)
            self._single_operand_step("reduce_modes" if is_sum else "permute", last, self._output, conjugated=True)
        return Schedule(tuple(self._steps), path)

    def _single_operand_step(self, op: str, term: _Term, modes: str, *, conjugated: bool = False) -> _Term:
        """A step of one tensor. Unless `conjugated`, its conjugation is left to the step that contracts the result."""
        flops = 0 if op == "permute" else self._count(term.modes)
        return self._add(op, [term._replace(conj=term.conj and conjugated)], modes, flops, conj=term.conj)

    def _contraction(self, taken: list[_Term], others: list[_Term]) -> _Term:
        """Contract two tensors; of more, the cheapest pair until one is left. Sum over modes that no other needs."""
        needed = {mode for term in others for mode in term.modes} | set(self._output)
        all_modes = "".join(dict.fromkeys("".join(term.modes for term in taken)))
        output = [mode for mode in all_modes if mode in needed]
        if not others and set(output) == set(self._output):
            modes = self._output
        else:  # in the order of a matrix product: first the common modes, then those of each
            shared = [mode for mode in output if all(mode in term.modes for term in taken)]
            modes = "".join([*shared, *(mode for mode in output if mode not in shared)])
        while len(taken) > 2:  # cuTENSOR's contraction of three waits for the GPU and could not be captured
            first, second, inner = min(_pairs(taken, needed), key=self._pair_cost)
            taken = [term for term in taken if term not in (first, second)]
            taken.append(self._add("contract", [first, second], inner, self._count(first.modes + second.modes) * 2))
        all_modes = "".join(dict.fromkeys("".join(term.modes for term in taken)))
        flops = self._count(all_modes) * (len(taken) - (len(output) == len(all_modes)))
        if len(output) == len(all_modes):
            for first, second in (taken, taken[::-1]):
                if set(second.modes) == set(modes) and self._is_full(second):
                    return self._add("elementwise_binary", [first, second], modes, flops)
        return self._add("contract", taken, modes, flops)

    def _pair_cost(self, pair: tuple[_Term, _Term, str]) -> tuple[int, int]:
        """The products of elements in a contraction of a pair, and the elements of its result."""
        first, second, output = pair
        return self._count(first.modes + second.modes), self._count(output)

    def _is_full(self, term: _Term) -> bool:
        """Whether a tensor can be the C of `elementwise_binary`."""
        return term.number >= len(self._inputs) or self._full[term.number]

    def _add(self, op: str, terms: list[_Term], modes: str, flops: int, *, conj: bool = False) -> _Term:
        spec = f"{','.join(term.modes for term in terms)}->{modes}"
        shape = tuple(self._sizes[mode] for mode in modes)
        conjugated = tuple(term.conj for term in terms)
        self._steps.append(Step(op, tuple(term.number for term in terms), spec, shape, conjugated, flops))
        return _Term(len(self._inputs) + len(self._steps) - 1, modes, conj and not any(conjugated))

    def _count(self, modes: str) -> int:
        return math.prod(self._sizes[mode] for mode in set(modes))


def _pairs(terms: list[_Term], needed: set[str]) -> Iterator[tuple[_Term, _Term, str]]:
    """All pairs, each with the modes of its contraction: those that another term has or that are needed later."""
    for first, second in combinations(terms, 2):
        rest = needed.union(*(term.modes for term in terms if term not in (first, second)))
        yield first, second, "".join(dict.fromkeys(mode for mode in first.modes + second.modes if mode in rest))
