"""EinsumRequest: a sum of products over modes of any number of tensors. Making one validates it, and finds its path;
this file calls no library.

Follows https://numpy.org/doc/stable/reference/generated/numpy.einsum.html.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int, check_kinds, shown
from dispatch.core.operand_checks import TENSOR, check_writable
from dispatch.core.operands import Output
from dispatch.core.overlap import overlap
from dispatch.core.request import NamedArguments, Request, Signature, Unpacked
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, type_shown
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype
from dispatch.ops.contraction.base import NUMBERS
from dispatch.ops.contraction.modes import explicit_spec, extents_of, shown_spec
from dispatch.ops.contraction.orders import cost_model, result_strides
from dispatch.ops.contraction.paths import check_path
from dispatch.ops.contraction.steps import Schedule, find_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from dispatch.core.request import Argument, Operands, Use
    from dispatch.device.device import Device
    from dispatch.device.layout import Layout

__all__ = ["EinsumRequest", "unique_layout"]

Shape = tuple[int, ...]
REALS = (F16, F32, F64)  # each converts to those after it
COMPLEX = {F32: C64, F64: C128}
PRECISION = {C64: F32, C128: F64}
MAX_BYTES = 1 << 62
ORDERS = ("C", "F", "A", "K")  # of a result, as in NumPy


@dataclass(frozen=True, eq=False)
class EinsumRequest(Request["Tensor"]):
    """out = Σ operands[0] · operands[1] · …, over all modes that the result does not have, two operands at a time.

    Attributes:
        spec: a letter for each axis of each operand, and of the result after "->", as in NumPy: "ij,jk->ik".
            Without "->" the result has the modes that occur once, in alphabetical order. "..." are further axes,
            which broadcast. Or lists of modes, the last of them the result's. A mode that an operand has twice is its
            diagonal; if the result has it twice, a diagonal is written, with zeros elsewhere.
        operands: one tensor or more; of one dtype, or f16, f32, f64, c64 and c128, which are converted to the most
            precise among them (f16 and f32 together with c64 need an f64 or a c128). An axis of extent 1 broadcasts.
        conj: the indices of the operands whose conjugates are used.
        optimize: the method that orders the contractions: "auto", "optimal", "greedy", "dp", "random-greedy" and
            the other methods of opt_einsum; if it is not installed, NumPy has "auto", "greedy" and "optimal". Or
            "left-to-right", or a path, [(0, 1), (0, 1)]: for each step the operands to contract, among those left.
        memory_limit: the limit for the bytes of an intermediate result; None for the device's memory.
        compute: the precision of the contractions, a Compute or its name ("tf32"); None takes that of the dtypes.
        library: use only this library's rows for the steps, "cutensor" or "cublasLt"; "own" runs all of them in one
            launch, which is for small tensors; None considers all.
        autotune: time all rows that take a step, and store the fastest on disk.
        jit: have cuTENSOR execute all contractions, with kernels that it compiles for them if it can. That takes
            seconds at first; the kernels are stored on disk for this GPU and version of the library.
        order: the memory order of a result that is allocated, as in NumPy: "K" is the order in which the last
            contraction moves the fewest elements, "C" and "F" have the last or the first axis the fastest, "A" is "F"
            if all operands are in this order, else "C".
        out: a tensor for the result, with the spec's modes in their order; it overlaps no operand.

    Returns one tensor, a new one even if the result is an operand with its axes in another order. Intermediate results
    are in memory of the executor. All steps are one plan, launched as one graph once that is captured.
    """

    op: ClassVar[str] = "einsum"
    updates: ClassVar[tuple[str, ...]] = ()
    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("operands",))
    spec: str | Sequence[Any]
    operands: Sequence[Tensor]
    _: KW_ONLY
    conj: tuple[int, ...] = ()
    optimize: str | Sequence[Any] = "auto"
    memory_limit: int | None = None
    compute: Compute | str | None = None
    library: str | None = None
    autotune: bool = False
    jit: bool = False
    order: str = "K"
    out: Tensor | None = None

    def __post_init__(self) -> None:
        adopt(self)
        operands: object = self.operands
        if not isinstance(operands, (tuple, list)) or not operands:
            raise BadRequest("operands", shown(operands), "a list of at least one tensor")
        object.__setattr__(self, "operands", tuple(self.operands))
        self._check_tensors()
        check_kinds(self)
        object.__setattr__(self, "spec", explicit_spec(self.spec, tuple(one.ndim for one in self.operands)))
        object.__setattr__(self, "optimize", check_path(self.optimize, len(self.operands)))
        self._check_numbers()
        self._check_dtypes()
        self._check_out()
        self._check_memory()

    # -- what follows from the fields -------------------------------------------------------------------------------
    @cached_property
    def parsed(self) -> tuple[tuple[str, ...], str]:
        """The modes of each operand, and of the result."""
        inputs, _, output = str(self.spec).partition("->")
        return tuple(inputs.split(",")), output

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The extent of each mode."""
        shapes = [(f"operands[{n}]", modes, self.operands[n].shape) for n, modes in enumerate(self.parsed[0])]
        return extents_of(shapes, str(self.spec))

    @cached_property
    def shape(self) -> Shape:
        """The shape of the result."""
        return tuple(self.sizes[mode] for mode in self.parsed[1])

    @cached_property
    def has_one_dtype(self) -> bool:
        """Whether all operands have one dtype, the usual case; it allows to skip further checks."""
        first = self.operands[0].layout.dtype
        return all(one.layout.dtype is first for one in self.operands)

    @cached_property
    def precision(self) -> Dtype:
        """The real dtype that all operands are converted to, or the real and imaginary parts of complex ones."""
        if self.has_one_dtype:
            first = self.operands[0].dtype
            return PRECISION.get(first, first)
        dtypes = [PRECISION.get(one.dtype, one.dtype) for one in self.operands]
        return max(dtypes, key=REALS.index) if dtypes[0] is not BF16 else BF16

    @cached_property
    def dtype(self) -> Dtype:
        """The dtype of the result."""
        if self.has_one_dtype:
            return self.operands[0].dtype
        is_complex = any(one.dtype.is_complex for one in self.operands)
        return COMPLEX[self.precision] if is_complex else self.precision

    @cached_property
    def schedule(self) -> Schedule:
        """The steps, and the path that they follow."""
        inputs, output = self.parsed
        operands, none, is_mixed, sizes = self.operands, (False,) * len(self.operands), False, self.sizes
        conj = converted = none
        if self.conj:
            conj = tuple(number in self.conj and one.dtype.is_complex for number, one in enumerate(operands))
        if not self.has_one_dtype:
            converted = tuple(PRECISION.get(one.dtype, one.dtype) is not self.precision for one in operands)
            is_mixed = len({one.dtype.is_complex for one in operands}) > 1
        full = none
        if not is_mixed:
            full = tuple(
                [
                    len(set(modes)) == len(modes) and one.shape == tuple([sizes[mode] for mode in modes])
                    for modes, one in zip(inputs, operands, strict=True)
                ]
            )
        limit = None if self.memory_limit is None else max(self.memory_limit // self.dtype.itemsize, 1)
        return find_schedule(inputs, output, tuple(sizes.items()), conj, converted, full, self.optimize, limit)

    @cached_property
    def strides(self) -> Shape:
        """The strides of the result if it is allocated."""
        order = self.order
        if order == "A":
            order = "F" if all(map(is_column_major, self.operands)) else "C"
        if order == "F":
            return f_strides(self.shape)
        return c_strides(self.shape) if order == "C" else self._cheapest_strides()

    def _cheapest_strides(self) -> Shape:
        steps, output, count = self.schedule.steps, self.parsed[1], len(self.operands)
        last = steps[-1]
        inputs = last.spec.partition("->")[0].split(",")
        if last.op != "contract" or any(len(set(modes)) != len(modes) for modes in (*inputs, output)):
            return c_strides(self.shape)
        terms = []
        for modes, number in zip(inputs, last.inputs, strict=True):
            if number < count:
                layout = self.operands[number].layout
                terms.append((modes, layout.shape, layout.strides))
            else:
                shape = steps[number - count].shape
                terms.append((modes, shape, c_strides(shape)))
        return result_strides((terms[0], terms[1]), output, cost_model(self.dtype, self.compute))

    # -- the contract of Request --------------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        return self.operands[0].device

    def signature(self) -> Signature:
        return Signature((self.dtype, self.dtype), library=self.library)

    def key(self) -> tuple[Any, ...]:
        layouts = tuple(tensor.layout for _, tensor, _ in self.tensors())
        out = None if self.out is None else self.out.layout
        return (self.spec, layouts, out, self.conj, self.optimize, self.memory_limit, *self._choices)

    @property
    def _choices(self) -> tuple[Any, ...]:
        return self.compute, self.library, self.autotune, self.jit, self.order

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*(tensor.ptr for tensor in self.operands), outputs.get("out", self.out).ptr)  # type: ignore[union-attr]

    def addresses(self) -> tuple[str | None, ...]:
        return (*(f"operands[{number}]" for number in range(len(self.operands))), "out")

    def named_arguments(self) -> NamedArguments:
        return NamedArguments(tuple(name or "" for name in self.addresses()))

    def tensors(self) -> tuple[Use, ...]:
        uses = tuple((f"operands[{number}]", tensor, False) for number, tensor in enumerate(self.operands))
        return uses if self.out is None else (*uses, ("out", self.out, True))

    def outputs(self) -> dict[str, Output]:
        """The result as it will be allocated."""
        return {"out": Output(self.shape, self.strides, self.dtype)}

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        return {} if self.out is not None else {"out": tuple(self.outputs()["out"])}  # type: ignore[dict-item]

    def out_layout(self) -> Layout:
        """The layout of the result, also if it is still to be allocated."""
        if self.out is not None:
            return self.out.layout
        output = self.outputs()["out"]
        return self.device.layout(output.dtype, output.shape, output.strides, 256)

    def result(self, outputs: Operands) -> Tensor:
        return outputs["out"] if self.out is None else self.out

    def replace(self, **operands: Tensor) -> Self:
        places = {f"operands[{number}]": number for number in range(len(self.operands))}
        for name in operands:
            if name != "out" and name not in places:
                raise BadRequest(name, "a name that is not an operand of this request", ", ".join([*places, "out"]))
        tensors = tuple(operands.get(name, self.operands[number]) for name, number in places.items())
        return replace(self, operands=tensors, out=operands.get("out", self.out))

    def __repr__(self) -> str:
        return shown_spec(super().__repr__())

    def describe(self) -> str:
        parts = [repr(shown_spec(str(self.spec))), *(f"{name} {tensor.layout}" for name, tensor, _ in self.tensors())]
        if self.conj:
            parts.append(f"conj={self.conj}")
        schedule = self.schedule
        path = " ".join(str(step).replace(" ", "") for step in schedule.path)
        nbytes = schedule.largest * self.dtype.itemsize
        largest = f", {nbytes:,} bytes of intermediate results at most" if nbytes else ""
        return f"einsum({', '.join(parts)}): path {path}, {float(schedule.flops):.3g} operations{largest}"

    # -- checks -------------------------------------------------------------------------------------------------------
    def _check_tensors(self) -> None:
        for number, tensor in enumerate(self.operands):
            operand: object = tensor
            if not isinstance(operand, Tensor):
                hint = "use dev.array(x) or from_dlpack(x)"
                raise BadRequest(f"operands[{number}]", type_shown(operand), TENSOR, hint)
        out: object = self.out
        if out is not None and not isinstance(out, Tensor):
            raise BadRequest("out", type_shown(out), f"{TENSOR}; or None")
        home = self.device
        tensors = (*self.operands, *(() if self.out is None else (self.out,)))
        home.check(*tensors)
        if all(tensor.layout.device is home for tensor in tensors):
            return
        for name, tensor, _ in self.tensors():
            if tensor.device is not home:
                hint = f"move it: {home}.array(x)"
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}", hint)

    def _check_numbers(self) -> None:
        order: object = self.order
        if not isinstance(order, str) or order not in ORDERS:
            raise BadRequest("order", shown(order), ", ".join(map(repr, ORDERS)))
        conj: object = self.conj
        if not isinstance(conj, tuple):
            raise BadRequest("conj", shown(conj), "a tuple of the numbers of operands, such as (0,)")
        for number in conj:
            check_int("conj", number, 0, len(self.operands) - 1)
        if self.memory_limit is not None:
            check_int("memory_limit", self.memory_limit, 1, MAX_BYTES)

    def _check_dtypes(self) -> None:
        first = self.operands[0]
        if self.has_one_dtype and first.dtype in NUMBERS:
            return
        for number, one in enumerate(self.operands):
            if one.dtype not in NUMBERS:
                wanted = f"{', '.join(map(str, NUMBERS[:-1]))} or {NUMBERS[-1]}"
                raise BadRequest(f"operands[{number}]", str(one.layout), wanted, "convert it: x.astype('f32')")
            if (one.dtype is BF16) != (first.dtype is BF16):
                wanted = f"{first.dtype}, the dtype of operands[0]: bf16 is never converted"
                raise BadRequest(f"operands[{number}]", str(one.layout), wanted, f"x.astype('{first.dtype}')")
        is_complex = any(one.dtype.is_complex for one in self.operands)
        for number, one in enumerate(self.operands):
            if is_complex and not one.dtype.is_complex and self.precision is not F64:
                wanted = f"{COMPLEX.get(self.precision, C64)}: real numbers can be combined only with c128"
                raise BadRequest(f"operands[{number}]", str(one.layout), wanted, "x.astype('c64')")

    def _check_out(self) -> None:
        out = self.out
        if out is None:
            return
        if (out.shape, out.dtype) != (self.shape, self.dtype):
            hint = "leave out=None to have it allocated"
            raise BadRequest("out", str(out.layout), f"{self.dtype}{list(self.shape)}", hint)
        check_writable("out", out)
        for name, tensor, _ in self.tensors():
            if name != "out" and overlap(tensor, out):
                raise BadRequest("out", f"memory that overlaps {name}", "memory of its own", "leave out=None")

    def _check_memory(self) -> None:
        needed = self.schedule.largest * self.dtype.itemsize  # finds the path
        if self.memory_limit is not None and needed > self.memory_limit:
            hint = "optimize='optimal', or another path, may need less"
            raise BadRequest("memory_limit", f"{self.memory_limit:,} bytes", f"{needed:,} or more for this path", hint)


def f_strides(shape: Shape) -> Shape:
    """The strides of a dense tensor whose first axis is the fastest."""
    return c_strides(shape[::-1])[::-1]


def is_column_major(one: Tensor) -> bool:
    """Whether the first axis is the fastest; the strides of axes of one element do not matter."""
    usual = f_strides(one.shape)
    return all(e == 1 or s == t for e, s, t in zip(one.shape, one.layout.strides, usual, strict=True))


def unique_layout(request: EinsumRequest) -> Layout:
    """The layout of the result with each of its modes once: for a mode that it has twice, that of its diagonal."""
    layout, output = request.out_layout(), request.parsed[1]
    steps: dict[str, int] = {}
    for mode, stride in zip(output, layout.strides, strict=True):
        steps[mode] = steps.get(mode, 0) + stride
    shape = tuple(request.sizes[mode] for mode in steps)
    return request.device.layout(layout.dtype, shape, tuple(steps.values()), layout.alignment)
