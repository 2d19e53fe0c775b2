"""A whole run file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.groups import Gdpo
from headrace.algo.advantages.tokens import Prpo
from headrace.algo.config import AlgoConfig
from headrace.base.config import Section, leaves, load_toml, merge, parse_override, validate
from headrace.base.errors import ConfigError, DataError
from headrace.control import RunSection
from headrace.engine.fleet import FleetConfig
from headrace.flow import FlowConfig
from headrace.flow.filters import LengthFilter
from headrace.launch.config import LaunchConfig
from headrace.learner import LearnerConfig
from headrace.learner.companions.critic_config import CriticConfig
from headrace.learner.companions.fit import refuse_misfit
from headrace.models import ModelConfig
from headrace.models.hub import MODEL_PATHS, MODEL_TABLES, is_hub_name
from headrace.rollout.environments import DataConfig, EnvConfig
from headrace.rollout.environments.program import with_absolute_files
from headrace.run.observe.config import ObserveConfig
from headrace.run.session.agent_fit import refuse_strange_agents
from headrace.run.session.credit_fit import refuse_deaf_losses, refuse_pivots, refuse_ungraded
from headrace.run.session.engine_fit import refuse_incapable
from headrace.sync import SyncConfig
from headrace.wings.cluster.ray.fit import refuse_misfit as refuse_misfit_on_ray
from headrace.wings.recipes.systems import recipe

RunFile = str | Path | Mapping[str, Any]
"""The path of a TOML file, or its tree."""


class RunConfig(Section):
    """Everything that a run file can say."""

    model: ModelConfig
    """Which model is trained."""
    data: DataConfig = DataConfig()
    """The rows: to train on, and held out."""
    env: EnvConfig = EnvConfig()
    """What is asked of the model, and what it earns."""
    engine: FleetConfig = FleetConfig()
    """How completions are sampled."""
    flow: FlowConfig = FlowConfig()
    """How much is in flight, how old a token may be, what makes a batch."""
    algo: AlgoConfig = AlgoConfig()
    """What is learned from rewards: advantages, loss, corrections."""
    learner: LearnerConfig = LearnerConfig()
    """The optimizer and its schedule."""
    sync: SyncConfig = SyncConfig()
    """How new weights reach the engine."""
    launch: LaunchConfig = LaunchConfig()
    """Where the parts run, and on how many cores."""
    observe: ObserveConfig = ObserveConfig()
    """What is shown and kept of the run."""
    run: RunSection = RunSection()
    """How long, from which seed, where to."""

    @model_validator(mode="after")
    def _stale_tokens_are_corrected(self) -> Self:
        if self.flow.greatest_age > 0 and not self.algo.corrected and not self.algo.allow_uncorrected:
            raise ConfigError(
                f"flow.max_age={self.flow.max_age} trains tokens of older weights, and algo corrects for none of it",
                remedy="set algo.correction = 'tis' (or another), algo.old = 'engine', or flow.max_age = 0; to insist, "
                "algo.allow_uncorrected = true",
            )
        return self

    @model_validator(mode="after")
    def _masters_are_more_precise(self) -> Self:
        if not self.learner.memory.masters and self.model.dtype == "float32":
            raise ConfigError(
                "learner.memory.masters=false has no effect: with model.dtype='float32' the optimizer keeps no copy",
                remedy="leave it out, or set model.dtype = 'bfloat16'",
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_there(self) -> Self:
        if self.sync.codec == "adapter" and self.model.lora is None:
            raise ConfigError(
                "sync.codec='adapter' sends adapters alone, and model.lora is not set",
                remedy="set model.lora, or sync.codec = 'full'",
            )
        return self

    @model_validator(mode="after")
    def _engine_has_the_same_weights(self) -> Self:
        if self.model.deterministic and self.sync.codec.startswith("cast"):
            raise ConfigError(
                f"model.deterministic=true with sync.codec={self.sync.codec!r}: weights that are rounded on their way "
                "give other log-probabilities than the learner's",
                remedy="set sync.codec = 'full' or 'delta', or leave model.deterministic out",
            )
        return self

    @model_validator(mode="after")
    def _agents_are_there(self) -> Self:
        refuse_strange_agents(self.model, self.env)
        return self

    @model_validator(mode="after")
    def _commits_roll(self) -> Self:
        rolling, count = self.sync.rolling, self.engine.count
        if rolling is not None and rolling > count:
            raise ConfigError(
                f"sync.rolling={rolling} engines are to commit at once, and engine.count={count}",
                remedy=f"set sync.rolling <= {count}, or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_a_cluster(self) -> Self:
        refuse_misfit_on_ray(self.launch, self.engine, self.learner, self.sync)
        return self

    @model_validator(mode="after")
    def _others_have_something_to_do(self) -> Self:
        join, env = self.launch.join, self.env
        if join and not env.remote:
            raise ConfigError(
                f"launch.join={join!r}, and env.kind={env.kind!r} runs in no worker that another machine could bring",
                remedy="leave launch.join out, or set env.kind = 'env', 'rollout', 'program' or 'bridge'",
            )
        if not env.workers and not join:
            raise ConfigError(
                "env.workers=0 keeps no environment on this machine, and no other may join",
                remedy="set env.workers >= 1, or launch.join = 'ADDRESS:PORT'",
            )
        return self

    @model_validator(mode="after")
    def _filters_act(self) -> Self:
        for place, each in enumerate(self.flow.filters):
            longest = each.max_tokens if isinstance(each, LengthFilter) else None
            if longest is not None and longest >= self.engine.max_new_tokens and self.env.kind == "single_turn":
                raise ConfigError(
                    f"flow.filters[{place}] 'length': max_tokens={longest}, and no answer has more than "
                    f"engine.max_new_tokens={self.engine.max_new_tokens}",
                    remedy=f"set max_tokens < {self.engine.max_new_tokens}, or leave it out: what was cut off is meant",
                )
        return self

    @model_validator(mode="after")
    def _loss_heeds_rewards(self) -> Self:
        refuse_deaf_losses(self.algo, self.learner)
        return self

    @model_validator(mode="after")
    def _learner_has_the_columns(self) -> Self:
        refuse_misfit(self.algo, self.learner)
        return self

    @model_validator(mode="after")
    def _rewards_are_weighed_once(self) -> Self:
        advantage, rewards = self.algo.advantage, self.env.rewards
        if not isinstance(advantage, Gdpo) or not rewards:
            return self
        if advantage.weights is None and len({reward.weight for reward in rewards}) > 1:
            raise ConfigError(
                "algo.advantage='gdpo' normalises each reward by itself: the weights of env.rewards do not count",
                remedy=f"set algo.advantage.weights = {[reward.weight for reward in rewards]}",
            )
        if advantage.weights is not None and len(advantage.weights) != len(rewards):
            raise ConfigError(
                f"algo.advantage.weights has {len(advantage.weights)} entries for {len(rewards)} env.rewards",
                remedy="give one for each, in order",
            )
        return self

    @model_validator(mode="after")
    def _episodes_have_the_columns(self) -> Self:
        """Tried on two episodes with what single-turn episodes have: rewards, groups, lengths."""
        advantage = self.algo.advantage
        if advantage.stateful:
            raise ConfigError(
                f"algo.advantage={advantage.kind!r} keeps a baseline between batches, which a run does not carry on",
                remedy="choose another algo.advantage",
            )
        if isinstance(advantage, Prpo):
            refuse_ungraded(self.algo, self.env)
            return self
        if advantage.by_critic or advantage.by_teacher:
            return self
        ones = np.ones(2, np.int64)
        try:
            parts_EK = np.array([[0.0], [1.0]]).repeat(max(1, len(self.env.rewards)), axis=1)
            outcomes = Outcomes(rewards_E=np.array([0.0, 1.0]), parts_EK=parts_EK, groups_E=ones, lengths_E=ones)
            credit = self.algo.credit(outcomes)
        except DataError as error:
            raise ConfigError(
                f"algo.advantage={advantage.kind!r} does not fit env.kind={self.env.kind!r}: {error.problem}",
                remedy="choose another algo.advantage",
            ) from None
        if advantage.per_token or credit.shape != (2,):
            raise ConfigError(
                f"algo.advantage={advantage.kind!r} credits single tokens, and a run credits whole episodes",
                remedy="choose another algo.advantage",
            )
        return self

    @model_validator(mode="after")
    def _branches_can_be_compared(self) -> Self:
        refuse_pivots(self.flow, self.algo, self.env, self.engine)
        return self

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        refuse_incapable(self)
        return self

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> Self:
        least = "group_size" if self.flow.group_size == 1 else "min_episodes"
        if self.algo.advantage.compares_siblings and self.flow.min_episodes == 1:
            raise ConfigError(
                f"flow.{least}=1 with algo.advantage={self.algo.advantage.kind!r}, which compares the episodes of a "
                "group: one by itself earns no credit",
                remedy=f"set flow.{least} >= 2, or algo.advantage = 'gae' or 'reinforce_pp'",
            )
        return self

    @model_validator(mode="after")
    def _critic_is_asked_for(self) -> Self:
        critic, advantage = self.learner.critic, self.algo.advantage
        if not advantage.by_critic:
            changed = [key for key, value in critic.model_dump().items() if value != CriticConfig().model_dump()[key]]
            if changed:
                raise ConfigError(
                    f"learner.critic.{changed[0]}={critic.model_dump()[changed[0]]!r} has no effect: "
                    f"algo.advantage={advantage.kind!r} has no critic",
                    remedy="set algo.advantage = 'gae', or leave [learner.critic] out",
                )
            return self
        if self.learner.parallel.world > 1:
            raise ConfigError(
                f"algo.advantage={advantage.kind!r} trains a critic, which is for one process, and learner.parallel "
                f"asks for {self.learner.parallel.world} ranks",
                remedy="leave learner.parallel out, or choose another algo.advantage",
            )
        if critic.warmup_steps >= self.run.steps:
            raise ConfigError(
                f"learner.critic.warmup_steps={critic.warmup_steps} leaves none of run.steps={self.run.steps} to the "
                "policy",
                remedy="set run.steps above learner.critic.warmup_steps",
            )
        return self


def load_config(source: RunFile | RunConfig, overrides: Sequence[str] = (), *, like: str = "") -> RunConfig:
    """A run file with ``section.key=value`` overrides laid over it, checked. What neither says is as in the recipe that
    ``like`` names (:mod:`headrace.wings.recipes.systems`).

    Paths in a TOML file are relative to the file; in a tree and in ``overrides``, to the working directory.

    >>> load_config({"model": {"path": "m"}}, ["flow.max_age=0"]).flow.max_age
    0
    """
    tree = run_tree(source)
    settings = recipe(like).settings if like else {}
    tree = _absolute(merge(settings, tree, *(parse_override(text) for text in overrides)), Path.cwd())
    try:
        return validate(RunConfig, tree)
    except ConfigError as error:
        _tell_whose(error, settings, tree, like)
        raise


def run_tree(source: RunFile | RunConfig) -> dict[str, Any]:
    """What a run file says; its paths are absolute where it is a file."""
    if isinstance(source, RunConfig):
        return source.model_dump(mode="json")
    if isinstance(source, Mapping):
        return dict(source)
    return _absolute(load_toml(Path(source)), Path(source).resolve().parent)


def _tell_whose(error: ConfigError, settings: Mapping[str, Any], tree: Mapping[str, Any], like: str) -> None:
    """Add which of the settings that ``error`` names stand in no file of the reader's: the recipe brought them."""
    brought = {f"{path}={value!r}" for path, value in leaves(settings).items() if path in str(error)}
    kept = sorted(brought & {f"{path}={value!r}" for path, value in leaves(tree).items()})
    if kept:
        error.problem += f" (the recipe {like!r} says {', '.join(kept)})"
        error.remedy += ", or take another recipe"


