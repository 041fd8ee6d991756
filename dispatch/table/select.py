"""Selects a row: `select(request, arch)` returns the first that takes the request, or raises NoRow with all reasons.

`bind` uses `candidates`, users call `explain`. This module reads only the table and the request, and calls no library.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cudabind.errors import LibraryNotFound
from dispatch.checks import check_type, names_arguments, shown
from dispatch.core.request import check_request
from dispatch.core.row import Row, accepts, refusals
from dispatch.errors import BadRequest, NoRow, Refused, one_line
from dispatch.execute.installed import ANY_VERSION, Versions
from dispatch.keys import HOST
from dispatch.refusal import Kind, Refusal, distance
from dispatch.table.nearest import change_that_works
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.request import Plan, Request, Signature
    from dispatch.core.row import Rule
    from dispatch.keys import Arch

__all__ = ["Explanation", "called", "candidates", "explain", "first_taker", "no_row", "reasons", "select", "takes"]

LONGEST_REQUEST = 116  # characters of a request in the first line of an error
MAX_LINES = 12  # lines of an explanation in a notebook
LONGEST_LINE = 400  # characters of a line in a notebook


def candidates(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Iterator[Row]:
    """The rows that take a request on an architecture, in order of priority.

    `versions` are those of the installed libraries; a library without an entry counts as new enough. Rows of a library
    that is not installed are skipped.
    """
    wanted = request.signature()
    for row in TABLE.with_dtypes(request.op, wanted.dtypes):
        if takes(row, request, wanted, arch, versions):
            yield row


def takes(row: Row, request: Request, wanted: Signature, arch: Arch, versions: Versions = ANY_VERSION) -> bool:
    """Whether a row takes a request, whose signature is `wanted`, on an architecture with these libraries."""
    # The library first: the version of a library that does not qualify must not be read, as it may be missing.
    return row.of(wanted.library) and not _machine(row, arch, versions) and accepts(row, request, wanted)


def first_taker(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Row | None:
    """The first of `candidates`, or None; a rule's StopIteration passes through, as no generator can let it."""
    wanted = request.signature()
    for row in TABLE.with_dtypes(request.op, wanted.dtypes):
        if takes(row, request, wanted, arch, versions):
            return row
    return None


