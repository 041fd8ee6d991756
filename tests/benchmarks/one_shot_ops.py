"""The ops of bench_one_shot: operands, what must come out, and how this project and torch are called for each.

In an expression `x()` is the first operand and `out()` an output, at another address each time: they are views into two
large tensors, which repeat only after more calls than anything is remembered of. All values are exact in bf16.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from timing import Candidate, statement

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
MANY = 4096  # addresses of x and of out: four times as many as an executor keeps recorded calls for
LAST = (0, 3, 1, 2)  # the axes of an image whose channels are last in memory
EPSILON = 1e-5


class Op(NamedTuple):
    """One op: `x` and the operands that stay where they are, what must come out, and the expressions.

    `out` and `fresh` are this project's calls with and without `out=`; those of torch are "" where it has none.
    `host` is the dtype on the host, where rows of bf16 would take NumPy long.
    """

    name: str
    x: Array
    others: dict[str, Array]
    want: Array
    out: str
    fresh: str
    torch_out: str
    torch_fresh: str
    is_image: bool = False
    host: str = "f32"

    def named(self, way: str) -> str:
        """The name of a candidate: `way` is a heading of WAYS."""
        return f"{self.name}, {way}"


OUT, FRESH, TORCH_OUT, TORCH_FRESH = "out=", "no out=", "torch, out=", "torch"
MM, GELU, SOFTMAX, NORM = "matmul", "bias + GELU", "softmax", "layer norm"
POOLING, CONV, ATTENTION = "max pooling", "convolution 3x3", "attention"
NAMES = (MM, GELU, SOFTMAX, NORM, POOLING, CONV, ATTENTION)
SAME, BOUND = "matmul, out=, same addresses", "bound call, other operands"
NOT_OURS = (TORCH_OUT, TORCH_FRESH)


def ops() -> list[Op]:
    """All of them, with fresh numbers."""
    rng = np.random.default_rng(64)

    def draw(*shape: int) -> Array:
        return (rng.integers(-31, 32, shape) / 16).astype(np.float32)

    a, b, bias = draw(64, 64), draw(64, 64), draw(64)
    product = a.astype(np.float64) @ b
    x = product + bias
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    lines, scale, shift = draw(32, 256), draw(256), draw(256)
    image, filters = draw(1, 64, 14, 14), draw(64, 64, 3, 3)
    q, k, v = (draw(1, 4, 64, 64) for _ in range(3))
    large = draw(2, 16, 16, 16)
    mm = "matmul(x(), b, bias=bias, epilogue=epilogue"
    return [
        Op(
            MM,
            a,
            {"b": b},
            product,
            "matmul(x(), b, out=out())",
            "matmul(x(), b)",
            "mm(x(), b, out=out())",
            "mm(x(), b)",
        ),
        Op(
            *(GELU, a, {"b": b, "bias": bias, "weight": b.T}, gelu, f"{mm}, out=out())", f"{mm})"),
            *("", "gelu(linear(x(), weight, bias), approximate='tanh')"),
        ),
        Op(
            *(SOFTMAX, a, {}, softmax(a.astype(np.float64)), "softmax(x(), out=out())", "softmax(x())"),
            *("torch_softmax(x(), -1, out=out())", "torch_softmax(x(), -1)"),
        ),
        Op(
            *(NORM, lines, {"scale": scale, "bias": shift}, normalized(lines) * scale + shift),
            *("norm_fwd(x(), scale, bias, out=out())", "norm_fwd(x(), scale, bias)"),
            *("", "layer_norm(x(), (256,), scale, bias, 1e-5)"),
        ),
        Op(
            *(POOLING, large, {}, large.reshape(2, 16, 8, 2, 8, 2).max(axis=(3, 5)).astype(np.float64)),
            *("pooling(x(), 2, out=out())", "pooling(x(), 2)", "", "max_pool2d(x(), 2)"),
        ),
        Op(
            *(CONV, image, {"w": filters}, convolved(image, filters)),
            *("conv_fwd(x(), w, pad=1, out=out())", "conv_fwd(x(), w, pad=1)", "", "conv2d(x(), w, padding=1)"),
            is_image=True,
        ),
        Op(
            *(ATTENTION, q, {"k": k, "v": v}, attended(q, k, v)),
            *("sdpa_fwd(x(), k, v, out=out())", "sdpa_fwd(x(), k, v)", "", "attend(x(), k, v)"),
            host="f16",
        ),
    ]


# -- what must come out ---------------------------------------------------------------------------------------------
def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def normalized(x: Array) -> Array:
    exact = x.astype(np.float64)
    off = exact - exact.mean(axis=-1, keepdims=True)
    return np.asarray(off / np.sqrt((off**2).mean(axis=-1, keepdims=True) + EPSILON))


def convolved(x: Array, w: Array) -> Array:
    """With windows of 3 by 3 and as much padding as keeps the size."""
    height, width = x.shape[2:]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    return sum(
        np.einsum("nchw,kc->nkhw", padded[:, :, i : i + height, j : j + width], w[:, :, i, j].astype(np.float64))
        for i in range(3)
        for j in range(3)
    )


def attended(q: Array, k: Array, v: Array) -> Array:
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    return np.asarray(softmax(scores) @ v)


# -- candidates -----------------------------------------------------------------------------------------------------
def in_turn(views: list[Any]) -> Callable[[], Any]:
    """One after the other, without an end."""
    return itertools.cycle(views).__next__


def our_candidates(device: dp.Device, op: Op, many: int) -> list[Candidate]:
    """This project's calls of an op; for the product also at the same addresses, and bound."""
    dtype = op.host if device.is_host else "bf16"

    def views(values: Array) -> list[dp.Tensor]:
        """As many copies, each at an address of its own."""
        stored = values.transpose(0, 2, 3, 1) if op.is_image else values
        whole = device.array(np.broadcast_to(stored, (many, *stored.shape)), dtype)
        return [whole[i].transpose(*LAST) if op.is_image else whole[i] for i in range(many)]

    xs, outs = views(op.x), views(np.full(op.want.shape, np.nan, np.float32))
    names: dict[str, Any] = {name: getattr(dp, name) for name in OURS} | {"epilogue": dp.Epilogue.GELU_BIAS}
    names |= {"x": in_turn(xs), "out": in_turn(outs)}
    for name, values in op.others.items():
        if op.is_image:
            names[name] = device.array(np.ascontiguousarray(values.transpose(0, 2, 3, 1)), dtype).transpose(*LAST)
        else:
            names[name] = device.array(values, dtype)
    found = [statement(op.named(OUT), op.out, **names), statement(op.named(FRESH), op.fresh, **names)]
    if op.name == MM:
        names |= {"a": xs[0], "d": outs[0]}
        names["call"] = dp.prepare(dp.MatmulRequest(xs[0], names["b"]))
        found += [statement(SAME, "matmul(a, b, out=d)", **names), statement(BOUND, "call(a=x())", **names)]
    return found


