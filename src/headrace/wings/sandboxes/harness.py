"""The environment ``harness``: an external agent program works on a task directory in a sandbox session.

world of the task ─fork─▶ session ── command of the program ── 127.0.0.1:PORT ─▶ model endpoint of the episode
                             └─ the program ends, or its time is over ─▶ tests ─▶ reward
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
from headrace.wings.sandboxes.settings import WorldSettings, get_task_key, validate_settings
from headrace.wings.sandboxes.tasks import TaskDirectory
from headrace.wings.sandboxes.world import shared_worlds

INSTRUCTION = "/tmp/headrace/instruction.md"
"""The file in a session that contains the instruction of the task."""
COMMAND_S = 60.0
"""The time limit of commands that build the environment of a task and have no limit of their own, in seconds."""
GIB = 1 << 30
OUTPUT_BYTES = 16 * MIB
"""The largest size of a program's output and error output together, in bytes; tests run after that."""
KEPT_BYTES = 64 * MIB
"""The largest size of a file to keep, in bytes."""
FIRST_PORT = 1024
"""The smallest port on which a user other than root can listen."""
QUOTED = 600
"""The number of characters of the last output that an error message quotes."""


class HarnessSettings(WorldSettings):
    """The settings of the environment: ``env.options``."""

    command: str = Field(min_length=1)
    """The command that runs the program, as for bash, in the directory of the task. ``$HEADRACE_INSTRUCTION`` is the
    file with the instruction. Environment variables tell clients of OpenAI and Anthropic the model's address."""
    processes: int = Field(default=256, ge=4)
    """The limit of processes and threads of one session."""
    address_space_gb: float = Field(default=256.0, gt=0)
    """The limit of each process's address space, in GiB. Programs of Node.js and Go reserve far more address space than
    they use; ``memory_mb`` limits the memory in use."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the program."""
    keep: tuple[str, ...] = ()
    """Paths of files in a session that are copied to ``keep_in`` after the program ends, such as its transcript."""
    keep_in: str = ""
    """The folder on this machine for the files of ``keep``; each episode has its own folder ``TASK-SEED`` in it."""
    on_exit_code: Literal["fail", "grade"] = "fail"
    """The handling of a program that ends with an exit code other than 0: the episode fails as ``program_failed``
    (``fail``), or its tests are run (``grade``), as after the time limit."""

    @model_validator(mode="after")
    def _kept_files_have_a_folder(self) -> Self:
        """Refuse files to keep without a folder for them, and a folder without files."""
        if bool(self.keep) != bool(self.keep_in):
            raise ConfigError(
                f"keep={list(self.keep)} and keep_in={self.keep_in!r} belong together", remedy="set both, or none"
            )
        return self


async def run_harness(task: Mapping[str, Any], policy: EpisodePolicy, **options: Any) -> Episode:
    """Run the program of ``env.options`` (a :class:`HarnessSettings`) on the task of a row, and return an episode with
    the reward of the tests. The program calls the model at ``policy.base_url``. Raises
    :class:`~headrace.base.errors.EpisodeError` if the environment cannot be built or the program fails."""
    settings = validate_settings(HarnessSettings, options)
    assigned = settings.read_task(task)
    endpoint = urlsplit(policy.base_url)
    address_bytes = int(settings.address_space_gb * GIB)
    forwards = ((_inner_port(endpoint), f"{endpoint.hostname}:{endpoint.port}"),)
    worlds = shared_worlds(settings.world_config(command_s=COMMAND_S, address_bytes=address_bytes, forwards=forwards))
    driver = await worlds.open()
    variables = (
        _make_variables(policy, endpoint) if driver.serves_forwards else _make_network_variables(settings, policy)
    )
    async with await worlds.enter(get_task_key(task), assigned) as session:
        settings.refuse_unguarded(session)
        done = await _run_program(session, assigned, settings, variables)
        await _keep_files(session, settings, f"{assigned.name}-{policy.seed}")
        if done.reason is Reason.EXITED and not done.ok and settings.on_exit_code == "fail":
            raise EpisodeError(
                f"the program of the task {assigned.name} ended with exit code {done.exit_code}{_quote_output(done)}",
                remedy="correct env.options.command, or set env.options.on_exit_code = 'grade'",
                reason="program_failed",
            )
        graded = await grade(session, assigned)
        return Episode(reward=graded.reward, extra={LAST: graded.columns} if graded.columns else {})


async def _run_program(
    session: SandboxSession, task: TaskDirectory, settings: HarnessSettings, variables: Mapping[str, str]
) -> Finished:
    """Write the instruction into the session, run the program with ``variables`` until it ends or its time is over, and
    return its result."""
    await session.write({INSTRUCTION: task.instruction})
    more_variables = {**variables, "HEADRACE_INSTRUCTION": INSTRUCTION, **settings.variables}
    session.variables = {**session.variables, **more_variables}
    limits = replace(session.spec.limits, wall_s=task.agent_s, output_bytes=OUTPUT_BYTES)
    return await session.run(settings.command, limits=limits)


async def _keep_files(session: SandboxSession, settings: HarnessSettings, name: str) -> None:
    """Copy the files of the setting ``keep`` to the folder ``name`` below ``keep_in``. A file that does not exist is
    skipped."""
    for path in settings.keep:
        try:
            content = await session.read(path, KEPT_BYTES)
        except EpisodeError as error:
            if error.reason != "session_file":
                raise
            continue
        await asyncio.to_thread(_write_file, Path(settings.keep_in, name, posixpath.basename(path)), content)


def _write_file(path: Path, content: bytes) -> None:
    """Write a file, and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _make_variables(policy: EpisodePolicy, endpoint: SplitResult) -> dict[str, str]:
    """Return the environment variables with the model endpoint's address as the session reaches it, over a forward of
    its 127.0.0.1. Raises :class:`~headrace.base.errors.EnvError` for an endpoint with TLS, whose certificate is not
    valid for that name."""
    if endpoint.scheme != "http":
        raise EnvError(
            f"sessions cannot reach {policy.base_url} over their own 127.0.0.1: its certificate is of another name",
            remedy="leave env.tls_certificate out: nothing but the sessions hears it",
        )
    inside = f"http://127.0.0.1:{_inner_port(endpoint)}"
    return {name: value.replace(policy.base_url, inside) for name, value in policy.variables.items()}


def _inner_port(endpoint: SplitResult) -> int:
    """Return the port of a session's 127.0.0.1 that leads to the endpoint: the endpoint's own port, or a higher port if
    users may not listen on it."""
    port = endpoint.port or FIRST_PORT
    return port if port >= FIRST_PORT else port + FIRST_PORT


def _make_network_variables(settings: HarnessSettings, policy: EpisodePolicy) -> dict[str, str]:
    """Return the environment variables with the model endpoint's address for a session that has a network but no
    forwards. Raises :class:`~headrace.base.errors.EnvError` if its network is disabled."""
    if settings.driver.get("network") in (None, False, "none"):
        raise EnvError(
            f"sessions of kind {settings.sandbox!r} have no network, and no way to the endpoint {policy.base_url}",
            remedy="choose the kind 'jail' or 'bubblewrap', or set env.options.driver.network, and env.host to an "
            "address that it reaches",
        )
    return dict(policy.variables)


def _quote_output(done: Finished) -> str:
    """Return the end of a program's output with a colon before it, to append to an error message; empty if there is no
    output."""
    text = (done.stderr.strip() or done.stdout.strip())[-QUOTED:]
    return f": {visible(text)}" if text else ""
