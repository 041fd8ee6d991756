"""Plans of this library's kernels of BLAS, whose launches the CPU carries out."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dispatch.libraries.nvrtc import launching

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

PROCESSORS = 3  # so few that a block has several tiles
PARAMETERS = {
    "axpy": ("const Number* x", "const Number* y", "Number* out", "T alpha", "Index n"),
    "nrm2": ("const Number* x", "Number* out", "Index n", "unsigned* done", "T* partial"),
    "symmetric": (
        *("const Number* a", "const Number* x", "const Number* y", "Number* out", "Number alpha", "Number beta"),
        *("Index n", "Step line_step", "Step x_step", "Step y_step", "Step out_step"),
        *("unsigned* done", "Number* parts"),
    ),
}
KINDS = {"Index": ctypes.c_uint64, "Step": ctypes.c_int64}


def kinds(options):
    """How the types of numbers that a kernel takes by value are laid out."""
    chosen = dict(option[2:].split("=") for option in options if option.startswith("-D"))
    single = chosen["NUMBER"] == "float"
    pair = launching.SinglePair if single else launching.DoublePair
    numbers = pair if chosen.get("PARTS") == "2" else ctypes.c_float if single else ctypes.c_double
    return {**KINDS, "Number": numbers, "T": ctypes.c_double if chosen.get("SUM") == "double" else ctypes.c_float}


def executor_on(on_cpu, monkeypatch):
    """An executor of a GPU; `made` has its scratch memory, `launched` the blocks of each launch."""
    sources, made, launched = {}, [], []

    def loaded(source, function, options, _):
        sources[len(sources) + 1] = source, function, options
        return len(sources)

    def launch(function, *rest):
        blocks, _, _, threads, _, _, shared, _, pointers, _ = rest
        source, name, options = sources[function.value]
        by_value = kinds(options)
        declared = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in PARAMETERS[name]]
        given = [kind.from_address(at) for kind, at in zip(declared, pointers, strict=True)]
        assert shared == 0
        launched.append(blocks)
        on_cpu.launched(source, name, options, PARAMETERS[name], (blocks, threads), given)
        return 0

    driver = SimpleNamespace(
        cuMemsetD8Async=lambda to, value, count, _: ctypes.memset(to, value, count),
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
    )
    monkeypatch.setattr(launching, "driver", driver)
    monkeypatch.setattr(launching, "loaded", loaded)

    def empty(shape, _, dtype):
        made.append(np.full(shape, 0xFF, dtype.numpy))
        return SimpleNamespace(ptr=made[-1].ctypes.data, held=made[-1])

    stream = SimpleNamespace(c_handle=ctypes.c_void_p())
    device = SimpleNamespace(attribute=lambda _: PROCESSORS, l2_bytes=1 << 30)
    records = {"made": made, "launched": launched}
    return SimpleNamespace(device=device, stream=stream, target=ctypes.c_void_p(), empty=empty, **records)
