"""The plan of a product with a CUTLASS kernel for sm_90a: the kernel's spec, parameters, staging and reductions.

`plan` serves the table's rows of CUTLASS for Hopper. Everything but addresses and numbers is prepared when a plan is
made; a run writes the parameters on the host and launches.
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
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.ops.matmul.trees import TreeForm

__all__ = ["CutlassPlan", "chosen", "compiled", "fixed_words", "plan", "spec_of", "staged"]

BYTES_K = 128  # bytes of a tile along k: one line of the 128-byte swizzle


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: choose the kernel, compile or load it, prepare its parameters."""
    return CutlassPlan(request, executor, row, chosen(request.form, executor))


def chosen(form: TreeForm, executor: CudaExecutor) -> Config:
    """The configuration of a request: the given one, or the one that suits its extents."""
    return choose(form.m, form.n, form.k, form.batches, multiprocessors(executor), form.config)


def compiled(form: TreeForm, row: Row, config: Config) -> tuple[Source, str, Future[bytes]]:
    """The source of a request's kernel, its id and its future cubin."""
    spec = spec_of(form, Arch(90), config)
    source = emit(spec)
    future = compiler.request(source, spec.target, f"{row.name} {config.kernel}: {form.tree}")
    return source, compiler.kernel_id(source, spec.target), future


def spec_of(form: TreeForm, arch: Arch, config: Config) -> GemmSpec:
    """The spec of the kernel for a form."""
    # Outputs that are allocated for the request are row-major.
    orders = [order_of(t) if t is not None else "row" for t in (form.a, form.b, form.c, form.out)]
    return GemmSpec(
        arch=arch,
        a=form.a.dtype,
        b=form.b.dtype,
        c=None if form.c is None else form.c.dtype,
        d=form.d_dtype,
        orders=(orders[0], orders[1], orders[2], orders[3]),
        tile=(*config.tile, BYTES_K * 8 // form.a.dtype.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        scheduler=config.scheduler,
        epilogue=form.tree,
        operands=tuple(operands_of(form).items()),
        tf32=form.compute is Compute.COMPUTE_32F_FAST_TF32,
        fast_accumulation=form.fast_accum,
    )


def operands_of(form: TreeForm) -> dict[str, Operand]:
    """Kind, dtype and order of each operand that the tree names, for its visitor."""
    operands = {}
    for name, kind in form.kinds.items():
        operand = form.operand_values.get(name)
        if kind in ("store", "reduce"):
            dtype = form.tree_outputs[name].dtype
        else:
            number = I32 if form.d_dtype is I32 else F32
            dtype = operand.dtype if isinstance(operand, Tensor) else number
        is_matrix = kind in ("load", "store") and isinstance(operand, Tensor)
        operands[name] = Operand(kind, dtype, order_of(operand) if is_matrix else "row")  # type: ignore[arg-type]
    return operands


class CutlassPlan(TreePlan):
    """The launch of one kernel for one set of layouts."""

    __slots__ = ("config", "kernel", "spec")

    def __init__(self, request: MatmulRequest, executor: CudaExecutor, row: Row, config: Config) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        self.config = config
        form = request.form
        self.spec = spec_of(form, Arch(90), config)
        source, self.kernel, future = compiled(form, row, config)
        loaded = module(executor.device, self.kernel, future.result(), source.words)
        self._number = whole_bits if form.d_dtype is I32 else float_bits
        self._names = form.names
        self._values = fixed_words(form, multiprocessors(executor))
        self._values |= {"swizzle": config.swizzle, "raster": RASTERS.index(config.raster)}
        self._staged = staged(form, executor)
        self._values |= self._staged.words
        self._launch = Launch(loaded, executor, self._values, config.cluster)
        reduced = (node.name for node in walk(form.tree) if isinstance(node, Reduce))
        sizes = {name: prod(form.tree_outputs[name].shape) for name in reduced}
        self._reduce(form.tree, sizes, {"m": form.m, "n": form.n, "mn": form.m * form.n})


def staged(form: TreeForm, executor: CudaExecutor) -> Staged:
    """Staging memory for those given outputs that the kernel's tensor map would write beyond."""
    outputs = {"out": form.out} | {
        name: form.operand_values.get(name) for name, kind in form.kinds.items() if kind == "store"
    }
    return Staged(executor, {name: Lines.of(x, order_of(x)) for name, x in outputs.items() if isinstance(x, Tensor)})


def fixed_words(form: TreeForm, processors: int) -> dict[str, int]:
    """The parameter words that are the same in every run; 1 stands for an address that is given."""
    values = {
        "m": form.m,
        "n": form.n,
        "k": form.k,
        "batches": form.batches,
        "multiprocessors": processors,
    }
    missing = form.unallocated()
    for name in ("a", "b", "c", "out", *form.kinds):
        operand: Any = getattr(form, name) if name in ("a", "b", "c", "out") else form.operand_values.get(name)
        if name in missing:
            shape, strides, _ = missing[name]
        elif isinstance(operand, Tensor):
            shape, strides = operand.shape, operand.layout.strides
        else:
            continue
        values[name] = 1
        kind = form.kinds.get(name, "matrix")
        axes = {"row": 1, "col": 1, "scalar": 0, "reduce": len(shape) - len(form.batch)}.get(kind, 2)
        values[f"{name}.batch"] = strides[0] if len(shape) > axes and kind != "scalar" and shape[0] > 1 else 0
        if axes == 2:
            values[f"{name}.pitch"] = pitch(shape, strides)
    return values
