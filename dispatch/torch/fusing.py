"""`fuse`: finds what the ops of this package do in one call in a model of torch's, and has the model call them.

Each module's own forward is traced by torch.fx with its children as they are, so one that cannot be traced leaves the
others alone. A module gets a forward of its own, which `Report.undo` takes away again: parameters, submodules and
state_dict stay the very same, and the weights are read where they are at each call.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from dispatch.checks import names_arguments
from dispatch.errors import BadRequest
from dispatch.torch import fused, torch_layers, transformers_attention, transformers_rotary
from dispatch.torch.forward_guards import ForwardGuards, call_counts
from dispatch.torch.graphs import NAME, Graphs, graphed_forward
from dispatch.torch.patterns import Note, Patterns

__all__ = ["Note", "Report", "fuse"]

ATTENTION = "scaled_dot_product_attention"
NORMS: dict[Any, Any] = {nn.LayerNorm: fused.layer_norm_forward, nn.RMSNorm: fused.rms_norm_forward}


@dataclass
class Report:
    """What `fuse` did to a model.

    Attributes:
        replaced: what now runs by an op of this package, where it takes the operands; else torch's own runs.
        kept: what looks like it and was left, and why.
        graphs: with `graphs=True`, what was recorded, how often it was replayed, and why other calls were not.
    """

    replaced: list[Note] = field(default_factory=list)
    kept: list[Note] = field(default_factory=list)
    graphs: Graphs | None = None
    _forwards: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list, repr=False)  # ours, that of before
    _configs: list[tuple[nn.Module, Any]] = field(default_factory=list, repr=False)
    _consumed: set[nn.Module] = field(default_factory=set, repr=False)  # whose weights the forward of a parent reads

    def undo(self) -> None:
        """Give all modules the forward that they had, and their configs, again; a second time it does nothing.

        A forward that somebody else has set on a module since `fuse` stays, and what it calls of before stays with it:
        where that is the fused forward, set the module's own again to be rid of it. What was fused twice is undone in
        the other order.
        """
        for module, name, ours, before in reversed(self._forwards):
            if module.__dict__.get(name) is ours:
                if before is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before
            if self.graphs is not None and module.__dict__.get(NAME) is self.graphs:
                del module.__dict__[NAME]
        for module, config in self._configs:
            if transformers_attention.is_replaced(module):
                module.__dict__["config"] = config
        self._forwards.clear()
        self._configs.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.kept)} kept"]
        lines += [f"  {note.where or 'the model'}: {note.what}" for note in self.replaced]
        lines += [f"  {note.where or 'the model'}: {note.what} kept: {note.why}" for note in self.kept]
        return "\n".join(lines)

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(nn.Module, name) and not name.startswith("__"):
            text += "; fuse changes the model itself and gives back a report: go on with the model"
        raise AttributeError(text)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        text = "fuse changes the model itself and gives back a report: call the model"
        raise TypeError(f"a {type(self).__name__} is no model; {text}")

    def _install(self, module: nn.Module, forward: Any, name: str = "forward") -> None:
        forward.__name__ = name  # by which pickle looks methods up: a saved model loads with torch's own forwards
        before, ours = module.__dict__.get(name), MethodType(forward, module)
        module.__dict__[name] = ours
        self._forwards.append((module, name, ours, before))

    def _replace_layer(self, where: str, module: nn.Module, linears: bool) -> None:
        """What becomes of one of torch's layers for transformers."""
        found = torch_layers.replacement_of(where, module, linears)
        for name, forward in found.forwards.items():
            self._install(module, forward, name)
        self.replaced += found.replaced
        self.kept += found.kept
        self._consumed.update(found.consumed)

    def _replace_linear(self, where: str, module: nn.Module) -> None:
        """Have a Linear that is in no pattern call our op."""
        weight: Any = module.weight
        if weight.dtype not in fused.LINEAR_DTYPES:
            self.kept.append(Note(where, "Linear", f"no row has weights of {weight.dtype}"))
        elif module not in self._consumed:
            self._install(module, fused.linear_forward)
            self.replaced.append(Note(where, "Linear"))
            self.kept = [note for note in self.kept if (note.where, note.what) != (where, "Linear")]

    def _record_graphs(self, model: nn.Module) -> None:
        """Have calls of the model that look alike replayed as CUDA graphs."""
        what = "forward as a CUDA graph"  # and the backward pass as another
        if NAME in model.__dict__:
            self.kept.append(Note("", what, "it is recorded already"))
            return
        before = model.__dict__.get("forward")
        inner = getattr(before, "__func__", None) if getattr(before, "__self__", None) is model else None
        if before is not None and inner is None:
            self.kept.append(Note("", what, "the model has a forward of its own"))
            return
        self.graphs = model.__dict__[NAME] = Graphs()
        self._install(model, graphed_forward(type(model).forward if inner is None else inner))
        self.replaced.append(Note("", what))

    def _replace_rotary(self, where: str, module: nn.Module) -> None:
        """Have a module of transformers call our rotary embedding, or note why not."""
        what = f"{type(module).__name__}: {transformers_rotary.NAME}"
        why = transformers_rotary.why_not(module)
        if "forward" in module.__dict__:
            why = "its forward was replaced already"
        if why:
            self.kept.append(Note(where, what, why))
        else:
            self._install(module, transformers_rotary.forward_of(module))
            self.replaced.append(Note(where, what))

    def _replace_attention(self, where: str, module: nn.Module) -> None:
        """Have a module of transformers call our attention, or note why not."""
        why = transformers_attention.why_not(module)
        if why:
            self.kept.append(Note(where, type(module).__name__, why))
            return
        config = module.__dict__["config"]
        module.__dict__["config"] = transformers_attention.config_view(config)
        self._configs.append((module, config))
        if not any(note.where.startswith(f"{where}.") and note.what == ATTENTION for note in self.replaced):
            self.replaced.append(Note(where, f"{type(module).__name__}: {ATTENTION}"))


