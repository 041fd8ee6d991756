"""Argument parsing, error messages and exit statuses of the command lines of `cudabind` and `dispatch`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from cudabind._terminal import folded, paint, width

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["INTERRUPTED", "Parser", "ended", "mistake", "program"]

INTERRUPTED = 130  # the exit status by which shells report a program that Ctrl-C ended


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence and a pointer to `--help`, instead of the whole usage."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.set_defaults(parser=self)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse, but unrecognized arguments are an error of the innermost command."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(options, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Print the error, with a similar option or command, and exit with status 2."""
        mistake(self.prog, f"{message}{_meant(message, self._option_string_actions)}")
        sys.stderr.write(f"`{self.prog} --help` lists the arguments\n")
        raise SystemExit(2)


def mistake(who: str, message: str) -> None:
    """Print an error message on stderr, folded on a terminal."""
    for line in folded(f"{who}: error: {message}", width(sys.stderr), 2):
        sys.stderr.write(line.replace("error:", paint("error:", "red", sys.stderr), 1) + "\n")


def _meant(message: str, options: Iterable[str]) -> str:
    """The suggestion of the known option or command that is nearest to an unknown one; "" if none is near."""
    _, _, unknown = message.partition("unrecognized arguments: ")
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if unknown.startswith("-"):
        word, candidates = unknown.split()[0].partition("=")[0], list(options)
    elif choice:
        word, candidates = choice[1], re.findall(r"[\w-]+", choice[2])
    else:
        return ""
    from difflib import get_close_matches

    near = get_close_matches(word, candidates, 1)
    return f"; did you mean {near[0]}?" if near else ""


def program(name: str) -> str:
    """The command that a user types for a package's command line."""
    return name if os.path.basename(sys.argv[0]) == name else f"python -m {name}"


def ended(who: str, run: Callable[[], int]) -> int:
    """Run a command line and return its exit status.

    It is 130 after Ctrl-C, 0 if the reader of its output, such as `head`, has closed the pipe, and 2 if output cannot
    be written.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # the caller has closed it, and wants no output
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            status = run()
        except SystemExit as end:  # from argparse, whose help may still be in the buffer
            sys.stdout.flush()
            raise end from None
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_output()
        return 0
    except OSError as error:
        _abandon_output()
        mistake(who, str(error))
        return 2
    except KeyboardInterrupt:
        # A second Ctrl-C ends the process at once, even while it waits for threads.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return INTERRUPTED
    return status


def _abandon_output() -> None:
    """Discard what is left in stdout's buffer, so that it does not fail again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
