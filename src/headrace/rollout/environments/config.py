"""Settings of the data (``[data]``) and of the environment (``[env]``) of a run file."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from headrace.base.config import Section, validate
from headrace.base.config.kinds import NameOf
from headrace.base.config.tls import refuse_incomplete_tls
from headrace.base.errors import ConfigError
from headrace.rollout.answers import PARSERS
from headrace.rollout.environments.agents import RESERVED, AgentConfig
from headrace.rollout.environments.curriculum import CurriculumConfig
from headrace.rollout.environments.registry import BUILT_IN, ENV_OPTIONS, ENVIRONMENTS
from headrace.rollout.scoring import AnyReward, FunctionReward, RewardConfig


class DataConfig(Section):
    """Settings of the tasks: one row is one task."""

    count: int | None = Field(default=None, ge=1)
    """The number of generated rows ``{"number": 0}``, ``{"number": 1}``, ... for environments that create their own
    tasks. It replaces ``path``."""
    eval_count: int | None = Field(default=None, ge=1)
    """The number of generated held-out rows. Their numbers follow the numbers of the ``count`` rows. It replaces
    ``eval_path``."""
    path: str = ""
    """A ``.jsonl``, ``.csv`` or ``.parquet`` file. The reward function receives its columns. Empty if the rows are
    passed in Python."""
    eval_path: str = ""
    """A file of held-out rows in the same format; empty: no evaluation."""
    prompt_column: str = "prompt"
    """The column with the prompt: text, or a list of chat messages."""
    shuffle: bool = True
    """Whether the rows are visited in a new random order in every epoch."""
    epochs: int | None = Field(default=None, ge=1)
    """The number of passes over the rows, counted in attempted groups. After the last pass the run ends with its
    current weights. Unset: the rows are visited as often as the steps need, dropped groups included."""
    curriculum: CurriculumConfig | None = None
    """Choose rows by how often they were solved, instead of each row once per epoch; unset: no curriculum."""

    @model_validator(mode="after")
    def _rows_have_one_source(self) -> Self:
        """Refuse a file of rows together with a number of generated tasks."""
        for path, count in (("path", "count"), ("eval_path", "eval_count")):
            given = self.model_dump(include={path, count})
            if given[path] and given[count]:
                raise ConfigError(
                    f"data.{path}={given[path]!r} and data.{count}={given[count]} are both set",
                    remedy="leave one of them out",
                )
        return self


class EnvConfig(Section):
    """Settings of an attempt and of its reward."""

    kind: Annotated[str, NameOf(ENVIRONMENTS, also=BUILT_IN)] = "single_turn"
    """``single_turn``: the model reads the prompt and answers once. ``env``: a class with ``reset`` and ``step``.
    ``rollout``: an ``async def rollout(task, policy)``. ``program``: a command that uses OpenAI's or Anthropic's
    protocol. ``bridge``: an environment of another library, see docs/bridges.md. Any other name: the environment that
    an installed package provides under this name, see docs/extending.md."""
    entry: str = ""
    """``file.py:name`` of that class or function. It runs in worker processes, with one object per episode. For a
    bridge: ``LIBRARY/WHAT``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For a bridge: the settings of the library and of the bridge, which docs/bridges.md describes. For an environment
    of an installed package: the arguments with which it is called."""
    command: str | tuple[str, ...] = ""
    """The program with its arguments: a list, or a text that is split as a shell does. It is started for every episode
    in a new directory; see docs/agents.md."""
    own_namespace: bool = True
    """Whether each program runs in its own user namespace, if the system allows it. Then no program can read the key or
    the memory of another program, and no program can become another user (``sudo`` fails)."""
    agents: tuple[AgentConfig, ...] = ()
    """The agents of an episode, one table ``[[env.agents]]`` per agent: the policy under training, the weights with
    which the run begins, an adapter or another model. Empty: every agent name means the policy under training."""
    workers: int = Field(default=1, ge=0)
    """The number of processes that run environments on this machine. Machines that join the run add their own
    (``launch.join``). 0 means none on this machine, and is allowed only with ``launch.join``."""
    host: str = ""
    """The address of this machine at which programs and ``policy.base_url`` reach their episodes. Unset: 127.0.0.1 or,
    if workers may run on other machines, the address by which those machines reach this one. Each episode has its own
    key."""
    tls_certificate: str = ""
    """A PEM file with a certificate. If set, programs use https, and their clients have to trust the certificate
    (``SSL_CERT_FILE``). Unset: the traffic is not encrypted."""
    tls_key: str = ""
    """The private key of that certificate, without a password."""
    concurrency: int | None = Field(default=None, ge=1)
    """The largest number of concurrent episodes in each worker. Synchronous environments run in as many threads, which
    share one interpreter. Unset: 256; for programs, each of which is a process, 32."""
    memory_mb: int | None = Field(default=None, ge=64)
    """The memory limit of one worker and all processes that it has started, in MiB. A worker that uses more is
    replaced. Unset: half of the machine's memory."""
    processes: int | None = Field(default=None, ge=1)
    """The largest number of processes that one worker may have started at once. A worker with more is replaced. Unset:
    256; for programs, 16 for each concurrent episode."""
    max_turns: int | None = Field(default=None, ge=1)
    """The largest number of answers in an episode; unset: unlimited."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The largest number of tokens sampled in all answers of an episode together; unset: unlimited."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """The largest number of tool calls in the answers of an episode. An episode with more calls receives no further
    answer. Unset: unlimited."""
    tool_parser: Annotated[str, NameOf(PARSERS, also=("auto",))] = "auto"
    """The format in which answers contain tool calls. ``hermes``: ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>``; ``json``: the answer is such an object; ``auto``: chosen from the chat template."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """The time limit of an attempt in seconds, including the time it waits for the engine. An attempt that takes longer
    fails its own episode (``env_timeout``)."""
    block_s: float = Field(default=30.0, gt=0)
    """The longest time in seconds that async code may block the event loop of its worker. Longer blocking fails the
    episode that caused it (``env_blocked``)."""
    retries: int = Field(default=0, ge=0)
    """The number of further attempts at an episode after its environment has failed (``env_error``, ``env_timeout``,
    ``env_crashed``, ``env_blocked``). Equal requests receive the answers that were sampled before."""
    reward: str = ""
    """The reward function, as ``file.py:function``: ``reward(completion, **row) -> float | None``, sync or async; or,
    over a whole group, ``reward(prompts, completions, **columns) -> list``. Empty if a function is passed in Python, or
    if the environment returns the reward. If both exist, the function's reward is used; its ``completion`` is the last
    answer."""
    rewards: tuple[RewardConfig, ...] = ()
    """The reward as a weighted sum, one table ``[[env.rewards]]`` for each component, in place of ``reward``. Each
    component has its own workers, queue and deadline."""
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """The time limit of a call of the reward function in seconds, without the time in the queue. A call that takes
    longer fails its own episode, and its worker is replaced."""
    reward_workers: int = Field(default=1, ge=1)
    """The number of processes that call the reward function."""
    reward_concurrency: int = Field(default=256, ge=1)
    """The largest number of concurrent calls in each worker. A synchronous function runs at most 16 calls at once, in
    threads that share one interpreter. For more, make it ``async`` if it waits, or raise ``reward_workers`` if it
    computes."""

    reward_memory_mb: int | None = Field(default=None, ge=64)
    """The memory limit of one scoring worker and all processes that it has started, in MiB. A worker that uses more is
    replaced. Unset: half of the machine's memory."""
    reward_processes: int = Field(default=256, ge=1)
    """The largest number of processes that one scoring worker may have started at once."""

    @property
    def components(self) -> tuple[AnyReward, ...]:
        """The components of the reward: ``rewards``, or a single component made from ``reward``. Empty if there is no
        reward function."""
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
    def _endpoint_is_used(self) -> Self:
        """Refuse an address or a certificate of the HTTP endpoint if the kind of environment has no endpoint."""
        refuse_incomplete_tls("env", self.tls_certificate, self.tls_key)
        given = [name for name in ("host", "tls_certificate") if self.model_dump(include={name})[name]]
        if given and not self.has_endpoint:
            raise ConfigError(
                f"env.{given[0]} is set, and with env.kind={self.kind!r} no program reaches an episode",
                remedy=f"leave env.{given[0]} out, or set env.kind = 'rollout' or 'program'",
            )
        return self

    @model_validator(mode="after")
    def _rewards_add_up(self) -> Self:
        """Refuse reward components with equal names, components whose weights are all 0, and settings that belong into
        the tables of the components."""
        if not self.rewards:
            return self
        labels = [reward.label for reward in self.rewards]
        duplicate = next((label for label in labels if labels.count(label) > 1), None)
        if duplicate is not None:
            raise ConfigError(f"two env.rewards are called {duplicate!r}", remedy="give one of them another name")
        if not any(reward.weight for reward in self.rewards):
            raise ConfigError("every weight of env.rewards is 0: nothing could be earned", remedy="weigh one of them")
        if self.reward:
            raise ConfigError(
                f"env.reward={self.reward!r} and env.rewards are both set",
                remedy="make the function a component: [[env.rewards]] kind = 'function', ref = 'file.py:name'",
            )
        for name in ("timeout_s", "workers", "concurrency"):
            given = getattr(self, f"reward_{name}")
            if given != type(self).model_fields[f"reward_{name}"].default:
                raise ConfigError(
                    f"env.reward_{name}={given} has no effect on env.rewards", remedy=f"set {name} in their tables"
                )
        return self

    @property
    def episodes_at_once(self) -> int:
        """The largest number of concurrent episodes in each worker."""
        return self.concurrency or (32 if self.kind == "program" else 256)

    @property
    def max_processes(self) -> int:
        """The largest number of processes that each worker may have started at once."""
        return self.processes or (16 * self.episodes_at_once if self.kind == "program" else 256)

    @property
    def argv(self) -> tuple[str, ...]:
        """``command`` as a list of arguments. Raises ``ValueError`` for text that cannot be split as a shell does."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command

    def _refuse_unusable_program(self) -> None:
        """Raise an error if ``env.kind = 'program'`` has no command that can be run."""
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
        """Whether episodes run in worker processes. Only the built-in single turn runs in the controller."""
        return self.kind != "single_turn"

    @property
    def has_endpoint(self) -> bool:
        """Whether programs can reach an episode over HTTP."""
        return self.kind not in ("single_turn", "env")

    @model_validator(mode="after")
    def _agents_are_distinct(self) -> Self:
        """Refuse agents with equal or reserved names, and agents in an environment in which only the policy can
        answer."""
        names = [agent.name for agent in self.agents]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ConfigError(f"two env.agents are called {duplicate!r}", remedy="give one of them another name")
        reserved = next((name for name in names if name in RESERVED), None)
        if reserved is not None:
            raise ConfigError(
                f"env.agents: the name {reserved!r} is taken: {', '.join(sorted(RESERVED))} are authors in every "
                "episode",
                remedy="choose another name",
            )
        if names and not self.has_endpoint:
            raise ConfigError(
                f"env.agents has no effect: with env.kind={self.kind!r} the policy under training answers alone",
                remedy="set env.kind = 'rollout' or 'program', or leave env.agents out",
            )
        return self

    @model_validator(mode="after")
    def _settings_match_kind(self) -> Self:
        """Refuse a kind of environment without the settings that it needs, and settings that this kind does not use."""
        if self.kind == "program":
            self._refuse_unusable_program()
        elif self.command:
            raise ConfigError(
                f"env.command is set, and env.kind={self.kind!r} does not use it",
                remedy="set env.kind = 'program', or leave env.command out",
            )
        elif self.kind in _ENTRIES and not self.entry:
            raise ConfigError(
                f"env.kind={self.kind!r} needs env.entry, which is not set",
                remedy=f"set env.entry = {_ENTRIES[self.kind]!r}",
            )
        if not self.own_namespace and self.kind != "program":
            raise ConfigError(
                f"env.own_namespace=False has no effect: with env.kind={self.kind!r} no programs are started",
                remedy="set env.kind = 'program', or leave env.own_namespace out",
            )
        if self.options and self.kind in BUILT_IN and self.kind != "bridge":
            raise ConfigError(
                f"env.options has no effect: env.kind={self.kind!r} takes none",
                remedy="set env.kind = 'bridge', or leave env.options out",
            )
        if self.kind not in ("program", *_ENTRIES) and self.entry:
            raise ConfigError(
                f"env.entry={self.entry!r} is set, and env.kind={self.kind!r} does not use it",
                remedy="set env.kind = 'env' or 'rollout', or leave env.entry out",
            )
        if self.kind in ENV_OPTIONS:
            validate(ENV_OPTIONS.load(self.kind), self.options, "env.options")
        return self


_ENTRIES = {"env": "my_env.py:MyEnv", "rollout": "my_env.py:rollout", "bridge": "reasoning_gym/basic_arithmetic"}
"""An example of ``env.entry`` for each ``env.kind`` that needs one."""
