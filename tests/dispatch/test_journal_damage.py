"""A journal that is damaged is one clear error, or what is sound of it runs."""

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main

spec = importlib.util.spec_from_file_location("journals", Path(__file__).with_name("journals.py"))
journals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(journals)
PATIENCE, path, replay = journals.PATIENCE, journals.path, journals.replay

JUNK = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 2**200, -(1 << 40), 1.5, 1e300, "", "x", "f64", "f4e2m1", "\x1b[31mred",
    "a" * 3000,
    [], [1], [-1], [[1]], [2**40, 2**40], {}, {"tensor": 0}, {"tensor": 0, "offset": -8}, {"tuple": 5}, {"float": "x"},
    {"enum": "os:path", "name": "x"}, {"enum": "dispatch.keys:Epilogue", "name": "x"}, {"dtype": 5}, {"complex": [1]},
    {"dataclass": "dispatch.keys:Dtype", "fields": {}}, {"constant": "dispatch.nothing:x"}, {"other": "\x1b[2J"},
)  # fmt: skip


def a_journal(path):
    """Requests of several kinds, whose operands share memory."""
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        whole = dev.array(np.ones((8, 8), np.float32))
        sup.submit(dp.MatmulRequest(whole[:4], whole, out=dev.zeros((4, 8)), alpha=2.0)).result(PATIENCE)
        bias = dev.zeros(8)
        sup.submit(dp.MatmulRequest(whole, whole, bias=bias, epilogue=dp.Epilogue.RELU_BIAS)).result(PATIENCE)
        sup.submit(dp.MatmulRequest(whole, whole, scales=dp.Scales(), compute=dp.Compute.COMPUTE_32F)).result(PATIENCE)
        sup.submit(dp.ReduceRequest(whole, (0,))).result(PATIENCE)
        sup.submit(dp.PoolingRequest(dev.array(np.ones((1, 2, 4, 4), np.float32)), 2)).result(PATIENCE)
        assert sup.submit("no request").exception(PATIENCE)


def places(node, found):
    """Every container in a journal's lines, with a key or an index into it."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        found.append((node, key))
        places(node[key], found)
    return found


def mutated(lines, rng):
    """The text of a journal with one to three changes to what its lines say, or to its bytes."""
    lines = json.loads(json.dumps(lines))
    for _ in range(int(rng.integers(1, 4))):
        node, key = (found := places(lines, []))[int(rng.integers(len(found)))]
        kind = int(rng.integers(8))
        if kind < 5:
            node[key] = copy.deepcopy(JUNK[int(rng.integers(len(JUNK)))])  # which a later change may change
        elif kind < 6 and isinstance(node[key], int):
            node[key] += int(rng.integers(-1000, 1000))
        elif kind < 7:
            del node[key]
        elif lines:
            lines.insert(int(rng.integers(len(lines))), lines[int(rng.integers(len(lines)))])
    data = bytearray("".join(json.dumps(line) + "\n" for line in lines).encode())
    if rng.integers(4) == 0 and data:
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
    return bytes(data)


def test_a_damaged_journal_is_one_clear_error_or_runs_what_is_sound(path, tmp_path, rng, capsys, monkeypatch):
    monkeypatch.setattr(
        "dispatch.supervise.request_json.MACHINE_MEMORY", 1 << 22
    )  # as if this machine had no more: others work on it, too
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    statuses = []
    # Of 800 changes one takes away what cannot be run again, the sixth, and nothing else: that is the first here.
    sound = "".join(json.dumps(line) + "\n" for line in lines if 6 not in line.values()).encode()
    for number in range(400):
        bad = tmp_path / "bad"
        bad.write_bytes(mutated(lines, rng) if number else sound)
        statuses.append(main(["replay", str(bad), "--device", "host"]))
        said = "".join(capsys.readouterr())
        assert said.strip()
        assert said.replace("\n", "").replace("\t", "").isprintable(), said
    assert set(statuses) == {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("define", {"done": 5}), ("define", {"request": 1}), ("request", {"ended": [1]}), ("journal", {"request": 1})],
    ids=str,
)
def test_a_line_is_of_one_kind(path, kind, more, capsys):
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if kind in line).update(more)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(path) == 2
    assert f"a {kind} with unknown keys: " in capsys.readouterr().err


@pytest.mark.parametrize("depth", [400, 600, 900])
def test_what_is_nested_deeply_is_told_like_any_other_damage(path, depth, capsys):
    a_journal(path)
    deep = "[" * depth + "]" * depth
    path.write_text(path.read_text().replace('"alpha":2.0', f'"alpha":{deep}'))
    assert replay(path) in (1, 2)  # 2 where JSON itself goes no deeper
    assert "got" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "words"), [(("--seed", "-1"), "--seed"), (("--setup", ""), "--setup"), (("--setup", "..x"), "--setup")]
)
def test_an_option_that_is_none_is_told(path, options, words, capsys):
    a_journal(path)
    assert replay(path, *options) == 2
    assert f"{words}: got " in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_is_told_with_its_option(path, capsys):
    a_journal(path)
    assert replay(path, "--setup", "no_such_module") == 1
    assert "--setup no_such_module failed: ModuleNotFoundError" in capsys.readouterr().err


def test_a_line_that_is_no_json_is_told_by_its_number(path, capsys):
    a_journal(path)
    begin, rest = path.read_text().split("\n", 1)
    path.write_text(f"{begin}\nnothing of ours\n{rest}")
    assert replay(path) == 2
    assert f"{path}, line 2; expected lines of JSON objects" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -(1 << 40)}, {"offset": -4}, {"offset": 2}, {"offset": 1 << 47}, {"strides": [-8, 1]},
        {"strides": [1 << 40, 1]}, {"shape": [-1, 8]}, {"shape": [8]}, {"shape": [2**30, 2**30]}, {"shape": "ab"},
        {"dtype": "f31"}, {"dtype": None}, {"tensor": "x"}, {"offset": None}, {"offset": 0.0}, {"strides": None},
        {"shape": [1] * 70, "strides": [1] * 70},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_leaves_its_storage_is_never_made(path, tmp_path, change, capsys):
    a_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in lines if "define" in line)
    line["fields"]["out"] |= change
    bad = tmp_path / "bad"
    bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(bad), "--device", "host", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["unreadable"] == 2  # and what is no request
    assert report["why"].startswith(("BadRequest", "OutOfMemory"))
    assert report["ran"] == 4
