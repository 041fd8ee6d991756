"""The peers of bench_linalg: torch, CuPy and nvmath-python on a GPU, NumPy, SciPy and torch on the host.

Each is called as it is fastest: without checks that wait where it can leave them out, with `out=` and without. CuPy
checks no status unless `cupyx.seterr` says so. Code that is specific to a peer stands here, and nowhere else.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from linalg_routines import OUR_WAYS, Way
from timing import attempt

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, np.dtype[Any]]
ONE, TWO, THREE = ", out={0}", ", out=({0}, {1})", ", out=({0}, {1}, {2})"


def same_way() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Side:
    """A library: its ways by routine, the names in them, how it takes an array, and memory like a result's.

    `like(tensor, many)` is so many tensors of the same shape and order, each at an address of its own.
    """

    name: str
    ways: dict[str, tuple[Way, ...]]
    names: dict[str, Any]
    array: Callable[[Array], Any]
    like: Callable[[Any, int], list[Any]]
    setting: Callable[[], contextlib.AbstractContextManager[Any]] = field(default=same_way)


def torch_ways(name: str = "torch", *, both: bool = True) -> dict[str, tuple[Way, ...]]:
    """torch's calls, without outputs and, with `both`, also with them."""
    codes: dict[str, tuple[str, str, str]] = {
        "gemm": ("torch.mm({x}, b{out})", ONE, ""),
        "syrk": ("torch.mm({x}, {x}.mT{out})", ONE, ""),
        "trsm": ("la.solve_triangular(t, {x}, upper=False{out})", ONE, ""),
        "symv": ("torch.mv(s, {x}{out})", ONE, ""),
        "gemv": ("torch.mv(g, {x}{out})", ONE, ""),
        "dot": ("torch.dot({x}, y{out})", ONE, ""),
        "nrm2": ("la.vector_norm({x}{out})", ONE, ""),
        "axpy": ("y.add_({x}, alpha=2.0)", "", ""),
        "cholesky": ("la.cholesky_ex({x}{out})", TWO, ""),
        "cho_solve": ("torch.cholesky_solve({x}, c{out})", ONE, "c = la.cholesky(s)"),
        "lu_factor": ("la.lu_factor_ex({x}{out})", THREE, ""),
        "lu_solve": ("la.lu_solve(lu, p, {x}{out})", ONE, "lu, p = la.lu_factor(a)"),
        "solve": ("la.solve_ex({x}, b{out})", TWO, ""),
        "solve, pos": ("torch.cholesky_solve(b, la.cholesky_ex({x})[0])", "", ""),
        "qr": ("la.qr({x}{out})", TWO, ""),
        "inv": ("la.inv_ex({x}{out})", TWO, ""),
        "det": ("la.det({x}{out})", ONE, ""),
        "eigh": ("la.eigh({x}{out})", TWO, ""),
        "lstsq": ("la.lstsq({x}, b)", "", ""),
        "svd": ("la.svd({x}{out})", THREE, ""),
    }
    found = {}
    for routine, (code, out, before) in codes.items():
        plain, outs = Way(name, code, "", before), Way(f"{name}, out=", code, out, before)
        found[routine] = (plain, outs) if both and out else (plain,)
    return found


