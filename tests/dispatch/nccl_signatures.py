"""NCCL's functions, each called with arguments that ctypes converts to the types of the generated signature."""

import ast
import ctypes
from pathlib import Path

from cudabind.sys import nccl

# ctypes' type of each type in the generated signatures. Whole numbers are converted, to any number of bits.
KINDS = {
    "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int, "ncclDataType_t": ctypes.c_int, "ncclRedOp_t": ctypes.c_int,
    "ncclScalarResidence_t": ctypes.c_int, "void_p": ctypes.c_void_p, "const_void_p": ctypes.c_void_p,
    "ncclWindow_t": nccl.ncclWindow_t,
    "cudaStream_t": nccl.cudaStream_t, "ncclComm_t": nccl.ncclComm_t, "ncclUniqueId": nccl.ncclUniqueId,
}  # fmt: skip


class Call:
    """One function: each argument is of the type that C needs, or a whole number which that type can hold."""

    def __init__(self, library, name):
        self.library, self.name, self.real = library, name, getattr(nccl, name)
        self.kinds = SIGNATURES[name]

    def unchecked(self, *arguments):
        assert len(arguments) == len(self.kinds), f"{self.name} takes {len(self.kinds)}, was given {len(arguments)}"
        pairs = zip(arguments, self.kinds, strict=True)
        return self.library.called(self.name, tuple(self._converted(given, kind) for given, kind in pairs))

    def _converted(self, given, kind):
        wanted = KINDS.get(kind)
        if wanted is None or isinstance(given, wanted):
            return given
        is_address = issubclass(wanted, ctypes.c_void_p)
        assert type(given) is int or (given is None and is_address), f"{self.name}: {given!r} for a {kind}"
        converted = wanted(given)
        assert (converted.value or 0) == (given or 0), f"{self.name}: {given} does not fit in a {kind}"
        return converted

    def __call__(self, *arguments):
        status = self.library.called(self.name, arguments)
        if status:
            raise self.error(status)

    def error(self, status):
        return self.real.error(status)


def _signatures():
    """The types of each function's parameters, as the generated module writes them; several functions share a class."""
    tree = ast.parse(Path(nccl.__file__).read_text())
    kinds = {
        node.name: [ast.unparse(argument.annotation) for argument in node.body[0].args.posonlyargs[1:]]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.body and isinstance(node.body[0], ast.FunctionDef)
    }
    named = (node for node in tree.body if isinstance(node, ast.AnnAssign))
    return {node.target.id: kinds.get(ast.unparse(node.annotation)) for node in named}


SIGNATURES = _signatures()
