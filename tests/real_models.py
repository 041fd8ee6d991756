"""Models that others wrote, with random weights, and how they are held against torch's own numbers.

A Llama, a ViT and a ConvNeXt of transformers, a ViT and a ConvNeXt of timm, torchvision's ResNet, and the encoder that
torch itself brings: each from a configuration and a fixed seed, so nothing is downloaded. They run in two ways: as
`dispatch.torch.fuse` leaves them, and with every linear layer, norm, convolution and attention of torch through this
package's op (`everywhere`). What is right is the same model in float64, with the same weights.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from dispatch import torch as ours
from dispatch.errors import BadRequest, NoRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = nn.functional
FACTOR = 1.25  # of torch's own error in the same dtype
# What is tolerated where torch's own error is next to nothing: some roundings of f32, in which norms of these models
# compute even where the model is in float64.
FLOOR = 2.0**-22
# A single parameter's gradient may have few elements, and its error then varies more than that of all together.
SINGLE = 3.0


# -- the models --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A model, and what it is called with.

    Attributes:
        package: what must be installed.
        build: makes it, small or as large as a GPU is to have it.
        inputs: what it is called with.
        least: so many places `fuse` replaces in the small one, or more: else nothing is proved.
        kinked: it has ReLUs, whose slopes jump: in f32 one argument in a million decides on a gradient's error.
    """

    package: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool], torch.Tensor]
    least: int
    kinked: bool = False

    def model(self, small: bool, place: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        """The model in training, with weights that are the same for all devices."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages have to say about themselves
            return self.build(small).to(place, dtype).train()

    def operand(self, small: bool, place: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Tokens, or images that bf16 has exactly: the same in all dtypes."""
        torch.manual_seed(100 + seed)
        x = self.inputs(small)
        return (x.bfloat16().to(dtype) if x.is_floating_point() else x).to(place)


def why_not(package: str) -> str | None:
    """Why a package cannot be used, or None; one that is built for another torch raises what it likes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
            if package == "transformers":  # which imports what it needs where it is asked for
                importlib.import_module(package).LlamaForCausalLM  # noqa: B018
    except Exception as error:  # noqa: BLE001
        return f"{package} cannot be imported: {[*str(error).splitlines(), type(error).__name__][0]}"
    return None


VOCABULARY = 256
CLASSES = 1000


def llama(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = (
        {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
        if small
        else {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    )
    heads = size["num_attention_heads"] // 2
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=heads, use_cache=False, **size))


def vit(small: bool) -> nn.Module:
    """With GELU by tanh, as SigLIP and others have it: the library has no other."""
    from transformers import ViTConfig, ViTForImageClassification

    size = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        if small
        else {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12}
    )
    extent, patch = (32, 8) if small else (128, 16)
    given = {"image_size": extent, "patch_size": patch, "num_labels": CLASSES, "hidden_act": "gelu_pytorch_tanh"}
    return ViTForImageClassification(ViTConfig(**size, **given))


def convnext(small: bool) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes, depths = ([16, 32, 64, 64], [1, 1, 1, 1]) if small else ([96, 192, 384, 768], [2, 2, 4, 2])
    # Layers start at 1, not at the 1e-6 of training: else they add nothing, and nothing of them is seen.
    given = {"num_labels": CLASSES, "layer_scale_init_value": 1.0, "hidden_act": "gelu_pytorch_tanh"}
    return ConvNextForImageClassification(ConvNextConfig(hidden_sizes=sizes, depths=depths, **given))


def timm_vit(small: bool) -> nn.Module:
    import timm

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2} if small else {"depth": 6}
    return timm.create_model("vit_small_patch16_224", num_classes=CLASSES, act_layer=_tanh_gelu(), **size)


def timm_convnext(small: bool) -> nn.Module:
    import timm

    size = {"dims": (16, 32, 64, 64), "depths": (1, 1, 1, 1)} if small else {}
    return timm.create_model("convnext_atto", num_classes=CLASSES, act_layer=_tanh_gelu(), ls_init_value=1.0, **size)


def _tanh_gelu() -> Callable[..., nn.Module]:
    return lambda *_, **__: nn.GELU(approximate="tanh")


def resnet(small: bool) -> nn.Module:
    from torchvision.models import resnet, resnet50

    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], CLASSES) if small else resnet50(num_classes=CLASSES)


def encoder(small: bool) -> nn.Module:
    """torch's own, without dropout: what is drawn would differ from run to run."""
    width, heads, layers = (64, 4, 2) if small else (768, 12, 6)
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers)


def images(extent: int, large: int) -> Callable[[bool], torch.Tensor]:
    return lambda small: torch.randn((4, 3, extent, extent) if small else (16, 3, large, large))


def tokens(small: bool) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 16) if small else (4, 128))


