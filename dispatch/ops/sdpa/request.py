"""The requests of scaled dot product attention: `sdpa_fwd`, and its gradient `sdpa_bwd`.

Q is (B, Hq, Sq, D), K (B, Hk, Skv, D), V (B, Hv, Skv, Dv), with any strides (BHSD, BSHD or others) but a dense D. If K
and V have fewer heads than Q, groups of its heads share them (GQA; MQA with one). Sequences may also be packed, without
padding between them: see `SdpaRequest`. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operand_checks import check_tensor
from dispatch.core.operands import Output, dense, like, same_as
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import F32, I32
from dispatch.ops.sdpa.base import OFFSETS, Diagonal, SdpaRequest
from dispatch.ops.sdpa.packed import check_alike

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Diagonal", "SdpaBwdRequest", "SdpaFwdRequest", "SdpaRequest"]

PAGES = ("page_table_k", "page_table_v")
FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


@dataclass(frozen=True, eq=False)
class SdpaFwdRequest(SdpaRequest[R_co]):
    """O = softmax(mask(scale · Q · Kᵀ + bias)) · V, and with `stats` the logarithm of each row's sum for the backward.

    Attributes:
        q, k, v: the operands, f16, bf16 or fp8.
        bias: added to the scaled scores, (B or 1, Hq or 1, Sq, Skv).
        seq_len_q, seq_len_kv: i32 (B,): the lengths of the sequences; the rest is ignored.
        seed, offset: i64, one element each: the mask of dropout is drawn from them, the same for the same two.
        page_table_k, page_table_v: i32 (B, P): K and V are stored in pages, (pages, Hk, length of a page, D) and
            (pages, Hv, length of a page, Dv), and sequence b consists of pages table[b, 0], table[b, 1], … in this
            order. Each sequence has one key or more. Entries after its last page may be invalid; V of all pages in
            the table must be finite after the end, too.
        out: O, (B, Hq, Sq, Dv); if left out, it has the layout of q.
        stats_out: f32 (B, Hq, Sq, 1); allocated if `stats` is True and it is left out.
        mask_out: f32 (B, Hq, Sq, Skv), 1 for weights that dropout keeps, 0 for the others; allocated if `mask` is
            True and it is left out. It may be either for keys that a query does not attend to.
        descale_q, descale_k, descale_v, scale_o: f32, one element each, only with fp8: the factors of the operands,
            and of O before it is stored.
        scale_s, descale_s: likewise, the factors of the weights between the products, before they are rounded to
            fp8 and after.
        amax_s, amax_o: f32 (1,), the largest weight, and the largest magnitude of O before its scale.
        stats, mask, amax: whether to return the statistics, the mask of dropout, and the largest magnitudes.

    Returns O, followed by the requested outputs in the order of their fields. Follows cuDNN's scaled dot product
    attention.
    """

    op: ClassVar[str] = "sdpa_fwd"
    reads: ClassVar[tuple[str, ...]] = (
        *("q", "k", "v", "bias", "seq_len_q", "seq_len_kv", "seed", "offset", *PAGES, *FACTORS, *OFFSETS),
    )
    writes: ClassVar[tuple[str, ...]] = ("out", "stats_out", "mask_out", "amax_s", "amax_o")
    _: KW_ONLY
    out: Tensor | None = None
    stats_out: Tensor | None = None
    mask_out: Tensor | None = None
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
    stats: bool = False
    mask: bool = False
    amax: bool = False

    @property
    def pages(self) -> Tensor | None:
        return self.page_table_k

    @property
    def alone(self) -> bool:
        """Whether the request has no operands and options except Q, K, V and the scale."""
        return not (self.bias is not None or self.padded or self.masked or self.dropout or self.q.dtype.is_fp8)

    def outputs(self) -> dict[str, Output]:
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        outputs = {"out": dense(shape, self.q.dtype) if self.packed else like(self.q.layout, shape)}
        if self.stats:
            outputs["stats_out"] = dense((*self.scores[:3], 1), F32)
        if self.mask:
            outputs["mask_out"] = dense(self.scores, F32)
        if self.amax:
            outputs["amax_s"] = outputs["amax_o"] = dense((1,), F32)
        return outputs

    def check_fields(self) -> None:
        self._check_operands()
        self._check_pages()
        self._check_scores()
        self._check_dense("out")
        for name in ("stats_out", "mask_out"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and not tensor.layout.is_contiguous:
                raise BadRequest(name, str(tensor.layout), "a dense tensor")
        self._check_factors()
        if self.mask and not self.dropout:
            raise BadRequest("mask", "True", "False, because there is no dropout")

    def _check_factors(self) -> None:
        fp8 = self.q.dtype.is_fp8
        self._check_single(FACTORS, F32, fp8, f"None with {self.q.dtype}")
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
            raise BadRequest("seq_len_kv", "nothing", "lengths of both, because K and V are stored in pages")


@dataclass(frozen=True, eq=False)
class SdpaBwdRequest(SdpaRequest["tuple[Tensor, ...]"]):
    """dQ, dK, dV (and dbias) of `sdpa_fwd`, from its operands, its results O and statistics, and dO.

    Attributes:
        q, k, v, bias, seq_len_q, seq_len_kv, seed, offset: as in the forward, and so are all options for the
            scores.
        o, do: (B, Hq, Sq, Dv); packed ones of the same strides.
        stats: f32 (B, Hq, Sq, 1), as returned by `sdpa_fwd`.
        dq, dk, dv: the gradients; if left out, they have the layouts of q, k and v.
        dbias: the gradient of the bias, of its shape.
        bias_gradient: whether to return dbias, too; refused with lengths (`seq_len_q` and `seq_len_kv`).
        deterministic: return the same bits in every run; slower.
    """

    op: ClassVar[str] = "sdpa_bwd"
    reads: ClassVar[tuple[str, ...]] = (
        *("q", "k", "v", "o", "do", "stats", "bias", "seq_len_q", "seq_len_kv", "seed", "offset", *OFFSETS),
    )
    writes: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv", "dbias")
    o: Tensor
    do: Tensor
    stats: Tensor
    _: KW_ONLY
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    bias_gradient: bool = False
    deterministic: bool = False

    def outputs(self) -> dict[str, Output]:
        layouts = {f"d{name}": getattr(self, name).layout for name in ("q", "k", "v")}
        outputs = {name: like(layout) for name, layout in layouts.items()}
        if self.packed:  # a gradient has the offsets of its operand, so its strides, too
            outputs = {name: Output(layout.shape, layout.strides, layout.dtype) for name, layout in layouts.items()}
        if self.bias_gradient and self.bias is not None:
            outputs["dbias"] = dense(self.bias.shape, self.bias.dtype)
        return outputs

    def check_fields(self) -> None:
        self._check_operands()
        self._check_scores()
        check_tensor("o", self.o, self.q.dtype, (*self.q.shape[:-1], self.v.shape[-1]))
        same_as("do", self.do, "o", self.o)
        self._check_dense("o", "do", "dq", "dk", "dv")
        if self.packed:
            check_alike(self, ("do", "o"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
        hint = "pass the statistics that sdpa_fwd(…, stats=True) returned"
        check_tensor("stats", self.stats, F32, (*self.scores[:3], 1), hint=hint, dense=True)
        if self.bias_gradient and self.bias is None:
            raise BadRequest("bias_gradient", "True", "False, because there is no bias")
