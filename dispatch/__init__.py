"""A typed table from (op, dtype, epilogue, arch) to one library call, with requests and workers.

The folders, in the order in which they import each other (docs/architecture.md):

    device      order, memory, exchange, `cuda:N` and `host`
    core        requests, rows, operands: the parts of an op family
    execute     runs a plan on a stream
    testing     tools for the cases of all families
    libraries   handles, descriptors and kernels, one folder for each library
    ops         one folder for each op family: request, request function, libraries, reference, cases
    table       the rows, and the choice of the row that takes a request
    bind        from a request to its plan; prepared calls
    world       the ranks of a program, their communicators, and recovery from lost ranks
    supervise   one worker for each stream, in threads or processes; restarts; journal, status and trace
    torch       ops with autograd for PyTorch; loaded only by `import dispatch.torch`
    ray         supervisors and ranks as Ray actors; loaded only by `import dispatch.ray`

Importing this package loads no CUDA library and needs no GPU.
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING, Any

from cudabind import __version__ as __version__
from dispatch import errors as errors
from dispatch.bind.prepare import BoundCall as BoundCall
from dispatch.bind.prepare import prepare as prepare
from dispatch.bind.prepare import prepare_all as prepare_all
from dispatch.core.fusion import Fusion as Fusion
from dispatch.core.request import Request as Request
from dispatch.core.request import run as run
from dispatch.core.row import Row as Row
from dispatch.device import sources as _sources  # noqa: F401  # registers what `Device.array` reads
from dispatch.device import tensor_copies as _tensor_copies  # noqa: F401  # registers with `copy` and `pickle`
from dispatch.device.device import Device as Device
from dispatch.device.external_memory import from_cuda_array_interface as from_cuda_array_interface
from dispatch.device.external_memory import from_dlpack as from_dlpack
from dispatch.device.registry import device as device
from dispatch.device.stream import Stream as Stream
from dispatch.device.stream_objects import use_torch_stream as use_torch_stream
from dispatch.device.tensor import Tensor as Tensor
from dispatch.keys import Arch as Arch
from dispatch.keys import Compute as Compute
from dispatch.keys import Dtype as Dtype
from dispatch.keys import Epilogue as Epilogue
from dispatch.keys import ScaleMode as ScaleMode
from dispatch.ops import FAMILIES as _FAMILIES

if TYPE_CHECKING:
    from typing import NoReturn

    from dispatch import parallel as parallel
    from dispatch import signal as signal
    from dispatch.core.call_counter import CallCounter as CallCounter
    from dispatch.core.host_plan import numpy_call as numpy_call
    from dispatch.core.operands import OperandRequest as OperandRequest
    from dispatch.core.operands import Output as Output
    from dispatch.core.operands import same_as_first as same_as_first
    from dispatch.core.request import Plan as Plan
    from dispatch.core.request_function import request_function as request_function
    from dispatch.libraries.cutlass import evt as evt
    from dispatch.libraries.nvrtc.kernel import Kernel as Kernel
    from dispatch.libraries.nvrtc.kernel import Launch as Launch
    from dispatch.ops import graph as _graph
    from dispatch.ops.activation import *
    from dispatch.ops.attention_merge import *
    from dispatch.ops.blas import *
    from dispatch.ops.collective import *
    from dispatch.ops.contraction import *
    from dispatch.ops.contraction import functions as _tensor_functions
    from dispatch.ops.conv import *
    from dispatch.ops.ctc import *
    from dispatch.ops.dropout import *
    from dispatch.ops.fft import *
    from dispatch.ops.fft import functions as _fft_functions
    from dispatch.ops.gated import *
    from dispatch.ops.grouped_matmul import *
    from dispatch.ops.linalg import *
    from dispatch.ops.linalg import functions as _linalg_functions
    from dispatch.ops.local_norm import *
    from dispatch.ops.matmul import *
    from dispatch.ops.norm import *
    from dispatch.ops.pooling import *
    from dispatch.ops.random import *
    from dispatch.ops.random import generator as _generators
    from dispatch.ops.reduction import *
    from dispatch.ops.rnn import *
    from dispatch.ops.rope import *
    from dispatch.ops.sdpa import *
    from dispatch.ops.softmax import *
    from dispatch.ops.sparse import *
    from dispatch.ops.sparse import functions as _sparse_functions
    from dispatch.ops.sparse.tensor import SparseTensor as SparseTensor
    from dispatch.ops.structured import *
    from dispatch.ops.structured import functions as _structured_functions
    from dispatch.ops.structured.tensor import StructuredTensor as StructuredTensor
    from dispatch.supervise import trace as trace
    from dispatch.supervise.future import Future as Future
    from dispatch.supervise.supervisor import Supervisor as Supervisor
    from dispatch.table.select import explain as explain
    from dispatch.table.table import TABLE as TABLE
    from dispatch.world.local import LocalWorld as LocalWorld
    from dispatch.world.world import World as World

    cudnn = _graph
    fft = _fft_functions
    linalg = _linalg_functions
    random = _generators
    tensors = _tensor_functions
    register = TABLE.register
    sparse = _sparse_functions
    structured = _structured_functions

# Public modules and names that are imported at their first use, so that `import dispatch` stays quick.
_MODULES = {
    "cudnn": "dispatch.ops.graph",
    "evt": "dispatch.libraries.cutlass.evt",
    "fft": "dispatch.ops.fft.functions",
    "linalg": "dispatch.ops.linalg.functions",
    "parallel": "dispatch.parallel",
    "random": "dispatch.ops.random.generator",
    "signal": "dispatch.signal",
    "sparse": "dispatch.ops.sparse.functions",
    "structured": "dispatch.ops.structured.functions",
    "tensors": "dispatch.ops.contraction.functions",
    "trace": "dispatch.supervise.trace",
}
_LATE_NAMES = {
    "CallCounter": "dispatch.core.call_counter",
    "Future": "dispatch.supervise.future",
    "Kernel": "dispatch.libraries.nvrtc.kernel",
    "Launch": "dispatch.libraries.nvrtc.kernel",
    "LocalWorld": "dispatch.world.local",
    "OperandRequest": "dispatch.core.operands",
    "Output": "dispatch.core.operands",
    "Plan": "dispatch.core.request",
    "SparseTensor": "dispatch.ops.sparse.functions",
    "StructuredTensor": "dispatch.ops.structured.functions",
    "Supervisor": "dispatch.supervise.supervisor",
    "TABLE": "dispatch.table.table",
    "World": "dispatch.world.world",
    "explain": "dispatch.table.select",
    "numpy_call": "dispatch.core.host_plan",
    "request_function": "dispatch.core.request_function",
    "same_as_first": "dispatch.core.operands",
}
_HERE = [n for n, v in globals().items() if v is errors or getattr(v, "__module__", "").startswith("dispatch")]


def _import_public(name: str) -> Any:
    """Import and return the public name `name`: a module, a class that is imported late, or a name of an op family."""
    from functools import partial
    from importlib import import_module

    if name in _MODULES:
        module = import_module(_MODULES[name])
        vars(module).setdefault("__dir__", lambda: list(module.__all__))  # completion shows public names only
        vars(module).setdefault("__getattr__", partial(_raise_missing, name, module.__all__))
        return module
    if name == "__all__":
        return __dir__()
    if name == "register":
        return _import_public("TABLE").register
    families = [] if name.startswith("_") else [f"dispatch.ops.{family}" for family in _likely_families(name)]
    for place in (_LATE_NAMES[name],) if name in _LATE_NAMES else families:
        module = import_module(place)
        if name in module.__all__:
            value = globals()[name] = getattr(module, name)
            return value
    # No `obj=`: with it, Python would print its own suggestion in addition to ours.
    raise AttributeError(f"module 'dispatch' has no attribute {name!r}{_hint(name)}", name=name)


class _Aliases:
    """Import hook that makes `from dispatch.fft import rfft` work, though `dispatch.fft` is another module's alias.

    It is last in sys.meta_path, so Python asks it only for modules that have no file.
    """

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> Any:
        """The spec of an alias of _MODULES, or None for any other name."""
        package, _, last = name.rpartition(".")
        if package != "dispatch" or last not in _MODULES:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Aliases, loader_state=_import_public(last).__spec__)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> Any:
        """The aliased module itself, not a copy."""
        return _import_public(spec.name.rpartition(".")[2])

    @staticmethod
    def exec_module(module: Any) -> None:
        """Put the module's own spec back, which the import system has replaced; its code has run already."""
        module.__spec__ = module.__spec__.loader_state


