"""Where the parts of a run compute, on machines with any number of GPUs."""

from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.fleet import FleetConfig
from headrace.models.devices import Devices, choose_device, choose_devices, num_gpus, use_device


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [
        (0, 1, Devices(engines=("cpu",), learner=("cpu",))),
        (0, 2, Devices(engines=("cpu",), learner=("cpu", "cpu"))),
        (1, 1, Devices(engines=("cuda:0",), learner=("cuda:0",))),
        (2, 1, Devices(engines=("cuda:1",), learner=("cuda:0",))),
        (2, 2, Devices(engines=("cuda:1",), learner=("cuda:0", "cuda:1"))),
        (8, 4, Devices(engines=("cuda:7",), learner=("cuda:0", "cuda:1", "cuda:2", "cuda:3"))),
        (4, 0, Devices(engines=("cuda:3",), learner=())),
    ],
)
def test_unset_devices_use_every_machine_as_it_is(gpus: int, ranks: int, expected: Devices) -> None:
    assert choose_devices("auto", "auto", ranks=ranks, gpus=gpus) == expected


@pytest.mark.parametrize("gpus", range(4))
def test_settled_devices_stay_what_they_are(gpus: int) -> None:
    """So that a process may settle again what its run has settled."""
    settled = choose_devices("auto", "auto", ranks=1, gpus=gpus)
    assert choose_devices(settled.engines[0], settled.learner[0], ranks=1, gpus=gpus) == settled
    assert choose_device("engine.device", settled.engines[0], gpus=gpus) == settled.engines[0]


@pytest.mark.parametrize(
    ("gpus", "learner", "expected"),
    [
        (0, "auto", ["cpu", "cpu", "cpu"]),
        (1, "auto", ["cuda:0", "cuda:0", "cuda:0"]),
        (2, "auto", ["cuda:1", "cuda:1", "cuda:1"]),
        (3, "auto", ["cuda:2", "cuda:1", "cuda:2"]),
        (3, "cuda:2", ["cuda:1", "cuda:0", "cuda:1"]),
        (8, "auto", ["cuda:7", "cuda:6", "cuda:5"]),
    ],
)
def test_several_engines_take_what_the_learner_leaves(gpus: int, learner: str, expected: list[str]) -> None:
    devices = choose_devices("auto", learner, ranks=1, gpus=gpus, count=3)
    assert list(devices.engines) == expected
    shares = [FleetConfig(count=3, cache_share=0.6).for_engine(place, devices).cache_share for place in range(3)]
    assert shares == [pytest.approx(0.6 / expected.count(device)) for device in expected]


def test_named_devices_win() -> None:
    assert choose_devices("cuda:1", "auto", ranks=1, gpus=4, count=2).engines == ("cuda:1", "cuda:1")
    assert choose_devices("cpu", "cuda", ranks=1, gpus=2) == Devices(engines=("cpu",), learner=("cuda:0",))
    assert choose_devices("cuda:0", "cuda:1", ranks=1, gpus=2) == Devices(engines=("cuda:0",), learner=("cuda:1",))
    assert choose_devices("cuda", "cpu", ranks=2, gpus=2) == Devices(engines=("cuda:1",), learner=("cpu", "cpu"))


def test_kernels_for_processors_alone_choose_a_processor_unless_told_otherwise() -> None:
    assert choose_devices("auto", "auto", ranks=1, gpus=2, only_cpu=True) == Devices(engines=("cpu",), learner=("cpu",))
    assert choose_device("device", "cuda", gpus=2, only_cpu=True) == "cuda:0"


@pytest.mark.parametrize(
    ("engine", "learner", "gpus", "problem"),
    [
        ("cuda", "auto", 0, "engine.device='cuda', and torch sees no GPU"),
        ("auto", "cuda", 0, "learner.device='cuda', and torch sees no GPU"),
        ("cuda:1", "auto", 1, "engine.device='cuda:1', and torch sees one GPU, cuda:0"),
        ("auto", "cuda:5", 4, "learner.device='cuda:5', and torch sees 4 GPUs, cuda:0 to cuda:3"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    engine: str, learner: str, gpus: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        choose_devices(engine, learner, ranks=1, gpus=gpus)
    assert "'auto'" in refused.value.remedy


def test_ranks_that_cannot_have_a_gpu_each_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks, each on a GPU of its own, and torch sees 2") as refused:
        choose_devices("auto", "auto", ranks=4, gpus=2)
    assert refused.value.remedy == "ask for 2 ranks, or set learner.device = 'cpu'"
    with pytest.raises(ConfigError, match=r"learner.device='cuda:1' is one GPU.* 2 ranks") as refused:
        choose_devices("auto", "cuda:1", ranks=2, gpus=4)
    assert "learner.device = 'cuda'" in refused.value.remedy


def test_a_cache_leaves_room_where_the_learner_shares_its_device() -> None:
    config = EngineConfig()
    assert config.on("cuda:0", shared=True).cache_share == 0.3
    assert config.on("cuda:1", shared=False).cache_share == 0.9
    assert config.on("cpu", shared=False).cache_share == 0.3
    assert EngineConfig(cache_share=0.5).on("cuda:1", shared=False).cache_share == 0.5


def test_a_process_computes_where_it_is_told_or_says_why_not() -> None:
    assert str(use_device("device", "cpu")) == "cpu"
    with pytest.raises(ConfigError, match=r"device='cuda:99', and torch sees"):
        use_device("device", "cuda:99")
    assert num_gpus() >= 0
