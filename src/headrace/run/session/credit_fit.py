"""Whether a run can have what its credit is made from: rewards that count, segments that are graded, branches that are
compared."""

from __future__ import annotations

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.supervised import Ce, RefKl
from headrace.algo.reductions import ConstantDivisor, SequenceMeanTokenSum, TokenMean
from headrace.base.errors import ConfigError, DataError
from headrace.engine.fleet import FleetConfig
from headrace.flow import FlowConfig
from headrace.learner import LearnerConfig
from headrace.learner.companions.config import Frozen, OtherModel
from headrace.learner.companions.fit import columns_of
from headrace.rollout.environments import EnvConfig

_REDUCTIONS = (TokenMean, ConstantDivisor, SequenceMeanTokenSum)
"""Those under which two streams of tokens can each be reduced by itself."""


def refuse_deaf_losses(algo: AlgoConfig, learner: LearnerConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a loss to which the rewards of a run make no difference, or
    which
    wants samples of another kind than a run has."""
    named = f"algo.bundle={algo.bundle!r}" if algo.bundle == algo.loss.kind else f"algo.loss={algo.loss.kind!r}"
    instead = "to learn from rewards, set algo.loss = 'dapo' (or another that looks at them)"
    if isinstance(algo.loss, Ce):
        named = "algo.bundle='sft'" if algo.bundle == "sft" else named
        raise ConfigError(
            f"{named} would teach the model its own answers, right and wrong alike: a run trains what the model has "
            "just sampled, and this loss (cross-entropy) does not look at what it earned. It is no fine-tuning on "
            "demonstrations, of which a run has none",
            remedy=f"{instead}; to imitate demonstrations, use headrace.Policy with policy.demonstrations and "
            "loss='ce' (docs/own_loop.md)",
        )
    if "pairs" in columns_of(algo):
        raise ConfigError(
            f"{named} learns from pairs of answers, one preferred to the other, and a run has none: it samples "
            "groups of answers and gives each a reward",
            remedy=instead,
        )
    reference = learner.reference
    foreign = isinstance(reference, OtherModel) or (isinstance(reference, Frozen) and reference.path is not None)
    if isinstance(algo.loss, RefKl) and not foreign:
        raise ConfigError(
            f"{named} is nothing but the distance from the reference, which is this model's own past: it would bring "
            "the model back to where it came from, whatever its answers earned",
            remedy=f"{instead}; to imitate another model, set learner.reference.kind = 'model' and its path",
        )


def refuse_ungraded(algo: AlgoConfig, env: EnvConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where nobody grades segments, or nobody the whole."""
    kind, by_turn = algo.advantage.kind, [reward for reward in env.rewards if reward.by_turn]
    if not by_turn:
        raise ConfigError(
            f"algo.advantage={kind!r} credits segments by their process rewards, and none of env.rewards has by_turn",
            remedy="add a component with by_turn = true, which then grades every segment",
        )
    if len(by_turn) == len(env.rewards) and not env.remote:
        raise ConfigError(
            f"algo.advantage={kind!r} aligns segments with an outcome, and all env.rewards are process rewards",
            remedy="add a component without by_turn, which scores the whole answer",
        )
    for reward in by_turn:
        if reward.over_turns != "mean":
            raise ConfigError(
                f"env.rewards {reward.label!r} has over_turns={reward.over_turns!r}, which has no effect with "
                f"algo.advantage={kind!r}: process rewards do not count in the episode's",
                remedy="leave over_turns out",
            )


def refuse_pivots(flow: FlowConfig, algo: AlgoConfig, env: EnvConfig, engine: FleetConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where episodes cannot be resampled, or branches not compared."""
    pivots = flow.pivots
    if pivots is None:
        return
    if env.kind == "program":
        raise ConfigError(
            "flow.pivots with env.kind='program': what a program does cannot be repeated up to a pivot",
            remedy="leave flow.pivots out, or write the environment as a class or a rollout",
        )
    if pivots.gap >= engine.max_new_tokens:
        raise ConfigError(
            f"flow.pivots.gap={pivots.gap}, and no answer has more than engine.max_new_tokens={engine.max_new_tokens}: "
            "there is no place for a pivot",
            remedy=f"set flow.pivots.gap < {engine.max_new_tokens}",
        )
    if not _compares_branches(algo):
        raise ConfigError(
            f"algo.advantage={algo.advantage.kind!r} cannot compare the branches of flow.pivots, which are groups of "
            "their own",
            remedy="set algo.advantage = 'grpo' (or 'rloo', 'maxrl', 'opo')",
        )
    if not isinstance(algo.reduction, _REDUCTIONS):
        raise ConfigError(
            f"algo.reduction={algo.reduction.kind!r} cannot reduce the branches of flow.pivots by themselves",
            remedy="set algo.reduction = 'token_mean' (or 'constant', 'sequence_mean_token_sum')",
        )


def _compares_branches(algo: AlgoConfig) -> bool:
    advantage = algo.advantage
    if advantage.scope != "group" or advantage.per_token or advantage.by_turn or advantage.stateful:
        return False
    if advantage.by_critic or advantage.by_teacher or not advantage.compares_siblings:
        return False
    ones = np.ones(2, np.int64)
    try:
        return advantage(Outcomes(rewards_E=np.array([0.0, 1.0]), groups_E=ones, lengths_E=ones)).shape == (2,)
    except DataError:
        return False
