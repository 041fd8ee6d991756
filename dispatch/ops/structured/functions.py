"""Matrices of which half is 0, in a pattern that tensor cores skip: `dispatch.structured`.

Each function is one request, or says which. They take tensors, and arrays of torch and CuPy, as requests do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.request import run
from dispatch.errors import BadRequest, BadType
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


def prune(a: Any, *, algorithm: PruneAlgorithm | str = "strip", out: Any = None) -> Any:
    """The matrix with zeros where it is to have none: the request `prune_2_4`."""
    return ops.prune_2_4(a, algorithm=algorithm, out=out)


def is_structured(a: Any) -> bool:
    """Whether a dense matrix can be compressed: the request `check_2_4`, which is waited for."""
    return not int(run(ops.Check24Request(a)).item())


def compress(a: Any, *, validate: bool = False) -> StructuredTensor:
    """A structured matrix compressed: the request `compress_2_4`; `validate` sees whether it is, and waits for that."""
    request = ops.Compress24Request(a)
    if validate and not is_structured(a):
        group, kept = group_of(request.a.dtype)
        raise BadRequest("a", str(request.a.layout), f"at most {kept} of {group} along the columns", "prune(a)")
    return StructuredTensor(run(request), request.form._replace(made_by=made_by(request.device)))


def made_by(device: Device) -> str:
    """What decides the layout of a device's compressed bytes, for a StructuredForm that is made by hand."""
    if device.is_host:
        return ON_HOST
    from dispatch.libraries.cusparselt.handle import library_stamp  # at first use: requests bind no library

    executor: Any = device.executor()
    return library_stamp(executor)


def as_structured(a: Any, name: str = "a") -> StructuredTensor:
    """A compressed operand; BadType for any other."""
    if not isinstance(a, StructuredTensor):
        raise BadType(name, f"a {type(a).__name__}", "a StructuredTensor", f"compress({name}) makes one")
    return a


def matmul(a: StructuredTensor, b: Any, **choices: Any) -> Any:
    """alpha · A · B of a compressed A, with the epilogues of the request `matmul_2_4`, whose choices it takes."""
    return ops.matmul_2_4(*as_structured(a).parts, b, **choices)


def linear(x: Any, weight: StructuredTensor, bias: Any = None, **choices: Any) -> Any:
    """activation(x · Wᵀ + bias) for x (…, k) and a compressed W (m, k): (…, m), as torch's `linear` has it.

    It is the transpose of `matmul_2_4` of W and xᵀ, with the choices of that, and copies nothing; NoRow speaks of that
    request, whose b is xᵀ. x has lines as B has columns: a multiple of 8, 16 where elements have 8 bits, 4 in f32.
    """
    w = as_structured(weight, "weight")
    if w.ndim == BATCH or w.is_transposed:
        raise BadRequest("weight", repr(w), "one matrix (m, k), not transposed")
    shape = getattr(x, "shape", None)
    if not shape:
        given = f"a {type(x).__name__}" if shape is None else "one number, without axes"
        raise BadType("x", given, f"a tensor {w.dtype}[…, {w.shape[-1]}]", "dispatch.device().array(x) makes one")
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
    """An error about xᵀ, the b of a product W · xᵀ, as an error about x."""
    try:
        dtype = Dtype.of(x.dtype)
    except TypeError:  # none of ours
        dtype = x.dtype
    given, k, step = f"{dtype}{list(x.shape)}", w.shape[-1], dense_step(w.dtype)
    if dtype is not w.dtype or x.shape[-1] != k:
        hint = "" if dtype is w.dtype else f"x.astype('{w.dtype}')"
        return BadRequest("x", given, f"{w.dtype}[…, {k}], as the compressed matrix is {list(w.shape)}", hint)
    lines = math.prod(x.shape[:-1])
    if lines % step:
        wanted = f"a multiple of {step} lines, as dense matrices of {w.dtype} have"
        return BadRequest("x", f"{given}, with {lines} in all", wanted, "fill it up with zeros")
    return error.renamed({"b": "x"})


def todense(a: StructuredTensor) -> Any:
    """The dense matrix: on the host as it was, on a GPU as the product with the identity, `matmul_2_4`."""
    found = as_structured(a)
    if found.is_transposed:
        return todense(found.mT).mT
    device, k = found.device, found.shape[-1]
    if device.is_host:
        return device.array(unpack(np.asarray(found.data), found.form))
    identity = device.array(np.eye(k).astype(found.dtype.numpy))  # symmetric: it is column-major as well
    return matmul(found, identity.T, out_dtype=found.dtype, **compute_choice(found))


# -- what a StructuredTensor asks for ---------------------------------------------------------------------------------
def compute_choice(a: StructuredTensor) -> dict[str, Any]:
    """The compute type of an operator, which has none of its own: TF32 for f32, for the library has no other."""
    return {"compute": Compute.COMPUTE_32F_FAST_TF32} if a.dtype is F32 else {}


def product(a: StructuredTensor, other: Any) -> Any:
    """`a @ other`."""
    if a.is_transposed:
        raise BadRequest("a", repr(a), "one that is not transposed: its groups lie along k", "compress a.T as well")
    return matmul(a, other, **compute_choice(a))


def left_product(a: StructuredTensor, other: Any) -> Any:
    """`other @ a`, as the transpose of the transposed product."""
    if not a.is_transposed:
        raise BadRequest("b", repr(a), "a transposed one: its groups lie along k", "x @ a.T; or compress b.T: x @ c.T")
    try:
        found = matmul(a.mT, other.mT, **compute_choice(a))
    except BadRequest as error:
        if error.operand == "b":
            raise error_about_x(error, other, a.mT) from error
        raise
    return found.mT


StructuredTensor.product, StructuredTensor.left_product = staticmethod(product), staticmethod(left_product)
StructuredTensor.densified = staticmethod(todense)
