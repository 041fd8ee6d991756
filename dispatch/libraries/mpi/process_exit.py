"""Exit of a process that has lost a rank: without MPI_Finalize, which may wait for that rank for ever.

Measured with Open MPI 5.0.11 under `mpirun --with-ft ulfm`: of ten programs that had lost a rank to SIGKILL one stayed
in MPI_Finalize, holding the GIL. mpi4py calls MPI_Finalize after the interpreter has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

__all__ = ["exit_without_finalize"]

_is_requested = False


def exit_without_finalize() -> None:
    """Make the process end after its exit handlers, without MPI_Finalize; a second call does nothing.

    Exit handlers that were registered before the first world of MPI are not called then, except that of `logging`. The
    status is 1 if an exception ended the program, else 0: the argument of `sys.exit` is not available any more.
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
        with contextlib.suppress(Exception):  # it may be closed, or None
            stream.flush()
    os._exit(1 if getattr(sys, "last_value", None) is not None else 0)
