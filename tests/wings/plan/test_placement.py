"""Where parts of a run lie: never two on one accelerator, an engine on one machine, and all as Ray places them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from headrace.base.errors import ConfigError
from headrace.wings.plan import Cluster
from headrace.wings.plan.placement import MachineResources, PartDemand, assign_machines, place
from tests.wings.plan.ray_places import CPUS, GPUS, NUM_MACHINES


def machines(count: int, gpus: int = GPUS, cpus: float = CPUS) -> list[MachineResources]:
    return [MachineResources(number=number, num_gpus=gpus, cpus=cpus) for number in range(count)]


def of_run(engines: int, width: int, ranks: int, cpus: float = 0.1) -> list[PartDemand]:
    return [
        *(PartDemand(name=f"learner-{rank}", gpus=1, cpus=cpus) for rank in range(ranks)),
        *(PartDemand(name=f"engine-{number}", gpus=width, cpus=cpus) for number in range(engines)),
    ]


def kinds(
    parts: Sequence[PartDemand], where: Mapping[str, object]
) -> Counter[tuple[tuple[tuple[int, float], int], ...]]:
    """How many parts of which demand lie together: equal parts, and equal machines, can be exchanged."""
    held: dict[object, Counter[tuple[int, float]]] = {}
    for part in parts:
        held.setdefault(where[part.name], Counter())[part.gpus, part.cpus] += 1
    return Counter(tuple(sorted(each.items())) for each in held.values())


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_no_accelerator_is_given_twice_and_a_part_lies_on_one_machine(seed: int, strategy: str) -> None:
    rng = random.Random(seed)
    parts = [
        PartDemand(name=f"part-{number}", gpus=rng.choice([0, 1, 1, 2, 4, 8]), cpus=rng.choice([0.5, 1, 2]))
        for number in range(rng.randint(1, 12))
    ]
    rooms = machines(3)
    try:
        found = place(parts, rooms, strategy)
    except ConfigError:
        return
    taken = [(where.machine, gpu) for where in found.values() for gpu in where.gpus]
    assert len(taken) == len(set(taken)) == sum(part.gpus for part in parts)
    assert all(gpu < GPUS for _, gpu in taken)
    for room in rooms:
        assert sum(part.cpus for part in parts if found[part.name].machine == room.number) <= CPUS


def test_engines_are_placed_before_ranks_which_fill_what_is_left() -> None:
    found = place(of_run(2, 4, 4), machines(2), "pack")
    assert [found[f"engine-{number}"].gpus for number in (0, 1)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {found[f"learner-{rank}"].machine for rank in range(4)} == {1}
    apart = place(of_run(2, 4, 4), machines(2), "spread")
    assert {apart[f"engine-{number}"].machine for number in (0, 1)} == {0, 1}


def test_parts_that_do_not_fit_are_refused_with_what_they_ask_for_and_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"learner-4 asks for 1 accelerator and 0\.1 cores") as refused:
        place(of_run(3, 4, 5), machines(2), "pack")
    assert "all 8 parts ask for 17 accelerators, of which 2 machines have 16" in refused.value.problem
    with pytest.raises(ConfigError, match="engine-0 asks for 16 accelerators"):
        place(of_run(1, 16, 0), machines(2), "pack")
    assert "cluster.count" in refused.value.remedy
    with pytest.raises(ConfigError, match="cores free"):
        place(of_run(8, 1, 8, cpus=4), machines(2), "pack")


@pytest.mark.parametrize(("engines", "ways", "trainers"), [(3, 2, 10), (1, 8, 8), (16, 1, 0), (2, 4, 8)])
def test_split_of_a_search_uses_no_accelerator_twice(engines: int, ways: int, trainers: int) -> None:
    cluster = Cluster(accelerator="H100", count=16)
    placed, ranks = assign_machines(engines, ways, trainers, cluster)
    used = Counter({machine: ways * count for machine, count in Counter(placed).items()}) + Counter(ranks)
    assert max(used.values()) <= 8
    assert (len(placed), len(ranks)) == (engines, trainers)


@pytest.mark.slow
def test_places_are_those_of_ray() -> None:
    pytest.importorskip("ray")
    rng = random.Random(5)
    runs = [
        (of_run(2, 4, 4), "pack"),
        (of_run(2, 4, 4), "spread"),
        (of_run(8, 1, 8), "pack"),
        (of_run(1, 8, 9), "pack"),
    ]
    while len(runs) < 24:
        widths = [rng.choice([1, 2, 4, 8]) for _ in range(rng.randint(1, 4))]
        parts = [
            *(
                PartDemand(name=f"e{place}", gpus=width, cpus=rng.choice([0.5, 2]))
                for place, width in enumerate(widths)
            ),
            *(PartDemand(name=f"r{rank}", gpus=1, cpus=0.5) for rank in range(rng.randint(0, 8))),
        ]
        strategy = rng.choice(["pack", "spread"])
        try:
            place(parts, machines(NUM_MACHINES), strategy)
        except ConfigError:
            continue
        runs.append((parts, strategy))
    asked = [[[[part.name, part.gpus, part.cpus] for part in parts], strategy] for parts, strategy in runs]
    done = subprocess.run(
        [sys.executable, "-m", "tests.wings.plan.ray_places", json.dumps(asked)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    for (parts, strategy), placed in zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        own = {name: each.machine for name, each in place(parts, machines(NUM_MACHINES), strategy).items()}
        assert kinds(parts, own) == kinds(parts, placed), (parts, strategy)
