"""The function `einsum`: it takes operands one by one, as in NumPy, or in a list, and uses a cache of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.unknown_arguments import MISSING_ARGUMENT, refuse_arguments

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute

__all__ = ["einsum", "spec_and_operands"]

call_cache = ListCallCache(EinsumRequest)


class Einsum(Protocol):
    """The parameters of `einsum`."""

    def __call__(
        self,
        spec: Any,
        *operands: Any,
        conj: tuple[int, ...] = (),
        optimize: Any = "auto",
        memory_limit: int | None = None,
        compute: Compute | str | None = None,
        library: str | None = None,
        autotune: bool = False,
        jit: bool = False,
        order: str = "K",
        out: Any = None,
    ) -> Tensor: ...


def spec_and_operands(spec: Any, operands: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A spec and its operands, in one of NumPy's two forms: operands one by one, or each with the list of its modes."""
    if spec is None:
        raise BadRequest("spec", "None", 'a spec such as "ij,jk->ik", or operands each followed by its modes')
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)) and isinstance(spec, (str, list, tuple)):
        return spec, tuple(operands[0])
    if isinstance(spec, (str, list, tuple)):
        return spec, operands
    arguments = (spec, *operands)
    if len(arguments) < 2:
        raise BadRequest("operands", "nothing", "a spec and operands, or operands each followed by its modes")
    tensors, modes = arguments[: len(arguments) // 2 * 2 : 2], list(arguments[1::2])
    if len(arguments) % 2:
        return [*modes, arguments[-1]], tensors
    from dispatch.ops.contraction.modes import mode_letters

    letters: dict[Any, str] = {}
    try:
        for mode in sorted({mode for term in modes for mode in term if mode is not Ellipsis}):
            mode_letters([mode], letters)  # so that the letters follow the order of their numbers
        return ",".join(mode_letters(term, letters) for term in modes), tensors
    except TypeError:
        raise BadRequest(
            "operands", f"{len(arguments)} arguments", "operands each followed by the list of its modes"
        ) from None


def call(
    spec: Any = MISSING_ARGUMENT,
    operands: Any = MISSING_ARGUMENT,
    *more: Any,
    conj: Any = (),
    optimize: Any = "auto",
    memory_limit: Any = None,
    compute: Any = None,
    library: Any = None,
    autotune: Any = False,
    jit: Any = False,
    order: Any = "K",
    out: Any = None,
    **unknown: Any,
) -> Any:
    """The call by the cache of calls, else by a request."""
    if unknown:
        refuse_arguments("einsum", EinsumRequest, more, unknown)
    if spec is MISSING_ARGUMENT or operands is MISSING_ARGUMENT:
        raise TypeError("einsum() takes a spec and operands, as in einsum('ij->ji', a): see help(dispatch.einsum)")
    if type(spec) is str and not isinstance(operands, (list, tuple)):  # as in nearly all calls
        tensors: tuple[Any, ...] = (operands, *more)
    else:
        spec, tensors = spec_and_operands(spec, (operands, *more))
        if isinstance(spec, list):
            spec = tuple(tuple(term) if isinstance(term, list) else term for term in spec)
    if isinstance(optimize, list):
        optimize = tuple(tuple(step) if isinstance(step, list) else step for step in optimize)
    return call_cache(spec, tensors, conj, optimize, memory_limit, compute, library, autotune, jit, order, out)


einsum = cast("Einsum", request_function(EinsumRequest, "einsum", call))
