"""The test cases of copies and rotations: vectors of any step with poison in gaps, numbers of every kind of rotation.

Elements that are not read with a given flag are NaN. No numbers are drawn for which two roundings of an operand would
change the choice that `rotg` or `rotmg` makes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.blas import level1, rotations
from dispatch.ops.blas.cases1 import Form, forms, place_vector
from dispatch.ops.blas.cases3 import complex_normal
from dispatch.ops.blas.level1 import REAL
from dispatch.ops.blas.reference1 import evaluate, sizes
from dispatch.ops.blas.reference_rotations import matrix_of
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["rotation_cases"]

NAMED = {**vars(level1), **vars(rotations)}
KINDS: dict[str, Any] = {NAMED[name].op: NAMED[name] for name in ("CopyRequest", "SwapRequest", *rotations.__all__)}
FLAGS = (-1.0, 0.0, 1.0, -2.0)
READ = {-1.0: (1, 2, 3, 4), 0.0: (2, 3), 1.0: (1, 4), -2.0: ()}  # the elements of param that are read, by flag
Numbers = tuple[tuple[float, ...], ...]
# fmt: off
PAIRS: Numbers = ((3, 4), (4, -3), (-4, 3), (-3, -4), (0.25, 0), (0, 0.5), (0, 0), (2, 1e-4), (1e-4, 2))
MODIFIED: Numbers = (  # d1, d2, x1, y1 and the results: each flag, and d1 or d2 scaled up or down
    (2, 3, 1, 0.5), (0.1, 3, 1, 2), (3e8, 1, 1, 1), (1, 3e8, 1, 1), (1, 2e-9, 1, 3), (2e-9, 1, 1, 3),
    (1, -2, 1, 0.5), (1, -2, 0.1, 5), (-1, 1, 1, 1), (1, 1, 1, 0), (1, 0, 2, 3),
)
# fmt: on


def number(device: Device, value: Any, dtype: Dtype) -> GuardedBuffer:
    """A number, or a vector of five, surrounded by poison."""
    drawn = np.asarray(value, dtype.numpy)
    values = poison(dtype, (drawn.size + 2,))
    values[1:-1] = drawn.reshape(-1)
    memory = device.array(values)
    return GuardedBuffer(memory[1:-1].reshape(drawn.shape), memory, values, (slice(1, -1),))


class OperandDraw:
    """The operands of a form on a device, and the memory of its results."""

    def __init__(self, op: str, dtype: Dtype, form: Form, turn: int, device: Device, rng: np.random.Generator) -> None:
        self.op, self.dtype, self.form, self.turn, self.device, self.rng = op, dtype, form, turn, device, rng
        self.memory: dict[str, GuardedBuffer] = {}
        self.results: dict[str, GuardedBuffer] = {}

    def vectors(self) -> None:
        """x, y if there is one, and their results."""
        names = [name for name in KINDS[self.op].reads if name in ("x", "y")]
        for name, step in zip(names, self.form.steps, strict=False):
            self.memory[name] = place_vector(
                self.device, complex_normal(self.rng, self.dtype, (self.form.n,)), step, self.dtype
            )
        if self.op == "copy":
            self.results_at({"out": ""}, (self.form.steps[1],))
        else:
            self.results_at({"out_x": "x", "out_y": "y"}, self.form.steps[::-1])

    def results_at(self, sources: dict[str, str], steps: tuple[int, ...]) -> None:
        """Results in separate memory, or in that of an operand; every third form omits one of two."""
        for position, (name, source) in enumerate(sources.items()):
            if self.form.result == "in place" and source:
                self.results[name] = self.memory[source]
            elif self.form.result == "given" or (self.turn % 3 and position):
                drawn = np.full(self.form.n, np.nan, self.dtype.numpy)
                self.results[name] = place_vector(self.device, drawn, steps[position], self.dtype)

    def rotation(self) -> None:
        """The numbers of the rotation that is applied to the vectors."""
        real = REAL.get(self.dtype, self.dtype)
        if self.op == "rotm":
            flag = FLAGS[self.turn % len(FLAGS)]
            param = np.full(5, np.nan)
            param[0] = flag
            param[list(READ[flag])] = self.rng.standard_normal(len(READ[flag]))
            self.memory["param"] = number(self.device, param, self.dtype)
        elif self.op == "rot":
            angle, phase = self.rng.uniform(0.3, 1.2), self.rng.uniform(-3, 3)
            is_complex = self.dtype.is_complex and self.turn % 2 == 1
            s = np.sin(angle) * (np.exp(1j * phase) if is_complex else 1)
            self.memory["c"] = number(self.device, np.cos(angle), real)
            self.memory["s"] = number(self.device, s, self.dtype if is_complex else real)

    def numbers(self, drawn: tuple[float, ...]) -> None:
        """The numbers from which a rotation is computed, and their results."""
        kind, is_given = KINDS[self.op], self.turn % 3 != 2
        for name, value in zip(kind.reads, drawn, strict=True):
            phase = np.exp(1j * self.rng.uniform(-3, 3)) if self.dtype.is_complex else 1
            self.memory[name] = number(self.device, value * phase, self.dtype)
        for name in kind.writes:
            operand = name.removeprefix("out_")
            if self.turn % 3 == 0 and operand in self.memory:
                self.results[name] = self.memory[operand]
            elif is_given:
                dtype = REAL.get(self.dtype, self.dtype) if name == "c" else self.dtype
                shape = (5,) if name == "param" else ()
                self.results[name] = number(self.device, np.full(shape, np.nan), dtype)

    def check(self, name: str) -> Check:
        """The request, and its expected results."""
        fields = {each: buffer.view for each, buffer in (self.memory | self.results).items()}
        request = KINDS[self.op](**fields)
        with np.errstate(all="ignore"):
            expected = evaluate(request, EXACT)
            return Check(name, request, expected, bounds(request, expected), tuple(self.results.values()))


def check_vectors(
    op: str, dtype: Dtype, form: Form, turn: int, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """The vectors of a form, and one of the rotations, selected by `turn`."""
    draw = OperandDraw(op, dtype, form, turn, device, rng)
    draw.rotation()
    draw.vectors()
    return draw.check(name)


def check_numbers(
    op: str, dtype: Dtype, drawn: tuple[float, ...], turn: int, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A rotation that is computed."""
    draw = OperandDraw(op, dtype, Form(1, (1, 1), 1.0, ""), turn, device, rng)
    draw.numbers(drawn)
    return draw.check(name)


