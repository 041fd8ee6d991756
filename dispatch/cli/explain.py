"""`python -m dispatch explain OP …`: the row that would take a request, from the table alone, or why no row takes it.

The request is a real one over host memory whose data is never read, so it is checked like any other. Every field of the
op's request class is a flag; values that the command line does not give, such as the order of operands, are chosen so
that a row takes the request. The only fact about the machine is the installed library's version, which needs no GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cudabind._command import Parser
from dispatch.cli import print_aligned, print_json, say
from dispatch.cli.operands import RequestDraft
from dispatch.cli.probe import find_row, find_row_by_dtypes, request_classes
from dispatch.cli.request_flags import ORDERS, add_flags, given_fields, reader
from dispatch.cli.table import architecture, describe, rule_text, version_text
from dispatch.device.registry import device
from dispatch.device.tensor import Tensor
from dispatch.errors import NEAREST, BadRequest, NoRow
from dispatch.keys import Compute, Dtype, Epilogue
from dispatch.table.select import called
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.refusal import Refusal

__all__ = ["add_arguments", "installed", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`: an op, and the options of its requests."""
    brings = "--import MODULE adds your own"
    ops = parser.add_subparsers(dest="op", required=True, metavar="OP", help=brings, parser_class=_OpParser)
    for op in TABLE.ops:
        ops.add_parser(op, help=", ".join(dict.fromkeys(row.library for row in TABLE.of(op)))).op = op


class _OpParser(Parser):
    """The options of one op, created only for the op that is named: those of all ops take a quarter of a second.

    argparse looks for translation files for each parser, which takes a fifth of a millisecond, so the parser is created
    at its first use.
    """

    op = ""

    def __init__(self, **options: Any) -> None:
        self.__dict__["_options"] = options

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.pop("_options", None)
        if options is None:
            raise AttributeError(name)
        super().__init__(**options)
        _add_op(self, self.op)
        return getattr(self, name)


def _add_op(parser: argparse.ArgumentParser, op: str) -> None:
    kinds = request_classes(op)
    parser.set_defaults(kinds=kinds)
    parser.usage = "%(prog)s [options]"  # they would fill a screen, and are listed below with their meanings
    operand: Any = reader("", Tensor)
    names = ", ".join(Dtype.by_name)
    if not kinds:  # the op of a user's row, for which the table has only the columns
        parser.add_argument(
            "--dtype", type=_argparse_type(reader("dtype", Any)), action="append", required=True, help=names
        )
        parser.add_argument("--compute", type=_argparse_type(reader("", Compute)), help=", ".join(Compute.__members__))
        parser.add_argument(
            "--epilogue", type=_argparse_type(reader("", Epilogue)), default=Epilogue.NONE, help="default: NONE"
        )
    else:
        add_flags(parser, kinds)
        parser.add_argument(
            "--dtype", type=_argparse_type(reader("dtype", Any)), help=f"of operands that have no other: {names}"
        )
        parser.add_argument(
            "--shape", type=_argparse_type(operand), action="append", default=[], metavar="8x64[:f16][:rows]",
            help=f"an operand, in the order of the request's fields; extents, dtype and order ({', '.join(ORDERS)}), "
            "each optional; may be repeated",
        )  # fmt: skip
    parser.add_argument("--arch", type=architecture, help="sm_90, or host (default: this machine's)")
    parser.add_argument("--all", action="store_true", help="show every refusal")
    parser.add_argument("--json", action="store_true", help="print one object")


def _argparse_type(each: Any) -> Any:
    """A reader as the `type` of an argparse argument."""

    def read(text: str) -> Any:
        try:
            return each.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected {each.expected}{each.hint(text)}") from None

    return read


def run(options: argparse.Namespace) -> int:
    """Explain one request; returns 1 if no row takes it."""
    arch = device().arch if options.arch is None else options.arch
    refusal: NoRow | None
    if not options.kinds:
        row, refusal = find_row_by_dtypes(options.op, options.dtype, arch, options.compute, options.epilogue)
        text = f"{options.op}({', '.join(map(str, options.dtype))})"
    else:
        row, request, refusal = find_row(_drafts(options), arch)
        text = "" if request is None else request.describe()
    if row is not None:
        _print_row(options, text, row)
    elif refusal is not None:
        _print_refusals(options, refusal)
    return 0 if row is not None else 1


