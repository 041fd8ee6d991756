"""The examples that train and differentiate, on the GPU: the same code as on the host, to the same accuracy.

Every one checks itself and exits with 1 where it is not as right as it promises; what it printed says by which rows.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    """What an example prints on the GPU, away from the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--device", "cuda:0", *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd="/")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_digits_are_learned(dtype: str, tmp_path: Path):
    out = run("01_train_digits", "--dtype", dtype, "--out", str(tmp_path / "loss.png"))
    assert len(re.findall(r"^  .* cublasLt$", out, re.MULTILINE)) == 8


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_cnn_learns_the_digits(seed: str, tmp_path: Path):
    out = run("10_train_cnn", "--seed", seed, "--out", str(tmp_path / "loss.png"))
    found = re.search(r"^accuracy on 359 held-out scans: ([\d.]+)% after", out, re.MULTILINE)
    assert found
    assert float(found[1]) >= 98.5
    libraries = re.findall(r"^  \S.* (\w+)$", out, re.MULTILINE)
    assert len(libraries) == 32
    assert set(libraries) == {"cudnn", "cublasLt"}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_transformer_block_has_the_gradients_of_torch(dtype: str):
    out = run("11_transformer_block", "--dtype", dtype)
    assert out.count("against slopes") == 7  # x and six weights
    if importlib.util.find_spec("torch") is not None:
        assert out.count("against torch") == 7


def test_an_own_op_runs_by_its_kernel():
    out = run("14_own_op")
    assert re.search(r"^squared_relu f32→f32 sm_75 own +largest error", out, re.MULTILINE)
    assert re.search(r"^squared_relu f64→f64 sm_75 own +largest error", out, re.MULTILINE)


@pytest.mark.parametrize("name", ["sharpen", "blur", "edges"])
def test_a_picture_is_filtered_as_by_scipy(name: str, tmp_path: Path):
    pytest.importorskip("PIL", reason="Pillow, which matplotlib reads pictures with, is not installed")
    pytest.importorskip("scipy")
    out = run("21_image_filter", "--filter", name, "--out", str(tmp_path / "both.png"))
    found = re.search(
        r"^of 921600 bytes (\d+) are others than by scipy.ndimage, with an error of [01] at most", out, re.MULTILINE
    )
    assert found
    assert int(found[1]) < 1000


def test_photos_are_decoded_onto_a_sheet(tmp_path: Path):
    pytest.importorskip("PIL", reason="Pillow, which the result is held against, is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib, whose wheel has the photo, is not installed")
    out = run("27_decode_photos", "--out", str(tmp_path / "sheet.png"))
    decoder = "nvJPEG" if "Pillow decodes: nvjpeg" not in out else "Pillow"
    assert re.search(rf"^\d+ pictures, decoded by {decoder} on cuda:0: ", out, re.MULTILINE)
    assert (tmp_path / "sheet.png").stat().st_size > 10_000