_sys.meta_path.append(_Aliases)  # the class itself: it needs no instance


def _raise_missing(where: str, public: list[str], name: str) -> NoReturn:
    """Raise the AttributeError for a name that module `dispatch.<where>` lacks.

    Python's own error would name the module that the alias refers to.
    """
    hint = ""
    if not name.startswith("_"):
        try:
            _import_public(name)
            hint = f"; dispatch.{name}"
        except AttributeError:
            hint = _hint(name, public)
    raise AttributeError(f"module 'dispatch.{where}' has no attribute {name!r}{hint}", name=name)


def _hint(name: str, public: list[str] | None = None) -> str:
    """The hint at the end of an error about `name`: the name here for a name of NumPy, SciPy or torch, else the most
    similar public name, else "".
    """
    if name.startswith("_"):
        return ""
    from difflib import get_close_matches

    from dispatch.elsewhere import of_module

    if of_module(name):
        return f"; {of_module(name)}"

    if where := _module_of(name):
        return f"; dispatch.{where}.{name}"
    by_letters = {known.replace("_", "").lower(): known for known in public or __dir__()}
    similar = get_close_matches(name.replace("_", "").lower(), by_letters, 1)
    return f"; did you mean {by_letters[similar[0]]!r}?" if similar else ""


def _module_of(name: str) -> str:
    """The public module of functions that has a name, such as "tensors" for tensordot; "" if none has."""
    for module in ("tensors", "sparse", "structured", "linalg", "fft", "signal", "random", "parallel"):
        if name in _import_public(module).__all__:
            return module
    return ""


def _likely_families(name: str) -> list[str]:
    """The op families, those most likely to have `name` first, so that finding it imports few of them."""
    families = [family for family in _FAMILIES if family != "graph"]
    return sorted(families, key=lambda f: (name not in _FAMILIES[f][1], f[:3] != name[:3].lower()))


if not TYPE_CHECKING:  # type checkers must report undefined names as errors
    __getattr__ = _import_public


def __dir__() -> list[str]:
    """All public names."""
    from importlib import import_module

    families = [import_module(f"dispatch.ops.{family}") for family in _likely_families("")]
    of_families = (name for family in families for name in family.__all__)
    return sorted({*_HERE, *_MODULES, *_LATE_NAMES, "register", *of_families})
