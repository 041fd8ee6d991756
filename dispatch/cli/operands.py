"""The operands of a request from the command line, and defaults for those that it leaves out.

An operand that is left out gets the shape of the first one, unless other operands determine its shape: weights have
the size of their network, gradients the shape of their tensors. `COMPLETIONS` has the rules for such classes; the
command line always takes precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from dispatch.cli.request_flags import Partial, Spec, field_types, reader
from dispatch.core.communicator import Ranks
from dispatch.device.registry import device
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import F32, I32, U8, Dtype, Epilogue
from dispatch.libraries.threads.communicator import placeholder_communicator

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.libraries.cutlass.evt import Node

__all__ = ["RequestDraft", "tensor_of"]

Shape = tuple[int, ...]
OPERANDS = (Tensor, Tensor | None, Tensor | Sequence[int])  # the last one if the host may have the numbers


def tensor_of(spec: Spec) -> Tensor:
    """A host tensor of a spec, whose data is never read; defaults are C order and f32."""
    host, shape, dtype = device("host"), spec.shape or (), spec.dtype or F32
    if spec.strides is not None:  # rows with a larger pitch
        return host.empty((*shape[:-1], spec.strides[-2]), dtype)[..., : shape[-1]]
    if spec.order == "columns" and len(shape) > 1:
        return host.empty((*shape[:-2], shape[-1], shape[-2]), dtype).mT
    if spec.order == "channels_last" and len(shape) > 2:
        images = host.empty((shape[0], *shape[2:], shape[1]), dtype)
        return images.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))
    return host.empty(shape, dtype)


class RequestDraft:
    """A request class and the fields given on the command line; `specs` are its operands by name.

    An operand inside another field has both names: scales.a.
    """

    def __init__(self, kind: type[Any], values: dict[str, Any], dtype: Dtype | None) -> None:
        self.kind, self.values, self.dtype = kind, values, dtype
        self.fields = {field.name: field for field in sorted(fields(kind), key=lambda field: bool(field.kw_only))}
        self.specs: dict[str, Spec] = {}
        for name, value in values.items():
            self._collect(name, value)
        field_type = field_types(kind)
        self.operands = [name for name in self.fields if field_type[name] in OPERANDS]
        self.required = [name for name in self.operands if self.fields[name].default is MISSING]
        for name in self.fields:
            if field_type[name] is Ranks and name not in values:
                values[name] = placeholder_communicator(1)
        self.open_dtypes: list[str] = []  # operands whose dtype the rows may choose

    def _collect(self, name: str, value: Any) -> None:
        if isinstance(value, Spec):
            self.specs[name] = value
        elif isinstance(value, Partial):
            for key, part in value.values.items():
                self._collect(f"{name}.{key}", part)
        elif isinstance(value, dict):
            for key, part in value.items():
                self._collect(f"{name}.{key}", part)

    def add_shapes(self, given: list[Spec]) -> None:
        """Add the operands of --shape, in the order of the class."""
        free = [name for name in self.operands if name not in self.specs]
        if len(given) > len(free):
            raise BadRequest("--shape", f"{len(given)} operands", f"at most {len(free)}: {', '.join(free)}")
        self.specs |= dict(zip(free, given, strict=False))

    def missing_fields(self) -> list[str]:
        """The required fields that are not operands and are not given."""
        needed = [name for name, field in self.fields.items() if field.default is field.default_factory is MISSING]
        return [name for name in needed if name not in self.values and name not in self.required]

    def expected(self, name: str) -> str:
        """A description of the values that a field takes."""
        field_reader = reader(name, field_types(self.kind)[name])
        return "a value that no flag can express" if field_reader is None else field_reader.expected

    def complete(self) -> dict[str, Spec]:
        """All operands, including defaults for those that were left out."""
        for base in self.kind.__mro__:
            COMPLETIONS.get(base.__name__, _no_completion)(self)
        for name in self.required:
            first = self.specs.get(self.required[0], Spec())
            if first.shape is None:
                expected = f"extents of {self.required[0]}, the first operand, like 8x64"
                raise BadRequest("--shape", "none", expected)
            self.require(name, first.shape, order=first.order)
        for name, spec in self.specs.items():
            if spec.shape is None:
                raise BadRequest(f"--{name.replace('_', '-')}", "no extents", f"extents of {name}, like 8x64")
            if spec.dtype is None:
                self.specs[name] = spec._replace(dtype=self._default_dtype())
                if name not in self.required:
                    self.open_dtypes.append(name)
        return self.specs

    def _default_dtype(self) -> Dtype:
        first = next((self.specs[name].dtype for name in self.required if name in self.specs), None)
        dtype = self.dtype or first
        if dtype is None:
            raise BadRequest("--dtype", "none", f"the dtype of the operands: one of {', '.join(Dtype.by_name)}")
        return dtype

    def require(
        self,
        name: str,
        shape: Shape,
        dtype: Dtype | None = None,
        order: str | None = None,
        strides: Shape | None = None,
    ) -> Shape:
        """Make sure that an operand exists, with these defaults for what is not given; returns its shape."""
        spec = self.specs.get(name, Spec())
        if spec.shape is None:
            spec = spec._replace(shape=shape, order=spec.order or order, strides=strides)
        self.specs[name] = spec if spec.dtype is not None else spec._replace(dtype=dtype)
        return self.specs[name].shape or ()

    def shape(self, name: str) -> Shape:
        """The shape of an operand; BadRequest if it was not given."""
        spec = self.specs.get(name, Spec())
        if spec.shape is None:
            raise BadRequest("--shape", f"none of {name}", f"extents of {name}, like 8x64x32x32")
        return spec.shape

    def value(self, name: str) -> Any:
        """The value of a field, or its default."""
        given = self.values.get(name, self.fields[name].default)
        if given is MISSING:
            raise BadRequest(f"--{name.replace('_', '-')}", "nothing", f"a {name}, which {self.kind.op} requires")
        return given.kind(**given.values) if isinstance(given, Partial) else given

    def tensor(self, name: str) -> Tensor:
        spec = self.specs[name]
        return tensor_of(spec if spec.dtype is not None else spec._replace(dtype=self._default_dtype()))


# -- defaults that depend on other operands ---------------------------------------------------------------------------
def _no_completion(_: RequestDraft) -> None:
    pass


def _product(draft: RequestDraft) -> None:
    """A and B of 256 by 256; bias, aux and scale factors if the epilogue and the modes need them."""
    *batch, m, k = draft.require("a", (256, 256))
    n = draft.require("b", (*batch, k, 256))[-1]
    if "c" in draft.specs:
        draft.require("c", (*batch, m, n))
    epilogue = draft.value("epilogue")
    if isinstance(epilogue, Epilogue):
        _epilogue_operands(draft, epilogue, (*batch, m, n), k)
    elif epilogue is not None:
        _tree_operands(draft, epilogue, (*batch, m, n))


def _epilogue_operands(draft: RequestDraft, epilogue: Epilogue, shape: Shape, k: int) -> None:
    from dispatch.ops.matmul.scales import aux_shape, scale_shape

    if epilogue.adds_bias or "bias" in draft.specs:
        draft.require("bias", shape[-1:])
    if epilogue.activation and (epilogue.writes_aux or epilogue.is_gradient):
        aux, strides = aux_shape(epilogue, shape)
        draft.require("aux", aux, U8 if epilogue.activation == "relu" else None, strides=strides)
    scales = draft.values.get("scales", Partial(object, {})).values
    for side, lines in (("a", shape[-2]), ("b", shape[-1])):
        if f"{side}_mode" in scales and not isinstance(scales.get(side), float):
            dtype, factors = scale_shape(scales[f"{side}_mode"], lines, k)
            draft.require(f"scales.{side}", factors or (1,), dtype)


def _tree_operands(draft: RequestDraft, tree: Node, shape: Shape) -> None:
    from dispatch.libraries.cutlass.visitors import operands_of

    shapes = {"row": shape[-1:], "col": shape[-2:-1], "load": shape, "scalar": (1,)}
    for name, kind in operands_of(tree).items():
        if kind in shapes and name not in ("alpha", "beta") and not isinstance(_given(draft, name), (int, float)):
            draft.require(f"operands.{name}", shapes[kind], F32)


def _given(draft: RequestDraft, name: str) -> Any:
    return draft.values.get("operands", {}).get(name)


def _convolution(draft: RequestDraft) -> None:
    for name in draft.required[:2]:  # images and filters have different shapes
        draft.shape(name)
    if draft.value("epilogue") is not None and draft.kind.mode == "fwd":
        _tree_images(draft)


def _tree_images(draft: RequestDraft) -> None:
    """The operands of a forward convolution's tree; the result's shape depends on pad, stride and dilation."""
    from dispatch.libraries.cutlass.visitors import operands_of

    geometry = {name: draft.value(name) for name in ("pad", "stride", "dilation")}
    shape = draft.kind(draft.tensor("x"), draft.tensor("w"), **geometry).y_shape
    pixels = (shape[0], *shape[2:])
    for name, kind in operands_of(draft.value("epilogue")).items():
        if name in ("alpha", "beta") or isinstance(_given(draft, name), (int, float)):
            continue
        if kind == "load":
            draft.require(f"operands.{name}", shape, F32, "channels_last")
        elif kind in ("row", "col", "scalar"):
            draft.require(f"operands.{name}", {"row": shape[1:2], "col": pixels, "scalar": (1,)}[kind], F32)


def _groups(draft: RequestDraft) -> None:
    draft.require("ends", draft.shape("b")[:1], I32)


def _network(draft: RequestDraft) -> None:
    network = draft.value("network")
    reads_x = "x" in draft.fields
    steps, batch, _ = draft.require(
        "x" if reads_x else "y", (16, 8, network.input_size if reads_x else network.output_size)
    )
    if "y" in draft.fields:
        draft.require("y", (steps, batch, network.output_size))
    if "weights" in draft.fields:
        draft.require("weights", (network.weight_count,))
    if "reserve" in draft.required:
        draft.require("reserve", (64,), U8)  # its size is checked when the plan is made
    if "training" in draft.fields and draft.value("training") and draft.value("dropout"):
        _states(draft)
    for name, size in (("hx", network.state_size), ("cx", network.hidden_size)):
        if name in draft.specs:
            draft.require(name, (network.pseudo_layers, batch, size))


def _states(draft: RequestDraft) -> None:
    from dispatch.libraries.cudnn.dropout_states import states_bytes

    draft.require("states", (states_bytes(device("host")),), U8)


def _dropout_backward(draft: RequestDraft) -> None:
    from dispatch.ops.dropout import reserve_bytes

    size = 1
    for extent in draft.shape("dy"):
        size *= extent
    draft.require("reserve", (reserve_bytes(size),), U8)


def _norm(draft: RequestDraft) -> None:
    from dispatch.ops.norm import NormFwdRequest

    x = draft.shape(draft.required[0])
    draft.require("x", x)
    mode = draft.value("mode")
    channels = mode.name in ("BATCH_NORM", "INSTANCE_NORM", "GROUP_NORM")
    scale = draft.require("scale", x[1:2] if channels else x[-1:], F32)
    if "bias" in draft.operands and "bias" in draft.specs:
        draft.require("bias", scale, draft.specs["scale"].dtype)
    if "running_mean" in draft.fields and mode.name == "BATCH_NORM" and not draft.value("training"):
        draft.require("running_mean", scale, F32)
        draft.require("running_var", scale, F32)
    if "inv_variance" in draft.fields:
        choices = {"mode": mode, "groups": draft.value("groups"), "training": True}
        outputs = NormFwdRequest(draft.tensor("x"), draft.tensor("scale"), **choices).outputs()
        draft.require("inv_variance", outputs["inv_variance_out"].shape, F32)
        if "mean_out" in outputs:
            draft.require("mean", outputs["mean_out"].shape, F32)


def _pooling_backward(draft: RequestDraft) -> None:
    from dispatch.ops.pooling import PoolingRequest

    draft.shape("x")
    choices = {name: draft.value(name) for name in ("window", "mode", "stride", "padding")}
    output = PoolingRequest(draft.tensor("x"), **choices).outputs()["out"]
    order = draft.specs["x"].order
    draft.require("dy", draft.require("y", output.shape, order=order), order=order)


def _sdpa_backward(draft: RequestDraft) -> None:
    from dispatch.ops.sdpa import SdpaFwdRequest

    q = draft.shape("q")
    for name in ("k", "v"):
        draft.require(name, q, order=draft.specs["q"].order)
    if {"o", "do", "stats"} <= draft.specs.keys():
        return
    outputs = SdpaFwdRequest(draft.tensor("q"), draft.tensor("k"), draft.tensor("v"), stats=True).outputs()
    draft.require("do", draft.require("o", outputs["out"].shape))
    draft.require("stats", outputs["stats_out"].shape, F32)


def _ctc(draft: RequestDraft) -> None:
    _, sequences, _ = (*draft.shape("logits"), 0, 0)[:3]
    draft.require("labels", (sequences * draft.value("max_label_length"),), I32)
    for name in ("label_lengths", "input_lengths"):
        draft.require(name, (sequences,), I32)


def _rope(draft: RequestDraft) -> None:
    q = draft.shape("q")
    draft.require("k", q, order=draft.specs["q"].order)
    draft.require("sin", draft.require("cos", (1, *q[2:])), draft.specs["cos"].dtype)


def _attention_merge(draft: RequestDraft) -> None:
    a = draft.shape("a")
    draft.require("b", a, order=draft.specs["a"].order)
    for name in ("a_stats", "b_stats"):
        draft.require(name, (*a[:-1], 1), F32)


def _plane_rotation(draft: RequestDraft) -> None:
    from dispatch.ops.blas.level1 import REAL

    dtype = draft.specs.get("x", Spec()).dtype or draft.dtype
    draft.require("c", (), None if dtype is None else REAL.get(dtype, dtype))
    draft.require("s", ())


def _scalars(draft: RequestDraft) -> None:
    for name in draft.required:
        draft.require(name, ())


COMPLETIONS: dict[str, Callable[[RequestDraft], Any]] = {  # by the name of a request class or of a base class
    "MatmulRequest": _product,
    "GroupedMatmulRequest": _groups,
    "ConvRequest": _convolution,
    "RnnBase": _network,
    "DropoutRequest": _states,
    "DropoutBwdRequest": _dropout_backward,
    "NormRequest": _norm,
    "PoolingBwdRequest": _pooling_backward,
    "SdpaBwdRequest": _sdpa_backward,
    "CtcRequest": _ctc,
    "RopeRequest": _rope,
    "AttentionMergeRequest": _attention_merge,
    "RotRequest": _plane_rotation,
    "RotmRequest": lambda draft: draft.require("param", (5,)),
    "RotgRequest": _scalars,
    "RotmgRequest": _scalars,
}
