"""`fuse`: finds operations in a torch model that the ops of this package run in one call, and replaces them.

torch.fx traces the forward of each module separately, with its children as leaves, so a module that cannot be traced
does not affect the others. A module with replacements gets an instance attribute `forward`, which `Report.undo`
removes. Parameters, submodules and state_dict do not change, and the weights are read from the module at each call.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from dispatch.checks import check_bool, names_arguments
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
        replaced: what was replaced by ops of this package; for unsupported operands torch's own functions run.
        kept: candidates that were not replaced, and why.
        graphs: with `graphs=True`, the numbers of recordings and replays, and why other calls were not replayed.
    """

    replaced: list[Note] = field(default_factory=list)
    kept: list[Note] = field(default_factory=list)
    graphs: Graphs | None = None
    _forwards: list[tuple[nn.Module, str, Any, Any]] = field(
        default_factory=list, repr=False
    )  # module, name, new, previous
    _configs: list[tuple[nn.Module, Any]] = field(default_factory=list, repr=False)
    _consumed: set[nn.Module] = field(default_factory=set, repr=False)  # modules whose weights a fused parent reads

    def undo(self) -> None:
        """Restore the previous forwards and configs of all modules; a second call does nothing.

        A forward that other code has set on a module since `fuse` stays. If it calls the fused forward, that stays in
        use, too, until you restore the module's own forward. If a model was fused twice, undo the second report first.
        """
        for module, name, fused_forward, before in reversed(self._forwards):
            if module.__dict__.get(name) is fused_forward:
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
            text += "; fuse changes the model itself and returns a report: use the model"
        raise AttributeError(text)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        text = "fuse changes the model itself and returns a report: call the model"
        raise TypeError(f"a {type(self).__name__} is not a model; {text}")

    def _install(self, module: nn.Module, forward: Any, name: str = "forward") -> None:
        forward.__name__ = name  # pickle looks methods up by it: a saved model loads with the forwards of its classes
        before, method = module.__dict__.get(name), MethodType(forward, module)
        module.__dict__[name] = method
        self._forwards.append((module, name, method, before))

    def _replace_layer(self, where: str, module: nn.Module, linears: bool) -> None:
        """Replace the forwards of one of torch's transformer layers, or note why not."""
        replacement = torch_layers.replacement_of(where, module, linears)
        for name, forward in replacement.forwards.items():
            self._install(module, forward, name)
        self.replaced += replacement.replaced
        self.kept += replacement.kept
        self._consumed.update(replacement.consumed)

    def _replace_linear(self, where: str, module: nn.Module) -> None:
        """Make a Linear that is in no pattern call our op."""
        weight: Any = module.weight
        if weight.dtype not in fused.LINEAR_DTYPES:
            self.kept.append(Note(where, "Linear", f"no row has weights of {weight.dtype}"))
        elif module not in self._consumed:
            self._install(module, fused.linear_forward)
            self.replaced.append(Note(where, "Linear"))
            self.kept = [note for note in self.kept if (note.where, note.what) != (where, "Linear")]

    def _record_graphs(self, model: nn.Module) -> None:
        """Record repeated calls of the model as CUDA graphs and replay them."""
        what = "forward as a CUDA graph"  # and the backward pass as another
        if NAME in model.__dict__:
            self.kept.append(Note("", what, "it is recorded already"))
            return
        before = model.__dict__.get("forward")
        inner = getattr(before, "__func__", None) if getattr(before, "__self__", None) is model else None
        if before is not None and inner is None:
            self.kept.append(Note("", what, "the model has its own forward attribute"))
            return
        self.graphs = model.__dict__[NAME] = Graphs()
        self._install(model, graphed_forward(type(model).forward if inner is None else inner))
        self.replaced.append(Note("", what))

    def _replace_rotary(self, where: str, module: nn.Module) -> None:
        """Make a transformers module call our rotary embedding, or note why not."""
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
        """Make a transformers module call our attention, or note why not."""
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
    """Replace operations of a model by ops of this package that run several of them in one call.

    The model itself is changed; continue to use it. The return value is a report of the changes.

    These are replaced, as modules or functions: Linear followed by ReLU or by GELU with the tanh approximation, also
    with one more Linear after it; Conv2d with ReLU; LayerNorm and RMSNorm, including other libraries' RMS norms that
    compute the same; scaled_dot_product_attention; in eval mode Conv2d with BatchNorm2d, an added residual, and a ReLU
    after it. Filters multiplied by the norm's scale are cached until torch increments the version of one of the
    tensors. torch does not count writes to x.data, nor updates of statistics by F.batch_norm without their module.
    SiLU or the exact GELU times another tensor, as in Llama's MLP, is one kernel. With `trees`, the Linear before a
    SiLU is part of that kernel (CUTLASS, on sm_90, in f16 and bf16, when no gradient is needed); its first call
    compiles it, which takes 15 to 40 s.

    Attention modules of transformers whose config selects "sdpa" call our attention function, which is registered in
    transformers' AttentionInterface as "dispatch". The model's config does not change; if you select another function
    there later, for example "eager" to get attention weights, that one runs. transformers' own function runs for
    operands that cuDNN does not support, for a query of one token (cuDNN would need a new plan for each length of the
    cache), and for additions to attention: soft caps, position biases, paged caches. Modules whose
    `apply_rotary_pos_emb` computes the same as Llama's, tested on numbers, call one kernel for it; they use the other
    globals of their file as they were when the module was fused.

    MultiheadAttention called with need_weights=False uses our attention op. TransformerEncoderLayer calls its modules
    in eval mode, too, where torch would run one function for the whole layer; for padded sequences, which
    TransformerEncoder packs to a nested tensor, that function still runs.

    With `linears`, each other Linear calls `linear`, too.

    With `graphs`, repeated calls of the whole forward run as a CUDA graph if their operands are alike: tensors with the
    same layouts on one GPU, and equal numbers, strings and None; without gradients, in eval mode. After three such
    calls, one is recorded, compared with the forward itself, and replayed from then on, with up to 16 graphs per model.
    Results are copies that belong to the caller. The forward itself runs, and a new graph may be recorded later, if a
    parameter has another address, an attribute or submodule was set, there are hooks or autocast, or the operands
    differ. Other data that a forward reads (globals, files, a dict in an attribute) is frozen at the recording. A
    forward is not recorded if it writes to its operands or buffers, waits for the GPU, or returns objects other than
    tensors: `report.graphs.reasons` counts the reasons. Graphs keep the memory that their forwards need, in one pool,
    and their results outside the pool. On a GPU their replays run one after the other, whatever stream is current.

    With gradients, in training and eval mode, with or without autocast, the forward and the backward pass are two
    graphs behind one autograd node. They are recorded after three calls that were followed by a backward pass, and
    compared with the results, gradients and buffers of the model itself. Autograd gets copies of the gradients, so
    gradient accumulation, parameter hooks, clipping and DistributedDataParallel work as usual. Each replay draws new
    random numbers. The forward may write to buffers, such as batch norm statistics. A model has up to 8 such steps in
    one memory pool, which holds the saved tensors of one forward: until its backward pass has run, or its results are
    deleted, other forwards run eagerly. Forwards also run eagerly in anomaly mode, under saved-tensor hooks, inside
    backward passes, and if the backward pass of an earlier call retained its graph or computed a gradient of a
    gradient. If a backward pass differs from the recorded one, for example because it retains its graph, the forward
    runs again; a gradient of the gradient is refused.

    At each call, torch's own functions run for operands that an op does not support, for example f64 in a norm, f32 in
    attention, sparse and nested tensors or those of a subclass, and all operands within torch.func's transforms and
    forward-mode AD. In f32 on a GPU torch's layer norm and GELU are used, because cuDNN's layer norm has up to twice
    the error, and cuBLASLt's GELU ten times. Results equal the previous ones within the rounding of the dtype: fused
    operations round once. Modules with hooks are not changed. The original forward runs if later a hook, an epsilon, a
    stride, another child or any attribute that is a number, a string or a tuple of these was set. torch.compile checks
    what it checks of other models; it ignores hooks that are set after compilation.

    Replacements are based on what torch.fx traces: a branch on data inside an attribute, such as a config, is traced
    with its present value, a branch on `training` for both values, a branch on the class of an argument for a
    torch.fx.Proxy. Writes to attributes are not traced.
    A call that passes another value for a parameter than its default runs the original forward. A fused model can be
    copied, trained, compiled, moved and pickled; a loaded model runs torch's own forwards until it is fused again.
    """
    if not isinstance(model, nn.Module):
        raise BadRequest("model", f"a {type(model).__name__}", "a torch.nn.Module")
    for name, choice in (("trees", trees), ("linears", linears), ("graphs", graphs)):
        check_bool(name, choice)
    report = Report()
    _discard_loaded_forwards(model)
    for where, module in model.named_modules():
        kind = type(module)
        if "forward" in module.__dict__:
            report.kept.append(Note(where, kind.__name__, "it has its own forward attribute already"))
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
    """Whether the module's forward is user code that calls other modules or functions."""
    kind = type(module)
    is_composite = kind.forward is nn.Sequential.forward or not kind.__module__.startswith("torch.")
    return is_composite and kind.forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def _fuse_one(where: str, module: nn.Module, report: Report, trees: bool) -> None:
    """Trace a module's own forward in training and in eval mode, and install the forward with the replacements."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    training, graphs = module.training, {}
    try:
        for mode in (True, False):
            module.training = mode
            graphs[mode] = _traced(module, parameters)
    except Exception as error:  # noqa: BLE001  # tracing a user's forward may raise anything
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
    """The graph of a forward; parameters with defaults have these values."""
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise TypeError("it takes *args, **kwargs or keyword-only arguments; its modules were searched")
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    buffers = module._buffers
    module.__dict__["_buffers"] = {name: None if t is None else t.clone() for name, t in buffers.items()}
    try:  # tracing runs operations that involve only buffers: let it change copies of the buffers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about default values that torch.fx cannot assert
            return _ShallowTracer().trace(module, defaults or None)
    finally:
        module.__dict__["_buffers"] = buffers


def _discard_loaded_forwards(model: nn.Module) -> None:
    """Remove the attributes that pickle restored in place of fused forwards: the methods of the modules' classes."""
    for module in model.modules():
        attributes = vars(module)
        for name in [name for name, value in attributes.items() if isinstance(value, MethodType)]:
            if attributes[name].__self__ is module and attributes[name].__func__ is getattr(type(module), name, None):
                del attributes[name]
                attributes.pop(NAME, None)


def _guarded_forward(
    forwards: dict[bool, Any], guards: dict[bool, ForwardGuards], parameters: list[inspect.Parameter]
) -> Any:
    """A forward that runs the graph for training or for eval mode; parameters with defaults have these values.

    If the module has changed since it was traced, its own forward runs.
    """
    defaults = {p.name: p.default for p in parameters}
    count = sum(default is inspect.Parameter.empty for default in defaults.values())

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        guard = guards[self.training]
        if not (guard.holds_while_compiling if torch.compiler.is_compiling() else guard.holds_for)(self):
            return type(self).forward(self, *args, **kwargs)
        if kwargs or len(args) != count:
            bound = _bind_arguments(defaults, args, kwargs)
            if bound is None:
                return type(self).forward(self, *args, **kwargs)
            args = bound
        return forwards[self.training](self, *args)

    return forward


def _bind_arguments(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The required arguments in order; None if others differ from their defaults or the arguments do not match."""
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
