"""MatmulRequest: D = epilogue(alpha · op(A) · op(B) + beta · C + bias), row-major, batched, with scales.

Making a request validates it, so that a bad one never comes near a library. What is sound but not offered by any
library is for the table to refuse (NoRow). A request with an epilogue tree answers as its TreeForm does (trees.py).
This file calls nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import read_choices
from dispatch.core.overlap import broadcast
from dispatch.core.request import Argument, NamedArguments, Operands, R_co, Request, Signature, Unpacked, Use
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.keys import BF16, HALF, I8, I32, U8, Compute, Dtype, Epilogue, member
from dispatch.ops.matmul.scales import FACTORS_AND_AMAX, NO_SCALES, Scales, aux_shape
from dispatch.ops.matmul.validate import TENSORS, validate
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.matmul.trees import TreeForm

__all__ = ["NO_SCALES", "MatmulRequest", "Scales", "aux_shape"]

Shape = tuple[int, ...]
Number = int | float | complex


@dataclass(frozen=True, eq=False)
class MatmulRequest(Request[R_co]):
    """One product of A (…, m, k) and B (…, k, n), with what a library can fuse to it; batch axes broadcast.

    Attributes:
        a, b: the operands; strided views are taken as they are, in row-major or column-major order.
        c: added as beta · C, (…, m, n); `beta` is 1 where c is given and else 0. With beta and no c, `out` is C.
        bias: (n,), or (…, n) with D's batch axes.
        aux: written by RELU_AUX* and GELU_AUX*, read by DRELU* and DGELU*; see `aux_shape`.
        bgrad: bias gradient, written: (…, n) for DRELU_BGRAD, DGELU_BGRAD and BGRADB, (…, m) for BGRADA. Summed up in
            the compute type, of D as it is stored or before that rounding, as suits the algorithm.
        out: D, of `out_dtype`; it may be `c` itself, and overlaps no other operand.
        epilogue: what is done to the product before it is stored: an Epilogue or its name ("gelu_bias"), or a tree
            of `dispatch.evt`, which CUTLASS compiles (15 to 40 s at first, from disk then). A tree that says what a
            name says, with a bias called "bias", is that name. `evt.source()` is c, which may have no batch axes.
        alpha, beta: numbers, or tensors of one element in the compute type's dtype (both then are read on the device).
        out_dtype: that of D where `out` is left out; None takes `c`'s, else a's (bf16 for fp8, i32 for i8).
        scales: factors of a quantized product, see `Scales`.
        compute: a Compute or its name ("tf32"); None takes the row's own. Fast modes run only where they are asked for.
        fast_accum: fp8 only; sums in the tensor cores' own precision.
        workspace: the most bytes of workspace an algorithm may use; None takes the executor's.
        autotune: time all rows that take the request, and the algorithms or kernels of each, once; keep the fastest,
            and remember it on disk. `library` says which rows, where not all: kernels of CUTLASS are compiled for it.
        reduced_precision: let the library round to D's dtype before it is done: partial sums, and what an epilogue is
            applied to. Faster for some products; by default all of it is in the compute type, and D is rounded once.
        operands: what a tree names: tensors, or numbers for its scalars. A pair of each, or a mapping.
        config: tile, cluster, schedule and order of a kernel of CUTLASS; None for what suits the extents.
        library: the one whose rows alone are asked, such as "cublasLt" or "cutlass"; None asks all in the table's
            order. What CUTLASS alone carries out leaves `bias` to its tree, and has neither aux, bgrad nor scales; D,
            where it is left out, has rows at multiples of 16 bytes.

    Gives back D (…, m, n), or (D, aux) or (D, bgrad) for the epilogues that write them, or D and what a tree stores and
    reduces, in its order. On a GPU the second call with
    the same layouts and addresses is recorded as a graph, and from then on that graph is launched.
    """

    op: ClassVar[str] = "matmul"
    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",), numbers=("alpha", "beta"))
    advice: ClassVar[str] = "a row-major and b column-major, or extents that are multiples of 16"  # both dense along k
    a: Tensor
    b: Tensor
    _: KW_ONLY
    c: Tensor | None = None
    bias: Tensor | None = None
    aux: Tensor | None = None
    bgrad: Tensor | None = None
    out: Tensor | None = None
    epilogue: Epilogue | str | Node = Epilogue.NONE
    alpha: Number | Tensor = 1.0
    beta: Number | Tensor | None = None
    compute: Compute | str | None = None
    out_dtype: Any = None
    scales: Scales = NO_SCALES
    fast_accum: bool = False
    workspace: int | None = None
    autotune: bool = False
    reduced_precision: bool = False
    operands: Any = ()
    config: Config | None = None
    library: str | None = None

    def __post_init__(self) -> None:
        adopt(self)
        read_choices(self)
        if self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.c is None else 1.0)
        if self.epilogue.__class__ is not Epilogue or self.operands.__class__ is not tuple or self.operands:
            from dispatch.ops.matmul import trees  # only some products have one

            trees.prepare(self)
        validate(self)

    @cached_property
    def treed(self) -> bool:
        """Whether only CUTLASS can carry it out: it has a tree, or asks for what only CUTLASS has."""
        return self.epilogue.__class__ is not Epilogue or self.of_cutlass

    @cached_property
    def of_cutlass(self) -> bool:
        """Whether it asks for a kernel of CUTLASS by name."""
        return self.config is not None or (type(self.library) is str and self.library == "cutlass")

    @cached_property
    def form(self) -> TreeForm:
        """The product as a tree, as CUTLASS sees it."""
        from dispatch.ops.matmul.trees import TreeForm

        return TreeForm(self)

    @cached_property
    def plain_epilogue(self) -> Epilogue:
        """The epilogue of a request without a tree."""
        return self.epilogue  # type: ignore[return-value]  # a tree's request is asked for its form

    def usual(self) -> dict[str, Any]:
        return {"beta": 0.0 if self.c is None else 1.0}

    # -- sizes ----------------------------------------------------------------------------------------------------
    @cached_property
    def m(self) -> int:
        return self.a.shape[-2]

    @cached_property
    def n(self) -> int:
        return self.b.shape[-1]

    @cached_property
    def k(self) -> int:
        return self.a.shape[-1]

    @cached_property
    def batch(self) -> Shape:
        """The batch axes of D: those of A and B, broadcast."""
        return broadcast(self.a.shape[:-2], self.b.shape[:-2])

    @cached_property
    def shape(self) -> Shape:
        """The shape of D."""
        return (*self.batch, self.m, self.n)

    @cached_property
    def d_dtype(self) -> Dtype:
        """The dtype of D: that of `out`, `out_dtype`, or what the operands lead to (bf16 for fp8, i32 for i8)."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        if self.c is not None:
            return self.c.dtype
        return BF16 if self.a.dtype.is_fp8 or self.a.dtype.bits == 4 else I32 if self.a.dtype is I8 else self.a.dtype

    @cached_property
    def c_dtype(self) -> Dtype:
        """The dtype of C; without one, that of D or, for an fp8 D, that of the operands that go with a C of 16 bits."""
        if self.treed:
            return self.form.c_dtype
        if self.c is not None:
            return self.c.dtype
        if not self.d_dtype.is_fp8:
            return self.d_dtype
        companions = (self.bias, self.aux if self.plain_epilogue.activation == "gelu" else None)
        return next((t.dtype for t in companions if t is not None and t.dtype in HALF), BF16)

    @cached_property
    def c_is_out(self) -> bool:
        """Whether D is also C."""
        if self.treed:
            return self.c is not None and self.c is self.out
        return self.has_beta if self.c is None else self.c is self.out

    @cached_property
    def has_beta(self) -> bool:
        return isinstance(self.beta, Tensor) or bool(self.beta != 0)  # a NumPy number compares to a bool of its own

    @property
    def repeatable(self) -> bool:
        return not self.c_is_out and super().repeatable

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        return self.a.device

    def signature(self) -> Signature:
        if self.treed:
            dtypes = (self.a.dtype, self.b.dtype, self.c_dtype, self.d_dtype)
            library = "cutlass" if self.config is not None and self.library is None else self.library
            return Signature(dtypes, member(self.compute), self.epilogue, library=library)
        vector = self.bias if self.bias is not None else self.bgrad
        bias = None if vector is None else vector.dtype
        aux = None if self.aux is None or self.plain_epilogue.activation != "gelu" else self.aux.dtype
        added = (self.a.dtype, self.b.dtype, self.c_dtype, self.d_dtype, bias, aux)
        return Signature(added, member(self.compute), self.epilogue, self.scales.modes(), self.library)

    def key(self) -> tuple[Any, ...]:
        if self.treed:
            return self.form.key()
        return (
            self.a.layout,
            self.b.layout,
            None if self.c is None else self.c.layout,
            None if self.bias is None else self.bias.layout,
            None if self.aux is None else self.aux.layout,
            None if self.bgrad is None else self.bgrad.layout,
            None if self.out is None else self.out.layout,
            self.alpha.layout if isinstance(self.alpha, Tensor) else None,
            self.beta.layout if isinstance(self.beta, Tensor) else None,
            *self.attributes(),
        )

    def attributes(self) -> tuple[Any, ...]:
        """What of the key is no layout."""
        modes = None
        if self.scales is not NO_SCALES:
            factors = [getattr(self.scales, name) for name in FACTORS_AND_AMAX]
            kinds = (factor.layout if isinstance(factor, Tensor) else factor is not None for factor in factors)
            modes = (*kinds, self.scales.a_mode, self.scales.b_mode)
        return (
            self.epilogue,
            self.has_beta,
            self.c_is_out,
            self.compute,
            self.d_dtype.cuda,
            modes,
            self.fast_accum,
            self.workspace,
            self.autotune,
            self.reduced_precision,
            self.library,
        )

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        if self.treed:
            return self.form.arguments(outputs)
        out = outputs.get("out", self.out)
        c = self.c if self.c is not None else out if self.has_beta else None
        operands = (self.a, self.b, c, self.bias, outputs.get("aux", self.aux), outputs.get("bgrad", self.bgrad), out)
        pointers = tuple(0 if tensor is None else tensor.ptr for tensor in operands)
        # An address is an int and a number never is, so that a plan tells them apart.
        numbers = tuple(x.ptr if isinstance(x, Tensor) else _number(x) for x in (self.alpha, self.beta))
        return (*pointers, *numbers, *self.scale_arguments())

    def addresses(self) -> tuple[str | None, ...] | None:
        if self.treed or (self.c is not None and self.c_is_out):
            return None
        c = "c" if self.c is not None else "out" if self.has_beta else None
        numbers = (name if isinstance(getattr(self, name), Tensor) else None for name in ("alpha", "beta"))
        return ("a", "b", c, "bias", "aux", "bgrad", "out", *numbers, *(None for _ in self.scale_arguments()))

    def named_arguments(self) -> NamedArguments | None:
        if self.treed:
            return self.form.named_arguments()
        addresses = self.addresses()
        if addresses is None or self.scales is not NO_SCALES:
            return None  # D is C, or factors are held in a place of their own
        return NamedArguments((*(name or "" for name in addresses[:-2]), "alpha", "beta"))

    def scale_arguments(self) -> tuple[Argument, ...]:
        """The part of `arguments` that comes from `scales`; nothing without any."""
        if self.scales is NO_SCALES:
            return ()
        factors = (getattr(self.scales, name) for name in FACTORS_AND_AMAX)
        return tuple(x.ptr if isinstance(x, Tensor) else _number(x) for x in factors)

    def tensors(self) -> tuple[Use, ...]:
        return self._uses

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        if self.treed:
            return self.form.tensors()
        uses: list[Use] = []
        written = {"out", "bgrad", *(("aux",) if self.plain_epilogue.writes_aux else ())}
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                uses.append((name, tensor, name in written))
        numbers = (("alpha", self.alpha), ("beta", self.beta))
        uses += [(name, number, False) for name, number in numbers if isinstance(number, Tensor)]
        if self.scales is not NO_SCALES:
            for name in FACTORS_AND_AMAX:
                factor = getattr(self.scales, name)
                if isinstance(factor, Tensor):
                    uses.append((f"scales.{name}", factor, name.startswith("amax")))
        return tuple(uses)

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        return self._unallocated

    @cached_property
    def _unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        if self.treed:
            return self.form.unallocated()
        found: dict[str, tuple[Shape, Shape, Dtype]] = {}
        if self.out is None:
            found["out"] = (self.shape, c_strides(self.shape), self.d_dtype)
        if self.plain_epilogue.writes_aux and self.aux is None:
            found["aux"] = (*aux_shape(self.plain_epilogue, self.shape), self.aux_dtype)
        if self.plain_epilogue.writes_bgrad and self.bgrad is None:
            shape = (*self.batch, self.m if self.epilogue is Epilogue.BGRADA else self.n)
            found["bgrad"] = (shape, c_strides(shape), self.c_dtype)
        return found

    @cached_property
    def aux_dtype(self) -> Dtype:
        """The dtype of aux: u8 for a ReLU mask; for GELU that of the tensor given, or else of C."""
        if self.plain_epilogue.activation == "relu":
            return U8
        return self.c_dtype if self.aux is None else self.aux.dtype

    def result(self, outputs: Operands) -> R_co:
        if self.treed:
            found: R_co = self.form.result(outputs)
            return found
        given = [outputs.get("out", self.out)]
        if self.plain_epilogue.writes_aux:
            given.append(outputs.get("aux", self.aux))
        if self.plain_epilogue.writes_bgrad:
            given.append(outputs.get("bgrad", self.bgrad))
        one_or_all: Any = given[0] if len(given) == 1 else tuple(given)
        result: R_co = one_or_all
        return result

    def replace(self, **operands: Tensor) -> Self:
        if self.treed:
            return replace(self, **self.form.replaced(operands))
        names = {field.name for field in fields(self)}
        for name in operands:
            if name not in names:
                refuse_operand(name, (*TENSORS, "alpha", "beta", "scales"))
        return replace(self, **operands)  # type: ignore[arg-type]  # names are checked, values by the new request

    def describe(self) -> str:
        if self.treed:
            return self.form.describe()
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        modes = [
            f"{name} scale {mode.name}"
            for name, mode in zip("ab", self.scales.modes(), strict=True)
            if mode is not None
        ]
        asked = member(self.compute)
        compute = [asked.name] if asked is not None else []
        reduced = ["reduced_precision"] if self.reduced_precision else []
        library = [f"library={self.library}"] if self.library is not None else []
        return f"matmul({', '.join(parts)}) -> {self.d_dtype}[{', '.join(map(str, self.shape))}] " + " ".join(
            [self.plain_epilogue.name, *compute, *modes, *reduced, *library]
        )


def _number(given: Any) -> Number:
    """A number as Python's own float or complex: one of NumPy's equals others that it is not.

    np.float32(0.1) == 0.1. No number is -0.0, which has the plan of 0.0.
    """
    number: Number = (given or 0) * 1.0
    if type(number) is float:
        return number
    return complex(number) if isinstance(number, complex) or number.imag else float(number.real)
