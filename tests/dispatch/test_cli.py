"""The command line as a user meets it: what it prints, what its JSON holds, and how it exits."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dispatch as dp
from dispatch.cli import bench
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache

spec = importlib.util.spec_from_file_location("warm_start", Path(__file__).parents[1] / "warm_start.py")
warm_start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm_start)
START = warm_start.WarmStart()

ROOT = Path(__file__).parents[2]
COMMANDS = ("table", "explain", "doctor", "cache", "bench")
ISSUE = "explain matmul --dtype f8e4m3 --epilogue GELU_BIAS --arch sm_90"


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    yield
    START.close()


def call(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; away from the checkout, so that it must be found as it is installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return START.run("dispatch", words.split(), os.environ | {"PYTHONPATH": path, "COLUMNS": "120"} | environment)


def told(words: str, **environment: str) -> Any:
    """The JSON of a command that succeeds and has nothing to complain about."""
    done = call(words, **environment)
    assert (done.returncode, warm_start.PROGRESS.sub("", done.stderr)) == (0, "")
    return json.loads(done.stdout)


# -- help ---------------------------------------------------------------------------------------------------------
def test_help_names_every_command():
    done = call("--help")
    assert done.returncode == 0
    assert all(re.search(rf"^  +{command} ", done.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command):
    done = call(f"{command} --help")
    assert done.returncode == 0
    assert f"dispatch {command}" in done.stdout


def test_no_command_is_a_mistake():
    assert call("").returncode == 2
    assert call("tabel").returncode == 2


# -- table --------------------------------------------------------------------------------------------------------
def test_table_json_holds_every_row_in_order():
    rows = told("table --json")
    assert [row["name"] for row in rows] == [row.name for row in dp.TABLE]
    kinds = {
        "op": str, "dtypes": list, "min_arch": str, "library": str, "function": str,
        "min_version": str | None, "run_on": list | None, "compute": str | None, "rules": list,
        "max_arch": str | None, "note": str | None, "nonfinite": str | None,
    }  # fmt: skip
    for row, source in zip(rows, dp.TABLE, strict=True):
        assert all(isinstance(row[key], kind) for key, kind in kinds.items())
        assert row["dtypes"] == [dtype.name for dtype in source.dtypes]
        assert row.get("epilogues", ["NONE"]) == [epilogue.name for epilogue in source.epilogues]
        pairs = [[None if mode is None else mode.name for mode in pair] for pair in source.scales]
        assert row.get("scales", [[None, None]]) == pairs
        assert row.get("epilogue_dtypes", []) == [[dtype.name for dtype in each] for each in source.epilogue_dtypes]
        if source.fusion is None:
            assert not row.keys() & {"epilogues", "epilogue_dtypes", "scales"}
        assert row["run_on"] != []
        assert row["note"] == (source.note or None)
        assert row["nonfinite"] == source.nonfinite


def test_table_json_says_what_a_row_says():
    (row,) = [
        row for row in told("table --json --arch sm_100") if row["dtypes"] == ["f4e2m1", "f4e2m1", "bf16", "bf16"]
    ]
    assert row["scales"] == [["VEC16_UE4M3", "VEC16_UE4M3"]]
    assert (row["min_arch"], row["max_arch"], row["compute"], row["run_on"]) == ("sm_100", None, "COMPUTE_32F", None)
    assert (row["library"], row["function"], row["min_version"]) == ("cublasLt", "cublasLtMatmul", "12.9")
    assert row["rules"]
    assert not any("\n" in rule for rule in row["rules"])


def test_table_json_of_an_architecture_has_the_rows_that_run_on_it():
    assert {row["min_arch"] for row in told("table --json --arch sm_90 --op matmul")} == {"sm_80", "sm_90"}
    assert {row["min_arch"] for row in told("table --json --arch host")} == {"host"}


def test_table_is_aligned():
    lines = call("table --arch sm_90").stdout.splitlines()
    head, rows = lines[0], lines[1 : lines.index("")]
    assert len(rows) == len([row for row in dp.TABLE if row.on(dp.Arch(90))])
    for title in ("dtypes", "epilogues", "arch", "library function", "run on"):
        column = head.index(title)
        assert all(row[column - 1] == " " and row[column] != " " for row in rows)
    assert "[1] NONE RELU" in "\n".join(lines)


def test_table_shows_a_column_only_where_a_row_has_it():
    fused = {"epilogue dtypes", "epilogues", "scales of a, b"}
    for words, shown in (("--op matmul", fused), ("--op norm_bwd", {"epilogue dtypes"}), ("--op ctc_loss", set())):
        lines = call(f"table {words}").stdout.splitlines()
        assert {title for title in fused if title in lines[0]} == shown
        assert ("Epilogues:" in "\n".join(lines)) == ("epilogues" in shown)


@pytest.mark.parametrize(
    ("words", "complaint", "status"),
    [("--op softmin", "no op 'softmin'; its ops are matmul", 2), ("--arch sm_50", "sm_50", 1)],
)
def test_table_without_rows_says_so(words, complaint, status):
    done = call(f"table {words}")
    assert done.returncode == status
    assert complaint in done.stderr


def test_table_takes_no_nonsense_for_an_architecture():
    done = call("table --arch hopper")
    assert done.returncode == 2
    assert "'hopper' is not an architecture" in done.stderr


def test_table_ends_quietly_when_nobody_reads_on():
    done = subprocess.run(
        f"{sys.executable} -m dispatch table --json | head -1",
        shell=True, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[\n", "")


# -- explain ------------------------------------------------------------------------------------------------------
def test_explain_names_row_function_and_library_version():
    done = call(ISSUE)
    assert done.returncode == 0
    assert "bias bf16[256]" in done.stdout
    row = next(row for row in dp.TABLE if row.on(dp.Arch(90)) and [d.name for d in row.dtypes[:1]] == ["f8e4m3"])
    assert row.name in done.stdout
    assert "cudabind.sys.cublasLt.cublasLtMatmul" in done.stdout
    assert "dispatch.ops.matmul.cublaslt_matmul" in done.stdout
    assert "cublasLt 12.9 or newer" in done.stdout
    assert "H200" in done.stdout


def test_explain_tells_the_version_that_is_installed():
    from cudabind import _load
    from cudabind.errors import LibraryNotFound

    facts = told(f"{ISSUE} --json")
    try:
        expected = _load.version("cublasLt"), _load.path("cublasLt"), None
    except LibraryNotFound as error:
        expected = None, None, str(error)
    assert (facts["installed_version"], facts["installed_path"], facts["installed_problem"]) == expected
    assert (facts["op"], facts["library"], facts["function"], facts["min_version"]) == (
        "matmul", "cublasLt", "cublasLtMatmul", "12.9",
    )  # fmt: skip


def test_explain_needs_no_library():
    facts = told(f"{ISSUE} --json", CUDABIND_CUBLASLT_PATH="/nowhere/libcublasLt.so.13")
    assert facts["function"] == "cublasLtMatmul"
    assert facts["installed_version"] is None
    assert "CUDABIND_CUBLASLT_PATH=/nowhere" in facts["installed_problem"]


def test_explain_of_a_refusal_gives_the_nearest_first_and_exits_1():
    words = "explain matmul --dtype f8e4m3 --epilogue BGRADB --arch sm_90"
    done = call(words)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no row takes matmul(a f8e4m3[256, 256]")
    assert lines[1] == "Nearest that works: epilogue=NONE (now BGRADB)"
    assert lines[2].strip() == "matmul f8e4m3×f8e4m3→bf16 32F sm_90 cublasLt"  # noqa: RUF001
    assert lines[3].strip().startswith("needs an epilogue of NONE, ")
    assert lines[3].endswith("has BGRADB")
    assert "further away: --all shows them" in lines[-1]
    assert len(call(f"{words} --all").stdout.splitlines()) > len(dp.TABLE.of("matmul"))


def test_explain_json_of_a_refusal_has_every_row():
    done = call("explain matmul --dtype f32 --out-dtype f64 --arch sm_90 --json")
    assert done.returncode == 1
    facts = json.loads(done.stdout)
    assert facts["row"] is None
    assert {entry["row"] for entry in facts["refusals"]} == {row.name for row in dp.TABLE.of("matmul")}
    reasons = [reason for entry in facts["refusals"] for reason in entry["reasons"]]
    assert all(entry["reasons"] for entry in facts["refusals"])
    assert {reason["kind"] for reason in reasons} == {"dtypes", "compute", "epilogue", "scales", "arch", "rule"}
    assert all(reason["text"].startswith("needs dtypes (") for reason in reasons if reason["kind"] == "dtypes")
    assert facts["nearest"].startswith(facts["refusals"][0]["row"])
    assert facts["change"] == "out_dtype=None (now f64)"


OWN_OP = """
import sys
import dispatch as dp
from dataclasses import replace
from dispatch.__main__ import main
from dispatch.keys import F16, F32, HOST

