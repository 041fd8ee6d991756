"""What the tests of ops on the GPU share: the device, and a row tried with a case."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dispatch


@pytest.fixture
def gpu() -> dispatch.Device:
    return dispatch.device("cuda:0")


@pytest.fixture
def try_row(
    gpu: dispatch.Device, rng: np.random.Generator, skip_without: Callable[[Any], None]
) -> Callable[[Any, Any], None]:
    """`try_row(row, case)`: right results from the recorded call and the plain one, or the row's own refusal."""
    from dispatch.row_check import check_row

    def attempt(row: Any, case: Any) -> None:
        if not row.on(gpu.arch):
            pytest.skip(f"needs {row.min_arch} or newer, this GPU is {gpu.arch}")
        skip_without(row)
        check_row(row, case, gpu, rng)

    return attempt
