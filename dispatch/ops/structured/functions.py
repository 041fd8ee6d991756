"""Matrices that are half zeros, in a pattern that tensor cores skip: `dispatch.structured`.

Each function is one request, or documents which. They accept tensors, and arrays of torch and CuPy, as requests do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, names_arguments
from dispatch.core.request import run
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.keys import F32, Compute, Dtype
from dispatch.ops import structured as ops
from dispatch.ops.structured.form import ON_HOST, PruneAlgorithm, StructuredForm, dense_step, group_of
from dispatch.ops.structured.layout import unpack
from dispatch.ops.structured.tensor import StructuredTensor

if TYPE_CHECKING:
    from dispatch.device.device import Device

__all__ = ["StructuredForm", "StructuredTensor"]
__all__ += ["compress", "is_structured", "linear", "made_by", "matmul", "prune", "todense"]

BATCH = 3  # axes


@names_arguments
def prune(a: Any, *, algorithm: PruneAlgorithm | str = "strip", out: Any = None) -> Any:
    """The matrix with small elements set to zero: the request `prune_2_4`."""
    return ops.prune_2_4(a, algorithm=algorithm, out=out)


@names_arguments
def is_structured(a: Any) -> bool:
    """Whether a dense matrix can be compressed: the request `check_2_4`; waits for the result."""
    return not int(run(ops.Check24Request(a)).item())


@names_arguments
def compress(a: Any, *, validate: bool = False) -> StructuredTensor:
    """A structured matrix compressed: the request `compress_2_4`; `validate` checks it first, and waits for that."""
    request = ops.Compress24Request(a)
    check_bool("validate", validate)
    if validate and not is_structured(a):
        group, stored = group_of(request.a.dtype)
        raise BadRequest("a", str(request.a.layout), f"at most {stored} of {group} along the columns", "prune(a)")
    return StructuredTensor(run(request), request.form._replace(made_by=made_by(request.device)))


def made_by(device: Device) -> str:
    """The inputs that determine the layout of a device's compressed bytes, for a StructuredForm created by hand."""
    if device.is_host:
        return ON_HOST
    from dispatch.libraries.cusparselt.handle import library_stamp  # at first use: requests load no library

    executor: Any = device.executor()
    return library_stamp(executor)


def as_structured(a: Any, name: str = "a") -> StructuredTensor:
    """A compressed operand; BadType for any other."""
    if not isinstance(a, StructuredTensor):
        raise BadType(name, type_shown(a), "a StructuredTensor", f"compress({name}) makes one")
    return a


def matmul(a: StructuredTensor, b: Any, **choices: Any) -> Any:
    """alpha · A · B of a compressed A, with the epilogues of the request `matmul_2_4`, and its choices."""
    return ops.matmul_2_4(*as_structured(a).parts, b, **choices)


def linear(x: Any, weight: StructuredTensor, bias: Any = None, **choices: Any) -> Any:
    """activation(x · Wᵀ + bias) for x (…, k) and a compressed W (m, k): (…, m), like torch's `linear`.

    It is the transpose of `matmul_2_4` of W and xᵀ, with its choices, and copies nothing; NoRow refers to that request,
    whose b is xᵀ. The number of lines of x is a multiple of 8, 16 for 8-bit elements, 4 for f32, like the columns of B.
    """
    w = as_structured(weight, "weight")
    if w.ndim == BATCH or w.is_transposed:
        raise BadRequest("weight", repr(w), "one matrix (m, k), not transposed")
    shape = getattr(x, "shape", None)
    if not shape:
        shown_x = type_shown(x) if shape is None else "one number, without axes"
        raise BadType("x", shown_x, f"a tensor {w.dtype}[…, {w.shape[-1]}]", "dispatch.device().array(x) makes one")
    lead = tuple(shape[:-1])
    lines = x if len(lead) == 1 else x.reshape(-1, shape[-1])
    try:
        product = ops.matmul_2_4(*w.parts, lines.T, bias=bias, **choices).T
    except BadRequest as error:
        if error.operand == "b":
            raise error_about_x(error, x, w) from error
        raise
    return product if len(lead) == 1 else product.reshape(*lead, w.shape[0])


def error_about_x(error: BadRequest, x: Any, w: StructuredTensor) -> BadRequest:
    """An error about xᵀ, the b of a product W · xᵀ, converted to an error about x."""
    try:
        dtype = Dtype.of(x.dtype)
    except TypeError:  # not an error of this library
        dtype = x.dtype
    actual, k, step = f"{dtype}{list(x.shape)}", w.shape[-1], dense_step(w.dtype)
    if dtype is not w.dtype or x.shape[-1] != k:
        hint = "" if dtype is w.dtype else f"x.astype('{w.dtype}')"
        return BadRequest("x", actual, f"{w.dtype}[…, {k}], because the compressed matrix is {list(w.shape)}", hint)
    lines = math.prod(x.shape[:-1])
    if lines % step:
        wanted = f"a multiple of {step} lines, as dense matrices of {w.dtype} need"
        return BadRequest("x", f"{actual} (lines: {lines})", wanted, "pad it with zeros")
    return error.renamed({"b": "x"})


@names_arguments
def todense(a: StructuredTensor) -> Any:
    """The dense matrix: on the host exactly, on a GPU as the product with the identity, `matmul_2_4`."""
    compressed = as_structured(a)
    if compressed.is_transposed:
        return todense(compressed.mT).mT
    device, k = compressed.device, compressed.shape[-1]
    if device.is_host:
        return device.array(unpack(np.asarray(compressed.data), compressed.form))
    identity = device.array(np.eye(k).astype(compressed.dtype.numpy))  # symmetric: it is column-major as well
    return matmul(compressed, identity.T, out_dtype=compressed.dtype, **compute_choice(compressed))


# -- the operators of a StructuredTensor ------------------------------------------------------------------------------
def compute_choice(a: StructuredTensor) -> dict[str, Any]:
    """The compute type of an operator, which has no such choice: TF32 for f32, the library's only one."""
    return {"compute": Compute.COMPUTE_32F_FAST_TF32} if a.dtype is F32 else {}


def product(a: StructuredTensor, other: Any) -> Any:
    """`a @ other`."""
    if a.is_transposed:
        raise BadRequest(
            "a",
            repr(a),
            "a matrix that is not transposed, because its groups are along k",
            "compress a.T for this product",
        )
    return matmul(a, other, **compute_choice(a))


def left_product(a: StructuredTensor, other: Any) -> Any:
    """`other @ a`, as the transpose of the transposed product."""
    if not a.is_transposed:
        raise BadRequest(
            "b",
            repr(a),
            "a transposed matrix, because its groups are along k",
            "use x @ a.T, or compress b.T to c and use x @ c.T",
        )
    try:
        transposed = matmul(a.mT, other.mT, **compute_choice(a))
    except BadRequest as error:
        if error.operand == "b":
            raise error_about_x(error, other, a.mT) from error
        raise
    return transposed.mT


StructuredTensor.product, StructuredTensor.left_product = staticmethod(product), staticmethod(left_product)
StructuredTensor.densified = staticmethod(todense)
