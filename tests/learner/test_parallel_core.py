"""A learner over two ranks does everything that a learner in one process does, with the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from headrace.base.types.tokens import FloatColumn
from headrace.models import ModelConfig, load_model
from headrace.models.weights import correction_biases
from tests.learner.builders import Setup, gradients, random_batch, tiny
from tests.learner.rank_core_cases import (  # fmt: skip
    ALIGNED,
    AVERAGE,
    DISTIL,
    FLAT,
    LAYOUTS,
    MOVING,
    PENALTY,
    SEVERAL,
    SPECIAL,
    alike_steps,
    penalised,
    several,
)
from tests.learner.test_parallel import KINDS, Found, answer, run
from tests.once import once, selected, shared_directory

CASES = [
    *("parts", "scores", "from_one", "halves_of_weights", "curve", "biases", "kept_data", "kept_resumed", "taught"),
    *("aligned", "aligned_resumed", "full"),
]
CONFIG = {"tokens_per_microbatch": 30}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shared_directory(tmp_path_factory, "core")
    for kind in ("dense", "experts", "biased"):
        once(directory, f"made {kind}", lambda kind=kind: tiny(directory / kind, **KINDS[kind]))
    return directory


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, place: Path) -> Found:
    return once(place, "alone", lambda: found_alone(place, selected(request, "name")))


def found_alone(place: Path, names: list[str]) -> Found:
    """What one process finds; gradients beside it, for the ranks."""
    found: Found = {}
    for name in names:
        special = SPECIAL[name]
        learner = Setup(
            model_dir=place / special.kind, algo=special.algo, config={**CONFIG, **special.config}
        ).learner()
        gradient = learner.forward_backward(special.batch())
        found[name], found[f"{name} log_pi"] = gradient.metrics, gradient.log_pi_N
        save_file(gradients(learner), place / f"{name}.gradients")
    learner = Setup(model_dir=place / "dense", config=CONFIG).learner()
    batch = random_batch(num_samples=7)
    found["scores"] = learner.logprobs(batch)
    gradient = learner.forward_backward(batch)
    found["parts"], found["parts log_pi"] = gradient.metrics, gradient.log_pi_N
    save_file(gradients(learner), place / "dense.gradients")
    learner.optim_step()
    learner.train(random_batch(step=1, num_samples=7))
    (place / "saved_by_one").mkdir()
    learner.save(place / "saved_by_one")
    found["loss"] = [learner.train(random_batch(step=step, num_samples=7)).metrics["loss"] for step in (2, 3)]
    found["kept"] = kept_alone(place)
    learner = Setup(model_dir=place / "biased", config={**CONFIG, **MOVING}).learner()
    for step in range(2):
        learner.train(random_batch(step=step, num_samples=7))
    found["biases"] = {name: bias.tolist() for name, bias in correction_biases(learner.model).items()}
    learner = Setup(model_dir=place / "dense", algo=SEVERAL, config={**CONFIG, **FLAT}).learner()
    found["updates"] = several(lambda batch: learner.train(batch).metrics)
    found["aligned"] = aligned_alone(place)
    tiny(place / "other", **{**KINDS["dense"], "seed": 9})
    teacher = {"teachers": [{"kind": "model", "path": str(place / "other")}], "top_k": 5}
    learner = Setup(model_dir=place / "dense", algo=DISTIL, config={**CONFIG, **teacher}).learner()
    found["taught"] = learner.forward_backward(batch).metrics["loss"]
    save_file(gradients(learner), place / "taught.gradients")
    return found


def kept_alone(place: Path) -> list[list[float]]:
    learner = Setup(model_dir=place / "dense", algo=PENALTY, config={**CONFIG, **AVERAGE}).learner()
    return penalised(lambda batch: learner.train(batch).metrics, range(3))


def aligned_alone(place: Path) -> list[list[float]]:
    learner = Setup(model_dir=place / "dense", config={**CONFIG, **ALIGNED}).learner()
    return alike_steps(lambda batch: learner.train(batch).metrics, range(4))


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, place: Path, alone: Found) -> Found:
    cases = [*selected(request, "name"), *(f"updates_{layout}" for layout in selected(request, "updating"))]
    cases += [f"kept_{layout}" for layout in selected(request, "averaging") if layout != "data"]
    return once(place, "two", lambda: run(place, 2, [*cases, *CASES]))


def assert_metrics(found: Found, expected: Found) -> None:
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def assert_columns(found: list[float], expected: FloatColumn) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5)  # NaN where no loss was carried


@pytest.mark.parametrize("name", list(SPECIAL))
def test_what_one_process_can_do_ranks_can(two: Found, alone: Found, name: str) -> None:
    cases = answer(two, name)["found"]
    assert len(cases) == len(SPECIAL[name].layouts)
    for case in cases:
        assert case["worst"] < 1e-5, case["layout"]
        assert_columns(case["log_pi"], alone[f"{name} log_pi"])
        differs = case["metrics"].pop("routing_differs", None)
        if differs is not None:  # a row that fills up a part of a context is counted, too
            assert differs == pytest.approx(alone[name]["routing_differs"], abs=0.02)
        assert_metrics(case["metrics"], alone[name])


def test_a_batch_in_parts_adds_up_over_ranks(two: Found, alone: Found) -> None:
    found = answer(two, "parts")
    assert found["worst"] < 1e-5
    assert_metrics(found["metrics"], alone["parts"])
    assert_columns(found["log_pi"], alone["parts log_pi"])


def test_biases_of_experts_move_as_in_one_process_and_are_in_the_snapshot(
    two: Found, alone: Found, place: Path
) -> None:
    assert any(value for bias in alone["biases"].values() for value in bias)
    for found in answer(two, "biases")["found"]:
        assert found == alone["biases"]
    saved = correction_biases(load_model(ModelConfig(path=str(place / "biased_by_two"))))
    assert {name: bias.tolist() for name, bias in saved.items()} == alone["biases"]


@pytest.mark.parametrize("averaging", LAYOUTS)
def test_an_average_of_sharded_weights_is_that_of_whole_ones(two: Found, alone: Found, averaging: str) -> None:
    found, expected = answer(two, f"kept_{averaging}")["found"], alone["kept"]
    assert expected[2][1] > 0
    for step in range(3):
        assert found[step] == pytest.approx(expected[step], rel=1e-3, abs=1e-6)


def test_ranks_of_another_cut_go_on_with_the_average_that_ranks_saved(two: Found, alone: Found) -> None:
    (found,) = answer(two, "kept_resumed")["found"]
    assert found == pytest.approx(alone["kept"][2], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("updating", LAYOUTS)
def test_several_updates_over_ranks_are_those_of_one_process(two: Found, alone: Found, updating: str) -> None:
    found, expected = answer(two, f"updates_{updating}")["found"], alone["updates"]
    assert expected[1][3] == 4
    for step in range(2):
        assert found[step] == pytest.approx(expected[step], rel=1e-3, abs=1e-5)


def test_one_process_goes_on_with_the_average_that_ranks_saved(two: Found, alone: Found, place: Path) -> None:
    answer(two, "kept_data")
    learner = Setup(model_dir=place / "dense", algo=PENALTY, config={**CONFIG, **AVERAGE}).learner()
    learner.restore(place / "kept_by_two")
    (found,) = penalised(lambda batch: learner.train(batch).metrics, range(2, 3))
    assert found == pytest.approx(alone["kept"][2], rel=1e-3, abs=1e-6)


def assert_aligned(found: list[list[float]], expected: list[list[float]]) -> None:
    """The cosines and norms of gradients, and so the weights, are those of one process, where projections act."""
    assert [row[3] for row in expected[-2:]] == [1, 0]
    assert expected[-2][1] > 0.5
    assert expected[-1][1] < 0
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-5)


def test_cosines_of_gradients_over_ranks_are_those_of_one_process(two: Found, alone: Found) -> None:
    found = answer(two, "aligned")["found"]
    assert len(found) == 4
    for rows in found:
        assert_aligned(rows, alone["aligned"])


def test_ranks_of_another_cut_and_one_process_go_on_with_the_gradient_that_ranks_saved(
    two: Found, alone: Found, place: Path
) -> None:
    assert_aligned(answer(two, "aligned_resumed")["found"], alone["aligned"][2:])
    learner = Setup(model_dir=place / "dense", config={**CONFIG, **ALIGNED}).learner()
    learner.restore(place / "aligned_by_2")
    assert_aligned(alike_steps(lambda batch: learner.train(batch).metrics, range(2, 4)), alone["aligned"][2:])


def test_ranks_distil_as_one_process_does(two: Found, alone: Found) -> None:
    for loss, worst in answer(two, "taught")["found"]:
        assert loss == pytest.approx(alone["taught"], rel=1e-4)
        assert worst < 1e-4


def test_every_rank_knows_log_pi_of_every_token(two: Found, alone: Found) -> None:
    for column in answer(two, "scores")["found"]:
        assert column == pytest.approx(alone["scores"].tolist(), abs=1e-5)


def test_ranks_go_on_from_the_snapshot_of_one_process(two: Found, alone: Found) -> None:
    found = answer(two, "from_one")
    assert found["step"] == 2
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4, abs=1e-5)


def test_one_process_goes_on_from_the_snapshot_of_ranks(two: Found, place: Path) -> None:
    curve = answer(two, "curve")["curve"]
    learner = Setup(model_dir=place / "dense", config=CONFIG).learner()
    learner.restore(place / "saved_by_two")
    assert learner.version == 2
    losses = [learner.train(random_batch(step=step, num_samples=7)).metrics["loss"] for step in (2, 3)]
    assert losses == pytest.approx([loss for loss, _ in curve[2:]], rel=1e-4, abs=1e-5)


def test_a_snapshot_of_ranks_of_which_a_file_is_gone_is_refused(two: Found, place: Path, tmp_path: Path) -> None:
    answer(two, "curve")
    for path in (place / "saved_by_two").iterdir():
        if path.name != "shard-00002-of-00002.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    from headrace.base.errors import CheckpointError

    with pytest.raises(CheckpointError, match="shard-00002-of-00002"):
        Setup(model_dir=place / "dense").learner().restore(tmp_path)


def test_a_rank_holds_its_part_of_weights_and_moments(two: Found) -> None:
    found = answer(two, "halves_of_weights")
    assert found["held"] == pytest.approx(found["all"] / 2, rel=0.05)


def test_a_rank_without_memory_says_so_and_ends_the_others(two: Found, place: Path) -> None:
    found = answer(two, "full")
    assert found["kind"] == "RankLost"
    assert found["seconds"] < 20
    words = (place / "last-words").read_text()
    assert "rank 1 of the learner failed while the others computed: step 0 does not fit in memory" in words
    assert "learner.tokens_per_microbatch = 15 (every sample must fit): about " in words
