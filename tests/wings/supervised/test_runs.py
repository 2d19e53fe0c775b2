"""Whole runs: every row once, the ledger, resuming after kill −9 bit for bit, and what a user sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace.base.errors import ConfigError
from headrace.flow.ledger.opening import open_ledger
from headrace.run.cli.status import read_run_state
from headrace.run.session.exporting import export
from headrace.wings.supervised.session import dpo, sft
from tests.learner.builders import assert_same_bits
from tests.wings.supervised.material import chat_model, conversations, pairs, settings, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("runs") / "model")


def weights_at(run_dir: Path, step: int) -> dict[str, Any]:
    where = run_dir / "checkpoints" / f"step-{step:06}"
    return {**load_file(where / "model.safetensors"), **_floats(load_file(where / "optimizer.safetensors"))}


def _floats(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"optimizer {name}": tensor for name, tensor in tensors.items() if tensor.dtype.is_floating_point}


def test_every_row_is_trained_once_in_every_epoch_and_the_ledger_says_in_which_step(model, tmp_path):
    run = {"epochs": 2, "rows_per_step": 4}
    summary = sft(settings(model, tmp_path / "run", run=run), data=conversations(11), eval_data=conversations(3, 9))
    assert (summary.status, summary.steps, summary.epochs) == ("finished", 6, 2.0)
    assert summary.loss_last < summary.loss_first
    assert summary.eval_last["loss"] < summary.eval_first["loss"]
    ledger = open_ledger(tmp_path / "run")
    attempts = ledger.attempts(0)
    assert sorted(each.row for each in attempts[:11]) == sorted(each.row for each in attempts[11:]) == list(range(11))
    assert {step: len(numbers) for step, numbers in ledger.steps().items()} == {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 2}
    books = ledger.conservation()
    assert books.holds
    assert books.tokens.trained == summary.tokens_trained > 0
    ledger.close()
    found = read_run_state(tmp_path / "run")
    assert (found["state"], found["steps_done"]) == ("finished", 6)
    live = json.loads((tmp_path / "run" / "live.json").read_text())
    assert live["figures"].startswith("loss ")
    exported = export(tmp_path / "run", tmp_path / "out")
    assert load_file(Path(exported.directory) / "model.safetensors").keys()


def test_the_result_does_not_depend_on_packing_or_the_place_of_checkpoints(model, tmp_path):
    rows = conversations(12)
    one = settings(model, tmp_path / "one", run={"checkpoint_every": 1})
    other = settings(model, tmp_path / "other")
    sft(one, data=rows)
    sft(other, data=rows)
    assert_same_bits(weights_at(tmp_path / "one", 3), weights_at(tmp_path / "other", 3))


KILLED = """
import os, signal, sys
from headrace.learner.core import LearnerCore
from headrace.wings.supervised import session
whole = LearnerCore.train
def train(core, batch):
    if batch.step == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(core, batch)
