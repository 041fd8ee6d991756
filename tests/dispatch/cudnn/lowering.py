"""What test_lower.py runs in a process of its own, with the stub of libcuda on the library path: lower every case.

Prints a line of JSON: how many graphs were lowered by op, and what cuDNN said of those it did not take.
"""

import importlib
import json
from collections import Counter

import numpy as np

import dispatch as dp
from cudabind.errors import CudnnError
from dispatch.cudnn.handle import last_error
from dispatch.cudnn.lower import lower
from dispatch.keys import HOST
from dispatch.row import refusals

HOME = dp.device("host")
lowered: Counter[str] = Counter()
refused = []
for row in dp.TABLE:
    name = row.call.__module__.rpartition(".")[2]
    if row.arch == HOST or name not in ("conv", "sdpa", "norm"):
        continue
    describe = importlib.import_module(f"dispatch.ops.{name}.describe").describe
    for case in importlib.import_module(f"dispatch.ops.{name}").cases(row):
        request = case.request(HOME, np.random.default_rng(0))
        if refusals(row, request, request.signature()):
            continue
        try:
            lower(describe(request).graph, None)
            lowered[row.op] += 1
        except CudnnError as error:
            refused.append(f"{row.name} {case.id}: {error.name} {last_error()}")
print(json.dumps({"lowered": lowered, "refused": refused}))
