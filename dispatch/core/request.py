"""The base classes of every op: the frozen Request, the Plan that runs one, and the functions that run requests.

An op family derives its requests from `Request`, its plans from `Plan`; `executor.py` runs them. This module knows no
library, no table and no op; it defines the interface between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol

from dispatch.core.request_repr import text_of
from dispatch.device.frameworks.framework import ForeignStorage, ordered_with
from dispatch.device.stream import NULL_CONTEXT
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, BadRow, BadType, StaleTensor, WorkerFailed, shown
from dispatch.refusal import calls_user_code

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
    "Launchable",
    "NamedArguments",
    "Number",
    "Operands",
    "Plan",
    "Request",
    "Signature",
    "Unpacked",
    "as_requests",
    "check_request",
    "on_framework_stream",
    "plan_of",
    "refuse_moved",
    "run",
    "tell_written",
]

Argument = int | float | complex  # an address, or a number given by value
Use = tuple[str, Tensor, bool]  # a field's name, its tensor, whether it is written
Operands = dict[str, Tensor]  # by the request's field name


class Signature:
    """The choices of a request, without its sizes; the table matches its rows' columns with them.

    `dtypes` and `scales` are in the order that the op defines for its rows; `compute` None means the row's default.
    `epilogue` is an Epilogue or, for libraries that compile epilogues, a tree of `dispatch.evt`.
    `library` restricts the search to one library's rows; None means all.
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
    """Which fields of a request hold operands in a list or mapping (`several`), and which a number or an operand.

    `device` is the field that names the device, for requests that may have no operand.
    """

    several: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    device: str | None = None


class Number(NamedTuple):
    """The range in which a number given by value may change without another plan; NaN is outside every range."""

    low: float
    high: float
    is_whole: bool = False  # the plan takes an int; else a float

    def has(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)

    def argument(self, value: Any) -> Argument:
        """The number as an argument of a plan; -0.0 becomes 0.0."""
        return value if self.is_whole else float(value) + 0.0


class NamedArguments(NamedTuple):
    """The name of the operand or number behind each of `Request.arguments`, in their order.

    Names are those of `tensors` and `unallocated`, of number fields and of mapping keys; list items are field[0],
    field[1]. `numbers` may have any value of their range; all other numbers must be the same as before.
    `in_place` has the pairs of an output and an input that may be one view.
    """

    order: tuple[str, ...]
    numbers: dict[str, Number] = {}  # noqa: RUF012  # never modified
    in_place: frozenset[tuple[str, str]] = frozenset()


