"""One transformer block, forward and backward: RMS norm, a fused QKV product, rotary, causal GQA, a gated MLP.

Every step is one request, written next to its gradient, and nothing is copied in between: Q, K and V are views of one
product, residuals are added by the products before them, and attention writes its gradients where the next
product reads them. Gradients are compared with finite differences in float64, and with torch's if it is installed.

    python examples/11_transformer_block.py --device cuda:0 --dtype bf16
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import dispatch as dp
import dispatch.ops.graph as cudnn
from dispatch.keys import F16, F32, HOST

BATCH, SEQUENCE, WIDTH, HIDDEN = 2, 96, 128, 352
HEADS, KV_HEADS, HEAD = 8, 2, 32  # heads of queries; heads of keys and values, each shared by four; size of a head
Q, QK, QKV = HEADS * HEAD, (HEADS + KV_HEADS) * HEAD, (HEADS + 2 * KV_HEADS) * HEAD  # the ends of Q, K and V
EPSILON = 1e-5
TOKENS = BATCH * SEQUENCE
HALVES = (slice(None, HIDDEN), slice(HIDDEN, None))  # of the columns of gate_up: the gate, and its input
HALF, HALF_OF_TWO = (1, TOKENS, HIDDEN), (2 * TOKENS * HIDDEN, 2 * HIDDEN, 1)  # shape and strides of each half
BOUND = {"f32": 5e-6, "f16": 4e-3, "bf16": 2e-2}  # bounds of the error's norm, relative to the norm of the exact result
DIRECTIONS, STEP = 3, 1e-5
SPREAD = 4  # a standard normal number rarely exceeds it
RMS = dp.NormMode.RMS_NORM
Arrays = dict[str, np.ndarray]
SHAPES = {
    "norm_1": (WIDTH,), "qkv": (WIDTH, QKV), "out": (Q, WIDTH),
    "norm_2": (WIDTH,), "gate_up": (WIDTH, 2 * HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip


# -- on the device ----------------------------------------------------------------------------------------------------
class Saved(NamedTuple):
    """Results of the forward pass for the backward pass; (B·S, …), but (B, heads, S, D) for the heads of attention."""

    x: dp.Tensor
    normed: dp.Tensor
    inverse: dp.Tensor  # 1 / the root mean square of each token
    q: dp.Tensor
    k: dp.Tensor
    v: dp.Tensor
    mixed: dp.Tensor
    stats: dp.Tensor
    middle: dp.Tensor
    normed_2: dp.Tensor
    inverse_2: dp.Tensor
    gate_up: dp.Tensor
    gated: dp.Tensor


class Block:
    """The weights on a device, and the data that all runs share: the rotations and the graphs of the gate."""

    def __init__(self, device: dp.Device, weights: Arrays, dtype: str) -> None:
        self.device, self.dtype = device, dtype
        # The factors of the norms stay f32: they are few, and small training updates must not be lost by rounding.
        self.w = {n: device.array(w, "f32" if n.startswith("norm") else dtype) for n, w in weights.items()}
        self.rotations = device.array(rotations(), dtype)
        self.gate, self.gate_gradient, self.sum = draw_gate(dtype), draw_gate_gradient(dtype), draw_sum(dtype)

    def forward(self, x: dp.Tensor) -> tuple[dp.Tensor, Saved]:
        """y (B·S, W) from x (B·S, W), and the results that the backward pass needs."""
        w = self.w
        normed, inverse = dp.norm_fwd(x, w["norm_1"], mode=RMS, epsilon=EPSILON, training=True)
        qkv = dp.matmul(normed, w["qkv"])
        qk = self.rotate(qkv[:, :QK], self.rotations, self.device.empty((len(x), QK), self.dtype))
        q, k, v = by_head(qk[:, :Q]), by_head(qk[:, Q:]), by_head(qkv[:, QK:])
        mixed = self.device.empty((len(x), Q), self.dtype)
        _, stats = dp.sdpa_fwd(q, k, v, out=by_head(mixed), right_bound=0, stats=True)  # no key after the query: causal
        middle = dp.matmul(mixed, w["out"], c=x)  # D = A · B + C: the residual is in the product
        normed_2, inverse_2 = dp.norm_fwd(middle, w["norm_2"], mode=RMS, epsilon=EPSILON, training=True)
        gate_up = dp.matmul(normed_2, w["gate_up"])
        gate, up = (gate_up[None, :, half] for half in HALVES)  # a cuDNN graph needs three axes or more
        gated = self.gate(gate=gate, up=up)[0]
        y = dp.matmul(gated, w["down"], c=middle)
        return y, Saved(x, normed, inverse, q, k, v, mixed, stats, middle, normed_2, inverse_2, gate_up, gated)

    def backward(self, dy: dp.Tensor, saved: Saved) -> dict[str, dp.Tensor]:
        """The gradients of x and every weight, from that of y; those of weights in f32, which optimizers need."""
        w, s = self.w, saved
        dgated = dp.matmul(dy, w["down"].T)
        dgate_up = self.device.empty(s.gate_up.shape, self.dtype)
        gate, up, dgate, dup = (t[None, :, half] for t in (s.gate_up, dgate_up) for half in HALVES)
        self.gate_gradient(dy=dgated[None], gate=gate, up=up, dgate=dgate, dup=dup)
        dnormed_2 = dp.matmul(dgate_up, w["gate_up"].T)
        dmiddle, dnorm_2 = dp.norm_bwd(
            dnormed_2, s.middle, w["norm_2"], s.inverse_2, mode=RMS, epsilon=EPSILON, bias=False
        )
        dmiddle = self.sum(a=dmiddle[None], b=dy[None])[0]  # a residual passes its gradient on unchanged

        dmixed = dp.matmul(dmiddle, w["out"].T)
        dqk, dqkv = (self.device.empty((len(dy), columns), self.dtype) for columns in (QK, QKV))
        dp.sdpa_bwd(
            s.q, s.k, s.v, by_head(s.mixed), by_head(dmixed), s.stats, right_bound=0,
            dq=by_head(dqk[:, :Q]), dk=by_head(dqk[:, Q:]), dv=by_head(dqkv[:, QK:]),
        )  # fmt: skip
        self.rotate(dqk, self.rotations.mT, dqkv[:, :QK])  # the gradient of a rotation is the inverse rotation
        dnormed = dp.matmul(dqkv, w["qkv"].T)
        dx, dnorm_1 = dp.norm_bwd(dnormed, s.x, w["norm_1"], s.inverse, mode=RMS, epsilon=EPSILON, bias=False)
        pairs = {
            "qkv": (s.normed, dqkv),
            "out": (s.mixed, dmiddle),
            "gate_up": (s.normed_2, dgate_up),
            "down": (s.gated, dy),
        }
        gradients = {name: dp.matmul(a.T, d, out_dtype="f32") for name, (a, d) in pairs.items()}
        return gradients | {"x": self.sum(a=dx[None], b=dmiddle[None])[0], "norm_1": dnorm_1, "norm_2": dnorm_2}

    def rotate(self, x: dp.Tensor, rotations: dp.Tensor, out: dp.Tensor) -> dp.Tensor:
        """Rotary as a product: the heads of each position times the rotation of that position; returns `out`."""
        shape = (BATCH, SEQUENCE, -1, HEAD)
        dp.matmul(x.reshape(shape), rotations, out=out.reshape(shape))
        return out


def by_head(x: dp.Tensor) -> dp.Tensor:
    """(B·S, heads · D) as (B, heads, S, D): a view, because attention supports any strides."""
    return x.reshape(BATCH, SEQUENCE, -1, HEAD).transpose(0, 2, 1, 3)


def rotations() -> np.ndarray:
    """(S, D, D): at position s, the pair (i, i + D/2) of a head is rotated by s / 10000^(2i/D)."""
    half = HEAD // 2
    angles = np.arange(SEQUENCE)[:, None] / 10000 ** (np.arange(half) / half)
    matrices, i = np.zeros((SEQUENCE, HEAD, HEAD)), np.arange(half)
    matrices[:, i, i] = matrices[:, i + half, i + half] = np.cos(angles)
    matrices[:, i, i + half], matrices[:, i + half, i] = (
        np.sin(angles),
        -np.sin(angles),
    )  # for row vectors, from the right
    return matrices


def draw_gate(dtype: str) -> cudnn.Graph:
    """silu(gate) * up, over the two halves of one product."""
    graph = cudnn.Graph()
    gate, up = (graph.tensor(name, HALF, dtype, HALF_OF_TWO) for name in ("gate", "up"))
    graph.output("gated", graph.pointwise("SWISH_FWD", gate) * up, dtype)
    return graph


def draw_gate_gradient(dtype: str) -> cudnn.Graph:
    """Its gradient with respect to both halves, each written to its half of one tensor."""
    graph = cudnn.Graph()
    dy = graph.tensor("dy", HALF, dtype)
    gate, up = (graph.tensor(name, HALF, dtype, HALF_OF_TWO) for name in ("gate", "up"))
    graph.output("dgate", graph.pointwise("SWISH_BWD", dy * up, gate), dtype, HALF_OF_TWO)
    graph.output("dup", dy * graph.pointwise("SWISH_FWD", gate), dtype, HALF_OF_TWO)
    return graph


def draw_sum(dtype: str) -> cudnn.Graph:
    """a + b, computed in f32 and rounded once."""
    graph = cudnn.Graph()
    a, b = (graph.tensor(name, (1, TOKENS, WIDTH), dtype) for name in "ab")
    graph.output("sum", a + b, dtype)
    return graph


def attention_in_f32() -> None:
    """Make the host's attention support f32, which cuDNN's does not: the f16 rows again, with another dtype."""
    for op in ("sdpa_fwd", "sdpa_bwd"):
        rows = [row for row in dp.TABLE.of(op) if row.min_arch == HOST and row.dtypes[0] is F16]
        dp.register(*(replace(row, dtypes=(F32, F32, F32), fusion=dp.Fusion(((F32,),))) for row in rows))


# -- references -------------------------------------------------------------------------------------------------------
def reference(given: Arrays) -> np.ndarray:
    """y by the definition, in NumPy, from x and the weights by name."""
    x, w = given["x"], given

    def rms(t: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return t / np.sqrt((t * t).mean(axis=-1, keepdims=True) + EPSILON) * scale

    def turned(t: np.ndarray) -> np.ndarray:
        half = HEAD // 2
        angles = np.arange(SEQUENCE)[:, None] / 10000 ** (np.arange(half) / half)
        pairs = (t[..., :half] + 1j * t[..., half:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    parts = np.split(rms(x, w["norm_1"]) @ w["qkv"], [Q, QK], axis=1)
    q, k, v = (part.reshape(BATCH, SEQUENCE, -1, HEAD).swapaxes(1, 2) for part in parts)
    k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (turned(k), v))
    scores = turned(q) @ k.swapaxes(2, 3) / np.sqrt(HEAD) + np.triu(np.full((SEQUENCE, SEQUENCE), -np.inf), 1)
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = odds / odds.sum(axis=-1, keepdims=True) @ v
    middle = x + mixed.swapaxes(1, 2).reshape(TOKENS, Q) @ w["out"]
    gate, up = np.split(rms(middle, w["norm_2"]) @ w["gate_up"], 2, axis=1)
    y: np.ndarray = middle + gate / (1 + np.exp(-gate)) * up @ w["down"]
    return y


def slope_errors(found: Arrays, given: Arrays, dy: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """For each gradient, its error along random directions, relative to its norm; slopes are central differences.

    Along a direction of standard normal numbers an error of norm e appears as e times such a number.
    """

    def loss(values: Arrays) -> float:
        return float((reference(values) * dy).sum())

    errors = {}
    for name, gradient in found.items():
        off = []
        for _ in range(DIRECTIONS):
            along = rng.standard_normal(gradient.shape)
            ahead, behind = (loss(given | {name: given[name] + step * along}) for step in (STEP, -STEP))
            off.append(abs((ahead - behind) / (2 * STEP) - float((gradient * along).sum())))
        errors[name] = float(np.max(off) / np.linalg.norm(gradient))
    return errors


def torch_gradients(given: Arrays, dy: np.ndarray) -> Arrays | None:
    """The gradients by torch, in f64 on the CPU; None if it is not installed."""
    try:
        import torch
        from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
    except ImportError:
        return None
    t = {name: torch.tensor(value, requires_grad=True) for name, value in given.items()}
    turns = torch.tensor(rotations())

    qkv = rms_norm(t["x"], (WIDTH,), t["norm_1"], EPSILON) @ t["qkv"]
    q, k, v = (part.reshape(BATCH, SEQUENCE, -1, HEAD) for part in qkv.tensor_split((Q, QK), dim=1))
    heads = ((q @ turns).transpose(1, 2), (k @ turns).transpose(1, 2), v.transpose(1, 2))
    mixed = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    middle = t["x"] + mixed.transpose(1, 2).reshape(TOKENS, Q) @ t["out"]
    gate, up = (rms_norm(middle, (WIDTH,), t["norm_2"], EPSILON) @ t["gate_up"]).chunk(2, dim=1)
    (middle + (silu(gate) * up) @ t["down"]).backward(torch.tensor(dy))
    return {name: tensor.grad.numpy() for name, tensor in t.items()}


def distance(found: np.ndarray, exact: np.ndarray) -> float:
    """The norm of the error, relative to the norm of the exact result."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def worst_error(y: dp.Tensor, gradients: Arrays, given: Arrays, dy: np.ndarray, rng: np.random.Generator) -> float:
    """The largest error of y and of the gradients, all of which are printed; NaN if there is one."""
    errors = [distance(np.asarray(y, np.float64), reference(given))]
    print(f"y {y.shape}: error {errors[0]:.1e}")
    slopes, by_torch = slope_errors(gradients, given, dy, rng), torch_gradients(given, dy)
    for name, gradient in gradients.items():
        line = f"gradient by {name:<8} {gradient.shape!s:<11} error against slopes {slopes[name]:.1e}"
        errors.append(slopes[name] / SPREAD)
        if by_torch is not None:
            errors.append(distance(gradient, by_torch[name]))
            line += f", against torch {errors[-1]:.1e}"
        print(line)
    if by_torch is None:
        print("torch is not installed: nothing was compared with it")
    return float(np.max(errors))


