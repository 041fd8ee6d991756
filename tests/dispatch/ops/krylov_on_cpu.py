"""The kernels of the iterations, compiled by g++, in the passes that the graph's while node makes on a GPU."""

import ctypes
import importlib.util
import re
from pathlib import Path

import numpy as np

from dispatch.ops.sparse.krylov_kernels import BLOCKED, FACTORED, IN, KERNELS, SOLVED, SOLVES, SOURCES, Q, passes
from dispatch.ops.sparse.krylov_reference import preconditioner_function
from dispatch.ops.sparse.matrix_reference import matrix_of
from dispatch.ops.sparse.own_krylov import IterationLayout, SolveParameters, index_operands, options

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

THREADS, MAX_BLOCKS = 16, 3  # so few that threads have several elements, and sums come from several blocks
FUNCTION = re.compile(r'extern "C" __global__ void __launch_bounds__\(THREADS, 1\) (\w+)\(Solve s\)')


class Iterations(blocks_on_cpu.InBlocks):
    """`solve(request)` gives x, info, iterations and residual, and notes in `passes` how many there were."""

    def compiled_all(self, op, chosen):
        """All kernels of a method in one library."""
        key = op, chosen
        if key not in self.known:
            names = FUNCTION.findall(SOURCES[op])
            further = (*FACTORED.get(op, ()), *BLOCKED[op])
            assert {*names, SOLVES} == {"begin", "finish", SOLVES, *KERNELS[op], *further}
            behind = "".join(
                f"""
extern "C" void run_{name}(unsigned blocks, unsigned threads, Solve s)
{{
    auto thread = [=] {{ {name}(s); }};
    values = &thread;
    body = [](const void* values) {{ (*(decltype(thread)*)values)(); }};
    run_blocks(blocks, threads);
}}
"""
                for name in names
            )
            behind += 'extern "C" unsigned sizes(int which) { return which ? sizeof(Solve) : sizeof(State); }\n'
            path = self.folder / f"krylov{len(self.known)}"
            kernels_on_cpu = blocks_on_cpu.kernels_on_cpu
            text = kernels_on_cpu.BEFORE + blocks_on_cpu.BEFORE + SOURCES[op] + behind
            # Numbers may overflow, and a division by 0 is what IEEE 754 has.
            further = ("-O0", *chosen, "-fno-sanitize=float-divide-by-zero", "-Wl,-Bsymbolic")
            self.known[key] = ctypes.CDLL(kernels_on_cpu.by_gcc.built(path, text, *further))
        return self.known[key]

    def solve(self, request, most=10_000):
        """Begin, passes for as long as the state says so, finish; the memory holds NaN before."""
        chosen = options(request, THREADS)
        library = self.compiled_all(request.op, chosen)
        layout = IterationLayout(request, THREADS, MAX_BLOCKS)
        assert library.sizes(1) == ctypes.sizeof(SolveParameters)
        assert library.sizes(0) <= layout.starts[1]
        whole = np.full(layout.nbytes + 64, 0xFF, np.uint8)
        base = -(-whole.ctypes.data // 16) * 16
        whole[base - whole.ctypes.data :][:256] = 0
        made = {name: np.full(out.shape, -7, out.dtype.numpy) for name, out in request.outputs().items()}
        taken = layout.parameters(base)
        lines, places = (getattr(request, name).ptr for name in index_operands(request))
        taken.values, taken.lines, taken.places = request.values.ptr, lines, places
        taken.b = request.b.ptr
        taken.start = request.x0.ptr if request.x0 is not None else None
        taken.scale = request.M.ptr if request.M is not None and not request.is_factored else None
        for name in ("out", "info", "iterations", "residual"):
            setattr(taken, name, made[name].ctypes.data)

        def run(name, given):
            getattr(library, f"run_{name}")(ctypes.c_uint(layout.blocks), ctypes.c_uint(THREADS), given)

        kind = request.values.dtype
        matrix = matrix_of(request, np.dtype(np.float32 if kind.itemsize == 4 else np.float64)).tocsr()
        inside = layout.parameters(base)
        inside.scale = request.M.ptr if request.is_blocked else None
        source, target = (self.vector(layout, base, number, kind) for number in (IN, Q))
        ends = tuple(self.vector(layout, base, number, kind) for number in SOLVED.get(request.op, ()))
        apply = preconditioner_function(request, matrix, None) if request.is_factored else None
        more = ctypes.c_int.from_address(base)
        run("begin", taken)
        self.passes = 0
        while True:  # as the node does, whose first pass is always made
            with np.errstate(all="ignore"):
                target[:] = matrix @ source
            for name in passes(request):
                if name != SOLVES:
                    run(name, inside)
                    continue
                with np.errstate(all="ignore"):
                    ends[1][:] = apply(ends[0].astype(matrix.dtype))
                target[:] = np.nan  # the solves write there between
            self.passes += 1
            assert self.passes < most
            if not more.value:
                break
        run("finish", taken)
        return made["out"], int(made["info"]), int(made["iterations"]), float(made["residual"])

    @staticmethod
    def vector(layout, base, number, kind):
        memory = (ctypes.c_uint8 * (layout.n * kind.itemsize)).from_address(layout.vector(base, number))
        return np.frombuffer(memory, kind.numpy)
