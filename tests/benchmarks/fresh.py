"""Scripts in fresh processes, for the time that imports take: import_time and binding_imports ask.

pip compiles what it installs. So that a checkout is measured as users have it, also where Python was told to keep no
bytecode (as container images do), the processes share a folder of it, which the first of them fills.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cudabind

ROOT = str(Path(cudabind.__file__).resolve().parents[1])  # the very package that this process has


def run(script: str, bytecode: str) -> str:
    """What a script prints in a process of its own that keeps its bytecode in a folder."""
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": bytecode}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=60).stdout
