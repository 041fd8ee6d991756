"""Host time of calls with torch's, CuPy's and JAX's tensors: the way in, the way out, a call beside the library's own.

Small products in bf16 (f32 on the host), plain and with bias and GELU. `in` is what a repeated call reads of one
operand, `out` what it does for one result; a call has both, and torch's tensors come back. A call that is new makes an
operand a tensor of ours, and a result as well; so does one over several libraries' operands, and each over JAX's. Each
candidate is verified against NumPy, then called 300 times off the clock; then bursts of all alternate, and the median
of the bursts counts.
Repeat: `python tests/benchmarks/bench_frameworks.py [--quick] [--device cuda:0|host] [--json FILE]`; 20 s.
On `host` it shows whether they run, not how fast.
"""

from __future__ import annotations

import os
import timeit
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command
from report import Report, Target, judge, say, table
from timing import Candidate, attempt, host_race, summary

import dispatch as dp
from dispatch.device.frameworks.frameworks import framework_of

if TYPE_CHECKING:
    from collections.abc import Callable

N = 64
WARM = 300  # calls of each candidate before the clock
TOLERANCE = 1e-2  # of |result - reference| / |reference|: bf16 rounding is about 3e-3
IN, OUT = "one tensor in", "one tensor out"
NEW_IN, NEW_OUT = "one tensor in, new call", "one tensor out, new call"
MM, TORCH_MM = "matmul, torch's tensors", "torch.mm"
GELU, TORCH_GELU = "linear + GELU, torch's tensors", "F.linear + F.gelu"
FUSED = "torch._addmm_activation"
CUPY, CUPY_S = "matmul, CuPy's arrays", "cupy.matmul"
JAX_IN, JAX_OUT = "one array of JAX in", "one array of JAX out"
JAX, JAX_S, JAX_JIT = "matmul, JAX's arrays", "jax.numpy.matmul", "jax.jit(jax.numpy.matmul)"
TARGETS = (
    Target("in, a tensor", IN, 1.0, "us"),
    Target("out, a tensor", OUT, 2.5, "us"),
    Target("linear + GELU", GELU, 0.5, "us", TORCH_GELU),
    Target("the same beside torch's private fused call", GELU, 0.8, "us", FUSED),
    Target("a product of CuPy's arrays", CUPY, 0.5, "us", CUPY_S),
)


def candidates_of(device: dp.Device) -> tuple[list[Candidate], dict[str, Any], list[Candidate]]:
    """The calls, and what each must give; and the parts of a call, which give nothing that could be compared."""
    import torch
    from torch.nn import functional

    rng = np.random.default_rng(0)
    place, dtype = ("cpu", torch.float32) if device.is_host else (f"cuda:{device.ordinal}", torch.bfloat16)
    x, w, bias = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(place, dtype)
        for shape in ((N, N), (N, N), N)
    )
    framework: Any = framework_of(torch.Tensor)
    short = "bf16" if dtype is torch.bfloat16 else "f32"
    product = x.double() @ w.double().t()
    fused = functional.gelu(product + bias.double(), approximate="tanh")

    def gelu() -> Any:
        return functional.gelu(functional.linear(x, w, bias), approximate="tanh")

    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        NEW_IN: (lambda: framework.tensor("x", x), x.double()),
        MM: (lambda: dp.matmul(x, w.t()), product),
        TORCH_MM: (lambda: torch.mm(x, w.t()), product),
        GELU: (lambda: dp.matmul(x, w.t(), bias=bias, epilogue=dp.Epilogue.GELU_BIAS), fused),
        TORCH_GELU: (gelu, fused),
        FUSED: (lambda: torch._addmm_activation(bias, x, w.t(), use_gelu=True), fused),
    }
    found = [timed(name, call) for name, (call, _) in calls.items()]
    make, read = framework.maker(device, (N, N), (N, 1), dp.Dtype.of(short)), reader(framework.code)
    parts = [
        timed(IN, lambda: read(x)),
        timed(OUT, lambda: make().data_ptr()),
        timed(NEW_OUT, lambda: framework.allocate(device, (N, N), (N, 1), dp.Dtype.of(short))),
    ]
    return found, {name: want.cpu().numpy() for name, (_, want) in calls.items()}, parts


