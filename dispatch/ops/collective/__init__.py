"""Collectives: operations of all ranks of a communicator; each rank makes the same call.

NCCL runs them on GPUs; on the host MPI or gloo runs them between processes, and NumPy between threads of one process.
The communicator of a request, usually that of a `dispatch.World`, determines the library. The files: request (calls in
which all ranks have the same role), rooted (calls with a root, and calls between two ranks), group; nccl,
nccl_messages, host, mpi, gloo and threads (the plans), rules, reference (the expected results in NumPy) and cases.
"""

from __future__ import annotations

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.collective.group import collective_group
from dispatch.ops.collective.request import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    BroadcastRequest,
    RedOp,
    ReduceScatterRequest,
)
from dispatch.ops.collective.rooted import (
    BarrierRequest,
    GatherToRequest,
    RecvRequest,
    ReduceToRequest,
    ScatterFromRequest,
    SendRecvRequest,
    SendRequest,
)

__all__ = ["RedOp", "collective_group"]
__all__ += ["AllGatherRequest", "AllReduceRequest", "AllToAllRequest", "BroadcastRequest", "ReduceScatterRequest"]
__all__ += ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
__all__ += ["BarrierRequest", "GatherToRequest", "RecvRequest", "ReduceToRequest", "ScatterFromRequest"]
__all__ += ["SendRecvRequest", "SendRequest"]
__all__ += ["barrier", "gather", "recv", "reduce_to", "scatter", "send", "sendrecv"]

nccl_collective = plan_call("nccl_collective", "dispatch.ops.collective.nccl", "A plan of NCCL's calls.")
host_collective = plan_call("host_collective", "dispatch.ops.collective.host", "A plan by MPI, or between threads.")

all_reduce, broadcast = (
    request_function(AllReduceRequest, "all_reduce"),
    request_function(BroadcastRequest, "broadcast"),
)
all_gather = request_function(AllGatherRequest, "all_gather")
reduce_scatter = request_function(ReduceScatterRequest, "reduce_scatter")
all_to_all = request_function(AllToAllRequest, "all_to_all")
reduce_to, gather = request_function(ReduceToRequest, "reduce_to"), request_function(GatherToRequest, "gather")
scatter, barrier = request_function(ScatterFromRequest, "scatter"), request_function(BarrierRequest, "barrier")
send, recv = request_function(SendRequest, "send"), request_function(RecvRequest, "recv")
sendrecv = request_function(SendRecvRequest, "sendrecv")
