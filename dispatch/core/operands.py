"""OperandRequest: the base class of requests over named tensors.

A subclass lists the tensors that it reads and writes, describes its outputs and checks its own fields; this class
implements the rest of the `Request` interface. Nothing here calls a library.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from cudabind._cached import cached_property
from dispatch.checks import check_kinds, names_arguments, shown
from dispatch.core.operand_checks import TENSOR, check_writable
from dispatch.core.overlap import overlap, same_view
from dispatch.core.request import Argument, Operands, R_co, Request, Signature, Use
from dispatch.core.request_class import UNSIZED, check_class_body, check_outputs, check_request_class
from dispatch.device.frameworks.frameworks import adopt
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, BadRequestClass, WorkerFailed, type_shown
from dispatch.keys import U8
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["OperandRequest", "Output", "by_columns", "dense", "like", "same_as", "same_as_first", "unsized"]

Shape = tuple[int, ...]


@names_arguments
class Output(NamedTuple):
    """The description of an output to allocate: shape, strides in elements, dtype."""

    shape: Shape
    strides: Shape
    dtype: Dtype


def dense(shape: Shape, dtype: Dtype) -> Output:
    """An output in C order."""
    return Output(shape, c_strides(shape), dtype)


def by_columns(shape: Shape, dtype: Dtype) -> Output:
    """A matrix, or a batch of matrices, in column-major order, as LAPACK returns it."""
    *batch, rows, cols = shape
    *outer, row, col = c_strides((*batch, cols, rows))
    return Output(shape, (*outer, col, row), dtype)


def unsized() -> Output:
    """A dense u8 output whose size only the device's library knows; `bytes_of` queries it when a plan is bound."""
    return Output((UNSIZED,), (1,), U8)


def like(layout: Layout, shape: Shape | None = None) -> Output:
    """A dense output with its axes in the same memory order as another tensor's: channels last stays channels last."""
    extents = layout.shape if shape is None else shape
    order = sorted(range(len(extents)), key=lambda axis: (-abs(layout.strides[axis]), axis))
    c_order = c_strides(tuple(extents[axis] for axis in order))
    strides = [0] * len(extents)
    for axis, step in zip(order, c_order, strict=True):
        strides[axis] = step
    return Output(extents, tuple(strides), layout.dtype)


