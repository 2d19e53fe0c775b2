"""What the losses over pairs and ratings refuse, and what they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, DataError
from headrace.wings.supervised.config import DpoConfig, load_tuning
from headrace.wings.supervised.preparing import prepare_tuning
from headrace.wings.supervised.session import dpo
from tests.wings.supervised.material import chat_model, pairs, ratings, settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("losses") / "model")


def test_pairs_gain_on_the_rejected_answers(model: Path, tmp_path: Path) -> None:
    learner = {"lr": 3e-3, "tokens_per_microbatch": 60}
    tree = settings(model, tmp_path / "run", loss="ipo", run={"epochs": 4}, learner=learner)
    summary = dpo(tree, data=pairs(12), eval_data=pairs(12))
    assert summary.eval_last["pair_accuracy"] > 0.9
    assert summary.eval_last["loss"] < summary.eval_first["loss"]
    of_a_sampler = [name for name in summary.eval_last if "_mu" in name or "ess" in name or "age" in name]
    assert not of_a_sampler  # nobody has sampled these rows


def test_kto_raises_good_answers_over_bad_ones(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", loss="kto", run={"epochs": 4}, learner={"lr": 3e-3})
    summary = dpo(tree, data=ratings(12), eval_data=ratings(12))
    assert summary.eval_last["kto_good"] > summary.eval_last["kto_bad"]


def test_kto_needs_two_rows_in_every_step_and_room_for_answers_to_other_prompts(model: Path, tmp_path: Path) -> None:
    for run, words in (({"rows_per_step": 1}, "a step would have one row"), ({"rows_per_step": 4}, "one row of 13")):
        with pytest.raises(ConfigError, match=words):
            dpo(settings(model, tmp_path / "run", loss="kto", run=run), data=ratings(13))
    with pytest.raises(ConfigError, match="all rows have one prompt"):
        dpo(settings(model, tmp_path / "run", loss="kto"), data=[{**row, "prompt": "1+1="} for row in ratings(12)])
    rows = [
        {"prompt": "a" * 30, "completion": "b", "label": True},
        {"prompt": "a", "completion": "b" * 30, "label": False},
    ]
    with pytest.raises(ConfigError, match=r"the longest of both have 61 tokens, more than data.max_length=40"):
        dpo(settings(model, tmp_path / "run", loss="kto", data={"max_length": 40}), data=rows)


def test_a_pair_that_no_pass_can_hold_is_refused_by_its_row(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", learner={"tokens_per_microbatch": 64})
    long = {"prompt": "a" * 20, "chosen": "b" * 20, "rejected": "c" * 30}
    with pytest.raises(DataError, match=r"data, row 3: its two answers have 92 tokens together") as refused:
        prepare_tuning(load_tuning(DpoConfig, tree), data=[*pairs(2), long])
    assert "learner.tokens_per_microbatch >= 92" in refused.value.remedy


def test_a_label_that_is_neither_good_nor_bad_is_refused(model: Path, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "label": "perhaps"}
    with pytest.raises(DataError, match="row 1: label is 'perhaps'"):
        dpo(settings(model, tmp_path / "run", loss="kto"), data=[row, *ratings(3)])