row = next(row for row in dp.TABLE if row.min_arch == HOST)
dp.register(replace(row, op="norm", dtypes=(F32, F16), fusion=None, library="mine", function="norm"))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("dtype", "status", "words"), [("f32", 0, "mine.norm"), ("f64", 1, "has (f64, f16)")])
def test_explain_knows_the_ops_of_others_by_their_columns(dtype, status, words):
    command = [sys.executable, "-c", OWN_OP, "explain", "norm", "--dtype", dtype, "--arch", "host"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (status, "")
    assert words in done.stdout


# -- doctor -------------------------------------------------------------------------------------------------------
def test_doctor_json_tells_what_is_there():
    facts = told("doctor --json")
    assert facts["works"]["host"] == {"ok": True, "row": facts["works"]["host"]["row"], "problem": ""}
    assert facts["packages"]["numpy"]
    assert facts["packages"]["ml_dtypes"]
    assert facts["packages"]["cuda-bindings"]
    assert {row["library"] for row in facts["libraries"]} >= {"cuda", "cublasLt"}
    assert all({"device", "name", "arch", "memory_mib"} <= gpu.keys() for gpu in facts["gpus"])
    assert (facts["driver"] is None) == (facts["gpus"] == [])
    assert facts["advice"] or facts["gpus"]


def test_doctor_advises_about_a_library_that_is_missing(tmp_path):
    hidden = {"CUDABIND_CUBLASLT_PATH": "/nowhere/libcublasLt.so.13", "CUDABIND_CACHE": str(tmp_path / "none")}
    done = call("doctor", **hidden)
    assert done.returncode == 0
    assert "advice   cublasLt cannot be used" in done.stdout
    assert "correct CUDABIND_CUBLASLT_PATH or unset it" in done.stdout
    assert "works    host: " in done.stdout
    assert f"{tmp_path / 'none'}, 0 files of autotune, 0 compiled kernels (created when it is needed)" in done.stdout
    assert not (tmp_path / "none").exists()


# -- cache --------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one good file, a damaged one, what a killed process left, and a file of somebody else."""
    folder = tmp_path / "cache"
    AlgorithmCache("NVIDIA H200", "13.1.0", folder).put("matmul", "key", Algorithm(b"blob", 32))
    (folder / "autotune-damaged.json").write_text("{")
    (folder / "autotune-damaged.jsonx7f").write_text("")
    (folder / "mine.txt").write_text("keep")
    return folder


def test_cache_lists_what_it_holds(folder):
    facts = told("cache --json", CUDABIND_CACHE=str(folder))
    assert facts["folder"] == str(folder)
    good, *damaged = sorted(facts["files"], key=lambda entry: entry["state"] != "good")
    assert (good["gpu"], good["library"], good["algorithms"]) == ("NVIDIA H200", "13.1.0", 1)
    assert len(damaged) == 2
    assert "NVIDIA H200" in call("cache list", CUDABIND_CACHE=str(folder)).stdout


def test_cache_clear_removes_its_own_files_only(folder):
    assert "removed 3 files" in call("cache clear", CUDABIND_CACHE=str(folder)).stdout
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert "is empty" in call("cache", CUDABIND_CACHE=str(folder)).stdout
    assert "removed 0 files" in call("cache clear", CUDABIND_CACHE=str(folder)).stdout


def test_cache_path(tmp_path):
    assert call("cache path", CUDABIND_CACHE=str(tmp_path)).stdout == f"{tmp_path}\n"


# -- bench --------------------------------------------------------------------------------------------------------
def test_bench_finds_the_scripts_of_a_checkout():
    found = bench.scripts()
    assert all(path.name == f"bench_{name}.py" and path.exists() for name, path in found.items())
    done = call("bench --only nothing")
    assert done.returncode == 1
    assert "benchmark" in done.stderr


def test_bench_says_so_where_there_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.dispatch, "__file__", str(tmp_path / "dispatch" / "__init__.py"))
    from dispatch.__main__ import main

    assert main(["bench"]) == 1
    assert "no benchmarks are installed: they are in tests/benchmarks of the repository" in capsys.readouterr().err


