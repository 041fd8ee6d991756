"""Reads C headers into the model with libclang.

Called by `python -m cudabind.gen` and the tests. Headers are parsed as C11, because the C ABI is what is bound; what
they include is followed only as far as a declaration needs a type. It writes nothing and knows no library by name.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from clang.cindex import Cursor, CursorKind, Diagnostic, Index, StorageClass, TranslationUnit, Type, TypeKind

from cudabind.gen import macros
from cudabind.gen.model import (
    Alias,
    ArrayOf,
    Callback,
    CType,
    Declaration,
    Enum,
    Field,
    Function,
    Handle,
    Header,
    Named,
    Pointer,
    Record,
    Scalar,
    Void,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SCALARS = {
    TypeKind.BOOL: "bool_t",
    TypeKind.CHAR_S: "char",
    TypeKind.CHAR_U: "char",
    TypeKind.SCHAR: "int8_t",
    TypeKind.UCHAR: "uint8_t",
    TypeKind.SHORT: "int16_t",
    TypeKind.USHORT: "uint16_t",
    TypeKind.INT: "int32_t",
    TypeKind.UINT: "uint32_t",
    TypeKind.LONG: "long_t",
    TypeKind.ULONG: "ulong_t",
    TypeKind.LONGLONG: "int64_t",
    TypeKind.ULONGLONG: "uint64_t",
    TypeKind.FLOAT: "float32",
    TypeKind.DOUBLE: "float64",
}
# C's own typedefs: their width does not depend on what they are spelled with.
C_TYPEDEFS = {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"size_t"}
FUNCTIONS = (TypeKind.FUNCTIONPROTO, TypeKind.FUNCTIONNOPROTO)
ARRAYS = (TypeKind.CONSTANTARRAY, TypeKind.INCOMPLETEARRAY, TypeKind.VARIABLEARRAY)


class HeaderError(Exception):
    """A header could not be read: a file is missing, or it has something the model cannot say."""


def parse(
    headers: Sequence[str],
    include: Sequence[Path],
    prefixes: tuple[str, ...] = (),
    types: tuple[str, ...] = (),
    included: Sequence[str] = (),
    prologue: str = "",
    status: str = "",
) -> Header:
    """Read headers.

    Args:
        headers: the names to include; what these files themselves declare is taken.
        include: the folders to look in, the compiler's own last.
        prefixes: take only functions whose names start so.
        types: take only these types and what they need, and neither functions nor constants.
        included: further headers, which those include, of which the same is taken.
        prologue: C in front of the headers.
        status: a type that is taken even if no function mentions it.

    Raises:
        HeaderError: with libclang's words.
    """
    source = including(headers, prologue)
    unit = translate(source, include)
    reader = _Reader({*headers, *included})
    if types:
        reader.take_types(unit.cursor, set(types))
        return reader.header
    reader.take_all(unit.cursor, prefixes)
    if status not in reader.header.types:
        reader.take_types(unit.cursor, {status})
    reader.order_handles()
    names = macros.names(unit.cursor, reader.is_home)
    for name, probe in macros.probes(translate(source + macros.probe(names), include, strict=False)).items():
        function = macros.renamed(probe)
        value = None if function else macros.evaluate(probe)
        if function and function != name and function.startswith(prefixes):
            reader.header.renames[name] = function
            reader.header.functions.pop(name, None)  # declared before the macro, behind which no C program reaches it
        if value is not None:
            reader.header.constants[name] = value
    return reader.header


def including(headers: Iterable[str], prologue: str = "") -> str:
    """The C text that includes headers. Some of NVIDIA's write `alignas` and `bool`, which C has from these two."""
    first = "#include <stdalign.h>\n#include <stdbool.h>\n"
    return f"{first}{prologue}{''.join(f'#include <{header}>{chr(10)}' for header in headers)}"


