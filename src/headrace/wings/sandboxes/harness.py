"""The environment ``harness``: a program written by somebody else works on a task directory, in a session.

world of the task ─fork─▶ session ── command of the program ── 127.0.0.1:PORT ─▶ endpoint of the episode
                             └─ the program has ended, or its time is over ─▶ tests ─▶ reward
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from headrace.base.errors import ConfigError, EnvError, EpisodeError, visible
from headrace.rollout.environments.base import LAST
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.scoring.sandbox import Finished, Reason
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes import SandboxSession
from headrace.wings.sandboxes.grading import grade
from headrace.wings.sandboxes.settings import WorldSettings, read_settings, task_key
from headrace.wings.sandboxes.tasks import TaskDirectory
from headrace.wings.sandboxes.world import shared_worlds

INSTRUCTION = "/tmp/headrace/instruction.md"
"""The file of a session with the instruction of the task."""
COMMAND_S = 60.0
"""The longest time of a command that makes the world of a task and has no time of its own."""
GIB = 1 << 30
OUTPUT_BYTES = 16 * MIB
"""The most that a program may write to its standard output and error; tests are run after that."""
KEPT_BYTES = 64 * MIB
"""The largest file that is kept."""
FIRST_PORT = 1024
"""The first port on which a user without rights can listen."""
QUOTED = 600
"""The number of characters of its last output that an error message quotes."""


class HarnessSettings(WorldSettings):
    """The settings of the environment: ``env.options``."""

    command: str = Field(min_length=1)
    """The command that runs the program, as for bash, in the directory of the task. ``$HEADRACE_INSTRUCTION`` is the
    file with the instruction; clients of OpenAI and Anthropic find the model by their variables."""
    processes: int = Field(default=256, ge=4)
    """The most processes and threads of one session."""
    address_space_gb: float = Field(default=256.0, gt=0)
    """The address space of each process of the program, in GiB: programs of Node.js and Go reserve far more than they
    use. What they use is bounded by ``memory_mb``."""
    variables: dict[str, str] = Field(default_factory=dict)
    """More variables of the program."""
    keep: tuple[str, ...] = ()
    """Files of a session that are copied to ``keep_in`` after the program has ended, such as its own transcript."""
    keep_in: str = ""
    """The folder of this machine for these files; each episode has a folder of its own in it, ``TASK-SEED``."""
    on_exit_code: Literal["fail", "grade"] = "fail"
    """What becomes of an episode whose program ends with another exit code than 0: it fails as ``program_failed``, or
    its tests are run, as they are after the end of its time."""

    @model_validator(mode="after")
    def _kept_files_have_a_folder(self) -> Self:
        """Refuse files to keep without a folder for them, and a folder without files."""
        if bool(self.keep) != bool(self.keep_in):
            raise ConfigError(
                f"keep={list(self.keep)} and keep_in={self.keep_in!r} belong together", remedy="set both, or none"
            )
        return self


async def run_harness(task: Mapping[str, Any], policy: EpisodePolicy, **options: Any) -> Episode:
    """Attempt the task of a row with the program of ``env.options``, and return the reward of its tests. Raises
    :class:`~headrace.base.errors.EpisodeError` where the world cannot be made or the program fails."""
    settings = read_settings(HarnessSettings, options)
    assigned = settings.read_task(task)
    endpoint = urlsplit(policy.base_url)
    address_bytes = int(settings.address_space_gb * GIB)
    forwards = ((_inner_port(endpoint), f"{endpoint.hostname}:{endpoint.port}"),)
    worlds = shared_worlds(settings.world_config(command_s=COMMAND_S, address_bytes=address_bytes, forwards=forwards))
    driver = await worlds.open()
    variables = _variables(policy, endpoint) if driver.serves_forwards else _networked(settings, policy)
    async with await worlds.enter(task_key(task), assigned) as session:
        settings.refuse_unguarded(session)
        done = await _work(session, assigned, settings, variables)
        await _keep_files(session, settings, f"{assigned.name}-{policy.seed}")
        if done.reason is Reason.EXITED and not done.ok and settings.on_exit_code == "fail":
            raise EpisodeError(
                f"the program of the task {assigned.name} ended with exit code {done.exit_code}{_quoted(done)}",
                remedy="correct env.options.command, or set env.options.on_exit_code = 'grade'",
                reason="program_failed",
            )
        graded = await grade(session, assigned)
        return Episode(reward=graded.reward, extra={LAST: graded.columns} if graded.columns else {})


async def _work(
    session: SandboxSession, task: TaskDirectory, settings: HarnessSettings, variables: Mapping[str, str]
) -> Finished:
    """Run the program on its task until it ends or its time is over."""
    await session.write({INSTRUCTION: task.instruction})
    given = {**variables, "HEADRACE_INSTRUCTION": INSTRUCTION, **settings.variables}
    session.variables = {**session.variables, **given}
    limits = replace(
        session.spec.limits,
        wall_s=task.agent_s,
        output_bytes=OUTPUT_BYTES,
    )
    return await session.run(settings.command, limits=limits)


async def _keep_files(session: SandboxSession, settings: HarnessSettings, name: str) -> None:
    """Copy the files that are to be kept to this machine; one that is not there is left out."""
    for path in settings.keep:
        try:
            content = await session.read(path, KEPT_BYTES)
        except EpisodeError as error:
            if error.reason != "session_file":
                raise
            continue
        await asyncio.to_thread(_write_file, Path(settings.keep_in, name, posixpath.basename(path)), content)


def _write_file(path: Path, content: bytes) -> None:
    """Write a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _variables(policy: EpisodePolicy, endpoint: SplitResult) -> dict[str, str]:
    """Return the variables by which a program finds the endpoint over the 127.0.0.1 of its session. Raises
    :class:`~headrace.base.errors.EnvError` for an endpoint that this name does not reach."""
    if endpoint.scheme != "http":
        raise EnvError(
            f"sessions cannot reach {policy.base_url} over their own 127.0.0.1: its certificate is of another name",
            remedy="leave env.tls_certificate out: nothing but the sessions hears it",
        )
    inside = f"http://127.0.0.1:{_inner_port(endpoint)}"
    return {name: value.replace(policy.base_url, inside) for name, value in policy.variables.items()}


def _inner_port(endpoint: SplitResult) -> int:
    """Return the port of a session that leads to the endpoint: the same one, where a user may listen at it."""
    port = endpoint.port or FIRST_PORT
    return port if port >= FIRST_PORT else port + FIRST_PORT


def _networked(settings: HarnessSettings, policy: EpisodePolicy) -> dict[str, str]:
    """Return the variables for a session that has no way to the endpoint but a network of its own. Raises
    :class:`~headrace.base.errors.EnvError` where it has none."""
    if settings.driver.get("network") in (None, False, "none"):
        raise EnvError(
            f"sessions of kind {settings.sandbox!r} have no network, and no way to the endpoint {policy.base_url}",
            remedy="choose the kind 'jail' or 'bubblewrap', or set env.options.driver.network, and env.host to an "
            "address that it reaches",
        )
    return dict(policy.variables)


def _quoted(done: Finished) -> str:
    """Return the end of a program's output, to be appended to an error; empty if it wrote nothing."""
    text = (done.stderr.strip() or done.stdout.strip())[-QUOTED:]
    return f": {visible(text)}" if text else ""
