"""The record of all sections of a run file, :class:`RunSections`, whose settings the rules in this package compare.

Names of policies: μ is the distribution that sampled a token, as the engine recorded it; π_old is the policy in the
denominator of the loss's ratio, which the setting ``algo.old`` chooses.
"""

from __future__ import annotations

from typing import Any

import pydantic

from headrace.algo.config import AlgoConfig, for_old_tokens
from headrace.base.config import Section
from headrace.control import RunSection
from headrace.engine.fleet import FleetConfig
from headrace.flow import FlowConfig
from headrace.launch.config import LaunchConfig
from headrace.learner import LearnerConfig
from headrace.learner.auxiliary.config import MOST_VERSIONS
from headrace.models import ModelConfig
from headrace.rollout.environments import DataConfig, EnvConfig
from headrace.run.observe.config import ObserveConfig
from headrace.sync import SyncConfig


class RunSections(Section):
    """All sections of a run file as one record; each section is validated by itself. The subclass ``RunConfig`` also
    checks the rules between sections."""

    model: ModelConfig
    """The model that is trained."""
    data: DataConfig = DataConfig()
    """The rows to train on, and the held-out rows."""
    env: EnvConfig = EnvConfig()
    """The environment: how the model is prompted, and how its answers are rewarded."""
    engine: FleetConfig = FleetConfig()
    """The engines that sample completions, and the sampling parameters."""
    flow: FlowConfig = FlowConfig()
    """The number of groups in flight, the staleness bound, and the assembly of batches."""
    algo: AlgoConfig = AlgoConfig()
    """The learning from rewards: advantages, loss and corrections."""
    learner: LearnerConfig = LearnerConfig()
    """The optimizer, its schedule, and the teachers, references and critic of the learner."""
    sync: SyncConfig = SyncConfig()
    """The transfer of new weights to the engines."""
    launch: LaunchConfig = LaunchConfig()
    """The machines and the processor cores on which the parts run."""
    observe: ObserveConfig = ObserveConfig()
    """The display of the run, and the files it leaves for people."""
    run: RunSection = RunSection()
    """The length of the run, its seed and its directory."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _add_age_dependent_defaults(cls, tree: Any) -> Any:
        """Return ``tree``, the content of a run file before its validation, with two defaults added that depend on
        ``flow.max_age``. The defaults apply if tokens of older weights are trained, for settings that are not set.

        μ becomes π_old (``algo.old = "engine"``). With ``algo.old = "sampled"``, with which π_old is computed with the
        weights of each token's own version, the learner keeps as many old versions as the maximum age of a token.
        """
        algo = tree.get("algo", {}) if isinstance(tree, dict) else None
        if not isinstance(algo, dict):
            return tree
        try:
            flow = FlowConfig.model_validate(tree.get("flow", {}))
        except pydantic.ValidationError:
            return tree  # validation of the section itself will report it
        if flow.largest_age == 0:
            return tree
        tree = {**tree, "algo": for_old_tokens(algo)}
        learner = tree.get("learner", {})
        if algo.get("old") != "sampled" or not isinstance(learner, dict) or flow.largest_age > MOST_VERSIONS:
            return tree
        kept = learner.get("old") or {}
        if not isinstance(kept, dict) or kept.get("kind", "sampled") != "sampled":
            return tree
        return {**tree, "learner": {**learner, "old": {"kind": "sampled", "versions": flow.largest_age, **kept}}}
