"""Settings of a policy: the sections of a run file that sampling and training need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypedDict

from pydantic import Field, model_validator

from headrace.algo.config import AlgoConfig
from headrace.base.config import Section, merge, validate
from headrace.base.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.learner.companions.critic_config import CriticConfig
from headrace.learner.config import LearnerConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import AUTO, DeviceName
from headrace.models.hub import is_hub_name, local_directory, with_models

Table = Mapping[str, Any] | Section
"""A section as a run file has it, or as its record."""


class PolicyConfig(Section):
    """What a policy is made of."""

    model: ModelConfig
    """Which model is trained."""
    engine: EngineConfig = EngineConfig()
    """How it is sampled. Its temperature is the learner's too."""
    learner: LearnerConfig = LearnerConfig()
    """The optimizer and its schedule."""
    algo: AlgoConfig = AlgoConfig()
    """The loss of a ``forward_backward`` that names none, and the advantages of an ``advantages`` that names none."""
    total_steps: int | None = Field(default=None, ge=1)
    """Where a decaying learning rate ends."""
    seed: int = Field(default=0, ge=0)
    """With the number of prompts sampled so far it fixes every draw for which ``sample`` is given no seed."""
    device: DeviceName = AUTO
    """Where engine and learner compute: ``cpu``, ``cuda`` or ``cuda:N``; ``auto``: the first GPU that torch sees, the
    processor where there is none."""

    @model_validator(mode="after")
    def _schedule_ends(self) -> Self:
        if self.learner.schedule != "constant" and self.total_steps is None:
            raise ConfigError(
                f"learner.schedule={self.learner.schedule!r} decays, and total_steps does not say until when",
                remedy="set total_steps, or learner.schedule = 'constant'",
            )
        return self

    @model_validator(mode="after")
    def _has_one_device(self) -> Self:
        self.engine.refuse_server("a policy of a loop of its own")
        for name, given in (("engine", self.engine.device), ("learner", self.learner.device)):
            if given != AUTO:
                raise ConfigError(
                    f"{name}.device={given!r}: engine and learner of a policy share one device",
                    remedy=f"give device={given!r} instead",
                )
        return self

    @model_validator(mode="after")
    def _has_its_callers_advantages(self) -> Self:
        if self.algo.advantage.by_teacher:
            raise ConfigError(
                f"a policy of a loop of its own takes the advantages that it is given: algo.advantage="
                f"{self.algo.advantage.kind!r} is for runs",
                remedy="set algo.loss = 'distill' to learn from learner.teachers",
            )
        if self.learner.served_teachers:
            raise ConfigError(
                "a policy of a loop of its own starts no engines, and learner.teachers has one with an engine",
                remedy="leave engine out of its table: the learner computes it; or give batches whose taught column "
                "says what a teacher says",
            )
        return self

    @model_validator(mode="after")
    def _has_no_agents(self) -> Self:
        agents = list(self.model.adapter_agents)
        if agents:
            raise ConfigError(
                f"a policy of a loop of its own knows no agents, and model.lora.agents={agents}",
                remedy="leave it out; to train several adapters in a loop, take headrace.learner.adapters.Adapters",
            )
        return self

    @model_validator(mode="after")
    def _has_no_critic(self) -> Self:
        if self.algo.advantage.by_critic or self.learner.critic != CriticConfig():
            raise ConfigError(
                "a policy of a loop of its own has no critic: algo.advantage='gae' and learner.critic are for runs",
                remedy="compute values as you like and give forward_backward the advantages of headrace.algo.gae",
            )
        return self


class PolicySettings(TypedDict, total=False):
    """What may be said to :meth:`headrace.Policy.load` beside the model's directory: :class:`PolicyConfig`'s keys."""

    model: Table
    """All but its path."""
    engine: Table
    """See :class:`~headrace.engine.config.EngineConfig`."""
    learner: Table
    """See :class:`~headrace.learner.config.LearnerConfig`."""
    algo: Table
    """See :class:`~headrace.algo.config.AlgoConfig`."""
    total_steps: int
    """Where a decaying learning rate ends."""
    seed: int
    """Of the draws."""
    device: str
    """Where it computes."""


def resolve(
    base: Mapping[str, Any], settings: Mapping[str, Any], lr: float | None, loss: str | Mapping[str, Any] | None
) -> PolicyConfig:
    """``base`` under ``settings``, with ``lr`` and ``loss`` at their places. ``algo`` replaces that of the base; keys
    of other sections are laid over it one by one.

    >>> resolve({"model": {"path": "m"}}, {"engine": {"temperature": 0.8}}, 1e-5, "gspo").algo.loss.kind
    'gspo'
    """
    given = {key: _tree(value) if isinstance(value, Section) else value for key, value in settings.items()}
    for short, value, section, key in (("lr", lr, "learner", "lr"), ("loss", loss, "algo", "loss")):
        if value is None:
            continue
        table = dict(given.get(section, {}))
        if key in table:
            raise ConfigError(f"{short} and {section}.{key} are both given", remedy="give one of them")
        given[section] = {**table, key: value}
    tree = merge({key: value for key, value in base.items() if not (key == "algo" and "algo" in given)}, given)
    path = tree.get("model", {}).get("path")
    if isinstance(path, str) and path:
        found = path if is_hub_name(path) and not Path(path).exists() else str(Path(path).expanduser().resolve())
        tree = merge(tree, {"model": {"path": found}})
    return validate(PolicyConfig, tree)


def with_local_models(config: PolicyConfig) -> PolicyConfig:
    """The same settings with a directory for each model of a hub, fetched where its cache does not hold it."""
    tree = config.model_dump(mode="json")
    found = with_models(tree, lambda setting, path: local_directory(path, setting))
    return config if found == tree else validate(PolicyConfig, found)


def _tree(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_unset=not isinstance(section, AlgoConfig))
