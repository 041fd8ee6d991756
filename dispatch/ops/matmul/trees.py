"""A MatmulRequest as an epilogue tree, the form that CUTLASS's kernels are made from.

`TreeForm` is that view of any request: of one with an epilogue tree, which only CUTLASS can run, and of a plain one,
whose Epilogue it writes as a tree. `prepare` goes the other way: it replaces a tree by the Epilogue it is equal to, if
there is one. `validate` checks requests with a tree. This file calls no library.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from cudabind._cached import cached_property
from dispatch.checks import check_number
from dispatch.core.operands import Output
from dispatch.core.overlap import overlap, same_view
from dispatch.core.request import NamedArguments
from dispatch.device.layout import c_strides
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F32, HALF, I8, I32, Dtype, Epilogue
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.evt import Binary, Node, Reduce, Store, Unary, linear_combination, walk
from dispatch.libraries.cutlass.evt_operands import (
    EpilogueTreeMixin,
    OperandValue,
    check_tree,
    numbers_of,
    pairs_of,
    reads_the_source,
)
from dispatch.ops.matmul.checks import check_beta_has_c, check_shape
from dispatch.ops.matmul.scales import FACTORS_AND_AMAX

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands, Use
    from dispatch.keys import Compute
    from dispatch.libraries.cutlass.config import Config

__all__ = ["TreeForm", "prepare", "validate"]

Shape = tuple[int, ...]
MATRICES = ("a", "b", "c", "out")
IN_PLACE = frozenset({("out", "c")})
# The function of a tree that each Epilogue applies; cuBLASLt's GELU is the tanh approximation.
EPILOGUE_FUNCTIONS = {
    Epilogue.NONE: "",
    Epilogue.BIAS: "",
    Epilogue.RELU: "relu",
    Epilogue.RELU_BIAS: "relu",
    Epilogue.GELU: "gelu_tanh",
    Epilogue.GELU_BIAS: "gelu_tanh",
}
# In the order of `MatmulRequest.arguments`; kernels ignore those that no tree names.
PLAIN_ARGUMENTS = ("a", "b", "c", "bias", "aux", "bgrad", "out", "alpha", "beta")
NOT_WITH_TREE = ("aux", "bgrad", "workspace")  # fields that must be None with a tree


class TreeForm(EpilogueTreeMixin):
    """A MatmulRequest as CUTLASS sees it: D = tree(A · B, C, operands), with at most one batch axis.

    It has those fields of the request, under their names, that mean the same for a kernel.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.has_tree: bool = request.has_tree
        self.a: Tensor = request.a
        self.b: Tensor = request.b
        self.out: Tensor | None = request.out
        self.epilogue: Any = request.epilogue
        self.c: Tensor | None = request.c
        if request.c is None and request.has_beta and self._may_read_source:
            self.c = request.out
        if not request.has_tree and not request.has_beta:  # then nothing reads C
            self.c = None
        self.alpha, self.beta, self.operands = request.alpha, request.beta, request.operands
        if request.bias is not None:
            self.operands = (*self.operands, ("bias", request.bias))
        self.compute: Compute | None = request.compute
        self.config: Config | None = request.config
        self.fast_accum: bool = request.fast_accum
        self.m: int = request.m
        self.n: int = request.n
        self.k: int = request.k
        self.batch: Shape = request.batch
        self.shape: Shape = request.shape
        self.d_dtype: Dtype = request.d_dtype

    @cached_property
    def tree(self) -> Node:
        epilogue: Node | Epilogue = self.epilogue
        if not isinstance(epilogue, Epilogue):
            return epilogue
        tree: Node = linear_combination(with_source=self.c is not None)
        if epilogue.adds_bias:
            tree = tree + evt.row("bias")
        function = EPILOGUE_FUNCTIONS[epilogue]
        return Unary(function, tree) if function else tree

    @property
    def _may_read_source(self) -> bool:
        """Whether C is read if there is one: always, except by a tree without a source."""
        return not isinstance(self.epilogue, Node) or reads_the_source(self.epilogue)

    @property
    def c_is_out(self) -> bool:
        """Whether D is also C."""
        return self.c is not None and self.c is self.out

    @property
    def adds_out(self) -> bool:
        """Whether D is also C because there is a beta, but no c."""
        return self.c is not None and self.request.c is None

    @property
    def is_linear(self) -> bool:
        """Whether the result is alpha · A · B + beta · C."""
        return self.tree in LINEAR

    @property
    def batches(self) -> int:
        """The number of products in the batch."""
        return prod(self.batch)

    @property
    def c_dtype(self) -> Dtype:
        """The dtype of C; without a C, the one of the row: D's, or a 16-bit dtype for an fp8 D."""
        if self.c is not None:
            return self.c.dtype
        if self.d_dtype.bits > 8 or self.a.dtype is I8:
            return self.d_dtype
        return self.a.dtype if self.a.dtype in HALF else BF16

    @cached_property
    def tree_outputs(self) -> dict[str, Output]:
        """The outputs that the tree names, with the shapes and strides in which they are allocated."""
        shapes = {"m": (*self.batch, self.n), "n": (*self.batch, self.m), "mn": self.batch}
        outputs: dict[str, Output] = {}
        for node in walk(self.tree):
            if isinstance(node, Store):
                outputs[node.name] = padded(self.shape, node.dtype or self.d_dtype)
            elif isinstance(node, Reduce):
                outputs[node.name] = Output(shapes[node.over], c_strides(shapes[node.over]), F32)
        return outputs

    @cached_property
    def invalid_i32_scalars(self) -> tuple[str, ...]:
        """The scalars of a tree with an i32 D whose numbers are not whole or do not fit in i32."""
        if self.d_dtype is not I32:
            return ()
        numbers = {name: float(x) for name, x in self.operand_values.items() if not isinstance(x, Tensor)}
        return tuple(name for name, x in numbers.items() if not (x.is_integer() and -(2**31) <= x < 2**31))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the request's arguments, in their order; "" for those that a kernel does not use."""
        if self.has_tree:
            return (*MATRICES, *self.kinds)
        return (*PLAIN_ARGUMENTS, *("",) * len(self.request.scale_arguments()))

    def unallocated(self) -> dict[str, tuple[Shape, Shape, Dtype]]:
        """The outputs that the request does not give."""
        if not self.has_tree:
            outputs: dict[str, tuple[Shape, Shape, Dtype]] = self.request.unallocated()
            return outputs
        wanted = {} if self.out is not None else {"out": padded(self.shape, self.d_dtype)}
        wanted |= {name: output for name, output in self.tree_outputs.items() if name not in self.operand_values}
        return {name: (output.shape, output.strides, output.dtype) for name, output in wanted.items()}

    # -- the contract of Request, for requests with a tree --------------------------------------------------------
    def key(self) -> tuple[Any, ...]:
        layouts = tuple(None if t is None else t.layout for t in (self.a, self.b, self.c, self.out))
        operand_layouts = tuple(
            (name, x.layout if isinstance(x, Tensor) else None) for name, x in self.operand_values.items()
        )
        request = self.request
        choices = (self.tree, self.compute, self.d_dtype.cuda, self.fast_accum, self.config, request.library)
        # Numbers are not part of the key, except those that a row refuses: they must not find another request's plan.
        return (*layouts, operand_layouts, *choices, request.autotune, self.invalid_i32_scalars)

    def named_arguments(self) -> NamedArguments:
        # Rows may refuse numbers of an i32 D; they are part of the key.
        fixed_scalars = ("beta",) if self.adds_out else ()  # with another beta, `out` may not be read
        numbers = {} if self.d_dtype is I32 else numbers_of(self.kinds, fixed_scalars)
        matrices = ("a", "b", "out" if self.adds_out else "c", "out")
        return NamedArguments((*matrices, *self.kinds), numbers, IN_PLACE)

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        c = 0 if self.c is None else self.c.ptr
        pointers = (self.a.ptr, self.b.ptr, c, outputs.get("out", self.out).ptr)  # type: ignore[union-attr]
        named = {**self.operand_values, **outputs}
        # Addresses are ints and numbers are floats, so that a plan can distinguish them. -0.0 becomes 0.0.
        tree_arguments = (
            x.ptr if isinstance(x, Tensor) else float(x) + 0.0 for x in (named[name] for name in self.kinds)
        )
        return (*pointers, *tree_arguments)

    def tensors(self) -> tuple[Use, ...]:
        named = [(name, getattr(self.request, name), name == "out") for name in MATRICES]
        named += [(name, x, name in self.tree_outputs) for name, x in self.operand_values.items()]
        return tuple((name, x, written) for name, x, written in named if isinstance(x, Tensor))

    def result(self, outputs: Operands) -> Any:
        extra = tuple(self.operand_values.get(name, outputs.get(name)) for name in self.tree_outputs)
        out = outputs.get("out", self.out)
        return (out, *extra) if extra else out

    def replaced(self, operands: dict[str, Tensor]) -> dict[str, Any]:
        """The fields of the request with other operands, by the names of the request and of the tree."""
        fields = (*MATRICES, "alpha", "beta", *(("bias",) if self.request.bias is not None else ()))
        matrices: dict[str, Any] = {name: x for name, x in operands.items() if name in fields}
        named = {name: x for name, x in operands.items() if name not in matrices}
        for name in named:
            if name not in self.kinds:
                names = ", ".join((*MATRICES, *self.kinds))
                raise BadRequest(name, "a name that is not an operand of this request", f"one of {names}")
        return {**matrices, "operands": {**dict(self.request.operands), **named}}

    def describe(self) -> str:
        request = self.request
        choices = {name: getattr(request, name) for name in ("compute", "config", "library")}
        words = [f"{name}={getattr(value, 'name', value)}" for name, value in choices.items() if value is not None]
        words += [name for name in ("fast_accum", "autotune") if getattr(request, name)]
        c = "" if self.c is None else f" + {self.c.layout}"
        text = f"matmul {self.a.layout} x {self.b.layout}{c} -> {self.d_dtype}, epilogue {self.tree}"
        return ", ".join([text, *words])


