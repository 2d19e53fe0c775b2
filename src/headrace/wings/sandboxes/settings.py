"""What the environments of task directories have in common: the settings of their worlds, and the reading of a row."""

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
    """The kind of sandbox: ``jail``, ``bubblewrap``, or what an installed package offers."""
    driver: dict[str, Any] = Field(default_factory=dict)
    """The settings of the kind of sandbox, such as ``client`` of docker."""
    image: Literal["none", "machine", "task"] = "none"
    """What becomes of tasks that name an image. ``none``: their episodes fail by name. ``machine``: the system of this
    machine takes the place of the image, and the steps of the Dockerfile are carried out in it. ``task``: sessions
    begin in the image, and the steps are carried out in it; only some kinds have images, such as docker."""
    image_names: str = "swebench/sweb.eval.x86_64.{id_1776}:latest"
    """The image of a row of SWE-bench that names none. ``{instance_id}`` is its id, ``{id_1776}`` and ``{id_s}`` are
    the id in small letters with ``_1776_`` or ``_s_`` for ``__``."""
    repositories: str = ""
    """The folder of the repositories (``OWNER/NAME`` or ``OWNER__NAME``) of rows of SWE-bench, for ``image =
    "machine"``."""
    test_command: str = ""
    """The command that runs the named tests of a row of SWE-bench, before the files of the tests; unset: pytest."""
    offline: bool = False
    """Whether tasks that ask for a network are attempted without one; if not, their episodes fail by name."""
    memory_mb: int = Field(default=1024, ge=64)
    """The most memory of one session, in MiB; a task that asks for less gets less."""
    disk_mb: int = Field(default=512, ge=1)
    """The most files of one session and of its environment, in MiB each; they take memory."""
    processes: int = Field(default=64, ge=4)
    """The most processes of one session."""
    loopback: bool = False
    """Whether programs in a session reach each other over 127.0.0.1, such as a server that the agent starts."""
    readable: tuple[str, ...] = ()
    """Paths of this machine that sessions can read, besides the system and this Python."""
    may_lack: tuple[str, ...] = ("user", "network", "process numbers", "overlay")
    """Guards that this system may refuse; an episode fails if another one is missing. A missing network namespace is
    replaced by the filter of system calls."""
    environments: int = Field(default=32, ge=1)
    """The number of tasks whose environments are kept by each worker, so that an episode begins with a fork."""

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
        """Return what the worlds of all tasks have in common, whose commands take ``command_s`` seconds at most unless
        they are given other limits, and whose processes have an address space of ``address_bytes``. The moments of
        ``episodes`` ended episodes are kept. ``forwards`` are the ways out of their
        sessions, for drivers that have such ways."""
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
            kept=self.environments,
            episodes=episodes,
            options=json.dumps(self.driver, sort_keys=True),
            images=self.image == "task",
            repositories=self.repositories,
            loopback=self.loopback,
            forwards=forwards,
        )

    def read_task(self, row: Mapping[str, Any]) -> TaskDirectory:
        """Return the task of a row. Raises :class:`~headrace.base.errors.EpisodeError` for one that cannot be
        attempted."""
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
                f"the task {task.name} asks for a network, and sessions have none",
                remedy="set env.options.offline = true if it can be done without",
                reason="task_network",
            )
        return task

    def refuse_unguarded(self, session: SandboxSession) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` where the session lacks a guard that it must have."""
        refused = {name: why for name, why in session.missing.items() if name not in self.may_lack}
        if refused:
            words = "; ".join(f"{name} ({why})" for name, why in refused.items())
            raise EpisodeError(
                f"the sandbox lacks guards on this machine: {words}",
                remedy=f"allow them, or accept it: env.options.may_lack = {[*self.may_lack, *refused]}",
                reason="sandbox_weak",
            )


def read_settings(kind: type[S], options: Mapping[str, Any]) -> S:
    """Return ``env.options`` as settings of this kind. Raises :class:`~headrace.base.errors.EnvError` for one that
    cannot be used."""
    try:
        return validate(kind, options, "env.options")
    except ConfigError as error:
        raise EnvError(error.problem, remedy=error.remedy) from None


def task_key(row: Mapping[str, Any]) -> str:
    """Return the name of a row's task among those of the run."""
    return str(row.get("directory", row.get("instance_id")))
