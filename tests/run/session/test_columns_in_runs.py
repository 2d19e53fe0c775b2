"""Runs whose kept-sets and experts lie in the store: the same weights, and books that say what could not be read."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.base.errors import ConfigError, LedgerError, StoreError
from headrace.base.store import COLUMNS, ColumnStore
from headrace.base.types.episode import TokenChunk
from headrace.base.types.group import GroupState
from headrace.base.types.messages.codec import MessageCodec
from headrace.control.credit import credit
from headrace.flow.columns import collect_files
from headrace.flow.layout import make_outline
from headrace.flow.ledger.base import EndEpisode, EndStep, Move, Submit
from headrace.flow.ledger.opening import open_ledger
from headrace.flow.ledger.sqlite import IN_MEMORY, SqliteLedger
from headrace.flow.ready import ReadyColumns
from headrace.launch.hosts.batches import read_outline
from headrace.launch.processes import Processes
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import SingleRank
from headrace.run.session import load_config, train
from headrace.run.session.prepare import Inputs, prepare
from headrace.run.session.replaying import RecordedBatches
from tests.flow.outlines import groups_with
from tests.run.session.runs import make_run, running, tiny_model, verb
from tests.run.session.serial import same_learner

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {"max_new_tokens": 20, "max_sequences": 16, "top_k": 5, "flush_tokens": 12},
    "flow": {"groups_per_step": 2, "group_size": 4, "max_age": 0},
    "run": {"dir": "run", "steps": STEPS, "checkpoint_every": 100},
}

pytestmark = pytest.mark.timeout(300)
CODEC = MessageCodec(Any)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose experts take 16 bytes a token, so that those of a chunk of 12 tokens are stored."""
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
    directory = tmp_path_factory.mktemp("mixture") / "model"
    return tiny_model(directory, kind="qwen3_moe", num_layers=4, max_positions=64, extra=experts)


def last(directory: Path) -> Path:
    return directory / "run/checkpoints" / f"step-{STEPS:06d}"


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "run" / COLUMNS))


