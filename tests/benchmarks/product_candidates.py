"""One product of bench_matmul as this project and as torch run it: operand sets, calls, and the check of results.

The operands are torch's, random and never zero, and this project works on the same memory through DLPack. A candidate
is a function of the operand set's number that enqueues one call on torch's current stream and returns D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from timing import attempt
from torch.nn import functional

import dispatch as dp

if TYPE_CHECKING:
    from llm_products import Product

TUNED, HEURISTIC = "ours, autotuned", "ours, heuristic"
PRIVATE = "torch._addmm_activation"  # fuses bias and GELU; private, and part of the ratio all the same
ROTATE_BYTES = 160 << 20  # well above the L2 cache (50 MB on an H100, 60 on an H200)
SAMPLE = 96  # rows and columns of D that are compared
# Of |D - reference| / |reference|. Rounding D to bf16 alone makes 2e-3; fast accumulation keeps 14 bits of the sums.
TOLERANCE = {"bf16": 1e-2, "fp8-exact": 1e-2, "fp8": 3e-2}
FP8 = torch.float8_e4m3fn
Run = Callable[[int], Any]


class Set(NamedTuple):
    """The operands of one call, as torch takes them: A (m, k), B (k, n), bias (n,), D (m, n), and the fp8 scales."""

    a: Any
    b: Any
    bias: Any
    out: Any
    scale_a: Any
    scale_b: Any


def operand_sets(product: Product) -> list[Set]:
    """So many sets that a turn through them leaves nothing of itself in the L2 cache; at least two."""
    count = min(max(2, math.ceil(ROTATE_BYTES / product.nbytes)), 64)
    return [_operands(product) for _ in range(count)]


def _operands(product: Product) -> Set:
    m, n, k = product.m, product.n, product.k
    if product.form == "forward":  # W is stored (out, in)
        a, b = _random(product, m, k), _random(product, n, k).t()
    elif product.form == "dgrad":
        a, b = _random(product, m, k), _random(product, k, n)
    else:
        a, b = _random(product, k, m).t(), _random(product, k, n)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty((m, n), device="cuda", dtype=torch.bfloat16)
    # With these D is about normal, where GELU bends and a bias counts.
    scale_a, scale_b = (torch.full((1,), k**-0.25, device="cuda", dtype=torch.float32) for _ in range(2))
    return Set(a, b, bias, out, scale_a, scale_b)


def _random(product: Product, rows: int, columns: int) -> Any:
    values = torch.randn((rows, columns), device="cuda", dtype=torch.bfloat16)
    return values.mul_(product.k**-0.25) if product.kind == "bf16" else values.to(FP8)


def view(tensor: Any) -> dp.Tensor:
    """This project's tensor over the memory of one of torch's."""
    try:
        return dp.from_dlpack(tensor)
    except (RuntimeError, BufferError, TypeError, dp.errors.DispatchError):
        if tensor.dtype is not FP8:
            raise
    # This torch gives no fp8 through DLPack: pass the bytes, and say here what they are.
    raw = dp.from_dlpack(tensor.view(torch.uint8))
    layout = raw.device.layout(dp.Dtype.of("f8e4m3"), raw.shape, raw.layout.strides, raw.ptr)
    return dp.Tensor(raw.storage, raw.ptr, layout)


def our_runs(product: Product, sets: list[Set], missing: dict[str, str]) -> dict[str, Run]:
    """Bound calls over every set: with the algorithm that autotune measures, and with the heuristic's first."""
    found = {}
    for name, autotune in ((TUNED, True), (HEURISTIC, False)):
        calls = attempt(name, lambda autotune=autotune: [_bound(product, one, autotune) for one in sets], missing)
        if calls is not None:
            found[name] = lambda i, calls=calls: (calls[i](), sets[i].out)[1]
    return found