CUPY_WAYS: dict[str, tuple[Way, ...]] = {
    "gemm": (Way("CuPy", "cupy.matmul({x}, b{out})", ONE),),
    "syrk": (Way("CuPy", "blas.syrk('N', {x}, lower=True{out})", ONE),),
    "trsm": (Way("CuPy", "sla.solve_triangular(t, {x}, lower=True, check_finite=False)"),),
    "symv": (Way("CuPy", "cupy.matmul(s, {x}{out})", ONE),),
    "gemv": (
        Way("CuPy", "cupy.matmul(g, {x}{out})", ONE),
        Way("CuPy, cupy.cublas", "gemv(g, {x}, o)", "", "o = cupy.empty(len(g), g.dtype)"),
    ),
    "dot": (Way("CuPy", "blas.dot({x}, y{out})", ONE),),
    "nrm2": (Way("CuPy", "blas.nrm2({x}{out})", ONE),),
    "axpy": (Way("CuPy", "blas.axpy(2.0, {x}, y)"),),
    "cholesky": (Way("CuPy", "la.cholesky({x})"),),
    "cho_solve": (Way("CuPy", "cupyx.linalg.cho_solve((c, True), {x}, check_finite=False)", "", "c = la.cholesky(s)"),),
    "lu_factor": (Way("CuPy", "sla.lu_factor({x}, check_finite=False)"),),
    "lu_solve": (
        Way(
            *("CuPy", "sla.lu_solve((lu, p), {x}, check_finite=False)", ""),
            "lu, p = sla.lu_factor(a, check_finite=False)",
        ),
    ),
    "solve": (Way("CuPy", "la.solve({x}, b)"),),
    "solve, pos": (Way("CuPy", "cupyx.lapack.posv({x}, b)"),),
    "qr": (Way("CuPy", "la.qr({x})"),),
    "inv": (Way("CuPy", "la.inv({x})"),),
    "det": (Way("CuPy", "la.det({x})"),),
    "eigh": (Way("CuPy", "la.eigh({x})"),),
    "lstsq, any rank": (Way("CuPy", "la.lstsq({x}, b)"),),
    "svd": (Way("CuPy", "la.svd({x})"),),
}
NVMATH_WAYS = {"gemm": (Way("nvmath", "advanced.matmul({x}, b)"),)}
HOST_WAYS: dict[str, tuple[Way, ...]] = {
    "gemm": (Way("NumPy", "np.matmul({x}, b{out})", ONE),),
    "syrk": (Way("NumPy", "np.matmul({x}, {x}.mT{out})", ONE),),
    "trsm": (Way("SciPy", "sla.solve_triangular(t, {x}, lower=True, check_finite=False)"),),
    "symv": (Way("NumPy", "np.matmul(s, {x}{out})", ONE),),
    "gemv": (Way("NumPy", "np.matmul(g, {x}{out})", ONE),),
    "dot": (Way("NumPy", "np.dot({x}, y)"),),
    "nrm2": (Way("NumPy", "la.norm({x})"),),
    "axpy": (Way("NumPy", "np.add(2 * {x}, y, out=y)"),),
    "cholesky": (Way("NumPy", "la.cholesky({x})"),),
    "cho_solve": (Way("SciPy", "sla.cho_solve((c, True), {x}, check_finite=False)", "", "c = la.cholesky(s)"),),
    "lu_factor": (Way("SciPy", "sla.lu_factor({x}, check_finite=False)"),),
    "lu_solve": (Way("SciPy", "sla.lu_solve((lu, p), {x}, check_finite=False)", "", "lu, p = sla.lu_factor(a)"),),
    "solve": (Way("NumPy", "la.solve({x}, b)"),),
    "solve, pos": (Way("SciPy", "sla.solve({x}, b, assume_a='pos', lower=True)"),),
    "qr": (Way("NumPy", "la.qr({x})"),),
    "inv": (Way("NumPy", "la.inv({x})"),),
    "det": (Way("NumPy", "la.det({x})"),),
    "eigh": (Way("NumPy", "la.eigh({x})"),),
    "lstsq": (Way("SciPy", "sla.lstsq({x}, b, lapack_driver='gelsy')"),),
    "lstsq, any rank": (Way("NumPy", "la.lstsq({x}, b)"),),
    "svd": (Way("NumPy", "la.svd({x})"),),
}


# -- libraries ---------------------------------------------------------------------------------------------------------
def by_columns(strides: Any, ndim: int) -> bool:
    """Whether a matrix's columns lie one behind another."""
    return ndim == 2 and strides[0] < strides[1]


def ours(device: dp.Device) -> Side:
    """This project."""

    def like(tensor: Any, many: int) -> list[Any]:
        turned = by_columns(tensor.strides, tensor.ndim)
        whole = device.empty((many, *(tensor.shape[::-1] if turned else tensor.shape)), tensor.dtype)
        return [whole[i].T if turned else whole[i] for i in range(many)]

    names = {way.code.partition("(")[0] for ways in OUR_WAYS.values() for way in ways}
    return Side("ours", OUR_WAYS, {name: getattr(dp, name) for name in names}, device.array, like)


def torch_side(place: str) -> Side:
    """torch, with the library that it prefers by itself."""
    import torch

    def like(tensor: Any, many: int) -> list[Any]:
        size = max(tensor.numel(), 1)
        whole = torch.empty(many * size, dtype=tensor.dtype, device=place)
        return [whole.as_strided(tensor.shape, tensor.stride(), i * size) for i in range(many)]

    if place == "cpu":
        torch.set_num_threads(1)  # what is this small gains nothing by more
    names = {"torch": torch, "la": torch.linalg}
    return Side("torch", torch_ways(), names, lambda values: torch.from_numpy(values).to(place, copy=True), like)


