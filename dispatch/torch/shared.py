"""What the ops for PyTorch share: how one is defined, autocast, checks, and operands as libraries take them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad, profiler

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
    "lines_at_16",
    "move_vmap_axis",
    "needs_gradient",
    "on_gpu",
    "rows_of",
]

ALIGNED = 16  # bytes: where a library reads vectors, it reads so many at once


def _listens(name: str) -> Callable[[], bool]:
    """Whether something of torch's listens to calls; what a version of torch does not have is taken to listen."""
    found: Callable[[], bool] = getattr(torch._C, name, lambda: True)
    return found


# A call through torch's dispatcher costs 7 µs in Python, 18 with a gradient; these say whether anything listens there.
_in_dispatch_mode = _listens("_len_torch_dispatch_stack")
_in_function_mode = _listens("_is_torch_function_mode_enabled")
_in_transform = _listens("_are_functorch_transforms_active")
_in_trace = _listens("_is_tracing")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain_eager() -> bool:
    """Whether torch would only run an op: there is no compiler, mode, transformation, trace, profiler or forward AD."""
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
    """Whether a call over plain tensors on a GPU, which needs no gradient, is for us alone."""
    return is_plain_eager() and not torch.is_autocast_enabled("cuda")


def on_gpu(x: Any) -> bool:
    """Whether calls over a tensor may be remembered (core/framework_call_cache.py)."""
    return bool(x.is_cuda)


def needs_gradient(*operands: Any) -> bool:
    """Whether autograd follows a call over these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def _runs_directly(operands: tuple[Any, ...]) -> bool:
    """Whether torch would do nothing but run the op, over tensors that are what they seem."""
    if not is_plain_eager():
        return False
    for x in operands:
        if isinstance(x, torch.Tensor) and not (
            type(x) in _PLAIN and (x.is_cpu or x.is_cuda) and not x.is_neg() and not x._is_zerotensor()
        ):
            return False
    return True


class Op:
    """A custom op of torch's, called by the shortest way that means the same.

    Attributes:
        overload: the op as torch.compile, torch.export, transformations and modes see it.
    """

    __slots__ = ("_forward", "_function", "_lists", "_name", "overload")

    def __init__(self, overload: Any, forward: Callable[..., Any], save: Any, backward: Any, lists: bool) -> None:
        self.overload = overload
        self._name = overload.name()
        self._lists = lists  # there are lists of tensors, whose gradients torch.autograd.Function does not follow
        self._forward = forward
        self._function = None if backward is None or lists else _function(forward, save, backward)

    @staticmethod
    def direct(*operands: Any) -> bool:
        """Whether a call without gradients needs nothing of torch: what runs may then be called itself."""
        return _runs_directly(operands)

    def __call__(self, *operands: Any) -> Any:
        tensors = _flat(operands) if self._lists else operands
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
    """BadRequest where forward-mode AD follows an operand: torch takes a custom op's tangent for 0, without a word."""
    for x in tensors:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            _refuse_tangents(name, "an operand with a tangent of forward-mode AD")


def _refuse_tangents(name: str, what: str) -> NoReturn:
    raise BadRequest(name, what, "operands without", "torch.autograd.grad goes backward")


def _flat(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands, those in lists one by one."""
    return tuple(one for x in operands for one in (x if isinstance(x, list) else (x,)))


def _function(forward: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """The torch.autograd.Function of an op's forward and backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            output = _no_view(forward(*operands))
            save(ctx, operands, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    return Function


def _no_view(output: Any) -> Any:
    """What an op gives as tensors that are views of nothing, and so may be written in place under autograd."""
    if isinstance(output, (tuple, list)):
        return type(output)(map(_no_view, output))
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
    """A custom op `dispatch::name` of torch's: what runs, what it gives without running, and its gradient.

    Without `backward` a gradient through the op is refused by torch, as that of a gradient is; without `vmap` so is
    torch.vmap over it.
    """

    def implementation(*operands: Any) -> Any:
        if forward_ad._current_level >= 0:  # of a graph that was compiled before that
            _check_tangents(f"dispatch::{name}", _flat(operands))
        return _no_view(forward(*operands))

    def fake_implementation(*operands: Any) -> Any:
        # torch.compile asks here, with what has lost its tangents: whether this operand had one is not to be known.
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
        raise BadRequest(name, what, "operands without an axis of vmap", "pass that axis as a leading one of x")

    return refuse


def move_vmap_axis(name: str, info: Any, in_dims: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands for a rule of vmap that has the mapped axis of the first one, and of no other, in front."""
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return tuple(_refuse_vmap(name)(info, in_dims, *operands))
    return (operands[0].movedim(in_dims[0], 0), *operands[1:])


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, where it is on for the first one's device; f64 ones stay, as in torch."""
    place = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if place not in ("cpu", "cuda") or not torch.is_autocast_enabled(place):
        return tensors
    dtype = torch.get_autocast_dtype(place)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def check_tensors(dtypes: tuple[torch.dtype, ...], **operands: Any) -> None:
    """BadRequest for an operand that is no tensor, and for dtypes or devices that differ from the first one's."""
    names = iter(operands)
    first = next(names)
    x = operands[first]
    _check_tensor(dtypes, first, x)
    dtype, device = x.dtype, x.device
    for name in names:
        x = operands[name]
        if isinstance(x, torch.Tensor) and x.dtype is dtype and x.device == device:
            continue
        _check_tensor(dtypes, name, x)
        if x.dtype != dtype:
            raise BadRequest(name, f"a tensor of {x.dtype}", f"{dtype}, that of {first}", "torch.autocast, or x.to(…)")
        raise BadRequest(name, f"a tensor on {x.device}", f"one on {device}", "x.to(…)")


def _check_tensor(dtypes: tuple[torch.dtype, ...], name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise BadRequest(name, f"a {type(x).__name__}", "a torch.Tensor")
    if x.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BadRequest(name, f"a tensor of {x.dtype}", f"one of {known}, which there are rows for", "x.to(…)")


def dense(x: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The tensor, dense and at 16 bytes; a copy where it is not."""
    x = x.contiguous(memory_format=memory_format)
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def rows_of(x: Any) -> Any:
    """(…, k) as a matrix with dense rows that do not overlap: a view where its strides allow it."""
    if x.ndim != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows, k = x.shape
    between, within = x.stride()
    if (within == 1 or k <= 1) and (between >= k or rows <= 1):
        return x
    return x.contiguous()


def lines_at_16(x: Any) -> Any:
    """The tensor with lines along the last axis that a tensor map steps through; a copy where it has others."""
    step, k = ALIGNED // x.element_size(), x.shape[-1]
    between, along = x.stride()[-2:]
    in_order = along == 1 and (between >= k or x.shape[-2] == 1) and x.data_ptr() % ALIGNED == 0
    apart = (own for own, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True) if extent > 1)
    if in_order and (k > 1 or between > 1) and all(own % step == 0 for own in apart):
        return x
    return x.new_empty((*x.shape[:-1], -(-k // step) * step))[..., :k].copy_(x)


def empty_in_order_of(x: Any) -> Any:
    """A dense tensor whose axes lie in memory in the order of another's."""
    order = sorted(range(x.ndim), key=lambda axis: (-x.stride(axis), axis))
    made = x.new_empty([x.shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(x.ndim)])


def empty_result(like: Any) -> Any:
    """What an op gives instead of a result that nobody wants."""
    return like.new_empty(0)
