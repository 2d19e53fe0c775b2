"""What is exported are plain files: transformers and peft load them, and they compute what the learner computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import CheckpointError, ConfigError
from headrace.control.recovery import find_starting_point
from headrace.learner import checkpoint
from headrace.learner.checkpoint.snapshot import SnapshotState
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.heads import HEADS_FILE, load_head
from headrace.run.cli import main
from headrace.run.session import exporting
from headrace.run.session.directory import CONFIG_FILE, find_run_file, write_sealed
from headrace.run.session.exporting import export
from headrace.wings.bench.speculation_heads import add_head
from tests.learner.builders import random_batch, tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("export") / "base")


def trained(run_dir: Path, base: Path, lora: LoraConfig | None = None) -> LearnerCore:
    """A learner after two steps, each with a checkpoint in ``run_dir``."""
    learner = LearnerCore(
        load_model(ModelConfig(path=str(base), lora=lora)),
        LearnerConfig(lr=1e-2),
        Objective.build(AlgoConfig.model_validate({"bundle": "grpo"})),
        LearnerContext(temperature=1.0, total_steps=2, model_dir=base, clock=RealClock()),
    )
    run_dir.mkdir()
    for step in (0, 1):
        learner.train(random_batch(step))
        unfinished = checkpoint.begin(run_dir / "checkpoints", step + 1)
        learner.save(unfinished)
        state = SnapshotState(step=step + 1, version=step + 1, config_fingerprint="", controller={})
        checkpoint.commit(unfinished, state)
    return learner


def logits_of(learner: LearnerCore) -> torch.Tensor:
    with torch.no_grad():
        return forward(learner.model, torch.arange(6), PackedPlan([6]))


def plain_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(6)[None], attention_mask=torch.ones(1, 6)).logits[0]


def test_a_run_is_exported_as_its_newest_weights_bit_for_bit(base: Path, tmp_path: Path) -> None:
    learner = trained(tmp_path / "run", base)
    exported = export(tmp_path / "run", tmp_path / "out")
    assert (exported.kind, Path(exported.source).name) == ("model", "step-000002")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    held = dict(learner.model.named_parameters())
    assert all(torch.equal(tensor, held[name]) for name, tensor in plain.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(("optimizer", "state"))]
    load_model(ModelConfig(path=str(tmp_path / "out")))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_an_adapter_is_merged_or_written_by_itself(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    learner = trained(tmp_path / "run", base, LoraConfig(rank=4, use_dora=True))
    checkpointed = tmp_path / "run" / "checkpoints" / "step-000002"
    merged = export(checkpointed, tmp_path / "merged")
    assert (merged.kind, merged.lost_share) == ("merged adapter", 0.0)
    assert export(checkpointed, tmp_path / "apart", "separate").kind == "adapter"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    beside = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "apart")
    for model in (whole, beside):
        torch.testing.assert_close(plain_logits(model), logits_of(learner), rtol=0, atol=5e-5)
    assert not (tmp_path / "apart" / "config.json").exists()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_the_prediction_head_of_a_checkpoint_is_in_what_is_exported_bit_for_bit(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    base = add_head(tiny(tmp_path / "base", kind="qwen2"), noise=0.1)
    trained(tmp_path / "run", base, lora)
    export(tmp_path / "run", tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / HEADS_FILE), load_file(base / HEADS_FILE)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config = ModelConfig(path=str(tmp_path / "out"))
    assert load_head(config, load_model(config)).num_weights > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_files_of_many_ranks_are_copied_with_their_index(base: Path, tmp_path: Path) -> None:
    learner = trained(tmp_path / "run", base)
    snapshot, parts = tmp_path / "run" / "checkpoints" / "step-000002", tmp_path / "parts"
    tensors = load_file(snapshot / "model.safetensors")
    parts.mkdir()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, parts / file, {"format": "pt"})
        (parts / file.replace("model", "optimizer")).write_bytes(b"moments")
    index = json.dumps({"metadata": {}, "weight_map": files})
    (parts / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    (parts / "config.json").write_bytes((snapshot / "config.json").read_bytes())
    export(parts, tmp_path / "out")
    torch.testing.assert_close(
        plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits_of(learner), rtol=0, atol=5e-5
    )
    assert not list((tmp_path / "out").glob("optimizer*"))


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", base)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me", encoding="utf-8")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "lock").touch()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    for where, target, options, words in (
        (tmp_path / "run", tmp_path / "full", {}, "it is there already"),
        (tmp_path / "run", out, {"adapter": "merged"}, "holds a whole model and no adapter"),
        (tmp_path / "run", out, {"dtype": "bfloat16"}, "nothing is merged"),
        (tmp_path / "full", out, {}, "neither a run nor a checkpoint"),
        (tmp_path / "new", out, {}, "no whole checkpoint yet"),
        (tmp_path / "failed", out, {}, "no whole checkpoint yet"),
    ):
        with pytest.raises(ConfigError, match=words):
            export(where, target, **options)
    assert sorted(tmp_path.rglob("*")) == before
    damaged = tmp_path / "run" / "checkpoints" / "step-000002"
    (damaged / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be used"):
        export(damaged, out)
    with pytest.raises(CheckpointError, match="cannot be used") as caught:
        export(tmp_path / "run", out)
    assert "continue from step-000001" in caught.value.remedy
    damaged.rename(f"{damaged}.damaged")
    assert Path(export(tmp_path / "run", out).source).name == "step-000001"


def test_the_verb_says_what_it_wrote(base: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    trained(tmp_path / "run", base)
    monkeypatch.setattr("sys.argv", ["headrace", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["directory"]) == ("model", str(tmp_path / "out"))


def test_weights_are_read_where_only_the_optimizer_is_damaged(base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", base)
    moments = tmp_path / "run" / "checkpoints" / "step-000002" / "optimizer.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1] + b"?")
    assert Path(export(tmp_path / "run", tmp_path / "out").source).name == "step-000002"
    write_sealed(tmp_path / "run" / CONFIG_FILE, {"model": {"path": str(base)}})
    assert find_run_file(tmp_path / "run")["model"]["path"] == str(moments.parent)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors has changed"):
        find_starting_point(tmp_path / "run")
    moments.with_name("model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 0 bytes"):
        export(tmp_path / "run", tmp_path / "again")


def test_a_snapshot_that_the_run_removes_meanwhile_is_left_for_the_newer_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", base)
    newest, copy = tmp_path / "run" / "checkpoints" / "step-000002", exporting._copy_files

    def while_the_run_goes_on(files: list[Path], directory: Path) -> None:
        if newest.is_dir():
            newest.rename(newest.with_name("step-000003"))
        copy(files, directory)

    monkeypatch.setattr(exporting, "_copy_files", while_the_run_goes_on)
    assert Path(export(tmp_path / "run", tmp_path / "out").source).name == "step-000003"
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
