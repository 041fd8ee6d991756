"""Requests for `explain` to ask the table with: one after the other, until a row takes one.

Matmul requests are real ones over host memory that nothing reads. For an op that this file does not know, such as a
user's own, the table's columns are asked without tensors; the rules of its rows, which need them, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from dispatch.core.request import Signature
from dispatch.core.row import Row, refusals
from dispatch.device.registry import device
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import FP8, Arch, Dtype, Epilogue, ScaleMode
from dispatch.ops.matmul import MatmulRequest, Scales, aux_shape
from dispatch.ops.matmul.scales import scale_shape
from dispatch.refusal import Kind, Refusal, distance
from dispatch.table import select
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from dispatch.device.tensor import Tensor

__all__ = ["Probe", "probes"]

Modes = tuple[ScaleMode | None, ScaleMode | None]


@dataclass(frozen=True)
class Probe:
    """One thing to ask the table: a request, or the choices of one."""

    text: str
    request: Any

    def select(self, arch: Arch) -> Row | NoRow:
        """The row that takes it, or why none does."""
        if not isinstance(self.request, MatmulRequest):
            return _by_columns(self, arch)
        try:
            return select.select(self.request, arch)
        except NoRow as refusal:
            return refusal


def probes(options: argparse.Namespace) -> Iterator[Probe]:
    """What the command line asks, in every way that it leaves open, the likeliest first."""
    if options.op != "matmul":
        text = f"{options.op}({', '.join(d.name for d in (options.dtype, options.b_dtype, options.c_dtype) if d)})"
        yield Probe(f"{text} {options.epilogue.name}", options)
        return
    orders = (options.order,) if options.order else _orders(options.dtype, options.epilogue)
    for order in orders:
        blank = _matmul(options, order, Epilogue.NONE)
        bias, aux = _companions(options, blank.request.d_dtype)
        for one, other in product(bias, aux):
            yield _matmul(options, order, options.epilogue, one, other)


def _orders(dtype: Dtype, epilogue: Epilogue) -> tuple[str, ...]:
    """Orders of a and b, the one first that suits: fp8 units read along k, and BGRADA sums columns of a."""
    likely = "nt" if dtype in FP8 or dtype.bits == 4 else "tn" if epilogue is Epilogue.BGRADA else "nn"
    return tuple(dict.fromkeys((likely, "nn", "nt", "tn", "tt")))


def _companions(options: argparse.Namespace, out: Dtype) -> tuple[list[Dtype], list[Dtype]]:
    """Dtypes that rows of these operands allow for the bias and for the input of GELU."""
    pair = (options.dtype, options.b_dtype or options.dtype)
    rows = [row for row in TABLE.of("matmul") if row.dtypes[:2] == pair and row.dtypes[3] is out]
    found = [list(dict.fromkeys(dtype for row in rows for dtype in row.epilogue_dtypes[place])) for place in range(2)]
    bias = [options.bias_dtype] if options.bias_dtype else found[0] or [out]
    aux = [options.aux_dtype] if options.aux_dtype else found[1] or [out]
    return bias if options.epilogue.adds_bias else bias[:1], aux if options.epilogue.activation == "gelu" else aux[:1]


def _matmul(
    options: argparse.Namespace, order: str, epilogue: Epilogue, bias: Dtype | None = None, aux: Dtype | None = None
) -> Probe:
    host = device("host")
    m, n, k = _sizes(options.shape)

    def matrix(rows: int, columns: int, dtype: Dtype, dense: str) -> Tensor:
        return host.empty((rows, columns), dtype) if dense == "n" else host.empty((columns, rows), dtype).mT

    fields: dict[str, Any] = {
        "a": matrix(m, k, options.dtype, order[0]),
        "b": matrix(k, n, options.b_dtype or options.dtype, order[1]),
    }
    if options.c_dtype is not None:
        fields["c"] = host.empty((m, n), options.c_dtype)
    if epilogue.adds_bias and bias is not None:
        fields["bias"] = host.empty((n,), bias)
    if epilogue.activation and (epilogue.writes_aux or epilogue.is_gradient) and aux is not None:
        fields["aux"] = _aux(epilogue, (m, n), aux)
    scales = Scales(**_factors(options.scales, m, n, k))
    choices = {"compute": options.compute, "out_dtype": options.out_dtype, "scales": scales}
    request = MatmulRequest(**fields, **choices, epilogue=epilogue, reduced_precision=options.reduced_precision)
    return Probe(request.describe(), request)


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 0:
        raise BadRequest("--shape", ",".join(map(str, shape)), "m,n,k, each 0 or more")
    return shape


def _aux(epilogue: Epilogue, shape: tuple[int, int], dtype: Dtype) -> Tensor:
    wanted, strides = aux_shape(epilogue, shape)
    whole = device("host").empty((shape[0], strides[0]), "u8" if epilogue.activation == "relu" else dtype)
    return whole[:, : wanted[1]]


def _factors(modes: Modes, m: int, n: int, k: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mode, lines in zip("ab", modes, (m, n), strict=True):
        if mode is not None:
            dtype, shape = scale_shape(mode, lines, k)
            found[name], found[f"{name}_mode"] = device("host").empty(shape or (1,), dtype), mode
    return found


def _by_columns(probe: Probe, arch: Arch) -> Row | NoRow:
    """Ask the columns of the rows of an op; a dtype that was not given is taken to be the row's."""
    options = probe.request
    given = (options.dtype, options.b_dtype, options.c_dtype)
    tried: list[tuple[str, list[Refusal]]] = []
    for row in TABLE.of(options.op):
        dtypes = [dtype or wanted for dtype, wanted in zip(given, row.dtypes[:3], strict=False)] + list(row.dtypes[3:])
        dtypes[-1] = options.out_dtype or (row.dtypes[-1] if len(dtypes) > 1 else dtypes[-1])
        wanted = Signature(tuple(dtypes), options.compute, options.epilogue, options.scales)
        bare = replace(row, rules=())  # rules look at tensors
        elsewhere = [] if row.on(arch) else [Refusal(Kind.ARCH, (row.min_arch, row.max_arch), arch)]
        reasons = elsewhere or refusals(bare, probe.request, wanted)
        if not reasons:
            return row
        tried.append((row.name, reasons))
    nearest = min(tried, key=lambda refused: distance(refused[1]))
    return NoRow(probe.text, tried, f"{nearest[0]}, which {' and '.join(map(str, nearest[1]))}")