@names_arguments
def fuse(model: nn.Module, *, trees: bool = False, linears: bool = False, graphs: bool = False) -> Report:
    """Have a model call the ops of this package where they do in one call what it does in several.

    The model itself is changed, and goes on being used; what is given back is the report of it.

    Replaced are Linear with ReLU or GELU by tanh behind it, and with one more Linear behind that, and Conv2d with ReLU,
    as modules or functions; LayerNorm, and RMSNorm, also of other libraries where it computes the same;
    scaled_dot_product_attention; in eval mode Conv2d with BatchNorm2d, what is added, and the ReLU behind it. Filters
    are folded with the norm's scale, in memory of their own, which is kept until torch counts a change of either: a
    write to x.data is not counted, nor what F.batch_norm does to statistics without their module.
    SiLU or the exact GELU times up, as in Llama's MLP, is one kernel; with `trees`
    the Linear in front of a SiLU is one with it, by CUTLASS, on sm_90, in f16 and bf16, where no gradient is asked for;
    its first call compiles it, for 15 to 40 s.

    Attention modules of transformers, whose config chooses "sdpa", call an attention function of ours that is in
    transformers' AttentionInterface as "dispatch"; the model's config stays what it is, and what is chosen there later,
    for example "eager" for its weights, runs. transformers' own function runs for what cuDNN does not take, for a query
    of one token, since cuDNN would prepare each length of the cache behind it anew, and for what a model adds to
    attention: soft caps, biases by position, caches in pages. Modules whose `apply_rotary_pos_emb` is Llama's, asked
    with numbers, call one kernel for it, and see what else their file has as it was when they were fused.

    MultiheadAttention called with need_weights=False attends by our op, TransformerEncoderLayer calls its modules in
    eval mode, too, where torch has one function for all; but padded sequences, which TransformerEncoder then packs to a
    nested tensor, run by that function as before.

    With `linears`, each other Linear is one call of `linear`, too.

    With `graphs`, the whole forward is a CUDA graph where it is called again and again with operands that look alike:
    tensors of the same layouts on one GPU, and the same numbers, strings and None; without gradients in eval mode.
    After three calls one is recorded, held against the forward itself, and replayed from then on, up to 16 graphs a
    model. Results are the caller's, in memory of their own. A parameter at another address, an attribute or submodule
    that was set, hooks, autocast, other operands: the forward itself runs, and a new graph is recorded later. What a
    forward reads besides (globals, files, a dict within an attribute) is as it was at the recording. A forward that
    writes to its operands or buffers, waits for the GPU or gives back other objects than tensors is not recorded:
    `report.graphs.reasons` counts why. Graphs keep the memory that their forwards need, all of them one pool, and their
    results beside it; on a GPU their replays run one behind the other, whichever streams they are called on.

    With gradients, in training and in eval mode, under autocast or not, forward and backward pass are two graphs behind
    one node of autograd, recorded after three calls that were followed by a backward pass, and held against results,
    gradients and buffers of the model itself. Gradients are handed to autograd in memory of their own: they accumulate,
    are seen by hooks of parameters, clipped, and reduced by DistributedDataParallel as ever. Random numbers are drawn
    anew at each replay; buffers, as statistics of batch norm, may be written to. A model has up to 8 such steps, in one
    pool of memory, which holds what one forward saved: until its backward pass was, or its results are gone, other
    forwards run themselves. So they do in anomaly mode, under hooks of saved tensors, in backward passes, and where the
    backward pass of calls before kept its graph or was one of a gradient. A backward pass that is another than the
    recorded one, as one that keeps its graph, runs the forward again; a gradient of the gradient is refused.

    At each call torch's own runs instead where an op does not take the operands, for example f64 in a norm, or f32 in
    attention; and in f32 on a GPU torch's layer norm and its GELU, for cuDNN's is up to twice as far off, cuBLASLt's
    ten times. Results are those of before within the rounding of the dtype: what is fused is rounded once. Modules with
    hooks are left as they are, and the forward of before runs where a hook, an epsilon, a stride, another child or any
    attribute that is a number, a string or a tuple of these was set later. torch.compile sees what it sees of other
    models: not the hooks of after it has compiled.

    What torch.fx sees of a forward is what counts: a branch on what is within an attribute, as on a config, is taken as
    it is now, one on `training` for both, one on the class of an argument as for a torch.fx.Proxy; and what it writes
    to attributes is not seen.
    A call with other arguments than the defaults of those that have one runs the forward of before. A fused model can
    be copied, trained, compiled, moved and pickled; what is loaded runs torch's own forwards until it is fused again.
    """
    if not isinstance(model, nn.Module):
        raise BadRequest("model", f"a {type(model).__name__}", "a torch.nn.Module")
    report = Report()
    _discard_loaded_forwards(model)
    for where, module in model.named_modules():
        kind = type(module)
        if "forward" in module.__dict__:
            report.kept.append(Note(where, kind.__name__, "it has a forward of its own already"))
            if transformers_rotary.is_replaced(module) and transformers_attention.uses_attention_interface(module):
                report._replace_attention(where, module)
        elif kind in NORMS:
            report._install(module, NORMS[kind])
            report.replaced.append(Note(where, kind.__name__))
        elif kind.__name__.endswith("RMSNorm") and _traceable(module):
            if fused.is_rms_norm(module):
                report._install(module, fused.other_rms_norm_forward)
                report.replaced.append(Note(where, kind.__name__))
            else:
                report.kept.append(Note(where, kind.__name__, "it does not compute weight · x / √(mean of x² + eps)"))
        elif kind in torch_layers.KINDS:
            report._replace_layer(where, module, linears)
        elif kind is nn.Linear and linears:
            report._replace_linear(where, module)
        elif _traceable(module):
            if not transformers_attention.is_replaced(module):
                _fuse_one(where, module, report, trees)
            if transformers_rotary.uses_rotary(module):
                report._replace_rotary(where, module)
            if transformers_attention.uses_attention_interface(module):
                report._replace_attention(where, module)
    if graphs:
        report._record_graphs(model)
    return report


