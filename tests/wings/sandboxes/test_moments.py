"""Branches of an episode continue in the world of the moment where they leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import Reply
from headrace.base.types.episode import AttemptKind
from headrace.rollout.environments.data import load_rows
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import EpisodePolicy
from headrace.wings.sandboxes import SandboxSession
from headrace.wings.sandboxes.environment import ShellEnv, ShellSettings
from headrace.wings.sandboxes.tasks import open_task
from headrace.wings.sandboxes.world import Worlds, close_shared_worlds, shared_worlds
from tests.wings.sandboxes.conftest import KINDS
from tests.wings.sandboxes.task_files import HARBOR, write_task
from tests.wings.sandboxes.test_environment import Saying, num_stores

ORIGIN, BRANCH, ALONE = AttemptKind.ORIGIN, AttemptKind.BRANCH, AttemptKind.ALONE
DRAWN = "head -c 9 /dev/urandom | base64 | tee -a drawn"
"""A command that prints and keeps something else whenever it is run."""
COUNTED = "#!/bin/bash\nwc -l < /app/drawn > /logs/verifier/reward.txt\n"
"""Tests that pay for each line of the file."""


class Attempts:
    """Attempts at one task, in one process."""

    def __init__(self, runner: asyncio.Runner, directory: Path, **options: Any) -> None:
        self.options = {"image": "machine", "action": "line", **options}
        self._runner, self._directory = runner, directory

    def __call__(
        self, kind: AttemptKind, says: Sequence[str] | Saying, seed: int = 7
    ) -> tuple[float | None, list[str]]:
        """What an attempt has earned, and what its model has read."""
        model = says if isinstance(says, Saying) else Saying(says)
        model.seed = seed
        with ThreadPoolExecutor(1) as executor:
            rollout = as_rollout(partial(ShellEnv, **self.options), executor)
            policy = EpisodePolicy(model, attempt_kind=kind)
            return self._runner.run(rollout(load_rows(self._directory)[0], policy)).reward, model.read

    @property
    def worlds(self) -> Worlds:
        """The worlds of this process with these options."""

        async def shared() -> Worlds:
            return shared_worlds(ShellSettings(**self.options).worlds)

        return self._runner.run(shared())

    @property
    def num_stores(self) -> int:
        """The number of stores of files that the driver holds."""
        return num_stores(self.worlds)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(close_shared_worlds())


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "task", HARBOR, **{"tests/test.sh": COUNTED})


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_reads_what_its_origin_has_read_and_continues_in_its_world(
    runner: asyncio.Runner, task: Path, kind: str
) -> None:
    attempt = Attempts(runner, task, sandbox=kind, commands=9)
    earned, read = attempt(ORIGIN, [DRAWN, f"cd data; export NAME=here; {DRAWN}", f"cd ..; {DRAWN}", DRAWN, "submit"])
    assert earned == 3.0  # one of them is in the folder data
    assert len(set(read)) == 5
    for place in range(1, 5):
        answers = [DRAWN, f"cd data; export NAME=here; {DRAWN}", f"cd ..; {DRAWN}", DRAWN][: place - 1]
        earned, branch = attempt(
            BRANCH, [*answers, "pwd; echo [$NAME]; cat /app/drawn /app/data/drawn; false", "submit"]
        )
        assert branch[:place] == read[:place]
        drawn = [text for number, text in enumerate(read[1:place]) if number != 1] + read[2:3] * (place > 2)
        world = ["/app/data" if place == 3 else "/app", "[here]" if place > 2 else "[]", *drawn]
        lines = [line for line in branch[place].splitlines() if not line.startswith(("cat:", "[exit"))]
        assert lines == world
        assert earned == sum(number != 1 for number in range(place - 1))


def test_a_branch_that_repeats_everything_ends_as_its_origin_did(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task)
    origin = attempt(ORIGIN, [DRAWN, DRAWN, "submit"])
    assert attempt(BRANCH, [DRAWN, DRAWN, "submit"]) == origin


def test_branches_change_neither_their_origin_nor_each_other(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task)
    attempt(ORIGIN, [DRAWN, "rm drawn", "submit"])
    for _ in range(2):
        assert attempt(BRANCH, [DRAWN, f"ls; {DRAWN}; {DRAWN}; touch more", "submit"])[0] == 3.0
    _, read = attempt(BRANCH, [DRAWN, "ls", "submit"])
    assert read[-1] == "answer.sh\ndata\ndrawn\nlib"


def test_a_branch_goes_its_own_way_once_it_has_left_even_with_the_words_of_its_origin(
    runner: asyncio.Runner, task: Path
) -> None:
    attempt = Attempts(runner, task)
    _, read = attempt(ORIGIN, ["true", DRAWN, "submit"])
    earned, branch = attempt(BRANCH, [f"echo 1 > drawn; {DRAWN}", DRAWN, "submit"])
    assert branch[2] != read[2]
    assert earned == 3.0


@pytest.mark.parametrize(
    ("first", "then", "seed"),
    [(ALONE, BRANCH, 7), (ORIGIN, ALONE, 7), (ORIGIN, ORIGIN, 7), (ORIGIN, BRANCH, 8), (BRANCH, BRANCH, 7)],
)
def test_only_the_branches_of_an_origin_resume_its_world(
    runner: asyncio.Runner, task: Path, first: AttemptKind, then: AttemptKind, seed: int
) -> None:
    attempt = Attempts(runner, task)
    _, read = attempt(first, [DRAWN, "submit"])
    earned, other = attempt(then, [DRAWN, "submit"], seed)
    assert other[1] != read[1]
    assert earned == 1.0


def test_branches_follow_the_last_attempt_at_an_origin(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task)
    reads = [attempt(ORIGIN, [DRAWN, "submit"])[1] for _ in range(2)]
    assert attempt(BRANCH, [DRAWN, "submit"])[1] == reads[1]


def test_a_moment_with_a_process_in_the_background_is_made_again_from_the_one_before(
    runner: asyncio.Runner, task: Path
) -> None:
    attempt = Attempts(runner, task)
    start = (
        "(trap 'echo heard >> log; exit' USR1; echo $BASHPID > pid; while :; do sleep 0.01; done) > /dev/null 2>&1 &"
    )
    answers = [DRAWN, f"{start} while ! test -s pid; do :; done; echo started", "echo again | tee again"]
    _, read = attempt(ORIGIN, [*answers, "true", "submit"])
    hear = "kill -USR1 $(cat pid); while ! test -s log; do :; done; cat again log drawn"
    _, branch = attempt(BRANCH, [*answers, hear, "submit"])
    assert branch[:4] == read[:4]
    assert branch[4] == f"again\nheard\n{read[1]}"


def test_a_moment_that_cannot_be_made_again_fails_its_branch_by_name(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task)
    answers = [f"sleep 1000 > /dev/null & {DRAWN}", "true"]
    attempt(ORIGIN, [*answers, "submit"])
    with pytest.raises(EpisodeError, match="has another result than in the episode") as error:
        attempt(BRANCH, [*answers, "false", "submit"])
    assert error.value.reason == "world_differs"


def test_worlds_of_the_episodes_that_ended_longest_ago_are_given_up(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task, episodes=2)
    attempt(ALONE, ["submit"])
    before = attempt.num_stores
    reads = {seed: attempt(ORIGIN, [DRAWN, "true", "submit"], seed)[1] for seed in (1, 2)}
    assert attempt(BRANCH, [DRAWN, "submit"], 1)[1] == reads[1][:2]  # which makes 2 the one that was used longest ago
    reads[3] = attempt(ORIGIN, [DRAWN, "true", "submit"], 3)[1]
    assert attempt.num_stores == before + 2
    assert [attempt(BRANCH, [DRAWN, "submit"], seed)[1][1] == reads[seed][1] for seed in (1, 2, 3)] == [
        True, False, True,
    ]  # fmt: skip


async def never(session: SandboxSession, command: str) -> str:
    raise AssertionError(command)


@pytest.mark.parametrize("at_once", [False, True])
def test_worlds_of_an_origin_that_was_attempted_again_are_given_up(
    runner: asyncio.Runner, task: Path, at_once: bool
) -> None:
    attempt = Attempts(runner, task)
    attempt(ALONE, ["submit"])
    before, worlds, opened = attempt.num_stores, attempt.worlds, open_task(task)

    async def twice() -> None:
        one = await worlds.attempt(str(task), opened, seed=3, kind=ORIGIN)
        early = await worlds.attempt(str(task), opened, seed=3, kind=BRANCH)
        if not at_once:
            await one.leave()
        other = await worlds.attempt(str(task), opened, seed=3, kind=ORIGIN)
        assert not (await early.enter(never)).ended  # its moments stay as long as it needs them
        await early.leave()
        if at_once:
            await one.leave()
        branch = await worlds.attempt(str(task), opened, seed=3, kind=BRANCH)
        assert branch.session is None
        await branch.leave()
        await other.leave()

    runner.run(twice())
    assert attempt.num_stores == before + 1


@pytest.mark.parametrize("says", [["cat drawn; false"] * 3, ["true", "submit"]])
def test_a_worker_that_keeps_no_episodes_holds_no_files_of_any(
    runner: asyncio.Runner, task: Path, says: list[str]
) -> None:
    attempt = Attempts(runner, task, episodes=0, commands=3)
    attempt(ALONE, says)
    before = attempt.num_stores
    for kind in (ORIGIN, ORIGIN, BRANCH):
        attempt(kind, says)
        assert attempt.num_stores == before


def test_the_commands_of_a_branch_count_from_the_beginning_of_its_origin(runner: asyncio.Runner, task: Path) -> None:
    attempt = Attempts(runner, task, commands=4)
    attempt(ORIGIN, [DRAWN] * 4)
    earned, read = attempt(BRANCH, [DRAWN, DRAWN, "echo one", DRAWN])
    assert read[-1] == "one"
    assert earned == 3.0


class Thinking(Saying):
    """A model that takes its time for each answer."""

    def __init__(self, says: Sequence[str], clock: list[float], answer_s: float) -> None:
        super().__init__(says)
        self._clock, self._answer_s = clock, answer_s

    async def reply(self, *asked: Any, **options: Any) -> Reply:
        self._clock[0] += self._answer_s
        return await super().reply(*asked, **options)


def test_the_time_of_a_branch_counts_from_the_beginning_of_its_origin(
    runner: asyncio.Runner, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("headrace.wings.sandboxes.environment.now_s", lambda: clock[0])
    attempt = Attempts(runner, task)
    assert attempt(ORIGIN, Thinking([DRAWN] * 3, clock, 25.0))[0] == 2.0  # the task gives 60 s
    assert attempt(BRANCH, Thinking([DRAWN, DRAWN, "true", DRAWN, "submit"], clock, 2.0))[0] == 3.0  # 10 s were left
    assert attempt(BRANCH, Thinking([DRAWN, DRAWN, "true", DRAWN, "submit"], clock, 6.0))[0] == 2.0
