"""Recovery of the requests that were in flight when a child was lost: which one is the culprit, which run again.

The pool's monitor thread calls `recover`, while no thread sends. Requests that had started run again in a new child,
one at a time, until one faults again; all others are then sent again as before. This module starts no process itself.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dispatch.errors import DeadlineExceeded, DeviceFault, DispatchError, WorkerFailed
from dispatch.supervise.future import ConditionalFuture, TimedFuture
from dispatch.supervise.process import messages
from dispatch.supervise.process.child_process import RETRY_SECONDS
from dispatch.supervise.process.owner import QueueOwner
from dispatch.supervise.process.repeatable import InFlightRequest, unsafe_to_repeat
from dispatch.supervise.worker import describe_request

if TYPE_CHECKING:
    from dispatch.supervise.process.child_process import Child
    from dispatch.supervise.process.children import Children

__all__ = ["ChildLoss", "fail_in_flight", "recover"]

TICK = 0.25  # seconds between checks whether the child was stopped
# Factor of `hang_seconds` for a request that runs alone: in a new child it must also load libraries and kernels.
SOLO_TIMEOUT_FACTOR = 5
LATE_FAULT_DELAY = 1e-3  # seconds between the two runs of a request whose fault may be reported late
MAX_SOLO_CRASHES = 3  # children that died without a message while one request ran alone; then it counts as the culprit
# Statuses of the driver that a kernel causes: illegal address, assert, illegal instruction, misaligned address, invalid
# address space, invalid pc, launch failure (a trap). Others, such as an ECC error, may come by chance.
KERNEL_FAULTS = frozenset({700, 710, 715, 716, 717, 718, 719})
MISALIGNED = 716


class ChildLoss(NamedTuple):
    """Why a child must be replaced.

    `started` are the requests that had started and not ended, as the child reported; None if it could not report.
    `hanging` are the requests one of which may hang: the oldest request of each worker.
    """

    why: str
    error: BaseException | None = None
    started: frozenset[int] | None = None
    hanging: frozenset[int] = frozenset()

    @property
    def is_device_fault(self) -> bool:
        """Whether the device reported a fault: then nothing in the child's context runs any more."""
        return isinstance(self.error, DispatchError)

    @property
    def cause(self) -> BaseException:
        return self.error or WorkerFailed(self.why)

    @property
    def status(self) -> int | None:
        """The driver's status, if the device reported a fault."""
        cause = None if self.error is None else self.error.__cause__
        return getattr(cause, "status", None) if self.is_device_fault else None

    @property
    def is_kernel_fault(self) -> bool:
        return self.status in KERNEL_FAULTS

    @property
    def may_be_late(self) -> bool:
        """Whether a request that had ended without error may be the cause: a store to a misaligned address.

        Of some 100 such kernels on a busy H200, one had ended by the driver's status before the device stopped, and the
        next request was blamed.
        """
        return self.status == MISALIGNED


class ChildOwner(QueueOwner, Protocol):
    """The part of the pool that a recovery uses."""

    children: Children
    hang_seconds: float
    restarts: int

    def current_child(self) -> Child: ...
    def replace_child(self, loss: ChildLoss) -> bool: ...
    def fail_sent(self, sent: InFlightRequest, error: BaseException) -> None: ...
    def retry_chunks(self) -> None: ...
    def handle_control(self, child: Child) -> ChildLoss | None: ...
    def last_message(self, child: Child) -> ChildLoss | None: ...


def recover(pool: ChildOwner, loss: ChildLoss) -> bool:
    """Replace the child, and fail the requests that must not run again; returns False if the circuit is open now."""
    sent = sorted((each for queue in pool.queues for each in queue.sent.values()), key=lambda each: each.number)
    started = [each for each in sent if loss.started is None or each.number in loss.started]
    # The culprit is known without a second run.
    is_certain = len(started) == 1 and loss.is_kernel_fault and not loss.may_be_late
    # If the fault recurs, a second child is needed: start both at the same time.
    pool.children.start(1 if is_certain or not (loss.is_device_fault or loss.hanging) else 2)
    if not pool.replace_child(loss):
        return False
    if is_certain:
        _fail_culprit(pool, started[0], loss)
        return True
    unsafe = unsafe_to_repeat(started)
    for each in started:
        if each.number in unsafe:
            text = f"{loss.why} while it was in flight, and it cannot be run again: {unsafe[each.number]}"
            pool.fail_sent(each, _fault(pool, each, text, loss))
    # After a hang only the oldest request of each worker can be the cause; the others had not started.
    suspects = [each for each in started if each.number not in unsafe]
    if loss.hanging:
        suspects = [each for each in suspects if each.number in loss.hanging]
    for each in suspects:
        if isinstance(each.future, TimedFuture):
            each.future.may_have_started = True
    for each in _most_likely_last(suspects):
        outcome = _test_suspect(pool, each, may_hang=each.number in loss.hanging, runs=2 if loss.may_be_late else 1)
        if outcome is not None:
            return outcome
    return True


def fail_in_flight(pool: ChildOwner, loss: ChildLoss) -> None:
    """Fail all requests in flight, because the supervisor ends and runs nothing again."""
    for each in sorted((each for queue in pool.queues for each in queue.sent.values()), key=lambda each: each.number):
        text = f"{loss.why} while it was in flight, and its supervisor was closing: it was not run again"
        pool.fail_sent(each, _fault(pool, each, text, loss))


