"""The public names of `dispatch`, and its request functions as users, editors and type checkers see them."""

import ast
import asyncio
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
    if isinstance(found := getattr(dp, name), type) and issubclass(found, Request) and hasattr(found, "op")
}

FUNCTIONS = [op for op in CLASSES if hasattr(dp, op)]

RIGHT = """
import asyncio

import dispatch as dp
from dispatch import Tensor

dev = dp.device("host")
x = dev.zeros((2, 3, 8, 8))
w = dev.zeros((4, 3, 3, 3))
a = dev.zeros((16, 16), "f16")
scale = dev.zeros((8,))
y: Tensor = dp.conv_fwd(x, w, pad=1, activation=dp.Activation.RELU_FWD)
p: Tensor = dp.pooling(y, 2, mode=dp.PoolingMode.MAX)
dx: Tensor = dp.pooling_bwd(y, p, p, 2)
s: Tensor = dp.softmax(p, axis=1)
kept, reserve = dp.dropout(s, dp.dropout_states(dev, 7), 0.25)
gradient: Tensor = dp.dropout_bwd(kept, reserve, 0.25)
product: Tensor = dp.matmul(x, x, epilogue=dp.Epilogue.RELU)
stored, aux = dp.matmul(a, a, epilogue=dp.Epilogue.GELU_AUX)
normed, mean, inv_variance = dp.norm_fwd(x, scale, training=True)
dy, *others = dp.norm_bwd(x, x, scale, inv_variance, mean)
print(normed.numpy(), product.shape, stored.shape, aux.dtype, dy.ndim, len(others))
request = dp.SoftmaxRequest(x, axis=1)
again: Tensor = dp.run(request)
plain = dp.MatmulRequest(a, a)
pair = dp.MatmulRequest(a, a, epilogue=dp.Epilogue.RELU_AUX)
bare: dp.MatmulRequest = plain
named: dp.MatmulRequest[Tensor] = plain.replace(a=a)
rows: Tensor = dp.grouped_matmul(x, x, [2, 6], alpha=2.0)
several: tuple[Tensor, ...] = dp.grouped_matmul([x], [x], out_dtype="f32")
futures: list[dp.Future[Tensor]] = []

def first(call: dp.BoundCall[tuple[Tensor, Tensor]], training: bool) -> Tensor:
    found = dp.norm_fwd(x, scale, training=training)
    return call()[0] if isinstance(found, tuple) else found

async def serve(sup: dp.Supervisor) -> tuple[Tensor, Tensor]:
    later = sup.submit(request, after=[sup.submit(pair)])
    later.add_done_callback(lambda future: print(future.result().shape))
    futures.extend([later, *sup.submit_many([plain, plain])])
    await asyncio.gather(*map(asyncio.ensure_future, futures))
    return await sup.submit(pair)

async def wrong_or_revealed(sup: dp.Supervisor, flag: bool, tree: dp.evt.Node) -> None:
"""
WRONG = {  # a line, and what both checkers must find in it
    "dp.mat_mul(x, x)": "mat_mul",
    "dp.FAMILIES": "FAMILIES",
    "dp.graph": "graph",
    "dp.evaluate": "evaluate",
    "dp.pooling(x)": "window|few arguments",
    "dp.pooling(x, 2, 3)": "positional",
    "dp.pooling(x, 2, strides=2)": "strides",
    "dp.softmax(x, axis='1')": "axis|str",
    "dp.matmul(x, 3.0)": "float",
    "n: int = dp.softmax(x)": "int",
    "dp.conv_fwd(x, w, activation=1.5)": "activation|str",
    "m: int = dp.run(request)": "int",
    "dp.grouped_matmul(x, x, [2, 6], alpha='2')": "alpha|str",
    "k: int = dp.grouped_matmul([x], [x])": "int",
    "dp.grouped_matmul(x, x, 'ends', config=7)": "config|ends|int|str",
    "dp.matmul(a, a)[0].foo": "foo",
    "dp.matmul(a, a).foo": "foo",
    "dp.matmul(a, a, epilogue=dp.Epilogue.RELU_AUX).shape": "shape",
    "dp.matmul(a, a, epilog=dp.Epilogue.RELU)": "epilog|Literal.Epilogue.RELU",
    "dp.matmul(a, a, epilogue=dp.Epilogue.RELU, fast_accum='yes')": "fast_accum|str",
    "dp.MatmulRequest(a, 3.0)": "float",
    "dp.MatmulRequest(a, a, epilog=1)": "epilog",
    "dp.norm_fwd(x, scale, training=1.0)": "training|float",
    "d, e = dp.conv_fwd(x, w), dp.norm_fwd(x, scale, training=True).shape": "shape",
    "q: str = await sup.submit(request)": "str",
    "r: Tensor = await sup.submit(pair)": "Tensor",
    "sup.submit(plain).result().foo": "foo",
    "dp.prepare(pair)().shape": "shape",
    "t: list[dp.Future[int]] = sup.submit_many([plain])": "int",
    "sup.submit(x)": "Tensor",
}
ONE, PAIR, SEVERAL = "Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, ...]"
REVEALED = {  # an expression, and its type as both checkers say it
    "dp.matmul(a, a)": ONE,
    "dp.matmul(a, a, epilogue=dp.Epilogue.GELU_AUX)": PAIR,
    "dp.conv_fwd(x, w)": ONE,
    "dp.conv_bwd_data(dev.zeros((2, 4, 6, 6)), w)": ONE,
    "dp.conv_bwd_filter(dev.zeros((2, 4, 6, 6)), x, w_extents=(3, 3))": ONE,
    "dp.conv_transpose(dev.zeros((2, 4, 6, 6)), w)": ONE,
    "dp.norm_fwd(x, scale)": ONE,
    "dp.norm_fwd(x, scale, training=True)": SEVERAL,
    "dp.norm_fwd(x, scale, training=flag)": f"{ONE} | {SEVERAL}",
    "dp.sdpa_fwd(heads, heads, heads)": ONE,
    "dp.sdpa_fwd(heads, heads, heads, stats=True)": SEVERAL,
    "dp.reduce(x, 1)": ONE,
    "dp.reduce(x, 1, reduce=dp.ReduceOp.MAX, indices=True)": PAIR,
    "dp.reduce(x, 1, reduce=dp.ReduceOp.MAX, indices=flag)": f"{ONE} | {PAIR}",
    "dp.softmax(x)": ONE,
    "dp.run(plain)": ONE,
    "dp.run(pair)": PAIR,
    "dp.run(request)": ONE,
    "dp.run(dp.ReduceRequest(x, indices=True, reduce=dp.ReduceOp.MAX))": PAIR,
    "dp.prepare(plain)()": ONE,
    "dp.prepare(pair)()": PAIR,
    "dp.prepare(pair)": f"BoundCall[{PAIR}]",
    "dp.prepare_all([plain, request])": f"list[BoundCall[{ONE}]]",
    "sup.submit(plain)": f"Future[{ONE}]",
    "sup.submit(pair)": f"Future[{PAIR}]",
    "sup.submit(dp.ConvFwdRequest(x, w))": f"Future[{ONE}]",
    "sup.submit(dp.NormFwdRequest(x, scale, training=True))": f"Future[{SEVERAL}]",
    "sup.submit(dp.NormFwdRequest(x, scale, training=flag))": f"Future[{ONE} | {SEVERAL}]",
    "sup.submit(dp.SdpaFwdRequest(heads, heads, heads))": f"Future[{ONE}]",
    "sup.submit_many([plain, plain])": f"list[Future[{ONE}]]",
    "sup.submit_many([pair])": f"list[Future[{PAIR}]]",
    "sup.submit_many([plain, request])": f"list[Future[{ONE}]]",
    "sup.submit(pair).result()": PAIR,
    "await sup.submit(plain)": ONE,
    "await sup.submit(pair)": PAIR,
    "plain.replace(a=a)": f"MatmulRequest[{ONE}]",
}
FOR_TYPES = {  # which nothing of runs
    "dp.matmul(a, a, epilogue=tree)": f"{ONE} | {SEVERAL}",
    "dp.conv_fwd(x, w, epilogue=tree)": f"{ONE} | {SEVERAL}",
    "dp.MatmulRequest(a, a, epilogue=tree)": f"MatmulRequest[{ONE} | {SEVERAL}]",
    "dp.ctc_loss(x, x, x, x, max_label_length=1)": PAIR,
    "dp.ctc_loss(x, x, x, x, max_label_length=1, with_gradient=False)": ONE,
    "dp.rnn(x, x, dp.Network(dp.RnnMode.LSTM, 8, 8))": SEVERAL,
    **{
        f"dp.matmul(a, a, epilogue=dp.Epilogue.{e.name})": PAIR if e.writes_aux or e.writes_bgrad else ONE
        for e in dp.Epilogue
    },
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
    assert not {name for name in names if inspect.ismodule(getattr(dp, name))} - {
        "cudnn",
        "errors",
        "evt",
        "fft",
        "sparse",
        "structured",
        "linalg",
        "parallel",
        "random",
        "signal",
        "tensors",
        "trace",
    }


def test_a_star_import_gives_the_public_names():
    scope = {}
    exec("from dispatch import *", scope)
    assert set(scope) - {"__builtins__"} == set(dir(dp))


def test_a_name_that_nobody_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'dispatch' has no attribute 'mat_mul'; did you mean 'matmul'\?$"):
        _ = dp.mat_mul


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Matmul_Request", "MatmulRequest"),
        ("sofmax", "softmax"),
        ("supervisor", "Supervisor"),
        ("conv_forward", "conv_fwd"),
    ],
)
def test_an_error_says_which_name_is_likely_meant(name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(dp, name)
    assert str(caught.value).endswith(f"; did you mean {meant!r}?")
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["_repr_html_", "__wrapped__", "zzzzzz"])
def test_a_name_like_none_is_an_attribute_error_too(name):
    with pytest.raises(AttributeError, match=f"^module 'dispatch' has no attribute '{name}'$"):
        getattr(dp, name)


