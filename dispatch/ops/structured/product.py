"""Matmul24Request: D = activation(alpha · A · B + beta · C + bias) over a compressed matrix A."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import check_dtype, check_int, check_number, shown
from dispatch.core.factors import F32_MAX, ScaledRequest
from dispatch.core.operands import Output, by_columns, dense
from dispatch.core.request import NamedArguments, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F32, HALF, I8, I32, U8, Choice, Compute, Dtype
from dispatch.ops.structured.form import ON_HOST, StructuredForm, check_form, dense_step
from dispatch.ops.structured.layout import host_bytes, is_row_major

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Activation24", "Matmul24Request", "SplitKMode"]

MAX_INT = 2**31 - 1
BATCH = 3  # axes
VECTORS = ("bias", "alpha_vector", "beta_vector")


class Activation24(Choice):
    """The activation of the product: `CUSPARSELT_MATMUL_ACTIVATION_*`; GELU is the tanh approximation."""

    NONE = 0
    RELU = 1
    GELU = 2


class SplitKMode(Choice):
    """`cusparseLtSplitKMode_t`, how the parts of a product split along k are summed; DEFAULT is the library's choice.

    ONE_KERNEL and TWO_KERNELS are for GPUs before sm_90, the others for sm_90 and later.
    """

    DEFAULT = 0
    ONE_KERNEL = 1
    TWO_KERNELS = 2
    HEURISTIC = 3
    DATAPARALLEL = 4
    SPLITK = 5
    STREAMK = 6


@dataclass(frozen=True, eq=False)
class Matmul24Request(ScaledRequest["Tensor"]):
    """The product of a compressed matrix A (m, k) and a dense B (k, n), with the library's fused epilogue.

    D = activation(alpha · A · B + beta · C + bias), summed in f32, for i8 in i32. `x @ w.T` is the transpose of a
    product with w, and is computed as such; D has the layout of C if there is one, else of B.

    Attributes:
        a: the bytes of A, u8, from `compress_2_4`.
        form: a `StructuredForm`. A `StructuredTensor` unpacks into both: `matmul_2_4(*a, b)`.
        b: (k, n) or (batch, k, n), of A's dtype, row-major or column-major; column-major for 8-bit elements. n is a
            multiple of 8, of 16 for 8-bit elements, and of 4 for f32. A or B may be shared by a batch.
        c: added as beta · C, of D's shape and layout; `beta` is 1 if there is a c, else 0.
        bias: (m,), or (batch, m), added to each column of D; of C's dtype, and f32 for i8.
        alpha, beta: numbers.
        alpha_vector, beta_vector: f32 (m,), a factor for each row of D instead of the number; only for i8. beta_vector
            requires alpha_vector, and alpha_vector with a c requires beta_vector.
        activation: NONE, RELU or GELU; GELU is for i8 to i8, f8e4m3 to bf16 or f8e4m3, f8e5m2 to f8e5m2, and for 16-bit
            results before sm_100 for f8e5m2 to bf16, from sm_100 on for f8e4m3 to f16.
        upper_bound, threshold: of RELU, which is 0 up to the threshold, and at most the bound.
        gelu_scaling: a factor of the result of GELU.
        out_dtype: that of D if `out` is left out; None uses c's, else a's (i32 for i8, bf16 for fp8).
        compute: "tf32" for f32, the library's only choice; "16f" sums f16 in f16, on sm_90; None selects f32 or i32.
        split_k: the number of parts that k is split into; -1 on sm_90 is the library's own method, None its choice.
        split_k_mode: a `SplitKMode`.
        split_k_buffers: the number of buffers for partial sums, on GPUs before sm_90; None is the library's choice.
        config_id: the number of a kernel, from 0 on; None is the library's choice. NoRow states how many there are.
            Refused for 0.8 on sm_90, where some kernels end the process by an illegal instruction.
        autotune: let the library run all its kernels once, keep the fastest, and store it on disk. Refused if config_id
            is refused.
        library: only rows of this library are considered, "cusparseLt"; None considers all, in the table's order.
        out: D (m, n) or (batch, m, n), row-major or column-major; it may be c itself.
    """

    op: ClassVar[str] = "matmul_2_4"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c", *VECTORS)
    mixed: ClassVar[tuple[str, ...]] = ("b", "c", *VECTORS)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    real: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    a: Tensor
    form: StructuredForm
    b: Tensor
    _: KW_ONLY
    c: Tensor | None = None
    bias: Tensor | None = None
    alpha: float = 1.0
    beta: float | None = None
    alpha_vector: Tensor | None = None
    beta_vector: Tensor | None = None
    activation: Activation24 | str = Activation24.NONE
    upper_bound: float = math.inf
    threshold: float = 0.0
    gelu_scaling: float = 1.0
    out_dtype: Any = None
    compute: Compute | str | None = None
    split_k: int | None = None
    split_k_mode: SplitKMode | str = SplitKMode.DEFAULT
    split_k_buffers: int | None = None
    config_id: int | None = None
    autotune: bool = False
    library: str | None = None
    out: Tensor | None = None

    # -- derived values -----------------------------------------------------------------------------------------------
    @property
    def a_dtype(self) -> Dtype:
        """The dtype of A's elements."""
        return Dtype.of(self.form.dtype)

    @property
    def d_dtype(self) -> Dtype:
        """The dtype of D."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        if self.c is not None and not self.a_dtype.is_fp8:
            return self.c.dtype
        return BF16 if self.a_dtype.is_fp8 else I32 if self.a_dtype is I8 else self.a_dtype

    @property
    def c_dtype(self) -> Dtype:
        """The dtype of C; without a C that of D, and for a D of fp8 that of the bias, or bf16."""
        if self.c is not None:
            return self.c.dtype
        if not self.d_dtype.is_fp8:
            return self.d_dtype
        return self.bias.dtype if self.bias is not None and self.bias.dtype in HALF else BF16

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        return self.a_dtype, self.a_dtype, self.c_dtype, self.d_dtype

    @property
    def batch(self) -> int | None:
        """The number of products; None if D is one matrix."""
        batches = [shape[0] for shape in (self.form.shape, self.b.shape) if len(shape) == BATCH]
        return batches[0] if batches else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of D."""
        lead = () if self.batch is None else (self.batch,)
        return (*lead, self.form.shape[-2], self.b.shape[-1])

    # -- the contract of OperandRequest --------------------------------------------------------------------------------
    def check_fields(self) -> None:
        object.__setattr__(self, "form", check_form("form", self.form))
        self._check_bytes()
        self._check_b()
        shape = self.shape
        if self.c is not None and self.c.shape != shape:
            raise BadRequest(
                "c", str(self.c.layout), f"{list(shape)}, the shape of D", "c of another shape is not broadcast"
            )
        if self.out_dtype is not None:
            check_dtype("out_dtype", self.out_dtype)
        self._check_vectors()
        self._check_numbers()

    def _check_bytes(self) -> None:
        a, form = self.a, self.form
        if a.dtype is not U8 or a.ndim != 1 or (a.size > 1 and not a.layout.is_contiguous):
            raise BadRequest("a", str(a.layout), "dense bytes, u8, as compress_2_4 returns them")
        is_hosts = form.made_by == ON_HOST
        if is_hosts != a.device.is_host:
            where = "on the host" if a.device.is_host else "by its library"
            hint = "compress the dense matrix on this device instead of copying the bytes"
            raise BadRequest(
                "form.made_by", repr(form.made_by), f"bytes that were compressed {where} for {a.device!r}", hint
            )
        if is_hosts and a.size != (wanted := host_bytes(form.shape, self.a_dtype)):
            raise BadRequest(
                "a", str(a.layout), f"u8[{wanted}], the size of a compressed {form.dtype}{list(form.shape)}"
            )

    def _check_b(self) -> None:
        b, (k, step) = self.b, (self.form.shape[-1], dense_step(self.a_dtype))
        if b.ndim not in (2, BATCH) or b.shape[-2] != k or b.dtype is not self.a_dtype:
            hint = "b.mT exchanges the last two axes" if b.ndim > 1 and b.shape[-1] == k else ""
            raise BadRequest(
                "b", str(b.layout), f"{self.a_dtype}[{k}, n], or a batch of such matrices, because a has k = {k}", hint
            )
        if b.shape[-1] % step:
            wanted = f"n a multiple of {step}, as dense matrices of {self.a_dtype} need"
            raise BadRequest("b", str(b.layout), wanted, "pad it with zeros")
        counts = {shape[0] for shape in (self.form.shape, b.shape) if len(shape) == BATCH}
        if len(counts) > 1:
            raise BadRequest("b", str(b.layout), f"a batch of {self.form.shape[0]}, like a, or one matrix")

    def _check_vectors(self) -> None:
        m, batch = self.form.shape[-2], self.batch
        for name in VECTORS:
            vector: Tensor | None = getattr(self, name)
            if vector is None:
                continue
            shapes = [(m,)] if name != "bias" or batch is None else [(m,), (batch, m)]
            dtype = F32 if name != "bias" or self.a_dtype is I8 else self.c_dtype
            if vector.dtype is not dtype or vector.shape not in shapes:
                wanted = " or ".join(f"{dtype}{list(shape)}" for shape in shapes)
                raise BadRequest(name, str(vector.layout), f"{wanted}: a number for each row of D")
        if self.beta_vector is not None and (self.alpha_vector is None or self.c is None):
            raise BadRequest("beta_vector", str(self.beta_vector.layout), "None without c and alpha_vector")
        if self.alpha_vector is not None and self.alpha != 1:
            raise BadRequest("alpha", shown(self.alpha), "1 with alpha_vector, which replaces it")
        if self.beta_vector is not None and self.beta is not None:
            raise BadRequest("beta", shown(self.beta), "None with beta_vector, which replaces it")

    def _check_numbers(self) -> None:
        self.check_factors()
        check_number("upper_bound", self.upper_bound, low=-F32_MAX)
        for name in ("threshold", "gelu_scaling"):
            check_number(name, getattr(self, name), low=-F32_MAX, high=F32_MAX)
        relu, gelu = self.activation is Activation24.RELU, self.activation is Activation24.GELU
        if not relu and (self.upper_bound, self.threshold) != (math.inf, 0):
            raise BadRequest(
                "activation", shown(self.activation), "RELU, the only activation with upper_bound and threshold"
            )
        if not gelu and self.gelu_scaling != 1:
            raise BadRequest("activation", shown(self.activation), "GELU, the only activation with gelu_scaling")
        for name, low in (("split_k", -1), ("split_k_buffers", 0), ("config_id", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, MAX_INT)
        if self.split_k == 0:
            raise BadRequest("split_k", "0", "1 or more parts, -1 for the library's choice, or None")

    def outputs(self) -> dict[str, Output]:
        like = self.b if self.c is None else self.c
        make = dense if is_row_major(like.layout) else by_columns
        return {"out": make(self.shape, self.d_dtype)}

    def attributes(self) -> tuple[Any, ...]:
        named = {*self.reads, *self.writes, "alpha", "beta", "out_dtype"}
        choices = (getattr(self, field.name) for field in fields(self) if field.name not in named)
        return (*choices, self.d_dtype.name, self.reads_added)

    def named_arguments(self) -> NamedArguments:
        named = super().named_arguments()
        by_vector = {name for name in self.numbers if getattr(self, f"{name}_vector") is not None}
        return named._replace(numbers={name: one for name, one in named.numbers.items() if name not in by_vector})
