"""CallbackDftRequest: a Fourier transform that reads and writes its elements through callbacks; also with NumPy.

`dispatch.fft`'s functions make one if they get `load=` or `store=`. Making one validates it, except for the CUDA C++,
which is compiled with the plan.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import check_dtype, shown
from dispatch.core.host_plan import NumpyPlan, work_of
from dispatch.core.operands import Output, dense
from dispatch.core.request import NamedArguments, Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Dtype
from dispatch.ops.fft.callback import Callback, check_operand
from dispatch.ops.fft.reference import transformed
from dispatch.ops.fft.request import SPECTRA, DftKind, DftNorm, TransformRequest
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["CallbackDftRequest", "evaluate", "exact", "numpy_callback_dft"]

SIDES = ("load", "store")
COMPLEX = {F32: C64, F64: C128}


@dataclass(frozen=True, eq=False)
class CallbackDftRequest(TransformRequest["Tensor"]):
    """`dft` whose elements are read through one callback and written through another, without an extra pass.

    Attributes:
        a: any shape and any strides; c64, c128, f32, f64, f16, bf16, whole numbers or bool. The callback is not called
            for padding: it is zeros. For C2R half a spectrum: imaginary parts that no spectrum of real numbers has are
            ignored, after the callback.
        load: the function of each element of `a` before the transform; None for none.
        store: the function of each number of the result, including its factor 1/n; None for none.
        precision: the precision of the computation, "f32" or "f64"; None for f32 with c64, f32, f16 and bf16, else f64,
            as in NumPy.
        out: of the shape of `dft`'s and the dtype that `store` writes, else that of the precision: complex, for C2R
            real. C2C may write to `a` itself.

    Operands of callbacks are operands of the request, by the names "load.window" or "store.scale": they are on the
    device of `a`, none overlaps `out`, and they may change in each call. Reads of a callback beyond its operands'
    elements are not checked. cuFFT calls the callbacks in any order, once for each element.
    """

    op: ClassVar[str] = "callback_dft"
    unpacked: ClassVar[Unpacked | None] = Unpacked(several=("load_operands", "store_operands"))  # see callback_calls.py
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    kind: DftKind | str = DftKind.C2C
    s: int | tuple[int, ...] | None = None
    axes: int | tuple[int, ...] | None = None
    _: KW_ONLY
    load: Callback | None = None
    store: Callback | None = None
    inverse: bool = False
    norm: DftNorm | str = DftNorm.BACKWARD
    precision: Dtype | str | None = None
    out: Tensor | None = None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        names = ["a"]
        for side in SIDES:
            callback: Any = getattr(self, side)
            if isinstance(callback, Callback):
                names += [f"{side}.{name}" for name in callback.tensors]
        return tuple(names)

    def __getattr__(self, name: str) -> Any:
        """An operand of a callback by its name in `reads`."""
        side, dot, operand = name.partition(".")
        callback = self.__dict__.get(side) if dot else None
        if callback is None or operand not in callback.operands:
            raise AttributeError(name)
        return callback.operands[operand]

    @property
    def required(self) -> tuple[str, ...]:
        return ("a",)

    @classmethod
    def plain_reads(cls) -> tuple[str, ...] | None:
        """None: the operands depend on the callbacks."""
        return None

    @property
    def is_plain(self) -> bool:
        return False

    # -- checks ---------------------------------------------------------------------------------------------------
    def check_fields(self) -> None:
        dtype = self.a.dtype
        if dtype not in SPECTRA:
            wanted = "c64, c128, f32, f64, f16, bf16, whole numbers or bool"
            raise BadRequest("a", str(self.a.layout), wanted, "convert it: a.astype('f32')")
        if self.kind == DftKind.R2C and dtype.is_complex and self.load is None:
            raise BadRequest(
                "a", str(self.a.layout), "real numbers, for R2C", "pass a load callback that makes them real"
            )
        if self.precision is not None and check_dtype("precision", self.precision) not in COMPLEX:
            raise BadRequest("precision", shown(self.precision), "f32, f64 or None")
        self.check_axes()
        for side, shape in (("load", self.a.shape), ("store", self.result_shape)):
            callback = getattr(self, side)
            if callback is not None:
                self._check_callback(side, callback, shape)
        if self.load is not None and self.load.dtype is not None:
            raise BadRequest(
                "load.dtype", str(self.load.dtype), "None, because the kind determines the dtype of the transform"
            )

    def _check_callback(self, side: str, callback: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(callback, Callback):
            raise BadRequest(side, shown(callback), 'a dispatch.fft.Callback, such as Callback("return 2 * x;", …)')
        operand: Any
        for name, operand in callback.operands.items():
            place = f"{side}.{name}"
            check_operand(place, operand)
            if name in callback.broadcast:
                _check_broadcast(place, operand, shape)
            elif name in callback.tensors and not operand.layout.is_contiguous:
                hint = "copy it, or list it in broadcast"
                raise BadRequest(place, str(operand.layout), "elements in C order without gaps", hint)

    # -- what follows from the fields -----------------------------------------------------------------------------
    @cached_property
    def real(self) -> Dtype:
        """The precision of the computation: f32 or f64."""
        if self.precision is not None:
            return check_dtype("precision", self.precision)
        return F32 if self.a.dtype in (C64, F32, F16, BF16) else F64

    @property
    def number(self) -> Dtype:
        """The dtype of the numbers that are transformed."""
        return self.real if self.kind == DftKind.R2C else COMPLEX[self.real]

    @property
    def found(self) -> Dtype:
        """The dtype of the transform's result."""
        return self.real if self.kind == DftKind.C2R else COMPLEX[self.real]

    @property
    def dtypes(self) -> tuple[Dtype | None, ...]:
        """The dtypes for the choice of a row: the transform's input and output."""
        return self.number, self.found

    def outputs(self) -> dict[str, Output]:
        dtype: Any = None if self.store is None else self.store.dtype
        dtypes = {"real": self.real, "complex": COMPLEX[self.real], None: self.found}
        return {"out": dense(self.result_shape, dtypes.get(dtype, dtype))}

    def attributes(self) -> tuple[Any, ...]:
        keys = (None if one is None else one.key for one in (self.load, self.store))
        return (*super().attributes(), self.real, *keys)

    def addresses(self) -> tuple[str | None, ...]:
        return *self.reads, *self.writes

    def named_arguments(self) -> NamedArguments:
        return NamedArguments((*self.reads, *self.writes), in_place=self.in_place)

    def replace(self, **operands: Tensor) -> Self:
        names, values = {one.name for one in fields(self)}, dict(operands)
        for side in SIDES:
            named = {name: values.pop(name) for name in operands if name.startswith(f"{side}.")}
            for name in named:
                if name not in self.reads:
                    refuse_operand(name, (*self.reads, *self.writes))
            if named:
                callback: Callback = getattr(self, side)
                others = {name.partition(".")[2]: tensor for name, tensor in named.items()}
                values[side] = replace(callback, operands={**callback.operands, **others})  # type: ignore[assignment]
        for name in values:
            if name not in names:
                refuse_operand(name, (*self.reads, *self.writes))
        return replace(self, **values)  # type: ignore[arg-type]


