"""The reward of a task: its tests run in the session as the agent has left it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes import swe
from headrace.wings.sandboxes.archives import RefusedFile, pack_files, unpack
from headrace.wings.sandboxes.base import SandboxSession
from headrace.wings.sandboxes.building import collect_variables, task_directory
from headrace.wings.sandboxes.outputs import TestsReward, run_tests
from headrace.wings.sandboxes.tasks import TaskDirectory

_ALONE = {"PYTHONNOUSERSITE": "1"}
"""Variables of the tests: Python must not run files that the agent has left in its user site folder."""
REWARDS = "/logs/verifier"
"""The folder in which tests write their reward files."""
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)
_PYTEST_FILES = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
)
"""Configuration files of pytest, which would affect the tests below their folder."""
_SUMMARY = "short test summary info"
_HAS_ROOM = "head -c 65536 /dev/zero > $1"
"""A script that fails if the disk is full."""


async def grade(session: SandboxSession, task: TaskDirectory) -> TestsReward:
    """Run the tests of a task in the session as the agent has left it, and return the reward. The agent's processes and
    variables, and files that it has put in the place of tests and rewards, are removed first. Tests without a result
    give the reward 0."""
    await session.end_background()
    if task.named is not None:
        session.variables = {**session.first_variables(), **_ALONE, **task.test_variables}
        return await swe.grade(session, task, task.named)
    session.variables = {**collect_variables(session, task), **_ALONE, **task.test_variables}
    assert task.tests is not None
    directory = session.directory = task_directory(task, session.base_variables)
    archives = await asyncio.to_thread(_pack_tests, task)
    removed = "/tests /logs"  # they may be links, or folders without permissions
    if directory != "/":  # pytest would read them as the settings of /tests
        removed += "".join(f" /{name}" for name in _PYTEST_FILES)
    await session.run(
        f"rm -f {removed}; chmod -R u+rwX {removed}; rm -rf {removed}; "
        f"mkdir -p /tests {REWARDS} {shlex.quote(directory)}"
    )
    try:
        for archive in archives:
            await unpack(session, archive)
    except EpisodeError as error:
        if error.reason != "session_file":
            raise
        return TestsReward(reward=0.0, ended="the tests cannot be written")  # the agent has filled the disk
    session.directory = directory  # the agent may have removed it, and the command above made it again
    done = await run_tests(session, task.test_command, task.tests_s)
    if task.prints_pytest:
        return TestsReward(reward=_pytest_reward(done.stdout), ended=done.ended)
    return await _read_reward_files(session, task, done.ended)


def _pack_tests(task: TaskDirectory) -> list[bytes]:
    """Return the tests of a task as two tar archives. Raises :class:`~headrace.base.errors.EpisodeError` for files that
    must not be copied."""
    assert task.tests is not None
    try:
        more = [(path, f"/tests/{path.name}") for path in task.more_tests]
        return [pack_files([(task.tests, "/tests")], task.tests), pack_files(more, task.tests.parent)]
    except (RefusedFile, OSError) as error:
        raise EpisodeError(
            f"the tests of the task {task.name} cannot be read: {error}",
            remedy="put plain files of its own there",
            reason="task_invalid",
        ) from None


def _pytest_reward(stdout: str) -> float:
    """Return 1 if pytest's summary in ``stdout`` lists a passed test and no failed test, else 0."""
    _, found, summary = stdout.rpartition(_SUMMARY)
    outcomes = _OUTCOME.findall(summary) if found else []
    return float("PASSED" in outcomes and not {"FAILED", "ERROR"} & set(outcomes))


async def _read_reward_files(session: SandboxSession, task: TaskDirectory, end_reason: str) -> TestsReward:
    """Return the reward that the tests of ``task`` have written in ``session`` to ``reward.json`` or ``reward.txt``: a
    number, or JSON with the key ``reward`` or with one number. ``end_reason`` names the limit that ended the tests;
    empty: none did. Tests without a result give 0."""
    texts = {}
    for name in ("reward.json", "reward.txt"):
        path = f"{REWARDS}/{name}"
        if (await session.run_apart("[[ -e $1 || -L $1 ]]", path)).status != 0:
            continue
        if (await session.run_apart("[[ -f $1 ]]", path)).status != 0:  # reading a pipe would never end
            end_reason = end_reason or f"{name} is no plain file"
            continue
        try:
            texts[name] = (await session.read(path, 1 << 16)).decode("utf-8", "replace").strip()
        except EpisodeError as error:
            if error.reason != "session_file":
                raise
            end_reason = end_reason or f"{name} cannot be read"
    if not texts:
        return TestsReward(reward=0.0, ended=end_reason)
    name, text = next(iter(texts.items()))
    if not text and not end_reason and (await session.run_apart(_HAS_ROOM, f"{REWARDS}/room")).status != 0:
        end_reason = "the disk is full"
    if not text and end_reason:
        return TestsReward(reward=0.0, ended=end_reason)
    return TestsReward(reward=_parse_reward(text, name, task), ended=end_reason)


def _parse_reward(text: str, name: str, task: TaskDirectory) -> float:
    """Return the reward in ``text``, the content of the file ``name`` that the tests of ``task`` have written. Raises
    :class:`~headrace.base.errors.EpisodeError` if it contains no finite number."""
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
    """Return the only value of a dict. Raises ``ValueError`` if it has not exactly one."""
    (value,) = values.values()
    return value
