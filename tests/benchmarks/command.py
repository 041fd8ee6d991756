"""What each benchmark's command begins with: its options, its device and its report, or one line why it cannot run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from report import Report, environment, say

import dispatch as dp
from cudabind._command import Parser, ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def command(
    measure: Callable[..., None],
    doc: str | None,
    *,
    device: str = "cuda:0",
    tables: Sequence[str] = (),
    shortcuts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `measure(device, quick, report)` as the command line says; "auto" is the GPU if there is one.

    With names of `tables` there is an option `--only`, and `measure` is told which of them are wanted; `shortcuts` are
    options for one of them each, by their words.
    """
    sys.exit(ended(Path(sys.argv[0]).stem, lambda: _run(measure, doc, device, tables, shortcuts)))


def _run(
    measure: Callable[..., None], doc: str | None, device: str, tables: Sequence[str], shortcuts: Mapping[str, str]
) -> int:
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device, help=f"cuda:N, host, or auto: the GPU if there is one ({device})")
    parser.add_argument("--quick", action="store_true", help="few repeats: tests whether it runs, not how fast")
    parser.add_argument("--json", metavar="FILE", help="keep the figures there, from the first one on")
    if tables:
        parser.add_argument("--only", help=f"some of the tables, with commas ({','.join(tables)})")
    for word, table in shortcuts.items():
        parser.add_argument(f"--{word}", action="append_const", const=table, dest="shortcuts", help=f"--only {table}")
    options = parser.parse_args()
    short = (getattr(options, "shortcuts", None) or []) if tables else []
    wanted = [*(options.only.split(",") if tables and options.only else []), *short] or list(tables)
    if unknown := set(wanted) - set(tables):
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(tables)}")
    try:
        chosen = dp.device(None if options.device == "auto" else options.device)
    except dp.errors.DispatchError as error:
        say(f"{Path(sys.argv[0]).stem} cannot run on {options.device}: {error}")
        return 0
    report = Report(options.json)
    report.put("environment", environment(chosen))
    measure(chosen, options.quick, report, *([wanted] if tables else []))
    return 0


@contextmanager
def empty_cache() -> Iterator[None]:
    """Autotune measures anew in here, and the user's cache stays as it is."""
    before = os.environ.get("CUDABIND_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDABIND_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["CUDABIND_CACHE"]
            if before is not None:
                os.environ["CUDABIND_CACHE"] = before
