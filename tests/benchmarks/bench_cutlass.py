"""CUTLASS kernels compiled by NVRTC against torch: products, in groups and with an epilogue tree, and convolution.

GPU time alone counts: each candidate's calls, in turns over operand sets larger than the L2 cache, are one CUDA graph,
replayed between events, in turns with the others; medians of the rounds. Ours is what a user gets: the kernel that
`autotune=True` picks (for groups and convolutions, which have no autotune, the one that is chosen unasked), never the
best in hindsight. Then what a warm call costs the host, and what it takes to have a kernel: compiled, read from disk,
and its parameters learned. Every result is checked first.
Repeat: `python tests/benchmarks/bench_cutlass.py [--quick] [--device cuda:0|host] [--json FILE]`; under a minute where
the kernels are in the cache. On `host` a small product runs in NumPy: whether it runs, not how fast.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
from command import command
from conv_candidates import SHAPES, convolution
from report import Report, Target, judge, say, table
from timing import attempt, gpu_race

import dispatch as dp
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import LARGE
from dispatch.libraries.cutlass.emit.sm90_gemm import emit
from dispatch.libraries.nvrtc.kernel_cache import folder
from dispatch.ops.grouped_matmul.config import CONFIGS as GROUPED_CONFIGS
from dispatch.ops.grouped_matmul.config import choose as choose_grouped
from dispatch.ops.matmul import MatmulRequest
from dispatch.ops.matmul.reference import reference

L2_BYTES = 120 << 20
TUNED, UNTUNED = "ours, autotuned", "ours, untuned"
ROUNDS = {True: 5, False: 15}
HOST_BURSTS = 200  # 0.2 s: for some tenths of a second the same launches have taken 1.6 or 2.5 us
MULTIPROCESSORS = 132  # of an H100 or H200
TARGETS = (
    Target("bf16 4096 / torch.mm", "bf16 4096", 0.97, at_least=True),
    Target("bf16 8192 / torch.mm", "bf16 8192", 0.97, at_least=True),
    Target("fp8 / torch._scaled_mm", "fp8 4096", 0.95, at_least=True),
    Target("tree / torch eager", "tree 16384x4096x512", 1.3, at_least=True),
    Target("tree / torch.compile, the better mode", "compiled tree 16384x4096x512", 1.1, at_least=True),
    Target("convolution / cuDNN", "conv 32x256x56x56 3x3", 0.85, at_least=True),
    *(Target(f"grouped {groups} / torch", f"grouped {groups}", 1.0, at_least=True) for groups in (8, 64, 128)),
    Target("warm call, host µs", "host us", 3.0, at_least=False),
    Target("load from disk, ms", "disk ms", 60.0, at_least=False),
)


def ours(request: MatmulRequest) -> Any:
    """A prepared call on torch's current stream, which is ours as well while the benchmark runs."""
    return dp.prepare(request)


def sets_for(nbytes: int) -> int:
    return max(2, min(8, math.ceil(2 * L2_BYTES / nbytes)))


