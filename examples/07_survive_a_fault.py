"""Serve a model whose hundredth request corrupts the GPU: that request fails, and no other notices.

The model looks up words in a table with the user's own kernel, which does not check its indices, and multiplies
the result. Its workers are in a child process, the memory belongs to the parent: an index far outside the table costs
the child and one request. On the host the same mistake is a segmentation fault, and ends the child in the same way.

    python examples/07_survive_a_fault.py --device cuda:0
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import dispatch as dp
from dispatch.core.request import Operands, Plan, Request, Signature
from dispatch.keys import F32, HOST, I64, Arch, Epilogue

WORDS, WIDTH, OUT, TOKENS = 1000, 128, 64, 32
GUILTY = 100
FAR = 1 << 44  # a word whose vector would be beyond every valid address
KERNEL = r"""
extern "C" __global__ void lookup(const float* table, const long long* words, float* out, int width) {
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[blockIdx.x * width + i] = table[words[blockIdx.x] * width + i];
}
"""


@dataclass(frozen=True, eq=False)
class Lookup(Request):
    """The rows of `table` (words, width) with the indices `words` (n,), into `out` (n, width)."""

    op: ClassVar[str] = "lookup"
    table: dp.Tensor
    words: dp.Tensor
    out: dp.Tensor

    @property
    def device(self) -> dp.Device:
        return self.table.device

    def signature(self) -> Signature:
        return Signature((self.table.dtype, self.words.dtype))

    def key(self) -> tuple[Any, ...]:
        return (self.table.layout, self.words.layout, self.out.layout)

    def arguments(self, outputs: Operands) -> tuple[int, ...]:
        return (self.table.ptr, self.words.ptr, self.out.ptr)

    def tensors(self) -> tuple[tuple[str, dp.Tensor, bool], ...]:
        return (("table", self.table, False), ("words", self.words, False), ("out", self.out, True))

    def unallocated(self) -> dict[str, Any]:
        return {}

    def result(self, outputs: Operands) -> dp.Tensor:
        return self.out

    def replace(self, **operands: dp.Tensor) -> Lookup:
        return replace(self, **operands)

    def describe(self) -> str:
        return f"lookup({self.words.layout} in {self.table.layout})"


class HostLookup(Plan):
    """Copies the rows by address, as in C, without checks."""

    __slots__ = ()

    def run(self, request: Lookup, outputs: Operands) -> None:
        table, _, out = request.arguments(outputs)
        row = request.table.shape[1] * 4
        for place, word in enumerate(np.asarray(request.words)):
            ctypes.memmove(out + place * row, table + int(word) * row, row)


class GpuLookup(Plan):
    """Launches the kernel, with a block for each word."""

    __slots__ = ("blocks", "executor", "function", "width")

    def enqueue(self, arguments: tuple[Any, ...]) -> None:
        from cudabind import driver

        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        values = ((*arguments, self.width), types)
        driver.cuLaunchKernel(self.function, self.blocks, 1, 1, 128, 1, 1, 0, self.executor.target.value, values, 0)


def host_lookup(_request: Lookup, _executor: Any, row: dp.Row) -> Plan:
    return HostLookup(row, capture_safe=False)


def gpu_lookup(request: Lookup, executor: Any, row: dp.Row) -> Plan:
    from cudabind import driver, nvrtc

    plan = GpuLookup(row, capture_safe=False)
    code = nvrtc.compile(KERNEL, options=[f"-arch=sm_{int(executor.device.arch)}"]).code
    plan.function = driver.cuModuleGetFunction(driver.cuModuleLoadData(code), b"lookup")
    plan.executor, plan.blocks, plan.width = executor, request.words.shape[0], request.table.shape[1]
    return plan


ROWS = (
    dp.Row("lookup", (F32, I64), None, (), HOST, HOST, (), "example", "lookup", host_lookup),
    dp.Row("lookup", (F32, I64), None, (), Arch(70), None, (), "example", "lookup", gpu_lookup),
)
if __name__ != "__main__":  # see below
    dp.register(*ROWS)


class Model:
    """relu(table[words] · weights + bias); each answer has its own memory."""

    def __init__(self, sup: dp.Supervisor, rng: np.random.Generator) -> None:
        shapes = [(WORDS, WIDTH), (WIDTH, OUT), (OUT,)]
        self.arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        self.sup, dev = sup, sup.device
        self.table, self.weights, self.bias = map(dev.array, self.arrays)

    def submit(self, words: np.ndarray, worker: int) -> tuple[dp.Future, dp.Future]:
        """Queue both steps on one worker, which keeps their order."""
        dev = self.sup.device
        looked_up = dev.empty((len(words), WIDTH))
        lookup = self.sup.submit(Lookup(self.table, dev.array(words), looked_up), worker=worker)
        product = dp.MatmulRequest(looked_up, self.weights, bias=self.bias, epilogue=Epilogue.RELU_BIAS)
        return lookup, self.sup.submit(product, worker=worker)

    def expected(self, words: np.ndarray) -> np.ndarray:
        """The answer, in float64."""
        table, weights, bias = (array.astype(np.float64) for array in self.arrays)
        return np.maximum(table[words] @ weights + bias, 0)


def serve(model: Model, requests: list[np.ndarray]) -> tuple[list[float], dict[int, BaseException], float]:
    """Submit all requests; returns each answer's time in seconds, the failures, and the largest error of the others."""
    ends = [0.0] * len(requests)
    began = time.perf_counter()
    steps = []
    for number, words in enumerate(requests):
        steps.append(model.submit(words, number % 2))
        steps[-1][1].add_done_callback(lambda _, number=number: ends.__setitem__(number, time.perf_counter() - began))
    failures: dict[int, BaseException] = {}
    worst = 0.0
    for number, ((lookup, product), words) in enumerate(zip(steps, requests, strict=True), 1):
        errors = [step.exception(timeout=120) for step in (lookup, product)]
        if any(errors):
            failures[number] = next(error for error in errors if error)
            continue
        right = model.expected(words)
        worst = max(worst, float(np.abs(product.result().numpy() - right).max() / np.abs(right).max()))
    return ends, failures, worst


