"""A typed table from (op, dtype, epilogue, arch) to one library call, with requests over it and workers under it.

The folders, in the order in which they import each other (docs/architecture.md):

    device      order, memory, exchange, `cuda:N` and `host`
    core        requests, rows, operands: what an op family is made of
    execute     what runs a plan on a stream
    testing     what the cases of all families use
    libraries   handles, descriptors and kernels, a folder for each library
    ops         one op family each: request, request function, libraries, reference, cases
    table       the rows; which one takes a request
    bind        from a request to its plan; prepared calls
    supervise   a worker for each stream, in threads or processes; restarts; what users see of them

Importing this package loads no CUDA library and needs no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch import errors as errors
from dispatch.bind.prepare import BoundCall as BoundCall
from dispatch.bind.prepare import prepare as prepare
from dispatch.bind.prepare import prepare_all as prepare_all
from dispatch.core.request import Request as Request
from dispatch.core.request import run as run
from dispatch.core.row import Fusion as Fusion
from dispatch.core.row import Row as Row
from dispatch.device.device import Device as Device
from dispatch.device.external_memory import from_cuda_array_interface as from_cuda_array_interface
from dispatch.device.external_memory import from_dlpack as from_dlpack
from dispatch.device.registry import device as device
from dispatch.device.stream import Stream as Stream
from dispatch.device.tensor import Tensor as Tensor
from dispatch.keys import Arch as Arch
from dispatch.keys import Compute as Compute
from dispatch.keys import Dtype as Dtype
from dispatch.keys import Epilogue as Epilogue
from dispatch.keys import ScaleMode as ScaleMode
from dispatch.ops import FAMILIES as _FAMILIES
from dispatch.supervise import trace as trace
from dispatch.supervise.future import Future as Future
from dispatch.supervise.supervisor import Supervisor as Supervisor
from dispatch.table.select import explain as explain
from dispatch.table.table import TABLE as TABLE

if TYPE_CHECKING:
    from dispatch.libraries.cutlass import evt as evt
    from dispatch.ops import *
    from dispatch.ops import graph as _graph

    cudnn = _graph

register = TABLE.register

_MODULES = {"cudnn": "dispatch.ops.graph", "evt": "dispatch.libraries.cutlass.evt"}
_HERE = [
    name
    for name, value in globals().items()
    if getattr(value, "__module__", "").startswith("dispatch") or value in (errors, trace)
]


def _found(name: str) -> Any:
    """A name of an op family, or a module for users, imported now: `import dispatch` stays quick."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name])
    if name == "__all__":
        return __dir__()
    if not name.startswith("_"):
        # The family that the name looks like comes first; only a name that nobody has imports all of them.
        for family in sorted(
            _FAMILIES, key=lambda family: (name not in _FAMILIES[family][1], family[:3] != name[:3].lower())
        ):
            module = import_module(f"dispatch.ops.{family}")
            if name in module.__all__ and module.__name__ not in _MODULES.values():
                found = globals()[name] = getattr(module, name)
                return found
    raise AttributeError(f"module 'dispatch' has no attribute {name!r}")


if not TYPE_CHECKING:  # to a type checker a name that stands nowhere is an error
    __getattr__ = _found


def __dir__() -> list[str]:
    """All public names."""
    from importlib import import_module

    families = [import_module(f"dispatch.ops.{family}") for family in _FAMILIES if family != "graph"]
    return sorted({*_HERE, *_MODULES, *(name for family in families for name in family.__all__)})
