"""Real runs whose episodes run in processes beside the controller, with shards and engines that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.run.session import load_config, train
from tests.run.session.killed_runs import FLOW, LONG, SLOW_REWARD, ended
from tests.run.session.runs import components, first_words, make_run, running, verb
from tests.run.session.serial import SerialLoop, same_learner

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("rollouts", "engines"), [(1, 1), (2, 2)])
def test_a_run_is_bit_for_bit_the_same_with_any_number_of_shards(
    rollouts: int, engines: int, tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        engine={**LONG, "count": engines},
        flow={**FLOW, "max_age": 0},
        launch={"rollouts": rollouts, "engine_threads": engines, "learner_threads": 1},
        run={"dir": "run", "steps": 4, "checkpoint_every": 4},
    )
    verb("train", run_file)
    assert not ended(tmp_path / "run", 4)["recoveries"]
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "serial")
    if engines == 1:
        with pytest.raises(ConfigError, match=r"and the order in which its engine got the messages of several"):
            train(run_file, overrides=[f"run.dir={tmp_path / 'again'}"], replay=tmp_path / "run")


def test_episodes_that_are_not_needed_any_more_are_withdrawn_from_shards(tmp_path: Path, model_dir: Path) -> None:
    """All answers are equally long, so that many end while others of their group are withdrawn."""
    run_file = make_run(
        tmp_path,
        model_dir,
        engine={**LONG, "count": 2},
        flow=FLOW,
        launch={"rollouts": 2, "engine_threads": 2, "learner_threads": 1},
        run={"dir": "run", "steps": 12},
    )
    verb("train", run_file, "--set", 'flow.filters=[{kind="redundancy", keep=2}]')
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["recoveries"]) == ("finished", 12, [])
    episodes = summary["ledger"]["episodes"]
    assert (episodes["trained"], episodes["in_flight"]) == (48, 0)
    assert episodes["submitted"] == 48 + sum(episodes["dropped"].values())


@pytest.mark.parametrize(("role", "rollouts"), [("rollout-0", 1), ("rollout-1", 2), ("engine-1", 2)])
def test_a_run_whose_shard_or_engine_is_killed_loses_nothing_and_stays_the_same(
    role: str, rollouts: int, tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine={**LONG, "count": 2},
        flow={**FLOW, "max_age": 0, "record_tokens": 4},
        launch={"rollouts": rollouts, "engine_threads": 2, "learner_threads": 1},
        run={"dir": "run", "steps": 10, "checkpoint_every": 10},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        life.until_step(3)
        pid = components(run_dir)[role]
        os.kill(pid, signal.SIGKILL)
        assert life.rest(120.0) == first_words(run_file)
    summary, said = ended(run_dir, 10), "".join(life.lines)
    assert f"{role} (pid {pid}) was killed by SIGKILL" in said
    assert "it is started again, its " in said
    if rollouts == 1:  # nothing can go on before it is there again
        (recovery,) = summary["recoveries"]
        assert recovery.startswith(f"{role} (pid {pid}) was killed by SIGKILL")
        assert "; it serves again after " in said
    status = json.loads(verb("status", run_dir, "--json"))
    assert {part["role"]: part["restarts"] for part in status["components"]}[role] == 1
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(run_dir / "checkpoints" / "step-000010", tmp_path / "serial")


def test_a_run_whose_controller_is_killed_continues_with_another_number_of_shards(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine=LONG,
        flow={**FLOW, "max_age": 0, "record_tokens": 4},
        launch={"rollouts": 2, "engine_threads": 1, "learner_threads": 1},
        run={"dir": "run", "steps": 6, "checkpoint_every": 2},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        life.until_step(3)
        life.process.kill()
    verb("train", run_file, "--resume", "--set", "launch.rollouts=1")
    assert not ended(run_dir, 6, resumed=True)["recoveries"]
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(run_dir / "checkpoints" / "step-000006", tmp_path / "serial")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"flow": {**FLOW, "pivots": {}}}, "launch.rollouts=2 with flow.pivots"),
        (
            {"env": {"kind": "rollout", "entry": "reward.py:f", "agents": [{"name": "judge", "kind": "frozen"}]}},
            "agent 'judge' of env.agents has an engine of its own",
        ),
        (
            {"env": {"kind": "rollout", "entry": "reward.py:f"}, "launch": {"rollouts": 2, "join": "10.0.0.5:7781"}},
            "with launch.join='10.0.0.5:7781'",
        ),
        ({"env": {"reward": "", "rewards": [{"ref": "reward.py:reward", "by_turn": True}]}}, "env.rewards has by_turn"),
        ({"launch": {"rollouts": 2, "kind": "ray"}}, "where they cannot answer shards"),
    ],
)
def test_what_shards_cannot_do_is_refused_by_name(
    sections: dict[str, Any], words: str, tmp_path: Path, model_dir: Path
) -> None:
    tree = {"launch": {"rollouts": 2}, **sections}
    overrides = [f"{name}={json.dumps(table)}" for name, table in tree.items()]
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(make_run(tmp_path, model_dir), overrides)