def candidates_of_cupy() -> tuple[list[Candidate], dict[str, Any]]:
    """A product of CuPy's arrays, by us and by it, and what it must give."""
    import cupy

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    x, w = cupy.asarray(a), cupy.asarray(b)
    calls: dict[str, Callable[[], Any]] = {CUPY: lambda: dp.matmul(x, w), CUPY_S: lambda: cupy.matmul(x, w)}
    wants = dict.fromkeys(calls, a.astype(np.float64) @ b)
    return [Candidate(name, bursts_of(call), lambda call=call: call().get()) for name, call in calls.items()], wants


def candidates_of_jax(device: dp.Device) -> tuple[list[Candidate], dict[str, Any], list[Candidate]]:
    """The same of JAX's arrays, f32, with both of JAX's ways; and what one costs in and out."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory for the others
    import jax

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    place = jax.devices("cpu" if device.is_host else "cuda")[0]
    x, w = jax.device_put(a, place), jax.device_put(b, place)
    framework: Any = framework_of(type(x))
    compiled, ours = jax.jit(jax.numpy.matmul), device.array(a)
    calls: dict[str, Callable[[], Any]] = {
        JAX: lambda: dp.matmul(x, w),
        JAX_S: lambda: jax.numpy.matmul(x, w),
        JAX_JIT: lambda: compiled(x, w),
        JAX_IN: lambda: framework.tensor("x", x),
        JAX_OUT: lambda: framework.wrapped(ours),
    }
    found = [Candidate(name, bursts_of(call), lambda call=call: np.asarray(call())) for name, call in calls.items()]
    return found[:3], dict.fromkeys((JAX, JAX_S, JAX_JIT), a.astype(np.float64) @ b), found[3:]


def reader(code: Any) -> Callable[[Any], Any]:
    """What a repeated call does for one operand that it is given (core/framework_call_cache.py)."""
    scope = {"kinds": code.kinds, **code.scope}
    checks = f"type(x) not in kinds or ({code.watching} and {code.watched.format(x='x')})"
    lines = [
        "def read(x):",
        f"    at = {code.pointer.format(x='x')}",
        f"    key = ({code.layout.format(x='x')}, at & 255)",
        f"    return None if {checks} else key",
    ]
    exec("\n".join(lines), scope)
    return scope["read"]


def timed(name: str, call: Callable[[], Any]) -> Candidate:
    """A candidate that calls, whose result is an array."""

    def result() -> Any:
        last = call()
        return last.numpy().astype(np.float64) if isinstance(last, dp.Tensor) else last.double().cpu().numpy()

    return Candidate(name, bursts_of(call), result)


def bursts_of(call: Callable[[], Any]) -> Callable[[int], float]:
    return timeit.Timer("call()", globals={"call": call}).timeit


def verified(found: list[Candidate], wants: dict[str, Any], missing: dict[str, str]) -> list[Candidate]:
    """Those that compute what they should: a call that does nothing must not win."""
    good = []
    for candidate in found:
        want = wants.get(candidate.name)
        result = attempt(candidate.name, candidate.result, missing)
        if result is None:
            continue
        error = 0.0 if want is None else np.linalg.norm(result - want) / np.linalg.norm(want)
        if error < TOLERANCE:  # false for NaN
            good.append(candidate)
        else:
            missing[candidate.name] = f"wrong result: relative error {error:.1e}"
    return good


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    missing: dict[str, str] = {}
    bursts, calls = (3, 5) if device.is_host else (20, 200) if quick else (100, 200)
    found, wants, parts = attempt("torch", lambda: candidates_of(device), missing) or ([], {}, [])
    if not device.is_host:
        more, right = attempt("CuPy", candidates_of_cupy, missing) or ([], {})
        found, wants = found + more, wants | right
    more, right, others = attempt("JAX", lambda: candidates_of_jax(device), missing) or ([], {}, [])
    found, wants, parts = found + more, wants | right, parts + others
    found = verified(found, wants, missing) + parts
    for candidate in found:
        candidate.burst(5 if device.is_host else WARM)
        device.synchronize()
    seconds, failed = host_race(found, device.synchronize, bursts=bursts, calls=calls)
    missing |= failed
    figures = {name: summary(taken) for name, taken in seconds.items()}
    say(f"\nhost time per call in us, {bursts} bursts of {calls}")
    keys = ("median", "p25", "p75", "best")
    table(("call", *keys), [(name, *(f"{figure[key]:.2f}" for key in keys)) for name, figure in figures.items()])
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("frameworks", {"count": bursts, "calls": calls, "us": figures, "missing": missing})
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, {name: figure["median"] for name, figure in figures.items()}, report)


if __name__ == "__main__":
    command(main, __doc__)
