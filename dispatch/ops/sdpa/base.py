"""The fields and checks that the requests of attention share: Q, K and V, packed or not, and changes to the scores.

`request.py` derives the two requests from SdpaRequest. A request is validated when it is made. This file calls no
library.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.factors import F32_MAX
from dispatch.core.operand_checks import check_probability, check_tensor
from dispatch.core.operands import OperandRequest
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64, Choice, Dtype

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["OFFSETS", "RAGGED", "Diagonal", "SdpaRequest"]

Shape = tuple[int, ...]
# Packed sequences: the field with the offsets of each operand.
OFFSETS = ("ragged_q", "ragged_k", "ragged_v", "ragged_o")
RAGGED = dict(zip("qkvo", OFFSETS, strict=True))
# Results and gradients with the same layout as an operand share its offsets.
RAGGED |= {"out": "ragged_o", "do": "ragged_o", "dq": "ragged_q", "dk": "ragged_k", "dv": "ragged_v"}


class Diagonal(Choice):
    """The corner of the scores in which the diagonal of a mask starts; it matters if Sq and Skv differ."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


@dataclass(frozen=True, eq=False)
class SdpaRequest(OperandRequest[R_co]):
    """The fields that forward and backward share: Q, K, V, and the changes to the scores before the softmax.

    Packed sequences: q (tokens, Hq, D), k (tokens, Hk, D), v (tokens, Hv, Dv) and O (tokens, Hq, Dv) hold the tokens of
    all sequences. Their first two axes have any strides, so they may be views of one (tokens, 3, H, D). Sequence b of
    an operand consists of `seq_len_…[b]` tokens from element `ragged_…[b]` on. Offsets are i32 or i64 (B + 1,), in
    elements from the operand's first one. Each is a multiple of the token's stride, and the last one is the end. The
    longest sequences have at most `max_q` queries and `max_kv` keys, which do not exceed the numbers of tokens of q and
    of k. An O that is left out is dense, so `ragged_o` contains multiples of Hq · Dv elements. It differs from
    `ragged_q` if q is a view of (tokens, 3, H, D), because the tokens of q are 3 · H · D elements apart then. A
    gradient has the strides and the offsets of its operand. Memory between sequences is ignored in operands and
    undefined in results, and so are statistics after a sequence's end. `ragged_offsets` computes offsets from lengths.

    Padded sequences: memory after a sequence's end (`seq_len_…`) is ignored, even if it is NaN. Results are 0 there,
    and statistics -∞, as for a query that attends to no key. This holds from sm_90 on and on the host, with one
    exception: if Sq is 1, cuDNN computes the query even if its length is 0 (seen on an H200). Engines for older GPUs
    propagate NaN and infinities of V after an end to O, and those of all operands to gradients. Lengths, offsets and
    tables are on the device, so they cannot be checked in advance: lengths are from 0 to the longest. The host refuses
    others with BadRequest.

    Heads, D and Dv, have a multiple of 8 elements, or of 16 in fp8, and at most 256.

    Attributes:
        scale: the factor of the scores, above 0; None for 1/√D.
        left_bound, right_bound, diagonal: which keys a query attends to: with r = 0 for TOP_LEFT and r = Skv - Sq
            for BOTTOM_RIGHT, query i attends to key j if j <= i + r + right_bound and j > i + r - left_bound.
            right_bound 0 is causal, left_bound is the width of a sliding window. cuDNN refuses more queries than
            keys with left_bound or BOTTOM_RIGHT, unless lengths are given, and BOTTOM_RIGHT with a bias or with
            dropout.
        dropout: the probability that a weight is dropped; the others are divided by 1 - dropout.
        ragged_q, ragged_k, ragged_v, ragged_o, max_q, max_kv: for packed sequences; Sq and Skv are then max_q and
            max_kv, in the bias and the statistics, too.
        workspace: the most bytes an engine may use; None allows any size up to 1 GiB.
        autotune: time cuDNN's candidates once, keep the fastest, and remember it on disk.
    """

    advice: ClassVar[str] = "heads of 64 or 128, one mask at a time, TOP_LEFT, and no limit of workspace"
    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    bias: Tensor | None = None
    seq_len_q: Tensor | None = None
    seq_len_kv: Tensor | None = None
    scale: float | None = None
    left_bound: int | None = None
    right_bound: int | None = None
    diagonal: Diagonal | str = Diagonal.TOP_LEFT
    dropout: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None
    ragged_q: Tensor | None = None
    ragged_k: Tensor | None = None
    ragged_v: Tensor | None = None
    ragged_o: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None
    workspace: int | None = None
    autotune: bool = False

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        """The dtypes of Q, K, the result and the bias."""
        return (self.q.dtype, self.k.dtype, self.q.dtype, None if self.bias is None else self.bias.dtype)

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or 1/√D."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else float(self.scale)

    @property
    def padded(self) -> bool:
        """Whether the sequences of the batch have individual lengths."""
        return self.seq_len_q is not None

    @property
    def masked(self) -> bool:
        return self.left_bound is not None or self.right_bound is not None

    @property
    def packed(self) -> bool:
        """Whether the sequences are stored without padding, and located by offsets."""
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
        """The page table of K, if K and V are stored in pages."""
        return None

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_operands(self) -> None:
        q, k, v = self.q, self.k, self.v
        missing = [name for name in OFFSETS if getattr(self, name) is None]
        if 0 < len(missing) < len(OFFSETS):
            given = ", ".join(name for name in OFFSETS if name not in missing)
            raise BadRequest(missing[0], "nothing", f"offsets of all operands, as in {given}, or of none")
        axes = "(tokens, heads, head) for packed sequences" if self.packed else "(batch, heads, sequence, head)"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4 - self.packed:
                raise BadRequest(name, str(tensor.layout), f"{'three' if self.packed else 'four'} axes: {axes}")
            if tensor.size == 0:
                raise BadRequest(name, str(tensor.layout), "extents of 1 or more", "skip the call for an empty batch")
            if tensor.dtype is not q.dtype:
                raise BadRequest(name, str(tensor.layout), f"dtype {q.dtype}, that of q")
            if tensor.shape[0] != q.shape[0] and self.pages is None and not self.packed:
                raise BadRequest(name, str(tensor.layout), f"batch {q.shape[0]}, that of q {q.layout}")
            if q.shape[1] % tensor.shape[1]:
                raise BadRequest(name, f"{tensor.shape[1]} heads", f"a divisor of the {q.shape[1]} heads of q")
        if k.shape[-1] != q.shape[-1]:
            raise BadRequest("k", str(k.layout), f"heads of {q.shape[-1]}, like q {q.layout}")
        if not self.packed and v.shape[2] != k.shape[2]:
            raise BadRequest("v", str(v.layout), f"a sequence of {k.shape[2]}, like k {k.layout}")
        self._check_dense("q", "k", "v")
        self._check_ragged()

    def _check_ragged(self) -> None:
        """Check the offsets, and that with offsets there are the longest lengths and no pages."""
        for name in OFFSETS:
            tensor: Tensor | None = getattr(self, name)
            first = self.ragged_q
            if tensor is None or first is None:
                continue
            if tensor.ndim != 1 or tensor.size < 2 or tensor.shape != first.shape or not tensor.layout.is_contiguous:
                raise BadRequest(
                    name, str(tensor.layout), "one more offset than sequences, the same number for each operand"
                )
            if tensor.dtype not in (I32, I64) or tensor.dtype is not first.dtype:
                raise BadRequest(name, str(tensor.layout), "all offsets in i32, or all in i64")
        for name, operand in (("max_q", self.q), ("max_kv", self.k)):
            longest = getattr(self, name)
            if self.packed:
                check_int(name, longest, 1, operand.shape[0])
            elif longest is not None:
                raise BadRequest(name, repr(longest), "None, because the sequences are not packed")
        if self.packed and not self.padded:
            raise BadRequest("seq_len_q", "nothing", "lengths of queries and keys, because the sequences are packed")
        if self.packed and self.pages is not None:
            raise BadRequest("page_table_k", "tables of pages", "no tables of pages with packed sequences")

    def _check_dense(self, *names: str) -> None:
        for name in names:
            tensor: Tensor | None = getattr(self, name)
            if tensor is None or not tensor.ndim:  # an output of another shape is refused later
                continue
            axes = list(zip(tensor.layout.strides, tensor.shape, strict=True))
            if (tensor.shape[-1] > 1 and axes[-1][0] != 1) or any(s < 1 and e > 1 for s, e in axes):
                hint = "copy it: dev.array(x)"
                raise BadRequest(name, str(tensor.layout), "a dense last axis and nonnegative strides", hint)

    def _check_scores(self) -> None:
        if self.scale is not None and not abs(float(self.scale)) <= F32_MAX:
            raise BadRequest("scale", repr(self.scale), f"a finite number in the range of f32, up to {F32_MAX:.4g}")
        for name, low in (("left_bound", 1), ("right_bound", 0), ("workspace", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, 1 << 40)
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
            check_tensor(name, getattr(self, name), I32, (b,), ", the length of each sequence of the batch")
        check_probability("dropout", self.dropout)
        self._check_single(("seed", "offset"), I64, self.dropout > 0, "None without dropout")

    def _check_single(self, names: tuple[str, ...], dtype: Dtype, wanted: bool, otherwise: str) -> None:
        """Check that tensors of one element are given if they are wanted, and none otherwise."""
        for name in names:
            tensor: Tensor | None = getattr(self, name)
            if (tensor is not None) != wanted:
                layout_text = "nothing" if tensor is None else str(tensor.layout)
                raise BadRequest(name, layout_text, f"an {dtype} tensor of one element" if wanted else otherwise)
            if tensor is not None and (tensor.size != 1 or tensor.ndim > 1 or tensor.dtype is not dtype):
                raise BadRequest(name, str(tensor.layout), f"an {dtype} tensor of one element")