_PATHS = (
    *MODEL_PATHS,
    *("data.path", "data.eval_path", "env.reward", "env.entry", "run.dir"),
)


def _absolute(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    for path in _PATHS:
        *sections, key = path.split(".")
        table: Any = tree
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and value:
            bridged = path == "env.entry" and table.get("kind") == "bridge"
            found = _absolute_bridge(value, directory) if bridged else _absolute_path(value, directory)
            found = _absolute_model(value, directory) if path in MODEL_PATHS else found
            change: dict[str, Any] = {key: found}
            for section in reversed(sections):
                change = {section: change}
            tree = merge(tree, change)
    tree = _with_absolute_tables(_with_absolute_loss(tree, directory), directory)
    return _with_absolute_command(tree, directory)


def _absolute_path(path: str, directory: Path) -> str:
    return str(directory / Path(path).expanduser())


def _absolute_model(path: str, directory: Path) -> str:
    """A name of a hub stays as it is where no directory is meant."""
    found = _absolute_path(path, directory)
    return path if is_hub_name(path) and not Path(found).exists() else found


def _with_absolute_command(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A program runs in a directory of its own: the files that its command names are found from there, too."""
    env = tree.get("env")
    command = env.get("command") if isinstance(env, dict) else None
    try:
        parts = shlex.split(command) if isinstance(command, str) else command
    except ValueError:  # said where settings are checked
        return tree
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return tree
    found = with_absolute_files(parts, directory)
    return merge(tree, {"env": {"command": found}}) if found else tree


def _absolute_bridge(entry: str, directory: Path) -> str:
    """``LIBRARY/WHAT``, where what may be a command or ``file.py:name``: files that it names are found from there."""
    library, _, what = entry.partition("/")
    try:
        parts = shlex.split(what)
    except ValueError:  # said where the command is started
        return entry
    files = [part.rpartition(":")[0] if ".py:" in part else part for part in parts]
    found = [
        str(directory / part) if file.endswith(".py") and os.path.isfile(directory / file) else part
        for part, file in zip(parts, files, strict=True)
    ]
    return entry if found == parts else f"{library}/{shlex.join(found) if len(found) > 1 else found[0]}"


_TABLES = (("env", "rewards", "ref"), *MODEL_TABLES)
"""Lists of tables in sections, and their key that names a file: ``file.py:function``, or a directory."""


def _with_absolute_tables(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    for section, name, key in _TABLES:
        table = tree.get(section)
        tables = table.get(name) if isinstance(table, dict) else None
        if not isinstance(tables, list | tuple):
            continue
        absolute_of = _absolute_path if key == "ref" else _absolute_model
        absolute = [
            {**each, key: absolute_of(each[key], directory)}
            if isinstance(each, dict) and isinstance(each.get(key), str) and each[key]
            else each
            for each in tables
        ]
        tree = merge(tree, {section: {name: absolute}})
    return tree


def _with_absolute_loss(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A loss of the user's own is named ``file.py:function``, alone or as the ``ref`` of its table."""
    algo = tree.get("algo")
    loss = algo.get("loss") if isinstance(algo, dict) else None
    ref = loss.get("ref") if isinstance(loss, dict) else loss
    if not isinstance(ref, str) or ".py:" not in ref:
        return tree
    absolute = str(directory / Path(ref).expanduser())
    return merge(tree, {"algo": {"loss": {"ref": absolute} if isinstance(loss, dict) else absolute}})
