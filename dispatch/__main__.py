"""The command line: `python -m dispatch table | explain | doctor | cache | replay | top | bench`.

Once installed, `dispatch` alone does the same. Each command is a file of `cli/`, imported only when it is asked for.
`--import MODULE` brings in rows and ops of others first, as installed packages do by themselves.
Nothing here needs a GPU, and only `doctor`, `replay` and `bench` use one where there is one.
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
    "table": "the rows: what runs where, by which library function",
    "explain": "the row that a request would take, or why none takes it",
    "doctor": "driver, GPUs, libraries and versions; what works, and what to do about the rest",
    "cache": "what autotune keeps on disk",
    "replay": "run a supervisor's journal again, on random data, and find the first request that ends otherwise",
    "top": "a live view of the GPUs, or of the supervisors of a running process",
    "bench": "measure against torch, CuPy, nvmath-python and C, whichever are installed",
}


STATUSES = "Exit status: 0; 1 for a refusal or a failure; 2 for a mistake in the call; 130 after Ctrl-C."
PAGED = ("table", "explain", "doctor", "cache")  # the others show what they do while they do it


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    That is 0, or 1 for a refusal or a failure, 2 for a mistake in the call, and 130 after Ctrl-C.
    """
    return ended(program("dispatch"), lambda: _run(sys.argv[1:] if arguments is None else list(arguments)))


def _run(given: list[str]) -> int:
    left, modules, wide = _taken(given)
    show_whole_lines(wide)
    tell_pipes()
    try:
        with warnings.catch_warnings(), paged() if _command(left) in (None, *PAGED) else nullcontext():
            warnings.showwarning = _warn
            for module in modules:
                plugins.load(module)
            options = _parser(_command(left)).parse_args(left)
            status: int = options.run(options)
    except (DispatchError, CudaError, MemoryError) as error:
        mistake(program("dispatch"), printable(str(error) or type(error).__name__))
        return 2
    finally:
        tell_pipes(False)
    return status


def _parser(named: str | None) -> Parser:
    """The options of all, and of the command that is named."""
    parser = Parser(prog=program("dispatch"), description="Which library function carries out what.", epilog=STATUSES)
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
    """For their help alone: `_taken` has read them, because a module may bring an op, and so options."""
    parser.add_argument("--import", metavar="MODULE", help="import it first, for its rows and ops; may be repeated")
    parser.add_argument("--wide", action="store_true", help="fold no line and leave no column out on a terminal")


def _command(given: list[str]) -> str | None:
    return next((word for word in given if not word.startswith("-")), None)


def _taken(given: list[str]) -> tuple[list[str], list[str], bool]:
    """The command line without `--import MODULE` and `--wide`, wherever they stand; the modules; whether it is wide."""
    left: list[str] = []
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
            left.append(word)
    return left, modules, wide


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Warnings, such as that of a package whose rows are broken, are one line here."""
    complain(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
