"""A CutlassGemmRequest carried out by a CUTLASS kernel: its spec, its parameters, and what goes before and behind it.

The table's GPU rows end here, by `plan`. Everything but addresses and numbers is done when a plan is made; a run writes
the parameters on the host and launches.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dispatch.device.tensor import Tensor
from dispatch.keys import F32, I32, Arch, Compute
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.config import RASTERS, choose
from dispatch.libraries.cutlass.emit.sm90_gemm import GemmSpec, emit
from dispatch.libraries.cutlass.evt import Reduce, walk
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.layout import order_of, pitch
from dispatch.libraries.cutlass.plan import TreePlan, float_bits, multiprocessors, whole_bits
from dispatch.libraries.cutlass.staged import Lines, Staged
from dispatch.libraries.cutlass.visitors import Operand

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

__all__ = ["CutlassPlan", "chosen", "compiled", "fixed_words", "plan", "spec_of", "staged"]

BYTES_K = 128  # of a tile along k: a line of the swizzle


def plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: choose the kernel, compile or load it, learn its parameters."""
    if request.autotune and request.config is None:
        from dispatch.ops.cutlass_gemm import tune

        return tune.plan(request, executor, row)
    return CutlassPlan(request, executor, row, chosen(request, executor))


def chosen(request: CutlassGemmRequest, executor: CudaExecutor) -> Config:
    """The configuration of a request: its own, or the one that suits its extents."""
    return choose(request.m, request.n, request.k, request.batches, multiprocessors(executor), request.config)


def compiled(request: CutlassGemmRequest, row: Row, config: Config) -> tuple[Source, str, Future[bytes]]:
    """The source of a request's kernel, its id and its future cubin."""
    spec = spec_of(request, Arch(90), config)
    source = emit(spec)
    future = compiler.request(source, spec.target, f"{row.name} {config.kernel}: {request.tree}")
    return source, compiler.kernel_id(source, spec.target), future


def spec_of(request: CutlassGemmRequest, arch: Arch, config: Config) -> GemmSpec:
    """The kernel of a request."""
    # Outputs that are made for the request have rows.
    orders = [order_of(t) if t is not None else "row" for t in (request.a, request.b, request.c, request.out)]
    return GemmSpec(
        arch=arch,
        a=request.a.dtype,
        b=request.b.dtype,
        c=None if request.c is None else request.c.dtype,
        d=request.d_dtype,
        orders=(orders[0], orders[1], orders[2], orders[3]),
        tile=(*config.tile, BYTES_K * 8 // request.a.dtype.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        scheduler=config.scheduler,
        epilogue=request.tree,
        operands=tuple(operands_of(request).items()),
        tf32=request.compute is Compute.COMPUTE_32F_FAST_TF32,
        fast_accumulation=request.fast_accum,
    )


def operands_of(request: CutlassGemmRequest) -> dict[str, Operand]:
    """What each operand that the tree names is, for its visitor."""
    found = {}
    for name, kind in request.kinds.items():
        given = request.given.get(name)
        if kind in ("store", "reduce"):
            dtype = request.writes[name][1]
        else:
            number = I32 if request.d_dtype is I32 else F32
            dtype = given.dtype if isinstance(given, Tensor) else number
        is_matrix = kind in ("load", "store") and isinstance(given, Tensor)
        found[name] = Operand(kind, dtype, order_of(given) if is_matrix else "row")  # type: ignore[arg-type]
    return found


class CutlassPlan(TreePlan):
    """One kernel for one set of layouts."""

    __slots__ = ("config", "kernel", "spec")

    def __init__(self, request: CutlassGemmRequest, executor: CudaExecutor, row: Row, config: Config) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        self.config = config
        self.spec = spec_of(request, Arch(90), config)
        source, self.kernel, future = compiled(request, row, config)
        loaded = module(executor.device, self.kernel, future.result(), source.words)
        self._number = whole_bits if request.d_dtype is I32 else float_bits
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._values = fixed_words(request, multiprocessors(executor))
        self._values |= {"swizzle": config.swizzle, "raster": RASTERS.index(config.raster)}
        self._staged = staged(request, executor)
        self._values |= self._staged.words
        self._launch = Launch(loaded, executor, self._values, config.cluster)
        reduced = (node.name for node in walk(request.tree) if isinstance(node, Reduce))
        sizes = {name: prod(request.writes[name][0]) for name in reduced}
        self._reduce(request.tree, sizes, {"m": request.m, "n": request.n, "mn": request.m * request.n})


def staged(request: CutlassGemmRequest, executor: CudaExecutor) -> Staged:
    """The memory that the kernel writes for those matrices which the request gives and a tensor map would overrun."""
    given = {"out": request.out} | {
        name: request.given.get(name) for name, kind in request.kinds.items() if kind == "store"
    }
    return Staged(executor, {name: Lines.of(x, order_of(x)) for name, x in given.items() if isinstance(x, Tensor)})


def fixed_words(request: CutlassGemmRequest, processors: int) -> dict[str, int]:
    """The words that do not change from run to run; 1 stands for an address that is there."""
    values = {
        "m": request.m,
        "n": request.n,
        "k": request.k,
        "batches": request.batches,
        "multiprocessors": processors,
    }
    missing = request.unallocated()
    for name in ("a", "b", "c", "out", *request.kinds):
        given: Any = getattr(request, name) if name in ("a", "b", "c", "out") else request.given.get(name)
        if name in missing:
            shape, strides, _ = missing[name]
        elif isinstance(given, Tensor):
            shape, strides = given.shape, given.layout.strides
        else:
            continue
        values[name] = 1
        kind = request.kinds.get(name, "matrix")
        axes = {"row": 1, "col": 1, "scalar": 0, "reduce": len(shape) - len(request.batch)}.get(kind, 2)
        values[f"{name}.batch"] = strides[0] if len(shape) > axes and kind != "scalar" and shape[0] > 1 else 0
        if axes == 2:
            values[f"{name}.pitch"] = pitch(shape, strides)
    return values
