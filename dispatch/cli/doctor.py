"""`python -m dispatch doctor`: what this machine has, what works on it, and how to fix the rest.

It examines every library, the driver and the GPUs, and runs one checked product on the host and on the first GPU. It
changes nothing, and exits with 0 if the host works.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import TYPE_CHECKING, Any

from cudabind._progress import Progress
from dispatch.cli import print_aligned, print_json, say

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "examine", "run"]

NEEDED = {  # each with the package to install; cuda-python is only the package that installs the next two
    "cuda-bindings": "cuda-python",
    "cuda-pathfinder": "cuda-python",
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
}
OPTIONAL = {"cuda-python": "", "cuda-core": "", "tqdm": "for progress bars of examples", "matplotlib": "for pictures"}
HANGING_INDENT = 9  # columns before the text about an item
NO_DRIVER = (
    "no working NVIDIA driver was found: install one (https://www.nvidia.com/drivers; in a container, start it with"
    " its GPUs: docker run --gpus all), or use the host, which needs no driver"
)
NO_GPU = "the driver finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one object")


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the result; returns 0 if the host works."""
    report = examine()
    if options.json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["works"]["host"]["ok"] else 1


def examine() -> dict[str, Any]:
    """All results of `doctor`, as plain data; `advice` holds one sentence for each missing item."""
    from cudabind import LIBRARIES, __version__
    from cudabind.__main__ import describe
    from dispatch.cli.cache import entries, kernels
    from dispatch.execute.private_files import cache_folder

    with Progress("doctor", len(LIBRARIES) + 3, ticking=True) as bar:
        libraries = []
        for row in LIBRARIES.values():
            bar.title = f"doctor opens {row.name}"
            libraries.append(describe(row))
            bar.update()
        bar.title = "doctor asks the driver"
        driver, gpus, problem = _gpus()
        bar.update()
        works = {}
        for name in ("host", "cuda:0")[: 1 + bool(gpus)]:
            bar.title = f"doctor computes on {name}"
            works[name] = _product(name)
            bar.update()
    folder = cache_folder()
    report: dict[str, Any] = {
        "version": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "packages": {name: _package(name) for name in (*NEEDED, *OPTIONAL)},
        "driver": driver,
        "gpus": gpus,
        "libraries": [
            {key: row[key] for key in ("library", "version", "path", "install", "problem")} for row in libraries
        ],
        "cache": {
            "folder": str(folder),
            "exists": folder.is_dir(),
            "files": len(entries(folder)),
            "kernels": len(kernels(folder)),
        },
        "works": works,
    }
    report["advice"] = _advice(report, problem)
    return report


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str | None, list[dict[str, Any]], str]:
    """The newest CUDA version that the driver supports, the GPUs, and why there are none; creates no context."""
    from cudabind import driver
    from cudabind.errors import CudaError, LibraryNotFound

    try:
        driver.cuInit(0)
        version = int(driver.cuDriverGetVersion())
        handles = [driver.cuDeviceGet(number) for number in range(int(driver.cuDeviceGetCount()))]
        gpus = [_gpu(number, handle) for number, handle in enumerate(handles)]
    except CudaError as error:
        if isinstance(error, LibraryNotFound):
            return None, [], NO_DRIVER
        return None, [], NO_GPU if error.name == "CUDA_ERROR_NO_DEVICE" else f"{NO_DRIVER} ({error})"
    return f"CUDA {version // 1000}.{version % 1000 // 10}", gpus, "" if gpus else NO_GPU


def _gpu(number: int, handle: Any) -> dict[str, Any]:
    from cudabind import driver

    kinds = driver.CUdevice_attribute
    major = int(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle))
    minor = int(driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle))
    return {
        "device": f"cuda:{number}",
        "name": driver.cuDeviceGetName(96, handle).split(b"\0")[0].decode(),
        "arch": f"sm_{major}{minor}",
        "memory_mib": int(driver.cuDeviceTotalMem(handle)) // 2**20,
    }


def _product(name: str) -> dict[str, Any]:
    """A small fused product on a device, checked against float64: whether it is right, its row, and the error."""
    import numpy as np

    import dispatch as dp
    from cudabind.errors import CudaError

    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 64), (64, 32), (32,)))
    try:
        home = dp.device(name)
        request = dp.MatmulRequest(home.array(a), home.array(b), bias=home.array(bias), epilogue=dp.Epilogue.RELU_BIAS)
        result = dp.run(request).numpy()
        chosen = dp.explain(request).row
        row = None if chosen is None else chosen.name
    except (dp.errors.DispatchError, CudaError) as error:
        return {"ok": False, "row": None, "problem": str(error)}
    expected = np.maximum(a.astype(np.float64) @ b + bias, 0)
    right = bool(np.allclose(result, expected, rtol=1e-4, atol=1e-4))
    return {"ok": right, "row": row, "problem": "" if right else "the product is wrong"}


def _advice(found: dict[str, Any], no_gpu: str) -> list[str]:
    advice = [no_gpu] if no_gpu else []
    missing = [row for row in found["libraries"] if row["problem"] and row["library"] != "cuda"]
    advice += [f"{row['library']} cannot be used: {row['problem']}" for row in missing]
    for name, package in found["packages"].items():
        if package is None:
            install, use = (NEEDED[name], "it is needed") if name in NEEDED else (name, OPTIONAL[name])
            if use:
                advice.append(f"the Python package {name} is not installed ({use}): pip install {install}")
    for device, outcome in found["works"].items():
        if not outcome["ok"]:
            advice.append(f"a product on {device} failed: {outcome['problem']}")
    return advice


def _print(found: dict[str, Any]) -> None:
    say(f"cudabind {found['version']}, Python {found['python']}, {found['system']}", hang=2)
    say("packages", "bold")
    print_aligned([(name, version or "not installed") for name, version in found["packages"].items()], "  ")
    say(f"driver   {found['driver'] or 'none'}")
    for gpu in found["gpus"]:
        say(f"  {gpu['device']}  {gpu['name']}  {gpu['arch']}  {gpu['memory_mib']:,} MiB")
    say("libraries", "bold")
    print_aligned(
        [(row["library"], row["version"] or "-", row["path"] or "not found") for row in found["libraries"]], "  "
    )
    cache = found["cache"]
    contents = f"{cache['files']} files of autotune, {cache['kernels']} compiled kernels"
    say(
        f"cache    {cache['folder']}, {contents}" + ("" if cache["exists"] else " (created when it is needed)"),
        hang=HANGING_INDENT,
    )
    for device, outcome in found["works"].items():
        word, style = ("works", "green") if outcome["ok"] else ("BROKEN", "red")
        say(f"{word}    {device}: {outcome['row'] or outcome['problem']}", style, HANGING_INDENT)
    for sentence in found["advice"]:
        say(f"advice   {sentence}", "yellow", HANGING_INDENT)
