"""Worker: one thread with its own stream, library handles and workspace, which runs the requests in its queue.

This is the base class of the workers of the host (host_worker.py) and of a GPU (cuda_worker.py): the life of the
thread, requests with conditions, and failures. pool.py makes workers, supervisor.py fills their queues. A worker does
not choose queues and does not decide about restarts.
"""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

from cudabind.errors import CudaDriverError, CudaError
from dispatch.core.request import Request
from dispatch.core.user_code import is_of_user_code
from dispatch.device.cuda import OUT_OF_MEMORY, CudaDevice
from dispatch.device.stream import current
from dispatch.errors import BadRequest, DispatchError, OutOfMemory, WorkerFailed, error_text
from dispatch.supervise.future import ALREADY_CLAIMED, CANCELLED, FAILED, ConditionalFuture
from dispatch.supervise.queue import clone_error

if TYPE_CHECKING:
    from dispatch.supervise.future import Future, QueueLike
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["Worker", "describe_request"]

ENDS = (SystemExit, KeyboardInterrupt)  # what a user's code raises of these must not end the thread that reads it


class Worker:
    """The base class of workers on a GPU and on the host.

    Guarantees: a worker settles every future that it takes from its queue, even if it breaks; the current one then
    fails with WorkerFailed. Its executor, stream and handles are created, used and closed on its own thread, except
    that another thread may launch a request that has run before, while the worker's thread stays out
    (inline_runner.py).
    """

    def __init__(self, queue: WorkerQueue, owner: WorkerOwner) -> None:
        self.queue, self.owner, self.device = queue, owner, owner.device
        self.executor: Any = None
        self.successor: Worker | None = None  # a worker that takes over this one's thread
        name = f"dispatch {self.device} worker {queue.index}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def in_flight(self) -> list[Future]:
        """The futures taken from the queue and not settled yet."""
        return []

    def help(self, future: Future) -> None:
        """Called by a thread that waits for a future: it may do the worker's work for that request here."""

    @property
    def is_current_thread(self) -> bool:
        """Whether the calling thread is the worker's, or does its work for it."""
        return self.thread is threading.current_thread()

    # -- overridden by subclasses ---------------------------------------------------------------------------------
    def _open(self) -> None:
        """Create the stream and the executor."""
        self.executor = self.device.executor(self.device.stream())

    def _serve(self) -> None:
        """Run requests until the owner ends."""

    def _close(self) -> None:
        """Settle the batches in flight, and close the objects that `_open` created."""
        if self.executor is not None:
            self.executor.close()

    def _settle_batches(self) -> None:
        """Wait for the batches in flight, so that their memory is free."""

    def _find_cause(self, error: CudaError) -> BaseException:
        """The device's fault if an error was caused by one, else the error."""
        return error

    # -- its life -------------------------------------------------------------------------------------------------
    def _main(self) -> None:
        defect: BaseException | None = None
        is_lost = False
        for step in (self._open_and_serve, self._close):
            try:
                step()
            except BaseException as error:  # noqa: BLE001  # passed to the owner, which decides
                defect = defect or error
            is_lost = self.device.fault is not None
            if is_lost:
                self.owner.on_device_lost()  # before any future fails with the fault: callers that see it are refused
        if is_lost or defect is None or not self.owner.replace(self, defect):
            self.queue.drain(self.owner)
        elif self.successor is not None:
            if self.executor is not None:  # it is closed: the successor creates another one on this thread
                current.executors.pop(self.executor.stream, None)
            self.successor._main()

    def _open_and_serve(self) -> None:
        self._open()
        self.owner.on_worker_opened(self.executor, self.queue)
        self._serve()

    # -- requests with conditions, and failures ---------------------------------------------------------------------
    def _claim_conditional(self, future: Future) -> Any:
        """Claim a future without `_request`; ALREADY_CLAIMED if it was cancelled or must not start any more."""
        request = future.claim()
        if request is ALREADY_CLAIMED:
            self.queue.cancelled += future._status == CANCELLED
        elif isinstance(future, ConditionalFuture):
            refusal = future.refusal()
            if refusal is not None:
                self._fail(future, refusal)
                return ALREADY_CLAIMED
            try:
                for other in future.after:
                    if not other._status and other._queue is not self.queue:
                        self._order_after(other._queue)
            except BaseException as error:  # noqa: BLE001  # it must not run without that order
                self._fail_or_raise(future, request, error)
                return ALREADY_CLAIMED
            future.after = ()
        return request

    def _order_after(self, queue: QueueLike) -> None:
        """Order later work after all work that another worker has enqueued; on the host that work has already run."""

    def _handle_error(self, future: Future, request: Request, error: BaseException) -> bool:
        """Handle the error of a request; returns whether it has run after all. Raises an error that ends the worker."""
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # our frame has the batch
        if _is_out_of_memory(error):
            retried = self._retry(future, request)
            if retried is None:
                return True
            error = retried
        self._fail_or_raise(future, request, error)
        return False

    def _fail_or_raise(self, future: Future, request: Request, error: BaseException) -> None:
        """Fail a request with its error. Raises an error that ends the worker."""
        if isinstance(error, CudaError):
            error = self._find_cause(error)
        if self.device.fault is not None:
            self.owner.on_device_lost()
            fault = clone_error(self.device.fault)
            self._fail(future, fault)
            raise clone_error(fault)
        is_own = not isinstance(error, (DispatchError, CudaError)) and is_of_user_code(error, request)
        if isinstance(error, (DispatchError, CudaError)) or (is_own and not isinstance(error, ENDS)):
            self._fail(future, error)
            return
        if not isinstance(request, Request):
            hint = "such as dispatch.MatmulRequest(a=a, b=b)"
            self._fail(future, BadRequest("request", type(request).__name__, "a dispatch.Request", hint))
            return
        failure = WorkerFailed(
            f"worker {self.queue.index} of {self.device} failed on {describe_request(request)}: {error_text(error)}"
        )
        failure.__cause__ = error
        self._fail(future, failure)
        if not is_own:
            raise error

    def _retry(self, future: Future, request: Request) -> BaseException | None:
        """Free memory and run a request once more; returns its error if it failed again."""
        self.executor.release()
        self._settle_batches()
        gc.collect()
        try:
            if isinstance(self.device, CudaDevice):
                self.device.trim()
            future._value = self.executor.run(request)
        except BaseException as error:  # noqa: BLE001  # judged by `_handle_error`
            if not _is_out_of_memory(error):
                return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            text = describe_request(request)
            short = OutOfMemory(
                f"{self.device} does not have enough memory for {text}, even after its caches were freed:"
                f" {error_text(error, str)}"
            )
            short.__cause__ = error
            return short
        return None

    def _fail(self, future: Future, error: BaseException) -> None:
        self.queue.failed += 1
        self.owner.on_request_failed(future, future.settle(FAILED, error))

    def _notify(self, future: Future) -> None:
        """Wake the threads that wait for a future whose status is set, and run its callbacks."""
        wait_list = future._wait_list
        errors = wait_list.notify(future) if wait_list is not None else []
        if errors:
            self.owner.on_callback_errors(errors)


def describe_request(request: Request) -> str:
    """A request as text; an error of its `describe` must not hide the failure that the text is for."""
    try:
        return request.describe()
    except Exception as error:  # noqa: BLE001
        return f"a {type(request).__name__} whose describe() raised {error_text(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, CudaDriverError) and error.status == OUT_OF_MEMORY)
