"""Every name that the headers declare is in the module, with the header's value, or has its reason; and no other is."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import _lazy
from cudabind.gen import sources
from cudabind.gen.libraries import ROWS
from cudabind.gen.pins import RELEASES
from cudabind.gen.wheels import WheelError
from cudabind.sys import cuda_symbols

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cudabind.proof.conftest import Headers
    from tests.cudabind.proof.modules.conftest import Proof, Proofs

pytestmark = pytest.mark.generator

Record = Callable[[str, object], None]

# Macros that a module does not carry, as fnmatch has it.
NO_VALUE = {
    "*API": "an attribute of functions",
    "*DEPRECATED*": "an attribute",
    "CUTENSOR_EXTERN": "a keyword",
    "*_CPP_VERSION": "of the C++ compiler",
    "NCCL_*INITIALIZER": "the initializer of a struct, in braces",
    "NCCL_COMM_NULL": "NULL, which is None",
    "NCCL_CONFIG_UNDEF_PTR": "NULL, which is None",
    "cublasStatus": "an old spelling of cublasStatus_t",
    "CUFILEOP_STATUS_ENTRIES": "a list that other macros are made of",
    "NVML_VGPU_*VIRTUALIZATION_CAP_MIGRATION": "a range of bits, 0:0",
    "nvmlBlacklist*": "an old spelling of nvmlExcluded…",
    "nvmlEccBitType_t": "an old spelling of nvmlMemoryErrorType_t",
    "PACKED_ALIGNMENT": "an attribute",
    "NPP_ALIGN_*": "an attribute",
    "NVSHMEM*_INITIALIZER": "the initializer of a struct, in braces",
    "cublas?rotg_64": "stands for a function that no header declares",
    "cublas?rotmg_64": "stands for a function that no header declares",
}
# Types that a module does not carry.
THE_C_LIBRARYS = {"sockaddr_t": "a second name for a struct of the C library, to which only pointers are passed"}
MOVED = "PROXY_"  # enumerators of an enum of NVSHMEM's that has lost its name
# Where NVIDIA's numbers for a version differ between two that were read, a library between them has its own.
VERSION = re.compile(r"_(VER|VERSION|VARS|MAJOR|MINOR|PATCH|PATCHLEVEL|BUILD|SUFFIX|CODE)(_|$)|_SM_|MAX_DEVICE_VERSION")


def test_every_name_of_the_headers_is_there_or_has_its_reason(proof: Proof) -> None:
    if proof.row.types:
        assert {name for name in proof.row.types if name in proof.headers.types} <= proof.names
        return
    if proof.is_newer:
        pytest.skip(f"{proof.row.module} {proof.version} is newer than any header that the module was made from")
    left_out = {*getattr(proof.module, "LEFT_OUT", ()), *proof.opaque, *proof.row.inline_as.values()}
    left_out |= {name for name, target in proof.headers.renamed.items() if target in left_out}
    patterns = [pattern for pattern in left_out if "*" in pattern]
    left_out |= {name for name in proof.declared - proof.names if any(fnmatch(name, each) for each in patterns)}
    left_out |= THE_C_LIBRARYS.keys()
    left_out |= {name for name in proof.declared if name.startswith("_") and hasattr(proof.module, name)}
    assert proof.declared - proof.names == left_out & proof.declared
    for name, members in proof.headers.enums.items():
        if name:
            assert set(members) <= set(getattr(proof.module, name).__members__), name


def test_every_macro_without_a_value_has_its_reason(proof: Proof) -> None:
    without = proof.headers.macros.keys() - proof.headers.macro_values.keys() - proof.headers.renamed.keys()
    if not proof.row.types:  # a module of some types has no macros
        assert [name for name in without if not any(fnmatch(name, pattern) for pattern in NO_VALUE)] == []


def test_a_name_is_in_the_headers_if_and_only_if_the_module_says_so(proof: Proof) -> None:
    # Structs within structs have no name in C: a module calls them by their struct and their member.
    inner = {
        name for name in proof.own if any(name[: at.start()] in proof.headers.types for at in re.finditer("_", name))
    }
    enumerators = {member for members in proof.headers.enums.values() for member in members}
    elsewhere = (inner | proof.headers.foreign | enumerators) - proof.declared
    for name in proof.own - elsewhere - {name for name in proof.own if name.startswith(MOVED)}:
        if proof.was_read:
            assert (name in proof.declared) == proof.is_due(name), name
        elif proof.is_due(name) and _lazy.key(proof.version) < _lazy.key(proof.module.UNTIL.get(name, "9999")):
            assert name in proof.declared, name


def test_every_enumerator_is_in_the_headers_of_some_release(name: str, proofs: Proofs) -> None:
    declared: dict[str, set[str]] = {}
    for release in RELEASES:
        for enumeration, members in proofs.of(name, release).headers.enums.items():
            declared.setdefault(enumeration, set()).update(members)
    newest = proofs.of(name, RELEASES[-1])
    made = {each: newest.enum(each) for each in declared if each}
    # An enum that is another module's by now is held against that one's headers.
    extra = {
        each: set(value.__members__) - declared[each]
        for each, value in made.items()
        if value and value.__name__ == each
    }
    assert {each for each, members in extra.items() if members} == set()
    assert extra or not newest.headers.enums.keys() - {""}


def test_constants_and_enumerators_have_the_headers_values(proof: Proof, record_property: Record) -> None:
    headers, module = proof.headers, proof.module
    said: dict[str, Any] = {name: getattr(module, name) for name in headers.constants if proof.has(name)}
    said |= {each: getattr(module, each) for each in headers.enums.get("", ()) if proof.has(each)}
    constants = len(said)
    for name, members in headers.enums.items():
        if name and proof.has(name):
            said |= {each: getattr(module, name)[each].value for each in members}
    expected = {name: headers.values[name] for name in said if name in headers.values}
    enumerators = len(said) - constants
    if not proof.row.types:
        said |= {name: getattr(module, name) for name in headers.macro_values if proof.has(name)}
        expected |= {name: value for name, value in headers.macro_values.items() if proof.has(name)}
    differ = {name: (said[name], expected.get(name)) for name in said if not same(said[name], expected.get(name))}
    if not proof.was_read:
        changing = {name for name, *_ in getattr(module, "BEFORE", ()) if VERSION.search(name)}
        differ = {name: values for name, values in differ.items() if name not in changing}
    assert differ == {}
    assert expected.keys() == said.keys()
    record_property("enums", len({id(proof.enum(name)) for name in headers.enums if proof.enum(name)}))
    record_property("enumerators", enumerators)
    record_property("constants", len(said) - enumerators)


def same(said: Any, printed: Any) -> bool:
    """gcc's program prints every integer as a signed one."""
    return said == printed or (isinstance(said, int) and isinstance(printed, int) and said - printed == 2**64)


def test_second_names_stand_for_the_same_function(proof: Proof, record_property: Record) -> None:
    renamed = {name: target for name, target in proof.headers.renamed.items() if proof.has(target)}
    if not proof.row.types:
        assert [
            name for name, target in renamed.items() if getattr(proof.module, name) is not getattr(proof.module, target)
        ] == []
        record_property("second names", len(renamed))


def test_the_drivers_second_names_are_those_of_its_header(headers: type[Headers], tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.symbols)
    try:
        read = headers(row.headers, sources.folders(row, RELEASES[-1])[:-1], tmp_path)
    except WheelError as error:
        pytest.skip(f"NVIDIA's headers cannot be had: {error}")
    assert len(read.renamed) > 50
    assert read.renamed == cuda_symbols.SYMBOLS
