"""The peers of bench_overhead: a C loop and a ctypes loop over cublasLtMatmul, torch, CuPy and nvmath-python.

Each function gives candidates for the same product of square bf16 matrices; the one that calls it turns whatever it
raises (not installed, no compiler, no such dtype) into a line of the table. Every library works on operands of its own,
on the stream that it uses by default, since nothing is to wait for anything.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from timing import Candidate, statement

Array = np.ndarray[Any, np.dtype[Any]]
TORCH_MM = "torch.mm(out=)"
TORCH_GELU = "F.linear + F.gelu(tanh)"
TORCH_FUSED = "torch._addmm_activation, fused gelu"  # private: torch's users do not have it
TORCH_GRAPH = "torch.cuda.CUDAGraph.replay(), mm"
C_GRAPH = "C loop, cuGraphLaunch"
NVMATH = "nvmath Matmul.execute()"
SOURCE = Path(__file__).with_name("cublaslt_loop.cu")
WORKSPACE = 32 << 20


class Operands(NamedTuple):
    """A and B (size, size) and bias (size,), in float32 that bf16 holds exactly."""

    a: Array
    b: Array
    bias: Array


def torch_candidates(operands: Operands, many: int) -> list[Candidate]:
    """What torch offers for the product, plain and with bias and GELU; `many` outputs make the new pointers."""
    import torch
    from torch.nn import functional

    a, b, bias = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in operands)
    weight = b.t().contiguous()  # F.linear takes it transposed
    out = torch.full_like(a, float("nan"))
    new = itertools.cycle([torch.empty_like(a) for _ in range(many)]).__next__
    names = {"mm": torch.mm, "addmm": torch.addmm, "linear": functional.linear, "gelu": functional.gelu}
    names |= {"a": a, "b": b, "bias": bias, "weight": weight, "out": out, "new": new}
    rows = (
        (TORCH_MM, "mm(a, b, out=out)"),
        ("torch.mm(out=), new pointers", "mm(a, b, out=new())"),
        ("torch.mm", "mm(a, b)"),
        ("torch.addmm", "addmm(bias, a, b)"),
        ("F.linear with bias", "linear(a, weight, bias)"),
        (TORCH_GELU, "gelu(linear(a, weight, bias), approximate='tanh')"),
        (TORCH_FUSED, "fused(bias, a, b, use_gelu=True)"),
    )
    names["fused"] = torch._addmm_activation
    return [statement(name, code, **names) for name, code in rows]


def torch_graph_candidates(operands: Operands) -> list[Candidate]:
    """torch.mm captured once and replayed: what a bound call is, in torch."""
    import torch

    a, b = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in operands[:2])
    out = torch.full_like(a, float("nan"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(a, b, out=out)
    side.synchronize()
    out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        torch.mm(a, b, out=out)
    # The graph holds addresses, not tensors: the operands live as long as the candidate does.
    timed = statement(TORCH_GRAPH, "replay()", replay=graph.replay, operands=(a, b))

    def result() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return out

    return [Candidate(timed.name, timed.burst, result)]


def torch_compile_candidates(operands: Operands) -> list[Candidate]:
    """What torch.compile makes of linear + GELU where it may search for kernels and use CUDA graphs."""
    import torch
    from torch.nn import functional

    a, b, bias = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in operands)
    weight = b.t().contiguous()

    def fused_gelu(x: Any, w: Any, b: Any) -> Any:
        return functional.gelu(functional.linear(x, w, b), approximate="tanh")

    compiled = torch.compile(fused_gelu, mode="max-autotune")
    with torch.no_grad():
        for _ in range(3):  # compiled, recorded, replayed
            compiled(a, weight, bias)
    names = {"compiled": torch.no_grad()(compiled), "a": a, "weight": weight, "bias": bias}
    return [statement("torch.compile max-autotune, linear + gelu", "compiled(a, weight, bias)", **names)]


def cupy_candidates(operands: Operands) -> list[Candidate]:
    """`cupy.matmul(out=)` in bf16 where CuPy has it, else in f16."""
    import cupy
    import ml_dtypes

    try:
        a, b = (cupy.asarray(x.astype(ml_dtypes.bfloat16)) for x in operands[:2])
        out, dtype = cupy.empty_like(a), "bf16"
        cupy.matmul(a, b, out=out)
    except (TypeError, ValueError, RuntimeError):
        a, b = (cupy.asarray(x.astype(np.float16)) for x in operands[:2])
        out, dtype = cupy.empty_like(a), "f16"
    return [statement(f"cupy.matmul(out=) {dtype}", "matmul(a, b, out=out)", matmul=cupy.matmul, a=a, b=b, out=out)]


def nvmath_candidates(operands: Operands) -> list[Candidate]:
    """nvmath-python's stateful `execute` after one `plan`, and its function, over torch's tensors."""
    import torch
    from nvmath.linalg import advanced

    a, b = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in operands[:2])
    planned = advanced.Matmul(a, b)
    planned.plan()
    return [
        statement(NVMATH, "execute()", execute=planned.execute),
        statement("nvmath matmul()", "matmul(a, b)", matmul=advanced.matmul, a=a, b=b),
    ]


class CublasLtCall:
    """One cublasLtMatmul over dense bf16 matrices with everything prebuilt, as a careful C program would have it."""

    def __init__(self, device: Any, operands: Operands) -> None:
        from cudabind.sys import cublasLt as lt

        self.lt, self.device = lt, device
        size = operands.a.shape[0]
        self._keep = [device.array(x, "bf16") for x in operands[:2]]
        self.out = device.array(np.full((size, size), np.nan), "bf16")
        workspace = device.empty(WORKSPACE, "u8")
        self._stream = device.stream()
        handle, desc, preference = lt.cublasLtHandle_t(), lt.cublasLtMatmulDesc_t(), lt.cublasLtMatmulPreference_t()
        lt.cublasLtCreate(handle)
        lt.cublasLtMatmulDescCreate(desc, lt.cublasComputeType_t.CUBLAS_COMPUTE_32F, lt.cudaDataType_t.CUDA_R_32F)
        layout = lt.cublasLtMatrixLayout_t()
        lt.cublasLtMatrixLayoutCreate(layout, lt.cudaDataType_t.CUDA_R_16BF, size, size, size)
        lt.cublasLtMatmulPreferenceCreate(preference)
        limit = lt.cublasLtMatmulPreferenceAttributes_t.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
        lt.cublasLtMatmulPreferenceSetAttribute(preference, limit, ctypes.byref(ctypes.c_uint64(WORKSPACE)), 8)
        found = (lt.cublasLtMatmulHeuristicResult_t * 1)()
        count = ctypes.c_int32()
        four = (layout,) * 4
        lt.cublasLtMatmulAlgoGetHeuristic(handle, desc, *four, preference, 1, found, ctypes.byref(count))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        # Row-major operands are the transposes of column-major ones: (A·B)ᵀ = Bᵀ·Aᵀ.
        first, second, out = (ctypes.c_void_p(x.ptr) for x in (self._keep[1], self._keep[0], self.out))
        self.arguments = (
            *(handle, desc, ctypes.byref(one), first, layout, second, layout, ctypes.byref(zero)),
            *(out, layout, out, layout, ctypes.byref(found[0].algo), ctypes.c_void_p(workspace.ptr)),
            *(ctypes.c_size_t(WORKSPACE), lt.cudaStream_t(self._stream.c_handle.value)),
        )
        self._keep += [workspace, found, one, zero]
        device.synchronize()  # the operands were copied on another stream

    def result(self) -> Any:
        """Run once, checked, and give the product."""
        self.lt.cublasLtMatmul(*self.arguments)
        self.device.synchronize()
        return self.out


def ctypes_candidates(device: Any, operands: Operands) -> list[Candidate]:
    """A Python loop over `cudabind.sys.cublasLt.cublasLtMatmul.unchecked` with prebuilt arguments."""
    call = CublasLtCall(device, operands)
    unchecked = call.lt.cublasLtMatmul.unchecked
    timed = statement("ctypes loop, cublasLtMatmul", "matmul(*arguments)", matmul=unchecked, arguments=call.arguments)
    return [Candidate(timed.name, timed.burst, call.result)]


def c_candidates(device: Any, operands: Operands, folder: Path) -> list[Candidate]:
    """The same loop in C, built with nvcc into `folder`; RuntimeError where there is no nvcc or it fails."""
    call = CublasLtCall(device, operands)
    loop = ctypes.CDLL(str(build_loop(folder))).cublaslt_loop
    function = ctypes.cast(call.lt.cublasLtMatmul.unchecked, ctypes.c_void_p)

    def burst(calls: int) -> float:
        started = time.perf_counter()
        status = loop(ctypes.c_int(calls), function, *call.arguments)
        took = time.perf_counter() - started
        if status:
            raise call.lt.cublasLtMatmul.error(status)
        return took

    def result() -> Any:
        burst(1)
        device.synchronize()
        return call.out

    return [Candidate("C loop, cublasLtMatmul", burst, result)]


def graph_candidates(device: Any, operands: Operands, folder: Path) -> list[Candidate]:
    """The same call captured as a graph of one node, launched from a loop in C: the least that a replay can cost."""
    from cudabind import driver

    call = CublasLtCall(device, operands)
    recorder, stream = device.stream(), device.stream()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuStreamBeginCapture(recorder.c_handle.value, relaxed)
    call.lt.cublasLtMatmul(*call.arguments[:-1], call.lt.cudaStream_t(recorder.c_handle.value))
    graph = driver.cuStreamEndCapture(recorder.c_handle.value)
    executable = ctypes.c_void_p(int(driver.cuGraphInstantiate(graph, 0)))
    loop = ctypes.CDLL(str(build_loop(folder))).graph_loop
    function = ctypes.cast(driver.cuGraphLaunch.unchecked, ctypes.c_void_p)

    def burst(calls: int) -> float:
        started = time.perf_counter()
        status = loop(ctypes.c_int(calls), function, executable, stream.c_handle)
        took = time.perf_counter() - started
        if status:
            raise driver.error("cuGraphLaunch", status)
        return took

    def result() -> Any:
        burst(1)
        device.synchronize()
        return call.out

    return [Candidate(C_GRAPH, burst, result)]


def build_loop(folder: Path) -> Path:
    """Compile cublaslt_loop.cu into a shared library; RuntimeError says what is missing."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    nvcc = shutil.which("nvcc", path=places)
    if nvcc is None:
        raise RuntimeError("nvcc is not installed (looked in PATH, CUDA_HOME and /usr/local/cuda)")
    library = folder / "cublaslt_loop.so"
    if library.exists():
        return library
    # There is no device code in it: as C++ it is compiled without the detour through a fat binary.
    command = [nvcc, "-x", "c++", "-O3", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"nvcc failed: {done.stderr.strip()[-300:]}")
    return library
