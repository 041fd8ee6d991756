"""Programs that fork, each in a process of its own: what goes wrong there is a deadlock.

A forked process that hangs is ended by an alarm and counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 600  # for a whole program, on a machine that has other things to do

BEGIN = """
import faulthandler, gc, itertools, os, signal, socket, sys, tempfile, threading, time, traceback, warnings
warnings.simplefilter("ignore")
import numpy as np
import dispatch as dp
from dispatch.supervise import status_server as status
from dispatch.errors import Closed, DispatchError

status.PATIENCE = 120.0  # seconds that an answer may take: how busy the machine is must not matter
ALARM = 300  # seconds that a forked process has, which needs a fraction of one
host = dp.device("host")
faulthandler.register(signal.SIGALRM, chain=True)  # says where a forked process hangs, which ends by it

def forked(work):
    # Run in a forked process; its exit status, or minus the signal that ended it.
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(ALARM)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def product(n=4, m=5, k=3):
    a, b = host.array(np.ones((n, k), np.float32)), host.array(np.ones((k, m), np.float32))
    assert (np.asarray(dp.matmul(a, b)) == k).all()

def exchange():
    tensor = host.array(np.arange(6, dtype=np.float32))
    assert np.from_dlpack(tensor)[5] == 5
    assert dp.from_dlpack(np.arange(3))[2].item() == 2
    tensor.__dlpack__()  # which nobody consumes
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), f"{done.returncode} {done.stdout} {done.stderr[-3000:]}"