def bounds(request: Any, expected: Results) -> Results:
    """The error bounds: copies 0, sums of two products four roundings, computed rotations somewhat more."""
    first = getattr(request, request.reads[0]).dtype
    unit = ROUNDOFF[F32 if first in HALF else first][0] * (4 if first.is_complex else 1)
    if request.op in ("copy", "swap"):
        return {name: np.zeros(()) for name in expected}
    if request.op in ("rotg", "rotmg"):
        allowed = {name: np.asarray(32 * unit * np.abs(value)) for name, value in expected.items()}
        if request.op == "rotmg":
            implied = [place for place in range(1, 5) if place not in READ[float(expected["param"][0])]]
            allowed["param"][implied] = np.inf
        return allowed
    x, y = (
        sizes(np.asarray(getattr(request, name)).astype(np.complex128 if first.is_complex else np.float64))
        for name in ("x", "y")
    )
    if request.op == "rot":
        c, s = (abs(complex(np.asarray(getattr(request, name)))) for name in ("c", "s"))
        matrix = np.array(((c, s), (s, c)))
    else:
        matrix = np.abs(matrix_of(np.asarray(request.param).astype(np.float64)))
    return {
        name: np.asarray(rounded(4 * unit * (one * x + other * y), expected[name], first))
        for name, (one, other) in zip(("out_x", "out_y"), matrix, strict=True)
    }


def rotation_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's routine and dtype; for computed rotations every set of numbers, in each kind of memory."""
    op, dtype = row.op, row.dtypes[0]
    if op in ("rotg", "rotmg"):
        drawn = PAIRS if op == "rotg" else MODIFIED
        if dtype.is_complex:
            drawn = tuple(pair for pair in PAIRS if pair[0])
        every = [partial(check_numbers, op, dtype, one, turn) for one in drawn for turn in range(3)]
    else:
        every = [partial(check_vectors, op, dtype, form, turn) for turn, form in enumerate(forms(op, dtype))]
    return [MadeCase(f"{dtype}-{number}", make) for number, make in enumerate(every)]
