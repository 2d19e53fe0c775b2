"""Settings of data and environment."""

from __future__ import annotations

import shlex
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.tls import refuse_half
from headrace.base.errors import ConfigError
from headrace.rollout.environments.agents import RESERVED, AgentConfig
from headrace.rollout.environments.curriculum import CurriculumConfig
from headrace.rollout.scoring import AnyReward, FunctionReward, RewardConfig


class DataConfig(Section):
    """Where the tasks come from: one row is one task."""

    count: int | None = Field(default=None, ge=1)
    """In place of ``path``, for environments that make their own tasks: so many rows ``{"number": 0}``, ..."""
    eval_count: int | None = Field(default=None, ge=1)
    """In place of ``eval_path``: so many held-out rows, whose numbers follow those of ``count``."""
    path: str = ""
    """A ``.jsonl``, ``.csv`` or ``.parquet`` file; its columns are what the reward sees. Empty where rows are handed
    over in Python."""
    eval_path: str = ""
    """Held-out rows in the same form; empty: no evaluation."""
    prompt_column: str = "prompt"
    """The column with the prompt: text, or a list of chat messages."""
    shuffle: bool = True
    """Visit the rows in a new random order in every epoch."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows, in groups attempted: when they are used up, the run ends with what it has learned. Unset:
    the rows are visited again as often as the steps need, dropped groups included."""
    curriculum: CurriculumConfig | None = None
    """Attempt rows by how often they are solved, instead of each once per epoch; unset: no curriculum."""

    @model_validator(mode="after")
    def _rows_have_one_source(self) -> Self:
        for path, count in (("path", "count"), ("eval_path", "eval_count")):
            given = self.model_dump(include={path, count})
            if given[path] and given[count]:
                raise ConfigError(
                    f"data.{path}={given[path]!r} and data.{count}={given[count]} are both set",
                    remedy="leave one of them out",
                )
        return self


