"""Rows of one's own: registered, preferred, refused, taken out again, and brought by packages."""

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.request import Plan
from dispatch.core.row import Row, Table
from dispatch.errors import BadRow
from dispatch.keys import F32, HOST, Arch, Epilogue
from dispatch.refusal import Kind, Refusal

ROOT = Path(__file__).parents[2]
BUILT_IN = next(row for row in dp.TABLE if row.min_arch == HOST and row.dtypes == (F32,) * 4)
NONE = dataclasses.replace(BUILT_IN.fusion, epilogues=(Epilogue.NONE,))


class Answer(Plan):
    """A plan that writes one number everywhere, so that one sees who ran."""

    __slots__ = ("number",)

    def __init__(self, row: Row, number: float) -> None:
        super().__init__(row, capture_safe=False)
        self.number = number

    def run(self, request: Any, outputs: dict[str, dp.Tensor]) -> None:
        np.asarray(outputs.get("out", request.out))[...] = self.number


def mine(number: float, **columns: Any) -> Row:
    """A host row for f32 products without an epilogue whose answer is a number."""
    row = dataclasses.replace(BUILT_IN, fusion=NONE, library=f"mine{number}", function="answer")
    return dataclasses.replace(row, call=lambda *arguments: Answer(arguments[2], number), **columns)


@pytest.fixture
def product() -> Iterator[dp.MatmulRequest]:
    """A request whose true answer is 2; the table is as before afterwards."""
    dev = dp.device("host")
    before = tuple(dp.TABLE)
    yield dp.MatmulRequest(dev.array(np.ones((3, 2), np.float32)), dev.array(np.ones((2, 3), np.float32)))
    for row in set(dp.TABLE) - set(before):
        dp.TABLE.unregister(row)
    assert tuple(dp.TABLE) == before


def answer(request: dp.MatmulRequest) -> float:
    (value,) = set(dp.run(request).numpy().ravel().tolist())
    return float(value)


def test_a_registered_row_goes_first_and_the_latest_before_it(product):
    assert answer(product) == 2
    dp.register(mine(10))
    assert answer(product) == 10  # the plan made before is forgotten
    dp.register(mine(20))
    assert answer(product) == 20
    assert dp.explain(product).row.library == "mine20"


def test_unregister_gives_the_requests_back(product):
    row = mine(10)
    dp.register(row)
    assert answer(product) == 10
    dp.TABLE.unregister(row)
    assert answer(product) == 2
    with pytest.raises(BadRow, match="is not in the table"):
        dp.TABLE.unregister(row)


def test_a_row_that_is_taken_out_while_its_plan_is_made_gives_the_requests_back(product):
    """As another thread may do it, while a kernel is compiled: that call has the row, and no later one."""

    def call(_request, _executor, of):
        dp.TABLE.unregister(of)
        return Answer(of, 10)

    dp.register(dataclasses.replace(mine(10), call=call))
    assert answer(product) == 10
    assert answer(product) == 2
    assert answer(dp.MatmulRequest(product.a, product.b)) == 2


def test_unregister_takes_no_row_that_differs_in_its_variant(product):
    count = len(dp.TABLE)
    with pytest.raises(BadRow, match="is not in the table"):
        dp.TABLE.unregister(dataclasses.replace(BUILT_IN, variant="mine"))
    assert len(dp.TABLE) == count
    assert answer(product) == 2


def test_a_bound_call_keeps_its_row_until_it_is_bound_anew(product):
    call = dp.prepare(product)
    assert call().numpy()[0, 0] == 2
    dp.register(mine(10))
    assert dp.prepare(product)().numpy()[0, 0] == 10


def test_what_a_registered_row_refuses_goes_on_to_the_next(product):
    dp.register(mine(10))
    fused = dataclasses.replace(product, epilogue=Epilogue.RELU)
    assert answer(fused) == 2
    name, reasons = dp.explain(fused).refusals[0]
    assert name.endswith("mine10")
    assert reasons == (Refusal(Kind.EPILOGUE, (Epilogue.NONE,), Epilogue.RELU),)
    assert str(reasons[0]) == "needs an epilogue of NONE, has RELU"


