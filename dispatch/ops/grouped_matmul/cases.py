"""The test cases of the rows of grouped_matmul, and the allowed errors.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.row import FAST
from dispatch.keys import F64, FP8, Compute, Dtype, member
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.bounds import SUMS, errors_of, product_error, stored
from dispatch.libraries.cutlass.matrices import poisoned_matrix, random_matrix
from dispatch.ops.grouped_matmul.config import LARGE
from dispatch.ops.grouped_matmul.reference import products, reference, reference_list
from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest
from dispatch.ops.grouped_matmul.rules import only_lists
from dispatch.testing.memory import GuardedBuffer, Mismatch
from dispatch.testing.roundoff import by_numpy

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["GroupedCase", "GroupedTrial", "ListCase", "ListTrial", "cases", "list_cases"]

# fmt: off
SIZES = {
    "uniform":    (64, 64, 64, 64),
    "varying":    (1, 130, 17, 300, 64),
    "some empty": (0, 5, 0, 0, 259, 0),
    "one":        (37,),
    "many":       tuple(3 * (g % 7) for g in range(64)),
}
# fmt: on
BEHIND = 3  # rows after the last group, which must not be written


@dataclass(frozen=True)
class GroupedCase:
    """One request, described by everything except the numbers in its operands."""

    name: str
    dtypes: tuple[Dtype, ...]
    sizes: tuple[int, ...]
    n: int = 136
    k: int = 72
    order: str = "c"
    tree: Node | None = None
    fast_accum: bool = False
    config: Config | None = None
    alpha_on_device: bool = False
    library: str | None = None  # for a row that comes after another in the table

    @property
    def id(self) -> str:
        return f"{'·'.join(map(str, self.dtypes))}-{self.name}"

    def request(self, device: Device, rng: np.random.Generator) -> GroupedMatmulRequest:
        """The case with fresh operands."""
        return self._request(device, rng)[0]

    def _request(self, device: Device, rng: np.random.Generator) -> tuple[GroupedMatmulRequest, GuardedBuffer]:
        a, b, _, d = self.dtypes
        total = sum(self.sizes) + BEHIND
        memory = poisoned_matrix(device, (total, self.n), d, "r")
        memory.before[memory.inside] = 7  # also in the rows after the last group
        memory.renew()
        request = GroupedMatmulRequest(
            random_matrix(device, rng, (total, self.k), a, "r"),
            random_matrix(device, rng, (len(self.sizes), self.k, self.n), b, self.order),
            device.array(np.cumsum(self.sizes), "i32"),
            out=memory.view,
            epilogue=self.tree,
            alpha=device.array([0.75], "f32") if self.alpha_on_device else 0.75,
            fast_accum=self.fast_accum,
            config=self.config,
            library=self.library,
        )
        return request, memory

    def check(self, device: Device, rng: np.random.Generator) -> GroupedTrial:
        """The request with its expected results."""
        return GroupedTrial(self.id, *self._request(device, rng))


class GroupedTrial:
    """A request, its float64 reference, and the bound of each element."""

    def renew(self) -> None:
        """Fill the output with values that no kernel writes."""
        if self.memory is not None:
            self.memory.renew()

    def __init__(self, name: str, request: GroupedMatmulRequest, memory: GuardedBuffer | None = None) -> None:
        self.name, self.request, self.memory = name, request, memory
        self.expected = reference(request)["out"]
        self.allowed = np.zeros(request.shape)
        for rows, a, b in products(request, np.float64):
            self.allowed[rows] = _allowed(request, a, b, self.expected[rows])

    def verify(self, result: Any) -> None:
        """Raise Mismatch if D is not within its bound, or memory after the last group or around D was written."""
        if self.memory is not None and (count := self.memory.disturbed()):
            raise Mismatch(f"{self.name}: {count} bytes beside the output were written")
        got = result.numpy().astype(np.float64)
        after_end = np.isnan(self.expected)
        wrong = ~(np.abs(got - np.where(after_end, 7.0, self.expected)) <= self.allowed)
        if wrong.any():
            index = tuple(map(int, np.argwhere(wrong)[0]))
            raise Mismatch(
                f"{self.name}: wrong in {wrong.sum()} of {got.size} places; at {index} it is {got[index]}, expected"
                f" {self.expected[index]} within {self.allowed[index]:.3g} ({self.request.describe()})"
            )


def _allowed(request: GroupedMatmulRequest | GroupedMatmulListRequest, a: Array, b: Array, expected: Array) -> Array:
    """The allowed error of each element of a group's D."""
    a_dtype = next(iter(request.matrices))[1].dtype
    error = product_error(a, b, a_dtype, member(request.compute), on_host=by_numpy(request.device))
    operands = {"alpha": np.asarray(request.alpha, np.float64)}
    unit = {"unit": SUMS[True]} if a_dtype is F64 else {}  # of the precision in which it is scaled
    bound = errors_of(request.tree, a @ b, error, operands, None, **unit)["out"]
    return stored(bound, expected, request.d_dtype)


# fmt: off
EXTENTS = {
    "all varying": ((64, 64, 64), (1, 136, 80), (300, 8, 272), (37, 53, 16), (128, 264, 144)),
    "alike":       ((48, 72, 96),) * 3,
    "awkward":     ((37, 53, 29), (1, 1, 1), (130, 9, 40), (64, 64, 64), (1, 131, 72)),
    "many":        tuple((1 + 9 * (g % 5), 16 + 8 * (g % 3), 16 * (1 + g % 4)) for g in range(70)),
}
# fmt: on


