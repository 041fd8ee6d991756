"""What a row of the generator says: one generated module, the headers that it comes from, and what it leaves out.

Rows stand in `cudabind.gen.libraries`, and by area in `cudabind.gen.rows`; the generator and the tests read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One generated module.

    Attributes:
        module: the module's name in `cudabind.sys`.
        headers: what to include; everything these files declare is generated. An older version need not have them all.
        included: further headers that count, which those include; some cannot be included twice.
        prologue: C that headers written for C++ need in front of them.
        revealed: patterns of text, as `re` has them, and what is read instead of each match, in the row's headers: they
            hide from C what the library has for C programs, too.
        wheel: the row of WHEELS that the headers come from.
        docs: NVIDIA's documentation of the library.
        prefixes: how the functions' names start; other functions in the headers are not the library's.
        status: the enum of the statuses, or ``""`` where there are no functions.
        returned: the struct that functions return instead, whose first member is the status.
        success: its enumerator for success, which the check relies on being 0.
        text: the function that puts a status into words, or ``""``.
        error: the error class of `cudabind.errors`.
        library: the name in `cudabind.LIBRARIES`, where it is not the module's.
        uses: modules whose types are imported instead of generated again.
        needs: further rows of WHEELS that the headers include.
        types: generate just these types: for headers that are shared by many libraries.
        symbols: generate just the symbols behind the names that the header redefines: cuda-python binds the rest.
        elements: structs that arrays of numbers are made of, whose pointers may be device addresses.
        renumbered: enums in which a number may mean something else in another version.
        inline_as: the symbols behind functions that are inline in old headers and exported by newer libraries.
        sized: functions that are inline because all they do is to call their `_internal` with the size of a struct, as
            the argument behind the first; each with that struct.
        left_out: declared functions, and constants that are structs, which are not generated, each with the reason.
        not_exported: generated functions that the newest wheel's library does not export, with what is known of each.
            The names of both are patterns, as fnmatch has them.
    """

    module: str
    headers: tuple[str, ...]
    wheel: str
    docs: str
    prefixes: tuple[str, ...] = ()
    included: tuple[str, ...] = ()
    prologue: str = ""
    revealed: tuple[tuple[str, str], ...] = ()
    status: str = ""
    returned: str = ""
    success: str = ""
    text: str = ""
    error: str = ""
    library: str = ""
    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    symbols: bool = False
    elements: tuple[str, ...] = ()
    renumbered: tuple[str, ...] = ()
    inline_as: dict[str, str] = field(default_factory=dict)
    sized: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_exported: dict[str, str] = field(default_factory=dict)
