"""The benchmark of the bindings runs without a GPU: every call does what it should in every way, and is measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "bench_bindings.py"
LIBRARIES = {"cublasLtMatrixLayoutGetAttribute": 5, "cusparseCooGet": 10, "cudnnGetRNNDescriptor_v8": 15}
BY_CTYPES = {"ctypes, untyped", "ctypes, c_void_p", "ctypes, same types", "unchecked", "checked"}


@pytest.mark.exhaustive
def test_the_bindings_are_measured_on_the_host(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the functions that do nothing, is not installed")
    target = tmp_path / "figures.json"
    command = [sys.executable, "-W", "error", str(SCRIPT), "--device", "host", "--quick", "--json", str(target)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(target.read_text())
    calls = figures["calls"]
    # A peer may be absent, and so may a library; a wrong result may not.
    assert not [why for why in calls["missing"].values() if "wrong result" in why]
    counted = {name: count for name, count in calls["arguments"].items() if name.startswith("counted")}
    assert counted == {"counted0": 0, "counted5": 5, "counted10": 10, "counted16": 16}
    for name in (*counted, *(name for name in LIBRARIES if name in calls["ns"])):
        assert calls["ns"][name].keys() >= BY_CTYPES, name
        assert calls["arguments"][name] == (counted | LIBRARIES)[name]
    assert figures["imports"]["ms"]["cudabind.sys.cublasLt"] > 0
    judged = [row["target"] for row in figures["targets"] if not row["verdict"].startswith("no verdict")]
    assert judged.count("unchecked") == judged.count("checked, beyond bare ctypes") == 4
