"""What the tests of real work without a GPU share: a library that is not installed is the reason of a skip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cudabind import _load
from cudabind.errors import LibraryNotFound

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def need() -> Callable[..., None]:
    """Skips the test where one of these libraries is not installed."""

    def skip_without(*libraries: str) -> None:
        try:
            for library in libraries:
                _load.open(library)
        except LibraryNotFound as error:
            pytest.skip(str(error))

    return skip_without


@pytest.fixture(scope="session")
def without_a_driver() -> None:
    """Skips what is true only where there is no GPU."""
    try:
        _load.open("cuda")
    except LibraryNotFound:
        return
    pytest.skip("there is a driver here")