OURS = ("matmul", "softmax", "norm_fwd", "pooling", "conv_fwd", "sdpa_fwd")


def torch_candidates(op: Op, many: int, place: str = "cuda") -> list[Candidate]:
    """torch's calls of an op, on the same values."""
    import torch
    from torch.nn import functional

    def stored(values: Array) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(place, torch.bfloat16)
        return tensor.contiguous(memory_format=torch.channels_last) if op.is_image else tensor

    def views(values: Array) -> list[Any]:
        image = stored(values)
        whole = torch.empty((many * image.numel(),), dtype=image.dtype, device=place)
        size, strides = image.numel(), image.stride()
        made = [whole.as_strided(image.shape, strides, number * size) for number in range(many)]
        for view in made:
            view.copy_(image)
        return made

    torch.backends.cudnn.benchmark = True
    names = {"mm": torch.mm, "torch_softmax": torch.softmax, "linear": functional.linear, "gelu": functional.gelu}
    names |= {"layer_norm": functional.layer_norm, "max_pool2d": functional.max_pool2d, "conv2d": functional.conv2d}
    names["attend"] = functional.scaled_dot_product_attention
    names |= {"x": in_turn(views(op.x)), "out": in_turn(views(np.full(op.want.shape, np.nan, np.float32)))}
    names |= {name: stored(values) for name, values in op.others.items()}
    ways = ((TORCH_OUT, op.torch_out), (TORCH_FRESH, op.torch_fresh))
    return [statement(op.named(way), code, **names) for way, code in ways if code]


def values(result: Any) -> Array:
    """The elements of a tensor of either, in float64."""
    if isinstance(result, dp.Tensor):
        return result.numpy().astype(np.float64)
    return np.asarray(result.detach().float().cpu().numpy().astype(np.float64))
