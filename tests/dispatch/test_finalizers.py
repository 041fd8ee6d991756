"""Finalizers may come amid a caller's capture, on any thread: what they ask of a library must not end it.

On an H200 a captured call failed with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED once the garbage collector had let go of
an analysis of cuSPARSE's in the middle of it, with the memory that the library had for it.
"""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.libraries import finalizer as module
from dispatch.libraries.finalizer import finalizer

LIBRARIES = Path(dp.__file__).parent / "libraries"
# What is destroyed here is in the host's memory alone.
ON_HOST = {"cublaslt/descriptors.py", "cudnn/tensors.py"}


def finalizers():
    for path in sorted(LIBRARIES.rglob("*.py")):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef):
                methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
                if "__del__" in methods:
                    yield path.relative_to(LIBRARIES).as_posix(), methods


def is_relaxed(node):
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(each, ast.Name) and each.id == "finalizer" for each in node.decorator_list)
    return isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and getattr(item.context_expr.func, "id", "") == "relaxed"
        for item in node.items
    )


def bare_calls(node, methods, *, relaxed=False):
    """The calls that a finalizer makes outside of `relaxed()`, those of the methods that it calls with them.

    `finalizer` (dispatch/libraries/finalizer.py) is `relaxed()`, too.
    """
    relaxed = relaxed or is_relaxed(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not relaxed:
        if node.func.attr in ("unchecked", "_destroy", "destroy"):
            yield ast.unparse(node)
        elif isinstance(node.func.value, ast.Name) and node.func.value.id == "self" and node.func.attr in methods:
            yield from bare_calls(methods[node.func.attr], methods)
    for child in ast.iter_child_nodes(node):
        yield from bare_calls(child, methods, relaxed=relaxed)


FOUND = list(finalizers())


@pytest.mark.parametrize(("path", "methods"), FOUND, ids=[path for path, _ in FOUND])
def test_what_a_finalizer_asks_of_a_library_ends_no_capture(path, methods):
    calls = [*bare_calls(methods["__del__"], methods)]
    assert not calls or path in ON_HOST, calls


def test_there_are_finalizers():
    assert {"finalizer.py", "cutensor/descriptors.py", "curand/generators.py"} <= {path for path, _ in FOUND}
    assert {path for path, _ in FOUND} >= ON_HOST


@pytest.fixture
def finalized(monkeypatch):
    """A class with a finalizer, and what comes about as its objects go: "(" and ")" are `relaxed()`."""
    happened = []

    @contextmanager
    def relaxed():
        happened.append("(")
        yield
        happened.append(")")

    class Made:
        @finalizer
        def __del__(self):
            happened.append("destroyed")

    monkeypatch.setattr(module, "relaxed", relaxed)
    return Made, happened


def test_a_finalizer_destroys_as_relaxed(finalized):
    made, happened = finalized
    made()
    assert happened == ["(", "destroyed", ")"]


def test_a_finalizer_leaves_all_as_it_is_while_the_interpreter_ends(finalized, monkeypatch):
    made, happened = finalized
    monkeypatch.setattr(module.sys, "is_finalizing", lambda: True)
    made()
    assert happened == []
