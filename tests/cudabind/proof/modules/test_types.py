"""Sizes, offsets and kinds of every type, and the signature of every function, are what gcc makes of the headers."""

from __future__ import annotations

import ctypes
import keyword
import re
import shutil
import subprocess
from collections.abc import Callable
from ctypes import _Pointer, _SimpleCData
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import _types, callbacks
from cudabind.gen import layout, sources
from cudabind.gen.emit import GAP
from cudabind.gen.libraries import ROWS
from cudabind.gen.pins import RELEASES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cudabind.proof.conftest import Headers
    from tests.cudabind.proof.modules.conftest import Proof, Proofs

pytestmark = pytest.mark.generator

Record = Callable[[str, object], None]

INTEGER, POINTER, REAL, RECORD, UNION = 1, 5, 8, 12, 13  # what gcc's __builtin_classify_type answers
CLASS = "__builtin_classify_type(*(__typeof__({}) *)0)"
FIRST = "int i = 0; while (!(b[i / 8] >> i % 8 & 1)) i++; i;"
COUNT = "int i, n = 0; for (i = 0; i < (int)sizeof x * 8; i++) n += b[i / 8] >> i % 8 & 1; n;"
ELEMENTS = {element for row in ROWS for element in row.elements}


def test_sizes_offsets_and_kinds_are_the_compilers(proof: Proof, record_property: Record) -> None:
    said = of_types(proof)
    assert differences(proof, said) == {}
    record_property("types", sum(expression.count("sizeof") and "->" not in expression for expression, _ in said))
    record_property("sizes, offsets and kinds", len(said))


def test_every_struct_is_measured(proof: Proof, record_property: Record) -> None:
    """Structs within structs have no name in C: they are measured as members, and none may be out of reach."""
    seen: set[type] = set()
    for name in proof.headers.types:
        made = getattr(proof.module, name) if proof.has(name) else None
        pending = [made] if is_record(made) else []
        while pending:
            record = pending.pop()
            seen.add(record)
            kinds = [element(kind) for _, kind, *_ in record._fields_]
            pending += [kind for kind in kinds if is_record(kind)]
    due = {name for name in proof.own if proof.is_due(name) and name not in proof.module.__annotations__}
    records = {name: made for name in due if is_record(made := getattr(proof.module, name))}
    included = proof.headers.foreign - proof.headers.types.keys()
    assert {name for name, made in records.items() if made not in seen} - included == set()
    record_property("structs", len(seen))


def test_every_function_takes_and_returns_what_the_compiler_says(proof: Proof, record_property: Record) -> None:
    if proof.row.types:
        return  # the functions are those of the libraries that share these types
    functions = signatures(proof)
    assert functions or not proof.headers.functions
    for name, (kinds, spelled) in functions.items():
        assert len(kinds) == len(spelled), name
        for kind, parameter in zip(kinds, spelled[:-1], strict=False):  # a pointer comes back as an address
            assert typed(kind) is named(proof, parameter), (name, parameter)
    assert differences(proof, of_functions(proof)) == {}
    record_property("functions", len(functions))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("module", [row.module for row in ROWS if row.revealed])