CASES = {
    "llama": Case("transformers", llama, tokens, 7),
    "vit": Case("transformers", vit, images(32, 128), 9),
    "convnext": Case("transformers", convnext, images(32, 128), 13),
    "timm-vit": Case("timm", timm_vit, images(32, 224), 9),
    "timm-convnext": Case("timm", timm_convnext, images(32, 128), 9),
    "resnet": Case("torchvision", resnet, images(64, 128), 12, kinked=True),
    "encoder": Case("torch", encoder, lambda small: torch.randn((4, 16, 64) if small else (8, 128, 768)), 8),
}


# -- every op by this package's ----------------------------------------------------------------------------------------
@dataclass
class Seen:
    """How often each function was called and taken, and the last reason where it was not."""

    taken: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        taken = ", ".join(f"{count} {name}" for name, count in sorted(self.taken.items()))
        left = "".join(f"\n  left: {name}: {' '.join(why.split())[:200]}" for name, why in sorted(self.left.items()))
        return f"by ours: {taken or 'nothing'}{left}"


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise BadRequest("key", f"{key.shape[1]} heads", f"{query.shape[1]}, without enable_gqa")
    if attn_mask is not None or dropout_p:
        raise BadRequest("attn_mask", "a mask or dropout", "neither")
    return ours.scaled_dot_product_attention(query, key, value, is_causal, scale)


FUNCTIONS: dict[str, Any] = {
    "linear": ours.linear,
    "conv2d": ours.conv2d,
    "layer_norm": ours.layer_norm,
    "rms_norm": ours.rms_norm,
    "scaled_dot_product_attention": _attention,
}


@contextmanager
def everywhere() -> Iterator[Seen]:
    """All of these of torch.nn.functional by this package, where it takes the operands."""
    seen, before = Seen(), {name: getattr(F, name) for name in FUNCTIONS}

    def through(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                y = FUNCTIONS[name](*args, **kwargs)
            except (BadRequest, NoRow) as error:
                seen.left[name] = str(error)
                return before[name](*args, **kwargs)
            seen.taken[name] += 1
            return y

        return call

    for name in FUNCTIONS:
        setattr(F, name, through(name))
    try:
        yield seen
    finally:
        for name, function in before.items():
            setattr(F, name, function)


# -- errors ------------------------------------------------------------------------------------------------------------
Tensors = dict[str, torch.Tensor]


def logits(y: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(y, "logits", y)
    return found


def forward_and_back(model: nn.Module, x: torch.Tensor) -> Tensors:
    """The result, as "", and the gradients by the parameters' names, of a cotangent that is the same in all dtypes."""
    y = logits(model(x))
    torch.manual_seed(2)
    cotangent = torch.randn(y.shape).bfloat16().to(y.device, y.dtype)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(y, [*named.values()], cotangent, allow_unused=True)
    return {"": y.detach()} | {n: grad for n, grad in zip(named, gradients, strict=True) if grad is not None}


@dataclass
class Errors:
    """Squares of what is off, and of what is right, for the result and for all gradients, over several trials."""

    result: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gradients: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, off: dict[str, float], exact: Tensors) -> None:
        for name, t in exact.items():
            sums = self.gradients if name else self.result
            sums[0] += off[name] ** 2
            sums[1] += float(t.norm()) ** 2

    def relative(self) -> tuple[float, float]:
        """The relative errors of the result and of the gradients, in the norm over all elements and trials."""
        return math.sqrt(self.result[0] / self.result[1]), math.sqrt(self.gradients[0] / self.gradients[1])


def distances(found: Tensors, exact: Tensors) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: float((found[name].double() - t).norm()) for name, t in exact.items()}


def beyond(mine: dict[str, float], theirs: dict[str, float], exact: Tensors, eps: float) -> list[str]:
    """What alone is too far off: a wrong gradient of a few elements is lost among all together.

    The gradient of some parameters is zero but for rounding, as that of the keys' bias: hence not their own size alone.
    """
    everything = math.sqrt(sum(float(t.norm()) ** 2 for t in exact.values()) / sum(t.numel() for t in exact.values()))
    found = []
    for name, t in exact.items():
        slack = 2 * eps * min(float(t.norm()), everything * math.sqrt(t.numel()))
        if not mine[name] <= SINGLE * theirs[name] + slack:  # false for NaN
            found.append(f"{name or 'the result'}: off by {mine[name]:.3g}, torch by {theirs[name]:.3g}")
    return found


