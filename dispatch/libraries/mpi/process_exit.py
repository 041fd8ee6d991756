"""The end of a process that has lost a rank: it leaves without MPI_Finalize, which may wait for that rank for ever.

Measured with Open MPI 5.0.11 under `mpirun --with-ft ulfm`: of ten programs that had lost a rank to SIGKILL one stayed
in MPI_Finalize, holding the interpreter's lock. mpi4py calls that once the interpreter is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

__all__ = ["exit_without_finalize"]

_is_requested = False


def exit_without_finalize() -> None:
    """Have the process end behind its exit handlers, and not with MPI's; again, it does nothing.

    Handlers that were there before the first world of MPI are not called then, but that of `logging`. The status is 1
    where an exception ended the program, else 0: what it gave to `sys.exit` is not to be had any more.
    """
    global _is_requested
    _is_requested = True


@atexit.register
def _exit() -> None:
    if not _is_requested:
        return
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or be nobody's
            stream.flush()
    os._exit(1 if getattr(sys, "last_value", None) is not None else 0)
