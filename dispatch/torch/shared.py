"""Code that the ops for PyTorch share: definition of ops, autocast, checks, and layouts that libraries support."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ALIGNED",
    "Op",
    "autocast",
    "check_tensors",
    "define",
    "dense",
    "empty_in_order_of",
    "empty_result",
    "is_plain_eager",
    "is_plain_inference",
    "is_strided",
    "is_transformed",
    "move_vmap_axis",
    "needs_gradient",
    "on_gpu",
    "overrides_functions",
    "rows_at_16",
    "rows_of",
]

ALIGNED = 16  # bytes: the size of a vector load in the libraries


def _mode_query(name: str) -> Callable[[], bool]:
    """A function of torch that tells whether a mode is on; a mode counts as on if torch lacks the function."""
    query: Callable[[], bool] = getattr(torch._C, name, lambda: True)
    return query


# A call through torch's dispatcher costs 7 µs in Python, 18 with a gradient. These tell whether it is necessary.
_in_dispatch_mode = _mode_query("_len_torch_dispatch_stack")
_in_function_mode = _mode_query("_is_torch_function_mode_enabled")
_in_transform = _mode_query("_are_functorch_transforms_active")
_in_trace = _mode_query("_is_tracing")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain_eager() -> bool:
    """Whether torch would only run an op: no compiler, mode, transform, trace, profiler or forward-mode AD is on."""
    return not (
        torch.compiler.is_compiling()
        or _in_dispatch_mode()
        or _in_function_mode()
        or _in_transform()
        or _in_trace()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


def is_plain_inference() -> bool:
    """Whether a call with plain CUDA tensors and without a gradient can bypass torch's dispatcher."""
    return is_plain_eager() and not torch.is_autocast_enabled("cuda")


def is_transformed() -> bool:
    """Whether a call is part of one of torch.func's transforms or of forward-mode AD; False within torch.compile."""
    return not torch.compiler.is_compiling() and (_in_transform() or forward_ad._current_level >= 0)


def is_strided(x: Any) -> bool:
    """Whether a tensor is elements at strides in memory: neither sparse, nor nested, nor in a library's own layout."""
    return x.layout is torch.strided and not x.is_nested


def overrides_functions(x: Any) -> bool:
    """Whether a tensor is of a class of a user's or a library's that runs torch's functions in its own way.

    Such are wrappers of other tensors, and subclasses in Python that have no `__torch_dispatch__` of their own.
    """
    kind = type(x)
    return kind not in _PLAIN and (is_traceable_wrapper_subclass(x) or _is_python_subclass(kind))


def _is_python_subclass(kind: type) -> bool:
    """Whether a class, neither Tensor nor Parameter, has a Tensor's memory; that of a fake tensor, e.g., has none."""
    return getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def on_gpu(x: Any) -> bool:
    """Whether calls with this tensor can be cached (core/framework_call_cache.py)."""
    return bool(x.is_cuda)


def needs_gradient(*operands: Any) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def _runs_directly(operands: tuple[Any, ...]) -> bool:
    """Whether torch would only run the op, and all operands are plain tensors."""
    if not is_plain_eager():
        return False
    for x in operands:
        if isinstance(x, torch.Tensor) and not (
            type(x) in _PLAIN and (x.is_cpu or x.is_cuda) and not x.is_neg() and not x._is_zerotensor()
        ):
            return False
    return True


class Op:
    """A torch custom op, called in the shortest way that has the same effect.

    Attributes:
        overload: the registered op, for torch.compile, torch.export, transforms and modes.
    """

    __slots__ = ("_forward", "_function", "_lists", "_name", "overload")

    def __init__(self, overload: Any, forward: Callable[..., Any], save: Any, backward: Any, lists: bool) -> None:
        self.overload = overload
        self._name = overload.name()
        self._lists = lists  # it takes lists of tensors, for which torch.autograd.Function has no gradients
        self._forward = forward
        self._function = None if backward is None or lists else _function(forward, save, backward)

    @staticmethod
    def direct(*operands: Any) -> bool:
        """Whether a call without gradients can bypass torch and call the implementation directly."""
        return _runs_directly(operands)

    def __call__(self, *operands: Any) -> Any:
        tensors = _flatten(operands) if self._lists else operands
        if not _runs_directly(tensors):
            if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
                _check_tangents(self._name, tensors)
            return self.overload(*operands)
        if torch.is_grad_enabled():
            for x in tensors:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    return self.overload(*operands) if self._function is None else self._function.apply(*operands)
        return self._forward(*operands)


def _check_tangents(name: str, tensors: tuple[Any, ...]) -> None:
    """BadRequest if an operand has a forward-mode tangent: torch would silently use 0 as a custom op's tangent."""
    for x in tensors:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            _refuse_tangents(name, "an operand with a tangent of forward-mode AD")


def _refuse_tangents(name: str, what: str) -> NoReturn:
    raise BadRequest(name, what, "operands without tangents", "torch.autograd.grad uses reverse mode")


