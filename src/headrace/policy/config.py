"""The settings of a policy (:class:`~headrace.policy.policy.Policy`): the sections of a run file that sampling and
training need, and the function that resolves them from the arguments of ``Policy.load``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypedDict

from pydantic import Field, model_validator

from headrace.algo.config import AlgoConfig
from headrace.base.config import Section, merge, validate
from headrace.base.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.learner.auxiliary.config import CriticConfig
from headrace.learner.config import LearnerConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import AUTO, DeviceName
from headrace.models.hub import change_models, is_hub_name, local_directory

Table = Mapping[str, Any] | Section
"""A section of settings: a mapping, as in a run file, or a record."""


class PolicyConfig(Section):
    """The settings of a :class:`~headrace.policy.policy.Policy`. Validators refuse settings that only a run with
    several processes supports."""

    model: ModelConfig
    """The model that is trained."""
    engine: EngineConfig = EngineConfig()
    """Settings of the engine that samples. The learner uses the same temperature."""
    learner: LearnerConfig = LearnerConfig()
    """Settings of the optimizer and its schedule."""
    algo: AlgoConfig = AlgoConfig()
    """The default loss of ``forward_backward``, and the default formula of ``advantages``."""
    total_steps: int | None = Field(default=None, ge=1)
    """Number of steps after which a decaying learning rate reaches its floor. It must be set unless the rate is
    constant."""
    seed: int = Field(default=0, ge=0)
    """The seed of calls of ``sample`` without a seed: random numbers follow from it and the number of prompts sampled
    so far."""
    device: DeviceName = AUTO
    """Device of engine and learner: ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: the first GPU that torch finds,
    otherwise the CPU."""

    @model_validator(mode="after")
    def _refuse_decay_without_end(self) -> Self:
        """Raise :class:`ConfigError` for a decaying learning rate without ``total_steps``."""
        if self.learner.schedule != "constant" and self.total_steps is None:
            raise ConfigError(
                f"learner.schedule={self.learner.schedule!r} decays, and total_steps does not say until when",
                remedy="set total_steps, or learner.schedule = 'constant'",
            )
        return self

    @model_validator(mode="after")
    def _refuse_other_devices(self) -> Self:
        """Raise :class:`ConfigError` for an engine that is a server, and for a separate device of the engine or the
        learner."""
        self.engine.refuse_server("a policy of a loop of its own")
        for name, device_name in (("engine", self.engine.device), ("learner", self.learner.device)):
            if device_name != AUTO:
                raise ConfigError(
                    f"{name}.device={device_name!r}: engine and learner of a policy share one device",
                    remedy=f"give device={device_name!r} instead",
                )
        return self

    @model_validator(mode="after")
    def _refuse_settings_of_runs(self) -> Self:
        """Raise :class:`ConfigError` for what only a run has: advantages and teachers that it computes, adapters of
        several agents, and a critic (a value model)."""
        if self.algo.advantage.by_teacher:
            raise ConfigError(
                f"a policy of a loop of its own takes the advantages that it is given: algo.advantage="
                f"{self.algo.advantage.kind!r} is for runs",
                remedy="set algo.loss = 'distill' to learn from learner.teachers",
            )
        if self.learner.served_teachers:
            raise ConfigError(
                "a policy of a loop of its own starts no engines, and learner.teachers has one with an engine",
                remedy="leave engine out of its table: the learner computes it; or give batches with teacher_scores",
            )
        if agents := list(self.model.adapter_agents):
            raise ConfigError(
                f"a policy of a loop of its own knows no agents, and model.lora.agents={agents}",
                remedy="leave it out; to train several adapters in a loop, take headrace.learner.adapters.Adapters",
            )
        if self.algo.advantage.by_critic or self.learner.critic != CriticConfig():
            raise ConfigError(
                "a policy of a loop of its own has no critic: algo.advantage='gae' and learner.critic are for runs",
                remedy="compute values as you like and give forward_backward the advantages of headrace.algo.gae",
            )
        return self


class PolicySettings(TypedDict, total=False):
    """The keyword arguments of :meth:`headrace.Policy.load`, which are the keys of :class:`PolicyConfig`."""

    model: Table
    """Settings of the model, except its path, which is a separate argument."""
    engine: Table
    """Settings of the engine; see :class:`~headrace.engine.config.EngineConfig`."""
    learner: Table
    """Settings of the learner; see :class:`~headrace.learner.config.LearnerConfig`."""
    algo: Table
    """Settings of the algorithm; see :class:`~headrace.algo.config.AlgoConfig`."""
    total_steps: int
    """Number of steps after which a decaying learning rate reaches its floor."""
    seed: int
    """Seed of the random numbers of sampling."""
    device: str
    """Device on which the engine and the learner compute."""


def resolve(
    base: Mapping[str, Any], settings: Mapping[str, Any], lr: float | None, loss: str | Mapping[str, Any] | None
) -> PolicyConfig:
    """Return the settings of a policy. ``base`` are the settings of a saved policy, as nested dicts. ``settings``
    override them, ``lr`` overrides ``learner.lr`` and ``loss`` overrides ``algo.loss``; ``None`` overrides nothing. A
    section ``algo`` in ``settings`` replaces the whole section of ``base``; other sections are merged key by key. A
    local path of the model becomes absolute. Raises :class:`~headrace.base.errors.ConfigError` for invalid settings.

    >>> resolve({"model": {"path": "m"}}, {"engine": {"temperature": 0.8}}, 1e-5, "gspo").algo.loss.kind
    'gspo'
    """
    overrides = {
        key: _section_as_dict(value) if isinstance(value, Section) else value for key, value in settings.items()
    }
    for short, value, section, key in (("lr", lr, "learner", "lr"), ("loss", loss, "algo", "loss")):
        if value is None:
            continue
        table = dict(overrides.get(section, {}))
        if key in table:
            raise ConfigError(f"{short} and {section}.{key} are both given", remedy="give one of them")
        overrides[section] = {**table, key: value}
    tree = merge({key: value for key, value in base.items() if not (key == "algo" and "algo" in overrides)}, overrides)
    path = tree.get("model", {}).get("path")
    if isinstance(path, str) and path:
        resolved = path if is_hub_name(path) and not Path(path).exists() else str(Path(path).expanduser().resolve())
        tree = merge(tree, {"model": {"path": resolved}})
    return validate(PolicyConfig, tree)


def with_local_models(config: PolicyConfig) -> PolicyConfig:
    """Return the settings ``config`` with each hub name of a model replaced by a local directory. A model that is not
    in the cache is downloaded."""
    tree = config.model_dump(mode="json")
    local = change_models(tree, lambda setting, path: local_directory(path, setting))
    return config if local == tree else validate(PolicyConfig, local)


def _section_as_dict(section: Section) -> dict[str, Any]:
    """Return a section as nested dicts with only the keys that were set, so that it does not override other keys. The
    section ``algo``, which replaces the whole section of a saved policy, is returned with all keys."""
    return section.model_dump(mode="json", exclude_unset=not isinstance(section, AlgoConfig))
