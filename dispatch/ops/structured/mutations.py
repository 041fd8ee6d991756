"""Wrong results of structured matrices that the cases must reject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.structured.form import PruneAlgorithm
from dispatch.ops.structured.product import Activation24
from dispatch.ops.structured.reference import clipped, evaluate
from dispatch.testing.mutations import altered, of_operand

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.testing.mutations import Mutation

__all__ = ["MUTATIONS"]


def product_with(**changes: Callable[[Any], Any]) -> Mutation:
    """The product of a request with other fields; None if a field is to become None, or nothing changes."""

    def mutation(request: Any) -> Results | None:
        if request.op != "matmul_2_4":
            return None
        fields = {name: change(request) for name, change in changes.items()}
        if any(value is None for value in fields.values()):
            return None
        return {"out": clipped(altered(evaluate, request, **fields)["out"], request.d_dtype)}

    return mutation


def without(name: str, **more: Any) -> Mutation:
    """The product without an operand."""

    def mutation(request: Any) -> Results | None:
        if request.op != "matmul_2_4" or getattr(request, name) is None:
            return None
        return {"out": clipped(altered(evaluate, request, **{name: None, **more})["out"], request.d_dtype)}

    return mutation


def neighbours(name: str) -> Mutation:
    """The product in which each element of an operand is its neighbour's along the axis of D's rows, or of k."""
    roll = of_operand(evaluate, name, lambda values: np.roll(values, 1, axis=-2 if name == "b" else -1))

    def mutation(request: Any) -> Results | None:
        rolled = roll(request) if request.op == "matmul_2_4" else None
        return None if rolled is None else {"out": clipped(rolled["out"], request.d_dtype)}

    return mutation


def other_algorithm(request: Any) -> Results | None:
    """The other algorithm."""
    if request.op != "prune_2_4":
        return None
    return altered(evaluate, request, algorithm=PruneAlgorithm(1 - request.algorithm))


def unpruned(request: Any) -> Results | None:
    """The matrix, not pruned."""
    return {"out": np.asarray(request.a)} if request.op == "prune_2_4" else None


def smallest(request: Any) -> Results | None:
    """The smallest elements stay instead of the largest."""
    if request.op != "prune_2_4":
        return None
    dense = np.asarray(request.a)
    return {"out": np.where(evaluate(request, dense.dtype)["out"] == 0, dense, np.zeros((), dense.dtype))}


def other_answer(request: Any) -> Results | None:
    """The other answer."""
    return {"out": 1 - evaluate(request, np.dtype(np.int32))["out"]} if request.op == "check_2_4" else None


RELU, GELU, NONE = Activation24.RELU, Activation24.GELU, Activation24.NONE
PLAIN = {"upper_bound": np.inf, "threshold": 0.0, "gelu_scaling": 1.0}

MUTATIONS: dict[str, Mutation] = {
    "the other algorithm": other_algorithm,
    "not pruned": unpruned,
    "the smallest stay": smallest,
    "the other answer": other_answer,
    "alpha too large": product_with(alpha=lambda r: None if r.alpha_vector is not None else 1.5 * r.alpha or None),
    "beta too large": product_with(
        beta=lambda r: r.factor("beta") + 1 if r.reads_added and r.beta is not None else None
    ),
    "without bias": without("bias"),
    "bias of a neighbour": neighbours("bias"),
    "alpha of a neighbour": neighbours("alpha_vector"),
    "beta of a neighbour": neighbours("beta_vector"),
    "b of a neighbour": neighbours("b"),
    "without activation": product_with(
        activation=lambda r: None if r.activation is NONE else NONE,
        **{name: lambda _, value=value: value for name, value in PLAIN.items()},
    ),
    "without a bound": product_with(upper_bound=lambda r: np.inf if np.isfinite(r.upper_bound) else None),
    "without a threshold": product_with(threshold=lambda r: 0.0 if r.threshold else None),
    "without the factor of GELU": product_with(gelu_scaling=lambda r: 1.0 if r.gelu_scaling != 1 else None),
}
