"""Products with 2:4 sparse weights beside dense ones and beside torch's: y = x · Wᵀ by layer, tokens and dtype.

GPU time of recorded calls, in turns over several sets of operands, all candidates in one run: `structured.linear` as it
comes, of some shapes with the kernel that `autotune=True` finds, the same product dense by cuBLASLt (`matmul`), torch's
semi-structured linear layer and torch's dense one. TFLOP/s count the dense product's operations for all of them, so
that twice the dense figure is what half the work could give. The table says where 2:4 wins, and where it loses.
Repeat: `python tests/benchmarks/bench_sparselt.py [--quick] [--device cuda:0|host] [--json FILE]`; a minute at most.
On `host` it shows whether the calls run: NumPy unpacks the weights, which is no faster than a dense product.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from command import command
from report import Report, Target, judge, say, table
from timing import attempt, geometric_mean, gpu_race

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[int], Any]


class Shape(NamedTuple):
    """A layer of so many outputs and inputs, and how many tokens go through it."""

    dtype: str
    tokens: int
    outputs: int
    inputs: int

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.tokens} x {self.outputs} x {self.inputs}"

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.outputs * self.inputs


LAYERS = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
SHAPES = (
    *(Shape("f16", tokens, *layer) for layer in LAYERS for tokens in (16, 256, 4096)),
    *(Shape(dtype, tokens, 4096, 4096) for dtype in ("bf16", "i8", "f8e4m3") for tokens in (16, 256, 4096)),
    Shape("f32", 256, 4096, 4096),
    Shape("f32", 4096, 4096, 4096),
)
QUICK = (Shape("f16", 256, 4096, 4096), Shape("i8", 256, 4096, 4096))
SEARCHED = (*QUICK, Shape("f16", 16, 4096, 4096), Shape("f16", 4096, 4096, 4096))  # a search takes seconds
ON_HOST = (Shape("f16", 16, 64, 128), Shape("i8", 16, 64, 128))
SETS_BYTES, MAX_SETS = 100 << 20, 8  # of operands, so that a turn through them leaves nothing in the L2 cache
ROUNDS, REPEATS = 7, 16
OURS, TUNED, DENSE = "2:4", "2:4 searched", "dense"
TORCH, TORCH_DENSE = "torch 2:4", "torch dense"
TARGETS = (Target("the least ratio to torch's 2:4", "least", 1.0, at_least=True),)


def operands(torch: Any, shape: Shape, seed: int) -> tuple[Any, Any]:
    """x and a pruned W, as torch's tensors."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kinds = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i8": "int8", "f8e4m3": "float8_e4m3fn"}
    kind = getattr(torch, kinds[shape.dtype])

    def drawn(*extents: int) -> Any:
        if shape.dtype == "i8":
            return torch.randint(-9, 10, extents, device="cuda", dtype=kind, generator=generator)
        return torch.randn(extents, device="cuda", generator=generator).to(kind)

    return drawn(shape.tokens, shape.inputs), dp.structured.prune(drawn(shape.outputs, shape.inputs))


