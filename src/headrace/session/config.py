"""A whole run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from headrace.algo.advantages import Outcomes
from headrace.algo.config import AlgoConfig
from headrace.config import Section, load_toml, merge, parse_override, validate
from headrace.control import RunSection
from headrace.engine import EngineConfig
from headrace.env import DataConfig, EnvConfig
from headrace.errors import ConfigError, DataError
from headrace.flow import FlowConfig
from headrace.launch import LaunchConfig
from headrace.learner import LearnerConfig
from headrace.learner.config import COLUMNS
from headrace.models import ModelConfig
from headrace.observe.config import ObserveConfig
from headrace.sync import SyncConfig

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
    engine: EngineConfig = EngineConfig()
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
        if self.flow.max_age > 0 and not self.algo.corrected and not self.algo.allow_uncorrected:
            raise ConfigError(
                f"flow.max_age={self.flow.max_age} trains tokens of older weights, and algo corrects for none of it",
                remedy="set algo.correction = 'tis' (or another), algo.old = 'engine', or flow.max_age = 0; to insist, "
                "algo.allow_uncorrected = true",
            )
        return self

    @model_validator(mode="after")
    def _learner_has_the_columns(self) -> Self:
        parts = (self.algo.loss, *self.algo.correction)
        missing = sorted({column for part in parts for column in part.columns()} - COLUMNS)
        if missing:
            raise ConfigError(
                f"algo.loss={self.algo.loss.kind!r} with its corrections reads {', '.join(missing)}, which the learner "
                "does not compute",
                remedy="choose another algo.loss or algo.correction; for log_ref set algo.loss.kl_coef = 0",
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
        ones = np.ones(2, np.int64)
        try:
            credit = self.algo.credit(Outcomes(rewards_E=np.array([0.0, 1.0]), groups_E=ones, lengths_E=ones))
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


def load_config(source: RunFile | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """A run file with ``section.key=value`` overrides laid over it, checked.

    Paths in a TOML file are relative to the file; in a tree and in ``overrides``, to the working directory.

    >>> load_config({"model": {"path": "m"}}, ["flow.max_age=0"]).flow.max_age
    0
    """
    if isinstance(source, RunConfig):
        tree = source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        tree = dict(source)
    else:
        tree = _absolute(load_toml(Path(source)), Path(source).resolve().parent)
    tree = merge(tree, *(parse_override(text) for text in overrides))
    return validate(RunConfig, _absolute(tree, Path.cwd()))


_PATHS = ("model.path", "model.lora.adapter", "data.path", "data.eval_path", "env.reward", "run.dir")


def _absolute(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    for path in _PATHS:
        *sections, key = path.split(".")
        table: Any = tree
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and value:
            change: dict[str, Any] = {key: str(directory / Path(value).expanduser())}
            for section in reversed(sections):
                change = {section: change}
            tree = merge(tree, change)
    return _with_absolute_loss(tree, directory)


def _with_absolute_loss(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A loss of the user's own is named ``file.py:function``, alone or as the ``ref`` of its table."""
    algo = tree.get("algo")
    loss = algo.get("loss") if isinstance(algo, dict) else None
    ref = loss.get("ref") if isinstance(loss, dict) else loss
    if not isinstance(ref, str) or ".py:" not in ref:
        return tree
    absolute = str(directory / Path(ref).expanduser())
    return merge(tree, {"algo": {"loss": {"ref": absolute} if isinstance(loss, dict) else absolute}})