def main() -> int:
    """Serve the requests; 1 if a request other than the hundredth fails, or an answer is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--requests", type=int, default=400, help="how many (default: 400)")
    parser.add_argument("--spare", action="store_true", help="keep a second child ready, which shortens the recovery")
    options = parser.parse_args()
    name = dp.device().name if options.device == "auto" else options.device

    rng = np.random.default_rng(0)
    requests = [rng.integers(0, WORDS, TOKENS) for _ in range(options.requests)]
    requests[GUILTY - 1][7] = FAR
    setup = (Path(__file__).stem,)  # the child imports this file by its name, for the rows and the request
    with dp.Supervisor(name, streams=2, isolation="process", setup=setup, spare=options.spare) as sup:
        ends, failures, worst = serve(Model(sup, rng), requests)
        stats = sup.stats()
    gap = max(after - before for before, after in zip(sorted(ends), sorted(ends)[1:], strict=False))
    answered = len(requests) - len(failures)
    print(f"{answered} of {len(requests)} requests answered on {name}, largest error {worst:.1e}")
    for number, error in [*failures.items()][:5]:
        print(f"request {number} failed: {type(error).__name__}: {str(error).partition('. ')[0]}")
    print(f"children replaced: {stats.restarts}; without an answer for {gap:.2f} s at most, {max(ends):.2f} s in all")
    return 0 if list(failures) == [GUILTY] and worst < 1e-5 else 1


if __name__ == "__main__":
    # Run under the name by which the child imports it: a class of "__main__" would be a different one there.
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(importlib.import_module(Path(__file__).stem).main())
