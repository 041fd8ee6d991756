"""The request that solves sparse systems of equations of several patterns at once by factorization: cuDSS.

The matrices share only their dtype, their format and what is known of them. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int, check_kinds, check_library, shown
from dispatch.core.matrix_choices import FillMode
from dispatch.core.operand_checks import TENSOR, check_writable
from dispatch.core.operands import Output, by_columns, dense
from dispatch.core.overlap import overlap
from dispatch.core.request import Request, Signature
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, type_shown
from dispatch.keys import I32, member
from dispatch.ops.sparse.direct import MAX_BATCH, MAX_REFINEMENTS, MAX_STAMP, SparseKind
from dispatch.ops.sparse.form import SparseForm, SparseFormat, check_form, check_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from dispatch.core.request import Argument, Operands, Use
    from dispatch.device.device import Device
    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["BatchedSpsolveListRequest"]

READS = ("values", "rows", "columns", "b")
LISTS = (*READS, "out")


@dataclass(frozen=True, eq=False)
class BatchedSpsolveListRequest(Request["tuple[Tensor, ...]"]):
    """The x[i] of A[i] · x[i] = b[i] for matrices of any patterns and extents; returns (x[0], x[1], …, info).

    All are analysed in one call, factorized in one and solved in one. The analyses are kept with the plan if every form
    has a `pattern`, and so are factors if there is a `stamp`, as in `spsolve`. If one of the matrices cannot be
    factorized, they are solved one after another, and the status of each shows which failed; others are right. A call
    that factorizes waits for the status.

    Follows https://docs.nvidia.com/cuda/cudss/functions.html (cudssMatrixCreateBatchCsr, cudssMatrixCreateBatchDn).

    Attributes:
        values, rows, columns: those of each A, in CSR, as in `SparseTensor`: (nnz,), (n + 1,) and (nnz,).
        form: that of each A, of one `base`.
        b: of each (n,), or (n, k) for several right-hand sides; any strides.
        assume_a: a `SparseKind`, of all.
        uplo: the only triangle that is stored, of matrices that are not general; None if both are.
        stamp: a number that identifies the elements of all A: the caller promises that they have not changed since the
            last call with this number and these `values`, so that the factors are reused.
        refinements: how many steps of iterative refinement each solve does; None for none.
        library: only rows of this library are considered, such as "cudss"; None considers all, in the table's order.
        out: x of each, of b's shape, with contiguous columns; None to allocate them.
        info: (batch,) of i32: a status for each A, as in `spsolve`.
    """

    op: ClassVar[str] = "spsolve_batched"
    updates: ClassVar[tuple[str, ...]] = ()
    values: Sequence[Tensor]
    rows: Sequence[Tensor]
    columns: Sequence[Tensor]
    form: Sequence[SparseForm]
    b: Sequence[Tensor]
    _: KW_ONLY
    assume_a: SparseKind | str = SparseKind.GEN
    uplo: FillMode | str | None = None
    stamp: int | None = None
    refinements: int | None = None
    library: str | None = None
    out: Sequence[Tensor] | None = None
    info: Tensor | None = None

    def __post_init__(self) -> None:
        adopt(self)
        for name in (*LISTS, "form"):
            value = getattr(self, name)
            if value is not None or name != "out":
                object.__setattr__(self, name, _as_tuple(name, value))
        self._check_tensors()
        check_library("library", self.library)
        check_kinds(self)
        self._check_systems()
        self._check_choices()
        self._check_outputs()

    # -- derived values -------------------------------------------------------------------------------------------
    @property
    def batch(self) -> int:
        """The number of systems."""
        return len(self.values)

    @property
    def dtype(self) -> Dtype:
        """The dtype of all matrices and vectors."""
        return self.values[0].dtype

    @property
    def device(self) -> Device:
        return self.values[0].device

    @cached_property
    def solutions(self) -> tuple[Output, ...]:
        """Each x as it will be allocated."""
        return tuple((dense if b.ndim == 1 else by_columns)(b.shape, self.dtype) for b in self.b)

    @cached_property
    def _made(self) -> dict[str, Output]:
        """All outputs as they will be allocated, by name."""
        names = {f"out[{number}]": made for number, made in enumerate(self.solutions)}
        return {**names, "info": dense((self.batch,), I32)}

    def outputs(self) -> dict[str, Output]:
        """The outputs by name, in the order in which they are returned."""
        return self._made

    def layout_of(self, name: str, number: int) -> Layout:
        """The layout of an operand of one system, or its future layout if it is not yet allocated."""
        if name == "out" and self.out is None:
            solution = self.solutions[number]
            return self.device.layout(solution.dtype, solution.shape, solution.strides, 256)
        tensor: Tensor = getattr(self, name)[number]
        return tensor.layout

    # -- the contract of Request ----------------------------------------------------------------------------------
    def signature(self) -> Signature:
        return Signature((self.dtype, self.dtype), library=self.library)

    def key(self) -> tuple[Any, ...]:
        layouts = tuple(tensor.layout for _, tensor, _ in self.tensors())
        choices = self.assume_a, self.uplo, self.refinements, self.library, self.stamp is None
        return self.batch, layouts, self.out is None, self.info is None, self.form, *choices

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        tensors = [tensor for name in READS for tensor in getattr(self, name)]
        tensors += self.result(outputs)
        return (*(tensor.ptr for tensor in tensors), -1.0 if self.stamp is None else self.stamp)

    def tensors(self) -> tuple[Use, ...]:
        return self._uses

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        several = (
            (f"{name}[{number}]", tensor, name == "out")
            for name in LISTS
            for number, tensor in enumerate(getattr(self, name) or ())
        )
        return (*several, *(() if self.info is None else (("info", self.info, True),)))

    def unallocated(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]:
        passed = {name for name, _, is_written in self.tensors() if is_written}
        return {name: (one.shape, one.strides, one.dtype) for name, one in self._made.items() if name not in passed}

    def result(self, outputs: Operands) -> tuple[Tensor, ...]:
        passed = {name: tensor for name, tensor, is_written in self.tensors() if is_written}
        return tuple(passed[name] if name in passed else outputs[name] for name in self._made)

    def replace(self, **operands: Tensor) -> Self:
        names = {f"{name}[{number}]" for name in LISTS for number in range(self.batch)}
        changed: dict[str, Any] = {"info": operands.pop("info")} if "info" in operands else {}
        for name in operands:
            if name not in names:
                raise BadRequest(
                    name,
                    "a name that is not an operand of this request",
                    "values[0], rows[0], b[0], out[0] and so on, or info",
                )
        for name in LISTS:
            before = getattr(self, name) or (None,) * self.batch
            after = tuple(operands.get(f"{name}[{number}]", tensor) for number, tensor in enumerate(before))
            if any(tensor is not None for tensor in after):
                changed[name] = after
        return replace(self, **changed)

    def describe(self) -> str:
        extents = ", ".join(f"{form.shape[0]}" for form in self.form[:4])
        more = ", …" if self.batch > 4 else ""
        words = [f"assume_a={member(self.assume_a).name}"]
        words += [] if self.uplo is None else [f"uplo={member(self.uplo).name}"]
        words += [] if self.refinements is None else [f"refinements={self.refinements}"]
        return f"spsolve_batched({self.batch} matrices of {self.dtype}, n {extents}{more}, {', '.join(words)})"

    # -- checks ---------------------------------------------------------------------------------------------------
    def _check_tensors(self) -> None:
        """BadRequest unless all lists have the same length and hold tensors on one live device."""
        counts = {name: len(getattr(self, name)) for name in (*LISTS, "form") if getattr(self, name) is not None}
        if len(set(counts.values())) > 1 or not 0 < self.batch <= MAX_BATCH:
            listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise BadRequest("values", listed, "as many of each, and at least one")
        for name, tensor, _ in self.tensors():
            given: object = tensor
            if not isinstance(given, Tensor):
                raise BadRequest(name, type_shown(given), TENSOR, "use dev.array(x)")
        home = self.device
        home.check(*(tensor for _, tensor, _ in self.tensors()))
        for name, tensor, _ in self.tensors():
            if tensor.device is not home:
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}, the device of values[0]")

    def _check_systems(self) -> None:
        """BadRequest unless each matrix is square, in CSR and of one dtype and base, and its right-hand side fits."""
        forms = tuple(check_form(f"form[{number}]", form) for number, form in enumerate(self.form))
        object.__setattr__(self, "form", forms)
        for number, form in enumerate(forms):
            kind = SparseFormat(form.format)  # type: ignore[arg-type]  # it is a member since it was checked
            if kind is not SparseFormat.CSR:
                raise BadRequest(f"form[{number}].format", kind.name, "CSR", "csr2csc converts from CSC")
            m, n = form.shape
            if m != n or not n:
                raise BadRequest(f"form[{number}].shape", f"({m}, {n})", "a square matrix of at least one row")
            if form.base != forms[0].base:
                raise BadRequest(
                    f"form[{number}].base", str(form.base), f"{forms[0].base}, the base of the first matrix"
                )
            self._check_system(number, form, n)

    def _check_system(self, number: int, form: SparseForm, n: int) -> None:
        try:
            check_parts(form, {name: getattr(self, name)[number] for name in ("values", "rows", "columns")})
        except BadRequest as error:
            raise error.about(f"{error.operand}[{number}]") from None
        b = self.b[number]
        for name, tensor in ((f"values[{number}]", self.values[number]), (f"b[{number}]", b)):
            if tensor.dtype is not self.dtype:
                raise BadRequest(
                    name, str(tensor.layout), f"{self.dtype}, the dtype of values[0]", f'x.astype("{self.dtype}")'
                )
        if b.ndim not in (1, 2) or b.shape[0] != n or 0 in b.shape:
            wanted = f"{self.dtype}[{n}] or [{n}, 1 or more], because A[{number}] is [{n}, {n}]"
            raise BadRequest(f"b[{number}]", str(b.layout), wanted)

    def _check_choices(self) -> None:
        """Raise BadRequest for choices that do not fit each other."""
        if isinstance(self.uplo, FillMode) and member(self.assume_a) is SparseKind.GEN:
            raise BadRequest("uplo", self.uplo.name, "None for general matrices", 'assume_a="sym", "her" or "pos"')
        if self.stamp is not None:
            check_int("stamp", self.stamp, 0, MAX_STAMP)
        if self.refinements is not None:
            check_int("refinements", self.refinements, 0, MAX_REFINEMENTS)

    def _check_outputs(self) -> None:
        """BadRequest unless the caller's outputs fit, and share no memory with other operands."""
        written = [(name, tensor) for name, tensor, is_written in self.tensors() if is_written]
        for name, tensor in written:
            wanted = self._made[name]
            if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
                hint = f"leave {name.partition('[')[0]}=None to have it allocated"
                raise BadRequest(name, str(tensor.layout), f"{wanted.dtype}{list(wanted.shape)}", hint)
            check_writable(name, tensor)
        if written:
            _check_overlap(self.tensors())


def _check_overlap(uses: tuple[Use, ...]) -> None:
    """BadRequest for an output whose memory overlaps another operand's; by sorting, for there may be thousands."""
    begun: dict[bool, list[Use]] = {True: [], False: []}  # by whether they are written: those that may go on
    for use in sorted(uses, key=lambda use: use[1].ptr + use[1].layout.low):
        name, tensor, is_written = use
        for kind in (True, False) if is_written else (True,):
            begun[kind] = [
                one for one in begun[kind] if one[1].ptr + one[1].layout.high > tensor.ptr + tensor.layout.low
            ]
            for other_name, other, _ in begun[kind]:
                if overlap(tensor, other):
                    first, second = (name, other_name) if is_written else (other_name, name)
                    raise BadRequest(first, f"memory that overlaps {second}", "memory of its own")
        begun[is_written].append(use)


def _as_tuple(name: str, given: object) -> tuple[Any, ...]:
    """A list as a tuple; BadRequest for anything else."""
    if not isinstance(given, (tuple, list)) or hasattr(given, "_fields"):
        raise BadRequest(name, shown(given), "a list with one item for each matrix", "for one matrix use spsolve")
    return tuple(given)
