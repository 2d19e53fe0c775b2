"""The engines of a run and their devices, while engines come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.engine.config import FleetConfig
from headrace.launch import places
from headrace.launch.config import LaunchConfig
from headrace.launch.places import EnginePlaces
from headrace.models.devices import Devices


def places_of(*devices: str, gpus: int = 0, others: int = 0, **settings: Any) -> EnginePlaces:
    """Engines of the policy on ``devices``, of which the last ``others`` are agents'; the learner is on ``cuda:0``."""
    order: Any = SimpleNamespace(
        engine=FleetConfig(count=len(devices) - others, **settings),
        agents={f"a{number}": None for number in range(others)},
        teachers={},
        devices=Devices(engines=devices, learner=("cuda:0" if gpus else "cpu",)),
        launch=LaunchConfig(),
        model=SimpleNamespace(deterministic=False),
    )
    return EnginePlaces(order)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(num: int) -> None:
        monkeypatch.setattr(places, "num_gpus", lambda: num)

    make(0)
    return make


@pytest.mark.usefixtures("gpus")
def test_names_are_the_first_that_are_free_and_an_index_stays_with_its_engine() -> None:
    made = places_of("cpu", "cpu", "cpu", others=1)
    assert made.names == ("engine-0", "engine-1", "agent-a0")
    assert made.add(2) == ("engine-2", "engine-3")
    assert [made.index(name) for name in made.names] == [0, 1, 2, 3, 4]
    made.remove(made.index("engine-0"))
    made.remove(made.index("engine-2"))
    made.remove(3)  # that of engine-2, which has gone
    assert made.policy == ("engine-1", "engine-3")
    assert made.add(1) == ("engine-0",)
    assert (made.index("engine-1"), made.index("engine-0")) == (1, 5)
    assert made.devices.engines == ("", "cpu", "cpu", "", "cpu", "cpu")


@pytest.mark.usefixtures("gpus")
def test_single_engine_keeps_its_name_beside_others_and_gets_it_back() -> None:
    made = places_of("cpu")
    assert made.add(1) == ("engine-1",)
    made.remove(made.index("engine"))
    assert made.add(1) == ("engine",)


def test_every_added_engine_gets_a_gpu_of_its_own_which_a_removed_one_gives_back(gpus: Any) -> None:
    gpus(4)
    made = places_of("cuda:3", gpus=4)
    made.add(2)
    assert made.devices.engines == ("cuda:3", "cuda:2", "cuda:1")
    with pytest.raises(
        ConfigError,
        match=r"no GPU is free; torch sees 4 GPUs, cuda:0 to cuda:3, and they are in use: 3 engines on cuda:3, cuda:2, "
        r"cuda:1, learner on cuda:0",
    ):
        made.add(1)
    made.remove(made.index("engine-1"))
    with pytest.raises(ConfigError, match="no GPU is free"):
        made.add(2)
    assert made.policy == ("engine", "engine-2"), "none of the two"
    assert made.add(1) == ("engine-1",)
    assert made.device("engine-1") == "cuda:2"


@pytest.mark.parametrize(("devices", "num_gpus"), [(("cuda:0", "cuda:0"), 1), (("cuda:2", "cuda:1", "cuda:2"), 3)])
def test_engines_that_share_a_gpu_are_removed_and_added_again_on_the_same_gpus(
    gpus: Any, devices: tuple[str, ...], num_gpus: int
) -> None:
    gpus(num_gpus)
    made = places_of(*devices, gpus=num_gpus)
    for gone in (made.policy[:1], made.policy[1:]):
        for name in gone:
            made.remove(made.index(name))
        assert made.add(len(gone)) == gone
        assert sorted(map(made.device, made.policy)) == sorted(devices)
        assert sorted(filter(None, made.devices.engines)) == sorted(devices), "a share of the memory for each"
        with pytest.raises(ConfigError, match=f"no GPU is free; .* in use: {len(devices)} engines on"):
            made.add(1)


def test_engine_of_several_gpus_gets_as_many_or_is_refused_with_the_figure(gpus: Any) -> None:
    gpus(4)
    made = places_of("cuda:2,3", gpus=4, kind="vllm", tensor=2)
    with pytest.raises(ConfigError, match="1 of the 2 GPUs that it computes on are free; torch sees 4 GPUs"):
        made.add(1)
    gpus(6)
    made.add(1)
    assert made.device("engine-1") == "cuda:4,5"


def test_named_device_of_the_engines_is_not_left(gpus: Any) -> None:
    gpus(4)
    with pytest.raises(ConfigError, match=r"no GPU is free; .* and engine\.device='cuda:3', and they are in use"):
        places_of("cuda:3", gpus=4, device="cuda:3").add(1)
    assert places_of("cpu", gpus=4, device="cpu").add(1) == ("engine-1",)


@pytest.mark.usefixtures("gpus")
def test_more_engines_than_the_setting_allows_are_refused() -> None:
    with pytest.raises(ConfigError, match="the run has 1 engines, and 64 more would be more than 64"):
        places_of("cpu").add(64)
    with pytest.raises(ConfigError, match="1000000000 more would be more than 64"):
        places_of("cpu").refuse_too_many(10**9)  # before a billion names are made
