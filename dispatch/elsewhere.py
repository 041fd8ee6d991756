"""Names of NumPy and torch that are different here: an AttributeError for such a name says what to write instead.

This module is imported only when such an error is raised.
"""

from __future__ import annotations

import numpy as np

from dispatch import errors

__all__ = ["of_argument", "of_device", "of_module", "of_sparse", "of_tensor"]

OVER_AXES = "dispatch.reduce(x, axes, reduce={!r})"
NORM = "dispatch.norm_fwd(x, scale, bias, mode={!r})"
MODULE = {
    **dict.fromkeys(("array", "asarray", "tensor", "as_tensor"), "a device creates arrays: dispatch.device().array(x)"),
    **{name: f"a device creates arrays: dispatch.device().{name}(shape, dtype)" for name in ("empty", "zeros")},
    **{name: f"a device creates arrays: dispatch.device().array(np.{name}(…))" for name in ("arange", "full", "ones")},
    **dict.fromkeys(("bmm", "gemm", "mm"), "dispatch.matmul(a, b)"),
    **{name: f"dispatch.activation(x, mode={name!r})" for name in ("elu", "relu", "sigmoid", "tanh")},
    "silu": "dispatch.activation(x, mode='swish')",
    "gelu": "dispatch.matmul(a, b, epilogue='gelu'), fused with a product",
    "log_softmax": "dispatch.softmax(x, algorithm='log')",
    **dict.fromkeys(("attention", "scaled_dot_product_attention", "sdpa"), "dispatch.sdpa_fwd(q, k, v)"),
    **{name: NORM.format(name) for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")},
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d"), "dispatch.conv_fwd(x, w)"),
    **dict.fromkeys(("avg_pool2d", "max_pool2d"), "dispatch.pooling(x, window)"),
    "rand": "dispatch.random.Generator(seed).random(size)",
    "randn": "dispatch.random.Generator(seed).standard_normal(size)",
    "randint": "dispatch.random.Generator(seed).integers(low, high, size)",
    "randperm": "dispatch.random.Generator(seed).permutation(n)",
    **dict.fromkeys(("default_rng", "manual_seed", "seed"), "dispatch.random.Generator(seed), whose methods draw"),
    **{
        name: OVER_AXES.format(mode) for name, mode in (("max", "max"), ("mean", "avg"), ("min", "min"), ("sum", "add"))
    },
}
COPIES = "x.numpy() copies it to the host, dev.array(x) to a device, x.astype(dtype) converts"
TENSOR = {
    **{name: MODULE[name] for name in ("max", "mean", "min", "sum")},
    "prod": OVER_AXES.format("mul"),
    "dot": "a @ b",
    "matmul": "a @ b",
    "fill": "x.copy_from(np.full(x.shape, value))",
    "itemsize": "x.dtype.itemsize",
    "ravel": "x.reshape(-1), a view",
    "flatten": "x.reshape(-1).copy()",
    **dict.fromkeys(("squeeze", "unsqueeze"), "x.reshape(…), x[0] or x[None], views"),
    "view": "x.reshape(shape), a view; x.astype(dtype) converts",
    **dict.fromkeys(("permute", "swapaxes"), "x.transpose(…), a view"),
    **dict.fromkeys(("clone", "contiguous"), "x.copy()"),
    **dict.fromkeys(("cpu", "cuda", "to"), COPIES),
    **{name: f"x.astype({kind!r})" for name, kind in (("bfloat16", "bf16"), ("float", "f32"), ("half", "f16"))},
}

ARGUMENT = {
    **dict.fromkeys(("activation", "act"), ("epilogue", "mode")),
    **dict.fromkeys(("dim", "dims", "axis"), ("axis", "axes")),
    **dict.fromkeys(("causal", "is_causal"), ("right_bound=0",)),
    **dict.fromkeys(("dtype", "output_dtype"), ("out_dtype",)),
    **dict.fromkeys(("eps",), ("epsilon",)),
    **dict.fromkeys(("gamma",), ("scale",)),
    **dict.fromkeys(("input", "self"), ("x", "a", "q")),
    **dict.fromkeys(("kernel", "kernel_size", "size"), ("window",)),
    **dict.fromkeys(("mat2", "other"), ("b",)),
    **dict.fromkeys(("output", "result"), ("out",)),
    **dict.fromkeys(("padding",), ("pad",)),
    **dict.fromkeys(("residual", "add"), ("c", "residual")),
    **dict.fromkeys(("weight", "weights", "filter"), ("w", "weights", "scale")),
    **dict.fromkeys(("transpose_a", "transa", "trans_a"), ("a=a.T",)),
    **dict.fromkeys(("transpose_b", "transb", "trans_b"), ("b=b.T",)),
}  # from an argument's name in NumPy or torch to the possible names here; an op has one of them

SPARSE = {
    **dict.fromkeys(("gbmv", "gemv", "hemv", "hpmv", "sbmv", "spmv", "symv"), "spmv(a, x)"),
    **dict.fromkeys(("gemm", "hemm", "matmul", "symm"), "spmm(a, b)"),
    **dict.fromkeys(("tbsv", "tpsv", "trsm", "trsv"), "spsolve_triangular(a, b)"),
    **dict.fromkeys(("cho_solve", "solve"), "spsolve(a, b)"),
    **dict.fromkeys(("cholesky", "lu_factor"), "splu(a)"),
}  # from an op over dense matrices to the function of dispatch.sparse


def of_sparse(op: str) -> str:
    """The end of a hint about a sparse operand: the function that takes it instead of this op; "" if there is none."""
    return f"; dispatch.sparse.{SPARSE[op]} takes a sparse matrix" if op in SPARSE else ""


def of_argument(name: str, known: list[str]) -> str:
    """The argument of an op for a name in NumPy or torch, with its value if the name implies one; "" if none."""
    return next((one for one in ARGUMENT.get(name.lower(), ()) if one.partition("=")[0] in known), "")


def of_device(name: str) -> str:
    """The code that makes an array on a device, for the name of a NumPy function that makes one."""
    return "dev.array(x)" if name == "asarray" else f"dev.array(np.{name}(…))"


def of_module(name: str) -> str:
    """This package's counterpart of a name of NumPy, torch or a module here; "" if there is none."""
    return f"dispatch.errors.{name}" if name in errors.__all__ else MODULE.get(name, "")


def of_tensor(name: str) -> str:
    """The counterpart of a method or attribute of NumPy's arrays or torch's tensors; "" for names that neither has."""
    on_host = f"on the host x.numpy().{name}" if hasattr(np.ndarray, name) else ""
    if name not in TENSOR:
        return on_host
    return f"{TENSOR[name]}, or {on_host}" if OVER_AXES[:15] in TENSOR[name] else TENSOR[name]
