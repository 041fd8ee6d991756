"""What every op shares: the frozen request, the plan that carries one out, and the doors through which they are run.

An op file derives its request from `Request` and its plans from `Plan`; `executor.py` runs them. This module knows no
library, no table and no op; it is the contract between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from dispatch.core.showing import text_of
from dispatch.device.frameworks.framework import Adopted, beside
from dispatch.device.stream import NULL_CONTEXT
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from typing_extensions import Self, TypeVar

    from dispatch.core.call_counter import CallCounter
    from dispatch.device.device import Device
    from dispatch.keys import Compute, Dtype

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

__all__ = [
    "Argument",
    "NamedArguments",
    "Number",
    "Operands",
    "Plan",
    "Request",
    "Signature",
    "Unpacked",
    "as_requests",
    "at_home",
    "check_request",
    "run",
    "tell_written",
]

Argument = int | float | complex  # an address, or a number given by value
Use = tuple[str, Tensor, bool]  # a field's name, its tensor, whether it is written
Operands = dict[str, Tensor]  # by the request's field name


class Signature:
    """What the table's columns are matched with: the choices of a request, without its sizes.

    `dtypes` and `scales` are in the order that the op states for its rows; `compute` None takes the row's default.
    `epilogue` is an Epilogue or, for libraries that compile one, a tree of `dispatch.evt`.
    `library` is the one whose rows alone are asked; None for those of all.
    """

    __slots__ = ("compute", "dtypes", "epilogue", "library", "scales")

    def __init__(
        self,
        dtypes: tuple[Dtype | None, ...],
        compute: Compute | None = None,
        epilogue: Any = None,
        scales: tuple[Any, ...] = (),
        library: str | None = None,
    ) -> None:
        self.dtypes, self.compute, self.epilogue, self.scales = dtypes, compute, epilogue, scales
        self.library = library


class Unpacked(NamedTuple):
    """Which fields of a request hold several operands, as a list or by their names, and which a number or an operand.

    `device` is the field that says where the request is to run, where no operand does.
    """

    several: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    device: str | None = None


class Number(NamedTuple):
    """What a number given by value may be, and it is all one to the plan which; NaN is out of every range."""

    low: float
    high: float
    is_whole: bool = False  # it goes to the plan as the int that it is, others as a float

    def has(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)

    def argument(self, value: Any) -> Argument:
        """The number as a plan takes it; -0.0 is 0."""
        return value if self.is_whole else float(value) + 0.0


class NamedArguments(NamedTuple):
    """What a run follows from: the operand or number that each of `arguments` is, in their order.

    Names are those of `tensors` and `unallocated`, of number fields and in mappings, and field[0], field[1] in lists.
    `numbers` are those that may be any of a range; all others are to be what they are. Outputs and inputs that may be
    one view are in `in_place`.
    """

    order: tuple[str, ...]
    numbers: dict[str, Number] = {}  # noqa: RUF012  # nobody adds to it
    in_place: frozenset[tuple[str, str]] = frozenset()


class Request(ABC, Generic[R_co]):
    """A frozen description of one operation on tensors; making one validates it and raises BadRequest.

    A request holds its tensors, and the outputs it was given; an output left None is allocated anew at every run.
    A run of a Request[R] gives back an R.
    """

    op: ClassVar[str]
    advice: ClassVar[str] = ""  # what a library that refused a request of this op nearly always takes: "a row-major, …"
    # cuda_executor.py keeps its last binding here, so that running the same request again costs no look-up.
    bound: Any = None
    # The library whose operands it was given, if any is another library's: it runs on that one's current stream, and
    # gives back its tensors. `adopt` puts it in.
    framework: Any = None
    # Of classes whose calls are remembered though their operands are no fields of their own (remembered_operands.py).
    unpacked: ClassVar[Unpacked | None] = None
    # Whether all rows that take the request are timed, and the fastest carries it out; a field of some classes.
    autotune: Any = False

    @classmethod
    def plain_reads(cls) -> tuple[str, ...] | None:
        """What plain requests of this class read, in the order of their arguments; None where none is plain.

        A plain request stands for all calls of its layouts and choices: they differ in addresses alone.
        """
        return None

    @property
    def is_plain(self) -> bool:
        """Whether this one is plain, where the class has such requests."""
        return self.plain_reads() is not None

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device that all operands are on."""

    @abstractmethod
    def signature(self) -> Signature:
        """What the table is asked with."""

    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """All that a plan depends on: layouts and choices, no pointers and no numbers given by value."""

    @abstractmethod
    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        """Addresses and numbers in the op's fixed order; `outputs` are those that it leaves open."""

    def addresses(self) -> tuple[str | None, ...] | None:
        """The operand whose address each of `arguments` is, None for a number.

        A run over other operands of the same layouts has their addresses in these places, and all else as it is; where
        it does not, there is nothing.
        """
        return None

    def named_arguments(self) -> NamedArguments | None:
        """What a run follows from, where `unpacked` is said; None where each such call is to make a request."""
        return None

    @abstractmethod
    def tensors(self) -> tuple[Use, ...]:
        """Each operand given: its field name, the tensor, and whether the request writes it."""

    @abstractmethod
    def unallocated(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]:
        """The outputs to be allocated: field name to (shape, strides in elements, dtype)."""

    @abstractmethod
    def result(self, outputs: Operands) -> R_co:
        """What a run gives back: the first output, or a tuple where there are several."""

    def give(self, outputs: Operands) -> R_co:
        """`result`, as objects of the library whose operands the request was given."""
        result = self.result(outputs)
        if self.framework is None:
            return result
        given: R_co = self.framework.given_back(result, outputs.values())
        return given

    @abstractmethod
    def replace(self, **operands: Tensor) -> Self:
        """The same request over other operands; BadRequest for a name that is none of its tensors."""

    @abstractmethod
    def describe(self) -> str:
        """One line: op, layouts and choices."""

    @property
    def repeatable(self) -> bool:
        """Whether a second run would give the same as the first: no operand that is written is read as well."""
        spans = [(t.storage, t.ptr + t.layout.low, t.ptr + t.layout.high, written) for _, t, written in self.tensors()]
        return not any(
            one[3] and not other[3] and one[0] is other[0] and one[1] < other[2] and other[1] < one[2]
            for one in spans
            for other in spans
        )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # a dataclass would make one of all fields

    def __repr__(self) -> str:
        """The class and the fields that are not as it has them by default, tensors without their elements."""
        try:
            return text_of(self)
        except Exception:  # noqa: BLE001  # half made, or of a class of the user's
            return f"<{type(self).__name__}>"

    def usual(self) -> dict[str, Any]:
        """The values of fields whose default is worked out from others, where they are not said."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the fields, and nothing that was worked out from them or found for this process."""
        state = vars(self)
        if is_dataclass(self):
            return {field.name: state[field.name] for field in fields(self) if field.name in state}
        return {name: value for name, value in state.items() if name != "bound"}


