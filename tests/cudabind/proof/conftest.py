"""A C compiler's account of NVIDIA's headers, for the proofs: names, values, sizes, offsets and signatures.

gcc preprocesses, evaluates and lays out; this file only asks it, and picks names out of preprocessed text. It reads no
header by cudabind's own parser: from cudabind.gen it takes which headers a module has and the folders they are in.
"""

from __future__ import annotations

import functools
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

TOKEN = re.compile(r'[A-Za-z_]\w*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[\w.]+|\S')
MARKER = re.compile(r'# \d+ "([^"]*)"')
AUX = re.compile(r"/\* (?P<file>\S+?):\d+:\w(?P<kind>\w) \*/ (?P<words>.*?)\b(?P<name>\w+) \((?P<parameters>.*)\);")
ATTRIBUTE = re.compile(r"\b__attribute__ \( \([^)]*(?:\( [^)]*\) )?\) \)|\b__extension__\b|\b_Alignas \( [^)]*\)")
INTEGERS = ": {0}, ".join(
    [
        *("_Bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned"),
        *("long", "unsigned long", "long long", "unsigned long long", ""),
    ]
)
SIZE = "sizeof({})"
# Of a type's class gcc answers 5 for a pointer, and for an array, too.
IS_ARRAY = "(__builtin_classify_type(*(__typeof__({0}) *)0) == 5 && sizeof({0}) != 8)"
# What an expression is worth to a Python program: an integer, a number, a text; anything else has no value, and is not
# evaluated: it may be a function.
SHOW = f"""
static void show_integer(long long value) {{ printf("int %lld\\n", value); }}
static void show_number(double value) {{ printf("float %.17g\\n", value); }}
static void show_text(const char *value) {{ printf("str %s\\n", value); }}
static void show_none(int value) {{ printf("none \\n"); }}
#define KIND(x, integer, number, text, none) _Generic((x), \\
    {INTEGERS.format("integer")}float: number, double: number, char *: text, const char *: text, default: none)
#define INTEGER(x) show_integer((long long)(x));
#define ANY(x) KIND(x, show_integer, show_number, show_text, show_none) \\
    (__builtin_choose_expr(KIND(x, 1, 1, 1, 0), (x), 0));
"""
MAKE: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "none": lambda _: None}


