"""Convolution and attention by cuDNN's graphs, forward and backward, against torch and cuDNN's own Python front end.

Layers of ResNet-50, ConvNeXt and a 3D U-Net in bf16, channels last, against torch with cudnn.benchmark; attention in
bf16 against torch's cuDNN and flash backends and, where it is installed, nvidia-cudnn-frontend. GPU time alone counts:
each candidate's calls, in turns over operand sets larger than the L2 cache, are one CUDA graph, replayed between
events, in turns with the others; medians of the rounds. Results are compared first. Repeat:
`python tests/benchmarks/bench_cudnn.py [--quick] [--device cuda:0] [--json FILE]`; 4 minutes on an H200, or 1.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from command import command, empty_cache
from report import Report, Target, judge, say, table
from timing import attempt, geometric_mean, gpu_race, host_race, reason, statement, summary

import dispatch as dp
from dispatch.ops.conv import ConvBwdDataRequest, ConvBwdFilterRequest, ConvFwdRequest
from dispatch.ops.sdpa import SdpaBwdRequest, SdpaFwdRequest

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import torch
except ImportError as error:
    no_torch: str | None = reason(error)
else:
    no_torch = None

OURS, FRONT_END = "dispatch", "cuDNN front end"
Row = dict[str, Any]
Runs = dict[str, "Callable[[int], Any]"]
L2_BYTES, MAX_SETS = 60 << 20, 12
BUDGET = {True: 60.0, False: 240.0}  # seconds, by `quick`
# Name, x (N, C, spatial…), w (K, C / groups, spatial…), padding, stride.
# fmt: off
LAYERS = (
    ("ResNet-50 3x3 64",      (32, 64, 56, 56),        (64, 64, 3, 3),        1, 1),
    ("ResNet-50 1x1 256",     (32, 256, 56, 56),       (64, 256, 1, 1),       0, 1),
    ("ConvNeXt 7x7 dw 96",    (32, 96, 56, 56),        (96, 1, 7, 7),         3, 1),
    ("U-Net 3D 64",           (2, 64, 32, 64, 64),     (64, 64, 3, 3, 3),     1, 1),
    ("ResNet-50 3x3 256",     (32, 256, 14, 14),       (256, 256, 3, 3),      1, 1),
    ("ResNet-50 3x3 128 s2",  (32, 128, 56, 56),       (128, 128, 3, 3),      1, 2),
    ("ConvNeXt 2x2 s2",       (32, 192, 28, 28),       (384, 192, 2, 2),      0, 2),
    ("U-Net 3D 32",           (2, 32, 64, 96, 96),     (32, 32, 3, 3, 3),     1, 1),
    ("ResNet-50 7x7 s2",      (32, 3, 224, 224),       (64, 3, 7, 7),         3, 2),
    ("ResNet-50 1x1 512",     (32, 512, 28, 28),       (1024, 512, 1, 1),     0, 2),
    ("ResNet-50 3x3 512",     (32, 512, 7, 7),         (512, 512, 3, 3),      1, 1),
    ("ConvNeXt 4x4 s4",       (32, 3, 224, 224),       (96, 3, 4, 4),         0, 4),
    ("ConvNeXt 7x7 dw 384",   (32, 384, 14, 14),       (384, 1, 7, 7),        3, 1),
    ("U-Net 3D 128",          (2, 128, 16, 32, 32),    (128, 128, 3, 3, 3),   1, 1),
    ("U-Net 3D 256 s2",       (2, 128, 16, 32, 32),    (256, 128, 3, 3, 3),   1, 2),
)
# Batch, heads of Q, heads of K and V, tokens, head, causal.
ATTENTIONS = (
    (4, 16, 16, 4096, 128, False),  (4, 16, 16, 4096, 128, True),   (8, 16, 16, 2048, 64, True),
    (4, 32, 8, 2048, 128, True),    (16, 16, 16, 1024, 64, False),  (1, 16, 16, 16384, 128, True),
    (2, 16, 16, 8192, 64, False),   (2, 32, 8, 8192, 128, True),    (16, 16, 16, 1024, 128, True),
    (8, 32, 4, 1024, 128, False),   (1, 32, 8, 16384, 64, True),    (4, 16, 16, 3000, 128, True),
)
# fmt: on
TARGETS = (
    Target("convolution: geometric mean of torch's time over ours", "convolution", 1.0, at_least=True),
    Target("convolution: the worst layer", "worst convolution", 0.95, at_least=True),
    Target("attention: torch's cuDNN over ours", "torch cuDNN", 1.0, at_least=True),
    Target("attention: torch's flash over ours", "torch flash", 1.5, at_least=True),
    Target("attention: the front end over ours", FRONT_END, 0.98, at_least=True),
    Target("microseconds of host time of a repeated call", "host us", 3.0, at_least=False),
)


def race(runs: Runs, estimate: float, rounds: int, sets: int = 1) -> dict[str, float]:
    """Median seconds of each candidate, in turns over operand sets."""
    repeats = max(1, min(50, math.ceil(3e-3 / estimate)) // sets) * sets
    seconds, _ = gpu_race(runs, sets=sets, repeats=repeats, rounds=rounds)
    return {name: summary(values)["median"] / 1e6 for name, values in seconds.items()}


def checked(runs: Runs, missing: dict[str, str]) -> Runs:
    """Those that run, and give what the first one gives."""
    kept: Runs = {}
    first: Any = None
    for name, run in runs.items():
        result = attempt(name, lambda run=run: _first(run(0)), missing)
        if result is None:
            continue
        first = result if first is None else first
        off = float((result - first).abs().max() / first.abs().max())
        if off > 0.05:
            missing[name] = f"off by {off:.2g} of the largest"
        else:
            kept[name] = run
    return kept


def _first(result: Any) -> Any:
    tensor = result[0] if isinstance(result, tuple) else result
    array = tensor if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)
    return array.float().clone()


# -- convolution ------------------------------------------------------------------------------------------------------
def operand_sets(layer: tuple[Any, ...]) -> list[tuple[Any, Any, Any]]:
    """x, w and dy, so many times that a turn through them leaves nothing of itself in the L2 cache."""
    _, x_shape, w_shape, pad, stride = layer
    last = torch.channels_last if len(x_shape) == 4 else torch.channels_last_3d
    sets: list[tuple[Any, Any, Any]] = []
    nbytes = 0
    while nbytes < 2 * L2_BYTES and len(sets) < MAX_SETS:
        x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in (x_shape, w_shape))
        w = w / math.sqrt(np.prod(w_shape[1:]))
        x, w = x.contiguous(memory_format=last), w.contiguous(memory_format=last)
        y = convolve(x, w, pad, stride)
        sets.append((x, w, torch.randn_like(y)))
        nbytes += 2 * (x.numel() + w.numel() + y.numel())
    return sets


def convolve(x: Any, w: Any, pad: int, stride: int) -> Any:
    """torch's convolution of as many axes."""
    conv = {4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}[x.ndim]
    return conv(x, w, stride=stride, padding=pad, groups=x.shape[1] // w.shape[1])


def convolutions(layer: tuple[Any, ...], sets: list[tuple[Any, Any, Any]]) -> dict[str, Runs]:
    """The candidates of a layer: forward, and the gradients by x and by w."""
    _, x_shape, w_shape, pad, stride = layer
    rank = len(x_shape) - 2
    steps: dict[str, Any] = {"pad": pad, "stride": stride, "autotune": True, "library": "cudnn"}
    requests: dict[str, list[Any]] = {"forward": [], "by x": [], "by w": []}
    for given in sets:
        x, w, dy = (dp.from_dlpack(t) for t in given)
        to_y, to_x, to_w = (dp.from_dlpack(torch.empty_like(t)) for t in (given[2], given[0], given[1]))
        requests["forward"].append(ConvFwdRequest(x, w, out=to_y, **steps))
        requests["by x"].append(ConvBwdDataRequest(dy, w, out=to_x, **steps))
        requests["by w"].append(ConvBwdFilterRequest(dy, x, out=to_w, **steps))

    def theirs(way: str, number: int) -> Any:
        x, w, dy = sets[number]
        if way == "forward":
            return convolve(x, w, pad, stride)
        mask = [way == "by x", way == "by w", False]
        choices = ([stride] * rank, [pad] * rank, [1] * rank, False, [0] * rank, x_shape[1] // w_shape[1], mask)
        return torch.ops.aten.convolution_backward(dy, x, w, None, *choices)[mask.index(True)]

    return {
        way: {
            "torch": lambda number, way=way: theirs(way, number),
            OURS: lambda number, way=way: dp.run(requests[way][number]),
        }
        for way in requests
    }


def measure_layer(layer: tuple[Any, ...], rounds: int) -> list[Row]:
    """The rows of a layer, one for each way."""
    rows = []
    flop = 2 * np.prod(layer[2]) * layer[1][0] * np.prod(layer[1][2:]) / layer[4] ** (len(layer[1]) - 2)
    sets = operand_sets(layer)
    for way, runs in convolutions(layer, sets).items():
        missing: dict[str, str] = {}
        good = checked(runs, missing)
        seconds = race(good, max(flop / 4e14, 5e-6), rounds, len(sets))
        ratio = seconds["torch"] / seconds[OURS] if len(seconds) == 2 else None
        rates = {name: flop / s / 1e12 for name, s in seconds.items()}
        rows.append({"layer": layer[0], "way": way, "tflops": rates, "ratio": ratio, "missing": missing})
    return rows


# -- attention --------------------------------------------------------------------------------------------------------
def attentions(shape: tuple[Any, ...]) -> dict[str, Runs]:
    """The candidates of a shape, forward and backward."""
    b, h, hk, s, d, causal = shape
    q, k, v = (
        torch.randn((b, s, heads, d), device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (h, hk, hk)
    )
    do = torch.randn((b, s, h, d), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    mine = [dp.from_dlpack(t) for t in (q, k, v, do)]
    bound = 0 if causal else None
    o, stats = dp.run(SdpaFwdRequest(*mine[:3], right_bound=bound, stats=True))
    out = dp.from_dlpack(torch.empty_like(do))
    forward = SdpaFwdRequest(*mine[:3], out=out, right_bound=bound, autotune=True)
    gradients = [dp.from_dlpack(torch.empty_like(t)) for t in (q, k, v)]
    made = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    backward = SdpaBwdRequest(*mine[:3], o, mine[3], stats, right_bound=bound, **made)
    runs: dict[str, Runs] = {
        "forward": {OURS: lambda _: dp.run(forward)},
        "backward": {OURS: lambda _: dp.run(backward)},
    }
    kernels = {
        "torch cuDNN": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
        "torch flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    }
    for name, kernel in kernels.items():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]

        def attend(leaves: list[Any] = leaves, kernel: Any = kernel) -> Any:
            with torch.nn.attention.sdpa_kernel([kernel]):
                return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=h != hk)

        def forth(_: int, attend: Any = attend) -> Any:
            with torch.no_grad():
                return attend()

        runs["forward"][name] = forth
        failed: dict[str, str] = {}
        made_o = attempt(name, attend, failed)
        if made_o is not None:
            runs["backward"][name] = lambda _, o=made_o, leaves=leaves: torch.autograd.grad(
                o, leaves, do, retain_graph=True
            )
    runs["forward"][FRONT_END] = front_end({"q": q, "k": k, "v": v}, causal)
    known = {"q": q, "k": k, "v": v, "o": torch.from_dlpack(o), "dO": do, "stats": torch.from_dlpack(stats)}
    runs["backward"][FRONT_END] = front_end(known, causal)
    return runs


def front_end(given: dict[str, Any], causal: bool) -> Callable[[int], Any]:
    """cuDNN's own Python front end: backward where dO is given. What it fails with it says when it is called."""
    try:
        return _front_end(given, causal)
    except Exception as error:  # noqa: BLE001 - not installed, or a version that takes no such call
        why = error

    def fails(_: int) -> Any:
        raise why

    return fails


def _front_end(given: dict[str, Any], causal: bool) -> Callable[[int], Any]:
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=single, compute_data_type=single, handle=handle
    )
    wires = {name: graph.tensor_like(t.detach()) for name, t in given.items()}
    choices = {"attn_scale": 1 / math.sqrt(given["q"].shape[-1]), "use_causal_mask": causal, "name": "sdpa"}
    if "dO" in given:
        outputs, like = graph.sdpa_backward(**wires, **choices), ("q", "k", "v")
    else:
        outputs, like = graph.sdpa(**wires, is_inference=True, **choices)[:1], ("q",)
    results = [torch.empty_like(given[name].transpose(1, 2)).transpose(1, 2) for name in like]
    for wire, result in zip(outputs, results, strict=True):
        wire.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
    pack = {wires[name]: t for name, t in given.items()} | dict(zip(outputs, results, strict=True))

    def run(_: int) -> Any:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, workspace, handle=handle)
        return results[0]

    return run


def measure_attention(shape: tuple[Any, ...], rounds: int) -> list[Row]:
    """The rows of a shape, forward and backward."""
    b, h, _, s, d, causal = shape
    rows = []
    for way, runs in attentions(shape).items():
        missing: dict[str, str] = {}
        flop = (4 if way == "forward" else 10) * b * h * s * s * d / (2 if causal else 1)
        seconds = race(checked(runs, missing), flop / 5e14, rounds)
        rates = {name: flop / t / 1e12 for name, t in seconds.items()}
        ratios = {name: t / seconds[OURS] for name, t in seconds.items() if name != OURS and OURS in seconds}
        rows.append({"shape": shape, "way": way, "tflops": rates, "ratios": ratios, "missing": missing})
    return rows


def host_time(device: dp.Device, report: Report) -> float:
    """Microseconds of host time of a repeated attention call, in bursts that the GPU keeps up with."""
    q = device.array(np.zeros((1, 2, 64, 64)), "bf16")
    call = dp.prepare(SdpaFwdRequest(q, q, q))
    request = SdpaFwdRequest(q, q, q, out=device.empty((1, 2, 64, 64), "bf16"))
    ways = [
        statement("call()", "call()", call=call),
        statement("run(request)", "run(request)", run=dp.run, request=request),
    ]
    seconds, missing = host_race(ways, device.synchronize, bursts=200, calls=100)
    medians = {name: summary(values)["median"] for name, values in seconds.items()}
    say(f"\nhost time of a small repeated sdpa_fwd: {medians} us {missing or ''}")
    report.put("host us", medians)
    return medians["call()"]


def on_gpu(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure layers and shapes in turn until the time is up, then the verdicts."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    rounds = 5 if quick else 15
    ends = time.monotonic() + BUDGET[quick]
    stream = torch.cuda.Stream()
    layers: list[Row] = []
    shapes: list[Row] = []
    failed: dict[str, str] = {}
    figure = host_time(device, report)
    with torch.cuda.stream(stream), dp.Stream.from_handle(device, stream.cuda_stream):
        for number in range(max(len(LAYERS), len(ATTENTIONS))):
            for kind, measure, rows in ((LAYERS, measure_layer, layers), (ATTENTIONS, measure_attention, shapes)):
                if number >= len(kind) or time.monotonic() > ends:
                    continue
                item = kind[number]
                rows.extend(attempt(str(item), lambda m=measure, i=item: m(i, rounds), failed) or [])
                torch.cuda.empty_cache()
            report.put("layers", layers)
            report.put("attention", shapes)
    conclude(layers, shapes, failed, figure, report)


def conclude(layers: list[Row], shapes: list[Row], failed: dict[str, str], host_us: float, report: Report) -> None:
    """Print the tables, the means and the targets."""
    say("\nTFLOP/s; ratio is torch's time over ours")
    cells = [
        (
            row["layer"],
            row["way"],
            *(f"{row['tflops'].get(n, 0):.1f}" for n in (OURS, "torch")),
            f"{row['ratio'] or 0:.3f}",
            _notes(row),
        )
        for row in layers
    ]
    table(("layer", "way", "ours", "torch", "ratio", ""), cells)
    names = (OURS, "torch cuDNN", "torch flash", FRONT_END)
    lines = [
        (str(row["shape"]), row["way"], *(f"{row['tflops'].get(n, 0):.0f}" for n in names), _notes(row))
        for row in shapes
    ]
    table(("B, Hq, Hkv, S, D, causal", "way", *names, ""), lines)
    for name, why in failed.items():
        say(f"missing: {name}: {why}")
    report.put("missing", failed)
    figures: dict[str, float] = {"host us": host_us}
    ratios = [row["ratio"] for row in layers if row["ratio"]]
    if ratios:
        figures["convolution"], figures["worst convolution"] = geometric_mean(ratios), min(ratios)
    for name in names[1:]:
        found = [row["ratios"][name] for row in shapes if name in row["ratios"]]
        if found:
            figures[name] = geometric_mean(found)
            say(f"{name} over ours: geometric mean {figures[name]:.3f}, least {min(found):.3f}, of {len(found)}")
    judge([target for target in TARGETS if target.figure in figures], figures, report)


def _notes(row: Row) -> str:
    return " ".join(f"missing: {name}: {why}" for name, why in row["missing"].items())


def on_host(device: dp.Device, report: Report) -> None:
    """One small convolution and attention in NumPy: whether it runs, not how fast."""
    x, w = device.zeros((2, 8, 9, 9)), device.zeros((4, 8, 3, 3))
    q = device.zeros((1, 2, 16, 8), "f16")
    ways = [
        statement("conv_fwd", "run(request)", run=dp.run, request=ConvFwdRequest(x, w)),
        statement("sdpa_fwd", "run(request)", run=dp.run, request=SdpaFwdRequest(q, q, q)),
    ]
    seconds, missing = host_race(ways, device.synchronize, bursts=3, calls=3)
    medians = {name: summary(values)["median"] for name, values in seconds.items()}
    say(f"on the host: {medians} us {missing or ''}")
    report.put("host", medians)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure and print the tables and the targets."""
    if device.is_host:
        on_host(device, report)
    elif no_torch is not None:
        say(f"bench_cudnn needs torch to compare with: {no_torch}")
        report.put("missing", {"torch": no_torch})
    else:
        with empty_cache():
            on_gpu(device, quick, report)


if __name__ == "__main__":
    command(main, __doc__)
