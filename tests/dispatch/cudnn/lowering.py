"""What test_lower.py runs in a process of its own, with a stub of libcuda on the library path: cases without a GPU.

Each graph becomes descriptors; with a file of device properties as argument, cuDNN's heuristics are asked too and the
first plan is made, as for the GPU that the file describes. Prints a line of JSON: how many by op, and what was refused.
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import dispatch as dp
from cudabind.errors import CudnnError
from dispatch.cudnn.engines import described, engines
from dispatch.cudnn.handle import last_error
from dispatch.cudnn.lower import lower
from dispatch.errors import Refused
from dispatch.keys import HOST
from dispatch.row import refusals

HOME = dp.device("host")
TARGET = described(Path(sys.argv[1]).read_bytes()) if len(sys.argv) > 1 else None
taken: Counter[str] = Counter()
refused = []
for row in dp.TABLE:
    name = row.call.__module__.rpartition(".")[2]
    if row.arch == HOST or name not in ("conv", "sdpa", "norm"):
        continue
    rooms = {room: importlib.import_module(f"dispatch.ops.{name}.{room}") for room in ("describe", "cudnn", "forms")}
    for case in rooms["forms"].cases(row):
        request = case.request(HOME, np.random.default_rng(0))
        if refusals(row, request, request.signature()):
            continue
        graph = rooms["describe"].describe(request).graph
        try:
            if TARGET is None:
                lower(graph, None)
            else:
                next(engines(graph, TARGET, rooms["cudnn"].policy_of(request, row)))
            taken[row.op] += 1
        except (CudnnError, Refused) as error:
            refused.append(f"{row.name} {case.id}: {error} {last_error()}")
print(json.dumps({"taken": taken, "refused": refused}))
