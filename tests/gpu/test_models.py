"""Models that nobody here wrote, on a GPU: `fuse` and every op against float64 and torch's own error; load and faults.

    python -m pytest tests/gpu/test_models.py -s

prints for each model its errors beside torch's, what `fuse` replaced, and what not and why. Packages that are not
installed are skipped with that reason; torch's own encoder is always there.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "15_beside_torch.py"
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
sys.path.insert(0, str(TESTS))
real_models, torch_load = (importlib.import_module(name) for name in ("real_models", "torch_load"))
sys.path.remove(str(TESTS))

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that nobody here wrote
GPU = "cuda:0"


@pytest.fixture(autouse=True)
def _f32_is_f32(monkeypatch):
    """torch's convolutions in f32 are of TF32 otherwise, whose error is a thousand times as large."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(params=real_models.CASES)
def case(request):
    found = real_models.CASES[request.param]
    if (why := real_models.why_not(found.package)) is not None:
        pytest.skip(why)
    return found


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_is_as_right_as_torch_has_it(case, dtype, small):
    outcomes, undone = real_models.compare(case, small=small, place=GPU, dtype=dtype, trials=6 if small else 1)
    for way, outcome in outcomes.items():
        print(f"\n{case.build.__name__}, {'small' if small else 'large'}, {dtype}, {way}\n{outcome}")
    assert undone, "results are the same bits after undo"
    for way, outcome in outcomes.items():
        assert outcome.right(), f"{way}: {outcome}"


def test_a_fused_model_runs_in_other_modes(case):
    """With f32 in all of them but autocast; a thousandth is what one ReLU that turns costs a gradient."""
    for mode, apart in real_models.in_other_modes(case, small=False, place=GPU).items():
        assert apart <= (5e-2 if mode == "autocast" else 1e-2 if case.kinked else 1e-4), mode


@pytest.mark.alone
def test_a_hundred_thousand_calls_from_8_threads_leave_memory_as_it_was(record_property):
    grown = torch_load.hammer(GPU, threads=8, calls=100_000)
    record_property("grown", str(grown))
    print(f"bytes more after 100,000 calls: {grown}")


@pytest.mark.parametrize("kind", ["illegal address", "trap"])
def test_a_fault_in_a_child_leaves_torch_right(trouble, kind):
    assert torch_load.beside_a_fault(trouble, GPU, GPU, kind, rounds=3) >= 3


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_training_goes_as_by_torch(dtype, tmp_path):
    command = [sys.executable, str(EXAMPLE), "--device", GPU, "--dtype", dtype, "--out", str(tmp_path / "loss.png")]
    path = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd="/")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r": 200 steps, ", done.stdout)) == 2
