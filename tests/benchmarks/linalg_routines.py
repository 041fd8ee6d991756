"""The routines of bench_linalg: their operands, how everybody is called, and what is computed of results in float64.

In an expression `{x}` is the first operand and `{out}` what names the outputs, as `Way.out` has it, or nothing. Results
are held against residuals of a few vectors each, in units of n·eps, so that this takes little of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
PROBES = 4  # vectors that a factorization is applied to
RIGHT = 64  # right sides of a system
OURS, AUTOTUNE = "ours", "autotune"
TUNED = f"{OURS}, {AUTOTUNE}"  # of drivers: a way of the table of drivers alone


@dataclass(frozen=True)
class Way:
    """One way to call a routine: an expression, how it is told its outputs, and what is run once before it."""

    name: str
    code: str
    out: str = ""
    before: str = ""


# -- operands --------------------------------------------------------------------------------------------------------
def operands(n: int, dtype: str, batch: tuple[int, ...] = (), right: int = RIGHT) -> Callable[[str], Array]:
    """A function from a kind to an array of the NumPy dtype, the same one whenever it is asked again."""
    rng, made = np.random.default_rng(18), {}
    k = min(right, n)
    shapes = {"vector": (n,), "long": (n * n,), "rhs": (n, k), "tall": (n, n // 2)}

    def draw(*shape: int) -> Array:
        real = rng.standard_normal((*batch, *shape), np.float32)
        both = real + 1j * rng.standard_normal(real.shape, np.float32) if np.dtype(dtype).kind == "c" else real
        return np.asarray(both, dtype)

    def make(kind: str) -> Array:
        if kind.rstrip("2") in shapes:
            return draw(*shapes[kind.rstrip("2")])
        if kind.startswith("random"):
            return draw(n, n)
        g, one = get("random"), np.eye(n, dtype=dtype)
        if kind == "lower":
            return np.tril(g, -1) / np.sqrt(n).astype(g.real.dtype) + 2 * one
        if kind == "near one":
            return one + g / (4 * np.sqrt(n)).astype(g.real.dtype)
        symmetric = (g + g.mT.conj()) / np.sqrt(2).astype(g.real.dtype)
        return symmetric if kind == "symmetric" else symmetric + np.asarray(4 * np.sqrt(n) * one, dtype)

    def get(kind: str) -> Array:
        if kind not in made:
            made[kind] = make(kind)
        return made[kind]

    return get


# -- what results are off by, with `xp` NumPy or torch, and operands and results in float64 ---------------------------
def norm(x: Any) -> Any:
    return (abs(x) ** 2).sum() ** 0.5


def apart(got: Any, want: Any, scale: Any = 0.0) -> float:
    return float(norm(got - want) / (norm(want) + scale))


def probe(xp: Any, a: Any) -> Any:
    """Vectors for the columns of `a`, the same for every matrix of a batch."""
    n = a.shape[-1]
    values = np.random.default_rng(n).standard_normal((n, PROBES))
    return values.astype(a.dtype) if xp is np else xp.asarray(values, device=a.device).to(a.dtype)


def solved(a: Any, x: Any, b: Any) -> float:
    """The backward error of a system's solution."""
    return apart(a @ x, b, norm(a) * norm(x) / max(1.0, np.prod(a.shape[:-2])) ** 0.5)


def orthonormal(q: Any, w: Any) -> float:
    got = q.mT.conj() @ (q @ w)
    return apart(got, w + 0 * got)  # as many of w as there are matrices