def test_a_rule_gives_its_reason(product):
    def three_rows(request: dp.MatmulRequest) -> str:
        """m is 4."""
        return "" if request.m == 4 else f"needs m = 4, has {request.m}"

    dp.register(mine(10, rules=(three_rows,)))
    assert answer(product) == 2
    assert dp.explain(product).refusals[0][1] == (Refusal(Kind.RULE, "needs m = 4, has 3"),)


def test_a_rule_that_breaks_where_the_row_refuses_anyway_hides_nothing(product):
    def fragile(request: dp.MatmulRequest) -> str:
        """Relies on a bias."""
        return "" if request.bias.shape else "needs a bias"

    dp.register(mine(10, rules=(fragile,), fusion=dataclasses.replace(NONE, epilogues=(Epilogue.BIAS,))))
    assert dp.explain(product).refusals[0][1] == (Refusal(Kind.EPILOGUE, (Epilogue.BIAS,), Epilogue.NONE),)


@pytest.mark.usefixtures("product")
def test_watchers_are_told():
    told = []
    dp.TABLE.watchers.append(lambda: told.append(len(dp.TABLE)))
    try:
        row = mine(10)
        count = len(dp.TABLE)
        dp.register(row)
        dp.TABLE.unregister(row)
    finally:
        dp.TABLE.watchers.pop()
    assert told == [count + 1, count]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (BUILT_IN, "is already in the table"),
        ("matmul", "a str, not a Row"),
        (
            mine(1, fusion=dataclasses.replace(NONE, epilogues=())),
            "needs a function to call, and at least one epilogue",
        ),
        (mine(1, fusion=dataclasses.replace(NONE, scales=())), "pair of scale modes"),
        (dataclasses.replace(mine(1), call=None), "needs a function to call"),
        (
            dataclasses.replace(BUILT_IN, variant="mine"),
            "accepts the same requests as .*, which is already in the table",
        ),
        (dataclasses.replace(mine(1), rules=len), "rules are a tuple of functions"),
        (dataclasses.replace(mine(1), rules=("needs more",)), "rules are a tuple of functions"),
        (dataclasses.replace(mine(1), dtypes=("f32",) * 4), "dtypes are a tuple of at least one Dtype"),
    ],
    ids=[
        *("twice", "no row", "no epilogue", "no scales", "no function"),
        *("its variant alone is another", "a rule alone", "no rules", "no dtypes"),
    ],
)
def test_an_unsound_row_is_refused_and_none_is_added(row, words, product):
    with pytest.raises(BadRow, match=words):
        dp.register(mine(30), row)
    assert answer(product) == 2


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"op": 3}, "op is a name, not 3"),
        ({"dtypes": ()}, r"dtypes are a tuple of at least one Dtype, not \(\)"),
        ({"compute": "32F"}, "compute is a Compute, or None, not '32F'"),
        ({"min_arch": None}, r"min_arch is an Arch such as Arch\(90\), or HOST, not None"),
        ({"min_arch": 90}, "min_arch is an Arch"),
        ({"max_arch": "sm_90"}, "max_arch is an Arch"),
        ({"min_version": "1"}, r"min_version is a tuple of numbers such as \(12, 4\), or \(\), not '1'"),
        ({"min_version": (1, "2")}, "min_version is a tuple of numbers"),
        ({"library": ""}, "library is a name, not ''"),
        ({"function": None}, "function is a name"),
        ({"run_on": "H200"}, "run_on is a tuple of names"),
        ({"fusion": "relu"}, "fusion is a Fusion, or None"),
        ({"note": None}, "note is a string"),
        (
            {"min_arch": Arch(90), "max_arch": Arch(80)},
            ".* can never be reached: max_arch sm_80 is older",
        ),
        ({"min_arch": Arch(90), "max_arch": HOST}, ".* can never be reached: max_arch host is older"),
    ],
    ids=str,
)
def test_a_column_that_holds_something_else_is_refused_by_its_name(columns, words, product):
    with pytest.raises(BadRow, match=f"^{words}"):
        dp.register(dataclasses.replace(mine(30), **columns))
    assert answer(product) == 2


