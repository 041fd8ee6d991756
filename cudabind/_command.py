"""How the command lines end: with a sentence where the user is mistaken, and in silence where he has seen enough."""

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

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a sentence, and where to read on, instead of all options."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.set_defaults(parser=self)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What is said, as argparse has it; what no command knows is the mistake of the one that was named last."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        mistake(self.prog, f"{message}{_meant(message, self._option_string_actions)}")
        sys.stderr.write(f"`{self.prog} --help` shows what there is\n")
        raise SystemExit(2)


def mistake(who: str, message: str) -> None:
    """Say on stderr what is wrong; a terminal folds it."""
    for line in folded(f"{who}: error: {message}", width(sys.stderr), 2):
        sys.stderr.write(line.replace("error:", paint("error:", "red", sys.stderr), 1) + "\n")


def _meant(message: str, options: Iterable[str]) -> str:
    """The option or command that is nearest to one which is not there."""
    _, _, unknown = message.partition("unrecognized arguments: ")
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if unknown.startswith("-"):
        word, known = unknown.split()[0].partition("=")[0], list(options)
    elif choice:
        word, known = choice[1], re.findall(r"[\w-]+", choice[2])
    else:
        return ""
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def program(name: str) -> str:
    """What a user types for a package's command line."""
    return name if os.path.basename(sys.argv[0]) == name else f"python -m {name}"


def ended(who: str, run: Callable[[], int]) -> int:
    """Run a command line to its exit status.

    That is 130 after Ctrl-C, 0 where the reader, such as `head`, has seen enough, and 2 where output cannot be written.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # closed by who started this, who wants no output
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            status = run()
        except SystemExit as end:  # of argparse, whose help may stand in the buffer
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
        # What still runs, such as threads that are waited for at the end, a second one ends at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return INTERRUPTED
    return status


def _abandon_output() -> None:
    """What is left in stdout's buffer goes nowhere when Python ends, instead of failing once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