def reasons(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> list[tuple[Row, list[Refusal]]]:
    """Every row of the request's op, in order, with the reasons why it refuses; no reasons if it takes the request."""
    wanted, listed = request.signature(), []
    answers: dict[Rule, str] = {}
    for row in TABLE.of(request.op):
        why = _machine(row, arch, versions) if row.of(wanted.library) or not row.on(arch) else []
        # A newer library can be installed, so the row's other conditions are listed, too; a GPU cannot be changed.
        listed.append((row, why if not row.on(arch) else why + refusals(row, request, wanted, answers)))
    return listed


def _machine(row: Row, arch: Arch, versions: Versions) -> list[Refusal]:
    """Why a row cannot run on a machine: its architecture, or a library that is missing or too old."""
    if not row.on(arch):
        return [Refusal(Kind.ARCH, (row.min_arch, row.max_arch), arch)]
    try:
        version = versions.get(row.library) if row.min_version else None
    except LibraryNotFound as error:
        return [Refusal(Kind.MISSING, row.library, error.hint or str(error))]
    if version is not None and version < row.min_version:
        return [Refusal(Kind.VERSION, (row.library, row.min_version), version)]
    return []


def select(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Row:
    """The first row that takes a request on an architecture; NoRow lists every row, and the nearest that works."""
    row = first_taker(request, arch, versions)
    if row is None:
        raise no_row(request, arch, versions)
    return row


def no_row(
    request: Request,
    arch: Arch,
    versions: Versions = ANY_VERSION,
    refused: Mapping[Row, Refused] = MappingProxyType({}),
    *,
    suggest: bool = True,
) -> NoRow:
    """The error for a request that no row takes; `refused` has the rows that do, but whose library refuses.

    With `suggest` it searches for the smallest change that a row takes. Raises BadRequest for a library without rows.
    """
    library = request.signature().library
    names = dict.fromkeys(row.stands_for or row.library for row in TABLE.of(request.op))
    if library is not None and not any(row.of(library) for row in TABLE.of(request.op)):
        like = next((name for name in names if name.lower() == str(library).lower()), "")
        raise BadRequest(
            "library",
            shown(library),
            f"a library that has rows of {request.op}: {', '.join(names)}; or None",
            f"did you mean {like!r}?" if like else "",
        )
    tried = reasons(request, arch, versions)
    if refused:
        library_refusals = {row: [Refusal(refusal.kind, str(refusal))] for row, refusal in refused.items()}
        tried = [(row, library_refusals.get(row, why)) for row, why in tried]
    best, change = nearest(tried, arch), ""
    if refused and request.advice:  # a row takes the request, but its library refuses
        best = f"{next(iter(refused)).name} with {request.advice}"
    elif suggest and not refused:
        of_arch = sorted(((row, why) for row, why in tried if row.on(arch)), key=lambda entry: distance(entry[1]))
        if of_arch and any(reason.kind is not Kind.RULE for reason in of_arch[0][1]):  # rules say what helps
            change = change_that_works(request, of_arch, lambda other: first_taker(other, arch, versions) is not None)
    named = [(row.name, why) for row, why in tried]
    return NoRow(request.describe(), named, best, change, _asked(request, arch))


def _asked(request: Request, arch: Arch) -> str:
    """The request and its device, on one line; for a long request only its operands, without strides, and library."""
    where = f"{request.device} ({arch})" if arch and arch == request.device.arch else str(arch)
    text = request.describe()
    if len(text) > LONGEST_REQUEST:
        parts = [f"{name} {t.dtype}{list(t.shape)}" for name, t, _ in request.tensors()]
        library = request.signature().library
        text = f"{request.op}({', '.join(parts + ([f'library={library}'] if library else []))})"
    return f"{one_line(text, LONGEST_REQUEST)} on {where}"


def called(row: Row) -> str:
    """The library function that a row calls: "cudabind.sys.cublasLt.cublasLtMatmul", or "numpy.lrn" if not bound."""
    from importlib import import_module

    from cudabind import LIBRARIES

    bound = import_module(f"cudabind.sys.{row.library}") if row.min_version and row.library in LIBRARIES else None
    return f"{'cudabind.sys.' if hasattr(bound, row.function) else ''}{row.library}.{row.function}"


def nearest(tried: Sequence[tuple[Row, Sequence[Refusal]]], arch: Arch) -> str:
    """The row of this architecture that is nearest to taking a request, and what it would need, as text."""
    of_arch = [(row, why) for row, why in tried if row.on(arch) and why]
    if not of_arch:
        return f"no row is for {arch}"
    row, why = min(of_arch, key=lambda entry: distance(entry[1]))
    return f"{row.name}, which {' and '.join(map(str, why))}"


@dataclass(frozen=True)
class Explanation:
    """Which row runs a request, and why those before it do not.

    If no row takes it, `row` is None, `refusals` has all rows with their reasons, the nearest first, and `refusal` is
    the error that a run raises. If the request has run on the current stream, `launch` says how its plan is launched:
    as one graph at any addresses, or by its library, and why. For a request with `autotune`, `tuned` says how many rows
    will race; once it has run on the current stream, `row` is the winner.
    """

    request: str
    row: Row | None
    refusals: tuple[tuple[str, tuple[Refusal, ...]], ...]
    launch: str = ""
    refusal: NoRow | None = None
    tuned: str = ""

    def __repr__(self) -> str:
        end = "no row takes it" if self.row is None else self.row.name
        return f"<Explanation: {self.request} -> {end}; {len(self.refusals)} rows refuse>"

    def _repr_html_(self) -> str:
        from html import escape

        lines = [one_line(line, LONGEST_LINE) for line in str(self).splitlines()]
        more = len(lines) - MAX_LINES
        shown = lines if more <= 0 else [*lines[:MAX_LINES], f"   {more} more rows: print(dispatch.explain(request))"]
        return f"<div><pre>{escape(chr(10).join(shown))}</pre></div>"

    def __str__(self) -> str:
        row, refusal = self.row, self.refusal
        if row is None:
            best = "nothing" if refusal is None else refusal.change or refusal.nearest
            why = [f"   {name}: {'; '.join(map(str, reasons))}" for name, reasons in self.refusals]
            return "\n".join([self.request, "-> no row takes it", f"   nearest that works: {best}", *why])
        since = ".".join(map(str, row.min_version))
        run_on = ", ".join(row.run_on) or "no machine yet"
        lines = [
            self.request,
            f"-> {row.name}",
            f"   calls {called(row)}",
            *([f"   needs {row.library} {since} or newer"] if since else []),
            f"   has run on {run_on}",
            *([f"   NaN and infinities: {row.nonfinite}"] if row.nonfinite else []),
            *([f"   {self.tuned}"] if self.tuned else []),
            *([f"   {self.launch}"] if self.launch else []),
        ]
        return "\n".join(lines)


@names_arguments
def explain(request: Request, arch: Arch | None = None, versions: Versions = ANY_VERSION) -> Explanation:
    """Explain which row runs a request on an architecture (by default its device's), and why others do not.

    If no row takes it, the explanation says so, why, and what to change; `explain` does not raise NoRow.
    """
    check_request(request)
    if arch is not None and not isinstance(arch, int):
        raise BadRequest("arch", shown(arch), "an Arch, such as dispatch.Arch.of('sm_90')")
    check_type("versions", versions, Mapping)
    where = request.device.arch if arch is None else arch
    chosen = first_taker(request, where, versions)
    if chosen is None:
        refusal = no_row(request, where, versions)
        return Explanation(request.describe(), None, tuple(refusal.nearest_first), refusal=refusal)
    plan = _plan(request) if where == request.device.arch else None
    tuned = ""
    if request.autotune and where != HOST:
        count = sum(1 for _ in candidates(request, where, versions))
        tuned = f"{count} rows take it; they are timed when it first runs" if count > 1 else ""
        if plan is not None and tuned:
            chosen, tuned = plan.row, f"{plan.row.name} was the fastest of {count} rows"
    before = itertools.takewhile(lambda entry: entry[0] is not chosen, reasons(request, where, versions))
    lost = (Refusal(Kind.RULE, "takes it, but was not the fastest"),)
    refused = tuple((row.name, tuple(why) or lost) for row, why in before if row.on(where))
    return Explanation(request.describe(), chosen, refused, _launch(plan), tuned=tuned)


def _plan(request: Request) -> Plan | None:
    """The plan of a request on the current stream; None if it has not run there."""
    plan: Plan | None = request.device.executor().plans.get((type(request), *request.key()))
    return plan


def _launch(plan: Plan | None) -> str:
    """How a plan is launched, as text; "" if unknown."""
    if plan is None:
        return ""
    if plan.relocation is None:
        return "" if plan.launch is None else "launched by its library; prepare(request, graph=True) captures it"
    why, nodes = plan.relocation.why, plan.relocation.nodes
    if why:
        return f"launched by its library: {why}"
    return f"launched as a graph of {nodes} node{'s' if nodes > 1 else ''}, at any addresses"
