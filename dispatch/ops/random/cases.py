"""The test cases of the rows of random numbers: Philox's numbers, compared with a reference in NumPy.

Bits and uniform numbers must be equal to the last bit, others within the error of a GPU's functions. The numbers of
other generators are compared with cuRAND's host generators, published values and their statistics:
tests/dispatch/ops/test_random*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.keys import F32, F64, I8, I32, I64, U8, U32, U64
from dispatch.ops.random import distributions
from dispatch.ops.random import request as requests
from dispatch.ops.random.distribution_kernels import MODES
from dispatch.ops.random.reference import evaluate
from dispatch.ops.random.reference_distributions import evaluate_drawn
from dispatch.ops.random.single_precision import is_single
from dispatch.testing.check import Check, MadeCase, Mismatch, place, poison, rounded, unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "cases"]


class Form(NamedTuple):
    """A size, an offset in the sequence, and a gap in memory before the result."""

    name: str
    size: int | tuple[int, ...]
    offset: int = 0
    gap: int = 0


ROW = 4 << 16  # elements in one block of every subsequence
FORMS = (
    Form("odd", 77),
    Form("one element", 1, 6),
    Form("scalar", ()),
    Form("three axes", (3, 5, 8), 4),
    Form("nothing", (3, 0)),
    Form("middle of a quad", 59, 3),
    Form("to the middle", (7, 6), 1002),
    Form("next row", 60, ROW - 28),
    Form("past 32 bits", 40, (5 << 32) + 8),
    Form("far", 33, (1 << 61) + 1),
    Form("unaligned", 36, 0, 1),
    Form("large", 1 << 15),
)
KINDS = {
    "random_bits": requests.RandomBitsRequest,
    "random_uniform": requests.RandomUniformRequest,
    "random_normal": requests.RandomNormalRequest,
    "random_lognormal": requests.RandomLognormalRequest,
    "random_exponential": requests.RandomExponentialRequest,
    "random_poisson": requests.RandomPoissonRequest,
    "random_integers": distributions.RandomIntegersRequest,
    "random_gamma": distributions.RandomGammaRequest,
    "random_beta": distributions.RandomBetaRequest,
    "random_binomial": distributions.RandomBinomialRequest,
    "random_truncated_normal": distributions.RandomTruncatedNormalRequest,
    "random_permutation": distributions.RandomPermutationRequest,
    "random_choice": distributions.RandomChoiceRequest,
    "random_multinomial": distributions.RandomMultinomialRequest,
}
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "random_uniform": ({}, {"interval": "[0,1)"}, {"low": -3.0, "high": 2.5}, {"high": 7.0, "interval": "[0,1)"}),
    "random_normal": ({}, {"mean": -2.0, "std": 0.5}),
    "random_lognormal": ({}, {"mean": 0.5, "std": 0.25}),
    "random_exponential": ({}, {"scale": 3.0}),
    "random_poisson": ({"lam": 4.0}, {"lam": 300.0}, {"lam": 10.0}, {"lam": 1e6}, {"lam": 0.01}, {"lam": 39000.0}),
    "random_integers": ({"high": 100}, {"low": 3, "high": 60}, {"high": 127}),
    "random_gamma": (
        *({"shape_parameter": 2.5, "scale": 3.0}, {"shape_parameter": 0.3}, {"shape_parameter": 1.0}),
        {"shape_parameter": 400.0},
    ),
    "random_beta": ({"a": 2.0, "b": 5.0}, {"a": 0.3, "b": 0.2}, {"a": 40.0, "b": 0.7}),
    "random_binomial": (
        {"n": 20, "p": 0.3},
        {"n": 1000, "p": 0.7},
        {"n": 10**6, "p": 1e-5},
        {"n": 10**9, "p": 0.25},
        {"n": 10**8, "p": 0.9},
    ),
    "random_truncated_normal": (
        *({}, {"low": 1.5, "high": 9.0}, {"low": -4.0, "high": -3.9}, {"low": -0.5, "high": 0.25}),
        *({"low": -1.0, "high": math.inf, "mean": 3.0, "std": 2.0}, {"low": 6.0, "high": math.inf}),
    ),
    "random_permutation": ({}, {"n": 1 << 20}, {"n": 1 << 18}, {"n": 200_003}),
    "random_choice": ({"sums": (0.1, 0.1, 0.6, 0.9, 1.0)}, {"sums": (7.0,)}),
    "random_multinomial": ({"pvals": (0.2, 0.0, 0.5, 0.3), "n": 30}, {"pvals": (0.9, 0.1), "n": 1000}),
}
# Ranges for which many words are rejected, and the full ranges of dtypes.
RANGES: dict[Any, tuple[dict[str, Any], ...]] = {
    I8: ({"low": -100, "high": 101}, {"low": -128, "high": 128}),
    U8: ({"high": 256},),
    I32: ({"low": -(2**31), "high": 2**30}, {"low": -(2**31), "high": 2**31}),
    U32: ({"low": 5, "high": 3 << 30}, {"high": 2**32}),
    I64: ({"low": -(2**60), "high": 5 << 60}, {"low": -(2**63), "high": 2**63}, {"low": -(2**40), "high": 2**32}),
    U64: ({"low": 7, "high": 3 << 62}, {"high": 2**64}, {"low": 2**63, "high": 2**63 + 3 * 2**30}),
}
FEW = 8
NORMALS = ("random_normal", "random_lognormal")
FEW_ROWS = 2000
LARGEST = 7.0  # the largest normal number in f32; in f64 8.6
SINE = 2.0**-19  # error of the fast sine and cosine instructions, in [0, 2 pi]
SINGLE = 6e-6  # error of a normal number that is drawn in f32
SMALL_ROOT = 1e-4  # relative error of a gamma number whose cube root is 1 - 0.95; of others 1e-5 at most
LOG = 2.0**-22  # error of the fast logarithm of numbers from 0.5 on; for smaller ones it is the relative error


def request_of(op: str, dtype: Dtype, form: Form, parameters: dict[str, Any], device: Device, seed: int) -> Any:
    """A request with an output tensor, and the memory of that output."""
    lists = {name: device.array(np.array(values)) for name, values in parameters.items() if isinstance(values, tuple)}
    size = min(form.size, FEW_ROWS) if op == "random_multinomial" and isinstance(form.size, int) else form.size
    request = KINDS[op](device, size, seed, form.offset, out_dtype=dtype, **(parameters | lists))
    memory = place(device, poison(dtype, request.outputs()["out"].shape), gap=0 if request.reads else form.gap)
    return request.replace(out=memory.view), memory


def expected_results(request: Any) -> Results:
    """The reference results of a request."""
    return evaluate_drawn(request) if request.op in MODES else evaluate(request)


def check(
    library: str,
    op: str,
    dtype: Dtype,
    form: Form,
    parameters: dict[str, Any],
    name: str,
    device: Device,
    rng: np.random.Generator,
) -> Any:
    """A case with a fresh seed."""
    request, memory = request_of(op, dtype, form, parameters, device, int(rng.integers(2**63)))
    if library == "curand" and op == "random_poisson":
        request = request.replace(library=library)
        anything = {"out": np.full(request.shape, np.inf)}
        return EventsCheck(name, request, {"out": np.zeros(request.shape)}, anything, (memory,))
    expected = expected_results(request)
    return Check(name, request, expected, bounds(request, expected), (memory,))


def bounds(request: Any, expected: Results) -> Results:
    """Error bounds; 0 for integers and for multiples of a power of 2."""
    dtype, out = request.kind, expected["out"]
    if dtype.numpy.kind in "iu":
        return {"out": np.zeros(out.shape)}
    y, u = np.abs(out.astype(np.float64)), unit(dtype)
    if request.op in MODES:
        more = abs(request.mean) if hasattr(request, "mean") else 0.0
        error = (2.0**-44 + (2 * u if dtype.itemsize == 2 else 0)) * (y + more)  # of functions in f64, via f32
        if request.op == "random_truncated_normal" and request.standard[0] <= 0 <= request.standard[1]:
            # Near 0 the absolute error is that of a normal number whose cosine is near 0, or of a difference.
            error = error + 1.25 * LARGEST * request.std * 8 * unit(F64)
        if is_single(request):
            error = error + single_error(request, y)
    elif request.op == "random_uniform":
        ends = (request.low, request.high)
        error = 0 * y if ends == (0, 1) else 4 * u * (abs(ends[0]) + abs(ends[1])) + 0 * y
    elif request.op == "random_exponential":
        error = 8 * u * y + (0 if dtype is F64 else LOG * request.scale)
    else:
        size = 1.25 * LARGEST * request.std
        error = size * (8 * u + (0 if dtype is F64 else SINE)) + 2 * u * abs(request.mean) + 0 * y
        if request.op == "random_lognormal":
            error = y * (1.1 * error + 8 * u)
    return {"out": rounded(error, out, dtype)}


def single_error(request: Any, y: Any) -> Any:
    """Error bounds of numbers drawn in f32 with a GPU's fast sine, cosine and logarithm instructions."""
    if request.op == "random_truncated_normal":
        most = max(abs(end) for end in (request.low, request.high, request.mean, *y.flat) if math.isfinite(end))
        return SINGLE * request.std + 4 * unit(F32) * (y + most)
    return SMALL_ROOT * y + 2.0**-126