LINEAR = (linear_combination(with_source=False), linear_combination(with_source=True))


def padded(shape: Shape, dtype: Dtype) -> Output:
    """A matrix to be allocated in C order, with rows at multiples of 16 bytes, as tensor maps need them."""
    if len(shape) < 2 or dtype.bits == 0:
        return Output(shape, c_strides(shape), dtype)
    step = 128 // dtype.bits
    pitch = -(-shape[-1] // step) * step
    return Output(shape, (*(s * pitch for s in c_strides(shape[:-1])), 1), dtype)


def prepare(request: Any) -> None:
    """Store a request's operands as pairs, and replace a tree by the Epilogue that it is equal to, if there is one."""
    object.__setattr__(request, "operands", pairs_of(request.operands))
    tree = request.epilogue
    if not isinstance(tree, Node) or request.asks_for_cutlass:
        return
    with_source = request.c is not None or (request.out is not None and request.has_beta)
    epilogue = _equal_epilogue(tree, request.alpha, with_source=with_source)
    operands = dict(request.operands)
    if epilogue is None or operands.keys() != ({"bias"} if epilogue.adds_bias else set()) or request.bias is not None:
        return
    object.__setattr__(request, "epilogue", epilogue)
    object.__setattr__(request, "bias", operands.get("bias"))
    object.__setattr__(request, "operands", ())


def _equal_epilogue(tree: Node, alpha: OperandValue, *, with_source: bool) -> Epilogue | None:
    """The Epilogue that a tree is equal to, with its bias called "bias"; None where there is none.

    A tree that does not read the request's alpha or C is equal to no Epilogue, because an Epilogue always reads them.
    """
    function, biased = "", False
    if isinstance(tree, Unary):
        function, tree = tree.function, tree.x
    if isinstance(tree, Binary) and tree.function == "add" and tree.y == evt.row("bias"):
        biased, tree = True, tree.x
    plain = tree == evt.accumulator() and not isinstance(alpha, Tensor) and alpha == 1
    if tree != LINEAR[with_source] and not (plain and not with_source):
        return None
    return next((e for e, name in EPILOGUE_FUNCTIONS.items() if name == function and e.adds_bias == biased), None)


# -- checks -----------------------------------------------------------------------------------------------------------
def validate(request: Any) -> None:
    """Raise BadRequest for a request with a tree that no kernel could run; A and B were checked before."""
    _check_fields(request)
    for name in ("alpha", "beta"):
        value = getattr(request, name)
        if not isinstance(value, Tensor):
            check_number(name, value)
    check_beta_has_c(request)
    form: TreeForm = request.form
    form.check_names()
    form.check_reads("c", request.c)
    form.check_scalars(request.a.dtype)
    _check_shapes(form)
    _check_memory(form)


def _check_fields(request: Any) -> None:
    """Only the tree says what is fused; the fields of plain epilogues are not given."""
    check_tree(request.epilogue if isinstance(request.epilogue, Node) else None, request.config)
    for name in NOT_WITH_TREE:
        if getattr(request, name) is not None:
            raise BadRequest(
                name,
                "a value",
                "None, because CUTLASS kernels have no such limit",
                "use evt.store and evt.reduce in the tree",
            )
    if request.reduced_precision:
        raise BadRequest("reduced_precision", "True", "False, because a tree is computed in f32 and rounded at its end")
    if any(getattr(request.scales, name) is not None for name in FACTORS_AND_AMAX):
        hint = "in the tree, multiply by evt.scalar, evt.row or evt.col"
        raise BadRequest("scales", "factors", "None, because CUTLASS kernels have no scales", hint)
    epilogue = request.epilogue
    if isinstance(epilogue, Epilogue) and epilogue not in EPILOGUE_FUNCTIONS:
        names = ", ".join(one.name for one in EPILOGUE_FUNCTIONS)
        raise BadRequest("epilogue", epilogue.name, f"{names} or a tree, for which CUTLASS has kernels")
    if request.bias is not None and not (isinstance(epilogue, Epilogue) and epilogue.adds_bias):
        raise BadRequest(
            "bias", str(request.bias.layout), "None", "add evt.row('bias') in the tree, and pass it in operands"
        )


def _check_shapes(form: TreeForm) -> None:
    m, n, batch = form.m, form.n, form.batch
    shapes = {
        "row": ((n,), (*batch, n)),
        "col": ((m,), (*batch, m)),
        "load": ((m, n), form.shape),
    }
    wanted: dict[str, tuple[Shape, ...]] = {"c": ((m, n), form.shape), "out": (form.shape,)}
    wanted |= {name: shapes[kind] for name, kind in form.kinds.items() if kind in shapes}
    wanted |= {name: (output.shape,) for name, output in form.tree_outputs.items()}
    for name, tensor, _ in form.tensors():
        if form.kinds.get(name) == "scalar" and tensor.size != 1:
            raise BadRequest(name, str(tensor.layout), "a number, or a tensor of one element")
        if name in wanted:
            check_shape(name, tensor, *wanted[name])
        if name in form.tree_outputs and tensor.dtype is not form.tree_outputs[name].dtype:
            raise BadRequest(
                name, str(tensor.layout), f"dtype {form.tree_outputs[name].dtype}, as the epilogue specifies"
            )


def _check_memory(form: TreeForm) -> None:
    """All tensors are of one device that is alive, and no written tensor overlaps another operand."""
    uses = form.tensors()
    home = form.a.device
    home.check(*(tensor for _, tensor, _ in uses))
    for name, tensor, written in uses:
        if tensor.device is not home:
            raise BadRequest(name, f"a tensor on {tensor.device!r}", f"one on {home!r}, the device of a")
        if not written:
            continue
        if tensor.layout.readonly or tensor.layout.meets_itself:
            raise BadRequest(name, str(tensor.layout), "writable memory, with a different address for each element")
        for other_name, other, _ in uses:
            same = name == "out" and other_name == "c" and same_view(tensor, other)
            if other_name != name and not same and overlap(tensor, other):
                raise BadRequest(
                    name, f"memory that overlaps {other_name}", "memory of its own", "only c may be out itself"
                )
