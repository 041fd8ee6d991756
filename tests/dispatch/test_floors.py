"""The order of dispatch's folders: each imports only what stands before it, and no op family imports another.

All imports count, those inside functions and for types, too. docs/draw.py has the order, and draws it.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DRAW = Path(__file__).parents[2] / "docs" / "draw.py"
spec = importlib.util.spec_from_file_location("draw", DRAW)
draw = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)

EXCEPTIONS = {  # at most three
    ("supervise.supervisor", "supervise.process.process_pool"): "the class that users name begins either kind of pool",
    ("supervise.supervisor", "supervise.process.shared_device"): "and such a pool's device is another one",
}
LONGEST = 400  # lines
# A tensor names its device, and a device makes tensors, streams and copies: for types these import one another.
OF_A_DEVICE = {
    f"device.{name}"
    for name in ["async_copy", "device", "dlpack", "host_memory", "layout", "storage", "stream", "tensor"]
}


def test_no_import_goes_upward():
    against = {(one.source, one.target) for one in draw.upward()}
    assert against == EXCEPTIONS.keys(), "an exception that is no longer needed goes, too"
    assert len(EXCEPTIONS) <= 3


def test_folders_import_in_no_circle():
    """Follows from the order where nothing goes upward; with the exceptions' arrows left out."""
    arrows = {}
    for one in draw.imports():
        if (one.source, one.target) not in EXCEPTIONS and draw.floor(one.source) != draw.floor(one.target):
            arrows.setdefault(draw.floor(one.source), set()).add(draw.floor(one.target))

    assert not [draw.NAMES[number] for number in arrows if number in reached(number, arrows)]


def reached(start, arrows):
    """What there is a way to along the arrows."""
    found, left = set(), [start]
    while left:
        for target in arrows.get(left.pop(), ()):
            if target not in found:
                found.add(target)
                left.append(target)
    return found


# A product's request is looked at by another file, whose functions name its type.
OF_A_PRODUCT = {"ops.matmul.request", "ops.matmul.validate"}


def test_modules_import_in_no_circle_but_for_the_types_of_a_device_and_of_a_product():
    arrows = {}
    for one in draw.imports():
        if one.source != one.target:
            arrows.setdefault(one.source, set()).add(one.target)
    assert {module for module in arrows if module in reached(module, arrows)} == OF_A_DEVICE | OF_A_PRODUCT


def test_no_op_family_imports_another():
    crossed = set()
    for one in draw.imports():
        source, target = one.source.split("."), one.target.split(".")
        if source[0] == target[0] == "ops" and len(source) > 1 and len(target) > 1 and source[1] != target[1]:
            crossed.add((source[1], target[1]))
    assert not crossed


def test_no_module_that_was_written_by_hand_is_too_long():
    """`cudabind/sys` is generated."""
    root = DRAW.parents[1]
    found = [path for folder in ("cudabind", "dispatch", "tests") for path in (root / folder).rglob("*.py")]
    lines = {
        path: len(path.read_text().splitlines()) for path in found if root / "cudabind" / "sys" not in path.parents
    }
    assert len(lines) > 1000, "the folders have moved"
    assert not {str(path.relative_to(root)): count for path, count in lines.items() if count > LONGEST}


def test_every_folder_stands_on_a_floor():
    folders = {path.parent.name for path in draw.PACKAGE.glob("*/*.py")}
    assert folders <= set(draw.NAMES)


@pytest.mark.parametrize("wrong", ["device.tensor ops.matmul", "execute.executor table.table"])
def test_a_wrong_import_is_found(wrong, monkeypatch):
    source, target = wrong.split()
    real = list(draw.imports())
    monkeypatch.setattr(draw, "imports", lambda: [*real, draw.Import(source, target, 1)])
    with pytest.raises(AssertionError):
        test_no_import_goes_upward()


def test_the_picture_is_the_one_that_the_imports_give():
    done = subprocess.run([sys.executable, DRAW, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
