"""Every graph of every case becomes finalized descriptors, without a GPU: cuDNN itself checks shapes, dtypes and names.

cuDNN's run-time compiler is linked to libcuda, which is only where a driver is; a stub of its symbols lets cuDNN load.
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
SYMBOLS = (
    *("cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    *("cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
)


@pytest.fixture
def stub(tmp_path):
    """A folder with a libcuda.so.1 whose functions all fail."""
    source = tmp_path / "stub.c"
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in SYMBOLS) + "\n")
    built = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1"), str(source)]
    try:
        subprocess.run(built, check=True)
    except FileNotFoundError:
        pytest.skip("gcc is not installed, and the stub of libcuda needs it")
    return tmp_path


def test_cudnn_takes_the_descriptors_of_every_case(stub):
    try:
        folder = Path(_load.path("cudnn")).parent
    except LibraryNotFound as error:
        pytest.skip(str(error))
    paths = [str(stub), str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(HERE / "lowering.py")], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"] == []
    assert set(found["lowered"]) == {
        *("conv_fwd", "conv_bwd_data", "conv_bwd_filter", "sdpa_fwd", "sdpa_bwd", "norm_fwd", "norm_bwd")
    }
