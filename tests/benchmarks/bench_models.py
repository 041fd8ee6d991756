"""Whole models of transformers, by torch and with this package, in bf16 with random weights: wall time to the result.

A Llama of 8 layers, 1,024 wide, forward with 4 sequences of 1 and of 512 tokens; and training steps (forward, backward,
SGD) of a ViT-B/16 with GELU by tanh and of torch's own encoder. Candidates are torch as it is, after
`dispatch.torch.fuse`, without and with CUDA graphs and trees, with every linear layer, norm, convolution and attention
by this package's op, by torch.compile as it comes (for one shape) and with its own CUDA graphs, torch.compile of the
fused model, and in training both by torch.cuda.make_graphed_callables. Each is held against the model in float64
first. Then bursts of all candidates alternate; a burst ends when its last result is there, and the median of the bursts
counts.
Repeat: `python tests/benchmarks/bench_models.py [--quick] [--device cuda:0|host] [--json FILE]`; five minutes.
On `host` the models are small, nothing is compiled, and it shows whether they run, not how fast.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from command import command
from report import Report, Target, judge, say, table
from timing import Candidate, attempt, host_race, summary

if TYPE_CHECKING:
    from collections.abc import Callable

    import dispatch as dp

sys.path.insert(0, str(Path(__file__).parents[1]))  # for real_models, which imports torch

EAGER, FUSED, EVERY = "eager torch", "dispatch.torch.fuse", "every op by ours"
GRAPHS, TREES = "fuse(graphs=True)", "fuse(graphs=True, trees=True)"
GRAPHED, FUSED_GRAPHED = "make_graphed_callables", "make_graphed_callables of fused"
COMPILED, BOTH, REDUCED = "torch.compile", "torch.compile of fused", "torch.compile, reduce-overhead"
ONE, MANY, VIT, ENCODER = "Llama 4x1", "Llama 4x512", "ViT step", "encoder step"
WRONG = 2.0  # times torch's own error: a call that does nothing must not win; tests have the narrow bound
WARM = 5  # calls of each candidate before the clock
TARGETS = (
    Target("a Llama's forward of 4x1", f"{ONE}: {FUSED}", 1.0, "ms", f"{ONE}: {EAGER}"),
    Target("of 4x512", f"{MANY}: {FUSED}", 0.95, "ms", f"{MANY}: {EAGER}"),
    Target("of 4x512 beside torch.compile", f"{MANY}: {GRAPHS}", 0.9, "ms", f"{MANY}: {COMPILED}"),
    Target("of 4x512 beside its CUDA graphs", f"{MANY}: {GRAPHS}", 0.9, "ms", f"{MANY}: {REDUCED}"),
    Target("of 4x1 beside its CUDA graphs", f"{ONE}: {GRAPHS}", 0.9, "ms", f"{ONE}: {REDUCED}"),
    Target("a ViT's training step", f"{VIT}: {FUSED}", 0.95, "ms", f"{VIT}: {EAGER}"),
    Target("a ViT's training step by graphs", f"{VIT}: {GRAPHS}", 0.95, "ms", f"{VIT}: {EAGER}"),
    Target("beside torch's graphs of it", f"{VIT}: {GRAPHS}", 1.0, "ms", f"{VIT}: {GRAPHED}"),
)


@dataclass(frozen=True)
class Subject:
    """A model on its device, what it is called with, and whether it is trained."""

    model: Any
    x: Any
    trained: bool


def llama(small: bool, tokens: int) -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    wide, layers, heads = (64, 2, 4) if small else (1024, 8, 16)
    size = {"hidden_size": wide, "intermediate_size": 11 * wide // 4, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=1000 if small else 32000, num_attention_heads=heads, use_cache=False, **size)
    return LlamaForCausalLM(config), torch.randint(0, config.vocab_size, (4, min(tokens, 16) if small else tokens))


def vit(small: bool) -> tuple[Any, Any]:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    extent, batch = (32, 2) if small else (224, 32)
    config = ViTConfig(num_labels=100, hidden_act="gelu_pytorch_tanh", image_size=extent, **(size if small else {}))
    return ViTForImageClassification(config), torch.randn(batch, 3, extent, extent)


def encoder(small: bool) -> tuple[Any, Any]:
    import real_models
    import torch

    return real_models.encoder(small), torch.randn((2, 16, 64) if small else (32, 197, 768))


def subject(device: dp.Device, build: Callable[[], tuple[Any, Any]], *, trained: bool) -> Subject:
    """A model in bf16 from a fixed seed, and its operand."""
    import torch

    place = "cpu" if device.is_host else device.name
    torch.manual_seed(0)
    model, x = build()
    return Subject(model.to(place, torch.bfloat16).train(trained), _as(x, torch.bfloat16).to(place), trained)


def _as(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if x.is_floating_point() else x


# -- candidates --------------------------------------------------------------------------------------------------------
def models_of(of: Subject, compiled: bool) -> tuple[dict[str, Any], str]:
    """The model in each way, each with weights of its own; and what `fuse` did."""
    import torch

    from dispatch.torch import fuse

    found = {EAGER: of.model, FUSED: copy.deepcopy(of.model), EVERY: copy.deepcopy(of.model)}
    report = fuse(found[FUSED])
    if compiled:
        found[GRAPHS] = copy.deepcopy(of.model)
        fuse(found[GRAPHS], graphs=True)
    if compiled and of.trained:
        fused = copy.deepcopy(of.model)
        fuse(fused)
        found[GRAPHED], found[FUSED_GRAPHED] = graphed(copy.deepcopy(of.model)), graphed(fused)
    elif compiled:
        found[TREES] = copy.deepcopy(of.model)
        fuse(found[TREES], graphs=True, trees=True)
    if compiled:
        torch._dynamo.reset()  # what was compiled for another shape would make this one dynamic
        found[COMPILED] = torch.compile(copy.deepcopy(of.model), dynamic=False)
        both = copy.deepcopy(of.model)
        fuse(both)
        found[BOTH] = torch.compile(both, dynamic=False)
        if not of.trained:
            found[REDUCED] = torch.compile(copy.deepcopy(of.model), dynamic=False, mode="reduce-overhead")
    what = Counter(note.what for note in report.replaced)
    why = Counter(f"{note.what}: {note.why}" for note in report.kept)
    lines = [f"  {count} x {name}" for name, count in what.most_common()]
    lines += [f"  kept {count} x {reason}" for reason, count in why.most_common()]
    return found, "\n".join([f"fuse: {len(report.replaced)} replaced, {len(report.kept)} kept", *lines])


def graphed(model: Any) -> Any:
    """The model by torch.cuda.make_graphed_callables, which takes operands of one shape: recorded for each anew."""
    import torch

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    class Graphed(Holder):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["held"] = {}  # no submodules: they are the model once more

        def forward(self, x: Any) -> Any:
            if x.shape not in self.held:
                self.held[x.shape] = torch.cuda.make_graphed_callables(Holder(), (x,))
            return self.held[x.shape](x)

    return Graphed()


def candidate(name: str, model: Any, of: Subject, synchronize: Callable[[], None]) -> Candidate:
    """One that calls or trains a model so many times, and waits for the last result."""
    import real_models
    import torch

    if of.trained:
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def once() -> Any:
        if not of.trained:
            return real_models.logits(model(of.x))
        optimizer.zero_grad()
        y = real_models.logits(model(of.x)).float()
        (y.square().mean()).backward()
        optimizer.step()
        return y

    def way() -> Any:
        return real_models.everywhere() if name.endswith(EVERY) else contextlib.nullcontext()

    def burst(count: int) -> float:
        with torch.set_grad_enabled(of.trained), way():
            start = perf_counter()
            for _ in range(count):
                once()
            synchronize()
            return perf_counter() - start

    def result() -> Any:
        with torch.set_grad_enabled(of.trained), way():
            for _ in range(WARM - 1):  # behind which graphs are replayed
                numbers(model, of)
            return numbers(model, of)

    return Candidate(name, burst, result)


def numbers(model: Any, of: Subject) -> dict[str, Any]:
    """The result, and the gradients where it is trained, of the first two of a batch."""
    import real_models
    import torch

    x = of.x[:2]
    if not of.trained:
        return {"": real_models.logits(model(x))}
    found = real_models.forward_and_back(model, x)
    return {"": found.pop(""), "gradients": torch.cat([found[name].flatten() for name in sorted(found)])}


def exact(of: Subject) -> dict[str, Any]:
    """The same in float64, with the same weights."""
    import torch

    wide = Subject(copy.deepcopy(of.model).double(), _as(of.x, torch.float64), of.trained)
    with torch.set_grad_enabled(of.trained):
        return numbers(wide.model, wide)


# -- the race ----------------------------------------------------------------------------------------------------------
def race(name: str, of: Subject, device: dp.Device, bursts: int, calls: int, missing: dict[str, str]) -> dict[str, Any]:
    """Verify and measure one model in all ways; the figures by the candidates' names, in ms, with their errors."""
    models, report = models_of(of, compiled=not device.is_host)
    say(f"\n{name}: {report}")
    right, errors, found = exact(of), {}, []
    for way, model in models.items():
        one = candidate(f"{name}: {way}", model, of, device.synchronize)
        result = attempt(one.name, one.result, missing)
        if result is None:
            continue
        off = {part: float((result[part].double() - want).norm() / want.norm()) for part, want in right.items()}
        errors[one.name] = off
        own = errors.get(f"{name}: {EAGER}", off)
        if not all(off[part] <= WRONG * own[part] for part in right):  # false for NaN
            missing[one.name] = f"wrong result: relative errors {off}, those of torch {own}"
        elif attempt(one.name, lambda burst=one.burst: burst(1 if device.is_host else WARM), missing) is not None:
            found.append(one)
    seconds, failed = host_race(found, device.synchronize, bursts=bursts, calls=calls)
    missing |= failed
    figures = {way: summary(taken, 1e-3) | {"errors": errors[way]} for way, taken in seconds.items()}
    base = figures.get(f"{name}: {EAGER}")
    keys = ("median", "p25", "p75", "best")
    say(f"wall time of one in ms, {bursts} bursts of {calls}; its relative errors against float64")
    table(
        ("way", *keys, "of eager", "errors"),
        [
            (
                way,
                *(f"{figure[key]:.3f}" for key in keys),
                f"{figure['median'] / base['median']:.3f}" if base else "-",
                ", ".join(f"{part or 'result'} {error:.1e}" for part, error in figure["errors"].items()),
            )
            for way, figure in figures.items()
        ],
    )
    return figures


