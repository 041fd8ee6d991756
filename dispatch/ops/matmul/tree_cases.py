"""The test cases of CUTLASS's rows of matmul, random epilogue trees, and the bounds of their results.

`cases.py` uses `row_cases(row)`; tests also run `tree_cases()` and `quantized_cases()`. A case names its kernel's
configuration, so that all extents of a row share a few kernels. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import BF16, F8E4M3, F32, F64, FP8, I8, Dtype, Epilogue, member
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.bounds import SUMS, errors_of, product_error, stored
from dispatch.libraries.cutlass.config import Config
from dispatch.libraries.cutlass.matrices import poisoned_matrix, poisoned_vector, random_matrix
from dispatch.ops.matmul.reference import reference
from dispatch.ops.matmul.request import MatmulRequest
from dispatch.testing.memory import GuardedBuffer, Mismatch, poison
from dispatch.testing.roundoff import by_numpy

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Compute
    from dispatch.libraries.cutlass.evt import Node

__all__ = [
    "Case",
    "Check",
    "quantized_cases",
    "random_tree",
    "row_cases",
    "tree_cases",
]

TREES = 48
GIVEN = (9, 14, 17, 24, 26, 37, 40)  # trees whose outputs are given, not allocated; they store and reduce over all axes
HOPPER = 90
EXTENTS = {
    "plain": (128, 128, 128),
    "large": (640, 576, 512),
    "awkward": (37, 53, 29),
    "one row": (1, 264, 72),
    "one column": (129, 1, 40),
    "one": (1, 1, 1),
    "deep": (16, 24, 2056),
}


@dataclass(frozen=True)
class Case:
    """Everything that is chosen about one request, except the numbers in its operands."""

    name: str
    dtypes: tuple[Dtype, Dtype, Dtype, Dtype]
    extents: tuple[int, int, int]
    config: Config | None
    orders: str = "rcrr"  # of a, b, c, d: r for dense rows, c for dense columns
    batch: tuple[int, ...] = ()
    c: bool = False
    tree: Node | None = None
    compute: Compute | None = None
    fast_accum: bool = False
    step: int = 16  # bytes that lines are multiples of; if less than 16, they are not multiples of 16
    has_out: bool = False  # whether the tree's outputs are given, too

    @property
    def id(self) -> str:
        return f"{'·'.join(map(str, self.dtypes))}-{self.name}"

    def request(self, device: Device, rng: np.random.Generator) -> MatmulRequest:
        """The case with fresh operands."""
        return self._request(device, rng)[0]

    def _request(self, device: Device, rng: np.random.Generator) -> tuple[MatmulRequest, tuple[GuardedBuffer, ...]]:
        m, n, k = self.extents
        a, b, c, d = self.dtypes
        operands: dict[str, Any] = {}
        alpha, beta = (1.0, 1.0) if a is I8 else (0.75, -0.5)
        if self.tree is not None:
            shapes = {"row": (n,), "col": (m,), "load": (*self.batch, m, n)}
            for name, kind in evt_kinds(self.tree).items():
                if kind in shapes:
                    shape, dtype = shapes[kind], (F32 if len(name) % 2 else BF16)
                    operands[name] = random_matrix(device, rng, shape, dtype, "r")
                elif kind == "scalar":
                    value = float(np.float32(rng.uniform(0.25, 1.0)))
                    operands[name] = value if len(name) % 2 else device.array([value], "f32")
        written = {"out": poisoned_matrix(device, (*self.batch, m, n), d, self.orders[3], self.step)}
        if self.has_out and self.tree is not None:
            written |= self._written(device, self.tree, d)
            operands |= {name: memory.view for name, memory in written.items() if name != "out"}
        request = MatmulRequest(
            random_matrix(device, rng, (*self.batch, m, k), a, self.orders[0], self.step),
            random_matrix(device, rng, (*self.batch, k, n), b, self.orders[1], self.step),
            c=random_matrix(device, rng, (*self.batch, m, n), c, self.orders[2], self.step) if self.c else None,
            out=written["out"].view,
            epilogue=Epilogue.NONE if self.tree is None else self.tree,
            operands=operands,
            alpha=alpha if self.tree is None else 1.0,  # random trees read neither alpha nor beta
            beta=beta if self.c else None,
            compute=self.compute,
            fast_accum=self.fast_accum,
            config=self.config,
            library="cutlass",
        )
        return request, tuple(written.values())

    def _written(self, device: Device, tree: Node, d: Dtype) -> dict[str, GuardedBuffer]:
        """Poisoned memory for the outputs of a tree other than D."""
        (m, n, _), memories = self.extents, {}
        extents = {"m": (n,), "n": (m,), "mn": ()}
        for node in evt.walk(tree):
            if isinstance(node, evt.Store):
                shape = (*self.batch, m, n)
                memories[node.name] = poisoned_matrix(device, shape, node.dtype or d, self.orders[3], self.step)
            elif isinstance(node, evt.Reduce):
                memories[node.name] = poisoned_vector(device, (*self.batch, *extents[node.over]))
        return memories

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The check of a request with fresh operands."""
        return Check(self.id, *self._request(device, rng))


