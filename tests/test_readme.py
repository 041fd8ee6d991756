"""The README keeps its word: its example runs, and every file and make target it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_example_runs() -> None:
    example = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert example
    above = README.count("\n", 0, example.start(1))  # blank lines, so that a traceback shows the README's own
    exec(compile("\n" * above + example[1], "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z0-9-]+)", README))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!https?:|#)([^)#]+)", README))))
def test_linked_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_functions_are_counted_as_the_modules_have_them() -> None:
    pytest.importorskip("clang", reason="cudabind.gen, which knows the versions of each release, needs libclang")
    from cudabind.gen import counts

    assert counts.table() in README
