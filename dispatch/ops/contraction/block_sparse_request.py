"""ContractBlockSparseRequest: a contraction of tensors that store only some blocks. Making one validates it; this
file calls no library.

Follows `cutensorCreateBlockSparseContraction`, https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.core.factors import ScaledRequest
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64, Compute, Dtype
from dispatch.ops.contraction.block_sparse import BlockSparseForm, check_form, reachable, sections_by_mode, size_of
from dispatch.ops.contraction.modes import canonical_spec, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor
    from dispatch.ops.contraction.base import Factor

__all__ = ["ContractBlockSparseRequest"]

DTYPES = (F32, F64, C64, C128)


@dataclass(frozen=True, eq=False)
class ContractBlockSparseRequest(ScaledRequest["Tensor"]):
    """D = alpha · Σ A · B + beta · C over block-sparse tensors; only the blocks of D's form are computed.

    Operands are the elements of the stored blocks, in one tensor of one axis, each with its `BlockSparseForm`;
    a `BlockSparseTensor` unpacks into both: contract_block_sparse("ik,kj->ij", *a, *b). A mode has the same sections
    in all tensors.

    Attributes:
        spec: the modes of a, b and the result: "ik,kj->ij", or lists of modes. A tensor has each mode once.
        a: the blocks of A, of `a_form`, in sequence; f32, f64, c64 or c128.
        a_form: the stored blocks of A.
        b: the blocks of B, of a's dtype.
        b_form: the stored blocks of B.
        out_form: the blocks of D and c: others are not computed, and those that nothing contributes to are 0. None for
            all blocks that a pair of blocks of A and B contributes to, in the order of their coordinates.
        c: the blocks that are added as beta · C, of `out_form`; it may be `out` itself, and is not read if beta is 0.
        alpha: a number; complex numbers for complex tensors only.
        beta: a number; the default is 1 if there is a c, else 0.
        reproducible: whether the result is bitwise the same in each run, which may take longer (cuTENSOR 2.8).
        compute: a Compute or its name; None takes that of the dtype, f32 or f64; there are no others.
        library: use only this library's rows, "cutensor"; None considers all rows in the table's order.
        out: the blocks of D, of `out_form`.
    """

    op: ClassVar[str] = "contract_block_sparse"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    spec: str | Sequence[Any]
    a: Tensor
    a_form: BlockSparseForm
    b: Tensor
    b_form: BlockSparseForm
    _: KW_ONLY
    out_form: BlockSparseForm | None = None
    c: Tensor | None = None
    alpha: Factor = 1.0
    beta: Factor | None = None
    reproducible: bool = False
    compute: Compute | str | None = None
    library: str | None = None
    out: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", canonical_spec(self.spec))
        super().__post_init__()

    # -- what follows from the fields ---------------------------------------------------------------------------------
    @cached_property
    def parsed(self) -> tuple[tuple[str, ...], str]:
        """The modes of A and B, and of the result."""
        return parse(str(self.spec), 2)

    @cached_property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """The sections along each mode."""
        return dict(sections_by_mode(self.parsed[0], (self.a_form, self.b_form)))

    @cached_property
    def d_form(self) -> BlockSparseForm:
        """The form of D."""
        if self.out_form is not None:
            return self.out_form
        return reachable(self.parsed[0], self.parsed[1], (self.a_form, self.b_form))

    def modes_of(self, name: str) -> str:
        """The modes of an operand; the added operand has those of the result."""
        return self.parsed[0]["ab".index(name)] if name in ("a", "b") else self.parsed[1]

    def form_of(self, name: str) -> BlockSparseForm:
        """The form of an operand."""
        return {"a": self.a_form, "b": self.b_form}.get(name) or self.d_form

    # -- the contract of OperandRequest -------------------------------------------------------------------------------
    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        return self.a.dtype, self.b.dtype, self.layout_of("out").dtype

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((size_of(self.d_form, self.a.dtype),), self.a.dtype)}

    def check_fields(self) -> None:
        if self.a.dtype not in DTYPES:
            wanted = f"{', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}"
            raise BadRequest("a", str(self.a.layout), wanted, "a.astype('f32')")
        for name in ("b", "c"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and tensor.dtype is not self.a.dtype:
                raise BadRequest(
                    name, str(tensor.layout), f"{self.a.dtype}, the dtype of a", f"{name}.astype('{self.a.dtype}')"
                )
        self._check_forms()
        for name in ("a", "b", "c", "out"):
            self._check_blocks(name)
        self.check_factors()

    def _check_forms(self) -> None:
        """Check that each mode has the same sections in all tensors, and that each tensor has a mode once."""
        check_form("a_form", self.a_form)
        check_form("b_form", self.b_form)
        if self.out_form is not None:
            check_form("out_form", self.out_form)
        elif self.c is not None:
            raise BadRequest("out_form", "None", "the form of c, which is also that of the result", "out_form=c.form")
        for name in ("a", "b"):
            modes, form = self.modes_of(name), self.form_of(name)
            if len(modes) != form.ndim:
                actual = f"{form.ndim} axes, {list(form.shape)}"
                raise BadRequest(
                    f"{name}_form", actual, f"{len(modes)}, because its modes are {modes!r} in {self.spec!r}"
                )
            if len(set(modes)) < len(modes):
                raise BadRequest("spec", f"{self.spec!r}: {name} has a mode twice", "each mode once in a tensor")
        sections_of: dict[str, tuple[tuple[int, ...], str]] = {}
        for name in ("a", "b", *(("out",) if self.out_form is not None else ())):
            modes, form = self.modes_of(name), self.form_of(name)
            if len(modes) != form.ndim:
                actual = f"{form.ndim} axes, {list(form.shape)}"
                raise BadRequest("out_form", actual, f"{len(modes)}, because the result has the modes {modes!r}")
            for mode, sections in zip(modes, form.sections, strict=True):
                first, whose = sections_of.setdefault(mode, (sections, name))
                if name == "out" and whose == "out":
                    break
                if first != sections:
                    actual = f"the sections {sections} along {mode} of {self.spec!r}"
                    raise BadRequest(f"{name}_form", actual, f"{first}, the sections of {whose}")
        for mode in self.parsed[1]:
            if mode not in self.sections:
                raise BadRequest("spec", f"{self.spec!r}: no operand has {mode}", "only modes of operands")

    def _check_blocks(self, name: str) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            return
        count = size_of(self.form_of(name), self.a.dtype)
        if tensor.shape != (count,) or (count > 1 and not tensor.layout.is_contiguous):
            wanted = f"dense {self.a.dtype}[{count}], the {len(self.form_of(name).blocks)} blocks of its form"
            raise BadRequest(name, str(tensor.layout), wanted, "BlockSparseTensor.from_dense(x, sections) makes both")

    def describe(self) -> str:
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        forms = [f"{name} {self.form_of(name)!r}" for name in ("a", "b", "out")]
        return f"{self.op}({self.spec!r}, {', '.join([*parts, *forms])})"