SCRIPT = """
import argparse
import json
from pathlib import Path
from {helper} import answer

parser = argparse.ArgumentParser()
parser.add_argument("--device")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--json", type=Path)
options = parser.parse_args()
print("ran on", options.device, "quick" if options.quick else "slowly")
options.json.write_text(json.dumps({{"answer": answer}}))
"""


def test_bench_runs_all_and_gathers_their_figures(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "bench_helper_of_test_cli.py").write_text("answer = 42\n")
    (folder / "bench_good.py").write_text(SCRIPT.format(helper="bench_helper_of_test_cli"))
    (folder / "bench_bad.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.setattr(bench.dispatch, "__file__", str(tmp_path / "dispatch" / "__init__.py"))
    from dispatch.__main__ import main

    target = tmp_path / "out" / "figures.json"
    assert main(["bench", "--device", "host", "--quick", "--json", str(target)]) == 1
    assert json.loads(target.read_text()) == {"good": {"answer": 42}}
    told = capfd.readouterr()
    assert "ran on host quick" in told.out
    assert re.search(r"== bad on host \(quick\), 1 of 3\n== good .*, 2 of 3, \d+ s so far, about \d+ s left", told.out)
    assert "no luck" in told.err
    assert "failed: bad" in told.err
    assert main(["bench", "--device", "host", "--only", "good"]) == 0
    assert "ran on host slowly" in capfd.readouterr().out


def test_bench_runs_a_benchmark_of_this_checkout_and_says_first_that_there_is_no_gpu(tmp_path):
    target = tmp_path / "figures.json"
    done = call(f"bench --quick --only precision --json {target}", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "")
    first, heading, *_ = done.stdout.splitlines()
    assert first.startswith("No working GPU was found")
    assert "each benchmark runs a few small cases in NumPy" in first
    assert heading == "== precision on host (quick)"
    assert json.loads(target.read_text())["precision"]["nothing to measure"]


def test_a_journal_that_cannot_be_read_is_named(tmp_path, capsys):
    from dispatch.__main__ import main

    assert main(["replay", str(tmp_path / "gone")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'gone'} cannot be read: No such file or directory\n"
