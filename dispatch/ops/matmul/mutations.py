"""Wrong products that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.device.tensor import Tensor
from dispatch.keys import Epilogue, ScaleMode
from dispatch.ops.matmul.reference import Results, reference
from dispatch.testing.mutations import changed, host_array, typical

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["MUTATIONS", "named"]

FEW = 16  # elements


def named(request: MatmulRequest, result: Any) -> dict[str, Tensor]:
    """The outputs by the names of their results."""
    given = list(result) if isinstance(result, tuple) else [result]
    names = ["out"]
    names += ["aux"] if request.epilogue.writes_aux else []
    names += ["bgrad"] if request.epilogue.writes_bgrad else []
    outputs = dict(zip(names, given, strict=True))
    for name in ("amax_d", "amax_aux"):
        tensor = getattr(request.scales, name)
        if tensor is not None and (name == "amax_d" or "aux" in outputs):
            outputs[name] = tensor
    return outputs


def _values(tensor: Tensor) -> Array:
    return np.asarray(tensor).astype(np.complex128 if tensor.dtype.is_complex else np.float64)


def without_k(request: MatmulRequest, columns: slice | int) -> Results | None:
    """The results without some of k."""
    if request.k == 0 or 0 in request.shape:
        return None
    values = np.asarray(request.a).copy()
    values[..., columns] = 0
    return reference(replace(request, a=host_array(request.a, values)))


def one_k(request: MatmulRequest) -> Results | None:
    """One k left out, whose share is a typical one."""
    if request.k == 0 or 0 in request.shape:
        return None
    lines = (np.abs(_values(tensor)).reshape(-1, request.k) for tensor in (request.a, request.b.mT))
    shares = np.prod([sizes.mean(axis=0) for sizes in lines], axis=0)
    return without_k(request, typical(shares))


def half_of_k(request: MatmulRequest) -> Results | None:
    """A product over half of k."""
    return without_k(request, slice(request.k // 2, None))


def alpha(request: MatmulRequest) -> Results | None:
    """alpha 2% too large; of whole numbers, one more. One element alone may be its bias and C above all."""
    if np.prod(request.shape) < FEW:
        return None
    value = _by_value(request.alpha)
    wrong = value + 1 if request.a.dtype.numpy.kind == "i" else value * 1.02
    return reference(replace(request, alpha=wrong, beta=_by_value(request.beta)))


def alpha_doubled(request: MatmulRequest) -> Results | None:
    """alpha twice what it is."""
    return reference(replace(request, alpha=2 * _by_value(request.alpha), beta=_by_value(request.beta)))


def _by_value(number: Any) -> Any:
    return np.asarray(number).reshape(())[()].item() if isinstance(number, Tensor) else number


def beta(request: MatmulRequest) -> Results | None:
    """C left out."""
    if not request.has_beta:
        return None
    return reference(replace(request, alpha=_by_value(request.alpha), beta=0.0))


def bias(request: MatmulRequest) -> Results | None:
    """The bias left out."""
    if request.bias is None:
        return None
    return reference(replace(request, bias=host_array(request.bias, np.zeros(request.bias.shape))))


def bias_beside(request: MatmulRequest) -> Results | None:
    """Each column with its neighbour's bias."""
    if request.bias is None:
        return None
    return reference(replace(request, bias=host_array(request.bias, np.roll(np.asarray(request.bias), 1, axis=-1))))


def bias_of_first(request: MatmulRequest) -> Results | None:
    """All batches with the first one's bias."""
    if request.bias is None or request.bias.ndim < 2:
        return None
    values = np.asarray(request.bias)
    first = values[(0,) * (values.ndim - 1)]
    return reference(replace(request, bias=host_array(request.bias, np.broadcast_to(first, values.shape))))


def activation(request: MatmulRequest) -> Results | None:
    """The activation left out: everything else as it is. One element alone may be far beyond where it bends."""
    if not request.epilogue.activation or request.epilogue.is_gradient or np.prod(request.shape) < FEW:
        return None
    plain = Epilogue.BIAS if request.epilogue.adds_bias else Epilogue.NONE
    return {"out": reference(_bare(request, plain))["out"]}