@dataclass(frozen=True)
class EventsCheck(Check):
    """Checks the mean and the spread of cuRAND's Poisson numbers, because their algorithm is not documented."""

    def drawn(self, rng: np.random.Generator) -> Results:
        """Possible results: Poisson numbers by NumPy."""
        request: Any = self.request
        return {"out": np.asarray(rng.poisson(request.lam, request.shape))}

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        out = result[0] if isinstance(result, tuple) else result
        lam, numbers = self.request.lam, out.numpy().astype(np.float64)  # type: ignore[attr-defined]
        self._check_memory()
        if not numbers.size:
            return
        off = abs(numbers.mean() - lam) / np.sqrt(lam / numbers.size)
        beyond = np.abs(numbers - lam).max() / np.sqrt(lam)
        if off > 6 or beyond > 12:
            raise Mismatch(
                f"{self.name}: the mean is {off:.1f} standard errors off, one number {beyond:.1f} deviations"
            )


def cases(row: Row) -> list[MadeCase]:
    """One case for each form, with the parameter choices in turn."""
    op, dtype = row.op, row.dtypes[0]
    choices, library = CHOICES.get(op, ({},)), row.stands_for or row.library
    if op == "random_integers":
        choices += RANGES[dtype]
    return [
        MadeCase(
            f"{dtype}-{form.name}", partial(check, library, op, dtype, form, choices[number % len(choices)]), form.name
        )
        for number, form in enumerate(FORMS)
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
def other(**changes: Callable[[Any], Any]) -> Callable[[Any], Results | None]:
    """The results of a request with changed fields; not for few numbers, which may be equal by chance."""

    def mutation(request: Any) -> Results | None:
        if request.count < FEW or request.op in ("random_poisson", "random_choice", "random_multinomial"):
            return None  # integers, many of which are equal
        fields = {name: change(request) for name, change in changes.items()}
        return None if None in fields.values() else expected_results(request.replace(**fields))

    return mutation


MUTATIONS = {
    "another seed": other(seed=lambda r: r.seed ^ 1),
    "another upper half of the seed": other(seed=lambda r: r.seed ^ 1 << 40),
    "the next number": other(offset=lambda r: r.offset + 1),
    "the next quad": other(offset=lambda r: r.offset + 4),
    "the next row": other(offset=lambda r: r.offset + ROW),
    "another end": lambda r: other(high=lambda r: r.high + 0.5)(r) if r.op == "random_uniform" else None,
    "another mean": lambda r: other(mean=lambda r: r.mean + 0.5)(r) if r.op in NORMALS else None,
    "twice the events": lambda r: (
        {"out": np.random.default_rng(r.seed).poisson(2 * r.lam, r.shape)}
        if r.op == "random_poisson" and r.count >= 4 * FEW
        else None
    ),
    "another spread": lambda r: other(std=lambda r: r.std * 1.5)(r) if r.op in NORMALS else None,
}
