"""Validation of a matmul request: one function for each check, in the order that gives the clearest errors.

`MatmulRequest` calls `validate` when it is made. Each check raises BadRequest with the operand, what was given, what
was expected and what to do. No check reads the elements of a tensor or calls a library.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dispatch.checks import MAX_FLOAT, NO_NUMBERS, check_enum, shown
from dispatch.core.operand_checks import MAX_EXTENT, check_extents, check_writable
from dispatch.core.overlap import broadcast, overlap, same_view
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import F32, I8, U8, Compute, Dtype, Epilogue, ScaleMode, member
from dispatch.ops.matmul.checks import check_beta_has_c, check_shape
from dispatch.ops.matmul.scales import (
    AUX_BITS,
    AUX_ELEMENTS,
    FACTORS,
    NO_SCALES,
    Scales,
    aux_shape,
    scale_dtype,
    scale_shape,
)

if TYPE_CHECKING:
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["TENSORS", "validate"]

TENSORS = ("a", "b", "c", "bias", "aux", "bgrad", "out")


def validate(request: MatmulRequest) -> None:
    """Raise BadRequest for a request that no library could run, StaleTensor for operands whose device is gone."""
    _check_kinds(request)
    if request.has_tree:
        from dispatch.ops.matmul import trees

        _check_matrices(request)
        trees.validate(request)
        return
    request.device.check(*(tensor for _, tensor, _ in request.tensors()))
    _check_numbers(request)
    _check_operands(request)
    _check_epilogue(request)
    _check_out(request)
    _check_scales(request)


KINDS = (
    ("scales", Scales),
    ("fast_accum", bool),
    ("autotune", bool),
    ("reduced_precision", bool),
)


def _check_kinds(request: MatmulRequest) -> None:
    """Each field is of its type, and all tensors are of one device."""
    for name in TENSORS:
        tensor = getattr(request, name)
        if not isinstance(tensor, Tensor) and (tensor is not None or name in "ab"):
            raise BadRequest(
                name, f"a {type(tensor).__name__}", "a dispatch Tensor", "use dev.array(x) or from_dlpack(x)"
            )
    if request.operands and not request.has_tree:
        raise BadRequest("operands", shown(request.operands), "none, because the epilogue is not a tree")
    if request.epilogue.__class__ is not Epilogue:
        _check_tree(request.epilogue)
    for name, kind in KINDS:
        value = getattr(request, name)
        if not isinstance(value, kind):
            raise BadRequest(name, shown(value), f"a {kind.__name__}")
    if request.compute is not None and not isinstance(request.compute, Compute):
        check_enum("compute", request.compute, Compute, " or None")
    workspace = request.workspace
    if workspace is not None and (type(workspace) is not int or workspace < 0):
        raise BadRequest("workspace", shown(workspace), "a number of bytes, 0 or more, or None")
    if request.library is not None and type(request.library) is not str:
        raise BadRequest("library", shown(request.library), "the name of a library, such as 'cutlass', or None")
    if request.out_dtype is not None:
        try:
            wanted = Dtype.of(request.out_dtype)
        except TypeError as error:
            raise BadRequest("out_dtype", shown(request.out_dtype), "a dtype", str(error)) from None
        if request.out is not None and wanted is not request.out.dtype:
            raise BadRequest("out_dtype", str(wanted), f"{request.out.dtype}, the dtype of out, or None")
    if request.has_tree:
        return  # trees.validate checks the operands of a tree, after the tree itself
    home = request.a.device
    for name, tensor, _ in request.tensors():
        if tensor.device is not home and tensor.device.alive:
            raise BadRequest(
                name, f"a tensor on {tensor.device!r}", f"one on {home!r}, the device of a", f"move it: {home}.array(x)"
            )


def _check_tree(epilogue: object) -> None:
    from dispatch.libraries.cutlass.evt import Node

    if not isinstance(epilogue, Node):
        check_enum("epilogue", epilogue, Epilogue, ", or a tree of dispatch.evt")


def _check_matrices(request: MatmulRequest) -> None:
    """A and B are matrices whose extents match."""
    a, b = request.a, request.b
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim < 2:
            raise BadRequest(name, str(tensor.layout), "two axes or more", "x[None] and x[:, None] add an axis")
        check_extents(name, tensor)
    if a.shape[-1] != b.shape[-2]:
        raise BadRequest("b", f"{b.layout}", f"{a.shape[-1]} rows, the columns of a {a.layout}", "transpose with .mT")
    try:
        products = math.prod(broadcast(a.shape[:-2], b.shape[:-2]))
    except ValueError:
        raise BadRequest("b", str(b.layout), f"batch axes that broadcast with those of a {a.layout}") from None
    if products > MAX_EXTENT:
        raise BadRequest("a", f"{products} products of {a.layout} and {b.layout}", f"up to {MAX_EXTENT}", "take slices")


def _check_operands(request: MatmulRequest) -> None:
    """A and B are matrices whose extents match, and all matrices have strides that a library can address."""
    _check_matrices(request)
    check_shape("c", request.c, request.shape)
    check_shape("out", request.out, request.shape)
    for name in ("a", "b", "c", "out"):
        tensor = getattr(request, name)
        if tensor is not None:
            _check_steps(name, tensor)


def _check_steps(name: str, tensor: Tensor) -> None:
    """One of the last two axes is dense, the other steps over all of it, and no stride is negative."""
    rows, columns = tensor.shape[-2:]
    down, right = tensor.layout.strides[-2:]
    row_major = (right == 1 or columns <= 1) and (down >= columns or rows <= 1)
    column_major = (down == 1 or rows <= 1) and (right >= rows or columns <= 1)
    if tensor.size and (not (row_major or column_major) or min(tensor.layout.strides[:-2], default=0) < 0):
        raise BadRequest(
            name,
            f"{tensor.layout.dtype}{list(tensor.shape)} with strides {list(tensor.layout.strides)}",
            "dense rows or columns and nonnegative strides",
            "copy it: dev.array(x)",
        )


def _check_epilogue(request: MatmulRequest) -> None:
    """The epilogue has the tensors it needs, of the right shapes, and no others."""
    epilogue = request.plain_epilogue
    if epilogue is Epilogue.NONE and request.bias is request.aux is request.bgrad is None:
        return
    needs = {
        "bias": (epilogue.adds_bias, epilogue.adds_bias),
        "aux": (epilogue.is_gradient, epilogue.is_gradient or epilogue.writes_aux),
        "bgrad": (False, epilogue.writes_bgrad),
    }
    for name, (needed, supported) in needs.items():
        tensor = getattr(request, name)
        if needed and tensor is None:
            raise BadRequest(name, "nothing", f"the tensor that epilogue {epilogue.name} reads", f"pass {name}=…")
        if tensor is not None and not supported:
            takers = ", ".join(e.name for e in Epilogue if _takes(e, name))
            raise BadRequest(
                name,
                str(tensor.layout),
                f"None, because epilogue {epilogue.name} has no {name}",
                f"use one of {takers}",
            )
    if epilogue in (Epilogue.BGRADA, Epilogue.BGRADB) and 0 in request.shape:
        raise BadRequest(
            "epilogue",
            f"{epilogue.name} with an empty D",
            "a D with elements",
            "compute the sum of the operand separately",
        )
    batch = request.batch
    check_shape("bias", request.bias, (request.n,), (*batch, request.n))
    extent = request.m if epilogue is Epilogue.BGRADA else request.n
    check_shape("bgrad", request.bgrad, (*batch, extent))
    for name in ("bias", "bgrad"):
        tensor = getattr(request, name)
        if tensor is not None and tensor.size and tensor.layout.strides[-1] != 1 and tensor.shape[-1] > 1:
            raise BadRequest(name, f"stride {tensor.layout.strides[-1]}", "a dense last axis", "copy it: dev.array(x)")
    if request.aux is not None:
        _check_aux(request, request.aux)


def _takes(epilogue: Epilogue, name: str) -> bool:
    kinds = {
        "bias": epilogue.adds_bias,
        "aux": epilogue.writes_aux or epilogue.is_gradient,
        "bgrad": epilogue.writes_bgrad,
    }
    return kinds[name]


def _check_aux(request: MatmulRequest, aux: Tensor) -> None:
    wanted, _ = aux_shape(request.plain_epilogue, request.shape)
    relu = request.plain_epilogue.activation == "relu"
    hint = "pass aux=None in the forward product, and the aux that it returns here"
    if relu and aux.dtype is not U8:
        raise BadRequest("aux", str(aux.layout), f"u8{list(wanted)}, the bit mask of a ReLU", hint)
    if aux.shape != wanted:
        raise BadRequest("aux", f"shape {aux.shape}", f"shape {wanted}", hint)
    row, step = aux.layout.strides[-2:] if aux.ndim > 1 else (0, 1)
    multiple = AUX_BITS // 8 if relu else AUX_ELEMENTS
    dense = step == 1 or aux.shape[-1] <= 1
    if aux.size and (
        not dense or (row % multiple and aux.shape[-2] > 1) or (row < aux.shape[-1] and aux.shape[-2] > 1)
    ):
        raise BadRequest(
            "aux", f"strides {aux.layout.strides}", f"dense rows a multiple of {multiple} elements apart", hint
        )


def _check_out(request: MatmulRequest) -> None:
    """D has its dtype, and no written tensor overlaps another operand."""
    out = request.out
    check_beta_has_c(request)
    if request.c_is_out and request.c_dtype is not request.d_dtype and out is not None and request.c is None:
        raise BadRequest("c", "nothing", f"a {request.c_dtype} tensor: {out.dtype} cannot be both C and D")
    operands = list(request.tensors())
    for name, tensor, written in operands:
        if not written:
            continue
        check_writable(name, tensor)
        for other_name, other, _ in operands:
            if other_name == name or (name == "out" and other_name == "c" and same_view(tensor, other)):
                continue
            if overlap(tensor, other):
                raise BadRequest(
                    name, f"memory that overlaps {other_name}", "memory of its own", "only c may be out itself"
                )


def _check_numbers(request: MatmulRequest) -> None:
    for name in ("alpha", "beta"):
        value = getattr(request, name)
        if type(value) is float and request.a.dtype is not I8:
            continue
        if isinstance(value, Tensor):
            if value.size != 1:
                raise BadRequest(name, str(value.layout), "a tensor of one element")
            wanted = scale_dtype(request.a.dtype, member(request.compute))
            if value.dtype is not wanted:
                raise BadRequest(
                    name, str(value.layout), f"dtype {wanted}, that of the sums", f"dev.array([x], '{wanted}')"
                )
        elif isinstance(value, NO_NUMBERS) or not isinstance(value, (int, float, complex, np.number)):
            raise BadRequest(name, shown(value), "a number or a tensor of one element")
        elif isinstance(value, int) and abs(value) > MAX_FLOAT:
            raise BadRequest(name, shown(value), "a number in the range of a float")
        elif isinstance(value, (complex, np.complexfloating)) and not request.a.dtype.is_complex:
            raise BadRequest(name, shown(value), f"a real number, because a is {request.a.dtype}")
        elif request.a.dtype is I8 and not (abs(value) <= MAX_EXTENT and float(value.real).is_integer()):
            raise BadRequest(name, shown(value), "a whole number of 32 bits, because i8 products are integers")


def _check_scales(request: MatmulRequest) -> None:
    scales = request.scales
    if scales is NO_SCALES:
        return
    for name in ("a_mode", "b_mode"):
        check_enum(f"scales.{name}", getattr(scales, name), ScaleMode)
    for name in FACTORS:
        _check_factor(request, name)
    if scales.aux is not None and not (request.plain_epilogue.writes_aux or request.plain_epilogue.is_gradient):
        raise BadRequest("scales.aux", "a factor", f"None, because epilogue {request.plain_epilogue.name} has no aux")
    for name in ("amax_d", "amax_aux"):
        amax = getattr(scales, name)
        if amax is not None and (not isinstance(amax, Tensor) or amax.dtype is not F32 or amax.size != 1):
            amax_text = str(amax.layout) if isinstance(amax, Tensor) else type(amax).__name__
            raise BadRequest(f"scales.{name}", amax_text, "an f32 tensor of one element")


def _check_factor(request: MatmulRequest, name: str) -> None:
    factor = getattr(request.scales, name)
    operand = f"scales.{name}"
    if factor is None:
        return
    mode = getattr(request.scales, f"{name}_mode", ScaleMode.SCALAR_32F)
    if not isinstance(factor, Tensor):
        if isinstance(factor, NO_NUMBERS) or not isinstance(factor, (int, float, np.integer, np.floating)):
            raise BadRequest(operand, shown(factor), "a number above 0, or a tensor")
        if not 0 < factor < math.inf:
            raise BadRequest(operand, shown(factor), "a finite number above 0")
        if mode is not ScaleMode.SCALAR_32F:
            raise BadRequest(operand, shown(factor), f"a tensor, for mode {mode.name}", "use SCALAR_32F for a number")
        return
    dtype, shape = scale_shape(mode, request.m if name == "a" else request.n, request.k)
    if factor.dtype is not dtype:
        raise BadRequest(operand, str(factor.layout), f"dtype {dtype} for mode {mode.name}")
    if factor.size != 1 if shape == () else factor.shape != shape:
        raise BadRequest(operand, f"shape {factor.shape}", f"shape {shape or '(1,)'} for mode {mode.name}")
    if not factor.layout.is_contiguous:
        raise BadRequest(operand, f"strides {factor.layout.strides}", "a dense tensor", "copy it: dev.array(x)")
