"""From a kernel's source to its cubin: memory, disk, or NVRTC in a process of its own, several at once.

Plans ask `request` for a future and wait for it; `precompile` asks for many. Within `compiling_in_background`, plans
only start the compilations that they would wait for. A second request for a kernel that is being compiled gets the same
future. NVRTC holds the GIL while it runs, so it runs in separate processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from cudabind._fork import anew
from dispatch.errors import DispatchError, Refused
from dispatch.libraries.cutlass import headers
from dispatch.libraries.nvrtc.kernel_cache import Entry, folder, store
from dispatch.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source

__all__ = [
    "OPTIONS",
    "CompileFailed",
    "StillCompiling",
    "compiling_in_background",
    "kernel_id",
    "plan_of",
    "request",
    "toolchain",
]

OPTIONS = (
    "-std=c++17",
    "-default-device",
    "-DNDEBUG",
    "-diag-suppress=177",  # variables that a header declares and this kernel does not use
    # Division by multiplication needs 128-bit integers to prepare divisors that are no powers of two; without them
    # CUTLASS stops at a breakpoint instruction: a launch failure (719) for most extents.
    "-device-int128",
    "-DCUTLASS_UINT128_NATIVE",
)
MAX_COMPILERS = 16
COMPILER_BYTES = 4 << 30  # memory of NVRTC for one kernel: 2.5 to 3.9 GB with 13.5
LOG_LINES = 3  # lines of the compiler's errors in a message


class CompileFailed(DispatchError, RuntimeError):
    """A kernel that NVRTC refuses: its name, the first error, and the path of the whole log."""

    def __init__(self, label: str, error: str, log: str) -> None:
        self.label, self.error, self.log = label, error, log
        super().__init__(f"NVRTC does not compile {label}: {error}. The full log is in {log}")

    def __reduce__(self) -> tuple[type[CompileFailed], tuple[str, str, str]]:
        return type(self), (self.label, self.error, self.log)


def kernel_id(source: Source, target: str) -> str:
    """The digest of the source and target, without the toolchain."""
    return hashlib.sha256("\0".join((source.text, target, *OPTIONS)).encode()).hexdigest()


@cache
def toolchain() -> str | None:
    """The versions of NVRTC, CUTLASS and CCCL, and the digest of our amendments; None if something is missing."""
    from dispatch.libraries.nvrtc.compiled import compiler

    try:
        installed = headers.find()
    except headers.HeadersMissing:
        return None
    nvrtc = compiler()
    if nvrtc is None:
        return None
    amendments = hashlib.sha256(json.dumps(installed.texts, sort_keys=True).encode()).hexdigest()[:16]
    return f"{nvrtc}, CUTLASS {installed.cutlass}, CCCL {installed.cccl}, amendments {amendments}"


def plan_of(plan: Callable[..., Plan], request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """A plan of a CUTLASS row.

    If its kernel cannot be compiled here, that is an error for a request that only CUTLASS can run (`has_tree`), and
    Refused for any other one: the next row is tried, and a race continues among the other rows.
    """
    try:
        return plan(request, executor, row)
    except (headers.HeadersMissing, CompileFailed) as missing:
        if request.has_tree:
            raise
        raise Refused(str(missing)) from missing


class StillCompiling(Exception):
    """Raised by `request` within `compiling_in_background`: the kernel is being compiled."""


_here = threading.local()
_lock = threading.Lock()
_known: dict[str, Future[bytes]] = {}
anew(sys.modules[__name__], "_lock", threading.Lock)
anew(sys.modules[__name__], "_known", dict)  # the parent receives the results of its compilations


@cache
def _compilers() -> ThreadPoolExecutor:
    """Threads that each wait for one compiler process: as many as there are cores and memory for."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = min(MAX_COMPILERS, (os.cpu_count() or 2) - 1, free // COMPILER_BYTES)
    return ThreadPoolExecutor(max(1, count), thread_name_prefix="nvrtc")


os.register_at_fork(after_in_child=_compilers.cache_clear)  # a forked child does not have the threads


@contextmanager
def compiling_in_background() -> Iterator[set[Future[bytes]]]:
    """Make this thread's `request` raise StillCompiling for uncompiled kernels; yields the compilations it started."""
    started: set[Future[bytes]] = set()
    _here.started = started
    try:
        yield started
    finally:
        del _here.started


def request(source: Source, target: str, label: str) -> Future[bytes]:
    """The future cubin of a source, which is compiled already, being compiled, or starts to be."""
    future = _request(source, target, label)
    started = getattr(_here, "started", None)
    if started is not None and not future.done():
        started.add(future)
        raise StillCompiling(label)
    return future


def _request(source: Source, target: str, label: str) -> Future[bytes]:
    kernel = kernel_id(source, target)
    with _lock:
        future = _known.get(kernel)
        if future is not None and not (future.done() and future.exception()):
            return future
        entry = _kept(kernel)
        if entry is None:
            future = _compilers().submit(_compile, kernel, source.text, target, label)
        else:
            future = Future()
            future.set_result(entry.code)
        _known[kernel] = future
        return future


def _kept(kernel: str) -> Entry | None:
    try:
        return store().find(kernel, toolchain())
    except DispatchError as error:
        log("not cached", {"path": str(folder()), "cause": error})
        return None


def _compile(kernel: str, text: str, target: str, label: str) -> bytes:
    """Compile in a child process, and store the result."""
    chain = toolchain()
    if chain is None:
        headers.find()  # raises with a message about what is missing
        raise headers.HeadersMissing(f"{label} is not compiled yet, and NVRTC is not installed. {headers.INSTALL}")
    started = time.monotonic()
    command = [sys.executable, "-c", "from dispatch.libraries.cutlass.compile_child import main; main()"]
    order = json.dumps({"text": text, "options": [f"-arch={target}", *OPTIONS]}).encode()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, input=order, capture_output=True, env=environment, check=False)
    if done.returncode == 0:
        entry = Entry(kernel, chain, target, label, round(time.monotonic() - started, 1), done.stdout)
        try:
            store().put(entry)
        except DispatchError as error:  # the next process compiles it again
            log("not cached", {"path": str(folder()), "cause": error})
        return entry.code
    messages = done.stderr.decode(errors="replace")
    raise CompileFailed(label, first_errors(messages), _keep_log(kernel, text, messages))


def first_errors(log: str) -> str:
    """The first errors of a log, without the templates in which they occurred."""
    errors = re.findall(r"^(?:.*?\(\d+\): )?(?:error|catastrophic error)\s?:? ?(.*)$", log, re.MULTILINE)
    lines: Sequence[str] = list(dict.fromkeys(error.strip() for error in errors)) or log.strip().splitlines()[-1:]
    return "; ".join(line[:200] for line in lines[:LOG_LINES]) or "the compiler process ended without a message"


def _keep_log(kernel: str, text: str, log: str) -> str:
    """Write a log to a file that a person can read; returns the path, or why there is none."""
    logs = folder() / "logs"
    path = logs / f"{kernel[:16]}.log"
    try:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{log}\n\n// ---- the source ----\n{text}", encoding="utf-8")
    except OSError as error:  # it must not hide the compiler's errors
        return f"no file: {error}"
    return str(path)
