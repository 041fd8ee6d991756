"""The cases of iterations: each result must meet the criterion of its request, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import C64, F32
from dispatch.ops.sparse import krylov
from dispatch.ops.sparse.cases_block_jacobi import Form as BlockForm
from dispatch.ops.sparse.cases_block_jacobi import expected_inverses
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.incomplete import Ic0Request, Ilu0Request
from dispatch.ops.sparse.incomplete_reference import evaluate as evaluate_incomplete
from dispatch.ops.sparse.krylov import Preconditioner
from dispatch.ops.sparse.krylov_reference import evaluate_krylov, norm_of, preconditioner_matrix
from dispatch.ops.sparse.matrix_reference import matrix_of, numbers
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, Mismatch, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["KRYLOV", "KrylovCheck", "krylov_cases", "matrix_for"]

KRYLOV: dict[str, Any] = {
    kind.op: kind for name, kind in vars(krylov).items() if name in krylov.__all__ and hasattr(kind, "op")
}
CHOICES = {
    "jacobi": Preconditioner.JACOBI,
    "ilu0": Preconditioner.ILU0,
    "ic0": Preconditioner.IC0,
    "blocks": Preconditioner.BLOCK_JACOBI,
}
FACTORED: dict[str, Any] = {"ilu0": Ilu0Request, "ic0": Ic0Request}
VARIANTS = {**dict.fromkeys(FACTORED, "factors"), "blocks": "blocks"}
CSR, CSC, COO, BSR = SparseFormat


class Form(NamedTuple):
    """A case: the pattern, the storage, the initial guess, the kind of M, and the layout of the result."""

    pattern: str
    kind: SparseFormat = CSR
    base: int = 0
    wide: bool = False
    start: str = "zeros"  # drawn, in place
    scale: str = "none"  # drawn, jacobi, ilu0, ic0, blocks
    rtol: float = 1e-5
    atol: float = 0.0
    has_out: bool = False
    size: int = 0  # of blocks
    order: tuple[int, ...] = (0, 2, 1)  # of their axes in memory


FORMS = (
    Form("2d Poisson"),
    Form("3d Poisson", wide=True, start="drawn", has_out=True),
    Form("graph Laplacian", base=1, start="in place", scale="drawn"),
    Form("2d Poisson", CSC, scale="jacobi", rtol=1e-4),
    Form("3d Poisson", COO, base=1, rtol=0.0, atol=1e-3, has_out=True),
    Form("graph Laplacian", BSR, wide=True, scale="drawn"),
    Form("3d Poisson", CSR, base=1, scale="jacobi", start="drawn"),
    Form("3d Poisson", scale="ilu0", start="drawn"),
    Form("graph Laplacian", base=1, scale="ic0", has_out=True),
    Form("2d Poisson", scale="ilu0", start="in place", rtol=1e-6),
    Form("2d Poisson", scale="blocks", size=4, rtol=1e-6),
    Form("3d Poisson", COO, base=1, wide=True, start="drawn", scale="blocks", has_out=True, size=7, order=(0, 1, 2)),
    Form("graph Laplacian", BSR, start="in place", scale="blocks", size=4),
    Form("3d Poisson", CSC, scale="blocks", size=9, order=(2, 1, 0)),
    Form("graph Laplacian", base=1, start="drawn", scale="blocks", size=1, atol=1e-4),
)
ACCURATE = 4  # allowed roundoffs of the summed magnitudes


def krylov_cases(row: Row) -> list[MadeCase]:
    """Every form of a row: with incomplete factors, with inverses of blocks, or without."""
    return MadeCase.each(row, [form for form in FORMS if VARIANTS.get(form.scale, "") == row.variant], check)


def matrix_for(op: str, mask: Any, rng: np.random.Generator, *, is_complex: bool = False) -> Array:
    """A well-conditioned matrix for a method: Hermitian positive definite, Hermitian, or any."""
    n = len(mask)
    drawn = rng.uniform(-1, 1, (n, n)) + (1j * rng.uniform(-1, 1, (n, n)) if is_complex else 0)
    drawn = np.where(mask & ~np.eye(n, dtype=bool), drawn, 0)
    if op in ("cg", "minres"):
        drawn = (drawn + drawn.conj().T) / 2
    rows = np.abs(drawn).sum(axis=1) + 0.5 + rng.random(n)
    signs = np.where(rng.random(n) < 0.4, -1, 1) if op == "minres" else 1
    return np.asarray(drawn + np.diag(rows * signs))


def definite(dense: Array) -> Array:
    """A Hermitian positive definite matrix with the elements of a given one, and their mirror images."""
    below = np.tril(dense, -1)
    whole = below + below.conj().T
    return np.asarray(whole + np.diag(np.abs(whole).sum(axis=1) + 0.5))


@dataclass(frozen=True)
class KrylovCheck(Check):
    """A check that a solution meets the criterion, and that the status reports it."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for a residual above the criterion, another status, or writes outside the results."""
        outputs = result if isinstance(result, tuple) else (result,)
        x, info, iterations, residual = (tensor.numpy() for tensor in outputs)
        request: Any = self.request
        most = 4 * int(self.expected["iterations"]) + 20
        if int(info) != 0 or not 0 <= int(iterations) <= most:
            self._refuse(f"info is {int(info)} after {int(iterations)} iterations")
        found, target, slack = residual_of(request, x, self.expected)
        if not found <= target * (1 + 1e-3) + slack:
            self._refuse(f"the residual is {found:.3g}, above {target:.3g}")
        if not abs(float(residual) - found) <= target * 1e-2 + slack:
            self._refuse(f"the residual is {found:.3g}, said to be {float(residual):.3g}")
        self._check_memory()

    def _refuse(self, text: str) -> None:
        raise Mismatch(f"{self.name}: {text} ({self.request.describe()})")


