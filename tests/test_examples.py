"""Every example runs alone and is right, and the digits are learned to the accuracy that is promised."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
TRAIN_DIGITS, TRAIN_CNN = (path for path in EXAMPLES if "train" in path.stem)
# Arguments that shorten an example: each step is compared, so what `fuse` gets wrong shows in the first 60 of 200.
SHORTER = {"15_beside_torch": ("--steps", "60")}
# Some seconds each; torch learns ten times beside one, for 15 s.
LONG = ("11_transformer_block", "15_beside_torch", "19_monte_carlo_option", "20_spectrogram", "24_pagerank")
PRODUCTS = {
    "forward 1": "RELU_AUX_BIAS", "forward 2": "RELU_AUX_BIAS", "forward 3": "BIAS",
    "backward 3": "DRELU_BGRAD", "backward 2": "DRELU_BGRAD",
    "update 3": "BGRADB", "update 2": "NONE", "update 1": "NONE",
}  # fmt: skip


def run(example: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example on the host, without a display and away from the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "error", str(example), "--device", "host", *arguments]
    # Small products gain nothing by threads, and lose much where other tests have the cores.
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)  # 07_survive_a_fault.py has a child crash, and its stack is no news
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def accuracy(out: str) -> float:
    """The accuracy that an example printed last."""
    found = re.search(r"^accuracy on (\d+) held-out scans: ([\d.]+)% after", out, re.MULTILINE)
    assert found
    assert int(found[1]) == 359  # a fifth of 1,797
    return float(found[2]) / 100


# The longest come first: where several processes run the tests, those of this file are the last to be handed out.
@pytest.mark.exhaustive
def test_networks_learn_in_bf16_as_by_torch(tmp_path: Path):
    pytest.importorskip("torch")
    (example,) = (path for path in EXAMPLES if path.stem == "15_beside_torch")
    done = run(example, "--dtype", "bf16", "--steps", "100", "--out", str(tmp_path / "loss.png"))  # 60 in f32
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.findall(r"^(\w+): 100 steps, ", done.stdout, re.MULTILINE) == ["digits", "letters"]


@pytest.mark.exhaustive
def test_a_cnn_learns_the_digits(tmp_path: Path):
    # By itself it makes 15 epochs. The accuracy is there after four; what learns wrongly has less time to catch up.
    done = run(TRAIN_CNN, "--epochs", "6", "--out", str(tmp_path / "loss.png"))
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 0.985
    rows = dict(re.findall(r"^  (\S.*\S) {2,}(\w+) \S*f32→f32 32F host numpy$", done.stdout, re.MULTILINE))
    assert {name for name in rows if name.startswith("conv")} == {
        "conv 1", "conv 2", "conv 3", "conv gradient 2", "conv gradient 3",
        "conv update 1", "conv update 2", "conv update 3",
    }  # fmt: skip
    assert set(rows.values()) == {
        "conv_fwd", "conv_bwd_data", "conv_bwd_filter", "norm_fwd", "norm_bwd", "activation", "activation_bwd",
        "pooling", "pooling_bwd", "matmul", "softmax", "softmax_bwd",
    }  # fmt: skip
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_examples_are_numbered_and_each_is_tested():
    assert [path.name[:2] for path in EXAMPLES] == [f"{number:02}" for number in range(1, len(EXAMPLES) + 1)]


def why_no_library_can_be_added() -> str | None:
    """What 06_add_a_library.py lacks here, or None; pip is asked for its wheel, as the generator asks for headers."""
    if importlib.util.find_spec("clang") is None or shutil.which("gcc") is None:
        return "libclang or gcc is not installed: pip install 'cudabind[gen]'"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    done = subprocess.run([*pip, "nvidia-nvjpeg"], capture_output=True, text=True)
    return f"the package index cannot be reached: {done.stderr.strip()[-200:]}" if done.returncode else None


def test_training_on_a_gpu_that_is_not_there_ends_in_a_sentence_and_says_what_to_do():
    done = run(TRAIN_DIGITS, "--device", "cuda:99")
    assert done.returncode == 1
    assert re.fullmatch(r"no training: .*cuda:99.*\nwithout a GPU: --device host, or make demo .*\n", done.stderr)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=[pytest.mark.exhaustive] if path.stem in LONG else [], id=path.stem)
        for path in EXAMPLES
        if path not in (TRAIN_DIGITS, TRAIN_CNN)
    ],
)
def test_an_example_runs_and_checks_itself(example: Path):
    if example.stem == "06_add_a_library" and (reason := why_no_library_can_be_added()):
        pytest.skip(reason)
    done = run(example, *SHORTER.get(example.stem, ()))
    if example.stem == "05_raw_curand" and "LibraryNotFound" in done.stderr:
        pytest.skip("cuRAND is not installed")
    assert (done.returncode, done.stderr) == (0, "")
    assert "error" in done.stdout


def test_a_fault_costs_one_request():
    (example,) = (path for path in EXAMPLES if path.stem == "07_survive_a_fault")
    done = run(example, "--requests", "150", "--spare")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("149 of 150 requests answered on host")
    assert re.search(r"^request 100 failed: ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_service_answers_all_that_it_takes(isolation: str):
    (example,) = (path for path in EXAMPLES if path.stem == "08_serve_asyncio")
    done = run(example, "--isolation", isolation)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "960 answered" in done.stdout
    assert "64 too late" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_explains_its_flags(example: Path):
    done = run(example, "--help")
    assert done.returncode == 0
    assert "--device" in done.stdout


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_digits_are_learned(dtype: str, tmp_path: Path):
    picture = tmp_path / "new" / "loss.png"
    done = run(TRAIN_DIGITS, "--dtype", dtype, "--out", str(picture))
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 0.97
    for product, epilogue in PRODUCTS.items():
        out = "f32" if product.startswith("update") else dtype
        row = f"matmul {dtype}\N{MULTIPLICATION SIGN}{dtype}→{out} 32F host numpy"
        assert re.search(rf"^ +{product} +{epilogue} +{row}$", done.stdout, re.MULTILINE)
    matplotlib = pytest.importorskip("matplotlib.image", reason="matplotlib, which draws the picture, is not installed")
    pixels = matplotlib.imread(picture)
    assert min(pixels.shape[:2]) > 300
    assert np.ptp(pixels) > 0.5  # something is drawn


def test_too_little_training_exits_with_1(tmp_path: Path):
    done = run(TRAIN_DIGITS, "--epochs", "1", "--streams", "1", "--out", str(tmp_path / "loss.png"))
    assert done.returncode == 1
    assert accuracy(done.stdout) < 0.97
    assert "that is below 97%" in done.stderr


@pytest.mark.exhaustive
def test_the_same_seed_learns_the_same(tmp_path: Path):
    outs = {accuracy(run(TRAIN_DIGITS, "--epochs", "4", "--out", str(tmp_path / "loss.png")).stdout) for _ in range(2)}
    assert len(outs) == 1


@pytest.mark.parametrize("dtype", [pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
def test_a_transformer_block_is_right_in_16_bits(dtype: str):
    (example,) = (path for path in EXAMPLES if path.stem == "11_transformer_block")
    done = run(example, "--dtype", dtype, "--seed", "1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("against slopes") == 7  # x and six weights


@pytest.mark.parametrize("name", ["blur", "edges"])
def test_a_picture_is_filtered(name: str, tmp_path: Path):
    image = pytest.importorskip("PIL.Image", reason="Pillow, which matplotlib reads pictures with, is not installed")
    (example,) = (path for path in EXAMPLES if path.stem == "21_image_filter")
    rng, drawn = np.random.default_rng(5), tmp_path / "drawn.png"
    image.fromarray(rng.integers(0, 256, (37, 50, 3)).astype("u1")).save(drawn)
    done = run(example, "--filter", name, "--picture", str(drawn), "--out", str(tmp_path / "new" / "both.png"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"{name}: 50 by 37 pixels of 3 colours" in done.stdout
    with image.open(tmp_path / "new" / "both.png") as both:
        assert both.size == (100, 37)
        before, after = np.split(np.asarray(both).astype(int), 2, axis=1)
    assert (before == np.asarray(image.open(drawn))).all()
    assert (np.ptp(after) < np.ptp(before)) == (name == "blur")  # of noise a blur leaves the mean
