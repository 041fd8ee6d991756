"""Requests that go wrong in a chosen way, on the host and on a GPU: for the tests of what survives them.

A child of a supervisor imports this module by `setup=("trouble",)`; importing it registers the rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import select
import signal
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import dispatch as dp
from dispatch.core.request import Plan, Request, Signature
from dispatch.keys import F32, HOST, Arch

LONGEST_HOLD = 300  # seconds: longer than any test waits, so that one that fails before it lets go does end
ON_HOST = ("die", "die once", "stop", "hang", "raise", "exit", "out of memory", "slow", "held", "hook", "fine")
ON_GPU = ("illegal address", "misaligned", "trap", "assert", "hang", *ON_HOST)
KERNEL = r"""
extern "C" __global__ void trouble(float* out, int n, int kind) {
    for (int i = 0; i < n / 2; i++) out[i] = -1;          // half of the output
    __threadfence_system();
    if (kind == 0) *(volatile int*)(1ull << 44) = 1;      // no such address
    if (kind == 1) *(volatile int*)((char*)out + 1) = 1;  // misaligned
    if (kind == 2) asm("trap;");
    if (kind == 3) __assertfail("always", "trouble.py", 1, "trouble", 1);
    while (kind == 4) { }                                 // without an end
}
"""


@dataclass(frozen=True, eq=False)
class Trouble(Request):
    """Reads `a`, writes half of `out`, does what `kind` says (if `once` names a file, only until that exists)."""

    op: ClassVar[str] = "trouble"
    kind: str
    a: dp.Tensor
    out: dp.Tensor
    once: str = ""

    @property
    def device(self) -> dp.Device:
        return self.a.device

    def signature(self) -> Signature:
        return Signature((F32,))

    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.once, self.a.layout, self.out.layout)

    def arguments(self, outputs: Any) -> tuple[Any, ...]:
        return (self.a.ptr, self.out.ptr)

    def tensors(self) -> tuple[Any, ...]:
        return (("a", self.a, False), ("out", self.out, True))

    def unallocated(self) -> dict[str, Any]:
        return {}

    def result(self, outputs: Any) -> Any:
        return self.out

    def replace(self, **operands: Any) -> Trouble:
        return Trouble(**{"kind": self.kind, "a": self.a, "out": self.out, "once": self.once, **operands})

    def describe(self) -> str:
        return f"trouble({self.kind})"


def happen(kind: str, once: str) -> None:
    """Do to this process what a request asks for."""
    if kind == "held":  # until who waits for it takes the file away: how long that takes must not matter
        ends = time.monotonic() + LONGEST_HOLD
        while Path(once).exists():
            if time.monotonic() > ends:
                raise RuntimeError(f"nobody let go of {once} in {LONGEST_HOLD} s")
            time.sleep(0.005)
        return
    if once:
        if Path(once).exists():
            return
        Path(once).touch()
    if kind in ("die", "die once"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit":
        os._exit(3)
    elif kind == "hang":
        while True:
            time.sleep(0.05)
    elif kind == "slow":
        time.sleep(0.2)
    elif kind == "raise":
        raise RuntimeError("a defect")
    elif kind == "out of memory":
        raise MemoryError("none left")


class HostTrouble(Plan):
    """Writes half of the output, does what was asked, and then the other half."""

    __slots__ = ()

    def run(self, request: Any, outputs: Any) -> None:
        a, out = np.asarray(request.a), np.asarray(request.out)
        half = len(out) // 2
        out[:half] = a[:half]
        happen(request.kind, request.once)
        out[half:] = a[half:]


class GpuTrouble(Plan):
    """Launches the kernel, for what a kernel can do; the rest happens to the process."""

    __slots__ = ("executor", "kernel", "request")

    def enqueue(self, arguments: tuple[Any, ...]) -> None:
        from cudabind import driver

        request, stream = self.request, self.executor.stream.c_handle.value
        source, target = arguments
        if request.kind in ON_GPU[:5]:
            types = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
            values = (target, request.out.size, ON_GPU.index(request.kind))
            driver.cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, stream, (values, types), 0)
            return
        happen(request.kind, request.once)
        driver.cuMemcpyDtoDAsync(target, source, request.out.nbytes, stream)


def on_host(_request: Trouble, _executor: Any, row: dp.Row) -> Plan:
    return HostTrouble(row, capture_safe=False)


class Hold(AbstractContextManager):
    """Has requests of the kind "held" go on no sooner than this says so; `once` is what they are to be made with.

    As a block behind a supervisor's it lets go before that one waits for its work, whatever has failed in it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "hold"
        self._file.touch()
        self.once = str(self._file)

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)

    def release_behind(self, pid: int, sent: int, patience: float) -> None:
        """Send a signal to the process that holds one, and let go once that is dead, whoever reaps it."""
        with self, ExitStack() as stack:
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            os.kill(pid, sent)
            gone = select.poll()  # which, unlike select(), takes a descriptor of any number
            gone.register(handle, select.POLLIN)
            assert gone.poll(patience * 1000), f"process {pid} lives on {patience} s after signal {sent}"


def cubin(arch: int) -> bytes:
    """The kernel, compiled once for all children: what recovery takes must not depend on a compiler."""
    from cudabind import nvrtc

    key = hashlib.sha256(KERNEL.encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"trouble-{os.getuid()}-{arch}-{key}.cubin"
    if not file.exists():
        made = file.with_suffix(f".{os.getpid()}")
        made.write_bytes(nvrtc.compile(KERNEL, options=[f"-arch=sm_{arch}"]).code)
        made.rename(file)
    return file.read_bytes()


def on_gpu(request: Trouble, executor: Any, row: dp.Row) -> Plan:
    from cudabind import driver

    plan = GpuTrouble(row, capture_safe=False)
    plan.executor, plan.request = executor, request
    if request.kind in ON_GPU[:5]:
        code = cubin(int(executor.device.arch))
        plan.kernel = driver.cuModuleGetFunction(driver.cuModuleLoadData(code), b"trouble")
    return plan


ROWS = (
    dp.Row("trouble", (F32,), None, (), HOST, HOST, (), "tests", "trouble", on_host),
    dp.Row("trouble", (F32,), None, (), Arch(70), None, (), "tests", "trouble", on_gpu),
)
dp.register(*ROWS)
