"""What einsum does one after another: contractions of two tensors, sums over modes of one, permutations.

Modes alone; nothing here knows how tensors lie, or a library.
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

__all__ = ["Course", "Step", "course_of"]

Shape = tuple[int, ...]


class Step(NamedTuple):
    """A request of this family: its op, the operands by their numbers, its spec, the shape of its result.

    The operands of einsum come first, then the results of the steps. `conj` says of which the conjugates are taken.
    """

    op: str
    inputs: tuple[int, ...]
    spec: str
    shape: Shape
    conj: tuple[bool, ...]
    flops: int


class Course(NamedTuple):
    """All steps, whose last gives the result; the path that they follow, and what it costs."""

    steps: tuple[Step, ...]
    path: Path

    @property
    def flops(self) -> int:
        """Additions and multiplications of real numbers' contractions; eight times as many a pair of complex ones."""
        return sum(step.flops for step in self.steps)

    @property
    def largest(self) -> int:
        """The elements of the largest result on the way."""
        return max((math.prod(step.shape) for step in self.steps[:-1]), default=0)


class _Term(NamedTuple):
    number: int
    modes: str
    conj: bool


@lru_cache(1024)
def course_of(
    inputs: tuple[str, ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    conj: tuple[bool, ...],
    converted: tuple[bool, ...],
    whole: tuple[bool, ...],
    optimize: str | Path,
    limit: int | None,
) -> Course:
    """The steps of a sum of products over modes.

    `converted` are the operands that are of another precision, `whole` those with the dtype of the result, each mode
    once, and an extent of 1 along none where others have more.
    """
    return _Walk(inputs, output, dict(sizes), whole).course(conj, converted, optimize, limit)


class _Walk:
    """The steps as they come."""

    def __init__(self, inputs: tuple[str, ...], output: str, sizes: dict[str, int], whole: tuple[bool, ...]) -> None:
        self._inputs, self._output, self._sizes = inputs, "".join(dict.fromkeys(output)), sizes
        self._whole = whole
        self._steps: list[Step] = []

    def course(
        self, conj: tuple[bool, ...], converted: tuple[bool, ...], optimize: str | Path, limit: int | None
    ) -> Course:
        terms = [_Term(number, modes, conj[number]) for number, modes in enumerate(self._inputs)]
        counts = Counter(mode for term in terms for mode in set(term.modes))
        for place, given in enumerate(terms):
            term = given
            unique = "".join(dict.fromkeys(term.modes))
            kept = "".join(mode for mode in unique if counts[mode] > 1 or mode in self._output)
            if converted[place]:
                term = terms[place] = self._one("permute", term, unique)
            if len(terms) > 1 and any(self._sizes[mode] != 1 for mode in unique if mode not in kept):
                terms[place] = self._one("reduce_modes", term, kept)
        shapes = tuple(tuple(self._sizes[mode] for mode in term.modes) for term in terms)
        path = find_path(tuple(term.modes for term in terms), self._output, shapes, optimize, limit)
        for places in path:
            if len(places) > 1:
                taken = [terms[place] for place in places]
                terms = [term for place, term in enumerate(terms) if place not in places]
                terms.append(self._several(taken, terms))
        (last,) = terms
        if last.modes != self._output or not self._steps or last.conj:
            is_sum = set(last.modes) != set(self._output)
            self._one("reduce_modes" if is_sum else "permute", last, self._output, conjugated=True)
        return Course(tuple(self._steps), path)

    def _one(self, op: str, term: _Term, modes: str, *, conjugated: bool = False) -> _Term:
        """A tensor alone; its conjugates are taken where it is contracted, unless it is not."""
        flops = 0 if op == "permute" else self._count(term.modes)
        return self._add(op, [term._replace(conj=term.conj and conjugated)], modes, flops, conj=term.conj)

    def _several(self, taken: list[_Term], others: list[_Term]) -> _Term:
        """Two tensors, or the cheapest two of more until two are left: modes that nobody else has are summed up."""
        needed = {mode for term in others for mode in term.modes} | set(self._output)
        there = "".join(dict.fromkeys("".join(term.modes for term in taken)))
        kept = [mode for mode in there if mode in needed]
        if not others and set(kept) == set(self._output):
            modes = self._output
        else:  # as a matrix product has them: what all have, then what each one has
            shared = [mode for mode in kept if all(mode in term.modes for term in taken)]
            modes = "".join([*shared, *(mode for mode in kept if mode not in shared)])
        while len(taken) > 2:  # never three at once: cuTENSOR's contraction of three waits for the GPU, and is no graph
            first, second, inner = min(_pairs(taken, needed), key=self._work)
            taken = [term for term in taken if term not in (first, second)]
            taken.append(self._add("contract", [first, second], inner, self._count(first.modes + second.modes) * 2))
        there = "".join(dict.fromkeys("".join(term.modes for term in taken)))
        flops = self._count(there) * (len(taken) - (len(kept) == len(there)))
        if len(kept) == len(there):
            for first, second in (taken, taken[::-1]):
                if set(second.modes) == set(modes) and self._is_whole(second):
                    return self._add("elementwise_binary", [first, second], modes, flops)
        return self._add("contract", taken, modes, flops)

    def _work(self, pair: tuple[_Term, _Term, str]) -> tuple[int, int]:
        """The products of elements that a contraction of two takes, and the elements that it leaves."""
        first, second, left = pair
        return self._count(first.modes + second.modes), self._count(left)

    def _is_whole(self, term: _Term) -> bool:
        """Whether a tensor may be what another one is multiplied with, element by element."""
        return term.number >= len(self._inputs) or self._whole[term.number]

    def _add(self, op: str, terms: list[_Term], modes: str, flops: int, *, conj: bool = False) -> _Term:
        spec = f"{','.join(term.modes for term in terms)}->{modes}"
        shape = tuple(self._sizes[mode] for mode in modes)
        own = tuple(term.conj for term in terms)
        self._steps.append(Step(op, tuple(term.number for term in terms), spec, shape, own, flops))
        return _Term(len(self._inputs) + len(self._steps) - 1, modes, conj and not any(own))

    def _count(self, modes: str) -> int:
        return math.prod(self._sizes[mode] for mode in set(modes))


def _pairs(terms: list[_Term], needed: set[str]) -> Iterator[tuple[_Term, _Term, str]]:
    """Any two, with the modes that are left of them: those that another one has, and those that are needed later."""
    for first, second in combinations(terms, 2):
        rest = needed.union(*(term.modes for term in terms if term not in (first, second)))
        yield first, second, "".join(dict.fromkeys(mode for mode in first.modes + second.modes if mode in rest))
