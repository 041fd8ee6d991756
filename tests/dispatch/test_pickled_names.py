"""Public functions and classes are pickled by their names, and are themselves again, in this process and in another."""

import pickle
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import dispatch as dp
from dispatch.core.row import Table
from dispatch.ops import FAMILIES

PLACES = ("linalg", "fft", "sparse", "structured", "tensors", "signal", "random", "parallel", "trace")


def named(module):
    """What a module's public names are, but modules."""
    for name in getattr(module, "__all__", dir(module)):
        if not name.startswith("_") and not isinstance(found := getattr(module, name), ModuleType):
            yield f"{module.__name__}.{name}", found


def public():
    """Every public name: of `dispatch`, of the families of ops, and of the modules that users know."""
    yield from named(dp)
    for family in FAMILIES:
        yield from named(import_module(f"dispatch.ops.{family}"))
    for place in PLACES:
        yield from named(getattr(dp, place))


def lost(found):
    """Those that are not themselves behind a pickle, for what reason."""
    for name, one in found:
        try:
            again = pickle.loads(pickle.dumps(one))
        except (pickle.PicklingError, TypeError, AttributeError, ImportError) as error:
            yield f"{name}: {type(error).__name__}: {error}"
            continue
        if again is not one and again != one:
            yield f"{name}: another object"


def test_every_public_name_is_itself_behind_a_pickle():
    found = dict(public())
    assert len(found) > 600
    assert sum(callable(one) for one in found.values()) > 500
    assert not list(lost(found.items()))


def test_the_names_of_torch_s_ops_are_themselves_behind_a_pickle():
    pytest.importorskip("torch")
    found = dict(named(import_module("dispatch.torch")))
    assert found
    assert not list(lost(found.items()))


def test_another_process_reads_functions_before_it_has_used_one():
    functions = [found for _, found in public() if callable(found)]
    program = (
        "import pickle, sys; found = pickle.load(sys.stdin.buffer); import dispatch as dp; "
        "assert dp.matmul in found and dp.linalg.solve in found and dp.register in found; print(len(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(functions), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout.decode().split()) == (0, [str(len(functions))]), done.stderr.decode()


def test_a_function_of_ones_own_op_is_pickled_where_a_module_makes_it(monkeypatch):
    source = """
from dispatch import MatmulRequest, request_function
double = request_function(MatmulRequest, "double")
def made():
    return request_function(MatmulRequest, "matmul")
"""
    module = ModuleType("of_ones_own")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    assert module.double.__module__ == "of_ones_own"
    assert module.made().__module__ == dp.MatmulRequest.__module__


def test_a_table_of_ones_own_is_not_pickled():
    assert pickle.loads(pickle.dumps(dp.TABLE)) is dp.TABLE
    with pytest.raises(TypeError, match=r"only dispatch\.TABLE can be pickled"):
        pickle.dumps(Table(()))
