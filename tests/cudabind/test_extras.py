"""The extras `cu12` and `cu13`: each has a wheel for every library of the map, for its own CUDA, and no other's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import cudabind

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# cuda.pathfinder's name of each file, and the name of the wheel that holds it, without what tells the CUDA.
WHEELS = {
    "cudart": "nvidia-cuda-runtime",
    "nvrtc": "nvidia-cuda-nvrtc",
    "nvJitLink": "nvidia-nvjitlink",
    "cublas": "nvidia-cublas",
    "cublasLt": "nvidia-cublas",
    "cudnn": "nvidia-cudnn",
    "cufft": "nvidia-cufft",
    "curand": "nvidia-curand",
    "cusolver": "nvidia-cusolver",
    "cusolverMg": "nvidia-cusolver",
    "cusparse": "nvidia-cusparse",
    "cusparseLt": "nvidia-cusparselt",
    "cutensor": "cutensor",
    "cutensorMg": "cutensor",
    "cutensorMp": "cutensor",
    "nccl": "nvidia-nccl",
}


# The same of the libraries that an area's extras are for; "" where NVIDIA's wheel for CUDA 12 has another name.
AREAS = {
    "solvers": {"cudss": "nvidia-cudss"},
    "images": {name: f"nvidia-{name}" for name in ("nvjpeg", "nvjpeg2k", "nvtiff", "nvimgcodec")},
    "npp": dict.fromkeys(("nppc", *cudabind.NPP), "nvidia-npp"),
    "data": {"nvcomp": "nvidia-libnvcomp", "cufile": "nvidia-cufile"},
    "compilers": {"nvfatbin": "nvidia-nvfatbin", "nvvm": "nvidia-nvvm", "mathdx": "nvidia-libmathdx"},
    "tools": {"cupti": "nvidia-cuda-cupti", "sanitizer": "nvidia-cuda-sanitizer-api"},
    "distributed": {
        "nvshmem_host": "nvidia-nvshmem",
        "cublasmp": "nvidia-cublasmp",
        "cusolverMp": "nvidia-cusolvermp",
        "cufftMp": "nvidia-cufftmp",
    },
    "quantum": {name: name for name in ("custatevec", "cutensornet", "cudensitymat", "cupauliprop", "custabilizer")},
}
OTHER_NAMES = {"nvidia-cuda-nvcc": "nvidia-nvvm"}  # of CUDA 12, whose nvcc brings libNVVM along


def requirements(extra: str) -> dict[str, str]:
    """The names of an extra's distributions, and what is asked of their versions."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli", reason="nothing reads TOML here")
    with PYPROJECT.open("rb") as file:
        lines = toml.load(file)["project"]["optional-dependencies"][extra]
    split = [re.fullmatch(r"([\w.-]+?)((?:[<>=!~].*)?)", line) for line in lines]
    return {found[1]: found[2] for found in split if found}


@pytest.mark.parametrize("extra", ["cu12", "cu13"])
def test_an_extra_has_a_wheel_for_every_library(extra: str) -> None:
    files = {row.file for row in cudabind.LIBRARIES.values() if row.install == cudabind.EXTRAS}
    assert files == set(WHEELS)
    found = {name.removesuffix(f"-{extra}") for name in requirements(extra)}
    assert found - {"cuda-python", "cuda-core"} == set(WHEELS.values())


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_an_areas_extra_has_a_wheel_for_each_of_its_libraries(area: str, cuda: str) -> None:
    files = {row.file for row in cudabind.LIBRARIES.values() if row.install == cudabind.extras(area)}
    assert files == set(AREAS[area])
    found = {name.removesuffix(f"-{cuda}") for name in requirements(f"{area}-{cuda}")}
    assert {OTHER_NAMES.get(name, name) for name in found} == set(AREAS[area].values())


def test_every_library_belongs_to_an_extra_or_says_where_it_comes_from() -> None:
    known = {cudabind.EXTRAS, *map(cudabind.extras, AREAS)}
    others = {row.name for row in cudabind.LIBRARIES.values() if row.install not in known}
    assert others == {"cuda", "nvml", "nvptxcompiler"}


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_what_matmul_needs_is_a_part_of_all(cuda: str) -> None:
    assert requirements(f"cublas-{cuda}").items() < requirements(cuda).items()


def test_the_extras_share_no_wheel() -> None:
    assert set(requirements("cu12")) & set(requirements("cu13")) == {"cuda-python"}


@pytest.mark.parametrize(("extra", "major"), [("cu12", 12), ("cu13", 13)])
def test_cuda_python_is_of_the_same_cuda(extra: str, major: int) -> None:
    assert f"<{major + 1}" in requirements(extra)["cuda-python"]


@pytest.mark.parametrize(
    "extra", [f"{area}{cuda}" for area in ("", *(f"{a}-" for a in AREAS)) for cuda in ("cu12", "cu13")]
)
def test_every_wheel_stops_before_the_next_major_version(extra: str) -> None:
    for name, versions in requirements(extra).items():
        assert re.search(r">=(\d+)", versions), name
        assert re.search(r"<(\d+)", versions), name
