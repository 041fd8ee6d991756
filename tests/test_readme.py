"""README and the pages keep their word: its example runs, and every file and make target they name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_first_example_runs() -> None:
    example = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert example
    above = README.count("\n", 0, example.start(1))  # blank lines, so that a traceback shows the README's own
    exec(compile("\n" * above + example[1], "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z0-9-]+)", README))))
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    links = set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")))
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_the_functions_are_counted_as_the_modules_have_them() -> None:
    pytest.importorskip("clang", reason="cudabind.gen, which knows the versions of each release, needs libclang")
    from cudabind.gen import counts

    assert counts.table() in (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
