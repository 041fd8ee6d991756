"""The requests of scaled dot product attention: `sdpa_fwd`, and its gradient `sdpa_bwd`.

Q is (B, Hq, Sq, D), K (B, Hk, Skv, D), V (B, Hv, Skv, Dv); strides say how they lie (BHSD, BSHD or neither), but D is
dense. Fewer heads of K and V than of Q are shared by groups of them (GQA; MQA with one). Sequences may also be packed,
one behind the other without padding: `SdpaRequest` says how. This file calls nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.cudnn.operands import Made, OperandRequest, chosen, dense, like, same_as, whole
from dispatch.errors import BadRequest
from dispatch.keys import F32, I32, I64, Dtype
from dispatch.ops.sdpa.packed import OFFSETS, RAGGED, check_alike, check_ragged
from dispatch.request import Signature

if TYPE_CHECKING:
    from dispatch.tensor import Tensor

__all__ = ["Diagonal", "SdpaBwdRequest", "SdpaFwdRequest", "SdpaRequest"]

Shape = tuple[int, ...]


PAGES = ("page_table_k", "page_table_v")
FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


class Diagonal(IntEnum):
    """Which corner of the scores the diagonal of a mask starts from; they differ where Sq and Skv do."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class SdpaRequest(OperandRequest):
    """What forward and backward have in common: Q, K, V, and what is done to the scores before the softmax.

    With r = 0 for TOP_LEFT and r = Skv - Sq for BOTTOM_RIGHT, query i sees key j where j <= i + r + right_bound and
    j > i + r - left_bound: right_bound 0 is causal, left_bound is the width of a sliding window.

    Packed sequences: q (tokens, Hq, D), k (tokens, Hk, D), v (tokens, Hv, Dv) and O (tokens, Hq, Dv) hold the tokens of
    all sequences; their first two axes have any strides, so that they may be views of one (tokens, 3, H, D). Sequence b
    of an operand is its `seq_len_…[b]` tokens from element `ragged_…[b]` on: offsets in elements from the operand's
    first one, i32 or i64 (B + 1,), each a multiple of the token's stride, the last one the end. The longest sequences
    have at most `max_q` queries and `max_kv` keys. A gradient has the strides and the offsets of its operand. What lies
    between sequences must be finite; in results it may be anything, and so may statistics behind a sequence's end.
    `ragged_offsets` makes offsets from lengths.
    """

    advice: ClassVar[str] = "heads of 64 or 128, one mask at a time, TOP_LEFT, and no limit of workspace"
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    seq_len_q: Tensor | None
    seq_len_kv: Tensor | None
    scale: float | None
    left_bound: int | None
    right_bound: int | None
    diagonal: Diagonal
    dropout: float
    seed: Tensor | None
    offset: Tensor | None
    ragged_q: Tensor | None
    ragged_k: Tensor | None
    ragged_v: Tensor | None
    ragged_o: Tensor | None
    max_q: int | None
    max_kv: int | None
    workspace: int | None
    autotune: bool

    @property
    def required(self) -> tuple[str, ...]:
        return ("q", "k", "v")

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        """Of Q, K and the result, and of the bias."""
        return (self.q.dtype, self.k.dtype, self.q.dtype, None if self.bias is None else self.bias.dtype)

    def signature(self) -> Signature:
        return Signature(self.dtypes)

    @property
    def factor(self) -> float:
        """What the scores are multiplied with: `scale`, or 1/√D."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else float(self.scale)

    @property
    def padded(self) -> bool:
        """Whether the sequences of the batch have lengths of their own."""
        return self.seq_len_q is not None

    @property
    def masked(self) -> bool:
        return self.left_bound is not None or self.right_bound is not None

    @property
    def packed(self) -> bool:
        """Whether the sequences lie one behind the other, found by offsets."""
        return self.ragged_q is not None

    def extents(self, name: str) -> Shape:
        """The shape of an operand as (batch, heads, longest sequence, head), packed or not."""
        shape: Shape = self.layout_of(name).shape
        if self.ragged_q is None or name not in RAGGED:
            return shape
        longest = self.max_kv if RAGGED[name] in ("ragged_k", "ragged_v") else self.max_q
        return (self.ragged_q.shape[0] - 1, shape[1], longest or 0, shape[2])

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape of Q · Kᵀ."""
        b, h, sq, _ = self.extents("q")
        keys = self.extents("k")[2]
        return (b, h, sq, keys if self.pages is None else self.pages.shape[1] * keys)

    @property
    def pages(self) -> Tensor | None:
        """The table of the pages of K, where K and V are kept in pages."""
        return None

    def choices(self) -> tuple[Any, ...]:
        bounds = (self.left_bound, self.right_bound, self.diagonal)
        return (self.factor, *bounds, self.dropout, self.max_q, self.max_kv, self.workspace, self.autotune)

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_operands(self) -> None:
        q, k, v = self.q, self.k, self.v
        axes = "(tokens, heads, head) for packed sequences" if self.packed else "(batch, heads, sequence, head)"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4 - self.packed:
                raise BadRequest(name, str(tensor.layout), f"{'three' if self.packed else 'four'} axes: {axes}")
            if tensor.size == 0:
                raise BadRequest(name, str(tensor.layout), "extents of 1 or more", "leave an empty batch out")
            if tensor.dtype is not q.dtype:
                raise BadRequest(name, str(tensor.layout), f"dtype {q.dtype}, that of q")
            if tensor.shape[0] != q.shape[0] and self.pages is None and not self.packed:
                raise BadRequest(name, str(tensor.layout), f"batch {q.shape[0]}, that of q {q.layout}")
            if q.shape[1] % tensor.shape[1]:
                raise BadRequest(name, f"{tensor.shape[1]} heads", f"a divisor of the {q.shape[1]} heads of q")
        if k.shape[-1] != q.shape[-1]:
            raise BadRequest("k", str(k.layout), f"heads of {q.shape[-1]}, as q {q.layout} has")
        if not self.packed and v.shape[2] != k.shape[2]:
            raise BadRequest("v", str(v.layout), f"a sequence of {k.shape[2]}, as k {k.layout} has")
        self._check_dense("q", "k", "v")
        check_ragged(self)

    def _check_dense(self, *names: str) -> None:
        for name in names:
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            steps = list(zip(tensor.layout.strides, tensor.shape, strict=True))
            if (tensor.shape[-1] > 1 and steps[-1][0] != 1) or any(s < 1 and e > 1 for s, e in steps):
                hint = "copy it: dev.array(x.numpy())"
                raise BadRequest(name, str(tensor.layout), "a dense last axis, and steps forward", hint)

    def _check_scores(self) -> None:
        if self.scale is not None and (isinstance(self.scale, bool) or not isinstance(self.scale, (int, float))):
            raise BadRequest("scale", repr(self.scale), "a number, or None for 1/√D")
        for name, low in (("left_bound", 1), ("right_bound", 0), ("workspace", 0)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), low, 1 << 40)
        chosen("diagonal", self.diagonal, Diagonal)
        b, h, sq, skv = self.scores
        if self.bias is not None:
            wanted = f"shape ({b} or 1, {h} or 1, {sq}, {skv})"
            if self.bias.shape not in {(x, y, sq, skv) for x in (1, b) for y in (1, h)}:
                raise BadRequest("bias", str(self.bias.layout), wanted)
            self._check_dense("bias")
        if (self.seq_len_q is None) != (self.seq_len_kv is None):
            missing = "seq_len_q" if self.seq_len_q is None else "seq_len_kv"
            raise BadRequest(missing, "nothing", "lengths of both queries and keys, or of neither")
        for name in ("seq_len_q", "seq_len_kv"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tensor.shape != (b,) or tensor.dtype is not I32):
                raise BadRequest(name, str(tensor.layout), f"i32[{b}], the length of each sequence of the batch")
        self._check_dropout()

    def _check_dropout(self) -> None:
        dropout: object = self.dropout
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise BadRequest("dropout", repr(dropout), "a probability from 0 to below 1")
        for name in ("seed", "offset"):
            tensor: Tensor | None = getattr(self, name)
            if (tensor is not None) != (dropout > 0):
                given = "nothing" if tensor is None else str(tensor.layout)
                raise BadRequest(name, given, "an i64 tensor of one element" if dropout else "none without dropout")
            if tensor is not None and (tensor.size != 1 or tensor.ndim > 1 or tensor.dtype is not I64):
                raise BadRequest(name, str(tensor.layout), "an i64 tensor of one element")


