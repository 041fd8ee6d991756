"""cuFile: a file into GPU memory and back, where its driver opens at all: in a process of its own, with a time limit.

Without NVIDIA's kernel module or a file system that it knows, cuFile goes through the CPU's memory (its compatibility
mode), which the same calls use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = ("cuda", "cufile")
SECONDS = 120
ROOT = Path(__file__).parents[3]
PROGRAM = """
import ctypes, json, os, sys
import numpy as np
from cudabind import driver
from cudabind.errors import CudaError
from cudabind.sys import cufile
folder, size = sys.argv[1], 1 << 20
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)))
wanted = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
there, back = os.path.join(folder, "there"), os.path.join(folder, "back")
wanted.tofile(there)
def registered(path, flags):
    fd = os.open(path, flags, 0o600)
    description = cufile.CUfileDescr_t(type=int(cufile.CUfileFileHandleType.CU_FILE_HANDLE_TYPE_OPAQUE_FD))
    description.handle.fd = fd
    handle = cufile.CUfileHandle_t()
    cufile.cuFileHandleRegister(handle, description)
    return fd, handle
try:
    cufile.cuFileDriverOpen()
    memory = int(driver.cuMemAlloc(size))
    driver.cuMemsetD8(memory, 0xFF, size)
    cufile.cuFileBufRegister(memory, size, 0)
    fd, handle = registered(there, os.O_RDONLY)
    read = cufile.cuFileRead(handle, memory, size - 4096, 4096, 0)
    cufile.cuFileHandleDeregister(handle)
    os.close(fd)
    found = np.empty(size, np.uint8)
    driver.cuMemcpyDtoH(found.ctypes.data, memory, size)
    fd, handle = registered(back, os.O_RDWR | os.O_CREAT)
    written = cufile.cuFileWrite(handle, memory, size - 8192, 0, 4096)
    cufile.cuFileHandleDeregister(handle)
    os.close(fd)
    cufile.cuFileBufDeregister(memory)
    cufile.cuFileDriverClose_v2()
except CudaError as error:
    print(json.dumps({"refused": str(error), "name": error.name}))
else:
    print(json.dumps({
        "read": read, "written": written,
        "right": bool((found[:-4096] == wanted[4096:]).all() and (found[-4096:] == 0xFF).all()),
        "back": bool((np.fromfile(back, np.uint8) == wanted[8192:]).all()),
    }))
"""


def test_a_file_goes_into_gpu_memory_and_back(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    try:  # where it writes its log
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"cuFile's driver did not open within {SECONDS} s: it waits for a kernel module that is not there")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    if "refused" in told:
        assert told["name"].startswith("CU_FILE_")  # in its own words, and nothing has crashed
        pytest.skip(told["refused"])
    assert told == {"read": (1 << 20) - 4096, "written": (1 << 20) - 8192, "right": True, "back": True}
