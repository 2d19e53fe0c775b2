"""Adapters that several ranks train are those that one process trains: numbers, snapshots and what engines get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.learner.adapters import Adapters
from headrace.learner.parallel.mesh import SingleRank
from headrace.models import ModelConfig, load_model
from headrace.models.config import AGENTS as FOLDER
from headrace.models.lora import save_adapter
from tests.learner.builders import Setup, random_batch, tiny
from tests.learner.rank_adapter_cases import (  # fmt: skip
    ADAPTED,
    FLAT,
    PENALTY,
    SEVERAL,
    Adapted,
    _apart,
    five_steps,
    own_core,
    publish,
    trained,
)
from tests.learner.test_parallel import KINDS, Found, answer, run
from tests.once import once, selected, shared_directory

OF_TWO = [name for name in ADAPTED if name != "on_four"]
LOSS = 3e-6


def begin(directory: Path, name: str) -> dict[str, Any]:
    """Write adapters whose B is not 0, and return the settings that begin there."""
    adapted = ADAPTED[name]
    model = load_model(ModelConfig(path=str(directory / adapted.kind), lora=adapted.lora))
    random = torch.Generator().manual_seed(1)
    for key, tensor in model.named_parameters():
        if ".lora_B." in key:
            tensor.data.copy_(0.1 * torch.randn(tensor.shape, generator=random))
        elif "magnitude" in key:
            tensor.data.mul_(1.1)
    start = directory / f"start of {name}"
    for agent in ("", *adapted.lora.get("agents", ())):
        place = start / FOLDER / agent if agent else start
        place.mkdir(parents=True)
        save_adapter(model, place, agent)
    return adapted.start(directory, name)


def learner_of(directory: Path, adapted: Adapted, lora: Mapping[str, Any], **algo: Any) -> Any:
    config = {**FLAT, **adapted.config}
    return Setup(model_dir=directory / adapted.kind, config=config, lora=dict(lora), **algo).learner()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shared_directory(tmp_path_factory, "adapters")
    for kind in ("dense", "experts", "zero_experts"):
        once(directory, f"made {kind}", lambda kind=kind: tiny(directory / kind, **KINDS[kind]))
    return directory


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, place: Path) -> Found:
    names = dict.fromkeys(["policy", "on_four", *selected(request, "name")])
    return once(place, "alone", lambda: found_alone(place, list(names)))


def found_alone(place: Path, names: list[str]) -> Found:
    """What one process finds; gradients and weights beside it, for the ranks."""
    found: Found = {}
    for name in names:
        adapted = ADAPTED[name]
        learner = learner_of(place, adapted, begin(place, name))
        found[name], gradients = five_steps(learner, adapted)
        save_file(gradients, place / f"{name}.gradients")
        save_file(trained(learner), place / f"{name}.weights")
    policy = ADAPTED["policy"]
    learner = learner_of(place, policy, policy.start(place, "policy"))
    found["saved"] = [learner.train(random_batch(step=step, num_samples=7)).metrics["loss"] for step in range(4)]
    learner = learner_of(place, policy, policy.start(place, "policy"), algo=PENALTY)
    reports = [learner.train(random_batch(step=step, num_samples=7)).metrics for step in range(2)]
    found["penalised"] = [[each["loss"], each["kl_ref"]] for each in reports]
    model = load_model(ModelConfig(path=str(place / "dense")))
    adapters = Adapters(model, str(place / "dense"), SEVERAL, partial(own_core, place, None))
    for name in SEVERAL:
        with adapters.on(name) as learner:
            found[name] = [learner.train(random_batch(step=step, num_samples=7)).metrics["loss"] for step in range(3)]
    return found


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, place: Path, alone: Found) -> Found:
    cases = [f"adapted_{name}" for name in selected(request, "name")]
    cases += ["fresh", "saved", "kept_adapters", "unsaved", "published", "several_learners"]
    return once(place, "two", lambda: run(place, 2, cases))


@pytest.fixture(scope="module")
def four(place: Path, alone: Found) -> Found:
    return once(place, "four", lambda: run(place, 4, ["adapted_on_four", "saved_by_four"]))


def assert_like_one_process(found: list[Found], expected: list[list[float]], name: str) -> None:
    assert [each["layout"] for each in found] == list(ADAPTED[name].layouts)
    for each in found:
        for pair, expected_pair in zip(each["curve"], expected, strict=True):
            assert pair[0] == pytest.approx(expected_pair[0], rel=0, abs=LOSS), each["layout"]
            assert pair[1] == pytest.approx(expected_pair[1], rel=ADAPTED[name].apart), each["layout"]
        for kind, most in {"gradients": 1e-5, "weights": ADAPTED[name].apart}.items():
            key, apart = each[kind]
            assert apart < most, (each["layout"], kind, key)


@pytest.mark.parametrize("name", OF_TWO)
def test_losses_gradients_and_weights_of_adapters_are_those_of_one_process(two: Found, alone: Found, name: str) -> None:
    assert_like_one_process(answer(two, f"adapted_{name}")["found"], alone[name], name)


@pytest.mark.slow
def test_bfloat16_rounds_no_more_over_ranks_than_in_one_process(place: Path, alone: Found) -> None:
    """Tensor parallelism sums in another order: its gradients are others than those of one process, not worse ones."""
    adapted, expected = ADAPTED["policy"], load_file(place / "policy.gradients")
    setup = Setup(model_dir=place / "dense", config=FLAT, lora=adapted.start(place, "policy"), dtype="bfloat16")
    gradients = five_steps(setup.learner(), adapted)[1]
    _, of_one = _apart({name: one.float() for name, one in gradients.items()}, expected)
    found = answer(run(place, 2, ["rounded"]), "rounded")
    assert found["data"][1] == pytest.approx(of_one)
    assert 1e-3 < found["tensor"][1] < 1.5 * of_one


@pytest.mark.slow
def test_four_ranks_train_the_adapter_of_one_process(four: Found, alone: Found) -> None:
    assert_like_one_process(answer(four, "adapted_on_four")["found"], alone["on_four"], "on_four")


def test_new_adapters_have_the_bits_that_one_process_draws(two: Found) -> None:
    found = answer(two, "fresh")
    assert len(found) == 4
    assert all(found.values()), found


def losses(directory: Path, snapshot: str) -> list[float]:
    """The figures of steps 2 and 3, from one process that continues from a snapshot of ranks."""
    policy = ADAPTED["policy"]
    learner = learner_of(directory, policy, {"rank": 4, "adapter": str(directory / snapshot)})
    learner.restore(directory / snapshot)
    assert learner.version == 2
    return [learner.train(random_batch(step=step, num_samples=7)).metrics["loss"] for step in (2, 3)]


def test_a_snapshot_of_an_adapter_goes_on_to_the_same_bits_and_on_other_ranks_along_the_same_curve(
    two: Found, alone: Found, place: Path
) -> None:
    found, expected = answer(two, "saved"), pytest.approx(alone["saved"][2:], rel=0, abs=LOSS)
    assert found["losses"] == pytest.approx(alone["saved"], rel=0, abs=LOSS)
    assert found["on {'data': 2}"] == found["losses"][2:]
    assert found["same bits"]
    assert found["on {'tensor': 2}"] == expected
    assert losses(place, "adapter_by_two") == expected


def test_a_snapshot_of_ranks_has_the_files_of_one_process(two: Found, place: Path, tmp_path: Path) -> None:
    answer(two, "saved")
    assert not list((place / "of the other rank").iterdir())
    policy = ADAPTED["policy"]
    learner = learner_of(place, policy, policy.start(place, "policy"))
    learner.train(random_batch(num_samples=7))
    learner.save(tmp_path)
    names = [sorted(path.name for path in directory.iterdir()) for directory in (tmp_path, place / "adapter_by_two")]
    assert names[0] == names[1]
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(directory / name) for directory in (tmp_path, place / "adapter_by_two"))
        assert {key: each.shape for key, each in one.items()} == {key: each.shape for key, each in other.items()}
    trees = [json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path, place / "adapter_by_two")]
    for tree in trees:
        tree["target_modules"].sort()
    assert trees[0] == trees[1]


@pytest.mark.slow
def test_a_snapshot_of_four_ranks_goes_on_along_the_same_curve_on_two_and_on_one(
    four: Found, alone: Found, place: Path
) -> None:
    expected = pytest.approx(alone["saved"][2:], rel=0, abs=LOSS)
    assert answer(four, "saved_by_four")["losses"] == pytest.approx(alone["saved"][:2], rel=0, abs=LOSS)
    assert losses(place, "adapter_by_four") == expected
    found = answer(run(place, 2, ["from_four"]), "from_four")
    assert found == {"{'data': 2}": expected, "{'context': 2}": expected}


def test_a_reference_beside_an_adapter_is_that_of_one_process_and_is_saved_once(
    two: Found, alone: Found, place: Path
) -> None:
    for pair, expected in zip(answer(two, "kept_adapters")["found"], alone["penalised"], strict=True):
        assert pair == pytest.approx(expected, rel=1e-4, abs=LOSS)
    saved = place / "penalised_by_two"
    assert [path.name for path in saved.glob("reference*")] == ["reference.safetensors"]
    policy = ADAPTED["policy"]
    learner = learner_of(place, policy, {"rank": 4, "adapter": str(saved)}, algo=PENALTY)
    learner.restore(saved)
    assert learner.version == 2


def test_a_snapshot_that_cannot_be_written_is_refused_on_every_rank_and_training_goes_on(two: Found) -> None:
    found = answer(two, "unsaved")
    assert len(found["said"]) == 2
    assert all("CheckpointError: snapshot" in each and "cannot be written" in each for each in found["said"])
    assert found["loss"] != 0


def test_an_engine_gets_the_bytes_that_one_process_publishes(two: Found, place: Path) -> None:
    update = publish(place, SingleRank(torch.device("cpu")), "one")
    assert answer(two, "published")["update"] == update
    assert update[0] == "adapter-v1"
    one, other = ((place / f"engine of {name}").read_bytes() for name in ("one", "two"))
    assert one == other
    start = load_file(place / "start of policy" / "adapter_model.safetensors")
    for name, tensor in load_file(place / "engine of two").items():
        assert torch.equal(tensor, start[f"base_model.model.{name}"])


def test_learners_with_adapters_of_their_own_share_a_sharded_base(two: Found, alone: Found) -> None:
    found = answer(two, "several_learners")
    assert found.keys() == SEVERAL.keys()
    for name in SEVERAL:
        assert found[name] == pytest.approx(alone[name], rel=0, abs=LOSS), name