def _most_likely_last(suspects: list[InFlightRequest]) -> list[InFlightRequest]:
    """The suspects grouped by worker, in order within each, with the worker of the oldest suspect last.

    A kernel that faults blocks its own stream from its start, and other streams only once the device stops. So the
    oldest suspect is the likeliest culprit. If it runs last, the others have their results before the fault recurs,
    which the driver takes 0.2 s to report and which a second child may have to wait for. If one suspect depends on
    another, all stay in the order of sending.
    """
    if any(isinstance(each.future, ConditionalFuture) and each.future.after for each in suspects):
        return suspects
    by_queue: dict[int, list[InFlightRequest]] = {}
    for each in suspects:
        by_queue.setdefault(each.queue.index, []).append(each)
    return [each for group in sorted(by_queue.values(), key=lambda group: -group[0].number) for each in group]


def _test_suspect(pool: ChildOwner, sent: InFlightRequest, *, may_hang: bool, runs: int) -> bool | None:
    """Run one request alone, `runs` times.

    Returns None if it succeeds, True if it was the culprit and the child was replaced, False if no child starts.
    """
    refusal = sent.queue.refusal(sent)
    if refusal is not None:
        pool.fail_sent(sent, refusal)
        return None
    if isinstance(sent.future, ConditionalFuture) and any(not other._status for other in sent.future.after):
        return None  # alone it would wait for ever for a request that is sent again later
    for _ in range(MAX_SOLO_CRASHES):
        loss = _run_alone(pool, sent, may_hang, runs)
        if loss is None:
            return None
        if loss.is_device_fault:
            _fail_culprit(pool, sent, loss)
        if not pool.replace_child(loss):
            return False
        if sent.number not in sent.queue.sent:  # the request faulted, or hung
            return True
    _fail_culprit(pool, sent, ChildLoss(f"{MAX_SOLO_CRASHES} consecutive processes died while it ran alone"))
    return True


def _fail_culprit(pool: ChildOwner, sent: InFlightRequest, loss: ChildLoss) -> None:
    pool.fail_sent(sent, _fault(pool, sent, loss.why, loss))


def _fault(pool: ChildOwner, sent: InFlightRequest, why: str, loss: ChildLoss) -> DeviceFault:
    fault = DeviceFault(f"{describe_request(sent.request)}: {why} (restart {pool.restarts} of {pool.device})")
    fault.__cause__ = loss.error
    return fault


def _run_alone(pool: ChildOwner, sent: InFlightRequest, may_hang: bool, runs: int) -> ChildLoss | None:
    """Send a request to an otherwise idle child, and wait for its end; returns the loss if the child is lost.

    If its fault may be reported late, it runs twice: by the end of the second run a fault of the first has shown.
    """
    child, queue = pool.current_child(), sent.queue
    link = child.links[queue.index]
    ends = _hang_deadline(pool, sent, may_hang)
    try:
        queue.resend(link, [sent])
        while sent.number in queue.sent:
            pool.retry_chunks()  # the child may be waiting for a chunk that its connection had no room for
            is_told = link.flush() and not child.blocked_errno
            readable = messages.wait_readable([link.socket, child.control], TICK if is_told else RETRY_SECONDS)
            if link.socket in readable:
                message = link.receive(wait=False)
                if message == [sent.number] and runs > 1:
                    runs -= 1
                    messages.wait_readable([link.socket, child.control], LATE_FAULT_DELAY)
                    queue.resend(link, [sent])
                elif message is not None:
                    queue.settle_report(message)
            elif child.control in readable:
                loss = pool.handle_control(child)
                if loss is not None:
                    return loss
            elif monotonic() > ends:
                pool.fail_sent(sent, DeadlineExceeded(_hang_text(pool, sent)))
                return ChildLoss("a request hung")
            elif (how := child.exit_state()) and not messages.wait_readable([link.socket, child.control], 0):
                return ChildLoss("the child process died" if how == "ended" else f"the child process {how}")
    except (EOFError, OSError):
        return pool.last_message(child) or ChildLoss("the child process died")
    return None


def _hang_deadline(pool: ChildOwner, sent: InFlightRequest, may_hang: bool) -> float:
    """The time (monotonic) after which a request that runs alone counts as hanging."""
    soonest = monotonic() + SOLO_TIMEOUT_FACTOR * pool.hang_seconds
    if isinstance(sent.future, TimedFuture):
        return max(sent.future.deadline, soonest)
    return soonest if may_hang else math.inf


def _hang_text(pool: ChildOwner, sent: InFlightRequest) -> str:
    """Why a request was ended that ran too long when it ran alone, and what to do."""
    waited, alone = pool.hang_seconds, SOLO_TIMEOUT_FACTOR * pool.hang_seconds
    limits = f"for more than hang_seconds={waited:g} s, and for {alone:g} s when it ran alone in a new process"
    if isinstance(sent.future, TimedFuture):
        return f"it ran past its deadline (timeout=) {limits}; if it is that slow, give it a larger timeout"
    cause = f"a request that was submitted with timeout= had its deadline while this one ran, which went on {limits}"
    hint = "give the supervisor a larger hang_seconds, or submit requests with a timeout to another supervisor"
    return f"it has no deadline, but {cause}; if it is that slow, {hint}"