def evt_kinds(tree: Node) -> dict[str, str]:
    """The operands of a tree and their kinds, without alpha and beta."""
    from dispatch.libraries.cutlass.visitors import operands_of

    return {name: kind for name, kind in operands_of(tree).items() if name not in ("alpha", "beta")}


class Check:
    """A request, its float64 reference, the bound of each output, and the guarded memory of its outputs."""

    def __init__(self, name: str, request: MatmulRequest, written: tuple[GuardedBuffer, ...] = ()) -> None:
        self.name, self.request, self.written = name, request, written
        self.expected = reference(request)
        self.allowed = bounds(request, self.expected)

    def renew(self, result: Any = None) -> None:
        """Poison all outputs, the given ones and the allocated ones of `result`."""
        for memory in self.written:
            memory.renew()
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        views = [memory.view for memory in self.written]
        for tensor in results:
            if tensor is not self.request.out and not any(tensor is view for view in views):
                tensor.copy_from(poison(tensor.dtype, tensor.shape))

    def verify(self, result: Any) -> None:
        """Raise Mismatch if an output is not within its bound, or memory around one was written."""
        if count := sum(memory.disturbed() for memory in self.written):
            raise Mismatch(f"{self.name}: {count} bytes beside the outputs were written")
        outputs = result if isinstance(result, tuple) else (result,)
        for name, tensor in zip(("out", *self.request.form.tree_outputs), outputs, strict=True):
            got, expected, allowed = tensor.numpy().astype(np.float64), self.expected[name], self.allowed[name]
            with np.errstate(invalid="ignore"):
                wrong = ~(np.abs(got - expected) <= allowed)
            if wrong.any():
                worst = np.unravel_index(np.argmax(np.where(wrong, np.abs(got - expected) - allowed, -1)), got.shape)
                raise Mismatch(
                    f"{self.name}: {name} is wrong in {wrong.sum()} of {got.size} places; at"
                    f" {tuple(map(int, worst))} it is {got[worst]}, expected {expected[worst]} within"
                    f" {np.broadcast_to(allowed, got.shape)[worst]:.3g} ({self.request.describe()})"
                )


def bounds(request: MatmulRequest, expected: dict[str, Array]) -> dict[str, Array]:
    """The allowed error of each output.

    The error of the product (`product_error`) is propagated through the tree; then each output is rounded to its dtype,
    or to a whole number.
    """
    form = request.form
    a, b = (np.asarray(t).astype(np.float64) for t in (request.a, request.b))
    error = product_error(a, b, request.a.dtype, member(request.compute), on_host=by_numpy(request.a.device))
    operands = {name: np.asarray(x) for name, x in form.operand_values.items() if name not in form.tree_outputs}
    operands = {name: x.astype(np.float64) for name, x in operands.items()}
    source = None if form.c is None else np.asarray(form.c)
    errors = errors_of(form.tree, a @ b, error, operands, source, SUMS[request.a.dtype is F64])
    dtypes = {"out": request.d_dtype, **{name: output.dtype for name, output in form.tree_outputs.items()}}
    return {name: stored(errors[name], expected[name], dtype) for name, dtype in dtypes.items()}


# -- the cases of a row --------------------------------------------------------------------------------------------
FAVORITES = (
    Config((128, 128), (2, 1)),
    Config((64, 128), (1, 1), "pingpong"),
    Config((128, 64), (1, 2)),
    Config((128, 128), (1, 1), "cooperative", "stream_k"),
    Config((64, 64), (1, 1), "pingpong"),
)


def row_cases(row: Row) -> list[Case]:
    """Several extents with one kernel, a batch, fast accumulation where offered, and all orders and C for bf16."""
    a, b, c, d = row.dtypes
    dtypes = (a, b, c, d)
    if row.function == "DefaultGemmUniversal" or row.library == "numpy-multistage":
        return _multistage(dtypes, row.compute)
    if row.min_arch > HOPPER or row.library == "numpy-blackwell":
        return _blackwell(dtypes)
    # Rows of different dtypes use different configurations.
    config = FAVORITES[(a.cuda * 3 + b.cuda * 5 + d.cuda) % len(FAVORITES)]
    all_cases = [Case(name, dtypes, extents, config, compute=row.compute) for name, extents in EXTENTS.items()]
    all_cases.append(Case("batch", dtypes, (72, 48, 136), config, batch=(3,), compute=row.compute))
    if a in FP8 and d is BF16:
        all_cases.append(Case("fast", dtypes, (128, 128, 128), config, fast_accum=True))
    if c is not d or dtypes == (BF16,) * 4:
        all_cases.append(Case("c", dtypes, (96, 136, 72), config, c=True, compute=row.compute))
    if dtypes == (BF16,) * 4:
        all_cases += [
            Case(f"order {orders}", dtypes, (136, 72, 56), config, orders=orders)
            for orders in ("rrrr", "ccrr", "crrr", "rcrc")
        ]
        all_cases.append(Case("order rccc with c", dtypes, (136, 72, 56), config, orders="rccc", c=True))
    return all_cases