class Headers:
    """Some headers as gcc has them: what they themselves declare, and where asked for also what they include.

    Attributes:
        enums: the enumerators of every enum, by the enum's names (tag and typedefs; "" where it has none).
        types: how C spells each type that is declared here, by its name.
        constants: the variables with a value.
        variables: the `extern` ones, which the library exports.
        macros: the macros that have a body and no parameters.
        foreign: every word of the headers that these include.
    """

    def __init__(
        self,
        headers: Iterable[str],
        folders: Iterable[Path],
        work: Path,
        included: bool = False,
        further: Iterable[str] = (),
        prologue: str = "",
    ) -> None:
        self._headers = tuple(headers)
        self._further = tuple(further)
        self._prologue = prologue
        self._included = included
        self._folders = [f"-I{folder}" for folder in folders]
        self._work = work
        self.enums: dict[str, list[str]] = {}
        self.types: dict[str, str] = {}
        self.bodies: dict[str, str] = {}
        self.constants: list[str] = []
        self.variables: list[str] = []
        self.macros: dict[str, str] = {}
        self.foreign: set[str] = set()
        self._read(self._gcc("", "-E", "-dD"))

    @functools.cached_property
    def functions(self) -> dict[str, tuple[str, list[str]]]:
        """The spelled result and parameters of every function."""
        listing = self._work / "declared.txt"
        self._gcc("", "-fsyntax-only", "-aux-info", str(listing))
        found = filter(None, map(AUX.match, listing.read_text().splitlines()))
        return {each["name"]: _signature(each) for each in found if self._is_home(each["file"])}

    @functools.cached_property
    def renamed(self) -> dict[str, str]:
        """The functions that the headers give a second name; the driver's go through further macros."""
        nested = [name for name, body in self.macros.items() if re.fullmatch(r"\w+ ?\(\w+\)", body)]
        expanded = self._gcc("".join(f'"{name}" {name}\n' for name in nested), "-E", "-P") if nested else ""
        bodies = {**self.macros, **dict(re.findall(r'^"(\w+)" (\w+)$', expanded, re.MULTILINE))}
        return {name: body for name, body in bodies.items() if body in self.functions and body != name}

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The value of every macro that has one, of every constant and of every enumerator; also what types are.

        One program tells it all: most of what gcc takes is for the headers themselves.
        """
        enumerators = [name for members in self.enums.values() for name in members]
        asked = [question.format(spelled) for spelled in self.types.values() for question in (SIZE, IS_ARRAY)]
        return self.ask([*enumerators, *asked], [*self.constants, *self.macros])

    @functools.cached_property
    def opaque(self) -> set[str]:
        """Types of which only a pointer can be passed: incomplete ones and arrays."""
        incomplete = {name for name, spelled in self.types.items() if SIZE.format(spelled) not in self.values}
        return incomplete | {name for name, spelled in self.types.items() if self.values.get(IS_ARRAY.format(spelled))}

    @functools.cached_property
    def macro_values(self) -> dict[str, Any]:
        """The value of every macro that has one."""
        return {name: self.values[name] for name in self.macros if name in self.values}

    def ask(self, integers: Iterable[str], others: Iterable[str] = ()) -> dict[str, Any]:
        """The values of C expressions, as printed by a program; of the others any that has a value.

        Those that do not compile, or have no value, are not in the answer.
        """
        asked = dict.fromkeys(others, "ANY") | dict.fromkeys(integers, "INTEGER")
        program = str(self._work / "ask")
        if self._gcc(_printing(asked), "-o", program, wrong=True):
            # A function each: gcc complains of an unknown name only once in a function.
            probes = [f"void f{i}(void) {{ (void)({text}); }}\n" for i, text in enumerate(asked)]
            errors = self._gcc("".join(probes), "-fsyntax-only", "-ftrack-macro-expansion=0", wrong=True)
            first = self._including("").count("\n") + 1
            wrong = {int(line) - first for line in re.findall(r"ask\.c:(\d+):\d+: error", errors)}
            asked = {text: kind for i, (text, kind) in enumerate(asked.items()) if i not in wrong}
            self._gcc(_printing(asked), "-o", program)
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
        answers = (answer.partition(" ") for answer in said)
        made = {text: MAKE[kind](value) for text, (kind, _, value) in zip(asked, answers, strict=True)}
        return {text: value for text, value in made.items() if value is not None}

    def _including(self, text: str) -> str:
        # Some of NVIDIA's headers write `alignas` and `bool`, which C has from stdalign.h and stdbool.h.
        ours = "".join(f"#include <{name}.h>\n" for name in ("stdalign", "stdbool", "stddef", "stdio"))
        return ours + self._prologue + "".join(f"#include <{header}>\n" for header in self._headers) + text

    def _gcc(self, text: str, *arguments: str, wrong: bool = False) -> str:
        source = self._work / "ask.c"
        source.write_text(self._including(text))
        command = ["gcc", "-w", *arguments, *self._folders, str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and not wrong:
            raise AssertionError(f"{' '.join(command)}: {done.stderr[:2000]}")
        return done.stderr if wrong else done.stdout

    def _is_home(self, file: str) -> bool:
        return self._included or file.endswith(tuple(f"/{header}" for header in (*self._headers, *self._further)))

    def _read(self, text: str) -> None:
        tokens: list[str] = []
        home = False
        for line in text.splitlines():
            if marker := MARKER.match(line):
                home = self._is_home(marker[1])
            elif home and line.startswith("#define "):
                name, _, body = line[8:].partition(" ")
                if body and "(" not in name:
                    self.macros[name] = body
            elif home and not line.startswith("#"):
                tokens += TOKEN.findall(line)
            elif not home:
                self.foreign.update(re.findall(r"[A-Za-z_]\w+", line))
        for declaration in _declarations(tokens):
            self._declare(declaration)

    def _declare(self, text: str) -> None:
        text = ATTRIBUTE.sub("", text).strip()
        kind = text.split()[0]
        tag = re.match(r"(?:typedef )?(struct|union|enum) (?:(\w+) )?\{", text)
        outer = re.sub(r"\{.*\}", "", text)
        names = []
        if kind == "typedef":
            pointer = re.search(r"\( \* (\w+) \) \(", outer)
            several = [re.findall(r"[A-Za-z_]\w*", part.split(" [")[0]) for part in outer.split(",")]
            names = [pointer[1]] if pointer else [words[-1] for words in several if words]
            self.types.update({name: name for name in names})
        elif " = " in outer and "(" not in outer.split(" = ")[0] and not tag:
            self.constants.append(re.findall(r"\w+", outer.split(" = ")[0].split(" [")[0])[-1])
        elif "(" not in outer and "extern" in text.split():
            self.variables.append(re.findall(r"\w+", outer)[-1])
        if tag and tag[2]:
            names.append(tag[2])
            self.types.setdefault(tag[2], f"{tag[1]} {tag[2]}")
        self.bodies.update(dict.fromkeys(names, text))
        for body in re.findall(r"\benum (?:\w+ )?\{([^}]*)\}", text):
            members = [part.split()[0] for part in _split(body) if part.strip()]
            for name in names if tag and tag[1] == "enum" else [""]:
                self.enums[name] = [*self.enums.get(name, ()), *members]


def _printing(asked: dict[str, str]) -> str:
    lines = "".join(f"  {kind}({text})\n" for text, kind in asked.items())
    return f"{SHOW}int main(void) {{\n{lines}}}\n"


def _declarations(tokens: list[str]) -> Iterator[str]:
    """The declarations at the top level of preprocessed text; of a function's definition only its head."""
    depth, start, function = 0, 0, False
    for i, token in enumerate(tokens):
        if token == "{" and depth == 0:
            function = ")" in tokens[start:i] and tokens[start] not in ("typedef", "struct", "union", "enum")
        depth += (token in "{(") - (token in "})")
        if depth == 0 and (token == ";" or (token == "}" and function)):
            if i > start:
                yield " ".join(tokens[start:i])
            start, function = i + 1, False


def _signature(listed: re.Match[str]) -> tuple[str, list[str]]:
    result = re.sub(r"\b(extern|static|inline)\b", "", listed["words"]).strip()
    parameters = [] if listed["parameters"] in ("void", "/* ??? */") else list(_split(listed["parameters"]))
    if listed["kind"] == "F":  # a definition, with the parameters' names
        parameters = [re.sub(r"\w+$", "", parameter).strip() for parameter in parameters]
    return result, parameters


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that are in no parentheses."""
    depth, part = 0, ""
    for each in text:
        depth += (each == "(") - (each == ")")
        if each == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += each
    yield part.strip()


@pytest.fixture(scope="session")
def headers() -> type[Headers]:
    """Asks gcc: call it with the headers' names, the folders to find them in, and a folder to work in."""
    return Headers
