"""The reward of a task: its tests, in the world as the agent has left it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes import swe
from headrace.wings.sandboxes.archives import RefusedFile, packed_files, unpack
from headrace.wings.sandboxes.base import SandboxSession
from headrace.wings.sandboxes.building import task_directory, variables_of
from headrace.wings.sandboxes.outputs import TestsReward, run_tests
from headrace.wings.sandboxes.tasks import TaskDirectory

_ALONE = {"PYTHONNOUSERSITE": "1"}
"""Variables of tests: no Python executes what the agent has left in its home."""
REWARDS = "/logs/verifier"
"""The folder of the reward files."""
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)
_OF_PYTEST = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
)
"""Files by which pytest changes what it does with the tests below their folder."""
_SUMMARY = "short test summary info"
_HAS_ROOM = "head -c 65536 /dev/zero > $1"
"""Fail where the disk is full."""


async def grade(session: SandboxSession, task: TaskDirectory) -> TestsReward:
    """Run the tests of a task in the world as the agent has left it, and return the reward. Processes of the agent are
    ended before; its variables, and whatever it has put in the place of tests and rewards, are taken away. Tests that
    do not come to a result earn 0."""
    await session.end_background()
    if task.named is not None:
        session.variables = {**session.first_variables(), **_ALONE, **task.test_variables}
        return await swe.grade(session, task, task.named)
    session.variables = {**variables_of(session, task), **_ALONE, **task.test_variables}
    assert task.tests is not None
    directory = session.directory = task_directory(task, session.surroundings)
    archives = await asyncio.to_thread(_packed_tests, task)
    taken = "/tests /logs"  # links and closed folders among them
    if directory != "/":  # what pytest would take for the settings of /tests
        taken += "".join(f" /{name}" for name in _OF_PYTEST)
    await session.run(
        f"rm -f {taken}; chmod -R u+rwX {taken}; rm -rf {taken}; mkdir -p /tests {REWARDS} {shlex.quote(directory)}"
    )
    try:
        for archive in archives:
            await unpack(session, archive)
    except EpisodeError as error:
        if error.reason != "session_file":
            raise
        return TestsReward(reward=0.0, ended="the tests cannot be written")  # the agent has filled the disk
    session.directory = directory  # the agent may have taken it away, and the command above has made it again
    done = await run_tests(session, task.test_command, task.tests_s)
    if task.prints_pytest:
        return TestsReward(reward=_pytest_reward(done.stdout), ended=done.ended)
    return await _reward_of_files(session, task, done.ended)


def _packed_tests(task: TaskDirectory) -> list[bytes]:
    """Return the tests of a task as archives. Raises :class:`~headrace.base.errors.EpisodeError` for files that must
    not be copied."""
    assert task.tests is not None
    try:
        more = [(path, f"/tests/{path.name}") for path in task.more_tests]
        return [packed_files([(task.tests, "/tests")], task.tests), packed_files(more, task.tests.parent)]
    except (RefusedFile, OSError) as error:
        raise EpisodeError(
            f"the tests of the task {task.name} cannot be read: {error}",
            remedy="put plain files of its own there",
            reason="task_invalid",
        ) from None


def _pytest_reward(stdout: str) -> float:
    """Return 1 if pytest's summary names tests that passed, and none that failed; else 0.

    >>> _pytest_reward(f"{_SUMMARY} ===\\nPASSED a\\n"), _pytest_reward(f"{_SUMMARY} ===\\nPASSED a\\nFAILED b - x\\n")
    (1.0, 0.0)
    """
    _, found, summary = stdout.rpartition(_SUMMARY)
    outcomes = _OUTCOME.findall(summary) if found else []
    return float("PASSED" in outcomes and not {"FAILED", "ERROR"} & set(outcomes))


async def _reward_of_files(session: SandboxSession, task: TaskDirectory, ended: str) -> TestsReward:
    """Return the reward that the tests have written, as a number or as JSON with the key ``reward`` or one number.
    ``ended`` is the limit that ended them, if one did. Tests without a result earn 0."""
    texts = {}
    for name in ("reward.json", "reward.txt"):
        path = f"{REWARDS}/{name}"
        if (await session.run_apart("[[ -e $1 || -L $1 ]]", path)).status != 0:
            continue
        if (await session.run_apart("[[ -f $1 ]]", path)).status != 0:  # reading a pipe would never end
            ended = ended or f"{name} is no plain file"
            continue
        try:
            texts[name] = (await session.read(path, 1 << 16)).decode("utf-8", "replace").strip()
        except EpisodeError as error:
            if error.reason != "session_file":
                raise
            ended = ended or f"{name} cannot be read"
    if not texts:
        return TestsReward(reward=0.0, ended=ended)
    name, text = next(iter(texts.items()))
    if not text and not ended and (await session.run_apart(_HAS_ROOM, f"{REWARDS}/room")).status != 0:
        ended = "the disk is full"
    if not text and ended:
        return TestsReward(reward=0.0, ended=ended)
    return TestsReward(reward=_number_in(text, name, task), ended=ended)


def _number_in(text: str, name: str, task: TaskDirectory) -> float:
    """Return the reward in the ``text`` of the file ``name``. Raises :class:`~headrace.base.errors.EpisodeError` for
    text that is no reward."""
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else _only(value)
        reward = float(value)
        if not math.isfinite(reward):
            raise ValueError(text)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise EpisodeError(
            f"the tests of the task {task.name} have written {text[:80]!r} to {name}",
            remedy='have them write a number, or {"reward": 1.0}',
            reason="task_reward",
        ) from None
    return reward


def _only(values: dict[str, object]) -> object:
    """Return the only value. Raises ``ValueError`` where there are several."""
    (value,) = values.values()
    return value