def _drafts(options: argparse.Namespace) -> list[RequestDraft]:
    """The drafts of the request classes that accept the given fields; BadRequest if none does."""
    drafts: list[RequestDraft] = []
    wrong: list[BadRequest] = []
    for kind in options.kinds:
        try:
            drafts.append(_draft(options, kind))
        except BadRequest as error:  # noqa: PERF203  # there is nearly always one class
            wrong.append(error)
    if not drafts:
        raise wrong[0]
    return drafts


def _draft(options: argparse.Namespace, kind: type[Any]) -> RequestDraft:
    values = given_fields(options, kind)
    if "on" in {field.name for field in fields(kind)}:  # a device: the host is enough
        values["on"] = device("host")
    draft = RequestDraft(kind, values, options.dtype)
    draft.add_shapes(options.shape)
    for name in draft.missing_fields():
        raise BadRequest(f"--{name.replace('_', '-')}", "nothing", draft.expected(name))
    return draft


def installed(library: str) -> dict[str, str | None]:
    """Version and path of an installed library, without a GPU; or the problem and what to install."""
    from cudabind import LIBRARIES, _load
    from cudabind.errors import CudaError

    if library not in LIBRARIES:
        import importlib.metadata

        try:
            return {"version": importlib.metadata.version(library), "path": None, "problem": None}
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return {"version": None, "path": None, "problem": None}
    try:
        return {"version": _load.version(library), "path": _load.path(library), "problem": None}
    except CudaError as error:
        return {"version": None, "path": None, "problem": str(error)}


def _print_row(options: argparse.Namespace, text: str, row: Row) -> None:
    version_and_path = installed(row.library)
    if options.json:
        facts = {"request": text, "row": row.name, **describe(row)}
        shown = {f"installed_{name}": value for name, value in version_and_path.items()}
        print_json({**facts, **shown, "call": _call_path(row), "refusals": [], "nearest": None, "change": None})
        return
    lines = [
        ("row", row.name),
        ("calls", called(row)),
        ("through", _call_path(row)),
        ("needs", f"{row.library} {version_text(row.min_version)} or newer" if row.min_version else "nothing else"),
        ("installed", _installed_text(row, version_and_path)),
        ("run on", ", ".join(row.run_on) or "no machine yet"),
        *(("asks", rule_text(rule)) for rule in row.rules),
        *([("note", row.note)] if row.note else []),
        *([("NaN, inf", row.nonfinite)] if row.nonfinite else []),
    ]
    say(text, "bold", 2)
    print_aligned(lines, indent="  ")


def _installed_text(row: Row, here: dict[str, str | None]) -> str:
    if here["version"] is None:
        return here["problem"] or "unknown"
    version = tuple(int(part) for part in here["version"].split(".") if part.isdigit())
    old = " - too old" if version < row.min_version else ""
    return f"{row.library} {here['version']}{old}" + (f" ({here['path']})" if here["path"] else "")


def _call_path(row: Row) -> str:
    return f"{row.call.__module__}.{getattr(row.call, '__qualname__', row.call)}"


def _print_refusals(options: argparse.Namespace, refusal: NoRow) -> None:
    """Print why no row takes a request, the nearest row first."""
    refusals = refusal.nearest_first
    if options.json:
        entries = [{"row": row, "reasons": [_reason_json(reason) for reason in reasons]} for row, reasons in refusals]
        print_json(
            {
                "request": refusal.request,
                "row": None,
                "refusals": entries,
                "nearest": refusal.nearest,
                "change": refusal.change,
            }
        )
        return
    say(f"no row takes {refusal.request}", "red", 2)
    say(f"Nearest that works: {refusal.change or refusal.nearest}", "green", 2)
    for row, reasons in refusals if options.all else refusals[:NEAREST]:
        say(f"  {row}", hang=4)
        for reason in reasons:
            say(f"    {reason}", hang=6)
    if len(refusals) > NEAREST and not options.all:
        say(f"  … and {len(refusals) - NEAREST} rows that are further away: --all shows them")


def _reason_json(reason: Refusal) -> dict[str, str]:
    return {"kind": reason.kind.value, "text": str(reason)}