def _bare(request: MatmulRequest, epilogue: Epilogue) -> MatmulRequest:
    """The request with another epilogue, that has neither aux nor bias gradient."""
    scales = replace(request.scales, aux=None, amax_aux=None)
    return replace(request, epilogue=epilogue, aux=None, bgrad=None, scales=scales)


def gradient(request: MatmulRequest) -> Results | None:
    """The gradient of the activation left out, and with it from what the bias gradient is summed."""
    if not request.epilogue.is_gradient:
        return None
    return {"out": reference(_bare(request, Epilogue.NONE))["out"]}


def aux_of_neighbour(request: MatmulRequest) -> Results | None:
    """One row with the aux of the row beside it."""
    if not request.epilogue.is_gradient or request.aux is None or request.m < 2:
        return None
    values = np.asarray(request.aux).copy()
    row = request.m // 2
    values[..., row - 1, :] = values[..., row, :]
    return reference(replace(request, aux=changed(request.aux, values)))


def aux_of_first(request: MatmulRequest) -> Results | None:
    """All batches with the first one's aux."""
    if not request.epilogue.is_gradient or request.aux is None or not request.batch:
        return None
    values = np.asarray(request.aux)
    first = values[(0,) * len(request.batch)]
    return reference(replace(request, aux=changed(request.aux, np.broadcast_to(first, values.shape))))


def bgrad_summed(request: MatmulRequest) -> Results | None:
    """A bias gradient summed over the batches."""
    if not request.epilogue.writes_bgrad or not request.batch:
        return None
    right = reference(request)["bgrad"]
    axes = tuple(range(len(request.batch)))
    return {"bgrad": np.broadcast_to(right.sum(axis=axes, keepdims=True), right.shape)}


def bgrad_short(request: MatmulRequest) -> Results | None:
    """A bias gradient without one of the terms it is the sum of."""
    epilogue = request.epilogue
    if not epilogue.writes_bgrad:
        return None
    if epilogue in (Epilogue.BGRADA, Epilogue.BGRADB):
        terms = _values(request.a) if epilogue is Epilogue.BGRADA else _values(request.b.mT)
        terms = np.broadcast_to(terms, (*request.batch, *terms.shape[-2:]))
    else:
        terms = np.swapaxes(reference(replace(request, scales=type(request.scales)()))["out"], -1, -2)
    if not terms.size:
        return None
    left_out = typical(np.abs(terms).reshape(-1, terms.shape[-1]).mean(axis=0))
    return {"bgrad": reference(request)["bgrad"] - terms[..., left_out]}


def _scale(name: str) -> Any:
    def left_out(request: MatmulRequest) -> Results | None:
        factor, mode = getattr(request.scales, name), getattr(request.scales, f"{name}_mode", ScaleMode.SCALAR_32F)
        if factor is None or (isinstance(factor, Tensor) and not factor.size):
            return None
        if mode is ScaleMode.SCALAR_32F:
            wrong: Any = 1.0
        else:  # of many factors, one too large
            values = np.asarray(factor).copy()
            values.flat[0] = values.flat[0] * values.dtype.type(2)
            wrong = host_array(factor, values)
        return reference(replace(request, scales=replace(request.scales, **{name: wrong})))

    left_out.__doc__ = f"The factor of {name} left out."
    return left_out


MUTATIONS = {
    "one k left out": one_k,
    "half of k left out": half_of_k,
    "alpha off": alpha,
    "alpha doubled": alpha_doubled,
    "C left out": beta,
    "bias left out": bias,
    "bias of the column beside": bias_beside,
    "bias of the first batch": bias_of_first,
    "activation left out": activation,
    "gradient of the activation left out": gradient,
    "aux of the row beside": aux_of_neighbour,
    "aux of the first batch": aux_of_first,
    "bgrad summed over batches": bgrad_summed,
    "bgrad with a term left out": bgrad_short,
    **{f"scale of {name} off": _scale(name) for name in ("a", "b", "c", "d", "aux")},
}
