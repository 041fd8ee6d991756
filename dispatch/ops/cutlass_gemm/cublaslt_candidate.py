"""The same product by cuBLASLt, where it has one: what autotune times beside CUTLASS's kernels.

tune.py asks here. `matmul_of` says how matmul would be asked, `CublasLtCandidate` carries a CutlassGemmRequest out
that way. A tree that cuBLASLt cannot fuse has no such candidate, and nothing here decides which is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import Argument, Plan
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import Epilogue
from dispatch.libraries.cutlass.evt import Binary, Leaf, Node, Unary, accumulator, linear_combination
from dispatch.ops.matmul.request import MatmulRequest

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

__all__ = ["CublasLtCandidate", "arguments_of", "matmul_of", "plan"]

# The activation and whether there is a bias; cuBLASLt's GELU is the one by tanh.
EPILOGUES = {
    ("", False): Epilogue.NONE,
    ("", True): Epilogue.BIAS,
    ("relu", False): Epilogue.RELU,
    ("relu", True): Epilogue.RELU_BIAS,
    ("gelu_tanh", False): Epilogue.GELU,
    ("gelu_tanh", True): Epilogue.GELU_BIAS,
}
PRODUCTS = (accumulator(), linear_combination(with_source=False), linear_combination(with_source=True))


def plan(request: CutlassGemmRequest, executor: CudaExecutor) -> Plan | None:
    """The tuned plan of cuBLASLt; None where it has nothing that does the same."""
    made = request.unallocated().get("out")
    out = request.out if made is None else executor.empty(*made)  # for its layout: a plan keeps no memory of it
    product = matmul_of(request, out)
    if product is None:
        return None
    try:
        return CublasLtCandidate(request, executor.plan(product), bias=_parts(request.tree)[1])
    except (NoRow, BadRequest):  # matmul takes no D by columns with a bias, nor C and D of different orders
        return None


def matmul_of(request: CutlassGemmRequest, out: Tensor | None) -> MatmulRequest | None:
    """The request to matmul that means the same; None where there is none."""
    activation, bias, product = _parts(request.tree)
    if product not in PRODUCTS or (activation, bool(bias)) not in EPILOGUES:
        return None
    with_source = product == PRODUCTS[2]
    vector = request.given.get(bias) if bias else None
    try:
        return MatmulRequest(
            request.a,
            request.b,
            c=request.c if with_source else None,
            bias=vector if isinstance(vector, Tensor) else None,
            out=out,
            epilogue=EPILOGUES[activation, bool(bias)],
            alpha=1.0 if product == PRODUCTS[0] else request.alpha,
            # The plan is for other numbers, too: one without C, which a beta of 0 would give, is for that alone.
            beta=0.0 if not with_source else 1.0 if request.beta == 0 else request.beta,
            compute=request.compute,
            fast_accum=request.fast_accum,
            autotune=True,
        )
    except BadRequest:  # alpha on the device and beta not, or a bias of another dtype
        return None


def _parts(tree: Node) -> tuple[str, str, Node]:
    """The activation at the root, the bias below it by name, and what they are applied to."""
    activation, bias = "", ""
    if isinstance(tree, Unary):
        activation, tree = tree.function, tree.x
    if isinstance(tree, Binary) and tree.function == "add" and isinstance(tree.y, Leaf) and tree.y.kind == "row":
        bias, tree = tree.y.name, tree.x
    return activation, bias, tree


def arguments_of(named: dict[str, Argument], bias: str, *, source: bool) -> tuple[Argument, ...]:
    """The arguments of a MatmulRequest, from those of a CutlassGemmRequest by name."""
    c, beta = (named["c"], named.get("beta", 0.0)) if source else (0, 0.0)
    vector = named[bias] if bias else 0
    return (named["a"], named["b"], c, vector, 0, 0, named["out"], named.get("alpha", 1.0), beta)


class CublasLtCandidate(Plan):
    """A CutlassGemmRequest carried out by matmul's plan; its row says so."""

    __slots__ = ("_bias", "_inner", "_names", "_source")

    def __init__(self, request: CutlassGemmRequest, inner: Plan, bias: str) -> None:
        super().__init__(inner.row, capture_safe=inner.capture_safe)
        self._inner, self._bias = inner, bias
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._source = "beta" in request.kinds

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        named = dict(zip(self._names, arguments, strict=True))
        self._inner.enqueue(arguments_of(named, self._bias, source=self._source))
