"""Models of transformers, timm, torchvision and torch on the CPU, small: by `fuse`, and by every op of this package.

tests/gpu/test_models.py has the same on a GPU, at larger sizes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("dispatch.torch")
TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))
real_models, torch_load = (importlib.import_module(name) for name in ("real_models", "torch_load"))
sys.path.remove(str(TESTS))

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that nobody here wrote


@pytest.fixture(params=real_models.CASES)
def case(request):
    found = real_models.CASES[request.param]
    if (why := real_models.why_not(found.package)) is not None:
        pytest.skip(why)
    return found


@pytest.fixture(autouse=True)
def _one_thread():
    """What is this small gains nothing by torch's threads, and loses much where other tests have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_is_as_right_as_torch_has_it(case, dtype):
    trials = 1 if case.package == "torchvision" else 2  # many elements in one, and slow in bf16
    outcomes, undone = real_models.compare(case, small=True, place="cpu", dtype=dtype, trials=trials)
    for way, outcome in outcomes.items():
        print(f"{way}: {outcome}")
        assert outcome.right(), f"{way}: {outcome}"
    assert undone


def test_a_fused_model_runs_in_other_modes(case):
    for mode, apart in real_models.in_other_modes(case, small=True, place="cpu").items():
        assert apart <= (5e-2 if mode == "autocast" else 1e-5), mode


def test_a_wrong_gradient_is_found():
    """The comparison itself: a bias whose gradient is lost, and a result that is a hundredth off."""
    case = real_models.CASES["encoder"]
    x = case.operand(True, "cpu", torch.float32)
    exact = real_models.forward_and_back(case.model(True, "cpu", torch.float64), x.double())
    right = real_models.distances(real_models.forward_and_back(case.model(True, "cpu", torch.float32), x), exact)
    assert real_models.beyond(right, right, exact, 1e-7) == []
    for name, factor in (("layers.0.linear1.bias", 0.0), ("", 1.01)):
        wrong = {**exact, name: exact[name] * factor}
        (line,) = real_models.beyond(real_models.distances(wrong, exact), right, exact, 1e-7)
        assert line.startswith(name or "the result")


def test_many_calls_from_many_threads():
    torch_load.hammer("cpu", threads=8, calls=400)


def test_a_child_dies_while_torch_works_beside_it(trouble):
    assert torch_load.beside_a_fault(trouble, "host", "cpu", "die", rounds=1) >= 1
