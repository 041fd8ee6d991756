"""A communicator's configuration: the fields of the installed NCCL's `ncclConfig_t`.

Follows https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclconfig-t. The only call of NCCL is
the query of its version.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

from cudabind.sys import nccl
from dispatch.checks import check_bool, check_int
from dispatch.errors import BadRequest, Refused

__all__ = ["NcclConfig", "c_config", "require", "version"]

MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC; older headers have it only inside NCCL_CONFIG_INITIALIZER
# The field of ncclConfig_t for each field of this class.
# fmt: off
NAMES = {
    "cga_cluster_size": "cgaClusterSize", "min_ctas": "minCTAs",           "max_ctas": "maxCTAs",
    "net_name":         "netName",        "split_share": "splitShare",     "traffic_class": "trafficClass",
    "comm_name":        "commName",       "collnet_enable": "collnetEnable", "cta_policy": "CTAPolicy",
    "shrink_share":     "shrinkShare",    "nvls_ctas": "nvlsCTAs",
    "channels_per_net_peer": "nChannelsPerNetPeer", "nvlink_centric_sched": "nvlinkCentricSched",
    "graph_usage_mode": "graphUsageMode", "rma_contexts": "numRmaCtx", "max_p2p_peers": "maxP2pPeers",
    "graph_stream_ordering": "graphStreamOrdering", "launch_order_implicit": "launchOrderImplicit",
    "rma_signals": "numRmaSig", "rma_eager_init": "rmaEagerInit", "host_cft_mode": "hostCftMode",
    "nvls_host_mode": "nvlsHostMode",
}
# The first version of NCCL that reads a field, from the headers of 2.26.5, 2.28.9, 2.29.7 and 2.32.3 and the release
# notes. Older versions ignore the field silently.
SINCE = {
    (2, 27, 0): ("comm_name", "collnet_enable", "cta_policy", "shrink_share", "nvls_ctas"),
    (2, 28, 0): ("channels_per_net_peer", "nvlink_centric_sched"),
    (2, 29, 0): ("graph_usage_mode", "rma_contexts"),
    (2, 31, 0): ("max_p2p_peers", "graph_stream_ordering", "launch_order_implicit", "rma_signals", "rma_eager_init",
                 "host_cft_mode", "nvls_host_mode"),
}
# fmt: on


@dataclass(frozen=True)
class NcclConfig:
    """How NCCL carries out the collectives of a communicator; None leaves a field to NCCL and its environment.

    Attributes:
        blocking: whether a call of NCCL returns only after enqueueing its work. Otherwise one of NCCL's threads
            enqueues it; this library waits for that, which takes longer. The deadline applies in both cases.
        cga_cluster_size: the cluster size of its kernels' thread blocks, 0 to 8.
        min_ctas, max_ctas: the minimum and maximum number of thread blocks of a kernel.
        net_name: the network plugin, such as "Socket".
        split_share, shrink_share: whether communicators made by split or shrink share this one's resources.
        traffic_class: the traffic class of network packets.
        comm_name: its name in logs and profilers.
        collnet_enable: whether network switches may compute reductions.
        cta_policy: a bit mask: 0 the default, 1 few thread blocks, 2 none if copy engines can do the work.
        nvls_ctas: the number of thread blocks for NVLink SHARP.
        channels_per_net_peer: the number of channels to each rank over a network.
        nvlink_centric_sched: whether kernels are placed for NVLink.
        graph_usage_mode: 0 if no CUDA graph will contain its calls, so that NCCL need not order graphs and calls; this
            library then refuses captures. 1 for a single graph, 2 (the default) for graphs and calls.
        rma_contexts, rma_signals: the number of contexts and signals for puts; `rma_eager_init`: whether they are
            created at once.
        max_p2p_peers: the number of ranks that a rank sends to and receives from.
        graph_stream_ordering: whether launches of graphs are ordered with other calls.
        launch_order_implicit: whether NCCL keeps the order of calls of several communicators.
        host_cft_mode, nvls_host_mode: values of `ncclHostCftMode_t` and `ncclNvlsHostMode_t`.
    """

    blocking: bool = True
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: int | None = None
    shrink_share: int | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: int | None = None
    cta_policy: int | None = None
    nvls_ctas: int | None = None
    channels_per_net_peer: int | None = None
    nvlink_centric_sched: int | None = None
    graph_usage_mode: int | None = None
    rma_contexts: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: int | None = None
    launch_order_implicit: int | None = None
    rma_signals: int | None = None
    rma_eager_init: int | None = None
    host_cft_mode: int | None = None
    nvls_host_mode: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "blocking":
                check_bool(field.name, value)
                continue
            is_word = field.name.endswith("_name")
            if value is not None and not is_word:
                check_int(field.name, value, 0)
            if is_word and not isinstance(value, (str, type(None))):
                raise BadRequest(field.name, repr(value), "a name, or None")


def version() -> tuple[int, int, int]:
    """The version of the loaded NCCL."""
    number = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def require(least: tuple[int, int, int], function: str) -> None:
    """Refused if the loaded NCCL is older than the function."""
    loaded = version()
    if loaded < least:
        minimum, actual = (".".join(map(str, each)) for each in (least[:2], loaded))
        raise Refused(f"{function} came with NCCL {minimum}, and {actual} is loaded: install a newer nvidia-nccl")


def c_config(config: NcclConfig) -> Any:
    """The `ncclConfig_t` of a communicator: NCCL_CONFIG_INITIALIZER with the given fields.

    Refused for a field that the installed NCCL does not have.
    """
    settings = nccl.ncclConfig_t()
    kinds = {name: kind for name, kind, *_ in settings._fields_}
    for name, kind in kinds.items():
        if kind is ctypes.c_int32:
            setattr(settings, name, nccl.NCCL_CONFIG_UNDEF_INT)
    major, minor, patch = version()
    settings.size, settings.magic = ctypes.sizeof(settings), MAGIC
    settings.version, settings.blocking = 10000 * major + 100 * minor + patch, int(config.blocking)
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or field.name == "blocking":
            continue
        least = next((each for each, names in SINCE.items() if field.name in names), (2, 17, 0))
        require(least, f"{field.name} of NcclConfig")
        if NAMES[field.name] not in kinds:
            raise Refused(f"{field.name} is none of NCCL {major}.{minor}'s: {', '.join(kinds)}")
        if isinstance(value, str):
            text = ctypes.create_string_buffer(value.encode())
            settings.keep = (*getattr(settings, "keep", ()), text)  # keeps the text alive: the struct has its address
            value = ctypes.addressof(text)
        setattr(settings, NAMES[field.name], value)
    return settings
