"""The rows of transforms with callbacks, a stand-in for cuFFT, and the compiler where it is installed."""

import importlib.util
from pathlib import Path

import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from dispatch.keys import HOST


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cufft_stand_in.py")
ROWS = [row for row in dp.TABLE.of("callback_dft") if row.min_arch != HOST]


@pytest.fixture
def compiler():
    try:
        return nvrtc.nvrtcVersion()
    except LibraryNotFound as error:
        pytest.skip(str(error))