def product(size: int, kind: str, rounds: int) -> dict[str, Any]:
    """A square product of bf16 or fp8 (fast accumulation): TFLOP/s of torch, and of ours with and without autotune."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kind]
    count = sets_for(size * size * (6 if kind == "bf16" else 4))
    a = [torch.randn(size, size, device="cuda").to(dtype) for _ in range(count)]
    b = [torch.randn(size, size, device="cuda").to(dtype).t() for _ in range(count)]
    out = [torch.empty(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    one = torch.ones((), device="cuda")

    def by_torch(i: int) -> Any:
        if kind == "bf16":
            return torch.mm(a[i], b[i], out=out[i])
        return torch._scaled_mm(a[i], b[i], one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    runs: dict[str, Any] = {"torch": by_torch}
    expected = (a[0].float() @ b[0].float()).cpu().numpy()
    picked = ""
    fields: dict[str, Any] = {"fast_accum": kind == "fp8"}
    for name, autotune in ((TUNED, True), (UNTUNED, False)):
        enqueue = [
            ours(
                MatmulRequest(
                    foreign(a[i]),
                    foreign(b[i]),
                    out=foreign(out[i]),
                    autotune=autotune,
                    library=None if autotune else "cutlass",  # tuned, all libraries race
                    **fields,
                )
            )
            for i in range(count)
        ]
        out[0].fill_(float("nan"))
        enqueue[0]()
        torch.cuda.synchronize()
        off = np.abs(out[0].float().cpu().numpy() - expected).max() / np.abs(expected).max()
        if not off < 0.02:
            raise AssertionError(f"{kind} {size} {name} is off by {off}")
        runs[name] = lambda i, enqueue=enqueue: enqueue[i]()
        picked = picked or kernel_of(enqueue[0])
    if kind == "bf16":
        lt = [
            ours(MatmulRequest(foreign(a[i]), foreign(b[i]), out=foreign(out[i]), autotune=True, library="cublasLt"))
            for i in range(count)
        ]
        runs["cuBLASLt"] = lambda i: lt[i]()
    seconds, how = gpu_race(runs, sets=count, repeats=4 * count, rounds=rounds)
    rates = {name: 2 * size**3 / statistics.median(values) / 1e12 for name, values in seconds.items()}
    return {"tflops": rates, "picked": picked, "ratio": rates[TUNED] / rates["torch"], "timed by": how}


def kernel_of(call: Any) -> str:
    """The kernel behind a prepared call, in words: a configuration of CUTLASS, or cuBLASLt where that won the race."""
    return str(getattr(call._bound.plan, "config", "cuBLASLt"))


def foreign(tensor: Any) -> dp.Tensor:
    """A torch tensor as ours; fp8 goes by its bytes where DLPack has no fp8."""
    import torch

    try:
        return dp.from_dlpack(tensor)
    except (RuntimeError, BufferError, TypeError, dp.errors.DispatchError):
        raw = dp.from_dlpack(tensor.view(torch.uint8))
    layout = raw.device.layout(dp.Dtype.of("f8e4m3"), raw.shape, raw.layout.strides, raw.ptr)
    return dp.Tensor(raw.storage, raw.ptr, layout)


def tree(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """bias + silu + residual + the largest magnitude of each row: one kernel, against torch eager and torch.compile."""
    import torch

    count = sets_for(2 * (m * k + n * k + 2 * m * n))
    a = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    b = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t() for _ in range(count)]
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    residual = [torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    out = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    top = [torch.empty(m, device="cuda") for _ in range(count)]

    def eager(a: Any, b: Any, residual: Any) -> Any:
        x = torch.nn.functional.silu(torch.addmm(bias, a, b)) + residual
        return x, x.abs().amax(dim=1)

    runs: dict[str, Any] = {"torch eager": lambda i: eager(a[i], b[i], residual[i])}
    missing: dict[str, str] = {}
    # The mode that searches for kernels; not the one with CUDA graphs, for all candidates are recorded here.
    for name, mode in (("torch.compile", None), ("torch.compile max-autotune", "max-autotune-no-cudagraphs")):
        compiled = attempt(name, lambda mode=mode: torch.compile(eager, mode=mode), missing)
        if attempt(name, lambda compiled=compiled: compiled(a[0], b[0], residual[0]), missing) is not None:
            runs[name] = lambda i, compiled=compiled: compiled(a[i], b[i], residual[i])
    for name, why in missing.items():
        say(f"    missing: {name}: {why}")
    x = evt.silu(evt.accumulator() + evt.row("bias")) + evt.load("residual")
    enqueue = [
        ours(
            MatmulRequest(
                foreign(a[i]),
                foreign(b[i]),
                out=foreign(out[i]),
                epilogue=evt.reduce(x, "top", "amax", over="n"),
                operands={"bias": foreign(bias), "residual": foreign(residual[i]), "top": foreign(top[i])},
                autotune=True,
            )
        )
        for i in range(count)
    ]
    out[0].fill_(float("nan"))
    top[0].fill_(float("nan"))
    enqueue[0]()
    torch.cuda.synchronize()
    wanted, largest = eager(a[0], b[0], residual[0])
    picked = kernel_of(enqueue[0])
    if not torch.allclose(out[0].float(), wanted.float(), rtol=0.03, atol=0.5):
        raise AssertionError(f"the tree is wrong with {picked}")
    if not torch.allclose(top[0], largest.float(), rtol=0.02, atol=0.5):
        raise AssertionError(f"the tree's row maxima are wrong with {picked}")
    runs[TUNED] = lambda i: enqueue[i]()
    seconds, how = gpu_race(runs, sets=count, repeats=4 * count, rounds=rounds)
    us = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    ratios = {name: us[name] / us[TUNED] for name in us if name.startswith("torch")}
    compiled_us = [ratio for name, ratio in ratios.items() if name.startswith("torch.compile")]
    best = {"best torch.compile": min(compiled_us)} if compiled_us else {}
    return {"us": us, "picked": picked, "ratios": ratios | best, "timed by": how}


MOE = ((8, 8192, 4096, 4096), (64, 16384, 2048, 2048), (128, 4096, 1536, 4096))  # groups, rows, n, k


def grouped(groups: int, rows: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Rows in groups of uneven sizes, as a router makes them, against torch's grouped product."""
    import torch

    count = sets_for(2 * (rows * k + groups * n * k + rows * n))
    cuts = np.sort(np.random.default_rng(1).integers(0, rows + 1, groups - 1))
    ends = torch.tensor([*cuts, rows], dtype=torch.int32, device="cuda")
    a = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    b = [torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16).mT for _ in range(count)]
    out = [torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    runs: dict[str, Any] = {}
    for config in GROUPED_CONFIGS:
        enqueue = [
            ours(dp.GroupedMatmulRequest(*map(foreign, (a[i], b[i], ends)), out=foreign(out[i]), config=config))
            for i in range(count)
        ]
        runs[str(config)] = lambda i, enqueue=enqueue: enqueue[i]()
        enqueue[0]()
        check_groups(a[0], b[0], ends, out[0])
    peer = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if peer is not None:
        runs["torch"] = lambda i: peer(a[i], b[i], offs=ends)
    seconds, how = gpu_race(runs, sets=count, repeats=4 * count, rounds=rounds)
    us = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    us["cutlass"] = us[str(choose_grouped(rows, groups, n, MULTIPROCESSORS))]
    return {"us": us, "timed by": how} | ({"ratio": us["torch"] / us["cutlass"]} if "torch" in us else {})


def check_groups(a: Any, b: Any, ends: Any, out: Any) -> None:
    """Each group of `out` against torch's product in f32."""
    import torch

    begin = 0
    for group, end in enumerate(ends.tolist()):
        wanted = a[begin:end].float() @ b[group].float()
        bound = 0.02 * a.shape[1] ** 0.5
        if end > begin and not torch.allclose(out[begin:end].float(), wanted, rtol=0.02, atol=bound):
            raise AssertionError(f"group {group} is wrong")
        begin = end


def host_side(device: dp.Device) -> dict[str, float]:
    """What a warm call costs the host, what a kernel costs to read from disk, and to learn its parameters."""
    a, b = device.zeros((256, 256), "bf16"), device.zeros((256, 256), "bf16").T
    request = MatmulRequest(a, b, config=LARGE, library="cutlass")
    started = time.perf_counter()
    call = dp.prepare(request)
    prepared = time.perf_counter() - started
    call()
    call()
    bursts = []
    for _ in range(HOST_BURSTS):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            call()
        bursts.append((time.perf_counter() - started) / 200)
    device.synchronize()
    from dispatch.libraries.nvrtc.kernel_cache import Store

    plan = call._bound.plan
    source = emit(plan.spec)
    kernel = compiler.kernel_id(source, plan.spec.target)
    reads = []
    for _ in range(5):
        started = time.perf_counter()
        entry = Store(folder()).find(kernel, compiler.toolchain())
        reads.append(time.perf_counter() - started)
    if entry is None:
        raise AssertionError("the kernel is not on disk")
    return {
        "host us": statistics.median(bursts) * 1e6,
        "disk ms": statistics.median(reads) * 1e3,
        "prepare ms": prepared * 1e3,
        "compiled in s": entry.seconds,
    }


def on_host(device: dp.Device, report: Report) -> None:
    """A small tree in NumPy, checked."""
    rng = np.random.default_rng(0)
    a = device.array(rng.standard_normal((64, 128)), "bf16")
    b = device.array(rng.standard_normal((128, 96)), "bf16")
    request = MatmulRequest(a, b, epilogue=evt.silu(evt.accumulator()), library="cutlass")
    started = time.perf_counter()
    got = dp.run(request).numpy().astype(float)
    took = time.perf_counter() - started
    np.testing.assert_allclose(got, reference(request)["out"], rtol=0.01, atol=1e-3)
    report.put("host", {"ms": took * 1e3})
    say(f"a tree over 64x96x128 in NumPy: {took * 1e3:.2f} ms")


def on_gpu(quick: bool, report: Report) -> None:
    rounds = ROUNDS[quick]
    figures: dict[str, float] = {}
    lines = []
    for kind, size in (("bf16", 4096), ("bf16", 8192), ("fp8", 4096), ("fp8", 8192)):
        found = product(size, kind, rounds)
        report.put(f"{kind} {size}", found)
        figures[f"{kind} {size}"] = found["ratio"]
        rates = found["tflops"]
        names = ("torch", "cuBLASLt", UNTUNED, TUNED)
        values = (f"{rates[name]:.0f}" if name in rates else "-" for name in names)
        lines.append((f"{kind} {size}", *values, f"{found['ratio']:.3f}", found["picked"]))
    table(("product", "torch TFLOP/s", "cuBLASLt", "untuned", "autotuned", "autotuned/torch", "picked"), lines)
    lines = []
    for shape in MOE:
        found = grouped(*shape, rounds)
        name = f"groups {shape[0]} of {shape[1]}, {shape[2]}x{shape[3]}"
        report.put(name, found)
        if "ratio" in found:
            figures[f"grouped {shape[0]}"] = found["ratio"]
        lines.append((name, *(f"{us:.0f} {peer}" for peer, us in found["us"].items() if peer != "cutlass")))
    table(("grouped product", *(f"us, by {peer}" for peer in ("large", "medium", "small", "torch"))), lines)
    lines = []
    for m, n, k in ((16384, 4096, 512), (8192, 4096, 1024), (4096, 4096, 4096)):
        found = tree(m, n, k, rounds)
        name = f"tree {m}x{n}x{k}"
        report.put(name, found)
        figures[name] = found["ratios"]["torch eager"]
        if "best torch.compile" in found["ratios"]:
            figures[f"compiled {name}"] = found["ratios"]["best torch.compile"]
        ratios = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in found["ratios"].items())
        lines.append((name, f"{found['us'][TUNED]:.0f} us", found["picked"], ratios))
    table(("bias, silu, residual, row amax", "ours", "by", "times as fast as"), lines)
    lines = []
    for shape in SHAPES:
        n, c, k, extent, taps = shape
        name = f"conv {n}x{c}x{extent}x{extent} {taps}x{taps}"
        found = convolution(shape, rounds)
        report.put(name, found)
        figures[name] = found["ratio"]
        rates = found["tflops"]
        lines.append(
            (
                f"{name} to {k}",
                f"{rates['torch']:.0f}",
                f"{rates['ours']:.0f}",
                found["picked"],
                f"{found['ratio']:.3f}",
            )
        )
    table(("convolution", "cuDNN TFLOP/s", "ours", "by", "ratio"), lines)
    report.put("ratios", figures)


def side_figures(device: dp.Device, report: Report) -> None:
    """The host's side, on a stream of ours; then the targets."""
    side = host_side(device)
    report.put("host side", side)
    say(", ".join(f"{name}: {value:.3g}" for name, value in side.items()))
    judge(TARGETS, report.figures["ratios"] | side, report)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure and print the tables and the targets."""
    if device.is_host:
        on_host(device, report)
    elif device.arch != 90:
        say(f"bench_cutlass cannot run on {device}: its kernels are for sm_90, this is {device.arch}")
    else:
        import torch

        side = torch.cuda.Stream()  # the default one cannot be recorded
        with torch.cuda.stream(side), dp.Stream.from_handle(device, side.cuda_stream):
            on_gpu(quick, report)
        side_figures(device, report)


if __name__ == "__main__":
    command(main, __doc__)
