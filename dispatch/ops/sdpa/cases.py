"""The test cases of the attention rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`. The bounds are derived below, not tuned to what a
library happens to return.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, values
from dispatch.keys import F32, Dtype
from dispatch.ops.sdpa.base import OFFSETS
from dispatch.ops.sdpa.packed import packed, ragged_offsets
from dispatch.ops.sdpa.reference import evaluate, factor, per_head, sequences, summed, weights_of
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest, SdpaFwdRequest
from dispatch.ops.sdpa.rules import is_packed, not_packed
from dispatch.testing.check import FormCase, GuardedBuffer, checked, normal, place, poison, rounded, unit, with_outputs
from dispatch.testing.roundoff import FP8_SUMS, ROUNDOFF

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.ops.sdpa.request import SdpaRequest
    from dispatch.testing.check import Check

__all__ = ["Form", "SdpaCase", "bounds_of", "cases"]

BOTTOM = {"diagonal": Diagonal.BOTTOM_RIGHT}
CAUSAL, WINDOW = {"right_bound": 0}, {"left_bound": 17}
SBHD = (2, 0, 1, 3)  # orders of the axes in memory
BSHD = (0, 2, 1, 3)
HEADS = (0, 1, 2, 3)
BACK = ("descale_s", "descale_v")  # the factors of the rounding errors of fp8 weights
SCALES = {"descale_q": 0.5, "descale_k": 0.75, "descale_v": 1.5, "scale_s": 256, "descale_s": 1 / 256, "scale_o": 16}
EXP2 = 2.0**-20  # ex2.approx and the scaling of its argument, relative, for arguments of magnitude 1


@dataclass(frozen=True)
class Form:
    """Sizes, order in memory and masks.

    `bias` is the first two extents of its shape; `lengths` draws the length of each sequence. `packed` sequences are
    stored "apart", with unused tokens between them, or "together", with Q, K and V as views of one (tokens, 3, heads,
    head).
    """

    name: str
    b: int
    h: int
    hk: int
    sq: int
    skv: int
    d: int
    dv: int = 0
    order: tuple[int, ...] = BSHD
    masks: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, int] | None = None
    lengths: bool = False
    page: int = 0  # the length of a page, if K and V are stored in pages
    packed: str = ""


# fmt: off
FORMS = (
    Form("plain",               2, 4, 4, 128, 128, 64),
    Form("heads first",         2, 3, 3, 128, 128, 64, order=(0, 1, 2, 3)),
    Form("sequence first",      2, 2, 2, 96, 64, 64, order=SBHD),
    Form("ones",                1, 1, 1, 1, 1, 8),
    Form("primes",              3, 5, 5, 67, 131, 40),
    Form("one query",           8, 8, 8, 1, 257, 64),
    Form("more queries",        1, 2, 2, 200, 77, 64),
    Form("head 128",            1, 2, 2, 150, 150, 128),
    Form("head 256",            1, 2, 2, 70, 90, 256),
    Form("wide v",              1, 2, 2, 64, 96, 64, 128),
    Form("gqa",                 2, 6, 2, 100, 131, 64),
    Form("mqa",                 2, 4, 1, 127, 129, 128),
    Form("scaled",              1, 2, 2, 64, 64, 64, masks={"scale": 0.3}),
    Form("causal",              2, 4, 4, 193, 193, 64, masks=CAUSAL),
    Form("causal, fewer keys",  2, 6, 6, 130, 70, 64, masks=CAUSAL),
    Form("causal gqa",          1, 8, 2, 129, 129, 128, masks=CAUSAL),
    Form("causal bottom",       2, 2, 2, 65, 131, 64, masks={**CAUSAL, **BOTTOM}),
    Form("right 5",             1, 2, 2, 100, 100, 64, masks={"right_bound": 5}),
    Form("window",              1, 2, 2, 150, 150, 64, masks=WINDOW),
    Form("causal window",       1, 2, 2, 200, 200, 64, masks={**CAUSAL, **WINDOW}),
    Form("causal window bottom", 1, 2, 2, 77, 130, 64, masks={**CAUSAL, **WINDOW, **BOTTOM}),
    Form("bias",                2, 3, 3, 64, 96, 64, bias=(1, 3)),
    Form("bias for all",        2, 3, 3, 100, 67, 64, bias=(1, 1)),
    Form("bias of each",        2, 2, 2, 64, 64, 64, bias=(2, 2)),
    Form("causal bias",         1, 2, 2, 128, 128, 64, masks=CAUSAL, bias=(1, 2)),
    Form("lengths",             3, 2, 2, 128, 160, 64, lengths=True),
    Form("causal lengths",      3, 2, 2, 128, 128, 64, masks=CAUSAL, lengths=True),
    Form("causal bottom lengths", 3, 2, 2, 128, 160, 64, masks={**CAUSAL, **BOTTOM}, lengths=True),
    Form("pages",               3, 4, 2, 1, 64, 64, order=HEADS, lengths=True, page=16),
    Form("pages of one",        2, 2, 2, 33, 40, 64, order=HEADS, lengths=True, page=1),
    Form("causal pages",        2, 4, 4, 48, 128, 128, order=HEADS, masks={**CAUSAL, **BOTTOM}, lengths=True, page=32),
    Form("packed",              3, 2, 2, 128, 160, 64, lengths=True, packed="apart"),
    Form("packed primes",       5, 3, 3, 67, 131, 40, lengths=True, packed="apart"),
    Form("packed together",     3, 3, 3, 67, 67, 40, masks=CAUSAL, lengths=True, packed="together"),
    Form("packed gqa",          4, 6, 2, 100, 131, 64, lengths=True, packed="apart"),
    Form("packed causal gqa",   2, 8, 2, 129, 129, 128, masks=CAUSAL, lengths=True, packed="apart"),
    Form("packed causal bottom", 3, 4, 1, 33, 67, 64, masks={**CAUSAL, **BOTTOM}, lengths=True, packed="apart"),
    Form("packed causal window", 2, 2, 2, 150, 150, 64, masks={**CAUSAL, **WINDOW}, lengths=True, packed="apart"),
    Form("packed wide v",       2, 2, 2, 64, 96, 64, 128, lengths=True, packed="apart"),
    Form("packed of one",       1, 2, 2, 77, 77, 64, lengths=True, packed="apart"),
    Form("head of 12",          4, 4, 4, 64, 64, 12),
    Form("bottom, fewer keys",  2, 4, 4, 96, 64, 64, masks={**CAUSAL, **BOTTOM}),
)
# fmt: on
# fp8 elements are so imprecise that an output needs more of them to reveal an error of 1% in all.
FP8_LARGER: dict[str, dict[str, Any]] = {
    "one query": {"h": 24, "hk": 24},
    "causal bias": {"b": 4},
    "causal lengths": {"b": 8},
}


@dataclass(frozen=True)
class SdpaCase(FormCase):
    """One request, described by everything except the numbers in its operands."""

    op: str
    form: Form
    dtype: Dtype
    choices: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return "-".join([str(self.dtype), self.form.name, *(name for name, _ in self.choices)])

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands and poisoned outputs."""
        return checked(self.id, self.drawn(device, rng), evaluate, bounds_of, by_chance=True)

    def drawn(self, device: Device, rng: np.random.Generator) -> tuple[SdpaRequest, tuple[GuardedBuffer, ...]]:
        forward = self._forward(device, rng)
        request: SdpaRequest = self._backward(device, rng, forward) if self.op == "sdpa_bwd" else forward
        placed = operand = partial(place, device, order=None if self.form.packed else self.form.order)
        if self.form.packed == "together":
            operand = partial(_strided, device, strides=forward.q.layout.strides)
        return with_outputs(request, partial(place, device), out=placed, dq=operand, dk=operand, dv=operand)

    def _forward(self, device: Device, rng: np.random.Generator) -> SdpaFwdRequest:
        form = self.form
        shapes = {
            "q": (form.b, form.h, form.sq, form.d),
            "k": (form.b, form.hk, form.skv, form.d),
            "v": (form.b, form.hk, form.skv, form.dv or form.d),
        }
        tables: dict[str, Any] = {}
        if form.page:
            pages = form.skv // form.page
            for name in "kv":
                shapes[name] = (form.b * pages + 3, form.hk, form.page, form.d)  # three that no sequence has
                table = rng.permutation(form.b * pages + 3)[: form.b * pages].astype(np.int32)
                tables[f"page_table_{name}"] = device.array(table.reshape(form.b, pages))
        operands: dict[str, Any] = {}
        if form.lengths:
            for name, most in (("seq_len_q", form.sq), ("seq_len_kv", form.skv)):
                operands[name] = device.array(self._lengths(rng, name, most))
        if form.packed:
            operands |= self._packed(device, rng, operands)
        else:
            drawn = {name: normal(rng, self.dtype, shape) for name, shape in shapes.items()}
            operands |= {name: place(device, values, form.order).view for name, values in drawn.items()}
        if self.dtype.is_fp8:
            tables = {name: device.array(np.array([value], np.float32)) for name, value in SCALES.items()}
        if form.bias is not None:
            operands["bias"] = device.array(normal(rng, self.dtype, (*form.bias, form.sq, form.skv)))
        choices = dict(self.choices) if self.op == "sdpa_fwd" else {}
        return SdpaFwdRequest(**operands, **tables, **form.masks, **choices)

    def _packed(self, device: Device, rng: np.random.Generator, lengths: dict[str, Any]) -> dict[str, Any]:
        """Packed operands with their offsets; if Q, K and V are stored together, they have the same lengths."""
        form = self.form
        heads = {"q": form.h, "k": form.hk, "v": form.hk, "o": form.h}
        operands: dict[str, Any] = {"max_q": form.sq, "max_kv": form.skv}
        if form.packed == "together":
            operands["seq_len_kv"] = lengths["seq_len_q"]
            counts = lengths["seq_len_q"].numpy().tolist()
            memory = device.array(normal(rng, self.dtype, (sum(counts), 3, form.h, form.d)))
            operands |= {name: memory[:, number] for number, name in enumerate("qkv")}
            of_out = ragged_offsets(counts, device.empty(operands["q"].shape, self.dtype))
            return (
                operands
                | {f"ragged_{name}": ragged_offsets(counts, operands["q"]) for name in "qkv"}
                | {"ragged_o": of_out}
            )
        between = rng.integers(0, 4, form.b)
        for name, count in heads.items():
            counts = (lengths["seq_len_kv" if name in "kv" else "seq_len_q"].numpy() + between).tolist()
            width = form.dv or form.d if name in "vo" else form.d
            tensor = device.array(normal(rng, self.dtype, (sum(counts), count, width)))
            operands[f"ragged_{name}"] = ragged_offsets(counts, tensor)
            if name != "o":
                operands[name] = tensor
        return operands

    def _lengths(self, rng: np.random.Generator, name: str, most: int) -> Array:
        """One full sequence, the others shorter; with the diagonal at the bottom right every query has a key."""
        bottom = self.form.masks.get("diagonal") is Diagonal.BOTTOM_RIGHT
        low, high = (1, max(most // 2, 1)) if name == "seq_len_q" else (most // 2 if bottom else 1, most)
        drawn = rng.integers(low, high + 1, self.form.b).astype(np.int32)
        drawn[0] = most
        return drawn

    def _backward(self, device: Device, rng: np.random.Generator, forward: SdpaFwdRequest) -> SdpaBwdRequest:
        forward_results = evaluate(forward, EXACT)
        stats = weights_of(forward, EXACT).stats
        order = None if self.form.packed else self.form.order
        o = place(device, forward_results["out"].astype(self.dtype.numpy), order).view
        do = place(device, normal(rng, self.dtype, forward_results["out"].shape), order).view
        shared = ("q", "k", "v", "bias", "seq_len_q", "seq_len_kv", *OFFSETS, "max_q", "max_kv")
        operands: dict[str, Any] = {name: getattr(forward, name) for name in shared}
        logarithms = device.array(np.where(np.isfinite(stats), stats, 0).astype(np.float32))
        return SdpaBwdRequest(o=o, do=do, stats=logarithms, **operands, **self.form.masks, **dict(self.choices))


def _strided(device: Device, values: Array, strides: tuple[int, ...]) -> GuardedBuffer:
    """Values on a device with these strides of packed sequences, without guard elements around them."""
    tokens, heads, width = values.shape
    before = poison(Dtype.of(values.dtype), (tokens, strides[0] // (heads * width), heads, width))
    memory = device.array(before)
    return GuardedBuffer(memory[:, 0], memory, before, (slice(None), 0))


def bounds_of(request: SdpaRequest, expected: Results) -> Results:
    """The allowed error of each output, element by element.

    A score is a sum of D products and within e = (8 + 4 √D) · u · scale · |Q| · |K| of the exact one. Its exponential
    then has the relative error e, plus EXP2 · (1 + |score|) from the GPU's ex2. Weights are rounded to the operands'
    dtype (unit roundoff w, half a step of its subnormals tiny) before they are multiplied by V, and so is the inner
    gradient before it is multiplied by Q and K. Errors of sums of n terms grow like √n.
    """
    work = EXACT
    (w, tiny), u = ROUNDOFF[request.q.dtype], unit(request.q.dtype)
    heads, d = request.scores[1], request.q.shape[-1]
    q, k, v = (np.abs(sequences(request, name, work)) for name in "qkv")
    k, v = per_head(k, heads), per_head(v, heads)
    fp8 = 4 * FP8_SUMS if request.q.dtype.is_fp8 else 0.0  # the error per group of a sum, times its largest product
    sizes = (q @ np.swapaxes(k, -1, -2)) * abs(request.factor) * factor(request, "descale_q", "descale_k")
    stats = values(request.stats, work) if isinstance(request, SdpaBwdRequest) else None
    exact = weights_of(request, work, stats)
    is_visible = np.isfinite(exact.scores)
    off = ((8 + 4 * np.sqrt(d)) * u + fp8) * sizes + EXP2 * (1 + np.where(is_visible, np.abs(exact.scores), 0))
    if request.bias is not None:
        off = off + 4 * u * np.abs(values(request.bias, work))
    worst = np.where(is_visible, off, 0).max(axis=-1, keepdims=True)
    spread = 2 * worst + (4 + np.sqrt(exact.scores.shape[-1])) * u + w + fp8
    if isinstance(request, SdpaBwdRequest):
        return _backward_bounds(request, expected, exact.weights, spread, (q, k, v))
    between = factor(request, "scale_s", "descale_s", "descale_v")
    error = spread * (exact.weights @ v)
    if request.q.dtype.is_fp8:  # 4-bit weights have independent roundings: 6 · 0.4 of the roundoff
        chance = 2.5 * np.sqrt(exact.weights**2 @ v**2)
        error = (spread - w) * (exact.weights @ v) + w * np.minimum(exact.weights @ v, chance)
    error = error * between + tiny * v.sum(axis=-2, keepdims=True) * factor(request, *BACK)
    scaled = packed(request, "out", error * factor(request, "scale_o"), np.inf)
    allowed = {"out": rounded(scaled, expected["out"], request.q.dtype)}
    if "amax_s" in expected:
        allowed["amax_s"], allowed["amax_o"] = (spread * exact.weights).max().reshape(1), error.max().reshape(1)
    if "stats_out" in expected:
        logarithms = np.where(np.isfinite(expected["stats_out"]), np.abs(expected["stats_out"]), 0)
        allowed["stats_out"] = rounded(worst + EXP2 * (1 + logarithms) + spread - w, logarithms, F32)
        if request.packed:  # after the end of a sequence they are undefined
            allowed["stats_out"] = np.where(np.isfinite(expected["stats_out"]), allowed["stats_out"], np.inf)
    return allowed


def _backward_bounds(
    request: SdpaBwdRequest, expected: Results, weights: Array, spread: Array, sizes: tuple[Array, ...]
) -> Results:
    q, k, v = sizes
    (w, tiny), u = ROUNDOFF[request.q.dtype], unit(request.q.dtype)
    operands = {name: sequences(request, name, EXACT) for name in ("do", "o", "v")}
    do, o = np.abs(operands["do"]), np.abs(operands["o"])
    growth = (8 + 4 * np.sqrt(request.v.shape[-1])) * u
    products, deltas = do @ np.swapaxes(v, -1, -2), (do * o).sum(axis=-1, keepdims=True)
    signed = operands["do"] @ np.swapaxes(per_head(operands["v"], q.shape[1]), -1, -2)
    inner = np.abs(signed - (operands["do"] * operands["o"]).sum(axis=-1, keepdims=True))
    off = weights * ((spread + 4 * u) * inner + growth * (products + deltas))
    if request.bias_gradient or request.deterministic:  # these engines keep dO · Vᵀ in memory, in the operands' dtype
        off = off + weights * (w * np.abs(signed) + tiny)
    scaled = abs(request.factor) * (off + w * weights * inner) + tiny
    lengths = (8 + 4 * np.sqrt(max(q.shape[2], k.shape[2]))) * u + w  # of the sums, and of heads before they are added
    scaled_inner = abs(request.factor) * weights * inner
    transposed_weights = np.swapaxes(weights, -1, -2)
    errors = {
        "dq": scaled @ k + lengths * (scaled_inner @ k),
        "dk": summed(np.swapaxes(scaled + lengths * scaled_inner, -1, -2) @ q, request.k.shape[1]),
        "dv": summed(
            np.swapaxes(spread * weights + tiny, -1, -2) @ do + lengths * (transposed_weights @ do), request.v.shape[1]
        ),
    }
    errors = {name: packed(request, name, error, np.inf) for name, error in errors.items()}
    allowed = {name: rounded(errors[name], expected[name], request.q.dtype) for name in errors}
    if "dbias" in expected and request.bias is not None:
        axes = tuple(axis for axis in (0, 1) if request.bias.shape[axis] == 1)
        # Engines store the gradient by block, in the operands' dtype, before and after the subtraction, and add up the
        # blocks from there. The latter is multiplied by the scale: with f16 and a scale of 1/8 all elements are
        # multiples of 2^-21, 8 times the smallest number (9.19).
        subnormal = (1 + 1 / abs(request.factor)) * tiny
        error = (off + 3 * w * weights * inner + subnormal).sum(axis=axes, keepdims=True)
        allowed["dbias"] = rounded(error, expected["dbias"], request.bias.dtype)
    return allowed


def cases(row: Row) -> list[SdpaCase]:
    """Every form that the row supports; forward with and without statistics in turn, backward with its choices."""
    dtype = row.dtypes[0]
    forms = [form for form in FORMS if (not_packed if form.packed else is_packed) not in row.rules]
    if dtype.is_fp8:
        more: tuple[tuple[tuple[str, Any], ...], ...] = ((), (("stats", True), ("amax", True)))
        fp8_forms = [replace(f, **FP8_LARGER.get(f.name, {})) for f in forms if not f.page and not f.packed]
        return [SdpaCase(row.op, form, dtype, more[number % 2]) for number, form in enumerate(fp8_forms)]
    if row.op == "sdpa_fwd":
        turns = ((), (("stats", True),))
        return [SdpaCase(row.op, form, dtype, turns[number % 2]) for number, form in enumerate(forms)]
    all_cases = [SdpaCase(row.op, form, dtype) for form in forms if not form.page]
    biased = [form for form in forms if form.bias is not None]
    all_cases += [SdpaCase(row.op, form, dtype, (("bias_gradient", True),)) for form in biased]
    plain = [form for form in forms if form.name in ("plain", "causal gqa", "packed gqa")]
    return all_cases + [SdpaCase(row.op, form, dtype, (("deterministic", True),)) for form in plain]