def _check_broadcast(place: str, operand: Any, shape: tuple[int, ...]) -> None:
    operand_shape = getattr(operand, "shape", ())
    ends = zip(reversed(operand_shape), reversed(shape), strict=False)
    if (
        not hasattr(operand, "layout")
        or len(operand_shape) > len(shape)
        or any(one not in (1, other) for one, other in ends)
    ):
        actual = str(operand.layout) if hasattr(operand, "layout") else shown(operand)
        raise BadRequest(place, actual, f"a tensor of a shape that broadcasts to {list(shape)}")


# -- NumPy ------------------------------------------------------------------------------------------------------------
def evaluate(request: CallbackDftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in a working dtype."""
    del work  # from the row; the request has its own precision
    return {"out": _through(request, work_of(request.real))}


def exact(request: CallbackDftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in extended precision."""
    del work
    return {"out": _through(request, np.dtype(np.longdouble))}


def _through(request: CallbackDftRequest, work: np.dtype[Any]) -> Array:
    """The operand after the first callback, the transform and the second callback."""
    raw = np.asarray(request.a)
    spectrum = np.result_type(work, np.complex64)
    with np.errstate(invalid="ignore"):  # the bits of other numbers may be a NaN
        a = raw.astype(spectrum if raw.dtype.kind == "c" else work)
    if raw.dtype.kind not in "fciub" or raw.dtype.itemsize == 2:
        raw = raw.view(np.uint16)
    if request.load is not None:
        elements = _of(request.load, "load", a, raw, work)
        if request.kind == DftKind.R2C and elements.dtype.kind == "c":
            raise BadRequest("load", "complex numbers from its NumPy counterpart", "real numbers, for R2C")
        a = elements.astype(spectrum if elements.dtype.kind == "c" else work)
    result = transformed(a, request, work)
    if request.store is None:
        return result
    elements = _of(request.store, "store", result, result, work)
    if elements.dtype.kind == "c" and not request.outputs()["out"].dtype.is_complex:
        wanted = request.outputs()["out"].dtype
        raise BadRequest(
            "store", "complex numbers from its NumPy counterpart", f"{wanted}, the numbers that it writes", "dtype="
        )
    return elements


def _of(callback: Callback, side: str, x: Array, raw: Array, work: np.dtype[Any]) -> Array:
    elements = np.asarray(callback(x, raw, work))
    if elements.shape not in (x.shape, ()):
        what = f"shape {list(elements.shape)} from its NumPy counterpart"
        raise BadRequest(side, what, f"{list(x.shape)}, the shape of x")
    return np.broadcast_to(elements, x.shape)


def numpy_callback_dft(request: CallbackDftRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy, through the callbacks' NumPy counterparts."""
    del request, executor
    return NumpyPlan(row, evaluate, work_of(row.dtypes[1]))
