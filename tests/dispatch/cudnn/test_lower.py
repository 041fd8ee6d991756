"""Every graph of every case becomes finalized descriptors, without a GPU: cuDNN itself checks shapes, dtypes and names.

cuDNN's run-time compiler is linked to libcuda, which is only where a driver is; a stub of its symbols lets cuDNN load.
Engines are then asked for a GPU that is not there, and their kernels compiled: h200.json is what cuDNN 9.19 said of an
H200 (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION), with two keys that 9.28 asks for beside them, the width of the H200's
memory bus and 0 for a whole device. A case of each row of bf16 takes 10 s; all of them, 6 minutes of processor time,
are asked for where CUDNN_DEVICE_PROPERTIES names a file of properties (9.19.1 and 9.28.0 have engines for all).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudabind import _load
from cudabind.errors import LibraryNotFound

HERE = Path(__file__).parent
PROPERTIES = "CUDNN_DEVICE_PROPERTIES"
OPS = {"conv_fwd", "conv_bwd_data", "conv_bwd_filter", "sdpa_fwd", "sdpa_bwd", "norm_fwd", "norm_bwd", "reduce"}
# What loads a kernel succeeds with a handle of nothing; what would run one fails with CUDA_ERROR_NO_DEVICE.
LOADS = ("cuKernelGetFunction", "cuLibraryLoadData", "cuLibraryGetKernel", "cuModuleLoadData", "cuModuleGetFunction")
SUCCEEDS = (
    *("cuKernelSetAttribute", "cuKernelGetAttribute", "cuLibraryUnload", "cuModuleUnload"),
    "cuThreadExchangeStreamCaptureMode",  # around whatever a finalizer destroys: each would write a traceback otherwise
)
FAILS = (
    *("cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDeviceGet", "cuDeviceGetCount"),
    *("cuGetErrorName", "cuGetErrorString", "cuLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cuLibraryLoadFromFile", "cuLinkAddData", "cuLinkComplete", "cuLinkCreate", "cuLinkDestroy", "cuStreamGetCtx"),
    *("cuOccupancyMaxPotentialClusterSize", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
)


@pytest.fixture
def stub(tmp_path):
    """A folder with a libcuda.so.1 that has no device."""
    source = tmp_path / "stub.c"
    lines = [f"int {name}(void **made) {{ *made = (void *)8; return 0; }}" for name in LOADS]
    lines += [f"int {name}(void) {{ return 0; }}" for name in SUCCEEDS]
    lines += [f"int {name}(void) {{ return 100; }}" for name in FAILS]
    lines += ["int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"]
    source.write_text("\n".join(lines) + "\n")
    built = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    try:
        subprocess.run(built, check=True)
    except FileNotFoundError:
        pytest.skip("gcc is not installed, and the stub of libcuda needs it")
    return tmp_path


def run(stub, *arguments):
    try:
        folders = [str(Path(_load.path(library)).parent) for library in ("cudnn", "cublasLt", "nvrtc")]
    except LibraryNotFound as error:
        pytest.skip(str(error))
    paths = [str(stub), *folders, os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    command = [sys.executable, str(HERE / "lowering.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Exception ignored" not in done.stderr, done.stderr[:2000]  # by a finalizer
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_cudnn_takes_the_descriptors_of_every_case(stub):
    found = run(stub)
    assert found["refused"] == []
    assert set(found["taken"]) == OPS


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_cudnn_has_an_engine_for_a_case_of_each_row(stub):
    found = run(stub, str(HERE / "h200.json"), "few")
    if "unknown" in found:
        pytest.skip(f"this cuDNN does not take the properties of h200.json: {found['unknown']}")
    assert found["refused"] == []
    assert set(found["taken"]) == OPS


@pytest.mark.compiles
@pytest.mark.timeout(900)  # some 500 kernels are compiled
def test_cudnn_has_an_engine_for_every_case(stub):
    if PROPERTIES not in os.environ:
        pytest.skip(f"{PROPERTIES} names no file of device properties, and every case takes minutes")
    found = run(stub, os.environ[PROPERTIES])
    assert found["refused"] == []
    assert set(found["taken"]) == OPS