def sides(torch: Any, shape: Shape, failed: dict[str, str]) -> tuple[dict[str, Run], int]:
    """All ways to carry out a product, over several sets of operands; each has run once."""
    item = dp.Dtype.of(shape.dtype).itemsize
    once = item * shape.inputs * (shape.tokens + shape.outputs)
    count = min(MAX_SETS, 1 + SETS_BYTES // once)
    sets = [operands(torch, shape, seed) for seed in range(count)]
    packed = [dp.structured.compress(w) for _, w in sets]
    chosen = {"compute": "tf32"} if shape.dtype == "f32" else {}
    linear, matmul = dp.structured.linear, dp.matmul
    made: dict[str, Run] = {
        OURS: lambda i: linear(sets[i][0], packed[i], **chosen),
        DENSE: lambda i: matmul(sets[i][0], sets[i][1].T, **chosen),
    }
    if shape in SEARCHED:
        made[TUNED] = lambda i: linear(sets[i][0], packed[i], autotune=True, **chosen)
    if shape.dtype in ("f16", "bf16", "f32"):
        torch.backends.cuda.matmul.allow_tf32 = True
        made[TORCH_DENSE] = lambda i: torch.nn.functional.linear(*sets[i])
    if shape.dtype in ("f16", "bf16"):
        theirs = attempt(TORCH, lambda: [torch.sparse.to_sparse_semi_structured(w) for _, w in sets], failed)
        if theirs is not None:
            made[TORCH] = lambda i: torch.nn.functional.linear(sets[i][0], theirs[i])
    if shape.dtype == "i8":
        made[TORCH_DENSE] = lambda i: torch._int_mm(sets[i][0], sets[i][1].T)
    ran = {name: attempt(name, lambda run=run: [run(i) for i in range(count)], failed) for name, run in made.items()}
    torch.cuda.synchronize()
    return {name: run for name, run in made.items() if ran[name] is not None}, count


def on_gpu(quick: bool, report: Report) -> dict[str, float]:
    """A line for each product; where 2:4 wins and loses."""
    import torch

    found: dict[str, dict[str, float]] = {}
    missing: dict[str, str] = {}
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one takes no recording
        for shape in QUICK if quick else SHAPES:
            failed: dict[str, str] = {}
            runs, count = sides(torch, shape, failed)
            missing |= {f"{name}, {shape.name}": why for name, why in failed.items()}
            if OURS not in runs:
                continue
            took, _ = gpu_race(runs, sets=count, repeats=2 if quick else REPEATS, rounds=2 if quick else ROUNDS)
            found[shape.name] = {name: shape.operations / statistics.median(took[name]) / 1e12 for name in took}
            report.put("products", found)
    names = (OURS, TUNED, DENSE, TORCH, TORCH_DENSE)
    heads = ("tokens x outputs x inputs", *names, "2:4 to dense", "to torch's 2:4")
    table(heads, [line_of(name, rates) for name, rates in found.items()])
    say("TFLOP/s, as if all were dense")
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    to_torch = [rates[OURS] / rates[TORCH] for rates in found.values() if TORCH in rates]
    to_dense = [rates[OURS] / rates[DENSE] for rates in found.values() if DENSE in rates]
    figures = {"least": min(to_torch)} if to_torch else {}
    means = {"to torch": geometric_mean(to_torch), "to dense": geometric_mean(to_dense)}
    report.put("figures", figures | means)
    say(f"geometric means: {means['to dense']:.2f} times dense, {means['to torch']:.2f} times torch's 2:4")
    return figures


def line_of(name: str, rates: dict[str, float]) -> tuple[str, ...]:
    """The cells of a product."""
    cells = [f"{rates[each]:.0f}" if each in rates else "-" for each in (OURS, TUNED, DENSE, TORCH, TORCH_DENSE)]
    ratios = [f"{rates[OURS] / rates[each]:.2f}" if each in rates else "-" for each in (DENSE, TORCH)]
    return (name, *cells, *ratios)


def on_host(dev: dp.Device, report: Report) -> dict[str, float]:
    """Whether it runs, and in which time."""
    rng = np.random.default_rng(0)
    found = {}
    for shape in ON_HOST:
        dtype = dp.Dtype.of(shape.dtype).numpy
        x, w = (rng.integers(-9, 10, (n, shape.inputs)).astype(dtype) for n in (shape.tokens, shape.outputs))
        packed = dp.structured.compress(dp.structured.prune(dev.array(w)))
        given = dev.array(x)
        began = time.perf_counter()
        found[shape.name] = {"finite": float(np.isfinite(dp.structured.linear(given, packed).numpy()).all())}
        say(f"{shape.name}: {(time.perf_counter() - began) * 1e6:.0f} us")
    report.put("products", found)
    return {}


def measure(dev: dp.Device, quick: bool, report: Report) -> None:
    """The products, and the targets."""
    figures = on_host(dev, report) if dev.is_host else on_gpu(quick, report)
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(measure, __doc__)
