"""The routines of cuBLAS's and cuSOLVER's headers: each is called for a row, or stands in the docs with the reason.

The names that plans call by are read out of the modules that call: strings there are names, or made of parts.
"""

import ast
import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import dispatch as dp
from cudabind._bind import functions
from cudabind.sys import cublas, cusolverDn

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "dispatch" / folder for folder in ("libraries", "ops/blas", "ops/linalg", "ops/matmul")]
FOLDERS.append(ROOT / "dispatch/ops/grouped_matmul")
ANY = {"*"}  # what a part of a name is that only a run tells: a letter of a dtype, the routine of an op


def parts(node, known):
    """What a string may be, with a star for what is not known here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.FormattedValue):
        return parts(node.value, known)
    if isinstance(node, ast.IfExp):
        return parts(node.body, known) | parts(node.orelse, known)
    if isinstance(node, ast.JoinedStr):
        every = itertools.product(*(parts(value, known) for value in node.values))
        return {"".join(one) for one in every}
    if isinstance(node, ast.Name):
        return known.get(node.id, ANY)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "LETTERS":
        return {"[SDCZ]"}
    return ANY


def strings_of(scope):
    """Whatever strings a function or a module says, its own names put in, and the attributes that it reads."""
    known = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = zip(target.elts, node.value.elts, strict=False) if is_pair(target, node.value) else ()
                for name, value in both or ((target, node.value),):
                    if isinstance(name, ast.Name) and isinstance(value, (ast.Constant, ast.JoinedStr, ast.IfExp)):
                        known.setdefault(name.id, set()).update(parts(value, {}))
    for node in ast.walk(scope):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            yield from parts(node, known)
        elif isinstance(node, ast.Attribute):
            yield node.attr


def is_pair(*nodes):
    return all(isinstance(node, ast.Tuple) for node in nodes)


def without_docs(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.fixture(scope="module")
def said():
    """All that the calling modules say, and the functions that rows end in."""
    found = {row.function.removesuffix("_v2") for row in dp.TABLE}
    for folder in FOLDERS:
        for path in folder.rglob("*.py"):
            tree = without_docs(ast.parse(path.read_text()))
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for scope in (*functions, tree):
                found.update(strings_of(scope))
    return found


@pytest.fixture(scope="module")
def forms(said):
    """Those of them with parts that only a run tells."""
    unsure = [one for one in said if one.startswith(("cublas", "cusolverDn")) and ("[" in one or "*" in one)]
    return [re.compile(one.replace("*", r"(\w*)")) for one in unsure]


def is_called(name, said, forms):
    """Whether plans call a routine: by its name, by a form whose parts are said elsewhere, or by a type's letter."""
    if name in said:
        return True
    matches = [match for form in forms if (match := form.fullmatch(name))]
    if any(all(part in said for part in match.groups()) for match in matches):
        return True
    typed = re.fullmatch(r"cublas(?:[SDCZ]|Sc|Dz|Cs|Zd|HSH|HSS|TST|TSS)([a-z]\w*)", name)
    return typed is not None and typed[1] in said


def routines(module):
    """What a header declares, each once: for sizes of 64 bits and for the workspace it is the same routine."""
    names = functions(module)
    return sorted({re.sub(r"(_v2)?(_64)?$|_bufferSize$", "", name, count=1) for name in names})


def reasons(page):
    """The table of a page's section: patterns of names without the library's, by their reason."""
    section = (ROOT / "docs" / page).read_text().split("## Routines without a row", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    return {reason: re.findall(r"[\w?*\[\]]+", names.replace("`", " ")) for names, reason in rows}


@pytest.mark.parametrize(
    ("module", "page"),
    [(cublas, "blas.md"), (cusolverDn, "linear_algebra.md")],
    ids=["cublas", "cusolverDn"],
)
def test_each_routine_is_called_or_stands_in_the_docs_with_the_reason(module, page, said, forms):
    patterns = [pattern for row in reasons(page).values() for pattern in row]
    assert all(len(reason) > 10 for reason in reasons(page))
    left = {
        re.sub("^(cublas|cusolverDn|cusolver)", "", name): is_called(name, said, forms) for name in routines(module)
    }
    named = {name: [one for one in patterns if fnmatchcase(name, one)] for name in left}
    assert not [name for name in left if not left[name] and not named[name]], "neither called nor in the docs"
    assert not [name for name in left if left[name] and named[name]], "called, and in the docs as if not"
    assert not [pattern for pattern in patterns if not any(pattern in found for found in named.values())], "of nothing"