def check_lu(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    lu, a, w = r[0], o["x"], probe(xp, o["x"])
    upper, wanted = xp.triu(lu) @ w, a @ w
    got = xp.tril(lu, -1) @ upper + upper
    rows = permutation(np.asarray(r[1]), a.shape[-1])[..., None]
    if xp is np:
        return apart(got, np.take_along_axis(wanted, rows, -2))
    return apart(got, xp.take_along_dim(wanted, xp.asarray(rows, device=a.device), -2))


def permutation(pivots: Array, n: int) -> Array:
    """The order of rows that LAPACK's exchanges lead to; CuPy and SciPy count from 0, as their last pivot tells."""
    swaps = pivots.reshape(-1, n)
    swaps = swaps - (swaps[0, -1] - (n - 1))
    order = np.broadcast_to(np.arange(n), swaps.shape).copy()
    each = np.arange(len(swaps))
    for i in range(n):
        order[each, i], order[each, swaps[:, i]] = order[each, swaps[:, i]], order[each, i]
    return order.reshape(pivots.shape)


def check_qr(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    w = probe(xp, o["x"])
    return max(apart(r[0] @ (r[1] @ w), o["x"] @ w), orthonormal(r[0], w))


def check_eigh(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    w = probe(xp, o["x"])
    return max(apart(o["x"] @ (r[1] @ w), r[1] @ (r[0][..., None] * w)), orthonormal(r[1], w))


def check_svd(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    w, (u, s, vh) = probe(xp, o["x"]), r[:3]
    return max(apart(u @ (s[..., None] * (vh @ w)), o["x"] @ w), orthonormal(u, w), orthonormal(vh, w))


def check_cholesky(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    w, low = probe(xp, o["x"]), xp.tril(r[0])
    return apart(low @ (low.mT.conj() @ w), o["x"] @ w)


def check_lstsq(_: Any, o: dict[str, Any], r: list[Any]) -> float:
    a, b, x = o["x"], o["b"], r[0]
    return float(norm(a.mT.conj() @ (a @ x - b)) / (norm(a) * norm(b)))


def check_syrk(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    return apart(xp.tril(r[0]), xp.tril(o["x"] @ o["x"].mT))


def check_det(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    return apart(r[0], xp.linalg.det(o["x"]))


def check_gemm(xp: Any, o: dict[str, Any], r: list[Any]) -> float:
    w = probe(xp, o["b"])
    return apart(r[0] @ w, o["x"] @ (o["b"] @ w))


CHECKS: dict[str, Callable[[Any, dict[str, Any], list[Any]], float]] = {
    "gemm": check_gemm,
    "syrk": check_syrk,
    "trsm": lambda _, o, r: solved(o["t"], r[0], o["x"]),
    "symv": lambda _, o, r: apart(r[0], o["s"] @ o["x"]),
    "gemv": lambda _, o, r: apart(r[0], o["g"] @ o["x"]),
    "dot": lambda _, o, r: float(abs(r[0] - (o["x"] * o["y"]).sum()) / (norm(o["x"]) * norm(o["y"]))),
    "nrm2": lambda _, o, r: apart(r[0], norm(o["x"])),
    "axpy": lambda _, o, r: apart(r[0], 2.0 * o["x"] + o["y"]),
    "cholesky": check_cholesky,
    "cho_solve": lambda _, o, r: solved(o["s"], r[0], o["x"]),
    "lu_factor": check_lu,
    "lu_solve": lambda _, o, r: solved(o["a"], r[0], o["x"]),
    "solve": lambda _, o, r: solved(o["x"], r[0], o["b"]),
    "solve, pos": lambda _, o, r: solved(o["x"], r[0], o["b"]),
    "qr": check_qr,
    "inv": lambda xp, o, r: solved(o["x"], r[0] @ probe(xp, o["x"]), probe(xp, o["x"])),
    "det": check_det,
    "eigh": check_eigh,
    "lstsq": check_lstsq,
    "lstsq, any rank": check_lstsq,
    "svd": check_svd,
}
OPERANDS: dict[str, tuple[str, dict[str, str]]] = {
    "gemm": ("random", {"b": "random2"}),
    "syrk": ("random", {}),
    "trsm": ("random2", {"t": "lower"}),
    "symv": ("vector", {"s": "symmetric"}),
    "gemv": ("vector", {"g": "random"}),
    "dot": ("long", {"y": "long2"}),
    "nrm2": ("long", {}),
    "axpy": ("long", {"y": "long2"}),
    "cholesky": ("positive", {}),
    "cho_solve": ("rhs", {"s": "positive"}),
    "lu_factor": ("random", {}),
    "lu_solve": ("rhs", {"a": "random"}),
    "solve": ("random", {"b": "rhs"}),
    "solve, pos": ("positive", {"b": "rhs"}),
    "qr": ("random", {}),
    "inv": ("random", {}),
    "det": ("near one", {}),
    "eigh": ("symmetric", {}),
    "lstsq": ("tall", {"b": "rhs"}),
    "lstsq, any rank": ("tall", {"b": "rhs"}),
    "svd": ("random", {}),
}
LOOKS_AT_THE_GPU = ("eigh", "svd", "lstsq, any rank")  # as docs/linear_algebra.md has it: these cannot be captured
IN_PLACE = ("axpy",)  # BLAS's own way; the others leave operands as they are


def bound(routine: str, n: int, dtype: str) -> float:
    """How far a result may be off: what does nothing, or rounds to ten bits, must not win; tests have narrow bounds.

    Jacobi's rotations leave more with each row, torch's and ours alike: 10 n·eps in Uᴴ·U.
    """
    most = 30 * max(n, 16)
    return (most if routine in ("eigh", "svd") else min(most, 2000)) * float(np.finfo(dtype).eps)


# -- this project's calls ----------------------------------------------------------------------------------------------
def ours(name: str, code: str, out: str = "", before: str = "") -> Way:
    return Way(f"{OURS}, {name}" if name else OURS, code, out, before)


OUR_WAYS: dict[str, tuple[Way, ...]] = {
    "gemm": (
        ours("", "matmul({x}, b{out})", ", out={0}"),
        ours("cublas", 'matmul({x}, b, library="cublas"{out})', ", out={0}"),
    ),
    "syrk": (ours("", "syrk({x}{out})", ", out={0}"),),
    "trsm": (ours("", "trsm(t, {x}{out})", ", out={0}"),),
    "symv": (ours("", "symv(s, {x}{out})", ", out={0}"),),
    "gemv": (ours("", "gemv(g, {x}{out})", ", out={0}"),),
    "dot": (ours("", "dot({x}, y{out})", ", out={0}"),),
    "nrm2": (ours("", "nrm2({x}{out})", ", out={0}"),),
    "axpy": (ours("", "axpy({x}, y, alpha=2.0, out=y)"),),
    "cholesky": (ours("", "cholesky({x}{out})", ", out={0}, info={1}"),),
    "cho_solve": (ours("", "cho_solve(c, {x}{out})", ", out={0}", "c = cholesky(s)[0]"),),
    "lu_factor": (ours("", "lu_factor({x}{out})", ", out={0}, pivots={1}, info={2}"),),
    "lu_solve": (ours("", "lu_solve(lu, p, {x}{out})", ", out={0}", "lu, p, _ = lu_factor(a)"),),
    "solve": (ours("", "solve({x}, b{out})", ", out={0}, info={1}"),),
    "solve, pos": (ours("", 'solve({x}, b, assume_a="pos", lower=True{out})', ", out={0}, info={1}"),),
    "qr": (ours("", "qr({x}{out})", ", q={0}, r={1}"),),
    "inv": (ours("", "inv({x}{out})", ", out={0}, info={1}"),),
    "det": (ours("", "det({x}{out})", ", det={0}"),),
    "eigh": (
        ours("", "eigh({x}{out})", ", w={0}, v={1}, info={2}"),
        ours("syevj", 'eigh({x}, driver="syevj"{out})', ", w={0}, v={1}, info={2}"),
        ours(AUTOTUNE, "eigh({x}, autotune=True{out})", ", w={0}, v={1}, info={2}"),
    ),
    "lstsq": (ours("", 'lstsq({x}, b, driver="gels"{out})', ", out={0}, residuals={1}, info={2}"),),
    "lstsq, any rank": (
        ours("", "lstsq({x}, b{out})", ", out={0}, residuals={1}, rank={2}, s={3}, info={4}"),
    ),
    "svd": (
        ours("", "svd({x}{out})", ", u={0}, s={1}, vh={2}, info={3}"),
        ours("gesvdj", 'svd({x}, driver="gesvdj"{out})', ", u={0}, s={1}, vh={2}, info={3}"),
        ours("gesvdp", 'svd({x}, driver="gesvdp"{out})', ", u={0}, s={1}, vh={2}, info={3}"),
        ours(AUTOTUNE, "svd({x}, autotune=True{out})", ", u={0}, s={1}, vh={2}, info={3}"),
    ),
}  # fmt: skip
