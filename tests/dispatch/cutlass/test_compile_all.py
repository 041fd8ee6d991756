"""Every kernel of the tests on the GPU, compiled for real: hours of one core, so only where a person asks for it.

    CUTLASS_COMPILE="rows grouped" python -m pytest tests/dispatch/cutlass/test_compile_all.py

names sets of tests/gpu/cutlass/kernels.py. What is compiled stays in the user's cache, for a pack or the next time.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest

from dispatch.libraries.cutlass import compile as compiler

ASKED = os.environ.get("CUTLASS_COMPILE", "").split()
COMMAND = 'CUTLASS_COMPILE="rows trees grouped" python -m pytest tests/dispatch/cutlass/test_compile_all.py'


def kernels():
    """The kernels that were asked for; looking them up takes seconds, so that nothing is where none were."""
    if not ASKED:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"half a minute for each kernel: {COMMAND}"))]
    sys.path.insert(0, str(Path(__file__).parents[2] / "gpu/cutlass"))
    module = importlib.import_module("kernels")
    return [pytest.param(kernel, id=kernel.label) for kernel in module.of(ASKED).values()]


@pytest.mark.compiles
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kernel", kernels())
def test_a_kernel_of_the_gpu_tests_compiles(kernel):
    code = compiler.request(kernel.source, kernel.target, kernel.label).result()
    assert code.startswith(b"\x7fELF")
    for symbol in (b"\0gemm\0", b"\0fill\0"):
        assert symbol in code
