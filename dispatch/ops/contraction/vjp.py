"""The gradients of einsum: a request for each operand, a sum of products of the others with the result's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import names_arguments
from dispatch.errors import BadRequest
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.ops.contraction.einsum_call import spec_and_operands
from dispatch.ops.contraction.modes import mode_letter

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute

__all__ = ["einsum_vjp"]

FIRST_ADDED_MODE = 2000  # the number of a mode that no spec has


@names_arguments
def einsum_vjp(
    spec: Any,
    *operands: Any,
    grad: Any,
    conj: tuple[int, ...] = (),
    optimize: str = "auto",
    memory_limit: int | None = None,
    compute: Compute | str | None = None,
    library: str | None = None,
    autotune: bool = False,
    jit: bool = False,
) -> tuple[EinsumRequest, ...]:
    """The requests for the gradients of all operands of `einsum(spec, *operands, conj=conj)`, in their order.

    `dispatch.run(request)` computes one. `grad` is the gradient of the result, of its shape and dtype. For a real loss
    L each is the g with dL = Re Σ conj(g) · dx, as in PyTorch. For an operand of extent 1 along a mode, it is summed
    along that mode; for one with a mode twice, it is 0 outside the diagonal. Raises BadRequest for a grad that does not
    fit, and for real operands among complex ones, whose gradient is a real part.
    """
    spec, operands = spec_and_operands(spec, operands)
    forward = EinsumRequest(spec, operands, conj=conj, optimize=optimize, memory_limit=memory_limit)
    inputs, _ = forward.parsed
    if grad is None:
        raise BadRequest("grad", "None", f"{forward.dtype}{list(forward.shape)}, like the result")
    result_grad = EinsumRequest("...", (grad,)).operands[0]
    if (result_grad.shape, result_grad.dtype) != (forward.shape, forward.dtype):
        raise BadRequest("grad", str(result_grad.layout), f"{forward.dtype}{list(forward.shape)}, like the result")
    requests = []
    for number, modes in enumerate(inputs):
        if forward.dtype.is_complex and not forward.operands[number].dtype.is_complex:
            hint = f"pass operands[{number}].astype('{forward.dtype}'), and take the real part of its gradient"
            raise BadRequest(f"operands[{number}]", str(forward.operands[number].layout), "complex numbers", hint)
        terms, tensors, flags = _product(forward, number, result_grad)
        result, added = _result(forward, number, modes, _full_modes(forward, terms, tensors))
        terms += [mode for mode, _ in added]
        tensors += [one for _, one in added]
        requests.append(
            EinsumRequest(
                f"{','.join(terms)}->{result}", tuple(tensors), conj=flags, optimize=optimize,
                memory_limit=memory_limit, compute=compute, library=library, autotune=autotune, jit=jit,
            )
        )  # fmt: skip
    return tuple(requests)


def _product(forward: EinsumRequest, number: int, grad: Tensor) -> tuple[list[str], list[Tensor], tuple[int, ...]]:
    """The modes and the tensors of all other operands and of the result's gradient, and which are conjugated."""
    inputs, output = forward.parsed
    others = [place for place in range(len(inputs)) if place != number]
    is_conj = number in forward.conj
    flags = [place for place, other in enumerate(others) if (other in forward.conj) == is_conj]
    if is_conj:
        flags.append(len(others))
    if not forward.dtype.is_complex:
        flags = []
    terms = [*(inputs[other] for other in others), output]
    return terms, [*(forward.operands[other] for other in others), grad], tuple(flags)


def _full_modes(forward: EinsumRequest, terms: list[str], tensors: list[Tensor]) -> str:
    """The modes along which a term has the full extent: one of extent 1 does not."""
    pairs = (
        (mode, extent)
        for term, one in zip(terms, tensors, strict=True)
        for mode, extent in zip(term, one.shape, strict=True)
    )
    return "".join({mode for mode, extent in pairs if extent == forward.sizes[mode]})


def _result(forward: EinsumRequest, number: int, modes: str, there: str) -> tuple[str, list[tuple[str, Tensor]]]:
    """The modes of an operand's gradient, and ones along those that no other term has."""
    result, added = "", []
    for axis, mode in enumerate(modes):
        extent = forward.operands[number].shape[axis]
        name = mode
        if extent != forward.sizes[mode]:
            name = mode_letter(FIRST_ADDED_MODE + axis)  # it was repeated along the mode, and is summed along it
        if name not in there and name not in result:
            ones = np.ones(extent, forward.dtype.numpy)
            added.append((name, forward.device.array(ones)))
        result += name
    return result, added
