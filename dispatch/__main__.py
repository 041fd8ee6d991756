"""The command line: `python -m dispatch table | explain | doctor | cache | replay | top | bench`.

Once installed, `dispatch` alone does the same. Each command is a file of `cli/`, imported only when it is run.
`--import MODULE` first loads rows and ops of other packages; installed packages do that through entry points.
Nothing here needs a GPU, and only `doctor`, `replay` and `bench` use one if there is one.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import nullcontext

from cudabind import __version__
from cudabind._command import Parser, ended, mistake, program
from cudabind._progress import tell_pipes
from cudabind._terminal import paged, show_whole_lines
from cudabind.errors import CudaError
from dispatch.cli import complain, plugins, printable
from dispatch.errors import DispatchError

__all__ = ["main"]

COMMANDS = {
    "table": "the rows: which requests run on which GPU, by which library function",
    "explain": "the row that a request would use, or why no row takes it",
    "doctor": "driver, GPUs, libraries and versions; what works, and how to fix the rest",
    "cache": "the results of autotune and the compiled kernels on disk",
    "replay": "run a supervisor's journal again, on random data, and find the first request with another outcome",
    "top": "a live view of the GPUs, or of the supervisors of a running process",
    "bench": "measure against torch, CuPy, nvmath-python and C, whichever are installed",
}


STATUSES = "Exit status: 0; 1 for a refusal or a failure; 2 for wrong arguments; 130 after Ctrl-C."
PAGED = ("table", "explain", "doctor", "cache")  # the others print while they work


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    That is 0, or 1 for a refusal or a failure, 2 for wrong arguments, and 130 after Ctrl-C.
    """
    return ended(program("dispatch"), lambda: _run(sys.argv[1:] if arguments is None else list(arguments)))


def _run(given: list[str]) -> int:
    words, modules, wide = _taken(given)
    show_whole_lines(wide)
    tell_pipes()
    try:
        with warnings.catch_warnings(), paged() if _command(words) in (None, *PAGED) else nullcontext():
            warnings.showwarning = _warn
            for module in modules:
                plugins.load(module)
            options = _parser(_command(words)).parse_args(words)
            status: int = options.run(options)
    except (DispatchError, CudaError, MemoryError) as error:
        mistake(program("dispatch"), printable(str(error) or type(error).__name__))
        return 2
    finally:
        tell_pipes(False)
    return status


def _parser(named: str | None) -> Parser:
    """The options common to all commands, and those of the named command."""
    parser = Parser(
        prog=program("dispatch"), description="Which library function carries out which request.", epilog=STATUSES
    )
    parser.add_argument("--version", action="version", version=f"dispatch {__version__}")
    _add_common(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == named:
            module = importlib.import_module(f"dispatch.cli.{name}")
            module.add_arguments(command)
            _add_common(command)
            command.set_defaults(run=module.run)
    return parser


def _add_common(parser: Parser) -> None:
    """Add options for the help text only: `_taken` reads them first, because a module may add an op with options."""
    parser.add_argument(
        "--import", metavar="MODULE", help="import this module first, for its rows and ops; may be repeated"
    )
    parser.add_argument("--wide", action="store_true", help="show all columns on a terminal, without wrapping lines")


def _command(given: list[str]) -> str | None:
    return next((word for word in given if not word.startswith("-")), None)


def _taken(given: list[str]) -> tuple[list[str], list[str], bool]:
    """The words other than `--import MODULE` and `--wide`, which may be anywhere; the modules; whether it is --wide."""
    others: list[str] = []
    modules: list[str] = []
    wide = False
    words = iter(given)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--import" and (equals or (value := next(words, ""))):
            modules.append(value)
        elif word == "--wide":
            wide = True
        else:
            others.append(word)
    return others, modules, wide


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning, such as that about a package with broken rows, as one line."""
    complain(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
