"""Every benchmark runs to its end: on the host with few repeats, and without a GPU it says why it cannot run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(script: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=120).stdout


@pytest.mark.parametrize(
    ("script", "figures"),
    [
        ("bench_overhead.py", "bursts"),
        ("bench_supervisor.py", "bursts"),
        ("bench_supervisor.py", "growth"),
        ("bench_matmul.py", "host"),
        ("bench_cutlass.py", "host"),
        ("bench_cudnn.py", "host"),
        ("bench_completion.py", "completion"),
        ("bench_copies.py", "copies"),
        ("bench_precision.py", "nothing to measure"),
        ("bench_one_shot.py", "one-shot"),
        ("bench_streams.py", "streams"),
        ("bench_frameworks.py", "frameworks"),
        ("bench_models.py", "models"),
        ("bench_linalg.py", "scaling"),
        ("bench_fft.py", "host"),
        ("bench_fft_several_gpus.py", "resident"),
        ("bench_einsum.py", "host"),
        ("bench_random.py", "random"),
        ("bench_sparselt.py", "products"),
        ("bench_collectives.py", "collectives"),
        ("bench_scaling.py", "scaling"),
        ("bench_sparse.py", "host"),
    ],
)
def test_runs_on_the_host_and_writes_its_figures(script: str, figures: str, tmp_path: Path) -> None:
    if script in ("bench_linalg.py", "bench_fft.py", "bench_sparse.py"):
        pytest.importorskip("scipy", reason="SciPy, which carries them out on the host, is not installed")
    target = tmp_path / "figures.json"
    printed = run(script, "--device", "host", "--quick", "--json", str(target))
    for peer in ("ray_actors", "torch", "transformers"):  # which few have
        printed = printed.replace(f"missing: {peer}:", "")
    assert "missing" not in printed
    assert figures in json.loads(target.read_text())


@pytest.mark.parametrize(("option", "figures"), [("--curves", "scaling"), ("--drivers", "drivers")])
def test_a_table_of_linear_algebra_has_an_option_of_its_own(option: str, figures: str, tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="SciPy, which has linear algebra on the host, is not installed")
    target = tmp_path / "figures.json"
    run("bench_linalg.py", "--device", "host", "--quick", option, "--json", str(target))
    found = json.loads(target.read_text())
    assert found.keys() & {"large", "host", "batched", "drivers", "scaling"} == {figures}


def test_bindings_are_measured_on_a_gpu(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    run("bench_bindings.py", "--device", "cuda:0", "--quick", "--json", str(target))
    calls = json.loads(target.read_text())["calls"]
    assert calls["arguments"]["cublasSgemvStridedBatched"] == 16
    assert {"unchecked", "checked"} <= calls["ns"]["cublasSgemvStridedBatched"].keys()
    assert not [name for name in calls["missing"] if not name.endswith("nvmath")]


@pytest.mark.parametrize(
    "script",
    [
        "bench_overhead.py",
        "bench_supervisor.py",
        "bench_matmul.py",
        "bench_cutlass.py",
        "bench_cudnn.py",
        "bench_completion.py",
        "bench_copies.py",
        "bench_precision.py",
        "bench_one_shot.py",
        "bench_streams.py",
        "bench_models.py",
        "bench_linalg.py",
        "bench_fft.py",
        "bench_fft_several_gpus.py",
        "bench_einsum.py",
        "bench_random.py",
        "bench_sparselt.py",
        "bench_sparse.py",
    ],
)
def test_says_why_it_cannot_run_without_a_gpu(script: str) -> None:
    assert "cannot run on cuda:0" in run(script, CUDA_VISIBLE_DEVICES="")
