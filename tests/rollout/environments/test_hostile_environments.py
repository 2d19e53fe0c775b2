"""Hostile and broken environments: the run continues, and each is counted for what it did."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import Message, Reply
from headrace.base.types.episode import AttemptKind, EpisodeKey, StopReason
from headrace.launch.clients.environment import MAX_QUERIES
from headrace.run.session import train
from tests.launch.workers import parts_here
from tests.rollout.environments.hostile import CAUSES, ENVIRONMENT, KEEP, QUICK, judged
from tests.rollout.environments.pools import running_pool, task
from tests.rollout.environments.tasks import make_env_run
from tests.rollout.scoring.hostile import CAUSES as REWARD_CAUSES
from tests.rollout.scoring.hostile import DEEDS
from tests.rollout.scoring.hostile import EITHER as REWARD_EITHER

KEY = EpisodeKey(0, 0)
REWARD = (
    DEEDS
    + """
    def reward(completion, wrong=""):
        return DEEDS[wrong]() if wrong else sum(character in "01234" for character in completion) / 4
"""
)


@pytest.mark.parametrize("entry", CAUSES)
def test_each_hostile_environment_is_counted_for_what_it_did_and_the_others_go_on(tmp_path: Path, entry: str) -> None:
    before = parts_here()
    counted = judged(tmp_path, entry, [*QUICK[entry], "fine 1", "fine 2"], timeout_s=6, within_s=100)
    assert counted.total() == len(QUICK[entry]) + 2
    assert counted[""] >= 3
    assert not parts_here() - before
    assert all(log.stat().st_size < 2 * KEEP.log_bytes for log in tmp_path.glob("environment-*.log"))


def test_an_episode_may_have_so_many_questions_open_and_no_more(tmp_path: Path) -> None:
    @dataclass
    class Mute:
        """Answers one question."""

        seed: int = 0
        key: EpisodeKey = KEY
        attempt_kind: AttemptKind = AttemptKind.ALONE
        num_asked: int = 0

        async def reply(self, *_: object) -> Reply:
            self.num_asked += 1
            if self.num_asked > 1:
                await asyncio.Event().wait()
            message = Message(role="assistant", content="ok")
            return Reply(message=message, turn=1, stop_reason=StopReason.STOP, num_prompt_tokens=1, num_tokens=1)

    async def main() -> None:
        episode: Any = Mute()
        async with asyncio.timeout(60), running_pool(tmp_path, ENVIRONMENT, "rollout", keep=KEEP) as at:
            with pytest.raises(EpisodeError, match="1024 questions of this episode are open") as raised:
                await at.pool.run(task("flood"), episode)
        assert raised.value.reason == "env_error"
        assert episode.num_asked == 1 + MAX_QUERIES

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("entry", CAUSES)
def test_hundreds_of_hostile_environments_are_counted(tmp_path: Path, entry: str) -> None:
    deeds = [f"{deed} {number}" for number in range(4) for deed in CAUSES[entry]]
    counted = judged(tmp_path, entry, deeds, timeout_s=8, within_s=1700)
    assert counted.total() == len(deeds)
    assert {"env_error", "env_timeout", "env_crashed", "reward_nan"} <= counted.keys()
    assert len([deed for causes in CAUSES.values() for deed in causes]) * 4 >= 250


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_hostile_environments_and_rewards_comes_to_its_end_and_its_books_say_why(
    tmp_path: Path, model_dir: Path
) -> None:
    environments = [deed for deed in CAUSES["rollout"] if deed not in ("fine", "truth", "leave", "bomb")]
    rewards = [deed for deed in (*REWARD_CAUSES, *REWARD_EITHER) if deed not in ("fine", "bomb")]
    hostile = [{"deed": deed} for deed in environments] + [{"deed": "learn", "wrong": deed} for deed in rewards]
    rows = [{"prompt": "1+1=", **each} for row in hostile for each in (row, {"deed": "learn"})]
    run_file = make_env_run(
        tmp_path,
        model_dir,
        ENVIRONMENT,
        "rollout",
        rows="".join(json.dumps(row) + "\n" for row in rows),
        reward=REWARD,
        env={
            "reward": "reward.py:reward", "timeout_s": 60.0, "block_s": 2.0, "memory_mb": 512, "processes": 40,
            "reward_timeout_s": 20.0, "reward_memory_mb": 512, "reward_processes": 40, "max_turns": 5000,
        },
        data={"shuffle": False, "epochs": 1},
        flow={"groups_per_step": 2, "group_size": 2, "max_age": 3, "max_failed_groups": 99, "max_idle_batches": 99},
        run={"steps": 200},
    )  # fmt: skip
    summary = train(run_file, overrides=["observe.view=none"])
    assert summary.status == "finished"
    assert summary.steps >= len(hostile) // 4  # every other row can be learned from
    books = summary.ledger
    assert books.groups.submitted == len(rows)
    assert books.groups.submitted == books.groups.trained + sum(books.groups.dropped.values()) + books.groups.in_flight
    reasons = Counter(books.groups.dropped)
    assert {"env_error", "env_timeout", "env_blocked", "env_crashed", "reward_nan"} <= reasons.keys()
    assert {"reward_error", "reward_timeout", "reward_crashed"} <= reasons.keys()
