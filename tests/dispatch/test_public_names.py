"""The public names of `dispatch`, and its request functions as users, editors and type checkers see them."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core.request import Request
from dispatch.ops import FAMILIES

ROOT = Path(dp.__file__).parents[1]
CLASSES = {
    found.op: found
    for name in dir(dp)
    if isinstance(found := getattr(dp, name), type) and issubclass(found, Request) and found is not Request
}

FUNCTIONS = [op for op in CLASSES if hasattr(dp, op)]

RIGHT = """
import dispatch as dp
from dispatch import Tensor

dev = dp.device("host")
x = dev.zeros((2, 3, 8, 8))
w = dev.zeros((4, 3, 3, 3))
y: Tensor = dp.conv_fwd(x, w, pad=1, activation=dp.Activation.RELU_FWD)
p: Tensor = dp.pooling(y, 2, mode=dp.PoolingMode.MAX)
dx: Tensor = dp.pooling_bwd(y, p, p, 2)
s: Tensor = dp.softmax(p, axis=1)
kept, reserve = dp.dropout(s, dp.dropout_states(dev, 7), 0.25)
gradient: Tensor = dp.dropout_bwd(kept, reserve, 0.25)
product = dp.matmul(x, x, epilogue=dp.Epilogue.RELU)
request = dp.SoftmaxRequest(x, axis=1)
again: Tensor = dp.run(request)
rows: Tensor = dp.grouped_matmul(x, x, [2, 6], alpha=2.0)
several: tuple[Tensor, ...] = dp.grouped_matmul([x], [x], out_dtype="f32")
"""
WRONG = {  # a line, and what both checkers must find in it
    "dp.mat_mul(x, x)": "mat_mul",
    "dp.pooling(x)": "window|few arguments",
    "dp.pooling(x, 2, 3)": "positional",
    "dp.pooling(x, 2, strides=2)": "strides",
    "dp.softmax(x, axis='1')": "axis|str",
    "dp.matmul(x, 3.0)": "float",
    "n: int = dp.softmax(x)": "int",
    "dp.conv_fwd(x, w, activation='relu')": "activation|str",
    "m: int = dp.run(request)": "int",
    "dp.grouped_matmul(x, x, [2, 6], alpha='2')": "alpha|str",
    "k: int = dp.grouped_matmul([x], [x])": "int",
    "dp.grouped_matmul(x, x, 'ends', config=7)": "config|ends|int|str",
}


def test_each_public_name_is_there_and_stands_in_one_family():
    names = dir(dp)
    assert len(names) == len(set(names))
    assert all(getattr(dp, name) is not None for name in names)
    families = [import_module(f"dispatch.ops.{family}") for family in FAMILIES if family != "graph"]
    found = [name for family in families for name in family.__all__]
    assert len(found) == len(set(found))
    assert set(found) <= set(names)
    assert not {name for name in names if name.startswith("_") or name in ("annotations", "Any", "TYPE_CHECKING")}
    assert not {name for name in names if inspect.ismodule(getattr(dp, name))} - {"cudnn", "errors", "evt", "trace"}


def test_a_star_import_gives_the_public_names():
    scope = {}
    exec("from dispatch import *", scope)
    assert set(scope) - {"__builtins__"} == set(dir(dp))


def test_a_name_that_nobody_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'dispatch' has no attribute 'mat_mul'"):
        _ = dp.mat_mul


def test_type_checkers_see_every_family():
    """The imports for them stand beside the map, one a line."""
    tree = ast.parse((ROOT / "dispatch" / "ops" / "__init__.py").read_text())
    stars = {
        n.module.rpartition(".")[2] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"
    }
    assert stars == FAMILIES.keys() - {"graph"}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_function_has_the_parameters_of_its_class_and_its_documentation(op):
    kind, function = CLASSES[op], getattr(dp, op)
    assert function.__name__ == function.__qualname__ == op
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [field.name for field in sorted(fields(kind), key=lambda field: field.kw_only)]
    for field in fields(kind):
        parameter = parameters[field.name]
        assert parameter.default == (inspect.Parameter.empty if field.default is MISSING else field.default)
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == field.kw_only
        assert parameter.annotation == field.type
        assert re.search(rf"(?m)^    (\w+, )*{field.name}(, \w+)*:", function.__doc__), (
            f"{kind.__name__} does not document {field.name}"
        )
    assert "Attributes:" not in function.__doc__
    with pytest.raises(TypeError, match=rf"{op}\(\)"):
        function()


def checked_by(command, folder):
    program = [*RIGHT.strip().split("\n"), *WRONG]
    (folder / "user.py").write_text("\n".join(program) + "\n")
    ran = subprocess.run(
        [sys.executable, "-m", *command, "user.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    found = {}
    for line in ran.stdout.replace(str(folder / "user.py"), "user.py").split("\n"):
        if match := re.search(r"user\.py:(\d+)\S* -? ?(error.*)", line):
            found.setdefault(program[int(match[1]) - 1], match[2])
    assert found.keys() == WRONG.keys(), ran.stdout + ran.stderr
    for line, message in found.items():
        assert re.search(WRONG[line], message), message


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed (extra dev)")
def test_mypy_finds_the_wrong_calls_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    checked_by(["mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}"], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed (extra dev)"
)
def test_pyright_finds_the_wrong_calls_of_a_user(tmp_path):
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"typeCheckingMode": "standard", "extraPaths": ["{ROOT}"], "pythonVersion": "3.10"}}'
    )
    checked_by(["basedpyright", "--project", "."], tmp_path)