def _flatten(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands, with lists expanded."""
    return tuple(one for x in operands for one in (x if isinstance(x, list) else (x,)))


def _function(forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """The torch.autograd.Function of an op's forward and backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            output = _without_views(forward(*operands))
            save(ctx, operands, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    return Function


def _without_views(output: Any) -> Any:
    """An op's results as tensors that autograd does not treat as views, so that users may write to them in place."""
    if isinstance(output, (tuple, list)):
        return type(output)(map(_without_views, output))
    if isinstance(output, torch.Tensor) and output._is_view():
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output


def define(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> Op:
    """Define the torch custom op `dispatch::name` by its implementation, its fake-tensor rule and its gradient.

    Without `backward` torch refuses a gradient through the op, as it refuses a gradient of a gradient. Without `vmap`,
    torch.vmap over the op is refused.
    """

    def implementation(*operands: Any) -> Any:
        if forward_ad._current_level >= 0:  # the caller is a graph that was compiled before forward-mode AD began
            _check_tangents(f"dispatch::{name}", _flatten(operands))
        return _without_views(forward(*operands))

    def fake_implementation(*operands: Any) -> Any:
        # torch.compile calls this with operands stripped of their tangents, so whether they had one is unknown.
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"dispatch::{name}", "a compiled call within forward-mode AD")
        return fake(*operands)

    op = torch.library.custom_op(f"dispatch::{name}", implementation, mutates_args=(), schema=schema)
    op.register_fake(fake_implementation)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    op.register_vmap(_refuse_vmap(name) if vmap is None else vmap)
    return Op(getattr(torch.ops.dispatch, name).default, forward, save, backward, "Tensor[] " in schema)


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(_info: Any, _in_dims: Any, *_operands: Any) -> Any:
        what = f"torch.vmap over dispatch::{name}"
        raise BadRequest(name, what, "operands without a vmap axis", "pass that axis as a leading axis of x")

    return refuse


def move_vmap_axis(name: str, info: Any, in_dims: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a vmap rule, the first one's mapped axis moved to the front; others must have no mapped axis."""
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return tuple(_refuse_vmap(name)(info, in_dims, *operands))
    return (operands[0].movedim(in_dims[0], 0), *operands[1:])


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype if it is on for the first one's device; f64 tensors are not cast, as in torch."""
    device_type = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def check_tensors(dtypes: tuple[torch.dtype, ...], **operands: Any) -> None:
    """BadRequest for an operand that is not a tensor, or whose dtype or device differs from the first one's."""
    names = iter(operands)
    first = next(names)
    x = operands[first]
    _check_tensor(dtypes, first, x)
    dtype, device = x.dtype, x.device
    for name in names:
        x = operands[name]
        if isinstance(x, torch.Tensor) and x.dtype is dtype and x.device == device and _is_elements(x):
            continue
        _check_tensor(dtypes, name, x)
        if x.dtype != dtype:
            raise BadRequest(
                name, f"a tensor of {x.dtype}", f"{dtype}, the dtype of {first}", "torch.autocast, or x.to(…)"
            )
        raise BadRequest(name, f"a tensor on {x.device}", f"one on {device}", "x.to(…)")


def _check_tensor(dtypes: tuple[torch.dtype, ...], name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise BadRequest(name, f"a {type(x).__name__}", "a torch.Tensor")
    if not _is_elements(x):
        _refuse_kind(name, x)
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BadRequest(name, f"a tensor of {x.dtype}", f"one of the supported dtypes: {names}", "x.to(…)")


def _is_elements(x: Any) -> bool:
    """Whether an op reads a tensor's memory, or that of what its class stands for."""
    kind = type(x)
    return is_strided(x) and (kind in _PLAIN or not _is_python_subclass(kind))


def _refuse_kind(name: str, x: Any) -> NoReturn:
    if x.is_nested:
        raise BadRequest(name, "a nested tensor", "a tensor of one shape", "torch.nested.to_padded_tensor(x, 0.0)")
    if x.layout is not torch.strided:
        raise BadRequest(name, f"a tensor of layout {x.layout}", "a strided one", "x.to_dense()")
    hint = "x.as_subclass(torch.Tensor), if only the elements in memory are meant"
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    raise BadRequest(name, f"a {kind}", "a torch.Tensor or Parameter itself", hint)


def dense(x: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The tensor if it is dense and aligned to 16 bytes, else a copy."""
    x = x.contiguous(memory_format=memory_format)
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def rows_of(x: Any) -> Any:
    """(…, k) as a matrix with dense rows that do not overlap; a view if the strides allow it, else a copy."""
    if x.ndim != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows, k = x.shape
    between, within = x.stride()
    if (within == 1 or k <= 1) and (between >= k or rows <= 1):
        return x
    return x.contiguous()


def rows_at_16(x: Any) -> Any:
    """The tensor with dense rows at multiples of 16 bytes, as TMA descriptors require; a copy if it has others."""
    multiple, k = ALIGNED // x.element_size(), x.shape[-1]
    between, along = x.stride()[-2:]
    is_dense = along == 1 and (between >= k or x.shape[-2] == 1) and x.data_ptr() % ALIGNED == 0
    strides = (stride for stride, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True) if extent > 1)
    if is_dense and (k > 1 or between > 1) and all(stride % multiple == 0 for stride in strides):
        return x
    return x.new_empty((*x.shape[:-1], -(-k // multiple) * multiple))[..., :k].copy_(x)


def empty_in_order_of(x: Any) -> Any:
    """An uninitialized dense tensor whose axes have the same order in memory as x's."""
    order = sorted(range(x.ndim), key=lambda axis: (-x.stride(axis), axis))
    empty = x.new_empty([x.shape[axis] for axis in order])
    return empty.permute([order.index(axis) for axis in range(x.ndim)])


def empty_result(like: Any) -> Any:
    """An empty tensor in place of a result that is not needed."""
    return like.new_empty(0)