@dataclass(frozen=True)
class ListCase:
    """Products of these extents, described by everything except the numbers in their operands."""

    name: str
    dtypes: tuple[Dtype, ...]
    extents: tuple[tuple[int, int, int], ...]
    order: str = "c"
    order_of_a: str = "r"
    order_of_d: str = "r"
    library: str | None = None
    compute: Compute | None = None

    @property
    def id(self) -> str:
        return f"{'·'.join(map(str, self.dtypes))}-{self.name}"

    def check(self, device: Device, rng: np.random.Generator) -> ListTrial:
        """The request with its expected results."""
        a, b, _, d = self.dtypes
        memories = tuple(poisoned_matrix(device, (m, n), d, self.order_of_d) for m, n, _ in self.extents)
        request = GroupedMatmulListRequest(
            tuple(random_matrix(device, rng, (m, k), a, self.order_of_a) for m, _, k in self.extents),
            tuple(random_matrix(device, rng, (k, n), b, self.order) for _, n, k in self.extents),
            out=tuple(memory.view for memory in memories),
            alpha=-0.5,
            library=self.library,
            compute=self.compute,
        )
        return ListTrial(self.id, request, memories)

    def request(self, device: Device, rng: np.random.Generator) -> GroupedMatmulListRequest:
        """The request alone."""
        return self.check(device, rng).request


class ListTrial:
    """A request, its float64 reference, and the bound of each element."""

    def renew(self) -> None:
        """Poison the outputs."""
        for memory in self.memories:
            memory.renew()

    def __init__(self, name: str, request: GroupedMatmulListRequest, memories: tuple[GuardedBuffer, ...] = ()) -> None:
        self.name, self.request, self.memories = name, request, memories
        self.expected = list(reference_list(request).values())
        pairs = zip(request.a, request.b, self.expected, strict=True)
        self.allowed = [_allowed(request, *(np.asarray(x).astype(np.float64) for x in pair)) for pair in pairs]

    def verify(self, results: tuple[Tensor, ...]) -> None:
        """Raise Mismatch if a D is not within its bound, or memory around one was written."""
        if count := sum(memory.disturbed() for memory in self.memories):
            raise Mismatch(f"{self.name}: {count} bytes beside the outputs were written")
        for g, (result, expected, allowed) in enumerate(zip(results, self.expected, self.allowed, strict=True)):
            wrong = ~(np.abs(result.numpy().astype(np.float64) - expected) <= allowed)
            if wrong.any():
                raise Mismatch(
                    f"{self.name}: D {g} {self.request.extents[g]} is wrong in {wrong.sum()} of {wrong.size} places"
                    f" ({self.request.describe()})"
                )


def list_cases(row: Row) -> list[ListCase]:
    """All extents with the kernels of `cases`; for cuBLAS, which supports any order, in all orders."""
    compute = row.compute if row.compute in FAST else None
    every = EXTENTS.items()
    all_cases = [ListCase(name, row.dtypes, extents, library=named(row), compute=compute) for name, extents in every]
    if row.of("cublas"):
        plain = replace(all_cases[0], extents=(*EXTENTS["awkward"], *EXTENTS["alike"], *EXTENTS["awkward"][:2]))
        for a, b, d in ("rrr", "rcr", "ccr", "rrc", "crc", "ccc"):
            all_cases.append(replace(plain, name=f"orders {a}{b}{d}", order_of_a=a, order=b, order_of_d=d))
    return all_cases


def grouped_cases(row: Row) -> list[GroupedCase]:
    """All sizes with two kernels, chosen by mean extents; 16-bit operands also with row-major b and a tree."""
    library = named(row)
    varying = GroupedCase("varying", row.dtypes, SIZES["varying"], library=library)
    all_cases = [replace(varying, name=name, sizes=sizes) for name, sizes in SIZES.items()]
    all_cases += [replace(varying, name=f"{n} columns", n=n, k=k) for n, k in ((53, 29), (1, 80))]
    if row.dtypes[0] in FP8:
        all_cases.append(replace(varying, name="fast", fast_accum=True))
        return [replace(case, k=80 if case.k % 8 == 0 else case.k) for case in all_cases]
    if library is not None:
        all_cases.append(replace(varying, name="alpha on the device", alpha_on_device=True))
        all_cases.append(replace(varying, name="b by rows", order="r"))
    elif row.dtypes[0] is row.dtypes[3] and row.dtypes[0].name == "bf16":
        tree = evt.silu(evt.scalar("alpha") * evt.accumulator())
        all_cases.append(replace(varying, name="silu", tree=tree))
        all_cases.append(replace(varying, name="large tiles", config=LARGE))
        all_cases.append(replace(varying, name="b by rows", order="r"))
    return all_cases


def named(row: Row) -> str | None:
    """The library that a request must name to select a row; None for the rows that come first in the table."""
    return next((library for library in ("cublasLt", "cublas") if row.of(library)), None)


def cases(row: Row) -> list[GroupedCase | ListCase]:
    """The test cases of a row of the table: with groups of one matrix, and with lists of operands."""
    return [*(() if only_lists in row.rules else grouped_cases(row)), *list_cases(row)]