def _bound(product: Product, one: Set, autotune: bool) -> dp.BoundCall:
    fields: dict[str, Any] = {"out": view(one.out), "epilogue": dp.Epilogue[product.epilogue], "autotune": autotune}
    fields["library"] = "cublasLt"  # CUTLASS's kernels are bench_cutlass's
    if product.epilogue != "NONE":
        fields["bias"] = view(one.bias)
    if product.kind != "bf16":
        fields["scales"] = dp.Scales(a=view(one.scale_a), b=view(one.scale_b))
        fields["fast_accum"] = product.kind == "fp8"
    return dp.prepare(dp.MatmulRequest(a=view(one.a), b=view(one.b), **fields))


def torch_runs(product: Product, sets: list[Set]) -> dict[str, Run]:
    """The ways that torch has for the product, and the private one that fuses GELU."""
    gelu = product.epilogue == "GELU_BIAS"
    found: dict[str, Run] = {}
    if product.kind != "bf16":
        found["torch._scaled_mm" + (" + F.gelu" if gelu else "")] = lambda i: _scaled(product, sets[i], gelu)
    elif product.epilogue == "NONE":
        # F.linear without a bias is this very call: timing it again would only make the best of two of one thing.
        found["torch.mm(out=)"] = lambda i: torch.mm(sets[i].a, sets[i].b, out=sets[i].out)
    elif gelu:
        found["F.linear + F.gelu"] = lambda i: functional.gelu(_linear(sets[i]), approximate="tanh")
        found[PRIVATE] = lambda i: torch._addmm_activation(sets[i].bias, sets[i].a, sets[i].b, use_gelu=True)
    else:
        found["F.linear"] = lambda i: _linear(sets[i])
        found["torch.addmm(out=)"] = lambda i: torch.addmm(sets[i].bias, sets[i].a, sets[i].b, out=sets[i].out)
    return found


def _linear(one: Set) -> Any:
    return functional.linear(one.a, one.b.t(), one.bias)


def _scaled(product: Product, one: Set, gelu: bool) -> Any:
    bias = None if product.epilogue == "NONE" else one.bias
    fast = product.kind == "fp8"
    factors = {"scale_a": one.scale_a, "scale_b": one.scale_b}
    out = torch._scaled_mm(one.a, one.b, **factors, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return functional.gelu(out, approximate="tanh") if gelu else out


def verified(product: Product, sets: list[Set], runs: dict[str, Run], missing: dict[str, str]) -> dict[str, Run]:
    """Those whose D is finite everywhere and right in a sample, on the first and on the last set."""
    right = {}
    for name, run in runs.items():
        errors = attempt(name, lambda run=run: [_error(product, sets[i], run, i) for i in (0, len(sets) - 1)], missing)
        if errors is None:
            continue
        if max(errors) < TOLERANCE[product.kind]:
            right[name] = run
        else:
            missing[name] = f"wrong result: relative error {max(errors):.1e}"
    return right


def _error(product: Product, one: Set, run: Run, number: int) -> float:
    """|D - reference| / |reference| in float64 over sampled rows and columns; infinite where D is not finite."""
    one.out.fill_(float("nan"))  # what a call leaves unwritten shows
    out = run(number)
    if out.shape != (product.m, product.n) or not bool(torch.isfinite(out).all()):
        return math.inf
    rows = torch.randint(product.m, (SAMPLE,), device="cuda")
    columns = torch.randint(product.n, (SAMPLE,), device="cuda")
    want = _picked(one.a, rows) @ _picked(one.b.t(), columns).t()
    if product.kind != "bf16":
        want = want * (one.scale_a * one.scale_b).double()
    if product.epilogue != "NONE":
        want = want + one.bias[columns].double()
    if product.epilogue == "GELU_BIAS":
        want = functional.gelu(want, approximate="tanh")
    return float((out[rows][:, columns].double() - want).norm() / want.norm())


def _picked(matrix: Any, rows: Any) -> Any:
    """Some rows in float64; fp8 is picked as bytes, since torch indexes no fp8."""
    if matrix.dtype is not FP8:
        return matrix[rows].double()
    return matrix.view(torch.uint8)[rows].contiguous().view(FP8).double()