def test_a_run_with_a_store_makes_the_weights_of_one_without(
    tmp_path: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, inline = (make_run(tmp_path / name, mixture, **SETTINGS) for name in ("stored", "inline"))
    train(load_config(stored))
    with monkeypatch.context() as patch:
        patch.setattr(Processes, "_make_store_if_recorded", lambda self, writer="": None)
        train(load_config(inline))
    assert same_learner(last(tmp_path / "stored"), last(tmp_path / "inline"))
    assert names(tmp_path / "stored") == ["engine.000000"]
    assert not (tmp_path / "inline/run" / COLUMNS).exists()
    files = []
    for name in ("stored", "inline"):
        with closing(open_ledger(tmp_path / name / "run")) as ledger:
            assert ledger.conservation().holds
            files.append(collect_files([turn for episode in ledger.episodes(0) for turn in episode.turns]))
    assert files == [{"engine.000000"}, set()]
    books = json.loads(verb("ledger", tmp_path / "stored/run", "--json"))
    assert books["columns_bytes"] == (tmp_path / "stored/run" / COLUMNS / "engine.000000").stat().st_size > 0
    assert "agree bit for bit" in verb("ledger", tmp_path / "stored/run", "--replay")
    (tmp_path / "stored/run" / COLUMNS / "engine.000000").unlink()
    with pytest.raises(
        StoreError,
        match=r"step 0 cannot be trained again, because columns of groups 0, 1 cannot be read: .*engine\.000000",
    ) as refused:
        verb("ledger", tmp_path / "stored/run", "--replay")
    assert "flow.columns.keep = 'always'" in refused.value.remedy


def test_a_run_with_shards_trains_what_the_engine_has_stored(tmp_path: Path, mixture: Path) -> None:
    for name, rollouts in (("alone", 0), ("shards", 2)):
        launch = {"engine_threads": 1, "learner_threads": 1, "rollouts": rollouts}
        # else the rounding of the experts depends on which sequences share a step
        run_file = make_run(tmp_path / name, mixture, **SETTINGS, launch=launch)
        train(load_config(run_file, ["model.deterministic=true"]))
    assert same_learner(last(tmp_path / "shards"), last(tmp_path / "alone"))
    with closing(open_ledger(tmp_path / "shards/run")) as ledger:
        assert ledger.conservation().holds
        assert collect_files([turn for episode in ledger.episodes(0) for turn in episode.turns]) == {"engine.000000"}
    assert "agree bit for bit" in verb("ledger", tmp_path / "shards/run", "--replay")


def test_a_replay_leaves_out_the_groups_that_the_run_could_not_read(tmp_path: Path) -> None:
    config = load_config({"model": {"path": "m"}, "flow": {"group_size": 4, "groups_per_step": 4}})
    engines, groups = ColumnStore(tmp_path, "engine-0", file_bytes=8000), groups_with(1, num_groups=5, longest=200)[:4]
    for turns in (episode.turns for group in groups for episode in group.episodes):
        turns[:] = [
            msgspec.structs.replace(turn, tokens=engines.chunk(TokenChunk(tokens=turn.tokens)).tokens) for turn in turns
        ]
    ready = ReadyColumns(tmp_path, file_bytes=1)
    outline = make_outline(0, [ready.put(group) for group in groups], credit(config.algo, groups))
    (tmp_path / "ready.000001").unlink()
    (tmp_path / "engine-0.000000").unlink()
    found = read_outline(outline, StoreStart(directory=str(tmp_path)), SingleRank(torch.device("cpu")))
    assert [(each.number, each.left_out) for each in found.lost] == [(11, True), (10, False)]
    with closing(SqliteLedger(IN_MEMORY, group_size=4, groups_per_step=4)) as ledger:
        numbers = tuple(group.number for group in groups)
        ledger.apply(Submit(numbers=numbers, rows=numbers, at_s=0.0))
        ledger.apply(*(EndEpisode(episode=episode, at_s=0.0) for group in groups for episode in group.episodes))
        ledger.apply(Move(numbers=numbers, state=GroupState.TAKEN, step=0, at_s=0.0))
        step = EndStep(step=0, numbers=numbers, trained_tokens=1, dropped_tokens={"columns_lost": 1}, ages={}, at_s=0.0)
        ledger.apply(step)
        later = replace(step, step=1, numbers=(), lost=found.lost)  # by a newer version, which resumed the run
        ledger.apply(later)
        with pytest.raises(
            LedgerError, match=r"in its step 0 \(columns_lost\), and an older version of Headrace has not"
        ):
            RecordedBatches(config, ledger, tmp_path)
        ledger.apply(replace(step, lost=found.lost))
        lines: list[str] = []
        batch = RecordedBatches(config, ledger, tmp_path).assemble(0, lines.append)
        assert CODEC.encode(batch) == CODEC.encode(found.batch)
        assert lines[0].startswith(
            "step 0: groups 11, 10 carried no loss in the run, nor here: the part of the store at"
        )
        ledger.apply(replace(step, lost=found.lost[:1]))
        with pytest.raises(StoreError, match=r"step 0 cannot be trained again, because columns of group 10 cannot"):
            RecordedBatches(config, ledger, tmp_path).assemble(0, lines.append)
        for path in tmp_path.glob("engine-0.*"):
            path.unlink()
        found = read_outline(outline, StoreStart(directory=str(tmp_path)), SingleRank(torch.device("cpu")))
        ledger.apply(replace(step, lost=found.lost))
        batch = RecordedBatches(config, ledger, tmp_path).assemble(0, lines.append)
        assert CODEC.encode(batch) == CODEC.encode(found.batch)
        assert not len(batch.lengths_S)


def killed_run(directory: Path, model: Path) -> Path:
    """A run whose controller is killed in its fourth step or later, and that has no snapshot."""
    run_file = make_run(directory, model, **SETTINGS)
    with running("train", run_file) as life:
        life.until_step(3)
        life.process.kill()
        life.process.wait()
    return run_file


@pytest.mark.slow
def test_a_killed_run_trains_what_lies_in_its_store(tmp_path: Path, mixture: Path) -> None:
    train(load_config(make_run(tmp_path / "whole", mixture, **SETTINGS)))
    run_file = killed_run(tmp_path / "killed", mixture)
    printed = verb("train", run_file, "--resume", "--set", "flow.columns.keep=until_trained")
    assert "resumed at step" in printed
    assert same_learner(last(tmp_path / "killed"), last(tmp_path / "whole"))
    assert names(tmp_path / "killed") == ["engine.000001"]  # the last snapshot contains all that was in the first


@pytest.mark.slow
def test_groups_whose_columns_are_damaged_are_counted_and_the_run_goes_on(tmp_path: Path, mixture: Path) -> None:
    run_file = killed_run(tmp_path, mixture)
    with closing(open_ledger(tmp_path / "run")) as ledger:
        kept = ledger.episodes(0)[1].turns[-1].tokens.kept
    assert kept is not None
    file = tmp_path / "run" / COLUMNS / kept.stored[0].file
    data = bytearray(file.read_bytes())
    data[kept.stored[0].start + 1] ^= 1
    file.write_bytes(data)
    printed = verb("train", run_file, "--resume")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    lost = summary["ledger"]["tokens"]["dropped"]["columns_lost"]
    assert 4 < lost <= 4 * 20, "one group of four answers"
    (warning,) = [words for words in summary["warnings"] if "carried no loss" in words]
    assert "step 0" in warning
    assert "engine.000000" in warning
    assert "differs from what was written" in printed
    with closing(open_ledger(tmp_path / "run")) as ledger:
        assert ledger.conservation().holds
    replayed = verb("ledger", tmp_path / "run", "--replay")
    assert "step 0: group 0 carried no loss in the run, nor here" in replayed
    assert "agree bit for bit" in replayed


@pytest.mark.parametrize("setting", ["engine.top_k=0", "learner.keep_sampling_mask=false"])
def test_a_store_that_no_engine_would_use_is_refused(tmp_path: Path, model_dir: Path, setting: str) -> None:
    run_file = make_run(tmp_path, model_dir, engine={"max_new_tokens": 4, "top_k": 5})
    with pytest.raises(ConfigError, match=r"flow\.columns\.keep is set, and this run records neither"):
        prepare(load_config(run_file, ["flow.columns.keep=until_trained", setting]), Inputs())


def test_a_store_of_a_run_on_several_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flow\.columns is set, and with launch\.kind='ray'"):
        load_config({"model": {"path": "m"}}, ["launch.kind=ray", "flow.columns.limit_gb=3"])


def test_a_store_of_what_a_run_records_is_taken(tmp_path: Path, model_dir: Path, mixture: Path) -> None:
    for name, model, top_k in (("truncated", model_dir, 5), ("mixture", mixture, 0)):
        run_file = make_run(tmp_path / name, model, engine={"max_new_tokens": 4, "top_k": top_k})
        config = load_config(run_file, ["flow.columns.keep=until_trained", "flow.columns.limit_gb=3"])
        assert prepare(config, Inputs()).config.flow.columns.limit_gb == 3