@dataclass(frozen=True, eq=False)
class SdpaFwdRequest(SdpaRequest):
    """O = softmax(mask(scale · Q · Kᵀ + bias)) · V, and with `stats` the logarithm of each row's sum for the backward.

    Attributes:
        q, k, v: the operands, f16, bf16 or fp8.
        bias: added to the scaled scores, (B or 1, Hq or 1, Sq, Skv).
        seq_len_q, seq_len_kv: i32 (B,): only so much of each sequence counts.
        seed, offset: i64, one element each: what the mask of dropout is made from, the same for the same two.
        page_table_k, page_table_v: i32 (B, P): K and V are kept in pages, (pages, Hk, length of a page, D) and
            (pages, Hv, length of a page, Dv), and sequence b is pages table[b, 0], table[b, 1], … one after the other.
        out: O, (B, Hq, Sq, Dv); lies as q does where it is left out.
        stats_out: f32 (B, Hq, Sq, 1); made where `stats` is True and it is left out.
        mask_out: f32 (B, Hq, Sq, Skv), 1 for what dropout keeps; made where `mask` is True and it is left out.
        ragged_q, ragged_k, ragged_v, ragged_o, max_q, max_kv: for packed sequences, see `SdpaRequest`; Sq and Skv are
            then max_q and max_kv, in the bias and the statistics, too.
        dropout: the probability of a weight to be dropped; the others are divided by 1 - dropout.
        scale: None for 1/√D.
        left_bound, right_bound, diagonal: see `SdpaRequest`.
        descale_q, descale_k, descale_v, scale_o: f32, one element each, with fp8 alone: what operands are multiplied
            with, and O before it is stored; scale_s and descale_s do the same to the weights between the products.
        amax_s, amax_o: f32 (1,), the largest weight, and the largest magnitude of O before its scale.
        stats, mask, amax: whether to give back the statistics, the mask of dropout, and the largest magnitudes.
    """

    op: ClassVar[str] = "sdpa_fwd"
    reads: ClassVar[tuple[str, ...]] = (
        "q",
        "k",
        "v",
        "bias",
        "seq_len_q",
        "seq_len_kv",
        "seed",
        "offset",
        *PAGES,
        *FACTORS,
        *OFFSETS,
    )
    writes: ClassVar[tuple[str, ...]] = ("out", "stats_out", "mask_out", "amax_s", "amax_o")
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    seq_len_q: Tensor | None = None
    seq_len_kv: Tensor | None = None
    out: Tensor | None = None
    stats_out: Tensor | None = None
    mask_out: Tensor | None = None
    scale: float | None = None
    left_bound: int | None = None
    right_bound: int | None = None
    diagonal: Diagonal = Diagonal.TOP_LEFT
    dropout: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None
    page_table_k: Tensor | None = None
    page_table_v: Tensor | None = None
    descale_q: Tensor | None = None
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    descale_s: Tensor | None = None
    scale_s: Tensor | None = None
    scale_o: Tensor | None = None
    amax_s: Tensor | None = None
    amax_o: Tensor | None = None
    ragged_q: Tensor | None = None
    ragged_k: Tensor | None = None
    ragged_v: Tensor | None = None
    ragged_o: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None
    stats: bool = False
    mask: bool = False
    amax: bool = False
    workspace: int | None = None
    autotune: bool = False

    @property
    def pages(self) -> Tensor | None:
        return self.page_table_k

    @property
    def alone(self) -> bool:
        """Whether there is nothing but Q, K, V and the scale."""
        return not (self.bias is not None or self.padded or self.masked or self.dropout or self.q.dtype.is_fp8)

    def made(self) -> dict[str, Made]:
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        found = {"out": dense(shape, self.q.dtype) if self.packed else like(self.q.layout, shape)}
        if self.stats:
            found["stats_out"] = dense((*self.scores[:3], 1), F32)
        if self.mask:
            found["mask_out"] = dense(self.scores, F32)
        if self.amax:
            found["amax_s"] = found["amax_o"] = dense((1,), F32)
        return found

    def choices(self) -> tuple[Any, ...]:
        return (*super().choices(), self.stats, self.mask, self.amax)

    def check_fields(self) -> None:
        self._check_operands()
        self._check_scores()
        self._check_dense("out")
        for name in ("stats_out", "mask_out"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and not tensor.layout.is_contiguous:
                raise BadRequest(name, str(tensor.layout), "a dense tensor")
        self._check_pages()
        self._check_factors()
        if self.mask and not self.dropout:
            raise BadRequest("mask", "True", "False, for there is no dropout")

    def _check_factors(self) -> None:
        fp8 = self.q.dtype.is_fp8
        for name in FACTORS:
            tensor: Tensor | None = getattr(self, name)
            if (tensor is not None) != fp8:
                given = "nothing" if tensor is None else str(tensor.layout)
                raise BadRequest(name, given, "an f32 tensor of one element" if fp8 else f"none with {self.q.dtype}")
            if tensor is not None and (tensor.size != 1 or tensor.ndim > 1 or tensor.dtype is not F32):
                raise BadRequest(name, str(tensor.layout), "an f32 tensor of one element")
        if self.amax and not fp8:
            raise BadRequest("amax", "True", f"False with {self.q.dtype}")

    def _check_pages(self) -> None:
        b = self.q.shape[0]
        for name, other in ((PAGES[0], PAGES[1]), (PAGES[1], PAGES[0])):
            tensor: Tensor | None = getattr(self, name)
            twin: Tensor | None = getattr(self, other)
            if (tensor is None) != (twin is None):
                raise BadRequest(other if twin is None else name, "nothing", "tables of both K and V, or of neither")
            if tensor is not None and twin is not None:
                if tensor.ndim != 2 or tensor.shape[0] != b or tensor.dtype is not I32 or tensor.shape != twin.shape:
                    raise BadRequest(name, str(tensor.layout), f"i32 ({b}, pages of a sequence), one shape for both")
                if not tensor.layout.is_contiguous:
                    raise BadRequest(name, str(tensor.layout), "a dense tensor")
        if self.pages is not None and not self.padded:
            raise BadRequest("seq_len_kv", "nothing", "lengths of both, for K and V are kept in pages")


@dataclass(frozen=True, eq=False)
class SdpaBwdRequest(SdpaRequest):
    """dQ, dK, dV (and dbias) of `sdpa_fwd`, from its operands, its results O and statistics, and dO.

    Attributes:
        q, k, v, bias, seq_len_q, seq_len_kv, seed, offset: as in the forward, and so all that is done to the scores.
        o, do: (B, Hq, Sq, Dv); packed ones of the same strides.
        stats: f32 (B, Hq, Sq, 1), as `sdpa_fwd` gives it back.
        dq, dk, dv: the gradients; lie as q, k and v do where they are left out.
        dbias: the gradient of the bias, given back where `bias_gradient` is True.
        deterministic: bit for bit the same result at every run; slower.
    """

    op: ClassVar[str] = "sdpa_bwd"
    reads: ClassVar[tuple[str, ...]] = (
        *("q", "k", "v", "o", "do", "stats", "bias", "seq_len_q", "seq_len_kv", "seed", "offset", *OFFSETS),
    )
    writes: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv", "dbias")
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    stats: Tensor
    bias: Tensor | None = None
    seq_len_q: Tensor | None = None
    seq_len_kv: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    scale: float | None = None
    left_bound: int | None = None
    right_bound: int | None = None
    diagonal: Diagonal = Diagonal.TOP_LEFT
    dropout: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None
    ragged_q: Tensor | None = None
    ragged_k: Tensor | None = None
    ragged_v: Tensor | None = None
    ragged_o: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None
    bias_gradient: bool = False
    deterministic: bool = False
    workspace: int | None = None
    autotune: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return ("q", "k", "v", "o", "do", "stats")

    def made(self) -> dict[str, Made]:
        layouts = {f"d{name}": getattr(self, name).layout for name in ("q", "k", "v")}
        found = {name: like(layout) for name, layout in layouts.items()}
        if self.packed:  # with the offsets of its operand, and so its strides
            found = {name: Made(layout.shape, layout.strides, layout.dtype) for name, layout in layouts.items()}
        if self.bias_gradient and self.bias is not None:
            found["dbias"] = dense(self.bias.shape, self.bias.dtype)
        return found

    def choices(self) -> tuple[Any, ...]:
        return (*super().choices(), self.bias_gradient, self.deterministic)

    def check_fields(self) -> None:
        self._check_operands()
        self._check_scores()
        wanted = (*self.q.shape[:-1], self.v.shape[-1])
        if (self.o.shape, self.o.dtype) != (wanted, self.q.dtype):
            raise BadRequest("o", str(self.o.layout), f"{self.q.dtype}{list(wanted)}")
        same_as("do", self.do, "o", self.o)
        self._check_dense("o", "do", "dq", "dk", "dv")
        if self.packed:
            check_alike(self, ("do", "o"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
        stats = (*self.scores[:3], 1)
        if (self.stats.shape, self.stats.dtype) != (stats, F32) or not self.stats.layout.is_contiguous:
            hint = "pass on what sdpa_fwd(…, stats=True) gave back"
            raise BadRequest("stats", str(self.stats.layout), f"f32{list(stats)}, dense", hint)
        if self.bias_gradient and self.bias is None:
            raise BadRequest("bias_gradient", "True", "False, for there is no bias")