@pytest.mark.parametrize("given", [True, False, 5], ids=repr)
def test_a_rule_says_why_and_not_whether(given, product):
    def is_small(_):
        return given

    row = dataclasses.replace(mine(30), rules=(is_small,))
    dp.register(row)
    for use in (lambda: answer(product), lambda: dp.explain(product)):
        with pytest.raises(TypeError, match=rf"the rule .*is_small returned {given!r}; expected a string"):
            use()
    dp.TABLE.unregister(row)
    assert answer(product) == 2


def test_a_row_that_can_never_be_reached_is_refused_when_the_table_is_made():
    narrow = dataclasses.replace(BUILT_IN, fusion=NONE)
    with pytest.raises(BadRow, match="can never be reached"):
        Table([BUILT_IN, narrow])
    assert len(Table([narrow, BUILT_IN])) == 2


def test_rows_are_seen_by_number_and_in_order():
    assert dp.TABLE[0] is next(iter(dp.TABLE))
    assert len(dp.TABLE) == len(list(dp.TABLE))
    assert dp.TABLE.of("no such op") == ()


PACKAGE = """
    from dataclasses import replace
    import dispatch as dp
    from dispatch.keys import F64, HOST

    BUILT_IN = next(row for row in dp.TABLE.of("matmul") if row.min_arch == HOST and row.dtypes == (F64,) * 4)
    ROW = replace(BUILT_IN, library="packaged")
    ROWS = [ROW, replace(BUILT_IN, library="packaged too")]
    WRONG = [ROW, ROW]

    def __getattr__(name):
        if name == "RAISES":
            raise OSError("no such file\\x1b[31m")
        if name == "EXITS":
            raise SystemExit(3)
        if name == "WORDLESS":
            raise type("Wordless", (Exception,), {"__str__": lambda self: 1 / 0})
        raise AttributeError(name)
"""
PROBE = """
import dispatch as dp
names = lambda: [row.library for row in dp.TABLE if row.library.startswith("packaged")]
print(names(), dp.TABLE.ops[0], len(dp.TABLE.broken))
a = dp.device("host").zeros((2, 2))
assert dp.matmul(a, a).shape == (2, 2)
assert names() == names()
"""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a process prints in which a package that brings these rows is installed."""

    def run(value: str) -> str:
        (tmp_path / "packaged.py").write_text(textwrap.dedent(PACKAGE))
        info = tmp_path / "packaged-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dispatch.rows]\nmine = {value}\n")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_package_brings_a_row_by_entry_point(packaged):
    assert packaged("packaged:ROW") == "['packaged'] matmul 0\n"


def test_a_package_brings_several_rows(packaged):
    assert packaged("packaged:ROWS") == "['packaged too', 'packaged'] matmul 0\n"


@pytest.mark.parametrize(
    "value",
    [
        *("packaged:WRONG", "packaged:MISSING", "missing:ROW", "packaged:F64", "packaged:RAISES", "packaged"),
        *("packaged:EXITS", "packaged:WORDLESS"),
    ],
)
def test_a_broken_package_is_named_once_and_costs_only_its_own_rows(packaged, value):
    out = packaged(value)
    assert out.startswith("[] matmul 1\n")
    assert out.count(f"RuntimeWarning: entry point mine = {value} of dispatch.rows adds no rows: ") == 1


def test_an_interrupt_while_packages_come_in_leaves_no_row_to_stand_in_its_own_way(monkeypatch):
    table, pressed = Table([BUILT_IN]), [True]

    class Entry:
        name = "mine"

        def __init__(self, row):
            self.row, self.value = row, "packaged:" + ("NONE" if row is None else "ROW")

        def load(self):
            if self.row is None and pressed:
                pressed.pop()
                raise KeyboardInterrupt
            return [] if self.row is None else self.row

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Entry(mine(1)), Entry(None)])
    with pytest.raises(KeyboardInterrupt):
        table.of("matmul")
    assert [row.library for row in table.of("matmul")] == [mine(1).library, BUILT_IN.library]
    assert table.broken == ()
