"""torch's own checks of `dispatch.torch`'s ops, on a GPU: opcheck, gradcheck, compile, export and vmap.

They are those of tests/dispatch/torch_ops, made anew with the GPU as the device on which torch makes its tensors.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

# torch's compiler imports what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
OPS = ("attention", "convolution", "fp8", "gated", "grouped", "linear", "mlp", "norms", "rotary", "trees")
KINDS = ("opcheck", "gradcheck", "compile", "export", "vmap")
HOST = Path(__file__).parents[1] / "dispatch" / "torch_ops"


def _checks():
    """Each check under a name that tells its op."""
    for op in OPS:
        spec = importlib.util.spec_from_file_location(f"checks_of_{op}", HOST / f"test_{op}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where torch.compile looks for what a function refers to
        spec.loader.exec_module(module)
        for name, check in vars(module).items():
            if name.startswith("test_") and any(kind in name for kind in KINDS):
                yield f"{name}_{op}", check


globals().update(_checks())


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def test_every_op_is_checked():
    names = [name for name in globals() if name.startswith("test_opcheck")]
    assert len(names) == len(OPS), names
