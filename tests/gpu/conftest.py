"""What every test on a GPU may ask for: the device, and the libraries that tensors are exchanged with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.execute import plan_relocation
from dispatch.execute.installed import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that meets cuTENSOR, which no CUDA toolkit has, is skipped where it is not installed."""
    try:
        yield
    except LibraryNotFound as error:
        if "cutensor" not in str(error):
            raise
        pytest.skip(str(error))


SOON = 40  # calls of a plan before it is learnt, so that a few dozen are the library's and then a graph's


@pytest.fixture(autouse=True)
def learnt_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_relocation, "FIRST", SOON)


@pytest.fixture
def dev() -> dp.Device:
    return dp.device("cuda:0")


@pytest.fixture
def skip_without() -> Callable[[Any], None]:
    """`skip_without(row)` skips where the library is not installed, or older than the row needs."""

    def skip(row: Any) -> None:
        try:
            version = installed.get(row.library) if row.min_version else None
        except LibraryNotFound as error:
            pytest.skip(str(error))
        if version is not None and version < row.min_version:
            needed, found = (".".join(map(str, parts)) for parts in (row.min_version, version))
            pytest.skip(f"needs {row.library} {needed} or newer, {found} is installed")

    return skip


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def jax() -> Any:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory for the others
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return jax