def torch_cusolver_side() -> Side:
    """torch where it is to take cuSOLVER, for what it would choose MAGMA for."""
    import torch

    if not torch.cuda.has_magma:
        raise RuntimeError("this torch has no MAGMA: it takes cuSOLVER in any case")

    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        torch.backends.cuda.preferred_linalg_library("cusolver")
        try:
            yield
        finally:
            torch.backends.cuda.preferred_linalg_library("default")

    side, chosen = torch_side("cuda"), ("lu_factor", "lu_solve", "solve", "inv", "det")
    ways = {name: way for name, way in torch_ways("torch, cusolver", both=False).items() if name in chosen}
    return Side("torch, cusolver", ways, side.names, side.array, side.like, setting)


def cupy_side() -> Side:
    """CuPy."""
    import cupy
    import cupyx
    import cupyx.lapack
    import cupyx.linalg
    import cupyx.scipy.linalg
    from cupy import cublas

    def gemv(a: Any, x: Any, y: Any) -> Any:
        cublas.gemv("N", 1.0, a, x, 0.0, y)
        return y

    def like(tensor: Any, many: int) -> list[Any]:
        turned = by_columns(tensor.strides, tensor.ndim)
        whole = cupy.empty((many, *(tensor.shape[::-1] if turned else tensor.shape)), tensor.dtype)
        return [whole[i].T if turned else whole[i] for i in range(many)]

    names = {"cupy": cupy, "cupyx": cupyx, "la": cupy.linalg, "sla": cupyx.scipy.linalg, "blas": cublas, "gemv": gemv}
    return Side("CuPy", CUPY_WAYS, names, cupy.array, like)


def nvmath_side() -> Side:
    """nvmath-python, over torch's tensors."""
    from nvmath.linalg import advanced

    side = torch_side("cuda")
    return Side("nvmath", NVMATH_WAYS, {"advanced": advanced}, side.array, side.like)


def host_side() -> Side:
    """NumPy, and SciPy."""
    import scipy.linalg

    def like(tensor: Any, many: int) -> list[Any]:
        return [np.empty_like(tensor) for _ in range(many)]

    names = {"np": np, "la": np.linalg, "sla": scipy.linalg}
    return Side("NumPy and SciPy", HOST_WAYS, names, np.array, like)


def all_sides(device: dp.Device, missing: dict[str, str]) -> list[Side]:
    """This project and the peers that are installed; the others go into `missing` with the reason."""
    builds: dict[str, Callable[[], Side]] = {
        "torch": lambda: torch_side("cpu" if device.is_host else "cuda"),
        **({"NumPy and SciPy": host_side} if device.is_host else {"CuPy": cupy_side, "nvmath": nvmath_side}),
        **({} if device.is_host else {"torch, cusolver": torch_cusolver_side}),
    }
    found = [ours(device)]
    for name, build in builds.items():
        side = attempt(name, build, missing)
        found += [side] if side is not None else []
    return found


# -- values ------------------------------------------------------------------------------------------------------------
def arithmetic(device: dp.Device) -> Any:
    """What results are checked with: torch on a GPU if it is there, else NumPy."""
    if device.is_host:
        return np
    try:
        import torch
    except ImportError:
        return np
    return torch


def wide(xp: Any, value: Any) -> Any:
    """A tensor of any of the libraries in double precision; integers as NumPy's array."""
    if xp is np or not hasattr(value, "__dlpack__") or np.isscalar(value):
        return _widened(_array(value))
    tensor = xp.from_numpy(np.ascontiguousarray(value)).cuda() if isinstance(value, np.ndarray) else value
    tensor = tensor if isinstance(tensor, xp.Tensor) else xp.from_dlpack(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.cpu().numpy()
    return tensor.to(xp.complex128 if tensor.is_complex() else xp.float64)


def _array(value: Any) -> Any:
    if isinstance(value, dp.Tensor):
        return value.numpy()
    if hasattr(value, "resolve_conj"):  # torch
        return value.detach().cpu().numpy()
    return np.asarray(value.get() if hasattr(value, "get") else value)


def _widened(array: Any) -> Any:
    if array.dtype.kind not in "fc":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
