"""What becomes of what was in flight when a child was lost: who is guilty, what runs again, what fails.

The pool's monitor thread calls `recover`, with nobody sending meanwhile. What had begun runs again in a new child, one
request at a time, until the one that faults again is known; the rest is sent again as it was. This module starts no
process itself.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dispatch.errors import DeadlineExceeded, DeviceFault, DispatchError, WorkerFailed
from dispatch.supervise.future import LateFuture, TimedFuture
from dispatch.supervise.process import messages
from dispatch.supervise.process.child_process import LOOK_SECONDS
from dispatch.supervise.process.owner import QueueOwner
from dispatch.supervise.process.repeatable import Sent, unsafe_to_repeat
from dispatch.supervise.worker import described

if TYPE_CHECKING:
    from dispatch.supervise.process.child_process import Child
    from dispatch.supervise.process.children import Children

__all__ = ["ChildLoss", "fail_in_flight", "recover"]

TICK = 0.25  # seconds between looks at whether the child was stopped
# Times `hang_seconds` for a request that runs alone: in a new child it also loads what others had loaded.
SOLO_TIMEOUT_FACTOR = 5
LATE_FAULT_DELAY = 1e-3  # seconds between the two runs of a request whose fault may come late
MAX_SOLO_CRASHES = 3  # of children without a word, while one request ran alone: then it is taken to be the cause
# Statuses of the driver that a kernel brings about: illegal address, assert, illegal instruction, misaligned address,
# invalid address space, invalid pc, launch failure (a trap). Others, as an error of the memory, may come by chance.
OF_KERNELS = frozenset({700, 710, 715, 716, 717, 718, 719})
MISALIGNED = 716


class ChildLoss(NamedTuple):
    """Why a child is to be replaced.

    `begun` are the requests that had begun and not ended, by the child's own word; None where it could give none.
    `hanging` are those of which one may be without an end: those that the workers had been with the longest.
    """

    why: str
    error: BaseException | None = None
    begun: frozenset[int] | None = None
    hanging: frozenset[int] = frozenset()

    @property
    def proven(self) -> bool:
        """Whether the device itself said that a request faulted: then nothing of its context runs any more."""
        return isinstance(self.error, DispatchError)

    @property
    def cause(self) -> BaseException:
        return self.error or WorkerFailed(self.why)

    @property
    def status(self) -> int | None:
        """The driver's, where the device itself said that a request faulted."""
        cause = None if self.error is None else self.error.__cause__
        return getattr(cause, "status", None) if self.proven else None

    @property
    def is_of_a_kernel(self) -> bool:
        return self.status in OF_KERNELS

    @property
    def may_be_late(self) -> bool:
        """Whether a request that ended well may have brought it about: what is stored to a misaligned address.

        Of some 100 such kernels on a busy H200 one had ended, by the driver's word, before the device stopped, and what
        ran next had the blame.
        """
        return self.status == MISALIGNED


class ChildOwner(QueueOwner, Protocol):
    """What a recovery asks of the pool whose child was lost."""

    children: Children
    hang_seconds: float
    restarts: int

    def present(self) -> Child: ...
    def renew(self, loss: ChildLoss) -> bool: ...
    def give_up(self, sent: Sent, error: BaseException) -> None: ...
    def catch_up(self) -> None: ...
    def hear(self, child: Child) -> ChildLoss | None: ...
    def last_words(self, child: Child) -> ChildLoss | None: ...


def recover(pool: ChildOwner, loss: ChildLoss) -> bool:
    """Replace the child, and settle those that must not run again; False where the circuit is open now."""
    sent = sorted((each for queue in pool.queues for each in queue.sent.values()), key=lambda each: each.number)
    begun = [each for each in sent if loss.begun is None or each.number in loss.begun]
    # Who it was needs no second run to be known.
    sure = len(begun) == 1 and loss.is_of_a_kernel and not loss.may_be_late
    # A fault that comes again costs a second child: both get ready at the same time.
    pool.children.start(1 if sure or not (loss.proven or loss.hanging) else 2)
    if not pool.renew(loss):
        return False
    if sure:
        _fail_culprit(pool, begun[0], loss)
        return True
    unsafe = unsafe_to_repeat(begun)
    for each in begun:
        if each.number in unsafe:
            text = f"{loss.why} while it was in flight, and it cannot be run again: {unsafe[each.number]}"
            pool.give_up(each, _fault(pool, each, text, loss))
    # Of requests that may hang only the first at each worker can be the one: the others had not been reached.
    suspects = [each for each in begun if each.number not in unsafe]
    if loss.hanging:
        suspects = [each for each in suspects if each.number in loss.hanging]
    for each in _most_likely_last(suspects):
        found = _try(pool, each, may_hang=each.number in loss.hanging, runs=2 if loss.may_be_late else 1)
        if found is not None:
            return found
    return True


