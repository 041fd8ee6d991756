"""NCCL's functions, each called bare with arguments of the types that C would need them to be."""

import ast
import ctypes
from pathlib import Path

from cudabind.sys import nccl

# What a parameter of a type in the generated signature is given, where nobody converts it.
KINDS = {
    "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int, "ncclDataType_t": ctypes.c_int, "ncclRedOp_t": ctypes.c_int,
    "ncclScalarResidence_t": ctypes.c_int, "void_p": ctypes.c_void_p, "const_void_p": ctypes.c_void_p,
    "ncclWindow_t": nccl.ncclWindow_t,
    "cudaStream_t": nccl.cudaStream_t, "ncclComm_t": nccl.ncclComm_t, "ncclUniqueId": nccl.ncclUniqueId,
}  # fmt: skip


class Call:
    """One function, called bare: each argument is of the type that C would need it to be."""

    def __init__(self, library, name):
        self.library, self.name, self.real = library, name, getattr(nccl, name)
        self.kinds = SIGNATURES[name]

    def unchecked(self, *arguments):
        assert len(arguments) == len(self.kinds), f"{self.name} takes {len(self.kinds)}, was given {len(arguments)}"
        for given, kind in zip(arguments, self.kinds, strict=True):
            if (wanted := KINDS.get(kind)) is not None:
                is_null = given is None and wanted is ctypes.c_void_p
                assert is_null or isinstance(given, wanted), f"{self.name}: {type(given)} for a {kind}"
        return self.library.called(self.name, arguments)

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