def test_the_interpreter_says_what_is_meant_once():
    ran = subprocess.run(
        [sys.executable, "-c", "import dispatch\ndispatch.mat_mul"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.lower().count("did you mean") == 1


def test_completion_knows_the_public_names_before_they_are_used():
    """As the REPL and IPython complete: by `dir()`, in an interpreter that has used none."""
    asks = "import dispatch as dp, rlcompleter; complete = rlcompleter.Completer({'dp': dp}).attr_matches"
    said = f"{asks}; print(*complete('dp.conv_'), *complete('dp.Super'), *complete('dp.mat'), *complete('dp.key'))"
    ran = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [word.partition("(")[0] for word in ran.stdout.split() if word.startswith("dp.")]
    assert sorted(found) == [
        *("dp.Supervisor", "dp.conv_bwd_data", "dp.conv_bwd_filter", "dp.conv_fwd", "dp.conv_transpose", "dp.matmul"),
        *("dp.matmul_2_4", "dp.matrix_norm", "dp.matrix_rank"),
    ]


def test_type_checkers_see_every_family():
    """The imports for them, one a line."""
    tree = ast.parse((ROOT / "dispatch" / "__init__.py").read_text())
    stars = {
        n.module.rpartition(".")[2] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"
    }
    assert stars == FAMILIES.keys() - {"graph"}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_function_has_the_parameters_of_its_class_and_its_documentation(op):
    kind, function = CLASSES[op], getattr(dp, op)
    assert function.__name__ == function.__qualname__ == op
    parameters = inspect.signature(function).parameters
    described = function.__doc__.partition("Args:")[2]
    assert list(parameters) == [field.name for field in sorted(fields(kind), key=lambda field: field.kw_only)]
    for field in fields(kind):
        parameter = parameters[field.name]
        assert parameter.default == (inspect.Parameter.empty if field.default is MISSING else field.default)
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == field.kw_only
        assert parameter.annotation == field.type
        assert re.search(rf"(?m)^    (\w+, )*{field.name}(, \w+)*:", described), (
            f"{kind.__name__} does not document {field.name}"
        )
    assert "Attributes:" not in function.__doc__
    with pytest.raises(TypeError, match=rf"{op}\(\)"):
        function()


@pytest.mark.parametrize("expression", REVEALED)
def test_what_comes_out_is_what_checkers_are_told(expression):
    """The expressions that checkers tell the types of, run on the host."""

    async def outcome():
        with dp.Supervisor("host", streams=1) as sup:
            scope = {"dp": dp, "sup": sup, "flag": True}
            lines = [
                line for line in RIGHT.split("\n") if line.startswith(("dev ", "x ", "w ", "a ", "scale ", "plain "))
            ]
            exec(
                "\n".join([*lines, *(line for line in RIGHT.split("\n") if line.startswith(("request ", "pair ")))]),
                scope,
            )
            scope["heads"] = scope["dev"].zeros((1, 2, 4, 8), "f16")
            found = eval(expression.removeprefix("await "), scope)
            return await found if expression.startswith("await ") else found

    assert is_of(asyncio.run(outcome()), REVEALED[expression])


@pytest.mark.parametrize("name", ["BoundCall", "Future", "MatmulRequest", "NormFwdRequest", "Request"])
def test_an_annotation_with_the_type_of_a_result_can_be_evaluated(name):
    assert getattr(dp, name)[dp.Tensor].__args__ == (dp.Tensor,)


def is_of(value, kind):
    """Whether a value is of a type as checkers say it."""
    if kind.startswith("Tensor | "):
        return is_of(value, ONE) or is_of(value, kind.removeprefix("Tensor | "))
    if kind == SEVERAL:
        return type(value) is tuple and all(type(one) is dp.Tensor for one in value)
    if kind == PAIR:
        return is_of(value, SEVERAL) and len(value) == 2
    if kind.startswith("list["):
        return type(value) is list and all(is_of(one, kind[5:-1]) for one in value)
    if kind.startswith("BoundCall["):
        return type(value) is dp.BoundCall and is_of(value(), kind[10:-1])
    if kind.startswith("Future["):
        return type(value) is dp.Future and is_of(value.result(), kind[7:-1])
    return type(value) is getattr(dp, kind.partition("[")[0])


def checked_by(command, folder):
    """Run a checker over a user's program, whose last lines are wrong, each in its way, and ask it for types."""
    revealed = {f"reveal_type({expression})": kind for expression, kind in (REVEALED | FOR_TYPES).items()}
    program = [*RIGHT.strip().split("\n"), "    heads = dev.zeros((1, 2, 4, 8), 'f16')"]
    program.append(f"    print({', '.join(f'dp.{name}' for name in dir(dp))})")
    start = len(program)
    program += [f"    {line}" for line in (*WRONG, *revealed)]
    (folder / "user.py").write_text("\n".join(program) + "\n")
    ran = subprocess.run(
        [sys.executable, "-m", *command, "user.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    errors, types, line = {}, {}, ""
    for said in ran.stdout.replace(str(folder / "user.py"), "user.py").split("\n"):
        if match := re.search(r"user\.py:(\d+)\S* -? ?(error.*)", said):
            line = program[int(match[1]) - 1].strip() if int(match[1]) > start else f"line {match[1]}"
            errors[line] = errors.get(line, "") + match[2]
        elif match := re.search(r"user\.py:(\d+)\S* .*(?:Revealed type|Type of .*) is \"(.*)\"", said):
            types[program[int(match[1]) - 1].strip()] = re.sub(r"\b(?:\w+\.)+(?=\w)", "", match[2])
        elif line:
            errors[line] += said  # a message goes on
    assert errors.keys() == WRONG.keys(), ran.stdout + ran.stderr
    for line, message in errors.items():
        assert re.search(WRONG[line], message), message
    assert types == revealed


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
        f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT}"], "pythonVersion": "3.10"}}'
    )
    checked_by(["basedpyright", "--project", "."], tmp_path)


@pytest.mark.parametrize("name", ["NoRow", "BadRequest", "QueueFull"])
def test_an_error_is_found_in_its_module(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; dispatch\.errors\.{name}$"):
        getattr(dp, name)


@pytest.mark.parametrize("name", ["cudnn", "evt", "fft", "linalg", "random", "signal", "trace"])
def test_a_module_shows_its_public_names_and_no_others(name):
    module = getattr(dp, name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in dir(module))


def test_modules_are_imported_by_their_public_names_too():
    text = """
import importlib, pickle
from dispatch.linalg import solve
import dispatch.random as generators
import dispatch

assert solve is dispatch.linalg.solve and generators is dispatch.random
for name in dispatch._MODULES:
    module = importlib.import_module(f"dispatch.{name}")
    assert module is getattr(dispatch, name), name
    assert module.__spec__.name == module.__name__, name
assert pickle.loads(pickle.dumps(solve)) is solve
for code in ("import dispatch.nothing", "import dispatch.fft.nothing", "from dispatch.fft import nothing"):
    try:
        exec(code)
    except ImportError:
        continue
    raise AssertionError(code)
"""
    subprocess.run([sys.executable, "-c", text], check=True)