class Request(ABC, Generic[R_co]):
    """A frozen description of one operation on tensors; the constructor validates it and raises BadRequest.

    A request holds its operands and the outputs it was given; an output left None is allocated anew in every run.
    Running a Request[R] returns an R.
    """

    op: ClassVar[str]
    advice: ClassVar[str] = ""  # layouts that libraries nearly always accept, for the hint in a refusal
    # cuda_executor.py stores the last binding here, so that another run of the same request needs no look-up.
    bound: Any = None
    hint_if_missing: ClassVar[str] = ""  # for the error about missing arguments; {name} is that of the function
    # The framework (torch, CuPy, …) whose arrays the operands are, if any: the request runs on its current stream and
    # returns its arrays. `adopt` sets it.
    framework: Any = None
    # Set in classes whose calls are cached although operands are in lists or mappings (list_call_cache.py).
    unpacked: ClassVar[Unpacked | None] = None
    # Whether to time all rows that take the request and run the fastest; a field of some classes.
    autotune: Any = False

    @classmethod
    def plain_reads(cls) -> tuple[str, ...] | None:
        """The fields that plain requests of this class read, in the order of their arguments; None if none is plain.

        Calls of plain requests with the same layouts and choices differ only in addresses.
        """
        return None

    @property
    def is_plain(self) -> bool:
        """Whether this request is plain, if the class has plain requests."""
        return self.plain_reads() is not None

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device that all operands are on."""

    @abstractmethod
    def signature(self) -> Signature:
        """The choices by which the table finds a row."""

    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """Everything that a plan depends on: layouts and choices, but no addresses and no numbers given by value."""

    @abstractmethod
    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        """Addresses and numbers in the op's fixed order; `outputs` holds the outputs that were allocated."""

    def addresses(self) -> tuple[str | None, ...] | None:
        """The name of the operand whose address each of `arguments` is; None for a number.

        Only for requests whose runs over other operands with the same layouts differ only in these addresses; None for
        all others.
        """
        return None

    def named_arguments(self) -> NamedArguments | None:
        """The name of each argument, for classes with `unpacked`; None if every call must make a request."""
        return None

    @abstractmethod
    def tensors(self) -> tuple[Use, ...]:
        """Each given operand: its field name, the tensor, and whether the request writes it."""

    @abstractmethod
    def unallocated(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]:
        """The outputs to be allocated: field name to (shape, strides in elements, dtype)."""

    @abstractmethod
    def result(self, outputs: Operands) -> R_co:
        """The result of a run: the output, or a tuple if there are several."""

    def give(self, outputs: Operands) -> R_co:
        """`result` as arrays of the framework that the operands come from."""
        result = self.result(outputs)
        if self.framework is None:
            return result
        arrays: R_co = self.framework.given_back(result, outputs.values())
        return arrays

    @abstractmethod
    def replace(self, **operands: Tensor) -> Self:
        """The same request over other operands; BadRequest for a name that is not one of its operands."""

    @abstractmethod
    def describe(self) -> str:
        """One line: op, layouts and choices."""

    @property
    def repeatable(self) -> bool:
        """Whether a second run would give the same result as the first: no memory that is written is also read."""
        spans = [(t.storage, t.ptr + t.layout.low, t.ptr + t.layout.high, written) for _, t, written in self.tensors()]
        return not any(
            one[3] and not other[3] and one[0] is other[0] and one[1] < other[2] and other[1] < one[2]
            for one in spans
            for other in spans
        )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # otherwise a dataclass would generate one

    def __repr__(self) -> str:
        """The class and the fields that differ from their defaults; tensors are shown without their elements."""
        try:
            return text_of(self)
        except Exception:  # noqa: BLE001  # the request's check has failed, or it is of a user's class
            return f"<{type(self).__name__}>"

    def usual(self) -> dict[str, Any]:
        """The default values of fields that depend on other fields."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle: the fields only, without cached properties and bindings of this process."""
        state = vars(self)
        if is_dataclass(self):
            return {field.name: state[field.name] for field in fields(self) if field.name in state}
        return {name: value for name, value in state.items() if name != "bound"}


class Launchable(Protocol):
    """A captured call."""

    @property
    def launch(self) -> Callable[[], int]:
        """A function that launches it on the stream that it was captured for, and returns the driver's status."""


class Plan:
    """A request bound to one executor: everything that does not depend on addresses is prepared.

    cuda_executor.py sets `launch` and `relocation`: the graph that launches the plan at any addresses once the executor
    has learnt it, and the state of that learning. A bare plan may set `launch` itself, to what makes its call. With a
    `counter`, each call has a number (call_counter.py).
    """

    __slots__ = ("__weakref__", "capture_safe", "counter", "launch", "relocation", "row")
    is_bare: ClassVar[bool] = False  # callers may capture its calls, but the executor does not record them as graphs

    def __init__(self, row: Any, *, capture_safe: bool, counter: CallCounter | None = None) -> None:
        self.row, self.counter = row, counter
        self.capture_safe = capture_safe
        self.launch: Callable[[tuple[Argument, ...]], int] | None = None
        self.relocation: Any = None

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        """Called before each call of a bare plan with its tensors, for plans that must keep them alive."""

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """On a GPU: enqueue the work on the executor's stream, for these addresses; never waits.

        If the plan has a counter, the number of the call follows the arguments.
        """
        raise WorkerFailed(f"{type(self).__name__} does not run on a GPU")

    def as_calls(self, _arguments: tuple[Argument, ...], _tensors: tuple[Tensor, ...]) -> Launchable | None:
        """The call at these addresses, for plans that make it themselves; None if it needs the executor."""
        return None

    def as_graph(self, _arguments: tuple[Argument, ...]) -> Launchable:
        """The call captured into a graph, for plans that are captured only if the caller asks for it; else refused."""
        raise BadRequest("graph", "True", f"False for {self.row.name}, whose calls cannot be captured")

    def run(self, request: Any, outputs: Operands) -> None:
        """On the host: compute the result into the request's outputs and the allocated `outputs`."""
        raise WorkerFailed(f"{type(self).__name__} does not run on the host")