def _traceable(module: nn.Module) -> bool:
    """Whether its forward is one that somebody wrote over other modules or functions."""
    kind = type(module)
    own = kind.forward is nn.Sequential.forward or not kind.__module__.startswith("torch.")
    return own and kind.forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def _fuse_one(where: str, module: nn.Module, report: Report, trees: bool) -> None:
    """Trace a module's own forward, in training and not, and install what was found in it."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    training, graphs = module.training, {}
    try:
        for mode in (True, False):
            module.training = mode
            graphs[mode] = _traced(module, parameters)
    except Exception as error:  # noqa: BLE001  # whatever tracing a forward of others raises
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        report.kept.append(Note(where, type(module).__name__, f"torch.fx cannot trace its forward: {reason}"))
        return
    finally:
        module.training = training
    searches = [Patterns(where, module, graph, mode, trees) for mode, graph in graphs.items()]
    before = {mode: call_counts(graph) for mode, graph in graphs.items()}
    for patterns in searches:
        patterns.replace()
    report.kept += dict.fromkeys(note for patterns in searches for note in patterns.kept)
    report._consumed.update(*(patterns.consumed for patterns in searches))
    replaced = dict.fromkeys(note for patterns in searches for note in patterns.replaced)
    if replaced:
        report.replaced += replaced
        forwards = {mode: type(fx.GraphModule(module, graph)).forward for mode, graph in graphs.items()}
        guards = {mode: ForwardGuards(module, before[mode] - call_counts(graph)) for mode, graph in graphs.items()}
        report._install(module, _guarded_forward(forwards, guards, parameters))


class _ShallowTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: nn.Module, parameters: list[inspect.Parameter]) -> fx.Graph:
    """The graph of a forward, with parameters that have defaults at these."""
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise TypeError("it takes *args, **kwargs or arguments by keyword alone; its modules were looked at")
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    buffers = module._buffers
    module.__dict__["_buffers"] = {name: None if t is None else t.clone() for name, t in buffers.items()}
    try:  # what the forward does to buffers alone, it does while it is traced
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about defaults that no assertion can be written for
            return _ShallowTracer().trace(module, defaults or None)
    finally:
        module.__dict__["_buffers"] = buffers


def _discard_loaded_forwards(model: nn.Module) -> None:
    """Remove what a model that was fused, saved and loaded has in place of its fused forwards: those of its classes."""
    for module in model.modules():
        own = vars(module)
        for name in [name for name, value in own.items() if isinstance(value, MethodType)]:
            if own[name].__self__ is module and own[name].__func__ is getattr(type(module), name, None):
                del own[name]
                own.pop(NAME, None)


def _guarded_forward(
    forwards: dict[bool, Any], guards: dict[bool, ForwardGuards], parameters: list[inspect.Parameter]
) -> Any:
    """A forward by the graphs for training and not, which have the parameters with defaults at these.

    Where the module is not as it was when they were made, its own forward runs.
    """
    defaults = {p.name: p.default for p in parameters}
    count = sum(default is inspect.Parameter.empty for default in defaults.values())

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = guards[self.training]
        if not (found.holds_while_compiling if torch.compiler.is_compiling() else found.holds_for)(self):
            return type(self).forward(self, *args, **kwargs)
        if kwargs or len(args) != count:
            bound = _bind_arguments(defaults, args, kwargs)
            if bound is None:
                return type(self).forward(self, *args, **kwargs)
            args = bound
        return forwards[self.training](self, *args)

    return forward


def _bind_arguments(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments without a default, in order; None if another has another value than its default, or none fits."""
    given = dict(zip(defaults, args, strict=False)) | kwargs
    if len(given) != len(args) + len(kwargs) or not given.keys() <= defaults.keys():
        return None
    required = []
    for name, default in defaults.items():
        if default is inspect.Parameter.empty:
            if name not in given:
                return None
            required.append(given[name])
        elif name in given and given[name] is not default:
            return None
    return tuple(required)