def test_what_is_hidden_from_c_is_what_a_cpp_compiler_says(
    module: str, release: str, proofs: Proofs, headers: type[Headers], tmp_path: Path
) -> None:
    """The headers as they are, read by g++: what of them C programs are told once more, with other words replaced."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    proof = proofs.of(module, release)
    folders = sources.folders(proof.row, release)[1:-2]  # without those that reveal, and the stand-ins for C++'s
    there = [name for name in proof.row.headers if any((folder / name).is_file() for folder in folders)]
    macros = "".join(f"{line}\n" for line in proof.row.prologue.splitlines() if " unsigned short" not in line)
    # A default argument is what keeps one of them from C as a whole.
    plain = headers([name for name in there if name != "cufft_device.h"], folders, tmp_path, prologue=macros)
    hidden = sorted(proof.headers.functions.keys() - plain.functions.keys())
    assert bool(hidden) is (module != "cufft" or "cufft_device.h" in there)
    text = macros + "".join(f"#include <{name}>\n" for name in there) + TELL_SIGNATURES
    text += "".join(f"show((decltype(&{name}))nullptr);\n" for name in hidden) + "}\n"
    source, program = tmp_path / "ask.cpp", tmp_path / "ask"
    source.write_text(text)
    flags = [f"-I{folder}" for folder in folders]
    done = subprocess.run(["g++", "-w", "-std=c++17", *flags, str(source), "-o", str(program)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[:2000]
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    python = signatures(proof)
    for name, line in zip(hidden, said, strict=True):
        assert " ".join(f"{ctypes.sizeof(kind)}:{int(is_pointer(kind))}" for kind in python[name][0]) == line, name


# The size of each parameter and of the result, and whether it is a pointer.
TELL_SIGNATURES = r"""
#include <cstdio>
#include <type_traits>
template <class T> int tell(const char *end) { return printf("%zu:%d%s", sizeof(T), std::is_pointer<T>::value, end); }
template <class R, class... A> void show(R (*)(A...)) { (tell<A>(" "), ...); tell<R>("\n"); }
int main() {
"""


def is_pointer(kind: Any) -> bool:
    """Whether ctypes passes an address."""
    return not is_record(kind) and not (issubclass(kind, _SimpleCData) and kind._type_ not in "PzZ")


def differences(proof: Proof, said: set[tuple[str, int]]) -> dict[str, tuple[int, object]]:
    """What Python says beside what gcc answers, where the two are not the same."""
    found = answers(proof)
    return {text: (value, found.get(text)) for text, value in said if found.get(text) != value}


@cache
def answers(proof: Proof) -> dict[str, Any]:
    """What gcc answers of types and functions, by one program for both."""
    return proof.headers.ask(text for text, _ in of_types(proof) | of_functions(proof))


@cache
def of_types(proof: Proof) -> set[tuple[str, int]]:
    """What Python says of the types and their members: C expressions and their values."""
    said: set[tuple[str, int]] = set()
    for name, spelled in proof.headers.types.items():
        if proof.has(name) and name not in proof.opaque:
            said |= facts(proof, _types.argument(getattr(proof.module, name)), spelled).items()
            said |= set(members(proof, getattr(proof.module, name), name, spelled))
    return said


@cache
def signatures(proof: Proof) -> dict[str, tuple[list[Any], list[str]]]:
    """The parameters of each function and its result, in Python and in C."""
    found = {}
    for name, (result, parameters) in proof.headers.functions.items():
        if proof.has(name):
            hints = proof.module._names.signature(name).__annotations__
            kinds = [_types.argument(proof.module._names.evaluate(hint)) for hint in hints.values()]
            found[name] = kinds, [*parameters, result]
    return found


@cache
def of_functions(proof: Proof) -> set[tuple[str, int]]:
    """What Python says of what functions take and return: C expressions and their values.

    Of one C type two functions may say different things: all that is said is kept.
    """
    said: set[tuple[str, int]] = set()
    if proof.row.types:
        return said
    for kinds, spelled in signatures(proof).values():
        for kind, each in zip(kinds, spelled, strict=False):
            said |= facts(proof, kind, each).items()
    return said


def facts(proof: Proof, kind: Any, spelled: str) -> dict[str, int]:
    """What Python says of a type, by the C expression that must have the same value."""
    if kind is None:
        return {f"__builtin_types_compatible_p({spelled}, void)": 1}
    said = {f"sizeof({spelled})": ctypes.sizeof(kind)}
    if issubclass(kind, ctypes.Array):
        return said
    code = kind._type_ if issubclass(kind, _SimpleCData) else None
    number = isinstance(code, str) and code not in "PzZ"
    said[CLASS.format(spelled)] = (
        RECORD if issubclass(kind, ctypes.Structure)
        else UNION if issubclass(kind, ctypes.Union)
        else POINTER if not number
        else REAL if code in "fd"
        else INTEGER
    )  # fmt: skip
    if number and code not in "fdc?" and not proof.enum(base(spelled)):
        said[f"((__typeof__({spelled}))-1 < (__typeof__({spelled}))0)"] = int(code in "bhilq")
    return said


def members(
    proof: Proof, made: Any, name: str, spelled: str, path: str = "", start: int = 0
) -> Iterator[tuple[str, int]]:
    """What Python says of a struct's members and of theirs."""
    if not is_record(made):
        return
    body = proof.headers.bodies.get(made.__name__) or proof.headers.bodies[name]
    for own, kind, *bits in made._fields_:
        if own.startswith(GAP):
            continue
        if bits:
            where, width = layout.placed(made, own)
            yield bit_field(spelled, f"{path}{own}", FIRST), start * 8 + where
            yield bit_field(spelled, f"{path}{own}", COUNT), width
            continue
        if own in getattr(made, "_anonymous_", ()):
            for inner, *inner_bits in kind._fields_:
                if len(inner_bits) == 1:
                    yield f"offsetof({spelled}, {path}{inner})", start + getattr(made, inner).offset
            continue
        member = own.removesuffix("_") if keyword.iskeyword(own.removesuffix("_")) else own
        place = f"{path}{member}"
        if not path:
            yield f"offsetof({spelled}, {place})", getattr(made, own).offset
        words = re.search(rf"(\w+) (?:\* )*{member} [;,\[]", body)
        told = facts(proof, kind, f"__typeof__((({spelled} *)0)->{place})")
        if (words and proof.enum(words[1])) or (path and kind is ctypes.c_int):  # an enum's sign is the compiler's
            told = {text: value for text, value in told.items() if "-1 <" not in text}
        yield from told.items()
        if is_record(element(kind)) and element(kind) is kind:
            for inner, _, *inner_bits in kind._fields_:
                if not inner_bits and not inner.startswith(("_", GAP)):
                    yield (
                        f"offsetof({spelled}, {place}.{inner}) - offsetof({spelled}, {place})",
                        getattr(kind, inner).offset,
                    )
            yield from members(proof, kind, name, spelled, f"{place}.", start + getattr(made, own).offset)


def bit_field(spelled: str, place: str, answer: str) -> str:
    """C gives a bit-field no offset: its bits are set in a struct of zeros, and looked for."""
    bits = f"__builtin_memset(&x, 0, sizeof x); x.{place} = -1; unsigned char *b = (unsigned char *)&x"
    return f"__extension__ ({{ __typeof__({spelled}) x; {bits}; {answer} }})"


def element(kind: Any) -> Any:
    while isinstance(kind, type) and issubclass(kind, ctypes.Array):
        kind = kind._type_
    return kind


def is_record(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, (ctypes.Structure, ctypes.Union))


def base(spelled: str) -> str:
    """The name of a type, or of what a pointer points to."""
    return re.sub(r"\b(const|struct|union|enum)\b|[*\s]", "", spelled)


def named(proof: Proof, spelled: str) -> Any:
    """The class that ctypes must insist on for a C type, by the name that the header writes, or None."""
    made = getattr(proof.module, base(spelled), None) if re.fullmatch(r"[\w\s*]+", spelled) else None
    if not isinstance(made, type) or spelled.count("*") > 1:
        return None
    strict = issubclass(made, (_types.Handle, ctypes.Structure, ctypes.Union)) and made.__name__ not in ELEMENTS
    if "*" in spelled:
        return ctypes.POINTER(made) if strict else None
    return made if strict or is_record(made) or issubclass(made, callbacks.Callback) else None


def typed(kind: Any) -> Any:
    """The class that ctypes insists on, or None where it takes any number or address."""
    ours = (_types.Handle, callbacks.Callback, ctypes.Structure, ctypes.Union)
    target = kind._type_ if isinstance(kind, type) and issubclass(kind, _Pointer) else kind
    return kind if isinstance(target, type) and issubclass(target, ours) else None
