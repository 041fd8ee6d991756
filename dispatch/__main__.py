"""The command line: `python -m dispatch table | explain | doctor | cache | replay | top | bench`.

Once installed, `dispatch` alone does the same. Each command is a file of `cli/`, imported only when it is asked for.
Nothing here needs a GPU, and only `doctor`, `replay` and `bench` use one where there is one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from cudabind import __version__
from dispatch.cli import complain
from dispatch.errors import DispatchError

__all__ = ["main"]

COMMANDS = {
    "table": "the rows: what runs where, by which library function",
    "explain": "the row that a request would take, or why none takes it",
    "doctor": "driver, GPUs, libraries and versions; what works, and what to do about the rest",
    "cache": "what autotune keeps on disk",
    "replay": "run a supervisor's journal again, on random data, and find the first request that ends otherwise",
    "top": "a live view of the supervisors of a running process",
    "bench": "measure against torch, CuPy, nvmath-python and C, whichever are installed",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for a refusal or a failure, 2 for a mistake in the call."""
    given = sys.argv[1:] if arguments is None else arguments
    named = next((word for word in given if not word.startswith("-")), None)
    program = "dispatch" if os.path.basename(sys.argv[0]) == "dispatch" else "python -m dispatch"
    parser = argparse.ArgumentParser(prog=program, description="Which library function carries out what.")
    parser.add_argument("--version", action="version", version=f"dispatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == named:
            module = importlib.import_module(f"dispatch.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(given)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DispatchError, MemoryError, OSError) as error:
        complain(f"{parser.prog}: {error}")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