LearnerCore.train = train
getattr(session, sys.argv[1])(sys.argv[2])
"""


def run_file(directory: Path, model_dir: Path, run_dir: Path, rows: Path, **sections: Any) -> Path:
    tree = settings(model_dir, run_dir, data={"path": str(rows)}, **sections)
    lines = [
        line
        for name, section in tree.items()
        for line in ([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())])
    ]
    directory.mkdir(exist_ok=True)
    (directory / "run.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory / "run.toml"


@pytest.mark.parametrize("verb", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_run_killed_in_a_step_resumes_to_the_same_bits_and_trains_no_row_twice(model, tmp_path, verb):
    rows = write_rows(tmp_path / "rows.jsonl", conversations(18) if verb == "sft" else pairs(18))
    run = {"checkpoint_every": 2, "epochs": 2, "rows_per_step": 5, "keep_checkpoints": 9}
    whole = run_file(tmp_path / "a", model, tmp_path / "whole", rows, run=run)
    killed = run_file(tmp_path / "b", model, tmp_path / "killed", rows, run=run)
    (tmp_path / "killer.py").write_text(KILLED, encoding="utf-8")
    call = [sys.executable, str(tmp_path / "killer.py"), verb, str(killed), "x", "5"]
    died = subprocess.run(call, check=False, capture_output=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert read_run_state(tmp_path / "killed")["state"] == "killed"
    assert not (tmp_path / "killed" / "checkpoints" / "step-000005").exists()
    verbs = {"sft": sft, "dpo": dpo}
    assert verbs[verb](whole).steps == 8
    summary = verbs[verb](killed, resume=True)
    assert (summary.status, summary.steps) == ("finished", 8)
    for step in (6, 8):
        assert_same_bits(weights_at(tmp_path / "whole", step), weights_at(tmp_path / "killed", step))
    ledgers = [open_ledger(tmp_path / name) for name in ("whole", "killed")]
    assert ledgers[0].steps() == ledgers[1].steps()
    assert [each.row for each in ledgers[0].attempts(0)] == [each.row for each in ledgers[1].attempts(0)]
    assert ledgers[1].conservation() == ledgers[0].conservation()
    assert ledgers[1].conservation().holds
    for ledger in ledgers:
        ledger.close()
    with pytest.raises(ConfigError, match="the run has 8 steps behind it"):
        verbs[verb](killed, resume=True)


def test_a_finished_run_goes_on_with_more_epochs_as_if_they_had_been_asked_for_at_once(model, tmp_path):
    rows = conversations(8)
    sft(settings(model, tmp_path / "one", run={"epochs": 3}), data=rows)
    sft(settings(model, tmp_path / "two", run={"epochs": 1}), data=rows)
    sft(settings(model, tmp_path / "two", run={"epochs": 3}), data=rows, resume=True)
    assert_same_bits(weights_at(tmp_path / "one", 6), weights_at(tmp_path / "two", 6))


def test_a_run_does_not_go_on_with_other_rows_or_another_order(model, tmp_path):
    sft(settings(model, tmp_path / "run"), data=conversations(8))
    for data, changed in ((conversations(8, seed=5), {}), (conversations(8), {"seed": 3})):
        with pytest.raises(ConfigError, match="rows or their order differ"):
            sft(settings(model, tmp_path / "run", run={"epochs": 2, **changed}), data=data, resume=True)


def test_ctrl_c_ends_a_run_after_its_step_with_a_checkpoint(model, tmp_path, monkeypatch):
    from headrace.learner.core import LearnerCore

    whole = LearnerCore.train

    def train(core: LearnerCore, batch: Any) -> Any:
        if batch.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(core, batch)

    monkeypatch.setattr(LearnerCore, "train", train)
    summary = sft(settings(model, tmp_path / "run"), data=conversations(16))
    assert (summary.status, summary.stopped_by, summary.steps) == ("stopped", "SIGINT", 2)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_an_adapter_is_trained_and_resumed(model, tmp_path):
    pytest.importorskip("peft")
    adapted = {"path": str(model), "lora": {"rank": 4}}
    rows = pairs(8)
    summary = dpo(settings(model, tmp_path / "run", model=adapted), data=rows)
    assert summary.steps == 2
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "adapter_model.safetensors").is_file()
    again = dpo(settings(model, tmp_path / "run", model=adapted, run={"epochs": 2}), data=rows, resume=True)
    assert again.steps == 4


def test_settings_without_effect_are_refused(model, tmp_path):
    for verb, sections, words in (
        (dpo, {"loss": "simpo", "learner": {"reference": {"kind": "frozen"}}}, "has no reference policy"),
        (sft, {"run": {"eval_every": 2}}, "no effect without held-out rows"),
        (sft, {"run": {"steps": 2, "epochs": 2}}, "are both set"),
        (sft, {"data": {"path": "a.jsonl", "sources": [{"path": "b.jsonl"}]}}, "are both set"),
        (sft, {"loss": "dpo"}, "loss is not a setting"),
    ):
        with pytest.raises(ConfigError, match=words):
            verb(settings(model, tmp_path / "run", **sections), data=conversations(4))