class IdlePlan(Plan):
    """The plan of a request whose results have no elements: it launches nothing."""

    __slots__ = ()
    is_bare = True

    def __init__(self, row: Any, *, capture_safe: bool = False) -> None:
        super().__init__(row, capture_safe=capture_safe)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Does nothing."""


def run(request: Request[R_co]) -> R_co:
    """Select a row, bind it and enqueue it on the current stream of the calling thread; returns without waiting.

    Returns the request's outputs. Raises NoRow if no row takes the request, StaleTensor for tensors of a closed
    device, DeviceFault on a lost one.
    """
    try:
        if request.framework is not None:
            return _run_on_framework_stream(request)
        result: R_co = request.device.executor().run(request)
    except AttributeError:
        check_request(request)
        raise
    return result


def on_framework_stream(request: Request[Any]) -> AbstractContextManager[Any]:
    """A context on the current stream of the operands' framework; an empty one if it has no streams."""
    framework = request.framework
    stream = None if framework is None else framework.stream(request.device)
    return NULL_CONTEXT if stream is None else stream


def _run_on_framework_stream(request: Request[R_co]) -> R_co:
    """Run on the current stream of the operands' framework, in order with the streams of other frameworks' operands."""
    device = request.device
    refuse_moved(request)
    with on_framework_stream(request):
        executor = device.executor()
        with NULL_CONTEXT if device.is_host else ordered_with(executor.stream, request.tensors(), request.framework):
            result: R_co = executor.run(request)
    tell_written(request)
    return result


def refuse_moved(request: Request[Any]) -> None:
    """StaleTensor if a framework has freed or moved the memory of an operand since the request was made.

    Also if an output was given other memory, which would not show the result.
    """
    for name, tensor, written in request.tensors():
        storage, what = tensor.storage, ""
        if isinstance(storage, ForeignStorage):
            if storage.is_moved:
                what = "the memory of its storage was freed or moved since, as by untyped_storage().resize_()"
            elif written and storage.has_other_memory:
                what = "it was given other memory since, as by x.data = y, which would not show the result"
        if what:
            text = f"{name}: {tensor.layout} was an operand of a request, and {what}. Make the request again"
            raise StaleTensor(text)


def tell_written(request: Request[Any]) -> None:
    """Tell each framework which of its arrays a request writes, so that autograd notices changes of saved tensors."""
    for _, tensor, written in request.tensors():
        if written and isinstance(tensor.storage, ForeignStorage):
            tensor.storage.framework.written(tensor.storage.keep)


def as_requests(requests: Iterable[Request[R_co]]) -> list[Request[R_co]]:
    """An iterable of requests as a list; BadType for anything else."""
    if isinstance(requests, Request) or not hasattr(requests, "__iter__"):
        kind = type(requests).__name__
        if isinstance(requests, Request):
            raise BadType("requests", f"one {kind}", "a list: [request]")
        raise BadType("requests", kind, "a list of requests")
    return list(requests)


def check_request(request: object) -> None:
    """BadRequest for an object that is not a request; called only after an AttributeError, to explain it."""
    if not isinstance(request, Request):
        hint = "such as dispatch.MatmulRequest(a=a, b=b)"
        raise BadRequest("request", f"a {type(request).__name__}", "a dispatch.Request", hint)


@calls_user_code
def plan_of(row: Any, request: Request, executor: Any) -> Plan:
    """The plan that a row makes for a request; BadRow if its `call` returns anything else."""
    plan: object = row.call(request, executor, row)
    if not isinstance(plan, Plan):
        raise BadRow(f"{row.name}: its call returned {shown(plan)}; expected a dispatch.Plan")
    return plan
