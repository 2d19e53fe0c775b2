"""The construction of a learner's auxiliary models from its settings."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.algo.objective import Objective
from headrace.base.errors import ConfigError
from headrace.learner.auxiliary.alignment import GradientAlignment
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.auxiliary.config import SampledVersions
from headrace.learner.auxiliary.critic import Critic
from headrace.learner.auxiliary.external_teacher import ExternalTeacher
from headrace.learner.auxiliary.policies import OldPolicy, Reference, SampledPolicies, TeacherModel
from headrace.learner.config import COLUMNS, SETTINGS


def auxiliary_models(parts: LearnerParts) -> tuple[AuxiliaryModel, ...]:
    """Create the auxiliary models that the settings and the objective in ``parts`` need, and return them in the order
    in which they prepare a batch."""
    config, found = parts.config, list[AuxiliaryModel]()
    if config.reference is not None:
        found.append(Reference(parts, config.reference))
    if isinstance(config.old, SampledVersions):
        found.append(SampledPolicies(parts, config.old))
    elif config.old is not None:
        found.append(OldPolicy(parts, config.old))
    if (teacher := config.own_teacher) is not None:
        found.append(TeacherModel(parts, teacher))
    elif config.teachers:
        found.append(ExternalTeacher(parts))
    if parts.objective.critic is not None:
        found.append(Critic(parts, parts.objective.critic))
    if config.alignment is not None:
        found.append(GradientAlignment(parts, config.alignment))
    return tuple(found)


def refuse_unserved(objective: Objective, models: Sequence[AuxiliaryModel]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the objective reads a column that neither the learner nor one
    of ``models``, its auxiliary models, computes. The error names the settings that would add the column."""
    available = COLUMNS.union(*(model.columns for model in models))
    names = {model.name for model in models}
    missing: list[str] = sorted(objective.columns - available)
    if objective.old == "kept" and "old" not in names:
        missing.append("log_old of kept weights")
    if objective.old == "sampled" and SampledPolicies.name not in names:
        missing.append("log_old of each token's version")
    if objective.teaching is not None and "teacher" not in names:
        missing.append("log_nu")
    if missing:
        settings = sorted({SETTINGS[name] for name in missing if name in SETTINGS})
        raise ConfigError(
            f"the objective reads {', '.join(missing)}, which this learner does not compute",
            remedy=" or ".join(
                [*(f"set {setting}" for setting in settings), "choose a loss and corrections without it"]
            ),
        )