def fail_in_flight(pool: ChildOwner, loss: ChildLoss) -> None:
    """Fail all that was in flight: the supervisor ends, and runs nothing again."""
    for each in sorted((each for queue in pool.queues for each in queue.sent.values()), key=lambda each: each.number):
        text = f"{loss.why} while it was in flight, and its supervisor was ending: it was not run again"
        pool.give_up(each, _fault(pool, each, text, loss))


def _most_likely_last(suspects: list[Sent]) -> list[Sent]:
    """In order at each worker, workers in turn, the one that had waited longest last.

    A kernel that faults holds up its own stream from its beginning on, the others only once the device stops. So the
    oldest is the likeliest, and where it comes last the others have their results before the fault that it repeats,
    which the driver takes 0.2 s to report and a second child may have to wait for. Where one waits for another worker's
    all stay in the order of sending.
    """
    if any(isinstance(each.future, LateFuture) and each.future.after for each in suspects):
        return suspects
    by_queue: dict[int, list[Sent]] = {}
    for each in suspects:
        by_queue.setdefault(each.queue.index, []).append(each)
    return [each for group in sorted(by_queue.values(), key=lambda group: -group[0].number) for each in group]


def _try(pool: ChildOwner, sent: Sent, *, may_hang: bool, runs: int) -> bool | None:
    """Run one request alone, so many times.

    None: it is innocent; True: it was guilty, and there is a child again; False: there is none.
    """
    refusal = sent.queue.refusal(sent)
    if refusal is not None:
        pool.give_up(sent, refusal)
        return None
    if isinstance(sent.future, LateFuture) and any(not other._status for other in sent.future.after):
        return None  # alone it would wait for ever for what is sent again after this
    for _ in range(MAX_SOLO_CRASHES):
        loss = _alone(pool, sent, may_hang, runs)
        if loss is None:
            return None
        if loss.proven:
            _fail_culprit(pool, sent, loss)
        if not pool.renew(loss):
            return False
        if sent.number not in sent.queue.sent:  # it faulted, or hung
            return True
    _fail_culprit(pool, sent, ChildLoss(f"{MAX_SOLO_CRASHES} processes in a row died while it ran alone"))
    return True


def _fail_culprit(pool: ChildOwner, sent: Sent, loss: ChildLoss) -> None:
    pool.give_up(sent, _fault(pool, sent, loss.why, loss))


def _fault(pool: ChildOwner, sent: Sent, why: str, loss: ChildLoss) -> DeviceFault:
    fault = DeviceFault(f"{described(sent.request)}: {why} (restart {pool.restarts} of {pool.device})")
    fault.__cause__ = loss.error
    return fault


def _alone(pool: ChildOwner, sent: Sent, may_hang: bool, runs: int) -> ChildLoss | None:
    """Send a request to a child that has nothing else to do, and wait for its end.

    Where its fault may come late it runs twice, and the second end counts: what ran first is seen by then.
    """
    child, queue = pool.present(), sent.queue
    link = child.links[queue.index]
    ends = _limit(pool, sent, may_hang)
    try:
        queue.resend(link, [sent])
        while sent.number in queue.sent:
            pool.catch_up()  # it may wait for a chunk that its connection had no room for
            is_told = link.flush() and not child.behind
            readable = messages.ready([link.socket, child.control], TICK if is_told else LOOK_SECONDS)
            if link.socket in readable:
                message = link.receive(wait=False)
                if message == [sent.number] and runs > 1:
                    runs -= 1
                    messages.ready([link.socket, child.control], LATE_FAULT_DELAY)
                    queue.resend(link, [sent])
                elif message is not None:
                    queue.report(message)
            elif child.control in readable:
                loss = pool.hear(child)
                if loss is not None:
                    return loss
            elif monotonic() > ends:
                text = "it ran beyond its deadline, or without an end before others that had one, also alone"
                pool.give_up(sent, DeadlineExceeded(text))
                return ChildLoss("a request hung")
            elif (how := child.fate()) and not messages.ready([link.socket, child.control], 0):
                return ChildLoss("the child process died" if how == "ended" else f"the child process {how}")
    except (EOFError, OSError):
        return pool.last_words(child) or ChildLoss("the child process died")
    return None


def _limit(pool: ChildOwner, sent: Sent, may_hang: bool) -> float:
    """The moment at which a request that runs alone is taken to be without an end."""
    soonest = monotonic() + SOLO_TIMEOUT_FACTOR * pool.hang_seconds
    if isinstance(sent.future, TimedFuture):
        return max(sent.future.deadline, soonest)
    return soonest if may_hang else math.inf
