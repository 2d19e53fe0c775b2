"""Publications by process groups: what moves, what each phase waits for, and the seconds that follow."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
import pytest

from headrace.wings.plan import Cluster
from headrace.wings.plan.catalogue import HostFigures, hosts, model
from headrace.wings.plan.publication import (
    GB,
    SOCKET_PASSES,
    EngineUptake,
    PublicationEstimate,
    PublicationRequest,
    estimate_publication,
    tree_edges,
)

NODE = Cluster(accelerator="H100", count=64).machine


def tree_by_members(size: int) -> set[tuple[int, int]]:
    """The sends of Gloo's broadcast as each member decides about them by itself."""
    dim, sends = (size - 1).bit_length(), set()
    for rank in range(size):
        mask = (1 << dim) - 1
        for bit in range(dim):
            mask ^= 1 << bit
            peer = rank ^ (1 << bit)
            if not rank & mask and peer < size and not rank & (1 << bit):
                sends.add((rank, peer))
    return sends


@pytest.mark.parametrize("size", range(2, 40))
def test_broadcast_tree_is_that_of_gloo_and_reaches_every_member_once(size: int) -> None:
    edges = tree_edges(size)
    assert set(edges) == tree_by_members(size)
    assert sorted(receiver for _, receiver in edges) == list(range(1, size))


def one_by_one(request: PublicationRequest, host: HostFigures) -> tuple[float, dict[str, float]]:
    """The seconds of the broadcasts and the bytes that they move, from every connection of every group."""
    part = request.sent_bytes / len(request.ranks)
    threads: dict[tuple[int, int], float] = defaultdict(float)
    cores: dict[int, float] = defaultdict(float)
    memory: dict[int, float] = defaultdict(float)
    links: dict[tuple[str, int], float] = defaultdict(float)
    moved = {"network": 0.0, "within machines": 0.0}
    for rank, machine in enumerate(request.ranks):
        members = [machine, *request.engines]
        for edge in tree_by_members(len(members)):
            for member in edge:
                seconds = part / (host.stream_gb_s * GB)
                threads[rank, member] += seconds
                cores[members[member]] += seconds
                memory[members[member]] += SOCKET_PASSES * part
            sender, receiver = (members[member] for member in edge)
            moved["within machines" if sender == receiver else "network"] += part
            if sender != receiver:
                links["out", sender] += part
                links["in", receiver] += part
    assert host.cores
    waits = [max(threads.values()), max(cores.values()) / host.cores, max(memory.values()) / (host.memory_gb_s * GB)]
    return max(*waits, max(links.values(), default=0.0) / (host.link_gb_s * host.links * GB)), moved


@pytest.mark.parametrize("seed", range(40))
def test_broadcasts_take_what_all_connections_of_all_groups_take_together(seed: int) -> None:
    rng = random.Random(seed)
    host = msgspec.structs.replace(
        NODE,
        cores=rng.choice([1, 2, 8, 112]),
        link_gb_s=rng.choice([0.1, 1.0, 50.0]),
        links=rng.choice([1, 2, 8]),
        memory_gb_s=rng.choice([5.0, 600.0]),
        stream_gb_s=rng.uniform(0.5, 9.0),
    )
    request = PublicationRequest(
        image_bytes=8e9,
        sent_bytes=rng.choice([8e9, 2e8]),
        ranks=[rng.randrange(4) for _ in range(rng.randint(1, 9))],
        engines=[rng.randrange(4) for _ in range(rng.randint(1, 9))],
    )
    found = estimate_publication(request, host)
    (broadcast,) = (phase for phase in found.phases if phase.name == "broadcast")
    seconds, moved = one_by_one(request, host)
    assert broadcast.seconds == pytest.approx(seconds)
    assert {key: found.moved_bytes[key] for key in moved} == pytest.approx(moved)
    assert sum(moved.values()) == pytest.approx(request.sent_bytes * len(request.engines))


def of(name: str, ranks: list[int], engines: list[int], width: int, host: HostFigures = NODE) -> PublicationEstimate:
    num_bytes = model(name).params * 2.0
    request = PublicationRequest(
        image_bytes=num_bytes, sent_bytes=num_bytes, ranks=ranks, engines=engines, width=width,
        uptake=EngineUptake.FILES,
    )  # fmt: skip
    return estimate_publication(request, host)


def received_s(found: PublicationEstimate) -> float:
    """Return the seconds until every engine's machine has a verified image."""
    return found.copy.seconds + found.travel_s - found.uptake.seconds


def total_s(found: PublicationEstimate) -> float:
    """Return the seconds until every engine uses the version."""
    return sum(phase.seconds for phase in found.phases)


def test_large_models_on_nodes_of_eight_h100_take_what_the_page_says() -> None:
    medium = of("qwen3-32b", [0] * 8, [1] * 4, 2)
    assert received_s(medium) == pytest.approx(12.1, abs=0.05)
    assert total_s(medium) == pytest.approx(82, abs=0.5)
    assert medium.phases[3].limit == "what leaves a machine over the network"
    large = of("llama-3.1-70b", [rank // 8 for rank in range(32)], [4, 5], 8)
    assert received_s(large) == pytest.approx(14.5, abs=0.05)
    assert received_s(large) < 20
    assert total_s(large) == pytest.approx(67, abs=0.5)
    # with slots of page-locked memory the copy of a rank would run at the speed of its PCIe link
    locked = of("qwen3-32b", [0] * 8, [1] * 4, 2, msgspec.structs.replace(NODE, down_gb_s=52.8))
    assert received_s(locked) == pytest.approx(9.2, abs=0.05)


def test_learner_waits_for_its_copy_alone_and_a_server_for_its_files_too() -> None:
    num_bytes = 16e9
    for uptake, gap_s, uptake_s in (
        (EngineUptake.POINTERS, 0.005, 0.0),
        (EngineUptake.UPLOAD, 0.005, num_bytes / (NODE.up_gb_s * GB)),
        (EngineUptake.FILES, num_bytes / (NODE.load_gb_s * GB), num_bytes / (NODE.copy_gb_s * GB)),
    ):
        request = PublicationRequest(
            image_bytes=num_bytes, sent_bytes=num_bytes, ranks=[0, 0], engines=[1], uptake=uptake
        )
        found = estimate_publication(request, NODE)
        assert found.copy.seconds == pytest.approx(num_bytes / 2 / (NODE.down_gb_s * GB))
        assert (found.commit.seconds, found.uptake.seconds) == pytest.approx((gap_s, uptake_s))
        assert total_s(found) == pytest.approx(found.copy.seconds + found.travel_s + found.commit.seconds)


def test_figures_of_a_cluster_file_replace_those_of_the_catalogue() -> None:
    set_here = Cluster.model_validate({"accelerator": "H200", "count": 8, "network_gb_s": 12.5, "host": {"cores": 7}})
    assert set_here.machine == msgspec.structs.replace(hosts()["DGX-H100"], cores=7, link_gb_s=12.5)
    assert Cluster(accelerator="CPU-core", count=6, per_node=6).machine.cores == 6
