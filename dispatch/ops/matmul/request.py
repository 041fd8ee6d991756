"""MatmulRequest: D = epilogue(alpha · op(A) · op(B) + beta · C + bias), row-major, batched, with scales.

A request is validated when it is made, so that no invalid one reaches a library. A valid request that no library
supports is refused by the table (NoRow). The methods of a request with an epilogue tree ask its TreeForm (trees.py).
This file calls no library.
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
from dispatch.ops.matmul.scales import FACTORS_AND_AMAX, NO_SCALES, Scales, aux_shape, bgrad_strides
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
    """One product of A (…, m, k) and B (…, k, n), with the epilogue that a library fuses to it; batch axes broadcast.

    Attributes:
        a, b: the operands; strided views are used without a copy, in row-major or column-major order. For fp8, k is a
            multiple of 16, and a row of D one of 16 bytes (if n > 1, and without CUTLASS); for i8, lines begin at
            multiples of 4 bytes.
        c: added as beta · C, (…, m, n); `beta` is 1 where c is given and else 0. With beta and no c, `out` is C.
        bias: (n,), or (…, n) with D's batch axes. cuBLASLt takes a bias, an aux and a bgrad only where they start at a
            multiple of 16 bytes: copy a view like bias[1:].
        aux: written by RELU_AUX* and GELU_AUX*, read by DRELU* and DGELU*; see `aux_shape`.
        bgrad: bias gradient, written: (…, n) for DRELU_BGRAD, DGELU_BGRAD and BGRADB, (…, m) for BGRADA. It is summed
            in the compute type, from D before or after D is rounded, depending on the algorithm. BGRADA, the sum of a
            along k, needs a column-major a, and BGRADB, the sum of b along k, a row-major b; both refuse an empty D.
            The lines of an allocated one begin at multiples of 16 bytes where a batch takes several library calls.
        out: D, of `out_dtype`; it may be `c` itself, and overlaps no other operand.
        epilogue: what is done to the product before it is stored: an Epilogue or its name ("gelu_bias"), or a tree
            of `dispatch.evt`, which CUTLASS compiles (15 to 40 s the first time, then loaded from disk). A tree equal
            to a named epilogue, with a bias called "bias", is taken as that one. `evt.source()` is c, which may have
            no batch axes; `evt.scalar("alpha")` and `evt.scalar("beta")` are alpha and beta. A c, alpha or beta that
            a tree does not read is refused.
        alpha, beta: numbers, or tensors of one element in the compute type's dtype (then both are read on the device).
            For an i8 product they are whole numbers of 32 bits, also where D is f32 or i8.
        out_dtype: the dtype of D where `out` is left out; None takes `c`'s, else a's (bf16 for fp8, i32 for i8).
        scales: factors of a quantized product, see `Scales`.
        compute: a Compute or its name ("tf32"); None takes the row's own. Fast modes run only if they are requested.
        fast_accum: fp8 only; sums in the tensor cores' own precision.
        workspace: the most bytes of workspace an algorithm may use; None takes the executor's.
        autotune: time all rows that take the request, and the algorithms or kernels of each, once; keep the fastest
            and remember it on disk. `library` restricts this to the rows of one library; kernels of CUTLASS are
            compiled for it.
        reduced_precision: let the library round to D's dtype early: partial sums, and the input of the epilogue.
            Faster for some products; by default everything is in the compute type, and D is rounded once.
        operands: the tensors that a tree names, and numbers for its scalars: (name, operand) pairs, or a mapping.
        config: tile, cluster, schedule and order of a CUTLASS kernel; None takes what suits the extents.
        library: use only rows of this library, such as "cublasLt" or "cutlass"; None asks all rows in the table's
            order. With "cutlass" or a tree, `bias` is part of the tree, there is no aux, bgrad or scales, and a D that
            is left out gets rows at multiples of 16 bytes.

    Returns D (…, m, n), or (D, aux) or (D, bgrad) for the epilogues that write them, or D and what a tree stores and
    reduces, in the tree's order. On a GPU the second call with the same layouts and addresses is captured as a CUDA
    graph, and later calls launch that graph.
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
            from dispatch.ops.matmul import trees  # imported here: few products have a tree

            trees.prepare(self)
        validate(self)

    @cached_property
    def has_tree(self) -> bool:
        """Whether only CUTLASS can run the request: it has a tree, or names CUTLASS or a config of it."""
        return self.epilogue.__class__ is not Epilogue or self.asks_for_cutlass

    @cached_property
    def asks_for_cutlass(self) -> bool:
        """Whether the request asks for CUTLASS, by `library` or by `config`."""
        return self.config is not None or (type(self.library) is str and self.library == "cutlass")

    @cached_property
    def form(self) -> TreeForm:
        """The product with its epilogue as a tree, as CUTLASS sees it."""
        from dispatch.ops.matmul.trees import TreeForm

        return TreeForm(self)

    @cached_property
    def plain_epilogue(self) -> Epilogue:
        """The epilogue of a request without a tree."""
        return self.epilogue  # type: ignore[return-value]  # callers use `form` for a request with a tree

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
        """The dtype of D: that of `out`, `out_dtype`, or the one that follows from the operands (see the class)."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return Dtype.of(self.out_dtype)
        if self.c is not None:
            return self.c.dtype
        return BF16 if self.a.dtype.is_fp8 or self.a.dtype.bits == 4 else I32 if self.a.dtype is I8 else self.a.dtype

    @cached_property
    def c_dtype(self) -> Dtype:
        """The dtype of C. Without a C it is D's or, for an fp8 D, that of a 16-bit bias or aux, else bf16."""
        if self.has_tree:
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
        if self.has_tree:
            return self.form.c_is_out
        return self.has_beta if self.c is None else self.c is self.out

    @cached_property
    def has_beta(self) -> bool:
        return isinstance(self.beta, Tensor) or bool(self.beta != 0)  # a NumPy number gives a NumPy bool

    @property
    def repeatable(self) -> bool:
        return not self.c_is_out and super().repeatable

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        return self.a.device

    def signature(self) -> Signature:
        if self.has_tree:
            dtypes = (self.a.dtype, self.b.dtype, self.c_dtype, self.d_dtype)
            library = "cutlass" if self.config is not None and self.library is None else self.library
            return Signature(dtypes, member(self.compute), self.epilogue, library=library)
        vector = self.bias if self.bias is not None else self.bgrad
        bias = None if vector is None else vector.dtype
        aux = None if self.aux is None or self.plain_epilogue.activation != "gelu" else self.aux.dtype
        added = (self.a.dtype, self.b.dtype, self.c_dtype, self.d_dtype, bias, aux)
        return Signature(added, member(self.compute), self.epilogue, self.scales.modes(), self.library)

    def key(self) -> tuple[Any, ...]:
        if self.has_tree:
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
        """The part of the key that is not layouts."""
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
        if self.has_tree:
            return self.form.arguments(outputs)
        out = outputs.get("out", self.out)
        c = self.c if self.c is not None else out if self.has_beta else None
        operands = (self.a, self.b, c, self.bias, outputs.get("aux", self.aux), outputs.get("bgrad", self.bgrad), out)
        pointers = tuple(0 if tensor is None else tensor.ptr for tensor in operands)
        # Addresses are ints and numbers are floats or complex, so that a plan can distinguish them.
        numbers = tuple(x.ptr if isinstance(x, Tensor) else _number(x) for x in (self.alpha, self.beta))
        return (*pointers, *numbers, *self.scale_arguments())

    def addresses(self) -> tuple[str | None, ...] | None:
        if self.has_tree or (self.c is not None and self.c_is_out):
            return None
        c = "c" if self.c is not None else "out" if self.has_beta else None
        numbers = (name if isinstance(getattr(self, name), Tensor) else None for name in ("alpha", "beta"))
        return ("a", "b", c, "bias", "aux", "bgrad", "out", *numbers, *(None for _ in self.scale_arguments()))

    def named_arguments(self) -> NamedArguments | None:
        if self.has_tree:
            return self.form.named_arguments()
        addresses = self.addresses()
        if addresses is None or self.scales is not NO_SCALES:
            return None  # D is C, or there are scale factors, which plans store elsewhere
        return NamedArguments((*(name or "" for name in addresses[:-2]), "alpha", "beta"))

    def scale_arguments(self) -> tuple[Argument, ...]:
        """The part of `arguments` that comes from `scales`; empty without scales."""
        if self.scales is NO_SCALES:
            return ()
        factors = (getattr(self.scales, name) for name in FACTORS_AND_AMAX)
        return tuple(x.ptr if isinstance(x, Tensor) else _number(x) for x in factors)

    def tensors(self) -> tuple[Use, ...]:
        return self._uses

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        if self.has_tree:
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
        if self.has_tree:
            return self.form.unallocated()
        outputs: dict[str, tuple[Shape, Shape, Dtype]] = {}
        if self.out is None:
            outputs["out"] = (self.shape, c_strides(self.shape), self.d_dtype)
        if self.plain_epilogue.writes_aux and self.aux is None:
            outputs["aux"] = (*aux_shape(self.plain_epilogue, self.shape), self.aux_dtype)
        if self.plain_epilogue.writes_bgrad and self.bgrad is None:
            shape = (*self.batch, self.m if self.epilogue is Epilogue.BGRADA else self.n)
            matrices = [t.layout for t in (self.a, self.b, self.c, self.aux, self.out) if t is not None]
            outputs["bgrad"] = (shape, bgrad_strides(shape, self.c_dtype, matrices), self.c_dtype)
        return outputs

    @cached_property
    def aux_dtype(self) -> Dtype:
        """The dtype of aux: u8 for a ReLU mask; for GELU that of the given tensor, else that of C."""
        if self.plain_epilogue.activation == "relu":
            return U8
        return self.c_dtype if self.aux is None else self.aux.dtype

    def result(self, outputs: Operands) -> R_co:
        if self.has_tree:
            tree_result: R_co = self.form.result(outputs)
            return tree_result
        tensors = [outputs.get("out", self.out)]
        if self.plain_epilogue.writes_aux:
            tensors.append(outputs.get("aux", self.aux))
        if self.plain_epilogue.writes_bgrad:
            tensors.append(outputs.get("bgrad", self.bgrad))
        one_or_all: Any = tensors[0] if len(tensors) == 1 else tuple(tensors)
        result: R_co = one_or_all
        return result

    def replace(self, **operands: Tensor) -> Self:
        if self.has_tree:
            return replace(self, **self.form.replaced(operands))
        names = {field.name for field in fields(self)}
        for name in operands:
            if name not in names:
                refuse_operand(name, (*TENSORS, "alpha", "beta", "scales"))
        return replace(self, **operands)  # type: ignore[arg-type]  # the new request checks the values

    def describe(self) -> str:
        if self.has_tree:
            return self.form.describe()
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        modes = [
            f"{name} scale {mode.name}"
            for name, mode in zip("ab", self.scales.modes(), strict=True)
            if mode is not None
        ]
        compute_type = member(self.compute)
        compute = [compute_type.name] if compute_type is not None else []
        reduced = ["reduced_precision"] if self.reduced_precision else []
        library = [f"library={self.library}"] if self.library is not None else []
        return f"matmul({', '.join(parts)}) -> {self.d_dtype}[{', '.join(map(str, self.shape))}] " + " ".join(
            [self.plain_epilogue.name, *compute, *modes, *reduced, *library]
        )


def _number(given: Any) -> Number:
    """A number as a Python float or complex, with -0.0 as 0.0.

    NumPy scalars are converted because np.float32(0.1) == 0.1 holds, though the two are different numbers.
    """
    number: Number = (given or 0) * 1.0
    if type(number) is float:
        return number
    return complex(number) if isinstance(number, complex) or number.imag else float(number.real)
