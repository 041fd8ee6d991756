"""What test_lower.py runs in a process of its own, with a stub of libcuda on the library path: cases without a GPU.

Each graph becomes descriptors; with a file of device properties as argument, cuDNN's heuristics are asked too and the
first plan is made, as for the GPU that the file describes; with `few` behind it, for one case of each row of bf16 and
i8. Prints a line of JSON: how many by op, what was refused, and `unknown` where cuDNN does not take the properties.
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import dispatch as dp
from cudabind.errors import CudnnError
from dispatch.core.row import refusals
from dispatch.errors import Refused
from dispatch.keys import BF16, HOST, I8
from dispatch.libraries.cudnn.engines import engines, target_of
from dispatch.libraries.cudnn.handle import last_error
from dispatch.libraries.cudnn.lower import lower
from dispatch.row_check import cases_of

HOME = dp.device("host")
FAMILIES = ("conv", "sdpa", "norm", "reduction")
FEW = sys.argv[2:] == ["few"]


def requests_of(row):
    """The cases of a row that it takes, and their requests."""
    for case in cases_of(row):
        request = case.request(HOME, np.random.default_rng(0))
        if not refusals(row, request, request.signature()):
            yield case, request
            if FEW:
                return


def refusal(graph, target, policy):
    """What cuDNN says against a graph, or ""."""
    try:
        if target is None:
            lower(graph, None)
        else:
            next(engines(graph, target, policy))
    except (CudnnError, Refused) as error:
        return f"{error} {last_error()}"
    return ""


def check(target):
    taken, refused = Counter(), []
    for row in dp.TABLE:
        name = row.call.__module__.rpartition(".")[2]
        if (
            row.min_arch == HOST
            or row.function != "cudnnBackendExecute"
            or name not in FAMILIES
            or (FEW and row.dtypes[0] not in (BF16, I8))
        ):
            continue
        family = importlib.import_module(f"dispatch.ops.{name}")
        describe, cudnn = family, family
        if name != "reduction":  # which is one file
            describe, cudnn = (importlib.import_module(f"dispatch.ops.{name}.{part}") for part in ("graph", "cudnn"))
        for case, request in requests_of(row):
            policy = cudnn.policy_of(request, row)
            words = [word for graph in describe.graphs(request) if (word := refusal(graph, target, policy))]
            refused += [f"{row.name} {case.id}: {word}" for word in words]
            taken[row.op] += not words
    return {"taken": taken, "refused": refused}


try:
    GPU = target_of(Path(sys.argv[1]).read_bytes()) if len(sys.argv) > 1 else None
except CudnnError:
    print(json.dumps({"unknown": last_error()}))
else:
    print(json.dumps(check(GPU)))