def translate(source: str, include: Sequence[Path], strict: bool = True) -> TranslationUnit:
    """Parse C text; `strict` refuses what does not compile."""
    arguments = ["-x", "c", "-std=gnu11", "-ferror-limit=0", *(f"-I{folder}" for folder in include[:-1])]
    arguments += ["-isystem", str(include[-1])]
    unit = Index.create().parse(
        "cudabind_headers.c",
        args=arguments,
        unsaved_files=[("cudabind_headers.c", source)],
        options=TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
    )
    errors = [str(d) for d in unit.diagnostics if d.severity >= Diagnostic.Error]
    if errors and strict:
        raise HeaderError("\n".join(errors[:10]))
    return unit


class _Reader:
    """Walks one translation unit and fills a Header, following types to their declarations."""

    def __init__(self, home: set[str]) -> None:
        self.header = Header()
        self._home = home
        self._is_home: dict[str, bool] = {}  # by file
        self._handles: dict[str, tuple[str, bool]] = {}  # the record each points to, and whether that is const
        self._typedefs: dict[str, CType] = {}  # a header of NPP's mentions one of them a thousand times
        self._invented: set[str] = set()  # names of records inside records, for which C has none
        self._open: set[str] = set()  # of records whose members are being read
        self._names: dict[int, str] = {}  # an enum or record without a tag goes by its first typedef

    def is_home(self, cursor: Cursor) -> bool:
        file = cursor.location.file
        if file is None:
            return False
        name = file.name
        if name not in self._is_home:
            self._is_home[name] = any(name == home or name.endswith("/" + home) for home in self._home)
        return self._is_home[name]

    def take_types(self, root: Cursor, wanted: set[str]) -> None:
        self._name_typedefs(root)
        for cursor in root.get_children():
            if cursor.spelling in wanted and cursor.kind in (
                CursorKind.TYPEDEF_DECL,
                CursorKind.ENUM_DECL,
                CursorKind.STRUCT_DECL,
            ):
                self._type(cursor.type)

    def take_all(self, root: Cursor, prefixes: tuple[str, ...]) -> None:
        self._name_typedefs(root)
        for cursor in filter(self.is_home, root.get_children()):
            if cursor.kind is CursorKind.FUNCTION_DECL:
                if cursor.spelling.startswith(prefixes):
                    self._function(cursor)
            elif cursor.kind is CursorKind.TYPEDEF_DECL or (
                cursor.kind in (CursorKind.STRUCT_DECL, CursorKind.UNION_DECL) and cursor.is_definition()
            ):
                self._type(cursor.type)
            elif cursor.kind is CursorKind.ENUM_DECL and cursor.is_definition():
                self._enum(cursor)
            elif cursor.kind is CursorKind.VAR_DECL:
                self._variable(cursor)

    def order_handles(self) -> None:
        """Give each handle the one for a const object of its kind as its base, and put the base first."""
        const_of = {record: name for name, (record, const) in self._handles.items() if const and record}
        ordered: dict[str, Declaration] = {}
        for name, declared in self.header.types.items():
            record, const = self._handles.get(name, ("", True))
            base = "" if const else const_of.get(record, "")
            if base:
                ordered.setdefault(base, Handle(base))
            ordered.setdefault(name, Handle(name, base) if base else declared)
        self.header.types = ordered

    def _variable(self, cursor: Cursor) -> None:
        value = macros.evaluate(cursor)
        if value is None and cursor.is_definition():
            self.header.unvalued.append(cursor.spelling)
        elif value is None:
            self.header.variables[cursor.spelling] = self._type(cursor.type)
        else:
            self.header.constants[cursor.spelling] = value

    def _name_typedefs(self, root: Cursor) -> None:
        for cursor in root.get_children():
            if cursor.kind is CursorKind.TYPEDEF_DECL:
                declaration = cursor.underlying_typedef_type.get_canonical().get_declaration()
                if _untagged(declaration):
                    self._names.setdefault(declaration.hash, cursor.spelling)

    def _function(self, cursor: Cursor) -> None:
        arguments = list(cursor.get_arguments())
        parameters = self._parameters([each.spelling for each in arguments], [each.type for each in arguments])
        inline = cursor.is_definition() and cursor.storage_class is StorageClass.STATIC
        self.header.functions[cursor.spelling] = Function(
            cursor.spelling, self._type(cursor.result_type), parameters, inline
        )

    def _parameter(self, kind: Type) -> CType:
        if kind.kind in ARRAYS:
            return Pointer(self._type(kind.element_type), kind.element_type.is_const_qualified())
        if kind.kind in FUNCTIONS:
            return Pointer(Void())
        return self._type(kind)

    def _type(self, kind: Type) -> CType:
        if kind.kind is TypeKind.ELABORATED:
            return self._type(kind.get_named_type())
        if kind.kind is TypeKind.TYPEDEF:
            return self._typedef(kind)
        if kind.kind is TypeKind.POINTER:
            pointee = kind.get_pointee()
            if pointee.get_canonical().kind in FUNCTIONS:
                return Pointer(Void())
            return Pointer(self._type(pointee), pointee.is_const_qualified())
        if kind.kind is TypeKind.CONSTANTARRAY:
            return ArrayOf(self._type(kind.element_type), kind.element_count)
        if kind.kind is TypeKind.ENUM:
            return self._enum(kind.get_declaration())
        if kind.kind is TypeKind.RECORD:
            return self._record(kind.get_declaration())
        if kind.kind is TypeKind.VOID:
            return Void()
        if kind.kind in SCALARS:
            return Scalar(SCALARS[kind.kind])
        raise HeaderError(f"{kind.spelling}: the model has no {kind.kind.name}")

    def _typedef(self, kind: Type) -> CType:
        declaration = kind.get_declaration()
        name = declaration.spelling
        if name in C_TYPEDEFS:
            return Scalar(name)
        if name not in self._typedefs:
            self._typedefs[name] = self._new_typedef(name, declaration)
        return self._typedefs[name]

    def _new_typedef(self, name: str, declaration: Cursor) -> CType:
        known = self.header.types.get(name)
        underlying = declaration.underlying_typedef_type
        if known is None and underlying.get_canonical().kind is TypeKind.POINTER:
            known = self._pointer_typedef(declaration)
        if isinstance(known, Handle):
            return Named(name, "handle", name)
        if isinstance(known, Callback):
            return Named(name, "callback", name)
        target = self._type(underlying)
        if isinstance(target, Named):
            if target.name != name:
                self.header.types.setdefault(name, Alias(name, target))
            return Named(name, target.kind, target.base)
        if isinstance(target, Scalar) and not declaration.location.is_in_system_header:
            self.header.types.setdefault(name, Alias(name, target))
            return Named(name, "scalar", target.name)
        if isinstance(target, Pointer):
            self.header.types.setdefault(name, Alias(name, target))
            return Named(name, "pointer", name)
        return target

    def _pointer_typedef(self, declaration: Cursor) -> Handle | Callback | None:
        """A handle where the pointer's target is opaque or a record, a callback where it is a function."""
        name, underlying = declaration.spelling, declaration.underlying_typedef_type
        if underlying.kind is TypeKind.TYPEDEF or (
            underlying.kind is TypeKind.ELABORATED and underlying.get_named_type().kind is TypeKind.TYPEDEF
        ):
            return None  # an alias of a pointer typedef
        pointee = underlying.get_canonical().get_pointee()
        made: Handle | Callback | None = None
        if pointee.kind in FUNCTIONS:
            made = self._callback(name, declaration, pointee)
        elif pointee.kind in (TypeKind.RECORD, TypeKind.VOID):
            made = Handle(name)
            record = pointee.get_declaration().spelling if pointee.kind is TypeKind.RECORD else ""
            self._handles[name] = (record, pointee.is_const_qualified())
        if made is not None:
            self.header.types[name] = made
        return made

    def _parameters(self, names: Sequence[str], types: Iterable[Type]) -> tuple[tuple[str, CType], ...]:
        kinds = [self._parameter(kind) for kind in types]
        # A callback type need not name its parameters.
        spelled = names if len(names) == len(kinds) else [""] * len(kinds)
        return tuple((name or f"arg{i}", kind) for i, (name, kind) in enumerate(zip(spelled, kinds, strict=True)))

    def _enum(self, cursor: Cursor) -> CType:
        cursor = cursor.get_definition() or cursor
        members = tuple(
            (child.spelling, child.enum_value) for child in cursor.get_children() if child.enum_value is not None
        )
        name = self._names.get(cursor.hash) if _untagged(cursor) else cursor.spelling
        if not name:
            self.header.constants.update(members)
            return Scalar("int32_t")
        self.header.types.setdefault(name, Enum(name, members))
        return Named(name, "enum", name)

    def _record(self, cursor: Cursor, name: str = "") -> CType:
        cursor = cursor.get_definition() or cursor
        name = name or (self._names.get(cursor.hash, "") if _untagged(cursor) else cursor.spelling)
        if not cursor.is_definition() or cursor.location.is_in_system_header:
            return Void()  # opaque, or the C library's own (FILE): only pointers to it are passed
        if name in self._open:
            return Void()  # of a function among its own members, which takes a pointer to it
        if name not in self.header.types:
            self._open.add(name)
            fields = tuple(self._fields(cursor, name))
            self._open.remove(name)
            union = cursor.kind is CursorKind.UNION_DECL
            spelled = name if _untagged(cursor) else f"{'union' if union else 'struct'} {name}"
            c_name = "" if name in self._invented else spelled
            self.header.types[name] = Record(name, union, fields, cursor.type.get_size(), c_name)
        return Named(name, "record", name)

    def _fields(self, record: Cursor, outer: str) -> Iterable[Field]:
        for index, cursor in enumerate(record.type.get_fields()):
            # libclang spells a member without a name by its place, "(anonymous at …)", or not at all
            unnamed = not cursor.spelling or "(" in cursor.spelling
            name = f"_{index}" if unnamed else cursor.spelling
            anonymous = unnamed and not cursor.is_bitfield()
            offset = cursor.get_field_offsetof()
            width = cursor.get_bitfield_width() if cursor.is_bitfield() else 0
            inner = _element(cursor.type).get_declaration()
            if _untagged(inner) and inner.hash not in self._names and inner.kind is not CursorKind.ENUM_DECL:
                self._names[inner.hash] = f"{outer}_{name.strip('_')}"
                self._invented.add(self._names[inner.hash])
            yield Field(name, self._member(cursor, f"{outer}_{name.strip('_')}"), offset, width, anonymous)

    def _member(self, cursor: Cursor, name: str) -> CType:
        """A pointer inside a record is read as an address, so what it points to need not be generated.

        But for a function, whose signature a Python function must be given: C has no name of its type.
        """
        kind = cursor.type
        if kind.kind is not TypeKind.POINTER:
            return self._type(kind)
        pointee = kind.get_pointee().get_canonical()
        if pointee.kind not in FUNCTIONS:
            return Pointer(Void())
        self.header.types[name] = self._callback(name, cursor, pointee)
        return Named(name, "callback", name)

    def _callback(self, name: str, declaration: Cursor, function: Type) -> Callback:
        names = [child.spelling for child in declaration.get_children() if child.kind is CursorKind.PARM_DECL]
        kinds = function.argument_types() if function.kind is TypeKind.FUNCTIONPROTO else ()  # `int (*f)()` has none
        return Callback(name, self._type(function.get_result()), self._parameters(names, kinds))


def _element(kind: Type) -> Type:
    kind = kind.get_canonical()
    while kind.kind in ARRAYS or kind.kind is TypeKind.POINTER:
        kind = (kind.get_pointee() if kind.kind is TypeKind.POINTER else kind.element_type).get_canonical()
    return kind


def _untagged(cursor: Cursor) -> bool:
    """Whether an enum or record has no tag of its own; libclang then spells it by its place or its typedef."""
    if cursor.kind not in (CursorKind.ENUM_DECL, CursorKind.STRUCT_DECL, CursorKind.UNION_DECL):
        return False
    tokens = [token.spelling for token in islice(cursor.get_tokens(), 2)]
    return cursor.is_anonymous() or "(" in cursor.spelling or tokens[1:2] == ["{"]
