"""`python -m dispatch top` without a process: over a stand-in of NVML, with what a real one cannot tell or refuses."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import _load
from cudabind.errors import NvmlError
from cudabind.sys import nvml
from dispatch.__main__ import main
from dispatch.libraries.nvml.readings import Gpus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# GPU 1 is a slice of a GPU: it tells neither power nor how busy it is. One process of GPU 0 is in another container.
SOURCE = """
#include <stdio.h>
#include <string.h>
typedef unsigned long long u64;
typedef struct { unsigned pid; u64 memory; unsigned a, b; } process;
static int count = 2, open_, status, processes = 2, looks;
static char ids[2];
#define DEVICE(d) ((char *)(d) - ids)
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
const char *nvmlErrorString(int s) { return "the stand-in's words"; }
int nvmlInit_v2(void) { if (status == 9) return 9; open_++; return 0; }
int nvmlShutdown(void) { open_--; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return open_ ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) {
  if (status == 15) return 15; *d = ids + i; return i < 2 ? 0 : 2; }
static int text(char *to, unsigned n, const char *from) { if (n <= strlen(from)) return 7; strcpy(to, from); return 0; }
int nvmlSystemGetDriverVersion(char *t, unsigned n) { return text(t, n, "580.1"); }
int nvmlDeviceGetName(void *d, char *t, unsigned n) { return text(t, n, DEVICE(d) ? "MIG 1g.10gb" : "NVIDIA H200"); }
int nvmlDeviceGetUUID(void *d, char *t, unsigned n) { return text(t, n, DEVICE(d) ? "MIG-1" : "GPU-0"); }
int nvmlDeviceGetUtilizationRates(void *d, unsigned *r) { if (DEVICE(d)) return 3; r[0] = 87; r[1] = 41; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, u64 *m) { m[0] = 1ull << 30; m[1] = 0; m[2] = 1ull << 28; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *p) { *p = 312500; return DEVICE(d) ? 3 : 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *p) { *p = 700000; return DEVICE(d) ? 4 : 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *t) { *t = 54 + sensor; return 0; }
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *c) { *c = kind == 1 ? 1980 : kind == 2 ? 3201 : 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, process *p) {
  unsigned room = *n, i, have = DEVICE(d) ? 0 : processes + looks++ / 2;
  *n = have; if (room < have) return 7;
  for (i = 0; i < have; i++) { p[i].pid = 100 + i; p[i].memory = i ? -1ull : 64ull << 20; } return 0; }
int nvmlSystemGetProcessName(unsigned pid, char *t, unsigned n) { return pid == 100 ? text(t, n, "python") : 6; }
void standInSet(int c, int s) { count = c; status = s; looks = 0; }
int standInOpen(void) { return open_; }
"""


def unbind() -> None:
    """Have NVML's functions look for their library anew."""
    for function in vars(nvml).values():
        if getattr(function, "_bare", None) is not None:
            function._call(function._bind_and_call)
            function._bare = None
            function.__dict__.pop("unchecked", None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    source, made = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", made, source], check=True)
    return made


@pytest.fixture
def stand_in(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("CUDABIND_NVML_PATH", str(library))
    monkeypatch.setattr(_load, "_opened", {k: v for k, v in _load._opened.items() if k != "nvml"})
    unbind()
    made = ctypes.CDLL(str(library))
    made.standInSet(2, 0)
    yield made
    assert made.standInOpen() == 0  # what was begun is ended
    unbind()


@pytest.mark.usefixtures("stand_in")
def test_a_reading_has_what_nvml_says_in_units() -> None:
    with Gpus() as gpus:
        now = gpus.read()
    whole, part = now.gpus
    assert (now.driver, whole.name, whole.uuid) == ("580.1", "NVIDIA H200", "GPU-0")
    assert (whole.utilization, whole.memory_utilization, whole.temperature) == (87, 41, 54)
    assert (whole.memory_used, whole.memory_total) == (256 << 20, 1024 << 20)
    assert (whole.power, whole.power_limit, whole.sm_clock, whole.memory_clock) == (312.5, 700.0, 1980, 3201)
    assert (part.name, part.utilization, part.power, part.power_limit) == ("MIG 1g.10gb", None, None, None)
    assert part.processes == ()


@pytest.mark.usefixtures("stand_in")
def test_processes_that_come_while_it_looks_are_there_and_what_is_not_told_is_none() -> None:
    with Gpus() as gpus:
        found = [(each.pid, each.name, each.memory_used) for each in gpus.read().gpus[0].processes]
    assert found == [(100, "python", 64 << 20), (101, None, None)]


def test_the_view_has_a_line_for_each_gpu_and_each_process(stand_in: Any, capsys: Any) -> None:
    assert main(["top", "--once"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "gpu name busy memory busy memory power temperature sm clock memory clock"
    assert lines[1] == "0 NVIDIA H200 87% 41% 256 of 1,024 MiB 312 of 700 W 54 C 1980 MHz 3201 MHz"
    assert lines[2] == "1 MIG 1g.10gb - - 256 of 1,024 MiB - 54 C 1980 MHz 3201 MHz"
    assert lines[4:] == ["gpu pid memory process", "0 100 64 MiB python", "0 101 - -"]
    stand_in.standInSet(0, 0)
    assert main(["top", "--once"]) == 0
    assert "the driver finds no GPU" in capsys.readouterr().out


@pytest.mark.usefixtures("stand_in")
def test_scripts_get_one_object(capsys: Any) -> None:
    assert main(["top", "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["driver"] == "580.1"
    assert [gpu["power"] for gpu in told["gpus"]] == [312.5, None]
    assert told["gpus"][0]["processes"][1] == {"pid": 101, "name": None, "memory_used": None}


@pytest.mark.usefixtures("stand_in")
def test_it_goes_on_until_ctrl_c(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("dispatch.cli.gpu_view.time.sleep", sleep)
    assert main(["top", "--interval", "0.25"]) == 0
    assert waited == [0.25] * 3
    assert capsys.readouterr().out.count("NVIDIA H200") == 3


@pytest.mark.parametrize(("status", "words"), [(9, "DRIVER_NOT_LOADED"), (15, "GPU_IS_LOST")])
def test_a_driver_that_refuses_is_told_in_a_sentence(stand_in: Any, capsys: Any, status: int, words: str) -> None:
    stand_in.standInSet(2, status)
    assert main(["top", "--once"]) == 1
    told = capsys.readouterr()
    assert (told.out, words in told.err) == ("", True)
    assert told.err.startswith("the GPUs cannot be watched: nvml")


def test_a_failure_that_is_no_refusal_to_tell_is_raised(stand_in: Any) -> None:
    stand_in.standInSet(3, 0)  # there is no third GPU
    with Gpus() as gpus, pytest.raises(NvmlError, match="NVML_ERROR_INVALID_ARGUMENT"):
        gpus.read()


def test_without_a_driver_it_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDABIND_NVML_PATH", "/nowhere/libnvidia-ml.so.1")
    monkeypatch.setattr(_load, "_opened", {k: v for k, v in _load._opened.items() if k != "nvml"})
    unbind()
    assert main(["top"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("no GPUs to watch: NVML, which comes with NVIDIA's driver, was not found.")