@dataclass
class Outcome:
    """What the comparison of one way found: ours and torch's relative errors, of the result and of the gradients."""

    ours: Errors = field(default_factory=Errors)
    torchs: Errors = field(default_factory=Errors)
    single: list[str] = field(default_factory=list)
    done: str = ""  # what ran by this package's ops

    def add(self, found: Tensors, of_torch: dict[str, float], exact: Tensors) -> None:
        of_ours = distances(found, exact)
        self.single += beyond(of_ours, of_torch, exact, torch.finfo(found[""].dtype).eps)
        self.ours.add(of_ours, exact)
        self.torchs.add(of_torch, exact)

    def __str__(self) -> str:
        lines = [
            f"{what}: relative error {mine:.3e}, torch's own {theirs:.3e}, {mine / theirs if theirs else 0:.3f} of it"
            for what, mine, theirs in self._pairs()
        ]
        return "\n".join([*lines, *self.single, self.done])

    def right(self) -> bool:
        """Whether all is within the bounds."""
        return all(mine <= FACTOR * theirs + FLOOR for _, mine, theirs in self._pairs()) and not self.single

    def _pairs(self) -> list[tuple[str, float, float]]:
        return [*zip(("result", "gradients"), self.ours.relative(), self.torchs.relative(), strict=True)]


def shaken(model: nn.Module, seed: int) -> nn.Module:
    """The model in f64, with weights off by up to 64 roundings of f32, by chance: enough for some ReLUs to turn.

    One that turns is a thousandth of a gradient, a thousand times all that is rounded, and every fifth run has one:
    torch's or ours, as it happens. What some of them come to is the bound, then, for the gradients alone.
    """
    torch.manual_seed(200 + seed)
    found = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in found.parameters():
            off = torch.rand(parameter.shape, dtype=torch.float64).to(parameter.device) - 0.5
            parameter.mul_(1 + 128 * torch.finfo(torch.float32).eps * off)
    return found


def compare(case: Case, *, small: bool, place: str, dtype: torch.dtype, trials: int) -> tuple[dict[str, Outcome], bool]:
    """Run a model by torch, by `fuse` and by `everywhere`, each held against the model in f64.

    Several trials have weights and operands of their own: the error of one result of few elements is mostly chance.
    Gives back the outcome of either way, and whether results were the same bits after `fuse` was undone.
    """
    fused, through, same = Outcome(), Outcome(), True
    for seed in range(trials):
        model = case.model(small, place, dtype, seed)
        x, x64 = (case.operand(small, place, kind, seed) for kind in (dtype, torch.float64))
        exact = forward_and_back(copy.deepcopy(model).double(), x64)
        plain = forward_and_back(copy.deepcopy(model), x)
        of_torch = distances(plain, exact)
        if case.kinked and dtype == torch.float32:
            jumps = distances(forward_and_back(shaken(model, seed), x64), exact)
            of_torch |= {name: max(of_torch[name], jump) for name, jump in jumps.items() if name}
        with everywhere() as seen:
            through.add(forward_and_back(copy.deepcopy(model), x), of_torch, exact)
        report = ours.fuse(model)
        fused.add(forward_and_back(model, x), of_torch, exact)
        fused.done, through.done = str(report), str(seen)
        assert len(report.replaced) >= case.least, report
        assert seen.taken["linear"], seen
        report.undo()
        same = same and torch.equal(logits(model(x)), plain[""])
    return {"fuse": fused, "everywhere": through}, same


def run_in_training(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A model's result in f64, in training mode."""
    return logits(copy.deepcopy(model).double().train()(x.double()))


def in_other_modes(case: Case, *, small: bool, place: str) -> dict[str, float]:
    """How far a fused f32 model's result is from torch's, in ways to run one other than those of `compare`."""
    model, x = case.model(small, place, torch.float32), case.operand(small, place, torch.float32)
    fused = copy.deepcopy(model)
    ours.fuse(fused)
    fused = copy.deepcopy(fused)  # which is fused, too

    def checkpointed(one: nn.Module) -> torch.Tensor:
        y = logits(torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False))
        return torch.autograd.grad(y.sin().sum(), next(one.parameters()))[0]

    kind = torch.device(place).type
    modes: dict[str, tuple[Any, Callable[[nn.Module], torch.Tensor]]] = {
        "inference": (torch.inference_mode(), lambda one: logits(one(x))),
        "evaluation": (torch.no_grad(), lambda one: logits(one.eval()(x))),
        "checkpointed": (torch.enable_grad(), lambda one: checkpointed(one.train())),
        "autocast": (torch.autocast(kind, torch.bfloat16), lambda one: logits(one(x))),
    }
    found = {}
    for name, (mode, run) in modes.items():
        with mode:
            mine, theirs = (run(one).detach().double() for one in (fused, model))
            if name == "evaluation" and case.package == "torch":
                # On a GPU torch's one function for an encoder's layer has GELU by tanh, though the layer's is by erf
                # (1.8e-4 here); without dropout the modules' forward in training mode is what is right.
                theirs = run_in_training(model, x)
        found[name] = float((mine - theirs).norm() / theirs.norm())
    return found
