"""`python -m MODULE …` in processes forked from one that has imported everything already.

To import all rows takes most of a second, which a command pays once and each of a hundred tests of commands paid again.
A forked process has its own memory, environment, folder, terminal and end: a command finds nothing of another's.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import selectors
import socket
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120  # seconds, on a machine that has other things to do
# The lines on stderr that commands write while they take longer than two seconds, as on a busy machine.
PROGRESS = re.compile(r"(doctor.*|open libraries): \d+ of \d+, \d+ s.*\n")


class WarmStart:
    """Starts commands, one after the other; they come from a process that is made with the first of them."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(PATIENCE)

    def begin(
        self,
        module: str,
        words: Sequence[str],
        environment: dict[str, str],
        streams: Sequence[int],
        is_tty: bool = False,
    ) -> None:
        """Start a command with these streams, in a session of its own that has the terminal if they are one."""
        if self._server is None:
            number = self._theirs.fileno()
            command = [sys.executable, __file__, str(number)]
            self._server = subprocess.Popen(command, pass_fds=(number,), start_new_session=True, cwd="/")
            self._theirs.close()
        with tempfile.TemporaryFile() as file:  # an environment may be longer than a message
            file.write(json.dumps([module, list(words), environment, is_tty]).encode())
            file.flush()
            socket.send_fds(self._ours, [b"!"], [file.fileno(), *streams])

    def status(self) -> int:
        """What the command that was started last has ended with: its status, or its signal as a negative number."""
        return int(self._ours.recv(64))

    def run(self, module: str, words: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` gives for a command whose output is captured as text."""
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing:
            self.begin(module, words, environment, (nothing.fileno(), to_out, to_err))
        for end in (to_out, to_err):
            os.close(end)
        told = {out: b"", err: b""}
        with selectors.DefaultSelector() as waiting:
            for end in told:
                waiting.register(end, selectors.EVENT_READ)
            while waiting.get_map():
                for key, _ in waiting.select(PATIENCE):
                    data = os.read(key.fd, 1 << 16)
                    told[key.fd] += data
                    if not data:
                        waiting.unregister(key.fd)
                        os.close(key.fd)
        return subprocess.CompletedProcess([module, *words], self.status(), *(text.decode() for text in told.values()))

    def close(self) -> None:
        self._ours.close()
        if self._server is not None:
            self._server.wait(PATIENCE)


def serve(asked: socket.socket) -> str:
    """Fork for each command, and tell how it ended; in a process that is to run one, give its module's name."""
    while True:
        data, received, _, _ = socket.recv_fds(asked, 1, 4)
        if not data:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            asked.detach()
            return become(*received)
        for number in received:
            os.close(number)
        asked.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become(file: int, *streams: int) -> str:
    """Be a process that was started with this module, these words, this environment and these streams."""
    module, words, environment, is_tty = json.loads(os.pread(file, 1 << 24, 0))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 10)
    os.setsid()
    if is_tty:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        lines, errors = (1, "backslashreplace") if name == "stderr" else (1 if os.isatty(number) else -1, "strict")
        stream = open(number, mode, lines, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    before = (*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT), str(ROOT / "tests"))
    os.environ.clear()
    os.environ.update(environment)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.getcwd(), *given, *(path for path in sys.path if path not in (*before, *given))]
    importlib.invalidate_caches()
    sys.argv = [module, *words]
    return str(module)


def import_all() -> None:
    """All rows and commands; no row is in the table yet, and no package has been looked for."""
    sys.path.insert(0, str(ROOT))
    from dispatch import TABLE

    for name in (*TABLE._modules, *(f"dispatch.cli.{each}" for each in ("doctor", "explain", "plugins", "table"))):
        importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    import_all()
    runpy.run_module(serve(socket.socket(fileno=int(sys.argv[1]))), run_name="__main__", alter_sys=True)
