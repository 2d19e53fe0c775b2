"""Whole runs on real processes with branches of failed episodes, and with segments at entropy spikes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as library
from headrace.base.config import merge
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph
from headrace.flow.ledger import SqliteLedger
from headrace.run.session import load_config
from tests.run.session.runs import SETTINGS, verb

ROWS = [{"prompt": f"{a}+{a + 1}=", "answer": 2 * a + 1} for a in range(12)]
REWARDS = '''
def ends_small(completion):
    """1 where the last character is a small digit."""
    return float(completion[-1:] in tuple("01234"))

def small_digits(completion, history):
    """A process reward: the share of small digits."""
    assert history
    return sum(character in "01234" for character in completion) / max(1, len(completion))
'''


def tree(tmp_path: Path, model: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    own = {
        "model": {"path": str(model)},
        "data": {"path": ""},
        "env": {"reward": str(tmp_path / "rewards.py") + ":ends_small"},
        "engine": {"max_new_tokens": 24, "max_sequences": 64},
        "observe": {"view": "none"},
        "run": {"dir": str(tmp_path / "run"), "steps": 3},
    }
    return merge(SETTINGS, own, *changes)


def episodes(run_dir: Path) -> list[EpisodeGraph]:
    """Of all groups that were trained."""
    ledger = SqliteLedger.open(run_dir / "ledger.sqlite")
    try:
        assert ledger.conservation().holds
        return [e for numbers in ledger.steps().values() for number in numbers for e in ledger.episodes(number)]
    finally:
        ledger.close()


def metric(run_dir: Path, name: str) -> float:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(line.get("metrics", line).get(name, 0.0) for line in lines)


@pytest.mark.parametrize("max_age", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_branches_of_failed_episodes_are_trained_from_one_cache_and_one_version(
    tmp_path: Path, model_dir: Path, max_age: int
) -> None:
    pivots = {"gap": 5, "branches": 3, "per_episode": 2}
    config = tree(tmp_path, model_dir, {"flow": {"max_age": max_age, "pivots": pivots}})
    summary = library.train(config, data=ROWS)
    run_dir = tmp_path / "run"
    assert summary.status == "finished"
    tokens, pivots_seen = summary.ledger.tokens, 0
    assert tokens.submitted == tokens.trained + sum(tokens.dropped.values()) + tokens.in_flight
    for episode in episodes(run_dir):
        grown: dict[int, set[int]] = {}
        for turn in episode.turns:
            if turn.branch is not None and turn.branch.reward is not None:
                grown.setdefault(turn.branch.pivot, set()).update(turn.tokens.versions_T.tolist())
        assert bool(grown) <= (episode.reward == 0.0)
        assert all(len(versions) == 1 for versions in grown.values())
        pivots_seen += len(grown)
    assert pivots_seen > 0
    assert metric(run_dir, "pivots/branches") == 3 * metric(run_dir, "pivots/chosen")
    if max_age == 0:  # no weights change while a step's episodes are sampled: every branch continues from the cache
        assert metric(run_dir, "pivots/by_prefix") == 0
        assert not summary.warnings
    told = json.loads(verb("ledger", run_dir, "--replay", "--json"))  # a fresh learner, from what the ledger holds
    assert (told["differ"], told["first_difference"]) == ([], None)
    with pytest.raises(
        ConfigError, match=r"flow\.pivots is set, and the moments when branches were requested are not recorded"
    ):
        library.train(config, data=ROWS, overrides=[f"run.dir={tmp_path / 'again'}"], replay=run_dir)


@pytest.mark.slow
def test_segments_are_graded_at_entropy_spikes_and_trained_by_prpo(tmp_path: Path, model_dir: Path) -> None:
    rewards = [
        {"kind": "function", "name": "outcome", "ref": str(tmp_path / "rewards.py") + ":ends_small"},
        {"kind": "function", "name": "steps", "ref": str(tmp_path / "rewards.py") + ":small_digits", "by_turn": True},
    ]
    config = tree(
        tmp_path,
        model_dir,
        {"env": {"reward": "", "rewards": rewards}, "algo": {"advantage": {"kind": "prpo", "spikes": 3, "gap": 4}}},
    )
    summary = library.train(config, data=ROWS)
    assert summary.status == "finished"
    seen = set()
    for episode in episodes(tmp_path / "run"):
        assert episode.reward in (0.0, 1.0)  # what the segments earned stands beside it
        segments = [turn for turn in episode.turns if turn.stop_reason is not None]
        seen.add(len(segments))
        assert all(turn.process is not None and 0 <= turn.process <= 1 for turn in segments)
        assert all(turn.tokens.entropies_T is not None for turn in segments)
        entropies_T = np.concatenate([turn.tokens.entropies_T for turn in segments])
        assert (entropies_T > 0).all()
        assert (entropies_T <= np.log(64)).all()
    assert max(seen) > 1
    assert metric(tmp_path / "run", "reward/steps") > 0


STEPS = {"kind": "exact", "name": "steps", "by_turn": True}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env": {"reward": "f.py:f"}, "algo": {"advantage": "prpo"}}, "none of env.rewards has by_turn"),
        ({"env": {"rewards": [STEPS]}, "algo": {"advantage": "prpo"}}, "all env.rewards are process rewards"),
        (
            {"env": {"rewards": [{"kind": "exact"}, {**STEPS, "over_turns": "sum"}]}, "algo": {"advantage": "prpo"}},
            "over_turns='sum', which has no effect",
        ),
        ({"flow": {"pivots": {}}, "algo": {"advantage": "step"}}, "'step' cannot compare the branches"),
        ({"flow": {"pivots": {}}, "algo": {"advantage": "gae"}}, "'gae' cannot compare the branches"),
        ({"flow": {"pivots": {}}, "algo": {"reduction": "prompt_mean"}}, "'prompt_mean' cannot reduce"),
        ({"flow": {"pivots": {"gap": 16}}, "engine": {"max_new_tokens": 16}}, "there is no place for a pivot"),
        ({"flow": {"pivots": {"branches": 1}}}, "branches"),
        ({"flow": {"pivots": {}}, "env": {"kind": "program", "command": "a.py"}}, "cannot be repeated up to a pivot"),
    ],
)
def test_credit_that_a_run_could_not_have_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    base = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    with pytest.raises(ConfigError, match=words):
        load_config(merge(base, sections))