def residual_of(request: Any, x: Array, given: dict[str, Array]) -> tuple[float, float, float]:
    """The norm of b - A·x, its limit, and the roundoff of the limit; all in double precision."""
    a = matrix_of(request, EXACT).tocsr()
    b, weights = numbers(request.b, EXACT), preconditioner_matrix(request, a)
    wide = x.astype(np.result_type(x.dtype, np.float64))
    target = max(request.rtol * norm_of(request, b, weights), request.atol)
    size = np.abs(a).sum(axis=1).max() * np.linalg.norm(wide) + np.linalg.norm(b) + np.linalg.norm(given["start"])
    is_weighted = request.op == "minres" and weights is not None
    weight = float(np.sqrt(np.abs(weights).sum(axis=1).max())) if is_weighted else 1.0
    slack = ACCURATE * ROUNDOFF[request.values.dtype][0] * float(size) * max(1.0, weight)
    return norm_of(request, b - a @ wide, weights), target, slack


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands surrounded by poison."""
    mask = PATTERNS[form.pattern](rng, (24, 24))
    if form.kind is BSR:
        mask = mask[:24, :24]
    n = len(mask)
    dense = matrix_for(op, mask, rng, is_complex=dtype.is_complex).astype(dtype.numpy)
    block = (4, 4) if form.kind is BSR else (1, 1)
    index = np.int64 if form.wide else np.int32
    parts = stored(mask | np.eye(n, dtype=bool), dense, form.kind, form.base, index, block)
    fields: dict[str, Any] = {"form": parts[3]}

    def place_operand(field: str, values: Array) -> GuardedBuffer:
        memory = place(device, values.astype(dtype.numpy) if values.dtype.kind != "i" else values, None, 2)
        fields[field] = memory.view
        return memory

    def normal() -> Array:
        drawn = rng.standard_normal(n)
        return np.asarray(drawn + 1j * rng.standard_normal(n) if dtype.is_complex else drawn)

    for field, values in zip(("values", "rows", "columns"), parts, strict=False):
        fields[field] = device.array(values)
    place_operand("b", normal())
    written: tuple[GuardedBuffer, ...] = ()
    start = np.zeros(n)
    if form.start != "zeros":
        start = normal()
        memory = place_operand("x0", start)
        if form.start == "in place":
            fields["out"], written = memory.view, (memory,)
    if form.scale == "drawn":
        place_operand("M", (0.5 + rng.random(n)) / (np.abs(np.diag(dense)) + 0.5))
    elif form.scale == "blocks":
        blocks = expected_inverses(dense, BlockForm(n, form.size, form.pattern, absolute=op == "minres"))[0]
        last = n - (len(blocks) - 1) * form.size
        blocks[-1, last:] = blocks[-1, :, last:] = np.nan  # must not be read
        fields["M"] = place(device, blocks.astype(dtype.numpy), form.order, 1).view
    elif form.scale in FACTORED:
        fields["form"] = fields["form"]._replace(pattern=int(rng.integers(1 << 40)))
        parts_of_a = {field: fields[field] for field in ("values", "rows", "columns", "form")}
        if form.scale == "ic0":  # of a matrix for which IC(0) exists, at A's places
            parts_of_a["values"] = device.array(stored(mask, definite(dense), CSR, form.base, index)[0])
        place_operand("M", evaluate_incomplete(FACTORED[form.scale](**parts_of_a), EXACT)["out"])
    if form.has_out:
        written = (*written, place_operand("out", poison(dtype, (n,))))
    near = 30 if dtype in (F32, C64) else 1  # far enough from roundoff for a meaningful residual
    choices = {
        "rtol": form.rtol * near,
        "atol": form.atol * near,
        "preconditioner": CHOICES.get(form.scale, Preconditioner.NONE),
    }
    request = KRYLOV[op](**fields, **choices)
    expected = {**evaluate_krylov(request, EXACT), "start": start}
    return KrylovCheck(name, request, expected, {}, written)