class Plan:
    """A request bound to one executor: everything that does not depend on addresses is done.

    `launch` and `relocation` belong to cuda_executor.py: what launches it at any addresses, once that is learnt, and
    what is known of that. With a `counter`, each call has a number (call_counter.py).
    """

    __slots__ = ("__weakref__", "capture_safe", "counter", "launch", "relocation", "row")
    is_bare: ClassVar[bool] = False  # a caller may capture its calls, though they are not worth a record of ours

    def __init__(self, row: Any, *, capture_safe: bool, counter: CallCounter | None = None) -> None:
        self.row, self.counter = row, counter
        self.capture_safe = capture_safe
        self.launch: Callable[[tuple[Argument, ...]], int] | None = None
        self.relocation: Any = None

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Of a bare plan: told of the tensors of a call before it is made, where what it enqueues may come later."""

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """On a GPU: enqueue the work on the executor's stream, for these addresses; never waits.

        Behind the addresses comes the number of the call, where the plan has a counter.
        """
        raise WorkerFailed(f"{type(self).__name__} does not run on a GPU")

    def run(self, request: Any, outputs: Operands) -> None:
        """On the host: do the work, into the request's outputs and those made for it."""
        raise WorkerFailed(f"{type(self).__name__} does not run on the host")


class IdlePlan(Plan):
    """A request whose results have no element: nothing is launched."""

    __slots__ = ()
    is_bare = True

    def __init__(self, row: Any, *, capture_safe: bool = False) -> None:
        super().__init__(row, capture_safe=capture_safe)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Nothing is to be done."""


def run(request: Request[R_co]) -> R_co:
    """Select a row, bind it and enqueue it on the current stream of the calling thread; returns without waiting.

    Returns the request's outputs. Raises NoRow where no row takes the request, StaleTensor for tensors of a closed
    device, DeviceFault on a lost one.
    """
    try:
        if request.framework is not None:
            return _run_at_home(request)
        result: R_co = request.device.executor().run(request)
    except AttributeError:
        check_request(request)
        raise
    return result


def at_home(request: Request[Any]) -> AbstractContextManager[Any]:
    """A block on the current stream of the library that the operands are of; an idle one where that has no streams."""
    framework = request.framework
    stream = None if framework is None else framework.stream(request.device)
    return NULL_CONTEXT if stream is None else stream


def _run_at_home(request: Request[R_co]) -> R_co:
    """Run on the current stream of the library that the operands are of, in order with those of others among them."""
    device = request.device
    with at_home(request):
        executor = device.executor()
        with NULL_CONTEXT if device.is_host else beside(executor.stream, request.tensors(), request.framework):
            result: R_co = executor.run(request)
    tell_written(request)
    return result


def tell_written(request: Request[Any]) -> None:
    """Have the libraries whose operands a request writes know: autograd is to find that what it saved has changed."""
    for _, tensor, written in request.tensors():
        if written and isinstance(tensor.storage, Adopted):
            tensor.storage.framework.written(tensor.storage.keep)


def as_requests(requests: Iterable[Request[R_co]]) -> list[Request[R_co]]:
    """Several requests as a list; TypeError for what are not several."""
    if isinstance(requests, Request) or not hasattr(requests, "__iter__"):
        kind = type(requests).__name__
        is_one = isinstance(requests, Request)
        given = f"one {kind}: pass a list, [request]" if is_one else f"{kind}; expected a list of requests"
        raise TypeError(f"requests: got {given}")
    return list(requests)


def check_request(request: object) -> None:
    """BadRequest for what is no request; the doors ask only once something has gone wrong."""
    if not isinstance(request, Request):
        hint = "such as dispatch.MatmulRequest(a=a, b=b)"
        raise BadRequest("request", f"a {type(request).__name__}", "a dispatch.Request", hint)
