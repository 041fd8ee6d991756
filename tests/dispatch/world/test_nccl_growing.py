"""Communicators of NCCL that grow, and what an older NCCL has not; over a stand-in for the library."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dispatch.errors import BadRequest, Refused
from dispatch.libraries.nccl import config
from dispatch.libraries.nccl.communicator import NcclCommunicator, unique_id
from dispatch.libraries.nccl.config import NcclConfig, c_config

spec = importlib.util.spec_from_file_location("nccl_stand_in", Path(__file__).parents[1] / "nccl_stand_in.py")
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)


@pytest.fixture
def library(monkeypatch):
    made, gpu = stand_in.install(monkeypatch)
    made.gpu = gpu
    return made


def on_threads(call, count):
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def test_a_communicator_grows_by_ranks_that_join(library, monkeypatch):
    identity = unique_id()
    comms = on_threads(lambda rank: NcclCommunicator.create(library.gpu, rank, 2, identity, deadline=20), 2)
    growing = comms[1].growing_id()

    def grown(rank):
        if rank > 1:
            return NcclCommunicator.join(library.gpu, rank, 3, growing, deadline=20)
        return comms[rank].grow(3, growing if rank == 1 else None)

    larger = on_threads(grown, 3)
    assert [(comm.rank, comm.size) for comm in larger] == [(0, 3), (1, 3), (2, 3)]
    assert library.named.count("ncclCommGrow") == 3
    with pytest.raises(BadRequest, match="size"):
        comms[0].grow(2)
    monkeypatch.setattr(library, "_GetVersion", lambda pointer: setattr(pointer._obj, "value", 22809))
    for call in (comms[0].grow, lambda size: NcclCommunicator.join(library.gpu, 2, size, growing)):
        with pytest.raises(Refused, match=r"ncclCommGrow came with NCCL 2.29, and 2.28.9 is loaded"):
            call(3)
    for comm in (*larger, *comms):
        comm.close()
    assert len(library.destroyed) == 5
    assert library.aborted == []


def test_a_field_that_an_older_nccl_would_pass_over_is_refused(library, monkeypatch):
    assert c_config(NcclConfig(max_p2p_peers=3, graph_usage_mode=1)).maxP2pPeers == 3
    monkeypatch.setattr(library, "_GetVersion", lambda pointer: setattr(pointer._obj, "value", 22809))
    assert c_config(NcclConfig(nvls_ctas=2)).nvlsCTAs == 2
    with pytest.raises(Refused, match=r"graph_usage_mode of NcclConfig came with NCCL 2.29, and 2.28.9 is loaded"):
        c_config(NcclConfig(graph_usage_mode=1))


def test_every_field_has_a_name_of_ncclss_struct():
    kinds = {name for name, *_ in config.nccl.ncclConfig_t._fields_}
    assert set(config.NAMES.values()) | {"size", "magic", "version", "blocking"} == kinds
    assert set(config.NAMES) | {"blocking"} == set(NcclConfig.__dataclass_fields__)