def main() -> int:
    """Run the block both ways; 1 if the error of y or a gradient is larger than the dtype allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument(
        "--dtype", choices=BOUND, help="default: f32 on the host, bf16 on a GPU, where attention has no f32"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, x and dy (default: 0)")
    options = parser.parse_args()
    device = dp.device(None if options.device == "auto" else options.device)
    dtype = options.dtype or ("f32" if device.is_host else "bf16")
    if device.is_host and dtype == "f32":
        attention_in_f32()

    rng = np.random.default_rng(options.seed)
    weights = {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in SHAPES.items()}
    weights |= {name: 1 + 0.1 * rng.standard_normal(WIDTH) for name in ("norm_1", "norm_2")}
    block = Block(device, weights, dtype)
    x, dy = (device.array(rng.standard_normal((TOKENS, WIDTH)), dtype) for _ in range(2))
    y, saved = block.forward(x)
    gradients = {name: np.asarray(g, np.float64) for name, g in block.backward(dy, saved).items()}

    # The references get the numbers on the device, rounded to its dtype, so that only errors of the computation remain.
    operands = {name: np.asarray(tensor, np.float64) for name, tensor in (block.w | {"x": x}).items()}
    print(f"{TOKENS} tokens in {dtype} on {device}")
    error = worst_error(y, gradients, operands, np.asarray(dy, np.float64), rng)
    return 0 if error <= BOUND[dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