def why_not(package: str) -> str | None:
    """Why a package is not there, or None."""
    import real_models

    return real_models.why_not(package)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    missing: dict[str, str] = {}
    small = device.is_host
    builds: dict[str, tuple[str, Callable[[], tuple[Any, Any]], bool, int]] = {
        ONE: ("transformers", lambda: llama(small, 1), False, 10),
        MANY: ("transformers", lambda: llama(small, 512), False, 10),
        VIT: ("transformers", lambda: vit(small), True, 3),
        ENCODER: ("torch", lambda: encoder(small), True, 3),
    }
    figures: dict[str, Any] = {}
    for name, (package, build, trained, calls) in builds.items():
        why = attempt("torch", lambda package=package: why_not(package) or "", missing)
        if why is None or why:
            missing.setdefault("torch" if why is None else package, why or "")
            continue
        times = (1, 1) if small else (3, 2) if quick else (30, calls)

        def measure(
            name: str = name, build: Any = build, trained: bool = trained, times: Any = times
        ) -> dict[str, Any]:
            return race(name, subject(device, build, trained=trained), device, *times, missing)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages have to say about themselves
            figures |= attempt(name, measure, missing) or {}
        report.put("models", {"ms": figures, "missing": missing})
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("models", {"ms": figures, "missing": missing})
    if small:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, {name: figure["median"] for name, figure in figures.items()}, report)


if __name__ == "__main__":
    command(main, __doc__)
