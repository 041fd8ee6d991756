"""The example that decodes photos: its sheet has each picture of a folder, its kernel is its reference in NumPy."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "27_decode_photos.py"
ON_CPU = """
#include <math.h>
#define __global__
static struct { int x, y; } threadIdx, blockIdx, blockDim;
%s
extern "C" void run(const unsigned char* photo, unsigned char* out, int H, int W, int h, int w)
{
    blockDim.x = 16; blockDim.y = 16;
    for (blockIdx.y = 0; blockIdx.y <= h / 16; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x <= w / 16; ++blockIdx.x)
            for (threadIdx.y = 0; threadIdx.y < 16; ++threadIdx.y)
                for (threadIdx.x = 0; threadIdx.x < 16; ++threadIdx.x) shrink(photo, out, H, W, h, w);
}
"""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("decode_photos", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["decode_photos"] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    yield module
    for row in [row for row in dp.TABLE if row.op == "shrink"]:
        dp.TABLE.unregister(row)
    del sys.modules["decode_photos"]


def test_every_picture_of_a_folder_is_on_the_sheet(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow, which decodes on the host, is not installed")
    colours = {"a": (250, 10, 10), "b": (10, 250, 10), "c": (10, 10, 250), "d": (240, 240, 10), "e": (128, 128, 128)}
    for number, (name, colour) in enumerate(colours.items()):
        image.new("RGB", (40 + 300 * number, 700 - 100 * number), colour).save(tmp_path / f"{name}.jpg", quality=95)
    (tmp_path / "no picture.txt").write_text("left out")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--device", "host", "--photos", tmp_path, "--out", tmp_path / "sheet.png"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(r"^b\.jpg +91 x 160 ", done.stdout, re.MULTILINE)
    with image.open(tmp_path / "sheet.png") as drawn:
        sheet = np.asarray(drawn).astype(int)
    assert sheet.shape == (2 * 168 + 8, 4 * 168 + 8, 3)
    for number, colour in enumerate(colours.values()):
        row, column = divmod(number, 4)
        middle = sheet[8 + 168 * row + 80, 8 + 168 * column + 80]
        assert np.abs(middle - colour).max() <= 4


@pytest.mark.parametrize(("given", "wanted"), [((33, 47), (33, 47)), ((100, 61), (17, 20)), ((50, 160), (1, 159))])
def test_the_kernel_computes_what_the_host_does(example, given, wanted, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    source, library = tmp_path / "shrink.cpp", tmp_path / "shrink.so"
    source.write_text(ON_CPU % example.SOURCE)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    photo = np.random.default_rng(3).integers(0, 256, (*given, 3)).astype(np.uint8)
    out = np.full((*wanted, 3), 77, np.uint8)
    ctypes.CDLL(str(library)).run(
        photo.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), *given, *wanted
    )
    exact = example.averages(photo, *wanted)
    assert np.abs(out - exact).max() <= 0.5 + 1e-9
    blocks = photo[: given[0] // 2 * 2].reshape(given[0] // 2, 2, given[1], 3).mean(axis=1)
    assert np.abs(example.averages(photo[: given[0] // 2 * 2], given[0] // 2, given[1]) - blocks).max() < 1e-9


@pytest.mark.compiles
def test_the_kernel_compiles_for_sm_90(example):
    from cudabind.errors import LibraryNotFound

    try:
        assert len(example.KERNEL.cubin("sm_90")) > 1000
    except LibraryNotFound as error:
        pytest.skip(str(error))
