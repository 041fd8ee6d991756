"""`python -m dispatch explain OP …`: the row that a request would take, purely from the table, or why none takes it.

The request is a real one over memory of the host that nothing reads, so it is checked as any other is; what the command
line leaves open (the order of a and b, the dtypes of bias and aux) is filled in as the rows want it. Only the installed
library's version is asked of the machine, and that needs no GPU.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dispatch.cli import print_aligned, print_json, say
from dispatch.cli.probe import Probe, probes
from dispatch.cli.table import architecture, describe, rule_text, version_text
from dispatch.errors import NEAREST, NoRow
from dispatch.keys import Compute, Dtype, Epilogue, ScaleMode
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.refusal import Refusal

__all__ = ["add_arguments", "installed", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    names, dtypes = ", ".join(Epilogue.__members__), ", ".join(Dtype.by_name)
    parser.add_argument("op", choices=TABLE.ops, help="the op")
    parser.add_argument("--dtype", type=_dtype, required=True, help=f"of the first operand: {dtypes}")
    parser.add_argument("--b-dtype", type=_dtype, help="of the second operand (default: that of the first)")
    parser.add_argument("--c-dtype", type=_dtype, help="add a C of this dtype (default: none)")
    parser.add_argument("--out-dtype", type=_dtype, help="of the result (default: what the operands lead to)")
    parser.add_argument("--bias-dtype", type=_dtype, help="of the bias, if any (default: what the row wants)")
    parser.add_argument("--aux-dtype", type=_dtype, help="of the input of GELU, if any (default: what the row wants)")
    parser.add_argument("--epilogue", type=_member(Epilogue), default=Epilogue.NONE, help=f"{names} (default: NONE)")
    parser.add_argument("--arch", type=architecture, help="sm_90, or host (default: this machine's)")
    parser.add_argument(
        "--compute", type=_member(Compute), help=f"{', '.join(Compute.__members__)} (default: the row's)"
    )
    parser.add_argument(
        "--scales", type=_modes, default=(None, None), metavar="MODE[,MODE]",
        help=f"scale mode of a and b, or of both: {', '.join(ScaleMode.__members__)}, none (default: none)",
    )  # fmt: skip
    parser.add_argument("--shape", type=_shape, default=(256, 256, 256), metavar="M,N,K", help="default: 256,256,256")
    parser.add_argument(
        "--order", choices=("nn", "nt", "tn", "tt"),
        help="how a and b lie: n for dense rows, t for dense columns (default: as the row wants)",
    )  # fmt: skip
    parser.add_argument(
        "--reduced-precision", action="store_true",
        help="let sums and epilogues round to the result's dtype on the way (matmul)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="show every refusal")
    parser.add_argument("--json", action="store_true", help="print one object")


def _dtype(text: str) -> Dtype:
    try:
        return Dtype.of(text)
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _member(kind: type[Any]) -> Any:
    """Read a name of an enum, in any case, and a Compute without its COMPUTE_ too."""
    names = {short.lower(): name for name in kind.__members__ for short in (name, name.removeprefix("COMPUTE_"))}

    def read(text: str) -> Any:
        if text.lower() in names:
            return kind[names[text.lower()]]
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(kind.__members__)}")

    return read


def _modes(text: str) -> tuple[ScaleMode | None, ScaleMode | None]:
    read = _member(ScaleMode)
    found = [None if part.lower() == "none" else read(part) for part in text.split(",")]
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} has more modes than there are operands")
    return found[0], found[-1]


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write it like 256,256,256") from None


def run(options: argparse.Namespace) -> int:
    """Explain one request; 1 where no row takes it."""
    arch = options.arch
    if arch is None:
        from dispatch.device.registry import device

        arch = device().arch
    refusal: NoRow | None = None
    for probe in probes(options):
        row = probe.select(arch)
        if isinstance(row, NoRow):
            refusal = refusal or row  # of the likeliest request
            continue
        _accept(options, probe, row)
        return 0
    if refusal is not None:
        _refuse(options, refusal)
    return 1


def installed(library: str) -> dict[str, str | None]:
    """Version and path of a library as it is found here, without a GPU; or the problem, and what to install."""
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


def _accept(options: argparse.Namespace, probe: Probe, row: Row) -> None:
    here = installed(row.library)
    if options.json:
        facts = {"request": probe.text, "row": row.name, **describe(row)}
        found = {f"installed_{name}": value for name, value in here.items()}
        print_json({**facts, **found, "call": _place(row), "refusals": [], "nearest": None})
        return
    sys_module = "cudabind.sys." if row.min_version else ""
    lines = [
        ("row", row.name),
        ("calls", f"{sys_module}{row.library}.{row.function}"),
        ("through", _place(row)),
        ("needs", f"{row.library} {version_text(row.min_version)} or newer" if row.min_version else "nothing else"),
        ("installed", _here(row, here)),
        ("run on", ", ".join(row.run_on) or "no machine yet"),
        *(("asks", rule_text(rule)) for rule in row.rules),
        *([("note", row.note)] if row.note else []),
        *([("NaN, inf", row.nonfinite)] if row.nonfinite else []),
    ]
    say(probe.text)
    print_aligned(lines, indent="  ")


def _here(row: Row, here: dict[str, str | None]) -> str:
    if here["version"] is None:
        return here["problem"] or "unknown"
    version = tuple(int(part) for part in here["version"].split(".") if part.isdigit())
    old = " - too old" if version < row.min_version else ""
    return f"{row.library} {here['version']}{old}" + (f" ({here['path']})" if here["path"] else "")


def _place(row: Row) -> str:
    return f"{row.call.__module__}.{getattr(row.call, '__qualname__', row.call)}"


def _refuse(options: argparse.Namespace, refusal: NoRow) -> None:
    """Print why no row takes a request, the row that is nearest to it first."""
    refusals = refusal.nearest_first
    if options.json:
        found = [{"row": row, "reasons": [_reason(reason) for reason in reasons]} for row, reasons in refusals]
        print_json({"request": refusal.request, "row": None, "refusals": found, "nearest": refusal.nearest})
        return
    say(f"no row takes {refusal.request}")
    say(f"Nearest that works: {refusal.nearest}")
    for row, reasons in refusals if options.all else refusals[:NEAREST]:
        say("\n    ".join((f"  {row}", *map(str, reasons))))
    if len(refusals) > NEAREST and not options.all:
        say(f"  … and {len(refusals) - NEAREST} rows that are further away: --all shows them")


def _reason(reason: Refusal) -> dict[str, str]:
    return {"kind": reason.kind.value, "text": str(reason)}
