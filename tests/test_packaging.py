"""What is installed: one pure wheel with both packages, few requirements, and an import that costs next to nothing."""

import atexit
import email
import email.message
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import cudabind
import dispatch
from cudabind.gen.pins import RELEASES, WHEELS

ROOT = Path(__file__).parents[1]
PACKAGES = ("cudabind", "dispatch")
RUNTIME = {"cuda-python", "ml_dtypes", "numpy"}
EXTRAS = {"cu13", "cublas-cu13", "test", "gen", "examples", "dev"}
TESTED = ("3.10", "3.11", "3.12", "3.13")  # README says which suite ran on each

# Of the processor's time, NumPy's own import included, which takes 1 at the same time on the same machine. It leaves no
# room for a CUDA library or a plotting package.
IMPORT_LIMIT = 3.0
IMPORT_TRIES = 5

# Of these packages, and of Python's own modules those that take long to import; what NumPy imports is there anyway.
MODULES = 88
AT_FIRST_USE = {
    "asyncio",
    "base64",
    "concurrent",
    "importlib.metadata",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
}
AT_FIRST_USE |= {"random", "shutil", "socket", "subprocess", "tempfile", "urllib"}
FOLDERS_AT_FIRST_USE = ("dispatch.cli.", "dispatch.supervise.", "dispatch.testing.", "dispatch.libraries.cudnn.")

# Libraries that the driver or the toolkit brings; cuda-python's own extension modules have no "lib" in front.
CUDA_LIBRARY = re.compile(
    r"/lib(cuda|cudart|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cutensor|nccl|nvJitLink|nvrtc|nvidia-)[\w.-]*\.so"
)

PROBE = """
import json, sys, time
start = time.process_time()
import {module}
seconds = time.process_time() - start
with open("/proc/self/maps") as maps:
    mapped = sorted({{line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}})
json.dump({{"seconds": seconds, "mapped": mapped, "modules": sorted(sys.modules)}}, sys.stdout)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed: pip install -e '.[test]'")
    out = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    done = subprocess.run([sys.executable, "-m", *command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_is_pure_python(wheel: Path, members: set[str]) -> None:
    assert re.fullmatch(r"cudabind-[\d.]+-py3-none-any\.whl", wheel.name)
    assert not [name for name in members if name.endswith((".so", ".pyd", ".dll", ".h", ".cu"))]


def test_wheel_holds_the_two_packages_and_nothing_else(members: set[str]) -> None:
    tops = {name.split("/")[0] for name in members}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_module_and_py_typed(package: str, members: set[str]) -> None:
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert source
    assert source | {f"{package}/__init__.py", f"{package}/py.typed"} <= members


def test_wheel_carries_its_licence(metadata: email.message.Message, members: set[str]) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in members)


def test_runtime_requires_three_distributions_only(metadata: email.message.Message) -> None:
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in required} == {
        name.replace("-", "_") for name in RUNTIME
    }
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS


def test_version_is_the_one_the_packages_tell(metadata: email.message.Message) -> None:
    assert metadata["Version"] == cudabind.__version__ == dispatch.__version__


def test_each_python_that_was_tested_is_named(metadata: email.message.Message) -> None:
    named = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", line)
    ]
    assert tuple(named) == TESTED


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is in the wheel, and its scripts in `bin`."""
    folder = tmp_path_factory.mktemp("installed")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def run_installed(installed: Path, folder: Path, *command: str) -> str:
    """What a command prints in a folder that has nothing to do with the checkout."""
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, *command], env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_script_does_what_the_module_does(package: str, installed: Path, tmp_path: Path) -> None:
    script = [str(installed / "bin" / package)]
    assert run_installed(installed, tmp_path, *script, "--version") == f"{package} {cudabind.__version__}\n"
    assert run_installed(installed, tmp_path, *script, "--help").startswith(f"usage: {package} ")
    module = ["-m", package]
    assert run_installed(installed, tmp_path, *module, "--version") == f"{package} {cudabind.__version__}\n"
    assert run_installed(installed, tmp_path, *module, "--help").startswith(f"usage: python -m {package} ")


def test_the_first_example_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    example = re.search(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert example
    told = run_installed(installed, tmp_path, "-c", f"{example[1]}\nprint(dp.__file__)")
    assert Path(told.strip()).is_relative_to(installed)


def test_what_the_bindings_are_generated_with_is_pinned(metadata: email.message.Message) -> None:
    pins = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", []) if "extra == 'gen'" in line}
    assert any(re.fullmatch(r"libclang==[\d.]+", pin) for pin in pins), "the parser decides what is generated"
    versions = [version for row in WHEELS for version in row.versions]
    assert len(versions) == len(WHEELS) * len(RELEASES)
    assert all(re.fullmatch(r"\d+(\.\d+){2,4}(\.post\d+)?", version) for version in versions)


@functools.cache
def bytecode() -> str:
    """A folder for the bytecode of all imports here, which goes with this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


@functools.cache
def imported(module: str) -> dict[str, Any]:
    """Import a module in a fresh interpreter; return seconds taken, files mapped and modules loaded after it."""
    # Without an installed copy the checkout itself must be found; with one this changes nothing.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # pip compiles what it installs: a checkout is timed likewise, with its bytecode kept whatever Python was told.
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": bytecode()}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", PACKAGES)
def test_import_maps_no_cuda_library(module: str) -> None:
    assert [path for path in imported(module)["mapped"] if CUDA_LIBRARY.search(path)] == []


@pytest.mark.parametrize("module", PACKAGES)
@pytest.mark.parametrize("optional", ["clang", "cupy", "jax", "matplotlib", "scipy", "torch", "tqdm"])
def test_import_loads_nothing_optional(module: str, optional: str) -> None:
    assert optional not in imported(module)["modules"]


@pytest.mark.parametrize("module", PACKAGES)
def test_import_loads_what_it_needs_and_no_more(module: str) -> None:
    """The time follows from the modules, whose number does not depend on how busy the machine is."""
    loaded = set(imported(module)["modules"]) - set(imported("numpy, ml_dtypes")["modules"])
    assert loaded & AT_FIRST_USE == set()
    ours = sorted(name for name in loaded if name.split(".")[0] in PACKAGES)
    assert len(ours) <= MODULES, ours
    assert not [name for name in ours if name.startswith(FOLDERS_AT_FIRST_USE)]
    assert {name.split(".")[2] for name in ours if name.startswith("dispatch.ops.")} <= {"matmul"}


@pytest.mark.parametrize("module", PACKAGES)
def test_import_is_quick(module: str) -> None:
    ours, numpys = [], []
    for _ in range(IMPORT_TRIES):
        imported.cache_clear()
        numpys.append(imported("numpy")["seconds"])
        ours.append(imported(module)["seconds"])
        if min(ours) <= IMPORT_LIMIT * min(numpys):
            return
    took = f"{min(ours):.3f} s at best of {IMPORT_TRIES}, and NumPy's {min(numpys):.3f} s"
    pytest.fail(f"import {module} took {took}: more than {IMPORT_LIMIT} times as long")
