"""The settings and the row format that all environments of task directories share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from headrace.base.config import Section, validate
from headrace.base.errors import ConfigError, DataError, EnvError, EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes import LIMITS, SANDBOXES, SandboxSession, swe
from headrace.wings.sandboxes.tasks import TaskDirectory, open_task
from headrace.wings.sandboxes.world import WorldConfig

S = TypeVar("S", bound="WorldSettings")


class WorldSettings(Section):
    """The settings of the worlds of tasks: a part of ``env.options``."""

    sandbox: str = "jail"
    """The kind of sandbox: ``jail``, ``bubblewrap``, or a kind that an installed package registers."""
    driver: dict[str, Any] = Field(default_factory=dict)
    """The settings of the kind of sandbox, such as ``client`` of docker."""
    image: Literal["none", "machine", "task"] = "none"
    """The handling of tasks that name an image. ``none``: their episodes fail with that reason. ``machine``: the system
    of this machine replaces the image, and the steps of the Dockerfile run in it. ``task``: sessions start from the
    image, and the steps run in it; only some kinds have images, such as docker."""
    image_names: str = "swebench/sweb.eval.x86_64.{id_1776}:latest"
    """The image of a row of SWE-bench that does not name an image. ``{instance_id}`` is its id; ``{id_1776}`` and
    ``{id_s}`` are the id in lower case with ``_1776_`` or ``_s_`` for ``__``."""
    repositories: str = ""
    """The folder of the repositories (``OWNER/NAME`` or ``OWNER__NAME``) of rows of SWE-bench, for ``image =
    "machine"``."""
    test_command: str = ""
    """The command that runs the tests of a row of SWE-bench; the test files are appended to it; unset: pytest."""
    offline: bool = False
    """Whether tasks that request a network are attempted without a network; if not, their episodes fail."""
    memory_mb: int = Field(default=1024, ge=64)
    """The limit of memory of one session, in MiB; a task that requests less has a lower limit."""
    disk_mb: int = Field(default=512, ge=1)
    """The limit of the size of one session's files, and of its environment's files, in MiB each; they use memory."""
    processes: int = Field(default=64, ge=4)
    """The limit of processes of one session."""
    loopback: bool = False
    """Whether programs in a session reach each other over 127.0.0.1, such as a server that the agent starts."""
    readable: tuple[str, ...] = ()
    """Paths of this machine that sessions can read, in addition to the system and this Python."""
    may_lack: tuple[str, ...] = ("user", "network", "process numbers", "overlay")
    """Guards that this system may lack; an episode fails if another guard is missing. Without a network
    namespace, the filter of system calls blocks the network."""
    environments: int = Field(default=32, ge=1)
    """The number of tasks whose built environments each worker caches, so that an episode begins with a fork."""

    @model_validator(mode="after")
    def _sandbox_is_known(self) -> Self:
        """Refuse a kind of sandbox that no package offers."""
        SANDBOXES.offer(self.sandbox)
        return self

    def world_config(
        self,
        *,
        command_s: float,
        episodes: int = 0,
        address_bytes: int | None = None,
        forwards: tuple[tuple[int, str], ...] = (),
    ) -> WorldConfig:
        """Return the configuration of the worlds of all tasks. ``command_s`` is the default time limit of a command in
        seconds, ``address_bytes`` the limit of each process's address space (``None``: the memory limit),
        ``episodes`` the number of ended episodes whose moments are kept, and ``forwards`` the TCP forwards of sessions
        (port and address), for drivers that serve forwards."""
        limits = replace(
            LIMITS,
            wall_s=command_s,
            memory_bytes=self.memory_mb * MIB,
            disk_bytes=self.disk_mb * MIB,
            file_bytes=self.disk_mb * MIB,
            processes=self.processes,
            address_bytes=address_bytes,
        )
        return WorldConfig(
            kind=self.sandbox,
            readable=self.readable,
            limits=limits,
            kept_environments=self.environments,
            episodes=episodes,
            options=json.dumps(self.driver, sort_keys=True),
            images=self.image == "task",
            repositories=self.repositories,
            loopback=self.loopback,
            forwards=forwards,
        )

    def read_task(self, row: Mapping[str, Any]) -> TaskDirectory:
        """Return the task of a row. Raises :class:`~headrace.base.errors.EpisodeError` if these settings cannot attempt
        it."""
        if "directory" not in row and not swe.is_row(row):
            raise EpisodeError(
                "the row has no column 'directory', nor those of SWE-bench",
                remedy="set data.path to task directories, or to rows with instance_id and FAIL_TO_PASS",
                reason="task_invalid",
            )
        try:
            if "directory" in row:
                task = open_task(Path(row["directory"]))
            else:
                task = swe.open_row(row, self.image_names, self.test_command)
        except DataError as error:
            raise EpisodeError(error.problem, remedy=error.remedy, reason="task_invalid") from None
        if task.image and self.image == "none":
            raise EpisodeError(
                f"the task {task.name} needs the image {task.image!r}, which sandboxes of kind "
                f"{self.sandbox!r} do not have",
                remedy="set env.options.image = 'task' for a kind with images, or 'machine' if the system of this "
                "machine can take its place",
                reason="task_image",
            )
        if task.asks_network and not self.offline:
            raise EpisodeError(
                f"the task {task.name} requests a network, and sessions have none",
                remedy="set env.options.offline = true if it can be done without",
                reason="task_network",
            )
        return task

    def refuse_unguarded(self, session: SandboxSession) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` if the session lacks a guard that ``may_lack`` does
        not list."""
        refused = {name: why for name, why in session.missing.items() if name not in self.may_lack}
        if refused:
            words = "; ".join(f"{name} ({why})" for name, why in refused.items())
            raise EpisodeError(
                f"the sandbox lacks guards on this machine: {words}",
                remedy=f"allow them, or accept it: env.options.may_lack = {[*self.may_lack, *refused]}",
                reason="sandbox_weak",
            )


def validate_settings(section: type[S], options: Mapping[str, Any]) -> S:
    """Return ``options``, the table ``env.options``, as a validated record of the class ``section``. Raises
    :class:`~headrace.base.errors.EnvError` for an invalid setting."""
    try:
        return validate(section, options, "env.options")
    except ConfigError as error:
        raise EnvError(error.problem, remedy=error.remedy) from None


def get_task_key(row: Mapping[str, Any]) -> str:
    """Return the key of a row's task, unique among the tasks of the run: its directory, or its id."""
    return str(row.get("directory", row.get("instance_id")))