class EnvConfig(Section):
    """What an attempt is, and how it is rewarded."""

    kind: Literal["single_turn", "env", "rollout", "program", "bridge"] = "single_turn"
    """``single_turn``: the model reads the prompt and answers once. ``env``: a class with ``reset`` and ``step``.
    ``rollout``: an ``async def rollout(task, policy)``. ``program``: a command that speaks OpenAI's or Anthropic's
    protocol. ``bridge``: an environment of another library, see docs/bridges.md."""
    entry: str = ""
    """``file.py:name`` of that class or function. It runs in processes of its own, one object per episode. Of a bridge:
    ``LIBRARY/WHAT``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a bridge: those of the library, and those that its file in ``headrace.wings.bridges`` names."""
    command: str | tuple[str, ...] = ""
    """The program, with its arguments: a list, or a text that is split at its spaces as a shell does. It is started for
    every episode, in a directory of its own; see docs/agents.md."""
    agents: tuple[AgentConfig, ...] = ()
    """Who answers under which name, a table ``[[env.agents]]`` for each: the policy under training, the weights that
    the run begins with, an adapter, another model. Empty: every name is the policy under training."""
    workers: int = Field(default=1, ge=0)
    """Processes that environments run in; those of machines that join come on top (``launch.join``). 0, only with
    ``launch.join``: none here."""
    host: str = ""
    """Address of this machine at which programs and ``policy.base_url`` reach their episodes; unset: 127.0.0.1, and
    where workers may be on other machines the address by which those reach this one. Each episode has a key."""
    tls_certificate: str = ""
    """A PEM file: they do so over https. Their clients have to trust it (``SSL_CERT_FILE``); unset: in clear text."""
    tls_key: str = ""
    """The key of that certificate, without a password."""
    concurrency: int | None = Field(default=None, ge=1)
    """Episodes at once in each worker. Of sync environments as many threads run; they share one interpreter. Unset:
    256, and of programs 32, each of which is a process of its own."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Memory of one worker and all that it has started, in MiB: it is replaced when it takes more. Unset: half of the
    machine's."""
    processes: int | None = Field(default=None, ge=1)
    """Processes that one worker may have started at once: it is replaced when it has more. Unset: 256, and of programs
    16 for each episode at once."""
    max_turns: int | None = Field(default=None, ge=1)
    """Answers that an episode may have; unset: as many as it asks for."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that may be sampled in all answers of an episode together; unset: no limit of their own."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """An episode whose answers have called more tools gets no further answer; unset: no limit."""
    tool_parser: Literal["auto", "hermes", "json"] = "auto"
    """How answers write calls of tools. ``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``;
    ``json``: the answer is such an object; ``auto``: what the chat template tells the model."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """An attempt that has not ended this long after it began, its waits for the engine included, costs its own episode
    (``env_timeout``)."""
    block_s: float = Field(default=30.0, gt=0)
    """Async code that keeps the loop of its worker from turning for this long costs its own episode
    (``env_blocked``)."""
    retries: int = Field(default=0, ge=0)
    """How often an episode is attempted again whose environment failed (``env_error``, ``env_timeout``,
    ``env_crashed``, ``env_blocked``). What is asked again is answered with what was sampled before."""
    reward: str = ""
    """``file.py:function``: ``reward(completion, **row) -> float | None``, sync or async; or, over a whole group,
    ``reward(prompts, completions, **columns) -> list``. Empty where a function is handed over in Python, or where the
    environment says what an episode earned. Where both do, this counts; its ``completion`` is the last answer."""
    rewards: tuple[RewardConfig, ...] = ()
    """The reward as a weighted sum, a table ``[[env.rewards]]`` for each component, in place of ``reward``. Each has
    workers, a queue and a deadline of its own."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """A call that has not returned this long after it began costs its own episode, and its worker is replaced. Calls
    that wait their turn do not count."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes that call the reward function."""
    reward_concurrency: int = Field(default=256, ge=1)
    """Calls at once in each worker. Of a sync function at most 16 run at once, in threads that share one interpreter:
    for more, write it ``async`` where it waits, or raise ``reward_workers`` where it computes."""

    reward_memory_mb: int | None = Field(default=None, ge=64)
    """Memory of one scoring worker and all that it has started, in MiB: it is replaced when it takes more. Unset: half
    of the machine's."""
    reward_processes: int = Field(default=256, ge=1)
    """Processes that one scoring worker may have started at once."""

    @property
    def components(self) -> tuple[AnyReward, ...]:
        """What the reward is made of: ``rewards``, or the function alone."""
        if self.rewards or not self.reward:
            return self.rewards
        return (
            FunctionReward(
                name="reward",
                ref=self.reward,
                timeout_s=self.reward_timeout_s,
                workers=self.reward_workers,
                concurrency=self.reward_concurrency,
            ),
        )

    @model_validator(mode="after")
    def _programs_can_reach_it(self) -> Self:
        refuse_half("env", self.tls_certificate, self.tls_key)
        given = [name for name in ("host", "tls_certificate") if self.model_dump(include={name})[name]]
        if given and self.kind not in ("rollout", "program", "bridge"):
            raise ConfigError(
                f"env.{given[0]} is set, and with env.kind={self.kind!r} no program reaches an episode",
                remedy=f"leave env.{given[0]} out, or set env.kind = 'rollout' or 'program'",
            )
        return self

    @model_validator(mode="after")
    def _rewards_add_up(self) -> Self:
        if not self.rewards:
            return self
        labels = [reward.label for reward in self.rewards]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ConfigError(f"two env.rewards are called {twice!r}", remedy="give one of them another name")
        if not any(reward.weight for reward in self.rewards):
            raise ConfigError("every weight of env.rewards is 0: nothing could be earned", remedy="weigh one of them")
        if self.reward:
            raise ConfigError(
                f"env.reward={self.reward!r} and env.rewards are both set",
                remedy="make the function a component: [[env.rewards]] kind = 'function', ref = 'file.py:name'",
            )
        for name in ("timeout_s", "workers", "concurrency"):
            given = {"timeout_s": self.reward_timeout_s, "workers": self.reward_workers}.get(
                name, self.reward_concurrency
            )
            if given != type(self).model_fields[f"reward_{name}"].default:
                raise ConfigError(
                    f"env.reward_{name}={given} has no effect on env.rewards", remedy=f"set {name} in their tables"
                )
        return self

    @property
    def episodes_at_once(self) -> int:
        """In each worker."""
        return self.concurrency or (32 if self.kind == "program" else 256)

    @property
    def most_processes(self) -> int:
        """Of each worker."""
        return self.processes or (16 * self.episodes_at_once if self.kind == "program" else 256)

    @property
    def argv(self) -> tuple[str, ...]:
        """``command`` in its parts."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command

    def _refuse_no_program(self) -> None:
        if self.entry:
            raise ConfigError(
                f"env.entry={self.entry!r} is set, and env.kind='program' does not use it",
                remedy="set env.command, or env.kind = 'env' or 'rollout'",
            )
        try:
            argv = self.argv
        except ValueError as error:
            raise ConfigError(
                f"env.command={self.command!r} cannot be split: {error}", remedy="close the quotation, or give a list"
            ) from None
        if not argv or not argv[0]:
            raise ConfigError(
                "env.kind='program' needs env.command, which is not set", remedy="set env.command = 'python agent.py'"
            )

    @property
    def remote(self) -> bool:
        """Whether episodes run in workers."""
        return self.kind != "single_turn"

    @model_validator(mode="after")
    def _agents_can_be_told_apart(self) -> Self:
        names = [agent.name for agent in self.agents]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two env.agents are called {twice!r}", remedy="give one of them another name")
        reserved = next((name for name in names if name in RESERVED), None)
        if reserved is not None:
            raise ConfigError(
                f"env.agents: the name {reserved!r} is taken: {', '.join(sorted(RESERVED))} are authors in every "
                "episode",
                remedy="choose another name",
            )
        if names and self.kind not in ("rollout", "program", "bridge"):
            raise ConfigError(
                f"env.agents has no effect: with env.kind={self.kind!r} the policy under training answers alone",
                remedy="set env.kind = 'rollout' or 'program', or leave env.agents out",
            )
        return self

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if self.kind == "program":
            self._refuse_no_program()
        elif self.command:
            raise ConfigError(
                f"env.command is set, and env.kind={self.kind!r} does not use it",
                remedy="set env.kind = 'program', or leave env.command out",
            )
        elif self.remote and not self.entry:
            raise ConfigError(
                f"env.kind={self.kind!r} needs env.entry, which is not set",
                remedy=f"set env.entry = {_ENTRIES[self.kind]!r}",
            )
        if self.options and self.kind != "bridge":
            raise ConfigError(
                f"env.options has no effect: env.kind={self.kind!r} takes none",
                remedy="set env.kind = 'bridge', or leave env.options out",
            )
        if not self.remote and self.entry:
            raise ConfigError(
                f"env.entry={self.entry!r} is set, and env.kind='single_turn' does not use it",
                remedy="set env.kind = 'env' or 'rollout', or leave env.entry out",
            )
        return self


_ENTRIES = {
    "env": "my_env.py:MyEnv",
    "rollout": "my_env.py:rollout",
    "bridge": "reasoning_gym/basic_arithmetic",
}
"""What ``env.entry`` looks like, by ``env.kind``."""
