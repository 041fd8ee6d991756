"""NVSHMEM's host library: which version it is, and one processing element that puts into its own symmetric memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ctypes import byref, c_int32
from pathlib import Path

import pytest

from cudabind import _load
from cudabind.sys import nvshmem

LIBRARIES = ("cuda", "nvshmem")
SECONDS = 120
ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
from ctypes import sizeof
import numpy as np
from cudabind import _load, driver
from cudabind.sys import nvshmem as n
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)))
newer = tuple(map(int, _load.version("nvshmem").split("."))) >= (3, 8)
number = (2 if newer else 1) << 16  # of these structs in nvshmem_types.h; the size is below it
unique, attr = n.nvshmemx_uniqueid_t(), n.nvshmemx_init_attr_t()
unique.version = (1 << 16) + sizeof(unique)
attr.version, attr.args.version = number + sizeof(attr), number + sizeof(attr.args)
attr.args.uid_args.version = (1 << 16) + sizeof(attr.args.uid_args)
if newer:
    attr.args.cuda_device_id = -1
steps = [n.nvshmemx_get_uniqueid(unique), n.nvshmemx_set_attr_uniqueid_args(0, 1, unique, attr)]
if not any(steps):
    steps.append(n.nvshmemx_hostlib_init_attr(int(n.flags.NVSHMEMX_INIT_WITH_UNIQUEID), attr))
if any(steps):
    print(json.dumps({"refused": steps}))
    sys.exit()
pe, count, size = n.nvshmem_my_pe(), n.nvshmem_n_pes(), 1 << 16
x, y = n.nvshmem_malloc(size), n.nvshmem_malloc(size)
wanted = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
found = np.zeros_like(wanted)
driver.cuMemcpyHtoD(x, wanted.ctypes.data, size)
driver.cuMemsetD8(y, 0xFF, size)
driver.cuCtxSynchronize()
n.nvshmem_putmem(y, x, size, pe)
n.nvshmem_quiet()
driver.cuCtxSynchronize()
driver.cuMemcpyDtoH(found.ctypes.data, y, size)
n.nvshmem_free(x)
n.nvshmem_free(y)
n.nvshmemx_hostlib_finalize()
print(json.dumps({"pe": pe, "count": count, "right": bool((found == wanted).all())}))
"""


def test_it_tells_its_version():
    numbers = [c_int32(-1) for _ in range(3)]
    nvshmem.nvshmemx_vendor_get_version_info(*map(byref, numbers))
    told = ".".join(str(number.value) for number in numbers)
    assert told == _load.version("nvshmem")
    assert numbers[0].value == 3
    major, minor = c_int32(-1), c_int32(-1)
    nvshmem.nvshmem_info_get_version(byref(major), byref(minor))  # of the OpenSHMEM that it follows
    assert (major.value, minor.value) >= (1, 0)


def test_one_processing_element_puts_into_its_own_memory():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", PROGRAM], os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"NVSHMEM found no way to begin within {SECONDS} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:  # it ends the process where it finds no network interface or transport
        pytest.skip(f"NVSHMEM does not begin here: {(done.stdout + done.stderr).strip()[-400:]}")
    told = json.loads(lines[-1])
    if "refused" in told:
        pytest.skip(f"NVSHMEM refuses to begin with the statuses {told['refused']}")
    assert told == {"pe": 0, "count": 1, "right": True}