def _blackwell(dtypes: tuple[Dtype, Dtype, Dtype, Dtype]) -> list[Case]:
    """Several extents with one kernel, and C with another; the tile is fixed."""
    all_cases = [Case(name, dtypes, extents, None) for name, extents in EXTENTS.items()]
    all_cases.append(Case("batch", dtypes, (72, 48, 136), None, batch=(3,)))
    return [*all_cases, Case("c", dtypes, (96, 136, 72), None, c=True)]


def _multistage(dtypes: tuple[Dtype, Dtype, Dtype, Dtype], compute: Compute | None) -> list[Case]:
    """Lines that tensor maps cannot describe: their length is a multiple of 4 bytes, not of 16."""
    even = max(32 // dtypes[0].bits, 1)
    k = 30 // even * even - (1 if even == 1 else 0)
    all_cases = [
        Case(name, dtypes, extents, None, orders, batch, c, None, compute, step=max(4, dtypes[0].bits // 8))
        for name, extents, orders, batch, c in (
            ("awkward", (37, 53, k), "rcrr", (), False),
            ("awkward c", (37, 53, k), "rcrr", (), True),
            ("large", (900, 1300, 268), "rcrr", (), False),
            ("batch", (72, 50, 40), "rcrr", (3,), True),
            ("one row", (1, 264, 72), "rcrr", (), False),
        )
    ]
    if dtypes in ((BF16,) * 4, (F64,) * 4):
        all_cases += [
            Case(
                f"order {orders}", dtypes, (36, 52, 40), None, orders, compute=compute, step=max(4, dtypes[0].bits // 8)
            )
            for orders in ("rrrr", "ccrr", "crrr")
        ]
    return all_cases


# -- random trees --------------------------------------------------------------------------------------------------
def random_tree(rng: np.random.Generator, depth: int = 4) -> Node:
    """A random tree of `depth` nodes over the accumulator, with all kinds of nodes; each operand has its own name."""
    names: dict[str, int] = {}

    def name(kind: str) -> str:
        names[kind] = names.get(kind, 0) + 1
        return f"{kind}{'_' * (names[kind] % 2)}{names[kind]}"

    def leaf() -> Node:
        kind = rng.choice(["row", "col", "load", "scalar", "constant"])
        if kind == "constant":
            return evt.constant(float(np.float32(rng.uniform(-2, 2))))
        return {"row": evt.row, "col": evt.col, "load": evt.load, "scalar": evt.scalar}[str(kind)](name(str(kind)))

    def grow(x: Node, left: int) -> Node:
        if left == 0:
            return x
        kind = rng.choice(["unary", "binary", "clamp", "fma", "store", "reduce", "shared"], p=PROBABILITIES)
        if kind == "unary":
            node: Node = evt.Unary(str(rng.choice(evt.UNARY)), x)
        elif kind == "binary":
            pair = (x, leaf()) if rng.random() < 0.5 else (leaf(), x)
            node = evt.Binary(str(rng.choice(evt.BINARY)), *pair)
        elif kind == "clamp":
            node = evt.clamp(x, -1.5, 2.0)
        elif kind == "fma":
            node = evt.fma(x, leaf(), leaf())
        elif kind == "shared":  # a node that is read twice
            node = evt.sigmoid(x) * x
        elif kind == "store":
            node = evt.store(x, name("store"), BF16)
        else:
            function, over = str(rng.choice(evt.REDUCTIONS)), str(rng.choice(["m", "n", "mn"]))
            node = evt.reduce(x, name(f"{function}_{over}"), function, over=over)
        return grow(node, left - 1)

    return grow(evt.constant(0.125) * evt.accumulator(), depth)


PROBABILITIES = (0.2, 0.3, 0.05, 0.1, 0.1, 0.15, 0.1)


def tree_cases() -> list[Case]:
    """Random trees, the same in every process, with extents that are not multiples of a tile."""
    all_cases, dtypes = [], (BF16, BF16, BF16, BF16)
    for number in range(TREES):
        tree = random_tree(np.random.default_rng(number), 2 + number % 5)
        config = FAVORITES[1] if number % 2 else FAVORITES[0]
        all_cases.append(Case(f"tree {number}", dtypes, (200, 152, 72), config, tree=tree))
        if number in GIVEN:
            all_cases.append(Case(f"tree {number} given", dtypes, (77, 53, 29), config, tree=tree, has_out=True))
    return all_cases


# One scale for all, for each column and for each row, with the amax that goes with it.
QUANTIZED = {
    "by one scale": (evt.quantize(evt.relu(evt.accumulator()), evt.scalar("scale"), "top"), F8E4M3),
    "by columns": (evt.quantize(evt.accumulator() + evt.row("bias"), evt.row("scale"), "top"), F8E4M3),
    "by rows": (evt.quantize(evt.silu(evt.accumulator()), evt.col("scale"), "top"), I8),
}


def quantized_cases() -> list[Case]:
    """Trees whose D is fp8 or i8, with the amax that the next scale is computed from."""
    return [
        Case(f"quantized {name}", (BF16, BF16, BF16, d), (200, 144, 72), FAVORITES[1], tree=tree)
        for name, (tree, d) in QUANTIZED.items()
    ]