class OperandRequest(Request[R_co]):
    """A request over named tensors; a subclass is a frozen dataclass with `eq=False`.

    `reads` and `writes` name its tensor fields in the order of `arguments()`; any of them may be None. `updates` names
    those of `reads` that the op also overwrites. `in_place` holds pairs of (output, input) that may be the same view.

    Rows are matched by the dtypes of the first input and the first output. All other inputs must have the dtype of the
    first, except those in `mixed`, which `check_fields` checks. A class that overrides `dtypes` is matched by the
    dtypes it returns, and no input's dtype is checked here.
    """

    reads: ClassVar[tuple[str, ...]]
    writes: ClassVar[tuple[str, ...]] = ("out",)
    updates: ClassVar[tuple[str, ...]] = ()
    mixed: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    _is_users_own: ClassVar[bool] = False  # whether the class is not one of this package

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_class_body(cls)
        cls._is_users_own = not cls.__module__.startswith("dispatch.")

    def __post_init__(self) -> None:
        check_request_class(type(self))
        adopt(self)
        self._check_tensors()
        check_kinds(self)
        self.check_fields()
        if self._is_users_own and type(self).key is OperandRequest.key:
            _check_hashable(self)
        for name in _of_one_dtype(type(self)):
            self._check_dtype(name)
        self._check_outputs()

    # -- what a subclass defines ----------------------------------------------------------------------------------
    def outputs(self) -> dict[str, Output]:
        """The outputs by name, in the order in which a run returns them; by default one like the first input."""
        first: Tensor = getattr(self, self.reads[0])
        return {self.writes[0]: like(first.layout)}

    @abstractmethod
    def check_fields(self) -> None:
        """Raise BadRequest for fields that do not fit each other; the tensors are live and on one device."""

    def attributes(self) -> tuple[Any, ...]:
        """The part of the key that is not layouts; by default all fields except the tensors."""
        return tuple(getattr(self, name) for name in _choices(type(self)))

    @property
    def required(self) -> tuple[str, ...]:
        """The inputs that must be given: those whose field has no default."""
        return _without_default(type(self))

    @classmethod
    def plain_reads(cls) -> tuple[str, ...] | None:
        """`reads`, unless the class overrides how a plan's arguments or results are made."""
        return cls.reads if cls.reads and not _has_own(cls) else None

    # -- the contract of Request ----------------------------------------------------------------------------------
    @property
    def device(self) -> Device:
        first: Tensor = getattr(self, self.reads[0])
        return first.device

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        """The dtypes that rows are matched with: those of the first input and the first output."""
        first: Tensor = getattr(self, self.reads[0])
        return first.dtype, next(iter(self._outputs.values())).dtype

    def signature(self) -> Signature:
        return Signature(self.dtypes, getattr(self, "compute", None), library=getattr(self, "library", None))

    def key(self) -> tuple[Any, ...]:
        tensors = (getattr(self, name) for name in (*self.reads, *self.writes))
        return (*(None if tensor is None else tensor.layout for tensor in tensors), *self.attributes())

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        tensors = [getattr(self, name) for name in self.reads]
        tensors += [outputs.get(name, getattr(self, name)) for name in self.writes]
        return tuple(0 if tensor is None else tensor.ptr for tensor in tensors)

    def addresses(self) -> tuple[str | None, ...] | None:
        return (*self.reads, *self.writes) if self.is_plain else None

    @property
    def repeatable(self) -> bool:
        changed = any(getattr(self, name) is not None for name in self.updates)
        return not changed and super().repeatable

    def tensors(self) -> tuple[Use, ...]:
        return self._uses

    @cached_property
    def _uses(self) -> tuple[Use, ...]:
        named = [(name, getattr(self, name)) for name in (*self.reads, *self.writes)]
        return tuple((n, t, n in self.writes or n in self.updates) for n, t in named if t is not None)

    @cached_property
    def _outputs(self) -> dict[str, Output]:
        outputs = self.outputs()
        if self._is_users_own:  # this package's classes are tested
            check_outputs(self, outputs)
        return outputs

    @cached_property
    def _unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        for name in self._outputs:
            if name not in self.writes:
                allowed = ", ".join(self.writes)
                raise BadRequestClass(f"{type(self).__name__}: outputs() returns {name}; writes contains {allowed}")
        open_ones = {name: self._sized(name) for name in self._outputs if getattr(self, name) is None}
        return {name: (output.shape, output.strides, output.dtype) for name, output in open_ones.items()}

    def _sized(self, name: str) -> Output:
        output = self._outputs[name]
        return dense((self.bytes_of(name),), output.dtype) if UNSIZED in output.shape else output

    def bytes_of(self, name: str) -> int:
        """The size in bytes of an output that `outputs` returns unsized; called only when a plan is bound."""
        raise WorkerFailed(f"{type(self).__name__} does not know the size of {name}")

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        return self._unallocated

    def place_of(self, name: str) -> int:
        """The index of an operand in `arguments`."""
        return (*self.reads, *self.writes).index(name)

    def layout_of(self, name: str) -> Layout:
        """The layout of an operand; for an output that is not allocated yet, the layout that it will have."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is not None:
            return tensor.layout
        output = self._sized(name)
        return self.device.layout(output.dtype, output.shape, output.strides, 256)

    def result(self, outputs: Operands) -> R_co:
        tensors = [outputs.get(name, getattr(self, name)) for name in self._outputs]
        result: Any = tensors[0] if len(tensors) == 1 else tuple(tensors)
        return cast("R_co", result)

    def replace(self, **operands: Tensor) -> Self:
        names = {field.name for field in fields(self)}  # type: ignore[arg-type]  # every subclass is a dataclass
        for name in operands:
            if name not in names:
                refuse_operand(name, (*self.reads, *self.writes))
        return replace(self, **operands)  # type: ignore[type-var]

    def describe(self) -> str:
        parts = [f"{name} {tensor.layout}" for name, tensor, _ in self.tensors()]
        numbers = [f"{name}={_word(getattr(self, name))}" for name in self._named_choices()]
        return f"{self.op}({', '.join([*parts, *numbers])})"

    def _named_choices(self) -> list[str]:
        tensors = {*self.reads, *self.writes}
        return [field.name for field in fields(self) if field.name not in tensors]  # type: ignore[arg-type]

    # -- checks of every request ----------------------------------------------------------------------------------
    def _check_tensors(self) -> None:
        """Check that all operands given are Tensors on one live device, and that none is missing."""
        tensors: list[tuple[str, Tensor]] = []
        for name in (*self.reads, *self.writes):
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor):
                tensors.append((name, tensor))
            elif tensor is not None or name in self.required:
                hint = "use dev.array(x) or from_dlpack(x)"
                if hasattr(tensor, "tocsr") or hasattr(tensor, "todense"):  # a sparse matrix
                    from dispatch.elsewhere import of_sparse

                    hint = f"it is sparse: x.todense() makes it dense{of_sparse(self.op)}"
                raise BadRequest(name, type_shown(tensor), TENSOR, hint)
        home = self.device
        home.check(*(tensor for _, tensor in tensors))
        for name, tensor in tensors:
            if tensor.device is not home:
                hint = f"move it: {home}.array(x)"
                raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}", hint)

    def _check_dtype(self, name: str) -> None:
        """Check that an input has the dtype of the first, which is the only one that rows are matched by."""
        tensor: Tensor | None = getattr(self, name)
        first: Tensor = getattr(self, self.reads[0])
        if tensor is not None and tensor.dtype is not first.dtype:
            hint = f'{name}.astype("{first.dtype}")'
            if not type(self).__module__.startswith("dispatch.ops."):  # an op of a user
                hint += f'; or mixed: ClassVar[tuple[str, ...]] = ("{name}",) in {type(self).__name__}'
            raise BadRequest(name, str(tensor.layout), f"{first.dtype}, as {self.reads[0]} is", hint)

    def _check_outputs(self) -> None:
        """Check that given outputs have the right shape and dtype, and share no memory with other operands."""
        outputs = self._outputs
        for name in self.writes:
            tensor = getattr(self, name)
            if tensor is not None and name not in outputs:
                raise BadRequest(name, str(tensor.layout), f"None: this {self.op} has no {name}")
            if tensor is None:
                continue
            unknown = UNSIZED in outputs[name].shape  # it is checked when the plan is bound
            shape = tensor.shape[:1] if unknown else outputs[name].shape
            if (tensor.shape, tensor.dtype) != (shape, outputs[name].dtype):
                extents = "[…]" if unknown else list(shape)
                hint = f"leave {name}=None to have it allocated"
                raise BadRequest(name, str(tensor.layout), f"{outputs[name].dtype}{extents}", hint)
        for name, tensor, written in self.tensors():
            if written:
                self._check_written(name, tensor)

    def _check_written(self, name: str, tensor: Tensor) -> None:
        check_writable(name, tensor)
        for other_name, other, _ in self.tensors():
            if other_name == name or ((name, other_name) in self.in_place and same_view(tensor, other)):
                continue
            if (other_name, name) in self.in_place and same_view(tensor, other):
                continue
            if overlap(tensor, other):
                partners = [other for one, other in self.in_place if one == name]
                hint = f"{' or '.join(partners)} may be {name} itself" if partners else f"leave {name}=None"
                raise BadRequest(name, f"memory that overlaps {other_name}", "memory of its own", hint)


# The members that decide how operands become addresses, and which results are returned.
OWN = (
    *("__post_init__", "_check_outputs", "_check_tensors", "_check_written", "_outputs", "_sized", "_unallocated"),
    *("_uses", "arguments", "device", "is_plain", "key", "result", "tensors", "unallocated"),
)


@functools.cache
def _has_own(kind: type[OperandRequest]) -> bool:
    """Whether a class overrides any of these."""
    return any(getattr(kind, name) is not getattr(OperandRequest, name) for name in OWN)


@functools.cache
def _of_one_dtype(kind: type[OperandRequest]) -> tuple[str, ...]:
    """The inputs that must have the dtype of the first; none if the class overrides `dtypes`."""
    if kind.dtypes is not OperandRequest.dtypes or not isinstance(kind.reads, tuple):
        return ()  # each request defines its dtypes
    return tuple(name for name in kind.reads[1:] if name not in kind.mixed)


@functools.cache
def _without_default(kind: type[OperandRequest]) -> tuple[str, ...]:
    return tuple(name for name in kind.reads if not hasattr(kind, name))


@functools.cache
def _choices(kind: type[OperandRequest]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name not in (*kind.reads, *kind.writes))  # type: ignore[arg-type]


def _check_hashable(request: OperandRequest) -> None:
    """BadRequest for a choice that is no part of a key, such as a list; the classes of this package have none."""
    try:
        hash(request.attributes())
    except TypeError as error:
        for name in _choices(type(request)):
            try:
                hash(value := getattr(request, name))
            except TypeError:  # noqa: PERF203
                expected = "a value with a hash, because plans are found by it"
                raise BadRequest(name, shown(value), expected, "such as a tuple") from None
        raise BadRequest("attributes()", shown(request.attributes()), "values with a hash", str(error)) from None


def _word(value: Any) -> str:
    return str(getattr(value, "name", value))


# -- checks for subclasses to call -----------------------------------------------------------------------------------
def same_as_first(request: OperandRequest) -> None:
    """BadRequest unless all operands given have the shape and dtype of the first."""
    first, *others = request.reads
    for name in others:
        tensor: Tensor | None = getattr(request, name)
        if tensor is not None:
            same_as(name, tensor, first, getattr(request, first))


def same_as(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """BadRequest unless two operands have one shape and one dtype."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        expected = f"{other.dtype}{list(other.shape)}, as {other_name} is"
        raise BadRequest(name, str(tensor.layout), expected)
