"""NumPy formulas: one function per op is both the plan of its host rows and the reference of all its rows.

A formula takes a request and a working dtype and returns the outputs by name. Host rows evaluate it in f32 (f64 for
f64) and round once at the end; evaluated in f64, the formula is the reference that every row is compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from dispatch.checks import names_arguments, shown
from dispatch.core.request import Plan
from dispatch.errors import BadRow
from dispatch.keys import C128, F64
from dispatch.refusal import calls_user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Operands, Request
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = [
    "EXACT",
    "Formula",
    "NumpyPlan",
    "Results",
    "draw",
    "exactly",
    "largest",
    "numpy_call",
    "numpy_plan",
    "sigmoid",
    "store",
    "values",
    "work_of",
]

EXACT = np.dtype(np.float64)

Results = dict[str, "Array"]


class Formula(Protocol):
    """The outputs of a request, by name, computed in a floating point dtype."""

    def __call__(self, request: Any, work: np.dtype[Any], /) -> Results: ...


def work_of(dtype: Dtype) -> np.dtype[Any]:
    """The dtype in which the host computes, for operands of a dtype: f64 for f64 and c128, else f32, as in cuDNN."""
    return np.dtype(np.float64 if dtype in (F64, C128) else np.float32)


def largest(dtype: Dtype) -> float:
    """The largest finite number of a floating point dtype; cuDNN's kernels start minima from it."""
    limits: Any = ml_dtypes.finfo  # ml_dtypes.finfo is untyped
    return float(limits(dtype.numpy).max)


def values(tensor: Tensor | Array | None, work: np.dtype[Any]) -> Array:
    """The elements of a tensor in a working dtype; complex ones in the complex dtype of its precision."""
    array = np.asarray(tensor)
    return array.astype(np.result_type(work, np.complex64) if array.dtype.kind == "c" else work, copy=False)


class NumpyPlan(Plan):
    """A formula as a plan; it runs requests rather than addresses, because NumPy needs the layouts."""

    __slots__ = ("_formula", "_work")

    def __init__(self, row: Row, formula: Formula, work: np.dtype[Any]) -> None:
        super().__init__(row, capture_safe=False)
        self._formula, self._work = formula, work

    @calls_user_code
    def run(self, request: Any, outputs: Operands) -> None:
        """Compute a request into its outputs; `outputs` holds those that were allocated."""
        with np.errstate(all="ignore"):  # as on a GPU, an overflow gives a value without a warning
            results = self._formula(request, self._work)
        self._check_names(request, results, outputs)
        for name, array in results.items():
            target = outputs.get(name, getattr(request, name))
            if target is not None:
                store(self._checked(name, array, target), target)

    def _check_names(self, request: Any, results: Any, outputs: Operands) -> None:
        """Raise BadRow unless the formula returned a dict with exactly the outputs to be written."""
        if not isinstance(results, dict):
            raise BadRow(f"{self.row.name}: its formula returned {shown(results)}; expected a dict of outputs by name")
        for name in results:
            if name not in outputs and not hasattr(request, name):
                raise BadRow(f"{self.row.name}: its formula returned {name!r}; expected only {', '.join(outputs)}")
        if missing := [name for name in outputs if name not in results]:
            raise BadRow(
                f"{self.row.name}: its formula returned {', '.join(results) or 'no output'}; expected {missing[0]}"
                " as well"
            )

    def _checked(self, name: str, given: Any, target: Tensor) -> Array:
        """The array that a formula returned for an output.

        BadRow unless it is an array of the output's shape, or a flat one of as many elements, and real if the output
        is.
        """
        message = f"{self.row.name}: its formula returned {name}"
        if not isinstance(given, (np.ndarray, np.generic)):
            raise BadRow(f"{message} as {shown(given)}; expected an array")
        array: Array = np.asarray(given)
        shape = array.shape
        if array.dtype.kind == "c" and not target.dtype.is_complex:
            raise BadRow(
                f"{message} in {array.dtype}; expected real numbers, because {name} is {target.dtype}: return .real"
            )
        if shape == target.shape or (len(shape) == 1 and shape[0] == target.size):
            return array
        if [extent for extent in shape if extent != 1] != [extent for extent in target.shape if extent != 1]:
            raise BadRow(f"{message} of shape {shape}; expected {target.shape}")
        return array


def numpy_plan(formula: Formula, request: Request, executor: object, row: Row) -> NumpyPlan:
    """The plan of a formula on the host, computed as cuDNN does for the row's first dtype."""
    del request, executor  # NumPy needs no handle, no stream and no workspace
    return NumpyPlan(row, formula, work_of(row.dtypes[0]))


@names_arguments
def numpy_call(formula: Formula) -> Callable[[Request, object, Row], NumpyPlan]:
    """The `call` of a host row, made from the formula of its op."""
    if not callable(formula):
        raise BadRow(f"a formula is a function of a request and a NumPy dtype, not {formula!r:.80}")

    def call(request: Request, executor: object, row: Row) -> NumpyPlan:
        """A plan that computes with NumPy."""
        return numpy_plan(formula, request, executor, row)

    call.__module__ = getattr(formula, "__module__", __name__)  # the op's module, which has its cases
    call.__name__ = call.__qualname__ = getattr(formula, "__name__", "call")  # shown by `explain`
    return call


def exactly(formula: Formula) -> Callable[[Any], Results]:
    """The reference of an op, made from its formula: the outputs of a request in float64, by name."""

    def reference(request: Any) -> Results:
        """The outputs of a request in float64, by name."""
        return formula(request, EXACT)

    return reference


def store(array: Array, tensor: Tensor) -> None:
    """Round values to a host tensor's dtype into its memory; i32 wraps around, as GPU adders do."""
    target = tensor.device.view(tensor)
    with np.errstate(all="ignore"):  # an f16 overflow gives infinity
        target[...] = array.astype(target.dtype, copy=False).reshape(target.shape)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x); e^y is computed only for y of at most 0, so nothing overflows."""
    power = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x.dtype.type(1), power) / (1 + power))


def draw(states: Array, size: int, p: float) -> tuple[Array, Array]:
    """Which of `size` elements dropout keeps, each with probability 1 - p, and the generator's state after that."""
    seed, passes = states.view(np.uint64)
    random = np.random.Generator(np.random.Philox(key=int(seed), counter=int(passes) << 64))
    return random.random(size) >= p, np.array([seed, passes + 1], np.uint64).view(np.uint8)
